//! A channel of a crypto disk. Reactor context.
//!
//! A write is encrypted into a buffer when it starts. A read goes to the base with a buffer, and is decrypted from there when the
//! base has completed it. A request without a buffer waits in the channel's one FIFO, only while the channel's own buffer is in
//! use: the completion of the request that uses it brings the next poll.

use crate::epoch::{Cipher, Epoch};
use crate::part::Part;
use crate::pool::{BUFFER_MAX, Pool, PoolBytes, Share};
use aryk_bdev::{BdevChannel, Channel, Completion, Io, Lba, Op, Status, Tag};
use aryk_dma::{Buffer, PAGE, Sgl};
use aryk_reactor::{Cx, RootId};
use aryk_slots::{Key as Slot, Slots};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes that one poll encrypts and decrypts, and those of one request more: some 50 µs with VAES, 100 µs with AES-NI.
const POLL_BYTES: usize = 512 << 10;

/// A request that the base has.
struct Request {
    tag: Tag,
    /// For a read: where its data goes.
    target: Option<(Lba, Sgl)>,
    buffer: Option<Buffer>,
    /// The buffer is the channel's own.
    is_own: bool,
}

/// The buffer that only this channel uses.
enum Own {
    /// It was never needed.
    Unallocated,
    Free(Buffer),
    InUse,
}

/// What the channels of a disk have in common.
pub(crate) struct Setup {
    /// The keys of the disk, as far as the channel has seen.
    pub epoch: Arc<Epoch>,
    /// That of the epoch.
    pub cipher: Cipher,
    pub part: Part,
    pub pool_bytes: PoolBytes,
    /// Requests in flight.
    pub depth: u32,
}

pub(crate) struct CryptoChannel {
    base: BdevChannel,
    setup: Setup,
    pool: Rc<Pool>,
    /// The pool's buffers that this channel has.
    share: Share,
    own: Own,
    requests: Slots<Request>,
    /// Requests that have no buffer yet, in the order of their submission.
    waiting: VecDeque<Io>,
    /// Requests that the base has completed, and whose data is not decrypted yet.
    completed: VecDeque<Completion>,
    from_base: Vec<Completion>,
    /// Completions of requests that the base never had.
    ended: Vec<Completion>,
    root: RootId,
}

impl Channel for CryptoChannel {
    #[inline]
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        if !io.op.has_data() {
            let key = self.requests.add(Request { tag: io.tag, target: None, buffer: None, is_own: false });
            self.submit_to_base(Io { tag: Tag(key.raw()), ..*io }, cx);
        } else if !self.waiting.is_empty() || !self.try_start(io, cx) {
            self.waiting.push_back(*io);
        }
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        let before = self.waiting.len();
        self.waiting.retain(|io| io.tag != tag);
        for _ in self.waiting.len()..before {
            self.ended.push(Completion { tag, status: Status::Aborted });
            cx.wake(self.root);
        }
        for (key, _) in self.requests.iter().filter(|(_, request)| request.tag == tag) {
            self.base.abort(Tag(key.raw()), cx);
        }
    }

    fn is_revocable(&self, tag: Tag) -> bool {
        let ours = |base_tag: Tag| {
            let request = self.requests.get(Slot::from_raw(base_tag.0));
            request.is_some_and(|request| request.tag == tag)
        };
        self.waiting.iter().all(|io| io.tag != tag) && self.base.are_revocable(ours)
    }

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        if !self.setup.epoch.is_settled() {
            // Also while no request comes: the old key is freed with the last reference to it.
            self.see_last_epoch();
        }
        self.base.poll(cx, &mut self.from_base);
        self.completed.extend(self.from_base.drain(..));
        let mut bytes = 0;
        while bytes < POLL_BYTES {
            let Some(completion) = self.completed.pop_front() else { break };
            bytes += self.complete(completion, out);
        }
        while bytes < POLL_BYTES {
            let Some(io) = self.waiting.front().copied() else { break };
            if !self.try_start(&io, cx) {
                break;
            }
            self.waiting.pop_front();
            bytes += io.data.len() as usize;
        }
        if bytes >= POLL_BYTES {
            cx.wake(self.root);
        }
        out.append(&mut self.ended);
    }
}

