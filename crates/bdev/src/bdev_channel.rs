//! The channel as its opener holds it: checks, credits, the one FIFO, splitting, statistics. Reactor context.
//!
//! A request lives in a slot from [`BdevChannel::submit`] until its completion is handed out. It goes to the module in as many pieces as the
//! module's limits ask for, each of which carries the slot's key as its tag. A request's pieces go out in order while there are credits; one with
//! pieces left to go stands in the FIFO.
//!
//! Rarer things are beside: requests made of reads and writes (`compound`), what they hold off (`fence`), and how long requests may take
//! (`deadline`).

mod compound;
mod deadline;
mod fence;
mod properties;
mod throttle;

use crate::cell::{Cells, ChannelCell, Command};
use crate::{Bdev, Channel, Completion, Descriptor, Io, Limits, Op, OpSet, OpenError, Stats, Status, Tag};
use aryk_dma::{Buffer, PAGE, Sgl};
use aryk_reactor::{Cx, Handle, Layer, Nanos, Point, RootId};
use aryk_slots::{Key, Slots};
use compound::Compounds;
use deadline::Watch;
use fence::Fences;
use futures_channel::oneshot;
use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use throttle::Throttle;

/// A request in flight. `lba`, `blocks` and `data` are what has not gone to the module yet.
struct Pending {
    tag: Tag,
    /// What was asked for.
    asked: Op,
    /// What the module is to do: that, or a step on the way to it.
    op: Op,
    fua: bool,
    may_unmap: bool,
    lba: u64,
    blocks: u64,
    data: Sgl,
    bytes: u64,
    /// Whether a piece is still to go, be it an empty one, as of a flush.
    to_go: bool,
    /// It waits for the disk's limits to let it go, and nothing of it has begun.
    is_limited: bool,
    /// A fence holds it off.
    is_held: bool,
    /// Pieces that the module has.
    pieces: u32,
    status: Status,
    started: Nanos,
    /// How long it waited before its first piece went to the module, in nanoseconds; until then, the part of that which is told already.
    waited_ns: u64,
    progress: Progress,
}

/// How far a request has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Progress {
    /// The module has had no piece of it.
    Waits,
    /// The module has had its first piece.
    Begun,
    /// It was aborted, and the module was told to abort each piece that it has.
    GivenUp,
}

/// Completions that the opener has, and of which it is not known yet when the guest was told.
#[derive(Default)]
struct Handed {
    requests: u32,
    at: Nanos,
    turn: u64,
}

enum State {
    Running,
    /// Aborting what the module has, then telling.
    Freezing(oneshot::Sender<()>),
    Frozen,
}

/// Zeroes to write where a module has no write-zeroes.
struct Zeroes {
    buffer: Buffer,
    sgl: Sgl,
}

/// A disk's channel, private to whoever opened it. See the file's head.
pub struct BdevChannel {
    inner: Box<dyn Channel>,
    /// Keeps the disk open.
    descriptor: Descriptor,
    bdev: Arc<Bdev>,
    /// The disk's number, for the trace.
    serial: u16,
    root: RootId,
    reactor: Handle,
    cells: Rc<Cells>,
    cell: Rc<ChannelCell>,
    limits: Limits,
    /// What the module does.
    ops: OpSet,
    /// What can be asked for.
    offered: OpSet,
    block_size: u32,
    /// Blocks of zeroes to write at one time.
    zero_blocks: u32,
    writable: bool,
    state: State,
    /// Fewer than none while the module has more than its depth, which has shrunk.
    credits: i64,
    /// Bytes that requests may send to the module before the next poll, which those of one piece may exceed.
    bytes_left: u64,
    pending: Slots<Pending>,
    waiting: VecDeque<Key>,
    ready: Vec<Completion>,
    zeroes: Option<Zeroes>,
    fences: Fences,
    compounds: Compounds,
    watch: Watch,
    /// Present while the disk is limited.
    throttle: Option<Throttle>,
    /// Requests that it holds.
    limited: u32,
    /// Whether its lines are to be looked at: they have requests, be it that these have failed meanwhile.
    holds: bool,
    handed: Handed,
}

impl fmt::Debug for BdevChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut s = f.debug_struct("BdevChannel");
        s.field("bdev", &self.bdev).field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

/// Bytes of zeroes to write at one time where a module has no write-zeroes, unless one block has more.
const ZEROES: u32 = 64 * 1024;

