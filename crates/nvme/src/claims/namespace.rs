//! A namespace's format, limits and identity, checked. NVM Command Set 1.0 §4.1.5.1.

use crate::claims::{BadClaim, ControllerInfo, claim};
use crate::quirks::Quirks;
use crate::spec::identify::{CommandSet, Descriptors, IdentifyNamespace, present};

/// The largest namespace in bytes. Offsets in files and of block devices are signed 64-bit integers.
const BYTES_MAX: u64 = i64::MAX as u64;

/// A correct namespace of a kind that the driver does not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unserved {
    /// The namespace has another command set than blocks.
    #[error("the namespace has the command set {0:?}, only NVM (blocks) is served")]
    CommandSet(CommandSet),
    /// The namespace has metadata beside or within each block.
    #[error(
        "the namespace's format has {bytes} bytes of {} metadata per block: format it without (`--lbaf` with ms:0)",
        if *.interleaved { "interleaved" } else { "separate" }
    )]
    Metadata {
        /// MS of the format in use.
        bytes: u16,
        /// FLBAS bit 4: the metadata follows the data of each block in the same buffer.
        interleaved: bool,
    },
    /// The namespace checks protection information.
    #[error("the namespace has end-to-end data protection of type {0}: format it without (`--pi 0`)")]
    Protection(u8),
    /// Blocks of a size that is not 512 to 65,536 bytes.
    #[error("the namespace has blocks of 2^{0} bytes; 2^9 to 2^16 are served")]
    BlockSize(u8),
    /// The identify data is of zeroes: the namespace ID is not active.
    #[error("the namespace is not active")]
    Inactive,
    /// The identify data contradicts the specification.
    #[error(transparent)]
    BadClaim(#[from] BadClaim),
    /// The controller answered Identify with an error.
    #[error("the controller does not identify the namespace: {0}")]
    NotIdentified(crate::spec::status::Status),
}

/// A namespace that the driver serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// NSID.
    pub nsid: u32,
    /// NSZE in blocks, at least 1; the last byte fits in an `i64`.
    pub blocks: u64,
    /// Bytes of a block as a power of two: 9 to 16.
    pub block_shift: u8,
    /// NUSE in blocks.
    pub used: u64,
    /// EUI64, NGUID and UUID.
    pub ids: Descriptors,
    /// NMIC bit 0: other controllers may change the namespace too.
    pub is_shared: bool,
    /// NSATTR bit 0: write protected now.
    pub is_write_protected: bool,
    /// NSFEAT bit 0: thin provisioned.
    pub is_thin: bool,
    /// Blocks that are written entirely or not at all when power fails, at least 1: NAWUPF, or the controller's AWUPF.
    pub atomic_power_fail: u32,
    /// Blocks of a fused compare and write, at least 1: NACWU, or the controller's ACWU.
    pub atomic_compare_write: u32,
    /// A write that crosses such a boundary (NABSPF, in blocks, counted from NABO) is not atomic; `None` without boundaries.
    pub atomic_boundary: Option<(u32, u32)>,
    /// Blocks that a request should not cross a multiple of: NOIOB, or a quirk; 0 if there is no boundary.
    pub optimal_boundary: u32,
    /// DLFEAT: reads of deallocated blocks return zeroes.
    pub reads_zeroes: bool,
    /// DLFEAT bit 3: Write Zeroes may deallocate (DEAC).
    pub write_zeroes_deallocates: bool,
    /// NPDG, in blocks: deallocations should be multiples of it; 1 if not reported.
    pub deallocate_granularity: u32,
    /// MSSRL: blocks of one source range of Copy.
    pub copy_range_max: u16,
    /// MCL: blocks of one Copy command.
    pub copy_max: u32,
    /// MSRC: source ranges of one Copy command, 1 to 256.
    pub copy_ranges_max: u16,
}

impl Namespace {
    /// Bytes of a block.
    pub const fn block_size(&self) -> u32 {
        1 << self.block_shift
    }

    /// Bytes of the namespace.
    pub const fn bytes(&self) -> u64 {
        self.blocks << self.block_shift
    }

