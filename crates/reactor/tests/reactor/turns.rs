//! A reactor turn by turn, in virtual time, on both engines.

use crate::support::{ENGINES, Log, Scripted, Time, add, kick, reactor, scripted, settle, take};
use aryk_reactor::{Armed, CoreSet, Cx, Driver, DriverKey, Nanos, Reactor, Root, RootId, SleepPolicy, Step};
use rustix::event::{EventfdFlags, eventfd};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::convert::Infallible;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

const fn micros(n: u64) -> Duration {
    Duration::from_micros(n)
}

struct LoggedDriver(Log);

impl Driver for LoggedDriver {
    fn reap(&mut self, _: u32, _: &mut Cx) -> u32 {
        self.0.borrow_mut().push("driver reaped".into());
        0
    }

    fn flush(&mut self, _: &mut Cx) {
        self.0.borrow_mut().push("driver flushed".into());
    }

    fn arm(&mut self, _: &mut Cx) -> Armed {
        self.0.borrow_mut().push("driver armed".into());
        Armed::Yes
    }

    fn in_flight(&self) -> u32 {
        1
    }
}

#[test]
fn a_turns_order() {
    for engine in ENGINES {
        let (time, log) = (Time::default(), Log::default());
        let (mut reactor, thread) = reactor(SleepPolicy::Interrupt, engine, &time);
        let say = |text: &'static str| {
            let log = Rc::clone(&log);
            move || log.borrow_mut().push(text.into())
        };
        let cx = reactor.cx();
        let make = |_, _: &mut Cx| Ok::<_, Infallible>(LoggedDriver(Rc::clone(&log)));
        let Ok(_driver) = cx.driver(DriverKey::unique(), make);
        let promoted = scripted(cx, thread, &log, "promoted", |_| false);
        let woken = scripted(cx, thread, &log, "woken", |_| false);
        let poller = say("poller ran");
        cx.add_poller(thread, "p", None, move |_| {
            poller();
            false
        });
        let (timer, task) = (say("timer fired"), say("task ran"));
        cx.call_at(Nanos(0), move |_| timer());
        cx.local().spawn(async move { task() }).detach();
        cx.wake(woken.id());
        cx.kick(promoted.id());
        reactor.turn();
        let expected = [
            "driver reaped",
            "promoted promoted",
            "promoted polled",
            "promoted parked",
            "woken polled",
            "poller ran",
            "timer fired",
            "task ran",
            "driver flushed",
        ];
        assert_eq!(take(&log), expected, "{engine:?}");
    }
}

/// A root that counts its polls, and has work while `busy`.
struct Counter {
    polls: u64,
    busy: bool,
}

impl Root for Counter {
    fn poll(&mut self, _: &mut Cx) -> bool {
        self.polls += 1;
        self.busy
    }
}

/// Wakes itself and another in each poll: first without effect on itself, then, if it is to, with.
struct Submitter {
    id: RootId,
    other: RootId,
    wakes_later: bool,
    polls: u32,
}

impl Root for Submitter {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        self.polls += 1;
        cx.without_wakes(self.id, |cx| {
            cx.wake(self.id);
            cx.wake(self.other);
            cx.wake(self.id);
        });
        cx.clear_wake(self.id);
        if std::mem::take(&mut self.wakes_later) {
            cx.wake(self.id);
        }
        false
    }
}

#[test]
fn a_root_is_not_woken_for_what_it_checks_in_the_same_poll() {
    for engine in ENGINES {
        let (mut reactor, thread) = reactor(SleepPolicy::Interrupt, engine, &Time::default());
        let other = add(reactor.cx(), thread, |_| Counter { polls: 0, busy: false });
        let submitter =
            add(reactor.cx(), thread, |id| Submitter { id, other: other.id(), wakes_later: true, polls: 0 });
        reactor.cx().wake(submitter.id());
        (0..5).for_each(|_| assert!(!reactor.turn()));
        let polls = reactor.cx().root::<Submitter>(submitter.id()).unwrap().borrow().polls;
        let others = reactor.cx().root::<Counter>(other.id()).unwrap().borrow().polls;
        assert_eq!(
            (polls, others),
            (2, 2),
            "the wake after its checks is not lost, the others are, and no wake of another"
        );
    }
}

