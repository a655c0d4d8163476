//! Log pages. NVMe 2.0 §5.16.1. Raw where a structure has the specification's names, decoded otherwise.

use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::spec::identify::text;
use crate::spec::status::{Code, Status};

/// Error Information.
pub const ERROR_INFORMATION: u8 = 0x01;
/// SMART / Health Information.
pub const SMART: u8 = 0x02;
/// Firmware Slot Information.
pub const FIRMWARE_SLOT: u8 = 0x03;
/// Changed Namespace List.
pub const CHANGED_NAMESPACES: u8 = 0x04;
/// Asymmetric Namespace Access.
pub const ANA: u8 = 0x0c;
/// Discovery.
pub const DISCOVERY: u8 = 0x70;
/// Reservation Notification.
pub const RESERVATION: u8 = 0x80;
/// Sanitize Status.
pub const SANITIZE_STATUS: u8 = 0x81;

/// Zero degrees Celsius, in the unit of temperatures.
const KELVIN: i32 = 273;

/// SMART / Health Information. NVMe 2.0 §5.16.1.3.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "the fields have the specification's names")]
pub struct SmartLog {
    pub critical_warning: u8,
    pub composite_temperature: U16,
    pub available_spare: u8,
    pub available_spare_threshold: u8,
    pub percentage_used: u8,
    pub endurance_group_warning: u8,
    reserved_7: [u8; 25],
    pub data_units_read: U128,
    pub data_units_written: U128,
    pub host_reads: U128,
    pub host_writes: U128,
    pub busy_minutes: U128,
    pub power_cycles: U128,
    pub power_on_hours: U128,
    pub unsafe_shutdowns: U128,
    pub media_errors: U128,
    pub error_log_entries: U128,
    pub warning_temperature_minutes: U32,
    pub critical_temperature_minutes: U32,
    pub temperature_sensors: [U16; 8],
    pub thermal_transitions: [U32; 2],
    pub thermal_seconds: [U32; 2],
    reserved_232: [u8; 280],
}

const _: () = assert!(size_of::<SmartLog>() == 512);

/// A bit of the SMART log's critical warning. NVMe 2.0 §5.16.1.3.
pub const CRITICAL_WARNINGS: [&str; 6] = [
    "available spare is below its threshold",
    "temperature is outside of its thresholds",
    "reliability is degraded",
    "media is read-only",
    "volatile memory backup failed",
    "persistent memory region is unreliable",
];

impl SmartLog {
    /// Decodes the log page; `None` if it is shorter than its fields.
    pub fn decode(log: &[u8]) -> Option<Self> {
        Self::read_from_prefix(log).ok().map(|(smart, _)| smart)
    }

    /// The composite temperature in degrees Celsius; `None` where the controller reports 0 kelvin.
    pub fn celsius(&self) -> Option<i32> {
        let kelvin = i32::from(self.composite_temperature.get());
        (kelvin != 0).then_some(kelvin - KELVIN)
    }

    /// The names of the critical warnings that are set.
    pub fn warnings(&self) -> impl Iterator<Item = &'static str> {
        let bits = self.critical_warning;
        CRITICAL_WARNINGS
            .iter()
            .enumerate()
            .filter(move |(bit, _)| bits >> bit & 1 != 0)
            .map(|(_, name)| *name)
    }
}

/// One entry of the Error Information log. NVMe 2.0 §5.16.1.2.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
#[expect(missing_docs, reason = "the fields have the specification's names")]
pub struct ErrorEntry {
    pub error_count: U64,
    pub sqid: U16,
    pub cid: U16,
    pub status_field: U16,
    pub parameter_error_location: U16,
    pub lba: U64,
    pub nsid: U32,
    pub vendor_log_page: u8,
    pub trtype: u8,
    reserved_30: [u8; 2],
    pub command_specific: U64,
    pub transport_specific: U16,
    reserved_42: [u8; 22],
}

const _: () = assert!(size_of::<ErrorEntry>() == 64);

impl ErrorEntry {
    /// The status of the failed command; bit 0 of the field is the phase tag.
    pub fn status(&self) -> Status {
        Status::new(self.status_field.get() >> 1)
    }

