//! A pool: one keeper, the log and the partitions, on one thread. Any context.
//!
//! The caller drives it by turns: it passes what arrived ([`Pool::submit`], [`Pool::command`], [`Pool::completed`]), ends the
//! turn ([`Pool::turn`]), and takes what is to be done ([`Pool::next_op`], [`Pool::next_reply`], [`Pool::next_command_reply`])
//! until there is nothing. Writes of one turn are committed as a group.
//!
//! The parts of a pool are in files of their own, each with an `impl Pool`: reads (`read.rs`), writes (`write.rs`), commands
//! (`admin.rs`), recovery (`recover.rs`), flushes and merges of the index (`levels.rs`), the cleaner (`clean.rs`), compaction
//! (`compact.rs`), back-pressure (`pressure.rs`), space that is reserved (`reserve.rs`), and the scrub (`scrub.rs`).

use crate::active::{Active, Runtime};
use crate::buffers::Buffers;
use crate::clean::Cleaner;
use crate::compact::Compactor;
use crate::dense::{DenseCache, DenseKey};
use crate::keeper::{Keeper, Then};
use crate::levels::Jobs;
use crate::loading;
use crate::log::Log;
use crate::manifest::Manifest;
use crate::manifest::checkpoint::Encoding;
use crate::manifest::edit::Content;
use crate::outbox::{Outbox, Owner};
use crate::partition::{FIRST_COMMIT, Histories, Partition};
use crate::pressure::Pressure;
use crate::read::{Found, Waiter};
use crate::recover::Recovery;
use crate::reserve::Reserves;
use crate::scrub::Scrubber;
use crate::tasks::Tasks;
use crate::write::Gate;
use crate::{
    BlobId, Command, CommandReply, Cut, Done, Extents, ForeignId, ForeignPiece, ForeignUse, LogPlace, OpId,
    OpenError, PARTITIONS, Reply, Request, Settings, State, Stats, StoreError, StoreFacts, StoreOp, Tag,
    Volume, VolumeId,
};
use aryk_dma::Buffer;
use aryk_slots::{Key, Slots};
use aryk_volume_index::{Index, Memtable, PageCache, RunId, TimelineId};
use std::collections::{HashMap, VecDeque};

/// Where a pool's manifest is read from.
#[derive(Clone, Debug)]
pub struct Recovered {
    /// The latest checkpoint; empty for that of an empty pool.
    pub checkpoint: Vec<u8>,
    /// The edits after it, in order.
    pub edits: Vec<Vec<u8>>,
}

/// A pool of volumes.
#[derive(Debug)]
pub struct Pool {
    pub(crate) settings: Settings,
    pub(crate) facts: StoreFacts,
    pub(crate) state: State,
    pub(crate) keeper: Keeper,
    pub(crate) histories: Histories,
    pub(crate) partitions: Vec<Partition>,
    pub(crate) cache: PageCache,
    pub(crate) dense: DenseCache,
    /// The answer of the latest lookup.
    pub(crate) slots: aryk_volume_index::Slots,
    pub(crate) found: Vec<Found>,
    pub(crate) requests: Slots<Active>,
    pub(crate) runtimes: HashMap<VolumeId, Runtime>,
    /// Volumes whose requests wait for their turn.
    pub(crate) ring: VecDeque<VolumeId>,
    /// Requests that wait for their turn.
    pub(crate) waiting: u64,
    /// Blocks that a request changes in part, with the requests that wait for it.
    pub(crate) locks: HashMap<(TimelineId, u64), VecDeque<Key>>,
    /// Index pages that are being read, with those who wait for them.
    pub(crate) pages: HashMap<(RunId, u32), Vec<Waiter>>,
    /// Headers of dense frames that are being read, with those who wait for them.
    pub(crate) headers: HashMap<DenseKey, Vec<Waiter>>,
    pub(crate) log: Log,
    /// The part of [`Log::written_bytes`] that is flushed.
    pub(crate) flushed_bytes: u64,
    pub(crate) gate: Gate,
    pub(crate) admin: crate::admin::Admin,
    pub(crate) jobs: Jobs,
    pub(crate) pressure: Pressure,
    pub(crate) cleaner: Cleaner,
    pub(crate) compactor: Compactor,
    pub(crate) tasks: Tasks,
    pub(crate) reserves: Reserves,
    pub(crate) scrubber: Scrubber,
    /// A read of inherited blocks that starts when its task is in its place.
    pub(crate) inflating: Option<Key>,
    pub(crate) recovery: Option<Recovery>,
    /// Bytes of memory of aborted requests that have not ended.
    pub(crate) abandoned_bytes: u64,
    /// What arrived before the pool was ready.
    early: VecDeque<Early>,
    pub(crate) out: Outbox,
    pub(crate) buffers: Buffers,
    /// Lists of checksums that are used again.
    pub(crate) checksum_lists: Vec<Vec<u32>>,
    foreign_lists: Vec<Vec<ForeignPiece>>,
    /// Lists of extents that are used again.
    pub(crate) extent_lists: Vec<Extents>,
    /// Lists of extents that callers have.
    pub(crate) lent: u64,
    pub(crate) stats: Stats,
    is_first_checkpoint: bool,
    pub(crate) log_damage: Option<LogPlace>,
}