/// Bytes that a channel sends to its module from one poll to the next, and those of one piece more: a module may copy them then and there, or have the kernel do
/// so. Requests that want more wait for the next turn, in which others have theirs too. It is about 80 µs of copies, so that a reactor's turn stays short beside
/// the latency of a disk.
const POLL_BYTES: u64 = 512 << 10;

/// Requests that have ended, and stay in a line at least.
const ENDED_MIN: usize = 64;

impl BdevChannel {
    pub(crate) fn open(descriptor: Descriptor, root: RootId, cx: &mut Cx) -> Result<Self, OpenError> {
        let bdev = Arc::clone(descriptor.bdev());
        if bdev.is_removing() {
            return Err(OpenError::Removed);
        }
        // First of all: what happens to all channels from now on happens to this one too.
        let (cells, cell) = Cells::open(&bdev, root, cx);
        let device = bdev.device();
        let limits = properties::limits(&**device);
        let ops = device.ops();
        let inner = device.open_channel(root, cx).inspect_err(|_| {
            cells.close(bdev.serial(), &cell);
            bdev.channel_closed(cx.handle(), &Stats::default());
        })?;
        cx.name_object(Layer::Bdev, bdev.serial() as u16, Some(bdev.name()));
        Ok(Self {
            inner,
            cells,
            cell,
            root,
            reactor: cx.handle().clone(),
            limits,
            offered: offered(ops),
            ops,
            zero_blocks: (ZEROES / device.geometry().block_size).max(1),
            block_size: device.geometry().block_size,
            writable: descriptor.is_writable(),
            state: State::Running,
            credits: limits.depth.into(),
            bytes_left: POLL_BYTES,
            pending: Slots::new(limits.depth.min(64)),
            waiting: VecDeque::new(),
            ready: Vec::new(),
            zeroes: None,
            fences: Fences::standing(bdev.ranges().fences()),
            compounds: Compounds::default(),
            watch: Watch::new(bdev.deadline()),
            throttle: Throttle::new(&bdev, root, cx),
            limited: 0,
            holds: false,
            handed: Handed::default(),
            serial: bdev.serial() as u16,
            bdev,
            descriptor,
        })
    }

    /// The disk.
    pub fn bdev(&self) -> &Arc<Bdev> {
        &self.bdev
    }

    /// Requests that have been submitted and whose completions have not been handed out.
    pub fn in_flight(&self) -> u32 {
        self.pending.len() + self.ready.len() as u32
    }

