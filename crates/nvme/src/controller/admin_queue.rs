//! The admin queue pair: a [`QueuePair`] with 4 KiB of data for each command, a larger buffer for one command at a time, and a
//! deadline for each command. NVMe 2.0 §3.3. Control context.

use std::sync::Arc;

use aryk_dma::GuestArea;
use aryk_pci::Function;

use crate::admin::{Command, DATA_MAX, Data};
use crate::controller::event::AdminAnswer;
use crate::data::{Piece, SglSupport, list_bytes};
use crate::inject::Injections;
use crate::memory::{DmaMemory, MemoryError};
use crate::queue::{DmaEnded, Doorbells, Fate, Layout, QueueError, QueuePair, Restart, Timeouts};
use crate::spec::status::Status;

/// Entries of both admin queues.
const ENTRIES: u32 = 64;
/// Commands in flight.
const DEPTH: u16 = 63;
/// Bytes of data that each command has room for; all structures of the specification fit.
const SMALL: usize = 4096;

/// The receiver of the answer to an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    /// The current step of the running job.
    Step,
    /// The owner of the controller, by the command's number.
    Owner(u64),
    /// An asynchronous event request.
    AsyncEvent,
    /// An Abort of this command, sent at `since`.
    Abort { sqid: u16, cid: u16, since: u64 },
    /// Keep Alive.
    KeepAlive,
}

#[derive(Debug)]
struct Pending {
    waiter: Waiter,
    /// Bytes that the controller writes.
    reads: usize,
    deadline: u64,
    /// The command uses the large buffer.
    is_large: bool,
    answer: Answer,
}

/// Where the answer to a command comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Controller,
    /// The controller's answer gets this status.
    Replaced(Status),
    /// The controller does not have the command, which is answered by this status at this time.
    Withheld(Status, u64),
}

/// Memory for data, of commands by their tokens or of one command.
#[derive(Debug)]
struct Buffer {
    memory: DmaMemory,
    area: GuestArea,
}

impl Buffer {
    fn new(function: &Arc<dyn Function>, len: u64, page: u64) -> Result<Self, MemoryError> {
        let memory = DmaMemory::new(function, len, page)?;
        let area = memory.part(0, len).expect("the memory has this length");
        Ok(Self { memory, area })
    }
}

/// The admin queue pair.
#[derive(Debug)]
pub(super) struct AdminQueue {
    pair: QueuePair,
    queues: DmaMemory,
    small: Buffer,
    /// [`DATA_MAX`] bytes, once a command had more than [`SMALL`]. One command uses it at a time.
    large: Option<Buffer>,
    /// By token, which is also the place in the small buffer.
    pending: Vec<Option<Pending>>,
    injections: Injections,
}

impl AdminQueue {
    pub(super) fn new(
        function: &Arc<dyn Function>,
        page: u64,
        controller: u64,
        doorbells: &Doorbells,
    ) -> Result<Self, MemoryError> {
        let layout = Layout {
            qid: 0,
            controller,
            entries: ENTRIES,
            depth: DEPTH,
            page,
            sgl: SglSupport::None,
            list: list_bytes(DATA_MAX as u64, 1, SglSupport::None, page),
            // Deadlines are by command here.
            timeouts: Timeouts { command: u64::MAX, grace: 0 },
        };
        let queues = DmaMemory::new(function, layout.len(), page)?;
        let small = Buffer::new(function, u64::from(DEPTH) * SMALL as u64, page)?;
        let pair = QueuePair::new(layout, &queues, doorbells).expect("the memory has the layout's length");
        let (pending, injections) = ((0..DEPTH).map(|_| None).collect(), Injections::default());
        Ok(Self { pair, queues, small, large: None, pending, injections })
    }

    /// Injects errors into the commands that are sent from now on.
    pub(super) fn set_injections(&mut self, injections: Injections) {
        self.injections = injections;
    }

    /// The values of AQA, ASQ and ACQ.
    pub(super) const fn registers(&self) -> (u32, u64, u64) {
        let [sq, cq] = self.pair.queues(self.queues.iova());
        ((ENTRIES - 1) | (ENTRIES - 1) << 16, sq, cq)
    }

    /// Commands in flight of this kind.
    pub(super) fn count(&self, is_counted: impl Fn(Waiter) -> bool) -> usize {
        self.pending.iter().flatten().filter(|pending| is_counted(pending.waiter)).count()
    }

    /// Allocates the memory that a command with `len` bytes of data needs, if there is none yet.
    pub(super) fn prepare(
        &mut self,
        len: usize,
        function: &Arc<dyn Function>,
        page: u64,
    ) -> Result<(), MemoryError> {
        if len > SMALL && self.large.is_none() {
            self.large = Some(Buffer::new(function, DATA_MAX as u64, page)?);
        }
        Ok(())
    }