#[derive(Debug)]
enum Early {
    Request(Request),
    Command(Tag, Command),
}

impl Pool {
    /// Creates an empty pool. The first operation is the checkpoint of its manifest; the pool is ready when that is answered.
    pub fn create(settings: Settings, facts: StoreFacts, uuid: [u8; 16]) -> Self {
        let mut pool = Self::new(settings, facts, Manifest::new(uuid, &facts));
        pool.is_first_checkpoint = true;
        pool
    }

    /// Opens a pool, with the settings that `settings` makes of its note. Its first operations read the log's tail.
    ///
    /// Context: a thread that may block. The time grows with the pool's blobs, runs and volumes: a third of a second for a pool
    /// of 15 TiB that was written at random.
    ///
    /// # Errors
    /// The manifest cannot be used.
    pub fn open(
        settings: impl FnOnce(&[u8]) -> Settings,
        facts: StoreFacts,
        uuid: [u8; 16],
        from: &Recovered,
    ) -> Result<Self, OpenError> {
        let manifest = loading::load(&facts, uuid, from)?;
        Ok(Self::recovering(settings(&manifest.note), facts, manifest))
    }

    /// The pool of this manifest, whose log is to be read.
    pub(crate) fn recovering(settings: Settings, facts: StoreFacts, manifest: Manifest) -> Self {
        let recovery = Recovery::new(&manifest);
        Self { recovery: Some(recovery), ..Self::new(settings, facts, manifest) }
    }

    pub(crate) fn new(settings: Settings, facts: StoreFacts, manifest: Manifest) -> Self {
        assert!(
            matches!(facts.alignment, 512 | 4096) && (10_240..=65_536).contains(&facts.blob_units),
            "{facts:?}"
        );
        let mut cache = PageCache::new(settings.cache_bytes / 2);
        let histories = Histories::new(&manifest);
        let partition = |(number, levels): (usize, &crate::manifest::PartitionLevels)| {
            let index = Index::new(Memtable::with_capacity(1024), levels.levels.iter().cloned(), &mut cache);
            let next = (levels.flushed.max(histories.newest(number)) + 1).max(FIRST_COMMIT);
            Partition { index, next, readable: next - 1, waiting: VecDeque::new() }
        };
        let partitions = manifest.partitions.iter().enumerate().map(partition).collect();
        let log = Log::new(manifest.uuid, facts.alignment, facts.blob_units, manifest.log.sequence);
        Self {
            settings,
            facts,
            state: State::Opening,
            runtimes: manifest.volumes.keys().map(|&id| (id, Runtime::default())).collect(),
            keeper: Keeper::new(manifest, &facts, settings.manifest_bytes_per_turn),
            histories,
            partitions,
            cache,
            dense: DenseCache::new(settings.cache_bytes / 2),
            slots: aryk_volume_index::Slots::new(),
            found: Vec::new(),
            requests: Slots::new(256),
            ring: VecDeque::new(),
            waiting: 0,
            locks: HashMap::new(),
            pages: HashMap::new(),
            headers: HashMap::new(),
            log,
            flushed_bytes: 0,
            gate: Gate::new(),
            admin: crate::admin::Admin::default(),
            jobs: Jobs::default(),
            pressure: Pressure::new(settings.unflushed_bytes_max),
            cleaner: Cleaner::default(),
            compactor: Compactor::default(),
            tasks: Tasks::default(),
            reserves: Reserves::default(),
            scrubber: Scrubber::default(),
            inflating: None,
            recovery: None,
            abandoned_bytes: 0,
            early: VecDeque::new(),
            out: Outbox::new(),
            buffers: Buffers::default(),
            checksum_lists: Vec::new(),
            foreign_lists: Vec::new(),
            extent_lists: Vec::new(),
            lent: 0,
            stats: Stats::default(),
            is_first_checkpoint: false,
            log_damage: None,
        }
    }

