//! Commands as initiators write them (SPC-4, SBC-3): from any bytes to a [`Command`], or to the sense data that says why not. Any context; pure.
//!
//! Reserved bits are not looked at. What is asked for but not offered (protection information, anchored blocks, saved pages) is refused at its
//! field.

use crate::Sense;
use aryk_bdev::Op;

/// Blocks to move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// The first block.
    pub lba: u64,
    /// How many; 0 moves nothing.
    pub blocks: u32,
    /// It goes past any cache.
    pub fua: bool,
}

/// With what VERIFY compares.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Check {
    /// With nothing: the blocks can be read.
    Medium,
    /// With as many blocks of data.
    Data,
    /// Each with one block of data.
    OneBlock,
}

/// Which values of mode pages are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageControl {
    /// As they are.
    Current,
    /// Which bits can be changed.
    Changeable,
    /// As they were at first.
    Default,
    /// As a reset brings them back.
    Saved,
}

/// What REPORT SUPPORTED OPERATION CODES is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Opcodes {
    /// All.
    All,
    /// One that has no service actions.
    One(u8),
    /// One that has.
    Action(u8, u16),
    /// One, with its service action if it has such.
    Either(u8, u16),
}

/// A command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "named as the standards name them; fields are the CDBs'")]
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
    /// No blocks: to the disk's end. `zeroes`: there is no data, and it is zeroes.
    WriteSame {
        lba: u64,
        blocks: u64,
        unmap: bool,
        zeroes: bool,
    },
    Unmap {
        length: u32,
    },
    /// No blocks: to the disk's end.
    SynchronizeCache {
        lba: u64,
        blocks: u32,
    },
    ReadCapacity10,
    ReadCapacity16 {
        allocation: u32,
    },
    GetLbaStatus {
        lba: u64,
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
        lba: u64,
        blocks: u32,
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

/// Opcodes.
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
/// The same: GET LBA STATUS.
pub(crate) const GET_LBA_STATUS: u8 = 0x12;
/// Service action of MAINTENANCE IN: REPORT SUPPORTED OPERATION CODES.
pub(crate) const REPORT_OPCODES: u8 = 0x0c;

/// Bytes of the longest CDB that is looked at.
const CDB_MAX: usize = 16;

/// Bytes of a CDB with this opcode (SPC-4, section 4.2.5.1); `None` for those of no fixed length.
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

    /// Its LBA, by its length: 6, 10, 12 or 16.
    const fn lba(&self) -> u64 {
        match length(self.0[0]) {
            Some(6) => (self.u32(0) & 0x1f_ffff) as u64,
            Some(16) => self.u64(2),
            _ => self.u32(2) as u64,
        }
    }

    /// Its transfer length, the same.
    const fn blocks(&self) -> u32 {
        match length(self.0[0]) {
            // No blocks are 256 here (SBC-3, section 5.8).
            Some(6) if self.0[4] == 0 => 256,
            Some(6) => self.0[4] as u32,
            Some(10) => self.u16(7) as u32,
            Some(12) => self.u32(6),
            _ => self.u32(10),
        }
    }

    /// A transfer whose byte 1 is protection, DPO and FUA.
    fn transfer(&self) -> Result<Transfer, Sense> {
        self.no_protection()?;
        Ok(Transfer { lba: self.lba(), blocks: self.blocks(), fua: self.bit(1, 3) })
    }

    const fn transfer_6(&self) -> Transfer {
        Transfer { lba: self.lba(), blocks: self.blocks(), fua: false }
    }

    /// The three bits at the top of byte 1 ask for protection information, of which there is none.
    const fn no_protection(&self) -> Result<(), Sense> {
        if self.0[1] >> 5 == 0 { Ok(()) } else { Err(Sense::in_cdb_bit(1, 7)) }
    }

    /// No auto contingent allegiance.
    const fn no_aca(&self, len: usize) -> Result<(), Sense> {
        if self.bit(len - 1, 2) { Err(Sense::in_cdb_bit(len as u16 - 1, 2)) } else { Ok(()) }
    }
}

