//! The I/O queue pairs of a controller, as the controller knows them: their memory, and how far each is in a reset. Control
//! context.

use std::sync::Arc;

use aryk_pci::Function;

use crate::data::{SglSupport, list_bytes};
use crate::memory::{DmaMemory, MemoryError};
use crate::queue::{DEPTH_MAX, Layout, Timeouts};

/// What the owner asks for in a new queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairRequest {
    /// Most commands in flight; lowered to what the controller's queues hold.
    pub depth: u16,
    /// The MSI-X vector of its completions; `None` for a pair that is only polled.
    pub vector: Option<u16>,
}

/// How far a pair is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The controller does not have the queues; they can be created.
    Waiting,
    /// The queues are being created; deleted at once after that, if the owner no longer wants them.
    Creating { is_wanted: bool },
    /// The controller has the queues.
    Live,
    /// The queues are being deleted; created again after that, or not.
    Deleting { again: bool },
    /// The controller no longer has the queues; the owner must rewind the pair first.
    Ended,
}

/// A pair's properties that resets do not change.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) qid: u16,
    pub(super) entries: u32,
    pub(super) depth: u16,
    pub(super) page: u64,
    pub(super) sgl: SglSupport,
    /// Most bytes of a command, for which its list has room.
    pub(super) transfer: u64,
    pub(super) list: u64,
    pub(super) timeouts: Timeouts,
    pub(super) controller: u64,
}

impl Shape {
    pub(super) const fn layout(&self) -> Layout {
        Layout {
            qid: self.qid,
            controller: self.controller,
            entries: self.entries,
            depth: self.depth,
            page: self.page,
            sgl: self.sgl,
            list: self.list,
            timeouts: self.timeouts,
        }
    }
}

/// A queue pair of the controller.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) shape: Shape,
    pub(super) vector: Option<u16>,
    pub(super) memory: DmaMemory,
    pub(super) stage: Stage,
    /// The owner has the [`crate::queue::QueuePair`].
    pub(super) is_given_out: bool,
    /// The owner has quiesced the pair for the reset or the shutdown under way.
    pub(super) is_quiesced: bool,
}

impl Pair {
    pub(super) const fn qid(&self) -> u16 {
        self.shape.qid
    }
}

/// The properties of a new pair whose commands transfer up to `transfer` bytes.
pub(super) struct NewPair {
    pub(super) qid: u16,
    pub(super) controller: u64,
    pub(super) entries_max: u32,
    pub(super) page: u64,
    pub(super) sgl: SglSupport,
    pub(super) transfer: u64,
    pub(super) pieces: u32,
    pub(super) timeouts: Timeouts,
}

impl NewPair {
    /// Allocates the pair's memory.
    pub(super) fn create(
        self,
        request: PairRequest,
        function: &Arc<dyn Function>,
    ) -> Result<Pair, MemoryError> {
        // One entry stays free, so that a full queue is not an empty one.
        let wanted = (u32::from(request.depth.clamp(1, DEPTH_MAX)) + 1).next_power_of_two();
        let entries = wanted.min(self.entries_max);
        let depth = u32::from(request.depth.clamp(1, DEPTH_MAX)).min(entries - 1) as u16;
        let list = list_bytes(self.transfer, self.pieces, self.sgl, self.page);
        let Self { qid, controller, page, sgl, transfer, timeouts, .. } = self;
        let shape = Shape { qid, entries, depth, page, sgl, transfer, list, timeouts, controller };
        let memory = DmaMemory::new(function, shape.layout().len(), page)?;
        Ok(Pair {
            shape,
            vector: request.vector,
            memory,
            stage: Stage::Waiting,
            is_given_out: false,
            is_quiesced: false,
        })
    }
}

/// Whether the doorbells of `pairs` queue pairs, and those of the admin queue, lie in one page of shadow doorbells.
pub(super) const fn has_room_for_shadows(pairs: u16, stride: u64, page: u64) -> bool {
    2 * (pairs as u64 + 1) * stride <= page
}