#[test]
fn promoted_roots_take_turns() {
    for engine in ENGINES {
        let (mut reactor, thread) = reactor(SleepPolicy::Adaptive, engine, &Time::default());
        let roots: Vec<_> =
            (0..600).map(|_| add(reactor.cx(), thread, |_| Counter { polls: 0, busy: true })).collect();
        roots.iter().for_each(|r| reactor.cx().kick(r.id()));
        (0..100).for_each(|_| assert!(reactor.turn()));
        let polls = |i: usize, cx: &mut Cx| cx.root::<Counter>(roots[i].id()).unwrap().borrow().polls;
        let all: Vec<_> = (0..600).map(|i| polls(i, reactor.cx())).collect();
        let (min, max) = (all.iter().min().unwrap(), all.iter().max().unwrap());
        assert!(*min > 0 && max - min <= 1, "{min}..{max}");
    }
}

#[test]
fn woken_roots_are_polled_once_in_order_and_within_the_budget() {
    for engine in ENGINES {
        let (mut reactor, thread) = reactor(SleepPolicy::Adaptive, engine, &Time::default());
        let order = Rc::new(RefCell::new(Vec::new()));
        let roots: Vec<_> = (0..1000)
            .map(|i| {
                let order = Rc::clone(&order);
                scripted(reactor.cx(), thread, &Log::default(), "r", move |_| {
                    order.borrow_mut().push(i);
                    true
                })
            })
            .collect();
        for _ in 0..3 {
            roots.iter().for_each(|r| reactor.cx().wake(r.id()));
        }
        let mut turns = 0;
        while reactor.turn() {
            turns += 1;
            assert!(order.borrow().len() <= turns * 256);
        }
        assert_eq!(*order.borrow(), (0..1000).collect::<Vec<_>>());
    }
}

#[test]
fn roots_whose_polls_take_long_have_their_turns_one_after_the_other() {
    for promoted in [false, true] {
        let time = Time::default();
        let (mut reactor, _) = reactor(SleepPolicy::Poll, ENGINES[0], &time);
        let order = Rc::new(RefCell::new(Vec::new()));
        let roots: Vec<_> = (0..20)
            .map(|i| {
                let (order, time) = (Rc::clone(&order), time.clone());
                let thread = reactor.cx().add_thread("slow", CoreSet::allowed());
                scripted(reactor.cx(), thread, &Log::default(), "r", move |_| {
                    order.borrow_mut().push(i);
                    time.pass(micros(400));
                    true
                })
            })
            .collect();
        for root in &roots {
            if promoted { reactor.cx().kick(root.id()) } else { reactor.cx().wake(root.id()) }
        }
        let mut before = time.nanos();
        while order.borrow().len() < 20 {
            reactor.turn();
            let took = time.nanos() - before;
            assert!(took <= 1_600_000, "a turn of {took} ns");
            before = time.nanos();
        }
        assert_eq!(order.borrow()[..20], (0..20).collect::<Vec<_>>(), "each root has its turn");
    }
}

#[test]
fn a_cleared_wake_causes_no_poll_and_takes_no_room() {
    let (mut reactor, thread) = reactor(SleepPolicy::Interrupt, ENGINES[0], &Time::default());
    let log = Log::default();
    let root = scripted(reactor.cx(), thread, &log, "r", |_| false);
    let before = format!("{:?}", reactor.cx());
    for _ in 0..10_000 {
        reactor.cx().wake(root.id());
        reactor.cx().clear_wake(root.id());
    }
    reactor.cx().wake(root.id());
    assert!(!reactor.turn());
    assert_eq!(take(&log), ["r polled"]);
    assert_eq!(format!("{:?}", reactor.cx()), before);
    reactor.cx().wake(root.id());
    reactor.cx().clear_wake(root.id());
    reactor.turn();
    assert!(take(&log).is_empty());
}

fn forever(cx: &mut Cx, say: impl Fn() + Clone + 'static) {
    say();
    let at = cx.now();
    cx.call_at(at, move |cx| forever(cx, say));
}

async fn endless(say: impl Fn()) {
    loop {
        say();
        let mut yielded = false;
        let once = |cx: &mut Context<'_>| {
            cx.waker().wake_by_ref();
            if std::mem::replace(&mut yielded, true) { Poll::Ready(()) } else { Poll::Pending }
        };
        std::future::poll_fn(once).await;
    }
}

