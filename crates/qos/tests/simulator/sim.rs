//! Reactors and openers in virtual time: openers are closed loops over a device with latency, and reactors poll late.

use aryk_qos::{Bucket, Direction, Lane, Limiter, Path, Share, Wheel};
use fastrand::Rng;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

pub const SECOND: u64 = 1_000_000_000;
pub const MILLI: u64 = 1_000_000;

/// The wake-ups that lanes have requested.
#[derive(Default)]
struct WakeUps {
    next: u64,
    now: Vec<usize>,
    later: Vec<(u64, usize, u64)>,
    cancelled: BTreeSet<u64>,
}

#[derive(Clone, Default)]
pub struct Clockwork(Rc<RefCell<WakeUps>>);

impl Wheel for Clockwork {
    type Waiter = usize;
    type Timer = u64;

    fn wake(&mut self, who: usize) {
        self.0.borrow_mut().now.push(who);
    }

    fn wake_at(&mut self, who: usize, at: u64) -> u64 {
        let mut wheel = self.0.borrow_mut();
        let timer = wheel.next;
        wheel.next += 1;
        wheel.later.push((at, who, timer));
        timer
    }

    fn cancel(&mut self, timer: u64) {
        self.0.borrow_mut().cancelled.insert(timer);
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Wake { who: usize, timer: Option<u64> },
    Complete { who: usize },
}

/// The continuous load of an opener.
#[derive(Clone, Copy)]
pub struct Load {
    pub reactor: usize,
    pub depth: u64,
    pub bytes: u64,
    /// The device's latency.
    pub latency: u64,
    pub direction: Direction,
}

struct Opener {
    load: Load,
    /// The buckets of its lane.
    buckets: Vec<*const Bucket>,
    lane: Lane<usize, u64>,
    queue: VecDeque<u64>,
    stopped: bool,
}

/// A request that was admitted.
#[derive(Clone, Copy)]
pub struct Admitted {
    pub at: u64,
    pub who: usize,
}

/// A reactor's share of a bucket.
type Part = Rc<RefCell<Share<usize, u64>>>;

pub struct Sim {
    pub now: u64,
    pub admitted: Vec<Admitted>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    sequence: u64,
    wheel: Clockwork,
    openers: Vec<Opener>,
    shares: HashMap<(usize, *const Bucket), Part>,
    random: Rng,
    /// How late a reactor polls at most.
    lateness: u64,
}

impl Sim {
    pub fn new(seed: u64, lateness: u64) -> Self {
        Self {
            now: SECOND,
            admitted: Vec::new(),
            events: BinaryHeap::new(),
            sequence: 0,
            wheel: Clockwork::default(),
            openers: Vec::new(),
            shares: HashMap::new(),
            random: Rng::with_seed(seed),
            lateness,
        }
    }

    /// Creates a lane with these buckets, owned by `who`.
    fn lane(
        &mut self,
        who: usize,
        load: Load,
        levels: &[&Limiter],
    ) -> (Vec<*const Bucket>, Lane<usize, u64>) {
        let buckets = levels.iter().flat_map(|level| level.buckets());
        let counts = buckets.filter(|(kind, _)| kind.counts(load.direction));
        let (buckets, path): (Vec<_>, Path<usize, u64>) = counts
            .map(|(_, bucket)| {
                let new = || Rc::new(RefCell::new(Share::new(Arc::clone(bucket))));
                let at = Arc::as_ptr(bucket);
                (at, Rc::clone(self.shares.entry((load.reactor, at)).or_insert_with(new)))
            })
            .unzip();
        (buckets, Lane::new(who, path))
    }

    /// Adds an opener under these limits, and starts its load.
    pub fn open(&mut self, levels: &[&Limiter], load: Load) -> usize {
        let who = self.openers.len();
        let (buckets, lane) = self.lane(who, load, levels);
        self.openers.push(Opener { load, buckets, lane, queue: VecDeque::new(), stopped: false });
        for _ in 0..load.depth {
            self.push(self.now, Event::Complete { who });
        }
        who
    }

    /// Changes the opener's limits.
    pub fn move_to(&mut self, who: usize, levels: &[&Limiter]) {
        let (buckets, lane) = self.lane(who, self.openers[who].load, levels);
        let opener = &mut self.openers[who];
        opener.lane.leave(self.now, &mut self.wheel);
        (opener.buckets, opener.lane) = (buckets, lane);
        self.serve(who);
        self.collect();
    }

    /// Ends the opener's load.
    pub fn stop(&mut self, who: usize) {
        let opener = &mut self.openers[who];
        opener.stopped = true;
        opener.queue.clear();
        opener.lane.settle(false, self.now, &mut self.wheel);
        self.collect();
    }

