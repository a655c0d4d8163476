//! Reactors on threads of their own, in real time.
#![expect(clippy::disallowed_methods, reason = "these tests are about real time")]

use crate::support::{ENGINES, add, block_on, kick};
use aryk_reactor::{
    Armed, ChangeError, CoreSet, Cx, Driver, DriverKey, DriverRef, Engine, Gone, Handle, Layer, Options,
    Point, Reactors, Root, RootRef, SleepPolicy, Traced,
};
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{ClockId, clock_gettime};
use std::convert::Infallible;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn start(policy: SleepPolicy, engine: Engine) -> Reactors {
    let options = Options { cores: CoreSet::allowed(), policy, engine, watchdog: Duration::from_secs(5) };
    Reactors::start(&options).unwrap()
}

#[test]
fn messages_under_load_come_once_and_in_order() {
    const SENDERS: usize = 4;
    const EACH: u64 = 20_000;
    for engine in ENGINES {
        let reactors = start(SleepPolicy::Interrupt, engine);
        let handle = &reactors.handles()[0];
        let got: Arc<[AtomicU64; SENDERS]> = Arc::default();
        std::thread::scope(|scope| {
            for who in 0..SENDERS {
                let got = &got;
                scope.spawn(move || {
                    for i in 0..EACH {
                        let got = Arc::clone(got);
                        let message = move |_: &mut Cx| {
                            assert_eq!(got[who].fetch_add(1, Ordering::Relaxed), i);
                            if i % 4096 == 0 {
                                // Other senders fill the mailbox meanwhile.
                                std::thread::sleep(Duration::from_millis(1));
                            }
                        };
                        block_on(handle.cast(message)).unwrap();
                    }
                    // The messages that were sent before have run.
                    let count = Arc::clone(got);
                    let count = block_on(handle.call(move |_| count[who].load(Ordering::Relaxed)));
                    assert_eq!(count, Ok(EACH));
                });
            }
        });
    }
}

/// A queue in shared memory, like that of a guest: the guest kicks when the server wants kicks.
#[derive(Default)]
struct Queue {
    added: AtomicU64,
    done: AtomicU64,
    wants_kicks: AtomicBool,
}

struct Server {
    queue: Arc<Queue>,
    parks: Arc<AtomicU64>,
}

impl Server {
    fn is_behind(&self) -> bool {
        self.queue.added.load(Ordering::Acquire) > self.queue.done.load(Ordering::Relaxed)
    }
}

impl Root for Server {
    fn poll(&mut self, _: &mut Cx) -> bool {
        let behind = self.is_behind();
        if behind {
            self.queue.done.store(self.queue.added.load(Ordering::Acquire), Ordering::Release);
        }
        behind
    }

    fn promoted(&mut self, _: &mut Cx) {
        self.queue.wants_kicks.store(false, Ordering::Relaxed);
    }

    fn park(&mut self, _: &mut Cx) -> Armed {
        self.parks.fetch_add(1, Ordering::Relaxed);
        self.queue.wants_kicks.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.is_behind() { Armed::Busy } else { Armed::Yes }
    }
}

struct Disk {
    queue: Arc<Queue>,
    parks: Arc<AtomicU64>,
    kick: OwnedFd,
    root: RootRef<Server>,
}

fn disk(handle: &Handle) -> Disk {
    let queue = Arc::new(Queue { wants_kicks: AtomicBool::new(true), ..Queue::default() });
    let parks = Arc::new(AtomicU64::new(0));
    let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let watched = kick.try_clone().unwrap();
    let server = Server { queue: Arc::clone(&queue), parks: Arc::clone(&parks) };
    let make = move |cx: &mut Cx| {
        let thread = cx.add_thread("disk", CoreSet::allowed());
        let root = add(cx, thread, |_| server);
        cx.watch(watched, root.id()).unwrap();
        root
    };
    Disk { queue, parks, kick, root: block_on(handle.call(make)).unwrap() }
}

