//! Submission and completion queue entries. NVMe 2.0 §3.3.3.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::spec::status::Status;

/// A submission queue entry, 64 bytes, as eight little-endian words of 64 bits. NVMe 2.0 §3.3.3.1.
///
/// Words, not fields: the hot path builds an entry in registers, and a copy of it never loads a word that was stored in parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct SubmissionEntry([u64; 8]);

const _: () = assert!(size_of::<SubmissionEntry>() == 64);

/// CDW0.FUSE: an entry's place in a fused operation. NVMe 2.0 §3.3.3.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fuse {
    /// The first of two commands.
    First,
    /// The second of two commands.
    Second,
}

impl SubmissionEntry {
    /// An entry with this opcode and namespace; everything else is 0.
    pub const fn new(opcode: u8, nsid: u32) -> Self {
        Self([(opcode as u64 | (nsid as u64) << 32).to_le(), 0, 0, 0, 0, 0, 0, 0])
    }

    /// CDW0.OPC.
    pub const fn opcode(&self) -> u8 {
        u64::from_le(self.0[0]) as u8
    }

    /// CDW0.CID.
    pub const fn cid(&self) -> u16 {
        (u64::from_le(self.0[0]) >> 16) as u16
    }

    /// NSID.
    pub const fn nsid(&self) -> u32 {
        (u64::from_le(self.0[0]) >> 32) as u32
    }

    /// CDW0.FUSE, unless it is 0.
    pub const fn fuse(&self) -> Option<Fuse> {
        match u64::from_le(self.0[0]) >> 8 & 3 {
            1 => Some(Fuse::First),
            2 => Some(Fuse::Second),
            _ => None,
        }
    }

    /// Command dword `n`, 10 to 15.
    ///
    /// # Panics
    /// For another `n`.
    pub const fn cdw(&self, n: usize) -> u32 {
        assert!(n >= 10 && n <= 15, "an entry has CDW10 to CDW15");
        (u64::from_le(self.0[n / 2]) >> (n % 2 * 32)) as u32
    }

    /// CDW10 and CDW11 as one value: the starting LBA of most I/O commands.
    pub const fn cdw10_11(&self) -> u64 {
        u64::from_le(self.0[5])
    }

    /// PRP1 and PRP2, or both words of SGL1.
    pub const fn data_pointer(&self) -> [u64; 2] {
        [u64::from_le(self.0[3]), u64::from_le(self.0[4])]
    }

    /// CDW0.PSDT is not 0: the data pointer is an SGL.
    pub const fn has_sgl(&self) -> bool {
        u64::from_le(self.0[0]) >> 14 & 3 != 0
    }

    /// Sets CDW0.CID.
    #[must_use]
    pub const fn with_cid(mut self, cid: u16) -> Self {
        self.0[0] = (u64::from_le(self.0[0]) & !(0xffff << 16) | (cid as u64) << 16).to_le();
        self
    }

    /// Sets CDW0.FUSE.
    #[must_use]
    pub const fn with_fuse(mut self, fuse: Fuse) -> Self {
        let bits = match fuse {
            Fuse::First => 1,
            Fuse::Second => 2,
        };
        self.0[0] = (u64::from_le(self.0[0]) & !(3 << 8) | bits << 8).to_le();
        self
    }

    /// Sets PRP1 and PRP2 (CDW0.PSDT is 00b).
    #[must_use]
    pub const fn with_prps(mut self, prp1: u64, prp2: u64) -> Self {
        self.0[0] = (u64::from_le(self.0[0]) & !(3 << 14)).to_le();
        self.0[3] = prp1.to_le();
        self.0[4] = prp2.to_le();
        self
    }

    /// Sets SGL1 (CDW0.PSDT is 01b).
    #[must_use]
    pub const fn with_sgl(mut self, words: [u64; 2]) -> Self {
        self.0[0] = (u64::from_le(self.0[0]) & !(3 << 14) | 1 << 14).to_le();
        self.0[3] = words[0].to_le();
        self.0[4] = words[1].to_le();
        self
    }

    /// Sets CDW10 and CDW11.
    #[must_use]
    pub const fn with_cdw10_11(mut self, low: u32, high: u32) -> Self {
        self.0[5] = (low as u64 | (high as u64) << 32).to_le();
        self
    }

    /// Sets CDW12 and CDW13.
    #[must_use]
    pub const fn with_cdw12_13(mut self, low: u32, high: u32) -> Self {
        self.0[6] = (low as u64 | (high as u64) << 32).to_le();
        self
    }

    /// Sets CDW14 and CDW15.
    #[must_use]
    pub const fn with_cdw14_15(mut self, low: u32, high: u32) -> Self {
        self.0[7] = (low as u64 | (high as u64) << 32).to_le();
        self
    }
}