    /// Limits have changed: makes all lanes ask again, as channels do when they are notified.
    pub fn wake_all(&mut self) {
        for (who, opener) in self.openers.iter_mut().enumerate() {
            let path =
                opener.buckets.iter().map(|bucket| Rc::clone(&self.shares[&(opener.load.reactor, *bucket)]));
            opener.lane.leave(self.now, &mut self.wheel);
            opener.lane = Lane::new(who, path.collect());
        }
        for who in 0..self.openers.len() {
            self.push(self.now, Event::Wake { who, timer: None });
        }
    }

    fn push(&mut self, at: u64, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((at, self.sequence, event)));
    }

    fn collect(&mut self) {
        let (now, later) = {
            let mut wheel = self.wheel.0.borrow_mut();
            (std::mem::take(&mut wheel.now), std::mem::take(&mut wheel.later))
        };
        for who in now {
            // The next turn of its reactor.
            self.push(self.now + 200, Event::Wake { who, timer: None });
        }
        for (at, who, timer) in later {
            let late = self.random.u64(..self.lateness + 1);
            self.push(at.max(self.now) + late, Event::Wake { who, timer: Some(timer) });
        }
    }

    /// Submits the admitted requests, as a channel does when it is polled.
    fn serve(&mut self, who: usize) {
        let opener = &mut self.openers[who];
        while let Some(&bytes) = opener.queue.front() {
            if !opener.lane.ask(bytes, opener.queue.len() as u64 - 1, self.now, &mut self.wheel) {
                break;
            }
            opener.queue.pop_front();
            self.admitted.push(Admitted { at: self.now, who });
            self.sequence += 1;
            let done = self.now + opener.load.latency;
            self.events.push(Reverse((done, self.sequence, Event::Complete { who })));
        }
        opener.lane.settle(!opener.queue.is_empty(), self.now, &mut self.wheel);
    }

    pub fn run_for(&mut self, span: u64) {
        let end = self.now + span;
        while let Some(&Reverse((at, _, event))) = self.events.peek() {
            if at > end {
                break;
            }
            self.events.pop();
            self.now = at;
            match event {
                Event::Wake { timer: Some(timer), .. }
                    if self.wheel.0.borrow_mut().cancelled.remove(&timer) => {}
                Event::Wake { who, .. } => self.serve(who),
                Event::Complete { who } if self.openers[who].stopped => {}
                Event::Complete { who } => {
                    let opener = &mut self.openers[who];
                    opener.queue.push_back(opener.load.bytes);
                    // A new request waits behind the waiting requests; if there are none, it asks at once.
                    if opener.queue.len() == 1 {
                        self.serve(who);
                    }
                }
            }
            self.collect();
        }
        self.now = end;
    }

    /// The number of admitted requests of each opener since `from`.
    pub fn counts(&self, from: u64) -> Vec<u64> {
        let mut counts = vec![0; self.openers.len()];
        self.admitted.iter().filter(|a| a.at > from).for_each(|a| counts[a.who] += 1);
        counts
    }

    pub fn count(&self, from: u64, to: u64) -> u64 {
        self.admitted.iter().filter(|a| a.at > from && a.at <= to).count() as u64
    }
}

impl Drop for Sim {
    /// Closes all openers. Afterwards the buckets must have no leases and no waiting lanes.
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let buckets: Vec<_> = self.shares.values().map(|share| Arc::clone(share.borrow().bucket())).collect();
        self.openers.iter_mut().for_each(|opener| opener.lane.leave(self.now, &mut self.wheel));
        self.openers.clear();
        self.shares.clear();
        assert!(buckets.iter().all(|bucket| (bucket.leased(), bucket.waiting()) == (0, 0)), "{buckets:?}");
    }
}

/// The largest excess of any window over its length, in nanoseconds of a bucket.
pub fn excess<'a>(admitted: impl Iterator<Item = &'a Admitted>, cost: impl Fn(&Admitted) -> f64) -> f64 {
    let (mut sum, mut lowest, mut most) = (0.0, f64::INFINITY, f64::NEG_INFINITY);
    for a in admitted {
        // The window begins with this request, which counts.
        lowest = f64::min(lowest, sum - a.at as f64);
        sum += cost(a);
        most = f64::max(most, sum - a.at as f64 - lowest);
    }
    most
}

/// Jain's index: 1 if all values are equal.
pub fn jain(counts: &[u64]) -> f64 {
    let (sum, squares) =
        counts.iter().fold((0.0, 0.0), |(s, q), &c| (s + c as f64, q + (c as f64) * (c as f64)));
    sum * sum / (counts.len() as f64 * squares)
}
