//! The channel as its opener holds it: a pipeline from [`BdevChannel::submit`] to [`BdevChannel::poll`]. Reactor context.
//!
//! A request is checked (`shape`), gets a slot, and is at one [`Place`](request::Place) at any time until its completion is
//! handed out: held by rate limits (`throttle`) or by a fence (`fence`), in the channel's one queue, or at the device. It
//! goes to the device in as many pieces as the device's limits ask for (`shape`), each of which takes a credit (`credits`)
//! and carries the slot's key as its tag.
//!
//! Beside the pipeline: compound requests that the device does not do, which are made of reads and writes (`compound`), and
//! how long requests may take (`deadline`).

mod compound;
pub(crate) mod credits;
mod deadline;
mod fence;
mod properties;
mod request;
mod shape;
mod throttle;

pub use credits::CreditPool;

use crate::cell::{Command, Registration};
use crate::{
    Bdev, Blocks, Bytes, Channel, Completion, Descriptor, Io, Op, OpenError, OpenerQos, Status, Tag,
};
use aryk_dma::{Buffer, PAGE, Sgl};
use aryk_reactor::{Cx, Layer, Nanos, Point, RootId, Traced};
use aryk_slots::{Key, Slots};
use compound::Compounds;
use credits::Credits;
use deadline::Watch;
use fence::Fences;
use futures_channel::oneshot;
use request::{Place, Progress, Request};
use shape::{Piece, Route, Shape};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use throttle::Throttle;

/// Completions that the opener has, until the end of the turn in which the guest is notified of them.
#[derive(Default)]
struct Handed {
    requests: u32,
    at: Nanos,
    turn: u64,
}

enum State {
    Running,
    /// The channel aborts what the device has, then reports that the device has nothing.
    Freezing(oneshot::Sender<()>),
    Frozen,
    /// The channel waits until the device has nothing, then opens another channel of the device.
    Reopening(oneshot::Sender<Result<(), OpenError>>),
}

/// Zeroes to write where a device has no write-zeroes.
struct Zeroes {
    buffer: Buffer,
    sgl: Sgl,
}

/// A disk's channel, private to its opener. See the file's head.
pub struct BdevChannel {
    device: Box<dyn Channel>,
    /// Keeps the disk open.
    descriptor: Descriptor,
    registration: Registration,
    shape: Shape,
    state: State,
    requests: Slots<Request>,
    /// Nothing makes a request wait, as [`BdevChannel::is_clear_now`] says: a valid request may go to the device at once. A poll
    /// sets it; what may make requests wait clears it, which are commands to the channel and requests that join the queue.
    is_clear: bool,
    /// Requests at [`Place::Queued`], in the order of their turns; some may have ended since.
    queue: VecDeque<Key>,
    credits: Credits,
    /// Completions of requests that did not end at the device.
    ready: Vec<Completion>,
    zeroes: Option<Zeroes>,
    fences: Fences,
    compounds: Compounds,
    watch: Watch,
    /// The opener's own limits.
    opener: Option<Arc<OpenerQos>>,
    /// Present while the disk or the opener has rate limits.
    throttle: Option<Throttle>,
    handed: Handed,
    /// The queue and the disk that the trace records name.
    traced: Traced,
}

impl fmt::Debug for BdevChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut s = f.debug_struct("BdevChannel");
        s.field("bdev", self.bdev()).field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

/// Requests that have ended, and stay in a line at least.
const ENDED_MIN: usize = 64;