impl Disk {
    /// Adds requests as a guest does, at most `ahead` before the server, until there are `count` or the time `most` has passed.
    fn run(&self, count: u64, ahead: u64, most: Duration) -> (u64, u64) {
        let (start, mut kicks, mut added) = (Instant::now(), 0, 0);
        while added < count && start.elapsed() < most {
            added = self.queue.added.fetch_add(1, Ordering::Release) + 1;
            fence(Ordering::SeqCst);
            if self.queue.wants_kicks.load(Ordering::Relaxed) {
                kicks += 1;
                kick(&self.kick);
            }
            let asked = Instant::now();
            while self.queue.done.load(Ordering::Acquire) + ahead <= added {
                assert!(asked.elapsed() < Duration::from_secs(20), "a wake-up was lost after {added}");
                std::thread::yield_now();
            }
        }
        (added, kicks)
    }
}

/// Moves the calling thread, the guest, off `core`: on the reactor's core it would wait for the reactor.
fn leave_core(core: u16) {
    let mut cores = rustix::thread::CpuSet::new();
    CoreSet::allowed().iter().filter(|&c| c != core).for_each(|c| cores.set(c.into()));
    let _ = rustix::thread::sched_setaffinity(None, &cores);
}

#[test]
fn no_kick_is_lost() {
    for engine in ENGINES {
        for policy in [SleepPolicy::Interrupt, SleepPolicy::Adaptive] {
            let reactors = start(policy, engine);
            leave_core(reactors.handles()[0].core());
            let disk = disk(&reactors.handles()[0]);
            // Single requests: the server parks, or is about to, at nearly each of them.
            let (added, kicks) = disk.run(1_000_000, 1, Duration::from_millis(800));
            // Bursts of requests.
            let (all, more) = disk.run(1_500_000, 64, Duration::from_millis(800));
            let parks = disk.parks.load(Ordering::Relaxed);
            println!(
                "{engine:?} {policy:?}: {added} alone, {all} in all; {kicks}+{more} kicks, {parks} parkings"
            );
            assert!(parks > 0 && disk.root.handle() == &reactors.handles()[0]);
        }
    }
}

/// A device that completes on another thread.
#[derive(Default)]
struct Device {
    done: AtomicU64,
    reaped: AtomicU64,
    is_armed: AtomicBool,
    parks: AtomicU64,
}

struct Remote(Arc<Device>);

impl Driver for Remote {
    fn reap(&mut self, budget: u32, _: &mut Cx) -> u32 {
        self.0.is_armed.store(false, Ordering::Relaxed);
        let reaped = self.0.reaped.load(Ordering::Relaxed);
        let count = (self.0.done.load(Ordering::Acquire) - reaped).min(budget.into());
        self.0.reaped.store(reaped + count, Ordering::Release);
        count as u32
    }

    fn flush(&mut self, _: &mut Cx) {}

    fn arm(&mut self, _: &mut Cx) -> Armed {
        self.0.parks.fetch_add(1, Ordering::Relaxed);
        self.0.is_armed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let is_behind = self.0.done.load(Ordering::Acquire) > self.0.reaped.load(Ordering::Relaxed);
        if is_behind { Armed::Busy } else { Armed::Yes }
    }

    fn in_flight(&self) -> u32 {
        0
    }
}

/// Keeps its driver.
struct Keeper {
    _driver: DriverRef<Remote>,
}

impl Root for Keeper {
    fn poll(&mut self, _: &mut Cx) -> bool {
        false
    }
}

#[test]
fn no_completion_of_a_driver_is_lost() {
    for engine in ENGINES {
        for policy in [SleepPolicy::Interrupt, SleepPolicy::Adaptive] {
            let reactors = start(policy, engine);
            let handle = &reactors.handles()[0];
            leave_core(handle.core());
            let device = Arc::new(Device::default());
            let interrupt = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
            let (watched, driven) = (interrupt.try_clone().unwrap(), Arc::clone(&device));
            let begin = move |cx: &mut Cx| {
                let make = |id, cx: &mut Cx| cx.watch_driver(watched, id).map(|_| Remote(driven));
                let driver = cx.driver(DriverKey::unique(), make).unwrap();
                let thread = cx.add_thread("driver", CoreSet::allowed());
                add(cx, thread, |_| Keeper { _driver: driver });
            };
            block_on(handle.call(begin)).unwrap();
            let (start, mut done) = (Instant::now(), 0);
            while start.elapsed() < Duration::from_millis(500) {
                done = device.done.fetch_add(1, Ordering::Release) + 1;
                fence(Ordering::SeqCst);
                if device.is_armed.load(Ordering::Relaxed) {
                    kick(&interrupt);
                }
                let asked = Instant::now();
                while device.reaped.load(Ordering::Acquire) < done {
                    assert!(asked.elapsed() < Duration::from_secs(20), "a wake-up was lost after {done}");
                    std::thread::yield_now();
                }
            }
            let parks = device.parks.load(Ordering::Relaxed);
            println!("{engine:?} {policy:?}: {done} completions, parked {parks} times");
            assert!(parks > 0);
        }
    }
}

