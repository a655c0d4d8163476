//! The driver of the kernel interface, io_uring or (where that is forbidden) epoll. The reactor sleeps in it, is woken by it, and
//! receives the completions of file operations from it. Reactor context.
//!
//! It is a [`Driver`] like any other, except for its place in a turn. It is reaped first, since it reports which other drivers
//! were woken by their descriptors. It is flushed and armed last, since other drivers may queue operations.

use crate::ring_clients::RingClients;
use crate::socket::RECEIVE;
use crate::{Armed, Cx, Driver, DriverId, RootId};
use aryk_slots::{Key, Slots};
use aryk_uring::{Completion, Ring, Tag};
use rustix::event::{Timespec, epoll};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::str::FromStr;
use std::time::Duration;

/// Which kernel interface a reactor uses.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Engine {
    /// io_uring, or epoll where io_uring is forbidden.
    #[default]
    Auto,
    /// io_uring, or an error where it is forbidden.
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

/// Identifies a watched descriptor on its reactor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WatchId(Key);

/// The object that a watched descriptor wakes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Watcher {
    /// The reactor itself, by its eventfd, which has no other effect.
    Reactor,
    /// A root, which is promoted.
    Root(RootId),
    /// A driver, which is reaped in the same turn.
    Driver(DriverId),
}

impl Watcher {
    fn fire(self, cx: &mut Cx) {
        match self {
            Self::Reactor => {}
            Self::Root(root) => cx.kick(root),
            Self::Driver(driver) => cx.wake_driver(driver),
        }
    }
}

#[derive(Debug)]
struct Watch {
    fd: OwnedFd,
    watcher: Watcher,
}

enum Interface {
    Uring(Box<Ring>),
    Epoll { epoll: OwnedFd, events: Vec<epoll::Event>, skipped: u32 },
}

/// An operation for which the ring had no room, to be retried.
#[derive(Clone, Copy)]
enum Deferred {
    Start(Key),
    Cancel(Tag),
}

/// The most operations that are queued before they are submitted.
const RING_ENTRIES: u32 = 512;
/// The most events that one `epoll_wait` returns.
const EPOLL_EVENTS: usize = 64;
/// A busy reactor skips `epoll_wait`, which costs a system call, in this many turns after each call.
const EPOLL_TURNS: u32 = 8;
/// The client number of the watches in the ring. The numbers of [`crate::RingClient`]s follow.
const WATCHES: u16 = 0;
const _: () = assert!(EPOLL_EVENTS > 0 && RING_ENTRIES.is_power_of_two(), "as the kernel requires");

pub(crate) struct KernelDriver {
    interface: Interface,
    watches: Slots<Watch>,
    deferred: Vec<Deferred>,
    pub clients: RingClients,
    /// Blocking calls whose results have not been delivered.
    calls: u32,
    /// Results of blocking calls; empty except during their delivery.
    results: Vec<Completion>,
    /// Whether the ring supports sockets, once that was asked.
    has_sockets: Option<bool>,
}

impl KernelDriver {
    pub fn new(engine: Engine) -> io::Result<Self> {
        let interface = match engine {
            Engine::Epoll => Interface::epoll()?,
            Engine::IoUring => Interface::Uring(Box::new(Ring::new(RING_ENTRIES)?)),
            Engine::Auto => Interface::auto(Ring::new(RING_ENTRIES))?,
        };
        Ok(Self {
            interface,
            watches: Slots::new(16),
            deferred: Vec::new(),
            clients: RingClients::default(),
            calls: 0,
            results: Vec::new(),
            has_sockets: None,
        })
    }

