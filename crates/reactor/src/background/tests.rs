//! Budgets and priorities in virtual time; moves between reactors in real time.

use super::*;
use crate::{Engine, Options, Reactor, Reactors, Root, RootId, SleepPolicy, ThreadStats};
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Wake, Waker};

const STEP: Duration = Duration::from_micros(10);
const BUDGET: Budget = Budget { turn: Duration::from_micros(100) };

/// A reactor in virtual time with a task, each of whose steps takes [`STEP`].
struct Bench {
    reactor: Reactor,
    time: Arc<AtomicU64>,
    steps: Arc<AtomicU64>,
    entry: Arc<Entry>,
}

impl Bench {
    fn new() -> Self {
        let (time, steps) = (Arc::new(AtomicU64::new(1)), Arc::new(AtomicU64::new(0)));
        let clock = Clock::Virtual(Arc::clone(&time));
        let mut reactor = Reactor::new(0, SleepPolicy::Interrupt, Engine::Epoll, clock).unwrap();
        let (of_task, counted) = (Arc::clone(&time), Arc::clone(&steps));
        let start = move |mut turns: Turns| -> Work {
            let (time, steps) = (Arc::clone(&of_task), Arc::clone(&counted));
            Box::pin(async move {
                loop {
                    turns.next().await;
                    time.fetch_add(STEP.as_nanos() as u64, Relaxed);
                    steps.fetch_add(1, Relaxed);
                }
            })
        };
        let thread = Moving(Thread::new("check".into(), CoreSet::allowed()));
        let entry = Arc::new(Entry {
            name: "check".to_owned(),
            number: thread.number(),
            budget: BUDGET,
            busy_ns: AtomicU64::new(0),
            granted: AtomicU64::new(0),
            start: Mutex::new(Box::new(start)),
            place: Mutex::new(Place::Moving),
            all: std::sync::Weak::new(),
        });
        arrive(&entry, thread, reactor.cx());
        Self { reactor, time, steps, entry }
    }

    /// The steps of one turn.
    fn turn(&mut self) -> u64 {
        let before = self.steps.load(Relaxed);
        self.reactor.turn();
        self.steps.load(Relaxed) - before
    }

    fn thread(&mut self) -> Option<ThreadStats> {
        self.reactor.cx().thread_stats().into_iter().find(|thread| thread.name == "check")
    }
}

#[test]
fn a_turn_has_no_more_than_the_budget_and_its_time_is_the_threads() {
    let mut bench = Bench::new();
    let steps: Vec<u64> = (0..5).map(|_| bench.turn()).collect();
    assert_eq!(steps, [10; 5]);
    assert_eq!(bench.thread().unwrap().busy, STEP * 50);
    bench.entry.ended();
    end(bench.entry.number, bench.reactor.cx());
    for _ in 0..10 {
        bench.reactor.turn();
    }
    assert_eq!((bench.thread(), bench.turn()), (None, 0));
    assert!(bench.reactor.cx().is_deserted());
}

#[test]
fn a_task_ends_where_its_reactors_mailbox_is_full() {
    let (sender, ended) = std::sync::mpsc::channel();
    // A reactor that waited for room in its own mailbox would wait forever.
    std::thread::spawn(move || {
        let mut bench = Bench::new();
        bench.turn();
        let handle = bench.reactor.handle().clone();
        while handle.try_send(Box::new(|_| ())).is_ok() {}
        drop(BackgroundTask(Arc::clone(&bench.entry)));
        for _ in 0..10 {
            bench.reactor.turn();
        }
        sender.send((bench.thread(), bench.turn(), bench.reactor.cx().is_deserted())).unwrap();
    });
    assert_eq!(ended.recv_timeout(Duration::from_secs(20)), Ok((None, 0, true)));
}

/// A guest's queue that always has work, 50 microseconds in each turn.
struct Queue(Arc<AtomicU64>);

impl Root for Queue {
    fn poll(&mut self, _: &mut Cx) -> bool {
        self.0.fetch_add(50_000, Relaxed);
        true
    }
}

