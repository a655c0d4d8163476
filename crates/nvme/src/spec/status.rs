//! Status codes. NVMe 2.0 §3.3.3.2.1; NVM Command Set 1.0 §3.1.2; Zoned Namespace Command Set 1.1 for zones.

use std::fmt;

/// The status field of a completion without the phase tag: SC, SCT, CRD, M and DNR.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Status(u16);

impl Status {
    /// The status with these 15 bits.
    pub const fn new(bits: u16) -> Self {
        Self(bits & 0x7fff)
    }

    /// The 15 bits.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// SCT and SC.
    pub const fn code(self) -> Code {
        Code(self.0 & 0x7ff)
    }

    /// Whether SCT and SC are 0.
    pub const fn is_success(self) -> bool {
        self.code().0 == 0
    }

    /// CRD: 0, or the number (1 to 3) of the identify field CRDT with the delay before a retry.
    pub const fn crd(self) -> u8 {
        (self.0 >> 11) as u8 & 3
    }

    /// Sets CRD, 0 to 3.
    #[must_use]
    pub const fn with_crd(self, crd: u8) -> Self {
        Self(self.0 & !0x1800 | (crd as u16 & 3) << 11)
    }

    /// M: the Error Information log has more about this.
    pub const fn has_more(self) -> bool {
        self.0 & 0x2000 != 0
    }

    /// Sets DNR.
    #[must_use]
    pub const fn as_final(self) -> Self {
        Self(self.0 | 0x4000)
    }

    /// DNR: the same command would fail again.
    pub const fn is_final(self) -> bool {
        self.0 & 0x4000 != 0
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = self.code();
        write!(f, "{} (SCT {:X}h SC {:02X}h", code.name(), code.sct(), code.sc())?;
        if self.crd() != 0 {
            write!(f, ", CRD {}", self.crd())?;
        }
        f.write_str(if self.is_final() { ", DNR)" } else { ")" })
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A status code with its type: SCT in bits 8 to 10, SC in bits 0 to 7.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Code(pub u16);

impl Code {
    /// SCT: 0 generic, 1 command specific, 2 media and data integrity, 3 path related, 7 vendor specific.
    pub const fn sct(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// SC.
    pub const fn sc(self) -> u8 {
        self.0 as u8
    }

    /// The status field with this code, and all other bits 0.
    pub const fn status(self) -> Status {
        Status::new(self.0)
    }

    /// The kind that SCT names.
    pub const fn code_type(self) -> CodeType {
        match self.sct() {
            0 => CodeType::Generic,
            1 => CodeType::CommandSpecific,
            2 => CodeType::Media,
            3 => CodeType::Path,
            7 => CodeType::VendorSpecific,
            _ => CodeType::Reserved,
        }
    }
}

/// Status Code Type. NVMe 2.0 §3.3.3.2.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeType {
    /// Of all commands.
    Generic,
    /// Of one command.
    CommandSpecific,
    /// Media and data integrity errors.
    Media,
    /// Path related.
    Path,
    /// The vendor's.
    VendorSpecific,
    /// A value that the specification reserves.
    Reserved,
}

impl CodeType {
    /// All types; `type as usize` is the index.
    pub const ALL: [Self; 6] =
        [Self::Generic, Self::CommandSpecific, Self::Media, Self::Path, Self::VendorSpecific, Self::Reserved];

    /// The name in counters.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Generic => "generic",
            Self::CommandSpecific => "command_specific",
            Self::Media => "media",
            Self::Path => "path",
            Self::VendorSpecific => "vendor_specific",
            Self::Reserved => "reserved",
        }
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:03X}h)", self.name(), self.0)
    }
}

macro_rules! codes {
    ($($name:ident = $value:literal $text:literal;)*) => {
        #[expect(missing_docs, reason = "the names are the specification's")]
        impl Code {
            $(pub const $name: Self = Self($value);)*

            /// Every code that this crate knows.
            pub const KNOWN: &[Self] = &[$(Self::$name),*];

            /// The specification's name.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                    _ if self.sct() == 7 => "Vendor Specific",
                    _ => "Unknown Status",
                }
            }
        }
    };
}

