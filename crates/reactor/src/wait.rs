//! What a reactor sleeps in, and what wakes it: io_uring, or epoll where that is forbidden. Reactor context.

use crate::RootId;
use aryk_slots::{Key, Slots};
use aryk_uring::{Completion, Ring, Tag};
use rustix::event::{Timespec, epoll};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::str::FromStr;
use std::time::Duration;

/// Which kernel interface a reactor uses.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Engine {
    /// io_uring, or epoll where that is forbidden.
    #[default]
    Auto,
    /// io_uring, or nothing.
    IoUring,
    /// epoll, and a pool of threads for files.
    Epoll,
}

impl FromStr for Engine {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(Self::Auto),
            "io_uring" => Ok(Self::IoUring),
            "epoll" => Ok(Self::Epoll),
            _ => Err(format!("`{s}` is no engine: auto, io_uring or epoll")),
        }
    }
}

/// Names a watched descriptor on its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WatchId(Key);

#[derive(Debug)]
struct Watch {
    fd: OwnedFd,
    /// `None`: the reactor's own wake-up.
    root: Option<RootId>,
}

enum Kernel {
    Uring(Box<Ring>),
    Epoll { epoll: OwnedFd, events: Vec<epoll::Event>, skipped: u32 },
}

/// What the ring had no room for, and is tried again.
#[derive(Clone, Copy)]
enum Undone {
    Start(Key),
    Cancel(Tag),
}

/// Completions taken from the ring at one time.
const REAP_BUDGET: u32 = 256;
/// Operations that fit unsubmitted.
const RING_ENTRIES: u32 = 512;
/// Events taken from epoll at one time.
const EPOLL_EVENTS: usize = 64;
/// A busy reactor asks epoll, which costs a system call, once in so many turns.
const EPOLL_TURNS: u32 = 8;
/// The ring's client that watches descriptors; [`crate::RingClient`]s follow.
const WATCHER: u16 = 0;

pub(crate) struct Waiter {
    kernel: Kernel,
    watches: Slots<Watch>,
    /// Roots whose descriptors became readable.
    fired: Vec<RootId>,
    undone: Vec<Undone>,
}

impl Waiter {
    pub fn new(engine: Engine) -> io::Result<Self> {
        let kernel = match engine {
            Engine::Epoll => Kernel::epoll()?,
            Engine::IoUring => Kernel::Uring(Box::new(Ring::new(RING_ENTRIES)?)),
            Engine::Auto => Kernel::auto(Ring::new(RING_ENTRIES))?,
        };
        Ok(Self { kernel, watches: Slots::new(16), fired: Vec::new(), undone: Vec::new() })
    }

    pub fn engine(&self) -> Engine {
        match self.kernel {
            Kernel::Uring(_) => Engine::IoUring,
            Kernel::Epoll { .. } => Engine::Epoll,
        }
    }

    pub fn ring(&mut self) -> Option<&mut Ring> {
        match &mut self.kernel {
            Kernel::Uring(ring) => Some(ring),
            Kernel::Epoll { .. } => None,
        }
    }

    /// Whether the ring has operations in flight besides the watches' polls.
    pub fn is_owed(&self) -> bool {
        match &self.kernel {
            Kernel::Uring(ring) => ring.in_flight() > self.watches.len(),
            Kernel::Epoll { .. } => false,
        }
    }

    /// Reports `root` as fired each time that `fd` becomes readable.
    pub fn watch(&mut self, fd: OwnedFd, root: Option<RootId>) -> io::Result<WatchId> {
        if self.watches.is_full() {
            self.watches.grow(self.watches.capacity());
        }
        let Ok(key) = self.watches.insert(Watch { fd, root }) else { unreachable!("it has room") };
        self.start(key).inspect_err(|_| drop(self.watches.remove(key)))?;
        Ok(WatchId(key))
    }

    fn start(&mut self, key: Key) -> io::Result<()> {
        let fd = self.watches.get(key).expect("just inserted, or checked").fd.as_fd();
        match &mut self.kernel {
            Kernel::Uring(ring) => ring.poll_readable(tag(key), fd),
            Kernel::Epoll { epoll, .. } => {
                let data = epoll::EventData::new_u64(key.raw());
                Ok(epoll::add(epoll, fd, data, epoll::EventFlags::IN | epoll::EventFlags::ET)?)
            }
        }
    }

    /// Ends a watch, and gives its descriptor back.
    pub fn unwatch(&mut self, id: WatchId) -> Option<OwnedFd> {
        let watch = self.watches.remove(id.0)?;
        match &mut self.kernel {
            Kernel::Uring(_) => self.attempt(Undone::Cancel(tag(id.0))),
            Kernel::Epoll { epoll, .. } => {
                let _ = epoll::delete(epoll, &watch.fd);
            }
        }
        Some(watch.fd)
    }

    /// Queues it, now or when there is room.
    fn attempt(&mut self, what: Undone) {
        let result = match what {
            Undone::Start(key) if self.watches.get(key).is_some() => self.start(key),
            Undone::Start(_) => Ok(()),
            Undone::Cancel(tag) => self.ring().map_or(Ok(()), |ring| ring.cancel(tag)),
        };
        if result.is_err() {
            self.undone.push(what);
        }
    }

