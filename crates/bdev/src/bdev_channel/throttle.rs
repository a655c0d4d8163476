//! Rate limits: the lines in which the requests of a limited disk or opener wait for their turn, before they go any further.
//! Reactor context.
//!
//! Each request counts as one request. Reads and compares count as reads, all other operations as writes. A request counts
//! the bytes of its blocks; a compare-and-write and a copy count them twice; a flush and an unmap, which move no data,
//! count [`aryk_qos::LEAST_BYTES`].
//!
//! A channel has one line, or one for each direction if some bucket counts only one direction: then reads do not wait
//! behind writes that are over their limit.

use super::request::{Place, Request};
use super::{BdevChannel, State, make_room};
use crate::{Bdev, Bytes, Op, OpenerQos, Status};
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
    type Waiter = RootId;
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

#[repr(C)]
struct Line {
    lane: Lane<RootId, TimerId>,
    waiting: VecDeque<Key>,
}

impl Line {
    /// Asks for a request, if none is before it. If it is not let through, it will wait.
    #[inline(never)]
    fn ask(&mut self, bytes: Bytes, cx: &mut Cx) -> bool {
        if !self.waiting.is_empty() {
            return false;
        }
        let (now, waker) = (cx.now().0, &mut Waker(cx));
        let goes = self.lane.ask(bytes.0, 0, now, waker);
        if !goes {
            self.lane.settle(true, now, waker);
        }
        goes
    }
}