/// Decodes a CDB, of any length. Bytes behind its end are not looked at.
///
/// # Errors
/// What to answer instead.
pub fn decode(bytes: &[u8]) -> Result<Command, Sense> {
    let opcode = *bytes.first().ok_or(Sense::OPCODE)?;
    let len = length(opcode).ok_or(Sense::OPCODE)?;
    let Some(own) = bytes.get(..len) else {
        // The first byte that is missing; but a command that there is not is that first of all.
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

/// READ and WRITE as they come nearly always: in two of their forms, with no bit set that is looked at more closely. `None` says nothing of what
/// [`decode`] would.
#[inline]
pub(crate) fn plain(bytes: &[u8]) -> Option<(Op, Transfer)> {
    let cdb = bytes.first_chunk::<16>()?;
    let word = |at: usize| u32::from_be_bytes([cdb[at], cdb[at + 1], cdb[at + 2], cdb[at + 3]]);
    let (lba, blocks, control) = match cdb[0] {
        op::READ_16 | op::WRITE_16 => (u64::from(word(2)) << 32 | u64::from(word(6)), word(10), cdb[15]),
        op::READ_10 | op::WRITE_10 => (word(2).into(), u16::from_be_bytes([cdb[7], cdb[8]]).into(), cdb[9]),
        _ => return None,
    };
    if cdb[1] >> 5 != 0 || control != 0 {
        return None;
    }
    let is_read = matches!(cdb[0], op::READ_16 | op::READ_10);
    Some((if is_read { Op::Read } else { Op::Write }, Transfer { lba, blocks, fua: cdb[1] & 0x08 != 0 }))
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
            let (lba, blocks) = (cdb.lba(), cdb.0[13].into());
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
            GET_LBA_STATUS => Command::GetLbaStatus { lba: cdb.u64(2), allocation: cdb.u32(10) },
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
        // No blocks are anchored.
        return Err(Sense::in_cdb_bit(1, 4));
    }
    let ten = cdb.0[0] == op::WRITE_SAME_10;
    if ten && cdb.0[1] & 0x06 != 0 {
        // PBDATA and LBDATA are obsolete.
        return Err(Sense::in_cdb_bit(1, 2));
    }
    let (unmap, zeroes) = (cdb.bit(1, 3), !ten && cdb.bit(1, 0));
    Ok(Command::WriteSame { lba: cdb.lba(), blocks: cdb.blocks().into(), unmap, zeroes })
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
        // Pages are in no format but the standard's.
        return Err(Sense::in_cdb_bit(1, 4));
    }
    let save = cdb.bit(1, 0);
    Ok(Command::ModeSelect { ten, save, length: if ten { cdb.u16(7).into() } else { cdb.0[4].into() } })
}

fn start_stop(cdb: &Cdb) -> Result<Command, Sense> {
    if cdb.0[4] >> 4 != 0 {
        // There are no power conditions.
        return Err(Sense::in_cdb_bit(4, 7));
    }
    if cdb.bit(4, 1) {
        // Nothing can be ejected.
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
    /// Whether the command may be carried out once more if nobody knows whether it was: what a predecessor had in flight when it died is submitted again, and what
    /// may not be repeated is answered by a unit attention (29h/00h) instead, as after a loss of power, so that the initiator looks for itself.
    ///
    /// - READ, VERIFY and what tells of the unit change nothing.
    /// - WRITE, WRITE SAME, UNMAP and SYNCHRONIZE CACHE leave the same behind the second time; whoever has sent them has sent nothing to the same blocks
    ///   whose order mattered.
    /// - MODE SELECT and START STOP UNIT set the same once more.
    /// - COMPARE AND WRITE would find what it has written itself, and report a miscompare though it happened.
    /// - PERSISTENT RESERVE OUT would find its own change: its key, which it has replaced, or whom it has removed.
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

    /// Whether it is answered though an attention is pending, and whatever is reserved (SPC-4, sections 5.12.7 and 5.14; SAM-5, section 5.14).
    pub(crate) const fn passes_attention(&self) -> bool {
        matches!(self, Self::Inquiry { .. } | Self::ReportLuns { .. } | Self::RequestSense { .. })
    }
}

#[cfg(test)]
mod tests;