    /// Whether the pool is ready, or why not.
    pub const fn state(&self) -> State {
        self.state
    }

    /// Starts a request. It ends with exactly one [`Reply`].
    pub fn submit(&mut self, request: Request) {
        if self.state == State::Opening {
            self.early.push_back(Early::Request(request));
        } else {
            self.start(request);
        }
    }

    /// Starts a command. It ends with exactly one [`CommandReply`].
    pub fn command(&mut self, tag: Tag, command: Command) {
        if self.state == State::Opening {
            self.early.push_back(Early::Command(tag, command));
        } else {
            self.start_command(tag, command);
        }
    }

    /// The pool is open, or cannot be opened: what arrived before goes on.
    pub(crate) fn opened(&mut self, state: State) {
        self.state = state;
        while let Some(early) = self.early.pop_front() {
            match early {
                Early::Request(request) => self.start(request),
                Early::Command(tag, command) => self.start_command(tag, command),
            }
        }
    }

    /// Takes the answer to an operation.
    ///
    /// # Panics
    /// If the operation was answered before, or a buffer is missing.
    pub fn completed(&mut self, done: Done) {
        let Done { id, data, result } = done;
        let with = |data: Option<Buffer>| data.expect("the buffer of the operation");
        match self.out.take_owner(id) {
            Owner::Frame { sequence } => self.frame_answered(sequence, with(data), result),
            Owner::Data { request, blob, block, checksums } => {
                self.data_answered(request, blob, block, checksums, with(data), result);
            }
            Owner::Foreign { request, at, len } => {
                self.foreign_answered(request, at, len, with(data), result)
            }
            Owner::Page { run, page, blob } => self.page_answered(run, page, blob, with(data), result),
            Owner::DenseHeader { key } => self.header_answered(key, with(data), result),
            Owner::MergeRead { job, read } => self.merge_read_answered(job, &read, with(data), result),
            Owner::IndexWrite { job } => self.index_write_answered(job, with(data), result),
            Owner::Commit { durable } => self.commit_answered(durable, result),
            Owner::Checkpoint => self.checkpoint_answered(result),
            Owner::Copy => self.keeper.copy_done(result),
            Owner::Discard { blob } => self.discard_answered(blob, result),
            Owner::Flush { durable } => self.flush_answered(durable, result),
            Owner::Recovery { len } => self.recovery_answered(len, with(data), result),
            Owner::CleanRead { blob, len } => self.clean_read_answered(blob, len, with(data), result),
            Owner::CleanWrite => self.clean_write_answered(with(data), result),
            Owner::CompactRead { blob, at, blocks } => {
                self.compact_read_answered(blob, at, blocks, with(data), result);
            }
            Owner::CompactWrite => self.compact_write_answered(with(data), result),
            Owner::CopyWrite => self.copy_write_answered(with(data), result),
            Owner::Check { piece } => self.check_answered(&piece, with(data), result),
            Owner::ScrubData { piece } => self.scrub_data_answered(&piece, with(data), result),
            Owner::ScrubPages { run, page, pages, partition } => {
                self.scrub_pages_answered(&run, (page, pages), partition, with(data), result);
            }
        }
    }

