//! Unmaps memory and closes memory files on a separate thread. Any context may request it: a request is a message, and never
//! waits.
//!
//! The thread that drops the last reference to much memory waits for the kernel to free it: a second for some gigabytes.
//! Neither a reactor nor the control thread may spend that time. The work that is queued here is bounded by the limits of
//! mapped memory ([`crate::Limits`]), for each peer by the memory that it may announce ([`crate::Peer`]), and for files by the
//! caller of [`close_memory`]. No peer waits for another peer's memory.
//!
//! The kernel may be unable to unmap: unmapping part of a mapping that it has merged with its neighbours makes two
//! mappings of one, and their number is limited (`vm.max_map_count`). Such a failure, which a peer can cause, must not
//! end the process: the memory stays mapped and counted, and the thread retries.
//!
//! Devices may have the memory registered. Then the memory's [`Keeper`] receives the pages, and releases them when no device
//! has them registered any more.

use crate::{budget, fault};
use rustix::io::Errno;
use rustix::mm::munmap;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Bytes that are unmapped at a time: between two pieces, other threads can map, unmap and handle page faults. A multiple of
/// every page size.
const PIECE: usize = 1 << 30;
const _: () = assert!(PIECE.is_multiple_of(1 << 30), "the largest huge pages are unmapped as a whole");

/// Interval of retries of failed unmapping.
const RETRY: Duration = Duration::from_millis(100);

/// Mapped pages: whole pages of their file's page size.
#[derive(Debug)]
pub(crate) struct Pages {
    pub base: *mut c_void,
    len: usize,
    pub fault: Option<fault::Guard>,
    pub peer: Option<budget::Peer>,
    /// Decides when the pages of a dropped mapping are unmapped; see [`crate::Mapping::set_keeper`].
    pub keeper: OnceLock<Arc<dyn Keeper>>,
    waiting: Option<budget::Waiting>,
    /// Set once the pages are anonymous memory in place of the file's; see [`crate::Mapping::revoke`].
    pub revoked: OnceLock<Revoked>,
    /// The last field, so that the charge ends after the unmapping.
    _charge: Option<budget::Charge>,
}

// SAFETY: the memory belongs to the process, not to a thread, and `munmap` may be called from any.
unsafe impl Send for Pages {}
// SAFETY: as above; a shared reference gives only numbers away.
unsafe impl Sync for Pages {}

/// Decides when the pages of a dropped mapping are unmapped, because devices may still access them.
pub trait Keeper: Send + Sync + std::fmt::Debug {
    /// The mapping was dropped: requests no longer use its memory. Called once, on the thread that unmaps memory, so it must not
    /// wait.
    fn dropped(&self, pages: HeldPages);
}

/// The pages of a dropped mapping. They stay mapped, and count as the peer's, until [`HeldPages::release`]. If this value is
/// dropped instead, they stay mapped forever: no memory is freed while a device may use it.
#[derive(Debug)]
pub struct HeldPages(ManuallyDrop<Pages>);

impl HeldPages {
    /// Requests the unmapping of the pages: no device accesses them any more.
    pub fn release(self) {
        send(Job::Unmap(ManuallyDrop::into_inner(self.0)), now());
    }
}

/// The remaining [`Pages`], which the kernel cannot unmap now.
struct StillMapped(Pages);

impl Pages {
    /// The pages from `base` on: anonymous memory that the caller owns.
    pub const fn of_ours(base: *mut c_void, len: usize) -> Self {
        Self {
            base,
            len,
            fault: None,
            peer: None,
            keeper: OnceLock::new(),
            waiting: None,
            revoked: OnceLock::new(),
            _charge: None,
        }
    }

    /// As [`Pages::of_ours`], for a shared file.
    pub const fn of_file(base: *mut c_void, len: usize, fault: fault::Guard, charge: budget::Charge) -> Self {
        Self {
            base,
            len,
            fault: Some(fault),
            peer: None,
            keeper: OnceLock::new(),
            waiting: None,
            revoked: OnceLock::new(),
            _charge: Some(charge),
        }
    }

    /// Length in bytes.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Replaces the file's pages by anonymous memory, which keeps the addresses in use until the unmapping. The pages count as
    /// the peer's from now on, as if they waited to be unmapped.
    ///
    /// # Errors
    /// The kernel has no more mappings; then the caller may try again.
    pub fn revoke(&self) -> Result<(), Errno> {
        if self.fault.is_none() || self.revoked.get().is_some() {
            return Ok(());
        }
        for at in (0..self.len).step_by(PIECE) {
            let len = PIECE.min(self.len - at);
            if !fault::map_over(self.base as usize + at, len) {
                return Err(Errno::NOMEM);
            }
        }
        self.revoked.get_or_init(|| Revoked::new(self.len as u64, self.peer.as_ref()));
        Ok(())
    }

    fn unmap(mut self) -> Result<(), StillMapped> {
        assert!(self.keeper.get().is_none(), "devices may still access these pages");
        // Before other mappings can reuse the addresses.
        self.fault = None;
        while self.len > 0 {
            let piece = PIECE.min(self.len);
            // SAFETY: these pages are part of a mapping that only this value owns, and by the crate's invariant no
            // request uses it any more; pages that were unmapped before are not accessed again.
            match unsafe { munmap(self.base, piece) } {
                Ok(()) => {}
                Err(Errno::INTR) => continue,
                Err(Errno::NOMEM) => return Err(StillMapped(self)),
                // The kernel reports that these are not this process's pages: then the state of all other mappings is
                // unknown, too.
                Err(error) => panic!("a mapping of this process cannot be unmapped: {error}"),
            }
            self.base = self.base.wrapping_byte_add(piece);
            self.len -= piece;
        }
        Ok(())
    }
}

