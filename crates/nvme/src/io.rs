//! I/O commands of the NVM command set, checked against the limits of their namespace. NVM Command Set 1.0 §3.2. Pure; reactor
//! context.
//!
//! [`Commands`] is a namespace's limits in a form that a reactor keeps. Each method returns a [`SubmissionEntry`] without data;
//! [`crate::queue::QueuePair::submit`] adds the data.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::claims::{ControllerInfo, Namespace, Supported};
use crate::spec::entry::SubmissionEntry;
use crate::spec::opcode::io;

/// NLB is a 0-based field of 16 bits.
const NLB_MAX: u64 = 1 << 16;
/// CDW12.FUA: the data is on the media when the command completes.
const FUA: u32 = 1 << 30;
/// CDW12.DEAC of Write Zeroes: the blocks may be deallocated.
const DEAC: u32 = 1 << 25;
/// CDW11.AD of Dataset Management: deallocate.
const AD: u32 = 1 << 2;

/// A request that no command can carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    /// The blocks are not all inside of the namespace, or there are none.
    #[error("{blocks} blocks from LBA {slba} on are outside of the namespace")]
    OutOfRange {
        /// First block.
        slba: u64,
        /// Number of blocks.
        blocks: u64,
    },
    /// There are more blocks than the command may have.
    #[error("{blocks} blocks are more than the {max} of one command")]
    TooManyBlocks {
        /// Number of blocks.
        blocks: u64,
        /// The limit.
        max: u64,
    },
    /// There are no ranges, or more than the command may have.
    #[error("{ranges} ranges; a command has 1 to {max}")]
    Ranges {
        /// Number of ranges.
        ranges: usize,
        /// The limit.
        max: u16,
    },
    /// The controller does not support the command.
    #[error("the controller does not support {0}")]
    Unsupported(&'static str),
}

/// Consecutive blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First block.
    pub slba: u64,
    /// Number of blocks.
    pub blocks: u32,
}

/// A range of Dataset Management. NVM Command Set 1.0 §3.2.3.1.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DeallocateRange {
    attributes: U32,
    blocks: U32,
    slba: U64,
}

const _: () = assert!(size_of::<DeallocateRange>() == 16);

/// A source range of Copy in descriptor format 0. NVM Command Set 1.0 §3.2.2.1.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CopyRange {
    reserved_0: [u8; 8],
    slba: U64,
    nlb: U16,
    reserved_18: [u8; 6],
    eilbrt: U32,
    elbat: U16,
    elbatm: U16,
}

const _: () = assert!(size_of::<CopyRange>() == 32);

/// The commands that a namespace takes, and their limits. Made from checked claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Commands {
    nsid: u32,
    block_shift: u8,
    blocks: u64,
    /// Blocks of a command with data.
    transfer: u64,
    write_zeroes: u64,
    verify: u64,
    compare_write: u64,
    /// Ranges, blocks of a range, and blocks of a Dataset Management command.
    deallocate: (u16, u32, u64),
    /// Ranges, blocks of a range, and blocks of a Copy command.
    copy: (u16, u32, u64),
    deallocates_zeroes: bool,
    supported: Supported,
}

impl Commands {
    /// The commands of a namespace of this controller.
    pub fn new(namespace: &Namespace, controller: &ControllerInfo) -> Self {
        let transfer = (controller.transfer_max >> namespace.block_shift).clamp(1, NLB_MAX);
        let limit =
            |bytes: Option<u64>| bytes.map_or(NLB_MAX, |b| b >> namespace.block_shift).clamp(1, NLB_MAX);
        let supported = Supported {
            copy: controller.supported.copy && namespace.copy_range_max > 0 && namespace.copy_max > 0,
            ..controller.supported
        };
        Self {
            nsid: namespace.nsid,
            block_shift: namespace.block_shift,
            blocks: namespace.blocks,
            transfer,
            write_zeroes: limit(controller.write_zeroes_max),
            verify: limit(controller.verify_max),
            compare_write: transfer.min(namespace.atomic_compare_write.into()),
            deallocate: controller.deallocate_max,
            copy: (namespace.copy_ranges_max, namespace.copy_range_max.into(), namespace.copy_max.into()),
            deallocates_zeroes: namespace.write_zeroes_deallocates,
            supported,
        }
    }

    /// Blocks of the namespace.
    pub const fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The bytes of blocks.
    pub const fn bytes(&self, blocks: u64) -> u64 {
        blocks << self.block_shift
    }

    /// Most blocks of a command with data.
    pub const fn transfer_max(&self) -> u64 {
        self.transfer
    }