#[test]
fn ten_thousand_watches() {
    for engine in ENGINES {
        let reactors = start(SleepPolicy::Interrupt, engine);
        let handle = &reactors.handles()[0];
        let disks: Vec<_> = (0..2500).map(|_| disk(handle)).collect();
        // More events at once than the ring has room for completions, four times.
        for round in 1..=4 {
            for disk in &disks {
                disk.queue.added.store(round, Ordering::Release);
                kick(&disk.kick);
            }
            let start = Instant::now();
            while disks.iter().any(|d| d.queue.done.load(Ordering::Acquire) < round) {
                assert!(start.elapsed() < Duration::from_secs(20), "a kick was lost in round {round}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        // Watches begin and end, again and again.
        let churn = |cx: &mut Cx| {
            let thread = cx.add_thread("churn", CoreSet::allowed());
            let root = add(cx, thread, |_| Counter(0));
            let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
            for _ in 0..10_000 {
                let watch = cx.watch(fd.try_clone().unwrap(), root.id()).unwrap();
                kick(&fd);
                drop(cx.unwatch(watch).expect("it was there"));
            }
            cx.watch(fd.try_clone().unwrap(), root.id()).unwrap();
            (root, fd)
        };
        let (root, fd) = block_on(handle.call(churn)).unwrap();
        let polls = || block_on(root.call(|counter, _| counter.0)).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let before = polls();
        kick(&fd);
        std::thread::sleep(Duration::from_millis(50));
        assert!(polls() > before, "the last watch does not wake its root");
        let open = std::fs::read_dir("/proc/self/fd").unwrap().count();
        assert!(open < 3 * disks.len(), "{open} descriptors are open");
    }
}

struct Counter(u64);

impl Root for Counter {
    fn poll(&mut self, _: &mut Cx) -> bool {
        self.0 += 1;
        false
    }
}

#[test]
fn tasks_wait_for_other_threads() {
    for engine in ENGINES {
        let reactors = start(SleepPolicy::Interrupt, engine);
        let handles = reactors.handles();
        let [first, .., last] = &handles[..] else { return };
        let peer = last.clone();
        let (done, result) = std::sync::mpsc::channel();
        let begin = move |cx: &mut Cx| {
            let local = cx.local().clone();
            let task = async move {
                let mut sum = 0;
                for i in 0..5000 {
                    sum += peer.call(move |_| i).await.unwrap();
                    if i % 500 == 0 {
                        local.sleep(Duration::from_micros(10)).await;
                    }
                }
                done.send(sum).unwrap();
            };
            cx.local().spawn(task).detach();
        };
        block_on(first.call(begin)).unwrap();
        assert_eq!(result.recv_timeout(Duration::from_secs(10)), Ok(5000 * 4999 / 2));
    }
}

#[test]
fn an_idle_reactor_takes_no_cpu() {
    for engine in ENGINES {
        for policy in [SleepPolicy::Interrupt, SleepPolicy::Adaptive] {
            let reactors = start(policy, engine);
            let handle = &reactors.handles()[0];
            let disks: Vec<_> = (0..100).map(|_| disk(handle)).collect();
            for disk in &disks {
                disk.run(100, 1, Duration::from_secs(1));
            }
            std::thread::sleep(Duration::from_millis(20));
            let cpu = |_: &mut Cx| clock_gettime(ClockId::ThreadCPUTime);
            let before = block_on(handle.call(cpu)).unwrap();
            let slept = handle.stats().sleeping;
            std::thread::sleep(Duration::from_secs(1));
            let slept = handle.stats().sleeping - slept;
            let used = block_on(handle.call(cpu)).unwrap() - before;
            let used = Duration::try_from(used).unwrap();
            println!("{engine:?} {policy:?}: {used:?} of 1 s");
            assert!(used < Duration::from_millis(5), "{engine:?} {policy:?}: {used:?}");
            assert!(slept > Duration::from_millis(950), "{slept:?}");
        }
    }
}

#[test]
fn a_sleeper_wakes_soon() {
    for engine in ENGINES {
        let reactors = start(SleepPolicy::Interrupt, engine);
        let handle = &reactors.handles()[0];
        let mut took: Vec<_> = (0..200)
            .map(|_| {
                std::thread::sleep(Duration::from_micros(500));
                let sent = Instant::now();
                block_on(handle.call(move |_| sent.elapsed())).unwrap()
            })
            .collect();
        took.sort_unstable();
        println!("{engine:?}: median {:?}, 99% {:?}", took[100], took[198]);
        assert!(took[100] < Duration::from_millis(20), "{:?}", took[100]);
    }
}

#[test]
fn calls_end_when_their_reactor_ends() {
    for engine in ENGINES {
        let reactors = start(SleepPolicy::Adaptive, engine);
        let handle = reactors.handles()[0].clone();
        let asked = Arc::new(AtomicBool::new(false));
        let callers: Vec<_> = (0..4)
            .map(|_| {
                let (handle, asked) = (handle.clone(), Arc::clone(&asked));
                std::thread::spawn(move || {
                    while block_on(handle.call(|_| ())) == Ok(()) {
                        asked.store(true, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        while !asked.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        drop(reactors);
        callers.into_iter().for_each(|c| c.join().unwrap());
        assert_eq!(block_on(handle.call(|_| ())), Err(Gone));
        assert_eq!(block_on(handle.cast(|_| ())), Err(Gone));
    }
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

struct Slow;

impl Driver for Slow {
    fn reap(&mut self, _: u32, _: &mut Cx) -> u32 {
        std::thread::sleep(Duration::from_millis(400));
        0
    }

    fn flush(&mut self, _: &mut Cx) {}

    fn arm(&mut self, _: &mut Cx) -> Armed {
        Armed::Yes
    }

    fn in_flight(&self) -> u32 {
        0
    }

    fn name(&self) -> String {
        "treacle".to_owned()
    }
}

#[test]
fn the_watchdog_names_what_is_stuck() {
    let lines = Lines::default();
    let writer = lines.clone();
    // For the whole process, since the watchdog has a thread of its own; lines of other tests do no harm.
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let options = Options { watchdog: Duration::from_millis(100), ..Options::default() };
    let reactors = Reactors::start(&options).unwrap();
    let stall = || std::thread::sleep(Duration::from_millis(400));
    let begin = move |cx: &mut Cx| {
        let thread = cx.add_thread("t", CoreSet::allowed());
        cx.name_object(Layer::Bdev, 7, Some("disk7"));
        let mut times = 0;
        cx.add_poller(thread, "molasses", Some(Duration::from_millis(1)), move |cx| {
            times += 1;
            if times == 1 {
                cx.trace(Traced::new(Layer::Bdev, 7), Point::Submit, 1);
                stall();
            }
            false
        });
    };
    block_on(reactors.handles()[0].call(begin)).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    block_on(reactors.handles()[0].cast(move |_| stall())).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    // The driver is reaped once, in this turn, before its removal.
    let drive = |cx: &mut Cx| drop(cx.driver(DriverKey::unique(), |_, _| Ok::<_, Infallible>(Slow)));
    block_on(reactors.handles()[0].cast(drive)).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    drop(reactors);
    let lines = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
    let reports = |what: &str| lines.lines().filter(|l| l.contains("stuck in") && l.contains(what)).count();
    // Each turn is reported once, though the watchdog checks it several times.
    assert_eq!(reports("poller molasses, after submit in bdev of disk7"), 1, "{lines}");
    assert_eq!(reports("a message"), 1, "{lines}");
    assert_eq!(reports("driver treacle"), 1, "{lines}");
}

#[test]
fn placement() {
    let reactors = start(SleepPolicy::Interrupt, Engine::Auto);
    let cores: Vec<_> = reactors.handles().iter().map(Handle::core).collect();
    assert_eq!(cores, CoreSet::allowed().iter().collect::<Vec<_>>());
    for handle in reactors.handles() {
        let (core, allowed) = block_on(handle.call(|_| {
            (rustix::thread::sched_getcpu(), rustix::thread::sched_getaffinity(None).unwrap().count())
        }))
        .unwrap();
        assert_eq!((core, allowed), (handle.core().into(), 1));
        // A reactor's thread also sees all cores of the process.
        assert_eq!(block_on(handle.call(|_| CoreSet::allowed())), Ok(CoreSet::allowed()));
    }
    // Each root is added to the reactor with the fewest, so the roots are spread evenly.
    for i in 0..6 {
        let least = reactors.least_loaded(None);
        assert_eq!(least.members(), i / cores.len() as u64);
        disk(&least);
    }
    let last = CoreSet::from_iter(cores.last().copied());
    assert_eq!(reactors.least_loaded(Some(&last)).core(), *cores.last().unwrap());
    let nowhere = Options { cores: CoreSet::from_iter([1000]), ..Options::default() };
    let error = Reactors::start(&nowhere).unwrap_err().to_string();
    assert!(error.contains("may not run on any of the cores"), "{error}");
}

/// Waits until a reactor that is being removed has ended; returns how often it could not end yet.
fn end(reactors: &Reactors, handle: &Handle) -> usize {
    for refused in 0..1000 {
        if let Some(ending) = block_on(reactors.end(handle)) {
            while !ending.is_over() {
                std::thread::yield_now();
            }
            return refused;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("the reactor does not end");
}

#[test]
fn reactors_come_and_go() {
    for engine in ENGINES {
        let reactors = start(SleepPolicy::Interrupt, engine);
        let handles = reactors.handles();
        let [first, .., last] = &handles[..] else { return };
        let core = last.core();
        assert!(matches!(reactors.add(core), Err(ChangeError::Exists(_))));
        assert!(matches!(reactors.add(1001), Err(ChangeError::Forbidden { .. })));
        assert!(matches!(reactors.begin_to_leave(1001), Err(ChangeError::NotFound(_))));
        for _ in 0..3 {
            let leaving = reactors.begin_to_leave(core).unwrap();
            assert!(matches!(reactors.begin_to_leave(core), Err(ChangeError::Leaving(_))));
            assert!(reactors.hold_for_arrival(core).is_none());
            assert!(!reactors.is_any_on(&CoreSet::from_iter([core])));
            assert_ne!(*reactors.least_loaded(None), leaving);
            // A hold keeps the reactor from ending.
            let hold = reactors.hold(&leaving).unwrap();
            assert!(block_on(reactors.end(&leaving)).is_none());
            drop(hold);
            // So does a task, until the task has ended.
            let task = |cx: &mut Cx| {
                let local = cx.local().clone();
                cx.local().spawn(async move { local.sleep(Duration::from_millis(5)).await }).detach();
            };
            block_on(leaving.call(task)).unwrap();
            assert!(end(&reactors, &leaving) > 0);
            assert!(leaving.has_ended());
            assert_eq!(block_on(leaving.call(|_| ())), Err(Gone));
            assert_eq!(reactors.handles().len(), handles.len() - 1);
            assert!(reactors.hold(&leaving).is_none());
            let new = reactors.add(core).unwrap();
            assert_ne!(new, leaving);
            assert_eq!(block_on(new.call(|_| rustix::thread::sched_getcpu())), Ok(core.into()));
        }
        // A reactor with a thread does not end, and can be used again.
        let leaving = reactors.begin_to_leave(first.core()).unwrap();
        let add = |cx: &mut Cx| cx.add_thread("t", CoreSet::allowed());
        let thread = block_on(leaving.call(add)).unwrap();
        assert!(block_on(reactors.end(&leaving)).is_none());
        reactors.keep(&leaving);
        assert!(reactors.is_any_on(&CoreSet::from_iter([first.core()])));
        block_on(leaving.call(move |cx| cx.remove_thread(thread))).unwrap();
        for core in handles[1..].iter().map(Handle::core) {
            end(&reactors, &reactors.begin_to_leave(core).unwrap());
        }
        assert!(matches!(reactors.begin_to_leave(first.core()), Err(ChangeError::Last(_))));
        assert_eq!(reactors.handles(), std::slice::from_ref(first));
    }
}
