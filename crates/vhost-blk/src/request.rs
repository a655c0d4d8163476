//! Parses block requests of a guest (virtio 1.2, section 5.2.6) and translates them into requests of the block layer. Reactor
//! context.

use crate::config::SEG_MAX;
use aryk_bdev::{Blocks, Bytes, Io, Lba, Op, Status, Tag};
use aryk_dma::{BadAddress, MemTable, SgTable, Sgl};
use aryk_virtqueue::{Chain, Ends, Piece};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_ID_BYTES, VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
    VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes in a sector, virtio's unit for every block size.
pub(crate) const SECTOR: u32 = 512;

/// The header of a request.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Header {
    kind: u32,
    reserved: u32,
    sector: u64,
}

/// The range of a discard or write-zeroes. A request has one range, as the configuration space states.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Range {
    sector: u64,
    sectors: u32,
    flags: u32,
}

/// The status byte of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Answer {
    Ok = VIRTIO_BLK_S_OK as u8,
    IoError = VIRTIO_BLK_S_IOERR as u8,
    Unsupported = VIRTIO_BLK_S_UNSUPP as u8,
}

impl From<Status> for Answer {
    fn from(status: Status) -> Self {
        match status {
            Status::Ok => Self::Ok,
            Status::Unsupported => Self::Unsupported,
            _ => Self::IoError,
        }
    }
}

/// A request that is neither a read nor a write, or that failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Other {
    /// Guest address of the status byte, if the chain has room for it.
    status: Option<u64>,
    /// The header; `None` if the request is invalid.
    header: Option<Header>,
}

/// The next step for a request that is neither a read nor a write.
#[derive(Debug)]
pub(crate) enum Parsed {
    /// Submit this request to the disk.
    Submit(Io),
    /// Write the disk's id: [`Disk::write_id`].
    Identify,
    /// Answer at once, without data.
    Answer(Answer),
}

/// The disk operation of a request.
#[derive(Clone, Copy, Debug)]
struct Request {
    op: Op,
    may_unmap: bool,
    lba: Lba,
    blocks: Blocks,
}

/// The request has no place for its status, or the place is outside of guest memory: it cannot be answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Unanswerable;

/// Properties of the disk that apply to all requests of a queue.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Block size of the disk in bytes: a power of two, 512 or more.
    pub block_size: u32,
    /// The answer to GET_ID, padded with zeroes.
    pub id: [u8; VIRTIO_BLK_ID_BYTES as usize],
    /// Writes are durable on completion, because this guest has not negotiated flushes.
    pub write_through: bool,
}

/// The parts of a request in its chain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout<'a> {
    header: Option<Header>,
    /// Guest address of the status.
    status: Option<u64>,
    /// Data that the guest writes to the disk.
    readable: &'a [Piece],
    /// Data that the guest reads from the disk.
    writable: &'a [Piece],
}

impl<'a> Layout<'a> {
    /// The layout of a request whose header and status have their own buffers, as nearly all requests have. After `None`, the
    /// chain is unchanged.
    #[inline(always)]
    pub(crate) fn separate(chain: &'a mut Chain, memory: &MemTable) -> Option<Self> {
        let Ends { header, status, readable, writable } = chain.take_ends(memory)?;
        Some(Self { header: Some(header), status: Some(status), readable, writable })
    }

    /// The layout of any request.
    #[cold]
    pub(crate) fn any(chain: &'a mut Chain, memory: &MemTable) -> Self {
        let status = chain.take_last_writable();
        let header = chain.take_header(memory).ok().flatten();
        Self { header, status, readable: chain.readable(), writable: chain.writable() }
    }
}

impl Disk {
    /// Parses a request, and puts its data and then its status byte into `slot` of `sgs`. Stores with the slot the number of
    /// bytes that the request writes to guest memory, status included. The caller ends the slot.
    ///
    /// # Errors
    /// [`Other`], for [`Disk::parse_other`]; the slot is in use then too.
    // Always inlined and without rare branches: nearly all requests are reads and writes, and inlined values stay in registers.
    #[inline(always)]
    pub(crate) fn parse(&self, layout: Layout<'_>, slot: u16, sgs: &mut SgTable) -> Result<Io, Other> {
        let Layout { header, status, readable, writable } = layout;
        let mut list = sgs.begin(slot);
        let failed = Other { status, header: None };
        let Some(header) = header else { return Err(failed) };
        let (op, pieces) = match header.kind {
            VIRTIO_BLK_T_IN => (Op::Read, writable),
            VIRTIO_BLK_T_OUT => (Op::Write, readable),
            _ => return Err(Other { status, header: Some(header) }),
        };
        // The configuration space reports this limit to the guest.
        if pieces.len() > SEG_MAX as usize {
            return Err(failed);
        }
        let Ok(bytes) = list.extend(pieces.iter().map(|piece| (piece.addr, piece.len))) else {
            return Err(failed);
        };
        let Some((lba, blocks)) = self.blocks(header.sector, Bytes(bytes.into())) else { return Err(failed) };
        let Some(status) = status else { return Err(failed) };
        if list.push(status, 1).is_err() {
            return Err(Other { status: None, header: None });
        }
        list.note(if op == Op::Read { bytes + 1 } else { 1 });
        Ok(Io {
            tag: Tag(slot.into()),
            op,
            fua: self.write_through,
            may_unmap: false,
            lba,
            blocks,
            source: Lba::ZERO,
            data: list.first(bytes),
        })
    }

