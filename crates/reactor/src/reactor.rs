//! The reactor's loop: the order, the budgets and the account of a turn, and how the reactor goes to sleep. Reactor context.
//!
//! Each kind of work has a budget in each turn and is served in the order in which it came, or round robin: no kind starves
//! another, and within a kind no root, driver or task starves another.

use crate::account::Running;
use crate::blocking::Blocking;
use crate::cx::{Cx, Timed};
use crate::handle::Handle;
use crate::kernel::{Engine, KernelDriver};
use crate::sleep::{SleepPolicy, Spin};
use crate::trace::Trace;
use crate::{Armed, Clock, Driver, Nanos, PollerId, RootId, ThreadId};
use async_task::Runnable;
use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

/// How much of each kind of work a turn does at most.
const MESSAGES: usize = 64;
/// The budget of the kernel driver; `drivers.rs` has those of other drivers.
const KERNEL_COMPLETIONS: u32 = 256;
const PROMOTED_ROOTS: usize = 256;
const WOKEN_ROOTS: usize = 256;
/// After this time no more roots of a kind are polled in a turn: the others come first in the next turn.
const ROOTS_NS: u64 = 100_000;
const TIMERS: usize = 256;
const TASKS: usize = 16;
const CALLS: usize = 64;

/// Threads for blocking calls, shared by all reactors of a process.
pub(crate) const BLOCKING_THREADS: usize = 4;

/// One reactor. [`Reactor::run`] runs it until it ends; a test may call [`Reactor::step`] or [`Reactor::turn`] instead.
pub struct Reactor {
    cx: Cx,
    kernel: Rc<RefCell<KernelDriver>>,
    spin: Spin,
    /// The policy with the most polling among the roots that had work in this turn, or in the last one; `None`: no root had work.
    policy_of_work: Option<SleepPolicy>,
    /// The last turn had work after which the reactor polls on for a while.
    polls_on: bool,
    /// The reactor has slept since the last turn after which it polled on.
    slept: bool,
    /// The reactor's time until here is in its account.
    settled: Nanos,
    uncharged: Uncharged,
    runnable: Vec<Runnable>,
    waker: Waker,
}

/// Time that a thread has worked and that is not yet in its account. In a turn in which only one thread works, the clock is read
/// once.
struct Uncharged {
    thread: Option<ThreadId>,
    since: Nanos,
}

/// The result of a step of a reactor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// A turn with work.
    Worked,
    /// A turn without work; the reactor polls on.
    Polled,
    /// A turn without work, then a sleep, until an event or the next timer, at this time. In virtual time the sleep returns
    /// at once: the test that moves the time decides how long it lasts.
    Slept(Option<Nanos>),
}

impl std::fmt::Debug for Reactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reactor").field("cx", &self.cx).finish_non_exhaustive()
    }
}

impl Reactor {
    /// Creates a reactor for the calling thread, on which it must stay.
    ///
    /// # Errors
    /// The kernel's, if it refuses a resource of the engine.
    pub fn new(core: u16, policy: SleepPolicy, engine: Engine, clock: Clock) -> io::Result<Self> {
        Self::sharing(core, policy, engine, clock, Blocking::new(BLOCKING_THREADS))
    }

    /// As [`Reactor::new`], with a pool for blocking calls that other reactors share.
    pub(crate) fn sharing(
        core: u16,
        policy: SleepPolicy,
        engine: Engine,
        clock: Clock,
        blocking: Blocking,
    ) -> io::Result<Self> {
        let trace = Trace::new();
        let handle = Handle::new(core, clock.clone(), trace.reader())?;
        let waker = handle.waker();
        let cx = Cx::new(handle, clock, policy, engine, trace, blocking)?;
        Ok(Self {
            spin: Spin::new(cx.now()),
            policy_of_work: None,
            polls_on: false,
            slept: false,
            settled: cx.now(),
            uncharged: Uncharged { thread: None, since: cx.now() },
            runnable: Vec::new(),
            waker,
            kernel: Rc::clone(&cx.kernel),
            cx,
        })
    }

