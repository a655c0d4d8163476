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
    /// For NVMe, CRD: 0, or the number (1 to 3) of the controller's delay before another attempt.
    pub crd: u8,
    /// The specification's name of the error.
    pub name: &'static str,
    /// The block that failed, if the device names it.
    pub lba: Option<Lba>,
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
/// Failed blocks that are kept for the submitters of their requests.
const BLOCKS_MAX: usize = 32;

/// The failures of one disk's store.
#[derive(Debug)]
pub struct Failures {
    lines: LogLimit,
    kept: Mutex<Kept>,
}

#[derive(Debug)]
struct Kept {
    last: Option<Failure>,
    /// Blocks that the device has named, the latest last.
    blocks: Vec<Lba>,
}

impl Kept {
    fn add(&mut self, failure: Failure) {
        let Failure { lba: Lba(first), blocks: Blocks(blocks), device, .. } = failure;
        self.last = Some(failure);
        // The latest failure of a block counts.
        self.blocks.retain(|lba| !has(first, blocks, *lba));
        if let Some(lba) = device.and_then(|device| device.lba) {
            if self.blocks.len() == BLOCKS_MAX {
                self.blocks.remove(0);
            }
            self.blocks.push(lba);
        }
    }
}

/// Whether `blocks` blocks from `first` on have this one.
fn has(first: u64, blocks: u64, lba: Lba) -> bool {
    lba.0.checked_sub(first).is_some_and(|offset| offset < blocks)
}

impl Default for Failures {
    fn default() -> Self {
        let kept = Kept { last: None, blocks: Vec::with_capacity(BLOCKS_MAX) };
        Self { lines: LogLimit::new(LINES, LINE_PERIOD), kept: Mutex::new(kept) }
    }
}

impl Failures {
    /// Records and logs a request that the store of `disk` has failed.
    #[cold]
    pub fn add(&self, disk: &str, failure: Failure) {
        // Another thread holds the lock, and writes or reads another failure of this moment, which may be kept instead.
        match self.kept.try_lock() {
            Ok(mut kept) => kept.add(failure),
            Err(TryLockError::WouldBlock | TryLockError::Poisoned(_)) => {}
        }
        let Failure { op, lba: Lba(lba), blocks: Blocks(blocks), errno, device, .. } = failure;
        let (op, error) = (op.name(), failure.error());
        let Some(DeviceError { code, is_final, crd, name, lba: failed }) = device else {
            limited!(self.lines, warn, disk, op, lba, blocks, errno, %error, "the store has failed a request");
            return;
        };
        limited!(
            self.lines, warn, disk, op, lba, blocks, errno, device_error = name, code = %format_args!("{code:#05x}"),
            is_final, crd, failed_lba = failed.map(|Lba(lba)| lba), "the device has failed a request"
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
        lock(&self.kept).last
    }

    /// The block that the device has named for the latest failure of one of these blocks; `None` if it named none.
    pub fn failed_block(&self, lba: Lba, blocks: Blocks) -> Option<Lba> {
        // Another thread adds a failure.
        let kept = self.kept.try_lock().ok()?;
        kept.blocks.iter().rfind(|failed| has(lba.0, blocks.0, **failed)).copied()
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

    #[test]
    fn a_failed_block_is_that_of_the_latest_failure() {
        let failures = Failures::default();
        let fail = |lba, blocks, failed: Option<u64>| {
            let lba_of = failed.map(Lba);
            let device = DeviceError { code: 0x281, is_final: false, crd: 0, name: "bad", lba: lba_of };
            failures.add("d", Failure::now(Op::Read, Lba(lba), Blocks(blocks), 5).with_device(device));
        };
        let failed = |lba, blocks| failures.failed_block(Lba(lba), Blocks(blocks)).map(|lba| lba.0);
        assert_eq!(failed(0, u64::MAX), None);
        fail(8, 8, Some(12));
        fail(100, 8, Some(100));
        assert_eq!(
            (failed(8, 8), failed(12, 1), failed(8, 4), failed(13, 9)),
            (Some(12), Some(12), None, None)
        );
        assert_eq!((failed(0, 200), failed(100, 1)), (Some(100), Some(100)), "the latest");
        // A failure of which the device names no block.
        fail(8, 8, None);
        assert_eq!((failed(8, 8), failed(100, 8)), (None, Some(100)));
        (0..100).for_each(|lba| fail(1000 + lba, 1, Some(1000 + lba)));
        assert_eq!((failed(100, 8), failed(1099, 1), failed(1000, 1)), (None, Some(1099), None), "bounded");
    }
}