impl BdevChannel {
    pub(crate) fn open(descriptor: Descriptor, root: RootId, cx: &mut Cx) -> Result<Self, OpenError> {
        let bdev = Arc::clone(descriptor.bdev());
        if bdev.is_removing() {
            return Err(OpenError::Removed);
        }
        // First of all: what happens to all channels from now on happens to this one too.
        let registration = Registration::new(&bdev, root, cx);
        let shape = Shape::new(&**bdev.device(), descriptor.is_writable());
        let opened = bdev.device().open_channel(root, cx);
        let device = opened.inspect_err(|_| registration.close(&bdev))?;
        let depth = shape.limits.depth;
        cx.name_object(Layer::Bdev, bdev.serial() as u16, Some(bdev.name()));
        Ok(Self {
            credits: Credits::new(depth, device.credits(), root, cx.local()),
            device,
            registration,
            shape,
            state: State::Running,
            requests: Slots::new(depth.min(64)),
            is_clear: false,
            queue: VecDeque::new(),
            ready: Vec::new(),
            zeroes: None,
            fences: Fences::standing(bdev.ranges().fences()),
            compounds: Compounds::default(),
            watch: Watch::new(bdev.deadline()),
            opener: None,
            throttle: Throttle::new(&bdev, None, root, cx),
            handed: Handed::default(),
            traced: Traced::new(Layer::Bdev, bdev.serial() as u16),
            descriptor,
        })
    }

    /// From now on the trace records of the channel are those of its root too: it is a front-end's queue, whose requests all go
    /// to this channel, by its tags.
    pub fn trace_front_end(&mut self) {
        self.traced = Traced::both(self.root().trace_number(), self.bdev().serial() as u16);
    }

    /// The disk.
    #[inline]
    pub fn bdev(&self) -> &Arc<Bdev> {
        self.descriptor.bdev()
    }

    #[inline]
    fn root(&self) -> RootId {
        self.registration.root()
    }

