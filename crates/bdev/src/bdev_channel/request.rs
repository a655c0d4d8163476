//! A request between its submission and its completion. Reactor context.

use super::shape::Shape;
use crate::{Blocks, Bytes, Io, Lba, Op, Status, Tag};
use aryk_dma::Sgl;
use aryk_reactor::Nanos;
use std::ops::Range;

/// Where a request is. It leaves `Limited`, `Held` and `Compound` for `Queued`, and `Queued` for `AtDevice`; a compound
/// request goes back from `AtDevice` to `Queued` with each of its steps, and a compare may be `Held` before its first step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Place {
    /// The disk's rate limits hold the request: it stands in a line of the channel's throttle, and has not begun.
    Limited,
    /// A fence holds the request off: it stands in the fences' list.
    Held,
    /// The request has a piece to send, even if it is an empty one, as of a flush: it stands in the channel's queue, or is
    /// being sent.
    Queued,
    /// The request has nothing more to send. It completes with the last of its pieces at the device.
    AtDevice,
    /// An emulated compound request that waits for its turn or for its blocks: nothing of it is queued or at the device.
    Compound,
}

/// How far a request has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Progress {
    /// The device has had no piece of the request.
    Waits,
    /// The device has had its first piece.
    Begun,
    /// The request was aborted, and the device has an abort for each piece that it has.
    Aborted,
}

/// A request in flight. `lba`, `blocks` and `data` are the part that has not gone to the device.
pub(super) struct Request {
    pub tag: Tag,
    /// The operation that the opener asked for.
    pub asked: Op,
    /// The operation for the device: `asked`, or the step of an emulated compound request that is under way.
    pub op: Op,
    pub fua: bool,
    pub may_unmap: bool,
    pub place: Place,
    pub progress: Progress,
    pub status: Status,
    /// Pieces that the device has.
    pub pieces: u32,
    pub lba: Lba,
    pub blocks: Blocks,
    /// The first block that a copy reads.
    pub source: Lba,
    pub data: Sgl,
    /// Bytes of all its blocks.
    pub bytes: Bytes,
    pub started: Nanos,
    /// How long it waited before its first piece went to the device, in nanoseconds; until then, the part of that time
    /// which is counted already.
    pub waited_ns: u64,
}

impl Request {
    /// A request that is submitted now.
    #[inline]
    pub const fn new(io: &Io, bytes: Bytes, now: Nanos, place: Place) -> Self {
        let is_sent = matches!(place, Place::AtDevice);
        Self {
            tag: io.tag,
            asked: io.op,
            op: io.op,
            fua: io.fua,
            may_unmap: io.may_unmap,
            place,
            progress: if is_sent { Progress::Begun } else { Progress::Waits },
            status: Status::Ok,
            pieces: is_sent as u32,
            lba: io.lba,
            blocks: io.blocks,
            source: io.source,
            data: io.data,
            bytes,
            started: now,
            waited_ns: 0,
        }
    }

    /// A request of `bytes` bytes that goes to the device now, whole: nothing of it is left.
    #[inline(always)]
    pub fn sent(io: &Io, bytes: Bytes, now: Nanos) -> Self {
        Self {
            tag: io.tag,
            asked: io.op,
            op: io.op,
            fua: io.fua,
            may_unmap: false,
            place: Place::AtDevice,
            progress: Progress::Begun,
            status: Status::Ok,
            pieces: 1,
            lba: io.lba + io.blocks,
            blocks: Blocks::ZERO,
            source: Lba::ZERO,
            data: Sgl::EMPTY,
            bytes,
            started: now,
            waited_ns: 0,
        }
    }

    /// Moves the request to another place.
    #[inline]
    pub fn set_place(&mut self, to: Place) {
        use Place::{AtDevice, Compound, Held, Limited, Queued};
        let is_allowed = match (self.place, to) {
            (Limited | Held | Compound, Queued) | (Queued, Held | Compound | Queued | AtDevice) => true,
            // A compare, which is held off as reads are.
            (Compound, Held) | (Held, Compound) => true,
            (AtDevice, AtDevice) => true,
            // A compound request begins its next step.
            (AtDevice, Queued) => self.asked.is_compound() && self.pieces == 0,
            _ => false,
        };
        debug_assert!(
            is_allowed,
            "{:?} of {} pieces goes from {:?} to {to:?}",
            self.asked, self.pieces, self.place
        );
        self.place = to;
    }

    /// The part of it that has not gone to the device, as a request.
    pub const fn rest(&self) -> Io {
        let &Self { tag, op, fua, may_unmap, lba, blocks, source, data, .. } = self;
        Io { tag, op, fua, may_unmap, lba, blocks, source, data }
    }

    /// Whether the channel makes it of reads and writes, and has begun to.
    #[inline]
    pub const fn is_emulated(&self) -> bool {
        matches!(self.place, Place::Compound) || self.op as u8 != self.asked as u8
    }

    /// The blocks that it is about, whether they have gone to the device or not.
    pub fn range(&self, shape: &Shape) -> Range<Lba> {
        let end = self.lba + self.blocks;
        debug_assert!(
            Lba::ZERO + shape.blocks_of(self.bytes) <= end,
            "what has gone of a request lies before its rest"
        );
        end - shape.blocks_of(self.bytes)..end
    }

    /// Whether it is an emulated compare-and-write that has written a piece. Such a request writes the rest too: a reader
    /// finds all of it or nothing.
    pub fn has_begun_to_swap(&self, shape: &Shape) -> bool {
        let is_swap = matches!((self.asked, self.op), (Op::CompareAndWrite, Op::Write));
        is_swap && self.blocks < shape.blocks_of(self.bytes)
    }
}
