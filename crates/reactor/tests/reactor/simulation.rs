//! Two reactors under random work from a seed, in virtual time. Set `SEED` to repeat one.

use crate::support::{ENGINES, Time, add, kick, reactor};
use aryk_reactor::{Armed, Cx, Engine, Nanos, Reactor, Root, RootId, SleepPolicy, Step};
use fastrand::Rng;
use rustix::event::{EventfdFlags, eventfd};
use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// A queue like that of a guest: the guest adds to it, and kicks only if the server wants kicks.
#[derive(Default)]
struct Queue {
    added: u64,
    done: u64,
    wants_kicks: bool,
}

struct Server {
    queue: Rc<RefCell<Queue>>,
    /// Requests served in a poll at most.
    batch: u64,
    promoted: bool,
    /// A wake-up is due.
    woken: Rc<RefCell<bool>>,
}

impl Root for Server {
    fn poll(&mut self, _: &mut Cx) -> bool {
        let woken = self.woken.replace(false);
        assert!(self.promoted || woken, "a poll without a wake-up");
        let mut queue = self.queue.borrow_mut();
        let count = self.batch.min(queue.added - queue.done);
        queue.done += count;
        count > 0
    }

    fn promoted(&mut self, _: &mut Cx) {
        self.promoted = true;
        self.queue.borrow_mut().wants_kicks = false;
    }

    fn park(&mut self, _: &mut Cx) -> Armed {
        assert!(std::mem::replace(&mut self.promoted, false));
        let mut queue = self.queue.borrow_mut();
        queue.wants_kicks = true;
        if queue.added > queue.done { Armed::Busy } else { Armed::Yes }
    }
}

struct Guest {
    queue: Rc<RefCell<Queue>>,
    woken: Rc<RefCell<bool>>,
    kick: OwnedFd,
    root: RootId,
    on: usize,
}

/// Counts of begun and ended work; each message and task holds a clone of `alive`.
#[derive(Default)]
struct Tally {
    begun: u64,
    ended: Arc<AtomicU64>,
    /// Messages received, by sender and receiver.
    received: [[Arc<AtomicU64>; 2]; 2],
    sent: [[u64; 2]; 2],
    alive: Arc<()>,
}

struct World {
    random: Rng,
    time: Time,
    policy: SleepPolicy,
    reactors: Vec<Reactor>,
    guests: Vec<Guest>,
    tally: Tally,
}

impl World {
    fn new(seed: u64, engine: Engine) -> Self {
        let (mut random, time) = (Rng::with_seed(seed), Time::default());
        let policies = [SleepPolicy::Poll, SleepPolicy::Adaptive, SleepPolicy::Interrupt];
        let policy = policies[random.u64(..3) as usize];
        let mut reactors = Vec::new();
        let mut guests = Vec::new();
        for on in 0..2 {
            let (mut made, thread) = reactor(policy, engine, &time);
            for _ in 0..random.u64(..15) {
                let queue = Rc::new(RefCell::new(Queue { wants_kicks: true, ..Queue::default() }));
                let woken = Rc::new(RefCell::new(false));
                let server = Server {
                    queue: Rc::clone(&queue),
                    batch: 1 + random.u64(..40),
                    promoted: false,
                    woken: Rc::clone(&woken),
                };
                let root = add(made.cx(), thread, |_| server).id();
                let kick = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
                made.cx().watch(kick.try_clone().unwrap(), root).unwrap();
                guests.push(Guest { queue, woken, kick, root, on });
            }
            reactors.push(made);
        }
        Self { random, time, policy, reactors, guests, tally: Tally::default() }
    }

    fn act(&mut self) {
        let on = self.random.u64(..2) as usize;
        match self.random.u64(..12) {
            0..3 => self.guest_adds(),
            3 => self.wake(),
            4 => self.set_timer(on),
            5 => self.send(on),
            6 => self.spawn(on),
            7 => self.time.pass(Duration::from_nanos(self.random.u64(..50_000))),
            _ => drop(self.step(on)),
        }
    }

    fn a_guest(&mut self) -> Option<usize> {
        let count = self.guests.len() as u64;
        (count > 0).then(|| self.random.u64(..count) as usize)
    }

    fn guest_adds(&mut self) {
        let (Some(i), count) = (self.a_guest(), 1 + self.random.u64(..60)) else { return };
        let guest = &self.guests[i];
        guest.queue.borrow_mut().added += count;
        if guest.queue.borrow().wants_kicks {
            kick(&guest.kick);
        }
    }

    fn wake(&mut self) {
        let Some(i) = self.a_guest() else { return };
        self.guests[i].woken.replace(true);
        self.reactors[self.guests[i].on].cx().wake(self.guests[i].root);
    }

