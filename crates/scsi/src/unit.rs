//! A logical unit's channel, private to its opener: commands down, outcomes up, as with [`aryk_bdev::BdevChannel`]. Reactor
//! context.
//!
//! A command keeps its submitter's tag from [`UnitChannel::submit`] until its outcome is returned: the tag is the command's
//! index in the table (`tasks`), and the tag of its requests to the disk. READ and WRITE are one request each, with the
//! initiator's own memory; they allocate nothing. Nearly all of them are `plain`, to a unit without reservations or pending
//! attentions, and take a short path in and out. A command that takes several requests, such as UNMAP, sends one after the other
//! (`jobs`); a command that needs no request is answered at the next poll (`answers`).

mod answers;
mod jobs;
mod reserve;
mod tasks;

pub(crate) use answers::{copy_answer, report_luns};

use crate::cdb::{Command, Transfer, decode, plain};
use crate::cell::{Cells, Command as Order, UnitCell};
use crate::reservations::{Access, Refused};
use crate::{Attention, Lun, Nexus, Sense, Status, TaskFilter};
use aryk_bdev::{BdevChannel, Blocks, Bytes, Completion, Io, Lba, Op, OpenError, Status as BdevStatus, Tag};
use aryk_dma::Sgl;
use aryk_reactor::{Commands, Cx, Handle, Layer, Point, RootId, Traced};
use futures_channel::oneshot;
use jobs::Job;
use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use tasks::{AbortCause, Task, Tasks};

/// A command. Its memory must stay in place until its outcome is returned.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The submitter's tag: below the channel's depth, and not in use by another command in flight. The outcome returns it.
    pub tag: u16,
    /// The initiator's tag, by which task management identifies the command.
    pub task: u64,
    /// The command descriptor block, of any length.
    pub cdb: &'a [u8],
    /// Data that the initiator sends.
    pub data_out: Sgl,
    /// Memory that receives data for the initiator.
    pub data_in: Sgl,
    /// The command was submitted to a predecessor before, and may already have been carried out.
    pub replayed: bool,
}

/// The result of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// The tag of the command.
    pub tag: u16,
    /// The status of the command.
    pub status: Status,
    /// The reason, if the status is [`Status::CheckCondition`].
    pub sense: Sense,
    /// Bytes that were transferred, from the data-out list or into the data-in list.
    pub moved: u32,
    /// Bytes at the beginning of the data-in list that may have been written, also by a command that failed. The value may exceed
    /// the length of the list if `moved` counts data-out.
    pub filled: u32,
    /// Bytes that the command would have moved had the list been long enough; then the command was not started.
    pub overrun: Option<Bytes>,
    /// Task management aborted the command: a SCSI initiator receives no answer.
    pub aborted: bool,
}

/// An abort that a caller waits for.
struct PendingAbort {
    /// A bit for each tag that has not ended, and the number of these.
    tags: Box<[u64]>,
    left: u32,
    aborted: u32,
    /// These channels receive the number of aborted commands. When all receivers are gone, the abort is forgotten.
    done: Vec<oneshot::Sender<u32>>,
}

impl PendingAbort {
    fn is_waited_for(&self) -> bool {
        self.done.iter().any(|done| !done.is_canceled())
    }
}

/// The channel of a logical unit.
pub struct UnitChannel {
    nexus: Arc<Nexus>,
    disk: BdevChannel,
    reactor: Handle,
    root: RootId,
    cells: Rc<Cells>,
    cell: Rc<UnitCell>,
    tasks: Tasks,
    ready: Vec<Outcome>,
    completions: Vec<Completion>,
    /// Completions of commands that are not plain, or that failed, during a poll.
    others: Vec<Completion>,
    pending_aborts: Vec<PendingAbort>,
    /// Commands in flight that are loops.
    loops: u32,
    /// Block size, as a power of two.
    block_shift: u32,
}

impl fmt::Debug for UnitChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut s = f.debug_struct("UnitChannel");
        s.field("nexus", &self.nexus).field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

