//! A queue pair: one submission queue, its completion queue, and the commands in flight. NVMe 2.0 §3.3; one owner on one reactor.
//!
//! A turn of the owner is [`QueuePair::reap`], any number of [`QueuePair::submit`], and one [`QueuePair::flush`], which rings the
//! doorbell once. None of them allocates, locks, or calls the kernel. Time is a parameter, in nanoseconds of any clock that all
//! parts of the driver share.
//!
//! # What a controller may do to us
//! A completion is copied once. A CID that is not in flight, another queue's SQID, or an SQ head beyond the queue is a
//! [`QueueError`]: the pair stops, asserts nothing about any command, and waits for its reset. The SQ head is not used for flow
//! control: a pair has fewer commands in flight than its submission queue has entries, so there is always room.
//!
//! # Life
//! A pair runs until [`QueuePair::quiesce`] or a [`QueueError`]. From then on only [`QueuePair::rewind`] lets go of commands, and
//! that takes a [`DmaEnded`], which the controller issues when it can no longer access memory. So no command ends before its data
//! is safe. [`QueuePair::resume`] submits the kept commands again, in their old order.

mod commands;
mod doorbell;
#[cfg(any(test, fuzzing))]
pub mod scripted;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use aryk_dma::GuestArea;
use aryk_pci::Registers;
use zerocopy::IntoBytes;

pub use commands::DEPTH_MAX;
pub(crate) use doorbell::Shadow;

use crate::data::{self, List, Piece, SglSupport, Unfit};
use crate::memory::DmaMemory;
use crate::spec::entry::{CompletionEntry, Fuse, SubmissionEntry};
use crate::spec::status::Status;
use commands::{Commands, STAGES};
use doorbell::Doorbell;

/// Bytes of a submission queue entry.
pub(crate) const SQE: u64 = size_of::<SubmissionEntry>() as u64;
/// Bytes of a completion queue entry.
pub(crate) const CQE: u64 = size_of::<CompletionEntry>() as u64;

/// A command that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completed {
    /// The caller's name of the command, as submitted.
    pub token: u64,
    /// The controller's answer.
    pub status: Status,
    /// The command, by which the Error Information log names it.
    pub cid: u16,
    /// DW0 of the completion.
    pub result: u32,
    /// Time of the submission.
    pub submitted: u64,
}

/// Why a command was not submitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// As many commands are in flight as the pair allows.
    #[error("all slots of the queue pair are in use")]
    Full,
    /// The pair is quiesced, or waits for a reset.
    #[error("the queue pair does not run")]
    Stopped,
    /// The controller cannot access the data where it is.
    #[error(transparent)]
    Unfit(#[from] Unfit),
}

/// A completion that no correct controller posts. The pair must be reset; the data of its commands in flight is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The CID is of no command in flight: it was never used, or has completed before.
    #[error("queue {qid}: completion of CID {cid:#06x}, which is not in flight")]
    UnknownCid {
        /// The queue.
        qid: u16,
        /// CID of the completion.
        cid: u16,
    },
    /// The completion names another submission queue.
    #[error("queue {qid}: completion with SQID {sqid}")]
    WrongQueue {
        /// The queue.
        qid: u16,
        /// SQID of the completion.
        sqid: u16,
    },
    /// The SQ head is not below the size of the queue.
    #[error("queue {qid}: SQ head {sqhd} is beyond the queue's {entries} entries")]
    SqHead {
        /// The queue.
        qid: u16,
        /// SQHD of the completion.
        sqhd: u16,
        /// Entries of the queue.
        entries: u32,
    },
    /// The phase tag changed back while the completion was read.
    #[error("queue {qid}: a completion changed while it was read")]
    Changed {
        /// The queue.
        qid: u16,
    },
}

impl QueueError {
    /// The queue.
    pub const fn qid(self) -> u16 {
        match self {
            Self::UnknownCid { qid, .. }
            | Self::WrongQueue { qid, .. }
            | Self::SqHead { qid, .. }
            | Self::Changed { qid } => qid,
        }
    }
}

/// A command that is late.
#[derive(Clone, Debug)]
pub struct Late {
    /// The command, for [`crate::controller::Controller::abort`].
    pub cid: u16,
    /// The caller's name of the command.
    pub token: u64,
    /// Nanoseconds since the submission.
    pub waited: u64,
    /// What the owner asks the controller for.
    pub step: LateStep,
    /// Alive as long as the command is in flight: its CID may be another command's after that.
    pub in_flight: Weak<()>,
}