codes! {
    SUCCESS = 0x000 "Successful Completion";
    INVALID_OPCODE = 0x001 "Invalid Command Opcode";
    INVALID_FIELD = 0x002 "Invalid Field in Command";
    CID_CONFLICT = 0x003 "Command ID Conflict";
    DATA_TRANSFER_ERROR = 0x004 "Data Transfer Error";
    POWER_LOSS = 0x005 "Commands Aborted due to Power Loss Notification";
    INTERNAL_ERROR = 0x006 "Internal Error";
    ABORT_REQUESTED = 0x007 "Command Abort Requested";
    SQ_DELETED = 0x008 "Command Aborted due to SQ Deletion";
    FUSED_FAILED = 0x009 "Command Aborted due to Failed Fused Command";
    FUSED_MISSING = 0x00a "Command Aborted due to Missing Fused Command";
    INVALID_NAMESPACE_OR_FORMAT = 0x00b "Invalid Namespace or Format";
    COMMAND_SEQUENCE_ERROR = 0x00c "Command Sequence Error";
    INVALID_SGL_SEGMENT = 0x00d "Invalid SGL Segment Descriptor";
    INVALID_SGL_COUNT = 0x00e "Invalid Number of SGL Descriptors";
    SGL_DATA_LENGTH_INVALID = 0x00f "Data SGL Length Invalid";
    SGL_METADATA_LENGTH_INVALID = 0x010 "Metadata SGL Length Invalid";
    SGL_TYPE_INVALID = 0x011 "SGL Descriptor Type Invalid";
    INVALID_CMB_USE = 0x012 "Invalid Use of Controller Memory Buffer";
    PRP_OFFSET_INVALID = 0x013 "PRP Offset Invalid";
    ATOMIC_WRITE_UNIT_EXCEEDED = 0x014 "Atomic Write Unit Exceeded";
    OPERATION_DENIED = 0x015 "Operation Denied";
    SGL_OFFSET_INVALID = 0x016 "SGL Offset Invalid";
    HOST_ID_INCONSISTENT = 0x018 "Host Identifier Inconsistent Format";
    KEEP_ALIVE_EXPIRED = 0x019 "Keep Alive Timer Expired";
    KEEP_ALIVE_INVALID = 0x01a "Keep Alive Timeout Invalid";
    PREEMPTED = 0x01b "Command Aborted due to Preempt and Abort";
    SANITIZE_FAILED = 0x01c "Sanitize Failed";
    SANITIZE_IN_PROGRESS = 0x01d "Sanitize In Progress";
    SGL_GRANULARITY_INVALID = 0x01e "SGL Data Block Granularity Invalid";
    NOT_SUPPORTED_IN_CMB = 0x01f "Command Not Supported for Queue in CMB";
    NAMESPACE_WRITE_PROTECTED = 0x020 "Namespace is Write Protected";
    COMMAND_INTERRUPTED = 0x021 "Command Interrupted";
    TRANSIENT_TRANSPORT_ERROR = 0x022 "Transient Transport Error";
    PROHIBITED_BY_LOCKDOWN = 0x023 "Command Prohibited by Command and Feature Lockdown";
    ADMIN_MEDIA_NOT_READY = 0x024 "Admin Command Media Not Ready";
    LBA_OUT_OF_RANGE = 0x080 "LBA Out of Range";
    CAPACITY_EXCEEDED = 0x081 "Capacity Exceeded";
    NAMESPACE_NOT_READY = 0x082 "Namespace Not Ready";
    RESERVATION_CONFLICT = 0x083 "Reservation Conflict";
    FORMAT_IN_PROGRESS = 0x084 "Format In Progress";
    CQ_INVALID = 0x100 "Completion Queue Invalid";
    INVALID_QUEUE_ID = 0x101 "Invalid Queue Identifier";
    INVALID_QUEUE_SIZE = 0x102 "Invalid Queue Size";
    ABORT_LIMIT_EXCEEDED = 0x103 "Abort Command Limit Exceeded";
    ASYNC_EVENT_LIMIT_EXCEEDED = 0x105 "Asynchronous Event Request Limit Exceeded";
    INVALID_FIRMWARE_SLOT = 0x106 "Invalid Firmware Slot";
    INVALID_FIRMWARE_IMAGE = 0x107 "Invalid Firmware Image";
    INVALID_INTERRUPT_VECTOR = 0x108 "Invalid Interrupt Vector";
    INVALID_LOG_PAGE = 0x109 "Invalid Log Page";
    INVALID_FORMAT = 0x10a "Invalid Format";
    FIRMWARE_NEEDS_CONVENTIONAL_RESET = 0x10b "Firmware Activation Requires Conventional Reset";
    INVALID_QUEUE_DELETION = 0x10c "Invalid Queue Deletion";
    FEATURE_NOT_SAVEABLE = 0x10d "Feature Identifier Not Saveable";
    FEATURE_NOT_CHANGEABLE = 0x10e "Feature Not Changeable";
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10f "Feature Not Namespace Specific";
    FIRMWARE_NEEDS_SUBSYSTEM_RESET = 0x110 "Firmware Activation Requires NVM Subsystem Reset";
    FIRMWARE_NEEDS_CONTROLLER_RESET = 0x111 "Firmware Activation Requires Controller Level Reset";
    FIRMWARE_NEEDS_MORE_TIME = 0x112 "Firmware Activation Requires Maximum Time Violation";
    FIRMWARE_PROHIBITED = 0x113 "Firmware Activation Prohibited";
    OVERLAPPING_RANGE = 0x114 "Overlapping Range";
    NAMESPACE_CAPACITY = 0x115 "Namespace Insufficient Capacity";
    NAMESPACE_ID_UNAVAILABLE = 0x116 "Namespace Identifier Unavailable";
    NAMESPACE_ALREADY_ATTACHED = 0x118 "Namespace Already Attached";
    NAMESPACE_PRIVATE = 0x119 "Namespace Is Private";
    NAMESPACE_NOT_ATTACHED = 0x11a "Namespace Not Attached";
    THIN_PROVISIONING = 0x11b "Thin Provisioning Not Supported";
    CONTROLLER_LIST_INVALID = 0x11c "Controller List Invalid";
    SELF_TEST_IN_PROGRESS = 0x11d "Device Self-test In Progress";
    BOOT_PARTITION_PROTECTED = 0x11e "Boot Partition Write Prohibited";
    INVALID_CONTROLLER_ID = 0x11f "Invalid Controller Identifier";
    SANITIZE_PROHIBITED = 0x123 "Sanitize Prohibited While Persistent Memory Region is Enabled";
    NAMESPACE_ATTACHMENT_LIMIT = 0x127 "Namespace Attachment Limit Exceeded";
    COMMAND_SET_NOT_SUPPORTED = 0x129 "I/O Command Set Not Supported";
    COMMAND_SET_NOT_ENABLED = 0x12a "I/O Command Set Not Enabled";
    COMMAND_SET_INVALID = 0x12c "Invalid I/O Command Set";
    CONFLICTING_ATTRIBUTES = 0x180 "Conflicting Attributes";
    INVALID_PROTECTION_INFORMATION = 0x181 "Invalid Protection Information";
    READ_ONLY_RANGE = 0x182 "Attempted Write to Read Only Range";
    COMMAND_SIZE_LIMIT = 0x183 "Command Size Limit Exceeded";
    ZONE_BOUNDARY = 0x1b8 "Zoned Boundary Error";
    ZONE_FULL = 0x1b9 "Zone Is Full";
    ZONE_READ_ONLY = 0x1ba "Zone Is Read Only";
    ZONE_OFFLINE = 0x1bb "Zone Is Offline";
    ZONE_INVALID_WRITE = 0x1bc "Zone Invalid Write";
    WRITE_FAULT = 0x280 "Write Fault";
    UNRECOVERED_READ_ERROR = 0x281 "Unrecovered Read Error";
    GUARD_CHECK = 0x282 "End-to-end Guard Check Error";
    APPLICATION_TAG_CHECK = 0x283 "End-to-end Application Tag Check Error";
    REFERENCE_TAG_CHECK = 0x284 "End-to-end Reference Tag Check Error";
    COMPARE_FAILURE = 0x285 "Compare Failure";
    ACCESS_DENIED = 0x286 "Access Denied";
    DEALLOCATED_BLOCK = 0x287 "Deallocated or Unwritten Logical Block";
    STORAGE_TAG_CHECK = 0x288 "End-to-End Storage Tag Check Error";
    INTERNAL_PATH_ERROR = 0x300 "Internal Path Error";
    ANA_PERSISTENT_LOSS = 0x301 "Asymmetric Access Persistent Loss";
    ANA_INACCESSIBLE = 0x302 "Asymmetric Access Inaccessible";
    ANA_TRANSITION = 0x303 "Asymmetric Access Transition";
    CONTROLLER_PATHING_ERROR = 0x360 "Controller Pathing Error";
    HOST_PATHING_ERROR = 0x370 "Host Pathing Error";
    ABORTED_BY_HOST = 0x371 "Command Aborted By Host";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_prints_what_an_operator_needs() {
        let status = Status::new(0x4000 | 2 << 11 | 0x281);
        assert_eq!(status.to_string(), "Unrecovered Read Error (SCT 2h SC 81h, CRD 2, DNR)");
        assert_eq!(Status::new(0x7c0).to_string(), "Vendor Specific (SCT 7h SC C0h)");
        assert_eq!(Status::new(0x0ff).to_string(), "Unknown Status (SCT 0h SC FFh)");
    }

    #[test]
    fn every_code_has_a_type() {
        let types = [0x080, 0x180, 0x281, 0x370, 0x7c0, 0x401, 0x6ff].map(|code| Code(code).code_type());
        assert_eq!(types[..6], CodeType::ALL);
        assert_eq!(types[6], CodeType::Reserved);
        assert!(CodeType::ALL.into_iter().enumerate().all(|(index, of)| of as usize == index));
    }

    #[test]
    fn no_code_is_listed_twice() {
        let mut codes: Vec<u16> = Code::KNOWN.iter().map(|code| code.0).collect();
        codes.dedup();
        assert!(codes.is_sorted() && codes.len() == Code::KNOWN.len());
    }
}
