//! A model, a controller that drives it, and the owner of its queue pairs: what a program does with the library, in one
//! thread and virtual time.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use aryk_dma::{GuestArea, Mapping};
use aryk_nvme::admin::Command;
use aryk_nvme::controller::{
    AdminAnswer, Controller, End, Event, Failure, NamespaceChange, Options, PairRequest, RecoveryStep,
    ResetReason, SECOND,
};
use aryk_nvme::queue::{
    Completed, DmaEnded, Fate, Late, LateStep, QueueError, QueuePair, Timeouts, Unfinished,
};
use aryk_nvme::spec::log::SanitizeState;
use aryk_nvme_model::{Config, Model, Violations};
use aryk_pci::{Function, vfio_user};

pub const US: u64 = 1000;
pub const MS: u64 = 1000 * US;

/// Short limits, so that recoveries take little virtual time.
pub fn options() -> Options {
    Options { io: Timeouts { command: SECOND, grace: SECOND / 2 }, admin: 2 * SECOND, ..Options::default() }
}

/// What happened, in the form that tests compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    Ready,
    Quiesce(ResetReason),
    Recovered,
    Step(RecoveryStep),
    AttemptFailed(String),
    Namespaces(Vec<NamespaceChange>),
    Rescanned,
    TooManyNamespaces,
    Paused,
    Resumed,
    NotSet(&'static str),
    Sanitize(SanitizeState),
    QueueError(QueueError),
    Late(LateStep),
    QueueFailed(u16),
    RemovalRequested,
    ShuttingDown,
    Async,
    Smart,
    Ended(String),
}

/// Memory that the model may access, for the data of commands.
pub struct Buffer {
    pub mapping: Arc<Mapping>,
    pub area: GuestArea,
    pub iova: u64,
    function: Arc<dyn Function>,
}

impl Buffer {
    pub fn new(function: Arc<dyn Function>, len: u64) -> Self {
        let mapping = Arc::new(Mapping::in_file(len).unwrap());
        let iova = function.map(&mapping.dma_range(0, mapping.len()).unwrap()).unwrap();
        let area = GuestArea::new(&mapping, 0, len).unwrap();
        Self { mapping, area, iova, function }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // A server that is gone has no access.
        let _ = self.function.unmap(self.iova, self.mapping.len());
    }
}

/// Receives what the pairs report.
pub trait Owner {
    fn completed(&mut self, qid: u16, completed: Completed, now: u64);
    /// A command that a reset or a removal found in flight.
    fn unfinished(&mut self, qid: u16, unfinished: &Unfinished, is_removed: bool) -> Fate;
}

pub struct Rig {
    pub model: Arc<Model>,
    /// The model, or a client of a server of it.
    pub function: Arc<dyn Function>,
    pub controller: Controller,
    pub pairs: Vec<QueuePair>,
    pub now: u64,
    pub notes: Vec<Note>,
    pub answers: Vec<(u64, Option<AdminAnswer>)>,
    pub is_ended: bool,
    /// Pairs that are being deleted for good.
    pub deleted: Vec<u16>,
    /// An owner that does not quiesce its pairs.
    pub is_deaf: bool,
    /// An owner that may become deaf.
    pub has_slow_owner: bool,
    pub turns: u64,
    /// The client's socket, to break the connection.
    pub hang_up: Option<UnixStream>,
}

impl Rig {
    pub fn with_options(config: Config, options: Options) -> Result<Self, Failure> {
        let model = Model::new("model", config).unwrap();
        Self::attach(Arc::clone(&model), model, options)
    }

    /// A model that a thread serves by vfio-user. The doorbells are shared; all else goes through the socket.
    pub fn over_vfio_user(config: Config) -> Self {
        let model = Model::new("model", config).unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let hang_up = ours.try_clone().unwrap();
        let served = Arc::clone(&model);
        std::thread::spawn(move || vfio_user::serve(theirs, &*served));
        let client = vfio_user::Client::over(ours, "model", Duration::from_secs(10)).unwrap();
        let mut rig = Self::attach(model, Arc::new(client), options()).unwrap();
        rig.hang_up = Some(hang_up);
        rig
    }

    /// `None` if the attach is refused at once.
    pub fn on(model: Arc<Model>, options: Options) -> Option<Self> {
        Self::attach(Arc::clone(&model), model, options).ok()
    }

    fn attach(model: Arc<Model>, function: Arc<dyn Function>, options: Options) -> Result<Self, Failure> {
        let controller = Controller::attach(Arc::clone(&function), options, 0)?;
        Ok(Self {
            model,
            function,
            controller,
            pairs: Vec::new(),
            now: 0,
            notes: Vec::new(),
            answers: Vec::new(),
            is_ended: false,
            deleted: Vec::new(),
            is_deaf: false,
            has_slow_owner: false,
            turns: 0,
            hang_up: None,
        })
    }