/// What to do about a late command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LateStep {
    /// The command's time is over: abort it.
    Abort,
    /// The abort did not help within [`Timeouts::grace`]: reset the controller.
    Reset,
}

/// Limits of time for the commands of a pair, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// From the submission to [`LateStep::Abort`].
    pub command: u64,
    /// From there to [`LateStep::Reset`].
    pub grace: u64,
}

/// A command that a reset found in flight, in the order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unfinished {
    /// The command as it was submitted.
    pub entry: SubmissionEntry,
    /// The caller's name of the command.
    pub token: u64,
    /// Time of the submission.
    pub submitted: u64,
}

/// The end or the second submission of an [`Unfinished`] command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The pair submits it again as it is; its data must still be mapped.
    Resubmit,
    /// The pair forgets it, and the caller fails it.
    Fail,
}

/// Proof that the controller no longer accesses the memory of a pair's commands: the pair was deleted, CSTS.RDY became 0, or bus
/// mastering is off. Only the controller issues one, for one pair.
#[derive(Debug)]
pub struct DmaEnded {
    qid: u16,
    /// Tells the controllers of a process apart.
    controller: u64,
    /// Lives until the pair is rewound, or the proof is dropped.
    token: Arc<()>,
}

impl DmaEnded {
    pub(crate) fn new(qid: u16, controller: u64) -> Self {
        Self { qid, controller, token: Arc::default() }
    }

    /// Tells whether the proof still exists.
    pub(crate) fn token(&self) -> Weak<()> {
        Arc::downgrade(&self.token)
    }

    /// The queue pair.
    pub const fn qid(&self) -> u16 {
        self.qid
    }
}

/// What a pair needs to run again after its reset. Only the controller issues one, for one pair.
#[derive(Debug)]
pub struct Restart {
    pub(crate) qid: u16,
    pub(crate) controller: u64,
    /// What the controller supports now: its firmware may be another.
    pub(crate) sgl: SglSupport,
    pub(crate) doorbells: Doorbells,
}

impl Restart {
    /// The queue pair.
    pub const fn qid(&self) -> u16 {
        self.qid
    }
}

/// The doorbells of a pair.
#[derive(Clone, Debug)]
pub(crate) struct Doorbells {
    pub(crate) registers: Registers,
    pub(crate) stride: u64,
    pub(crate) shadow: Option<Shadow>,
}

impl Doorbells {
    fn split(&self, qid: u16) -> [Doorbell; 2] {
        // From the first doorbell on, where `registers` begins.
        let tail = 2 * u64::from(qid) * self.stride;
        [tail, tail + self.stride].map(|at| Doorbell::new(self.registers.clone(), at, self.shadow.clone()))
    }
}

/// Where a pair's memory is, and what its commands may be.
#[derive(Debug)]
pub(crate) struct Layout {
    pub(crate) qid: u16,
    pub(crate) controller: u64,
    /// Entries of both queues: a power of two, above `depth`.
    pub(crate) entries: u32,
    pub(crate) depth: u16,
    pub(crate) page: u64,
    pub(crate) sgl: SglSupport,
    /// Bytes of each command's list.
    pub(crate) list: u64,
    pub(crate) timeouts: Timeouts,
}

impl Layout {
    const fn cq_offset(&self) -> u64 {
        (self.entries as u64 * SQE).next_multiple_of(self.page)
    }

    const fn lists_offset(&self) -> u64 {
        self.cq_offset() + (self.entries as u64 * CQE).next_multiple_of(self.page)
    }

    /// Bytes of memory that the pair needs.
    pub(crate) const fn len(&self) -> u64 {
        self.lists_offset() + self.depth as u64 * self.list
    }

    /// Addresses of both queues, in memory at `iova`.
    pub(crate) const fn queues(&self, iova: u64) -> [u64; 2] {
        [iova, iova + self.cq_offset()]
    }
}

/// Whether a pair runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// No submission; completions are still taken.
    Quiesced,
    /// Neither.
    Broken(QueueError),
    /// After the end of DMA, before the queues exist again.
    Rewound,
}

/// Counters of a pair, since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Commands submitted, without those that a reset submitted again.
    pub submitted: u64,
    /// Commands that the controller completed.
    pub completed: u64,
    /// Writes to the doorbell registers of submission queues.
    pub sq_doorbells: u64,
    /// Writes to the doorbell registers of completion queues.
    pub cq_doorbells: u64,
    /// Commands that resets submitted again.
    pub resubmitted: u64,
}

impl Counters {
    /// Writes to doorbell registers.
    pub const fn doorbells(&self) -> u64 {
        self.sq_doorbells + self.cq_doorbells
    }
}

