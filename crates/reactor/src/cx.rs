//! The state of a reactor, for roots, channels, drivers, pollers and messages while they run. Reactor context.

use crate::account::Running;
use crate::background;
use crate::bell::{Bell, Bells};
use crate::blocking::Blocking;
use crate::drivers::Drivers;
use crate::executor::Local;
use crate::handle::{Handle, RootRef, lock};
use crate::kernel::{Engine, KernelDriver, WatchId, Watcher};
use crate::outgoing::Outgoing;
use crate::ring_clients::RingClient;
use crate::root::RootCell;
use crate::sleep::SleepPolicy;
use crate::thread::{self, Moving, Polled, PollerStats, Runs, Thread, ThreadId, ThreadStats};
use crate::timers::{TimerId, Timers};
use crate::trace::{Layer, Point, Trace, Traced};
use crate::{Clock, CoreSet, Nanos, PollerId, Root, RootId};
use aryk_slots::Slots;
use aryk_uring::{Completion, Filled, Ring, Signaller, Tag};
use std::any::{Any, TypeId};
use std::cell::{RefCell, RefMut};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

pub(crate) struct RootEntry {
    pub root: Rc<dyn RootCell>,
    pub thread: ThreadId,
    /// The root is to be polled.
    pub woken: bool,
    /// The root is in the queue of woken roots, where it stays when its wake is cleared.
    pub queued: bool,
    /// The root was woken by [`Cx::wake_for_event`].
    pub has_event: bool,
    pub promoted: bool,
    pub policy: SleepPolicy,
    /// When the root last had work while promoted.
    pub last_work: Nanos,
    /// Number of polls without work since then.
    pub idle_polls: u32,
    pub runs: Runs,
}

/// A poller's function; returns whether there was work.
type PollFn = Box<dyn FnMut(&mut Cx) -> bool>;

pub(crate) struct Poller {
    pub thread: ThreadId,
    /// `None`: the poller runs every turn.
    pub period: Option<Duration>,
    /// `None` while the poller runs.
    pub run: Option<PollFn>,
    pub runs: Runs,
}

pub(crate) enum Timed {
    Wake(RootId),
    Poll(PollerId),
    Call(Box<dyn FnOnce(&mut Cx)>),
}

/// The number of past turns whose end times are kept.
const TURNS: u64 = 64;

/// When the last turns ended.
pub(crate) struct Turns {
    number: u64,
    ends: [Nanos; TURNS as usize],
}

impl Default for Turns {
    fn default() -> Self {
        Self { number: 0, ends: [Nanos(0); TURNS as usize] }
    }
}

impl Turns {
    /// Begins a turn at `now`, which is also the end of the last turn.
    #[inline]
    pub fn begin(&mut self, now: Nanos) {
        self.ends[(self.number % TURNS) as usize] = now;
        self.number += 1;
    }
}

/// The state of a reactor. Each root, channel, poller and message gets it while it runs.
pub struct Cx {
    pub(crate) now: Nanos,
    pub(crate) turns: Turns,
    pub(crate) clock: Clock,
    pub(crate) handle: Handle,
    pub(crate) roots: Slots<RootEntry>,
    pub(crate) woken: VecDeque<RootId>,
    /// The root that was woken last, until it is polled: nearly all completions of a batch wake the same root.
    pub(crate) last_woken: Option<RootId>,
    /// The root that [`Cx::without_wakes`] runs for.
    unwoken: Option<RootId>,
    pub(crate) kicked: Vec<RootId>,
    pub(crate) promoted: VecDeque<RootId>,
    pub(crate) drivers: Drivers,
    /// Turns in which the kernel driver had completions. Every turn looks for them.
    pub(crate) kernel_busy_reaps: u64,
    /// The reactor's own number among the threads of the process.
    number: u64,
    pub(crate) pollers: Slots<Poller>,
    pub(crate) active_pollers: VecDeque<PollerId>,
    pub(crate) timers: Timers<Timed>,
    pub(crate) threads: Slots<Thread>,
    pub(crate) kernel: Rc<RefCell<KernelDriver>>,
    pub(crate) signaller: Signaller,
    pub(crate) blocking: Blocking,
    pub(crate) local: Local,
    /// Background tasks that wait for their next turn, in order of arrival.
    pub(crate) background: VecDeque<background::Waiting>,
    pub(crate) trace: Trace,
    pub(crate) outgoing: Outgoing,
    pub(crate) bells: Bells,
    pub(crate) awake_until: Nanos,
    /// The reactor's own policy, which roots without a policy have too.
    pub(crate) policy: SleepPolicy,
    /// Number of roots with the policy [`SleepPolicy::Poll`]. While there are any, the reactor does not sleep.
    pub(crate) sleepless_roots: u32,
    /// Whether the last turn had work.
    pub(crate) worked: bool,
    /// Blocking calls may have ended.
    pub(crate) results_may_be_there: bool,
    pub(crate) stopping: bool,
    locals: HashMap<TypeId, Rc<dyn Any>>,
}