    /// Whether sockets can be read and written by the ring.
    pub fn has_sockets(&mut self) -> bool {
        *self.has_sockets.get_or_insert_with(|| match &mut self.interface {
            Interface::Uring(ring) => match ring.prepare_sockets() {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!(%error, "io_uring does not support sockets (Linux 6.1 does): a reactor polls them");
                    false
                }
            },
            Interface::Epoll { .. } => false,
        })
    }

    /// Queues the receives of a socket of this client.
    pub fn receive(&mut self, client: u16, fd: BorrowedFd<'_>) -> io::Result<()> {
        let ring = self.ring().expect("a reactor with sockets in its ring has one");
        ring.receive(Tag { client, token: RECEIVE }, fd)?;
        self.clients.receive_began(client);
        Ok(())
    }

    pub const fn engine(&self) -> Engine {
        match self.interface {
            Interface::Uring(_) => Engine::IoUring,
            Interface::Epoll { .. } => Engine::Epoll,
        }
    }

    #[inline]
    pub fn ring(&mut self) -> Option<&mut Ring> {
        match &mut self.interface {
            Interface::Uring(ring) => Some(ring),
            Interface::Epoll { .. } => None,
        }
    }

    /// Counts a submitted blocking call as an operation in flight.
    pub const fn add_call(&mut self) {
        self.calls += 1;
    }

    /// Wakes `watcher` each time that `fd` becomes readable.
    pub fn watch(&mut self, fd: OwnedFd, watcher: Watcher) -> io::Result<WatchId> {
        let key = self.watches.add(Watch { fd, watcher });
        self.start(key).inspect_err(|_| drop(self.watches.remove(key)))?;
        Ok(WatchId(key))
    }

    fn start(&mut self, key: Key) -> io::Result<()> {
        let fd = self.watches.get(key).expect("just inserted, or checked").fd.as_fd();
        match &mut self.interface {
            Interface::Uring(ring) => ring.poll_readable(tag(key), fd),
            Interface::Epoll { epoll, .. } => {
                let data = epoll::EventData::new_u64(key.raw());
                Ok(epoll::add(epoll, fd, data, epoll::EventFlags::IN | epoll::EventFlags::ET)?)
            }
        }
    }

    /// Ends a watch; returns its watcher and its descriptor.
    pub fn unwatch(&mut self, id: WatchId) -> Option<(Watcher, OwnedFd)> {
        let watch = self.watches.remove(id.0)?;
        match &mut self.interface {
            Interface::Uring(_) => self.attempt(Deferred::Cancel(tag(id.0))),
            Interface::Epoll { epoll, .. } => {
                let _ = epoll::delete(epoll, &watch.fd);
            }
        }
        Some((watch.watcher, watch.fd))
    }

    /// Queues an operation, now or when there is room.
    fn attempt(&mut self, what: Deferred) {
        let result = match what {
            Deferred::Start(key) if self.watches.get(key).is_some() => self.start(key),
            Deferred::Start(_) => Ok(()),
            Deferred::Cancel(tag) => self.ring().map_or(Ok(()), |ring| ring.cancel(tag)),
        };
        if result.is_err() {
            self.deferred.push(what);
        }
    }

    /// Whether [`Driver::reap`] may find completions or events.
    #[inline]
    pub fn may_find(&mut self) -> bool {
        match &mut self.interface {
            Interface::Uring(ring) => ring.may_reap(),
            Interface::Epoll { .. } => true,
        }
    }

    /// Whether operations wait to be handed to the kernel.
    #[inline]
    pub fn has_queued(&self) -> bool {
        let ring_has = match &self.interface {
            Interface::Uring(ring) => ring.has_queued(),
            Interface::Epoll { .. } => false,
        };
        ring_has || !self.deferred.is_empty()
    }

    fn reap_ring(&mut self, budget: u32, cx: &mut Cx) -> u32 {
        let Interface::Uring(ring) = &mut self.interface else { unreachable!("the caller has a ring") };
        let (watches, clients, deferred) = (&self.watches, &mut self.clients, &mut self.deferred);
        ring.reap(budget, |c| {
            if c.tag.client != WATCHES {
                return clients.deliver(c, cx);
            }
            let Some((key, watch)) = find(watches, c.tag) else { return };
            watch.watcher.fire(cx);
            if c.more {
                return;
            }
            // The kernel ends a multishot poll when its completions overflow, and when the poll fails. A failed poll wakes its
            // watcher once and is not restarted; it does not happen with files that are checked before they are watched.
            if c.result >= 0 {
                deferred.push(Deferred::Start(key));
            } else {
                let error = io::Error::from_raw_os_error(-c.result);
                tracing::warn!(%error, "a watched descriptor cannot be polled");
            }
        })
    }

    fn reap_epoll(&mut self, timeout: Option<Duration>, cx: &mut Cx) -> u32 {
        let Interface::Epoll { epoll, events, skipped } = &mut self.interface else {
            unreachable!("the caller has no ring")
        };
        *skipped = 0;
        events.clear();
        let timeout =
            timeout.map(|t| Timespec::try_from(t).unwrap_or(Timespec { tv_sec: i64::MAX, tv_nsec: 0 }));
        // An interrupted wait only ends early.
        let _ = epoll::wait(&*epoll, rustix::buffer::spare_capacity(events), timeout.as_ref());
        for event in &*events {
            if let Some(watch) = self.watches.get(Key::from_raw(event.data.u64())) {
                watch.watcher.fire(cx);
            }
        }
        events.len() as u32
    }

    /// Delivers the results of blocking calls that have ended; returns their number.
    #[cold]
    fn deliver_results(&mut self, cx: &mut Cx) -> u32 {
        cx.handle.try_take_results(&mut self.results);
        let count = self.results.len() as u32;
        self.results.drain(..).for_each(|result| self.clients.deliver(result, cx));
        self.calls = self.calls.strict_sub(count);
        count
    }

    /// Sleeps until a completion or an event is there, or `timeout` has passed.
    pub fn wait(&mut self, timeout: Option<Duration>, cx: &mut Cx) -> io::Result<()> {
        match &mut self.interface {
            Interface::Uring(ring) => ring.wait(timeout),
            Interface::Epoll { .. } => {
                self.reap_epoll(timeout, cx);
                Ok(())
            }
        }
    }
}

