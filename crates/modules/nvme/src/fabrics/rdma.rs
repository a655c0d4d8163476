//! A connection of RDMA: its messages and its buffers. Context: that of its owner, at first the thread of NVMe over Fabrics, then
//! a reactor for an I/O queue.
//!
//! The target reads and writes the buffers for data, which are the connection's own, and nothing else: data is copied between
//! them and the memory of requests. So a target that accesses what no command names, or at the wrong time, harms requests to
//! itself only. What is written is copied before its command is sent, and what was read after its command has ended.
//!
//! If the operator trusts the target ([`super::direct`]), VMs' memory is registered for it, too. Then data that is in one piece
//! of registered memory is not copied ([`Way::Direct`]); other data is. The owner does not end a request of a lost connection
//! before the queue pair is destroyed ([`Wire::close`]): until then, the target may still access the memory of the request.
//!
//! **Invariants.** The buffers are lent from the beginning, and free for other uses only when the queue pair is destroyed: until
//! then, the target may access them at any time, and they are accessed by copies only. A command has its buffer until it has
//! ended. There are as many receives as commands, so that each completion finds one. Nothing here allocates after the first
//! commands.

use super::direct::from_value;
use aryk_bdev::MemoryLookup;
use aryk_dma::{Buffer, Seg, Sgl};
use aryk_nvme::spec::entry::{CompletionEntry, SubmissionEntry};
use aryk_nvme_fabrics::Transfer;
use aryk_nvme_fabrics::rdma::{Accept, BadAccept, Ended, HostQueue, Reject, Request, Violation};
use aryk_nvme_fabrics::sgl::Sgl as Descriptor;
use aryk_rdma::{CallError, Completion, Ending, Endpoint, Keys, Kind, Manager, Remote, Setup, StartError};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use tokio::sync::OnceCell;
use zerocopy::IntoBytes;

use super::RemoteConfig;
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

/// How the data of a command goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// By a buffer of the connection, if there is any.
    Copied,
    /// From or to the memory of the request, which has these keys.
    Direct(Seg, Keys),
}

/// [`Way::Direct`] for a request whose memory is one piece that is registered; other pieces are counted. A command has one
/// descriptor for its data.
#[inline]
fn direct_way(memory: &mut MemoryLookup, data: &Sgl) -> Option<Way> {
    let Some(piece) = data.as_contiguous() else {
        memory.count_bounced(data.pieces().count());
        return None;
    };
    memory.translate(&piece).map(|place| Way::Direct(piece, from_value(place.value)))
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
    /// The keys of VMs' memory, if the target may access it.
    memory: Option<MemoryLookup>,
    /// Data that a capsule may have.
    in_capsule_max: u32,
    completions: Vec<Completion>,
    /// Completions before this one were taken.
    taken: usize,
}

impl Wire {
    /// Connects a queue.
    pub(super) async fn connect(config: &RemoteConfig, place: Place) -> Result<Self, Lost> {
        let pending = config.rdma.manager().await?.resolve(config.address, config.source).await?;
        let direct = match &config.direct {
            Some(direct) if place.qid > 0 => direct.of(&pending).await?,
            _ => None,
        };
        let (domain, memory) = direct.unzip();
        let commands = usize::from(place.entries - 1);
        let data: Vec<usize> = sizes(place).collect();
        let shared = data.len();
        let own =
            std::iter::repeat_n(COMPLETION_LEN, commands).chain(std::iter::repeat_n(COMMAND_LEN, commands));
        let posted = u32::from(place.entries - 1);
        let setup = Setup {
            receives: (posted, 1),
            shared_receives: None,
            sends: (posted, 2),
            buffers: own.chain(data).collect(),
            shared,
            domain,
            rejection: Vec::new(),
        };
        let (endpoint, buffers) = pending.prepare(setup).await?;
        let mut wire = Self::new(endpoint, buffers, commands, memory);
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

    fn new(
        endpoint: Endpoint,
        mut buffers: Vec<Buffer>,
        commands: usize,
        memory: Option<MemoryLookup>,
    ) -> Self {
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
            memory,
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

    /// How the data of so many commands of a request goes. `None`: there are too few buffers for it now.
    #[inline]
    pub(super) fn way(&mut self, count: usize, transfer: Transfer, data: &Sgl) -> Option<Way> {
        // A request with two commands, or whose data is not its own (a deallocation), is copied.
        if let Some(memory) = &mut self.memory
            && transfer.len() == data.len()
            && !transfer.is_empty()
            && let Some(way) = direct_way(memory, data)
        {
            return Some(way);
        }
        self.has_room(count, transfer).then_some(Way::Copied)
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

    /// Adds a command whose data goes a way of [`Wire::way`]. `fill` copies what it writes to a buffer.
    #[inline]
    pub(super) fn submit(
        &mut self,
        cid: u16,
        entry: SubmissionEntry,
        transfer: Transfer,
        way: Way,
        fill: impl FnOnce(&Sgl),
    ) {
        let (len, is_read) = (transfer.len(), matches!(transfer, Transfer::ToHost(_)));
        let in_capsule = !is_read && len <= self.in_capsule_max;
        match way {
            Way::Direct(piece, keys) if in_capsule => {
                let capsule = self.capsule(cid, entry, len);
                self.endpoint().send_with(cid.into(), &capsule, piece, keys.local);
            }
            Way::Direct(piece, keys) => {
                self.submit_keyed(cid, entry, len, Remote { address: piece.base() as u64, key: keys.remote });
            }
            Way::Copied if len == 0 => self.submit_keyed(cid, entry, 0, Remote { address: 0, key: 0 }),
            Way::Copied => {
                let buffer = self.pool.take(len).expect("the owner has asked for room");
                self.data[usize::from(cid)] = Some(Data { buffer, read_len: if is_read { len } else { 0 } });
                let part = buffer.first(len);
                if !is_read {
                    fill(&part);
                }
                if in_capsule {
                    let capsule = self.capsule(cid, entry, len);
                    self.endpoint().send_pieces(cid.into(), &[capsule, part]);
                } else {
                    let remote = self.endpoint().remote(&buffer).expect("buffers for data are shared");
                    self.submit_keyed(cid, entry, len, remote);
                }
            }
        }
    }

    /// Sends a command whose data the target reads or writes.
    #[inline]
    fn submit_keyed(&mut self, cid: u16, entry: SubmissionEntry, len: u32, remote: Remote) {
        let Remote { address, key } = remote;
        let data = Descriptor::Keyed { address, len, key, invalidates: false };
        let entry = self.queue.submit(cid, entry, data);
        self.endpoint().send(cid.into(), entry.as_bytes(), None);
    }

    /// The first part of the capsule of a command whose data follows it there.
    #[inline]
    fn capsule(&mut self, cid: u16, entry: SubmissionEntry, len: u32) -> Sgl {
        let capsule = self.capsules[usize::from(cid)];
        capsule.put(&self.queue.submit(cid, entry, Descriptor::InCapsule { offset: 0, len }));
        capsule
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
                Kind::Read | Kind::Write | Kind::End => None,
            };
            if ended.is_some() {
                return Ok(ended);
            }
        }
    }

    /// Ends the connection. Returns its end if the target may access the memory of requests until then.
    pub(super) fn close(mut self) -> Option<Ending> {
        let ending = self.end()?;
        self.memory.is_some().then_some(ending)
    }

    fn end(&mut self) -> Option<Ending> {
        let endpoint = self.endpoint.take()?;
        Some(endpoint.end(std::mem::take(&mut self.buffers)))
    }

    /// What a command has read, which has ended with success, if it was copied.
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
        drop(self.end());
    }
}

