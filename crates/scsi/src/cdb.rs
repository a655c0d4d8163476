//! Decodes commands as initiators write them (SPC-4, SBC-3): any bytes become a [`Command`], or the sense data that states the
//! error. Any context; pure.
//!
//! The decoder ignores reserved bits. It refuses requests for features that are not offered (protection information, anchored
//! blocks, saved pages) and reports the field that asked for them.

use crate::Sense;
use aryk_bdev::{Blocks, Lba, Op};

/// A range of blocks to transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// The first block.
    pub lba: Lba,
    /// Number of blocks; a transfer of 0 blocks moves nothing.
    pub blocks: Blocks,
    /// FUA (force unit access): the transfer bypasses any cache.
    pub fua: bool,
}

/// What VERIFY compares the blocks with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Check {
    /// Nothing: VERIFY checks only that the blocks can be read.
    Medium,
    /// The same number of blocks of data.
    Data,
    /// One block of data, which is compared with each block.
    OneBlock,
}

/// Which values of the mode pages MODE SENSE requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageControl {
    /// Current values.
    Current,
    /// Changeable bits, as a mask.
    Changeable,
    /// Default values.
    Default,
    /// Saved values, which a reset restores.
    Saved,
}

/// Which commands REPORT SUPPORTED OPERATION CODES requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opcodes {
    /// All commands.
    All,
    /// One opcode that has no service actions.
    One(u8),
    /// One opcode with a service action.
    Action(u8, u16),
    /// One opcode, with its service action if the opcode has service actions.
    Either(u8, u16),
}

/// A decoded SCSI command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "names and fields are those of the standards")]
pub enum Command {
    TestUnitReady,
    RequestSense {
        descriptors: bool,
        allocation: u32,
    },
    Inquiry {
        page: Option<u8>,
        allocation: u32,
    },
    Read(Transfer),
    Write(Transfer),
    CompareAndWrite(Transfer),
    /// `blocks: 0` extends to the end of the disk. `zeroes`: the command has no data-out, and writes zeroes.
    WriteSame {
        lba: Lba,
        blocks: Blocks,
        unmap: bool,
        zeroes: bool,
    },
    Unmap {
        length: u32,
    },
    /// `blocks: 0` extends to the end of the disk.
    SynchronizeCache {
        lba: Lba,
        blocks: Blocks,
    },
    ReadCapacity10,
    ReadCapacity16 {
        allocation: u32,
    },
    GetLbaStatus {
        lba: Lba,
        allocation: u32,
    },
    ModeSense {
        ten: bool,
        no_blocks: bool,
        long: bool,
        control: PageControl,
        page: u8,
        subpage: u8,
        allocation: u32,
    },
    ModeSelect {
        ten: bool,
        save: bool,
        length: u32,
    },
    ReportLuns {
        select: u8,
        allocation: u32,
    },
    ReportOpcodes {
        which: Opcodes,
        timeouts: bool,
        allocation: u32,
    },
    StartStop {
        start: bool,
        flush: bool,
    },
    Verify {
        lba: Lba,
        blocks: Blocks,
        check: Check,
    },
    ReserveIn {
        action: u8,
        allocation: u32,
    },
    ReserveOut {
        action: u8,
        scope: u8,
        kind: u8,
        length: u32,
    },
}

