//! The file or block device of a disk, which the channels of all reactors share. Any context.

use crate::channel::FileChannel;
use crate::locks::{LockError, Uses};
use crate::ranges::Ranges;
use crate::{OnFull, Stats};
use aryk_bdev::{
    Bdev, Blocks, Bytes, Channel, Device, Failure, Failures, Geometry, Limits, OpSet, OpenError,
};
use aryk_dma::Sgl;
use aryk_log_limit::LogLimit;
use aryk_reactor::{Cx, RootId};
use aryk_uring::{Fsync, Tag, blocking};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

/// Alignment of requests to the kernel in bytes; 1 if there is none. Powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Alignment {
    /// Alignment of the addresses of memory pieces.
    pub memory: u32,
    /// Alignment of offsets in the file, and of lengths.
    pub offset: u32,
}

impl Alignment {
    /// The page cache needs no alignment.
    pub const NONE: Self = Self { memory: 1, offset: 1 };
}

/// The kind of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    File,
    BlockDevice,
}

#[derive(Debug)]
pub(crate) struct Store {
    pub file: OwnedFd,
    pub path: PathBuf,
    pub kind: Kind,
    /// The product name that the disk reports.
    pub product: &'static str,
    pub block_size: u32,
    pub physical_block_size: u32,
    pub alignment: Alignment,
    /// Alignment in bytes of the ranges that the store can punch or zero by itself. A power of two, no less than
    /// `alignment.offset`.
    pub allocation: u32,
    /// Requests wait for a device, instead of completing within the system call.
    pub has_device: bool,
    /// The store uses blocking calls in threads, also where there is a ring.
    pub blocking: bool,
    pub read_only: bool,
    pub on_full: OnFull,
    /// ENOSPC of a write is known to refer to that write ([`Self::may_report_earlier`]).
    pub enospc_is_own: bool,
    /// The size of the disk in [`Blocks`].
    pub blocks: AtomicU64,
    /// A resize is in progress.
    pub resizing: AtomicBool,
    /// Present if a write of one block may have to read first.
    pub ranges: Option<Ranges>,
    /// Whether the store can punch holes, and zero ranges by itself: true until it refuses.
    pub punches: AtomicBool,
    pub zeroes: AtomicBool,
    /// Written data was lost between the page cache and the device. The kernel reports that only once, so this flag is never
    /// cleared.
    pub lost: AtomicBool,
    pub counts: Counts,
    pub failures: Failures,
    /// Present if the file is locked only while a channel is open.
    pub uses: Option<Uses>,
    /// The disk, once it is registered.
    pub bdev: OnceLock<Weak<Bdev>>,
}

#[derive(Debug)]
pub(crate) struct Counts {
    /// Requests that are held because the store is full.
    held: AtomicU64,
    /// Requests that were ever held.
    held_total: AtomicU64,
    /// Limits the log lines about held requests; `logged`: the last line reported that requests are held.
    lines: LogLimit,
    logged: AtomicBool,
}

/// Period of the log lines about writes being held, and no longer held: a nearly full store alternates between the two.
const HOLD_PERIOD: Duration = Duration::from_secs(10);

impl Default for Counts {
    fn default() -> Self {
        Self {
            held: AtomicU64::new(0),
            held_total: AtomicU64::new(0),
            lines: LogLimit::new(1, HOLD_PERIOD),
            logged: AtomicBool::new(false),
        }
    }
}

/// The maximum number of requests in flight on one channel: as many as the largest virtqueue in use has, and more than keep an
/// SSD busy.
pub(crate) const DEPTH: u32 = 256;

/// The maximum size of one read or write in bytes: as many as the kernel puts into one `bio`. The kernel would split a larger
/// transfer too, but the requests that the block layer makes run in parallel.
const TRANSFER: Bytes = Bytes(1 << 20);

/// The maximum size of one unmap or write-zeroes in bytes. Other requests to the same file wait for it, so it must not take
/// long.
const ALLOCATE: Bytes = Bytes(256 << 20);

/// The maximum number of memory pieces in one request (`UIO_MAXIOV`).
const SEGMENTS: u32 = 1024;

/// The maximum number of requests in one submission to the kernel. The kernel starts no request of a batch before it has
/// prepared all of them, at 3 µs per request, and meanwhile a device with one queue that has just completed everything is idle:
/// the throughput of batches of 32 was 0.83 of that of batches of 4.
const BATCH: usize = 4;

/// The maximum number of bytes of reads and writes that are submitted at one time, for each kind of store: during the submission
/// the kernel copies pages of the page cache and pins other pages. With this limit, that time is accounted to the disk of the
/// requests, and the reactor measures it during the turn, not only at its end.
const SUBMIT_BYTES: u64 = 1 << 20;

/// A call to the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    Read { data: Sgl, offset: u64 },
    Write { data: Sgl, offset: u64, dsync: bool },
    Sync,
    Allocate { mode: i32, offset: u64, len: u64 },
}

impl Store {
    /// The present size of the disk.
    #[inline]
    pub fn blocks(&self) -> Blocks {
        Blocks(self.blocks.load(Ordering::Relaxed))
    }

    /// Whether the store's data goes through the page cache.
    pub const fn is_cached(&self) -> bool {
        self.alignment.offset == 1
    }

    /// Whether the error of a change may refer to earlier writes that were acknowledged. Through the page cache, NFS reports the
    /// write-back error of earlier writes in a later write, and no later sync reports it again. An unknown errno counts as one.
    pub const fn may_report_earlier(&self, errno: i32) -> bool {
        self.is_cached()
            && match errno {
                // The guest's memory cannot be accessed.
                libc::EFAULT => false,
                libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::ENOMEM => !self.enospc_is_own,
                _ => true,
            }
    }

