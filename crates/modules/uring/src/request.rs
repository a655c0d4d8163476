//! The state machine of one request: the next call to the kernel, and how its result is handled. Reactor context.
//!
//! A request is executed from its first byte to its last, in as many steps as needed: nearly always one step, directly between
//! its memory and the file. `at` is the offset of the first byte that is not done. After each step the next step is chosen for
//! the remaining bytes, so short transfers, bounced chunks and partial blocks at the edges need no plan.
//!
//! This module decides and copies; the channel starts the calls and keeps the lists.

use crate::OnFull;
use crate::store::{Call, Kind, Store};
use aryk_bdev::{Bytes, Failure, Io, Lba, Op, Status, Tag};
use aryk_dma::{Buffer, Sgl};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Bytes in a bounce buffer, unless the store's blocks are larger. Longer requests use it in chunks.
const BOUNCE: usize = 128 * 1024;

/// The number of unused bounce buffers that a channel keeps.
const KEPT: usize = 32;

/// Delays before a request that found the store full is retried: the first delay and the largest one.
const FULL_DELAY_MIN: Duration = Duration::from_millis(100);
const FULL_DELAY_MAX: Duration = Duration::from_secs(1);

/// Delay before a request is retried for which the kernel had no resources.
pub(crate) const AGAIN_DELAY: Duration = Duration::from_millis(1);

/// Bounce buffers of a channel, allocated when first needed.
#[derive(Debug)]
pub(crate) struct Pool {
    free: Vec<Buffer>,
    len: usize,
    align: usize,
    /// Bytes that were copied between buffers and requests' memory, or filled.
    pub copied: u64,
}

impl Pool {
    pub fn new(store: &Store) -> Self {
        let len = BOUNCE.max(store.alignment.offset as usize);
        Self {
            copied: 0,
            free: Vec::new(),
            len,
            align: (store.alignment.memory as usize).max(aryk_dma::PAGE as usize),
        }
    }

    fn take(&mut self) -> Buffer {
        self.free.pop().unwrap_or_else(|| Buffer::new(self.len, self.align))
    }

    fn give(&mut self, buffer: Buffer) {
        if self.free.len() < KEPT {
            self.free.push(buffer);
        }
    }
}

/// The next action for a request.
#[derive(Debug)]
pub(crate) enum Next {
    /// Start this call to the kernel.
    Start(Call),
    /// Complete the request.
    Done(Status),
    /// Restart the request after this delay.
    Later(Duration),
}

/// The step that the kernel executes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Transferring data between the request's memory and the file.
    Straight,
    /// Transferring a chunk between the bounce buffer and the file.
    Bounced,
    /// Reading the block at an edge, to change a part of it.
    EdgeRead,
    /// Writing this block back.
    EdgeWrite,
    /// Punching a hole, or zeroing a range.
    Allocate,
    /// Making all data of the store durable.
    Sync,
}

/// A request. See the head of this file.
#[derive(Debug)]
pub(crate) struct Request {
    pub tag: Tag,
    pub op: Op,
    /// The caller has aborted the request: it must not be held.
    pub abandoned: bool,
    /// The request is held because the store is full.
    pub held: bool,
    fua: bool,
    /// The blocks of a write-zeroes may become a hole.
    may_unmap: bool,
    /// The request ends with a sync.
    syncs: bool,
    /// The request must use a bounce buffer although its alignment fits.
    unfit: bool,
    /// The store has refused to punch or zero this range, so zeroes are written from a buffer.
    zeroes_by_writes: bool,
    step: Step,
    /// The request's range in the file.
    bytes: Range<u64>,
    at: u64,
    data: Sgl,
    /// The sync at the end is still to be done.
    sync: bool,
    delay: Duration,
    /// The current step: the mode of `fallocate`, the offset in the file, the number of bytes, and how many of them are done.
    mode: i32,
    from: u64,
    len: u64,
    done: u64,
    bounce: Option<Bounce>,
}

#[derive(Debug)]
struct Bounce {
    buffer: Buffer,
    /// Present while the buffer is lent to the kernel.
    view: Option<Sgl>,
}

const fn floor(n: u64, align: u64) -> u64 {
    n & !(align - 1)
}

const fn ceil(n: u64, align: u64) -> u64 {
    floor(n + align - 1, align)
}