impl fmt::Debug for Cx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cx").field("handle", &self.handle).field("now", &self.now).finish_non_exhaustive()
    }
}

impl Cx {
    pub(crate) fn new(
        handle: Handle,
        clock: Clock,
        policy: SleepPolicy,
        engine: Engine,
        trace: Trace,
        blocking: Blocking,
    ) -> io::Result<Self> {
        let mut kernel = KernelDriver::new(engine)?;
        kernel.watch(handle.0.wake_fd.try_clone()?, Watcher::Reactor)?;
        let signaller = Signaller::new();
        if !signaller.is_bounded() {
            tracing::warn!(
                "kernel AIO is not available: a hostile guest can stall this reactor when it is signalled. \
                 Look at fs.aio-max-nr, and at the seccomp filter of the container"
            );
        }
        Ok(Self {
            now: clock.now(),
            turns: Turns::default(),
            clock,
            local: Local::new(handle.clone()),
            handle,
            roots: Slots::new(16),
            woken: VecDeque::new(),
            last_woken: None,
            unwoken: None,
            kicked: Vec::new(),
            promoted: VecDeque::new(),
            drivers: Drivers::default(),
            kernel_busy_reaps: 0,
            number: thread::next_number(),
            pollers: Slots::new(8),
            active_pollers: VecDeque::new(),
            timers: Timers::new(),
            threads: Slots::new(8),
            kernel: Rc::new(RefCell::new(kernel)),
            signaller,
            blocking,
            background: VecDeque::new(),
            trace,
            outgoing: Outgoing::default(),
            bells: Bells::default(),
            awake_until: Nanos(0),
            policy,
            sleepless_roots: 0,
            worked: false,
            results_may_be_there: false,
            stopping: false,
            locals: HashMap::new(),
        })
    }

    /// The time when this turn last read the clock.
    #[inline]
    pub const fn now(&self) -> Nanos {
        self.now
    }

    /// Reads the clock. Only to measure a request: [`Cx::now`] is enough for everything else.
    #[inline]
    pub fn refresh_now(&mut self) -> Nanos {
        self.now = self.clock.now();
        self.now
    }

    /// The number of this turn.
    #[inline]
    pub const fn turn(&self) -> u64 {
        self.turns.number
    }

    /// When a turn ended, after its signals were sent. `None` for this turn, and for turns before the last 64.
    #[inline]
    pub fn turn_ended(&self, turn: u64) -> Option<Nanos> {
        let age = self.turns.number.wrapping_sub(turn);
        (1..=TURNS).contains(&age).then(|| self.turns.ends[(turn % TURNS) as usize])
    }

    /// The handle by which other threads reach this reactor.
    pub const fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The interface of this reactor for its tasks.
    pub const fn local(&self) -> &Local {
        &self.local
    }