/// State of a command after its start: `None` if it is in progress, otherwise the number of bytes that it has moved.
type Begun = Result<Option<u32>, Failure>;

/// The reason for which a command fails before its first request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Failure {
    Sense(Sense),
    Conflict,
    /// The limit of commands of this kind is reached.
    Full,
    /// The list is shorter than the number of bytes that the command moves.
    Overrun(Bytes),
}

impl Failure {
    /// The failure of a request of the block layer. `lba` is the block that failed, or the first if that is not known.
    const fn of(status: BdevStatus, op: Op, lba: Lba) -> Self {
        let sense = Sense::of(status, op);
        match status {
            BdevStatus::ReservationConflict => Self::Conflict,
            BdevStatus::Medium => Self::Sense(sense.with_lba(lba)),
            _ => Self::Sense(sense),
        }
    }
}

impl From<Sense> for Failure {
    fn from(sense: Sense) -> Self {
        Self::Sense(sense)
    }
}

impl UnitChannel {
    /// Opens a channel for the calling reactor, for commands with tags below `depth`. Outcomes wake `root`.
    ///
    /// # Errors
    /// As for opening the disk's channel.
    pub fn open(nexus: Arc<Nexus>, depth: u16, root: RootId, cx: &mut Cx) -> Result<Self, OpenError> {
        let lun = nexus.lun();
        let mut disk = nexus.open_disk(root, cx)?;
        disk.trace_front_end();
        let cell = Rc::new(UnitCell { nexus: nexus.number(), commands: Commands::new(root) });
        let cells = cx.local_state::<Cells>();
        cells.add(lun.serial(), &cell);
        lun.channel_opened(cx.handle());
        let block_size = nexus.bdev().geometry().block_size;
        Ok(Self {
            disk,
            reactor: cx.handle().clone(),
            root,
            cells,
            cell,
            tasks: Tasks::new(depth),
            ready: Vec::new(),
            completions: Vec::with_capacity(depth.into()),
            others: Vec::new(),
            pending_aborts: Vec::new(),
            loops: 0,
            block_shift: block_size.trailing_zeros(),
            nexus,
        })
    }

    /// The nexus that owns the channel.
    pub const fn nexus(&self) -> &Arc<Nexus> {
        &self.nexus
    }

    fn lun(&self) -> &Arc<Lun> {
        self.nexus.lun()
    }

    /// Commands that have been submitted and whose outcomes have not been returned.
    pub fn in_flight(&self) -> u32 {
        self.tasks.len() + self.ready.len() as u32
    }