impl Request {
    pub fn new(io: &Io, store: &Store) -> Self {
        let (Bytes(start), Bytes(len)) =
            (io.lba.to_bytes(store.block_size), io.blocks.to_bytes(store.block_size));
        let mut bytes = start..start + len;
        if io.op == Op::Unmap {
            // Blocks of the store that the range covers only in part keep their data.
            let align = store.allocation.into();
            let (start, end) = (ceil(bytes.start, align), floor(bytes.end, align));
            bytes = start..end.max(start);
        }
        let mut new = Self {
            tag: io.tag,
            op: io.op,
            abandoned: false,
            held: false,
            fua: io.fua,
            may_unmap: io.may_unmap,
            syncs: match io.op {
                Op::Flush => true,
                Op::WriteZeroes | Op::Unmap => io.fua,
                // A separate sync distinguishes a write-back error (of this write or of earlier ones) from an error of the
                // write itself.
                Op::Write => io.fua && store.is_cached(),
                _ => false,
            },
            unfit: false,
            zeroes_by_writes: false,
            step: Step::Sync,
            at: 0,
            bytes,
            data: io.data,
            sync: false,
            delay: FULL_DELAY_MIN,
            mode: 0,
            from: 0,
            len: 0,
            done: 0,
            bounce: None,
        };
        new.restart();
        new
    }

    /// Restarts the request from its first byte. Repeating the steps that were done changes nothing.
    fn restart(&mut self) {
        (self.at, self.sync) = (self.bytes.start, self.syncs);
    }

    /// Whether the request is within the disk's present size: the disk may have become smaller since the request was checked,
    /// and the file must not grow again.
    #[inline]
    pub fn is_within(&self, store: &Store) -> bool {
        self.bytes.end <= store.blocks().to_bytes(store.block_size).0
    }

    /// The range of the store that the request changes, and whether the claim must be exclusive because blocks are read first.
    pub fn claim(&self, store: &Store) -> (Range<u64>, bool) {
        let align = store.alignment.offset.into();
        let whole = floor(self.bytes.start, align)..ceil(self.bytes.end, align);
        let alone = whole != self.bytes;
        (whole, alone)
    }

    /// Chooses the next step for the bytes from `at` on.
    #[inline]
    pub fn next(&mut self, store: &Store, pool: &mut Pool) -> Next {
        if self.at == self.bytes.end {
            return self.last(store, pool);
        }
        let align = u64::from(store.alignment.offset);
        let reads = self.op == Op::Read;
        if !reads && (!self.at.is_multiple_of(align) || self.bytes.end - self.at < align) {
            return self.edge(align, pool);
        }
        let end = if reads { self.bytes.end } else { floor(self.bytes.end, align) };
        match self.op {
            Op::Read | Op::Write if self.is_fit(end, store) => {
                self.step(Step::Straight, self.at, end - self.at);
            }
            Op::Unmap | Op::WriteZeroes => match (self.allocation(end, store), self.mode(store)) {
                (Some(to), Some(mode)) => {
                    self.mode = mode;
                    self.step(Step::Allocate, self.at, to - self.at);
                }
                // An unmap is advisory, and this store does not support it.
                _ if self.op == Op::Unmap => {
                    self.at = self.bytes.end;
                    return self.last(store, pool);
                }
                // Zeroes are written up to the first offset that the store can zero by itself.
                (None, Some(_)) => {
                    let next = ceil(self.at + 1, store.allocation.into());
                    self.bounce_chunk(next.min(end), align, pool);
                }
                (_, None) => self.bounce_chunk(end, align, pool),
            },
            Op::Read | Op::Write => self.bounce_chunk(end, align, pool),
            Op::Flush => unreachable!("a flush has no bytes"),
            Op::Compare | Op::CompareAndWrite | Op::Copy => {
                unreachable!("the block layer builds it from other operations")
            }
        }
        Next::Start(self.call())
    }

    /// The last steps, after all bytes are done.
    fn last(&mut self, store: &Store, pool: &mut Pool) -> Next {
        if let Some(bounce) = self.bounce.take() {
            pool.give(bounce.buffer);
        }
        if std::mem::take(&mut self.sync) {
            // Earlier acknowledged writes were lost. The kernel reports that to one sync only.
            if store.lost.load(Ordering::Relaxed) {
                return self.fail(libc::EIO, store, pool);
            }
            self.step(Step::Sync, self.at, 0);
            return Next::Start(Call::Sync);
        }
        Next::Done(Status::Ok)
    }

    /// Whether the bytes from `at` to `end` can be transferred directly between the request's memory and the file.
    #[inline]
    fn is_fit(&self, end: u64, store: &Store) -> bool {
        let (memory, offset) = (store.alignment.memory as usize, u64::from(store.alignment.offset));
        if offset == 1 {
            return true;
        }
        let fits = |p: aryk_dma::Seg| {
            (p.base() as usize).is_multiple_of(memory) && (p.len() as u64).is_multiple_of(offset)
        };
        !self.unfit
            && self.at.is_multiple_of(offset)
            && end.is_multiple_of(offset)
            && self.memory(self.at..end).pieces().all(fits)
    }

    fn step(&mut self, step: Step, from: u64, len: u64) {
        (self.step, self.from, self.len, self.done) = (step, from, len, 0);
    }

