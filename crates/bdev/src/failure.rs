//! What the stores of disks have failed: told to the log, as often as that bears, and kept for those who ask. Any context;
//! a reactor waits for nothing here.

use crate::Op;
use crate::bdev::lock;
use aryk_log_limit::{LogLimit, limited};
use std::io;
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, SystemTime};

/// A request that a disk's store has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The operation that failed.
    pub op: Op,
    /// The first block.
    pub lba: u64,
    /// How many blocks; a flush has none.
    pub blocks: u64,
    /// Why, as the system says it.
    pub errno: i32,
    /// When.
    pub at: SystemTime,
}

impl Failure {
    /// A failure of now.
    #[expect(clippy::disallowed_methods, reason = "a date for people, by which nothing is decided")]
    pub fn now(op: Op, lba: u64, blocks: u64, errno: i32) -> Self {
        Self { op, lba, blocks, errno, at: SystemTime::now() }
    }

    /// The errno's text.
    pub fn error(&self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }
}

/// Lines that the log has of a disk's failures at once, and how often one after that.
const LINES: u32 = 5;
const LINE_PERIOD: Duration = Duration::from_secs(10);

/// The failures of one disk's store.
#[derive(Debug)]
pub struct Failures {
    lines: LogLimit,
    last: Mutex<Option<Failure>>,
}

impl Default for Failures {
    fn default() -> Self {
        Self { lines: LogLimit::new(LINES, LINE_PERIOD), last: Mutex::default() }
    }
}

impl Failures {
    /// The store of `disk` has failed a request.
    #[cold]
    pub fn add(&self, disk: &str, failure: Failure) {
        // The thread that holds the lock writes or reads another failure of this moment, which serves as well.
        match self.last.try_lock() {
            Ok(mut last) => *last = Some(failure),
            Err(TryLockError::WouldBlock | TryLockError::Poisoned(_)) => {}
        }
        let Failure { op, lba, blocks, errno, .. } = failure;
        let (op, error) = (op.name(), failure.error());
        limited!(self.lines, warn, disk, op, lba, blocks, errno, %error, "the store has failed a request");
    }

    /// Tells the log how many lines of the failures of `disk` it does not have, if no failure has told it and it is time.
    pub fn tell_left_out(&self, disk: &str) {
        if let Some(left_out) = self.lines.overdue() {
            tracing::warn!(disk, left_out, "the store had failed so many more requests");
        }
    }

    /// The last one.
    pub fn last(&self) -> Option<Failure> {
        *lock(&self.last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_failure_is_kept() {
        let failures = Failures::default();
        assert_eq!(failures.last(), None);
        for errno in [5, 28] {
            failures.add("d", Failure::now(Op::Write, 8, 16, errno));
        }
        let last = failures.last().unwrap();
        assert_eq!((last.op, last.lba, last.blocks, last.errno), (Op::Write, 8, 16, 28));
        assert!(last.error().to_string().contains("No space left"));
        assert!(last.at.elapsed().unwrap() < Duration::from_secs(60));
    }
}
