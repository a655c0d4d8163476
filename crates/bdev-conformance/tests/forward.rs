//! A disk whose requests are all executed on one reactor, independent of the submitting reactor.

#![expect(clippy::unwrap_used, reason = "what a test sets up is there, or the test fails")]

use aryk_bdev::{
    Access, AsyncChannel, Base, Bdev, BdevChannel, Blocks, BoxFuture, Channel, Completion, CreditPool,
    Device, Env, ForwardChannel, Geometry, Identity, Io, Lba, Limits, OpSet, OpenError, Registry, Tag,
};
use aryk_bdev_conformance::{Bench, Features, Fixture, Shape, block_on, conformance};
use aryk_dma::Buffer;
use aryk_reactor::{CoreSet, Cx, Handle, Hold, Options, Reactors, RootId};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const BLOCKS: Blocks = Blocks(8192);
const BLOCK: u32 = 512;

/// A disk on top of a base that only the owning reactor accesses.
struct Forwarded {
    base: Arc<Base>,
    owner: Mutex<Hold>,
    /// Number of channels of the base that the owners have opened.
    opened: Arc<AtomicU64>,
}

impl Device for Forwarded {
    fn product(&self) -> &'static str {
        "forwarded"
    }

    fn geometry(&self) -> Geometry {
        self.base.bdev().geometry()
    }

    fn limits(&self) -> Limits {
        self.base.bdev().device().limits()
    }

    fn ops(&self) -> OpSet {
        self.base.bdev().device().ops()
    }

    fn bases(&self) -> Vec<Arc<Bdev>> {
        vec![Arc::clone(self.base.bdev())]
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.base.close();
        Box::pin(std::future::ready(()))
    }

    fn prepare(&self, _: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        let owner = Handle::clone(&self.owner.lock().unwrap());
        Box::pin(async move { self.base.prepare(&owner).await })
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let (base, opened) = (Arc::clone(&self.base), Arc::clone(&self.opened));
        let open = move |root, cx: &mut Cx| {
            opened.fetch_add(1, Ordering::Relaxed);
            let own = Own { base: base.open_channel(root, cx)?, queue: cx.local_state::<OwnQueue>() };
            Ok::<_, OpenError>(Box::new(own) as Box<dyn Channel>)
        };
        let owner = self.owner.lock().unwrap();
        if **owner == *cx.handle() {
            return open(root, cx);
        }
        Ok(Box::new(ForwardChannel::open(&owner, Arc::new(open), root, cx)))
    }
}

/// Requests that the owner takes at one time, of all channels together.
const DEPTH: u32 = 4;

/// The owner's queue, which all of its channels share.
struct OwnQueue {
    credits: CreditPool,
    in_flight: Cell<u32>,
}

impl Default for OwnQueue {
    fn default() -> Self {
        Self { credits: CreditPool::new(DEPTH), in_flight: Cell::new(0) }
    }
}

/// A channel of the owner.
struct Own {
    base: BdevChannel,
    queue: Rc<OwnQueue>,
}

impl Channel for Own {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.queue.in_flight.update(|n| n + 1);
        assert!(self.queue.in_flight.get() <= DEPTH, "the queue has room for {DEPTH}");
        self.base.submit(*io, cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        self.base.abort(tag, cx);
    }

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        let before = out.len();
        self.base.poll(cx, out);
        self.queue.in_flight.update(|n| n - (out.len() - before) as u32);
    }

    fn credits(&self) -> Option<CreditPool> {
        Some(self.queue.credits.clone())
    }
}

struct Stack {
    env: Env,
    disk: Arc<Bdev>,
    opened: Arc<AtomicU64>,
    reactors: Reactors,
}

impl Fixture for Stack {
    fn registry(&self) -> &Registry {
        self.env.registry()
    }

    fn features(&self) -> Features {
        Features { data: true, unmap_zeroes: true }
    }
}

impl Stack {
    /// Creates `disk`, owned by the first of the reactors on `cores`.
    fn on(cores: CoreSet) -> Self {
        let env = Env::default();
        let malloc = aryk_bdev_malloc::Config {
            identity: Identity::named("base"),
            block_size: BLOCK,
            physical_block_size: BLOCK,
            blocks: BLOCKS,
            optimal_io_blocks: Blocks::ZERO,
        };
        aryk_bdev_malloc::create(&env, malloc).unwrap();
        let reactors = Reactors::start(&Options { cores, ..Options::default() }).unwrap();
        let owner = reactors.hold(&reactors.handles()[0]).unwrap();
        let base = Arc::new(Base::open(env.registry(), "base", "disk").unwrap());
        let opened = Arc::new(AtomicU64::new(0));
        let device = Forwarded { base, owner: Mutex::new(owner), opened: Arc::clone(&opened) };
        let disk = env.registry().register(Identity::named("disk"), Arc::new(device)).unwrap();
        Self { env, disk, opened, reactors }
    }