    /// The part of the request's memory for `bytes` of the file.
    #[inline]
    fn memory(&self, bytes: Range<u64>) -> Sgl {
        if bytes == self.bytes {
            return self.data;
        }
        self.data.slice((bytes.start - self.bytes.start) as u32, (bytes.end - bytes.start) as u32)
    }

    /// Begins the step for the block at `at`, of which only a part changes.
    fn edge(&mut self, align: u64, pool: &mut Pool) -> Next {
        self.step(Step::EdgeRead, floor(self.at, align), align);
        self.buffer(pool).lend();
        Next::Start(self.call())
    }

    /// Begins a step of as many bytes as the bounce buffer holds.
    fn bounce_chunk(&mut self, end: u64, align: u64, pool: &mut Pool) {
        let from = floor(self.at, align);
        let len = (ceil(end, align) - from).min(pool.len as u64);
        self.step(Step::Bounced, from, len);
        pool.copied += len;
        let (op, at) = (self.op, self.at);
        let data = if op == Op::Write { self.memory(at..at + len) } else { Sgl::EMPTY };
        let bounce = self.buffer(pool);
        match op {
            Op::Write => data.read(0, &mut bounce.buffer.bytes_mut()[..len as usize]),
            Op::WriteZeroes => bounce.buffer.bytes_mut()[..len as usize].fill(0),
            _ => {}
        }
        bounce.lend();
    }

    fn buffer(&mut self, pool: &mut Pool) -> &mut Bounce {
        self.bounce.get_or_insert_with(|| Bounce { buffer: pool.take(), view: None })
    }

    /// The call to the kernel for the bytes of this step that are not done.
    #[inline]
    fn call(&self) -> Call {
        let offset = self.from + self.done;
        let buffered = || {
            let view = self.bounce.as_ref().and_then(|b| b.view).expect("lent for this step");
            view.slice(self.done as u32, (self.len - self.done) as u32)
        };
        let (data, writes) = match self.step {
            Step::Sync => return Call::Sync,
            Step::Allocate => return Call::Allocate { mode: self.mode, offset, len: self.len },
            Step::Straight => (self.memory(offset..self.from + self.len), self.op == Op::Write),
            Step::Bounced => (buffered(), self.op != Op::Read),
            Step::EdgeRead => (buffered(), false),
            Step::EdgeWrite => (buffered(), true),
        };
        let dsync = self.fua && !self.syncs;
        if writes { Call::Write { data, offset, dsync } } else { Call::Read { data, offset } }
    }

    /// The end of the range from `at` to at most `end` that the store can zero or punch by itself; `None` if it is empty.
    fn allocation(&self, end: u64, store: &Store) -> Option<u64> {
        let unit = u64::from(store.allocation);
        let to = floor(end, unit);
        (self.at.is_multiple_of(unit) && to > self.at).then_some(to)
    }

