//! Which commands a reset submits again. Pure; reactor context, at a reset.
//!
//! A command in flight when DMA ended may have taken effect or not. Commands that change nothing are always submitted again.
//! A write is submitted again only if no reader can see that it may have happened twice: if no other change of its blocks
//! completed after its submission. Otherwise the sequence "first write, second write, first write again" would show data that
//! a completed write had replaced. All others fail.
//!
//! A [`History`] remembers the last changes that a pair completed. The pairs' owner adds to it, and asks all histories of a
//! namespace, because another pair's write may be the later one. While a single pair is reset
//! ([`crate::controller::Controller::reset_pair`]), the other pairs go on: a change that one of them completes between the
//! decision and [`crate::queue::QueuePair::resume`] is in no history. An owner of several pairs stops them too, or fails such
//! writes.

use crate::queue::{Fate, Unfinished};
use crate::spec::entry::SubmissionEntry;
use crate::spec::opcode::io;

/// What a second execution of a command means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replay {
    /// The command changes nothing.
    Harmless,
    /// The command sets these blocks to fixed data: the same, unless another change came between.
    IfUnseen {
        /// First block.
        slba: u64,
        /// Number of blocks.
        blocks: u64,
    },
    /// The result depends on what the blocks contained.
    Never,
}

/// Classifies an I/O command. The blocks of Dataset Management are in the command's data, so its owner says [`Replay::IfUnseen`]
/// with the blocks, if it knows them. Copy is never submitted again: its sources may have changed. Nor is a fused command: its
/// compare may have seen its own write.
pub const fn of(entry: &SubmissionEntry) -> Replay {
    if entry.fuse().is_some() {
        return Replay::Never;
    }
    match entry.opcode() {
        io::READ | io::COMPARE | io::VERIFY | io::FLUSH => Replay::Harmless,
        io::WRITE | io::WRITE_ZEROES => {
            Replay::IfUnseen { slba: entry.cdw10_11(), blocks: (entry.cdw(12) & 0xffff) as u64 + 1 }
        }
        _ => Replay::Never,
    }
}

/// A completed change of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Namespace.
    pub nsid: u32,
    /// First block.
    pub slba: u64,
    /// Number of blocks; `u64::MAX` for all.
    pub blocks: u64,
    /// Time of the completion.
    pub completed: u64,
}

/// The last changes that completed on a pair, up to a fixed number.
#[derive(Clone, Debug)]
pub struct History {
    /// In order, as a ring.
    changes: Box<[Change]>,
    next: usize,
    /// Changes since the creation.
    count: u64,
}

impl History {
    /// An empty history of up to `len` changes, at least 1.
    pub fn new(len: usize) -> Self {
        Self { changes: vec![Change::default(); len.max(1)].into(), next: 0, count: 0 }
    }

    /// A history that knows of no change up to `until` whether there was one, and of none after it: no write that was submitted
    /// by then is submitted again.
    pub fn unknown_until(until: u64) -> Self {
        let mut history = Self::new(1);
        // The first is forgotten.
        (0..2).for_each(|_| history.add(Change { completed: until, ..Change::default() }));
        history
    }

    /// Adds a change. The times do not decrease.
    #[inline]
    pub fn add(&mut self, change: Change) {
        self.changes[self.next] = change;
        self.next = if self.next + 1 == self.changes.len() { 0 } else { self.next + 1 };
        self.count += 1;
    }

    /// Whether no change of these blocks completed at `since` or later. `false` also if the history no longer goes back that far.
    /// Changes before `since` cost nothing but a binary search.
    fn is_untouched(&self, nsid: u32, slba: u64, blocks: u64, since: u64) -> bool {
        let (len, (newer, older)) = (self.changes.len() as u64, self.changes.split_at(self.next));
        let older = if self.count < len { &[] } else { older };
        if self.count > len && older[0].completed >= since {
            return false;
        }
        let end = slba.saturating_add(blocks);
        let is_apart = |change: &Change| {
            change.nsid != nsid || change.slba >= end || change.slba.saturating_add(change.blocks) <= slba
        };
        [older, newer].into_iter().all(|part| {
            let first = part.partition_point(|change| change.completed < since);
            part[first..].iter().all(is_apart)
        })
    }
}