    /// Most blocks of a Write Zeroes command.
    pub const fn write_zeroes_max(&self) -> u64 {
        self.write_zeroes
    }

    /// Most blocks of a fused compare and write.
    pub const fn compare_write_max(&self) -> u64 {
        self.compare_write
    }

    /// Ranges, blocks of a range, and blocks of a Dataset Management command.
    pub const fn deallocate_max(&self) -> (u16, u32, u64) {
        self.deallocate
    }

    /// Ranges, blocks of a range, and blocks of a Copy command.
    pub const fn copy_max(&self) -> (u16, u32, u64) {
        self.copy
    }

    /// Optional commands.
    pub const fn supported(&self) -> Supported {
        self.supported
    }

    /// Read. NVM Command Set 1.0 §3.2.4.
    ///
    /// # Errors
    /// [`BadRequest`].
    #[inline]
    pub fn read(&self, slba: u64, blocks: u64) -> Result<SubmissionEntry, BadRequest> {
        self.ranged(io::READ, slba, blocks, self.transfer, 0)
    }

    /// Write; with `fua`, the data is on the media when the command completes. NVM Command Set 1.0 §3.2.6.
    ///
    /// # Errors
    /// [`BadRequest`].
    #[inline]
    pub fn write(&self, slba: u64, blocks: u64, fua: bool) -> Result<SubmissionEntry, BadRequest> {
        self.ranged(io::WRITE, slba, blocks, self.transfer, if fua { FUA } else { 0 })
    }

    /// Flush: what completed before is on the media when the command completes. NVMe 2.0 §7.1.
    pub const fn flush(&self) -> SubmissionEntry {
        SubmissionEntry::new(io::FLUSH, self.nsid)
    }

    /// Write Zeroes; with `deallocate`, the controller may deallocate the blocks, if the namespace allows that. NVM Command Set
    /// 1.0 §3.2.8.
    ///
    /// # Errors
    /// [`BadRequest`].
    pub fn write_zeroes(
        &self,
        slba: u64,
        blocks: u64,
        deallocate: bool,
        fua: bool,
    ) -> Result<SubmissionEntry, BadRequest> {
        require(self.supported.write_zeroes, "Write Zeroes")?;
        let deac = if deallocate && self.deallocates_zeroes { DEAC } else { 0 };
        let flags = deac | if fua { FUA } else { 0 };
        self.ranged(io::WRITE_ZEROES, slba, blocks, self.write_zeroes, flags)
    }

    /// Compare. NVM Command Set 1.0 §3.2.1.
    ///
    /// # Errors
    /// [`BadRequest`].
    pub fn compare(&self, slba: u64, blocks: u64) -> Result<SubmissionEntry, BadRequest> {
        require(self.supported.compare, "Compare")?;
        self.ranged(io::COMPARE, slba, blocks, self.transfer, 0)
    }

    /// Compare and Write of the same blocks, for [`crate::queue::QueuePair::submit_fused`]. NVM Command Set 1.0 §3.1.
    ///
    /// # Errors
    /// [`BadRequest`].
    pub fn compare_and_write(
        &self,
        slba: u64,
        blocks: u64,
        fua: bool,
    ) -> Result<[SubmissionEntry; 2], BadRequest> {
        require(self.supported.compare_and_write, "fused Compare and Write")?;
        let compare = self.ranged(io::COMPARE, slba, blocks, self.compare_write, 0)?;
        let write = self.ranged(io::WRITE, slba, blocks, self.compare_write, if fua { FUA } else { 0 })?;
        Ok([compare, write])
    }

    /// Verify: the controller reads and checks the blocks, and transfers nothing. NVM Command Set 1.0 §3.2.5.
    ///
    /// # Errors
    /// [`BadRequest`].
    pub fn verify(&self, slba: u64, blocks: u64) -> Result<SubmissionEntry, BadRequest> {
        require(self.supported.verify, "Verify")?;
        self.ranged(io::VERIFY, slba, blocks, self.verify, 0)
    }