#[test]
fn nothing_starves() {
    for engine in ENGINES {
        let time = Time::default();
        let (mut reactor, thread) = reactor(SleepPolicy::Adaptive, engine, &time);
        let counts: Rc<RefCell<HashMap<&str, u32>>> = Rc::default();
        let count = |what: &'static str| {
            let counts = Rc::clone(&counts);
            move || *counts.borrow_mut().entry(what).or_default() += 1
        };
        // Each kind of work is endless.
        let (promoted, woken) = (count("promoted"), count("woken"));
        let cx = reactor.cx();
        let root = scripted(cx, thread, &Log::default(), "p", move |_| {
            promoted();
            true
        });
        cx.kick(root.id());
        for _ in 0..2000 {
            let woken = woken.clone();
            let wake_again = Rc::new(Cell::new(None::<RootId>));
            let own = Rc::clone(&wake_again);
            let root = scripted(cx, thread, &Log::default(), "w", move |cx| {
                woken();
                cx.wake(own.get().expect("set below"));
                true
            });
            wake_again.set(Some(root.id()));
            cx.wake(root.id());
        }
        (0..1000).for_each(|_| forever(cx, count("timer")));
        for _ in 0..100 {
            cx.local().spawn(endless(count("task"))).detach();
        }
        let handle = reactor.handle().clone();
        let messages = Arc::new(AtomicU32::new(0));
        counts.borrow_mut().clear();
        for _ in 0..100 {
            for _ in 0..100 {
                let messages = Arc::clone(&messages);
                reactor.cx().post(&handle, move |_| {
                    messages.fetch_add(1, Relaxed);
                });
            }
            assert!(reactor.turn());
        }
        let counts = counts.borrow();
        assert_eq!(messages.load(Relaxed), 64 * 99, "{engine:?}");
        assert_eq!((counts["promoted"], counts["woken"]), (100, 256 * 100));
        assert_eq!((counts["timer"], counts["task"]), (256 * 100, 16 * 99 + 16));
    }
}

#[test]
fn a_kick_promotes_and_idleness_parks() {
    for (policy, patience) in
        [(SleepPolicy::Interrupt, 0), (SleepPolicy::Adaptive, 200), (SleepPolicy::Poll, 10_000)]
    {
        for engine in ENGINES {
            let (time, log) = (Time::default(), Log::default());
            let (mut reactor, thread) = reactor(policy, engine, &time);
            let root = scripted(reactor.cx(), thread, &log, "q", |_| false);
            let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            reactor.cx().watch(fd.try_clone().unwrap(), root.id()).unwrap();
            // A poller that keeps the reactor from sleeping does not keep the root promoted.
            reactor.cx().add_poller(thread, "busy", None, |_| true);
            (0..20).for_each(|_| assert!(reactor.turn()));
            assert!(take(&log).is_empty());
            for _ in 0..3 {
                kick(&fd);
                let until = time.nanos() + patience * 1000;
                while take_one(&log).is_none_or(|e| e != "q promoted") {
                    reactor.turn();
                }
                while time.nanos() < until {
                    assert_eq!(take(&log), ["q polled"], "{policy:?} at {} of {until}", time.nanos());
                    time.pass(micros(patience / 100));
                    reactor.turn();
                }
                assert_eq!(take(&log), ["q polled", "q parked"]);
                (0..20).for_each(|_| assert!(reactor.turn()));
                assert!(take(&log).is_empty());
            }
        }
    }
}

#[test]
fn where_turns_are_long_a_root_is_polled_some_times_before_it_parks() {
    for (work_after, polls) in [(None, 64), (Some(60), 124)] {
        let (time, log) = (Time::default(), Log::default());
        let (mut reactor, thread) = reactor(SleepPolicy::Adaptive, ENGINES[0], &time);
        let mut polled = 0;
        let root = scripted(reactor.cx(), thread, &log, "q", move |_| {
            polled += 1;
            Some(polled) == work_after
        });
        reactor.cx().add_poller(thread, "busy", None, |_| true);
        reactor.cx().kick(root.id());
        let mut seen = Vec::new();
        while seen.last().is_none_or(|e| e != "q parked") {
            reactor.turn();
            time.pass(micros(50));
            seen.extend(take(&log));
        }
        assert_eq!(seen.iter().filter(|e| *e == "q polled").count(), polls);
    }
}

fn take_one(log: &Log) -> Option<String> {
    let mut log = log.borrow_mut();
    (!log.is_empty()).then(|| log.remove(0))
}