/// Opcodes of the supported commands.
pub(crate) mod op {
    pub const TEST_UNIT_READY: u8 = 0x00;
    pub const REQUEST_SENSE: u8 = 0x03;
    pub const READ_6: u8 = 0x08;
    pub const WRITE_6: u8 = 0x0a;
    pub const INQUIRY: u8 = 0x12;
    pub const MODE_SELECT_6: u8 = 0x15;
    pub const MODE_SENSE_6: u8 = 0x1a;
    pub const START_STOP_UNIT: u8 = 0x1b;
    pub const READ_CAPACITY_10: u8 = 0x25;
    pub const READ_10: u8 = 0x28;
    pub const WRITE_10: u8 = 0x2a;
    pub const VERIFY_10: u8 = 0x2f;
    pub const SYNCHRONIZE_CACHE_10: u8 = 0x35;
    pub const WRITE_SAME_10: u8 = 0x41;
    pub const UNMAP: u8 = 0x42;
    pub const MODE_SELECT_10: u8 = 0x55;
    pub const MODE_SENSE_10: u8 = 0x5a;
    pub const PERSISTENT_RESERVE_IN: u8 = 0x5e;
    pub const PERSISTENT_RESERVE_OUT: u8 = 0x5f;
    pub const READ_16: u8 = 0x88;
    pub const COMPARE_AND_WRITE: u8 = 0x89;
    pub const WRITE_16: u8 = 0x8a;
    pub const VERIFY_16: u8 = 0x8f;
    pub const SYNCHRONIZE_CACHE_16: u8 = 0x91;
    pub const WRITE_SAME_16: u8 = 0x93;
    pub const SERVICE_ACTION_IN_16: u8 = 0x9e;
    pub const REPORT_LUNS: u8 = 0xa0;
    pub const MAINTENANCE_IN: u8 = 0xa3;
    pub const READ_12: u8 = 0xa8;
    pub const WRITE_12: u8 = 0xaa;
    pub const VERIFY_12: u8 = 0xaf;
}

/// Service action of SERVICE ACTION IN (16): READ CAPACITY (16).
pub(crate) const READ_CAPACITY_16: u8 = 0x10;
/// Service action of SERVICE ACTION IN (16): GET LBA STATUS.
pub(crate) const GET_LBA_STATUS: u8 = 0x12;
/// Service action of MAINTENANCE IN: REPORT SUPPORTED OPERATION CODES.
pub(crate) const REPORT_OPCODES: u8 = 0x0c;

/// Bytes of a CDB that the decoder reads, at most.
const CDB_MAX: usize = 16;

/// Length in bytes of a CDB with this opcode (SPC-4, section 4.2.5.1); `None` for opcodes without a fixed length.
const fn length(opcode: u8) -> Option<usize> {
    match opcode >> 5 {
        0 => Some(6),
        1 | 2 => Some(10),
        4 => Some(16),
        5 => Some(12),
        _ => None,
    }
}

struct Cdb([u8; CDB_MAX]);

impl Cdb {
    const fn u16(&self, at: usize) -> u16 {
        u16::from_be_bytes([self.0[at], self.0[at + 1]])
    }

    const fn u32(&self, at: usize) -> u32 {
        (self.u16(at) as u32) << 16 | self.u16(at + 2) as u32
    }

    const fn u64(&self, at: usize) -> u64 {
        (self.u32(at) as u64) << 32 | self.u32(at + 4) as u64
    }

    const fn bit(&self, at: usize, bit: u8) -> bool {
        self.0[at] >> bit & 1 == 1
    }

    /// The LBA of a CDB of 6, 10, 12 or 16 bytes.
    const fn lba(&self) -> Lba {
        Lba(match length(self.0[0]) {
            Some(6) => (self.u32(0) & 0x1f_ffff) as u64,
            Some(16) => self.u64(2),
            _ => self.u32(2) as u64,
        })
    }

    /// The transfer length of a CDB of 6, 10, 12 or 16 bytes.
    const fn blocks(&self) -> Blocks {
        let blocks = match length(self.0[0]) {
            // In 6-byte CDBs, 0 stands for 256 blocks (SBC-3, section 5.8).
            Some(6) if self.0[4] == 0 => 256,
            Some(6) => self.0[4] as u32,
            Some(10) => self.u16(7) as u32,
            Some(12) => self.u32(6),
            _ => self.u32(10),
        };
        Blocks(blocks as u64)
    }

    /// The transfer of a CDB whose byte 1 holds protection information, DPO and FUA.
    fn transfer(&self) -> Result<Transfer, Sense> {
        self.no_protection()?;
        Ok(Transfer { lba: self.lba(), blocks: self.blocks(), fua: self.bit(1, 3) })
    }

    const fn transfer_6(&self) -> Transfer {
        Transfer { lba: self.lba(), blocks: self.blocks(), fua: false }
    }

