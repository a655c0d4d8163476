//! How a request of the block layer ends, as a host sees it, and when the host may try again.

use aryk_bdev::{Op, Status};
use aryk_nvme::spec::status::{Code, CodeType, Status as NvmeStatus};
use std::sync::atomic::{AtomicBool, Ordering};

/// The status of a command that is not executed. A host tries one again that the path has failed, on another path or later, and
/// one for which something is not ready yet.
pub(crate) fn refusal(code: Code) -> NvmeStatus {
    match code.code_type() == CodeType::Path || delay(code) > 0 {
        true => code.status(),
        false => code.status().as_final(),
    }
}

/// CRD: which of the controller's delays (CRDT1 to CRDT3) a host waits before it tries a command again. 0: the host need not
/// wait, or does not try again.
const fn delay(code: Code) -> u8 {
    match code {
        // The next attempt may succeed at once.
        Code::TRANSIENT_TRANSPORT_ERROR | Code::COMMAND_INTERRUPTED => 1,
        // The target, or another one, works on it.
        Code::NAMESPACE_NOT_READY | Code::ANA_TRANSITION => 2,
        // An operator changes it.
        Code::ANA_INACCESSIBLE => 3,
        _ => 0,
    }
}

/// Whether a host waits before it tries a command again (ACRE). Control sets it; the host's queues read it when a command fails.
#[derive(Debug, Default)]
pub(crate) struct RetryDelays(AtomicBool);

impl RetryDelays {
    pub(crate) fn enable(&self, is_enabled: bool) {
        self.0.store(is_enabled, Ordering::Relaxed);
    }

    /// The status with its delay, if the host waits.
    pub(crate) fn add(&self, status: NvmeStatus) -> NvmeStatus {
        match status.is_success() || status.is_final() || !self.0.load(Ordering::Relaxed) {
            true => status,
            false => status.with_crd(delay(status.code())),
        }
    }
}

/// The status of a command whose request has ended. A host may try again what has failed for want of an answer.
pub(crate) const fn of(status: Status, op: Op) -> NvmeStatus {
    let code = match (status, op) {
        (Status::Ok, _) => return NvmeStatus::new(0),
        (Status::Aborted, _) => return Code::ABORT_REQUESTED.status(),
        (Status::Removed, _) => Code::INVALID_NAMESPACE_OR_FORMAT,
        (Status::Invalid, _) => Code::INVALID_FIELD,
        (Status::OutOfRange, _) => Code::LBA_OUT_OF_RANGE,
        // A disk that others share, which copies, but not between ranges that overlap.
        (Status::Unsupported, Op::Copy) => Code::INVALID_FIELD,
        (Status::Unsupported, _) => Code::INVALID_OPCODE,
        (Status::ReadOnly, _) => Code::NAMESPACE_WRITE_PROTECTED,
        (Status::NoSpace, _) => Code::CAPACITY_EXCEEDED,
        (Status::ReservationConflict, _) => Code::RESERVATION_CONFLICT,
        (Status::AccessDenied, _) => Code::ACCESS_DENIED,
        (Status::Miscompare, _) => Code::COMPARE_FAILURE,
        (Status::Medium, Op::Read | Op::Compare) => Code::UNRECOVERED_READ_ERROR,
        (Status::Medium, _) => Code::WRITE_FAULT,
    };
    code.status().as_final()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_try_again_what_a_path_has_failed_or_what_is_not_ready() {
        for code in [Code::ANA_PERSISTENT_LOSS, Code::ANA_INACCESSIBLE, Code::NAMESPACE_NOT_READY] {
            assert!(!refusal(code).is_final());
        }
        assert!(refusal(Code::INVALID_FIELD).is_final());
    }

    #[test]
    fn a_host_that_waits_is_told_how_long() {
        let delays = RetryDelays::default();
        let codes = [
            (Code::COMMAND_INTERRUPTED, 1),
            (Code::NAMESPACE_NOT_READY, 2),
            (Code::ANA_INACCESSIBLE, 3),
            (Code::ANA_PERSISTENT_LOSS, 0),
            (Code::INVALID_FIELD, 0),
            (Code::SUCCESS, 0),
        ];
        for is_enabled in [false, true] {
            delays.enable(is_enabled);
            for (code, crd) in codes {
                let status = delays.add(refusal(code));
                assert_eq!((status.code(), status.crd()), (code, if is_enabled { crd } else { 0 }));
            }
        }
    }
}
