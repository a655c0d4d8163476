//! Controller properties: offsets in BAR 0 and bit fields (NVMe 2.0 §3.1.3). Context: any.

use crate::config::Config;

/// Offset of the first doorbell (NVMe over PCIe Transport 1.0 §3.1.2).
pub const DOORBELLS: u64 = 0x1000;

/// Controller Capabilities.
pub(crate) const CAP: u64 = 0x00;
/// Version.
pub(crate) const VS: u64 = 0x08;
/// Interrupt Mask Set.
pub(crate) const INTMS: u64 = 0x0c;
/// Interrupt Mask Clear.
pub(crate) const INTMC: u64 = 0x10;
/// Controller Configuration.
pub(crate) const CC: u64 = 0x14;
/// Controller Status.
pub(crate) const CSTS: u64 = 0x1c;
/// NVM Subsystem Reset.
pub(crate) const NSSR: u64 = 0x20;
/// Admin Queue Attributes.
pub(crate) const AQA: u64 = 0x24;
/// Admin Submission Queue Base Address.
pub(crate) const ASQ: u64 = 0x28;
/// Admin Completion Queue Base Address.
pub(crate) const ACQ: u64 = 0x30;
/// Controller Ready Timeouts.
pub(crate) const CRTO: u64 = 0x68;

/// CSTS.RDY.
pub(crate) const RDY: u32 = 1;
/// CSTS.CFS.
pub(crate) const CFS: u32 = 1 << 1;
/// CSTS.SHST: shutdown processing occurs.
pub(crate) const SHST_OCCURRING: u32 = 1 << 2;
/// CSTS.SHST: shutdown processing is complete.
pub(crate) const SHST_COMPLETE: u32 = 2 << 2;
/// CSTS.SHST, both bits.
pub(crate) const SHST: u32 = 3 << 2;

/// CC.EN.
pub(crate) const EN: u32 = 1;

/// The value of CAP.
pub(crate) fn cap(config: &Config) -> u64 {
    let mqes = u64::from(config.queue_entries.clamp(2, 1 << 16) - 1);
    // CAP.CQR: queues are physically contiguous. CAP.NSSRS: no subsystem reset.
    mqes | 1 << 16
        | u64::from(config.weighted_round_robin) << 17
        | u64::from(config.to) << 24
        | u64::from(config.dstrd & 0xf) << 32
        | u64::from(config.css) << 37
        | u64::from(config.mpsmin & 0xf) << 48
        | u64::from(config.mpsmax & 0xf) << 52
}

/// Fields of Controller Configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cc(pub(crate) u32);

impl Cc {
    pub(crate) const fn is_enabled(self) -> bool {
        self.0 & EN != 0
    }

    pub(crate) const fn css(self) -> u32 {
        self.0 >> 4 & 7
    }

    pub(crate) const fn mps(self) -> u32 {
        self.0 >> 7 & 0xf
    }

    pub(crate) const fn ams(self) -> u32 {
        self.0 >> 11 & 7
    }

    /// 1: normal shutdown; 2: abrupt.
    pub(crate) const fn shn(self) -> u32 {
        self.0 >> 14 & 3
    }

    /// As a power of two.
    pub(crate) const fn iosqes(self) -> u32 {
        self.0 >> 16 & 0xf
    }

    /// As a power of two.
    pub(crate) const fn iocqes(self) -> u32 {
        self.0 >> 20 & 0xf
    }

    /// Bytes of a memory page.
    pub(crate) const fn page(self) -> u64 {
        4096 << self.mps()
    }
}
