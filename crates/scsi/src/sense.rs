//! What a command that failed says of why (SPC-4, section 4.5). Any context; pure.

use aryk_bdev::{Op, Status as BdevStatus};

/// Status codes (SAM-5, section 5.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Status {
    /// It was done.
    Good = 0x00,
    /// There is sense data.
    CheckCondition = 0x02,
    /// The logical unit is reserved for others.
    ReservationConflict = 0x18,
    /// There are too many commands of its kind: it may be tried again when another has ended.
    TaskSetFull = 0x28,
    /// It was aborted on behalf of another initiator.
    TaskAborted = 0x40,
}

/// Sense keys (SPC-4, table 47).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Key {
    /// Nothing to say.
    NoSense = 0x0,
    /// The store failed.
    MediumError = 0x3,
    /// The command makes no sense.
    IllegalRequest = 0x5,
    /// Something has happened that the initiator did not do.
    UnitAttention = 0x6,
    /// The blocks may not be changed.
    DataProtect = 0x7,
    /// The command was given up.
    AbortedCommand = 0xb,
    /// The blocks hold other data.
    Miscompare = 0xe,
}

/// Where the mistake is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Field {
    /// In the CDB, or in the parameter list.
    pub in_cdb: bool,
    /// Byte.
    pub byte: u16,
    /// The field's highest bit in that byte, if it does not begin with the byte.
    pub bit: Option<u8>,
}

/// Sense data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sense {
    /// What kind of trouble it is.
    pub key: Key,
    /// The additional sense code, and its qualifier.
    pub code: (u8, u8),
    /// The block that it is about.
    pub lba: Option<u64>,
    /// The field that it is about.
    pub field: Option<Field>,
}

/// Bytes of sense data in either format, at most.
pub const SENSE_MAX: usize = 32;

impl Sense {
    /// Nothing to say.
    pub const NONE: Self = Self::new(Key::NoSense, 0x00, 0x00);
    /// There is no such command.
    pub const OPCODE: Self = Self::at_field(0x20, 0x00, true, 0, None);
    /// Blocks beyond the disk's end.
    pub const OUT_OF_RANGE: Self = Self::new(Key::IllegalRequest, 0x21, 0x00);
    /// There is no such logical unit.
    pub const NO_UNIT: Self = Self::new(Key::IllegalRequest, 0x25, 0x00);
    /// A parameter list ends within something.
    pub const LIST_LENGTH: Self = Self::new(Key::IllegalRequest, 0x1a, 0x00);
    /// Pages cannot be saved.
    pub const SAVING: Self = Self::new(Key::IllegalRequest, 0x39, 0x00);
    /// Someone has released what is not theirs.
    pub const RELEASE: Self = Self::new(Key::IllegalRequest, 0x26, 0x04);
    /// There is no room for another registration.
    pub const REGISTRATIONS: Self = Self::new(Key::IllegalRequest, 0x55, 0x04);
    /// The disk is read-only.
    pub const WRITE_PROTECTED: Self = Self::new(Key::DataProtect, 0x27, 0x00);
    /// The command was given up.
    pub const ABORTED: Self = Self::new(Key::AbortedCommand, 0x00, 0x00);

    /// Sense data of a key and a code.
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

    /// The same of a field whose highest bit is not the byte's.
    pub const fn in_cdb_bit(byte: u16, bit: u8) -> Self {
        Self::at_field(0x24, 0x00, true, byte, Some(bit))
    }

    /// A field of the parameter list that begins at a byte has a value that is not supported.
    pub const fn in_list(byte: u16) -> Self {
        Self::at_field(0x26, 0x00, false, byte, None)
    }

    /// How a command of the block layer's failed.
    pub const fn of(status: BdevStatus, op: Op) -> Self {
        match status {
            BdevStatus::Ok => Self::NONE,
            BdevStatus::Invalid => Self::in_cdb(0),
            BdevStatus::OutOfRange => Self::OUT_OF_RANGE,
            BdevStatus::Unsupported => Self::OPCODE,
            BdevStatus::ReadOnly => Self::WRITE_PROTECTED,
            // Space allocation failed write protect.
            BdevStatus::NoSpace => Self::new(Key::DataProtect, 0x27, 0x07),
            // Write error; unrecovered read error.
            BdevStatus::Medium if op.is_change() => Self::new(Key::MediumError, 0x0c, 0x00),
            BdevStatus::Medium => Self::new(Key::MediumError, 0x11, 0x00),
            BdevStatus::Aborted => Self::ABORTED,
            BdevStatus::Removed => Self::NO_UNIT,
            BdevStatus::Miscompare => Self::new(Key::Miscompare, 0x1d, 0x00),
        }
    }

    /// About this block.
    #[must_use]
    pub const fn with_lba(self, lba: u64) -> Self {
        Self { lba: Some(lba), ..self }
    }

    /// Its bytes in fixed format (section 4.5.3), and how many.
    pub fn fixed(&self) -> ([u8; SENSE_MAX], usize) {
        let mut out = [0; SENSE_MAX];
        out[0] = 0x70;
        // A block that has no room stays unsaid.
        if let Some(lba) = self.lba.and_then(|lba| u32::try_from(lba).ok()) {
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

    /// Its bytes in descriptor format (section 4.5.2), and how many.
    pub fn descriptors(&self) -> ([u8; SENSE_MAX], usize) {
        let mut out = [0; SENSE_MAX];
        (out[0], out[1]) = (0x72, self.key as u8);
        (out[2], out[3]) = self.code;
        let mut at = 8;
        if let Some(lba) = self.lba {
            out[at..at + 3].copy_from_slice(&[0x00, 10, 0x80]);
            out[at + 4..at + 12].copy_from_slice(&lba.to_be_bytes());
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
    fn both_formats_say_the_same() {
        let sense = Sense::in_cdb_bit(1, 7).with_lba(0x0102_0304);
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
    fn a_block_that_fixed_format_has_no_room_for_is_in_the_other() {
        let sense = Sense::of(BdevStatus::Medium, Op::Read).with_lba(1 << 40);
        assert_eq!(sense.fixed().0[..8], [0x70, 0, 3, 0, 0, 0, 0, 10]);
        assert_eq!(sense.descriptors().0[12..20], (1u64 << 40).to_be_bytes());
    }
}
