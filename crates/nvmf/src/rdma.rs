//! An RDMA connection: its messages and its buffers. Context: that of its owner, at first control, then a reactor for an I/O
//! queue.
//!
//! A message is received to a capsule: a small buffer for the command, and one of the connection's [`Pool`] for the data behind
//! it, which the command then has. All buffers are the connection's own, in memory that only its queue pair can access: what a
//! host does, its connection alone has to bear, and the memory is free for other uses only when the queue pair is destroyed.
//!
//! The exception: if the receives are shared ([`Receives::Shared`]), a message is copied when its completion is taken, and its
//! receive is posted again in the same turn. A host that sends more commands than its queue has entries, and so takes the
//! receives of others, loses its connection.

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
/// Those of an I/O queue that shares its receives, and the most of the smallest size: messages do not arrive in them.
const SHARING_IO_BUFFERS: (usize, [usize; 2]) = (64, [8, 4]);
/// Bytes of a place in a completion queue, as far as devices are known.
const COMPLETION_LEN: u64 = 64;
/// Bytes of a message, at most.
pub(crate) const MESSAGE_MAX: u32 = COMMAND_LEN as u32 + DATA_MAX;

/// What has happened.
pub(crate) enum Event {
    /// A command has arrived, with `data_len` bytes of data in this buffer, if there is any.
    Command { slot: SlotId, entry: SubmissionEntry, data_len: u32, data: Option<Taken> },
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
    /// There are more commands than the queue has entries.
    #[error("the host has sent more commands than its queue has entries")]
    TooMany,
    /// The device has failed.
    #[error(transparent)]
    Device(#[from] CallError),
}

/// A place for a message.
struct Capsule {
    command: Buffer,
    /// `Some` while it is posted.
    data: Option<Taken>,
}

/// The receives of a connection.
enum Receives {
    /// In capsules of the connection.
    Own {
        capsules: Vec<Capsule>,
        /// Capsules that are not posted.
        idle: Vec<u32>,
    },
    /// In places that all I/O queues of the device share.
    Shared,
}

/// A message that has arrived.
struct Message {
    command: [u8; COMMAND_LEN],
    len: u32,
    data: Option<Taken>,
}

/// A connection. Its drop ends it: buffers that requests still have are kept until its queue pair is destroyed.
pub(crate) struct Wire {
    /// `Some` until it is dropped.
    endpoint: Option<Endpoint>,
    queue: Queue,
    receives: Receives,
    /// By slot, the buffers whose data is being read or written.
    transfers: Vec<Option<Taken>>,
    /// Messages that were not taken.
    arrived: VecDeque<Message>,
    completions: Vec<Completion>,
    /// Completions before this one were taken.
    taken: usize,
}

/// A connection's role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Admin,
    Io,
    /// An I/O queue. The queues of a device share this many receives.
    SharingIo(u32),
}

/// The sizes of the buffers of a connection with so many entries.
fn buffers(entries: u16, role: Role) -> Vec<usize> {
    let entries = usize::from(entries);
    let (capsules, small, larger) = match role {
        Role::Admin => (entries, 2 * entries, ADMIN_BUFFERS),
        Role::Io => (entries, 2 * entries, IO_BUFFERS),
        Role::SharingIo(_) => (0, SHARING_IO_BUFFERS.0.min(entries), SHARING_IO_BUFFERS.1),
    };
    std::iter::repeat_n(COMMAND_LEN, capsules).chain(Pool::sizes(small, larger)).collect()
}

/// What the endpoint of a connection has, but for the receives that it shares.
pub(crate) fn setup(entries: u16, role: Role, rejection: &[u8]) -> Setup {
    let receives = entries.into();
    Setup {
        receives: (receives, 2),
        shared_receives: None,
        // A slot has a write and a send, or a read; there are twice as many slots as entries.
        sends: (4 * receives, 1),
        buffers: buffers(entries, role),
        shared: 0,
        domain: None,
        rejection: rejection.to_vec(),
    }
}