/// Bytes and number of the mappings whose memory was revoked and that are not unmapped yet.
static REVOKED_BYTES: AtomicU64 = AtomicU64::new(0);
static REVOKED: AtomicU64 = AtomicU64::new(0);

/// A mapping whose memory was revoked: it counts until this is dropped.
#[derive(Debug)]
pub(crate) struct Revoked {
    len: u64,
    _waiting: Option<budget::Waiting>,
}

impl Revoked {
    fn new(len: u64, peer: Option<&budget::Peer>) -> Self {
        REVOKED_BYTES.fetch_add(len, Relaxed);
        REVOKED.fetch_add(1, Relaxed);
        Self { len, _waiting: peer.map(|peer| peer.add_awaiting_unmap(len)) }
    }
}

impl Drop for Revoked {
    fn drop(&mut self) {
        REVOKED_BYTES.fetch_sub(self.len, Relaxed);
        REVOKED.fetch_sub(1, Relaxed);
    }
}

/// Bytes and number of the mappings whose memory was revoked ([`crate::Mapping::revoke`]), and whose addresses are still in use.
pub fn revoked() -> (u64, u64) {
    (REVOKED_BYTES.load(Relaxed), REVOKED.load(Relaxed))
}

enum Job {
    Unmap(Pages),
    Close { _file: OwnedFd, _ticket: Arc<()> },
}

/// The channel to the thread; `None` if the thread could not be started.
static WORKER: OnceLock<Option<Sender<(Job, Instant)>>> = OnceLock::new();

static PENDING: AtomicU64 = AtomicU64::new(0);
static DONE: AtomicU64 = AtomicU64::new(0);
static DELAY_NS_MAX: AtomicU64 = AtomicU64::new(0);

/// The backlog of the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reclaiming {
    /// Mappings and files that wait, or are being handled.
    pub pending: u64,
    /// Handled mappings and files.
    pub done: u64,
    /// The longest time between a request and its completion.
    pub delay_max: Duration,
}

/// The backlog of unmapping and closing, in this process.
pub fn reclaiming() -> Reclaiming {
    let delay_max = Duration::from_nanos(DELAY_NS_MAX.load(Relaxed));
    Reclaiming { pending: PENDING.load(Relaxed), done: DONE.load(Relaxed), delay_max }
}

/// Requests that a peer's memory file is closed. `ticket` is dropped after that, so a caller that closes many files of one peer
/// can wait for some of them.
pub fn close_memory(file: OwnedFd, ticket: Arc<()>) {
    request(Job::Close { _file: file, _ticket: ticket });
}

pub(crate) fn unmap(mut pages: Pages) {
    if pages.revoked.get().is_none() {
        pages.waiting = pages.peer.as_ref().map(|peer| peer.add_awaiting_unmap(pages.len as u64));
    }
    request(Job::Unmap(pages));
}

/// Starts the thread, unless it runs already. In control context, before the first request.
pub(crate) fn prepare() {
    WORKER.get_or_init(|| {
        let (sender, jobs) = channel();
        let work = move || Worker { jobs, kept: VecDeque::new() }.work();
        std::thread::Builder::new().name("reclaim".to_owned()).spawn(work).is_ok().then_some(sender)
    });
}

fn request(job: Job) {
    PENDING.fetch_add(1, Relaxed);
    send(job, now());
}

fn send(job: Job, requested: Instant) {
    match WORKER.get() {
        // The thread never ends, so the send succeeds.
        Some(Some(worker)) => drop(worker.send((job, requested))),
        Some(None) | None => {
            if let Err(StillMapped(pages)) = execute(job, requested) {
                // No thread can retry: the memory stays mapped, and counted.
                std::mem::forget(pages);
            }
        }
    }
}

/// The state of the thread.
struct Worker {
    jobs: Receiver<(Job, Instant)>,
    /// Memory whose unmapping is retried.
    kept: VecDeque<(Pages, Instant)>,
}

impl Worker {
    fn work(mut self) {
        loop {
            let next = match self.kept.is_empty() {
                true => self.jobs.recv().map_err(RecvTimeoutError::from),
                false => self.jobs.recv_timeout(RETRY),
            };
            match next {
                Ok((job, requested)) => {
                    self.keep(execute(job, requested), requested);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            // Retries in order, up to the first failure.
            while let Some((pages, requested)) = self.kept.pop_front()
                && self.keep(execute(Job::Unmap(pages), requested), requested)
            {}
        }
    }

    /// Keeps pages that could not be unmapped, for a retry; returns whether the unmapping succeeded.
    fn keep(&mut self, result: Result<(), StillMapped>, requested: Instant) -> bool {
        let is_done = result.is_ok();
        if let Err(StillMapped(pages)) = result {
            self.kept.push_back((pages, requested));
        }
        is_done
    }
}

fn execute(job: Job, requested: Instant) -> Result<(), StillMapped> {
    match job {
        Job::Unmap(mut pages) => match pages.keeper.take() {
            // The pages stay pending, and watched: until the unmapping, their replaced parts are mappings of this process, so
            // `fault` counts them until then, too.
            Some(keeper) => {
                keeper.dropped(HeldPages(ManuallyDrop::new(pages)));
                return Ok(());
            }
            None => pages.unmap()?,
        },
        close @ Job::Close { .. } => drop(close),
    }
    let delay = u64::try_from(requested.elapsed().as_nanos()).unwrap_or(u64::MAX);
    DELAY_NS_MAX.fetch_max(delay, Relaxed);
    DONE.fetch_add(1, Relaxed);
    let pending = PENDING.fetch_sub(1, Relaxed);
    assert!(pending > 0, "more jobs are done than were requested");
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "the duration is reported")]
fn now() -> Instant {
    Instant::now()
}