    /// Refuses protection information, which the top three bits of byte 1 request and which is not supported.
    const fn no_protection(&self) -> Result<(), Sense> {
        if self.0[1] >> 5 == 0 { Ok(()) } else { Err(Sense::in_cdb_bit(1, 7)) }
    }

    /// Refuses NACA in the control byte: auto contingent allegiance is not supported.
    const fn no_aca(&self, len: usize) -> Result<(), Sense> {
        if self.bit(len - 1, 2) { Err(Sense::in_cdb_bit(len as u16 - 1, 2)) } else { Ok(()) }
    }
}

/// Decodes a CDB of any length. The decoder ignores bytes beyond the length that the opcode implies.
///
/// # Errors
/// The sense data to answer with.
pub fn decode(bytes: &[u8]) -> Result<Command, Sense> {
    let opcode = *bytes.first().ok_or(Sense::OPCODE)?;
    let len = length(opcode).ok_or(Sense::OPCODE)?;
    let Some(own) = bytes.get(..len) else {
        // A CDB that is too short fails at its first missing byte, but an unknown opcode is reported before that.
        let all = Cdb(padded(bytes));
        return Err(match by_opcode(&all) {
            Err(sense) if sense == Sense::OPCODE => sense,
            _ => Sense::in_cdb(bytes.len() as u16),
        });
    };
    let cdb = Cdb(padded(own));
    let command = by_opcode(&cdb)?;
    cdb.no_aca(len)?;
    Ok(command)
}

/// Fast path for READ and WRITE in their two most frequent forms, without any flag that needs a check. `None` says nothing about
/// what [`decode`] would return.
#[inline]
pub(crate) fn plain(bytes: &[u8]) -> Option<(Op, Transfer)> {
    let cdb = bytes.first_chunk::<16>()?;
    let word = |at: usize| u32::from_be_bytes([cdb[at], cdb[at + 1], cdb[at + 2], cdb[at + 3]]);
    let of_16 = (u64::from(word(2)) << 32 | u64::from(word(6)), word(10), cdb[15]);
    let of_10 = (u64::from(word(2)), u16::from_be_bytes([cdb[7], cdb[8]]).into(), cdb[9]);
    let (op, (lba, blocks, control)) = match cdb[0] {
        op::READ_16 => (Op::Read, of_16),
        op::WRITE_16 => (Op::Write, of_16),
        op::READ_10 => (Op::Read, of_10),
        op::WRITE_10 => (Op::Write, of_10),
        _ => return None,
    };
    let is_plain = cdb[1] >> 5 == 0 && control == 0;
    let transfer = Transfer { lba: Lba(lba), blocks: Blocks(blocks.into()), fua: cdb[1] & 0x08 != 0 };
    is_plain.then_some((op, transfer))
}

fn padded(bytes: &[u8]) -> [u8; CDB_MAX] {
    let mut all = [0; CDB_MAX];
    all[..bytes.len()].copy_from_slice(bytes);
    all
}

#[inline]
fn by_opcode(cdb: &Cdb) -> Result<Command, Sense> {
    Ok(match cdb.0[0] {
        op::READ_10 | op::READ_12 | op::READ_16 => Command::Read(cdb.transfer()?),
        op::WRITE_10 | op::WRITE_12 | op::WRITE_16 => Command::Write(cdb.transfer()?),
        op::READ_6 => Command::Read(cdb.transfer_6()),
        op::WRITE_6 => Command::Write(cdb.transfer_6()),
        op::SYNCHRONIZE_CACHE_10 | op::SYNCHRONIZE_CACHE_16 => {
            Command::SynchronizeCache { lba: cdb.lba(), blocks: cdb.blocks() }
        }
        op::COMPARE_AND_WRITE => {
            cdb.no_protection()?;
            let (lba, blocks) = (cdb.lba(), Blocks(cdb.0[13].into()));
            Command::CompareAndWrite(Transfer { lba, blocks, fua: cdb.bit(1, 3) })
        }
        op::WRITE_SAME_10 | op::WRITE_SAME_16 => write_same(cdb)?,
        op::UNMAP if cdb.bit(1, 0) => return Err(Sense::in_cdb_bit(1, 0)),
        op::UNMAP => Command::Unmap { length: cdb.u16(7).into() },
        op::VERIFY_10 | op::VERIFY_12 | op::VERIFY_16 => verify(cdb)?,
        _ => return rare(cdb),
    })
}