/// The lines of a channel that is limited. While requests wait in a line, none of it is paid ahead.
pub(super) struct Throttle {
    /// A line of their own, where not all limits count all requests.
    writes: Option<Box<Line>>,
    line: Line,
    /// Requests at [`Place::Limited`]. The lines may have more entries, of requests that failed while they waited.
    held: u32,
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
    /// The lines of a channel of `bdev`, which this opener has; `None` if nothing limits it.
    pub fn new(bdev: &Bdev, opener: Option<&OpenerQos>, root: RootId, cx: &mut Cx) -> Option<Self> {
        let buckets = bdev.buckets(opener);
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
        Some(Self { writes, line: line(Direction::Read), held: 0 })
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

    /// Spends what a new request costs, if it may go at once. If not, [`Throttle::hold`] must follow.
    #[inline]
    fn try_spend(&mut self, direction: Direction, bytes: Bytes, cx: &mut Cx) -> bool {
        let line = self.line(direction);
        line.lane.spend_ahead(bytes.0) || line.ask(bytes, cx)
    }

    /// Adds a request to its line.
    fn hold(&mut self, direction: Direction, key: Key) {
        let line = self.line(direction);
        line.lane.hand_back();
        line.waiting.push_back(key);
        self.held += 1;
    }

    /// Requests that wait.
    #[inline]
    pub const fn held(&self) -> u32 {
        self.held
    }

    /// A request that waited has failed. Its entry stays in its line.
    pub const fn forget_one(&mut self) {
        assert!(self.held > 0, "a request that fails while limits hold it is one of those that they hold");
        self.held -= 1;
    }

    /// Whether some line has entries.
    pub fn has_lines(&self) -> bool {
        iter::once(&self.line).chain(self.writes.as_deref()).any(|line| !line.waiting.is_empty())
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
    fn into_waiting(self) -> Vec<Key> {
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
    const fn counted_bytes(op: Op, bytes: Bytes) -> Bytes {
        match op {
            Op::Read | Op::Write | Op::Compare => bytes,
            Op::CompareAndWrite | Op::Copy => bytes.doubled(),
            // Whether the store has to write them is not known before.
            Op::WriteZeroes => bytes,
            Op::Flush | Op::Unmap => Bytes(aryk_qos::LEAST_BYTES),
        }
    }

    /// Spends what a new request of a disk with rate limits costs, if it may go at once. If not, [`Self::hold`] must
    /// follow; a frozen channel holds each request.
    // Not inlined: the path of disks without limits is to stay as short as it is.
    #[inline(never)]
    pub(super) fn try_spend(&mut self, op: Op, bytes: Bytes, cx: &mut Cx) -> bool {
        let bytes = Self::counted_bytes(op, bytes);
        let throttle = self.throttle.as_mut().expect("the caller looked");
        matches!(self.state, State::Running) && throttle.try_spend(direction(op), bytes, cx)
    }

    /// Makes a request at [`Place::Limited`] wait.
    pub(super) fn hold(&mut self, key: Key) {
        let direction = direction(self.requests.get(key).expect("it has just come").op);
        let throttle = self.throttle.as_mut().expect("the caller looked");
        make_room(&mut throttle.line(direction).waiting, &self.requests);
        throttle.hold(direction, key);
    }

    /// Starts the requests that the limits let go by now.
    pub(super) fn advance_limited(&mut self, cx: &mut Cx) {
        if !matches!(self.state, State::Running) {
            return;
        }
        let Some(mut throttle) = self.throttle.take() else { return };
        let (now, mut started) = (cx.now().0, 0);
        for line in throttle.lines() {
            while let Some(&key) = line.waiting.front() {
                // A request that has failed is gone.
                if let Some(r) = self.requests.get(key) {
                    let bytes = Self::counted_bytes(r.op, r.bytes);
                    if !line.lane.ask(bytes.0, line.waiting.len() as u64 - 1, now, &mut Waker(cx)) {
                        break;
                    }
                    started += 1;
                    self.start_limited(key, cx);
                }
                line.waiting.pop_front();
            }
            line.lane.settle(!line.waiting.is_empty(), now, &mut Waker(cx));
        }
        assert!(started <= throttle.held, "the limits let requests go that they held");
        throttle.held -= started;
        self.throttle = Some(throttle);
    }

    /// Starts a request that the limits have let go.
    fn start_limited(&mut self, key: Key, cx: &mut Cx) {
        let request = self.requests.get_mut(key).expect("the caller looked");
        assert!(request.place == Place::Limited, "{:?} is not held by limits", request.place);
        request.set_place(Place::Queued);
        let held = cx.now().since(request.started);
        request.waited_ns = held.as_nanos() as u64;
        let mut stats = self.registration.stats_mut();
        stats.throttled(held);
        stats.layers.throttled(request.waited_ns);
        drop(stats);
        self.start(key, cx);
    }

    /// Applies the limits that an opener has now, beside those of the disk, also to requests that wait. The opener calls this
    /// again when it has changed them.
    pub fn limit_opener(&mut self, opener: &Arc<OpenerQos>, cx: &mut Cx) {
        self.opener = Some(Arc::clone(opener));
        self.is_clear = false;
        self.look_at_limits(cx);
        cx.wake(self.root());
    }

    /// Applies the limits that there are now.
    pub(super) fn look_at_limits(&mut self, cx: &mut Cx) {
        let mut waiting = Vec::new();
        if let Some(mut before) = self.throttle.take() {
            before.step_aside(cx);
            waiting = before.into_waiting();
            waiting.retain(|&key| self.requests.get(key).is_some());
            // Two lines may become one.
            waiting.sort_by_key(|&key| self.requests.get(key).map(|r| r.started));
        }
        let opener = self.opener.as_deref();
        self.throttle = Throttle::new(self.descriptor.bdev(), opener, self.registration.root(), cx);
        for key in waiting {
            let op = self.requests.get(key).expect("the others are gone").op;
            match &mut self.throttle {
                Some(throttle) => throttle.hold(direction(op), key),
                None => self.start_limited(key, cx),
            }
        }
    }

    /// Fails the requests that the limits hold.
    pub(super) fn fail_limited(&mut self, status: Status, cx: &mut Cx) {
        let is_limited = |(_, r): &(Key, &Request)| r.place == Place::Limited;
        let limited = self.requests.iter().filter(is_limited);
        let keys: Vec<Key> = limited.map(|(key, _)| key).collect();
        keys.into_iter().for_each(|key| self.fail(key, status, cx));
    }
}