    /// Checks Identify Namespace and the namespace's descriptors.
    ///
    /// # Errors
    /// [`Unserved`].
    pub fn check(
        nsid: u32,
        raw: &IdentifyNamespace,
        descriptors: Descriptors,
        controller: &ControllerInfo,
        quirks: Quirks,
    ) -> Result<Self, Unserved> {
        match descriptors.command_set {
            None | Some(CommandSet::Nvm) => {}
            Some(other) => return Err(Unserved::CommandSet(other)),
        }
        let (blocks, capacity) = (raw.nsze.get(), raw.ncap.get());
        if blocks == 0 && capacity == 0 {
            return Err(Unserved::Inactive);
        }
        let block_shift = check_format(raw)?;
        claim(blocks != 0, "NSZE", blocks, "a namespace has at least one block")?;
        let fits = blocks.checked_mul(1 << block_shift).is_some_and(|bytes| bytes <= BYTES_MAX);
        claim(fits, "NSZE", blocks, "the namespace would have more than 2^63-1 bytes")?;
        claim(capacity <= blocks, "NCAP", capacity, "it is above NSZE")?;
        let transfer = controller.transfer_max;
        claim(transfer >= 1 << block_shift, "MDTS", transfer, "a block is larger than a transfer")?;
        // NSFEAT bit 1: the namespace has its own atomic units.
        let has_atomics = raw.nsfeat & 2 != 0;
        let own = |field: u16, all: u32| {
            if has_atomics && field != 0 { u32::from(field) + 1 } else { all }
        };
        let boundary = (u32::from(raw.nabspf.get()) + 1, u32::from(raw.nabo.get()));
        let stripe_blocks = controller.stripe.map_or(0, |bytes| (bytes >> block_shift) as u32);
        let noiob = u32::from(raw.noiob.get());
        // NSFEAT bit 4: the fields of preferred sizes are defined.
        let has_preferred = raw.nsfeat & 0x10 != 0;
        let ids = Descriptors {
            eui64: descriptors.eui64.or_else(|| present(raw.eui64)),
            nguid: descriptors.nguid.or_else(|| present(raw.nguid)),
            ..descriptors
        };
        Ok(Self {
            nsid,
            blocks,
            block_shift,
            used: raw.nuse.get().min(capacity),
            ids: if quirks.bogus_namespace_ids { Descriptors::default() } else { ids },
            is_shared: raw.nmic & 1 != 0,
            is_write_protected: raw.nsattr & 1 != 0,
            is_thin: raw.nsfeat & 1 != 0,
            atomic_power_fail: own(raw.nawupf.get(), controller.atomic_power_fail),
            atomic_compare_write: own(raw.nacwu.get(), controller.atomic_compare_write),
            atomic_boundary: (has_atomics && boundary.0 > 1).then_some(boundary),
            optimal_boundary: if noiob != 0 { noiob } else { stripe_blocks },
            reads_zeroes: raw.dlfeat & 7 == 1,
            write_zeroes_deallocates: raw.dlfeat & 8 != 0,
            deallocate_granularity: if has_preferred { u32::from(raw.npdg.get()) + 1 } else { 1 },
            copy_range_max: raw.mssrl.get(),
            copy_max: raw.mcl.get(),
            copy_ranges_max: u16::from(raw.msrc) + 1,
        })
    }
}

/// Checks the LBA format in use, and returns the size of a block as a power of two.
fn check_format(raw: &IdentifyNamespace) -> Result<u8, Unserved> {
    let high = if raw.nlbaf > 15 { raw.flbas >> 5 & 3 } else { 0 };
    let index = raw.flbas & 15 | high << 4;
    claim(raw.nlbaf < 64, "NLBAF", raw.nlbaf.into(), "there are at most 64 LBA formats")?;
    claim(index <= raw.nlbaf, "FLBAS", raw.flbas.into(), "the LBA format in use is above NLBAF")?;
    let format = raw.lbaf[usize::from(index)];
    if !(9..=16).contains(&format.lbads) {
        return Err(Unserved::BlockSize(format.lbads));
    }
    if format.ms.get() != 0 {
        return Err(Unserved::Metadata { bytes: format.ms.get(), interleaved: raw.flbas & 0x10 != 0 });
    }
    match raw.dps & 7 {
        0 => Ok(format.lbads),
        kind => Err(Unserved::Protection(kind)),
    }
}
