//! The life of a controller: attach, reset, recovery, shutdown, removal. NVMe 2.0 §3.5 and §3.6. Control context: calls may
//! block in the transport, so a thread off the reactors makes them.
//!
//! A [`Controller`] does nothing by itself. Its owner calls [`Controller::poll`] at [`Controller::next_poll`], with the time, and
//! acts on each [`Event`]. I/O runs beside it: a [`QueuePair`] belongs to a reactor and knows the controller only through events.
//!
//! # A reset
//! 1. [`Event::Quiesce`]: each pair's owner calls [`QueuePair::quiesce`], then [`Controller::queue_quiesced`].
//! 2. The controller clears CC.EN and waits for CSTS.RDY = 0. If that does not come within CAP.TO, it resets the function.
//! 3. [`Event::DmaEnded`], one for each pair: its owner reaps, calls [`QueuePair::rewind`], then [`Controller::queue_rewound`].
//! 4. The controller is enabled and identified again, and each rewound pair's queues are created.
//! 5. [`Event::QueueReady`]: the owner calls [`QueuePair::resume`], which submits the kept commands.
//!
//! After [`Options::attempts`] failures, bus mastering is switched off, and [`Event::Ended`] follows the last
//! [`Event::DmaEnded`]. **No command ends before one of: its completion, CSTS.RDY = 0, the deletion of its queue, the function's
//! reset, bus mastering off.**
//!
//! # Late commands
//! [`QueuePair::late`] reports a late command twice. At first its owner calls [`Controller::abort`], then [`Controller::reset`].

mod admin_queue;
mod event;
mod jobs;
mod life;
mod pairs;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use aryk_pci::{Function, PciError, Registers, Width};

pub use event::{
    AdminAnswer, End, Event, Failure, NamespaceChange, Options, RecoveryStep, ResetReason, SECOND,
};
pub use pairs::PairRequest;

use crate::admin::{self, Command, DATA_MAX, Data, Patience};
use crate::claims::{Capabilities, ControllerInfo, Namespace, Unserved};
use crate::inject::Injections;
use crate::memory::DmaMemory;
#[cfg(doc)]
use crate::queue::QueuePair;
use crate::queue::{DEPTH_MAX, DmaEnded, Doorbells, Shadow};
use crate::quirks::{self, Quirks};
use crate::spec::register::{CAP, CC, CSTS, Cap, Cc, Csts, DOORBELLS, Shutdown, VS};
use admin_queue::{AdminQueue, Waiter};
use jobs::{Job, Running};
use life::{Life, Stop};
use pairs::{NewPair, Pair, Stage};

/// Admin commands of the owner at a time.
const OWNER_COMMANDS: usize = 16;
/// Aborts that wait for their turn; more late commands than this are left to the reset.
const ABORTS_WAITING: usize = 64;
/// Time between the sending of event requests. A controller that answers each at once keeps neither this thread nor the log
/// busy: four requests are in flight.
const ASYNC_PAUSE: u64 = SECOND / 100;
/// Time between two polls while something is under way.
const BUSY_POLL: u64 = SECOND / 1000;

/// A namespace that the controller lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedNamespace {
    /// NSID.
    pub nsid: u32,
    /// The namespace, or why the driver does not serve it.
    pub namespace: Result<Namespace, Unserved>,
}

/// Why a call was refused.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// The controller starts, recovers, or has ended.
    #[error("the controller is not ready")]
    NotReady,
    /// Too many admin commands are in flight.
    #[error(
        "too many admin commands are in flight: {OWNER_COMMANDS}, or one with more than 4096 bytes of data"
    )]
    Busy,
    /// The command has more data than one admin command may have.
    #[error("an admin command of this controller has at most {0} bytes of data")]
    TooLong(u64),
    /// The controller has no more queue pairs.
    #[error("the controller allows {0} queue pairs, and all are in use")]
    NoPair(u16),
    /// There is no such queue pair.
    #[error("there is no queue pair {0}")]
    UnknownPair(u16),
    /// The function has no such interrupt vector.
    #[error("the function has {vectors} MSI-X vectors, not one with number {vector}")]
    NoVector {
        /// The vector.
        vector: u16,
        /// Vectors of the function.
        vectors: u16,
    },
    /// The pair's memory cannot be had, or the controller's claims contradict.
    #[error(transparent)]
    Failure(#[from] Failure),
}

