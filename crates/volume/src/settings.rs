//! Settings, statistics and errors of a pool. Any context.

use crate::{Shard, StoreError};
use aryk_volume_index::{BlobId, Pieces};

/// How compaction writes the blocks of a range that it gathers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// One after the other, each with its own entry of the index.
    Row,
    /// As a dense frame with one entry for all of them. A pool of dense ranges that is then written at random, and is half full,
    /// moves 45 times what is written.
    Dense,
}

/// Limits of a pool's use of memory and of the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// Bytes of log after which the memtables are flushed.
    pub flush_bytes: u64,
    /// Index entries in memory after which the memtables are flushed.
    pub flush_entries: usize,
    /// Bytes of log that are not flushed, at most: writes wait before that.
    pub unflushed_bytes_max: u64,
    /// Bytes of data of one log frame.
    pub frame_bytes_max: u32,
    /// Log frames in flight.
    pub frames_in_flight_max: u32,
    /// Bytes of index pages and checksums in memory.
    pub cache_bytes: usize,
    /// Bytes of the manifest that one turn encodes: of a checkpoint, and of edits.
    pub manifest_bytes_per_turn: usize,
    /// Blobs that only the cleaner, compaction and deletions use.
    pub reserve_blobs: u32,
    /// Bytes that background work has in flight.
    pub background_bytes_max: u64,
    /// Used space ÷ live space, in hundredths, from which on the cleaner works although there are free blobs.
    pub space_amplification_max: u32,
    /// How compaction writes what it gathers.
    pub form: Form,
    /// Which ranges compaction gathers.
    pub pieces: Pieces,
    /// Bytes written to the store ÷ bytes written by users, in hundredths, up to which compaction in a row works.
    pub write_amplification_max: u32,
    /// Whether a write of a whole range of 4 MiB gets one entry of the index instead of 1,024. The index is smaller then, but the
    /// space of such a range becomes free only when all of it is written again.
    pub dense_writes: bool,
    /// Whether a pool is opened although its log is damaged, without what was written after the damage.
    pub accepts_damaged_log: bool,
    /// Which shard of the pool the engine is.
    pub shard: Shard,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            flush_bytes: 64 << 20,
            flush_entries: 64 << 10,
            unflushed_bytes_max: 256 << 20,
            frame_bytes_max: 1 << 20,
            frames_in_flight_max: 8,
            cache_bytes: 64 << 20,
            manifest_bytes_per_turn: 64 << 10,
            reserve_blobs: 4,
            background_bytes_max: 8 << 20,
            space_amplification_max: 200,
            form: Form::Row,
            pieces: Pieces { blocks_min: 512, pieces_min: 512, worn_min: u32::MAX },
            write_amplification_max: 350,
            dense_writes: false,
            accepts_damaged_log: false,
            shard: Shard::ALL,
        }
    }
}

impl Settings {
    /// The settings of one shard of a pool with these settings: it has its part of what the pool may use.
    #[must_use]
    pub const fn of_shard(self, shard: Shard) -> Self {
        let count = shard.count();
        Self {
            flush_bytes: self.flush_bytes / count as u64,
            flush_entries: self.flush_entries / count as usize,
            unflushed_bytes_max: self.unflushed_bytes_max / count as u64,
            cache_bytes: self.cache_bytes / count as usize,
            background_bytes_max: self.background_bytes_max / count as u64,
            shard,
            ..self
        }
    }
}

/// Why a pool cannot be opened.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OpenError {
    /// The manifest has a newer format.
    #[error("the pool has format version {0}, which this version does not know")]
    Version(u16),
    /// The manifest is damaged.
    #[error("the pool's manifest is damaged: {0}")]
    Damaged(&'static str),
    /// The manifest belongs to another pool.
    #[error("the pool's manifest belongs to another pool")]
    Foreign,
    /// The store has fewer blobs than the manifest uses.
    #[error("the pool's disk has become shorter: blob {0} is beyond its end")]
    Shorter(u32),
    /// The store has another alignment, or blobs of another size, than at the pool's creation.
    #[error("the pool was created on a disk of another geometry")]
    Geometry,
}

/// A place in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogPlace {
    /// The blob.
    pub blob: BlobId,
    /// The unit of the blob.
    pub unit: u32,
}

