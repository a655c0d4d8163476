//! What to do about each status code. Pure; any context.
//!
//! [`classify`] is one match in which every code of the specification has a place on purpose. A code that this crate does not
//! know counts as [`Class::Unknown`], the dangerous case: the command may have changed the media, and it is not tried again.

use crate::spec::status::{Code, Status};

/// Units of CRDT, in nanoseconds: 100 ms.
const CRDT_UNIT: u64 = 100_000_000;

/// Time before a retry while the controller is busy for long, where the status has no delay (CRD).
const LENGTHY: u64 = 1_000_000_000;

/// What a status means for the command's owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The command succeeded.
    Success,
    /// The command had no effect; the same command may succeed later.
    Retry,
    /// The media lost data, or could not be written: at the LBAs of the command. For SCSI, MEDIUM ERROR.
    Media,
    /// Compare found a difference.
    Miscompare,
    /// The protection information or the data in transit does not match.
    Integrity,
    /// The controller refuses this command with these fields: a bug of the driver, or a limit that the controller did not claim.
    Refused,
    /// The controller does not have this command or feature.
    Unsupported,
    /// The LBA is outside of the namespace, which may have shrunk.
    OutOfRange,
    /// The namespace is gone, or has another format.
    NamespaceGone,
    /// No space for the data of a thin namespace.
    NoSpace,
    /// The namespace, or this range, does not accept writes.
    WriteProtected,
    /// Another host holds a reservation.
    Reservation,
    /// The drive is locked (TCG Opal), or refuses access.
    Locked,
    /// The command was aborted; whether it had an effect is not known.
    Aborted,
    /// This path to the namespace does not work; another may.
    Path,
    /// The command failed inside of the controller or in transit; whether it had an effect is not known.
    Internal,
    /// The controller has lost its state or failed: reset it.
    Fatal,
    /// A code that this crate does not know.
    Unknown,
}

/// A classified status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// What the status means.
    pub class: Class,
    /// For how long to wait before the same command is tried again, in nanoseconds; `None` if it must not be tried again.
    pub retry_after: Option<u64>,
}

/// Classifies a status. `delays` are the controller's CRDT1 to CRDT3, in units of 100 ms. NVMe 2.0 §3.3.3.2.1.
///
/// DNR forbids every retry. CRD selects the delay.
pub fn classify(status: Status, delays: [u16; 3]) -> Verdict {
    let class = class_of(status.code());
    let may_retry = matches!(class, Class::Retry | Class::Path) && !status.is_final();
    Verdict { class, retry_after: may_retry.then(|| delay(status, delays)) }
}

/// For how long to wait before a command that changes nothing is tried again, in nanoseconds; `None` if it must not be tried
/// again.
///
/// Such a command does no harm twice: it is tried again also where whether it had an effect is not known, and where the
/// controller names a delay (CRD) for a command that failed. A failure of the media without a delay goes up at once: the drive
/// has tried often.
pub fn retry_harmless_after(status: Status, delays: [u16; 3]) -> Option<u64> {
    let Verdict { class, retry_after } = classify(status, delays);
    let may_retry = match class {
        Class::Internal | Class::Unknown => !status.is_final(),
        Class::Media | Class::Integrity => !status.is_final() && status.crd() != 0,
        _ => return retry_after,
    };
    may_retry.then(|| delay(status, delays))
}

/// The delay that a status names, in nanoseconds.
fn delay(status: Status, delays: [u16; 3]) -> u64 {
    match status.crd() {
        0 if is_lengthy(status.code()) => LENGTHY,
        0 => 0,
        n => u64::from(delays[usize::from(n) - 1]) * CRDT_UNIT,
    }
}

/// Whether the reason of a refusal lasts for seconds to hours.
const fn is_lengthy(code: Code) -> bool {
    matches!(code, Code::FORMAT_IN_PROGRESS | Code::SANITIZE_IN_PROGRESS | Code::SELF_TEST_IN_PROGRESS)
}