    /// Whether a poll would find nothing to do, unless the channel receives a command (see `cell`).
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.in_flight() == 0 && self.disk.is_quiet()
    }

    /// Whether sense data must be sent in descriptor format.
    pub fn wants_descriptors(&self) -> bool {
        self.lun().mode().descriptors
    }

    /// Starts a command. A later [`UnitChannel::poll`] returns its outcome, exactly once.
    // Always inlined, so that the caller can choose one of the two lists while they are in registers.
    #[inline(always)]
    pub fn submit(&mut self, request: Request<'_>, cx: &mut Cx) {
        match plain(request.cdb) {
            Some((op, transfer)) if self.nexus.is_clear() => {
                let begun = self.transfer(op, transfer, &request, cx);
                if !matches!(begun, Ok(None)) {
                    self.answer(request.tag, begun, cx);
                }
            }
            // A copy; otherwise the lists of plain commands would have to be in memory too.
            _ => self.submit_any(Request { ..request }, cx),
        }
    }

    #[cold]
    fn submit_any(&mut self, request: Request<'_>, cx: &mut Cx) {
        // A plain command is traced with its one request to the disk. Any other command has records of its own, since it may take
        // several requests, or none.
        cx.trace(Traced::new(Layer::Frontend, self.root.trace_number()), Point::Submit, request.tag.into());
        let begun = self.begin(&request, cx);
        if begun != Ok(None) {
            self.answer(request.tag, begun, cx);
        }
    }

    /// Starts a command; returns the number of bytes moved if it has ended already.
    fn begin(&mut self, request: &Request<'_>, cx: &mut Cx) -> Begun {
        // A pending attention is reported before an error in the CDB (SAM-5, section 5.14).
        let command = decode(request.cdb).map_err(|sense| self.attention().unwrap_or(sense))?;
        if request.replayed && !command.is_repeatable() {
            return Err(Attention::PowerOn.sense().into());
        }
        if self.nexus.has_pending()
            && !command.passes_attention()
            && let Some(sense) = self.attention()
        {
            return Err(sense.into());
        }
        if !self.nexus.may(access_of(&command)) {
            return Err(Failure::Conflict);
        }
        match command {
            Command::Read(transfer) => self.transfer(Op::Read, transfer, request, cx),
            Command::Write(transfer) => self.transfer(Op::Write, transfer, request, cx),
            _ => self.begin_rare(&command, request, cx),
        }
    }

    fn attention(&self) -> Option<Sense> {
        self.nexus.take_attention().map(Attention::sense)
    }

    /// Transfers blocks between the disk and the initiator's memory.
    #[inline(always)]
    fn transfer(&mut self, op: Op, t: Transfer, request: &Request<'_>, cx: &mut Cx) -> Begun {
        self.check_range(t.lba, t.blocks)?;
        let (fua, data) = match op {
            Op::Read => (false, request.data_in),
            _ => (self.check_change()? || t.fua, request.data_out),
        };
        let data = self.data_of(data, t.blocks, if op == Op::CompareAndWrite { 2 } else { 1 })?;
        if t.blocks == Blocks::ZERO {
            return Ok(Some(0));
        }
        let io = Io {
            tag: Tag(0),
            op,
            fua,
            may_unmap: false,
            lba: t.lba,
            blocks: t.blocks,
            source: Lba::ZERO,
            data,
        };
        self.start(request, data.len(), None, io, cx);
        Ok(None)
    }

    /// The first bytes of a list, `times` the size of these blocks.
    #[inline]
    fn data_of(&self, list: Sgl, blocks: Blocks, times: u64) -> Result<Sgl, Failure> {
        let bytes = Bytes((blocks.0 << self.block_shift) * times);
        let len = Bytes(list.len().into());
        if bytes > len {
            return Err(Failure::Overrun(bytes));
        }
        Ok(if bytes == len { list } else { list.slice(0, bytes.0 as u32) })
    }

    /// Checks that blocks are within the disk. The first block must be within the disk even if their number is 0.
    #[inline]
    fn check_range(&self, lba: Lba, blocks: Blocks) -> Result<(), Sense> {
        let end = Lba::ZERO + self.disk.bdev().blocks();
        if lba < end && blocks <= end - lba { Ok(()) } else { Err(Sense::OUT_OF_RANGE) }
    }

    /// Checks that the disk may be changed; returns whether each change must be durable before it completes.
    #[inline]
    fn check_change(&self) -> Result<bool, Sense> {
        let mode = self.lun().mode();
        if mode.protected || !self.nexus.is_writable() {
            return Err(Sense::WRITE_PROTECTED);
        }
        Ok(!mode.write_cache)
    }

    /// Sends the first request of a command.
    #[inline]
    fn start(&mut self, request: &Request<'_>, moved: u32, job: Option<Box<Job>>, io: Io, cx: &mut Cx) {
        let Request { tag, task: name, .. } = *request;
        let (op, lba, status) = (io.op, io.lba, BdevStatus::Ok);
        self.tasks.insert(
            tag,
            Task { name, lba, job, moved, op, status, abort_cause: AbortCause::None, runs: true },
        );
        self.disk.submit(Io { tag: Tag(tag.into()), ..io }, cx);
    }

    #[cold]
    fn answer(&mut self, tag: u16, begun: Begun, cx: &mut Cx) {
        self.ready.push(match begun {
            Ok(moved) => Outcome::good(tag, moved.expect("the command has ended")),
            Err(failure) => Outcome::failed(tag, failure),
        });
        cx.wake(self.root);
    }

    /// Hands the tags of successful commands and their numbers of moved bytes to `good`, and adds the outcomes of the other ended
    /// commands to `rest`. Commands that were answered without the disk are in `rest` even if they succeeded.
    #[inline]
    pub fn poll(&mut self, cx: &mut Cx, rest: &mut Vec<Outcome>, mut good: impl FnMut(u16, u32, &mut Cx)) {
        if self.cell.commands.has_some() {
            self.run_orders(cx);
        }
        let mut completions = std::mem::take(&mut self.completions);
        let Self { disk, tasks, pending_aborts, others, .. } = self;
        disk.poll_each(cx, &mut completions, |completion, cx| {
            let tag = completion.tag.0 as u16;
            let task = tasks.get(tag);
            let (moved, is_plain) = (task.moved, task.job.is_none() && pending_aborts.is_empty());
            if is_plain && completion.status.is_ok() {
                tasks.remove(tag);
                good(tag, moved, cx);
            } else {
                others.push(completion);
            }
        });
        if !(self.others.is_empty() && completions.is_empty()) {
            self.all_completed(&mut completions, rest, cx);
        }
        self.completions = completions;
        if !self.ready.is_empty() {
            rest.append(&mut self.ready);
        }
    }

    /// Adds the outcomes of all ended commands to `outcomes`.
    pub fn poll_all(&mut self, cx: &mut Cx, outcomes: &mut Vec<Outcome>) {
        let mut good = Vec::new();
        self.poll(cx, outcomes, |tag, moved, _| good.push(Outcome::good(tag, moved)));
        outcomes.append(&mut good);
    }

    /// Handles completions of requests of commands that are not plain, or that failed.
    #[cold]
    fn all_completed(&mut self, completions: &mut Vec<Completion>, rest: &mut Vec<Outcome>, cx: &mut Cx) {
        let mut others = std::mem::take(&mut self.others);
        for Completion { tag, status } in others.drain(..).chain(completions.drain(..)) {
            rest.extend(self.completed(tag.0 as u16, status, cx));
        }
        self.others = others;
    }

    /// Handles the completion of a command's request; returns the outcome if that was its last request.
    #[cold]
    fn completed(&mut self, tag: u16, status: BdevStatus, cx: &mut Cx) -> Option<Outcome> {
        let task = self.tasks.get(tag);
        task.status = task.status.or(status);
        let goes_on = task.job.is_some() && self.submit_next(tag, cx);
        (!goes_on).then(|| self.end(tag))
    }

    /// Removes an ended command from the table.
    fn end(&mut self, tag: u16) -> Outcome {
        let task = self.tasks.get(tag);
        self.loops -= u32::from(matches!(task.job.take().as_deref(), Some(Job::Loop(_))));
        let &mut Task { op, mut lba, moved, status, abort_cause, .. } = task;
        self.tasks.remove(tag);
        self.note_ended(tag);
        if status.is_ok() {
            return Outcome::good(tag, moved);
        }
        // How many bytes of a failed read were transferred is unknown.
        let filled = if op == Op::Read { moved } else { 0 };
        match abort_cause {
            AbortCause::Aborted if status == BdevStatus::Aborted => {
                let aborted = true;
                return Outcome { status: Status::TaskAborted, aborted, filled, ..Outcome::good(tag, 0) };
            }
            AbortCause::Refused if status == BdevStatus::Aborted => {
                return Outcome { filled, ..Outcome::failed(tag, Failure::Conflict) };
            }
            AbortCause::None | AbortCause::Aborted | AbortCause::Refused => {}
        }
        if status == BdevStatus::Medium {
            let blocks = Blocks((moved >> self.block_shift).max(1).into());
            lba = self.nexus.bdev().device().failed_block(lba, blocks).unwrap_or(lba);
        }
        Outcome { filled, ..Outcome::failed(tag, Failure::of(status, op, lba)) }
    }

    /// Aborts the commands with those tags, in one pass over all commands. Each still has an outcome.
    pub fn abort_those(&mut self, is_selected: impl Fn(u16) -> bool, cx: &mut Cx) {
        self.abort_selected(AbortCause::Aborted, |tag, _| is_selected(tag), cx);
    }

    /// Aborts all commands. Each still has an outcome.
    pub fn abort_all(&mut self, cx: &mut Cx) {
        self.abort_those(|_| true, cx);
    }

    /// Whether the memory of the commands with those tags may be replaced, as [`BdevChannel::are_revocable`]. They were aborted.
    pub fn are_revocable(&self, is_selected: impl Fn(u16) -> bool) -> bool {
        let starts_no_more = |(tag, task): (u16, &Task)| {
            let is_external = task.job.as_deref().is_some_and(Job::is_external);
            !is_selected(tag) || task.abort_cause != AbortCause::None && !is_external
        };
        self.tasks.running().all(starts_no_more) && self.disk.are_revocable(|tag| is_selected(tag.0 as u16))
    }

    /// Makes commands end soon, in one pass over all. Returns the tags of those that have not ended, by bit; their number; and
    /// the number of those that have ended at once, because they waited for external work. External work that has begun
    /// continues without its command.
    fn abort_selected(
        &mut self,
        cause: AbortCause,
        is_selected: impl Fn(u16, &Task) -> bool,
        cx: &mut Cx,
    ) -> (Box<[u64]>, u32, u32) {
        let (mut tags, mut left) = (vec![0; self.tasks.depth().div_ceil(64)].into_boxed_slice(), 0);
        let (mut ended_tags, mut is_new) = (Vec::new(), false);
        for (tag, task) in self.tasks.iter().filter(|(tag, task)| is_selected(*tag, task)) {
            // A command with further requests does not start the next one.
            let before = std::mem::replace(&mut task.abort_cause, cause);
            if task.job.as_deref().is_some_and(Job::is_external) {
                task.status = BdevStatus::Aborted;
                ended_tags.push(tag);
            } else {
                tags[usize::from(tag) / 64] |= 1_u64 << (tag % 64);
                left += 1;
                is_new |= before == AbortCause::None;
            }
        }
        // The disk has already received aborts for the commands that were aborted before.
        if is_new {
            let is_among = |tag: Tag| tags[tag.0 as usize / 64] & 1 << (tag.0 % 64) != 0;
            self.disk.abort_those(is_among, cx);
        }
        let ended = ended_tags.len() as u32;
        for tag in ended_tags {
            let outcome = self.end(tag);
            self.ready.push(outcome);
            cx.wake(self.root);
        }
        (tags, left, ended)
    }

    fn run_orders(&mut self, cx: &mut Cx) {
        self.pending_aborts.retain(PendingAbort::is_waited_for);
        let mut orders = self.cell.commands.take_all();
        while let Some(order) = orders.pop_front() {
            match order {
                Order::Abort(which, done) => {
                    let done = std::iter::once(done).chain(take_equal_aborts(&mut orders, &which)).collect();
                    self.abort_and_report(AbortCause::Aborted, |task| which.matches_tag(task.name), done, cx);
                }
                Order::Refuse(changes, done) => {
                    // Commands that wait for external work check their rights when their turn comes.
                    let is_selected = |task: &Task| {
                        !task.job.as_deref().is_some_and(Job::is_external)
                            && (!changes || task.op.is_change())
                    };
                    self.abort_and_report(AbortCause::Refused, is_selected, vec![done], cx);
                }
                Order::Count(which, done) => {
                    let running = self.tasks.iter().filter(|(_, task)| which.matches_tag(task.name)).count();
                    // The caller may have stopped waiting.
                    let _ = done.send(running as u32);
                }
                // If the command was aborted, another command may have its tag by now.
                Order::Ended(tag, wanted, result) if wanted.strong_count() > 0 => {
                    self.external_ended(tag, result)
                }
                Order::Ended(..) => {}
            }
        }
    }

    /// Ends a command whose external work has ended.
    fn external_ended(&mut self, tag: u16, result: Result<(), Refused>) {
        let outcome = self.end(tag);
        self.ready.push(result.map_or_else(|refused| Outcome::failed(tag, refused.into()), |()| outcome));
    }

    /// Aborts commands, and reports their number when they have ended.
    fn abort_and_report(
        &mut self,
        cause: AbortCause,
        is_selected: impl Fn(&Task) -> bool,
        done: Vec<oneshot::Sender<u32>>,
        cx: &mut Cx,
    ) {
        let (tags, left, ended) = self.abort_selected(cause, |_, task| is_selected(task), cx);
        self.pending_aborts.push(PendingAbort { tags, left, aborted: left + ended, done });
        self.report_aborts();
    }

    fn note_ended(&mut self, tag: u16) {
        let (word, bit) = (usize::from(tag) / 64, 1 << (tag % 64));
        for pending in self.pending_aborts.iter_mut().filter(|pending| pending.tags[word] & bit != 0) {
            pending.tags[word] &= !bit;
            pending.left -= 1;
        }
        self.report_aborts();
    }

    fn report_aborts(&mut self) {
        let has_ended = |pending: &mut PendingAbort| pending.left == 0 || !pending.is_waited_for();
        for PendingAbort { aborted, done, .. } in self.pending_aborts.extract_if(.., has_ended) {
            for done in done {
                // The caller may have stopped waiting.
                let _ = done.send(aborted);
            }
        }
    }
}

