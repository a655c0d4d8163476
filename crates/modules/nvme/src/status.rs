//! What a controller's status means for a request. Pure; reactor context.

use aryk_bdev::Status;
use aryk_nvme::errors::{Class, classify, retry_harmless_after};
use aryk_nvme::spec::status;

/// What to do with a command that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The request ends.
    Done(Status),
    /// The same command may succeed after so many nanoseconds; otherwise the request ends with this status.
    Retry(u64, Status),
    /// The controller has lost its state: it is reset, and the request ends with this status.
    Reset(Status),
}

/// The shortest time between two attempts of a command whose controller asks for no delay.
pub(crate) const RETRY_DELAY_MIN: u64 = 1_000_000;

/// Decides by the status of a command. `delays` are the controller's CRDT1 to CRDT3. The longest delay is `delay_max`, in
/// nanoseconds: a request waits between two attempts no longer than for an answer.
pub(crate) fn decide(status: status::Status, delays: [u16; 3], delay_max: u64) -> Outcome {
    if status.is_success() {
        return Outcome::Done(Status::Ok);
    }
    let verdict = classify(status, delays);
    let end = match verdict.class {
        Class::Success => Status::Ok,
        Class::Miscompare => Status::Miscompare,
        Class::Unsupported => Status::Unsupported,
        Class::OutOfRange => Status::OutOfRange,
        Class::NamespaceGone => Status::Removed,
        Class::NoSpace => Status::NoSpace,
        Class::WriteProtected => Status::ReadOnly,
        Class::Reservation => Status::ReservationConflict,
        Class::Locked => Status::AccessDenied,
        Class::Aborted => Status::Aborted,
        Class::Fatal => return Outcome::Reset(Status::Aborted),
        // The store failed: also where the controller refuses a command whose fields were checked against its claims, or where
        // whether the command had an effect is not known.
        Class::Retry
        | Class::Media
        | Class::Integrity
        | Class::Refused
        | Class::Path
        | Class::Internal
        | Class::Unknown => Status::Medium,
    };
    match verdict.retry_after {
        Some(delay) => Outcome::Retry(bounded(delay, delay_max), end),
        None => Outcome::Done(end),
    }
}

/// Decides about a command that changes nothing, after [`decide`]: it does no harm twice, also if the driver aborted it because
/// it was late.
pub(crate) fn decide_harmless(
    status: status::Status,
    delays: [u16; 3],
    delay_max: u64,
    outcome: Outcome,
) -> Outcome {
    let Outcome::Done(end) = outcome else { return outcome };
    let retry_after = match status.code() {
        status::Code::ABORT_REQUESTED => Some(RETRY_DELAY_MIN),
        _ => retry_harmless_after(status, delays),
    };
    retry_after.map_or(outcome, |delay| Outcome::Retry(bounded(delay, delay_max), end))
}

/// The time until a command is tried again.
fn bounded(delay: u64, delay_max: u64) -> u64 {
    delay.min(delay_max).max(RETRY_DELAY_MIN)
}

/// The errno by which operators know a failure of this kind.
pub(crate) const fn errno(status: Status) -> i32 {
    use rustix::io::Errno;
    match status {
        Status::NoSpace => Errno::NOSPC,
        Status::ReadOnly => Errno::ROFS,
        Status::Unsupported => Errno::OPNOTSUPP,
        Status::Removed => Errno::NODEV,
        Status::Aborted => Errno::CANCELED,
        Status::OutOfRange | Status::Invalid => Errno::INVAL,
        Status::Miscompare => Errno::ILSEQ,
        // As the kernel reports reservation conflicts.
        Status::ReservationConflict => Errno::BADE,
        Status::AccessDenied => Errno::ACCESS,
        Status::Ok | Status::Medium => Errno::IO,
    }
    .raw_os_error()
}

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_nvme::spec::status::Code;

    fn of(code: Code, flags: u16) -> Outcome {
        decide(status::Status::new(flags | code.0), [1, 299, 3000], 30_000_000_000)
    }

    #[test]
    fn retries_wait_as_the_controller_asks_within_bounds() {
        assert_eq!(of(Code::SUCCESS, 0), Outcome::Done(Status::Ok));
        let retry = |crd: u16| of(Code::NAMESPACE_NOT_READY, crd << 11);
        assert_eq!(retry(0), Outcome::Retry(RETRY_DELAY_MIN, Status::Medium));
        assert_eq!(retry(1), Outcome::Retry(100_000_000, Status::Medium));
        assert_eq!(retry(2), Outcome::Retry(29_900_000_000, Status::Medium));
        assert_eq!(retry(3), Outcome::Retry(30_000_000_000, Status::Medium), "no longer than for an answer");
        assert_eq!(of(Code::NAMESPACE_NOT_READY, 1 << 14), Outcome::Done(Status::Medium), "DNR");
    }

    #[test]
    fn media_errors_and_unknown_codes_end_the_request() {
        assert_eq!(of(Code::UNRECOVERED_READ_ERROR, 0), Outcome::Done(Status::Medium));
        assert_eq!(of(Code(0x7ff), 0), Outcome::Done(Status::Medium));
        assert_eq!(of(Code::COMPARE_FAILURE, 0), Outcome::Done(Status::Miscompare));
        assert_eq!(of(Code::CID_CONFLICT, 0), Outcome::Reset(Status::Aborted));
        assert_eq!(of(Code::RESERVATION_CONFLICT, 0), Outcome::Done(Status::ReservationConflict));
        for code in [Code::ACCESS_DENIED, Code::OPERATION_DENIED, Code::PROHIBITED_BY_LOCKDOWN] {
            assert_eq!(of(code, 0), Outcome::Done(Status::AccessDenied), "{code:?}");
        }
    }
}
