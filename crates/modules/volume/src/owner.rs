//! The root of a pool: the engine and its store, on one reactor, over a channel of the base. Reactor context.
//!
//! A poll takes what has completed and what channels have submitted, ends the engine's turn, and passes on what the engine and
//! the store hand out, until there is nothing. So the writes that a turn of the reactor has brought are one group. Each takes
//! a bounded number of bytes from the channels, and the engine bounds its background work; the root is polled again while there
//! is more, and an idle pool is not polled.

mod clients;
mod loader;
mod moving;
mod rest;

use crate::branch::Ends;
use crate::claim::Right;
use crate::device::VolumeKey;
use crate::disk::{BaseDisk, Ended};
use crate::foreign::{ForeignDisks, Reader};
use crate::inbox::{Client, Inbox, Inboxes, Submitted};
use crate::part::{Place, Signals};
use crate::pool::Listed;
use crate::pool::scrub::Order;
use crate::{Error, FormatError, Growing, READ_BYTES};
use aryk_bdev::{BdevChannel, Descriptor, Io, Op, OpenError, Status};
use aryk_reactor::{Cx, Nanos, Root, RootId, ThreadId};
use aryk_slots::{Key, Slots};
use aryk_volume::{
    Action, Answer, Command, CommandError, Damage, Done, Foreign, ForeignId, LogPlace, Pool as Engine, Reply,
    Request, Scrub, Settings, State, Stats, StoreError, StoreOp, TimelineId, UNIT, VolumeId,
};
use aryk_volume_store::{DiskDone, Erasing, Finding, Formatting, Growth, Looking, Opened, Opening, Store};
use clients::Clients;
use futures_channel::oneshot;
use loader::Loader;
pub(crate) use moving::Leave;
use moving::{Leaving, Moved};
use rest::{Next, Rest};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Bytes of requests that one poll takes from the channels: the engine copies them, and computes their checksums.
const POLL_BYTES: u64 = 1 << 20;
/// Requests that one poll takes from the channels.
const POLL_REQUESTS: u32 = 256;
/// Between two looks at the lease of a base that has requests.
const LEASE_LOOK: Duration = Duration::from_millis(500);
/// The initial room for requests in flight; the table grows for more.
const REQUESTS: u32 = 256;

/// Where the result of a command goes.
pub(crate) type Answering = oneshot::Sender<Result<Answer, CommandError>>;

/// What the root does first.
pub(crate) enum Start {
    /// Looks whether a pool can be created.
    Look(Box<Looking>),
    /// Creates a pool.
    Format(Box<Formatting>),
    /// Ends the existence of a pool.
    Erase(Box<Erasing>),
    /// Opens a pool.
    Open(Box<Opening>),
    /// A thread makes the engine of a pool whose store is open.
    Load { store: Box<Store>, findings: Vec<Finding> },
}

/// What the first requests to the base have led to.
enum Started {
    /// All is done.
    Done,
    Formatted(Box<Store>),
    Opened(Box<Opened>),
}

/// A pool that has been opened.
#[derive(Debug)]
pub(crate) struct Ready {
    pub findings: Vec<Finding>,
    /// Where the log is damaged; what was behind is lost.
    pub log_damage: Option<LogPlace>,
}

/// The engine and the store of a pool.
struct Running {
    engine: Engine,
    store: Box<Store>,
}

enum Phase {
    Starting(Start),
    /// The engine reads the tail of its log, or writes its first checkpoint.
    Loading(Running, Vec<Finding>),
    Running(Running),
    /// The root waits for what it gets from the one on another reactor.
    Arriving,
    /// Nothing is handed to the base any more.
    Ending,
}

/// A request of a client.
struct InFlight {
    client: Client,
    volume: VolumeKey,
    io: Io,
    stage: Stage,
    /// Whether its client has aborted it.
    is_aborted: bool,
}

/// Who has a request.
#[derive(Clone, Copy)]
enum Stage {
    /// The engine, which looks for the data of a branch's read.
    Locating,
    Engine,
    /// Foreign disks, from which pieces are read into the request's memory.
    Foreign {
        left: u32,
        status: Status,
    },
}

/// A call of the control plane.
pub(crate) type Call = Box<dyn FnOnce(&mut Owner, &mut Cx) + Send>;