/// A queue pair; see the [module](self).
#[derive(Debug)]
pub struct QueuePair {
    layout: Layout,
    sq: GuestArea,
    cq: GuestArea,
    lists: GuestArea,
    lists_iova: u64,
    commands: Commands,
    tail: Doorbell,
    head: Doorbell,
    sq_tail: u16,
    /// The tail that the controller knows.
    sq_rung: u16,
    cq_head: u16,
    phase: bool,
    state: State,
    submitted: u64,
    completed: u64,
    resubmitted: u64,
    /// Doorbells of earlier lives, of the submission and the completion queue.
    rung_before: [u64; 2],
    /// Late commands in flight.
    late: Vec<(u16, Arc<()>)>,
}

impl QueuePair {
    /// A pair in zeroed memory; `None` if the memory is shorter than [`Layout::len`].
    pub(crate) fn new(layout: Layout, memory: &DmaMemory, doorbells: &Doorbells) -> Option<Self> {
        let part = |offset, len| memory.part(offset, len);
        let [tail, head] = doorbells.split(layout.qid);
        Some(Self {
            sq: part(0, u64::from(layout.entries) * SQE)?,
            cq: part(layout.cq_offset(), u64::from(layout.entries) * CQE)?,
            lists: part(layout.lists_offset(), u64::from(layout.depth) * layout.list)?,
            lists_iova: memory.iova() + layout.lists_offset(),
            commands: Commands::new(layout.depth),
            tail,
            head,
            sq_tail: 0,
            sq_rung: 0,
            cq_head: 0,
            phase: true,
            state: State::Running,
            submitted: 0,
            completed: 0,
            resubmitted: 0,
            rung_before: [0; 2],
            late: Vec::new(),
            layout,
        })
    }

    /// The queues' identifier.
    pub const fn qid(&self) -> u16 {
        self.layout.qid
    }

    /// The most commands in flight.
    pub const fn depth(&self) -> u16 {
        self.layout.depth
    }

    /// Addresses of both queues, in memory at `iova`.
    pub(crate) const fn queues(&self, iova: u64) -> [u64; 2] {
        self.layout.queues(iova)
    }

    /// Commands in flight.
    pub const fn in_flight(&self) -> u16 {
        self.commands.len()
    }

    /// Counters since the creation.
    pub const fn counters(&self) -> Counters {
        Counters {
            submitted: self.submitted,
            completed: self.completed,
            sq_doorbells: self.rung_before[0] + self.tail.rung(),
            cq_doorbells: self.rung_before[1] + self.head.rung(),
            resubmitted: self.resubmitted,
        }
    }

    /// The error that stopped the pair, until its reset.
    pub const fn error(&self) -> Option<QueueError> {
        match self.state {
            State::Broken(error) => Some(error),
            _ => None,
        }
    }

    /// Whether commands are accepted.
    pub fn is_running(&self) -> bool {
        self.state == State::Running
    }

    /// Puts a command into the submission queue, and returns its CID. The controller sees the command after
    /// [`QueuePair::flush`]. `data` stays mapped until the command ends; it is empty for a command without data. `token` comes
    /// back with the completion.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was submitted.
    #[inline]
    pub fn submit(
        &mut self,
        entry: SubmissionEntry,
        data: &[Piece],
        token: u64,
        now: u64,
    ) -> Result<u16, SubmitError> {
        if self.state != State::Running {
            return Err(SubmitError::Stopped);
        }
        let (index, cid) = self.commands.next_cid().ok_or(SubmitError::Full)?;
        let entry = self.with_data(entry, data, index)?.with_cid(cid);
        self.commands.insert(entry, token, now);
        self.push(&entry);
        self.submitted += 1;
        Ok(cid)
    }

    /// Puts two fused commands into the submission queue, one directly behind the other. NVMe 2.0 §3.4.2. Each has its own
    /// completion.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was submitted.
    pub fn submit_fused(
        &mut self,
        entries: [SubmissionEntry; 2],
        data: [&[Piece]; 2],
        tokens: [u64; 2],
        now: u64,
    ) -> Result<[u16; 2], SubmitError> {
        if self.state == State::Running && self.commands.free() < 2 {
            return Err(SubmitError::Full);
        }
        // The second command's data is checked before the first is in the queue.
        let (index, _) = self.commands.next_cid().ok_or(SubmitError::Full)?;
        self.with_data(entries[1], data[1], index)?;
        let first = self.submit(entries[0].with_fuse(Fuse::First), data[0], tokens[0], now)?;
        let second = self.submit(entries[1].with_fuse(Fuse::Second), data[1], tokens[1], now)?;
        Ok([first, second])
    }