/// The state of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// The log is being read; requests and commands wait.
    Opening,
    /// Requests and commands are served.
    Ready,
    /// The store failed in a way after which nothing can be written; reads are served.
    ReadOnly(StoreError),
    /// A part of the log is missing that was durable. Nothing is served: what the pool would show is older than what it has
    /// acknowledged.
    Damaged(LogPlace),
    /// The log could not be read. Nothing is served; another attempt to open the pool may succeed.
    Failed(StoreError),
}

/// Counters and sizes of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Bytes that users have written.
    pub user_write_bytes: u64,
    /// Bytes that users have read.
    pub user_read_bytes: u64,
    /// Bytes written to the store: log frames.
    pub log_write_bytes: u64,
    /// Bytes written to the store: data that the cleaner and compaction have moved.
    pub moved_write_bytes: u64,
    /// The part of these bytes that compaction has gathered in a row.
    pub gathered_write_bytes: u64,
    /// Ranges that compaction has gathered.
    pub gathered_ranges: u64,
    /// Bytes written to the store: the index.
    pub index_write_bytes: u64,
    /// Bytes written to the store: the manifest.
    pub manifest_write_bytes: u64,
    /// Bytes read from the store, for users.
    pub data_read_bytes: u64,
    /// Bytes read from the store: index pages and checksums of dense ranges.
    pub index_read_bytes: u64,
    /// Bytes read from the store, for background work.
    pub background_read_bytes: u64,
    /// Lookups in the cache of index pages that found their page.
    pub cache_hits: u64,
    /// Lookups in the cache of index pages that did not.
    pub cache_misses: u64,
    /// Blocks whose data did not match its checksum.
    pub damaged_blocks: u64,
    /// Bytes that the scrub has read.
    pub scrub_read_bytes: u64,
    /// Blocks of data and pages of the index that the scrub has found damaged: those of all passes.
    pub scrub_damaged_blocks: u64,
    /// Bytes of log that are not flushed: the backlog.
    pub unflushed_bytes: u64,
    /// Bytes of runs that are to be merged: the debt.
    pub debt_bytes: u64,
    /// Requests that wait for space, for the backlog or for a frame.
    pub waiting_requests: u64,
    /// What a byte that is written costs because of the backlog: percent of a byte that flushes merge, 0 to 100. Of several
    /// shards, the highest.
    pub price_percent: u64,
    /// Blobs of the store.
    pub blobs: u64,
    /// Blobs that hold nothing.
    pub free_blobs: u64,
    /// Bytes of data that the pool can have.
    pub usable_bytes: u64,
    /// Bytes of these that are reserved for thick volumes, beyond the data that they have for themselves.
    pub reserved_bytes: u64,
    /// Bytes in blobs that are in use, dead data included.
    pub used_bytes: u64,
    /// Bytes of data to which the index refers.
    pub live_bytes: u64,
    /// Bytes of index runs.
    pub index_bytes: u64,
    /// Entries of index runs.
    pub index_entries: u64,
}

impl std::ops::AddAssign for Stats {
    fn add_assign(&mut self, more: Self) {
        self.user_write_bytes += more.user_write_bytes;
        self.user_read_bytes += more.user_read_bytes;
        self.log_write_bytes += more.log_write_bytes;
        self.moved_write_bytes += more.moved_write_bytes;
        self.gathered_write_bytes += more.gathered_write_bytes;
        self.gathered_ranges += more.gathered_ranges;
        self.index_write_bytes += more.index_write_bytes;
        self.manifest_write_bytes += more.manifest_write_bytes;
        self.data_read_bytes += more.data_read_bytes;
        self.index_read_bytes += more.index_read_bytes;
        self.background_read_bytes += more.background_read_bytes;
        self.cache_hits += more.cache_hits;
        self.cache_misses += more.cache_misses;
        self.damaged_blocks += more.damaged_blocks;
        self.scrub_read_bytes += more.scrub_read_bytes;
        self.scrub_damaged_blocks += more.scrub_damaged_blocks;
        self.unflushed_bytes += more.unflushed_bytes;
        self.debt_bytes += more.debt_bytes;
        self.waiting_requests += more.waiting_requests;
        self.price_percent = self.price_percent.max(more.price_percent);
        self.blobs += more.blobs;
        self.free_blobs += more.free_blobs;
        self.usable_bytes += more.usable_bytes;
        self.reserved_bytes += more.reserved_bytes;
        self.used_bytes += more.used_bytes;
        self.live_bytes += more.live_bytes;
        self.index_bytes += more.index_bytes;
        self.index_entries += more.index_entries;
    }
}
