//! Aborts of requests that a device has and does not give up, as the kernel does not; and the claims of closed channels.

use super::*;
use crate::{Access, Device, Geometry, Identity, Lba, Limits, OpSet, Registry};
use aryk_reactor::{Armed, Clock, CoreSet, Engine, Reactor, Root, RootRef, SleepPolicy};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const BLOCK: usize = 512;
const BLOCKS: Blocks = Blocks(64);

/// A disk in memory, whose requests go on when they are let.
struct Gated {
    bytes: Mutex<Vec<u8>>,
    /// Requests that may still go on.
    let_go: AtomicU64,
    aborts: AtomicU32,
    limits: Limits,
}

impl Device for Arc<Gated> {
    fn product(&self) -> &'static str {
        "gated"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(BLOCK as u32, BLOCKS)
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(GatedChannel { device: Arc::clone(self), root, held: VecDeque::new() }))
    }
}

struct GatedChannel {
    device: Arc<Gated>,
    root: RootId,
    held: VecDeque<Io>,
}

impl Channel for GatedChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.held.push_back(*io);
        cx.wake(self.root);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {
        self.device.aborts.fetch_add(1, Ordering::Relaxed);
    }

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        while self.device.let_go.load(Ordering::Relaxed) > 0
            && let Some(io) = self.held.pop_front()
        {
            self.device.let_go.fetch_sub(1, Ordering::Relaxed);
            let mut bytes = self.device.bytes.lock().unwrap();
            let range = io.lba.0 as usize * BLOCK..(io.lba + io.blocks).0 as usize * BLOCK;
            match io.op {
                Op::Read => io.data.write(0, &bytes[range]),
                _ => io.data.read(0, &mut bytes[range]),
            }
            out.push(Completion { tag: io.tag, status: Status::Ok });
        }
        cx.wake(self.root);
    }
}

struct Owner {
    channel: BdevChannel,
    done: Vec<Completion>,
}

impl Root for Owner {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        self.channel.poll(cx, &mut self.done);
        true
    }

    fn park(&mut self, _: &mut Cx) -> Armed {
        Armed::Yes
    }
}

struct Rig {
    reactor: Reactor,
    device: Arc<Gated>,
    descriptor: Descriptor,
    bdev: Arc<Bdev>,
}

impl Rig {
    fn new(limits: Limits) -> Self {
        let (bytes, let_go, aborts) =
            (Mutex::new(vec![0; BLOCKS.0 as usize * BLOCK]), AtomicU64::new(0), 0.into());
        let device = Arc::new(Gated { bytes, let_go, aborts, limits });
        let registry = Registry::new();
        let bdev = registry.register(Identity::named("d"), Arc::new(Arc::clone(&device))).unwrap();
        let descriptor = registry.open("d", Access::Shared, "test", |_| ()).unwrap();
        let reactor = Reactor::new(0, SleepPolicy::Poll, Engine::Epoll, Clock::Monotonic).unwrap();
        Self { reactor, device, descriptor, bdev }
    }

    fn open(&mut self) -> RootRef<Owner> {
        let cx = self.reactor.cx();
        let thread = cx.add_thread("test", CoreSet::allowed());
        let descriptor = self.descriptor.clone();
        let open = |id, cx: &mut Cx| {
            Ok::<_, OpenError>(Owner { channel: descriptor.open_channel(id, cx)?, done: Vec::new() })
        };
        cx.add_root(thread, "owner", open).unwrap()
    }

    fn with<T>(&mut self, owner: &RootRef<Owner>, f: impl FnOnce(&mut Owner, &mut Cx) -> T) -> T {
        let cx = self.reactor.cx();
        let owner = cx.root::<Owner>(owner.id()).unwrap();
        f(&mut owner.borrow_mut(), cx)
    }

    fn submit(&mut self, owner: &RootRef<Owner>, tag: u64, op: Op, blocks: u64, data: Sgl) {
        let source = if op == Op::Copy { Lba(32) } else { Lba::ZERO };
        let io = Io {
            tag: Tag(tag),
            op,
            fua: false,
            may_unmap: false,
            lba: Lba::ZERO,
            blocks: Blocks(blocks),
            source,
            data,
        };
        self.with(owner, |owner, cx| owner.channel.submit(io, cx));
        self.turns();
    }

    fn abort(&mut self, owner: &RootRef<Owner>, tag: u64) {
        self.with(owner, |owner, cx| owner.channel.abort(Tag(tag), cx));
        self.turns();
    }

    fn turns(&mut self) {
        for _ in 0..100 {
            self.reactor.turn();
        }
    }

