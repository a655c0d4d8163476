//! Requests that a disk's store has failed: they are logged, with a rate limit, and the last one is kept for operators. Any
//! context; no call of a reactor waits here.

use crate::bdev::lock;
use crate::{Blocks, Lba, Op};
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
    pub lba: Lba,
    /// The number of blocks; none for a flush.
    pub blocks: Blocks,
    /// The kernel's errno.
    pub errno: i32,
    /// What the device itself reports, if it reports more than the kernel.
    pub device: Option<DeviceError>,
    /// The time of the failure.
    pub at: SystemTime,
}

/// An error as a device reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceError {
    /// The device's number for it: for NVMe, SCT in bits 8 to 10 and SC in bits 0 to 7.
    pub code: u16,
    /// Whether the device says that the same request fails again (for NVMe, DNR).
    pub is_final: bool,
    /// The specification's name of the error.
    pub name: &'static str,
}

impl Failure {
    /// Creates a failure with the present time.
    #[expect(clippy::disallowed_methods, reason = "a date for people, by which nothing is decided")]
    pub fn now(op: Op, lba: Lba, blocks: Blocks, errno: i32) -> Self {
        Self { op, lba, blocks, errno, device: None, at: SystemTime::now() }
    }

    /// Adds what the device reports.
    #[must_use]
    pub const fn with_device(self, device: DeviceError) -> Self {
        Self { device: Some(device), ..self }
    }

    /// The errno's text.
    pub fn error(&self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }
}

/// The log gets this many lines of a disk's failures at once, and then one line per [`LINE_PERIOD`].
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
    /// Records and logs a request that the store of `disk` has failed.
    #[cold]
    pub fn add(&self, disk: &str, failure: Failure) {
        // Another thread holds the lock, and writes or reads another failure of this moment, which may be kept instead.
        match self.last.try_lock() {
            Ok(mut last) => *last = Some(failure),
            Err(TryLockError::WouldBlock | TryLockError::Poisoned(_)) => {}
        }
        let Failure { op, lba: Lba(lba), blocks: Blocks(blocks), errno, device, .. } = failure;
        let (op, error) = (op.name(), failure.error());
        let Some(DeviceError { code, is_final, name }) = device else {
            limited!(self.lines, warn, disk, op, lba, blocks, errno, %error, "the store has failed a request");
            return;
        };
        limited!(
            self.lines, warn, disk, op, lba, blocks, errno, device_error = name, code = %format_args!("{code:#05x}"),
            is_final, "the device has failed a request"
        );
    }

    /// Logs the number of failures of `disk` that the rate limit left out, if that is due and no later failure has logged it.
    pub fn tell_left_out(&self, disk: &str) {
        if let Some(left_out) = self.lines.overdue() {
            tracing::warn!(disk, left_out, "the store had failed so many more requests");
        }
    }

    /// The last failure.
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
            failures.add("d", Failure::now(Op::Write, Lba(8), Blocks(16), errno));
        }
        let last = failures.last().unwrap();
        assert_eq!((last.op, last.lba, last.blocks, last.errno), (Op::Write, Lba(8), Blocks(16), 28));
        assert!(last.error().to_string().contains("No space left"));
        assert!(last.at.elapsed().unwrap() < Duration::from_secs(60));
    }
}