    /// Locks the file until [`Self::leave`], unless it is locked for the life of the disk.
    ///
    /// # Errors
    /// Another opener has locked the file, or the lock fails.
    pub fn enter(&self) -> Result<(), LockError> {
        self.uses.as_ref().map_or(Ok(()), |uses| uses.enter(&self.file, !self.read_only))
    }

    pub fn leave(&self) {
        if let Some(uses) = &self.uses {
            uses.leave(&self.file);
        }
    }

    /// Starts a call to the kernel, which ends in a completion with `tag`.
    ///
    /// # Errors
    /// The ring has no room now.
    #[inline]
    pub fn start(self: &Arc<Self>, tag: Tag, call: Call, cx: &mut Cx) -> io::Result<()> {
        let file = self.file.as_fd();
        let Some(mut ring) = cx.ring().filter(|_| !self.blocking) else {
            let store = Arc::clone(self);
            cx.submit_blocking(tag, Box::new(move || store.call(call)));
            return Ok(());
        };
        match call {
            Call::Read { data, offset } => ring.read(tag, file, &data, offset)?,
            Call::Write { data, offset, dsync } => ring.write(tag, file, &data, offset, dsync)?,
            Call::Sync => ring.fsync(tag, file, Fsync::Data)?,
            Call::Allocate { mode, offset, len } => ring.fallocate(tag, file, mode, offset, len)?,
        }
        let is_batch = self.has_device && ring.unsubmitted() >= BATCH;
        if is_batch || ring.unsubmitted_bytes() >= SUBMIT_BYTES {
            // The request is queued even if this fails: the end of the turn submits again and handles the error.
            let _ = ring.submit();
        }
        Ok(())
    }

    /// Executes `call` in the calling thread, and blocks.
    fn call(&self, call: Call) -> i32 {
        let file = self.file.as_fd();
        match call {
            Call::Read { data, offset } => blocking::read(file, &data, offset),
            Call::Write { data, offset, dsync } => blocking::write(file, &data, offset, dsync),
            Call::Sync => blocking::fsync(file, Fsync::Data),
            Call::Allocate { mode, offset, len } => blocking::fallocate(file, mode, offset, len),
        }
    }

    /// Whether the disk is being removed.
    pub fn is_removing(&self) -> bool {
        self.bdev.get().and_then(Weak::upgrade).is_some_and(|b| b.is_removing())
    }

    /// Counts a request that has found the store full and is held.
    pub fn hold(&self) {
        self.counts.held_total.fetch_add(1, Ordering::Relaxed);
        if self.counts.held.fetch_add(1, Ordering::Relaxed) == 0
            && !self.counts.logged.load(Ordering::Relaxed)
            && let Some(admitted) = self.counts.lines.admit()
        {
            self.counts.logged.store(true, Ordering::Relaxed);
            let (path, left_out) = (self.path.display(), admitted.left_out());
            tracing::warn!(left_out, %path, "the store is full: writes are held until there is room");
        }
    }

    /// Counts a request that is no longer held.
    pub fn unhold(&self) {
        if self.counts.held.fetch_sub(1, Ordering::Relaxed) == 1
            && self.counts.logged.swap(false, Ordering::Relaxed)
        {
            tracing::info!(path = %self.path.display(), "writes are no longer held");
        }
    }

    /// Records that the store has failed a request.
    #[cold]
    pub fn failed(&self, failure: Failure) {
        let bdev = self.bdev.get().and_then(Weak::upgrade);
        self.failures.add(bdev.as_ref().map_or("", |bdev| bdev.name()), failure);
    }

    pub fn tell_left_out(&self) {
        let bdev = self.bdev.get().and_then(Weak::upgrade);
        self.failures.tell_left_out(bdev.as_ref().map_or("", |bdev| bdev.name()));
        if let Some(times) = self.counts.lines.overdue() {
            tracing::warn!(path = %self.path.display(), times, "the store was full {times} more times: writes were held");
        }
    }

    pub fn stats(&self) -> Stats {
        Stats {
            held: self.counts.held.load(Ordering::Relaxed),
            held_total: self.counts.held_total.load(Ordering::Relaxed),
        }
    }
}

/// The device through which the block layer opens channels.
#[derive(Debug)]
pub(crate) struct FileDevice(pub Arc<Store>);

impl Device for FileDevice {
    fn product(&self) -> &'static str {
        self.0.product
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: self.0.block_size,
            physical_block_size: self.0.physical_block_size,
            blocks: self.0.blocks(),
            optimal_io_blocks: Blocks::ZERO,
        }
    }

    fn limits(&self) -> Limits {
        let block_size = self.0.block_size;
        let allocate = ALLOCATE.whole_blocks(block_size);
        Limits {
            depth: DEPTH,
            transfer_blocks: TRANSFER.whole_blocks(block_size).max(Blocks(1)),
            segments: SEGMENTS,
            unmap_blocks: allocate,
            write_zeroes_blocks: allocate,
            ..Limits::default()
        }
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn is_read_only(&self) -> bool {
        self.0.read_only
    }

    fn last_failure(&self) -> Option<Failure> {
        self.0.failures.last()
    }

    fn tell_left_out(&self) {
        self.0.tell_left_out();
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        self.0.enter().map_err(|error| {
            let path = self.0.path.display();
            OpenError::Unavailable(match error {
                LockError::Held => format!("`{path}` is locked by another process or disk"),
                LockError::None(errno) | LockError::Os(errno) => {
                    format!("`{path}` cannot be locked: {errno}")
                }
            })
        })?;
        Ok(Box::new(FileChannel::new(&self.0, root, cx)))
    }
}
