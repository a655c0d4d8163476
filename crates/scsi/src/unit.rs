//! A logical unit's channel, private to its opener: commands down, outcomes up, as with [`aryk_bdev::BdevChannel`]. Reactor context.
//!
//! A command has its submitter's tag from [`UnitChannel::submit`] until its outcome is handed out: that is its place in the table (`tasks`), and the tag
//! of its requests to the disk. READ and WRITE are one request each, with the initiator's own memory; they allocate nothing. Nearly all of them are `plain`, of
//! a unit where nothing is reserved or to be told, and take a short way in and out. What takes several requests, such as UNMAP, sends one after the other
//! (`jobs`); what takes none is answered at the next poll (`answers`).

mod answers;
mod jobs;
mod reserve;
mod tasks;

pub(crate) use answers::{give, report_luns};

use crate::cdb::{Command, Transfer, decode, plain};
use crate::cell::{Cells, Command as Order, UnitCell};
use crate::reservations::{Access, Refused};
use crate::{Attention, Lun, Nexus, Sense, Status, Which};
use aryk_bdev::{BdevChannel, Completion, Io, Op, OpenError, Status as BdevStatus, Tag};
use aryk_dma::Sgl;
use aryk_reactor::{Cx, Handle, RootId};
use futures_channel::oneshot;
use jobs::Job;
use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use tasks::{GivenUp, Task, Tasks};

/// A command. Its memory stays in place until its outcome is handed out.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The submitter's: below the channel's depth, and no other command's that is in flight. It comes back with the outcome.
    pub tag: u16,
    /// The initiator's: task management knows the command by it.
    pub task: u64,
    /// The command descriptor block, of any length.
    pub cdb: &'a [u8],
    /// What the initiator gives.
    pub data_out: Sgl,
    /// Where the initiator takes.
    pub data_in: Sgl,
    /// It was submitted to a predecessor, of whom it is not known whether the command was carried out.
    pub replayed: bool,
}

/// How a command ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// The command's.
    pub tag: u16,
    /// Its status.
    pub status: Status,
    /// Why, if that is [`Status::CheckCondition`].
    pub sense: Sense,
    /// Bytes that were moved, out of the data-out list or into the data-in list.
    pub moved: u32,
    /// Bytes at the beginning of the data-in list that may have been written to, also by a command that failed. More than it has, if `moved` is what was given.
    pub filled: u32,
    /// Bytes that the command would have moved if the list had been long enough; then it did not begin.
    pub overrun: Option<u64>,
    /// It was aborted by task management: the initiator of SCSI proper gets no answer.
    pub aborted: bool,
}

/// An abortion that somebody waits for.
struct Abortion {
    /// A bit for each tag of those that have not ended, and how many they are.
    tags: Box<[u64]>,
    left: u32,
    aborted: u32,
    /// Get how many commands there were. When all receivers are gone, the abortion is forgotten.
    done: Vec<oneshot::Sender<u32>>,
}

impl Abortion {
    fn is_waited_for(&self) -> bool {
        self.done.iter().any(|done| !done.is_canceled())
    }
}

/// The channel. See the file's head.
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
    abortions: Vec<Abortion>,
    /// Commands that are loops.
    loops: u32,
    /// Bytes in a block, as a power of two.
    block_shift: u32,
}

impl fmt::Debug for UnitChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut s = f.debug_struct("UnitChannel");
        s.field("nexus", &self.nexus).field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

/// What becomes of a command: `None` if it will go on, otherwise the bytes that it has moved.
type Begun = Result<Option<u32>, Failure>;

/// Why a command fails before it begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Failure {
    Sense(Sense),
    Conflict,
    /// There are too many such.
    Full,
    /// Its list is shorter than the so many bytes that it moves.
    Overrun(u64),
}

impl From<Sense> for Failure {
    fn from(sense: Sense) -> Self {
        Self::Sense(sense)
    }
}

