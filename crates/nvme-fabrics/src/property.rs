//! Properties: the registers of a controller, which hosts access by commands. NVMe 2.0 §3.1.3 and §6.5. Any context.

use aryk_nvme::spec::register::{CAP, CC, CSTS, VS};
use aryk_nvme::spec::status::Code;

/// NVM Subsystem Reset, which this controller does not support.
const NSSR: u32 = 0x20;
/// The version that the controller conforms to: 1.4.0.
pub const VERSION: u32 = 0x0001_0400;

/// ATTRIB: the bytes of a property.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Width {
    /// 4 bytes.
    Four = 0,
    /// 8 bytes.
    Eight = 1,
}

/// A property, as a command names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// OFST.
    pub offset: u32,
    /// ATTRIB.
    pub width: Width,
}

impl Access {
    /// The property at an offset that has 32 bits.
    pub const fn four(offset: u64) -> Self {
        Self { offset: offset as u32, width: Width::Four }
    }

    /// The property at an offset that has 64 bits.
    pub const fn eight(offset: u64) -> Self {
        Self { offset: offset as u32, width: Width::Eight }
    }
}

/// What the host changed by setting CC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing that concerns queues.
    None,
    /// CC.EN became 1: the controller is ready and takes commands.
    Enabled,
    /// CC.EN became 0: a controller reset, which ends all commands and I/O queues. The association stays.
    Reset,
    /// CC.SHN asks for a shutdown; [`Properties::finish_shutdown`] follows when the I/O queues are idle.
    ShutDown,
}

/// The properties of one controller.
#[derive(Clone, Copy, Debug)]
pub struct Properties {
    queue_entries_max: u16,
    cc: u32,
    csts: u32,
}

/// Bits of CSTS.
mod csts {
    pub(super) const RDY: u32 = 1;
    pub(super) const CFS: u32 = 2;
    pub(super) const SHST: u32 = 3 << 2;
    pub(super) const SHST_RUNS: u32 = 1 << 2;
    pub(super) const SHST_DONE: u32 = 2 << 2;
}

impl Properties {
    /// The properties of a new controller, whose I/O queues have at most so many entries.
    ///
    /// # Panics
    /// If the number of entries is below 2.
    pub const fn new(queue_entries_max: u16) -> Self {
        assert!(queue_entries_max >= 2, "a queue has at least two entries");
        Self { queue_entries_max, cc: 0, csts: 0 }
    }

    /// CAP: contiguous queues, the NVM command set, pages of 4 KiB, and half a second to become ready.
    pub const fn cap(&self) -> u64 {
        (self.queue_entries_max - 1) as u64 | 1 << 16 | 1 << 24 | 1 << 37
    }

    /// Whether the controller takes commands: CSTS.RDY is 1, and there was no fatal error.
    pub const fn is_ready(&self) -> bool {
        self.csts & (csts::RDY | csts::CFS) == csts::RDY
    }

    /// The largest number of entries of an I/O queue.
    pub const fn queue_entries_max(&self) -> u16 {
        self.queue_entries_max
    }

    /// Executes Property Get.
    ///
    /// # Errors
    /// No property has this offset and width.
    pub const fn get(&self, access: Access) -> Result<u64, Code> {
        Ok(match (access.offset as u64, access.width) {
            (CAP, Width::Eight) => self.cap(),
            (VS, Width::Four) => VERSION as u64,
            (CC, Width::Four) => self.cc as u64,
            (CSTS, Width::Four) => self.csts as u64,
            _ => return Err(Code::INVALID_FIELD),
        })
    }

    /// Executes Property Set.
    ///
    /// # Errors
    /// No property with this offset and width can be set.
    pub const fn set(&mut self, access: Access, value: u64) -> Result<Change, Code> {
        match (access.offset, access.width) {
            (offset, Width::Four) if offset as u64 == CC => Ok(self.set_cc(value as u32)),
            // Without support for a subsystem reset, the property exists and does nothing.
            (NSSR, Width::Four) => Ok(Change::None),
            _ => Err(Code::INVALID_FIELD),
        }
    }

