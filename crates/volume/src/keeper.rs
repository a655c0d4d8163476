//! The keeper: the manifest, and the blobs that are free. Any context.
//!
//! Edits take effect in memory at once, and are handed to the store in groups, in their order. What may not happen before an edit
//! is durable is a [`Then`]: it comes back when the store has answered. A large group is handed out in pieces, one a turn, which
//! take effect together. A checkpoint is encoded in pieces too, and handed out when no edit of its state waits.

use crate::manifest::checkpoint::Encoding;
use crate::manifest::edit::Content;
use crate::manifest::{Blob, BlobKind, Edit, Manifest, edit};
use crate::{Answer, BlobId, StoreError, StoreFacts, Tag};
use std::collections::{BTreeSet, VecDeque};

/// What happens when an edit is durable.
#[derive(Debug)]
pub(crate) enum Then {
    /// The command has succeeded.
    Answer(Tag, Answer),
    /// The blobs are listed as the log's.
    LogBlobs(Vec<(BlobId, u64)>),
    /// The blobs are in no manifest any more.
    Gone(Vec<BlobId>),
    /// The flush with this number is complete, which has flushed these bytes of the log.
    Flushed { number: u64, bytes: u64 },
    /// The pool is open.
    Opened,
    /// Nothing: the edits only replace what stays valid.
    Nothing,
}

/// Why a blob that has nothing alive is kept, and who reads it.
#[derive(Clone, Copy, Default, Debug)]
struct Use {
    /// Reads in flight.
    pins: u32,
    /// Writes of moved data in flight, or without entries yet.
    moves: u32,
    /// The blob may have entries in memtables until the flush of this number is complete.
    held_until: u64,
    /// A writer appends to the blob.
    is_open: bool,
    /// The blob is in no manifest any more, and waits for its last read.
    is_gone: bool,
    /// The blob is in the list of candidates.
    is_candidate: bool,
}

/// The manifest, and the blobs that are free.
#[derive(Debug)]
pub(crate) struct Keeper {
    pub(crate) manifest: Manifest,
    free: BTreeSet<BlobId>,
    /// Blobs that are free, too, and were not discarded: those freed last. They are written before all others.
    kept: VecDeque<BlobId>,
    /// Whether there are none of these.
    pub(crate) discards_all: bool,
    uses: Vec<Use>,
    next_life: u64,
    next_run: u64,
    /// Edits that took effect and were not handed out.
    pending: Vec<Edit>,
    then: Vec<Then>,
    /// Whether pending edits are handed out at the end of the turn.
    is_wanted: bool,
    /// Pending edits are not complete: they wait for more that take effect together with them.
    is_gathering: bool,
    /// Edits of which a part was handed out.
    group: Option<Group>,
    in_flight: VecDeque<Vec<Then>>,
    edit_bytes: usize,
    checkpoint_bytes: usize,
    is_checkpointing: bool,
    is_checkpoint_wanted: bool,
    encoding: Option<Encoding>,
    /// A copy that is being encoded, whether another one is due, and whether one is being written.
    copy: Option<Encoding>,
    is_copy_due: bool,
    is_copying: bool,
    /// Whether the store has no room for copies.
    has_no_copies: bool,
    bytes_per_turn: usize,
    /// Blobs in which nothing is alive.
    candidates: Vec<BlobId>,
    /// The number of the last complete flush.
    pub(crate) flushed: u64,
    /// Blobs that are in no manifest any more, and are not free yet: they wait for their last read, or are being discarded.
    going: usize,
    /// Blobs of the log's tail.
    pub(crate) log_blobs: VecDeque<BlobId>,
}

/// Edits that take effect together.
#[derive(Debug)]
struct Group {
    edits: VecDeque<Edit>,
    then: Vec<Then>,
}

/// Bytes of edits after which a checkpoint is written, even if the manifest is small.
const CHECKPOINT_BYTES_MIN: usize = 256 << 10;

/// The share of the blobs that are free without a discard, and how many these are at most. A pool under load writes them again
/// soon: its base need neither give their space away nor find it again.
const KEPT_SHARE: usize = 16;
const KEPT_MAX: usize = 64;

