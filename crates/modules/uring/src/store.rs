//! A file or block device that holds a disk: what channels of all reactors share of it. Any context.

use crate::channel::FileChannel;
use crate::locks::{LockError, Uses};
use crate::ranges::Ranges;
use crate::{OnFull, Stats};
use aryk_bdev::{Bdev, Channel, Device, Failure, Failures, Geometry, Limits, OpSet, OpenError};
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

/// To multiples of what requests to the kernel must be aligned; 1 where it does not matter. Powers of two.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Alignment {
    /// Addresses of pieces of memory.
    pub memory: u32,
    /// Offsets in the file, and lengths.
    pub offset: u32,
}

impl Alignment {
    /// The page cache takes anything.
    pub const NONE: Self = Self { memory: 1, offset: 1 };
}

/// What holds a disk.
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
    /// What kind of disk it is called.
    pub product: &'static str,
    pub block_size: u32,
    pub physical_block_size: u32,
    pub alignment: Alignment,
    /// To multiples of what holes and zeroes must be aligned that it makes by itself. A power of two, no less than the
    /// alignment's.
    pub allocation: u32,
    /// Requests wait for a device behind the kernel, instead of being answered within the system call.
    pub has_device: bool,
    /// Goes by threads, though there is a ring.
    pub blocking: bool,
    pub read_only: bool,
    pub on_full: OnFull,
    /// An ENOSPC of a write is known to be about that write ([`Self::may_tell_of_earlier`]).
    pub enospc_is_own: bool,
    pub blocks: AtomicU64,
    /// Someone is giving it another size.
    pub resizing: AtomicBool,
    /// Present if a write of one block may have to read first.
    pub ranges: Option<Ranges>,
    /// Whether the store has not yet refused to make holes, and to make zeroes by itself.
    pub punches: AtomicBool,
    pub zeroes: AtomicBool,
    /// What was written has been lost on its way from the page cache. The kernel tells that once only; it stays true.
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
    /// Requests that have ever been.
    held_total: AtomicU64,
    /// Lines of the log that say so, and whether the last was that some are.
    lines: LogLimit,
    told: AtomicBool,
}

/// How often the log says that requests are held, and no longer: a store that is nearly full has room now and then.
const HOLD_PERIOD: Duration = Duration::from_secs(10);

impl Default for Counts {
    fn default() -> Self {
        Self {
            held: AtomicU64::new(0),
            held_total: AtomicU64::new(0),
            lines: LogLimit::new(1, HOLD_PERIOD),
            told: AtomicBool::new(false),
        }
    }
}

/// Requests in flight on one channel: as many as the largest virtqueue in use has, and more than an SSD needs to be busy.
pub(crate) const DEPTH: u32 = 256;

/// Bytes in one read or write: as many as the kernel puts into one `bio`; more it would split too, and our pieces go side
/// by side.
const TRANSFER: u32 = 1 << 20;

/// Bytes in one unmap or write-zeroes. They keep other requests to the same file waiting, so they are not to take long.
const ALLOCATE: u64 = 256 << 20;

/// Pieces of memory in one request (`UIO_MAXIOV`).
const SEGMENTS: u32 = 1024;

/// Requests that are handed to the kernel together, at most. It starts none of a batch before it has looked at all of it,
/// at 3 µs each, and a disk with one queue that has just answered everything has nothing to do meanwhile: 32 at a time gave
/// 0.83 of what four at a time give.
const BATCH: usize = 4;

/// Bytes of reads and writes that are submitted at one time, whatever the store: what is in the page cache the kernel
/// copies then and there, and other pages it pins. So that time is the disk's whose requests they are, and the reactor sees
/// it pass, rather than all at the end of its turn.
const SUBMIT_BYTES: u64 = 1 << 20;

/// What the kernel is asked to do.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call {
    Read { data: Sgl, offset: u64 },
    Write { data: Sgl, offset: u64, dsync: bool },
    Sync,
    Allocate { mode: i32, offset: u64, len: u64 },
}