    #[inline]
    fn with_data(
        &self,
        entry: SubmissionEntry,
        data: &[Piece],
        index: u16,
    ) -> Result<SubmissionEntry, Unfit> {
        let start = u64::from(index) * self.layout.list;
        let lists = &self.lists;
        let mut list = List {
            iova: self.lists_iova + start,
            len: (self.layout.list / 8) as usize,
            write: |word, words: &[u64]| lists.write_bytes(start as usize + 8 * word, words.as_bytes()),
        };
        data::attach(entry, data, self.layout.page, self.layout.sgl, &mut list)
    }

    #[inline]
    fn push(&mut self, entry: &SubmissionEntry) {
        self.sq.write(usize::from(self.sq_tail) * SQE as usize, entry);
        self.sq_tail = self.after(self.sq_tail);
    }

    /// The index behind `index`, in both queues.
    #[inline]
    const fn after(&self, index: u16) -> u16 {
        index.wrapping_add(1) & (self.layout.entries - 1) as u16
    }

    /// Tells the controller about all submitted commands, by one doorbell.
    #[inline]
    pub fn flush(&mut self) {
        if self.sq_tail != self.sq_rung && self.state == State::Running {
            self.tail.ring(self.sq_rung, self.sq_tail);
            self.sq_rung = self.sq_tail;
        }
    }

    /// Whether a completion waits. A caller that has enabled the interrupt asks this once more before it sleeps.
    #[inline]
    pub fn has_completion(&self) -> bool {
        self.status_at_head() & 1 == u16::from(self.phase)
    }

    #[inline]
    fn status_at_head(&self) -> u16 {
        let at = usize::from(self.cq_head) * CQE as usize + CompletionEntry::STATUS_OFFSET;
        // The rest of the entry is read after its phase tag.
        self.cq.load_u16(at, Ordering::Acquire)
    }