    /// Has so many requests go on, and gives what has completed by then.
    fn let_go(&mut self, owner: &RootRef<Owner>, count: u64) -> Vec<(u64, Status)> {
        self.device.let_go.fetch_add(count, Ordering::Relaxed);
        self.turns();
        let done = self.with(owner, |owner, _| std::mem::take(&mut owner.done));
        done.iter().map(|c| (c.tag.0, c.status)).collect()
    }

    fn bytes(&self, lba: usize, blocks: usize) -> Vec<u8> {
        self.device.bytes.lock().unwrap()[lba * BLOCK..][..blocks * BLOCK].to_vec()
    }
}

#[test]
fn an_abort_goes_to_the_module_once() {
    let mut rig = Rig::new(Limits::default());
    let owner = rig.open();
    let mut buffer = Buffer::new(BLOCK, 512);
    rig.submit(&owner, 1, Op::Read, 1, buffer.lend());
    (0..3).for_each(|_| rig.abort(&owner, 1));
    assert_eq!(rig.device.aborts.load(Ordering::Relaxed), 1);
    assert_eq!(rig.let_go(&owner, 1), [(1, Status::Ok)]);
    buffer.reclaim();
    rig.reactor.cx().remove_root(owner.id());
}

/// Blocks of 1 in the place of blocks of 0.
fn swap(blocks: usize) -> Buffer {
    Buffer::from_slice(&[vec![0; blocks * BLOCK], vec![1; blocks * BLOCK]].concat())
}

#[test]
fn what_is_aborted_while_it_reads_does_not_write() {
    for op in [Op::CompareAndWrite, Op::Copy, Op::Compare] {
        let mut rig = Rig::new(Limits::default());
        let owner = rig.open();
        rig.device.bytes.lock().unwrap()[32 * BLOCK..].fill(7);
        let mut buffer = swap(2);
        let lent = buffer.lend();
        let data = match op {
            Op::CompareAndWrite => lent,
            Op::Compare => lent.slice(0, 2 * BLOCK as u32),
            _ => Sgl::EMPTY,
        };
        rig.submit(&owner, 1, op, 2, data);
        rig.abort(&owner, 1);
        assert_eq!(rig.let_go(&owner, 100), [(1, Status::Aborted)], "{op:?}");
        assert_eq!(rig.device.let_go.load(Ordering::Relaxed), 99, "{op:?}: the read was all");
        assert_eq!(rig.bytes(0, 2), [0; 2 * BLOCK]);
        buffer.reclaim();
        rig.reactor.cx().remove_root(owner.id());
        rig.turns();
        assert_eq!(rig.bdev.ranges().len(), 0);
    }
}

#[test]
fn a_compare_and_write_that_has_begun_to_write_writes_all() {
    let mut rig = Rig::new(Limits { depth: 1, transfer_blocks: Blocks(1), ..Limits::default() });
    let owner = rig.open();
    let mut buffer = swap(3);
    rig.submit(&owner, 1, Op::CompareAndWrite, 3, buffer.lend());
    // Three reads, and the first of three writes; the second is the module's.
    assert_eq!(rig.let_go(&owner, 4), []);
    rig.abort(&owner, 1);
    rig.abort(&owner, 1);
    assert_eq!(rig.let_go(&owner, 1), []);
    // Each piece is heard of once: a module that holds it for as long as it likes is to give it up.
    assert_eq!(rig.device.aborts.load(Ordering::Relaxed), 2);
    assert_eq!(rig.let_go(&owner, 1), [(1, Status::Ok)]);
    assert_eq!(rig.bytes(0, 3), [1; 3 * BLOCK]);
    buffer.reclaim();
    rig.reactor.cx().remove_root(owner.id());
}

#[test]
fn a_compare_and_write_whose_write_has_not_begun_is_aborted() {
    let mut rig = Rig::new(Limits { depth: 1, ..Limits::default() });
    let owner = rig.open();
    let (mut buffer, mut other) = (swap(1), Buffer::new(BLOCK, 512));
    rig.submit(&owner, 1, Op::CompareAndWrite, 1, buffer.lend());
    // Its write waits for the only credit behind the read of another.
    rig.submit(&owner, 2, Op::Read, 1, other.lend());
    assert_eq!(rig.let_go(&owner, 1), []);
    rig.abort(&owner, 1);
    assert_eq!(rig.let_go(&owner, 100), [(1, Status::Aborted), (2, Status::Ok)]);
    assert_eq!(rig.bytes(0, 1), [0; BLOCK]);
    buffer.reclaim();
    other.reclaim();
    rig.reactor.cx().remove_root(owner.id());
}