impl Store {
    /// Whether its data go through the page cache.
    pub const fn is_cached(&self) -> bool {
        self.alignment.offset == 1
    }

    /// Whether the error of a change may be about earlier writes that were acknowledged. Through the page cache, NFS reports in a
    /// write what the write-back of earlier ones has met, and no later sync reports it again. An unknown errno counts as such.
    pub const fn may_tell_of_earlier(&self, errno: i32) -> bool {
        self.is_cached()
            && match errno {
                // The guest's memory is at fault.
                libc::EFAULT => false,
                libc::ENOSPC | libc::EDQUOT | libc::EFBIG | libc::ENOMEM => !self.enospc_is_own,
                _ => true,
            }
    }

    /// Has the file for itself until [`Self::leave`], if it has not anyway.
    ///
    /// # Errors
    /// Someone else has it.
    pub fn enter(&self) -> Result<(), LockError> {
        self.uses.as_ref().map_or(Ok(()), |uses| uses.enter(&self.file, !self.read_only))
    }

    pub fn leave(&self) {
        if let Some(uses) = &self.uses {
            uses.leave(&self.file);
        }
    }

    /// Asks the kernel, whose answer is a completion of `tag`.
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
            // It is queued, whatever the kernel returns, which the end of the turn meets too.
            let _ = ring.submit();
        }
        Ok(())
    }

    /// Does it by itself. Blocks.
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

    /// A request has found the store full, and is held.
    pub fn hold(&self) {
        self.counts.held_total.fetch_add(1, Ordering::Relaxed);
        if self.counts.held.fetch_add(1, Ordering::Relaxed) == 0
            && !self.counts.told.load(Ordering::Relaxed)
            && let Some(admitted) = self.counts.lines.admit()
        {
            self.counts.told.store(true, Ordering::Relaxed);
            let (path, left_out) = (self.path.display(), admitted.left_out());
            tracing::warn!(left_out, %path, "the store is full: writes are held until there is room");
        }
    }

    /// A request that was held is no longer.
    pub fn unhold(&self) {
        if self.counts.held.fetch_sub(1, Ordering::Relaxed) == 1
            && self.counts.told.swap(false, Ordering::Relaxed)
        {
            tracing::info!(path = %self.path.display(), "no write is held any more");
        }
    }

    /// The store has failed a request.
    #[cold]
    pub fn failed(&self, failure: Failure) {
        let bdev = self.bdev.get().and_then(Weak::upgrade);
        self.failures.add(bdev.as_ref().map_or("", |bdev| bdev.name()), failure);
    }

    pub fn tell_left_out(&self) {
        let bdev = self.bdev.get().and_then(Weak::upgrade);
        self.failures.tell_left_out(bdev.as_ref().map_or("", |bdev| bdev.name()));
        if let Some(times) = self.counts.lines.overdue() {
            tracing::warn!(path = %self.path.display(), times, "the store was full so many more times: writes were held");
        }
    }

    pub fn stats(&self) -> Stats {
        Stats {
            held: self.counts.held.load(Ordering::Relaxed),
            held_total: self.counts.held_total.load(Ordering::Relaxed),
        }
    }
}

/// The device that the block layer has.
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
            blocks: self.0.blocks.load(Ordering::Relaxed),
            optimal_io_blocks: 0,
        }
    }

    fn limits(&self) -> Limits {
        let block_size = self.0.block_size;
        let allocate = ALLOCATE / u64::from(block_size);
        Limits {
            depth: DEPTH,
            transfer_blocks: (TRANSFER / block_size).max(1),
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
                LockError::Held => format!("`{path}` is in use elsewhere: it is locked"),
                LockError::None(errno) | LockError::Os(errno) => {
                    format!("`{path}` cannot be locked: {errno}")
                }
            })
        })?;
        Ok(Box::new(FileChannel::new(&self.0, root, cx)))
    }
}