    /// The handle by which other threads reach the reactor.
    pub const fn handle(&self) -> &Handle {
        self.cx.handle()
    }

    /// The reactor's state, for a test that acts as a root or a channel.
    pub const fn cx(&mut self) -> &mut Cx {
        &mut self.cx
    }

    /// Runs turns and sleeps until a message stops the reactor.
    pub fn run(mut self) {
        while !self.cx.stopping {
            self.step();
        }
    }

    /// Runs one turn; after a turn without work, the reactor may sleep.
    pub fn step(&mut self) -> Step {
        if self.turn() {
            return Step::Worked;
        }
        if self.may_sleep() && self.is_quiet() && self.arm() {
            return self.sleep();
        }
        std::hint::spin_loop();
        Step::Polled
    }

    /// Runs one turn; returns whether there was any work in it.
    pub fn turn(&mut self) -> bool {
        let start = self.begin();
        // Each check is a few instructions in place: most turns have one kind of work.
        let mut worked = self.cx.handle.0.mailbox.has_message() && self.messages();
        worked |= self.reap();
        self.promote_kicked();
        worked |= self.promoted_roots();
        worked |= !self.cx.woken.is_empty() && self.woken_roots();
        worked |= !self.cx.active_pollers.is_empty() && self.pollers();
        worked |= self.cx.timers.next().is_some_and(|at| at <= self.cx.now) && self.timers();
        let others_worked = worked;
        worked |= (self.cx.local.has_calls() || !self.runnable.is_empty()) && self.calls_and_tasks();
        if !self.cx.background.is_empty() {
            self.cx.grant_background(others_worked);
        }
        self.flush();
        self.cx.worked = worked;
        self.cx.check_invariants();
        self.polls_on = worked && self.policy_of_work.unwrap_or(self.cx.policy) != SleepPolicy::Interrupt;
        if self.slept && self.polls_on {
            self.slept = false;
            self.spin.woke(start);
        }
        worked
    }

    /// Whether a reactor whose last turn had no work may sleep.
    fn may_sleep(&mut self) -> bool {
        let never = self.cx.policy == SleepPolicy::Poll || self.cx.sleepless_roots > 0;
        // An idle turn submits nothing to a device, so these requests were in flight when the work ended.
        let has_requests = || self.kernel.borrow().in_flight() > 0 || self.cx.drivers.has_requests();
        !never && self.spin.is_over(self.cx.now, has_requests())
    }

    /// Begins a turn: reads the clock, and adds the last turn's time to the accounts.
    #[inline]
    fn begin(&mut self) -> Nanos {
        let now = self.cx.refresh_now();
        self.cx.turns.begin(now);
        let ns = now.ns_since(self.settled);
        self.cx.handle.0.account.begin_turn(self.cx.turn(), now, ns, self.cx.worked);
        self.settled = now;
        self.charge_thread(now);
        if self.polls_on {
            self.spin.worked_until(now);
        }
        self.policy_of_work = None;
        if self.cx.handle.0.mailbox.take_attention() {
            self.take_announced_work();
        }
        now
    }

    /// Finds the work that other threads have announced.
    #[inline(never)]
    fn take_announced_work(&mut self) {
        self.run_as(Running::MESSAGES);
        self.cx.handle.try_take_runnable(&mut self.runnable);
        self.cx.results_may_be_there = true;
        self.cx.outgoing.retry();
        self.cx.answer_bells();
    }

    #[inline(never)]
    fn messages(&mut self) -> bool {
        let mut count = 0;
        while count < MESSAGES
            && let Some(message) = self.cx.handle.0.mailbox.pop()
        {
            self.run_as(Running::MESSAGES);
            message(&mut self.cx);
            count += 1;
        }
        if count > 0 {
            self.cx.handle.0.mailbox.made_room();
            // Messages belong to no thread; their time is kept out of the accounts of the threads that run next.
            let now = self.cx.refresh_now();
            self.charge_thread(now);
        }
        count > 0
    }