#[test]
fn claims_end_with_their_channel() {
    let mut rig = Rig::new(Limits::default());
    let first = rig.open();
    let mut buffer = swap(1);
    rig.submit(&first, 1, Op::CompareAndWrite, 1, buffer.lend());
    assert_eq!(rig.bdev.ranges().len(), 1, "it has its block, and keeps it");
    let mut others: Vec<_> = (0..8).map(|_| swap(1)).collect();
    for _ in 0..3 {
        let owner = rig.open();
        for (tag, other) in (1..).zip(&mut others) {
            rig.submit(&owner, tag, Op::CompareAndWrite, 1, other.lend());
            rig.abort(&owner, tag);
            other.reclaim();
        }
        assert_eq!(rig.let_go(&owner, 0).len(), 8);
        rig.reactor.cx().remove_root(owner.id());
        rig.turns();
        assert_eq!(rig.bdev.ranges().len(), 1);
    }
    assert_eq!(rig.let_go(&first, 2), [(1, Status::Ok)]);
    buffer.reclaim();
    rig.reactor.cx().remove_root(first.id());
}

/// A channel that is closed while the changes before its claim are still under way leaves no fence.
#[test]
fn fences_end_with_their_channel() {
    let mut rig = Rig::new(Limits::default());
    let (writer, owner) = (rig.open(), rig.open());
    let (mut write, mut buffer) = (Buffer::from_slice(&[9; BLOCK]), swap(1));
    rig.submit(&writer, 1, Op::Write, 1, write.lend());
    rig.submit(&owner, 1, Op::CompareAndWrite, 1, buffer.lend());
    assert_eq!(rig.bdev.ranges().fences().len(), 1);
    rig.abort(&owner, 1);
    rig.reactor.cx().remove_root(owner.id());
    rig.turns();
    assert_eq!((rig.bdev.ranges().len(), rig.bdev.ranges().fences()), (0, vec![]));
    assert!(rig.with(&writer, |writer, _| writer.channel.fences.is_empty()));
    assert_eq!(rig.let_go(&writer, 1), [(1, Status::Ok)]);
    write.reclaim();
    buffer.reclaim();
    rig.reactor.cx().remove_root(writer.id());
}

/// Reads and compares of excluded blocks wait as changes do, on every channel; flushes and requests for other blocks do not.
#[test]
fn excluded_blocks_are_neither_read_nor_changed() {
    let mut rig = Rig::new(Limits::default());
    let (owner, other) = (rig.open(), rig.open());
    let mut buffers: Vec<_> = (0..5).map(|_| Buffer::new(2 * BLOCK, 512)).collect();
    let data: Vec<Sgl> = buffers.iter_mut().map(Buffer::lend).collect();
    // Under way before the exclusion, which waits for both.
    rig.submit(&owner, 1, Op::Read, 2, data[0]);
    rig.submit(&other, 1, Op::Compare, 2, data[1]);
    let (local, bdev) = (rig.reactor.cx().local().clone(), Arc::clone(&rig.bdev));
    let (granted, mut grant) = oneshot::channel();
    let exclude = async move { drop(granted.send(bdev.exclude(Lba(1)..Lba(4), &local).await)) };
    rig.reactor.cx().local().spawn(exclude).detach();
    rig.turns();
    assert_eq!(rig.let_go(&owner, 1), [(1, Status::Ok)]);
    assert!(grant.try_recv().unwrap().is_none(), "a compare is under way");
    assert_eq!(rig.let_go(&other, 1), [(1, Status::Ok)]);
    let exclusion = grant.try_recv().unwrap().expect("nothing is under way");
    rig.submit(&other, 2, Op::Read, 2, data[2]);
    rig.submit(&other, 3, Op::Compare, 2, data[3]);
    rig.submit(&other, 5, Op::Write, 1, data[4].first(BLOCK as u32));
    rig.abort(&other, 3);
    rig.submit(&other, 6, Op::Compare, 2, data[3]);
    let aborted = (3, Status::Aborted);
    assert_eq!(rig.let_go(&other, 100), [aborted, (5, Status::Ok)]);
    drop(exclusion);
    let mut ended = rig.let_go(&other, 100);
    ended.sort_unstable_by_key(|(tag, _)| *tag);
    assert_eq!(ended, [(2, Status::Ok), (6, Status::Ok)]);
    assert_eq!((rig.bdev.ranges().len(), rig.bdev.ranges().fences()), (0, vec![]));
    buffers.iter_mut().for_each(Buffer::reclaim);
    rig.reactor.cx().remove_root(owner.id());
    rig.reactor.cx().remove_root(other.id());
}