/// The root.
pub(crate) struct Owner {
    root: RootId,
    thread: ThreadId,
    place: Arc<Place>,
    /// `None` once the base was given back.
    disk: Option<BaseDisk>,
    foreign: ForeignDisks,
    loader: Option<Loader>,
    rest: Rest,
    phase: Phase,
    settings: Settings,
    clients: Clients,
    requests: Slots<InFlight>,
    commands: HashMap<u64, Answering>,
    next_command: u64,
    opened: Option<oneshot::Sender<Result<Ready, Error>>>,
    growing: Option<oneshot::Sender<Growing>>,
    ended: Vec<oneshot::Sender<()>>,
    signals: Arc<Signals>,
    /// The engine's state, as it was noted.
    state: Option<State>,
    /// Bytes of reads that the engine has.
    read_bytes: u64,
    /// The move to another reactor.
    leaving: Option<Leaving>,
    /// Another reactor has not answered yet whether a root waits there, or removes that root: this one has not moved.
    is_withdrawing: bool,
    /// The root has come from another reactor, and does not have the channels of its reactor yet.
    is_settling: bool,
    settled: Option<oneshot::Sender<Moved>>,
    /// Calls that wait for the end of a move.
    waiting: VecDeque<Call>,
    /// Whether the base may be used, in this poll.
    right: Right,
    /// Whether the requests of the base were aborted since it might be used.
    has_aborted: bool,
    /// When the timer wakes the root to look at the lease, if the base has requests.
    lease_look: Nanos,
}

/// What a root is made of.
pub(crate) struct Setup {
    pub place: Arc<Place>,
    pub start: Start,
    pub settings: Settings,
    pub opened: oneshot::Sender<Result<Ready, Error>>,
}

impl Root for Owner {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        if matches!(self.phase, Phase::Arriving) {
            return false;
        }
        if self.signals.is_base_removed.load(Ordering::Acquire) && !matches!(self.phase, Phase::Ending) {
            self.end(None, cx);
        }
        let Some(disk) = &mut self.disk else { return false };
        self.right = match (self.place.right(), &self.phase) {
            // What was aborted is not submitted again: no renewal comes.
            (Right::Waits, Phase::Ending) => Right::Lost,
            (right, _) => right,
        };
        disk.poll(self.right, cx);
        self.watch_lease(cx);
        self.poll_foreign(cx);
        let running = if let Phase::Running(running) = &mut self.phase { Some(running) } else { None };
        self.clients.poll_branches(running, cx);
        match self.phase {
            Phase::Starting(_) => self.start_on(cx),
            Phase::Loading(..) | Phase::Running(_) => self.run(cx),
            Phase::Ending => self.finish_end(cx),
            Phase::Arriving => unreachable!("such a root is not polled"),
        }
        self.clients.send(cx);
        true
    }
}

impl Owner {
    pub fn new(channel: BdevChannel, setup: Setup, thread: ThreadId, root: RootId, cx: &mut Cx) -> Self {
        let inbox = Rc::new(Inbox::new(root));
        cx.local_state::<Inboxes>().add(setup.place.number, Rc::clone(&inbox));
        cx.answer_bell(&setup.place.signals.bell(), root);
        let Setup { place, start, settings, opened } = setup;
        let opened = Some(opened);
        Self { settings, opened, ..Self::over(channel, place, Phase::Starting(start), inbox, thread) }
    }

    /// A root without a pool.
    fn over(
        channel: BdevChannel,
        place: Arc<Place>,
        phase: Phase,
        inbox: Rc<Inbox>,
        thread: ThreadId,
    ) -> Self {
        Self {
            root: inbox.root(),
            thread,
            disk: Some(BaseDisk::new(channel, place.shard)),
            signals: Arc::clone(&place.signals),
            place,
            foreign: ForeignDisks::default(),
            loader: None,
            rest: Rest::new(),
            phase,
            settings: Settings::default(),
            clients: Clients::new(inbox),
            requests: Slots::new(REQUESTS),
            commands: HashMap::new(),
            next_command: 0,
            opened: None,
            growing: None,
            ended: Vec::new(),
            state: None,
            read_bytes: 0,
            leaving: None,
            is_withdrawing: false,
            is_settling: false,
            settled: None,
            waiting: VecDeque::new(),
            right: Right::Valid,
            has_aborted: false,
            lease_look: Nanos(0),
        }
    }

    /// Runs a call of the control plane; after the move, if the root moves. One that is urgent does not wait for the base.
    pub fn receive(&mut self, call: Call, is_urgent: bool, cx: &mut Cx) {
        let waits = matches!(self.phase, Phase::Arriving) || (self.leaving.is_some() && !is_urgent);
        if waits { self.waiting.push_back(call) } else { call(self, cx) }
    }

