//! How a request of the block layer ends, as a host sees it.

use aryk_bdev::{Op, Status};
use aryk_nvme::spec::status::{Code, Status as NvmeStatus};

/// SCT: the path fails the command.
const PATH_RELATED: u8 = 3;

/// The status of a command that is not executed. A host tries one again that the path has failed: on another path, or later.
pub(crate) const fn refusal(code: Code) -> NvmeStatus {
    match code.sct() {
        PATH_RELATED => code.status(),
        _ => code.status().as_final(),
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
    fn hosts_try_again_what_a_path_has_failed() {
        assert!(!refusal(Code::ANA_INACCESSIBLE).is_final());
        assert!(refusal(Code::INVALID_FIELD).is_final());
    }
}
