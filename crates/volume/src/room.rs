//! How many free blobs each kind of work leaves to others, so that a full pool goes on. Any context.
//!
//! The log takes a blob only from those above the *reserve*. The cleaner takes all but what flushes and merges may need, and what
//! the next opening needs; it begins a victim only if what it moves fits, so that each is emptied. Flushes and merges may
//! take all. What is emptied is free when they have left out the entries that refer to it. So victims of which a part is dead
//! always give more than they take, and nothing stops before there are no such victims.
//!
//! Between the reserve and what the cleaner wants to be free is the *margin*, which one cycle uses: the cleaner empties victims
//! while the log takes blobs, until the margin is nearly used. Then the emptied victims become free together, by merges of all
//! levels: the larger the margin, the fewer of these. The log takes no more than half of the margin before the cleaner has
//! emptied as much.

use crate::partition::Partition;
use crate::pool::Pool;
use crate::{BLOCK_UNITS, PARTITIONS};
use aryk_volume_index::Level;

/// Of so many blobs, one is in the margin.
const MARGIN_SHARE: u32 = 16;

/// Blobs of the margin of a small pool.
const MARGIN_MIN: u32 = 4;

/// Units of index that a writer of flushes or merges is to have room for, besides twice the present index.
const FLUSH_UNITS: i64 = 4096;

/// A victim has at least one dead unit in so many. Headers of frames take less than half of that when the rest is moved.
pub(crate) const DEAD_SHARE_MIN: u32 = 16;

/// Blobs beside those of live data that are not too many, however little is alive: of the log, of the index, and dead ones.
const OTHERS_MIN: usize = 16;

/// Of so many live units, one may be dead before counting them is worth merges.
const UNCOUNTED_SHARE: i64 = 8;

/// Blobs that may be taken, and how many of them are kept for a cycle of the cleaner.
#[derive(Clone, Copy, Debug)]
struct Room {
    blobs: usize,
    margin: usize,
}

impl Room {
    /// What is little of the margin.
    fn least(&self) -> usize {
        (self.margin / 4).max(1)
    }

    fn is_short(&self) -> bool {
        self.blobs <= self.least()
    }
}

impl Pool {
    /// Free blobs that flushes and merges may need.
    fn blobs_for_index(&self) -> usize {
        let index = self.keeper.manifest.blobs.index_live().max(0);
        // The output of a merge exists beside its inputs, which may be twice as large as the average.
        let beside = 2 * index / PARTITIONS as i64 / i64::from(self.facts.blob_units);
        self.jobs.writers_short_of(2 * index + FLUSH_UNITS, self.facts.blob_units) + beside as usize
    }

    /// Free blobs that the log leaves when it begins its first one after an opening: the cleaner needs one, too.
    pub(crate) fn opening_reserve(&self) -> usize {
        self.blobs_for_index() + 1
    }

    /// Free blobs that the cleaner leaves; among them one for the cleaner of the next opening, which begins another blob.
    pub(crate) fn index_reserve(&self) -> usize {
        self.blobs_for_index() + usize::from(self.cleaner.has_writer())
    }

    /// Free blobs that only the cleaner, flushes and merges take.
    pub(crate) fn reserve(&self) -> usize {
        (self.settings.reserve_blobs as usize).max(self.opening_reserve() + 1)
    }

    /// Blobs that the log and the cleaner share in a cycle.
    fn margin(&self) -> usize {
        (self.facts.blobs / MARGIN_SHARE).max(MARGIN_MIN) as usize
    }

    /// Units that may be dead although they count as alive: those of blocks that entries of newer levels may have replaced.
    fn uncounted_units(&self) -> i64 {
        let oldest = |partition: &Partition| partition.index.levels().last().map_or(0, Level::entries);
        let oldest: u64 = self.partitions.iter().map(oldest).sum();
        let newer = self.keeper.manifest.entries.saturating_sub(oldest);
        newer.min(u64::from(u32::MAX)) as i64 * i64::from(BLOCK_UNITS)
    }

    /// The blobs that may be taken before emptied ones become free: there are no others, or too much would be dead.
    fn rooms(&self) -> [Room; 2] {
        let blobs = &self.keeper.manifest.blobs;
        let live = blobs.data_live().saturating_sub(self.uncounted_units()).max(0);
        let live = (live / i64::from(self.facts.blob_units)) as usize;
        let others = (live * self.settings.space_amplification_max as usize / 100).saturating_sub(live);
        let others = others.max(OTHERS_MIN);
        [
            Room { blobs: self.keeper.free().saturating_sub(self.reserve()), margin: self.margin() },
            Room { blobs: (live + others).saturating_sub(blobs.len()), margin: others / 8 },
        ]
    }

    /// Whether the cleaner has emptied enough for now.
    pub(crate) fn is_roomy(&self) -> bool {
        let done = self.cleaner.done.len();
        self.rooms().iter().all(|room| room.blobs + done > room.margin)
    }

    /// Whether the margin is nearly used, so that all that can free blobs is done.
    pub(crate) fn is_short(&self) -> bool {
        !self.jobs.is_rebuilding && self.rooms().iter().any(Room::is_short)
    }

    /// Whether merges of all levels are worth it: for emptied blobs, or to know how much is dead.
    pub(crate) fn is_worth_merging(&self) -> bool {
        let (done, rooms) = (self.cleaner.done.len(), self.rooms());
        rooms.iter().any(|room| room.is_short() && done >= room.least())
            || rooms[1].is_short()
                && self.uncounted_units() > self.keeper.manifest.blobs.data_live() / UNCOUNTED_SHARE
    }

    /// Whether the log may take a free blob: the cleaner keeps up, or has nothing to do.
    pub(crate) fn may_log_grow(&self) -> bool {
        let free = self.keeper.free();
        let is_kept_up = free + self.cleaner.done.len() > self.reserve() + self.margin() / 2;
        free > self.reserve() && (is_kept_up || self.cleaner.is_idle())
    }

    /// Whether the cleaner can move this many units, with what is lost to headers.
    pub(crate) fn can_move(&self, units: i64) -> bool {
        let blobs = self.keeper.free().saturating_sub(self.index_reserve()) as i64;
        units + units / 32 <= blobs * i64::from(self.facts.blob_units) + i64::from(self.writer_room())
    }
}