impl Keeper {
    /// `bytes_per_turn`: the bytes of edits and checkpoints that a turn encodes.
    pub(crate) fn new(manifest: Manifest, facts: &StoreFacts, bytes_per_turn: usize) -> Self {
        let free = (0..facts.blobs).map(BlobId).filter(|id| !manifest.blobs.contains(*id)).collect();
        let first = u64::from(manifest.opening + 1) << 32;
        let mut keeper = Self {
            free,
            kept: VecDeque::new(),
            discards_all: false,
            uses: vec![Use::default(); facts.blobs as usize],
            next_life: first,
            next_run: first.max(manifest.newest_run().map_or(0, |run| run.0 + 1)),
            pending: Vec::new(),
            then: Vec::new(),
            is_wanted: false,
            is_gathering: false,
            group: None,
            in_flight: VecDeque::new(),
            edit_bytes: 0,
            checkpoint_bytes: 0,
            is_checkpointing: false,
            is_checkpoint_wanted: false,
            encoding: None,
            copy: None,
            is_copy_due: false,
            is_copying: false,
            has_no_copies: false,
            bytes_per_turn,
            candidates: Vec::new(),
            flushed: 0,
            going: 0,
            log_blobs: manifest.log.blobs.iter().copied().collect(),
            manifest,
        };
        let dead: Vec<_> =
            keeper.manifest.blobs.iter().filter(|(_, blob)| blob.live == 0).map(|(id, _)| id).collect();
        dead.into_iter().for_each(|id| keeper.add_candidate(id));
        keeper
    }

    /// Makes a change of the manifest.
    ///
    /// # Panics
    /// If the edit does not fit: the engine makes only edits that do.
    pub(crate) fn edit(&mut self, edit: Edit) {
        let touched: Vec<BlobId> = match &edit {
            Edit::Live { id, .. } => vec![*id],
            Edit::Merged { partition, first, count, .. } => {
                let levels = &self.manifest.partitions[usize::from(*partition)].levels;
                let old = levels[*first as usize..][..*count as usize].iter().flatten();
                old.map(|run| run.place.blob).collect()
            }
            _ => Vec::new(),
        };
        self.manifest.apply(edit.clone()).expect("an edit of the engine fits its manifest");
        touched.into_iter().for_each(|id| self.add_candidate(id));
        if self.encoding.as_mut().is_some_and(|encoding| !encoding.note(&edit)) {
            self.encoding = Some(Encoding::new(&self.manifest, Content::Checkpoint, self.checkpoint_bytes));
        }
        if self.copy.as_mut().is_some_and(|copy| !copy.note(&edit)) {
            self.copy = Some(Encoding::new(&self.manifest, Content::Copy, 0));
        }
        self.is_copy_due |=
            !matches!(edit, Edit::Blob { .. } | Edit::Live { .. } | Edit::BlobGone { .. } | Edit::Own { .. });
        self.pending.push(edit);
    }

    /// Hands out the pending edits at the end of this turn; `then` happens when they are durable.
    pub(crate) fn commit(&mut self, then: Then) {
        self.then.push(then);
        self.is_wanted = true;
    }

    /// Has all edits from now on wait for more that take effect together with them, or no longer.
    pub(crate) const fn gather(&mut self, is_gathering: bool) {
        self.is_gathering = is_gathering;
    }

    /// The bytes of the edits that are to be handed out now.
    pub(crate) fn take_commit(&mut self) -> Option<Vec<u8>> {
        if self.group.is_none() && self.is_wanted && !self.is_gathering {
            self.is_wanted = false;
            let edits = std::mem::take(&mut self.pending).into();
            self.group = Some(Group { edits, then: std::mem::take(&mut self.then) });
        }
        let mut group = self.group.take()?;
        let (bytes, count) = edit::encode(&self.manifest, self.bytes_per_turn, &group.edits);
        group.edits.drain(..count);
        self.edit_bytes += bytes.len();
        if group.edits.is_empty() {
            self.in_flight.push_back(group.then);
        } else {
            self.in_flight.push_back(Vec::new());
            self.group = Some(group);
        }
        Some(bytes)
    }