    /// Sends a command; `false` if there is no free slot, or no room for its data: [`AdminQueue::prepare`] was not called, or
    /// another command uses the large buffer.
    pub(super) fn submit(&mut self, command: &Command, waiter: Waiter, now: u64, deadline: u64) -> bool {
        let Some(token) = self.pending.iter().position(Option::is_none) else { return false };
        let (len, reads) = match &command.data {
            Data::None => (0, 0),
            Data::FromController(len) => (*len, *len),
            Data::ToController(bytes) => (bytes.len(), 0),
        };
        let is_large = len > SMALL;
        let is_taken = is_large && self.pending.iter().flatten().any(|pending| pending.is_large);
        if len > DATA_MAX || is_taken {
            return false;
        }
        let place = place(&self.small, self.large.as_ref(), token, is_large);
        let Some((buffer, start)) = place else { return false };
        let opcode = command.entry.opcode();
        if let Some((status, after)) = self.injections.withhold(opcode) {
            let answer = Answer::Withheld(status, now.saturating_add(after));
            self.pending[token] = Some(Pending { waiter, reads, deadline, is_large, answer });
            return true;
        }
        match &command.data {
            Data::ToController(bytes) => buffer.area.write_bytes(start, bytes),
            // What the controller does not write reads as zeroes, not as an earlier answer.
            _ => buffer.area.write_bytes(start, &vec![0; len]),
        }
        let piece = [Piece { iova: buffer.memory.iova() + start as u64, len: len as u32 }];
        let data = if len == 0 { &piece[..0] } else { &piece };
        if self.pair.submit(command.entry, data, token as u64, now).is_err() {
            return false;
        }
        self.pair.flush();
        let answer = self.injections.replace(opcode).map_or(Answer::Controller, Answer::Replaced);
        self.pending[token] = Some(Pending { waiter, reads, deadline, is_large, answer });
        true
    }

    /// Moves all deadlines, after a time in which the controller did not process commands.
    pub(super) fn postpone(&mut self, by: u64) {
        for pending in self.pending.iter_mut().flatten() {
            pending.deadline = pending.deadline.saturating_add(by);
        }
    }

    /// Takes all completions, those before an impossible one too.
    pub(super) fn reap(&mut self, now: u64) -> (Vec<(Waiter, AdminAnswer)>, Result<(), QueueError>) {
        let mut completions = Vec::new();
        let outcome = self.pair.reap(DEPTH, |completed| completions.push(completed));
        let Self { small, large, pending, .. } = self;
        let answers = completions.into_iter().map(|completed| {
            let token = completed.token as usize;
            let ended = pending[token].take().expect("the pair completes a command once");
            let mut data = vec![0; ended.reads];
            let place = place(small, large.as_ref(), token, ended.is_large);
            let (buffer, start) = place.expect("the command had its buffer");
            buffer.area.read_bytes(start, &mut data);
            let status = match ended.answer {
                Answer::Replaced(status) => status,
                Answer::Controller | Answer::Withheld(..) => completed.status,
            };
            (ended.waiter, AdminAnswer { status, result: completed.result, data })
        });
        let mut answers: Vec<_> = answers.collect();
        answers.extend(self.take_withheld(now));
        (answers, outcome.map(drop))
    }

    /// Ends the commands that an injection withholds, if their time has come.
    fn take_withheld(&mut self, now: u64) -> impl Iterator<Item = (Waiter, AdminAnswer)> {
        self.pending.iter_mut().filter_map(move |slot| {
            let Some(Pending { waiter, reads, answer: Answer::Withheld(status, at), .. }) = slot else {
                return None;
            };
            let (status, data) = (*status, vec![0; *reads]);
            let answer = (*at <= now).then_some((*waiter, AdminAnswer { status, result: 0, data }));
            *slot = slot.take().filter(|_| answer.is_none());
            answer
        })
    }

    /// A command whose deadline has passed, if there is one.
    pub(super) fn late(&self, now: u64) -> Option<Waiter> {
        self.pending.iter().flatten().find(|pending| pending.deadline <= now).map(|pending| pending.waiter)
    }

    /// Ends all commands, after the end of DMA, and empties the queues for the next start. Returns the numbers of the owner's
    /// commands.
    pub(super) fn rewind(&mut self, controller: u64, doorbells: &Doorbells, now: u64) -> Vec<u64> {
        self.pair.rewind(DmaEnded::new(0, controller), |_| Fate::Fail);
        self.pair
            .resume(Restart { qid: 0, controller, sgl: SglSupport::None, doorbells: doorbells.clone() }, now);
        let waiters = self.pending.iter_mut().filter_map(Option::take);
        let number = |pending: Pending| match pending.waiter {
            Waiter::Owner(id) => Some(id),
            _ => None,
        };
        waiters.filter_map(number).collect()
    }
}

/// The buffer of a command's data, and the offset of the data in it.
fn place<'a>(
    small: &'a Buffer,
    large: Option<&'a Buffer>,
    token: usize,
    is_large: bool,
) -> Option<(&'a Buffer, usize)> {
    if is_large { large.map(|large| (large, 0)) } else { Some((small, token * SMALL)) }
}