impl Driver for KernelDriver {
    #[inline]
    fn reap(&mut self, budget: u32, cx: &mut Cx) -> u32 {
        let results = if std::mem::take(&mut cx.results_may_be_there) { self.deliver_results(cx) } else { 0 };
        results
            + match &mut self.interface {
                Interface::Uring(_) => self.reap_ring(budget, cx),
                Interface::Epoll { skipped, .. } if cx.worked && *skipped < EPOLL_TURNS => {
                    *skipped += 1;
                    0
                }
                Interface::Epoll { .. } => self.reap_epoll(Some(Duration::ZERO), cx),
            }
    }

    /// Hands queued operations to the kernel.
    #[inline]
    fn flush(&mut self, _: &mut Cx) {
        for what in std::mem::take(&mut self.deferred) {
            self.attempt(what);
        }
        if let Some(ring) = self.ring()
            && let Err(e) = ring.submit()
        {
            panic!("io_uring refuses the queued operations: {e}");
        }
    }

    /// There is no wake-up to turn on: [`KernelDriver::wait`] returns at once if a completion is there.
    fn arm(&mut self, _: &mut Cx) -> Armed {
        if self.deferred.is_empty() { Armed::Yes } else { Armed::Busy }
    }

    /// Operations of the ring's clients, and blocking calls: watches and receives do not count.
    #[inline]
    fn in_flight(&self) -> u32 {
        let operations = match &self.interface {
            Interface::Uring(ring) => {
                ring.in_flight().saturating_sub(self.watches.len() + self.clients.receives())
            }
            Interface::Epoll { .. } => 0,
        };
        operations + self.calls
    }

    fn name(&self) -> String {
        match self.interface {
            Interface::Uring(_) if self.has_sockets == Some(false) => "io_uring without sockets",
            Interface::Uring(_) => "io_uring",
            Interface::Epoll { .. } => "epoll",
        }
        .to_owned()
    }
}

impl Interface {
    fn epoll() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        Ok(Self::Epoll { epoll, events: Vec::with_capacity(EPOLL_EVENTS), skipped: 0 })
    }

    /// Uses `ring` if the kernel created it, otherwise epoll, with a warning.
    fn auto(ring: io::Result<Ring>) -> io::Result<Self> {
        match ring {
            Ok(ring) => Ok(Self::Uring(Box::new(ring))),
            Err(error) => {
                tracing::warn!(
                    %error,
                    "io_uring is not available: epoll and threads replace it, which is slower. \
                     Check kernel.io_uring_disabled, and the seccomp filter of the container"
                );
                Self::epoll()
            }
        }
    }
}

/// The ring's token of a watch's key: the index, and as much of the generation as fits.
fn tag(key: Key) -> Tag {
    Tag { client: WATCHES, token: key.raw() & ((1 << 48) - 1) }
}

/// The watch that a token was made for, unless it has ended.
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
        let interface = tracing::subscriber::with_default(subscriber, || Interface::auto(Err(forbidden)));
        assert!(matches!(interface, Ok(Interface::Epoll { .. })));
        let text = String::from_utf8(lines.lock().unwrap().clone()).unwrap();
        assert!(text.contains("WARN") && text.contains("io_uring is not available"), "{text}");
        assert!(matches!(Interface::auto(Ring::new(4)), Ok(Interface::Uring(_))));
        assert_eq!(KernelDriver::new("epoll".parse().unwrap()).unwrap().engine(), Engine::Epoll);
        assert_eq!(KernelDriver::new("auto".parse().unwrap()).unwrap().engine(), Engine::IoUring);
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