    /// Takes up to `limit` completions, and tells the controller about them by one doorbell. Returns their number.
    ///
    /// # Errors
    /// [`QueueError`], now and in all later calls until the reset. The completions before it were reported.
    #[inline]
    pub fn reap(&mut self, limit: u16, mut report: impl FnMut(Completed)) -> Result<u16, QueueError> {
        match self.state {
            State::Running | State::Quiesced => {}
            State::Rewound => return Ok(0),
            State::Broken(error) => return Err(error),
        }
        let (old, mut count, mut failure) = (self.cq_head, 0, None);
        while count < limit && self.has_completion() {
            match self.take_completion() {
                Ok(completed) => report(completed),
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
            count += 1;
        }
        if count > 0 {
            self.completed += u64::from(count);
            if self.state == State::Running {
                self.head.ring(old, self.cq_head);
            }
            if !self.late.is_empty() {
                self.late.retain(|(cid, _)| self.commands.find(*cid).is_some());
            }
        }
        if let Some(error) = failure {
            self.state = State::Broken(error);
            return Err(error);
        }
        Ok(count)
    }

    #[inline]
    fn take_completion(&mut self) -> Result<Completed, QueueError> {
        let entry: CompletionEntry = self.cq.read(usize::from(self.cq_head) * CQE as usize);
        let index = self.check(&entry)?;
        let (token, submitted) = self.commands.remove(index);
        self.cq_head = self.after(self.cq_head);
        self.phase ^= self.cq_head == 0;
        Ok(Completed { token, status: entry.status(), cid: entry.cid(), result: entry.result(), submitted })
    }

    /// The command that a completion ends.
    #[inline]
    fn check(&self, entry: &CompletionEntry) -> Result<u16, QueueError> {
        let (qid, entries) = (self.layout.qid, self.layout.entries);
        if entry.phase() != self.phase {
            return Err(QueueError::Changed { qid });
        }
        if entry.sqid() != qid {
            return Err(QueueError::WrongQueue { qid, sqid: entry.sqid() });
        }
        if u32::from(entry.sqhd()) >= entries {
            return Err(QueueError::SqHead { qid, sqhd: entry.sqhd(), entries });
        }
        self.commands.find(entry.cid()).ok_or(QueueError::UnknownCid { qid, cid: entry.cid() })
    }

    /// Reports each command that became late since the last call, once for each [`LateStep`], up to `limit` of them.
    pub fn late(&mut self, now: u64, limit: u16, mut report: impl FnMut(Late)) {
        let mut left = limit;
        for (stage, (step, limit)) in self.stages().into_iter().enumerate() {
            let Some(until) = now.checked_sub(limit) else { continue };
            while left > 0 {
                let Some(index) = self.commands.take_late(stage, until) else { break };
                let slot = self.commands.slot(index);
                let (waited, token, cid) = (now - slot.submitted, slot.token, self.commands.cid(index));
                let known = self.late.iter().position(|(late, _)| *late == cid);
                let known = known.unwrap_or_else(|| {
                    self.late.push((cid, Arc::new(())));
                    self.late.len() - 1
                });
                let in_flight = Arc::downgrade(&self.late[known].1);
                report(Late { cid, token, waited, step, in_flight });
                left -= 1;
            }
        }
    }

    /// The earliest time at which [`QueuePair::late`] reports a command that is in flight now; `None` if it has reported all of
    /// them for the last step.
    pub fn next_late(&self) -> Option<u64> {
        let times = self.stages().into_iter().enumerate().filter_map(|(stage, (_, limit))| {
            self.commands.oldest_unreported(stage).map(|oldest| oldest.saturating_add(limit))
        });
        times.min()
    }

    /// The steps of a late command, and the times from the submission to them.
    const fn stages(&self) -> [(LateStep, u64); STAGES] {
        let Timeouts { command, grace } = self.layout.timeouts;
        [(LateStep::Abort, command), (LateStep::Reset, command.saturating_add(grace))]
    }

    /// Begins the time limits of all commands in flight at `now`: after a time in which the controller did not process commands.
    pub fn restart_clock(&mut self, now: u64) {
        self.commands.restart_clock(now);
    }

    /// Stops submissions and doorbells. Completions are still taken. The owner then reports
    /// [`crate::controller::Controller::queue_quiesced`].
    pub fn quiesce(&mut self) {
        if self.state == State::Running {
            self.state = State::Quiesced;
        }
    }

    /// Empties both queues after the end of DMA, and asks `decide` about each command in flight, in the order of submission.
    /// The owner reaps before this, because completions that came in time are lost otherwise, and reports
    /// [`crate::controller::Controller::queue_rewound`] after it. Returns the number of commands that [`QueuePair::resume`] will
    /// submit.
    ///
    /// # Panics
    /// If the proof is another pair's.
    pub fn rewind(&mut self, proof: DmaEnded, mut decide: impl FnMut(&Unfinished) -> Fate) -> u16 {
        let DmaEnded { qid, controller, token } = proof;
        assert_eq!((qid, controller), (self.layout.qid, self.layout.controller), "a proof for another pair");
        // Completions of the old queue must not be taken for new ones.
        let zeroes = [0; 4096];
        for start in (0..self.cq.len() as usize).step_by(zeroes.len()) {
            self.cq.write_bytes(start, &zeroes[..zeroes.len().min(self.cq.len() as usize - start)]);
        }
        (self.sq_tail, self.sq_rung, self.cq_head, self.phase) = (0, 0, 0, true);
        self.state = State::Rewound;
        self.late.clear();
        // No doorbell of this life follows: the controller may give the pair's number to another pair.
        drop(token);
        let in_flight: Vec<u16> = self.commands.in_order().collect();
        for index in in_flight {
            let slot = self.commands.slot(index);
            let unfinished = Unfinished { entry: slot.entry, token: slot.token, submitted: slot.submitted };
            if decide(&unfinished) == Fate::Fail {
                self.commands.remove(index);
            }
        }
        self.commands.len()
    }

    /// Runs again in queues that the controller has created again, and submits the kept commands in their old order. Their
    /// deadlines begin at `now`.
    ///
    /// # Panics
    /// If `restart` is another pair's, or the pair was not rewound.
    pub fn resume(&mut self, restart: Restart, now: u64) {
        let Restart { qid, controller, sgl, doorbells } = restart;
        assert_eq!((qid, controller), (self.layout.qid, self.layout.controller), "another pair's restart");
        assert_eq!(self.state, State::Rewound, "a pair is rewound before it runs again");
        self.layout.sgl = sgl;
        let Counters { sq_doorbells, cq_doorbells, .. } = self.counters();
        self.rung_before = [sq_doorbells, cq_doorbells];
        [self.tail, self.head] = doorbells.split(qid);
        self.commands.restart_clock(now);
        let kept: Vec<u16> = self.commands.in_order().collect();
        for index in &kept {
            let entry = self.commands.slot(*index).entry;
            self.push(&entry);
        }
        self.resubmitted += kept.len() as u64;
        self.state = State::Running;
        self.flush();
    }
}

#[cfg(test)]
mod tests;
