//! Requests that are made of reads and writes: compare, compare-and-write, copy. Reactor context.
//!
//! A compound request is carried out in chunks of a bounce buffer: each chunk is read, then compared or written. The
//! request's slot stays the same; in each step its [`Request`] is the read or write that is under way. A compound request
//! that writes has its blocks to itself while it runs ([`crate::ranges`]).
//!
//! An aborted request begins no further step: if it is aborted while it reads, it writes nothing. A compare-and-write that has
//! written a piece writes the rest and completes. A module may still give up a piece that it holds; then the request ends as
//! aborted, with a part written.
//!
//! A channel runs as many compound requests at one time as it has buffers, which it allocates when they are first needed.
//! The others wait in the channel's line and have no claim in the disk's table: the table and the list of running requests
//! do not grow with the number of requests that a guest submits.

use super::request::{Place, Progress, Request};
use super::shape::Shape;
use super::{BdevChannel, make_room};
use crate::cell::Command;
use crate::ranges::{self, Extent, HeldOff, RangeLock, Wanted};
use crate::{Blocks, Bytes, Completion, Lba, Op, Status};
use aryk_dma::{Buffer, PAGE, Sgl};
use aryk_reactor::Cx;
use aryk_slots::Key;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes in a bounce buffer, unless one block has more.
const BUFFER: Bytes = Bytes(64 * 1024);

/// Compound requests of a channel that run at one time.
const RUNNING_MAX: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Step {
    /// Waits for its blocks, even if it has ended.
    Waiting,
    Reading,
    Writing,
}

struct Compound {
    key: Key,
    op: Op,
    fua: bool,
    step: Step,
    lba: Lba,
    source: Lba,
    blocks: Blocks,
    data: Sgl,
    /// Blocks of it that are compared or copied.
    done: Blocks,
    /// Blocks in the chunk that is under way.
    chunk: Blocks,
    buffer: Buffer,
    /// The buffer is the module's.
    is_lent: bool,
    /// Its claim in the disk's table ends when this is dropped.
    _wanted: Wanted,
    lock: Option<RangeLock>,
}

impl Compound {
    /// The blocks that no other request may change while this one runs.
    fn extent(&self) -> Extent {
        let of = |lba| lba..lba + self.blocks;
        if self.op == Op::Copy { Extent([of(self.lba), of(self.source)]) } else { Extent::of(of(self.lba)) }
    }

    /// Where in it the chunk under way lies. A copy to behind its source goes from its end to its beginning, so that it
    /// reads no block that it has written.
    fn offset(&self) -> Blocks {
        if self.op == Op::Copy && self.lba > self.source {
            self.blocks - self.done - self.chunk
        } else {
            self.done
        }
    }

    /// The memory of the chunk under way, for the module.
    fn lend(&mut self, shape: &Shape) -> Sgl {
        assert!(!self.is_lent, "the module has the buffer of one step");
        self.is_lent = true;
        self.buffer.lend().slice(0, shape.data_len(self.chunk))
    }

    /// The module is done with it.
    fn reclaim(&mut self) {
        if std::mem::take(&mut self.is_lent) {
            self.buffer.reclaim();
        }
    }
}

#[derive(Default)]
pub(super) struct Compounds {
    running: Vec<Compound>,
    /// Buffers of those that have ended.
    free: Vec<Buffer>,
    /// Those that have not begun; some may have ended.
    waiting: VecDeque<Key>,
}

impl Compounds {
    fn find(&mut self, key: Key) -> &mut Compound {
        self.running.iter_mut().find(|c| c.key == key).expect("it runs until it ends")
    }

    /// Whether some have not begun.
    #[inline]
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Gives up the place of one that has ended.
    fn leave(&mut self, index: usize) {
        let mut compound = self.running.swap_remove(index);
        compound.reclaim();
        self.free.push(compound.buffer);
    }

    fn is_full(&self) -> bool {
        self.running.len() == RUNNING_MAX
    }
}

/// Whether `data` begins with `bytes`.
fn is_same(data: Sgl, bytes: &[u8]) -> bool {
    let mut piece = [0; PAGE as usize];
    bytes.chunks(piece.len()).zip((0..).step_by(PAGE as usize)).all(|(theirs, at)| {
        let ours = &mut piece[..theirs.len()];
        data.read(at, ours);
        ours == theirs
    })
}

impl BdevChannel {
    /// Starts a compound request, at [`Place::Compound`], that the device does not do.
    #[cold]
    pub(super) fn begin_compound(&mut self, key: Key, cx: &mut Cx) {
        if self.compounds.is_full() || self.compounds.has_waiting() {
            make_room(&mut self.compounds.waiting, &self.requests);
            self.compounds.waiting.push_back(key);
        } else {
            self.run_compound(key, cx);
        }
    }

    /// Runs those whose turn it is.
    #[cold]
    pub(super) fn advance_compounds(&mut self, cx: &mut Cx) {
        while !self.compounds.is_full()
            && let Some(key) = self.compounds.waiting.pop_front()
        {
            // A request that was aborted is gone.
            if self.requests.get(key).is_some() {
                self.run_compound(key, cx);
            }
        }
    }