    /// Whether a poll would find nothing to do, unless the channel is told something ([`Cx::tell`]).
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.in_flight() == 0 && self.handed.requests == 0
    }

    /// Starts a request, which completes exactly once, in a later [`BdevChannel::poll`]. Its data stays in place until then.
    // What is called here and is not inlined has no reference to the request. So its parts stay in registers until they are stored where they are kept;
    // copied from memory that they were just put into, they would wait for all stores before them, those to a guest's lines among them.
    #[inline]
    pub fn submit(&mut self, io: Io, cx: &mut Cx) {
        cx.trace(Layer::Bdev, Point::Submit, self.serial, io.tag.0 as u32);
        if let Err(status) = self.check(&io) {
            self.refuse(io.tag, io.op, status, cx);
            return;
        }
        let bytes = io.blocks * u64::from(self.block_size);
        let is_limited = self.throttle.is_some() && !self.may_go(io.op, bytes, cx);
        let at_once = self.credits > 0
            && self.bytes_left > 0
            && self.waiting.is_empty()
            && matches!(self.state, State::Running)
            && !is_limited
            && self.is_one_piece(&io)
            && (self.fences.is_empty() || !self.fences.hold_off(io.op, io.lba, io.blocks));
        let pending = Pending {
            tag: io.tag,
            asked: io.op,
            op: io.op,
            fua: io.fua,
            may_unmap: io.may_unmap,
            lba: io.lba,
            blocks: io.blocks,
            data: io.data,
            bytes,
            to_go: !at_once,
            is_limited,
            is_held: false,
            pieces: at_once.into(),
            status: Status::Ok,
            started: cx.now(),
            waited_ns: 0,
            progress: if at_once { Progress::Begun } else { Progress::Waits },
        };
        if self.pending.is_full() {
            self.pending.grow(self.pending.capacity());
        }
        let Ok(key) = self.pending.insert(pending) else { unreachable!("it has room") };
        if at_once {
            self.credits -= 1;
            self.bytes_left = self.bytes_left.saturating_sub(bytes);
            self.inner.submit(Io { tag: Tag(key.raw()), ..io }, cx);
        } else if is_limited {
            self.hold(key, io.op, io.source);
        } else {
            self.start(key, io, cx);
        }
        if self.watch.must_begin() {
            self.watch_oldest(cx);
        }
        self.publish_depths();
    }

    /// Starts a request that has its place, and that nothing limits.
    #[inline]
    fn start(&mut self, key: Key, io: Io, cx: &mut Cx) {
        if io.op.is_compound() {
            self.begin_compound(key, io, cx);
        } else if !self.fences.is_empty() && self.fences.hold_off(io.op, io.lba, io.blocks) {
            self.add_held(key);
        } else {
            self.enqueue(key, cx);
        }
    }

    /// Whether a piece may go to the module, of a request whose turn it is.
    #[inline]
    const fn may_send(&self) -> bool {
        self.credits > 0 && self.bytes_left > 0 && matches!(self.state, State::Running)
    }

    /// Sends what it can of a request to the module, and puts it into the FIFO with what is left.
    #[inline]
    fn enqueue(&mut self, key: Key, cx: &mut Cx) {
        if !self.waiting.is_empty() || self.advance(key, cx) {
            make_room(&mut self.waiting, &self.pending, |key| *key);
            self.waiting.push_back(key);
            if self.bytes_left == 0 {
                cx.wake(self.root);
            }
        }
    }

    #[inline]
    fn publish_depths(&self) {
        self.cell
            .set_depths(self.pending.len(), self.waiting.len() as u32 + self.fences.held() + self.limited);
    }

    #[cold]
    fn refuse(&mut self, tag: Tag, op: Op, status: Status, cx: &mut Cx) {
        self.cell.stats.borrow_mut().refuse(op);
        self.ready.push(Completion { tag, status });
        cx.wake(self.root);
    }

    /// Whether a request can go to the module as it is.
    #[inline]
    fn is_one_piece(&self, io: &Io) -> bool {
        let limits = &self.limits;
        match io.op {
            Op::Read | Op::Write => {
                io.blocks <= limits.transfer_blocks.into()
                    && io.data.segments() <= limits.segments
                    && (limits.boundary_blocks == 0
                        || io.blocks <= to_boundary(io.lba, limits.boundary_blocks))
            }
            Op::Flush => true,
            Op::Unmap => io.blocks <= limits.unmap_blocks,
            Op::WriteZeroes => self.ops.contains(Op::WriteZeroes) && io.blocks <= limits.write_zeroes_blocks,
            Op::Compare | Op::CompareAndWrite | Op::Copy => false,
        }
    }

    /// Says that nobody wants the requests with this tag any more. They still complete.
    pub fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        self.abort_those(|t| t == tag, cx);
    }

    /// Says that nobody wants any request any more. They still complete.
    pub fn abort_all(&mut self, cx: &mut Cx) {
        self.abort_those(|_| true, cx);
    }

    /// Says that nobody wants the requests with those tags any more, in one look at all requests. They still complete.
    pub fn abort_those(&mut self, is_meant: impl Fn(Tag) -> bool, cx: &mut Cx) {
        let meant = self.pending.iter().filter(|(_, p)| is_meant(p.tag));
        let keys: Vec<_> = meant.map(|(key, _)| key).collect();
        for key in keys {
            self.abort_one(key, cx);
        }
    }

    /// Adds what has completed to `out`, and sends on what has waited.
    #[inline]
    pub fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        if self.cell.has_command() {
            self.obey(cx);
        }
        if self.handed.requests > 0 && self.handed.turn != cx.turn() {
            self.account_handed(cx);
            self.handed.requests = 0;
        }
        self.bytes_left = POLL_BYTES;
        // What the module adds becomes what the opener gets, in place.
        let start = out.len();
        let mut end = start;
        self.inner.poll(cx, out);
        for i in start..out.len() {
            if let Some(completed) = self.piece_completed(out[i], cx) {
                out[end] = completed;
                end += 1;
            }
        }
        out.truncate(end);
        if self.compounds.has_waiting() {
            self.advance_compounds(cx);
        }
        if self.holds {
            self.advance_limited(cx);
        }
        if !self.waiting.is_empty() {
            self.advance_waiting(cx);
            if self.bytes_left == 0 && !self.waiting.is_empty() {
                cx.wake(self.root);
            }
        }
        if matches!(self.state, State::Freezing(_)) {
            self.look_frozen();
        }
        if !self.fences.is_empty() {
            self.look_before_fences();
        }
        self.publish_depths();
        if !self.ready.is_empty() {
            out.append(&mut self.ready);
        }
        if out.len() > start {
            self.handed.requests += (out.len() - start) as u32;
            (self.handed.at, self.handed.turn) = (cx.now(), cx.turn());
        }
    }

    #[inline]
    fn check(&self, io: &Io) -> Result<(), Status> {
        let bdev = &self.bdev;
        if bdev.is_removing() {
            return Err(Status::Removed);
        }
        if io.op.is_change() && !self.writable {
            return Err(Status::ReadOnly);
        }
        if !self.offered.contains(io.op) {
            return Err(Status::Unsupported);
        }
        if io.op == Op::Flush {
            return if io.blocks == 0 && io.data.is_empty() { Ok(()) } else { Err(Status::Invalid) };
        }
        if io.blocks == 0 {
            return Err(Status::Invalid);
        }
        if io.lba.checked_add(io.blocks).is_none_or(|end| end > bdev.blocks()) {
            return Err(Status::OutOfRange);
        }
        if io.op.is_compound() {
            return self.check_compound(Io { ..*io });
        }
        let bytes = if io.op.has_data() { u128::from(io.blocks) * u128::from(self.block_size) } else { 0 };
        if u128::from(io.data.len()) == bytes { Ok(()) } else { Err(Status::Invalid) }
    }

    /// Sends pieces of a request to the module while there are credits; whether more are to go.
    #[inline]
    fn advance(&mut self, key: Key, cx: &mut Cx) -> bool {
        let mut more = true;
        while more && self.may_send() {
            more = self.send_piece(key, cx);
        }
        more
    }

    /// Gives each request that waits a piece in turn while there are credits: one of many pieces does not hold up those behind it.
    fn advance_waiting(&mut self, cx: &mut Cx) {
        while self.may_send() {
            let Some(key) = self.waiting.pop_front() else { break };
            if self.send_piece(key, cx) {
                self.waiting.push_back(key);
            }
        }
    }

    /// Sends the next piece of a request, for which there is a credit; whether more are to go. One that has failed or was aborted meanwhile has none.
    #[inline]
    fn send_piece(&mut self, key: Key, cx: &mut Cx) -> bool {
        if !self.pending.get(key).is_some_and(|p| p.to_go) {
            return false;
        }
        match self.next_piece(key) {
            Some((io, more)) => {
                self.begin(key, cx.now());
                self.credits -= 1;
                let bytes = io.blocks * u64::from(self.block_size);
                self.bytes_left = self.bytes_left.saturating_sub(bytes);
                self.inner.submit(io, cx);
                if self.pending.get(key).is_some_and(|p| p.progress == Progress::GivenUp) {
                    self.inner.abort(Tag(key.raw()), cx);
                }
                more
            }
            None => {
                self.fail(key, Status::Invalid, cx);
                false
            }
        }
    }

    /// A request that has waited, for something or for nothing, goes to the module.
    fn begin(&mut self, key: Key, now: Nanos) {
        let p = self.pending.get_mut(key).expect("the caller looked");
        if p.progress == Progress::Waits {
            p.progress = Progress::Begun;
            let waited_ns = now.ns_since(p.started);
            self.cell.stats.borrow_mut().layers.queued(waited_ns - p.waited_ns);
            p.waited_ns = waited_ns;
        }
    }

    /// Of completions that were handed out in an earlier turn, the guest had been told when that ended.
    #[inline]
    fn account_handed(&mut self, cx: &Cx) {
        if let Some(end) = cx.turn_ended(self.handed.turn) {
            let ns = end.ns_since(self.handed.at);
            self.cell.stats.borrow_mut().layers.told(ns, self.handed.requests.into());
        }
    }

    /// Cuts the next piece off a request, and says whether more are to go. `None` if its segments are so small that no whole block of it fits the module's limit.
    #[inline]
    fn next_piece(&mut self, key: Key) -> Option<(Io, bool)> {
        let p = self.pending.get_mut(key).expect("the caller looked");
        let emulated = p.op == Op::WriteZeroes && !self.ops.contains(Op::WriteZeroes);
        let (op, blocks) = match p.op {
            Op::Read | Op::Write => (p.op, piece_blocks(p, &self.limits, self.block_size)?),
            Op::Flush => (Op::Flush, 0),
            Op::Unmap => (Op::Unmap, p.blocks.min(self.limits.unmap_blocks)),
            Op::WriteZeroes if emulated => {
                (Op::Write, p.blocks.min(zero_blocks(p.lba, &self.limits, self.zero_blocks).into()))
            }
            Op::WriteZeroes => (Op::WriteZeroes, p.blocks.min(self.limits.write_zeroes_blocks)),
            Op::Compare | Op::CompareAndWrite | Op::Copy => unreachable!("its steps are reads and writes"),
        };
        let data = if emulated {
            let bytes = self.zero_blocks as usize * self.block_size as usize;
            let zeroes = self.zeroes.get_or_insert_with(|| Zeroes::new(bytes));
            zeroes.sgl.slice(0, blocks as u32 * self.block_size)
        } else if blocks == p.blocks {
            p.data
        } else if p.op.has_data() {
            let bytes = blocks as u32 * self.block_size;
            let piece = p.data.slice(0, bytes);
            p.data = p.data.slice(bytes, p.data.len() - bytes);
            piece
        } else {
            Sgl::EMPTY
        };
        let Pending { fua, lba, .. } = *p;
        let may_unmap = p.may_unmap && op == Op::WriteZeroes;
        let io = Io { tag: Tag(key.raw()), op, fua, may_unmap, lba, blocks, source: 0, data };
        p.lba += blocks;
        p.blocks -= blocks;
        p.to_go = p.blocks > 0;
        p.pieces += 1;
        Some((io, p.to_go))
    }

    /// The request's completion, if that was all of it.
    #[inline]
    fn piece_completed(&mut self, completion: Completion, cx: &mut Cx) -> Option<Completion> {
        let key = Key::from_raw(completion.tag.0);
        self.credits += 1;
        let p = self.pending.get_mut(key).expect("a module completes what it was given, once");
        p.pieces -= 1;
        p.status = p.status.or(completion.status);
        p.to_go &= p.status.is_ok();
        if p.pieces > 0 || p.to_go {
            None
        } else if p.asked.is_compound() {
            self.stepped(key, cx)
        } else {
            Some(self.complete(key, cx))
        }
    }

    #[inline]
    fn complete(&mut self, key: Key, cx: &mut Cx) -> Completion {
        let Pending { tag, asked, bytes, status, started, waited_ns, .. } =
            self.pending.remove(key).expect("the caller looked");
        let latency = cx.now().ns_since(started);
        let mut stats = self.cell.stats.borrow_mut();
        stats.record(asked, bytes, status, latency);
        if waited_ns > 0 {
            stats.layers.completed(latency, waited_ns);
        }
        drop(stats);
        cx.trace(Layer::Bdev, Point::Complete, self.serial, tag.0 as u32);
        Completion { tag, status }
    }

    /// Gives up what is left of a request; it completes now, or with its last piece.
    fn fail(&mut self, key: Key, status: Status, cx: &mut Cx) {
        let p = self.pending.get_mut(key).expect("the caller looked");
        p.to_go = false;
        p.status = p.status.or(status);
        if p.pieces == 0 {
            // One that the limits hold has not begun.
            let is_compound = p.asked.is_compound() && !p.is_limited;
            self.limited -= u32::from(p.is_limited);
            let completion = if is_compound { self.end_compound(key, cx) } else { self.complete(key, cx) };
            self.ready.push(completion);
            cx.wake(self.root);
        }
    }

    /// Aborts a request. The second abort of the same request does nothing.
    fn abort_one(&mut self, key: Key, cx: &mut Cx) {
        let block_size = self.block_size;
        let Some(p) = self.pending.get_mut(key) else { return };
        if p.progress == Progress::GivenUp {
            return;
        }
        let (pieces, goes_on) = (p.pieces, p.has_begun_to_swap(block_size));
        if pieces > 0 || goes_on {
            p.progress = Progress::GivenUp;
        }
        // A compound request that waits for its blocks or a buffer has nothing to go and nothing at the module.
        if !goes_on && (p.to_go || pieces == 0) {
            self.fail(key, Status::Aborted, cx);
        }
        if pieces > 0 {
            self.inner.abort(Tag(key.raw()), cx);
        }
    }

    fn obey(&mut self, cx: &mut Cx) {
        while let Some(command) = self.cell.take_command() {
            match command {
                Command::Freeze(done) => {
                    self.state = State::Freezing(done);
                    if let Some(throttle) = &mut self.throttle {
                        throttle.step_aside(cx);
                    }
                    let at_module = self.pending.iter().filter(|(_, p)| p.pieces > 0);
                    let keys: Vec<_> = at_module.map(|(key, _)| key).collect();
                    keys.into_iter().for_each(|key| self.abort_one(key, cx));
                }
                Command::Thaw => self.state = State::Running,
                Command::Abort => self.abort_all(cx),
                Command::Fence { id, extent, quiet } => self.put_up_fence(id, extent, quiet),
                Command::Unfence(id) => self.take_down_fence(id, cx),
                Command::Granted { key, lock } => self.granted(key, lock, cx),
                Command::SetDeadline(deadline) => self.set_deadline(deadline, cx),
                Command::LookAtDeadlines => self.look_at_deadlines(cx),
                Command::LookAtLimits => self.look_at_limits(cx),
                Command::FailLimited => self.fail_limited(Status::Removed, cx),
                Command::ReloadProperties(done) => {
                    self.reload_properties();
                    // Whoever asked may have gone.
                    let _ = done.send(());
                }
                Command::BaseEvent { base, event, told } => {
                    self.inner.base_event(&base, event, cx);
                    // Whoever asked may have gone.
                    let _ = told.send(());
                }
            }
        }
    }

    fn look_frozen(&mut self) {
        if self.credits == i64::from(self.limits.depth)
            && let State::Freezing(done) = std::mem::replace(&mut self.state, State::Frozen)
        {
            // Whoever asked may have gone; then the thaw is on its way all the same.
            let _ = done.send(());
        }
    }
}