/// Bytes of the memory that an endpoint has.
pub(crate) fn memory(setup: &Setup, role: Role) -> u64 {
    let buffers: u64 = setup.buffers.iter().map(|&len| len as u64).sum();
    match role {
        // Its completion queue has room for all receives.
        Role::SharingIo(receives) => buffers + u64::from(receives) * COMPLETION_LEN,
        Role::Admin | Role::Io => buffers,
    }
}

impl Wire {
    /// A connection of a host that has up to `entries` commands at the same time, and the buffers of its pool. `buffers` are
    /// those of [`setup`].
    pub fn new(endpoint: Endpoint, mut buffers: Vec<Buffer>, entries: u16) -> (Self, Vec<Buffer>) {
        let (receives, pool) = match endpoint.shares_receives() {
            true => (Receives::Shared, buffers),
            false => {
                let pool = buffers.split_off(entries.into());
                let capsules = buffers.into_iter().map(|command| Capsule { command, data: None }).collect();
                (Receives::Own { capsules, idle: (0..entries.into()).rev().collect() }, pool)
            }
        };
        let queue = Queue::new(entries);
        let wire = Self {
            endpoint: Some(endpoint),
            receives,
            transfers: (0..queue.slots()).map(|_| None).collect(),
            queue,
            arrived: VecDeque::with_capacity(entries.into()),
            completions: Vec::new(),
            taken: 0,
        };
        (wire, pool)
    }

    /// Posts what is to be received, and all that was requested since the last call.
    pub fn flush(&mut self, pool: &Pool) -> Result<(), Lost> {
        let Self { endpoint, queue, receives, arrived, .. } = self;
        let endpoint = endpoint.as_mut().expect("present until dropped");
        if let Receives::Own { capsules, idle } = receives {
            let wanted = usize::from(queue.receives()).saturating_sub(arrived.len());
            while capsules.len() - idle.len() < wanted
                && let Some(&id) = idle.last()
                && let Some(mut data) = pool.take_small()
            {
                idle.pop();
                let capsule = &mut capsules[id as usize];
                let pieces = [capsule.command.lend(), data.buffer.lend().first(DATA_MAX)];
                endpoint.receive(id, &pieces);
                capsule.data = Some(data);
            }
        }
        Ok(endpoint.flush()?)
    }

    /// Takes completions, some at a time. Returns whether there may be more.
    pub fn poll(&mut self) -> Result<bool, Lost> {
        let Self { endpoint, completions, .. } = self;
        Ok(endpoint.as_mut().expect("present until dropped").poll(completions)?)
    }

    fn endpoint(&mut self) -> &mut Endpoint {
        self.endpoint.as_mut().expect("present until dropped")
    }

    /// The next of the events that [`Wire::poll`] has found. Data that arrives in shared places comes to buffers of the pool.
    pub fn next(&mut self, pool: &Pool) -> Result<Option<Event>, Lost> {
        if let Some(done) = self.next_done(pool)? {
            return Ok(Some(done));
        }
        if !self.queue.has_room() {
            return Ok(None);
        }
        let Some(Message { command, len, data }) = self.arrived.pop_front() else { return Ok(None) };
        let message = &command[..COMMAND_LEN.min(len as usize)];
        let (slot, entry) = self.queue.receive(message).map_err(|_| Lost::TooShort)?;
        Ok(Some(Event::Command { slot, entry, data_len: len - COMMAND_LEN as u32, data }))
    }

    /// As [`Wire::next`], without commands, which stay.
    pub fn next_done(&mut self, pool: &Pool) -> Result<Option<Event>, Lost> {
        loop {
            let Some(&Completion { kind, id, result }) = self.completions.get(self.taken) else {
                self.completions.clear();
                self.taken = 0;
                return Ok(None);
            };
            self.taken += 1;
            let len = match result {
                Ok(len) => len,
                Err(status) => {
                    self.give_back(kind, id);
                    return Err(match self.completions[self.taken - 1].is_flushed() {
                        true => Lost::Ended,
                        false => Lost::Failed(kind, status),
                    });
                }
            };
            match kind {
                Kind::Receive => self.arrive(id, len, pool)?,
                Kind::Read => {
                    let slot = SlotId(id as u16);
                    self.queue.has_read(slot);
                    let data = self.end_transfer(slot).expect("a read has a buffer");
                    return Ok(Some(Event::Read { slot, data }));
                }
                // They are reported only if they have failed.
                Kind::Write | Kind::End => {}
                Kind::Send => {
                    let slot = SlotId(id as u16);
                    self.queue.sent(slot);
                    return Ok(Some(Event::Sent { slot, data: self.end_transfer(slot) }));
                }
            }
        }
    }