/// Removes all other orders to abort the same commands from the list, and returns their senders.
fn take_equal_aborts(orders: &mut VecDeque<Order>, which: &TaskFilter) -> Vec<oneshot::Sender<u32>> {
    let mut done = Vec::new();
    for order in std::mem::take(orders) {
        match order {
            Order::Abort(other, other_done) if other == *which => done.push(other_done),
            other => orders.push_back(other),
        }
    }
    done
}

impl Outcome {
    /// The outcome of a command that succeeded.
    pub const fn good(tag: u16, moved: u32) -> Self {
        Self {
            tag,
            status: Status::Good,
            sense: Sense::NONE,
            moved,
            filled: moved,
            overrun: None,
            aborted: false,
        }
    }

    fn failed(tag: u16, failure: Failure) -> Self {
        let good = Self::good(tag, 0);
        match failure {
            Failure::Sense(sense) => Self { status: Status::CheckCondition, sense, ..good },
            Failure::Conflict => Self { status: Status::ReservationConflict, ..good },
            Failure::Full => Self { status: Status::TaskSetFull, ..good },
            Failure::Overrun(bytes) => {
                let sense = Sense::in_cdb(0);
                Self { status: Status::CheckCondition, sense, overrun: Some(bytes), ..good }
            }
        }
    }
}

/// The access of a command to the disk, for the check against reservations.
#[inline]
const fn access_of(command: &Command) -> Access {
    match command {
        Command::Read(_) | Command::Verify { .. } | Command::GetLbaStatus { .. } => Access::Read,
        Command::Write(_)
        | Command::CompareAndWrite(_)
        | Command::WriteSame { .. }
        | Command::Unmap { .. }
        | Command::SynchronizeCache { .. }
        | Command::ModeSense { .. }
        | Command::ModeSelect { .. }
        | Command::StartStop { start: false, .. } => Access::Change,
        _ => Access::None,
    }
}

impl Drop for UnitChannel {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        assert_eq!(self.in_flight(), 0, "{:?} is closed with commands in flight", self.lun());
        self.cells.remove(self.lun().serial(), &self.cell);
        self.lun().channel_closed(&self.reactor);
    }
}

#[cfg(test)]
mod tests;