    /// The block that the entry names for the failure of a command that concerned `blocks` blocks from `first` on; `None` if the
    /// entry is another command's.
    pub fn block_of(&self, sqid: u16, cid: u16, code: Code, first: u64, blocks: u64) -> Option<u64> {
        let is_it = (self.sqid.get(), self.cid.get(), self.status().code()) == (sqid, cid, code);
        let offset = self.lba.get().checked_sub(first)?;
        (is_it && offset < blocks).then_some(self.lba.get())
    }

    /// The entries of a log that describe an error: those with an error count.
    pub fn decode(log: &[u8]) -> impl Iterator<Item = Self> {
        let entries = log.as_chunks::<64>().0.iter();
        entries
            .filter_map(|bytes| Self::read_from_bytes(bytes).ok())
            .filter(|entry| entry.error_count.get() != 0)
    }
}

/// Firmware Slot Information, decoded. NVMe 2.0 §5.16.1.4.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirmwareSlots {
    /// The slot of the running firmware, 1 to 7; 0 where the controller reports none.
    pub active: u8,
    /// The slot of the firmware that the next reset activates, if any.
    pub next: Option<u8>,
    /// Revisions of slots 1 to 7; empty for an empty slot.
    pub revisions: [String; 7],
}

impl FirmwareSlots {
    /// Decodes the log page; `None` if it is shorter than its fields.
    pub fn decode(log: &[u8]) -> Option<Self> {
        let revisions = log.get(8..64)?.as_chunks::<8>().0;
        let afi = log[0];
        let next = afi >> 4 & 7;
        Some(Self {
            active: afi & 7,
            next: (next != 0).then_some(next),
            revisions: std::array::from_fn(|slot| text(&revisions[slot])),
        })
    }
}

/// The namespaces that the Changed Namespace List names. NVMe 2.0 §5.16.1.5.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangedNamespaces {
    /// These namespaces, at most 1,024.
    Some(Vec<u32>),
    /// More than the log has room for: examine all.
    All,
}

impl ChangedNamespaces {
    /// Decodes the log page, which ends with an ID of 0 or with the data.
    pub fn decode(log: &[u8]) -> Self {
        let ids = log.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id));
        let ids: Vec<u32> = ids.take(1024).take_while(|&nsid| nsid != 0).collect();
        if ids.contains(&u32::MAX) { Self::All } else { Self::Some(ids) }
    }
}

/// The state of the last sanitize operation: SSTAT bits 0 to 2, and SPROG. NVMe 2.0 §5.16.1.25.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SanitizeState {
    /// The NVM subsystem has never been sanitized.
    Never,
    /// The last sanitize operation succeeded: no user data that was written before can be read.
    Done,
    /// A sanitize operation runs; `progress` of 65,536 parts are done.
    Running {
        /// SPROG.
        progress: u16,
    },
    /// The last sanitize operation failed: the controller refuses most commands.
    Failed,
    /// A state that the specification reserves.
    Unknown(u8),
}

/// Sanitize Status, decoded. NVMe 2.0 §5.16.1.25.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SanitizeStatus {
    /// The state.
    pub state: SanitizeState,
    /// SSTAT bits 3 to 7: completed passes of an overwrite.
    pub passes: u8,
    /// SSTAT bit 8: nothing was written since the operation, or since the manufacture.
    pub is_erased: bool,
    /// SCDW10: CDW10 of the command that started the operation.
    pub cdw10: u32,
    /// ETO, ETBE and ETCE: estimated seconds of an overwrite, a block erase and a crypto erase; `None` if not reported.
    pub seconds: [Option<u32>; 3],
}