    /// Requests that have been submitted and whose completions have not been handed out.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.requests.len() + self.ready.len() as u32
    }

    /// Whether a poll would find nothing to do, unless the channel gets a command ([`Cx::wake_for_event`]).
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.in_flight() == 0 && self.handed.requests == 0
    }

    /// Starts a request, which completes exactly once, in a later [`BdevChannel::poll`]. Its data stays in place until then.
    // Not inlined: inlined into the poll of a queue, most of its values would be in memory instead of registers.
    #[inline(never)]
    pub fn submit(&mut self, mut io: Io, cx: &mut Cx) {
        cx.trace(self.traced, Point::Submit, io.tag.0 as u32);
        let Some(bytes) = self.bytes_if_immediate(&io).filter(|_| self.credits.try_take()) else {
            return self.submit_any(io, cx);
        };
        let key = self.requests.add(Request::sent(&io, bytes, cx.now()));
        self.registration.set_in_flight(self.requests.len());
        self.credits.spend(bytes);
        io.tag = Tag(key.raw());
        self.device.submit(&io, cx);
    }

    /// The bytes of a valid read or write that can go to the device at once and in one piece; `None` for any other request, valid
    /// or not. Most requests need no more checks than these.
    #[inline(always)]
    fn bytes_if_immediate(&self, io: &Io) -> Option<Bytes> {
        let bdev = self.bdev();
        let bytes = self.shape.bytes_if_plain(io, bdev.blocks())?;
        debug_assert!(
            !self.is_clear || self.is_clear_now(),
            "the flag is cleared when something makes requests wait"
        );
        (self.is_clear && !bdev.is_removing()).then_some(bytes)
    }

    /// Whether no request waits, no limit, fence or state of the channel may make one wait, and none has to set a timer.
    fn is_clear_now(&self) -> bool {
        self.queue.is_empty()
            && self.throttle.is_none()
            && self.fences.is_empty()
            && matches!(self.state, State::Running)
            && !self.watch.must_begin()
    }

    /// Checks any request, and starts it or finds out what it must wait for.
    #[inline(never)]
    fn submit_any(&mut self, io: Io, cx: &mut Cx) {
        if let Err(status) = self.check(&io) {
            self.refuse(io.tag, io.op, status, cx);
            return;
        }
        let bytes = self.shape.bytes_of(io.blocks);
        let is_limited = self.throttle.is_some() && !self.try_spend(io.op, bytes, cx);
        let goes_at_once = self.queue.is_empty()
            && !is_limited
            && self.fences.is_empty()
            && matches!(self.state, State::Running)
            && self.shape.is_one_piece(&io)
            && self.credits.try_take();
        let place = match goes_at_once {
            true => Place::AtDevice,
            false if is_limited => Place::Limited,
            false => Place::Queued,
        };
        let key = self.requests.add(Request::new(&io, bytes, cx.now(), place));
        self.registration.set_in_flight(self.requests.len());
        if goes_at_once {
            self.credits.spend(bytes);
            self.device.submit(&Io { tag: Tag(key.raw()), ..io }, cx);
        } else {
            self.place_later(key, is_limited, cx);
        }
        if self.watch.must_begin() {
            self.watch_oldest(cx);
        }
    }

    #[inline]
    fn check(&self, io: &Io) -> Result<(), Status> {
        let bdev = self.bdev();
        if bdev.is_removing() {
            return Err(Status::Removed);
        }
        self.shape.check(io, bdev.blocks())
    }

    /// Puts a new request where it waits, or sends on what there are credits for.
    #[inline(never)]
    fn place_later(&mut self, key: Key, is_limited: bool, cx: &mut Cx) {
        if is_limited {
            self.hold(key);
        } else {
            self.start(key, cx);
        }
        self.publish_depths();
    }

    /// Starts a request that has its slot, and that no rate limit holds.
    fn start(&mut self, key: Key, cx: &mut Cx) {
        let request = self.requests.get_mut(key).expect("the caller looked");
        let io = request.rest();
        if self.shape.route(&io) == Route::Emulated {
            request.set_place(Place::Compound);
            self.begin_compound(key, cx);
        } else if !self.fences.is_empty() && self.fences.hold_off(io.op, io.lba, io.blocks) {
            request.set_place(Place::Held);
            self.add_held(key);
        } else {
            self.enqueue(key, cx);
        }
    }

    /// Takes the credit for a piece of the request whose turn it is.
    #[inline]
    fn try_take_credit(&mut self) -> bool {
        matches!(self.state, State::Running) && self.credits.try_take()
    }

    /// Sends what it can of a request to the device, and puts it into the queue with what is left.
    fn enqueue(&mut self, key: Key, cx: &mut Cx) {
        self.requests.get_mut(key).expect("the caller looked").set_place(Place::Queued);
        if self.queue.is_empty() {
            let mut more = true;
            while more && self.try_take_credit() {
                more = self.send_piece(key, cx);
            }
            if !more {
                return;
            }
        }
        make_room(&mut self.queue, &self.requests);
        self.is_clear = false;
        self.queue.push_back(key);
        if self.credits.is_out_of_bytes() {
            cx.wake(self.root());
        }
    }

    #[inline]
    fn publish_depths(&self) {
        let limited = self.throttle.as_ref().map_or(0, Throttle::held);
        let waiting = self.queue.len() as u32 + self.fences.held() + limited;
        self.registration.set_depths(self.requests.len(), waiting);
    }

    #[cold]
    fn refuse(&mut self, tag: Tag, op: Op, status: Status, cx: &mut Cx) {
        self.registration.stats_mut().refuse(op);
        cx.trace(self.traced, Point::Complete, tag.0 as u32);
        self.ready.push(Completion { tag, status });
        cx.wake(self.root());
    }

    /// Aborts the requests with this tag. They still complete.
    pub fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        self.abort_those(|t| t == tag, cx);
    }

    /// Aborts all requests. They still complete.
    pub fn abort_all(&mut self, cx: &mut Cx) {
        self.abort_those(|_| true, cx);
    }

    /// Aborts the requests whose tags `is_meant` accepts, in one pass over all requests. They still complete.
    pub fn abort_those(&mut self, is_meant: impl Fn(Tag) -> bool, cx: &mut Cx) {
        let meant = self.requests.iter().filter(|(_, r)| is_meant(r.tag));
        let keys: Vec<_> = meant.map(|(key, _)| key).collect();
        for key in keys {
            self.abort_one(key, cx);
        }
    }

    /// Whether the memory of those requests may be replaced, as [`Channel::is_revocable`]: each was aborted, so that only its
    /// device has it, and the device allows that. Visits all requests.
    pub fn are_revocable(&self, is_meant: impl Fn(Tag) -> bool) -> bool {
        let is_revocable = |(key, request): (Key, &Request)| {
            request.progress == Progress::Aborted
                && !request.has_begun_to_swap(&self.shape)
                && self.device.is_revocable(Tag(key.raw()))
        };
        self.requests.iter().filter(|(_, r)| is_meant(r.tag)).all(is_revocable)
    }

    /// Adds what has completed to `out`, and sends on what has waited.
    #[inline]
    pub fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        self.begin_poll(cx);
        // What the device adds becomes what the opener gets, in place.
        let start = out.len();
        let mut end = start;
        self.device.poll(cx, out);
        for i in start..out.len() {
            if let Some(completed) = self.piece_completed(out[i], cx) {
                out[end] = completed;
                end += 1;
            }
        }
        out.truncate(end);
        self.send_on(cx);
        if !self.ready.is_empty() {
            out.append(&mut self.ready);
        }
        self.count_handed((out.len() - start) as u32, cx);
    }

    /// As [`BdevChannel::poll`], but calls `each` for each request that ended at the device: its completion is not stored in a
    /// list once more. Adds the other completions to `rest`, which must be empty.
    // Always inlined: the caller has the only call.
    #[inline(always)]
    pub fn poll_each(
        &mut self,
        cx: &mut Cx,
        rest: &mut Vec<Completion>,
        mut each: impl FnMut(Completion, &mut Cx),
    ) {
        debug_assert!(rest.is_empty(), "the list is the caller's scratch");
        self.begin_poll(cx);
        let mut count = 0;
        self.device.poll(cx, rest);
        for completion in rest.drain(..) {
            if let Some(completed) = self.piece_completed(completion, cx) {
                each(completed, cx);
                count += 1;
            }
        }
        self.send_on(cx);
        if !self.ready.is_empty() {
            rest.append(&mut self.ready);
        }
        self.count_handed(count + rest.len() as u32, cx);
    }

    #[inline]
    fn begin_poll(&mut self, cx: &mut Cx) {
        if self.registration.has_command() {
            self.obey(cx);
        }
        if self.handed.requests > 0 && self.handed.turn != cx.turn() {
            self.account_handed(cx);
            self.handed.requests = 0;
        }
        self.credits.begin_poll();
    }

    /// Sends on what has waited.
    #[inline]
    fn send_on(&mut self, cx: &mut Cx) {
        if !self.is_clear || self.credits.is_leased() || self.compounds.has_waiting() {
            self.advance(cx);
            self.is_clear = self.is_clear_now();
        }
        self.publish_depths();
    }

    /// Counts completions that the opener gets.
    #[inline]
    const fn count_handed(&mut self, count: u32, cx: &Cx) {
        if count > 0 {
            self.handed.requests += count;
            (self.handed.at, self.handed.turn) = (cx.now(), cx.turn());
        }
    }

    /// Sends on what has waited.
    #[inline(never)]
    fn advance(&mut self, cx: &mut Cx) {
        if self.compounds.has_waiting() {
            self.advance_compounds(cx);
        }
        if self.throttle.as_ref().is_some_and(Throttle::has_lines) {
            self.advance_limited(cx);
        }
        self.advance_queue(cx);
        if !matches!(self.state, State::Running) && self.credits.at_device() == 0 {
            self.drained(cx);
        }
        if !self.fences.is_empty() {
            self.report_quiet_fences();
        }
    }

    /// Sends a piece of each request in the queue in turn while there are credits: a request of many pieces does not hold
    /// up those behind it.
    fn advance_queue(&mut self, cx: &mut Cx) {
        while let Some(&key) = self.queue.front() {
            let is_queued = self.requests.get(key).is_some_and(|r| r.place == Place::Queued);
            if is_queued && !self.try_take_credit() {
                break;
            }
            self.queue.pop_front();
            if is_queued && self.send_piece(key, cx) {
                self.queue.push_back(key);
            }
        }
        if self.queue.is_empty() || !matches!(self.state, State::Running) {
            self.credits.decline(cx);
        } else if self.credits.is_out_of_bytes() {
            cx.wake(self.root());
        }
    }

    /// Sends the next piece of a request, whose credit was taken; whether more are to go.
    fn send_piece(&mut self, key: Key, cx: &mut Cx) -> bool {
        let (io, more) = match self.cut_piece(key) {
            Ok(cut) => cut,
            Err(status) => {
                self.credits.give_back(cx);
                self.fail(key, status, cx);
                return false;
            }
        };
        self.begin(key, cx.now());
        self.credits.spend(self.shape.bytes_of(io.blocks));
        self.device.submit(&io, cx);
        if self.requests.get(key).is_some_and(|r| r.progress == Progress::Aborted) {
            self.device.abort(Tag(key.raw()), cx);
        }
        more
    }

    /// Notes that a request that has waited, for something or for nothing, goes to the device.
    fn begin(&mut self, key: Key, now: Nanos) {
        let request = self.requests.get_mut(key).expect("the caller looked");
        if request.progress == Progress::Waits {
            request.progress = Progress::Begun;
            let waited_ns = now.ns_since(request.started);
            self.registration.stats_mut().layers.queued(waited_ns - request.waited_ns);
            request.waited_ns = waited_ns;
        }
    }

    /// Counts completions that were handed out in an earlier turn: the guest was notified of them when that turn ended.
    #[inline]
    fn account_handed(&mut self, cx: &Cx) {
        if let Some(end) = cx.turn_ended(self.handed.turn) {
            let ns = end.ns_since(self.handed.at);
            self.registration.stats_mut().layers.told(ns, self.handed.requests.into());
        }
    }

    /// Cuts the next piece off a request at [`Place::Queued`], and says whether more are to go.
    ///
    /// # Errors
    /// As [`Shape::next_piece`].
    #[inline]
    fn cut_piece(&mut self, key: Key) -> Result<(Io, bool), Status> {
        let request = self.requests.get_mut(key).expect("the caller looked");
        assert!(request.place == Place::Queued, "{:?} has nothing to send", request.place);
        let mut io = request.rest();
        io.tag = Tag(key.raw());
        match self.shape.next_piece(request)? {
            Piece::Blocks(blocks) if blocks == request.blocks => {}
            Piece::Blocks(blocks) => {
                io.blocks = blocks;
                if io.op.has_data() {
                    let bytes = self.shape.data_len(blocks);
                    io.data = request.data.slice(0, bytes);
                    request.data = request.data.slice(bytes, request.data.len() - bytes);
                }
            }
            Piece::Zeroes(blocks) => {
                let bytes = self.shape.data_len(self.shape.zero_blocks);
                let zeroes = self.zeroes.get_or_insert_with(|| Zeroes::new(bytes as usize));
                let data = zeroes.sgl.slice(0, self.shape.data_len(blocks));
                io = Io { op: Op::Write, may_unmap: false, blocks, data, ..io };
            }
        }
        debug_assert!(io.blocks <= request.blocks, "a piece is a part of what is left of its request");
        debug_assert!(io.blocks > Blocks::ZERO || io.op == Op::Flush, "each piece brings its request on");
        request.lba += io.blocks;
        request.blocks -= io.blocks;
        request.pieces += 1;
        let more = request.blocks > Blocks::ZERO;
        if !more {
            request.set_place(Place::AtDevice);
        }
        Ok((io, more))
    }

    /// The device has completed a piece. The request's completion, if that was all of it.
    #[inline]
    fn piece_completed(&mut self, completion: Completion, cx: &mut Cx) -> Option<Completion> {
        let key = Key::from_raw(completion.tag.0);
        self.credits.give_back(cx);
        let mut place = self.requests.occupied(key).expect("a device completes a piece once");
        let request = place.value();
        assert!(request.pieces > 0, "a device completes a piece once");
        request.pieces -= 1;
        if !completion.status.is_ok() {
            request.status = request.status.or(completion.status);
            // The rest is not sent.
            request.set_place(Place::AtDevice);
        }
        if request.pieces > 0 || request.place != Place::AtDevice {
            None
        } else if request.is_emulated() {
            self.stepped(key, cx)
        } else {
            let request = place.remove();
            Some(self.count_completed(request, cx))
        }
    }

    fn complete(&mut self, key: Key, cx: &mut Cx) -> Completion {
        let request = self.requests.remove(key).expect("the caller looked");
        self.count_completed(request, cx)
    }

    /// Adds a request that has left the table to the statistics, and returns its completion.
    #[inline(always)]
    fn count_completed(&mut self, request: Request, cx: &mut Cx) -> Completion {
        debug_assert!(request.pieces == 0, "a request completes after the last of its pieces");
        let Request { tag, asked, bytes, status, started, waited_ns, .. } = request;
        let latency = cx.now().ns_since(started);
        let mut stats = self.registration.stats_mut();
        stats.record(asked, bytes, status, latency);
        if waited_ns > 0 {
            stats.layers.completed(latency, waited_ns);
        }
        drop(stats);
        cx.trace(self.traced, Point::Complete, tag.0 as u32);
        Completion { tag, status }
    }

    /// Fails what is left of a request. The request completes now, or with its last piece.
    fn fail(&mut self, key: Key, status: Status, cx: &mut Cx) {
        let request = self.requests.get_mut(key).expect("the caller looked");
        request.status = request.status.or(status);
        assert!(!request.status.is_ok(), "a request fails with a reason");
        if request.pieces > 0 {
            request.set_place(Place::AtDevice);
            return;
        }
        let completion = if request.is_emulated() {
            self.end_compound(key, cx)
        } else {
            if request.place == Place::Limited {
                self.throttle.as_mut().expect("a limited request has limits").forget_one();
            }
            self.complete(key, cx)
        };
        self.ready.push(completion);
        cx.wake(self.root());
    }

    /// Aborts a request. The second abort of the same request does nothing.
    fn abort_one(&mut self, key: Key, cx: &mut Cx) {
        let Some(request) = self.requests.get_mut(key) else { return };
        if request.progress == Progress::Aborted {
            return;
        }
        let (pieces, goes_on) = (request.pieces, request.has_begun_to_swap(&self.shape));
        if pieces > 0 || goes_on {
            request.progress = Progress::Aborted;
        }
        if !goes_on && (pieces == 0 || request.place == Place::Queued) {
            self.fail(key, Status::Aborted, cx);
        }
        if pieces > 0 {
            self.device.abort(Tag(key.raw()), cx);
        }
    }

    /// Aborts all requests, since the disk is being removed. A device that has kept requests in spite of an abort, because its
    /// later requests must not overtake them, is asked once more.
    #[cold]
    fn abort_for_removal(&mut self, cx: &mut Cx) {
        let is_kept = |request: &Request| request.progress == Progress::Aborted && request.pieces > 0;
        let kept = self.requests.iter().filter(|(_, request)| is_kept(request));
        let kept: Vec<_> = kept.map(|(key, _)| key).collect();
        self.abort_all(cx);
        for key in kept {
            self.device.abort(Tag(key.raw()), cx);
        }
    }

    fn obey(&mut self, cx: &mut Cx) {
        self.is_clear = false;
        while let Some(command) = self.registration.take_command() {
            match command {
                Command::Freeze(done) => self.freeze(done, cx),
                // A channel that was opened after a reset began knows nothing of that reset.
                Command::Thaw if matches!(self.state, State::Reopening(_)) => {}
                Command::Thaw => self.thaw(),
                Command::Reopen(done) => self.begin_to_reopen(done, cx),
                Command::Abort => self.abort_for_removal(cx),
                Command::Fence { id, extent, held_off, quiet } => {
                    self.put_up_fence(id, (extent, held_off), quiet);
                }
                Command::Unfence(id) => self.take_down_fence(id, cx),
                Command::Granted { key, lock } => self.granted(key, lock, cx),
                Command::SetDeadline(deadline) => self.set_deadline(deadline, cx),
                Command::LookAtDeadlines => self.look_at_deadlines(cx),
                Command::LookAtLimits => self.look_at_limits(cx),
                Command::FailLimited => self.fail_limited(Status::Removed, cx),
                // The caller of each of the next two may have stopped waiting.
                Command::ReloadProperties(done) => {
                    self.reload_properties();
                    let _ = done.send(());
                }
                Command::BaseEvent { base, event, told } => {
                    self.device.base_event(&base, event, cx);
                    let _ = told.send(());
                }
            }
        }
    }

    /// Sends nothing more to the device, aborts what it has, and reports to `done` when it has nothing.
    fn freeze(&mut self, done: oneshot::Sender<()>, cx: &mut Cx) {
        if let State::Reopening(done) = std::mem::replace(&mut self.state, State::Freezing(done)) {
            let _ = done.send(Err(is_being_reset()));
        }
        if let Some(throttle) = &mut self.throttle {
            throttle.step_aside(cx);
        }
        let at_device = self.requests.iter().filter(|(_, r)| r.pieces > 0);
        let keys: Vec<_> = at_device.map(|(key, _)| key).collect();
        keys.into_iter().for_each(|key| self.abort_one(key, cx));
    }

    fn thaw(&mut self) {
        let is_freezing = matches!(self.state, State::Freezing(_));
        assert!(
            !is_freezing,
            "a reset ends after all channels have reported that their devices have nothing"
        );
        self.state = State::Running;
    }

    /// Sends nothing more to the device, and opens another channel of it when it has nothing. Not while the disk is reset.
    fn begin_to_reopen(&mut self, done: oneshot::Sender<Result<(), OpenError>>, cx: &mut Cx) {
        if matches!(self.state, State::Running) {
            self.state = State::Reopening(done);
            if let Some(throttle) = &mut self.throttle {
                throttle.step_aside(cx);
            }
        } else {
            let _ = done.send(Err(is_being_reset()));
        }
    }

    /// The device has nothing: goes on with what waited for that.
    #[cold]
    fn drained(&mut self, cx: &mut Cx) {
        // The caller may have stopped waiting for a reopened channel. A reset always thaws the channel that it froze.
        match std::mem::replace(&mut self.state, State::Running) {
            State::Freezing(done) => {
                self.state = State::Frozen;
                let _ = done.send(());
            }
            State::Reopening(done) => {
                let _ = done.send(self.reopen(cx));
                // Requests in the queue and in the lines of the limits go on in the next poll.
                cx.wake(self.root());
            }
            settled @ (State::Running | State::Frozen) => self.state = settled,
        }
    }

    /// Opens another channel of the device. If that cannot be, the channel keeps the one that it has.
    fn reopen(&mut self, cx: &mut Cx) -> Result<(), OpenError> {
        let root = self.root();
        assert!(
            self.credits.at_device() == 0,
            "a device's channel is closed when the device has nothing of it"
        );
        self.device = self.bdev().device().open_channel(root, cx)?;
        self.credits = Credits::new(self.shape.limits.depth, self.device.credits(), root, cx.local());
        Ok(())
    }
}

