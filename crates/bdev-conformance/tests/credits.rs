//! Hundreds of channels that share the few credits of one driver.

#![expect(clippy::unwrap_used, reason = "what a test sets up is there, or the test fails")]

use aryk_bdev::{
    Access, Bdev, Blocks, Channel, Completion, CreditPool, Device, Geometry, Identity, Io, Limits, OpSet,
    OpenError, Outbox, Registry, Status, Tag,
};
use aryk_bdev_conformance::{Bench, Opener, Shape};
use aryk_reactor::{Cx, RootId};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

/// Requests that the queue takes at one time.
const DEPTH: u32 = 8;
const CHANNELS: usize = 300;
const BUSY: usize = 48;
const BLOCK: u32 = 512;

/// The queue of a reactor, which all channels of the device share.
struct Queue {
    credits: CreditPool,
    in_flight: RefCell<VecDeque<(Tag, Rc<RefCell<Outbox>>)>>,
    /// The largest number of requests in flight.
    peak: Cell<usize>,
    polls: Cell<u64>,
}

impl Default for Queue {
    fn default() -> Self {
        let credits = CreditPool::new(DEPTH);
        Self { credits, in_flight: RefCell::default(), peak: Cell::new(0), polls: Cell::new(0) }
    }
}

impl Queue {
    /// Completes the oldest requests.
    fn complete(&self, count: usize, cx: &mut Cx) {
        for _ in 0..count {
            let Some((tag, outbox)) = self.in_flight.borrow_mut().pop_front() else { return };
            outbox.borrow_mut().push(tag, Status::Ok, cx);
        }
    }
}

struct Shared;

impl Device for Shared {
    fn product(&self) -> &'static str {
        "shared queue"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(BLOCK, Blocks(1024))
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let outbox = Rc::new(RefCell::new(Outbox::new(root)));
        Ok(Box::new(SharedChannel { queue: cx.local_state::<Queue>(), outbox }))
    }
}

struct SharedChannel {
    queue: Rc<Queue>,
    outbox: Rc<RefCell<Outbox>>,
}

impl Channel for SharedChannel {
    fn submit(&mut self, io: &Io, _: &mut Cx) {
        let mut in_flight = self.queue.in_flight.borrow_mut();
        in_flight.push_back((io.tag, Rc::clone(&self.outbox)));
        assert!(in_flight.len() <= DEPTH as usize, "{} requests for a queue of {DEPTH}", in_flight.len());
        self.queue.peak.set(self.queue.peak.get().max(in_flight.len()));
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        self.queue.polls.set(self.queue.polls.get() + 1);
        self.outbox.borrow_mut().take(out);
    }

    fn credits(&self) -> Option<CreditPool> {
        Some(self.queue.credits.clone())
    }
}

struct Rig {
    bench: Bench,
    bdev: Arc<Bdev>,
    queue: Rc<Queue>,
    disks: Vec<Opener>,
}

impl Rig {
    fn new() -> Self {
        let registry = Registry::new();
        let bdev = registry.register(Identity::named("disk"), Arc::new(Shared)).unwrap();
        let mut bench = Bench::new();
        let disks = (0..CHANNELS).map(|_| bench.open(&registry, "disk", Access::Shared, 32, BLOCK)).collect();
        let queue = bench.cx().local_state::<Queue>();
        Self { bench, bdev, queue, disks }
    }

    /// Completes some requests, and runs turns until all woken channels were polled.
    fn complete(&mut self, count: usize) {
        self.queue.complete(count, self.bench.cx());
        while self.bench.turn() {}
    }

    fn close(mut self) {
        self.disks.drain(..).for_each(|disk| disk.close(&mut self.bench));
        assert_eq!(self.queue.credits.free(), DEPTH);
    }
}