#[cfg(test)]
mod tests {
    use super::super::direct::to_value;
    use super::*;
    use aryk_bdev::{BoxFuture, Memory, MemoryClient, RegisterError};
    use aryk_dma::{DmaRange, Mapping, MemTable, Region, SgTable};

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

    /// Registers all memory but that of one length.
    struct Registrar;

    const REFUSED: u64 = 8192;
    const KEYS: Keys = Keys { local: 5, remote: 6 };

    impl MemoryClient for Registrar {
        fn name(&self) -> &str {
            "registrar"
        }

        fn register(&self, memory: DmaRange, _: Arc<str>) -> BoxFuture<'_, Result<u64, RegisterError>> {
            let is_refused = memory.len() == REFUSED;
            Box::pin(async move {
                if is_refused { Err(RegisterError::failed("no room")) } else { Ok(to_value(KEYS)) }
            })
        }

        fn unregister(&self, _: DmaRange, _: Arc<str>, _: u64) -> BoxFuture<'_, ()> {
            Box::pin(async {})
        }
    }

    #[test]
    fn data_in_one_registered_piece_is_not_copied() {
        let region = |guest_addr, len| {
            let mapping = Arc::new(Mapping::anonymous(len).unwrap());
            Region { guest_addr, user_addr: guest_addr, len, offset: 0, mapping }
        };
        let table = Arc::new(MemTable::new(vec![region(0, 4 * 8192), region(1 << 20, REFUSED)]).unwrap());
        let memory = Memory::default();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(memory.add(table.regions(), "vm"));
        let attachment = runtime.block_on(memory.attach(Registrar)).unwrap();
        let (mut lookup, mut lists) = (attachment.lookup(), SgTable::new(1, Arc::clone(&table)));
        let mut way = |pieces: &[(u64, u32)]| {
            let mut list = lists.begin(0);
            pieces.iter().for_each(|(addr, len)| list.push(*addr, *len).unwrap());
            let data = list.sgl();
            let way = direct_way(&mut lookup, &data).map(|way| {
                let Way::Direct(piece, keys) = way else { panic!("{way:?}") };
                assert_eq!(Some(piece.base()), data.pieces().next().map(|first| first.base()));
                (piece.len(), keys)
            });
            lists.end(0);
            way
        };
        assert_eq!(way(&[(512, 4096)]), Some((4096, KEYS)));
        assert_eq!(way(&[(0, 4096), (4096, 512)]), Some((4608, KEYS)), "pieces that follow each other");
        assert_eq!(way(&[(0, 4096), (8192, 512)]), None, "a gap");
        assert_eq!(way(&[(8192, 512), (0, 512)]), None, "another order");
        assert_eq!(way(&[(1 << 20, 512)]), None, "memory without a key");
        let mut own = Buffer::new(512, 512);
        assert_eq!(direct_way(&mut lookup, &own.lend()), None, "the daemon's own memory");
        own.reclaim();
        let info = memory.clients().remove(0);
        assert_eq!((info.registered, info.failed, info.bounced), (1, 1, 2 + 2 + 1 + 1));
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