    #[inline]
    fn reap(&mut self) -> bool {
        // The kernel driver is first, since it wakes other drivers.
        let may_find = self.cx.results_may_be_there || self.kernel.borrow_mut().may_find();
        (may_find && self.reap_kernel()) | self.cx.reap_drivers()
    }

    #[inline(never)]
    fn reap_kernel(&mut self) -> bool {
        self.run_as(Running::KERNEL);
        let worked = self.kernel.borrow_mut().reap(KERNEL_COMPLETIONS, &mut self.cx) > 0;
        self.cx.kernel_busy_reaps += u64::from(worked);
        worked
    }

    #[inline]
    fn promoted_roots(&mut self) -> bool {
        let mut worked = false;
        let start = self.cx.now;
        for _ in 0..self.cx.promoted.len().min(PROMOTED_ROOTS) {
            // A root's poll does not change the queue.
            let Some(&id) = self.cx.promoted.front() else { break };
            let had_work = self.poll_root(id);
            worked |= had_work;
            let stays = had_work || !(self.is_long_without_work(id) && self.park(id));
            if !stays {
                self.cx.promoted.pop_front();
            } else if self.cx.promoted.len() > 1 {
                self.cx.promoted.pop_front();
                self.cx.promoted.push_back(id);
            }
            // The clock is read whenever a root of another thread runs.
            if self.cx.now.ns_since(start) > ROOTS_NS {
                // The time limit is reached: the other kinds of work run now.
                self.switch_thread(None);
                break;
            }
        }
        worked
    }

    #[inline]
    fn promote_kicked(&mut self) {
        if !self.cx.kicked.is_empty() {
            self.promote_all_kicked();
        }
    }

    #[inline(never)]
    fn promote_all_kicked(&mut self) {
        let mut kicked = std::mem::take(&mut self.cx.kicked);
        for id in kicked.drain(..) {
            let Some(entry) = self.cx.roots.get_mut(id.0) else { continue };
            entry.last_work = self.cx.now;
            entry.idle_polls = 0;
            if std::mem::replace(&mut entry.promoted, true) {
                continue;
            }
            let root = Rc::clone(&entry.root);
            self.cx.promoted.push_back(id);
            self.run_as(Running::root(id.0.index()));
            root.promoted(&mut self.cx);
        }
        // A root may have kicked another root while it was promoted.
        kicked.append(&mut self.cx.kicked);
        self.cx.kicked = kicked;
    }

    fn is_long_without_work(&self, id: RootId) -> bool {
        let Some(entry) = self.cx.roots.get(id.0) else { return true };
        entry.policy.is_to_park(self.cx.now.since(entry.last_work), entry.idle_polls)
    }

    /// Turns a promoted root's wake-ups on. Returns false if the root has work.
    fn park(&mut self, id: RootId) -> bool {
        let Some(entry) = self.cx.roots.get(id.0) else { return true };
        let root = Rc::clone(&entry.root);
        self.run_as(Running::root(id.0.index()));
        if root.park(&mut self.cx) == Armed::Busy {
            root.promoted(&mut self.cx);
            return false;
        }
        if let Some(entry) = self.cx.roots.get_mut(id.0) {
            entry.promoted = false;
        }
        true
    }

    #[inline(never)]
    fn woken_roots(&mut self) -> bool {
        let mut worked = false;
        let start = self.cx.now;
        for _ in 0..self.cx.woken.len().min(WOKEN_ROOTS) {
            if self.cx.now.ns_since(start) > ROOTS_NS {
                break;
            }
            let Some(id) = self.cx.woken.pop_front() else { break };
            let Some(entry) = self.cx.roots.get_mut(id.0) else { continue };
            entry.queued = false;
            if entry.woken {
                worked |= self.poll_root(id);
            }
        }
        worked
    }

