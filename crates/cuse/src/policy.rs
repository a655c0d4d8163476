//! Which admin commands reach the controller. NVMe 2.0 §5. Pure.
//!
//! A list of what is allowed: an opcode or feature that this file does not name is refused. Never allowed is what would break the
//! driver (queues, doorbells, Abort, events, keep-alive) or change namespaces below its disks (management, attachment), and
//! features that the driver sets itself, for example the number of queues, the write cache and the host memory buffer.

/// What the device's creator allows its callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Commands that read.
    Read,
    /// Also commands that change or destroy: format, sanitize, firmware, security, features, resets.
    Change,
}

/// The judgement of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The command reads; every caller may send it.
    Read,
    /// The command changes the drive, or its speed, and needs [`Access::Change`].
    Change,
    /// No caller may send the command.
    Never,
}

impl Verdict {
    /// Whether callers with `access` may send the command.
    pub const fn is_allowed(self, access: Access) -> bool {
        match self {
            Self::Read => true,
            Self::Change => matches!(access, Access::Change),
            Self::Never => false,
        }
    }
}

const GET_LOG_PAGE: u8 = 0x02;
const IDENTIFY: u8 = 0x06;
const SET_FEATURES: u8 = 0x09;
const GET_FEATURES: u8 = 0x0a;
const FIRMWARE_COMMIT: u8 = 0x10;
const FIRMWARE_DOWNLOAD: u8 = 0x11;
const DEVICE_SELF_TEST: u8 = 0x14;
const FORMAT_NVM: u8 = 0x80;
const SECURITY_SEND: u8 = 0x81;
const SECURITY_RECEIVE: u8 = 0x82;
const SANITIZE: u8 = 0x84;
const GET_LBA_STATUS: u8 = 0x86;
/// Opcodes and features from here on are the vendor's.
const VENDOR: u8 = 0xc0;

/// Features that callers may set: power management, temperature threshold, autonomous power state transition, timestamp, host
/// controlled thermal management, non-operational power state, sanitize, endurance group events. NVMe 2.0 §5.27.1.
const FEATURES: &[u8] = &[0x02, 0x04, 0x0c, 0x0e, 0x10, 0x11, 0x17, 0x18];

/// Get Log Page, CDW10.RAE: the asynchronous event of this log stays uncleared.
const RETAIN_EVENT: u32 = 1 << 15;

/// The judgement of the command with this opcode and CDW10.
pub fn verdict(opcode: u8, cdw10: u32) -> Verdict {
    let feature = cdw10 as u8;
    match opcode {
        GET_LOG_PAGE | IDENTIFY | GET_FEATURES | SECURITY_RECEIVE | GET_LBA_STATUS => Verdict::Read,
        // A self-test changes no data, but takes up to hours, in which it may slow the drive down for all VMs.
        DEVICE_SELF_TEST
        | FIRMWARE_COMMIT
        | FIRMWARE_DOWNLOAD
        | FORMAT_NVM
        | SECURITY_SEND
        | SANITIZE
        | VENDOR.. => Verdict::Change,
        SET_FEATURES if feature >= VENDOR || FEATURES.contains(&feature) => Verdict::Change,
        _ => Verdict::Never,
    }
}

/// Whether a command that changes the drive may destroy data. Features, firmware and self-tests do not.
pub const fn may_destroy(opcode: u8) -> bool {
    !matches!(opcode, SET_FEATURES | FIRMWARE_COMMIT | FIRMWARE_DOWNLOAD | DEVICE_SELF_TEST)
}

/// The direction of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The command has no data.
    None,
    /// The controller reads the data.
    ToController,
    /// The controller writes the data.
    FromController,
}

/// The direction of the data of commands with this opcode, which bits 1:0 say; `None` for both directions. NVMe 2.0 §5, figure
/// of admin opcodes.
pub const fn direction(opcode: u8) -> Option<Direction> {
    match opcode & 3 {
        0 => Some(Direction::None),
        1 => Some(Direction::ToController),
        2 => Some(Direction::FromController),
        _ => None,
    }
}

/// The bytes that the controller transfers, by the fields of the command; 0 if the command has no such field. Such a command
/// transfers at most a page, unless it is a vendor's, whose length only the caller knows.
pub fn transfer(opcode: u8, cdw: &[u32; 6]) -> u64 {
    let dwords = |count: u64| (count + 1) * 4;
    match opcode {
        GET_LOG_PAGE => dwords(u64::from(cdw[0] >> 16) | u64::from(cdw[1] & 0xffff) << 16),
        FIRMWARE_DOWNLOAD => dwords(cdw[0].into()),
        GET_LBA_STATUS => dwords(cdw[2].into()),
        SECURITY_SEND | SECURITY_RECEIVE => cdw[1].into(),
        _ => 0,
    }
}

/// Changes what must not take effect: reading a log leaves its asynchronous event to the driver, which waits for such events.
pub(crate) fn keep_events(opcode: u8, cdw: &mut [u32; 6]) {
    if opcode == GET_LOG_PAGE {
        cdw[0] |= RETAIN_EVENT;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_that_break_the_driver_never_pass() {
        // Queues, Abort, events, namespace management and attachment, keep-alive, virtualization, doorbells, fabrics, lockdown.
        for opcode in [0x00, 0x01, 0x04, 0x05, 0x08, 0x0c, 0x0d, 0x15, 0x18, 0x1c, 0x24, 0x7c, 0x7f] {
            assert_eq!(verdict(opcode, 0), Verdict::Never, "{opcode:#x}");
        }
        // Arbitration, write cache, number of queues, interrupts, events, host memory buffer, keep-alive, host behaviour.
        for feature in [0x01, 0x06, 0x07, 0x08, 0x09, 0x0b, 0x0d, 0x0f, 0x16, 0x80, 0x84] {
            assert_eq!(verdict(SET_FEATURES, feature | 1 << 31), Verdict::Never, "{feature:#x}");
        }
        assert!(!Verdict::Never.is_allowed(Access::Change));
    }

    #[test]
    fn commands_that_change_need_the_creators_flag() {
        for (opcode, cdw10) in
            [(0x80, 0), (0x84, 2), (0x10, 0), (0x11, 0), (0x14, 2), (0x81, 0), (0xc1, 0), (0x09, 0x04)]
        {
            let verdict = verdict(opcode, cdw10);
            assert!(!verdict.is_allowed(Access::Read) && verdict.is_allowed(Access::Change), "{opcode:#x}");
        }
        for opcode in [0x02, 0x06, 0x0a, 0x82, 0x86] {
            assert!(verdict(opcode, 0).is_allowed(Access::Read));
        }
        assert!(!may_destroy(0x14) && may_destroy(0x80));
    }

    #[test]
    fn the_length_of_a_transfer_follows_from_the_command() {
        assert_eq!(transfer(GET_LOG_PAGE, &[1023 << 16 | 2, 0, 0, 0, 0, 0]), 4096);
        assert_eq!(transfer(GET_LOG_PAGE, &[0xffff << 16, 0xffff, 0, 0, 0, 0]), 1 << 34);
        assert_eq!(transfer(FIRMWARE_DOWNLOAD, &[u32::MAX, 0, 0, 0, 0, 0]), 1 << 34);
        assert_eq!(transfer(SECURITY_RECEIVE, &[0, 512, 0, 0, 0, 0]), 512);
        assert_eq!(transfer(IDENTIFY, &[u32::MAX; 6]), 0);
    }
}