    /// Dataset Management that deallocates `ranges`. The data of the command is one [`DeallocateRange`] for each, which the call
    /// passes to `put`. NVM Command Set 1.0 §3.2.3.
    ///
    /// # Errors
    /// [`BadRequest`]; what `put` received then has no meaning.
    pub fn deallocate(
        &self,
        ranges: &[Range],
        mut put: impl FnMut(DeallocateRange),
    ) -> Result<SubmissionEntry, BadRequest> {
        require(self.supported.dataset_management, "Dataset Management")?;
        let (count, each, all) = self.deallocate;
        let mut sum = 0_u64;
        if ranges.is_empty() || ranges.len() > usize::from(count) {
            return Err(BadRequest::Ranges { ranges: ranges.len(), max: count });
        }
        for range in ranges {
            let blocks = u64::from(range.blocks);
            self.check(range.slba, blocks, each.into())?;
            sum += blocks;
            let (slba, blocks) = (range.slba.into(), range.blocks.into());
            put(DeallocateRange { attributes: 0.into(), blocks, slba });
        }
        if sum > all {
            return Err(BadRequest::TooManyBlocks { blocks: sum, max: all });
        }
        let count = ranges.len() as u32 - 1;
        Ok(SubmissionEntry::new(io::DATASET_MANAGEMENT, self.nsid).with_cdw10_11(count, AD))
    }

    /// Copy of `sources`, one behind the other, to the blocks from `slba` on; with `fua`, the copy is on the media when the
    /// command completes. The data of the command is one [`CopyRange`] for each source, which the call passes to `put`. NVM
    /// Command Set 1.0 §3.2.2.
    ///
    /// # Errors
    /// [`BadRequest`]; what `put` received then has no meaning.
    pub fn copy(
        &self,
        sources: &[Range],
        slba: u64,
        fua: bool,
        mut put: impl FnMut(CopyRange),
    ) -> Result<SubmissionEntry, BadRequest> {
        require(self.supported.copy, "Copy")?;
        let (count, each, all) = self.copy;
        if sources.is_empty() || sources.len() > usize::from(count) {
            return Err(BadRequest::Ranges { ranges: sources.len(), max: count });
        }
        let mut sum = 0;
        for source in sources {
            let blocks = u64::from(source.blocks);
            self.check(source.slba, blocks, each.into())?;
            sum += blocks;
            put(CopyRange {
                reserved_0: [0; 8],
                slba: source.slba.into(),
                // A range has 1 to 65,535 blocks: MSSRL has 16 bits.
                nlb: (source.blocks as u16 - 1).into(),
                reserved_18: [0; 6],
                eilbrt: 0.into(),
                elbat: 0.into(),
                elbatm: 0.into(),
            });
        }
        self.check(slba, sum, all)?;
        let count = sources.len() as u32 - 1;
        let entry = SubmissionEntry::new(io::COPY, self.nsid);
        let cdw12 = count | if fua { FUA } else { 0 };
        Ok(entry.with_cdw10_11(slba as u32, (slba >> 32) as u32).with_cdw12_13(cdw12, 0))
    }

    #[inline]
    fn ranged(
        &self,
        opcode: u8,
        slba: u64,
        blocks: u64,
        max: u64,
        flags: u32,
    ) -> Result<SubmissionEntry, BadRequest> {
        self.check(slba, blocks, max)?;
        let entry = SubmissionEntry::new(opcode, self.nsid);
        Ok(entry
            .with_cdw10_11(slba as u32, (slba >> 32) as u32)
            .with_cdw12_13((blocks - 1) as u32 | flags, 0))
    }

    #[inline]
    fn check(&self, slba: u64, blocks: u64, max: u64) -> Result<(), BadRequest> {
        let is_inside = blocks > 0 && slba.checked_add(blocks).is_some_and(|end| end <= self.blocks);
        if !is_inside {
            return Err(BadRequest::OutOfRange { slba, blocks });
        }
        if blocks > max {
            return Err(BadRequest::TooManyBlocks { blocks, max });
        }
        Ok(())
    }
}