    /// Goes on with the creation, the destruction or the opening of a pool.
    fn start_on(&mut self, cx: &mut Cx) {
        let disk = self.disk.as_mut().expect("it is there while the pool is started");
        let Phase::Starting(start) = &mut self.phase else { return };
        if self.right == Right::Lost {
            return self.fail_opening(Error::TakenOver, cx);
        }
        let mut result = None;
        while let Some(done) = disk.next_done() {
            result = result.or(match start {
                Start::Look(looking) => looking.completed(done).map(|looked| looked.map(|()| Started::Done)),
                Start::Erase(erasing) => erasing.completed(done).map(|erased| erased.map(|()| Started::Done)),
                Start::Format(formatting) => {
                    formatting.completed(done).map(|store| store.map(Started::Formatted))
                }
                Start::Open(opening) => opening.completed(done).map(|opened| opened.map(Started::Opened)),
                Start::Load { .. } => unreachable!("a store that is open does nothing by itself"),
            });
        }
        match result {
            None => loop {
                let op = match start {
                    Start::Look(looking) => looking.next_op(),
                    Start::Erase(erasing) => erasing.next_op(),
                    Start::Format(formatting) => formatting.next_op(),
                    Start::Open(opening) => opening.next_op(),
                    Start::Load { .. } => return self.load_on(cx),
                };
                let Some(op) = op else { break };
                disk.start(op, cx);
            },
            Some(Err(error)) => self.fail_opening(error.into(), cx),
            Some(Ok(Started::Done)) => {
                self.tell_opened(Ok(Ready { findings: Vec::new(), log_damage: None }));
                self.end(None, cx);
            }
            Some(Ok(Started::Formatted(store))) => {
                let settings = self.settings.of_shard(self.place.shard);
                let engine = Engine::create(settings, store.facts(), store.pool().into_bytes());
                self.start_engine(engine, store, Vec::new(), cx);
            }
            Some(Ok(Started::Opened(opened))) => {
                let Opened { store, recovered, findings, .. } = *opened;
                let Some(recovered) = recovered else { return self.fail_opening(Error::NoManifest, cx) };
                self.loader =
                    Some(Loader::start(&store, recovered, self.settings, self.place.shard, self.root, cx));
                self.phase = Phase::Starting(Start::Load { store: Box::new(store), findings });
            }
        }
    }

    /// Takes the engine, when the thread has made it.
    fn load_on(&mut self, cx: &mut Cx) {
        let Some(engine) = self.loader.as_ref().and_then(Loader::take) else { return };
        self.loader = None;
        match engine {
            Err(error) => self.fail_opening(error, cx),
            Ok(engine) => {
                let loaded = std::mem::replace(&mut self.phase, Phase::Ending);
                let Phase::Starting(Start::Load { store, findings }) = loaded else {
                    unreachable!("the engine was being made")
                };
                self.start_engine(*engine, store, findings, cx);
            }
        }
    }

    /// Starts the engine over a store.
    fn start_engine(&mut self, engine: Engine, store: Box<Store>, findings: Vec<Finding>, cx: &mut Cx) {
        self.phase = Phase::Loading(Running { engine, store }, findings);
        cx.wake(self.root);
    }

    fn fail_opening(&mut self, error: Error, cx: &mut Cx) {
        self.tell_opened(Err(error));
        self.end(None, cx);
    }

    fn tell_opened(&mut self, result: Result<Ready, Error>) {
        if let Some(opened) = self.opened.take() {
            // The caller may have been dropped: it closes the pool.
            let _ = opened.send(result);
        }
    }

    /// A turn of an open pool.
    fn run(&mut self, cx: &mut Cx) {
        let disk = self.disk.as_mut().expect("it is there while the pool is open");
        let (Phase::Loading(running, _) | Phase::Running(running)) = &mut self.phase else { return };
        while let Some(done) = disk.next_done() {
            running.store.completed(done);
        }
        while let Some(done) = running.store.next_answer() {
            running.engine.completed(done);
        }
        if self.is_draining() {
            return self.drain(cx);
        }
        self.take_requests(cx);
        self.abort_requests(cx);
        let (Phase::Loading(running, _) | Phase::Running(running)) = &mut self.phase else { return };
        let is_in_use = running.engine.is_in_use() || running.engine.state() == State::Opening;
        match self.rest.note_turn(is_in_use, cx.now()) {
            Next::Nothing => {}
            Next::TurnAt(at) => _ = cx.wake_at(self.root, at),
            Next::Rest => _ = running.engine.rest(),
        }
        if running.store.is_checkpoint_due() {
            running.engine.request_checkpoint();
        }
        let has_more = running.engine.turn();
        let is_answered = self.pass_on(cx);
        self.take_replies(cx);
        self.look_at_state(cx);
        self.look_at_growth();
        let abandoned = self.engine().map_or(0, Engine::abandoned_bytes);
        let has_requests = !self.clients.inbox.is_empty() && self.read_bytes + abandoned < READ_BYTES;
        if has_more || is_answered || has_requests {
            cx.wake(self.root);
        }
    }