    /// Takes what the kernel has for us without waiting, but in `completions` what is for the ring's clients. `idle`: there
    /// was nothing else to do lately.
    pub fn reap(&mut self, completions: &mut Vec<Completion>, idle: bool) -> u32 {
        let ring = match &mut self.kernel {
            Kernel::Uring(ring) => ring,
            Kernel::Epoll { skipped, .. } if !idle && *skipped < EPOLL_TURNS => {
                *skipped += 1;
                return 0;
            }
            Kernel::Epoll { .. } => return self.reap_epoll(Some(Duration::ZERO)),
        };
        let (watches, fired, undone) = (&self.watches, &mut self.fired, &mut self.undone);
        ring.reap(REAP_BUDGET, |c| {
            if c.tag.client != WATCHER {
                return completions.push(c);
            }
            let Some((key, watch)) = find(watches, c.tag) else { return };
            fired.extend(watch.root);
            if c.more {
                return;
            }
            // The kernel ends a lasting poll when its completions overflow; and when it fails, which a file that is
            // checked before it is watched does not: its root is told, and no more.
            if c.result >= 0 {
                undone.push(Undone::Start(key));
            } else {
                let error = io::Error::from_raw_os_error(-c.result);
                tracing::warn!(%error, "a watched descriptor cannot be polled");
            }
        })
    }

    fn reap_epoll(&mut self, timeout: Option<Duration>) -> u32 {
        let Kernel::Epoll { epoll, events, skipped } = &mut self.kernel else { unreachable!("looked at") };
        *skipped = 0;
        events.clear();
        let timeout =
            timeout.map(|t| Timespec::try_from(t).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 }));
        // An interrupted wait is an early one.
        let _ = epoll::wait(&*epoll, rustix::buffer::spare_capacity(events), timeout.as_ref());
        let watches = &self.watches;
        let root = |e: &epoll::Event| watches.get(Key::from_raw(e.data.u64())).and_then(|w| w.root);
        self.fired.extend(events.iter().filter_map(root));
        events.len() as u32
    }

    /// Takes the roots that fired since the last call.
    pub fn take_fired(&mut self, into: &mut Vec<RootId>) {
        into.append(&mut self.fired);
    }

    /// Whether nothing is to be done but to wait.
    pub const fn is_quiet(&self) -> bool {
        self.undone.is_empty() && self.fired.is_empty()
    }

    /// Hands queued operations to the kernel.
    pub fn submit(&mut self) -> io::Result<()> {
        for what in std::mem::take(&mut self.undone) {
            self.attempt(what);
        }
        self.ring().map_or(Ok(()), Ring::submit)
    }

    /// Sleeps until something is there to be reaped, or `timeout` has passed.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        match &mut self.kernel {
            Kernel::Uring(ring) => ring.wait(timeout),
            Kernel::Epoll { .. } => {
                self.reap_epoll(timeout);
                Ok(())
            }
        }
    }
}

impl Kernel {
    fn epoll() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self::Epoll { epoll, events: Vec::with_capacity(EPOLL_EVENTS), skipped: 0 })
    }

    /// The ring if there is one.
    fn auto(ring: io::Result<Ring>) -> io::Result<Self> {
        match ring {
            Ok(ring) => Ok(Self::Uring(Box::new(ring))),
            Err(error) => {
                tracing::warn!(
                    %error,
                    "io_uring is not to be had: epoll and threads take its place, which is slower. \
                     Look at kernel.io_uring_disabled, and at the seccomp filter of the container"
                );
                Self::epoll()
            }
        }
    }
}

/// A key as a ring's token: the index, and as much of the generation as fits.
fn tag(key: Key) -> Tag {
    Tag { client: WATCHER, token: key.raw() & ((1 << 48) - 1) }
}

/// The watch that a token was made for, unless it is gone.
fn find(watches: &Slots<Watch>, t: Tag) -> Option<(Key, &Watch)> {
    let index = t.token as u32;
    watches.at_index(index).filter(|(key, _)| tag(*key) == t)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn without_a_ring_auto_takes_epoll_and_says_so() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (kept, forbidden) = (Arc::clone(&lines), io::Error::from(io::ErrorKind::PermissionDenied));
        let writer = move || Kept(Arc::clone(&kept));
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish();
        let kernel = tracing::subscriber::with_default(subscriber, || Kernel::auto(Err(forbidden)));
        assert!(matches!(kernel, Ok(Kernel::Epoll { .. })));
        let text = String::from_utf8(lines.lock().unwrap().clone()).unwrap();
        assert!(text.contains("WARN") && text.contains("io_uring is not to be had"), "{text}");
        assert!(matches!(Kernel::auto(Ring::new(4)), Ok(Kernel::Uring(_))));
        assert_eq!(Waiter::new("epoll".parse().unwrap()).unwrap().engine(), Engine::Epoll);
        assert_eq!(Waiter::new("auto".parse().unwrap()).unwrap().engine(), Engine::IoUring);
        assert!("kqueue".parse::<Engine>().is_err());
    }

    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Kept {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(text);
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
}
