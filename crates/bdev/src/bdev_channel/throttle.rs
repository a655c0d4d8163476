//! Where the requests of a limited disk wait for their turn, before anything else becomes of them. Reactor context.
//!
//! What is counted: each request is one, whatever it does. Reads and compares are reads; all else is a write. Bytes are those of its blocks; both ways for what is made of
//! reads and writes and writes in the end; and [`aryk_qos::LEAST_BYTES`] for flushes and unmaps, which move none.
//!
//! A channel has one line, or one for each direction where some bucket counts only one: then reads do not wait behind writes that are out of their limit.

use super::{BdevChannel, Pending, State, make_room};
use crate::{Bdev, Io, Op, Status};
use aryk_qos::{Bucket, Direction, Lane, Path, Share, Wheel};
use aryk_reactor::{Cx, Nanos, RootId, TimerId};
use aryk_slots::Key;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::iter;
use std::rc::{Rc, Weak};
use std::sync::Arc;

/// A reactor, as who wakes lanes.
struct Waker<'a>(&'a mut Cx);

impl Wheel for Waker<'_> {
    type Who = RootId;
    type Timer = TimerId;

    fn wake(&mut self, who: RootId) {
        self.0.wake(who);
    }

    fn wake_at(&mut self, who: RootId, at: u64) -> TimerId {
        self.0.wake_at(who, Nanos(at))
    }

    fn cancel(&mut self, timer: TimerId) {
        self.0.cancel_timer(timer);
    }
}

/// A request that waits. The source, of a copy, is not in its [`Pending`].
#[derive(Clone, Copy)]
pub(super) struct Waiting {
    pub key: Key,
    pub source: u64,
}

#[repr(C)]
struct Line {
    lane: Lane<RootId, TimerId>,
    waiting: VecDeque<Waiting>,
}

impl Line {
    /// Asks for a request, if none is before it. If it is not let through, it will wait.
    #[inline(never)]
    fn ask(&mut self, bytes: u64, cx: &mut Cx) -> bool {
        if !self.waiting.is_empty() {
            return false;
        }
        let (now, waker) = (cx.now().0, &mut Waker(cx));
        let may_go = self.lane.ask(bytes, 0, now, waker);
        if !may_go {
            self.lane.settle(true, now, waker);
        }
        may_go
    }
}

/// The lines of a channel whose disk is limited. While requests wait in a line, none of it is paid ahead.
pub(super) struct Throttle {
    /// A line of their own, where not all limits count all requests.
    writes: Option<Box<Line>>,
    line: Line,
}

type Parts = HashMap<*const Bucket, Weak<RefCell<Share<RootId, TimerId>>>>;

/// A reactor's parts of all buckets.
#[derive(Default)]
struct Shares(RefCell<Parts>);

impl Shares {
    fn of(&self, bucket: &Arc<Bucket>) -> Rc<RefCell<Share<RootId, TimerId>>> {
        let mut all = self.0.borrow_mut();
        if let Some(share) = all.get(&Arc::as_ptr(bucket)).and_then(Weak::upgrade) {
            return share;
        }
        if all.len() == all.capacity() {
            all.retain(|_, share| share.strong_count() > 0);
        }
        let share = Rc::new(RefCell::new(Share::new(Arc::clone(bucket))));
        all.insert(Arc::as_ptr(bucket), Rc::downgrade(&share));
        share
    }
}

impl Throttle {
    /// The lines of a channel of `bdev`; `None` if nothing limits it.
    pub fn new(bdev: &Bdev, root: RootId, cx: &mut Cx) -> Option<Self> {
        let buckets = bdev.buckets();
        if buckets.is_empty() {
            return None;
        }
        let shares = cx.local_state::<Shares>();
        let line = |direction| {
            let counts = buckets.iter().filter(|(kind, _)| kind.counts(direction));
            let path: Path<RootId, TimerId> = counts.map(|(_, bucket)| shares.of(bucket)).collect();
            Line { lane: Lane::new(root, path), waiting: VecDeque::new() }
        };
        let counts_all = |d| buckets.iter().all(|(kind, _)| kind.counts(d));
        let is_one = counts_all(Direction::Read) && counts_all(Direction::Write);
        let writes = (!is_one).then(|| Box::new(line(Direction::Write)));
        Some(Self { writes, line: line(Direction::Read) })
    }

    #[inline]
    fn line(&mut self, direction: Direction) -> &mut Line {
        match &mut self.writes {
            Some(writes) if direction == Direction::Write => writes,
            _ => &mut self.line,
        }
    }

    fn lines(&mut self) -> impl Iterator<Item = &mut Line> {
        iter::once(&mut self.line).chain(self.writes.as_deref_mut())
    }

    /// Whether a new request may go at once. If not, [`Throttle::hold`] must follow.
    #[inline]
    fn may_go(&mut self, direction: Direction, bytes: u64, cx: &mut Cx) -> bool {
        let line = self.line(direction);
        line.lane.spend_ahead(bytes) || line.ask(bytes, cx)
    }

    /// Has a request wait.
    fn hold(&mut self, direction: Direction, waiting: Waiting) {
        let line = self.line(direction);
        line.lane.hand_back();
        line.waiting.push_back(waiting);
    }

