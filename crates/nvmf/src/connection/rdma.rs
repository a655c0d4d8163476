//! An RDMA connection in control. Control context.
//!
//! Data of commands is copied between the connection's buffers and vectors: admin queues have little of it.

use super::{End, Slot, Slots};
use crate::association::Way;
use crate::pool::{Pool, Share, TRANSFER_MAX, Taken};
use crate::queue::Carrier;
use crate::quota::Held;
use crate::rdma::{self, Event, Lost, Role, Wire};
use crate::target::{ENTRIES_MAX, Inner};
use aryk_log_limit::limited;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::Status;
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::command::{self, Connect};
use aryk_nvme_fabrics::connect::{InvalidParameter, Refusal};
use aryk_nvme_fabrics::rdma::{Accept, Reject, Request};
use aryk_nvme_fabrics::sgl::{DataBlocks, Sgl};
use aryk_rdma::{Pending, Setup};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::rc::Rc;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Entries of an admin queue, at most.
const ADMIN_ENTRIES_MAX: u16 = 128;
/// The bit of an opcode, and of a Fabrics command's type, that says that data comes from the host.
const FROM_HOST: u8 = 0b01;

/// A connection that may be accepted.
pub(super) struct Admitted {
    request: Request,
    role: Role,
    setup: Setup,
    /// Its memory counts as long as this exists.
    _held: Held,
}

/// Checks what a host asks for, and counts the memory of its connection.
pub(super) fn admit(inner: &Inner, pending: &Pending, way: Way) -> Result<Admitted, Reject> {
    let parameters = &pending.parameters;
    let request = Request::decode(&parameters.private_data)?;
    let is_admin = request.qid == 0;
    let entries_max = if is_admin { ADMIN_ENTRIES_MAX } else { ENTRIES_MAX };
    if request.entries > entries_max {
        return Err(Reject::SEND_QUEUE);
    }
    if parameters.reads_max == 0 {
        return Err(Reject::NO_READS);
    }
    // Only a host that is connected has I/O queues, whose memory is larger.
    if !is_admin && !inner.has_host_at(way) {
        return Err(Reject::NO_RESOURCES);
    }
    let role = match inner.state.borrow().limits.shared_receives {
        _ if is_admin => Role::Admin,
        None => Role::Io,
        Some(receives) => Role::SharingIo(receives),
    };
    let setup = rdma::setup(request.entries, role, &Reject::NO_RESOURCES.encode());
    let held =
        inner.rdma_memory.take(way.peer.ip(), rdma::memory(&setup, role)).ok_or(Reject::NO_RESOURCES)?;
    Ok(Admitted { request, role, setup, _held: held })
}

/// A connection.
pub(super) struct RdmaLink {
    wire: Wire,
    pool: Pool,
    /// Says that there are completions.
    news: AsyncFd<OwnedFd>,
    qid: u16,
}

impl RdmaLink {
    /// Makes the queue pair of a connection, and accepts it.
    pub async fn accept(inner: &Inner, pending: Pending, admitted: &Admitted) -> Result<Self, End> {
        let Admitted { request, role, setup, .. } = admitted;
        let mut setup = setup.clone();
        if let Role::SharingIo(count) = *role {
            match inner.shared_receives(&pending, count).await {
                Ok(receives) => setup.shared_receives = Some(receives),
                Err(error) => {
                    limited!(
                        inner.lines,
                        warn,
                        %error,
                        "RDMA queues cannot share receives: raise the limit of locked memory (ulimit -l), or create the transport \
                         without max_srq_depth if the device cannot share them"
                    );
                    pending.reject(&setup.rejection);
                    return Err(End::Refused);
                }
            }
        }
        let (endpoint, buffers) = pending.prepare(setup).await.map_err(Lost::Device)?;
        let (mut wire, buffers) = Wire::new(endpoint, buffers, request.entries);
        let pool = Pool::of(buffers, Rc::default());
        let news = watch(wire.fd())?;
        wire.flush(&pool)?;
        wire.accept(&Accept { receives: request.entries }.encode()).await?;
        Ok(Self { wire, pool, news, qid: request.qid })
    }

    /// Checks that Connect is of the queue for which the host has asked.
    pub fn check(&self, connect: &Connect) -> Result<(), Refusal> {
        if connect.qid != self.qid {
            return Err(Refusal::Parameter(InvalidParameter::QID));
        }
        match connect.sqsize < self.wire.entries() {
            true => Ok(()),
            false => Err(Refusal::Parameter(InvalidParameter::SQSIZE)),
        }
    }