    /// Aborts what the base has when the claim has not been renewed in time: it may be another daemon's soon.
    fn watch_lease(&mut self, cx: &mut Cx) {
        let Some(disk) = &mut self.disk else { return };
        if !self.place.is_shared() || disk.in_flight() == 0 {
            return;
        }
        match self.right {
            Right::Valid => self.has_aborted = false,
            Right::Waits | Right::Lost if !self.has_aborted => {
                self.has_aborted = true;
                disk.abort_all(cx);
                tracing::warn!(
                    pool = self.place.number,
                    "the claim of a pool was not renewed in time: it stops using its disk, and requests wait"
                );
            }
            Right::Waits | Right::Lost => {}
        }
        if cx.now() >= self.lease_look {
            self.lease_look = cx.now().after(LEASE_LOOK);
            cx.wake_at(self.root, self.lease_look);
        }
    }

    /// Passes what the engine and the store hand out to the base, and what ends at once back to the engine. Returns whether the
    /// engine has got an answer, after which its next turn may have work.
    fn pass_on(&mut self, cx: &mut Cx) -> bool {
        let disk = self.disk.as_mut().expect("it is there while the pool is open");
        let (Phase::Loading(running, _) | Phase::Running(running)) = &mut self.phase else { return false };
        let Running { engine, store } = running;
        let mut is_answered = false;
        let right = self.right;
        loop {
            while let Some((id, op)) = engine.next_op() {
                match op {
                    StoreOp::ReadForeign { disk, unit, data, len } => match self.foreign.find(disk) {
                        Some(disk) => {
                            disk.read(Reader::Engine(id), unit * u64::from(UNIT), data, len, cx);
                        }
                        None => {
                            engine.completed(Done { id, data: Some(data), result: Err(StoreError::Gone) });
                        }
                    },
                    op => store.submit(id, op),
                }
            }
            let mut is_quiet = true;
            // The renewal of the claim rings the bell of a root that waits.
            while let Some(op) = (right != Right::Waits).then(|| store.next_op()).flatten() {
                if right == Right::Lost {
                    store.completed(op.refuse(StoreError::Gone));
                    is_quiet = false;
                    continue;
                }
                // Branches do not watch the lease.
                let own = if self.place.is_shared() { Some(op) } else { self.clients.hand_out(op) };
                if let Some(op) = own {
                    disk.start(op, cx);
                }
            }
            while let Some(done) = disk.next_done() {
                store.completed(done);
                is_quiet = false;
            }
            while let Some(done) = store.next_answer() {
                engine.completed(done);
                (is_quiet, is_answered) = (false, true);
            }
            if is_quiet {
                return is_answered;
            }
        }
    }

    /// Takes what foreign disks have read.
    fn poll_foreign(&mut self, cx: &mut Cx) {
        if self.signals.is_foreign_removed.swap(false, Ordering::AcqRel) {
            self.foreign.note_removed();
        }
        self.foreign.poll(cx);
        while let Some(Ended { tag, buffer, result }) = self.foreign.next_ended() {
            match tag {
                Reader::Engine(id) => {
                    if let Phase::Loading(running, _) | Phase::Running(running) = &mut self.phase {
                        running.engine.completed(Done { id, data: buffer, result });
                    }
                }
                Reader::User(key) => self.read_foreign_piece(key, result, cx),
            }
        }
    }

    /// A piece of a request was read from a foreign disk.
    fn read_foreign_piece(&mut self, key: Key, result: Result<(), StoreError>, cx: &mut Cx) {
        let request = self.requests.get_mut(key).expect("it waits for its pieces");
        let Stage::Foreign { left, status } = &mut request.stage else {
            unreachable!("the engine has answered the request")
        };
        *left -= 1;
        if result.is_err() {
            *status = Status::Medium;
        }
        if *left == 0 {
            let status = *status;
            Self::complete(&mut self.requests, &mut self.clients, key, status, cx);
        }
    }

