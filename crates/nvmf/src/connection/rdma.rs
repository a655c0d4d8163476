//! An RDMA connection in control. Control context.
//!
//! Data of commands is copied between the connection's buffers and vectors: admin queues have little of it.

use super::{End, Slot, Slots};
use crate::association::Way;
use crate::pool::{Pool, TRANSFER_MAX};
use crate::queue::Carrier;
use crate::quota::Held;
use crate::rdma::{self, Event, Lost, Wire};
use crate::target::{ENTRIES_MAX, Inner};
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
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Entries of an admin queue, at most.
const ADMIN_ENTRIES_MAX: u16 = 128;
/// The bit of an opcode, and of a Fabrics command's type, that says that data comes from the host.
const FROM_HOST: u8 = 0b01;

/// Checks what a host asks for, and counts its memory until the last of the returned values is dropped. `None`: it is to be
/// refused.
pub(super) fn admit(inner: &Inner, pending: &Pending, way: Way) -> Result<(Request, Setup, Held), Reject> {
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
    let setup = rdma::setup(request.entries, is_admin, &Reject::NO_RESOURCES.encode());
    let held = inner.rdma_memory.take(way.peer.ip(), rdma::memory(&setup)).ok_or(Reject::NO_RESOURCES)?;
    Ok((request, setup, held))
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
    pub async fn accept(pending: Pending, request: Request, setup: Setup) -> Result<Self, End> {
        let (endpoint, buffers) = pending.prepare(setup).await.map_err(Lost::Device)?;
        let (mut wire, pool) = Wire::new(endpoint, buffers, request.entries);
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

    /// The next command whose data has arrived.
    pub async fn next(&mut self, slots: &mut Slots) -> Result<SlotId, End> {
        loop {
            match self.wire.next()? {
                Some(Event::Command { slot, entry, data_len, data }) => {
                    let bytes = data.buffer.bytes()[..data_len as usize].to_vec();
                    self.pool.keep(data.buffer);
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
            match self.wire.next_done()? {
                Some(Event::Read { data, .. }) => {
                    let bytes = data.buffer.bytes()[..len as usize].to_vec();
                    self.pool.keep(data.buffer);
                    slots.get_mut(&slot).expect("it is being read").data = bytes;
                    return Ok(());
                }
                Some(done) => self.end_transfer(done, slots),
                None => self.until_news().await?,
            }
        }
    }

    fn end_transfer(&mut self, event: Event, slots: &mut Slots) {
        if let Event::Sent { slot, data } = event {
            slots.remove(&slot);
            data.into_iter().for_each(|data| self.pool.keep(data.buffer));
        }
    }

    /// Returns when all replies have left.
    pub async fn flush(&mut self, slots: &mut Slots) -> Result<(), End> {
        while self.wire.unsent() > 0 {
            match self.wire.next_done()? {
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
        Carrier::Rdma { wire: self.wire, pool: self.pool }
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
