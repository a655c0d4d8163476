//! What the pool hands out, and to whom each answer of the store belongs. Any context.

use crate::dense::DenseKey;
use crate::verify::Piece;
use crate::{BlobId, CommandReply, OpId, Reply, StoreOp};
use aryk_slots::{Key, Slots};
use aryk_volume_index::{PageRead, Run, RunId};
use std::collections::VecDeque;

/// Whom the answer to an operation concerns.
#[derive(Debug)]
pub(crate) enum Owner {
    /// The log, for the frame with this sequence.
    Frame {
        sequence: u64,
    },
    /// A read request: data of blocks from `block` on, with their checksums.
    Data {
        request: Key,
        blob: BlobId,
        block: u64,
        checksums: Vec<u32>,
    },
    /// A request that needs a piece of a foreign disk, for its memory from byte `at` on.
    Foreign {
        request: Key,
        at: u32,
        len: u32,
    },
    /// Lookups: an index page.
    Page {
        run: RunId,
        page: u32,
        blob: BlobId,
    },
    /// Lookups: the header of a dense frame.
    DenseHeader {
        key: DenseKey,
    },
    /// A merge: pages of its inputs.
    MergeRead {
        job: usize,
        read: PageRead,
    },
    /// A merge: pages of its output.
    IndexWrite {
        job: usize,
    },
    /// The keeper. Then frames of the log below this sequence are durable.
    Commit {
        durable: u64,
    },
    Checkpoint,
    /// The keeper: a copy of the manifest.
    Copy,
    Discard {
        blob: BlobId,
    },
    /// The flush gate, and what is durable then.
    Flush {
        durable: u64,
    },
    /// Recovery: the log.
    Recovery {
        len: u32,
    },
    /// The cleaner: frames of its victim.
    CleanRead {
        blob: BlobId,
        len: u32,
    },
    /// The cleaner: what it has moved.
    CleanWrite,
    /// Compaction: blocks of its range, from this block of the gathered data on.
    CompactRead {
        blob: BlobId,
        at: usize,
        blocks: usize,
    },
    /// Compaction: what it has gathered.
    CompactWrite,
    /// A volume that is inflated: what was copied.
    CopyWrite,
    /// A check: data.
    Check {
        piece: Piece,
    },
    /// The scrub: data.
    ScrubData {
        piece: Piece,
    },
    /// The scrub: so many pages of a run, from this one on.
    ScrubPages {
        run: Box<Run>,
        page: u32,
        pages: u32,
        partition: usize,
    },
}

/// What the pool hands out.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub(crate) ops: VecDeque<(OpId, StoreOp)>,
    owners: Slots<Owner>,
    pub(crate) replies: VecDeque<Reply>,
    pub(crate) command_replies: VecDeque<CommandReply>,
}

impl Outbox {
    pub(crate) fn new() -> Self {
        Self {
            ops: VecDeque::new(),
            owners: Slots::new(64),
            replies: VecDeque::new(),
            command_replies: VecDeque::new(),
        }
    }

    /// Hands out an operation.
    pub(crate) fn op(&mut self, owner: Owner, op: StoreOp) {
        let id = OpId(self.owners.add(owner).raw());
        self.ops.push_back((id, op));
    }

    /// Takes the owner of an operation that was answered.
    ///
    /// # Panics
    /// If the operation was answered before.
    pub(crate) fn take_owner(&mut self, id: OpId) -> Owner {
        self.owners.remove(Key::from_raw(id.0)).expect("each operation is answered once")
    }

    /// The owner of an operation that was not answered.
    pub(crate) fn owner(&self, id: OpId) -> Option<&Owner> {
        self.owners.get(Key::from_raw(id.0))
    }

    /// Operations that were not answered.
    pub(crate) const fn in_flight(&self) -> u32 {
        self.owners.len()
    }
}