    /// Takes requests from the clients, up to the budget of a poll.
    fn take_requests(&mut self, cx: &mut Cx) {
        let Phase::Running(running) = &mut self.phase else { return };
        let mut bytes = 0;
        let is_lost = self.right == Right::Lost;
        for _ in 0..POLL_REQUESTS {
            // A disk that does not answer must not fill memory with what is aborted.
            let read_bytes = self.read_bytes + running.engine.abandoned_bytes();
            if bytes >= POLL_BYTES || read_bytes >= READ_BYTES {
                break;
            }
            let Some(Submitted { client, volume, io }) = self.clients.inbox.take() else { break };
            let locates = io.op == Op::Read && matches!(client, Client::Branch(_));
            let stage = if locates { Stage::Locating } else { Stage::Engine };
            if !locates {
                bytes += u64::from(io.data.len());
                self.read_bytes += read_bytes_of(&io);
            }
            self.clients.note_taken(client, if io.op == Op::Write { io.data.len().into() } else { 0 });
            let key = self.requests.add(InFlight { client, volume, io, stage, is_aborted: false });
            if is_lost {
                self.read_bytes -= if locates { 0 } else { read_bytes_of(&io) };
                Self::complete(&mut self.requests, &mut self.clients, key, Status::Medium, cx);
                continue;
            }
            let action = if locates { Action::Locate } else { action_of(&io) };
            running.engine.submit(to_engine(key, volume, &io, action));
        }
    }

    /// Ends what clients have aborted: in the engine at once, whatever the base does; reads of foreign disks, which have the
    /// memory of the request, when these give them back.
    fn abort_requests(&mut self, cx: &mut Cx) {
        let Phase::Running(running) = &mut self.phase else { return };
        let aborted = self.clients.inbox.take_aborted();
        if aborted.is_empty() {
            return;
        }
        let mut in_engine: BTreeMap<VolumeId, HashSet<aryk_volume::Tag>> = BTreeMap::new();
        for (key, request) in self.requests.iter_mut() {
            let Some(&volume) = aborted.get(&(request.client, request.io.tag)) else { continue };
            request.is_aborted = true;
            if matches!(request.stage, Stage::Locating | Stage::Engine) {
                in_engine.entry(volume).or_default().insert(aryk_volume::Tag(key.raw()));
            }
        }
        let (requests, engine) = (&self.requests, &running.engine);
        let is_meant = |reader: &Reader| match reader {
            Reader::User(key) => requests.get(*key).is_some_and(|request| request.is_aborted),
            Reader::Engine(id) => engine
                .foreign_reader(*id)
                .is_some_and(|tag| in_engine.values().any(|tags| tags.contains(&tag))),
        };
        self.foreign.give_up(is_meant, cx);
        for (volume, tags) in in_engine {
            running.engine.abort(volume, |tag| tags.contains(&tag));
        }
    }