impl SanitizeStatus {
    /// Decodes the log page; `None` if it is shorter than its fields.
    pub fn decode(log: &[u8]) -> Option<Self> {
        let words = log.first_chunk::<20>()?.as_chunks::<4>().0;
        let [first, cdw10, seconds @ ..] = std::array::from_fn::<_, 5, _>(|i| u32::from_le_bytes(words[i]));
        let status = first >> 16;
        let state = match status & 7 {
            0 => SanitizeState::Never,
            1 | 4 => SanitizeState::Done,
            2 => SanitizeState::Running { progress: first as u16 },
            3 => SanitizeState::Failed,
            other => SanitizeState::Unknown(other as u8),
        };
        let (passes, is_erased) = ((status >> 3 & 31) as u8, status & 1 << 8 != 0);
        let seconds = seconds.map(|seconds| (seconds != u32::MAX).then_some(seconds));
        Some(Self { state, passes, is_erased, cdw10, seconds })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::status::Code;

    #[test]
    fn smart_fields_are_where_the_specification_puts_them() {
        let mut bytes = [0; 512];
        (bytes[0], bytes[1], bytes[2], bytes[3]) = (0b1001, 0x3a, 0x01, 99);
        bytes[160] = 5;
        bytes[200] = 1;
        let log = SmartLog::read_from_bytes(&bytes).unwrap();
        assert_eq!((log.celsius(), log.available_spare, log.media_errors.get()), (Some(41), 99, 5));
        assert_eq!(log.temperature_sensors[0].get(), 1);
        assert!(log.warnings().eq([CRITICAL_WARNINGS[0], CRITICAL_WARNINGS[3]]));
        assert_eq!(SmartLog::read_from_bytes(&[0; 512]).unwrap().celsius(), None);
    }

    #[test]
    fn only_entries_with_a_count_are_errors() {
        let mut bytes = [0; 192];
        (bytes[64], bytes[72], bytes[74]) = (3, 1, 9);
        bytes[76..78].copy_from_slice(&(0x281_u16 << 1 | 1).to_le_bytes());
        bytes[80] = 42;
        let entries: Vec<_> = ErrorEntry::decode(&bytes).collect();
        assert_eq!(entries.len(), 1);
        assert_eq!((entries[0].sqid.get(), entries[0].cid.get(), entries[0].lba.get()), (1, 9, 42));
        assert_eq!(entries[0].status().code(), Code::UNRECOVERED_READ_ERROR);
        let block = |sqid, cid, code, first, blocks| entries[0].block_of(sqid, cid, code, first, blocks);
        let code = Code::UNRECOVERED_READ_ERROR;
        assert_eq!((block(1, 9, code, 40, 3), block(1, 9, code, 42, 1)), (Some(42), Some(42)));
        for (sqid, cid, code, first, blocks) in [
            (2, 9, code, 40, 3),
            (1, 8, code, 40, 3),
            (1, 9, Code::WRITE_FAULT, 40, 3),
            (1, 9, code, 43, 3),
            (1, 9, code, 40, 2),
        ] {
            assert_eq!(block(sqid, cid, code, first, blocks), None);
        }
    }

    #[test]
    fn firmware_slots_and_namespaces_are_decoded() {
        let mut bytes = [0; 512];
        bytes[0] = 0x21;
        bytes[8..16].copy_from_slice(b"1.0     ");
        let slots = FirmwareSlots::decode(&bytes).unwrap();
        assert_eq!((slots.active, slots.next, slots.revisions[0].as_str()), (1, Some(2), "1.0"));
        assert_eq!(FirmwareSlots::decode(&bytes[..63]), None);
        assert_eq!(
            ChangedNamespaces::decode(&[1, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]),
            ChangedNamespaces::Some(vec![1, 7])
        );
        assert_eq!(ChangedNamespaces::decode(&[0xff; 4096]), ChangedNamespaces::All);
        assert_eq!(
            ChangedNamespaces::decode(&[1; 1 << 16]),
            ChangedNamespaces::Some(vec![0x0101_0101; 1024])
        );
    }

    #[test]
    fn sanitize_status_has_state_progress_passes_and_estimates() {
        let mut bytes = [0; 512];
        // Three of 16 passes are done, half of the fourth.
        bytes[..8].copy_from_slice(&[0, 128, 2 | 3 << 3, 0, 3 | 1 << 3, 0, 0, 0]);
        bytes[8..20].copy_from_slice(&[0x10, 0x0e, 0, 0, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0]);
        let status = SanitizeStatus::decode(&bytes).unwrap();
        assert_eq!(status.state, SanitizeState::Running { progress: 0x8000 });
        assert_eq!((status.passes, status.is_erased, status.cdw10), (3, false, 11));
        assert_eq!(status.seconds, [Some(3600), None, Some(2)]);
        (bytes[2], bytes[3]) = (1, 1);
        let done = SanitizeStatus::decode(&bytes).unwrap();
        assert!(done.state == SanitizeState::Done && done.is_erased);
        for (sstat, state) in [
            (0, SanitizeState::Never),
            (3, SanitizeState::Failed),
            (4, SanitizeState::Done),
            (7, SanitizeState::Unknown(7)),
        ] {
            bytes[2] = sstat;
            assert_eq!(SanitizeStatus::decode(&bytes).unwrap().state, state);
        }
        assert_eq!(SanitizeStatus::decode(&bytes[..19]), None);
    }
}
