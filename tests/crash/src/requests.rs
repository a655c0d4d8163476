//! How a wish becomes a request of either device, and how its answer is read. Test tool, the front-end's thread.

use std::iter::once;
use std::ops::Range;

use aryk_front_end::Piece;

use crate::checker::{Change, Checker, Read, Write};
use crate::content::{self, SECTOR};
use crate::load::{self, Wish};
use crate::memory::{Memory, Slot};
use crate::random::Random;
use crate::shape::{Device, Shape};

/// Bytes of a block device's header and status (virtio 1.2, section 5.2.6), and of a SCSI host's request and answer (section 5.6.6.1).
const BLK: [u32; 2] = [16, 1];
const SCSI: [u32; 2] = [51, 108];
/// Where in a SCSI answer status and response are, and the sense key of sense data in fixed format.
const STATUS_AT: u64 = 10;
const KEY_AT: u64 = 14;
const CHECK_CONDITION: u8 = 2;
const UNIT_ATTENTION: u8 = 6;

/// What is known of a request that runs.
#[derive(Debug)]
pub enum Kept {
    /// What it may see.
    Read(Read),
    /// What it may leave.
    Write(Write),
    /// It changes nothing.
    Flush,
}

/// How a request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answered {
    /// Well, and with as many bytes as it must have.
    Well,
    /// Not at all: the unit had something else to say, and wants to be asked again.
    Attention,
    /// Otherwise; as it says.
    Badly([u8; 2]),
}

/// Writes a request, and notes what it does; its pieces.
pub fn prepare(
    random: &mut Random,
    memory: &Memory,
    checker: &mut Checker,
    wish: &Wish,
    place: Slot,
    shape: &Shape,
) -> (Vec<Piece>, Kept) {
    let data = data(random, memory, wish, place, shape);
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
        Device::Blk => write_header(memory, wish, place),
        Device::Scsi => write_command(memory, wish, place, shape),
    }
    unanswer(memory, place);
    (pieces, keep(memory, checker, wish, place))
}

/// Makes a request one that is not answered.
pub fn unanswer(memory: &Memory, place: Slot) {
    memory.whole().write(place.status as usize, &[0xff_u8; 16]);
}

/// How a request was answered, of which so many bytes were written.
pub fn answered(memory: &Memory, kept: &Kept, place: Slot, len: u32, shape: &Shape) -> Answered {
    let data = match kept {
        Kept::Read(read) => sectors_len(&read.sectors()),
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
        return Answered::Attention;
    }
    if said == [0, 0] && len == answer + data { Answered::Well } else { Answered::Badly(said) }
}

/// Bytes of sectors.
pub fn sectors_len(sectors: &Range<u64>) -> u32 {
    (sectors.end - sectors.start) as u32 * SECTOR as u32
}

/// The pieces of a request's data, and what of it is no sectors.
fn data(random: &mut Random, memory: &Memory, wish: &Wish, place: Slot, shape: &Shape) -> Vec<Piece> {
    let (len, write) = match (wish, shape.device) {
        (Wish::Read(sectors), _) => (sectors_len(sectors), true),
        (Wish::Write(sectors), _) => (sectors_len(sectors), false),
        (Wish::Flush, _) => return Vec::new(),
        (Wish::Discard(sectors) | Wish::WriteZeroes(sectors, _), Device::Blk) => {
            let flags = u32::from(matches!(wish, Wish::WriteZeroes(_, true)));
            let count = (sectors.end - sectors.start) as u32;
            let range =
                [sectors.start.to_le_bytes(), (u64::from(count) | u64::from(flags) << 32).to_le_bytes()];
            memory.whole().write(place.range as usize, &range);
            return vec![Piece { at: place.range, len: 16, write: false }];
        }
        // UNMAP's parameter list of one descriptor (SBC-3, section 5.28.2).
        (Wish::Discard(sectors), Device::Scsi) => {
            let (lba, blocks) = blocks_of(sectors, shape);
            let mut list = [0; 24];
            list[..4].copy_from_slice(&[0, 22, 0, 16]);
            list[8..16].copy_from_slice(&lba.to_be_bytes());
            list[16..20].copy_from_slice(&blocks.to_be_bytes());
            memory.whole().write(place.range as usize, &list);
            return vec![Piece { at: place.range, len: 24, write: false }];
        }
        // WRITE SAME's one block.
        (Wish::WriteZeroes(..), Device::Scsi) => {
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

/// A block device's header: kind and sector.
fn write_header(memory: &Memory, wish: &Wish, place: Slot) {
    // Section 5.2.6: VIRTIO_BLK_T_IN, OUT, FLUSH, DISCARD, WRITE_ZEROES.
    let (kind, sector) = match wish {
        Wish::Read(sectors) => (0_u64, sectors.start),
        Wish::Write(sectors) => (1, sectors.start),
        Wish::Flush => (4, 0),
        Wish::Discard(_) => (11, 0),
        Wish::WriteZeroes(..) => (13, 0),
    };
    memory.whole().write(place.header as usize, &[kind.to_le(), sector.to_le()]);
}

/// A SCSI host's request: target 0, unit 0, and a CDB of 16 bytes.
fn write_command(memory: &Memory, wish: &Wish, place: Slot, shape: &Shape) {
    // READ, WRITE, SYNCHRONIZE CACHE, UNMAP and WRITE SAME; all but the fourth in their forms of 16 bytes (SBC-3, section 5).
    let (opcode, flags, sectors) = match wish {
        Wish::Read(sectors) => (0x88, 0, sectors.clone()),
        Wish::Write(sectors) => (0x8a, 0, sectors.clone()),
        Wish::Flush => (0x91, 0, 0..0),
        Wish::Discard(_) => (0x42, 0, 0..0),
        Wish::WriteZeroes(sectors, unmap) => (0x93, u8::from(*unmap) << 3, sectors.clone()),
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

/// Sectors in blocks of the disk: the first, and how many.
fn blocks_of(sectors: &Range<u64>, shape: &Shape) -> (u64, u32) {
    let block = u64::from(shape.block_size) / SECTOR as u64;
    (sectors.start / block, ((sectors.end - sectors.start) / block) as u32)
}

/// Fills a request's sectors, and notes what it does.
fn keep(memory: &Memory, checker: &mut Checker, wish: &Wish, place: Slot) -> Kept {
    let mut change =
        |sectors: &Range<u64>, change| Kept::Write(checker.submit_write(sectors.clone(), change));
    match wish {
        Wish::Flush => Kept::Flush,
        Wish::Discard(sectors) => change(sectors, Change::Discard),
        Wish::WriteZeroes(sectors, _) => change(sectors, Change::Zeroes),
        Wish::Read(sectors) => {
            // What an earlier request left there must not pass for an answer.
            for i in 0..sectors.end - sectors.start {
                memory.whole().write((place.data + i * SECTOR as u64) as usize, &[0xa5_u8; 16]);
            }
            Kept::Read(checker.submit_read(sectors.clone()))
        }
        Wish::Write(sectors) => {
            let write = checker.submit_write(sectors.clone(), Change::Write);
            for (i, sector) in (0..).zip(sectors.clone()) {
                memory.set_sector(place.data, i, &content::fill(sector, write.seq()));
            }
            Kept::Write(write)
        }
    }
}