    /// Takes a message from where it has arrived.
    fn arrive(&mut self, id: u32, len: u32, pool: &Pool) -> Result<(), Lost> {
        let message = match &mut self.receives {
            Receives::Own { capsules, idle } => {
                let Capsule { command, data } = &mut capsules[id as usize];
                command.reclaim();
                let mut data = data.take().expect("it was posted with it");
                data.buffer.reclaim();
                idle.push(id);
                Message { command: copy_of(command.bytes()), len, data: Some(data) }
            }
            Receives::Shared => {
                let has_room = self.arrived.len() < self.queue.receives().into();
                let endpoint = self.endpoint.as_mut().expect("present until dropped");
                let place = endpoint.message(id, len);
                let mut command = [0; COMMAND_LEN];
                let (of_command, of_data) =
                    (len.min(COMMAND_LEN as u32), len.saturating_sub(COMMAND_LEN as u32));
                place.read(0, &mut command[..of_command as usize]);
                let data = (of_data > 0 && has_room).then(|| {
                    let mut data = pool.take_for_capsule(of_data as usize);
                    place.read(of_command, &mut data.buffer.bytes_mut()[..of_data as usize]);
                    data
                });
                endpoint.receive_again(id);
                if !has_room {
                    return Err(Lost::TooMany);
                }
                Message { command, len, data }
            }
        };
        self.arrived.push_back(message);
        Ok(())
    }

    /// Whether the receives are shared.
    pub const fn shares_receives(&self) -> bool {
        matches!(self.receives, Receives::Shared)
    }

    /// Gives the shared receives back that a connection has taken which takes no commands any more. Returns whether there may be
    /// more of them.
    pub fn return_receives(&mut self) -> Result<bool, Lost> {
        let may_have_more = self.poll()?;
        self.drop_completions();
        self.endpoint().flush_receives()?;
        Ok(may_have_more)
    }

    /// Drops the completions that were not taken, but for the shared receives among them, which are given back.
    fn drop_completions(&mut self) {
        while let Some(&Completion { kind, id, .. }) = self.completions.get(self.taken) {
            self.taken += 1;
            self.give_back(kind, id);
        }
        self.completions.clear();
        self.taken = 0;
    }

    /// Gives the receive back whose completion it was, if it is shared.
    fn give_back(&mut self, kind: Kind, id: u32) {
        if kind == Kind::Receive && self.shares_receives() {
            self.endpoint().receive_again(id);
        }
    }

    fn end_transfer(&mut self, slot: SlotId) -> Option<Taken> {
        let mut data = self.transfers[usize::from(slot.0)].take()?;
        if data.buffer.is_lent() {
            data.buffer.reclaim();
        }
        Some(data)
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
        self.drop_completions();
        let capsules = match std::mem::replace(&mut self.receives, Receives::Shared) {
            Receives::Own { capsules, .. } => capsules,
            Receives::Shared => Vec::new(),
        };
        let of_capsules = capsules
            .into_iter()
            .flat_map(|capsule| std::iter::once(capsule.command).chain(capsule.data.map(|data| data.buffer)));
        let of_transfers = self.transfers.drain(..).flatten().map(|data| data.buffer);
        let lent = of_capsules.chain(of_transfers).filter(Buffer::is_lent).collect();
        if let Some(endpoint) = self.endpoint.take() {
            drop(endpoint.end(lent));
        }
    }
}

/// The bytes of a command.
fn copy_of(bytes: &[u8]) -> [u8; COMMAND_LEN] {
    bytes.try_into().expect("a buffer for a command")
}

fn remote(region: Region) -> Remote {
    Remote { address: region.address, key: region.key }
}
