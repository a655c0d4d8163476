//! The admin queue pair: a [`QueuePair`] with a page of data for each command, and a deadline for each. NVMe 2.0 §3.3. Control
//! context.

use std::sync::Arc;

use aryk_dma::GuestArea;
use aryk_pci::Function;

use crate::admin::{Command, DATA_MAX, Data};
use crate::controller::event::AdminAnswer;
use crate::data::{Piece, SglSupport};
use crate::memory::{DmaMemory, MemoryError};
use crate::queue::{DmaEnded, Doorbells, Fate, Layout, QueueError, QueuePair, Restart, Timeouts};

/// Entries of both admin queues.
const ENTRIES: u32 = 64;
/// Commands in flight.
const DEPTH: u16 = 63;

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
}

/// The admin queue pair.
#[derive(Debug)]
pub(super) struct AdminQueue {
    pair: QueuePair,
    queues: DmaMemory,
    pages: DmaMemory,
    data: GuestArea,
    /// By token, which is also the number of the page.
    pending: Vec<Option<Pending>>,
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
            list: 64,
            // Deadlines are by command here.
            timeouts: Timeouts { command: u64::MAX, grace: 0 },
        };
        let queues = DmaMemory::new(function, layout.len(), page)?;
        let all = u64::from(DEPTH) * DATA_MAX as u64;
        let pages = DmaMemory::new(function, all, page)?;
        let data = pages.part(0, all).expect("the memory has this length");
        let pair = QueuePair::new(layout, &queues, doorbells).expect("the memory has the layout's length");
        Ok(Self { pair, queues, pages, data, pending: (0..DEPTH).map(|_| None).collect() })
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

    /// Sends a command; `false` if there is no free slot, or the command has more data than [`DATA_MAX`].
    pub(super) fn submit(&mut self, command: &Command, waiter: Waiter, now: u64, deadline: u64) -> bool {
        let Some(token) = self.pending.iter().position(Option::is_none) else { return false };
        let start = token * DATA_MAX;
        let (len, reads) = match &command.data {
            Data::None => (0, 0),
            Data::FromController(len) => (*len, *len),
            Data::ToController(bytes) => (bytes.len(), 0),
        };
        if len > DATA_MAX {
            return false;
        }
        match &command.data {
            Data::ToController(bytes) => self.data.write_bytes(start, bytes),
            // What the controller does not write reads as zeroes, not as an earlier answer.
            _ => self.data.write_bytes(start, &[0; DATA_MAX][..len]),
        }
        let piece = [Piece { iova: self.pages.iova() + start as u64, len: len as u32 }];
        let data = if len == 0 { &piece[..0] } else { &piece };
        if self.pair.submit(command.entry, data, token as u64, now).is_err() {
            return false;
        }
        self.pair.flush();
        self.pending[token] = Some(Pending { waiter, reads, deadline });
        true
    }

    /// Takes all completions, those before an impossible one too.
    pub(super) fn reap(&mut self) -> (Vec<(Waiter, AdminAnswer)>, Result<(), QueueError>) {
        let mut answers = Vec::new();
        let Self { pair, pending, data, .. } = self;
        let outcome = pair.reap(DEPTH, |completed| {
            let token = completed.token as usize;
            let ended = pending[token].take().expect("the pair completes a command once");
            let mut bytes = vec![0; ended.reads];
            data.read_bytes(token * DATA_MAX, &mut bytes);
            let answer = AdminAnswer { status: completed.status, result: completed.result, data: bytes };
            answers.push((ended.waiter, answer));
        });
        (answers, outcome.map(drop))
    }

    /// A command whose deadline has passed, if there is one.
    pub(super) fn late(&self, now: u64) -> Option<Waiter> {
        self.pending.iter().flatten().find(|pending| pending.deadline <= now).map(|pending| pending.waiter)
    }

    /// Ends all commands, after the end of DMA, and empties the queues for the next start. Returns the numbers of the owner's
    /// commands.
    pub(super) fn rewind(&mut self, controller: u64, doorbells: &Doorbells, now: u64) -> Vec<u64> {
        self.pair.rewind(DmaEnded { qid: 0, controller }, |_| Fate::Fail);
        self.pair.resume(Restart { qid: 0, controller, doorbells: doorbells.clone() }, now);
        let waiters = self.pending.iter_mut().filter_map(Option::take);
        let number = |pending: Pending| match pending.waiter {
            Waiter::Owner(id) => Some(id),
            _ => None,
        };
        waiters.filter_map(number).collect()
    }
}
