//! A connection of RDMA: its messages and its buffers. Context: that of its owner, at first the thread of NVMe over Fabrics, then
//! a reactor for an I/O queue.
//!
//! The target reads and writes the buffers for data, which are the connection's own, and nothing else: data is copied between
//! them and the memory of requests. So a target that accesses what no command names, or at the wrong time, harms requests to
//! itself only. What is written is copied before its command is sent, and what was read after its command has ended.
//!
//! **Invariants.** The buffers are lent from the beginning, and free for other uses only when the queue pair is destroyed: until
//! then, the target may access them at any time, and they are accessed by copies only. A command has its buffer until it has
//! ended. There are as many receives as commands, so that each completion finds one. Nothing here allocates after the first
//! commands.

use aryk_dma::{Buffer, Sgl};
use aryk_nvme::spec::entry::{CompletionEntry, SubmissionEntry};
use aryk_nvme_fabrics::Transfer;
use aryk_nvme_fabrics::rdma::{Accept, BadAccept, Ended, HostQueue, Reject, Request, Violation};
use aryk_nvme_fabrics::sgl::Sgl as Descriptor;
use aryk_rdma::{CallError, Completion, Endpoint, Kind, Manager, Setup, StartError};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use tokio::sync::OnceCell;
use zerocopy::IntoBytes;

use super::connection::Place;

/// Bytes of a capsule's command, and of a completion.
const COMMAND_LEN: usize = size_of::<SubmissionEntry>();
const COMPLETION_LEN: usize = size_of::<CompletionEntry>();
/// The sizes of the buffers for data.
const SIZES: [usize; 4] = [8 << 10, 32 << 10, 128 << 10, super::DATA_MAX as usize];
/// Buffers of each larger size.
const ADMIN_BUFFERS: [usize; 3] = [1; 3];
const IO_BUFFERS: [usize; 3] = [16, 8, 2];

/// The thread that manages connections of RDMA, which begins with the first. Clones are the same.
#[derive(Clone, Debug, Default)]
pub struct RdmaThread(Arc<OnceCell<Manager>>);

impl RdmaThread {
    async fn manager(&self) -> Result<&Manager, Lost> {
        Ok(self.0.get_or_try_init(Manager::start).await?)
    }
}

