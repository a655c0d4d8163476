//! Sense data: the reason for which a command failed (SPC-4, section 4.5). Any context; pure.

use aryk_bdev::{Lba, Op, Status as BdevStatus};

/// Status codes (SAM-5, section 5.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Status {
    /// The command succeeded.
    Good = 0x00,
    /// Sense data states the reason.
    CheckCondition = 0x02,
    /// The logical unit is reserved for another initiator.
    ReservationConflict = 0x18,
    /// Too many commands of its kind are in flight: the initiator may retry after one of them has ended.
    TaskSetFull = 0x28,
    /// The command was aborted on behalf of another initiator.
    TaskAborted = 0x40,
}

/// Sense keys (SPC-4, table 47).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Key {
    /// Nothing to report.
    NoSense = 0x0,
    /// The store failed.
    MediumError = 0x3,
    /// The command is invalid.
    IllegalRequest = 0x5,
    /// An event that this initiator did not cause.
    UnitAttention = 0x6,
    /// The blocks may not be changed.
    DataProtect = 0x7,
    /// The command was aborted.
    AbortedCommand = 0xb,
    /// The blocks hold other data.
    Miscompare = 0xe,
}

/// The position of an invalid field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Field {
    /// The field is in the CDB; otherwise it is in the parameter list.
    pub in_cdb: bool,
    /// Index of the byte.
    pub byte: u16,
    /// The field's highest bit in that byte, if the field does not start with the byte.
    pub bit: Option<u8>,
}

/// Sense data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sense {
    /// The sense key: the kind of error.
    pub key: Key,
    /// The additional sense code and its qualifier (ASC, ASCQ).
    pub code: (u8, u8),
    /// The block at which the error occurred.
    pub lba: Option<Lba>,
    /// The invalid field.
    pub field: Option<Field>,
}

/// Bytes of sense data in either format, at most.
pub const SENSE_MAX: usize = 32;

impl Sense {
    /// Nothing to report.
    pub const NONE: Self = Self::new(Key::NoSense, 0x00, 0x00);
    /// The opcode is not supported.
    pub const OPCODE: Self = Self::at_field(0x20, 0x00, true, 0, None);
    /// Blocks beyond the end of the disk.
    pub const OUT_OF_RANGE: Self = Self::new(Key::IllegalRequest, 0x21, 0x00);
    /// The logical unit does not exist.
    pub const NO_UNIT: Self = Self::new(Key::IllegalRequest, 0x25, 0x00);
    /// A parameter list ends in the middle of a field.
    pub const LIST_LENGTH: Self = Self::new(Key::IllegalRequest, 0x1a, 0x00);
    /// Pages cannot be saved.
    pub const SAVING: Self = Self::new(Key::IllegalRequest, 0x39, 0x00);
    /// The initiator released a reservation of another type.
    pub const RELEASE: Self = Self::new(Key::IllegalRequest, 0x26, 0x04);
    /// The table of registrations is full.
    pub const REGISTRATIONS: Self = Self::new(Key::IllegalRequest, 0x55, 0x04);
    /// The disk is read-only.
    pub const WRITE_PROTECTED: Self = Self::new(Key::DataProtect, 0x27, 0x00);
    /// The command was aborted.
    pub const ABORTED: Self = Self::new(Key::AbortedCommand, 0x00, 0x00);

    /// Sense data with a key and a code.
    pub const fn new(key: Key, asc: u8, ascq: u8) -> Self {
        Self { key, code: (asc, ascq), lba: None, field: None }
    }

    const fn at_field(asc: u8, ascq: u8, in_cdb: bool, byte: u16, bit: Option<u8>) -> Self {
        Self { field: Some(Field { in_cdb, byte, bit }), ..Self::new(Key::IllegalRequest, asc, ascq) }
    }

    /// A field of the CDB that begins at a byte has a value that is not supported.
    pub const fn in_cdb(byte: u16) -> Self {
        Self::at_field(0x24, 0x00, true, byte, None)
    }

    /// As [`Sense::in_cdb`], for a field whose highest bit is not the byte's.
    pub const fn in_cdb_bit(byte: u16, bit: u8) -> Self {
        Self::at_field(0x24, 0x00, true, byte, Some(bit))
    }

    /// A field of the parameter list that begins at a byte has a value that is not supported.
    pub const fn in_list(byte: u16) -> Self {
        Self::at_field(0x26, 0x00, false, byte, None)
    }