/// A late command that is to be aborted.
#[derive(Debug)]
struct WaitingAbort {
    sqid: u16,
    cid: u16,
    in_flight: Weak<()>,
}

/// An NVMe controller; see the [module](self).
#[derive(Debug)]
pub struct Controller {
    id: u64,
    function: Arc<dyn Function>,
    options: Options,
    caps: Capabilities,
    page_min: u64,
    vs: u32,
    /// PCI vendor and device.
    device: (u16, u16),
    quirks: Quirks,
    registers: Registers,
    admin: AdminQueue,
    /// Shadow doorbells and EventIdx, once the controller has offered them; in use if the flag is set.
    shadow: Option<[DmaMemory; 2]>,
    is_shadowed: bool,
    info: Option<ControllerInfo>,
    namespaces: Vec<ListedNamespace>,
    pairs: Vec<Pair>,
    /// Deleted pairs whose owner has not yet rewound them, and could still ring their doorbells: by the proof's token.
    deleted: Vec<(u16, Weak<()>)>,
    /// Queue pairs that the controller allows.
    pairs_allowed: u16,
    life: Life,
    stop: Option<Stop>,
    running: Option<Running>,
    jobs: VecDeque<Job>,
    aborts: VecDeque<WaitingAbort>,
    events: VecDeque<Event>,
    next_watch: u64,
    next_keep_alive: u64,
    async_requests: u16,
    /// Before this time, no event request follows one that was answered.
    next_async: u64,
    /// Since when the controller has paused (CSTS.PP).
    paused: Option<u64>,
    /// Failed attempts to start, and failures soon after a start.
    attempts: u32,
    /// When the commands of the start must have ended.
    start_until: u64,
    ready_since: u64,
    /// Begin of the reset, and of its current step.
    reset_since: u64,
    step_since: u64,
    was_ready: bool,
    next_number: u64,
}