    fn commit_answered(&mut self, durable: u64, result: Result<(), StoreError>) {
        let all = self.keeper.commit_done();
        match result {
            Ok(()) => self.log.durable = self.log.durable.max(durable),
            Err(error) => self.fail(error),
        }
        for then in all {
            self.happen(then, result);
        }
    }

    fn happen(&mut self, then: Then, result: Result<(), StoreError>) {
        match then {
            Then::Answer(tag, answer) => {
                let result = result.map(|()| answer).map_err(|_| crate::CommandError::Medium);
                self.out.command_replies.push_back(CommandReply { tag, result });
            }
            Then::Nothing => {}
            _ if result.is_err() => {}
            Then::LogBlobs(blobs) => self.log.add_spares(blobs),
            Then::Gone(blobs) => {
                for blob in blobs {
                    if self.keeper.gone(blob) {
                        self.free(blob);
                    }
                }
            }
            Then::Flushed { number, bytes } => {
                self.keeper.flushed = number;
                // Blobs that were held may be victims.
                self.cleaner.is_due = true;
                self.flushed_bytes = bytes;
            }
            Then::Opened => self.opened(State::Ready),
        }
    }

    fn checkpoint_answered(&mut self, result: Result<(), StoreError>) {
        self.keeper.checkpoint_done();
        match result {
            Ok(()) if self.is_first_checkpoint => {
                self.is_first_checkpoint = false;
                self.begin_writing();
            }
            Ok(()) => {}
            Err(error) => self.fail(error),
        }
    }

    fn discard_answered(&mut self, blob: BlobId, result: Result<(), StoreError>) {
        // A failed discard costs space below only: the blob can be written.
        if result != Err(StoreError::Gone) {
            self.keeper.discarded(blob);
            self.cleaner.is_due = true;
        }
    }

    /// Frees a blob that is in no manifest any more, and has no reads.
    fn free(&mut self, blob: BlobId) {
        self.cleaner.forget(blob);
        self.cleaner.is_due = true;
        if let Some(blob) = self.keeper.freed(blob) {
            self.out.op(Owner::Discard { blob }, StoreOp::Discard { blob });
        }
    }

    /// A read of a blob has ended.
    pub(crate) fn unpin(&mut self, blob: BlobId) {
        if self.keeper.unpin(blob) {
            self.free(blob);
        }
    }

    /// Nothing can be written any more: changes under way fail, reads go on.
    pub(crate) fn fail(&mut self, error: StoreError) {
        if matches!(self.state, State::ReadOnly(_) | State::Damaged(_) | State::Failed(_)) {
            return;
        }
        let is_opening = self.state == State::Opening;
        self.state = if is_opening { State::Failed(error) } else { State::ReadOnly(error) };
        self.recovery = None;
        self.scrubber.stop();
        self.fail_changes();
        self.opened(self.state);
    }

    /// Ends a turn: commits the writes that have gathered, and does a bounded piece of background work. Returns whether another
    /// turn would find work to do without any new input.
    pub fn turn(&mut self) -> bool {
        let mut has_work = false;
        if self.recovery.is_some() {
            self.recover();
        } else if self.state == State::Ready {
            let has_waiting = self.admit_waiting();
            self.pump();
            let is_short = self.is_short();
            self.cleaner.is_due |= is_short && !self.cleaner.was_short;
            self.cleaner.was_short = is_short;
            let was_cleaning = !self.cleaner.is_idle();
            has_work =
                self.step_jobs(is_short) | self.step_cleaner() | self.step_compactor() | self.step_tasks();
            has_work |= self.step_reserves() | self.step_scrub() | has_waiting;
            // Jobs that free blobs begin when the cleaner has come to rest: a turn of its own, which nothing else brings.
            has_work |= was_cleaning && self.cleaner.is_idle();
            self.keeper.collect();
            self.ask_for_log_blobs();
            self.open_gate();
            if !has_work {
                self.refuse_waiting();
            }
        }
        self.hand_out_edits() | has_work
    }