impl Zeroes {
    fn new(bytes: usize) -> Self {
        let mut buffer = Buffer::new(bytes, PAGE as usize);
        let sgl = buffer.lend();
        Self { buffer, sgl }
    }
}

/// Makes room for one more in a line of requests, those of which that have ended meanwhile stay in it: when they are the most of it, they leave. So it never
/// has many more than there are requests, and each that joins it pays for about one look.
#[inline]
fn make_room<T>(line: &mut VecDeque<T>, pending: &Slots<Pending>, key: impl Fn(&T) -> Key) {
    if line.len() >= ENDED_MIN + 2 * pending.len() as usize {
        line.retain(|waiting| pending.get(key(waiting)).is_some());
    }
}

/// What can be asked for where a module does `ops`.
fn offered(ops: OpSet) -> OpSet {
    let mut all = ops;
    if ops.contains(Op::Write) {
        all = all.with(Op::WriteZeroes);
    }
    if ops.contains(Op::Read) {
        all = all.with(Op::Compare);
    }
    if ops.contains(Op::Read) && ops.contains(Op::Write) {
        all = all.with(Op::CompareAndWrite).with(Op::Copy);
    }
    all
}

/// How many blocks of what is left of a read or write go into the next piece.
#[inline]
fn piece_blocks(p: &Pending, limits: &Limits, block_size: u32) -> Option<u64> {
    let mut blocks = p.blocks.min(limits.transfer_blocks.into());
    if limits.boundary_blocks > 0 {
        blocks = blocks.min(to_boundary(p.lba, limits.boundary_blocks));
    }
    if p.data.segments() <= limits.segments {
        return Some(blocks);
    }
    let fits = p.data.pieces().take(limits.segments as usize).map(|s| s.len() as u64).sum::<u64>();
    blocks = blocks.min(fits / u64::from(block_size));
    (blocks > 0).then_some(blocks)
}

/// How many blocks of zeroes, at most `max`, to write at `lba` at one time.
fn zero_blocks(lba: u64, limits: &Limits, max: u32) -> u32 {
    let blocks = max.min(limits.transfer_blocks);
    match limits.boundary_blocks {
        0 => blocks,
        boundary => blocks.min(to_boundary(lba, boundary) as u32),
    }
}

fn to_boundary(lba: u64, boundary: u32) -> u64 {
    u64::from(boundary) - lba % u64::from(boundary)
}

impl Drop for BdevChannel {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        assert_eq!(self.in_flight(), 0, "{} is closed with requests in flight", self.bdev().name());
        assert!(self.throttle.as_ref().is_none_or(|t| t.is_aside()), "others would wait for it");
        if let Some(zeroes) = &mut self.zeroes {
            zeroes.buffer.reclaim();
        }
        self.cells.close(self.bdev().serial(), &self.cell);
        let stats = self.cell.stats.take();
        self.bdev().channel_closed(&self.reactor, &stats);
    }
}

#[cfg(test)]
mod tests;
