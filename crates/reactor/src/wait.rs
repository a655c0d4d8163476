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
    Epoll { epoll: OwnedFd, events: Vec<epoll::Event> },
}

/// Completions taken from the ring at one time.
const REAP_BUDGET: u32 = 256;
/// Operations that fit unsubmitted.
const RING_ENTRIES: u32 = 512;
/// Events taken from epoll at one time.
const EPOLL_EVENTS: usize = 64;
/// The ring's client that watches descriptors; [`crate::RingClient`]s follow.
const WATCHER: u16 = 0;

pub(crate) struct Waiter {
    kernel: Kernel,
    watches: Slots<Watch>,
    /// Roots whose descriptors became readable.
    fired: Vec<RootId>,
}

impl Waiter {
    pub fn new(engine: Engine) -> io::Result<Self> {
        let uring = match engine {
            Engine::Epoll => Err(io::Error::from(io::ErrorKind::Unsupported)),
            Engine::Auto | Engine::IoUring => Ring::new(RING_ENTRIES),
        };
        let kernel = match uring {
            Ok(ring) => Kernel::Uring(Box::new(ring)),
            Err(e) if engine == Engine::IoUring => return Err(e),
            Err(_) => Kernel::Epoll {
                epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
                events: Vec::with_capacity(EPOLL_EVENTS),
            },
        };
        Ok(Self { kernel, watches: Slots::new(16), fired: Vec::new() })
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
            // The poll holds the file until it is cancelled. If that cannot be queued now, the ring is broken, and its
            // next submission will say so.
            Kernel::Uring(ring) => {
                let _ = ring.cancel(tag(id.0));
            }
            Kernel::Epoll { epoll, .. } => {
                let _ = epoll::delete(epoll, &watch.fd);
            }
        }
        Some(watch.fd)
    }

    /// Takes what the kernel has for us without entering it, but in `completions` what is for the ring's clients.
    pub fn reap(&mut self, completions: &mut Vec<Completion>) -> u32 {
        let Kernel::Uring(ring) = &mut self.kernel else { return self.reap_epoll(Some(Duration::ZERO)) };
        let mut restart = false;
        let (watches, fired) = (&self.watches, &mut self.fired);
        let count = ring.reap(REAP_BUDGET, |c| {
            if c.tag.client != WATCHER {
                return completions.push(c);
            }
            let Some((key, watch)) = find(watches, c.tag) else { return };
            restart |= !c.more && c.result != -libc_ecanceled();
            debug_assert!(watches.get(key).is_some());
            fired.extend(watch.root);
        });
        if restart {
            self.restart_all();
        }
        count
    }

    /// The kernel ends a lasting poll when its completions overflow. That is rare, and a second poll of the same
    /// descriptor harmless: it is one more wake-up.
    fn restart_all(&mut self) {
        let keys: Vec<_> = self.watches.iter().map(|(key, _)| key).collect();
        for key in keys {
            if let Kernel::Uring(ring) = &mut self.kernel {
                let _ = ring.cancel(tag(key));
            }
            let _ = self.start(key);
        }
    }

    fn reap_epoll(&mut self, timeout: Option<Duration>) -> u32 {
        let Kernel::Epoll { epoll, events } = &mut self.kernel else { unreachable!("the caller looked") };
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

    /// Hands queued operations to the kernel.
    pub fn submit(&mut self) -> io::Result<()> {
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

const fn libc_ecanceled() -> i32 {
    rustix::io::Errno::CANCELED.raw_os_error()
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