    /// Returns whether there are more for the next turn.
    pub(crate) fn hand_out_edits(&mut self) -> bool {
        if matches!(self.state, State::ReadOnly(_) | State::Damaged(_) | State::Failed(_)) {
            return false;
        }
        if let Some(edit) = self.keeper.take_commit() {
            self.stats.manifest_write_bytes += edit.len() as u64;
            let durable = self.log.tail().0;
            self.out.op(Owner::Commit { durable }, StoreOp::Commit { edit });
        }
        if let Some(bytes) = self.keeper.take_checkpoint(self.is_first_checkpoint) {
            self.stats.manifest_write_bytes += bytes.len() as u64;
            self.out.op(Owner::Checkpoint, StoreOp::Checkpoint { bytes });
        }
        if let Some(bytes) = self.keeper.take_copy() {
            self.stats.manifest_write_bytes += bytes.len() as u64;
            self.out.op(Owner::Copy, StoreOp::Copy { bytes });
        }
        self.keeper.has_more()
    }

    /// The next operation for the store.
    pub fn next_op(&mut self) -> Option<(OpId, StoreOp)> {
        self.out.ops.pop_front()
    }

    /// The next reply to a request.
    pub fn next_reply(&mut self) -> Option<Reply> {
        self.out.replies.pop_front()
    }

    /// The next reply to a command.
    pub fn next_command_reply(&mut self) -> Option<CommandReply> {
        self.out.command_replies.pop_front()
    }

    /// Takes back the list of a reply.
    pub fn recycle(&mut self, mut foreign: Vec<ForeignPiece>) {
        if foreign.capacity() > 0 {
            foreign.clear();
            self.foreign_lists.push(foreign);
        }
    }

    /// The store has this many blobs now, which are more than before.
    pub fn grow(&mut self, blobs: u32) {
        self.facts.blobs = self.facts.blobs.max(blobs);
        self.keeper.grow(blobs);
    }

    /// The volumes and snapshots, by identifier.
    pub fn volumes(&self) -> impl Iterator<Item = (VolumeId, &Volume)> {
        self.keeper.manifest.volumes.iter().map(|(&id, volume)| (id, volume))
    }

    /// The foreign disks on which volumes depend.
    pub fn foreign_disks(&self) -> Vec<ForeignUse> {
        let all = self.keeper.manifest.timelines.iter();
        all.filter_map(|(&id, timeline)| match &timeline.base {
            Some(crate::manifest::Base::Foreign(foreign)) => {
                Some(ForeignUse { id: ForeignId::of(id), foreign: foreign.clone() })
            }
            _ => None,
        })
        .collect()
    }

    /// The view that is the base of a timeline; `None` if it has none, or a foreign disk.
    pub fn base(&self, timeline: TimelineId) -> Option<(TimelineId, Cut)> {
        match self.keeper.manifest.timelines.get(&timeline)?.base {
            Some(crate::manifest::Base::View { timeline, cut }) => Some((timeline, cut)),
            Some(crate::manifest::Base::Foreign(_)) | None => None,
        }
    }

    /// Has a checkpoint written soon, because the journal of the store is nearly full. Repeated calls are one.
    pub const fn request_checkpoint(&mut self) {
        self.keeper.request_checkpoint();
    }

    /// A copy of the manifest as it is now, as [`StoreOp::Copy`] has it.
    pub fn copy_of_manifest(&self) -> Vec<u8> {
        let manifest = &self.keeper.manifest;
        let mut encoding = Encoding::new(manifest, Content::Copy, 0);
        while !encoding.step(manifest, usize::MAX / 2) {}
        encoding.finish(manifest)
    }

    /// Where the log is damaged, if its end was found to be damage when the pool was opened.
    pub const fn log_damage(&self) -> Option<LogPlace> {
        self.log_damage
    }