/// Decides about a command of this class, with the histories of all pairs that serve its namespace: for
/// [`crate::queue::QueuePair::rewind`].
pub fn decide(replay: Replay, unfinished: &Unfinished, histories: &[&History]) -> Fate {
    let is_safe = match replay {
        Replay::Harmless => true,
        Replay::IfUnseen { slba, blocks } => histories
            .iter()
            .all(|history| history.is_untouched(unfinished.entry.nsid(), slba, blocks, unfinished.submitted)),
        Replay::Never => false,
    };
    if is_safe { Fate::Resubmit } else { Fate::Fail }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::entry::Fuse;

    fn write(slba: u32, blocks: u32, submitted: u64) -> Unfinished {
        let entry = SubmissionEntry::new(io::WRITE, 1).with_cdw10_11(slba, 0).with_cdw12_13(blocks - 1, 0);
        Unfinished { entry, token: 0, submitted }
    }

    fn of_write(unfinished: &Unfinished, histories: &[&History]) -> Fate {
        decide(of(&unfinished.entry), unfinished, histories)
    }

    fn change(slba: u64, blocks: u64, completed: u64) -> Change {
        Change { nsid: 1, slba, blocks, completed }
    }

    #[test]
    fn a_write_is_replayed_unless_a_later_change_of_its_blocks_completed() {
        let mut history = History::new(8);
        for change in [change(10, 4, 100), change(20, 1, 200), change(40, u64::MAX, 300)] {
            history.add(change);
        }
        let fate = |slba, blocks, at| of_write(&write(slba, blocks, at), &[&history]);
        assert_eq!(fate(10, 4, 101), Fate::Resubmit, "completed before the submission");
        assert_eq!(fate(10, 4, 100), Fate::Fail);
        assert_eq!((fate(6, 4, 0), fate(6, 5, 0), fate(13, 1, 0), fate(14, 6, 0)), {
            (Fate::Resubmit, Fate::Fail, Fate::Fail, Fate::Resubmit)
        });
        assert_eq!((fate(39, 1, 0), fate(39, 2, 0)), (Fate::Resubmit, Fate::Fail));
        let other = Unfinished { entry: SubmissionEntry::new(io::WRITE, 2), token: 0, submitted: 0 };
        assert_eq!(of_write(&other, &[&history]), Fate::Resubmit, "another namespace");
    }

    #[test]
    fn a_history_that_is_too_short_forbids_the_replay() {
        let mut history = History::new(2);
        (0..3).for_each(|i| history.add(change(1000, 1, 100 + i)));
        assert_eq!(
            of_write(&write(0, 1, 101), &[&history]),
            Fate::Fail,
            "a change at 101 may have been forgotten"
        );
        assert_eq!(of_write(&write(0, 1, 102), &[&history]), Fate::Resubmit);
        let empty = History::new(2);
        assert_eq!(of_write(&write(0, 1, 102), &[&empty, &history]), Fate::Resubmit);
        assert_eq!(of_write(&write(0, 1, 100), &[&empty, &history]), Fate::Fail);
    }

    #[test]
    fn what_is_unknown_forbids_the_replay() {
        let unknown = History::unknown_until(100);
        assert_eq!(of_write(&write(0, 1, 100), &[&unknown]), Fate::Fail);
        assert_eq!(of_write(&write(0, 1, 101), &[&unknown]), Fate::Resubmit);
    }

    #[test]
    fn a_search_finds_what_a_look_at_all_changes_finds() {
        let mut random = fastrand::Rng::with_seed(1);
        for len in [1, 2, 3, 7, 8] {
            let (mut history, mut all) = (History::new(len), Vec::<Change>::new());
            for step in 0..200 {
                let last = all.last().map_or(0, |change| change.completed);
                // Some at the same time.
                let change = change(random.u64(..8), random.u64(1..3), last + random.u64(..2));
                history.add(change);
                all.push(change);
                let (slba, since) = (random.u64(..8), random.u64(last.saturating_sub(6)..=last + 1));
                let forgotten = all.len().saturating_sub(len);
                let is_known = all[..forgotten].last().is_none_or(|_| all[forgotten].completed < since);
                let is_seen = |change: &&Change| {
                    change.completed >= since && change.slba <= slba && slba < change.slba + change.blocks
                };
                let expected = is_known && !all.iter().any(|change| is_seen(&change));
                assert_eq!(history.is_untouched(1, slba, 1, since), expected, "{len} changes, step {step}");
            }
        }
    }

    #[test]
    fn only_commands_without_effect_are_always_replayed() {
        for opcode in 0..=255 {
            let entry = SubmissionEntry::new(opcode, 1);
            let expected = match opcode {
                0 | 2 | 5 | 12 => Replay::Harmless,
                1 | 8 => Replay::IfUnseen { slba: 0, blocks: 1 },
                _ => Replay::Never,
            };
            assert_eq!(of(&entry), expected, "{opcode:#x}");
            assert_eq!(of(&entry.with_fuse(Fuse::First)), Replay::Never);
        }
    }
}
