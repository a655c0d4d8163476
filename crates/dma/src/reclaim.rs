//! Unmapping, and closing memory files, on a thread of its own. Any context may ask for it; that is a message, and never waits.
//!
//! Who is the last to let go of much memory waits for the kernel to free it: a second for some gigabytes that nobody else holds. That is neither a reactor's time nor
//! the control thread's. What waits here is bounded by what may be mapped ([`crate::Limits`]) and, for files, by who closes them ([`close_memory`]). Nobody waits for
//! it, so one peer's terabytes do not hold up another peer.

use crate::{budget, fault};
use rustix::mm::munmap;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// What is unmapped at a time: between two pieces others may map, unmap and fault. A multiple of every page's size.
const PIECE: usize = 1 << 30;

/// Mapped pages, whole ones of their file's size.
#[derive(Debug)]
pub(crate) struct Pages {
    pub base: *mut c_void,
    pub len: usize,
    pub fault: Option<fault::Guard>,
    /// Last: it goes when they are unmapped.
    pub _charge: Option<budget::Charge>,
}

// SAFETY: the memory belongs to the process, not to a thread, and `munmap` may be called from any.
unsafe impl Send for Pages {}
// SAFETY: as above; a shared reference gives only numbers away.
unsafe impl Sync for Pages {}

impl Pages {
    fn unmap(mut self) {
        // Before the addresses are others' to have.
        self.fault = None;
        let mut done = 0;
        while done < self.len {
            let piece = PIECE.min(self.len - done);
            // SAFETY: these pages are part of a mapping that only this value owns, and by the crate's invariant no request uses it any more; what was
            // unmapped before is not touched again.
            let unmapped = unsafe { munmap(self.base.wrapping_byte_add(done), piece) };
            unmapped.expect("a mapping of ours can be unmapped");
            done += piece;
        }
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

pub(crate) fn unmap(pages: Pages) {
    ask(Job::Unmap(pages));
}

/// Starts the thread, if it is not there. In control context, before there is anything to reclaim.
pub(crate) fn prepare() {
    WORKER.get_or_init(|| {
        let (sender, jobs) = channel::<(Job, Instant)>();
        let work = move || jobs.into_iter().for_each(|(job, asked)| work_off(job, asked));
        std::thread::Builder::new().name("reclaim".to_owned()).spawn(work).is_ok().then_some(sender)
    });
}

fn ask(job: Job) {
    PENDING.fetch_add(1, Relaxed);
    let asked = now();
    match WORKER.get() {
        // It never ends, so it takes it.
        Some(Some(worker)) => drop(worker.send((job, asked))),
        Some(None) | None => work_off(job, asked),
    }
}

fn work_off(job: Job, asked: Instant) {
    match job {
        Job::Unmap(pages) => pages.unmap(),
        close @ Job::Close { .. } => drop(close),
    }
    let delay = u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX);
    DELAY_NS_MAX.fetch_max(delay, Relaxed);
    DONE.fetch_add(1, Relaxed);
    PENDING.fetch_sub(1, Relaxed);
}

#[expect(clippy::disallowed_methods, reason = "how long it takes is what is told")]
fn now() -> Instant {
    Instant::now()
}
