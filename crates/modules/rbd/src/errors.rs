//! What a result of librbd means for a request. Any context.

use aryk_bdev::Status;
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};

/// A kind of failure, by what an operator does about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// The cluster has excluded this client (ESHUTDOWN): the request had no effect.
    Blocklisted,
    /// The cluster did not answer in the time that the client's options set. The request may have an effect later.
    TimedOut,
    /// The image or its pool is gone.
    Gone,
    /// The cluster or the pool is full.
    NoSpace,
    /// The image is open for reads only, or is not the primary of a mirror.
    ReadOnly,
    /// The client has no right to do this.
    Denied,
    /// The image ends before the end of the request.
    BeyondEnd,
    /// The image does not support the operation.
    Unsupported,
    /// The store failed.
    Failed,
    /// The module does not know this errno: whether the request had an effect is not known.
    Unknown,
}

impl Class {
    /// All kinds, each at its own index.
    pub const ALL: [Self; 10] = [
        Self::Blocklisted,
        Self::TimedOut,
        Self::Gone,
        Self::NoSpace,
        Self::ReadOnly,
        Self::Denied,
        Self::BeyondEnd,
        Self::Unsupported,
        Self::Failed,
        Self::Unknown,
    ];

    /// The kind's name in statistics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blocklisted => "blocklisted",
            Self::TimedOut => "timed_out",
            Self::Gone => "gone",
            Self::NoSpace => "no_space",
            Self::ReadOnly => "read_only",
            Self::Denied => "denied",
            Self::BeyondEnd => "beyond_end",
            Self::Unsupported => "unsupported",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }

    pub(crate) fn of(errno: Errno) -> Self {
        match errno {
            Errno::SHUTDOWN => Self::Blocklisted,
            Errno::TIMEDOUT => Self::TimedOut,
            Errno::NOENT | Errno::NODEV | Errno::NXIO => Self::Gone,
            Errno::NOSPC | Errno::DQUOT => Self::NoSpace,
            Errno::ROFS => Self::ReadOnly,
            Errno::PERM | Errno::ACCESS => Self::Denied,
            // librbd checks nothing but the range of a request that has the right form.
            Errno::INVAL => Self::BeyondEnd,
            Errno::NOTSUP | Errno::NOSYS => Self::Unsupported,
            Errno::IO | Errno::BADMSG | Errno::NOMEM | Errno::BUSY | Errno::AGAIN => Self::Failed,
            _ => Self::Unknown,
        }
    }

    /// The status of a request that has failed so.
    pub(crate) const fn status(self) -> Status {
        match self {
            Self::Gone => Status::Removed,
            Self::NoSpace => Status::NoSpace,
            Self::ReadOnly => Status::ReadOnly,
            Self::Denied => Status::AccessDenied,
            Self::BeyondEnd => Status::OutOfRange,
            Self::Unsupported => Status::Unsupported,
            // A request that was sent to an excluded client, or whose effect is not known, must look like a failed store.
            Self::Blocklisted | Self::TimedOut | Self::Failed | Self::Unknown => Status::Medium,
        }
    }
}

/// The errno of a negative result.
pub(crate) fn errno(result: i64) -> Errno {
    const UNKNOWN: i32 = 4095;
    let raw = i32::try_from(result.wrapping_neg()).ok().filter(|raw| (1..UNKNOWN).contains(raw));
    Errno::from_raw_os_error(raw.unwrap_or(UNKNOWN))
}

/// Numbers of failed requests, in the order of [`Class::ALL`].
pub type ErrorCounts = [u64; Class::ALL.len()];

/// Counts failed requests.
#[derive(Debug, Default)]
pub(crate) struct Counters([AtomicU64; Class::ALL.len()]);

impl Counters {
    pub fn count(&self, class: Class) {
        self.0[class as usize].fetch_add(1, Ordering::Relaxed);
    }

    pub fn read(&self) -> ErrorCounts {
        self.0.each_ref().map(|count| count.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_errno_has_a_class_and_unknown_ones_are_failures_of_the_store() {
        for (raw, class, status) in [
            (108, Class::Blocklisted, Status::Medium),
            (110, Class::TimedOut, Status::Medium),
            (2, Class::Gone, Status::Removed),
            (28, Class::NoSpace, Status::NoSpace),
            (122, Class::NoSpace, Status::NoSpace),
            (30, Class::ReadOnly, Status::ReadOnly),
            (1, Class::Denied, Status::AccessDenied),
            (22, Class::BeyondEnd, Status::OutOfRange),
            (95, Class::Unsupported, Status::Unsupported),
            (5, Class::Failed, Status::Medium),
            (133, Class::Unknown, Status::Medium),
        ] {
            let found = Class::of(errno(-raw));
            assert_eq!((found, found.status()), (class, status), "{raw}");
        }
        for odd in [i64::MIN, -i64::from(i32::MAX), -5000] {
            assert_eq!(Class::of(errno(odd)).status(), Status::Medium);
        }
    }

    #[test]
    fn classes_are_counted_at_their_own_indexes() {
        assert!(Class::ALL.iter().enumerate().all(|(index, class)| *class as usize == index));
        let counters = Counters::default();
        counters.count(Class::Denied);
        assert_eq!(counters.read()[Class::Denied as usize], 1);
        assert_eq!(counters.read().iter().sum::<u64>(), 1);
    }
}