    /// The mode for `fallocate(2)`; `None` if the store supports none. Blocks that may not be unmapped stay allocated, or are
    /// allocated. A hole in a file reads as zeroes; on a block device only a zeroed range reliably does.
    fn mode(&self, store: &Store) -> Option<i32> {
        let can = |ability: &AtomicBool| ability.load(Ordering::Relaxed) && !self.zeroes_by_writes;
        let may_punch = match self.op {
            Op::Unmap => true,
            _ => self.may_unmap && store.kind == Kind::File,
        };
        if may_punch && can(&store.punches) {
            Some(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
        } else if self.op == Op::WriteZeroes && can(&store.zeroes) {
            Some(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE)
        } else {
            None
        }
    }

    /// Handles the kernel's answer to a call and chooses the next action.
    #[inline]
    pub fn answered(&mut self, result: i32, store: &Store, pool: &mut Pool) -> Next {
        if result < 0 {
            return self.failed(-result, store, pool);
        }
        match self.step {
            // If two syncs run at the same time, the kernel reports an error to only one of them. That one sets this flag, and
            // the other checks it.
            Step::Sync if store.lost.load(Ordering::Relaxed) => return self.fail(libc::EIO, store, pool),
            Step::Sync => {}
            Step::Allocate => self.at = self.from + self.len,
            Step::Straight | Step::Bounced | Step::EdgeRead | Step::EdgeWrite => {
                let (before, done) = (self.done, self.done + result as u64);
                self.done = done;
                if done < self.len {
                    return self.short(before, store, pool);
                }
                if self.moved(pool) {
                    return Next::Start(self.call());
                }
            }
        }
        self.next(store, pool)
    }

    /// Continues a step that has transferred only a part of its data; `before` is the number of bytes done before.
    #[cold]
    fn short(&mut self, before: u64, store: &Store, pool: &mut Pool) -> Next {
        // Direct I/O can continue only at a multiple of the alignment.
        self.done = floor(self.done, store.alignment.offset.into());
        if self.done > before {
            return Next::Start(self.call());
        }
        // Another program has truncated the file.
        self.fail(libc::EIO, store, pool)
    }

    /// Ends a step that has transferred all its data. Returns whether another step follows at the same place.
    fn moved(&mut self, pool: &mut Pool) -> bool {
        let end = (self.from + self.len).min(self.bytes.end);
        if let Some(bounce) = &mut self.bounce {
            bounce.reclaim();
        }
        let part = (self.at - self.from) as usize..(end - self.from) as usize;
        if self.bounce.is_some() {
            pool.copied += part.len() as u64;
        }
        match (self.step, self.op) {
            (Step::Bounced, Op::Read) => {
                let bounce = self.bounce.as_ref().expect("used by this step");
                self.memory(self.at..end).write(0, &bounce.buffer.bytes()[part]);
            }
            (Step::EdgeRead, op) => {
                let data = if op == Op::Write { self.memory(self.at..end) } else { Sgl::EMPTY };
                let bounce = self.bounce.as_mut().expect("used by this step");
                let changed = &mut bounce.buffer.bytes_mut()[part];
                if op == Op::Write {
                    data.read(0, changed)
                } else {
                    changed.fill(0)
                }
                bounce.lend();
                (self.step, self.done) = (Step::EdgeWrite, 0);
                return true;
            }
            _ => {}
        }
        self.at = end;
        false
    }

    /// Classifies an error of the kernel. An unknown errno is a failure of the store.
    #[cold]
    fn failed(&mut self, errno: i32, store: &Store, pool: &mut Pool) -> Next {
        match (errno, self.step) {
            // The call has not begun, or the kernel lacked memory for it: both are temporary.
            (libc::EINTR, _) => Next::Start(self.call()),
            (libc::EAGAIN, _) => self.later(AGAIN_DELAY, pool),
            // The store needs a stricter alignment than it reports.
            (libc::EINVAL, Step::Straight) if store.alignment.offset > 1 && !self.unfit => {
                self.unfit = true;
                self.next(store, pool)
            }
            (libc::EOPNOTSUPP | libc::ENOSYS, Step::Allocate) => {
                let punched = self.mode & libc::FALLOC_FL_PUNCH_HOLE != 0;
                let can = if punched { &store.punches } else { &store.zeroes };
                can.store(false, Ordering::Relaxed);
                self.next(store, pool)
            }
            // The store refuses this range: it needs another alignment than it reports. Other ranges may succeed.
            (libc::EINVAL, Step::Allocate) => {
                self.zeroes_by_writes = true;
                self.next(store, pool)
            }
            // All failed syncs end here, so no other call consumes a write-back error, which the kernel reports once.
            (_, Step::Sync) => {
                store.lost.fetch_or(store.is_cached(), Ordering::Relaxed);
                self.fail(errno, store, pool)
            }
            _ => {
                let is_lost = self.op.is_change() && store.may_report_earlier(errno);
                store.lost.fetch_or(is_lost, Ordering::Relaxed);
                self.refused(errno, store, pool)
            }
        }
    }

    /// Handles a failed step: holds the request if the store is full and `on_full` is [`OnFull::Hold`]; otherwise fails it.
    fn refused(&mut self, errno: i32, store: &Store, pool: &mut Pool) -> Next {
        if !matches!(errno, libc::ENOSPC | libc::EDQUOT) || store.on_full == OnFull::Error {
            return self.fail(errno, store, pool);
        }
        let delay = self.delay;
        self.delay = (delay * 2).min(FULL_DELAY_MAX);
        if !std::mem::replace(&mut self.held, true) {
            store.hold();
        }
        self.later(delay, pool)
    }

    pub fn later(&mut self, delay: Duration, pool: &mut Pool) -> Next {
        self.put_buffer_back(pool);
        self.restart();
        Next::Later(delay)
    }

    fn fail(&mut self, errno: i32, store: &Store, pool: &mut Pool) -> Next {
        self.put_buffer_back(pool);
        let block_at = |offset| Lba::ZERO + Bytes(offset).whole_blocks(store.block_size);
        let lba = block_at(self.bytes.start);
        let blocks = block_at(self.bytes.end) - lba;
        store.failed(Failure::now(self.op, lba, blocks, errno));
        Next::Done(match errno {
            libc::ENOSPC | libc::EDQUOT => Status::NoSpace,
            _ => Status::Medium,
        })
    }

    fn put_buffer_back(&mut self, pool: &mut Pool) {
        if let Some(mut bounce) = self.bounce.take() {
            bounce.reclaim();
            pool.give(bounce.buffer);
        }
    }
}

impl Bounce {
    fn lend(&mut self) {
        self.view = Some(self.buffer.lend());
    }

    fn reclaim(&mut self) {
        if self.view.take().is_some() {
            self.buffer.reclaim();
        }
    }
}