    fn set_timer(&mut self, on: usize) {
        let delay = Duration::from_nanos(self.random.u64(..500_000));
        let cx = self.reactors[on].cx();
        let at = Nanos(self.time.nanos()).after(delay);
        let ended = Arc::clone(&self.tally.ended);
        let timer = cx.call_at(at, move |cx| {
            assert!(cx.now() >= at, "a timer fired before its time");
            ended.fetch_add(1, Relaxed);
        });
        if self.random.u64(..4) > 0 {
            self.tally.begun += 1;
        } else {
            assert!(self.reactors[on].cx().cancel_timer(timer));
        }
    }

    fn send(&mut self, from: usize) {
        let to = self.random.u64(..2) as usize;
        let handle = self.reactors[to].handle().clone();
        // Sometimes more messages than the mailbox has room for.
        let count = if self.random.u64(..20) == 0 { 1500 } else { 1 + self.random.u64(..20) };
        for _ in 0..count {
            let number = self.tally.sent[from][to];
            self.tally.sent[from][to] += 1;
            let (received, alive) =
                (Arc::clone(&self.tally.received[from][to]), Arc::clone(&self.tally.alive));
            self.reactors[from].cx().post(&handle, move |_| {
                assert_eq!(received.fetch_add(1, Relaxed), number, "out of order");
                drop(alive);
            });
        }
    }

    fn spawn(&mut self, on: usize) {
        self.tally.begun += 1;
        let delay = Duration::from_nanos(self.random.u64(..100_000));
        let other = self.reactors[1 - on].handle().clone();
        let (ended, alive) = (Arc::clone(&self.tally.ended), Arc::clone(&self.tally.alive));
        let local = self.reactors[on].cx().local().clone();
        let task = async move {
            let _alive = alive;
            let start = local.with(|cx| cx.now()).await;
            local.sleep(delay).await;
            // The other reactor may have ended.
            let there = other.call(|cx| cx.now()).await.unwrap_or_default();
            assert!(there >= start.after(delay) || there == Nanos(0));
            ended.fetch_add(1, Relaxed);
        };
        self.reactors[on].cx().local().spawn(task).detach();
    }

    fn step(&mut self, on: usize) -> Step {
        let step = self.reactors[on].step();
        if let Step::Slept(_) = step {
            assert_ne!(self.policy, SleepPolicy::Poll);
            for guest in self.guests.iter().filter(|g| g.on == on) {
                assert!(guest.queue.borrow().wants_kicks && !*guest.woken.borrow());
            }
            assert_eq!(self.received(on, on), self.tally.sent[on][on], "slept beside its own messages");
        }
        step
    }

    fn received(&self, from: usize, to: usize) -> u64 {
        self.tally.received[from][to].load(Relaxed)
    }

    /// Runs steps until no work is left; when both reactors sleep, the time moves to the next timer.
    fn run_out(&mut self) {
        let mut rests = 0;
        for _ in 0..1_000_000 {
            let steps = [self.step(0), self.step(1)];
            let until = steps.map(|s| if let Step::Slept(until) = s { until } else { None });
            match steps {
                [Step::Slept(_), Step::Slept(_)] if rests > 0 => {
                    let Some(next) = until.into_iter().flatten().min() else { return };
                    self.time.set(next.0);
                    rests = 0;
                }
                // A guest's kick meanwhile may still be in the kernel only: a real sleep would have ended at once.
                [Step::Slept(_), Step::Slept(_)] => rests += 1,
                _ => {
                    rests = 0;
                    self.time.pass(Duration::from_micros(1));
                }
            }
            if self.policy == SleepPolicy::Poll && self.is_done() {
                return;
            }
        }
        panic!("it does not come to rest");
    }

    fn is_done(&self) -> bool {
        let all_served = self.guests.iter().all(|g| g.queue.borrow().added == g.queue.borrow().done);
        let all_received = (0..4).all(|i| self.received(i / 2, i % 2) == self.tally.sent[i / 2][i % 2]);
        all_served && all_received && self.tally.ended.load(Relaxed) == self.tally.begun
    }
}

fn simulate(seed: u64, engine: Engine) {
    let mut world = World::new(seed, engine);
    let actions = world.random.u64(..2000);
    (0..actions).for_each(|_| world.act());
    if world.random.u64(..3) > 0 {
        world.run_out();
        assert!(world.is_done());
        assert_eq!(Arc::strong_count(&world.tally.alive), 1);
    }
    // The remaining messages and tasks are dropped, on this thread.
    world.reactors.clear();
    assert_eq!(Arc::strong_count(&world.tally.alive), 1);
}

#[test]
fn random_work_is_done_once_and_not_slept_through() {
    let seeds = match std::env::var("SEED") {
        Ok(seed) => vec![seed.parse().expect("a number")],
        Err(_) => (0..60).map(|i| Rng::with_seed(0xa27c_0000 + i).u64(..)).collect::<Vec<_>>(),
    };
    for seed in seeds {
        for engine in ENGINES {
            let result = std::panic::catch_unwind(|| simulate(seed, engine));
            assert!(result.is_ok(), "SEED={seed} on {engine:?}");
        }
    }
}