    /// Encodes a piece of a checkpoint, if one is due. Returns its bytes when it is complete.
    pub(crate) fn take_checkpoint(&mut self, is_first: bool) -> Option<Vec<u8>> {
        let is_due =
            self.is_checkpoint_wanted || self.edit_bytes > self.checkpoint_bytes.max(CHECKPOINT_BYTES_MIN);
        if self.encoding.is_none() {
            if self.is_checkpointing || !(is_due || is_first) {
                return None;
            }
            self.is_checkpoint_wanted = false;
            self.encoding = Some(Encoding::new(&self.manifest, Content::Checkpoint, self.checkpoint_bytes));
        }
        let is_complete = self.encoding.as_mut()?.step(&self.manifest, self.bytes_per_turn);
        if !is_complete {
            return None;
        }
        if !self.pending.is_empty() || self.group.is_some() {
            // The checkpoint has their changes: it replaces them, so they come before it.
            self.is_wanted |= !self.pending.is_empty();
            return None;
        }
        self.is_checkpointing = true;
        self.edit_bytes = 0;
        let bytes = self.encoding.take()?.finish(&self.manifest);
        self.checkpoint_bytes = bytes.len();
        Some(bytes)
    }

    /// Encodes a piece of a copy of the manifest, if one is due. Returns its bytes when it is complete. Its edits come before it.
    pub(crate) fn take_copy(&mut self) -> Option<Vec<u8>> {
        if self.copy.is_none() {
            if self.is_copying || self.has_no_copies || !std::mem::take(&mut self.is_copy_due) {
                return None;
            }
            self.copy = Some(Encoding::new(&self.manifest, Content::Copy, 0));
        }
        let is_complete = self.copy.as_mut()?.step(&self.manifest, self.bytes_per_turn);
        if !is_complete || !self.pending.is_empty() || self.group.is_some() {
            self.is_wanted |= is_complete && !self.pending.is_empty();
            return None;
        }
        self.is_copying = true;
        Some(self.copy.take()?.finish(&self.manifest))
    }

    /// A copy was written, or could not be.
    pub(crate) fn copy_done(&mut self, result: Result<(), StoreError>) {
        self.is_copying = false;
        self.has_no_copies |= result == Err(StoreError::NoSpace);
    }

    /// Whether the next turn hands out more.
    pub(crate) const fn has_more(&self) -> bool {
        self.group.is_some() || self.encoding.is_some() || self.copy.is_some()
    }

    /// Has a checkpoint written soon.
    pub(crate) const fn request_checkpoint(&mut self) {
        self.is_checkpoint_wanted = !self.is_checkpointing && self.encoding.is_none();
    }

    pub(crate) const fn checkpoint_done(&mut self) {
        self.is_checkpointing = false;
    }

    /// What happens now that the oldest edits in flight are durable. The store answers commits in their order.
    pub(crate) fn commit_done(&mut self) -> Vec<Then> {
        self.in_flight.pop_front().expect("a commit is in flight")
    }