#[test]
fn a_root_that_found_something_while_parking_stays() {
    for engine in ENGINES {
        let log = Log::default();
        let (mut reactor, thread) = reactor(SleepPolicy::Interrupt, engine, &Time::default());
        let root = scripted(reactor.cx(), thread, &log, "q", |_| false);
        let entry = reactor.cx().root::<Scripted>(root.id()).unwrap();
        entry.borrow_mut().parks = Armed::Busy;
        reactor.cx().kick(root.id());
        assert_eq!(reactor.step(), Step::Polled);
        take(&log);
        assert_eq!(reactor.step(), Step::Polled);
        // The root is asked to park once in its turn, and once more before the sleep.
        let each = ["q parked", "q promoted"];
        assert_eq!(take(&log), [&["q polled"], &each[..], &each[..]].concat());
        entry.borrow_mut().parks = Armed::Yes;
        assert_eq!(reactor.step(), Step::Slept(None));
        assert_eq!(take(&log), ["q polled", "q parked"]);
    }
}

#[test]
fn sleep_by_policy() {
    for engine in ENGINES {
        let time = Time::default();
        let (mut poll, _) = reactor(SleepPolicy::Poll, engine, &time);
        let (mut interrupt, _) = reactor(SleepPolicy::Interrupt, engine, &time);
        let (mut adaptive, _) = reactor(SleepPolicy::Adaptive, engine, &time);
        (0..100).for_each(|_| {
            time.pass(Duration::from_secs(1));
            assert_eq!(poll.step(), Step::Polled);
            assert_eq!(interrupt.step(), Step::Slept(None));
        });
        // Work every 40 µs without requests in flight: after a while the reactor polls between; after a pause of 1 ms it sleeps.
        settle(&mut adaptive);
        let mut slept = Vec::new();
        for _ in 0..20 {
            let at = Nanos(time.nanos()).after(micros(40));
            adaptive.cx().call_at(at, |_| ());
            let mut did_sleep = false;
            loop {
                match adaptive.step() {
                    Step::Worked => break,
                    Step::Polled => time.pass(micros(1)),
                    Step::Slept(until) => {
                        did_sleep = true;
                        time.set(until.unwrap().0);
                    }
                }
            }
            slept.push(did_sleep);
        }
        assert!(slept[..3].iter().all(|&s| s) && slept[8..].iter().all(|&s| !s), "{slept:?}");
        let at = Nanos(time.nanos()).after(micros(1000));
        adaptive.cx().call_at(at, |_| ());
        let mut polled = 0;
        while adaptive.step() == Step::Polled {
            polled += 1;
            time.pass(micros(1));
        }
        assert!((40..=51).contains(&polled), "{polled}");
        time.set(at.0);
        assert_eq!(adaptive.step(), Step::Worked);
        assert_eq!(adaptive.step(), Step::Slept(None));
    }
}

/// How often `reactor` sleeps in 20 gaps of 40 µs between the work of `root`.
fn sleeps_between(reactor: &mut Reactor, root: RootId, time: &Time) -> usize {
    let mut sleeps = 0;
    for _ in 0..20 {
        let at = Nanos(time.nanos()).after(micros(40));
        reactor.cx().wake_at(root, at);
        while time.nanos() < at.0 {
            match reactor.step() {
                Step::Worked => (),
                Step::Polled => time.pass(micros(1)),
                Step::Slept(until) => {
                    sleeps += 1;
                    time.set(until.unwrap_or(at).0);
                }
            }
        }
    }
    sleeps
}

#[test]
fn a_root_may_have_its_own_sleep_policy() {
    for engine in ENGINES {
        for own in [SleepPolicy::Adaptive, SleepPolicy::Interrupt] {
            let (time, log) = (Time::default(), Log::default());
            let (mut reactor, thread) = reactor(own, engine, &time);
            let root = scripted(reactor.cx(), thread, &log, "q", |_| true).id();
            let other = scripted(reactor.cx(), thread, &log, "r", |_| true).id();
            settle(&mut reactor);
            let mut sleeps = |policy| {
                reactor.cx().set_sleep_policy(root, policy);
                sleeps_between(&mut reactor, root, &time)
            };
            assert_eq!(sleeps(Some(SleepPolicy::Interrupt)), 20, "{engine:?} {own:?}");
            assert!(sleeps(Some(SleepPolicy::Adaptive)) < 10, "{engine:?} {own:?}");
            assert_eq!(sleeps(Some(SleepPolicy::Poll)), 0, "{engine:?} {own:?}");
            assert_eq!(sleeps(None) == 20, own == SleepPolicy::Interrupt, "{engine:?} {own:?}");
            // The work of one root does not change what follows the work of another.
            reactor.cx().set_sleep_policy(root, Some(SleepPolicy::Interrupt));
            assert_eq!(sleeps_between(&mut reactor, root, &time), 20);
            assert_eq!(sleeps_between(&mut reactor, other, &time) == 20, own == SleepPolicy::Interrupt);
            // A removed root does not keep the reactor awake.
            reactor.cx().set_sleep_policy(root, Some(SleepPolicy::Poll));
            (0..1000).for_each(|_| assert!(!matches!(reactor.step(), Step::Slept(_))));
            reactor.cx().remove_root(root);
            time.pass(Duration::from_secs(1));
            settle(&mut reactor);
        }
    }
}