    fn poll_root(&mut self, id: RootId) -> bool {
        self.cx.last_woken = None;
        let Some(entry) = self.cx.roots.get_mut(id.0) else { return false };
        entry.woken = false;
        let (root, thread) = (Rc::clone(&entry.root), entry.thread);
        self.switch_thread(Some(thread));
        self.run_as(Running::root(id.0.index()));
        let worked = root.poll(&mut self.cx);
        if let Some(entry) = self.cx.roots.get_mut(id.0) {
            entry.runs.count(worked);
            if worked {
                entry.last_work = self.cx.now;
                entry.idle_polls = 0;
                self.policy_of_work = self.policy_of_work.max(Some(entry.policy));
            } else {
                entry.idle_polls = entry.idle_polls.saturating_add(1);
            }
        }
        if worked {
            self.record_work_of(thread);
        }
        worked
    }

    #[inline(never)]
    fn pollers(&mut self) -> bool {
        let mut worked = false;
        for _ in 0..self.cx.active_pollers.len() {
            let Some(id) = self.cx.active_pollers.pop_front() else { break };
            worked |= self.run_poller(id);
            if self.cx.pollers.get(id.0).is_some() {
                self.cx.active_pollers.push_back(id);
            }
        }
        worked
    }

    fn run_poller(&mut self, id: PollerId) -> bool {
        let Some(poller) = self.cx.pollers.get_mut(id.0) else { return false };
        let thread = poller.thread;
        let Some(mut run) = poller.run.take() else { return false };
        self.switch_thread(Some(thread));
        self.run_as(Running::poller(id.0.index()));
        let worked = run(&mut self.cx);
        if worked {
            self.record_work_of(thread);
        }
        if let Some(poller) = self.cx.pollers.get_mut(id.0) {
            poller.run = Some(run);
            poller.runs.count(worked);
        }
        worked
    }

    #[inline(never)]
    fn timers(&mut self) -> bool {
        let now = self.cx.now;
        let mut worked = false;
        for _ in 0..TIMERS {
            // As with messages.
            if self.cx.timers.next().is_none_or(|at| at > now) {
                break;
            }
            let Some(timed) = self.cx.timers.pop(now) else { break };
            self.switch_thread(None);
            self.run_as(Running::TIMERS);
            match timed {
                Timed::Wake(root) => {
                    worked = true;
                    // The root is polled in the next turn; this turn counts as its work.
                    if let Some(entry) = self.cx.roots.get(root.0) {
                        self.policy_of_work = self.policy_of_work.max(Some(entry.policy));
                    }
                    self.cx.wake(root);
                }
                Timed::Call(f) => {
                    worked = true;
                    f(&mut self.cx);
                }
                Timed::Poll(id) => {
                    worked |= self.run_poller(id);
                    if let Some(period) = self.cx.pollers.get(id.0).and_then(|p| p.period) {
                        self.cx.timers.set(now.after(period), Timed::Poll(id));
                    }
                }
            }
        }
        worked
    }

    #[inline(never)]
    fn calls_and_tasks(&mut self) -> bool {
        let mut worked = false;
        if !self.runnable.is_empty() {
            worked = true;
            self.switch_thread(None);
            self.run_as(Running::TASKS);
            for runnable in self.runnable.drain(..self.runnable.len().min(TASKS)) {
                runnable.run();
            }
        }
        for _ in 0..CALLS {
            let Some(call) = self.cx.local.pop_call() else { break };
            worked = true;
            self.switch_thread(None);
            self.run_as(Running::TASKS);
            call(&mut self.cx);
        }
        worked
    }

    #[inline]
    fn flush(&mut self) {
        self.cx.flush_drivers();
        // The kernel driver is last, since other drivers may have queued operations.
        if self.kernel.borrow().has_queued() {
            self.flush_kernel();
        }
        if self.cx.signaller.has_pending() {
            self.send_signals();
        }
        if !self.cx.outgoing.is_quiet() {
            self.run_as(Running::MESSAGES);
            self.cx.outgoing.flush(&self.waker);
        }
    }

