//! The index of volumes: where each version of each block is. No I/O, clock, threads or randomness: the caller reads and writes
//! pages.
//!
//! A [`Key`] names a version: timeline, range of 4 MiB, slot (the whole range, or one of its 1,024 blocks of 4 KiB) and commit.
//! Each partition of a pool has an [`Index`]:
//!
//! | source, newest first | what it is |
//! | --- | --- |
//! | [`Memtable`] | fresh entries in memory |
//! | frozen memtables | the same, no longer changed, until a merge has written them |
//! | [`Level`]s | runs with disjoint keys: immutable B-trees of 4 KiB pages in blobs |
//!
//! **Visibility.** A view is a commit: the live view [`Commit::MAX`], or that of a snapshot. It sees, of each slot, the newest
//! version that is not newer than the view. An entry about the whole range is a version of each slot and hides entries of blocks
//! of its own commit. Where two sources have the same key, the newer source is right: a block that moves keeps its key.
//!
//! **Commits and sources.** A version may be in a newer source than versions that are newer than it, because blocks move and
//! ranges are rewritten. So a lookup takes the newest version of all sources, and skips a source only by the commits that the
//! source contains.
//!
//! [`Merge`] turns frozen memtables or neighbouring levels into one level and leaves out what no view sees; [`policy`] says
//! which. [`PageCache`] keeps pages in memory. Lookups and scans return [`NeedPages`] where a page is missing: the caller reads
//! the pages, inserts them, and repeats the call.
#![forbid(unsafe_code)]

mod cache;
mod index;
mod key;
mod lookup;
mod memtable;
mod merge;
mod owned;
mod page;
pub mod policy;
mod run;
mod scan;
mod survey;
mod tally;
#[cfg(test)]
mod tests;
mod views;

pub use cache::{CacheStatistics, PageCache};
pub use index::{Index, Level, LevelId};
pub use key::{BLOCK_UNITS, BlobId, Commit, Entry, Key, Place, RANGE_BLOCKS, Slot, TimelineId, Value};
pub use lookup::{Missing, NeedPages, Query, Slots, Version};
pub use memtable::Memtable;
pub use merge::{Input, Merge, PageRead, Step};
pub use owned::Owned;
pub use page::{PAGE_BYTES, PAGE_UNITS, PageBytes, PageError, entries_of};
pub use run::{Run, RunId, RunShape};
pub use scan::ScanOptions;
pub use survey::Pieces;
pub use tally::Tally;
pub use views::{TimelineViews, Views};