impl Controller {
    /// Takes a function over and begins to start its controller: [`Event::Ready`] follows.
    ///
    /// # Errors
    /// [`Failure`]: the function cannot be accessed, or its capabilities contradict.
    pub fn attach(function: Arc<dyn Function>, options: Options, now: u64) -> Result<Self, Failure> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut config = [0; 4];
        function.read_config(0, &mut config)?;
        let device = (u16::from_le_bytes([config[0], config[1]]), u16::from_le_bytes([config[2], config[3]]));
        let cap = Cap(function.read_register(CAP, Width::Eight)?);
        let vs = function.read_register(VS, Width::Four)? as u32;
        let caps = Capabilities::check(cap, vs)?;
        // The device must not write to memory of its earlier owner, which may have left commands running.
        function.set_bus_master(false)?;
        let mut pairs = options.pairs.clamp(1, pairs_max(caps.stride));
        let registers = loop {
            match map_doorbells(function.as_ref(), pairs, caps.stride) {
                // BAR 0 has fewer doorbells: those of as many queues as the controller may have.
                Err(PciError::OutOfBounds { .. }) if pairs > 1 => pairs /= 2,
                registers => break registers?,
            }
        };
        let doorbells = Doorbells { registers: registers.clone(), stride: caps.stride, shadow: None };
        let admin = AdminQueue::new(&function, caps.page, id, &doorbells)?;
        let mut controller = Self {
            id,
            function,
            options: Options { pairs, ..options },
            caps,
            page_min: cap.page_min(),
            vs,
            device,
            quirks: quirks::of(device.0, device.1, ""),
            registers,
            admin,
            shadow: None,
            is_shadowed: false,
            info: None,
            namespaces: Vec::new(),
            pairs: Vec::new(),
            deleted: Vec::new(),
            pairs_allowed: 0,
            life: Life::Ready,
            stop: None,
            running: None,
            jobs: VecDeque::new(),
            aborts: VecDeque::new(),
            events: VecDeque::new(),
            next_watch: now,
            next_keep_alive: now,
            async_requests: 0,
            next_async: now,
            paused: None,
            attempts: 0,
            start_until: now,
            ready_since: now,
            reset_since: now,
            step_since: now,
            was_ready: false,
            next_number: 0,
        };
        controller.disable(now);
        Ok(controller)
    }

    /// The function's name, for people.
    pub fn name(&self) -> &str {
        self.function.name()
    }

    /// PCI vendor and device.
    pub const fn device(&self) -> (u16, u16) {
        self.device
    }

    /// The number that the next queue pair would get; `None` if the controller allows no more.
    pub fn next_qid(&mut self) -> Option<u16> {
        self.deleted.retain(|(_, proof)| proof.strong_count() > 0);
        let is_free = |qid: &u16| {
            !self.pairs.iter().any(|pair| pair.qid() == *qid)
                && !self.deleted.iter().any(|(deleted, _)| deleted == qid)
        };
        (1..=self.pairs_allowed).find(is_free)
    }

    /// The most commands in flight of a queue pair.
    pub fn depth_max(&self) -> u16 {
        u16::try_from(self.caps.entries_max - 1).map_or(DEPTH_MAX, |depth| depth.min(DEPTH_MAX))
    }

    /// The controller's identity and limits, once it was ready.
    pub const fn info(&self) -> Option<&ControllerInfo> {
        self.info.as_ref()
    }

    /// All active namespaces, in the order of their IDs.
    pub fn namespaces(&self) -> &[ListedNamespace] {
        &self.namespaces
    }

    /// Queue pairs that the controller allows.
    pub const fn pairs_allowed(&self) -> u16 {
        self.pairs_allowed
    }

    /// Bytes of a memory page (CC.MPS): data of more than one piece must begin and end on such pages, but for its ends, unless
    /// the controller has SGLs.
    pub const fn page(&self) -> u64 {
        self.caps.page
    }

    /// Whether the controller takes commands of its owner.
    pub const fn is_ready(&self) -> bool {
        matches!(self.life, Life::Ready)
    }

    /// Reads the SMART / Health Information log (NVMe Base 2.1, 5.1.12.1.3): [`Event::Smart`] follows unless the controller
    /// refuses. Without effect while the controller is not ready. The read also clears a health event.
    pub fn read_health(&mut self) {
        let job = Job::ReadLog(crate::spec::log::SMART);
        if self.is_ready() && !self.jobs.contains(&job) {
            self.jobs.push_back(job);
        }
    }

    /// Does what is due, and returns the next event. Call it until it returns `None`.
    pub fn poll(&mut self, now: u64) -> Option<Event> {
        if self.events.is_empty() {
            self.advance(now);
        }
        self.events.pop_front()
    }

    /// When to call [`Controller::poll`] next, if nothing else happens.
    pub fn next_poll(&self, now: u64) -> u64 {
        match self.life {
            Life::Ended => u64::MAX,
            Life::Ready if !self.is_idle() => now + BUSY_POLL,
            Life::Ready => {
                let keep_alive = if self.options.keep_alive > 0 { self.next_keep_alive } else { u64::MAX };
                let events = if self.missing_async_requests() > 0 { self.next_async } else { u64::MAX };
                self.next_watch.min(keep_alive).min(events)
            }
            _ => now + BUSY_POLL,
        }
    }

    /// Changes the time between two reads of CSTS: the owner reads rarely while no command is in flight. A shorter time takes
    /// effect at once.
    pub fn set_watch(&mut self, interval: u64, now: u64) {
        self.options.watch = interval;
        self.next_watch = self.next_watch.min(now.saturating_add(interval));
    }

    /// Whether only event requests are in flight, and nothing waits to be sent.
    fn is_idle(&self) -> bool {
        let is_waiting = !self.jobs.is_empty() || !self.aborts.is_empty() || !self.events.is_empty();
        !is_waiting && self.admin.count(|waiter| waiter != Waiter::AsyncEvent) == 0
    }

    /// Sends an admin command, and returns its number in [`Event::Admin`].
    ///
    /// # Errors
    /// [`Refused`].
    pub fn admin(&mut self, command: &Command, now: u64) -> Result<u64, Refused> {
        if !self.is_ready() {
            return Err(Refused::NotReady);
        }
        let len = match &command.data {
            Data::None => 0,
            Data::FromController(len) => *len,
            Data::ToController(bytes) => bytes.len(),
        };
        let most = self.info.as_ref().map_or(0, |info| info.transfer_max).min(DATA_MAX as u64);
        if len as u64 > most {
            return Err(Refused::TooLong(most));
        }
        self.admin.prepare(len, &self.function, self.caps.page).map_err(Failure::Memory)?;
        let id = self.next_number;
        let is_owners = |waiter| matches!(waiter, Waiter::Owner(_));
        if self.admin.count(is_owners) >= OWNER_COMMANDS || !self.send(command, Waiter::Owner(id), now) {
            return Err(Refused::Busy);
        }
        self.next_number += 1;
        Ok(id)
    }

    /// Injects errors into the admin commands that are sent from now on, also the controller's own. A command that is withheld
    /// longer than its time limit leads to a reset, as if the controller did not answer.
    pub fn set_injections(&mut self, injections: Injections) {
        self.admin.set_injections(injections);
    }

    /// Begins to read the namespaces again. [`Event::Rescanned`] follows, after [`Event::NamespacesChanged`] if they have
    /// changed; or a reset, which reads them too.
    ///
    /// # Errors
    /// [`Refused::NotReady`].
    pub fn rescan(&mut self) -> Result<(), Refused> {
        if !self.is_ready() {
            return Err(Refused::NotReady);
        }
        if !self.jobs.contains(&Job::Rescan) {
            self.jobs.push_back(Job::Rescan);
        }
        Ok(())
    }

    /// Begins to create a queue pair, and returns its number; [`Event::QueueCreated`] or [`Event::QueueFailed`] follows.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn create_pair(&mut self, request: PairRequest) -> Result<u16, Refused> {
        let info = self.info.as_ref().filter(|_| self.is_ready());
        let (sgl, transfer) = info.map(|info| (info.sgl, info.transfer_max)).ok_or(Refused::NotReady)?;
        let vectors = self.function.vectors();
        if let Some(vector) = request.vector.filter(|&vector| vector >= vectors) {
            return Err(Refused::NoVector { vector, vectors });
        }
        let qid = self.next_qid().ok_or(Refused::NoPair(self.pairs_allowed))?;
        let new = NewPair {
            qid,
            controller: self.id,
            entries_max: self.caps.entries_max,
            page: self.caps.page,
            sgl,
            transfer,
            pieces: self.options.pieces,
            timeouts: self.options.io,
        };
        self.pairs.push(new.create(request, &self.function).map_err(Failure::Memory)?);
        self.jobs.push_back(Job::CreatePair(qid));
        Ok(qid)
    }

    /// Begins to delete a queue pair, which the owner has quiesced; the controller aborts the commands in flight.
    /// [`Event::DmaEnded`] follows; the owner rewinds the pair with it, and drops it. A pair that had ended already is reported
    /// once more. The controller reports a doorbell of a deleted queue as an error event.
    ///
    /// # Errors
    /// [`Refused::UnknownPair`].
    pub fn delete_pair(&mut self, qid: u16) -> Result<(), Refused> {
        self.end_pair(qid, false)
    }

    /// Begins to delete and create a queue pair, after a [`crate::queue::QueueError`] or [`QueuePair::quiesce`].
    /// [`Event::DmaEnded`] follows, and, after [`Controller::queue_rewound`], [`Event::QueueReady`].
    ///
    /// # Errors
    /// [`Refused::UnknownPair`].
    pub fn reset_pair(&mut self, qid: u16) -> Result<(), Refused> {
        self.end_pair(qid, true)
    }

    fn end_pair(&mut self, qid: u16, again: bool) -> Result<(), Refused> {
        let pair = self.pairs.iter_mut().find(|pair| pair.qid() == qid && pair.is_given_out);
        let pair = pair.ok_or(Refused::UnknownPair(qid))?;
        match pair.stage {
            Stage::Live => {
                pair.stage = Stage::Deleting { again };
                self.jobs.push_back(Job::DeletePair(qid));
            }
            // The last wish counts.
            Stage::Deleting { .. } => pair.stage = Stage::Deleting { again },
            // The controller may have the queues already: they are deleted once they exist.
            Stage::Creating { .. } => pair.stage = Stage::Creating { is_wanted: again },
            // A reset is under way, which resets the pair too.
            Stage::Waiting | Stage::Ended if again => {}
            Stage::Waiting | Stage::Ended => self.forget_pair(qid),
        }
        Ok(())
    }

    /// Removes a pair whose queues the controller does not have. Its number is free again when the owner has rewound it.
    fn forget_pair(&mut self, qid: u16) {
        self.pairs.retain(|pair| pair.qid() != qid);
        let proof = DmaEnded::new(qid, self.id);
        self.deleted.push((qid, proof.token()));
        self.events.push_back(Event::DmaEnded(proof));
    }

    /// Takes note that the owner has quiesced a pair, after [`Event::Quiesce`] or [`Event::ShuttingDown`].
    pub fn queue_quiesced(&mut self, qid: u16) {
        if let Some(pair) = self.pairs.iter_mut().find(|pair| pair.qid() == qid) {
            pair.is_quiesced = true;
        }
    }

    /// Takes note that the owner has rewound a pair, after [`Event::DmaEnded`].
    pub fn queue_rewound(&mut self, qid: u16) {
        let pair = self.pairs.iter_mut().find(|pair| pair.qid() == qid && pair.stage == Stage::Ended);
        if let Some(pair) = pair {
            pair.stage = Stage::Waiting;
            if self.is_ready() {
                self.jobs.push_back(Job::CreatePair(qid));
            }
        }
    }

    /// Begins to abort a late command, unless it has ended by its turn ([`crate::queue::Late::in_flight`]).
    pub fn abort(&mut self, sqid: u16, cid: u16, in_flight: Weak<()>) {
        self.aborts.retain(|waiting| waiting.in_flight.strong_count() > 0);
        // A pause has its own limit; the command may be completed after it.
        let is_ready = self.is_ready() && self.paused.is_none();
        let is_known = self.aborts.iter().any(|waiting| (waiting.sqid, waiting.cid) == (sqid, cid));
        if is_ready && !is_known && self.aborts.len() < ABORTS_WAITING {
            self.aborts.push_back(WaitingAbort { sqid, cid, in_flight });
        }
    }

    /// Begins a reset; a reset that is under way goes on. A late command is no reason while the controller pauses
    /// ([`Event::Paused`]).
    pub fn reset(&mut self, reason: ResetReason, now: u64) {
        let is_pausing = reason == ResetReason::CommandTimeout && self.paused.is_some();
        if self.is_ready() && !is_pausing {
            self.begin_reset(reason, now);
        }
    }

    /// Begins an orderly shutdown: [`Event::ShuttingDown`], and [`Event::Ended`] at the end. The owner has drained its pairs. A
    /// reset that is under way ends first, if it takes no longer than ten seconds.
    pub fn shut_down(&mut self, how: Shutdown, now: u64) {
        self.begin_shutdown(how, now);
    }

    /// Sends an admin command with the deadline of its kind.
    fn send(&mut self, command: &Command, waiter: Waiter, now: u64) -> bool {
        let limit = match command.patience {
            Patience::Normal => self.options.admin,
            Patience::Long => self.options.admin_long,
            Patience::Forever => u64::MAX,
        };
        self.admin.submit(command, waiter, now, now.saturating_add(limit))
    }

    fn write_cc(&self, value: Cc) -> Result<(), PciError> {
        self.function.write_register(CC, Width::Four, value.0.into())
    }

    fn read_csts(&self) -> Result<Csts, Failure> {
        let csts = Csts(self.function.read_register(CSTS, Width::Four)? as u32);
        if csts.is_absent() { Err(Failure::Vanished("CSTS reads as all ones".into())) } else { Ok(csts) }
    }

    /// The doorbells of I/O queue pairs.
    fn doorbells(&self) -> Doorbells {
        let shadow = self.shadow.as_ref().filter(|_| self.is_shadowed).and_then(|[doorbells, indices]| {
            let (doorbells, event_indices) =
                (doorbells.part(0, self.caps.page)?, indices.part(0, self.caps.page)?);
            Some(Shadow { doorbells, event_indices })
        });
        Doorbells { registers: self.registers.clone(), stride: self.caps.stride, shadow }
    }

    fn admin_doorbells(&self) -> Doorbells {
        Doorbells { shadow: None, ..self.doorbells() }
    }

    /// Event requests that are to be sent.
    fn missing_async_requests(&self) -> usize {
        let sent = self.admin.count(|waiter| waiter == Waiter::AsyncEvent);
        usize::from(self.async_requests).saturating_sub(sent)
    }

    /// Answers the admin queue's completions, also those after a failure.
    fn reap_admin(&mut self, now: u64) -> Result<(), Failure> {
        let (answers, outcome) = self.admin.reap(now);
        let mut outcome = outcome.map_err(Failure::AdminQueue);
        for (waiter, answer) in answers {
            match waiter {
                Waiter::Step => outcome = outcome.and(self.finish_step(answer, now)),
                Waiter::Owner(id) => self.events.push_back(Event::Admin { id, answer: Some(answer) }),
                Waiter::AsyncEvent => self.take_async_event(&answer),
                Waiter::KeepAlive => {}
                Waiter::Abort { sqid, cid, since } => {
                    let did_abort = answer.status.is_success() && answer.result & 1 == 0;
                    let step = RecoveryStep::Abort { sqid, cid, did_abort };
                    self.events.push_back(Event::Step { step, took: now.saturating_sub(since) });
                }
            }
        }
        outcome
    }

    /// Sends what is due by itself: aborts, event requests, keep-alive.
    fn send_due(&mut self, now: u64) {
        let Some(info) = &self.info else { return };
        let (aborts_max, has_keep_alive) = (usize::from(info.aborts_max), info.keep_alive_ms != 0);
        while self.admin.count(|waiter| matches!(waiter, Waiter::Abort { .. })) < aborts_max {
            let Some(abort) = self.aborts.pop_front() else { break };
            if abort.in_flight.strong_count() == 0 {
                continue;
            }
            let WaitingAbort { sqid, cid, .. } = abort;
            if !self.send(&admin::abort(sqid, cid), Waiter::Abort { sqid, cid, since: now }, now) {
                self.aborts.push_front(abort);
                break;
            }
        }
        let missing = self.missing_async_requests();
        if missing > 0 && now >= self.next_async {
            self.next_async = now.saturating_add(ASYNC_PAUSE);
            for _ in 0..missing {
                self.send(&admin::async_event(), Waiter::AsyncEvent, now);
            }
        }
        let interval = if has_keep_alive { self.options.keep_alive / 2 } else { 0 };
        if interval > 0
            && now >= self.next_keep_alive
            && self.send(&admin::keep_alive(), Waiter::KeepAlive, now)
        {
            self.next_keep_alive = now.saturating_add(interval);
        }
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        if !matches!(self.life, Life::Ended) {
            // The driver's memory is unmapped next. If this call fails, unmapping ends the access, or the memory is leaked.
            let _ = self.function.set_bus_master(false);
        }
    }
}

/// The most pairs whose doorbells lie in the registers of one window of 64 KiB.
const fn pairs_max(stride: u64) -> u16 {
    // CAP.DSTRD up to 15: the doorbells of one pair can be larger than the window.
    match ((1 << 16) / (2 * stride)).saturating_sub(1) {
        0 => 1,
        pairs => pairs as u16,
    }
}

fn map_doorbells(function: &dyn Function, pairs: u16, stride: u64) -> Result<Registers, PciError> {
    function.map_registers(DOORBELLS, (u64::from(pairs) + 1) * 2 * stride)
}