impl UnitChannel {
    /// A channel for the calling reactor, whose outcomes wake `root`, for commands with tags below `depth`.
    ///
    /// # Errors
    /// As the disk's channel.
    pub fn open(nexus: Arc<Nexus>, depth: u16, root: RootId, cx: &mut Cx) -> Result<Self, OpenError> {
        let lun = nexus.lun();
        let disk = nexus.open_disk(root, cx)?;
        let (cells, cell) = Cells::open(lun.serial(), nexus.number(), root, cx);
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
            abortions: Vec::new(),
            loops: 0,
            block_shift: block_size.trailing_zeros(),
            nexus,
        })
    }

    /// Whose it is.
    pub const fn nexus(&self) -> &Arc<Nexus> {
        &self.nexus
    }

    fn lun(&self) -> &Arc<Lun> {
        self.nexus.lun()
    }

    /// Commands that have been submitted and whose outcomes have not been handed out.
    pub fn in_flight(&self) -> u32 {
        self.tasks.len() + self.ready.len() as u32
    }

    /// Whether a poll would find nothing to do, unless the channel is told something ([`Cx::tell`]).
    #[inline]
    pub fn is_quiet(&self) -> bool {
        self.in_flight() == 0 && self.disk.is_quiet()
    }

    /// Whether sense data is to be sent in descriptor format.
    pub fn wants_descriptors(&self) -> bool {
        self.lun().mode().descriptors
    }

    /// Starts a command, whose outcome comes exactly once, in a later [`UnitChannel::poll`].
    // Always, so that of the two lists one can be taken while they are in registers.
    #[inline(always)]
    pub fn submit(&mut self, request: Request<'_>, cx: &mut Cx) {
        match plain(request.cdb) {
            Some((op, transfer)) if self.nexus.is_clear() => {
                let begun = self.transfer(op, transfer, &request, cx);
                if !matches!(begun, Ok(None)) {
                    self.answer(request.tag, begun, cx);
                }
            }
            // A copy, for otherwise plain ones would have to lie in memory too.
            _ => self.submit_any(Request { ..request }, cx),
        }
    }

    #[cold]
    fn submit_any(&mut self, request: Request<'_>, cx: &mut Cx) {
        let begun = self.begin(&request, cx);
        if begun != Ok(None) {
            self.answer(request.tag, begun, cx);
        }
    }

    /// Starts a command; what it has moved if it is over already.
    fn begin(&mut self, request: &Request<'_>, cx: &mut Cx) -> Begun {
        // What happened comes before what is wrong (SAM-5, section 5.14).
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

    /// Moves blocks between the disk and the initiator's memory.
    #[inline(always)]
    fn transfer(&mut self, op: Op, t: Transfer, request: &Request<'_>, cx: &mut Cx) -> Begun {
        self.check_range(t.lba, t.blocks.into())?;
        let (fua, data) = match op {
            Op::Read => (false, request.data_in),
            _ => (self.check_change()? || t.fua, request.data_out),
        };
        let data = self.data_of(data, t.blocks.into(), if op == Op::CompareAndWrite { 2 } else { 1 })?;
        if t.blocks == 0 {
            return Ok(Some(0));
        }
        let io = Io {
            tag: Tag(0),
            op,
            fua,
            may_unmap: false,
            lba: t.lba,
            blocks: t.blocks.into(),
            source: 0,
            data,
        };
        self.start(request, data.len(), None, io, cx);
        Ok(None)
    }

    /// The first bytes of a list, as many as `times` these blocks have.
    #[inline]
    fn data_of(&self, list: Sgl, blocks: u64, times: u64) -> Result<Sgl, Failure> {
        let bytes = (blocks << self.block_shift) * times;
        if bytes > list.len().into() {
            return Err(Failure::Overrun(bytes));
        }
        Ok(if bytes == list.len().into() { list } else { list.slice(0, bytes as u32) })
    }

    /// Whether blocks are within the disk, of which the first must be even if there are none.
    #[inline]
    fn check_range(&self, lba: u64, blocks: u64) -> Result<(), Sense> {
        let all = self.disk.bdev().blocks();
        if lba < all && blocks <= all - lba { Ok(()) } else { Err(Sense::OUT_OF_RANGE) }
    }

    /// Whether the disk may be changed; and if so, whether each change is to be durable at once.
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
        self.tasks.insert(tag, Task { name, lba, job, moved, op, status, given_up: GivenUp::No, runs: true });
        self.disk.submit(Io { tag: Tag(tag.into()), ..io }, cx);
    }

    #[cold]
    fn answer(&mut self, tag: u16, begun: Begun, cx: &mut Cx) {
        self.ready.push(match begun {
            Ok(moved) => Outcome::good(tag, moved.expect("the command is over")),
            Err(failure) => Outcome::failed(tag, failure),
        });
        cx.wake(self.root);
    }

    /// Gives the tags of commands that have gone well, and how many bytes they have moved, to `good`, and adds the outcomes of the others that are over to
    /// `rest`. Those that were answered without the disk are among the rest, however they went.
    #[inline]
    pub fn poll(&mut self, cx: &mut Cx, rest: &mut Vec<Outcome>, mut good: impl FnMut(u16, u32, &mut Cx)) {
        if self.cell.has_command() {
            self.obey(cx);
        }
        let mut completions = std::mem::take(&mut self.completions);
        self.disk.poll(cx, &mut completions);
        for &Completion { tag, status } in &completions {
            let tag = tag.0 as u16;
            let task = self.tasks.get(tag);
            let moved = task.moved;
            if status.is_ok() && task.job.is_none() && self.abortions.is_empty() {
                self.tasks.remove(tag);
                good(tag, moved, cx);
            } else {
                rest.extend(self.completed(tag, status, cx));
            }
        }
        completions.clear();
        self.completions = completions;
        if !self.ready.is_empty() {
            rest.append(&mut self.ready);
        }
    }

    /// Adds the outcomes of all commands that are over to `outcomes`.
    pub fn poll_all(&mut self, cx: &mut Cx, outcomes: &mut Vec<Outcome>) {
        let mut good = Vec::new();
        self.poll(cx, outcomes, |tag, moved, _| good.push(Outcome::good(tag, moved)));
        outcomes.append(&mut good);
    }

    /// A request of a command has completed; its outcome, if that was all.
    #[cold]
    fn completed(&mut self, tag: u16, status: BdevStatus, cx: &mut Cx) -> Option<Outcome> {
        let task = self.tasks.get(tag);
        task.status = task.status.or(status);
        let goes_on = task.job.is_some() && self.goes_on(tag, cx);
        (!goes_on).then(|| self.end(tag))
    }

    /// Takes a command that is over out of the table.
    fn end(&mut self, tag: u16) -> Outcome {
        let task = self.tasks.get(tag);
        self.loops -= u32::from(matches!(task.job.take().as_deref(), Some(Job::Loop(_))));
        let &mut Task { op, lba, moved, status, given_up, .. } = task;
        self.tasks.remove(tag);
        self.look_aborted(tag);
        if status.is_ok() {
            return Outcome::good(tag, moved);
        }
        // What a read that failed has moved is not known.
        let filled = if op == Op::Read { moved } else { 0 };
        match given_up {
            GivenUp::Aborted if status == BdevStatus::Aborted => {
                let aborted = true;
                return Outcome { status: Status::TaskAborted, aborted, filled, ..Outcome::good(tag, 0) };
            }
            GivenUp::Refused if status == BdevStatus::Aborted => {
                return Outcome { filled, ..Outcome::failed(tag, Failure::Conflict) };
            }
            GivenUp::No | GivenUp::Aborted | GivenUp::Refused => {}
        }
        let sense = Sense::of(status, op);
        let sense = if status == BdevStatus::Medium { sense.with_lba(lba) } else { sense };
        Outcome { filled, ..Outcome::failed(tag, Failure::Sense(sense)) }
    }

    /// Says that nobody wants the commands with those tags any more, in one look at all commands. They still have outcomes.
    pub fn abort_those(&mut self, is_meant: impl Fn(u16) -> bool, cx: &mut Cx) {
        self.give_up(GivenUp::Aborted, |tag, _| is_meant(tag), cx);
    }

    /// Says that nobody wants any command any more. They still have outcomes.
    pub fn abort_all(&mut self, cx: &mut Cx) {
        self.abort_those(|_| true, cx);
    }

    /// Has commands end soon, in one look at all; which they are, by bit, and how many. Those that wait for something elsewhere have ended: what they have begun
    /// goes on without them.
    fn give_up(
        &mut self,
        how: GivenUp,
        is_meant: impl Fn(u16, &Task) -> bool,
        cx: &mut Cx,
    ) -> (Box<[u64]>, u32, u32) {
        let (mut tags, mut left) = (vec![0; self.tasks.depth().div_ceil(64)].into_boxed_slice(), 0);
        let (mut over, mut is_news) = (Vec::new(), false);
        for (tag, task) in self.tasks.iter().filter(|(tag, task)| is_meant(*tag, task)) {
            // What has more to do does not begin it.
            let before = std::mem::replace(&mut task.given_up, how);
            if task.job.as_deref().is_some_and(Job::is_elsewhere) {
                task.status = BdevStatus::Aborted;
                over.push(tag);
            } else {
                tags[usize::from(tag) / 64] |= 1_u64 << (tag % 64);
                left += 1;
                is_news |= before == GivenUp::No;
            }
        }
        // The disk has been told of those that were given up before.
        if is_news {
            let is_among = |tag: Tag| tags[tag.0 as usize / 64] & 1 << (tag.0 % 64) != 0;
            self.disk.abort_those(is_among, cx);
        }
        let ended = over.len() as u32;
        for tag in over {
            let outcome = self.end(tag);
            self.ready.push(outcome);
            cx.wake(self.root);
        }
        (tags, left, ended)
    }

    fn obey(&mut self, cx: &mut Cx) {
        self.abortions.retain(Abortion::is_waited_for);
        let mut orders = VecDeque::from(self.cell.take_commands());
        while let Some(order) = orders.pop_front() {
            match order {
                Order::Abort(which, done) => {
                    let done = std::iter::once(done).chain(equal(&mut orders, &which)).collect();
                    self.give_up_these(GivenUp::Aborted, |task| which.has(task.name), done, cx);
                }
                Order::Refuse(changes, done) => {
                    // Those that wait elsewhere ask for their rights when it is their turn.
                    let is_meant = |task: &Task| {
                        !task.job.as_deref().is_some_and(Job::is_elsewhere)
                            && (!changes || task.op.is_change())
                    };
                    self.give_up_these(GivenUp::Refused, is_meant, vec![done], cx);
                }
                Order::Count(which, done) => {
                    let running = self.tasks.iter().filter(|(_, task)| which.has(task.name)).count();
                    // Whoever asked may have gone.
                    let _ = done.send(running as u32);
                }
                // If the command was given up, another may have its tag by now.
                Order::Over(tag, wanted, result) if wanted.strong_count() > 0 => self.over(tag, result),
                Order::Over(..) => {}
            }
        }
    }

    /// What a command has waited for elsewhere is over.
    fn over(&mut self, tag: u16, result: Result<(), Refused>) {
        let outcome = self.end(tag);
        self.ready.push(result.map_or_else(|refused| Outcome::failed(tag, refused.into()), |()| outcome));
    }

    /// Gives up commands, and says how many they were when they are over.
    fn give_up_these(
        &mut self,
        how: GivenUp,
        is_meant: impl Fn(&Task) -> bool,
        done: Vec<oneshot::Sender<u32>>,
        cx: &mut Cx,
    ) {
        let (tags, left, ended) = self.give_up(how, |_, task| is_meant(task), cx);
        self.abortions.push(Abortion { tags, left, aborted: left + ended, done });
        self.tell_aborted();
    }

    fn look_aborted(&mut self, tag: u16) {
        let (word, bit) = (usize::from(tag) / 64, 1 << (tag % 64));
        for abortion in self.abortions.iter_mut().filter(|abortion| abortion.tags[word] & bit != 0) {
            abortion.tags[word] &= !bit;
            abortion.left -= 1;
        }
        self.tell_aborted();
    }

    fn tell_aborted(&mut self) {
        let over = |abortion: &mut Abortion| abortion.left == 0 || !abortion.is_waited_for();
        for Abortion { aborted, done, .. } in self.abortions.extract_if(.., over) {
            for done in done {
                // Whoever asked may have gone.
                let _ = done.send(aborted);
            }
        }
    }
}

/// Takes all other orders to abort the same commands out of the list, and gives their senders.
fn equal(orders: &mut VecDeque<Order>, which: &Which) -> Vec<oneshot::Sender<u32>> {
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
    /// Of a command that went well.
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

/// What a command does, as reservations see it.
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
        self.cells.close(self.lun().serial(), &self.cell);
        self.lun().channel_closed(&self.reactor);
    }
}

#[cfg(test)]
mod tests;