/// The class of a code, without regard to DNR.
#[expect(clippy::too_many_lines, reason = "one row for each code of the specification")]
const fn class_of(code: Code) -> Class {
    match code {
        Code::SUCCESS => Class::Success,

        // The command did not run, or its effect does not matter when it runs again.
        Code::NAMESPACE_NOT_READY
        | Code::ADMIN_MEDIA_NOT_READY
        | Code::COMMAND_INTERRUPTED
        | Code::TRANSIENT_TRANSPORT_ERROR
        | Code::FORMAT_IN_PROGRESS
        | Code::SANITIZE_IN_PROGRESS
        | Code::SELF_TEST_IN_PROGRESS
        | Code::ABORT_LIMIT_EXCEEDED
        | Code::ASYNC_EVENT_LIMIT_EXCEEDED => Class::Retry,

        Code::WRITE_FAULT | Code::UNRECOVERED_READ_ERROR | Code::DEALLOCATED_BLOCK => Class::Media,
        Code::COMPARE_FAILURE => Class::Miscompare,
        Code::GUARD_CHECK
        | Code::APPLICATION_TAG_CHECK
        | Code::REFERENCE_TAG_CHECK
        | Code::STORAGE_TAG_CHECK => Class::Integrity,

        Code::INVALID_OPCODE
        | Code::INVALID_LOG_PAGE
        | Code::COMMAND_SET_NOT_SUPPORTED
        | Code::COMMAND_SET_NOT_ENABLED
        | Code::COMMAND_SET_INVALID
        | Code::THIN_PROVISIONING
        | Code::FEATURE_NOT_SAVEABLE
        | Code::FEATURE_NOT_CHANGEABLE
        | Code::FEATURE_NOT_NAMESPACE_SPECIFIC
        | Code::NOT_SUPPORTED_IN_CMB
        // Linux' target also answers so to a command that its disk does not do.
        | Code::COMMAND_SIZE_LIMIT => Class::Unsupported,

        Code::INVALID_FIELD
        | Code::COMMAND_SEQUENCE_ERROR
        | Code::INVALID_SGL_SEGMENT
        | Code::INVALID_SGL_COUNT
        | Code::SGL_DATA_LENGTH_INVALID
        | Code::SGL_METADATA_LENGTH_INVALID
        | Code::SGL_TYPE_INVALID
        | Code::INVALID_CMB_USE
        | Code::PRP_OFFSET_INVALID
        | Code::ATOMIC_WRITE_UNIT_EXCEEDED
        | Code::SGL_OFFSET_INVALID
        | Code::HOST_ID_INCONSISTENT
        | Code::KEEP_ALIVE_INVALID
        | Code::SGL_GRANULARITY_INVALID
        | Code::CQ_INVALID
        | Code::INVALID_QUEUE_ID
        | Code::INVALID_QUEUE_SIZE
        | Code::INVALID_FIRMWARE_SLOT
        | Code::INVALID_FIRMWARE_IMAGE
        | Code::INVALID_INTERRUPT_VECTOR
        | Code::INVALID_FORMAT
        | Code::INVALID_QUEUE_DELETION
        | Code::FIRMWARE_NEEDS_CONVENTIONAL_RESET
        | Code::FIRMWARE_NEEDS_SUBSYSTEM_RESET
        | Code::FIRMWARE_NEEDS_CONTROLLER_RESET
        | Code::FIRMWARE_NEEDS_MORE_TIME
        | Code::FIRMWARE_PROHIBITED
        | Code::OVERLAPPING_RANGE
        | Code::NAMESPACE_ID_UNAVAILABLE
        | Code::NAMESPACE_ALREADY_ATTACHED
        | Code::NAMESPACE_PRIVATE
        | Code::NAMESPACE_NOT_ATTACHED
        | Code::CONTROLLER_LIST_INVALID
        | Code::INVALID_CONTROLLER_ID
        | Code::SANITIZE_PROHIBITED
        | Code::NAMESPACE_ATTACHMENT_LIMIT
        | Code::CONFLICTING_ATTRIBUTES
        | Code::INVALID_PROTECTION_INFORMATION
        | Code::ZONE_BOUNDARY
        | Code::ZONE_FULL
        | Code::ZONE_INVALID_WRITE => Class::Refused,

        Code::LBA_OUT_OF_RANGE => Class::OutOfRange,
        Code::INVALID_NAMESPACE_OR_FORMAT => Class::NamespaceGone,
        Code::CAPACITY_EXCEEDED | Code::NAMESPACE_CAPACITY => Class::NoSpace,
        Code::NAMESPACE_WRITE_PROTECTED
        | Code::READ_ONLY_RANGE
        | Code::BOOT_PARTITION_PROTECTED
        | Code::ZONE_READ_ONLY
        | Code::ZONE_OFFLINE => Class::WriteProtected,
        Code::RESERVATION_CONFLICT => Class::Reservation,
        // A locked Opal drive answers with either of the first two.
        Code::ACCESS_DENIED
        | Code::OPERATION_DENIED
        | Code::PROHIBITED_BY_LOCKDOWN
        | Code::SANITIZE_FAILED => Class::Locked,

        Code::ABORT_REQUESTED
        | Code::SQ_DELETED
        | Code::FUSED_FAILED
        | Code::FUSED_MISSING
        | Code::POWER_LOSS
        | Code::PREEMPTED
        | Code::ABORTED_BY_HOST => Class::Aborted,

        Code::INTERNAL_PATH_ERROR
        | Code::ANA_PERSISTENT_LOSS
        | Code::ANA_INACCESSIBLE
        | Code::ANA_TRANSITION
        | Code::CONTROLLER_PATHING_ERROR
        | Code::HOST_PATHING_ERROR => Class::Path,

        Code::DATA_TRANSFER_ERROR | Code::INTERNAL_ERROR => Class::Internal,
        // We and the controller do not agree on what is in flight: only a reset gives a known state.
        Code::CID_CONFLICT | Code::KEEP_ALIVE_EXPIRED => Class::Fatal,

        _ => Class::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_code_has_a_class_on_purpose() {
        for code in Code::KNOWN {
            assert_ne!(class_of(*code), Class::Unknown, "{code:?}");
        }
        let known = (0..0x800).filter(|&code| class_of(Code(code)) != Class::Unknown).count();
        assert_eq!(known, Code::KNOWN.len(), "a code has a class but no name");
        assert_eq!((0..0x800).filter(|&code| class_of(Code(code)) == Class::Success).count(), 1);
    }

    #[test]
    fn retries_obey_dnr_and_the_controllers_delay() {
        let delays = [1, 20, u16::MAX];
        let status = |crd: u16, dnr: u16, code: Code| Status::new(dnr << 14 | crd << 11 | code.0);
        let retry = |status| classify(status, delays).retry_after;
        assert_eq!(retry(status(0, 0, Code::NAMESPACE_NOT_READY)), Some(0));
        assert_eq!(retry(status(2, 0, Code::NAMESPACE_NOT_READY)), Some(2_000_000_000));
        assert_eq!(retry(status(3, 0, Code::INTERNAL_PATH_ERROR)), Some(6_553_500_000_000));
        assert_eq!(retry(status(2, 1, Code::NAMESPACE_NOT_READY)), None);
        assert_eq!(retry(status(0, 0, Code::SANITIZE_IN_PROGRESS)), Some(1_000_000_000), "not at once");
        assert_eq!(retry(status(1, 0, Code::FORMAT_IN_PROGRESS)), Some(100_000_000));
        for code in [Code::UNRECOVERED_READ_ERROR, Code::INTERNAL_ERROR, Code::ABORT_REQUESTED, Code(0x0ff)] {
            assert_eq!(retry(status(1, 0, code)), None, "{code:?}");
        }
        let harmless = |status| retry_harmless_after(status, delays);
        assert_eq!(harmless(status(0, 0, Code::INTERNAL_ERROR)), Some(0));
        assert_eq!(harmless(status(1, 0, Code(0x0ff))), Some(100_000_000));
        assert_eq!(harmless(status(0, 1, Code::INTERNAL_ERROR)), None, "DNR");
        assert_eq!(harmless(status(0, 0, Code::UNRECOVERED_READ_ERROR)), None);
        assert_eq!(harmless(status(2, 0, Code::UNRECOVERED_READ_ERROR)), Some(2_000_000_000));
        assert_eq!(harmless(status(1, 0, Code::COMPARE_FAILURE)), None);
        assert_eq!(harmless(status(1, 0, Code::NAMESPACE_NOT_READY)), Some(100_000_000));
    }
}