    /// Asks for nothing for now: others are not to wait for it.
    pub fn step_aside(&mut self, cx: &mut Cx) {
        let now = cx.now().0;
        self.lines().for_each(|line| line.lane.leave(now, &mut Waker(cx)));
    }

    /// Whether nothing of it stands in a ring that others wait in.
    pub fn is_aside(&self) -> bool {
        iter::once(&self.line).chain(self.writes.as_deref()).all(|line| !line.lane.is_waiting())
    }

    /// Those that wait, in each line's order.
    fn into_waiting(self) -> Vec<Waiting> {
        iter::once(self.line).chain(self.writes.map(|line| *line)).flat_map(|line| line.waiting).collect()
    }
}

const fn direction(op: Op) -> Direction {
    match op {
        Op::Read | Op::Compare => Direction::Read,
        Op::Write | Op::Flush | Op::Unmap | Op::WriteZeroes | Op::CompareAndWrite | Op::Copy => {
            Direction::Write
        }
    }
}

impl BdevChannel {
    /// The bytes that a request is counted with.
    #[inline]
    const fn counted_bytes(op: Op, bytes: u64) -> u64 {
        match op {
            Op::Read | Op::Write | Op::Compare => bytes,
            Op::CompareAndWrite | Op::Copy => bytes.saturating_mul(2),
            // Whether the store has to write them is not known before.
            Op::WriteZeroes => bytes,
            Op::Flush | Op::Unmap => aryk_qos::LEAST_BYTES,
        }
    }

    /// Whether a new request of a limited disk may go at once. If not, [`Self::hold`] must follow; so it does without asking while the channel is frozen.
    // Not inlined: the path of disks without limits is to stay as short as it is.
    #[inline(never)]
    pub(super) fn may_go(&mut self, op: Op, bytes: u64, cx: &mut Cx) -> bool {
        let bytes = Self::counted_bytes(op, bytes);
        let throttle = self.throttle.as_mut().expect("the caller looked");
        matches!(self.state, State::Running) && throttle.may_go(direction(op), bytes, cx)
    }

    /// Has a request wait.
    pub(super) fn hold(&mut self, key: Key, op: Op, source: u64) {
        let throttle = self.throttle.as_mut().expect("the caller looked");
        make_room(&mut throttle.line(direction(op)).waiting, &self.pending, |w| w.key);
        throttle.hold(direction(op), Waiting { key, source });
        self.limited += 1;
        self.holds = true;
    }

    /// Starts what may go by now.
    pub(super) fn advance_limited(&mut self, cx: &mut Cx) {
        if !matches!(self.state, State::Running) {
            return;
        }
        let Some(mut throttle) = self.throttle.take() else { return };
        let now = cx.now().0;
        for line in throttle.lines() {
            while let Some(&waiting) = line.waiting.front() {
                // One that has failed is gone.
                if let Some(p) = self.pending.get(waiting.key) {
                    let bytes = Self::counted_bytes(p.op, p.bytes);
                    if !line.lane.ask(bytes, line.waiting.len() as u64 - 1, now, &mut Waker(cx)) {
                        break;
                    }
                    self.start_limited(waiting, cx);
                }
                line.waiting.pop_front();
            }
            line.lane.settle(!line.waiting.is_empty(), now, &mut Waker(cx));
        }
        self.holds = throttle.lines().any(|line| !line.waiting.is_empty());
        self.throttle = Some(throttle);
    }

    /// Starts a request that has waited.
    fn start_limited(&mut self, waiting: Waiting, cx: &mut Cx) {
        let p = self.pending.get_mut(waiting.key).expect("the caller looked");
        p.is_limited = false;
        self.limited -= 1;
        let held = cx.now().since(p.started);
        p.waited_ns = held.as_nanos() as u64;
        let mut stats = self.cell.stats.borrow_mut();
        stats.throttled(held);
        stats.layers.throttled(p.waited_ns);
        drop(stats);
        let &mut Pending { tag, asked: op, fua, may_unmap, lba, blocks, data, .. } = p;
        let io = Io { tag, op, fua, may_unmap, lba, blocks, source: waiting.source, data };
        self.start(waiting.key, io, cx);
    }

    /// Goes by the limits that there are now.
    pub(super) fn look_at_limits(&mut self, cx: &mut Cx) {
        let mut waiting = Vec::new();
        if let Some(mut before) = self.throttle.take() {
            before.step_aside(cx);
            waiting = before.into_waiting();
            waiting.retain(|w| self.pending.get(w.key).is_some());
            // Two lines may become one.
            waiting.sort_by_key(|w| self.pending.get(w.key).map(|p| p.started));
        }
        self.throttle = Throttle::new(&self.bdev, self.root, cx);
        self.holds &= self.throttle.is_some();
        for w in waiting {
            match &mut self.throttle {
                Some(throttle) => {
                    let op = self.pending.get(w.key).expect("the others are gone").op;
                    throttle.hold(direction(op), w);
                }
                None => self.start_limited(w, cx),
            }
        }
    }

    /// Fails what waits for its turn.
    pub(super) fn fail_limited(&mut self, status: Status, cx: &mut Cx) {
        let limited = self.pending.iter().filter(|(_, p)| p.is_limited);
        let keys: Vec<Key> = limited.map(|(key, _)| key).collect();
        keys.into_iter().for_each(|key| self.fail(key, status, cx));
    }
}