    /// The reactor's own value of type `T`, created by the first call.
    pub fn local_state<T: Default + 'static>(&mut self) -> Rc<T> {
        let state = self.locals.entry(TypeId::of::<T>()).or_insert_with(|| Rc::new(T::default()));
        Rc::downcast(Rc::clone(state)).unwrap_or_else(|_| unreachable!("stored under its own type"))
    }

    /// Creates a thread.
    pub fn add_thread(&mut self, name: impl Into<String>, cores: CoreSet) -> ThreadId {
        ThreadId(self.threads.add(Thread::new(name.into(), cores)))
    }

    /// Adds a thread that comes from another reactor.
    pub fn adopt_thread(&mut self, thread: Moving) -> ThreadId {
        ThreadId(self.threads.add(thread.0))
    }

    /// Removes a thread that moves to another reactor.
    ///
    /// # Panics
    /// If roots or pollers still belong to it.
    pub fn release_thread(&mut self, id: ThreadId) -> Moving {
        let thread = self.threads.remove(id.0).expect("a thread of this reactor");
        assert_eq!(thread.members, 0, "thread {} still has members", thread.name);
        Moving(thread)
    }

    /// The reactor's own number, which no thread of the process has: the reactor's drivers belong to none of its threads.
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// The number of a thread of this reactor, unique in the process.
    ///
    /// # Panics
    /// If the thread is not on this reactor.
    pub fn thread_number(&self, id: ThreadId) -> u64 {
        self.threads.get(id.0).expect("a thread of this reactor").number
    }

    /// The thread with this number, if it is on this reactor.
    pub fn find_thread(&self, number: u64) -> Option<ThreadId> {
        self.threads.iter().find(|(_, thread)| thread.number == number).map(|(key, _)| ThreadId(key))
    }

    /// Sets the cores on which a thread may run. This does not move the thread: the scheduler reads the set.
    ///
    /// # Panics
    /// If the thread is not on this reactor.
    pub fn set_thread_cores(&mut self, id: ThreadId, cores: CoreSet) {
        self.threads.get_mut(id.0).expect("a thread of this reactor").cores = cores;
    }

    /// The number of roots and pollers of a thread; 0 if there is no such thread.
    pub fn thread_members(&self, id: ThreadId) -> u32 {
        self.threads.get(id.0).map_or(0, |thread| thread.members)
    }

    /// Adds to a thread's account the time that it worked outside of its roots and pollers. A thread that no longer exists is
    /// ignored.
    pub(crate) fn charge(&mut self, id: ThreadId, time: Duration) {
        if let Some(thread) = self.threads.get_mut(id.0) {
            thread.busy_ns += time.as_nanos() as u64;
        }
    }

    /// Removes a thread.
    ///
    /// # Panics
    /// If roots or pollers still belong to it.
    pub fn remove_thread(&mut self, id: ThreadId) {
        drop(self.release_thread(id));
    }

    /// The number of the thread that `root` belongs to, as [`ThreadStats::id`].
    pub fn thread_of(&self, root: RootId) -> Option<u64> {
        Some(self.thread_number(self.roots.get(root.0)?.thread))
    }

    /// Whether the reactor has no threads, roots, pollers, drivers and tasks, and no messages to send.
    pub(crate) fn is_deserted(&self) -> bool {
        self.threads.iter().next().is_none()
            && self.roots.iter().next().is_none()
            && self.pollers.iter().next().is_none()
            && self.drivers.is_empty()
            && self.outgoing.is_empty()
            && !self.local.has_tasks()
    }

    /// The statistics of the roots and pollers of this reactor.
    pub fn poller_stats(&self) -> Vec<PollerStats> {
        let names = lock(&self.handle.0.names);
        let stats = |thread, what: Running, polled, runs| PollerStats {
            thread: self.thread_number(thread),
            id: what.number(),
            name: names.get(&what).cloned().unwrap_or_default(),
            polled,
            runs,
        };
        let roots = self.roots.iter().map(|(key, root)| {
            let polled = if root.promoted { Polled::Always } else { Polled::WhenWoken };
            stats(root.thread, Running::root(key.index()), polled, root.runs)
        });
        let pollers = self.pollers.iter().map(|(key, poller)| {
            let polled = poller.period.map_or(Polled::Always, Polled::Every);
            stats(poller.thread, Running::poller(key.index()), polled, poller.runs)
        });
        roots.chain(pollers).collect()
    }

    /// The statistics of the threads of this reactor.
    pub fn thread_stats(&self) -> Vec<ThreadStats> {
        self.some_thread_stats(0, usize::MAX)
    }

    /// As [`Cx::thread_stats`], of at most `most` threads after the first `skip`: one call for thousands takes too long.
    pub fn some_thread_stats(&self, skip: usize, most: usize) -> Vec<ThreadStats> {
        let stats = |(_, t): (aryk_slots::Key, &Thread)| ThreadStats {
            name: t.name.clone(),
            id: t.number,
            cores: t.cores.clone(),
            busy: Duration::from_nanos(t.busy_ns),
            members: t.members,
        };
        self.threads.iter().skip(skip).take(most).map(stats).collect()
    }

    fn joined(&mut self, thread: ThreadId, by: i64) {
        let thread = self.threads.get_mut(thread.0).expect("a thread of this reactor");
        thread.members = thread.members.strict_add_signed(by as i32);
        self.handle.0.account.add_members(by);
    }

    /// Adds the root that `make` builds from the id that it will have. The root is polled when it is woken; see also
    /// [`Cx::kick`].
    ///
    /// # Errors
    /// Those of `make`; then no root is added.
    pub fn add_root<T: Root, E>(
        &mut self,
        thread: ThreadId,
        name: &str,
        make: impl FnOnce(RootId, &mut Self) -> Result<T, E>,
    ) -> Result<RootRef<T>, E> {
        let entry = RootEntry {
            root: Rc::new(RefCell::new(NoRoot)),
            thread,
            woken: false,
            queued: false,
            has_event: false,
            promoted: false,
            policy: self.policy,
            last_work: self.now,
            idle_polls: 0,
            runs: Runs::default(),
        };
        let id = RootId(self.roots.add(entry));
        self.count_sleepless(self.policy, 1);
        self.joined(thread, 1);
        let made = make(id, self);
        let root = made.inspect_err(|_| self.remove_root(id))?;
        self.roots.get_mut(id.0).expect("just inserted").root = Rc::new(RefCell::new(root));
        lock(&self.handle.0.names).insert(Running::root(id.0.index()), format!("root {name}"));
        Ok(RootRef::new(self.handle.clone(), id))
    }

    /// Removes a root. It is dropped when it is no longer running.
    pub fn remove_root(&mut self, id: RootId) {
        let entry = self.roots.remove(id.0).expect("a root of this reactor");
        self.count_sleepless(entry.policy, -1);
        self.joined(entry.thread, -1);
        self.bells.remove(id);
        lock(&self.handle.0.names).remove(&Running::root(id.0.index()));
    }

    /// Moves a root to another thread of this reactor, which from then on accounts for its time.
    ///
    /// # Panics
    /// If the root or the thread is not on this reactor.
    pub fn set_thread(&mut self, root: RootId, thread: ThreadId) {
        let entry = self.roots.get_mut(root.0).expect("a root of this reactor");
        let before = std::mem::replace(&mut entry.thread, thread);
        self.joined(before, -1);
        self.joined(thread, 1);
    }

    /// Sets the policy that the reactor follows when it has no work after that of `root`; `None`: the reactor's own policy.
    ///
    /// # Panics
    /// If the root is not on this reactor.
    pub fn set_sleep_policy(&mut self, root: RootId, policy: Option<SleepPolicy>) {
        let policy = policy.unwrap_or(self.policy);
        let entry = self.roots.get_mut(root.0).expect("a root of this reactor");
        let before = std::mem::replace(&mut entry.policy, policy);
        self.count_sleepless(before, -1);
        self.count_sleepless(policy, 1);
    }

    const fn count_sleepless(&mut self, policy: SleepPolicy, change: i32) {
        if matches!(policy, SleepPolicy::Poll) {
            self.sleepless_roots = self.sleepless_roots.strict_add_signed(change);
        }
    }

    /// Removes a root that moves to another reactor, and returns it. `None` if the root is not on this reactor or not of this
    /// type. A root must not take itself.
    ///
    /// # Panics
    /// If the root is running.
    pub fn take_root<T: Root>(&mut self, id: RootId) -> Option<T> {
        let root = self.root::<T>(id)?;
        self.remove_root(id);
        Some(Rc::into_inner(root).expect("a root is not taken while it runs").into_inner())
    }

    /// The root `id`, if it is on this reactor and of this type.
    pub fn root<T: Root>(&self, id: RootId) -> Option<Rc<RefCell<T>>> {
        let root: Rc<dyn Any> = self.roots.get(id.0)?.root.clone();
        root.downcast().ok()
    }

    /// Makes the reactor poll `root`, in this turn or the next. A root that no longer exists is ignored.
    #[inline]
    pub fn wake(&mut self, root: RootId) {
        if self.last_woken != Some(root) {
            self.wake_other(root);
        }
        let is_woken = |entry: &RootEntry| entry.woken || self.unwoken == Some(root);
        debug_assert!(self.roots.get(root.0).is_none_or(is_woken), "a wake-up is lost");
    }

    #[inline(never)]
    fn wake_other(&mut self, root: RootId) {
        self.last_woken = Some(root);
        if let Some(entry) = self.roots.get_mut(root.0)
            && !std::mem::replace(&mut entry.woken, true)
            && !std::mem::replace(&mut entry.queued, true)
        {
            self.woken.push_back(root);
        }
    }

    /// As [`Cx::wake`], after an event that belongs to no request of `root`: its poll then checks everything, not only its
    /// requests.
    pub fn wake_for_event(&mut self, root: RootId) {
        if let Some(entry) = self.roots.get_mut(root.0) {
            entry.has_event = true;
            self.wake(root);
        }
    }

    /// Runs `f` for `root`, which is being polled, and will check in this poll everything that a wake of it could be for: a wake
    /// of it has no effect meanwhile. So a root that submits requests, and then polls for their completions, is not queued for
    /// another poll by those that complete at once.
    #[inline(always)]
    pub fn without_wakes<R>(&mut self, root: RootId, f: impl FnOnce(&mut Self) -> R) -> R {
        debug_assert!(self.unwoken.is_none(), "one root is polled at a time");
        (self.last_woken, self.unwoken) = (Some(root), Some(root));
        let result = f(self);
        (self.last_woken, self.unwoken) = (None, None);
        result
    }

    /// Cancels a pending wake of `root`, which checks for work now. Returns whether one of the wakes was by
    /// [`Cx::wake_for_event`].
    #[inline]
    pub fn clear_wake(&mut self, root: RootId) -> bool {
        self.last_woken = None;
        // The queue keeps its entry, which is skipped when it is popped.
        self.roots.get_mut(root.0).is_some_and(|entry| {
            entry.woken = false;
            std::mem::take(&mut entry.has_event)
        })
    }

    /// Wakes `root` now, and each time that `bell`, which is a bell of this reactor, is rung, until the root is removed.
    pub fn answer_bell(&mut self, bell: &Bell, root: RootId) {
        self.bells.add(bell, root);
        self.wake(root);
    }

    /// Wakes the roots whose bells were rung.
    pub(crate) fn answer_bells(&mut self) {
        let bells = std::mem::take(&mut self.bells);
        bells.silence(|root| self.wake(root));
        self.bells = bells;
    }

    /// Promotes `root`: it is polled every turn until it has been without work for a while.
    pub fn kick(&mut self, root: RootId) {
        self.kicked.push(root);
    }

    /// Keeps the reactor from sleeping until `at`: a queue of this reactor pauses for a few microseconds only.
    #[inline]
    pub fn stay_awake_until(&mut self, at: Nanos) {
        self.awake_until = self.awake_until.max(at);
    }

    /// Wakes `root` at the time `at`.
    pub fn wake_at(&mut self, root: RootId, at: Nanos) -> TimerId {
        self.timers.set(at, Timed::Wake(root))
    }

    /// Runs `f` at the time `at`.
    pub fn call_at(&mut self, at: Nanos, f: impl FnOnce(&mut Self) + 'static) -> TimerId {
        self.timers.set(at, Timed::Call(Box::new(f)))
    }

    /// Cancels a timer. Returns false if it has fired already.
    pub fn cancel_timer(&mut self, id: TimerId) -> bool {
        self.timers.cancel(id).is_some()
    }

    /// Adds a poller that runs once in each `period`, or else every turn, which keeps the reactor from sleeping. `run` returns
    /// whether it had work.
    pub fn add_poller(
        &mut self,
        thread: ThreadId,
        name: &str,
        period: Option<Duration>,
        run: impl FnMut(&mut Self) -> bool + 'static,
    ) -> PollerId {
        let period = period.filter(|p| !p.is_zero());
        let poller = Poller { thread, period, run: Some(Box::new(run)), runs: Runs::default() };
        let id = PollerId(self.pollers.add(poller));
        self.joined(thread, 1);
        match period {
            None => self.active_pollers.push_back(id),
            Some(period) => drop(self.timers.set(self.now.after(period), Timed::Poll(id))),
        }
        lock(&self.handle.0.names).insert(Running::poller(id.0.index()), format!("poller {name}"));
        id
    }

    /// Removes a poller.
    pub fn remove_poller(&mut self, id: PollerId) {
        let poller = self.pollers.remove(id.0).expect("a poller of this reactor");
        self.joined(poller.thread, -1);
        lock(&self.handle.0.names).remove(&Running::poller(id.0.index()));
    }

    /// Kicks `root` each time that `fd` becomes readable. The descriptor itself is never read.
    ///
    /// # Errors
    /// The kernel's.
    pub fn watch(&mut self, fd: OwnedFd, root: RootId) -> io::Result<WatchId> {
        self.kernel.borrow_mut().watch(fd, Watcher::Root(root))
    }

    /// Ends a watch of a root or of a driver, and returns its descriptor.
    pub fn unwatch(&mut self, id: WatchId) -> Option<OwnedFd> {
        let (watcher, fd) = self.kernel.borrow_mut().unwatch(id)?;
        if let Watcher::Driver(driver) = watcher {
            self.drivers.forget_watch(driver, id);
        }
        Some(fd)
    }

    /// Signals an eventfd at the end of the turn. The caller keeps it open until then.
    #[inline]
    pub fn signal(&mut self, fd: BorrowedFd<'_>) {
        self.signaller.signal(fd);
    }

    /// Which kernel interface this reactor uses.
    pub fn engine(&self) -> Engine {
        self.kernel.borrow().engine()
    }

    /// The reactor's ring, unless it runs on epoll.
    #[inline]
    pub fn ring(&mut self) -> Option<RefMut<'_, Ring>> {
        RefMut::filter_map(self.kernel.borrow_mut(), KernelDriver::ring).ok()
    }

    /// Whether the reactor's ring can read and write sockets ([`crate::Socket`]).
    pub fn has_ring_sockets(&self) -> bool {
        self.kernel.borrow_mut().has_sockets()
    }

    /// Queues the receives of a socket.
    pub(crate) fn receive(&mut self, client: &RingClient, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.kernel.borrow_mut().receive(client.number(), fd)
    }

    /// The bytes that came with a completion, if there are some.
    pub(crate) fn claim(&self, completion: &Completion) -> Option<Filled> {
        self.kernel.borrow_mut().ring()?.claim(completion)
    }

    /// Creates a client of the ring and of blocking calls: its completions wake `root`.
    pub fn open_ring_client(&mut self, root: RootId) -> RingClient {
        RingClient::open(&self.kernel, root)
    }

    /// Runs `call` on a thread where it may block. With either engine, its result (a byte count, or a negated errno) becomes a
    /// completion with `tag`, whose client number is that of a [`RingClient`].
    pub fn submit_blocking(&mut self, tag: Tag, call: Box<dyn FnOnce() -> i32 + Send>) {
        self.kernel.borrow_mut().add_call();
        self.blocking.submit(&self.handle, tag, call);
    }

    /// Sends `f` to another reactor, which runs it. The message is sent at the end of this turn, or when that reactor has room;
    /// it stays in order and delays no other message. If that reactor has ended, `f` is dropped.
    pub fn post(&mut self, to: &Handle, f: impl FnOnce(&mut Self) + Send + 'static) {
        self.outgoing.push(to, Box::new(f));
    }

    /// Writes a trace record.
    #[inline(always)]
    pub fn trace(&mut self, what: Traced, point: Point, tag: u32) {
        self.trace.record(self.now, what, point, tag);
    }

    /// Registers, for readers of the trace, the name of the object of records with this `layer` and `object`; `None` removes it.
    pub fn name_object(&mut self, layer: Layer, object: u16, name: Option<&str>) {
        let mut objects = lock(&self.handle.0.objects);
        match name {
            Some(name) => drop(objects.insert((layer, object), name.to_owned())),
            None => drop(objects.remove(&(layer, object))),
        }
    }
}

/// The placeholder of a root while it is being made.
struct NoRoot;

impl Root for NoRoot {
    fn poll(&mut self, _: &mut Cx) -> bool {
        false
    }
}
