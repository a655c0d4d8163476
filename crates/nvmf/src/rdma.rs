//! An RDMA connection: its messages and its buffers. Context: that of its owner, at first control, then a reactor for an I/O
//! queue.
//!
//! A message is received to a capsule: a small buffer for the command, and one of the connection's [`Pool`] for the data behind
//! it, which the command then has. All buffers are the connection's own, in memory that only its queue pair can access: what a
//! host does, its connection alone has to bear, and the memory is free for other uses only when the queue pair is destroyed.

use crate::pool::{Pool, SMALL, Taken};
use aryk_dma::Buffer;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::Status;
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::rdma::{Queue, Region, Reply};
use aryk_rdma::{CallError, Completion, Endpoint, Kind, Remote, Setup};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use zerocopy::IntoBytes;

/// Bytes of a command.
const COMMAND_LEN: usize = size_of::<SubmissionEntry>();
/// Bytes of data that a message may have behind its command.
const DATA_MAX: u32 = crate::address::Transport::Rdma.in_capsule_max();
const _: () =
    assert!(2 * DATA_MAX as usize <= SMALL, "the data of two halves of a fused operation fits a buffer");
/// Buffers of each size of the pool: an admin queue executes one command at a time.
const ADMIN_BUFFERS: [usize; 2] = [0, 1];
const IO_BUFFERS: [usize; 2] = [16, 8];

/// What has happened.
pub(crate) enum Event {
    /// A command has arrived, with `data_len` bytes of data in this buffer.
    Command { slot: SlotId, entry: SubmissionEntry, data_len: u32, data: Taken },
    /// The data of a command has been read to this buffer.
    Read { slot: SlotId, data: Taken },
    /// The completion of a command has left, and so has the data of this buffer.
    Sent { slot: SlotId, data: Option<Taken> },
}

/// Why the connection cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Lost {
    /// The host has ended it, or it has been ended here.
    #[error("the connection has ended")]
    Ended,
    /// The host does not answer, or its descriptors name memory that is not the controller's to access.
    #[error("a {0:?} request has failed with ibv_wc_status {1}")]
    Failed(Kind, u32),
    /// A message is no command.
    #[error("a message is shorter than a command")]
    TooShort,
    /// The device has failed.
    #[error(transparent)]
    Device(#[from] CallError),
}

/// A place for a message.
struct Capsule {
    command: Buffer,
    /// `None` while a command has it.
    data: Option<Taken>,
}

/// A connection. Its drop ends it: buffers that requests still have are kept until its queue pair is destroyed.
pub(crate) struct Wire {
    /// `Some` until it is dropped.
    endpoint: Option<Endpoint>,
    queue: Queue,
    capsules: Vec<Capsule>,
    /// By slot, the buffers whose data is being read or written.
    transfers: Vec<Option<Taken>>,
    /// Capsules that are neither posted nor have arrived.
    idle: Vec<u32>,
    posted: u16,
    /// Capsules that have arrived and were not taken, with their lengths.
    arrived: VecDeque<(u32, u32)>,
    completions: Vec<Completion>,
    /// Completions before this one were taken.
    taken: usize,
}

/// The sizes of the buffers of a connection with so many entries.
fn buffers(entries: u16, is_admin: bool) -> Vec<usize> {
    let entries = usize::from(entries);
    let pool = Pool::sizes(2 * entries, if is_admin { ADMIN_BUFFERS } else { IO_BUFFERS });
    std::iter::repeat_n(COMMAND_LEN, entries).chain(pool).collect()
}

/// What the endpoint of a connection has.
pub(crate) fn setup(entries: u16, is_admin: bool, rejection: &[u8]) -> Setup {
    let receives = entries.into();
    Setup {
        receives: (receives, 2),
        // A slot has a write and a send, or a read; there are twice as many slots as entries.
        sends: (4 * receives, 1),
        buffers: buffers(entries, is_admin),
        shared: 0,
        domain: None,
        rejection: rejection.to_vec(),
    }
}