    /// A controller that is ready, with pairs of these depths.
    pub fn ready(config: Config, depths: &[u16]) -> Self {
        Self::ready_with(config, options(), depths)
    }

    pub fn ready_with(config: Config, options: Options, depths: &[u16]) -> Self {
        Self::with_options(config, options).unwrap().with_pairs(depths)
    }

    /// Waits for the controller, and creates pairs of these depths.
    pub fn with_pairs(mut self, depths: &[u16]) -> Self {
        let rig = &mut self;
        rig.run_until(&mut Nobody, 10 * SECOND, |rig| rig.controller.is_ready());
        for &depth in depths {
            rig.controller.create_pair(PairRequest { depth, vector: None }).unwrap();
        }
        rig.run_until(&mut Nobody, 10 * SECOND, |rig| rig.pairs.len() == depths.len());
        self
    }

    pub fn buffer(&self, len: u64) -> Buffer {
        Buffer::new(Arc::clone(&self.function), len)
    }

    pub fn violations(&self) -> Violations {
        self.model.with(|model| model.violations().clone())
    }

    pub fn assert_clean(&self) {
        let violations = self.violations();
        assert_eq!(violations.count, 0, "{:?}", violations.first);
    }

    /// One turn of everything, and `step` nanoseconds of time.
    pub fn turn(&mut self, owner: &mut impl Owner, step: u64) {
        self.turns += 1;
        self.model.step(self.now);
        while let Some(event) = self.controller.poll(self.now) {
            self.act(event, owner);
        }
        for index in 0..self.pairs.len() {
            self.serve_pair(index, owner);
        }
        self.now += step;
    }

    fn serve_pair(&mut self, index: usize, owner: &mut impl Owner) {
        let now = self.now;
        let pair = &mut self.pairs[index];
        let qid = pair.qid();
        let had_error = pair.error().is_some();
        let reaped = pair.reap(256, |completed| owner.completed(qid, completed, now));
        if let Some(error) = reaped.err().filter(|_| !had_error) {
            self.notes.push(Note::QueueError(error));
            // A reset of the controller that is under way resets the pair too.
            self.controller.reset_pair(qid).unwrap();
        }
        let mut late: Vec<Late> = Vec::new();
        pair.late(now, 16, |command| late.push(command));
        for command in late {
            self.notes.push(Note::Late(command.step));
            match command.step {
                LateStep::Abort => self.controller.abort(qid, command.cid, command.in_flight),
                LateStep::Reset => self.controller.reset(ResetReason::CommandTimeout, now),
            }
        }
        self.pairs[index].flush();
    }

    fn act(&mut self, event: Event, owner: &mut impl Owner) {
        let note = match event {
            Event::Ready => Note::Ready,
            Event::Quiesce(reason) => {
                self.quiesce();
                Note::Quiesce(reason)
            }
            Event::ShuttingDown => {
                self.quiesce();
                Note::ShuttingDown
            }
            Event::DmaEnded(proof) => return self.rewind(proof, owner),
            Event::QueueCreated(pair) => return self.pairs.push(*pair),
            Event::QueueFailed { qid, .. } => Note::QueueFailed(qid),
            Event::QueueReady(restart) => {
                let qid = restart.qid();
                let now = self.now;
                let pair = self.pairs.iter_mut().find(|pair| pair.qid() == qid).unwrap();
                return pair.resume(restart, now);
            }
            Event::Recovered { took } => {
                assert!(took < 60 * SECOND, "a recovery of {took} ns");
                Note::Recovered
            }
            Event::Step { step, .. } => Note::Step(step),
            Event::AttemptFailed(failure) => Note::AttemptFailed(failure.to_string()),
            Event::NamespacesChanged(changes) => Note::Namespaces(changes),
            Event::Rescanned => Note::Rescanned,
            Event::TooManyNamespaces { .. } => Note::TooManyNamespaces,
            Event::Paused { .. } => Note::Paused,
            Event::Resumed { .. } => {
                self.pairs.iter_mut().for_each(|pair| pair.restart_clock(self.now));
                Note::Resumed
            }
            Event::NotSet { step, .. } => Note::NotSet(step),
            Event::Sanitize(status) => Note::Sanitize(status.state),
            Event::Async(_) => Note::Async,
            Event::Smart(_) => Note::Smart,
            Event::Admin { id, answer } => return self.answers.push((id, answer)),
            Event::RemovalRequested => Note::RemovalRequested,
            Event::Ended(end) => {
                self.is_ended = true;
                let mut command = [0; 2];
                // A device that is gone answers with all ones, or not at all.
                let is_there = self.function.read_config(4, &mut command).is_ok() && command != [0xff; 2];
                assert!(!is_there || command[0] & 4 == 0, "bus mastering is on after the end");
                Note::Ended(match end {
                    End::Stopped { is_clean: true } => "stopped".into(),
                    End::Stopped { is_clean: false } => "stopped without a shutdown".into(),
                    End::Failed(failure) => failure.to_string(),
                })
            }
        };
        self.notes.push(note);
    }

