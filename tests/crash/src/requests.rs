//! Builds requests for both device types, and reads their responses. Test tool, the front-end's thread.

use std::iter::once;
use std::ops::Range;

use aryk_front_end::Piece;

use crate::checker::{Change, Checker, Read, Write};
use crate::content::{self, SECTOR};
use crate::load::{self, IoRequest};
use crate::memory::{Memory, Slot};
use crate::shape::{Device, Shape};
use fastrand::Rng;

/// Bytes of a block device's header and status (virtio 1.2, section 5.2.6), and of a SCSI host's request and response
/// (section 5.6.6.1).
const BLK: [u32; 2] = [16, 1];
const SCSI: [u32; 2] = [51, 108];
/// Offsets of status and response code in a SCSI response, and of the sense key of sense data in fixed format.
const STATUS_AT: u64 = 10;
const KEY_AT: u64 = 14;
const CHECK_CONDITION: u8 = 2;
const UNIT_ATTENTION: u8 = 6;

/// The checker's record of a request in flight.
#[derive(Debug)]
pub enum Pending {
    /// A read, and the values that it may return.
    Read(Read),
    /// A change, and the values that it may leave.
    Write(Write),
    /// A flush changes no value.
    Flush,
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Success, with the right number of bytes.
    Success,
    /// A unit attention: the command was not executed, and must be submitted again.
    Attention,
    /// A failure; the two bytes of status.
    Failure([u8; 2]),
}

/// Writes a request and records it with the checker; returns its pieces.
pub fn prepare(
    random: &mut Rng,
    memory: &Memory,
    checker: &mut Checker,
    request: &IoRequest,
    place: Slot,
    shape: &Shape,
) -> (Vec<Piece>, Pending) {
    let data = data(random, memory, request, place, shape);
    let [header, answer] = match shape.device {
        Device::Blk => BLK,
        Device::Scsi => SCSI,
    };
    let header = Piece { at: place.header, len: header, write: false };
    let answer = Piece { at: place.status, len: answer, write: true };
    let (read, written): (Vec<_>, Vec<_>) = data.into_iter().partition(|piece| !piece.write);
    let pieces = match shape.device {
        Device::Blk => once(header).chain(read).chain(written).chain([answer]).collect(),
        Device::Scsi => once(header).chain(read).chain([answer]).chain(written).collect(),
    };
    match shape.device {
        Device::Blk => write_header(memory, request, place),
        Device::Scsi => write_command(memory, request, place, shape),
    }
    reset_status(memory, place);
    (pieces, keep(memory, checker, request, place))
}

/// Resets the status of a request to a value that no device writes.
pub fn reset_status(memory: &Memory, place: Slot) {
    memory.whole().write(place.status as usize, &[0xff_u8; 16]);
}

/// The result of a request, of which the device wrote `len` bytes.
pub fn answered(memory: &Memory, kept: &Pending, place: Slot, len: u32, shape: &Shape) -> Outcome {
    let data = match kept {
        Pending::Read(read) => sectors_len(&read.sectors()),
        _ => 0,
    };
    let byte = |at: u64| memory.whole().read::<u8>((place.status + at) as usize);
    let (said, answer) = match shape.device {
        Device::Blk => ([byte(0), 0], BLK[1]),
        Device::Scsi => ([byte(STATUS_AT), byte(STATUS_AT + 1)], SCSI[1]),
    };
    if shape.device == Device::Scsi
        && said == [CHECK_CONDITION, 0]
        && byte(KEY_AT) & 0xf == UNIT_ATTENTION
        && len == answer
    {
        return Outcome::Attention;
    }
    if said == [0, 0] && len == answer + data { Outcome::Success } else { Outcome::Failure(said) }
}

/// Bytes of the sectors.
pub fn sectors_len(sectors: &Range<u64>) -> u32 {
    (sectors.end - sectors.start) as u32 * SECTOR as u32
}