    /// Takes the replies of the engine.
    fn take_replies(&mut self, cx: &mut Cx) {
        let (Phase::Loading(running, _) | Phase::Running(running)) = &mut self.phase else { return };
        while let Some(Reply { tag, status, foreign, mut extents }) = running.engine.next_reply() {
            let key = Key::from_raw(tag.0);
            let request = self.requests.get_mut(key).expect("the engine replies once");
            if let Stage::Locating = request.stage {
                match (request.client, status) {
                    (Client::Channel(_), aryk_volume::Status::Ok) if request.is_aborted => {
                        running.engine.give_back(extents, 0);
                        Self::complete(&mut self.requests, &mut self.clients, key, Status::Aborted, cx);
                    }
                    // A part is on a foreign disk; or its branch has given its channels to the root meanwhile.
                    (_, aryk_volume::Status::Foreign) | (Client::Channel(_), aryk_volume::Status::Ok)
                        if !request.is_aborted =>
                    {
                        if status == aryk_volume::Status::Ok {
                            running.engine.give_back(extents, 0);
                        }
                        request.stage = Stage::Engine;
                        self.read_bytes += read_bytes_of(&request.io);
                        let action = action_of(&request.io);
                        running.engine.submit(to_engine(key, request.volume, &request.io, action));
                        cx.wake(self.root);
                    }
                    (Client::Branch(branch), aryk_volume::Status::Ok) => {
                        // A branch that has aborted it gives back what it gets.
                        extents.place(|blob, unit, len| running.store.offset(blob, unit, len));
                        self.clients.located(branch, request.io.tag, extents);
                        self.requests.remove(key);
                    }
                    _ => Self::complete(&mut self.requests, &mut self.clients, key, to_bdev(status), cx),
                }
                continue;
            }
            self.read_bytes -= read_bytes_of(&request.io);
            if request.is_aborted && !foreign.is_empty() {
                Self::complete(&mut self.requests, &mut self.clients, key, Status::Aborted, cx);
            } else if foreign.is_empty() {
                Self::complete(&mut self.requests, &mut self.clients, key, to_bdev(status), cx);
            } else {
                let mut left = 0;
                let mut status = Status::Ok;
                for piece in &foreign {
                    let Some(disk) = self.foreign.find(piece.disk) else {
                        status = Status::Medium;
                        continue;
                    };
                    let data = request.io.data.slice(piece.at as u32 * UNIT, piece.units as u32 * UNIT);
                    disk.read_into(Reader::User(key), piece.disk_unit * u64::from(UNIT), data, cx);
                    left += 1;
                }
                request.stage = Stage::Foreign { left, status };
                if left == 0 {
                    Self::complete(&mut self.requests, &mut self.clients, key, status, cx);
                }
            }
            running.engine.recycle(foreign);
        }
        while let Some(reply) = running.engine.next_command_reply() {
            if let Some(sender) = self.commands.remove(&reply.tag.0) {
                // The caller may have been dropped.
                let _ = sender.send(reply.result);
            }
        }
    }

    /// Ends a request with a status.
    fn complete(
        requests: &mut Slots<InFlight>,
        clients: &mut Clients,
        key: Key,
        status: Status,
        cx: &mut Cx,
    ) {
        let InFlight { client, io, is_aborted, .. } = requests.remove(key).expect("a request ends once");
        // What was given up has failed.
        let status = if is_aborted && status == Status::Medium { Status::Aborted } else { status };
        clients.complete(client, io.tag, status, cx);
    }

    /// Reports the end of the opening, and a failure of the pool.
    fn look_at_state(&mut self, cx: &mut Cx) {
        let (Phase::Loading(running, _) | Phase::Running(running)) = &mut self.phase else { return };
        let state = running.engine.state();
        if self.state != Some(state) {
            self.state = Some(state);
            self.signals.note_state(state);
            if let State::ReadOnly(error) = state
                && self.right != Right::Lost
            {
                tracing::error!(pool = self.place.number, %error, "the pool is read-only: its disk has failed");
            }
        }
        if !matches!(self.phase, Phase::Loading(..)) {
            return;
        }
        match state {
            State::Opening => {}
            State::Failed(error) => self.fail_opening(Error::Store(error), cx),
            State::Damaged(place) => {
                let offset = u64::from(place.unit) * u64::from(UNIT);
                self.fail_opening(Error::DamagedLog { segment: place.blob.0, offset }, cx);
            }
            State::Ready | State::ReadOnly(_) => {
                if let Phase::Loading(running, findings) = std::mem::replace(&mut self.phase, Phase::Ending) {
                    let log_damage = running.engine.log_damage();
                    self.phase = Phase::Running(running);
                    self.tell_opened(Ok(Ready { findings, log_damage }));
                }
            }
        }
    }

    fn look_at_growth(&mut self) {
        let Phase::Running(running) = &mut self.phase else { return };
        let Some(growing) = self.growing.take() else { return };
        match running.store.growth() {
            Growth::None | Growth::Running => self.growing = Some(growing),
            Growth::Grown(blobs) => {
                running.engine.grow(blobs);
                let _ = growing.send(Ok(blobs));
            }
            Growth::Failed(error) => drop(growing.send(Err(Error::Store(error)))),
        }
    }

    /// Starts a command; `sender` gets its result, and is dropped if the pool is not open.
    pub fn command(&mut self, command: Command, sender: Answering, cx: &mut Cx) {
        if let Phase::Running(running) = &mut self.phase {
            let tag = self.next_command;
            self.next_command += 1;
            self.commands.insert(tag, sender);
            running.engine.command(aryk_volume::Tag(tag), command);
            cx.wake(self.root);
        }
    }