    #[inline(never)]
    fn flush_kernel(&mut self) {
        self.run_as(Running::KERNEL);
        self.kernel.borrow_mut().flush(&mut self.cx);
    }

    #[inline(never)]
    fn send_signals(&mut self) {
        self.run_as(Running::SIGNALS);
        self.cx.signaller.flush();
    }

    /// Whether all known work, if there is any, would wake a sleeping reactor.
    fn is_quiet(&self) -> bool {
        let cx = &self.cx;
        cx.active_pollers.is_empty()
            && cx.woken.is_empty()
            && cx.kicked.is_empty()
            && cx.outgoing.is_quiet()
            && cx.awake_until <= cx.now
            && self.runnable.is_empty()
            && !cx.local.has_calls()
    }

    /// Turns all wake-ups on. Returns whether there was no work after that.
    fn arm(&mut self) -> bool {
        while let Some(id) = self.cx.promoted.pop_front() {
            if !self.park(id) {
                self.cx.promoted.push_back(id);
                return false;
            }
        }
        if !self.cx.park_drivers() {
            return false;
        }
        // Parking and arming may have queued operations or woken roots and drivers.
        self.flush();
        let is_armed = self.kernel.borrow_mut().arm(&mut self.cx) == Armed::Yes;
        is_armed && self.cx.promoted.is_empty() && self.cx.drivers.are_parked() && self.is_quiet()
    }

    fn sleep(&mut self) -> Step {
        let shared = &self.cx.handle.0;
        shared.mailbox.about_to_sleep();
        if !shared.mailbox.is_idle() {
            shared.mailbox.awake();
            return Step::Polled;
        }
        debug_assert!(
            self.cx.promoted.is_empty() && self.cx.drivers.are_parked(),
            "every wake-up is on before a sleep"
        );
        debug_assert!(self.is_quiet(), "a reactor sleeps without known work");
        let until = self.cx.timers.next();
        let start = self.cx.clock.now();
        shared.account.settle(start.ns_since(self.settled), false);
        shared.account.fall_asleep(start);
        let timeout = match until {
            _ if self.cx.clock.is_virtual() => Some(Duration::ZERO),
            until => until.map(|at| at.since(start)),
        };
        if let Err(e) = self.kernel.borrow_mut().wait(timeout, &mut self.cx) {
            panic!("the kernel refuses to let a reactor sleep: {e}");
        }
        let shared = &self.cx.handle.0;
        shared.mailbox.awake();
        let now = self.cx.clock.now();
        shared.account.wake_up(now.since(start));
        self.cx.now = now;
        self.settled = now;
        self.slept = true;
        Step::Slept(until)
    }

    #[inline]
    fn run_as(&self, what: Running) {
        self.cx.handle.0.account.run(what);
    }

    /// Records that `thread` has worked since the clock was read last.
    fn record_work_of(&mut self, thread: ThreadId) {
        self.uncharged.thread = Some(thread);
    }

    /// Called before work of `thread` (`None`: of no thread) runs: if another thread has worked, adds the time to its account.
    #[inline]
    fn switch_thread(&mut self, thread: Option<ThreadId>) {
        if self.uncharged.thread.is_some() && self.uncharged.thread != thread {
            self.charge_thread_until_now();
        }
    }

    #[inline(never)]
    fn charge_thread_until_now(&mut self) {
        let now = self.cx.refresh_now();
        self.charge_thread(now);
    }

    #[inline]
    fn charge_thread(&mut self, now: Nanos) {
        if let Some(thread) = self.uncharged.thread.take()
            && let Some(thread) = self.cx.threads.get_mut(thread.0)
        {
            thread.busy_ns += now.ns_since(self.uncharged.since);
        }
        self.uncharged.since = now;
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        // Tasks are dropped here, on their own thread.
        self.runnable.clear();
        self.cx.local.end();
        drop(self.cx.handle.close());
    }
}