    /// The sense data for a failed request of the block layer.
    pub const fn of(status: BdevStatus, op: Op) -> Self {
        match status {
            // The SCSI status of a reservation conflict has no sense data.
            BdevStatus::Ok | BdevStatus::ReservationConflict => Self::NONE,
            BdevStatus::Invalid => Self::in_cdb(0),
            BdevStatus::OutOfRange => Self::OUT_OF_RANGE,
            BdevStatus::Unsupported => Self::OPCODE,
            BdevStatus::ReadOnly => Self::WRITE_PROTECTED,
            // ASC 27h/07h: space allocation failed write protect.
            BdevStatus::NoSpace => Self::new(Key::DataProtect, 0x27, 0x07),
            // ASC 20h/02h: access denied, no access rights.
            BdevStatus::AccessDenied => Self::new(Key::DataProtect, 0x20, 0x02),
            // ASC 0Ch/00h: write error; 11h/00h: unrecovered read error.
            BdevStatus::Medium if op.is_change() => Self::new(Key::MediumError, 0x0c, 0x00),
            BdevStatus::Medium => Self::new(Key::MediumError, 0x11, 0x00),
            BdevStatus::Aborted => Self::ABORTED,
            BdevStatus::Removed => Self::NO_UNIT,
            BdevStatus::Miscompare => Self::new(Key::Miscompare, 0x1d, 0x00),
        }
    }

    /// Adds the block at which the error occurred.
    #[must_use]
    pub const fn with_lba(self, lba: Lba) -> Self {
        Self { lba: Some(lba), ..self }
    }

    /// The bytes in fixed format (section 4.5.3), and their number.
    pub fn fixed(&self) -> ([u8; SENSE_MAX], usize) {
        let mut out = [0; SENSE_MAX];
        out[0] = 0x70;
        // Fixed format has no room for a block number above 32 bits.
        if let Some(lba) = self.lba.and_then(|lba| u32::try_from(lba.0).ok()) {
            out[0] |= 0x80;
            out[3..7].copy_from_slice(&lba.to_be_bytes());
        }
        out[2] = self.key as u8;
        out[7] = 10;
        (out[12], out[13]) = self.code;
        if let Some(field) = &self.field {
            out[15..18].copy_from_slice(&field.specific());
        }
        (out, 18)
    }

    /// The bytes in descriptor format (section 4.5.2), and their number.
    pub fn descriptors(&self) -> ([u8; SENSE_MAX], usize) {
        let mut out = [0; SENSE_MAX];
        (out[0], out[1]) = (0x72, self.key as u8);
        (out[2], out[3]) = self.code;
        let mut at = 8;
        if let Some(lba) = self.lba {
            out[at..at + 3].copy_from_slice(&[0x00, 10, 0x80]);
            out[at + 4..at + 12].copy_from_slice(&lba.0.to_be_bytes());
            at += 12;
        }
        if let Some(field) = &self.field {
            out[at..at + 2].copy_from_slice(&[0x02, 6]);
            out[at + 4..at + 7].copy_from_slice(&field.specific());
            at += 8;
        }
        out[7] = (at - 8) as u8;
        (out, at)
    }
}

impl Field {
    /// The sense-key specific bytes (section 4.5.2.4.2).
    fn specific(self) -> [u8; 3] {
        let bit = self.bit.map_or(0, |bit| 0x08 | bit);
        let [high, low] = self.byte.to_be_bytes();
        [0x80 | u8::from(self.in_cdb) << 6 | bit, high, low]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_contain_the_same_data() {
        let sense = Sense::in_cdb_bit(1, 7).with_lba(Lba(0x0102_0304));
        let (fixed, len) = sense.fixed();
        let mut expected = [0; 18];
        expected[..3].copy_from_slice(&[0xf0, 0, 5]);
        expected[3..7].copy_from_slice(&[1, 2, 3, 4]);
        expected[7] = 10;
        expected[12] = 0x24;
        expected[15..].copy_from_slice(&[0xcf, 0, 1]);
        assert_eq!(fixed[..len], expected);
        let (descriptors, len) = sense.descriptors();
        let header = [0x72, 5, 0x24, 0, 0, 0, 0, 20];
        let information = [0, 10, 0x80, 0, 0, 0, 0, 0, 1, 2, 3, 4];
        let specific = [2, 6, 0, 0, 0xcf, 0, 1, 0];
        assert_eq!(descriptors[..len], [&header[..], &information, &specific].concat());
    }

    #[test]
    fn a_block_above_32_bits_is_only_in_descriptor_format() {
        let sense = Sense::of(BdevStatus::Medium, Op::Read).with_lba(Lba(1 << 40));
        assert_eq!(sense.fixed().0[..8], [0x70, 0, 3, 0, 0, 0, 0, 10]);
        assert_eq!(sense.descriptors().0[12..20], (1u64 << 40).to_be_bytes());
    }
}