/// The pieces of a request's data; writes data that is not sectors.
fn data(random: &mut Rng, memory: &Memory, request: &IoRequest, place: Slot, shape: &Shape) -> Vec<Piece> {
    let (len, write) = match (request, shape.device) {
        (IoRequest::Read(sectors), _) => (sectors_len(sectors), true),
        (IoRequest::Write(sectors), _) => (sectors_len(sectors), false),
        (IoRequest::Flush, _) => return Vec::new(),
        (IoRequest::Discard(sectors) | IoRequest::WriteZeroes(sectors, _), Device::Blk) => {
            let flags = u32::from(matches!(request, IoRequest::WriteZeroes(_, true)));
            let count = (sectors.end - sectors.start) as u32;
            let range =
                [sectors.start.to_le_bytes(), (u64::from(count) | u64::from(flags) << 32).to_le_bytes()];
            memory.whole().write(place.range as usize, &range);
            return vec![Piece { at: place.range, len: 16, write: false }];
        }
        // UNMAP's parameter list of one descriptor (SBC-3, section 5.28.2).
        (IoRequest::Discard(sectors), Device::Scsi) => {
            let (lba, blocks) = blocks_of(sectors, shape);
            let mut list = [0; 24];
            list[..4].copy_from_slice(&[0, 22, 0, 16]);
            list[8..16].copy_from_slice(&lba.to_be_bytes());
            list[16..20].copy_from_slice(&blocks.to_be_bytes());
            memory.whole().write(place.range as usize, &list);
            return vec![Piece { at: place.range, len: 24, write: false }];
        }
        // The one block of WRITE SAME.
        (IoRequest::WriteZeroes(..), Device::Scsi) => {
            let bytes = shape.block_size;
            (0..u64::from(bytes) / SECTOR as u64)
                .for_each(|i| memory.set_sector(place.data, i, &[0; SECTOR]));
            (bytes, false)
        }
    };
    let mut at = place.data;
    let cut = load::cut(random, len).into_iter();
    cut.map(|len| {
        at += u64::from(len);
        Piece { at: at - u64::from(len), len, write }
    })
    .collect()
}

/// Writes a block device's header: request type and sector.
fn write_header(memory: &Memory, request: &IoRequest, place: Slot) {
    // Section 5.2.6: VIRTIO_BLK_T_IN, OUT, FLUSH, DISCARD, WRITE_ZEROES.
    let (kind, sector) = match request {
        IoRequest::Read(sectors) => (0_u64, sectors.start),
        IoRequest::Write(sectors) => (1, sectors.start),
        IoRequest::Flush => (4, 0),
        IoRequest::Discard(_) => (11, 0),
        IoRequest::WriteZeroes(..) => (13, 0),
    };
    memory.whole().write(place.header as usize, &[kind.to_le(), sector.to_le()]);
}

/// Writes a SCSI host's request: target 0, unit 0, and a CDB of 16 bytes.
fn write_command(memory: &Memory, request: &IoRequest, place: Slot, shape: &Shape) {
    // READ, WRITE, SYNCHRONIZE CACHE, UNMAP and WRITE SAME; all but UNMAP in their 16-byte forms (SBC-3, section 5).
    let (opcode, flags, sectors) = match request {
        IoRequest::Read(sectors) => (0x88, 0, sectors.clone()),
        IoRequest::Write(sectors) => (0x8a, 0, sectors.clone()),
        IoRequest::Flush => (0x91, 0, 0..0),
        IoRequest::Discard(_) => (0x42, 0, 0..0),
        IoRequest::WriteZeroes(sectors, unmap) => (0x93, u8::from(*unmap) << 3, sectors.clone()),
    };
    let (lba, blocks) = blocks_of(&sectors, shape);
    let mut request = [0; 51];
    request[..3].copy_from_slice(&[1, 0, 0x40]);
    request[8..16].copy_from_slice(&place.header.to_le_bytes());
    let cdb = &mut request[19..];
    cdb[0] = opcode;
    if opcode == 0x42 {
        cdb[8] = 24;
    } else {
        cdb[1] = flags;
        cdb[2..10].copy_from_slice(&lba.to_be_bytes());
        cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    }
    memory.whole().write_bytes(place.header as usize, &request);
}

/// The sectors in blocks of the disk: the first block, and the number of blocks.
fn blocks_of(sectors: &Range<u64>, shape: &Shape) -> (u64, u32) {
    let block = u64::from(shape.block_size) / SECTOR as u64;
    (sectors.start / block, ((sectors.end - sectors.start) / block) as u32)
}

/// Fills a request's sectors, and records the request with the checker.
fn keep(memory: &Memory, checker: &mut Checker, request: &IoRequest, place: Slot) -> Pending {
    let mut change =
        |sectors: &Range<u64>, change| Pending::Write(checker.submit_write(sectors.clone(), change));
    match request {
        IoRequest::Flush => Pending::Flush,
        IoRequest::Discard(sectors) => change(sectors, Change::Discard),
        IoRequest::WriteZeroes(sectors, _) => change(sectors, Change::Zeroes),
        IoRequest::Read(sectors) => {
            // The content of an earlier request must not look like the result of this read.
            for i in 0..sectors.end - sectors.start {
                memory.whole().write((place.data + i * SECTOR as u64) as usize, &[0xa5_u8; 16]);
            }
            Pending::Read(checker.submit_read(sectors.clone()))
        }
        IoRequest::Write(sectors) => {
            let write = checker.submit_write(sectors.clone(), Change::Write);
            for (i, sector) in (0..).zip(sectors.clone()) {
                memory.set_sector(place.data, i, &content::fill(sector, write.seq()));
            }
            Pending::Write(write)
        }
    }
}
