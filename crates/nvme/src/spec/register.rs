//! Controller properties (registers) and doorbells. NVMe 2.0 §3.1.3; PCIe Transport 1.0 §3.1.2.

/// Controller Capabilities, 64 bits.
pub const CAP: u64 = 0x00;
/// Version, 32 bits.
pub const VS: u64 = 0x08;
/// Controller Configuration, 32 bits.
pub const CC: u64 = 0x14;
/// Controller Status, 32 bits.
pub const CSTS: u64 = 0x1c;
/// Admin Queue Attributes, 32 bits.
pub const AQA: u64 = 0x24;
/// Admin Submission Queue Base Address, 64 bits.
pub const ASQ: u64 = 0x28;
/// Admin Completion Queue Base Address, 64 bits.
pub const ACQ: u64 = 0x30;
/// Controller Ready Timeouts, 32 bits; only where CAP.CRMS is not 0.
pub const CRTO: u64 = 0x68;
/// The first doorbell. PCIe Transport 1.0 §3.1.2.1.
pub const DOORBELLS: u64 = 0x1000;

/// Milliseconds in the unit of CAP.TO and CRTO.
pub const TIMEOUT_UNIT_MS: u64 = 500;

/// The value of CAP. NVMe 2.0 §3.1.3.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cap(pub u64);

impl Cap {
    const fn bits(self, low: u32, count: u32) -> u64 {
        self.0 >> low & ((1 << count) - 1)
    }

    /// CAP.MQES: the largest number of entries in an I/O queue. Not 0-based here: 1 to 65,536.
    pub const fn max_queue_entries(self) -> u32 {
        self.bits(0, 16) as u32 + 1
    }

    /// CAP.AMS bit 0: the controller supports weighted round robin with urgent priority class.
    pub const fn has_weighted_round_robin(self) -> bool {
        self.bits(17, 1) == 1
    }

    /// CAP.TO: the longest time until CSTS.RDY follows CC.EN, in milliseconds.
    pub const fn ready_timeout_ms(self) -> u64 {
        self.bits(24, 8) * TIMEOUT_UNIT_MS
    }

    /// CAP.DSTRD: bytes from one doorbell to the next.
    pub const fn doorbell_stride(self) -> u64 {
        4 << self.bits(32, 4)
    }

    /// CAP.CSS bit 0: the controller supports the NVM command set.
    pub const fn has_nvm_command_set(self) -> bool {
        self.bits(37, 1) == 1
    }

    /// CAP.CSS bit 6: the controller supports several I/O command sets.
    pub const fn has_several_command_sets(self) -> bool {
        self.bits(43, 1) == 1
    }

    /// CAP.MPSMIN: the smallest memory page, in bytes.
    pub const fn page_min(self) -> u64 {
        1 << (12 + self.bits(48, 4))
    }

    /// CAP.MPSMAX: the largest memory page, in bytes.
    pub const fn page_max(self) -> u64 {
        1 << (12 + self.bits(52, 4))
    }

    /// CAP.CRMS: the register CRTO exists.
    pub const fn has_ready_timeouts(self) -> bool {
        self.bits(59, 2) != 0
    }
}

/// The value of CSTS. NVMe 2.0 §3.1.3.6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Csts(pub u32);

impl Csts {
    /// CSTS.RDY: the controller processes commands.
    pub const fn is_ready(self) -> bool {
        self.0 & 1 != 0
    }

    /// CSTS.CFS: a fatal error, which only a reset ends.
    pub const fn is_fatal(self) -> bool {
        self.0 & 2 != 0
    }

    /// CSTS.SHST is 10b: the shutdown is complete.
    pub const fn is_shut_down(self) -> bool {
        self.0 >> 2 & 3 == 2
    }

    /// CSTS.PP: the controller has stopped processing commands, for example while it activates firmware.
    pub const fn is_paused(self) -> bool {
        self.0 & 0x20 != 0
    }

    /// All bits are set: no device answers the read. Several bits are reserved, so no controller reports this value.
    pub const fn is_absent(self) -> bool {
        self.0 == u32::MAX
    }
}

/// CC.SHN: how the controller shuts down. NVMe 2.0 §3.1.3.5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// The controller finishes what is in its caches.
    Normal,
    /// Power goes soon: the controller saves the least that it must.
    Abrupt,
}

/// The value of CC. NVMe 2.0 §3.1.3.5.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cc(pub u32);

impl Cc {
    /// CC.EN.
    pub const ENABLE: u32 = 1;

    /// The value that enables the controller with memory pages of `page` bytes, entries of 64 and 16 bytes, and round robin
    /// arbitration. `all_command_sets` selects CC.CSS 110b, which CAP.CSS bit 6 demands.
    pub const fn enabled(page: u64, all_command_sets: bool) -> Self {
        let css = if all_command_sets { 0b110 } else { 0 };
        Self(Self::ENABLE | css << 4 | (page.trailing_zeros() - 12) << 7 | 6 << 16 | 4 << 20)
    }

    /// The same value with CC.EN at 0.
    #[must_use]
    pub const fn disabled(self) -> Self {
        Self(self.0 & !Self::ENABLE)
    }

    /// Whether CC.EN is 1.
    pub const fn is_enabled(self) -> bool {
        self.0 & Self::ENABLE != 0
    }

    /// The same value with CC.SHN set.
    #[must_use]
    pub const fn with_shutdown(self, how: Shutdown) -> Self {
        let shn = match how {
            Shutdown::Normal => 1,
            Shutdown::Abrupt => 2,
        };
        Self(self.0 & !(3 << 14) | shn << 14)
    }
}

/// Offset of the submission queue tail doorbell of queue `qid`, for doorbells `stride` bytes apart.
pub const fn tail_doorbell(qid: u16, stride: u64) -> u64 {
    DOORBELLS + 2 * qid as u64 * stride
}

/// Offset of the completion queue head doorbell of queue `qid`.
pub const fn head_doorbell(qid: u16, stride: u64) -> u64 {
    tail_doorbell(qid, stride) + stride
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fields_of_cap_are_where_the_specification_puts_them() {
        let cap = Cap(0x07ff | 0x3c << 24 | 2 << 32 | 1 << 37 | 1 << 48 | 3 << 52 | 1 << 59);
        assert_eq!(
            (cap.max_queue_entries(), cap.ready_timeout_ms(), cap.doorbell_stride()),
            (2048, 30_000, 16)
        );
        assert_eq!((cap.page_min(), cap.page_max()), (8192, 32768));
        assert!(cap.has_nvm_command_set() && cap.has_ready_timeouts());
        assert!(!cap.has_several_command_sets());
        let all = Cap(u64::MAX);
        assert_eq!((all.max_queue_entries(), all.doorbell_stride()), (65_536, 4 << 15));
    }

    #[test]
    fn cc_selects_page_size_entry_sizes_and_command_set() {
        let cc = Cc::enabled(8192, true);
        assert_eq!(cc.0, 1 | 6 << 4 | 1 << 7 | 6 << 16 | 4 << 20);
        assert!(!cc.disabled().is_enabled() && cc.with_shutdown(Shutdown::Abrupt).0 >> 14 & 3 == 2);
    }

    #[test]
    fn doorbells_lie_a_stride_apart() {
        assert_eq!((tail_doorbell(0, 4), head_doorbell(0, 4)), (0x1000, 0x1004));
        assert_eq!((tail_doorbell(3, 16), head_doorbell(3, 16)), (0x1060, 0x1070));
    }
}