    /// Takes messages from shared receives, which other connections need, until the connection fails. They are the next commands.
    pub async fn take_messages(&mut self) -> End {
        if !self.wire.shares_receives() {
            std::future::pending::<()>().await;
        }
        loop {
            let waited = match self.wire.next_done(&self.pool) {
                // Replies that have left.
                Ok(Some(Event::Sent { data, .. })) => {
                    data.into_iter().for_each(|data| self.give_back(data));
                    continue;
                }
                Ok(Some(_)) => continue,
                Ok(None) => self.until_news().await,
                Err(lost) => Err(lost.into()),
            };
            if let Err(end) = waited {
                return end;
            }
        }
    }

    /// The next command whose data has arrived.
    pub async fn next(&mut self, slots: &mut Slots) -> Result<SlotId, End> {
        loop {
            match self.wire.next(&self.pool)? {
                Some(Event::Command { slot, entry, data_len, data }) => {
                    let bytes = data.map(|data| self.take_bytes(data, data_len)).unwrap_or_default();
                    slots.insert(slot, Slot::new(entry, data_len, bytes));
                    let len = if data_len == 0 { len_to_read(&entry) } else { 0 };
                    if len > 0 {
                        self.read(slot, len, slots).await?;
                    }
                    return Ok(slot);
                }
                Some(done) => self.end_transfer(done, slots),
                None => self.until_news().await?,
            }
        }
    }

    /// Reads the data of a command. Commands that arrive meanwhile wait.
    async fn read(&mut self, slot: SlotId, len: u32, slots: &mut Slots) -> Result<(), End> {
        let data = self.pool.take_fixed(len as usize).expect("replies have left, and one command is read");
        self.wire.request_data(slot, data, len);
        loop {
            match self.wire.next_done(&self.pool)? {
                Some(Event::Read { data, .. }) => {
                    let bytes = self.take_bytes(data, len);
                    slots.get_mut(&slot).expect("it is being read").data = bytes;
                    return Ok(());
                }
                Some(done) => self.end_transfer(done, slots),
                None => self.until_news().await?,
            }
        }
    }

    /// The first `len` bytes of a buffer, which is free afterwards.
    fn take_bytes(&self, data: Taken, len: u32) -> Vec<u8> {
        let bytes = data.buffer.bytes()[..len as usize].to_vec();
        self.give_back(data);
        bytes
    }

    fn give_back(&self, data: Taken) {
        let waiting = self.pool.give_back(&mut Share::default(), data);
        debug_assert_eq!(waiting, None, "nothing waits for buffers of one connection");
    }

    fn end_transfer(&mut self, event: Event, slots: &mut Slots) {
        if let Event::Sent { slot, data } = event {
            slots.remove(&slot);
            data.into_iter().for_each(|data| self.give_back(data));
        }
    }

    /// Returns when all replies have left.
    pub async fn flush(&mut self, slots: &mut Slots) -> Result<(), End> {
        while self.wire.unsent() > 0 {
            match self.wire.next_done(&self.pool)? {
                Some(done) => self.end_transfer(done, slots),
                None => self.until_news().await?,
            }
        }
        Ok(())
    }

    /// Posts what there is to post, and returns when there may be completions.
    async fn until_news(&mut self) -> Result<(), End> {
        self.wire.flush(&self.pool)?;
        if !self.wire.arm()? {
            self.news.readable().await?.clear_ready();
            self.wire.poll()?;
        }
        Ok(())
    }

    pub fn complete(&mut self, id: SlotId, status: Status, result: u64) {
        self.wire.complete(id, status, result);
    }

    pub fn complete_with_data(&mut self, id: SlotId, bytes: &[u8], result: u64) {
        let mut data = self.pool.take_fixed(bytes.len()).expect("earlier replies have left");
        data.buffer.write(0, bytes);
        self.wire.complete_with_data(id, data, bytes.len() as u32, result);
    }

    pub fn drop_command(&mut self, id: SlotId) {
        self.wire.drop_command(id);
    }

    pub fn connect(&mut self, entries: u16, disables_flow_control: bool) {
        self.wire.connect(entries, disables_flow_control);
    }

    /// The connection for an I/O queue.
    pub fn into_carrier(self) -> Carrier {
        Carrier::Rdma { wire: self.wire, buffers: self.pool.into_buffers() }
    }
}

#[expect(deprecated, reason = "unsound for types whose descriptor may change; this is an OwnedFd")]
fn watch(fd: BorrowedFd<'_>) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(fd.try_clone_to_owned()?, Interest::READABLE)
}

/// Bytes of data that a command takes from the host's memory.
fn len_to_read(entry: &SubmissionEntry) -> u32 {
    // FCTYPE is where other commands have the low byte of NSID.
    let direction = if entry.opcode() == command::OPCODE { entry.nsid() as u8 } else { entry.opcode() };
    match Sgl::decode(entry, DataBlocks::Keyed) {
        Ok(Sgl::Keyed { len, .. }) if direction & FROM_HOST != 0 && len as usize <= TRANSFER_MAX => len,
        _ => 0,
    }
}