const fn require(is_supported: bool, command: &'static str) -> Result<(), BadRequest> {
    if is_supported { Ok(()) } else { Err(BadRequest::Unsupported(command)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claims::tests::{raw_controller, raw_namespace};
    use crate::quirks::Quirks;
    use crate::spec::identify::Descriptors;

    fn commands(change: impl FnOnce(&mut ControllerInfo, &mut Namespace)) -> Commands {
        let mut info =
            ControllerInfo::check(&raw_controller(), 0x0002_0000, 4096, 4096, Quirks::default()).unwrap();
        let mut raw = raw_namespace();
        (raw.mssrl, raw.mcl, raw.msrc, raw.dlfeat) = (8.into(), 20.into(), 3, 9);
        let mut namespace =
            Namespace::check(7, &raw, Descriptors::default(), &info, Quirks::default()).unwrap();
        change(&mut info, &mut namespace);
        Commands::new(&namespace, &info)
    }

    #[test]
    fn reads_and_writes_name_their_blocks() {
        let commands = commands(|_, namespace| namespace.blocks = 1 << 40);
        let entry = commands.write(0x1_0000_0002, 32, true).unwrap();
        assert_eq!((entry.opcode(), entry.nsid(), entry.cdw(10), entry.cdw(11)), (1, 7, 2, 1));
        assert_eq!(entry.cdw(12), 31 | 1 << 30);
        assert_eq!(commands.read(0, 1).unwrap().cdw(12), 0);
        assert_eq!(commands.flush().opcode(), 0);
        assert_eq!(commands.write_zeroes(0, 65_536, true, false).unwrap().cdw(12), 0xffff | 1 << 25);
        assert_eq!(commands.verify(0, 65_536).unwrap().opcode(), 0x0c);
    }

    #[test]
    fn blocks_outside_of_the_namespace_or_the_limits_are_refused() {
        let commands = commands(|_, _| {});
        for (slba, blocks) in [(0, 0), (1000, 1), (999, 2), (u64::MAX, 1), (1, u64::MAX), (0, 1001)] {
            assert_eq!(commands.read(slba, blocks), Err(BadRequest::OutOfRange { slba, blocks }));
        }
        assert_eq!(commands.read(0, 33), Err(BadRequest::TooManyBlocks { blocks: 33, max: 32 }));
        assert!(commands.read(999, 1).is_ok() && commands.read(0, 32).is_ok());
    }

    #[test]
    fn deallocations_keep_all_three_limits() {
        let commands = commands(|info, _| info.deallocate_max = (2, 100, 150));
        let range = |slba, blocks| Range { slba, blocks };
        let mut put = Vec::new();
        let entry = commands.deallocate(&[range(5, 100), range(200, 50)], |range| put.push(range)).unwrap();
        assert_eq!((entry.opcode(), entry.cdw(10), entry.cdw(11)), (9, 1, 4));
        assert_eq!(put.as_bytes()[..16], [0, 0, 0, 0, 100, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
        let refused = |ranges: &[Range]| commands.deallocate(ranges, |_| ()).unwrap_err();
        assert_eq!(refused(&[]), BadRequest::Ranges { ranges: 0, max: 2 });
        assert_eq!(refused(&[range(0, 1); 3]), BadRequest::Ranges { ranges: 3, max: 2 });
        assert_eq!(refused(&[range(0, 101)]), BadRequest::TooManyBlocks { blocks: 101, max: 100 });
        assert_eq!(
            refused(&[range(0, 80), range(0, 80)]),
            BadRequest::TooManyBlocks { blocks: 160, max: 150 }
        );
        assert_eq!(refused(&[range(990, 11)]), BadRequest::OutOfRange { slba: 990, blocks: 11 });
    }

    #[test]
    fn copies_keep_all_limits_and_both_ends() {
        let commands = commands(|_, _| {});
        let range = |slba, blocks| Range { slba, blocks };
        let mut put = Vec::new();
        let sources = [range(5, 8), range(100, 2)];
        let entry = commands.copy(&sources, 900, false, |range| put.push(range)).unwrap();
        assert_eq!((entry.opcode(), entry.cdw(10), entry.cdw(12)), (0x19, 900, 1));
        assert_eq!((put.as_bytes()[8], put.as_bytes()[16], put.as_bytes()[48]), (5, 7, 1));
        assert_eq!(commands.copy(&sources, 900, true, |_| ()).unwrap().cdw(12), 1 | 1 << 30);
        let refused = |ranges: &[Range], to| commands.copy(ranges, to, false, |_| ()).unwrap_err();
        assert_eq!(refused(&[range(0, 9)], 500), BadRequest::TooManyBlocks { blocks: 9, max: 8 });
        assert_eq!(refused(&[range(0, 8); 3], 500), BadRequest::TooManyBlocks { blocks: 24, max: 20 });
        assert_eq!(refused(&[range(0, 8)], 993), BadRequest::OutOfRange { slba: 993, blocks: 8 });
        assert_eq!(refused(&[range(0, 1); 5], 0), BadRequest::Ranges { ranges: 5, max: 4 });
        let without = self::commands(|_, namespace| namespace.copy_range_max = 0);
        assert_eq!(without.copy(&[range(0, 1)], 5, false, |_| ()), Err(BadRequest::Unsupported("Copy")));
    }

    #[test]
    fn a_fused_pair_is_no_larger_than_the_atomic_unit() {
        let commands = commands(|_, namespace| namespace.atomic_compare_write = 2);
        let [compare, write] = commands.compare_and_write(3, 2, false).unwrap();
        assert_eq!((compare.opcode(), write.opcode(), compare.cdw10_11()), (5, 1, write.cdw10_11()));
        assert_eq!(
            commands.compare_and_write(3, 3, false),
            Err(BadRequest::TooManyBlocks { blocks: 3, max: 2 })
        );
    }
}