/// Why there is no connection, or no longer one.
#[derive(Debug, thiserror::Error)]
pub enum Lost {
    /// The target has ended it.
    #[error("the target has closed the connection")]
    Ended,
    /// The target does not answer, or violates the rules of the transport.
    #[error("a {0:?} request has failed with ibv_wc_status {1}")]
    Failed(Kind, u32),
    /// The target violates the protocol.
    #[error("the target violates the protocol: {0}")]
    Violation(#[from] Violation),
    /// The target accepts the connection in a way that does not exist.
    #[error(transparent)]
    Accept(#[from] BadAccept),
    /// The target receives fewer commands than a queue has.
    #[error("the target receives {0} commands at a time, fewer than its queue has entries")]
    Receives(u16),
    /// The target refuses.
    #[error("the target refuses the connection: {}", name(*.0))]
    Refused(Option<Reject>),
    /// The device or the network has failed.
    #[error(transparent)]
    Device(#[from] CallError),
    /// This computer cannot use RDMA.
    #[error(transparent)]
    Start(#[from] StartError),
}

fn name(reject: Option<Reject>) -> &'static str {
    reject.map_or("no reason of NVMe", Reject::name)
}

impl From<aryk_rdma::ConnectError> for Lost {
    fn from(error: aryk_rdma::ConnectError) -> Self {
        match error {
            aryk_rdma::ConnectError::Refused(data) => Self::Refused(Reject::decode(&data)),
            aryk_rdma::ConnectError::Call(error) => Self::Device(error),
        }
    }
}

/// The buffers for data, by their sizes.
#[derive(Debug, Default)]
struct Pool {
    /// Those that no command has.
    free: [Vec<Sgl>; SIZES.len()],
    /// The number of all.
    counts: [usize; SIZES.len()],
}

impl Pool {
    fn new(buffers: impl Iterator<Item = Sgl>) -> Self {
        let mut pool = Self::default();
        buffers.for_each(|buffer| pool.put(buffer));
        pool.counts = pool.free.each_ref().map(Vec::len);
        pool
    }

    fn put(&mut self, buffer: Sgl) {
        self.free[class_of(buffer.len() as usize)].push(buffer);
    }

    /// The smallest buffer for so many bytes.
    fn take(&mut self, len: u32) -> Option<Sgl> {
        self.free.get_mut(class_of(len as usize)..)?.iter_mut().find_map(Vec::pop)
    }

    /// Whether so many buffers for so many bytes are free.
    fn has(&self, count: usize, len: u32) -> bool {
        let free = self.free.get(class_of(len as usize)..).into_iter().flatten();
        free.map(Vec::len).sum::<usize>() >= count
    }

    /// Whether so many buffers for so many bytes exist.
    fn can_have(&self, count: usize, len: u32) -> bool {
        self.counts.get(class_of(len as usize)..).into_iter().flatten().sum::<usize>() >= count
    }
}

/// The place of the smallest size that is large enough; behind all of them if none is.
fn class_of(len: usize) -> usize {
    SIZES.iter().position(|&size| size >= len).unwrap_or(SIZES.len())
}

/// The sizes of the buffers for the data of a queue.
fn sizes(place: Place) -> impl Iterator<Item = usize> {
    let larger = if place.qid == 0 { ADMIN_BUFFERS } else { IO_BUFFERS };
    let counts = std::iter::once(usize::from(place.entries - 1)).chain(larger);
    let needed = class_of(place.transfer_max as usize) + 1;
    SIZES.into_iter().zip(counts).take(needed).flat_map(|(size, count)| std::iter::repeat_n(size, count))
}

/// The data of a command.
#[derive(Clone, Copy, Debug)]
struct Data {
    buffer: Sgl,
    /// Bytes that the target writes.
    read_len: u32,
}

/// See the [module](self). Its drop ends the connection.
#[derive(Debug)]
pub(super) struct Wire {
    /// `Some` until it is dropped.
    endpoint: Option<Endpoint>,
    /// All are lent.
    buffers: Vec<Buffer>,
    queue: HostQueue,
    receives: Vec<Sgl>,
    /// Receives that are not posted.
    idle: Vec<u32>,
    /// By command: where it is if data follows it in its capsule.
    capsules: Vec<Sgl>,
    /// By command.
    data: Vec<Option<Data>>,
    pool: Pool,
    /// Data that a capsule may have.
    in_capsule_max: u32,
    completions: Vec<Completion>,
    /// Completions before this one were taken.
    taken: usize,
}

impl Wire {
    /// Connects, from an address of this host or from any.
    pub(super) async fn connect(
        rdma: &RdmaThread,
        address: SocketAddr,
        source: Option<SocketAddr>,
        place: Place,
    ) -> Result<Self, Lost> {
        let pending = rdma.manager().await?.resolve(address, source).await?;
        let commands = usize::from(place.entries - 1);
        let data: Vec<usize> = sizes(place).collect();
        let shared = data.len();
        let own =
            std::iter::repeat_n(COMPLETION_LEN, commands).chain(std::iter::repeat_n(COMMAND_LEN, commands));
        let posted = u32::from(place.entries - 1);
        let setup = Setup {
            receives: (posted, 1),
            sends: (posted, 2),
            buffers: own.chain(data).collect(),
            shared,
            rejection: Vec::new(),
        };
        let (endpoint, buffers) = pending.prepare(setup).await?;
        let mut wire = Self::new(endpoint, buffers, commands);
        wire.flush()?;
        let request = Request {
            qid: place.qid,
            receives: place.entries,
            entries: place.entries,
            controller_id: place.controller_id,
        };
        let accept = Accept::decode(&wire.endpoint().connect(&request.encode()).await?)?;
        if accept.receives < place.entries - 1 {
            return Err(Lost::Receives(accept.receives));
        }
        Ok(wire)
    }

    fn new(endpoint: Endpoint, mut buffers: Vec<Buffer>, commands: usize) -> Self {
        let mut views: Vec<Sgl> = buffers.iter_mut().map(Buffer::lend).collect();
        let pool = Pool::new(views.drain(2 * commands..));
        let capsules = views.split_off(commands);
        Self {
            endpoint: Some(endpoint),
            buffers,
            queue: HostQueue::new(commands as u16),
            receives: views,
            idle: (0..commands as u32).rev().collect(),
            capsules,
            data: vec![None; commands],
            pool,
            in_capsule_max: 0,
            completions: Vec::new(),
            taken: 0,
        }
    }

    /// Sets the data that a capsule may have, as the controller reports it.
    pub(super) fn set_in_capsule_max(&mut self, bytes: u32) {
        self.in_capsule_max = bytes;
    }

    fn endpoint(&mut self) -> &mut Endpoint {
        self.endpoint.as_mut().expect("present until dropped")
    }

    /// Whether there are buffers for so many commands with this data at the same time.
    #[inline]
    pub(super) fn has_room(&self, count: usize, transfer: Transfer) -> bool {
        transfer.is_empty() || self.pool.has(count, transfer.len())
    }

    /// Whether there would be buffers for so many commands with this data, if none was used.
    pub(super) fn can_have(&self, count: usize, transfer: Transfer) -> bool {
        transfer.is_empty() || self.pool.can_have(count, transfer.len())
    }

    /// Adds a command, for which there is room. `fill` copies what it writes.
    #[inline]
    pub(super) fn submit(
        &mut self,
        cid: u16,
        entry: SubmissionEntry,
        transfer: Transfer,
        fill: impl FnOnce(&Sgl),
    ) {
        let len = transfer.len();
        let (mut data, mut in_capsule) =
            (Descriptor::Keyed { address: 0, len: 0, key: 0, invalidates: false }, None);
        if len > 0 {
            let buffer = self.pool.take(len).expect("the owner has asked for room");
            let is_read = matches!(transfer, Transfer::ToHost(_));
            self.data[usize::from(cid)] = Some(Data { buffer, read_len: if is_read { len } else { 0 } });
            let part = buffer.first(len);
            if !is_read {
                fill(&part);
            }
            if !is_read && len <= self.in_capsule_max {
                (data, in_capsule) = (Descriptor::InCapsule { offset: 0, len }, Some(part));
            } else {
                let remote = self.endpoint().remote(&buffer).expect("buffers for data are shared");
                data =
                    Descriptor::Keyed { address: remote.address, len, key: remote.key, invalidates: false };
            }
        }
        let entry = self.queue.submit(cid, entry, data);
        match in_capsule {
            None => self.endpoint().send(cid.into(), entry.as_bytes(), None),
            Some(part) => {
                let capsule = self.capsules[usize::from(cid)];
                capsule.put(&entry);
                self.endpoint().send_pieces(cid.into(), &[capsule, part]);
            }
        }
    }

    /// Posts receives and what was submitted since the last call.
    pub(super) fn flush(&mut self) -> Result<(), Lost> {
        let Self { endpoint, idle, receives, .. } = self;
        let endpoint = endpoint.as_mut().expect("present until dropped");
        while let Some(id) = idle.pop() {
            endpoint.receive(id, &[receives[id as usize]]);
        }
        Ok(endpoint.flush()?)
    }

    /// Takes completions of the device, some at a time. Returns whether there may be more.
    pub(super) fn poll(&mut self) -> Result<bool, Lost> {
        let Self { endpoint, completions, .. } = self;
        Ok(endpoint.as_mut().expect("present until dropped").poll(completions)?)
    }

    /// Whether [`Wire::poll`] has found anything that was not taken.
    pub(super) fn has_any(&self) -> bool {
        !self.completions.is_empty()
    }

    /// The next command that has ended, of what [`Wire::poll`] has found. The owner copies its data ([`Wire::data`]) and releases
    /// it ([`Wire::release`]).
    pub(super) fn next(&mut self) -> Result<Option<Ended>, Lost> {
        loop {
            let Some(completion) = self.completions.get(self.taken).copied() else {
                self.completions.clear();
                self.taken = 0;
                return Ok(None);
            };
            self.taken += 1;
            let len = match completion.result {
                Ok(len) => len as usize,
                Err(_) if completion.is_flushed() => return Err(Lost::Ended),
                Err(status) => return Err(Lost::Failed(completion.kind, status)),
            };
            let ended = match completion.kind {
                Kind::Receive => {
                    let mut message = [0; COMPLETION_LEN];
                    self.receives[completion.id as usize].read(0, &mut message);
                    self.idle.push(completion.id);
                    self.queue.receive(&message[..len.min(COMPLETION_LEN)])?
                }
                Kind::Send => self.queue.sent(completion.id as u16),
                // This side makes no such requests.
                Kind::Read | Kind::Write => None,
            };
            if ended.is_some() {
                return Ok(ended);
            }
        }
    }

    /// What a command has read, which has ended with success.
    #[inline]
    pub(super) fn data(&self, cid: u16) -> Sgl {
        self.data[usize::from(cid)].map_or(Sgl::EMPTY, |data| data.buffer.first(data.read_len))
    }

    /// Gives back the buffer of a command that has ended.
    #[inline]
    pub(super) fn release(&mut self, cid: u16) {
        if let Some(data) = self.data[usize::from(cid)].take() {
            self.pool.put(data.buffer);
        }
    }

    /// Has the descriptor [`Wire::fd`] report the next completion. Returns whether there is one before.
    pub(super) fn arm(&mut self) -> Result<bool, Lost> {
        self.endpoint().arm()?;
        self.poll()?;
        Ok(self.has_any())
    }

    /// The descriptor that becomes readable at a completion.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.endpoint.as_ref().expect("present until dropped").fd()
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if let Some(endpoint) = self.endpoint.take() {
            endpoint.end(std::mem::take(&mut self.buffers));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: Place = Place { qid: 1, entries: 5, controller_id: 1, transfer_max: 128 << 10 };

    #[test]
    fn a_command_takes_the_smallest_buffer_that_is_large_enough() {
        let mut buffers: Vec<Buffer> =
            [SIZES[0], SIZES[0], SIZES[1], SIZES[2]].map(|len| Buffer::new(len, 64)).into();
        let mut pool = Pool::new(buffers.iter_mut().map(Buffer::lend));
        assert!(pool.has(4, 512) && !pool.has(5, 512) && pool.has(2, 8193) && !pool.has(1, 128 << 10 | 1));
        let taken: Vec<Sgl> = [4096, 8192, 512, 512].iter().filter_map(|len| pool.take(*len)).collect();
        let lens: Vec<usize> = taken.iter().map(|buffer| buffer.len() as usize).collect();
        assert_eq!(lens, [SIZES[0], SIZES[0], SIZES[1], SIZES[2]]);
        assert!(pool.can_have(4, 512) && !pool.can_have(5, 512) && pool.can_have(1, 128 << 10));
        assert!(!pool.can_have(2, 128 << 10) && !pool.can_have(1, 1 << 20) && !pool.can_have(1, u32::MAX));
        assert!(pool.take(512).is_none() && !pool.has(1, 512) && pool.take(u32::MAX).is_none());
        taken.into_iter().for_each(|buffer| pool.put(buffer));
        assert_eq!(pool.take(100 << 10).map(|buffer| buffer.len() as usize), Some(SIZES[2]));
        buffers.iter_mut().for_each(Buffer::reclaim);
    }

    #[test]
    fn a_queue_has_buffers_for_its_largest_transfer() {
        let count = |place: Place, size| sizes(place).filter(|len| *len == size).count();
        assert_eq!(SIZES.map(|size| count(PLACE, size)), [4, 16, 8, 0]);
        assert_eq!(SIZES.map(|size| count(Place { transfer_max: 1 << 20, ..PLACE }, size)), [4, 16, 8, 2]);
        assert_eq!(SIZES.map(|size| count(Place { transfer_max: 512, ..PLACE }, size)), [4, 0, 0, 0]);
        assert_eq!(SIZES.map(|size| count(Place { qid: 0, ..PLACE }, size)), [4, 1, 1, 0]);
    }

    #[test]
    fn a_refusal_says_why() {
        let data = Reject::NO_RESOURCES.encode().to_vec();
        let refused = Lost::from(aryk_rdma::ConnectError::Refused(data));
        assert_eq!(refused.to_string(), "the target refuses the connection: no resources");
        let refused = Lost::from(aryk_rdma::ConnectError::Refused(Vec::new()));
        assert_eq!(refused.to_string(), "the target refuses the connection: no reason of NVMe");
    }
}