    /// Changes the superblock: the pool grows to the size of its base, or gets another name. `sender` is dropped if the pool is
    /// not open.
    pub fn change_store(
        &mut self,
        change: impl FnOnce(&mut Store) -> Result<(), FormatError>,
        sender: oneshot::Sender<Growing>,
        cx: &mut Cx,
    ) {
        let Phase::Running(running) = &mut self.phase else { return };
        if self.growing.is_some() {
            drop(sender.send(Err(Error::Busy("the pool's superblock is being changed already"))));
            return;
        }
        match change(&mut running.store) {
            Ok(()) => self.growing = Some(sender),
            Err(error) => drop(sender.send(Err(error.into()))),
        }
        cx.wake(self.root);
    }

    /// The volumes and snapshots. From now on, [`Owner::add_foreign`] knows the disks on which they depend.
    pub fn volumes(&mut self) -> Vec<Listed> {
        let (Phase::Loading(running, _) | Phase::Running(running)) = &self.phase else { return Vec::new() };
        let engine = &running.engine;
        let used = engine.foreign_disks();
        self.foreign.set_names(&used);
        let foreign: HashMap<ForeignId, &Foreign> =
            used.iter().map(|used| (used.id, &used.foreign)).collect();
        let mut roots: HashMap<TimelineId, Option<Foreign>> = HashMap::new();
        let listed = engine.volumes().map(|(id, volume)| {
            // The base of a history is looked for once, also if it is the base of many.
            let mut path = Vec::new();
            let mut timeline = volume.timeline;
            let root = loop {
                if let Some(root) = roots.get(&timeline) {
                    break root.clone();
                }
                path.push(timeline);
                match engine.base(timeline) {
                    Some((base, _)) => timeline = base,
                    None => {
                        let id = ForeignId::of(timeline);
                        break foreign.get(&id).copied().cloned();
                    }
                }
            };
            roots.extend(path.into_iter().map(|timeline| (timeline, root.clone())));
            Listed { id, volume: volume.clone(), base: engine.base(volume.timeline), foreign: root }
        });
        listed.collect()
    }

    /// The foreign disks on which volumes, or deleted volumes whose space is not free yet, depend.
    pub fn foreign_names(&self) -> Vec<String> {
        let used = self.engine().map(Engine::foreign_disks).unwrap_or_default();
        used.into_iter().map(|used| used.foreign.name).collect()
    }

    /// Connects a branch. If the pool is not open, the rings are dropped, which the branch sees.
    pub fn add_branch(&mut self, ends: Ends, cx: &mut Cx) {
        let home = self.place.root().filter(|_| matches!(self.phase, Phase::Running(_)));
        let Some((owner, _)) = home else {
            let bell = ends.bell.clone();
            drop(ends);
            return bell.ring();
        };
        let link = self.clients.add_branch(ends);
        // The root may have moved since the branch was started.
        self.clients.tell_home(link, owner, self.signals.bell(), cx);
        cx.wake(self.root);
    }

    /// Opens a channel of a foreign disk.
    pub fn add_foreign(&mut self, name: String, disk: &Descriptor, cx: &mut Cx) -> Result<(), OpenError> {
        if !matches!(self.phase, Phase::Running(_)) {
            return Err(OpenError::Removed);
        }
        self.foreign.add(name, disk.clone(), self.root, cx)
    }

    /// Closes the foreign disks that are not among these when they have completed what they have.
    pub fn keep_foreign(&mut self, names: &[String], cx: &mut Cx) {
        self.foreign.keep(names);
        cx.wake(self.root);
    }

    /// The engine, if the pool is open.
    pub const fn engine(&self) -> Option<&Engine> {
        match &self.phase {
            Phase::Loading(running, _) | Phase::Running(running) => Some(&running.engine),
            Phase::Starting(_) | Phase::Arriving | Phase::Ending => None,
        }
    }

    /// The store, if the pool is open.
    pub fn store(&self) -> Option<&Store> {
        match &self.phase {
            Phase::Loading(running, _) | Phase::Running(running) => Some(&running.store),
            Phase::Starting(_) | Phase::Arriving | Phase::Ending => None,
        }
    }

    /// The pool's UUID and name, if it is open.
    pub fn identity(&self) -> Option<(uuid::Uuid, String)> {
        self.store().map(|store| (store.pool(), store.superblock().name.clone()))
    }

    /// Counters and sizes.
    pub fn stats(&self) -> Stats {
        self.engine().map(Engine::stats).unwrap_or_default()
    }