    fn new() -> Self {
        Self::on(Options::default().cores)
    }

    /// Makes another reactor the owner.
    fn move_to(&self, owner: &Handle) {
        let hold = self.reactors.hold(owner).unwrap();
        *self.disk.device_as::<Forwarded>().unwrap().owner.lock().unwrap() = hold;
        block_on(self.disk.reopen_channels()).unwrap();
    }
}

mod conformance {
    use super::*;
    conformance!(Stack::new);
}

#[test]
fn one_link_serves_all_channels_and_ends_with_the_last() {
    let stack = Stack::new();
    let mut bench = Bench::new();
    let mut disks: Vec<_> =
        (0..20).map(|_| bench.open(stack.env.registry(), "disk", Access::Shared, 8, BLOCK)).collect();
    for round in 0..50 {
        for disk in &mut disks {
            for _ in 0..8 {
                disk.read(0, 1, Shape::Single, &mut bench);
            }
        }
        for disk in &mut disks {
            assert!(disk.drain(&mut bench).iter().all(|o| o.status.is_ok()), "round {round}");
        }
    }
    assert_eq!(stack.opened.load(Ordering::Relaxed), 20);
    let owner = &stack.reactors.handles()[0];
    // The bench's own thread, and that of the link at the owner.
    let threads = |bench: &mut Bench| bench.cx().thread_stats().len();
    assert_eq!(threads(&mut bench), 2, "the bench's own, and the link's");
    assert_eq!(block_on(owner.call(|cx| cx.thread_stats().len())), Ok(1));
    disks.drain(..).for_each(|disk| disk.close(&mut bench));
    while threads(&mut bench) > 1 {
        bench.turn();
    }
    await_for("the owner's end of the link to end", || {
        block_on(owner.call(|cx| cx.thread_stats().len())) == Ok(0)
    });
}

/// Writes a block and reads it back, repeatedly, until `stop`; returns the number of rounds.
async fn write_and_read(channel: &AsyncChannel, stop: &AtomicBool) -> u64 {
    let mut rounds = 0_u64;
    while !stop.load(Ordering::Relaxed) || rounds < 100 {
        let (lba, data) = (rounds % 64, [rounds as u8; BLOCK as usize]);
        channel.write(Lba(lba), Blocks(1), Buffer::from_slice(&data)).await.expect("a write does not fail");
        let read = channel
            .read(Lba(lba), Blocks(1), Buffer::new(BLOCK as usize, 512))
            .await
            .expect("a read does not fail");
        assert_eq!(read.bytes(), data, "round {rounds}");
        rounds += 1;
    }
    rounds
}

#[test]
fn the_owner_moves_under_requests_and_its_reactor_ends() {
    let stack = Stack::on(CoreSet::allowed());
    let handles = stack.reactors.handles();
    let [first, second, ..] = &handles[..] else { panic!("a test of two cores") };
    let descriptor = stack.env.registry().open("disk", Access::Exclusive, "test", |_| ()).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (descriptor, stop) = (descriptor.clone(), Arc::clone(&stop));
        let (ended, wait) = futures_channel::oneshot::channel();
        let start = move |cx: &mut Cx| {
            let thread = cx.add_thread("writer", CoreSet::allowed());
            let channel = AsyncChannel::open(&descriptor, thread, cx).unwrap();
            let task = async move {
                let rounds = write_and_read(&channel, &stop).await;
                let _ = ended.send(rounds);
            };
            cx.local().spawn(task).detach();
        };
        block_on(second.call(start)).unwrap();
        wait
    };
    for _ in 0..20 {
        stack.move_to(second);
        stack.move_to(first);
    }
    stack.move_to(second);
    let leaving = stack.reactors.begin_to_leave(first.core()).unwrap();
    await_for("the reactor that was the owner to end", || block_on(stack.reactors.end(&leaving)).is_some());
    stop.store(true, Ordering::Relaxed);
    assert!(block_on(writer).unwrap() >= 100);
}

/// Waits for at most ten seconds.
fn await_for(what: &str, mut is_done: impl FnMut() -> bool) {
    for _ in 0..10_000 {
        if is_done() {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    panic!("timeout while waiting for {what}");
}
