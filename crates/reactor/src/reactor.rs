//! The loop: a turn's order, budgets and account, and the way to sleep. Reactor context.

use crate::blocking::Blocking;
use crate::cx::{Cx, Timed, running_poller, running_root};
use crate::handle::Handle;
use crate::sleep::{SPIN_MAX, SleepPolicy, Spin};
use crate::trace::Trace;
use crate::wait::Engine;
use crate::{Armed, Clock, Nanos, PollerId, RootId, ThreadId};
use aryk_uring::Completion;
use async_task::Runnable;
use std::io;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How much of each kind of work a turn does at most, so that none starves another.
const MESSAGES: usize = 64;
const DRIVER_COMPLETIONS: u32 = 128;
const WOKEN_ROOTS: usize = 256;
const TIMERS: usize = 256;
const TASKS: usize = 16;
const CALLS: usize = 64;

/// Threads for blocking calls, of a reactor by itself or of a process's all.
pub(crate) const BLOCKING_THREADS: usize = 4;

/// A promoted root that has been without work for this long is parked, though the reactor is busy with others.
const PARK_AFTER: Duration = SPIN_MAX;

/// One reactor. [`Reactor::run`] is its whole life; a test may call [`Reactor::turn`] by itself instead.
pub struct Reactor {
    cx: Cx,
    spin: Spin,
    slept: bool,
    completions: Vec<Completion>,
    scratch: Vec<RootId>,
    runnable: Vec<Runnable>,
}

impl std::fmt::Debug for Reactor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reactor").field("cx", &self.cx).finish_non_exhaustive()
    }
}

impl Reactor {
    /// A reactor for the calling thread, on which it must stay.
    ///
    /// # Errors
    /// The kernel's, if it refuses what the engine needs.
    pub fn new(core: u16, policy: SleepPolicy, engine: Engine, clock: Clock) -> io::Result<Self> {
        Self::sharing(core, policy, engine, clock, Blocking::new(BLOCKING_THREADS))
    }

    /// As [`Reactor::new`], with a pool for blocking calls that others use too.
    pub(crate) fn sharing(
        core: u16,
        policy: SleepPolicy,
        engine: Engine,
        clock: Clock,
        blocking: Blocking,
    ) -> io::Result<Self> {
        let trace = Trace::new();
        let handle = Handle::new(core, trace.reader())?;
        let cx = Cx::new(handle, clock, engine, trace, blocking)?;
        Ok(Self {
            spin: Spin::new(policy, cx.now()),
            cx,
            slept: false,
            completions: Vec::new(),
            scratch: Vec::new(),
            runnable: Vec::new(),
        })
    }

    /// Reaches it from other threads.
    pub const fn handle(&self) -> &Handle {
        self.cx.handle()
    }

    /// Its state, for a test that acts as what runs on it.
    pub const fn cx(&mut self) -> &mut Cx {
        &mut self.cx
    }

    /// Turns and sleeps until it is told to stop.
    pub fn run(mut self) {
        while !self.cx.stopping {
            self.step();
        }
    }

    /// One turn, and what follows one without work: a moment's wait, or sleep.
    pub fn step(&mut self) {
        if !self.turn() {
            self.rest();
        }
    }

    /// One turn; whether there was any work in it.
    pub fn turn(&mut self) -> bool {
        let start = self.cx.refresh_now();
        let mut worked = self.messages();
        worked |= self.reap();
        worked |= self.promoted_roots();
        worked |= self.woken_roots();
        worked |= self.pollers();
        worked |= self.timers();
        worked |= self.calls_and_tasks();
        self.flush();
        if worked {
            self.spin.worked(start, std::mem::take(&mut self.slept));
        }
        self.account(start, worked);
        worked
    }