    /// Starts, continues or stops a pass of the scrub. Returns how far it is, what it has found since the last call, and
    /// counters.
    pub fn scrub(&mut self, order: Order, cx: &mut Cx) -> (Scrub, Vec<Damage>, Stats) {
        let Phase::Running(Running { engine, .. }) = &mut self.phase else {
            return (Scrub::Idle, Vec::new(), Stats::default());
        };
        match order {
            Order::Start => engine.start_scrub(),
            Order::Grant(bytes) => engine.grant_scrub(bytes),
            Order::Stop => engine.stop_scrub(),
        }
        cx.wake(self.root);
        (engine.scrub(), engine.take_scrub_damage(), engine.stats())
    }

    /// Ends the pool: requests fail from now on. The base is given back when it has completed what it has; then `ended` is sent.
    pub fn end(&mut self, ended: Option<oneshot::Sender<()>>, cx: &mut Cx) {
        self.ended.extend(ended);
        if !matches!(self.phase, Phase::Ending) {
            self.phase = Phase::Ending;
            self.signals.has_ended.store(true, Ordering::Release);
            self.place.close_base();
            cx.local_state::<Inboxes>().remove(self.place.number, &self.clients.inbox);
            self.clients.inbox.end(cx);
            let keys: Vec<Key> = self.requests.iter().map(|(key, _)| key).collect();
            for key in keys {
                // Foreign disks write to the memory of a request until they complete it.
                let stage = self.requests.get(key).map(|request| request.stage);
                if matches!(stage, Some(Stage::Locating | Stage::Engine)) {
                    Self::complete(&mut self.requests, &mut self.clients, key, Status::Removed, cx);
                }
            }
            self.foreign.give_up(|_| true, cx);
            self.commands.clear();
            self.tell_opened(Err(Error::Ended));
            self.end_move(cx);
        }
        cx.wake(self.root);
    }

    /// Gives the base back when nothing is in flight, and removes the root.
    fn finish_end(&mut self, cx: &mut Cx) {
        let disk = self.disk.as_mut().expect("the root ends once");
        while let Some(DiskDone { .. }) = disk.next_done() {}
        self.foreign.keep(&[]);
        // Foreign disks have memory of requests of branches.
        let has_ended = self.foreign.is_empty() && self.clients.end_branches();
        // The thread's completion is for this root.
        self.loader.take_if(|loader| loader.take().is_some());
        if disk.in_flight() > 0 || !has_ended || self.is_withdrawing || self.loader.is_some() {
            return;
        }
        self.disk = None;
        for ended in self.ended.drain(..) {
            let _ = ended.send(());
        }
        let (root, thread) = (self.root, self.thread);
        cx.local().defer(move |cx| {
            cx.remove_root(root);
            cx.remove_thread(thread);
        });
    }
}

/// Bytes of memory that the engine has for a request.
fn read_bytes_of(io: &Io) -> u64 {
    if io.op == Op::Read { io.data.len().into() } else { 0 }
}

/// What the engine does for a request.
fn action_of(io: &Io) -> Action {
    match io.op {
        Op::Read => Action::Read { data: io.data },
        Op::Write => Action::Write { data: io.data, fua: io.fua },
        Op::Flush => Action::Flush,
        Op::Unmap => Action::Zero { whole_blocks: true, fua: io.fua },
        Op::WriteZeroes => Action::Zero { whole_blocks: false, fua: io.fua },
        Op::Compare | Op::CompareAndWrite | Op::Copy => {
            unreachable!("the block layer builds it from other operations")
        }
    }
}

/// The engine's request for a request of a client.
fn to_engine(key: Key, volume: VolumeKey, io: &Io, action: Action) -> Request {
    let block_units = u64::from(volume.block_units);
    Request {
        tag: aryk_volume::Tag(key.raw()),
        volume: volume.id,
        unit: io.lba.0 * block_units,
        units: io.blocks.0 * block_units,
        action,
    }
}

const fn to_bdev(status: aryk_volume::Status) -> Status {
    use aryk_volume::Status as Engine;
    match status {
        Engine::Ok => Status::Ok,
        Engine::Invalid => Status::Invalid,
        Engine::OutOfRange => Status::OutOfRange,
        Engine::ReadOnly => Status::ReadOnly,
        Engine::NoSpace => Status::NoSpace,
        Engine::Medium => Status::Medium,
        Engine::Aborted => Status::Aborted,
        Engine::Removed => Status::Removed,
        // A request that was aborted when the engine found it.
        Engine::Foreign => Status::Aborted,
    }
}