#[test]
fn busy_channels_of_hundreds_have_the_same_share_of_a_short_queue() {
    let mut rig = Rig::new();
    let mut done = [0_u32; BUSY];
    // Half of the channels keep many requests in flight, the others few.
    let depth = |i: usize| if i.is_multiple_of(2) { 32 } else { 2 };
    for (i, disk) in rig.disks.iter_mut().take(BUSY).enumerate() {
        for _ in 0..depth(i) {
            disk.read(0, 1, Shape::Single, &mut rig.bench);
        }
    }
    rig.queue.polls.set(0);
    let rounds = 4000;
    for round in 0..rounds {
        rig.complete(3);
        assert_eq!(
            rig.queue.in_flight.borrow().len(),
            DEPTH as usize,
            "round {round}: the queue is kept full"
        );
        for (disk, done) in rig.disks.iter_mut().zip(&mut done) {
            for _ in disk.completed() {
                *done += 1;
                disk.read(0, 1, Shape::Single, &mut rig.bench);
            }
        }
    }
    let (min, max) = (done.iter().min().unwrap(), done.iter().max().unwrap());
    assert!(max - min <= DEPTH + 2 && *min > 3 * rounds / BUSY as u32 - 8, "{done:?}");
    assert_eq!(rig.queue.peak.get(), DEPTH as usize);
    // Idle channels cost nothing: a request costs two polls, of its own channel and of the channel that gets its credit.
    let polls = rig.queue.polls.get();
    assert!(polls <= 2 * 3 * u64::from(rounds) + 100, "{polls} polls of {} requests", 3 * rounds);
    while rig.queue.credits.free() < DEPTH {
        rig.complete(8);
    }
    rig.disks.iter_mut().for_each(|disk| drop(disk.completed()));
    rig.close();
}

#[test]
fn what_is_aborted_in_the_line_and_what_is_reset_takes_no_credit() {
    let mut rig = Rig::new();
    let bdev = Arc::clone(&rig.bdev);
    // The first channel has all credits.
    for _ in 0..DEPTH {
        rig.disks[0].read(0, 1, Shape::Single, &mut rig.bench);
    }
    for i in 1..4 {
        rig.disks[i].read(0, 1, Shape::Single, &mut rig.bench);
    }
    rig.disks[1].abort_all(&mut rig.bench);
    rig.complete(2);
    // The two credits went past the second, which has nothing to send, to the third and the fourth.
    let completed = |disk: &mut Opener| disk.completed().iter().map(|o| o.status).collect::<Vec<_>>();
    assert_eq!(completed(&mut rig.disks[1]), [Status::Aborted]);
    assert_eq!((rig.queue.credits.free(), completed(&mut rig.disks[2]).len()), (0, 0));
    rig.complete(8);
    assert_eq!([2, 3].map(|i| completed(&mut rig.disks[i])), [[Status::Ok], [Status::Ok]]);
    assert_eq!((rig.queue.credits.free(), completed(&mut rig.disks[0]).len()), (DEPTH, DEPTH as usize));

    // A reset waits for the requests in the queue; waiting requests continue after it.
    for _ in 0..DEPTH + 2 {
        rig.disks[0].read(0, 1, Shape::Single, &mut rig.bench);
    }
    rig.disks[1].read(0, 1, Shape::Single, &mut rig.bench);
    {
        let (queue, bench) = (Rc::clone(&rig.queue), &mut rig.bench);
        let mut reset = Box::pin(bdev.reset());
        let mut is_over = false;
        while !is_over {
            is_over = futures_poll(&mut reset);
            queue.complete(1, bench.cx());
            bench.turn();
        }
    }
    while rig.queue.credits.free() < DEPTH {
        rig.complete(8);
    }
    assert_eq!(completed(&mut rig.disks[0]).len(), DEPTH as usize + 2);
    assert_eq!(completed(&mut rig.disks[1]), [Status::Ok]);
    rig.close();
}

fn futures_poll(future: &mut (impl Future<Output = bool> + Unpin)) -> bool {
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    std::pin::Pin::new(future).poll(&mut context).is_ready()
}