impl CryptoChannel {
    pub fn new(base: BdevChannel, setup: Setup, root: RootId, cx: &mut Cx) -> Self {
        let pool = cx.local_state::<Pool>();
        pool.open();
        let (requests, share) = (Slots::new(setup.depth.min(64)), Share::new(setup.pool_bytes));
        Self {
            base,
            setup,
            pool,
            share,
            own: Own::Unallocated,
            requests,
            waiting: VecDeque::new(),
            completed: VecDeque::new(),
            from_base: Vec::new(),
            ended: Vec::new(),
            root,
        }
    }

    /// Sends a read or write to the base, if there is a buffer for it. Returns false if it must wait for one.
    #[inline]
    fn try_start(&mut self, io: &Io, cx: &mut Cx) -> bool {
        let is_settled = self.setup.epoch.is_settled();
        if !is_settled && self.refuses(io, cx) {
            return true;
        }
        let len = io.data.len() as usize;
        let Some((mut buffer, is_own)) = self.take_buffer(len) else { return false };
        let target = if io.op == Op::Write {
            let to = &mut buffer.bytes_mut()[..len];
            match is_settled {
                true => self.setup.cipher.encrypt(io.lba, &io.data, to),
                false => self.setup.epoch.encrypt(io.lba, &io.data, to),
            }
            None
        } else {
            Some((io.lba, io.data))
        };
        let data = buffer.lend().first(io.data.len());
        let key = self.requests.add(Request { tag: io.tag, target, buffer: Some(buffer), is_own });
        self.submit_to_base(Io { tag: Tag(key.raw()), data, ..*io }, cx);
        true
    }

    /// Sends a request to the blocks of the base that it concerns.
    #[inline]
    fn submit_to_base(&mut self, io: Io, cx: &mut Cx) {
        let (lba, blocks) =
            if io.op == Op::Flush { (io.lba, io.blocks) } else { self.setup.part.on_base(io.lba, io.blocks) };
        self.base.submit(Io { lba, blocks, ..io }, cx);
    }

    /// Moves on to the last epoch, and fails a request for blocks in an unknown state.
    #[cold]
    fn refuses(&mut self, io: &Io, cx: &mut Cx) -> bool {
        self.see_last_epoch();
        let is_broken = self.setup.epoch.is_broken(io.lba, io.blocks);
        if is_broken {
            self.ended.push(Completion { tag: io.tag, status: Status::Medium });
            cx.wake(self.root);
        }
        is_broken
    }

    #[cold]
    fn see_last_epoch(&mut self) {
        while let Some(epoch) = self.setup.epoch.successor().cloned() {
            self.setup.cipher = epoch.cipher.clone();
            self.setup.epoch = epoch;
        }
    }

    /// Takes a buffer of the pool, or the channel's own. The buffer may be longer than `len`.
    #[inline]
    fn take_buffer(&mut self, len: usize) -> Option<(Buffer, bool)> {
        if let Some(buffer) = self.pool.take(&mut self.share, len) {
            return Some((buffer, false));
        }
        match std::mem::replace(&mut self.own, Own::InUse) {
            Own::Free(buffer) => Some((buffer, true)),
            Own::Unallocated => {
                // Every request fits: its bytes are at most the larger one of these.
                let size = BUFFER_MAX.max(self.setup.part.block_size as usize);
                Some((Buffer::new(size, PAGE as usize), true))
            }
            Own::InUse => None,
        }
    }

    /// Ends a request that the base has completed. Returns the bytes decrypted.
    #[inline]
    fn complete(&mut self, Completion { tag, status }: Completion, out: &mut Vec<Completion>) -> usize {
        let request = self.requests.remove(Slot::from_raw(tag.0)).expect("a base completes a request once");
        let mut bytes = 0;
        if let Some(mut buffer) = request.buffer {
            buffer.reclaim();
            if let Some((lba, data)) = request.target.filter(|_| status.is_ok()) {
                bytes = data.len() as usize;
                let from = &mut buffer.bytes_mut()[..bytes];
                match self.setup.epoch.is_settled() {
                    true => self.setup.cipher.decrypt(lba, from, &data),
                    false => self.setup.epoch.decrypt(lba, from, &data),
                }
            }
            self.give_back(buffer, request.is_own);
        }
        out.push(Completion { tag: request.tag, status });
        bytes
    }

    #[inline]
    fn give_back(&mut self, buffer: Buffer, is_own: bool) {
        if is_own {
            self.own = Own::Free(buffer);
        } else {
            self.pool.give_back(&mut self.share, buffer);
        }
    }
}

impl Drop for CryptoChannel {
    fn drop(&mut self) {
        self.pool.close(&self.share);
    }
}