/// Bytes of the memory that an endpoint has.
pub(crate) fn memory(setup: &Setup) -> u64 {
    setup.buffers.iter().map(|&len| len as u64).sum()
}

impl Wire {
    /// A connection of a host that has up to `entries` commands at the same time, and the pool of its other buffers. `buffers`
    /// are those of [`setup`].
    pub fn new(endpoint: Endpoint, mut buffers: Vec<Buffer>, entries: u16) -> (Self, Pool) {
        let pool = Pool::of(buffers.split_off(entries.into()));
        let capsules = buffers.into_iter().map(|command| Capsule { command, data: None }).collect();
        let queue = Queue::new(entries);
        let wire = Self {
            endpoint: Some(endpoint),
            capsules,
            transfers: (0..queue.slots()).map(|_| None).collect(),
            queue,
            idle: (0..entries.into()).rev().collect(),
            posted: 0,
            arrived: VecDeque::with_capacity(entries.into()),
            completions: Vec::new(),
            taken: 0,
        };
        (wire, pool)
    }

    /// Posts what is to be received, and all that was requested since the last call.
    pub fn flush(&mut self, pool: &Pool) -> Result<(), Lost> {
        while self.posted < self.queue.receives()
            && let Some(id) = self.idle.pop()
        {
            let Some(mut data) = pool.take_small() else {
                // Completions that have not left have all buffers.
                self.idle.push(id);
                break;
            };
            let command = &mut self.capsules[id as usize].command;
            let pieces = [command.lend(), data.buffer.lend().first(DATA_MAX)];
            self.endpoint().receive(id, &pieces);
            self.capsules[id as usize].data = Some(data);
            self.posted += 1;
        }
        Ok(self.endpoint().flush()?)
    }

    /// Takes completions, some at a time. Returns whether there may be more.
    pub fn poll(&mut self) -> Result<bool, Lost> {
        let Self { endpoint, completions, .. } = self;
        Ok(endpoint.as_mut().expect("present until dropped").poll(completions)?)
    }

    fn endpoint(&mut self) -> &mut Endpoint {
        self.endpoint.as_mut().expect("present until dropped")
    }