    fn quiesce(&mut self) {
        if self.is_deaf {
            return;
        }
        for pair in &mut self.pairs {
            pair.quiesce();
            self.controller.queue_quiesced(pair.qid());
        }
    }

    fn rewind(&mut self, proof: DmaEnded, owner: &mut impl Owner) {
        let qid = proof.qid();
        let now = self.now;
        // A pair that was deleted at its end is reported twice.
        let Some(pair) = self.pairs.iter_mut().find(|pair| pair.qid() == qid) else { return };
        // What was completed in time; an error here changes nothing any more.
        let _ = pair.reap(u16::MAX, |completed| owner.completed(qid, completed, now));
        // An ended controller has nothing more to do.
        let is_removed = self.deleted.contains(&qid) || self.controller.next_poll(now) == u64::MAX;
        pair.rewind(proof, |unfinished| owner.unfinished(qid, unfinished, is_removed));
        self.controller.queue_rewound(qid);
        if self.deleted.contains(&qid) {
            self.pairs.retain(|pair| pair.qid() != qid);
        }
    }

    /// Turns until `is_done`, for at most `limit` of virtual time.
    pub fn run_until(&mut self, owner: &mut impl Owner, limit: u64, is_done: impl Fn(&Self) -> bool) {
        let end = self.now + limit;
        while !is_done(self) {
            assert!(self.now < end, "not done after {} ms; {:?}", limit / MS, self.notes);
            self.turn(owner, 10 * US);
            let is_quiet = self.pairs.iter().all(|pair| pair.in_flight() == 0);
            if is_quiet && self.controller.is_ready() {
                self.now += 100 * US;
            }
        }
    }

    /// Turns for a time.
    pub fn run_for(&mut self, owner: &mut impl Owner, time: u64, step: u64) {
        let end = self.now + time;
        while self.now < end {
            self.turn(owner, step);
        }
    }

    /// Sends an admin command and returns its answer.
    pub fn admin(&mut self, command: &Command) -> AdminAnswer {
        let id = self.controller.admin(command, self.now).unwrap();
        self.run_until(&mut Nobody, 60 * SECOND, |rig| rig.answers.iter().any(|answer| answer.0 == id));
        let index = self.answers.iter().position(|answer| answer.0 == id).unwrap();
        self.answers.swap_remove(index).1.unwrap()
    }

    pub fn has(&self, note: &Note) -> bool {
        self.notes.contains(note)
    }

    /// The text of the end.
    pub fn end(&self) -> Option<&str> {
        self.notes.iter().find_map(|note| match note {
            Note::Ended(text) => Some(text.as_str()),
            _ => None,
        })
    }
}

/// An owner without commands.
pub struct Nobody;

impl Owner for Nobody {
    fn completed(&mut self, _: u16, completed: Completed, _: u64) {
        panic!("{completed:?}");
    }
    fn unfinished(&mut self, _: u16, unfinished: &Unfinished, _: bool) -> Fate {
        panic!("{unfinished:?}");
    }
}

/// An owner that keeps what it receives, and decides by the library's rule.
#[derive(Default)]
pub struct Keeper {
    pub completed: Vec<Completed>,
    pub failed: Vec<u64>,
    pub history: Option<aryk_nvme::replay::History>,
}

impl Keeper {
    /// The completion of the command with this token.
    pub fn of(&self, token: u64) -> Option<&Completed> {
        self.completed.iter().find(|completed| completed.token == token)
    }
}

impl Owner for Keeper {
    fn completed(&mut self, _: u16, completed: Completed, _: u64) {
        assert!(self.of(completed.token).is_none(), "{completed:?} twice");
        self.completed.push(completed);
    }
    fn unfinished(&mut self, _: u16, unfinished: &Unfinished, is_removed: bool) -> Fate {
        let histories: Vec<_> = self.history.iter().collect();
        let fate =
            aryk_nvme::replay::decide(aryk_nvme::replay::of(&unfinished.entry), unfinished, &histories);
        if is_removed || fate == Fate::Fail {
            self.failed.push(unfinished.token);
            return Fate::Fail;
        }
        Fate::Resubmit
    }
}