fn rare(cdb: &Cdb) -> Result<Command, Sense> {
    Ok(match cdb.0[0] {
        op::TEST_UNIT_READY => Command::TestUnitReady,
        op::REQUEST_SENSE => {
            Command::RequestSense { descriptors: cdb.bit(1, 0), allocation: cdb.0[4].into() }
        }
        op::INQUIRY => {
            let page = cdb.bit(1, 0).then_some(cdb.0[2]);
            if page.is_none() && cdb.0[2] != 0 {
                return Err(Sense::in_cdb(2));
            }
            Command::Inquiry { page, allocation: cdb.u16(3).into() }
        }
        op::READ_CAPACITY_10 => Command::ReadCapacity10,
        op::SERVICE_ACTION_IN_16 => match cdb.0[1] & 0x1f {
            READ_CAPACITY_16 => Command::ReadCapacity16 { allocation: cdb.u32(10) },
            GET_LBA_STATUS => Command::GetLbaStatus { lba: Lba(cdb.u64(2)), allocation: cdb.u32(10) },
            _ => return Err(Sense::in_cdb_bit(1, 4)),
        },
        op::MODE_SENSE_6 | op::MODE_SENSE_10 => mode_sense(cdb)?,
        op::MODE_SELECT_6 | op::MODE_SELECT_10 => mode_select(cdb)?,
        op::START_STOP_UNIT => start_stop(cdb)?,
        op::REPORT_LUNS => Command::ReportLuns { select: cdb.0[2], allocation: cdb.u32(6) },
        op::MAINTENANCE_IN if cdb.0[1] & 0x1f == REPORT_OPCODES => report_opcodes(cdb)?,
        op::MAINTENANCE_IN => return Err(Sense::in_cdb_bit(1, 4)),
        op::PERSISTENT_RESERVE_IN => {
            Command::ReserveIn { action: cdb.0[1] & 0x1f, allocation: cdb.u16(7).into() }
        }
        op::PERSISTENT_RESERVE_OUT => Command::ReserveOut {
            action: cdb.0[1] & 0x1f,
            scope: cdb.0[2] >> 4,
            kind: cdb.0[2] & 0xf,
            length: cdb.u32(5),
        },
        _ => return Err(Sense::OPCODE),
    })
}

fn write_same(cdb: &Cdb) -> Result<Command, Sense> {
    cdb.no_protection()?;
    if cdb.bit(1, 4) {
        // Anchored blocks are not supported.
        return Err(Sense::in_cdb_bit(1, 4));
    }
    let ten = cdb.0[0] == op::WRITE_SAME_10;
    if ten && cdb.0[1] & 0x06 != 0 {
        // PBDATA and LBDATA are obsolete.
        return Err(Sense::in_cdb_bit(1, 2));
    }
    let (unmap, zeroes) = (cdb.bit(1, 3), !ten && cdb.bit(1, 0));
    Ok(Command::WriteSame { lba: cdb.lba(), blocks: cdb.blocks(), unmap, zeroes })
}

fn verify(cdb: &Cdb) -> Result<Command, Sense> {
    cdb.no_protection()?;
    let check = match cdb.0[1] >> 1 & 3 {
        0 => Check::Medium,
        1 => Check::Data,
        3 => Check::OneBlock,
        _ => return Err(Sense::in_cdb_bit(1, 2)),
    };
    Ok(Command::Verify { lba: cdb.lba(), blocks: cdb.blocks(), check })
}

fn mode_sense(cdb: &Cdb) -> Result<Command, Sense> {
    let ten = cdb.0[0] == op::MODE_SENSE_10;
    let control = match cdb.0[2] >> 6 {
        0 => PageControl::Current,
        1 => PageControl::Changeable,
        2 => PageControl::Default,
        _ => PageControl::Saved,
    };
    Ok(Command::ModeSense {
        ten,
        no_blocks: cdb.bit(1, 3),
        long: ten && cdb.bit(1, 4),
        control,
        page: cdb.0[2] & 0x3f,
        subpage: cdb.0[3],
        allocation: if ten { cdb.u16(7).into() } else { cdb.0[4].into() },
    })
}

