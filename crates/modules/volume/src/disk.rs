//! A disk that a pool uses: its base, as the pool's store uses it, or a disk that is the base of volumes. Reactor context.
//!
//! A request that a reset of the disk has aborted is submitted again: the user never sees a reset. A request that its user has
//! given up ends instead. Where the user is a shard, its part of the disk lies in several places: a request may become several.

use crate::claim::Right;
use aryk_bdev::{BdevChannel, Blocks, Completion, Io, Lba, Op, Status, Tag};
use aryk_dma::{Buffer, Sgl};
use aryk_reactor::Cx;
use aryk_slots::{Key, Slots};
use aryk_volume::{Shard, StoreError};
use aryk_volume_store::{DiskDone, DiskOp, DiskRequest, DiskTag, share_places};
use std::collections::VecDeque;

/// The initial room for requests in flight; the table grows for more.
const IN_FLIGHT: u32 = 64;

/// A request that the disk has.
struct Request<T> {
    tag: T,
    /// The request to the user's part of the disk.
    io: Io,
    buffer: Option<Buffer>,
    /// The disk's requests for it that have not completed.
    left: u32,
    /// What those that have completed have said.
    status: Status,
    /// Whether its user has given it up.
    is_given_up: bool,
}

/// A request that has ended.
pub(crate) struct Ended<T> {
    pub tag: T,
    pub buffer: Option<Buffer>,
    pub result: Result<(), StoreError>,
}

/// A disk, for a user who knows its requests by `T`.
pub(crate) struct Disk<T> {
    channel: BdevChannel,
    /// The user's part of the disk.
    shard: Shard,
    requests: Slots<Request<T>>,
    completions: Vec<Completion>,
    /// Requests that a reset of the disk has aborted.
    again: Vec<Key>,
    ended: VecDeque<Ended<T>>,
}

/// What a status of a disk means for the store.
const fn result(status: Status) -> Result<(), StoreError> {
    match status {
        Status::Ok => Ok(()),
        Status::NoSpace => Err(StoreError::NoSpace),
        Status::Removed => Err(StoreError::Gone),
        _ => Err(StoreError::Medium),
    }
}

/// Ends a request that the disk does not have.
fn end<T>(requests: &mut Slots<Request<T>>, key: Key, result: Result<(), StoreError>) -> Ended<T> {
    let Request { tag, mut buffer, .. } = requests.remove(key).expect("a request ends once");
    if let Some(buffer) = &mut buffer {
        buffer.reclaim();
    }
    Ended { tag, buffer, result }
}

impl<T> Disk<T> {
    pub fn new(channel: BdevChannel, shard: Shard) -> Self {
        let (completions, again, ended) = (Vec::new(), Vec::new(), VecDeque::new());
        Self { channel, shard, requests: Slots::new(IN_FLIGHT), completions, again, ended }
    }

    /// Requests that have not completed.
    pub const fn in_flight(&self) -> u32 {
        self.requests.len()
    }