    /// Whether nothing waits for the store.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
            && !self.is_wanted
            && !self.is_checkpointing
            && !self.is_copying
            && !self.has_more()
    }

    /// Whether blobs will be free without anything else being done.
    pub(crate) const fn has_going(&self) -> bool {
        self.going > 0
    }

    /// The number of free blobs.
    pub(crate) fn free(&self) -> usize {
        self.free.len() + self.kept.len()
    }

    /// Begins a life of a free blob, if more than `reserve` are free.
    pub(crate) fn allocate(&mut self, kind: BlobKind, reserve: usize) -> Option<(BlobId, u64)> {
        if self.free() <= reserve {
            return None;
        }
        let id = self.kept.pop_back().or_else(|| self.free.pop_first())?;
        let life = self.next_life;
        self.next_life += 1;
        self.edit(Edit::Blob { id, blob: Blob { kind, life, live: 0 } });
        self.uses[id.0 as usize] = Use { is_open: true, ..Use::default() };
        Some((id, life))
    }

    /// A writer appends to a blob that an earlier opening has begun.
    pub(crate) fn open(&mut self, id: BlobId) {
        self.uses[id.0 as usize].is_open = true;
    }

    /// The name of the next run.
    pub(crate) const fn next_run(&mut self) -> u64 {
        let run = self.next_run;
        self.next_run += 1;
        run
    }

    /// A writer appends nothing more to the blob; memtables may refer to it until the flush of this number is complete.
    pub(crate) fn close(&mut self, id: BlobId, held_until: u64) {
        let blob = &mut self.uses[id.0 as usize];
        blob.is_open = false;
        blob.held_until = blob.held_until.max(held_until);
        self.add_candidate(id);
    }

    /// Memtables refer to the blob until the flush of this number is complete.
    pub(crate) fn hold(&mut self, id: BlobId, until: u64) {
        let blob = &mut self.uses[id.0 as usize];
        blob.held_until = blob.held_until.max(until);
    }

    /// A write of moved data begins; its entries follow.
    pub(crate) fn begin_move(&mut self, id: BlobId) {
        self.uses[id.0 as usize].moves += 1;
    }

    /// The entries of moved data were made, or will not be.
    pub(crate) fn end_move(&mut self, id: BlobId) {
        self.uses[id.0 as usize].moves -= 1;
        self.add_candidate(id);
    }

    /// Whether a writer appends to the blob.
    pub(crate) fn is_open(&self, id: BlobId) -> bool {
        self.uses[id.0 as usize].is_open
    }

    /// Whether entries of the blob may be in memtables only: more is alive than the manifest counts.
    pub(crate) fn is_held(&self, id: BlobId) -> bool {
        let blob = &self.uses[id.0 as usize];
        blob.moves > 0 || blob.held_until > self.flushed
    }

    /// Considers whether the blob can be freed, now or later.
    pub(crate) fn add_candidate(&mut self, id: BlobId) {
        let is_dead = self.manifest.blobs.get(id).is_some_and(|blob| blob.live == 0);
        let blob = &mut self.uses[id.0 as usize];
        if is_dead && !blob.is_candidate {
            blob.is_candidate = true;
            self.candidates.push(id);
        }
    }

    /// Frees a blob at once, of which nothing was said to the store before.
    pub(crate) fn free_at_once(&mut self, id: BlobId) {
        self.edit(Edit::BlobGone { id });
        self.uses[id.0 as usize] = Use::default();
        self.candidates.retain(|candidate| *candidate != id);
        self.free.insert(id);
    }

    /// Ends blobs that nothing refers to. They are free when the edit is durable.
    pub(crate) fn collect(&mut self) {
        let mut gone = Vec::new();
        let mut at = 0;
        while at < self.candidates.len() {
            let id = self.candidates[at];
            let blob = self.uses[id.0 as usize];
            let is_dead = self.manifest.blobs.get(id).is_some_and(|blob| blob.live == 0);
            let is_used = blob.is_open
                || blob.moves > 0
                || blob.held_until > self.flushed
                || self.log_blobs.contains(&id);
            if is_dead && is_used {
                at += 1;
                continue;
            }
            self.candidates.swap_remove(at);
            self.uses[id.0 as usize].is_candidate = false;
            if is_dead {
                self.edit(Edit::BlobGone { id });
                gone.push(id);
            }
        }
        if !gone.is_empty() {
            self.going += gone.len();
            self.commit(Then::Gone(gone));
        }
    }

    /// A blob is in no manifest any more. Returns whether it is to be [`Keeper::freed`] now; otherwise [`Keeper::unpin`] tells
    /// when.
    pub(crate) fn gone(&mut self, id: BlobId) -> bool {
        let blob = &mut self.uses[id.0 as usize];
        blob.is_gone = true;
        blob.pins == 0
    }

    /// A read of the blob starts.
    pub(crate) fn pin(&mut self, id: BlobId) {
        self.uses[id.0 as usize].pins += 1;
    }

    /// A read of the blob has ended. Returns whether the blob is to be [`Keeper::freed`] now.
    pub(crate) fn unpin(&mut self, id: BlobId) -> bool {
        let blob = &mut self.uses[id.0 as usize];
        blob.pins -= 1;
        blob.pins == 0 && blob.is_gone
    }

    /// The blob is free. Returns a blob that is to be discarded: it was freed long ago, and is not free until then.
    pub(crate) fn freed(&mut self, id: BlobId) -> Option<BlobId> {
        self.uses[id.0 as usize] = Use::default();
        self.kept.push_back(id);
        let most = if self.discards_all { 0 } else { (self.uses.len() / KEPT_SHARE).min(KEPT_MAX) };
        if self.kept.len() > most {
            return self.kept.pop_front();
        }
        self.going -= 1;
        None
    }

    /// The blob's space was discarded: it is free.
    pub(crate) fn discarded(&mut self, id: BlobId) {
        self.free.insert(id);
        self.going -= 1;
    }

    /// The store has this many blobs.
    pub(crate) fn grow(&mut self, blobs: u32) {
        let old = self.uses.len() as u32;
        if blobs > old {
            self.uses.resize(blobs as usize, Use::default());
            self.free.extend((old..blobs).map(BlobId));
        }
    }

    /// The life of a blob in use.
    pub(crate) fn life(&self, id: BlobId) -> Option<u64> {
        self.manifest.blobs.get(id).map(|blob| blob.life)
    }
}