    /// The next of the events that [`Wire::poll`] has found.
    pub fn next(&mut self) -> Result<Option<Event>, Lost> {
        if let Some(done) = self.next_done()? {
            return Ok(Some(done));
        }
        match self.arrived.front() {
            Some(&(id, len)) if self.queue.has_room() => {
                self.arrived.pop_front();
                self.command(id, len).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// As [`Wire::next`], without commands, which stay.
    pub fn next_done(&mut self) -> Result<Option<Event>, Lost> {
        loop {
            let Some(&Completion { kind, id, result }) = self.completions.get(self.taken) else {
                self.completions.clear();
                self.taken = 0;
                return Ok(None);
            };
            self.taken += 1;
            let len = match result {
                Ok(len) => len,
                Err(_) if self.completions[self.taken - 1].is_flushed() => return Err(Lost::Ended),
                Err(status) => return Err(Lost::Failed(kind, status)),
            };
            match kind {
                Kind::Receive => {
                    let capsule = &mut self.capsules[id as usize];
                    capsule.command.reclaim();
                    if let Some(data) = &mut capsule.data {
                        data.buffer.reclaim();
                    }
                    self.posted -= 1;
                    self.arrived.push_back((id, len));
                }
                Kind::Read => {
                    let slot = SlotId(id as u16);
                    self.queue.has_read(slot);
                    let data = self.end_transfer(slot).expect("a read has a buffer");
                    return Ok(Some(Event::Read { slot, data }));
                }
                // It is reported only if it has failed.
                Kind::Write => {}
                Kind::Send => {
                    let slot = SlotId(id as u16);
                    self.queue.sent(slot);
                    return Ok(Some(Event::Sent { slot, data: self.end_transfer(slot) }));
                }
            }
        }
    }

    fn end_transfer(&mut self, slot: SlotId) -> Option<Taken> {
        let mut data = self.transfers[usize::from(slot.0)].take()?;
        if data.buffer.is_lent() {
            data.buffer.reclaim();
        }
        Some(data)
    }

    fn command(&mut self, id: u32, len: u32) -> Result<Event, Lost> {
        let capsule = &mut self.capsules[id as usize];
        let message = &capsule.command.bytes()[..COMMAND_LEN.min(len as usize)];
        let (slot, entry) = self.queue.receive(message).map_err(|_| Lost::TooShort)?;
        let data = capsule.data.take().expect("it was posted with it");
        self.idle.push(id);
        Ok(Event::Command { slot, entry, data_len: len - COMMAND_LEN as u32, data })
    }

    /// Reads the `len` bytes of a command's data to this buffer, which [`Event::Read`] returns.
    pub fn request_data(&mut self, id: SlotId, mut data: Taken, len: u32) {
        let region = self.queue.request_data(id, len);
        self.endpoint().read(id.0.into(), &data.buffer.lend().first(len), remote(region));
        self.transfers[usize::from(id.0)] = Some(data);
    }

    /// Completes a command.
    pub fn complete(&mut self, id: SlotId, status: Status, result: u64) {
        let reply = self.queue.complete(id, status, result);
        self.send(id, &reply);
    }

    /// Completes a command with success, after the `len` bytes of data of this buffer, which [`Event::Sent`] returns. If the host
    /// has no room for them, the command fails.
    pub fn complete_with_data(&mut self, id: SlotId, mut data: Taken, len: u32, result: u64) {
        let (region, reply) = self.queue.complete_with_data(id, len, result);
        if let Some(region) = region {
            self.endpoint().write(&data.buffer.lend().first(len), remote(region));
        }
        self.transfers[usize::from(id.0)] = Some(data);
        self.send(id, &reply);
    }

    fn send(&mut self, id: SlotId, reply: &Reply) {
        let endpoint = self.endpoint();
        let invalidates = reply.invalidates.filter(|_| endpoint.can_invalidate());
        endpoint.send(id.0.into(), reply.entry.as_bytes(), invalidates);
    }

    /// Drops a command, which gets no completion.
    pub fn drop_command(&mut self, id: SlotId) {
        self.queue.drop_command(id);
    }

    /// Gives the queue its number of entries, as [`Queue::connect`].
    pub fn connect(&mut self, entries: u16, disables_flow_control: bool) {
        self.queue.connect(entries, disables_flow_control);
    }

    /// The number of commands that the host can have at the same time.
    pub const fn entries(&self) -> u16 {
        self.queue.entries()
    }

    /// The number of slots.
    pub const fn slots(&self) -> usize {
        self.queue.slots()
    }

    /// Completions that have not left.
    pub fn unsent(&self) -> usize {
        self.queue.unsent()
    }

    /// Has the descriptor [`Wire::fd`] report the next completion. Returns whether there is something to do before.
    pub fn arm(&mut self) -> Result<bool, Lost> {
        self.endpoint().arm()?;
        self.poll()?;
        Ok(!self.completions.is_empty())
    }

    /// The descriptor that becomes readable at a completion.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.endpoint.as_ref().expect("present until dropped").fd()
    }

    /// Accepts the connection, with data for the host.
    pub async fn accept(&self, private_data: &[u8]) -> Result<(), Lost> {
        Ok(self.endpoint.as_ref().expect("present until dropped").accept(private_data).await?)
    }

    /// Has the connection ended: the host sees that at once.
    pub fn disconnect(&self) {
        self.endpoint.as_ref().expect("present until dropped").disconnect();
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        let of_capsules = self
            .capsules
            .drain(..)
            .flat_map(|capsule| std::iter::once(capsule.command).chain(capsule.data.map(|data| data.buffer)));
        let of_transfers = self.transfers.drain(..).flatten().map(|data| data.buffer);
        let lent = of_capsules.chain(of_transfers).filter(Buffer::is_lent).collect();
        if let Some(endpoint) = self.endpoint.take() {
            drop(endpoint.end(lent));
        }
    }
}

fn remote(region: Region) -> Remote {
    Remote { address: region.address, key: region.key }
}