    fn account(&mut self, start: Nanos, worked: bool) {
        let took = self.cx.refresh_now().since(start).as_nanos() as u64;
        let account = &self.cx.handle.0.account;
        let time = if worked { &account.busy_ns } else { &account.idle_ns };
        // The reactor is the only writer.
        time.store(time.load(Ordering::Relaxed) + took, Ordering::Relaxed);
        account.turns.store(account.turns.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        account.running.store(0, Ordering::Relaxed);
    }

    fn messages(&mut self) -> bool {
        let mut count = 0;
        while count < MESSAGES {
            let Some(message) = self.cx.handle.0.mailbox.pop() else { break };
            message(&mut self.cx);
            count += 1;
        }
        if count > 0 {
            self.cx.handle.made_room();
        }
        count > 0
    }

    fn reap(&mut self) -> bool {
        let mut count = self.cx.waiter.reap(&mut self.completions);
        count += self.cx.handle.take_completed(&mut self.completions);
        for completion in self.completions.drain(..) {
            let root = self.cx.clients.deliver(completion);
            self.cx.wake(root);
        }
        for i in 0..self.cx.drivers.len() {
            let driver = Rc::clone(&self.cx.drivers[i]);
            count += driver.borrow_mut().reap(DRIVER_COMPLETIONS, &mut self.cx);
        }
        count > 0
    }

    fn promoted_roots(&mut self) -> bool {
        self.promote_kicked();
        let mut roots = std::mem::take(&mut self.scratch);
        roots.extend_from_slice(&self.cx.promoted);
        let mut worked = false;
        for id in roots.drain(..) {
            if self.poll_root(id) {
                worked = true;
            } else if self.is_long_without_work(id) && self.park(id) {
                self.cx.promoted.retain(|&r| r != id);
            }
        }
        self.scratch = roots;
        worked
    }

    fn promote_kicked(&mut self) {
        let mut kicked = std::mem::take(&mut self.cx.kicked);
        self.cx.waiter.take_fired(&mut kicked);
        for id in kicked.drain(..) {
            let Some(entry) = self.cx.roots.get_mut(id.0) else { continue };
            entry.last_work = self.cx.now;
            if std::mem::replace(&mut entry.promoted, true) {
                continue;
            }
            let root = Rc::clone(&entry.root);
            self.cx.promoted.push(id);
            root.borrow_mut().promoted(&mut self.cx);
        }
        // A root that was being promoted may have kicked another.
        kicked.append(&mut self.cx.kicked);
        self.cx.kicked = kicked;
    }

    fn is_long_without_work(&self, id: RootId) -> bool {
        let Some(entry) = self.cx.roots.get(id.0) else { return true };
        match self.spin.policy() {
            SleepPolicy::Poll => false,
            SleepPolicy::Interrupt => true,
            SleepPolicy::Adaptive => self.cx.now.since(entry.last_work) >= PARK_AFTER,
        }
    }

    /// Turns a promoted root's wake-ups on; whether it can be left alone.
    fn park(&mut self, id: RootId) -> bool {
        let Some(entry) = self.cx.roots.get(id.0) else { return true };
        let root = Rc::clone(&entry.root);
        if root.borrow_mut().park(&mut self.cx) == Armed::Busy {
            root.borrow_mut().promoted(&mut self.cx);
            return false;
        }
        if let Some(entry) = self.cx.roots.get_mut(id.0) {
            entry.promoted = false;
        }
        true
    }

    fn woken_roots(&mut self) -> bool {
        let mut worked = false;
        for _ in 0..self.cx.woken.len().min(WOKEN_ROOTS) {
            let Some(id) = self.cx.woken.pop_front() else { break };
            if self.cx.roots.get(id.0).is_some_and(|e| e.woken) {
                worked |= self.poll_root(id);
            }
        }
        worked
    }

    fn poll_root(&mut self, id: RootId) -> bool {
        let Some(entry) = self.cx.roots.get_mut(id.0) else { return false };
        entry.woken = false;
        let (root, thread) = (Rc::clone(&entry.root), entry.thread);
        self.cx.handle.0.account.running.store(running_root(id), Ordering::Relaxed);
        let start = self.cx.now;
        let worked = root.borrow_mut().poll(&mut self.cx);
        if worked {
            let now = self.charge(thread, start);
            if let Some(entry) = self.cx.roots.get_mut(id.0) {
                entry.last_work = now;
            }
        }
        worked
    }

    /// Adds the time since `start` to a thread's account.
    fn charge(&mut self, thread: ThreadId, start: Nanos) -> Nanos {
        let now = self.cx.refresh_now();
        if let Some(thread) = self.cx.threads.get_mut(thread.0) {
            thread.busy += now.since(start);
        }
        now
    }

    fn pollers(&mut self) -> bool {
        let mut worked = false;
        for i in (0..self.cx.active_pollers.len()).rev() {
            // One of them may have taken others out.
            let Some(&id) = self.cx.active_pollers.get(i) else { continue };
            worked |= self.run_poller(id);
        }
        worked
    }

    fn run_poller(&mut self, id: PollerId) -> bool {
        let Some(poller) = self.cx.pollers.get_mut(id.0) else { return false };
        let thread = poller.thread;
        let Some(mut run) = poller.run.take() else { return false };
        self.cx.handle.0.account.running.store(running_poller(id), Ordering::Relaxed);
        let start = self.cx.now;
        let worked = run(&mut self.cx);
        if worked {
            self.charge(thread, start);
        }
        if let Some(poller) = self.cx.pollers.get_mut(id.0) {
            poller.run = Some(run);
        }
        worked
    }

    fn timers(&mut self) -> bool {
        let now = self.cx.now;
        let mut worked = false;
        for _ in 0..TIMERS {
            let Some(timed) = self.cx.timers.pop(now) else { break };
            worked = true;
            match timed {
                Timed::Wake(root) => self.cx.wake(root),
                Timed::Call(f) => f(&mut self.cx),
                Timed::Poll(id) => {
                    self.run_poller(id);
                    if let Some(period) = self.cx.pollers.get(id.0).and_then(|p| p.period) {
                        self.cx.timers.set(now.after(period), Timed::Poll(id));
                    }
                }
            }
        }
        worked
    }

    fn calls_and_tasks(&mut self) -> bool {
        let mut worked = false;
        self.cx.handle.take_runnable(&mut self.runnable);
        for runnable in self.runnable.drain(..self.runnable.len().min(TASKS)) {
            worked = true;
            runnable.run();
        }
        for _ in 0..CALLS {
            let Some(call) = self.cx.local.pop_call() else { break };
            worked = true;
            call(&mut self.cx);
        }
        worked
    }

    fn flush(&mut self) {
        for i in 0..self.cx.drivers.len() {
            let driver = Rc::clone(&self.cx.drivers[i]);
            driver.borrow_mut().flush(&mut self.cx);
        }
        if let Err(e) = self.cx.waiter.submit() {
            panic!("io_uring refuses to go on: {e}");
        }
        self.cx.signaller.flush();
        for _ in 0..self.cx.outgoing.len() {
            let Some((to, message)) = self.cx.outgoing.pop_front() else { break };
            if let Err(message) = to.try_send(message) {
                // In order: what is for others waits too, which is rare and short.
                self.cx.outgoing.push_front((to, message));
                break;
            }
        }
    }

    /// There was nothing to do in this turn: polls on for a while, or sleeps.
    fn rest(&mut self) {
        if self.spin.is_over(self.cx.now) && self.is_quiet() && self.arm() {
            self.sleep();
        } else {
            std::hint::spin_loop();
        }
    }

    /// Whether nothing is known that must be done without being woken.
    fn is_quiet(&self) -> bool {
        let cx = &self.cx;
        cx.active_pollers.is_empty()
            && cx.woken.is_empty()
            && cx.kicked.is_empty()
            && cx.outgoing.is_empty()
            && cx.awake_until <= cx.now
            && self.runnable.is_empty()
            && !cx.local.has_calls()
    }

    /// Turns every wake-up on; whether there was nothing after that.
    fn arm(&mut self) -> bool {
        for id in std::mem::take(&mut self.cx.promoted) {
            if !self.park(id) {
                self.cx.promoted.push(id);
            }
        }
        let drivers = self.cx.drivers.clone();
        let armed = drivers.iter().all(|d| d.borrow_mut().arm(&mut self.cx) == Armed::Yes);
        // Parking and arming may have queued something.
        self.flush();
        armed && self.cx.promoted.is_empty() && self.is_quiet()
    }

    fn sleep(&mut self) {
        let handle = self.cx.handle.clone();
        let mailbox = &handle.0.mailbox;
        mailbox.about_to_sleep();
        if mailbox.is_empty() && !handle.has_runnable() && !handle.has_completed() {
            let start = self.cx.refresh_now();
            let timeout = self.cx.timers.next().map(|at| at.since(start));
            if let Err(e) = self.cx.waiter.wait(timeout) {
                panic!("the kernel refuses to let a reactor sleep: {e}");
            }
            let slept = self.cx.refresh_now().since(start).as_nanos() as u64;
            let account = &handle.0.account.sleeping_ns;
            account.store(account.load(Ordering::Relaxed) + slept, Ordering::Relaxed);
            self.slept = true;
        }
        mailbox.awake();
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        // Tasks end here, on their own thread.
        self.runnable.clear();
        self.cx.handle.close();
    }
}
