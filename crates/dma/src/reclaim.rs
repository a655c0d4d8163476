//! Unmapping, and closing memory files, on a thread of its own. Any context may ask for it; that is a message, and never waits.
//!
//! Who is the last to let go of much memory waits for the kernel to free it: a second for some gigabytes that nobody else holds. That is neither a reactor's time nor
//! the control thread's. What waits here is bounded by what may be mapped ([`crate::Limits`]), for a peer by what it may announce
//! ([`crate::Peer`]), and for files by
//! who closes them ([`close_memory`]). Nobody waits for another peer's.
//!
//! The kernel may lack what it takes to unmap: part of a mapping that it has merged with its neighbours makes two of one, and
//! there may be no more of them
//! (`vm.max_map_count`). What a peer can bring about ends no process: it stays mapped, and counted, and is tried again.

use crate::{budget, fault};
use rustix::io::Errno;
use rustix::mm::munmap;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// What is unmapped at a time: between two pieces others may map, unmap and fault. A multiple of every page's size.
const PIECE: usize = 1 << 30;

/// When what could not be unmapped is tried again.
const RETRY: Duration = Duration::from_millis(100);

/// Mapped pages, whole ones of their file's size.
#[derive(Debug)]
pub(crate) struct Pages {
    pub base: *mut c_void,
    len: usize,
    pub fault: Option<fault::Guard>,
    pub peer: Option<budget::Peer>,
    waiting: Option<budget::Waiting>,
    /// Last: it goes when they are unmapped.
    _charge: Option<budget::Charge>,
}

// SAFETY: the memory belongs to the process, not to a thread, and `munmap` may be called from any.
unsafe impl Send for Pages {}
// SAFETY: as above; a shared reference gives only numbers away.
unsafe impl Sync for Pages {}

/// There is something left of [`Pages`], which the kernel cannot unmap now.
struct Kept(Pages);

impl Pages {
    /// Those from `base` on, which are the caller's: memory of our own.
    pub const fn of_ours(base: *mut c_void, len: usize) -> Self {
        Self { base, len, fault: None, peer: None, waiting: None, _charge: None }
    }

    /// The same of a file that others have too.
    pub const fn of_file(base: *mut c_void, len: usize, fault: fault::Guard, charge: budget::Charge) -> Self {
        Self { base, len, fault: Some(fault), peer: None, waiting: None, _charge: Some(charge) }
    }

    fn unmap(mut self) -> Result<(), Kept> {
        // Before the addresses are others' to have.
        self.fault = None;
        while self.len > 0 {
            let piece = PIECE.min(self.len);
            // SAFETY: these pages are part of a mapping that only this value owns, and by the crate's invariant no request uses it any more; what was
            // unmapped before is not touched again.
            match unsafe { munmap(self.base, piece) } {
                Ok(()) => {}
                Err(Errno::INTR) => continue,
                Err(Errno::NOMEM) => return Err(Kept(self)),
                // It says that these are no pages of ours: then nobody knows what else is not.
                Err(error) => panic!("a mapping of ours can be unmapped: {error}"),
            }
            self.base = self.base.wrapping_byte_add(piece);
            self.len -= piece;
        }
        Ok(())
    }
}

enum Job {
    Unmap(Pages),
    Close { _file: OwnedFd, _ticket: Arc<()> },
}

/// The way to the thread; `None` if it could not be started.
static WORKER: OnceLock<Option<Sender<(Job, Instant)>>> = OnceLock::new();

static PENDING: AtomicU64 = AtomicU64::new(0);
static DONE: AtomicU64 = AtomicU64::new(0);
static DELAY_NS_MAX: AtomicU64 = AtomicU64::new(0);

/// How far the thread is behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reclaiming {
    /// Mappings and files that wait for it, or are at it.
    pub pending: u64,
    /// Those that are gone.
    pub done: u64,
    /// The longest time between one's being given up and its being gone.
    pub delay_max: Duration,
}

/// How far unmapping and closing are behind, in this process.
pub fn reclaiming() -> Reclaiming {
    let delay_max = Duration::from_nanos(DELAY_NS_MAX.load(Relaxed));
    Reclaiming { pending: PENDING.load(Relaxed), done: DONE.load(Relaxed), delay_max }
}

/// Closes a peer's memory file, later. `ticket` is dropped when that has been done, so that who closes many for one peer can wait for some of them.
pub fn close_memory(file: OwnedFd, ticket: Arc<()>) {
    ask(Job::Close { _file: file, _ticket: ticket });
}

pub(crate) fn unmap(mut pages: Pages) {
    pages.waiting = pages.peer.as_ref().map(|peer| peer.gives_up(pages.len as u64));
    ask(Job::Unmap(pages));
}

/// Starts the thread, if it is not there. In control context, before there is anything to reclaim.
pub(crate) fn prepare() {
    WORKER.get_or_init(|| {
        let (sender, jobs) = channel();
        let work = move || Worker { jobs, kept: VecDeque::new() }.work();
        std::thread::Builder::new().name("reclaim".to_owned()).spawn(work).is_ok().then_some(sender)
    });
}

fn ask(job: Job) {
    PENDING.fetch_add(1, Relaxed);
    let asked = now();
    match WORKER.get() {
        // It never ends, so it takes it.
        Some(Some(worker)) => drop(worker.send((job, asked))),
        Some(None) | None => {
            if let Err(Kept(pages)) = work_off(job, asked) {
                // There is nobody to try again: it stays mapped, and counted.
                std::mem::forget(pages);
            }
        }
    }
}

/// The thread.
struct Worker {
    jobs: Receiver<(Job, Instant)>,
    /// What is tried again.
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
                Ok((job, asked)) => {
                    self.keep(work_off(job, asked), asked);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            // Up to the first that still cannot be.
            while let Some((pages, asked)) = self.kept.pop_front()
                && self.keep(work_off(Job::Unmap(pages), asked), asked)
            {}
        }
    }

    /// Keeps what could not be unmapped, for later; whether it could.
    fn keep(&mut self, result: Result<(), Kept>, asked: Instant) -> bool {
        let is_done = result.is_ok();
        if let Err(Kept(pages)) = result {
            self.kept.push_back((pages, asked));
        }
        is_done
    }
}

fn work_off(job: Job, asked: Instant) -> Result<(), Kept> {
    match job {
        Job::Unmap(pages) => pages.unmap()?,
        close @ Job::Close { .. } => drop(close),
    }
    let delay = u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX);
    DELAY_NS_MAX.fetch_max(delay, Relaxed);
    DONE.fetch_add(1, Relaxed);
    PENDING.fetch_sub(1, Relaxed);
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "how long it takes is what is told")]
fn now() -> Instant {
    Instant::now()
}