fn is_being_reset() -> OpenError {
    OpenError::Unavailable("the disk is being reset".to_owned())
}

impl Zeroes {
    fn new(bytes: usize) -> Self {
        let mut buffer = Buffer::new(bytes, PAGE as usize);
        let sgl = buffer.lend();
        Self { buffer, sgl }
    }
}

/// Makes room for one more in a line of requests. A request that ends while it stands in a line leaves its entry there: when
/// such entries are most of the line, they are removed. So the line never has many more entries than there are requests,
/// and each request that joins it pays for about one look.
#[inline]
fn make_room(line: &mut VecDeque<Key>, requests: &Slots<Request>) {
    if line.len() >= ENDED_MIN + 2 * requests.len() as usize {
        line.retain(|key| requests.get(*key).is_some());
        debug_assert!(line.len() <= requests.len() as usize, "a request stands once in a line");
    }
}

impl Drop for BdevChannel {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        assert_eq!(self.in_flight(), 0, "{} is closed with requests in flight", self.bdev().name());
        assert_eq!(self.credits.at_device(), 0, "{} has pieces of no request", self.bdev().name());
        assert!(self.throttle.as_ref().is_none_or(Throttle::is_aside), "other channels would wait for it");
        if let Some(zeroes) = &mut self.zeroes {
            zeroes.buffer.reclaim();
        }
        self.registration.close(self.descriptor.bdev());
    }
}

#[cfg(test)]
mod tests;