    /// The next step of a request for which [`Disk::parse`] returned [`Other`].
    ///
    /// # Errors
    /// [`Unanswerable`].
    #[inline(never)]
    pub(crate) fn parse_other(
        &self,
        other: Other,
        chain: &Chain,
        slot: u16,
        sgs: &mut SgTable,
    ) -> Result<Parsed, Unanswerable> {
        let status = other.status.ok_or(Unanswerable)?;
        let parsed = match other.header {
            Some(header) => self.parse_rare(header, chain, slot, sgs.memory()).unwrap_or(Parsed::FAILED),
            None => Parsed::FAILED,
        };
        sgs.push(slot, status, 1).map_err(|_| Unanswerable)?;
        sgs.note(slot, 1);
        Ok(parsed)
    }

    fn parse_rare(
        &self,
        header: Header,
        chain: &Chain,
        slot: u16,
        memory: &MemTable,
    ) -> Result<Parsed, BadAddress> {
        let request = match header.kind {
            VIRTIO_BLK_T_FLUSH => {
                Request { op: Op::Flush, may_unmap: false, lba: Lba::ZERO, blocks: Blocks::ZERO }
            }
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                match self.range(header.kind, chain, memory)? {
                    Ok(request) => request,
                    Err(answer) => return Ok(Parsed::Answer(answer)),
                }
            }
            VIRTIO_BLK_T_GET_ID => return Ok(Parsed::Identify),
            _ => return Ok(Parsed::Answer(Answer::Unsupported)),
        };
        let Request { op, may_unmap, lba, blocks } = request;
        let (tag, fua) = (Tag(slot.into()), self.write_through && op != Op::Flush);
        Ok(Parsed::Submit(Io { tag, op, fua, may_unmap, lba, blocks, source: Lba::ZERO, data: Sgl::EMPTY }))
    }

    /// A range of sectors as a range of blocks, if the sectors are whole blocks.
    #[inline]
    fn blocks(&self, sector: u64, bytes: Bytes) -> Option<(Lba, Blocks)> {
        let start = Blocks(sector).checked_to_bytes(SECTOR)?;
        // The block size is a power of two, which the compiler does not know.
        let shift = self.block_size.trailing_zeros();
        let aligned = (start.0 | bytes.0) & (u64::from(self.block_size) - 1) == 0;
        aligned.then_some((Lba(start.0 >> shift), Blocks(bytes.0 >> shift)))
    }

    /// The request of a discard or write-zeroes, or the answer if it is invalid.
    fn range(
        &self,
        kind: u32,
        chain: &Chain,
        memory: &MemTable,
    ) -> Result<Result<Request, Answer>, BadAddress> {
        if chain.readable_len() != size_of::<Range>() as u64 {
            return Ok(Err(Answer::Unsupported));
        }
        let mut bytes = [0; size_of::<Range>()];
        let mut at = 0;
        for piece in chain.readable() {
            memory.read_bytes(piece.addr, &mut bytes[at..at + piece.len as usize])?;
            at += piece.len as usize;
        }
        let range = Range::read_from_bytes(&bytes).expect("as many bytes");
        let (op, allowed) = match kind {
            VIRTIO_BLK_T_DISCARD => (Op::Unmap, 0),
            _ => (Op::WriteZeroes, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP),
        };
        // Section 5.2.6.2: unknown flags, and unmap in a discard, are answered by UNSUPP.
        if range.flags & !allowed != 0 {
            return Ok(Err(Answer::Unsupported));
        }
        let Some((lba, blocks)) = self.blocks(range.sector, Blocks(range.sectors.into()).to_bytes(SECTOR))
        else {
            return Ok(Err(Answer::IoError));
        };
        let may_unmap = range.flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
        Ok(Ok(Request { op, may_unmap, lba, blocks }))
    }

    /// Writes the disk's id to a request's data, as much as fits. Returns the answer and the number of written bytes. Called
    /// only for requests whose answer has a place: writes for other requests would not be marked in the dirty log.
    #[cold]
    pub(crate) fn write_id(&self, chain: &Chain, memory: &MemTable) -> (Answer, u32) {
        let (mut id, mut answer) = (&self.id[..], Answer::Ok);
        for piece in chain.writable() {
            let (now, later) = id.split_at(id.len().min(piece.len as usize));
            id = later;
            if memory.write_bytes(piece.addr, now).is_err() {
                // A part may have been written.
                answer = Answer::IoError;
                break;
            }
            if id.is_empty() {
                break;
            }
        }
        (answer, (self.id.len() - id.len()) as u32)
    }
}

impl Parsed {
    const FAILED: Self = Self::Answer(Answer::IoError);
}