/// A completion queue entry, 16 bytes, as two little-endian words of 64 bits. NVMe 2.0 §3.3.3.2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(transparent)]
pub struct CompletionEntry([u64; 2]);

const _: () = assert!(size_of::<CompletionEntry>() == 16);

impl CompletionEntry {
    /// Offset of the 16 bits with the phase tag.
    pub const STATUS_OFFSET: usize = 14;

    /// The completion of command `cid`. SQHD, SQID and the phase tag are 0; `result` is DW0 and DW1.
    pub const fn new(cid: u16, status: Status, result: u64) -> Self {
        Self([result.to_le(), ((cid as u64) << 32 | (status.bits() as u64) << 49).to_le()])
    }

    /// Sets SQHD.
    #[must_use]
    pub const fn with_sqhd(mut self, sqhd: u16) -> Self {
        self.0[1] = (u64::from_le(self.0[1]) & !0xffff | sqhd as u64).to_le();
        self
    }

    /// DW0: the command's result.
    pub const fn result(&self) -> u32 {
        u64::from_le(self.0[0]) as u32
    }

    /// DW0 and DW1: the result of a command whose result has 64 bits.
    pub const fn result_64(&self) -> u64 {
        u64::from_le(self.0[0])
    }

    /// SQHD: the controller's head of the submission queue.
    pub const fn sqhd(&self) -> u16 {
        u64::from_le(self.0[1]) as u16
    }

    /// SQID: the submission queue of the command.
    pub const fn sqid(&self) -> u16 {
        (u64::from_le(self.0[1]) >> 16) as u16
    }

    /// CID: the command.
    pub const fn cid(&self) -> u16 {
        (u64::from_le(self.0[1]) >> 32) as u16
    }

    /// The phase tag.
    pub const fn phase(&self) -> bool {
        u64::from_le(self.0[1]) >> 48 & 1 != 0
    }

    /// The status field.
    pub const fn status(&self) -> Status {
        Status::new((u64::from_le(self.0[1]) >> 49) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::status::Code;

    #[test]
    fn an_entry_has_its_fields_where_the_specification_puts_them() {
        let entry = SubmissionEntry::new(0x02, 0x0403_0201)
            .with_cid(0xbeef)
            .with_fuse(Fuse::Second)
            .with_prps(0x1000, 0x2000)
            .with_cdw10_11(10, 11)
            .with_cdw12_13(12, 13)
            .with_cdw14_15(14, 15);
        let bytes = entry.as_bytes();
        assert_eq!(&bytes[..8], &[2, 2, 0xef, 0xbe, 1, 2, 3, 4]);
        assert_eq!((bytes[25], bytes[33]), (0x10, 0x20));
        (10..16).for_each(|n| assert_eq!((usize::from(bytes[4 * n]), entry.cdw(n)), (n, n as u32)));
        assert_eq!((entry.fuse(), entry.cid(), entry.nsid()), (Some(Fuse::Second), 0xbeef, 0x0403_0201));
        assert!(!entry.has_sgl() && entry.with_sgl([1, 2]).has_sgl());
        assert_eq!(entry.with_sgl([1, 2]).as_bytes()[1] >> 6, 1);
        assert_eq!(entry.with_cid(1).cid(), 1, "an old CID does not shine through");
    }

    #[test]
    fn a_completion_has_its_fields_where_the_specification_puts_them() {
        let mut bytes = [0; 16];
        bytes[0] = 7;
        bytes[8..10].copy_from_slice(&0x1234_u16.to_le_bytes());
        bytes[10] = 3;
        bytes[12..14].copy_from_slice(&0xabcd_u16.to_le_bytes());
        bytes[14..].copy_from_slice(&(0x8000_u16 | 1 << 12 | 2 << 9 | 0x81 << 1 | 1).to_le_bytes());
        let entry = CompletionEntry::read_from_bytes(&bytes).unwrap();
        assert_eq!((entry.result(), entry.sqhd(), entry.sqid(), entry.cid()), (7, 0x1234, 3, 0xabcd));
        let status = entry.status();
        assert!(entry.phase() && status.is_final() && !status.has_more());
        assert_eq!((status.code(), status.crd()), (Code::UNRECOVERED_READ_ERROR, 1));
    }

    #[test]
    fn a_completion_is_built_as_it_is_read() {
        let status = Code::LBA_OUT_OF_RANGE.status().as_final();
        let entry =
            CompletionEntry::new(0xabcd, status, 0x8877_6655_4433_2211).with_sqhd(9).with_sqhd(0x1234);
        assert_eq!((entry.cid(), entry.sqhd(), entry.sqid(), entry.phase()), (0xabcd, 0x1234, 0, false));
        assert_eq!((entry.status(), entry.result_64()), (status, 0x8877_6655_4433_2211));
        assert!(entry.status().is_final() && entry.result() == 0x4433_2211);
    }
}