fn mode_select(cdb: &Cdb) -> Result<Command, Sense> {
    let ten = cdb.0[0] == op::MODE_SELECT_10;
    if !cdb.bit(1, 4) {
        // Only mode pages in the standard's format are supported.
        return Err(Sense::in_cdb_bit(1, 4));
    }
    let save = cdb.bit(1, 0);
    Ok(Command::ModeSelect { ten, save, length: if ten { cdb.u16(7).into() } else { cdb.0[4].into() } })
}

fn start_stop(cdb: &Cdb) -> Result<Command, Sense> {
    if cdb.0[4] >> 4 != 0 {
        // Power conditions are not supported.
        return Err(Sense::in_cdb_bit(4, 7));
    }
    if cdb.bit(4, 1) {
        // The medium cannot be ejected.
        return Err(Sense::in_cdb_bit(4, 1));
    }
    let (start, no_flush) = (cdb.bit(4, 0), cdb.bit(4, 2));
    Ok(Command::StartStop { start, flush: !start && !no_flush })
}

fn report_opcodes(cdb: &Cdb) -> Result<Command, Sense> {
    let (opcode, action) = (cdb.0[3], cdb.u16(4));
    let which = match cdb.0[2] & 7 {
        0 => Opcodes::All,
        1 => Opcodes::One(opcode),
        2 => Opcodes::Action(opcode, action),
        3 => Opcodes::Either(opcode, action),
        _ => return Err(Sense::in_cdb_bit(2, 2)),
    };
    Ok(Command::ReportOpcodes { which, timeouts: cdb.bit(2, 7), allocation: cdb.u32(6) })
}

impl Command {
    /// Whether the command may be carried out twice. After a crash, the back-end repeats the commands that its predecessor had in
    /// flight, without knowing whether the command had been carried out. A command that may not be repeated is answered by a unit
    /// attention (29h/00h) instead, as after a loss of power, so that the initiator checks for itself.
    ///
    /// - READ, VERIFY and commands that only report something about the unit change nothing.
    /// - WRITE, WRITE SAME, UNMAP and SYNCHRONIZE CACHE have the same result the second time; the initiator has sent no other
    ///   command to the same blocks whose order mattered.
    /// - MODE SELECT and START STOP UNIT set the same values again.
    /// - COMPARE AND WRITE would compare with the data that it wrote the first time, and report a miscompare although it
    ///   succeeded.
    /// - PERSISTENT RESERVE OUT would meet its own change: the key that it replaced, or the registration that it removed.
    pub(crate) const fn is_repeatable(&self) -> bool {
        match self {
            Self::CompareAndWrite(_) | Self::ReserveOut { .. } => false,
            Self::TestUnitReady
            | Self::RequestSense { .. }
            | Self::Inquiry { .. }
            | Self::Read(_)
            | Self::Write(_)
            | Self::WriteSame { .. }
            | Self::Unmap { .. }
            | Self::SynchronizeCache { .. }
            | Self::ReadCapacity10
            | Self::ReadCapacity16 { .. }
            | Self::GetLbaStatus { .. }
            | Self::ModeSense { .. }
            | Self::ModeSelect { .. }
            | Self::StartStop { .. }
            | Self::ReportLuns { .. }
            | Self::ReportOpcodes { .. }
            | Self::ReserveIn { .. }
            | Self::Verify { .. } => true,
        }
    }

    /// Whether the command is carried out even while a unit attention is pending, and regardless of reservations (SPC-4, sections
    /// 5.12.7 and 5.14; SAM-5, section 5.14).
    pub(crate) const fn passes_attention(&self) -> bool {
        matches!(self, Self::Inquiry { .. } | Self::ReportLuns { .. } | Self::RequestSense { .. })
    }
}

#[cfg(test)]
mod tests;