    /// Whether nothing is in flight, and what has ended was taken.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.ended.is_empty()
    }

    /// Whether the disk is being removed.
    pub fn is_being_removed(&self) -> bool {
        self.channel.bdev().removal_state().is_some()
    }

    /// Reads `len` bytes into the first bytes of a buffer.
    pub fn read(&mut self, tag: T, offset: u64, mut buffer: Buffer, len: u32, cx: &mut Cx) {
        let data = buffer.lend().first(len);
        self.submit(tag, Op::Read, offset, len.into(), data, Some(buffer), cx);
    }

    /// Writes the first `len` bytes of a buffer.
    pub fn write(&mut self, tag: T, offset: u64, mut buffer: Buffer, len: u32, cx: &mut Cx) {
        let data = buffer.lend().first(len);
        self.submit(tag, Op::Write, offset, len.into(), data, Some(buffer), cx);
    }

    /// Reads into memory of the caller, who keeps it in place.
    pub fn read_into(&mut self, tag: T, offset: u64, data: Sgl, cx: &mut Cx) {
        self.submit(tag, Op::Read, offset, data.len().into(), data, None, cx);
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of a request")]
    fn submit(
        &mut self,
        tag: T,
        op: Op,
        offset: u64,
        bytes: u64,
        data: Sgl,
        mut buffer: Option<Buffer>,
        cx: &mut Cx,
    ) {
        if !op.has_data() && !self.channel.bdev().device().ops().contains(op) {
            // The writes of a disk without flushes are durable when they complete.
            self.ended.push_back(Ended { tag, buffer: None, result: Ok(()) });
            return;
        }
        let block = u64::from(self.channel.bdev().geometry().block_size);
        if !offset.is_multiple_of(block) || !bytes.is_multiple_of(block) {
            // A disk may get larger blocks while it is open.
            if let Some(buffer) = &mut buffer {
                buffer.reclaim();
            }
            self.ended.push_back(Ended { tag, buffer, result: Err(StoreError::Medium) });
            return;
        }
        let io = Io {
            tag: Tag(0),
            op,
            fua: false,
            may_unmap: false,
            lba: Lba(offset / block),
            blocks: Blocks(bytes / block),
            source: Lba::ZERO,
            data,
        };
        let status = Status::Ok;
        let key = self.requests.add(Request { tag, io, buffer, left: 0, status, is_given_up: false });
        self.start_request(key, cx);
    }

    /// Submits a request that the disk does not have.
    fn start_request(&mut self, key: Key, cx: &mut Cx) {
        let request = self.requests.get_mut(key).expect("it has not ended");
        let io = Io { tag: Tag(key.raw()), ..request.io };
        request.status = Status::Ok;
        if self.shard == Shard::ALL || io.op == Op::Flush {
            request.left = 1;
            self.channel.submit(io, cx);
            return;
        }
        let block = u64::from(self.channel.bdev().geometry().block_size);
        let places = || share_places(self.shard, io.lba.0 * block, io.blocks.0 * block);
        request.left = places().count() as u32;
        let mut at = 0;
        for (place, bytes) in places() {
            let data = if io.op.has_data() { io.data.slice(at, bytes as u32) } else { Sgl::EMPTY };
            let piece = Io { lba: Lba(place / block), blocks: Blocks(bytes / block), data, ..io };
            self.channel.submit(piece, cx);
            at += data.len();
        }
    }

    /// Takes the completions of the disk, and submits again what a reset has aborted, if the disk may be used.
    pub fn poll(&mut self, right: Right, cx: &mut Cx) {
        self.channel.poll(cx, &mut self.completions);
        for Completion { tag, status } in self.completions.drain(..) {
            let key = Key::from_raw(tag.0);
            let request = self.requests.get_mut(key).expect("completed once");
            request.left -= 1;
            // Of several, a failure counts more than an abort.
            if status != Status::Ok && matches!(request.status, Status::Ok | Status::Aborted) {
                request.status = status;
            }
            if request.left > 0 {
                continue;
            }
            let status = request.status;
            if status == Status::Aborted && !request.is_given_up {
                self.again.push(key);
                continue;
            }
            self.ended.push_back(end(&mut self.requests, key, result(status)));
        }
        if right == Right::Waits {
            return;
        }
        while let Some(key) = self.again.pop() {
            if right == Right::Valid {
                self.start_request(key, cx);
                continue;
            }
            self.ended.push_back(end(&mut self.requests, key, Err(StoreError::Gone)));
        }
    }

    /// Aborts what the disk has. It is submitted again by [`Disk::poll`].
    pub fn abort_all(&mut self, cx: &mut Cx) {
        self.channel.abort_all(cx);
    }

    /// Gives up the requests for whose tags `is_meant` returns true: they end soon, if the disk can abort them.
    pub fn give_up(&mut self, mut is_meant: impl FnMut(&T) -> bool, cx: &mut Cx) {
        let mut given_up = false;
        for (_, request) in self.requests.iter_mut().filter(|(_, request)| !request.is_given_up) {
            request.is_given_up = is_meant(&request.tag);
            given_up |= request.is_given_up;
        }
        if given_up {
            let requests = &self.requests;
            let is_given_up = |tag: Tag| requests.get(Key::from_raw(tag.0)).is_some_and(|r| r.is_given_up);
            self.channel.abort_those(is_given_up, cx);
        }
    }

    /// The next request that has ended.
    pub fn next_ended(&mut self) -> Option<Ended<T>> {
        self.ended.pop_front()
    }
}

/// The base of a pool.
pub(crate) type BaseDisk = Disk<DiskTag>;

impl BaseDisk {
    /// Starts an operation of the store.
    pub fn start(&mut self, op: DiskOp, cx: &mut Cx) {
        let DiskOp { tag, request } = op;
        match request {
            DiskRequest::Read { offset, buffer, len } => self.read(tag, offset, buffer, len, cx),
            DiskRequest::Write { offset, buffer, len } => self.write(tag, offset, buffer, len, cx),
            DiskRequest::Flush => self.submit(tag, Op::Flush, 0, 0, Sgl::EMPTY, None, cx),
            DiskRequest::Discard { offset, bytes } => {
                self.submit(tag, Op::Unmap, offset, bytes, Sgl::EMPTY, None, cx);
            }
        }
    }

    /// The next operation of the store that has ended.
    pub fn next_done(&mut self) -> Option<DiskDone> {
        self.next_ended().map(|Ended { tag, buffer, result }| DiskDone { tag, buffer, result })
    }
}