#[test]
fn events_that_keep_a_reactor_awake() {
    for engine in ENGINES {
        let time = Time::default();
        let (mut reactor, thread) = reactor(SleepPolicy::Interrupt, engine, &time);
        settle(&mut reactor);
        let at = Nanos(time.nanos()).after(micros(10));
        reactor.cx().stay_awake_until(at);
        assert_eq!(reactor.step(), Step::Polled);
        time.set(at.0);
        assert_eq!(reactor.step(), Step::Slept(None));
        let poller = reactor.cx().add_poller(thread, "p", None, |_| false);
        assert_eq!(reactor.step(), Step::Polled);
        reactor.cx().remove_poller(poller);
        settle(&mut reactor);
        let timed = reactor.cx().add_poller(thread, "t", Some(micros(5)), |_| false);
        assert_eq!(reactor.step(), Step::Slept(Some(at.after(micros(5)))));
        time.set(at.after(micros(5)).0);
        // A poll without work does not count as work: the reactor sleeps at once.
        assert_eq!(reactor.step(), Step::Slept(Some(at.after(micros(10)))));
        reactor.cx().remove_poller(timed);
        let late = reactor.cx().call_at(at.after(micros(7)), |_| ());
        assert!(reactor.cx().cancel_timer(late));
    }
}

#[test]
fn pollers_may_remove_each_other() {
    let (mut reactor, thread) = reactor(SleepPolicy::Poll, ENGINES[0], &Time::default());
    let log = Log::default();
    let victim = Rc::new(Cell::new(None));
    for name in ["a", "b", "c", "d"] {
        let (log, victim) = (Rc::clone(&log), Rc::clone(&victim));
        let id = reactor.cx().add_poller(thread, name, None, {
            let victim = Rc::clone(&victim);
            move |cx| {
                log.borrow_mut().push(name.to_owned());
                if name == "b"
                    && let Some(id) = victim.take()
                {
                    cx.remove_poller(id);
                }
                false
            }
        });
        if name == "c" {
            victim.set(Some(id));
        }
    }
    reactor.turn();
    assert_eq!(take(&log), ["a", "b", "d"]);
    reactor.turn();
    assert_eq!(take(&log), ["a", "b", "d"]);
}

#[test]
fn time_is_charged_to_the_thread_that_worked() {
    let time = Time::default();
    let (mut reactor, first) = reactor(SleepPolicy::Interrupt, ENGINES[0], &time);
    let cx = reactor.cx();
    let second = cx.add_thread("second", CoreSet::allowed());
    let worker = |cx: &mut Cx, thread, took: u64, worked: bool| {
        let time = time.clone();
        scripted(cx, thread, &Log::default(), "r", move |_| {
            time.pass(micros(took));
            worked
        })
    };
    let roots = [worker(cx, first, 3, true), worker(cx, first, 4, true), worker(cx, second, 10, true)];
    let idle = worker(cx, second, 100, false);
    roots.iter().for_each(|r| cx.wake(r.id()));
    assert!(reactor.turn());
    reactor.cx().wake(idle.id());
    assert!(!reactor.turn());
    time.pass(micros(1000));
    reactor.turn();
    let busy: Vec<_> = reactor.cx().thread_stats().iter().map(|t| t.busy).collect();
    assert_eq!(busy, [micros(7), micros(10)]);
    let stats = reactor.handle().stats();
    assert_eq!((stats.busy, stats.idle), (micros(17), micros(1100)));
    assert_eq!(stats.turns, 3);
    settle(&mut reactor);
    assert_eq!(reactor.cx().thread_stats()[0].members, 2);
    assert_eq!(reactor.handle().members(), 4);
    let busy = |reactor: &mut Reactor| {
        let stats = reactor.cx().thread_stats();
        stats.iter().map(|thread| (thread.busy, thread.members)).collect::<Vec<_>>()
    };
    let before = busy(&mut reactor);
    reactor.cx().set_thread(roots[1].id(), second);
    reactor.cx().wake(roots[1].id());
    assert!(reactor.turn());
    reactor.turn();
    assert_eq!(busy(&mut reactor), [(before[0].0, 1), (before[1].0 + micros(4), 3)]);
}