    /// The sequence of the first frame of the log that the next opening reads.
    pub const fn log_start(&self) -> u64 {
        self.keeper.manifest.log.sequence
    }

    /// What the caller has stored about the pool ([`Command::SetNote`]).
    pub fn note(&self) -> &[u8] {
        &self.keeper.manifest.note
    }

    /// Counters and sizes, in a time that does not grow with the pool.
    pub fn stats(&self) -> Stats {
        let cache = self.cache.statistics();
        let manifest = &self.keeper.manifest;
        let bytes = |units: i64| units.max(0) as u64 * u64::from(crate::UNIT);
        Stats {
            log_write_bytes: self.log.written_bytes,
            cache_hits: cache.hits,
            cache_misses: cache.misses,
            unflushed_bytes: self.unflushed_bytes(),
            waiting_requests: self.waiting,
            price_percent: self.price_percent(),
            debt_bytes: self.debt_bytes(),
            blobs: u64::from(self.facts.blobs),
            free_blobs: self.keeper.free() as u64,
            usable_bytes: self.usable_bytes(),
            reserved_bytes: self.reserved_bytes(),
            used_bytes: manifest.blobs.len() as u64 * self.facts.blob_bytes(),
            live_bytes: bytes(manifest.blobs.data_live()),
            index_bytes: bytes(manifest.blobs.index_live()),
            index_entries: manifest.entries,
            ..self.stats
        }
    }

    /// Bytes of data that the pool can have. Up to there, volumes can be written at random for ever: the other blobs are for the
    /// log, the index, what is being moved, and what is dead. The fuller a pool, the more is moved for each write.
    pub(crate) const fn usable_bytes(&self) -> u64 {
        /// Blobs of the log, and those to which flushes, merges and the cleaner append.
        const IN_USE: u32 = 7;
        /// Of so many blobs, one is for the index.
        const INDEX_SHARE: u32 = 64;
        /// Of so many blobs, one is for what is dead.
        const DEAD_SHARE: u64 = 6;
        let blobs = self.facts.blobs;
        let others = self.settings.reserve_blobs + IN_USE + blobs.div_ceil(INDEX_SHARE);
        let data = blobs.saturating_sub(others) as u64 * self.facts.blob_bytes();
        data - data / DEAD_SHARE
    }

    /// Bytes of memory that the pool has for aborted requests that have not ended. The caller submits no more while these are
    /// many.
    pub const fn abandoned_bytes(&self) -> u64 {
        self.abandoned_bytes
    }

    /// Whether requests are under way, aborted ones included.
    pub fn has_requests(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Whether requests are under way, or reads of what the pool has lent.
    pub fn is_in_use(&self) -> bool {
        self.has_requests() || self.lent > 0
    }

    /// Whether nothing is in flight and no background work is due: for tests and for a clean shutdown.
    pub fn is_idle(&self) -> bool {
        self.recovery.is_none()
            && !self.is_in_use()
            && self.out.in_flight() == 0
            && self.keeper.is_idle()
            && self.log.is_idle()
            && self.jobs.is_idle()
            && self.cleaner.is_idle()
            && self.compactor.is_idle()
            && self.tasks.is_idle()
            && self.reserves.is_idle()
            && self.scrubber.is_idle()
    }

    /// Has compaction begin with no further range, before the pool is closed; or lets it go on.
    pub const fn pause(&mut self, is_paused: bool) {
        self.compactor.pause(is_paused);
    }

    pub(crate) fn take_foreign_list(&mut self) -> Vec<ForeignPiece> {
        self.foreign_lists.pop().unwrap_or_default()
    }

    /// The partition that owns a block of a timeline.
    pub(crate) fn partition_of(&self, timeline: TimelineId, block: u64) -> usize {
        let shift = self.histories.get(timeline).map_or(0, |history| history.shift);
        let partition = crate::ids::partition_of(shift, block);
        debug_assert!(partition < PARTITIONS);
        partition
    }
}