    const fn set_cc(&mut self, value: u32) -> Change {
        let (was, is) = (self.cc & 1 != 0, value & 1 != 0);
        let (shutdown_was, shutdown) = (self.cc >> 14 & 3, value >> 14 & 3);
        self.cc = value;
        if was && !is {
            self.csts = 0;
            return Change::Reset;
        }
        if !was && is {
            // IOSQES 6 and IOCQES 4 (64 and 16 bytes); command set, page size and arbitration 0.
            let is_supported = value & 0x00ff_3ff0 == 0x0046_0000;
            self.csts = if is_supported { csts::RDY } else { csts::CFS };
            return if is_supported { Change::Enabled } else { Change::None };
        }
        if shutdown != 0 && shutdown_was == 0 {
            self.csts = self.csts & !csts::SHST | csts::SHST_RUNS;
            return Change::ShutDown;
        }
        Change::None
    }

    /// Reports that a shutdown is complete, if one runs.
    pub const fn finish_shutdown(&mut self) {
        if self.csts & csts::SHST == csts::SHST_RUNS {
            self.csts = self.csts & !csts::SHST | csts::SHST_DONE;
        }
    }

    /// Reports a fatal error (CSTS.CFS), which only a controller reset ends.
    pub const fn set_fatal(&mut self) {
        self.csts |= csts::CFS;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_nvme::spec::register::{Cap, Cc, Csts, Shutdown};

    fn csts(properties: &Properties) -> Csts {
        Csts(properties.get(Access::four(CSTS)).unwrap() as u32)
    }

    #[test]
    fn a_host_enables_shuts_down_and_resets_a_controller() {
        let mut properties = Properties::new(128);
        let cap = Cap(properties.get(Access::eight(CAP)).unwrap());
        assert_eq!((cap.max_queue_entries(), cap.page_min(), cap.page_max()), (128, 4096, 4096));
        assert!(cap.has_nvm_command_set() && cap.ready_timeout_ms() == 500);
        assert_eq!(properties.get(Access::four(VS)), Ok(0x1_0400));

        let cc = Cc::enabled(4096, false);
        assert!(!properties.is_ready());
        assert_eq!(properties.set(Access::four(CC), cc.0.into()), Ok(Change::Enabled));
        assert!(properties.is_ready() && csts(&properties).is_ready());
        assert_eq!(properties.set(Access::four(CC), cc.0.into()), Ok(Change::None));
        assert_eq!(properties.get(Access::four(CC)), Ok(cc.0.into()));

        let down = cc.with_shutdown(Shutdown::Normal);
        assert_eq!(properties.set(Access::four(CC), down.0.into()), Ok(Change::ShutDown));
        assert!(!csts(&properties).is_shut_down());
        assert_eq!(properties.set(Access::four(CC), down.0.into()), Ok(Change::None), "it runs already");
        properties.finish_shutdown();
        assert!(csts(&properties).is_shut_down());

        assert_eq!(properties.set(Access::four(CC), down.disabled().0.into()), Ok(Change::Reset));
        assert_eq!(csts(&properties), Csts(0));
        properties.finish_shutdown();
        assert_eq!(csts(&properties), Csts(0), "a reset ends a shutdown");
    }

    #[test]
    fn unsupported_configurations_are_fatal_until_a_reset() {
        for wrong in [Cc::enabled(8192, false).0, Cc::enabled(4096, true).0, 1, 0x0047_0001, 0x0046_0801] {
            let mut properties = Properties::new(128);
            assert_eq!(properties.set(Access::four(CC), wrong.into()), Ok(Change::None), "{wrong:x}");
            assert!(csts(&properties).is_fatal() && !properties.is_ready());
            assert_eq!(properties.set(Access::four(CC), 0), Ok(Change::Reset));
            let cc = Cc::enabled(4096, false).0.into();
            assert_eq!(properties.set(Access::four(CC), cc), Ok(Change::Enabled));
            properties.set_fatal();
            assert!(!properties.is_ready());
        }
    }

    #[test]
    fn other_properties_do_not_exist() {
        let mut properties = Properties::new(2);
        for access in
            [Access::four(CAP), Access::eight(CC), Access::four(0x24), Access::four(0x1000), Access::four(2)]
        {
            assert_eq!(properties.get(access), Err(Code::INVALID_FIELD));
            assert_eq!(properties.set(access, 1), Err(Code::INVALID_FIELD));
        }
        assert_eq!(properties.set(Access::four(CSTS), 1), Err(Code::INVALID_FIELD), "read-only");
        assert_eq!(properties.set(Access::four(NSSR.into()), 0x4e56_4d65), Ok(Change::None));
    }
}