    fn run_compound(&mut self, key: Key, cx: &mut Cx) {
        let request = self.requests.get(key).expect("the caller looked");
        let &Request { op, fua, lba, source, blocks, data, .. } = request;
        // A compare claims no blocks, so a fence that holds off reads holds it off as it does other reads.
        if op == Op::Compare && self.fences.hold_off(op, lba, blocks) {
            self.requests.get_mut(key).expect("just found").set_place(Place::Held);
            return self.add_held(key);
        }
        let (step, done, chunk) = (Step::Waiting, Blocks::ZERO, Blocks::ZERO);
        let bytes = BUFFER.max(Bytes(self.shape.block_size.into())).0 as usize;
        let buffer = self.compounds.free.pop().unwrap_or_else(|| Buffer::new(bytes, PAGE as usize));
        let (wanted, unwanted) = ranges::want();
        let compound = Compound {
            key,
            op,
            fua,
            step,
            lba,
            source,
            blocks,
            data,
            done,
            chunk,
            buffer,
            is_lent: false,
            _wanted: wanted,
            lock: None,
        };
        let extent = compound.extent();
        assert!(!self.compounds.is_full(), "a compound request waits until another has left its place");
        self.compounds.running.push(compound);
        if op == Op::Compare {
            return self.next_chunk(key, cx);
        }
        let (cell, local) = (Rc::downgrade(self.registration.cell()), cx.local().clone());
        let grant = move |lock| {
            local.defer(move |cx| {
                // If the channel is closed, or the request has ended, the lock is dropped.
                if let Some(cell) = cell.upgrade() {
                    cell.command(Command::Granted { key, lock }, cx);
                }
            });
        };
        cx.local()
            .spawn(ranges::hold(Arc::clone(self.bdev()), (extent, HeldOff::Changes), unwanted, grant))
            .detach();
    }

    /// A request has got its blocks. If the request has ended in the meantime, the lock is dropped and its place is free:
    /// the poll runs another request there.
    pub(super) fn granted(&mut self, key: Key, lock: RangeLock, cx: &mut Cx) {
        if self.requests.get(key).is_some() {
            let compound = self.compounds.find(key);
            assert!(
                compound.step == Step::Waiting,
                "a compound request gets its blocks before its first step"
            );
            compound.lock = Some(lock);
            self.next_chunk(key, cx);
        } else if let Some(index) = self.compounds.running.iter().position(|c| c.key == key) {
            self.compounds.leave(index);
        }
    }

    /// Reads the next chunk.
    fn next_chunk(&mut self, key: Key, cx: &mut Cx) {
        let shape = &self.shape;
        let c = self.compounds.find(key);
        assert!(c.done < c.blocks, "a chunk is read while some are left");
        c.chunk = (c.blocks - c.done).min(shape.blocks_of(BUFFER).max(Blocks(1)));
        c.step = Step::Reading;
        let from = if c.op == Op::Copy { c.source } else { c.lba };
        let lba = from + c.offset();
        let data = c.lend(shape);
        self.step(key, Op::Read, false, lba, data, cx);
    }

    /// Sends a read or write of a compound request.
    fn step(&mut self, key: Key, op: Op, fua: bool, lba: Lba, data: Sgl, cx: &mut Cx) {
        let blocks = self.shape.blocks_of(Bytes(data.len().into()));
        assert!(self.shape.data_len(blocks) == data.len(), "a step is of whole blocks");
        let request = self.requests.get_mut(key).expect("it runs until it ends");
        request.set_place(Place::Queued);
        *request = Request { op, fua, lba, blocks, source: Lba::ZERO, data, ..*request };
        self.enqueue(key, cx);
    }

    /// A step of a compound request has ended. Its completion, if that was all.
    #[cold]
    pub(super) fn stepped(&mut self, key: Key, cx: &mut Cx) -> Option<Completion> {
        let request = self.requests.get_mut(key).expect("the caller looked");
        let c = self.compounds.find(key);
        c.reclaim();
        let is_aborted = request.progress == Progress::Aborted;
        if request.status.is_ok() && is_aborted && c.step == Step::Reading {
            request.status = Status::Aborted;
        }
        if !request.status.is_ok() {
            return Some(self.end_compound(key, cx));
        }
        match c.step {
            Step::Waiting => unreachable!("nothing of it is under way"),
            Step::Reading if c.op == Op::Copy => {
                c.step = Step::Writing;
                let (fua, lba) = (c.fua, c.lba + c.offset());
                let data = c.lend(&self.shape);
                self.step(key, Op::Write, fua, lba, data, cx);
                return None;
            }
            Step::Reading => {
                let bytes = self.shape.data_len(c.chunk);
                let expected = c.data.slice(self.shape.data_len(c.done), bytes);
                if !is_same(expected, &c.buffer.bytes()[..bytes as usize]) {
                    request.status = Status::Miscompare;
                    return Some(self.end_compound(key, cx));
                }
            }
            // All of a compare-and-write is written at one time.
            Step::Writing if c.op == Op::CompareAndWrite => return Some(self.end_compound(key, cx)),
            Step::Writing => {}
        }
        c.done += c.chunk;
        if is_aborted && c.done < c.blocks {
            request.status = Status::Aborted;
            return Some(self.end_compound(key, cx));
        }
        if c.done < c.blocks {
            self.next_chunk(key, cx);
        } else if c.op == Op::CompareAndWrite {
            c.step = Step::Writing;
            let (fua, lba, half) = (c.fua, c.lba, c.data.len() / 2);
            let data = c.data.slice(half, half);
            self.step(key, Op::Write, fua, lba, data, cx);
        } else {
            return Some(self.end_compound(key, cx));
        }
        None
    }

    /// Ends a compound request of which the module has nothing. The next poll runs another in its place.
    pub(super) fn end_compound(&mut self, key: Key, cx: &mut Cx) -> Completion {
        let compounds = &mut self.compounds;
        // One that waits for its turn is left in its line. One whose blocks are asked for keeps its place until it has them
        // (`granted`): so a channel never asks for those of more than there are places, however many are aborted.
        if let Some(index) = compounds.running.iter().position(|c| c.key == key)
            && compounds.running[index].step != Step::Waiting
        {
            compounds.leave(index);
        }
        self.complete(key, cx)
    }
}