#[test]
fn requests_of_guests_come_first_but_do_not_starve_it() {
    let mut bench = Bench::new();
    bench.turn();
    let (time, cx) = (Arc::clone(&bench.time), bench.reactor.cx());
    let thread = cx.add_thread("guest", CoreSet::allowed());
    let Ok(root) = cx.add_root(thread, "queue", |_: RootId, _| Ok::<_, Infallible>(Queue(time)));
    cx.kick(root.id());
    // This turn was granted before.
    bench.turn();
    let began = bench.time.load(Relaxed);
    let steps: u64 = (0..440).map(|_| bench.turn()).sum();
    let passed = Duration::from_nanos(bench.time.load(Relaxed) - began);
    let turns = passed.as_micros() as u64 / STARVED.as_micros() as u64;
    assert!(steps <= turns * 10 && steps >= turns * 8, "{steps} steps in {passed:?}");
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

fn until(is_so: impl Fn() -> bool) {
    for _ in 0..2000 {
        if is_so() {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(10));
    }
    panic!("not in 20 seconds");
}

fn threads(reactor: &Handle) -> Vec<(u64, String)> {
    let stats = block_on(reactor.call(|cx| cx.thread_stats())).unwrap();
    stats.into_iter().map(|thread| (thread.id, thread.name)).collect()
}

#[test]
fn a_task_moves_with_what_it_remembers_and_ends_with_its_owner() {
    let cores = CoreSet::allowed();
    if cores.iter().count() < 2 {
        return eprintln!("skipped: it takes two cores");
    }
    let reactors = Reactors::start(&Options { cores, ..Options::default() }).unwrap();
    let (done, on) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(u64::MAX)));
    let dropped = Arc::new(AtomicBool::new(false));
    struct Last(Arc<AtomicBool>);
    impl Drop for Last {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }
    let (counted, place, last) = (Arc::clone(&done), Arc::clone(&on), Last(Arc::clone(&dropped)));
    let task = reactors.background().spawn("scrub", BUDGET, move |mut turns| {
        let (done, place) = (Arc::clone(&counted), Arc::clone(&place));
        let _ = &last;
        async move {
            let core = turns.local().with(|cx| cx.handle().core()).await;
            loop {
                turns.next().await;
                place.store(core.into(), Relaxed);
                done.fetch_add(1, Relaxed);
            }
        }
    });
    until(|| done.load(Relaxed) > 100);
    let handles = reactors.handles();
    let first = handles.iter().position(|handle| u64::from(handle.core()) == on.load(Relaxed)).unwrap();
    let (from, to) = (&handles[first], &handles[1 - first.min(1)]);
    let number = threads(from).into_iter().find(|(_, name)| name == "scrub").unwrap().0;
    let hold = reactors.hold_for_arrival(to.core()).unwrap();
    assert!(block_on(reactors.background().move_to(number, hold)));
    until(|| on.load(Relaxed) == u64::from(to.core()));
    assert!(done.load(Relaxed) > 100, "it goes on where it was");
    assert_eq!((threads(from), threads(to)), (vec![], vec![(number, "scrub".to_owned())]));
    // Nothing is left on that reactor: it can end.
    let leaving = reactors.begin_to_leave(from.core()).unwrap();
    assert!(block_on(reactors.end(&leaving)).is_some());
    drop(task);
    until(|| threads(to).is_empty() && dropped.load(Relaxed));
    assert!(lock(&reactors.background().0.tasks).is_empty());
}

#[test]
fn a_task_whose_work_is_over_is_gone() {
    let reactors = Reactors::start(&Options::default()).unwrap();
    let task = reactors.background().spawn("brief", BUDGET, |_| async {});
    until(|| lock(&reactors.background().0.tasks).is_empty());
    until(|| threads(&reactors.handles()[0]).is_empty());
    drop(task);
    // A task that ends before it has begun.
    drop(reactors.background().spawn("never", BUDGET, |_| std::future::pending()));
    until(|| threads(&reactors.handles()[0]).is_empty());
}
