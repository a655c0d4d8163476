//! The commands in flight of one queue pair: a table by CID, and one list in the order of submission. Reactor context.
//!
//! A CID has the slot's index in its low bits and the slot's generation in the others, so that a completion which comes twice, or
//! late, finds nothing. The list serves deadlines: all commands of a pair have the same timeout, so the first of the list is the
//! first to be late, and every operation takes constant time. It also gives the order in which a reset submits commands again.
//!
//! A free slot is used again after all others that were free before it, so that a CID returns as late as possible: an Abort names
//! its command by the CID, and must not find another.

use crate::spec::entry::SubmissionEntry;

/// The most commands in flight of one pair: 12 bits of a CID are the index, and 4 the generation.
pub const DEPTH_MAX: u16 = 4095;

/// "No slot", as an index.
const NONE: u16 = u16::MAX;

/// Stages at which a late command is reported: the owner first aborts the command, then resets the controller.
pub(crate) const STAGES: usize = 2;

#[derive(Clone, Debug)]
pub(crate) struct Slot {
    /// The entry as it was submitted, for a second submission after a reset.
    pub(crate) entry: SubmissionEntry,
    pub(crate) token: u64,
    /// Time of the submission, in nanoseconds.
    pub(crate) submitted: u64,
    generation: u16,
    /// Neighbours in the list of submission, or the next free slot.
    prev: u16,
    next: u16,
    is_used: bool,
}

#[derive(Debug)]
pub(crate) struct Commands {
    slots: Box<[Slot]>,
    /// The first and the last slot of the list of free ones.
    free: u16,
    last_free: u16,
    first: u16,
    last: u16,
    /// For each stage, the first command in the list that was not reported.
    unreported: [u16; STAGES],
    /// The time of a command in flight begins at its submission, or here if that is later.
    restarted: u64,
    len: u16,
    index_bits: u32,
    generations: u16,
}

impl Commands {
    /// An empty table for `depth` commands, 1 to [`DEPTH_MAX`].
    pub(crate) fn new(depth: u16) -> Self {
        assert!((1..=DEPTH_MAX).contains(&depth), "a pair has 1 to {DEPTH_MAX} commands");
        let index_bits = u16::BITS - (depth - 1).leading_zeros();
        let slot = |index| Slot {
            entry: SubmissionEntry::default(),
            token: 0,
            submitted: 0,
            generation: 0,
            prev: NONE,
            next: if index + 1 < depth { index + 1 } else { NONE },
            is_used: false,
        };
        Self {
            slots: (0..depth).map(slot).collect(),
            free: 0,
            last_free: depth - 1,
            first: NONE,
            last: NONE,
            unreported: [NONE; STAGES],
            restarted: 0,
            len: 0,
            index_bits,
            // Without the last one, so that no CID is FFFFh, which the Error Information log uses for "no command".
            generations: (u32::from(u16::MAX) >> index_bits) as u16,
        }
    }

    pub(crate) const fn len(&self) -> u16 {
        self.len
    }

    pub(crate) const fn free(&self) -> u16 {
        self.slots.len() as u16 - self.len
    }

    /// The index of the slot that the next [`Commands::insert`] uses, and the CID; `None` if all are in flight.
    #[inline]
    pub(crate) fn next_cid(&self) -> Option<(u16, u16)> {
        let slot = self.slots.get(usize::from(self.free))?;
        Some((self.free, slot.generation << self.index_bits | self.free))
    }

    /// Puts a command into the slot of [`Commands::next_cid`], at the end of the list.
    #[inline]
    pub(crate) fn insert(&mut self, entry: SubmissionEntry, token: u64, submitted: u64) {
        let index = self.free;
        let last = self.last;
        let slot = &mut self.slots[usize::from(index)];
        self.free = slot.next;
        (slot.entry, slot.token, slot.submitted) = (entry, token, submitted);
        (slot.prev, slot.next, slot.is_used) = (last, NONE, true);
        match self.slots.get_mut(usize::from(last)) {
            Some(last) => last.next = index,
            None => self.first = index,
        }
        self.last = index;
        for cursor in &mut self.unreported {
            if *cursor == NONE {
                *cursor = index;
            }
        }
        self.len += 1;
    }

    /// The index of the command in flight with this CID.
    #[inline]
    pub(crate) fn find(&self, cid: u16) -> Option<u16> {
        let index = cid & ((1 << self.index_bits) - 1);
        let slot = self.slots.get(usize::from(index))?;
        (slot.is_used && slot.generation == cid >> self.index_bits).then_some(index)
    }

    /// Takes the command in slot `index` out, and returns its token and the time of its submission.
    #[inline]
    pub(crate) fn remove(&mut self, index: u16) -> (u64, u64) {
        let slot = &mut self.slots[usize::from(index)];
        assert!(slot.is_used, "only a command in flight ends");
        let (prev, next) = (slot.prev, slot.next);
        slot.is_used = false;
        slot.generation += 1;
        if slot.generation >= self.generations {
            slot.generation = 0;
        }
        slot.next = NONE;
        let found = (slot.token, slot.submitted);
        match self.slots.get_mut(usize::from(self.last_free)) {
            Some(last) if self.free != NONE => last.next = index,
            _ => self.free = index,
        }
        self.last_free = index;
        match self.slots.get_mut(usize::from(prev)) {
            Some(prev) => prev.next = next,
            None => self.first = next,
        }
        match self.slots.get_mut(usize::from(next)) {
            Some(next) => next.prev = prev,
            None => self.last = prev,
        }
        for cursor in &mut self.unreported {
            if *cursor == index {
                *cursor = next;
            }
        }
        self.len -= 1;
        found
    }

    pub(crate) fn slot(&self, index: u16) -> &Slot {
        &self.slots[usize::from(index)]
    }

    /// The CID of the command in slot `index`.
    pub(crate) fn cid(&self, index: u16) -> u16 {
        self.slots[usize::from(index)].generation << self.index_bits | index
    }

    /// When the time of the oldest command in flight that was not reported at this stage began.
    pub(crate) fn oldest_unreported(&self, stage: usize) -> Option<u64> {
        self.slots.get(usize::from(self.unreported[stage])).map(|slot| slot.submitted.max(self.restarted))
    }

    /// The next command whose time began at `until` or before and that was not reported at this stage, which the call marks as
    /// reported.
    #[inline]
    pub(crate) fn take_late(&mut self, stage: usize, until: u64) -> Option<u16> {
        let index = self.unreported[stage];
        let slot =
            self.slots.get(usize::from(index)).filter(|slot| slot.submitted.max(self.restarted) <= until)?;
        self.unreported[stage] = slot.next;
        Some(index)
    }

    /// The indices of the commands in flight, in the order of submission.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = u16> {
        let follow = |index: &u16| Some(self.slots[usize::from(*index)].next).filter(|&next| next != NONE);
        std::iter::successors(Some(self.first).filter(|&first| first != NONE), follow)
    }

    /// Begins the time of all commands in flight at `now`, with no report of lateness. Their times of submission stay: the rules
    /// of replay need these.
    pub(crate) const fn restart_clock(&mut self, now: u64) {
        self.restarted = now;
        self.unreported = [self.first; STAGES];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn submit(commands: &mut Commands, token: u64, now: u64) -> u16 {
        let (_, cid) = commands.next_cid().unwrap();
        commands.insert(SubmissionEntry::new(2, 1), token, now);
        cid
    }

    #[test]
    fn a_cid_finds_its_command_once() {
        for depth in [1, 2, 3, 31, 64, 1023, DEPTH_MAX] {
            let mut commands = Commands::new(depth);
            let cids: Vec<u16> = (0..depth).map(|i| submit(&mut commands, i.into(), 0)).collect();
            assert!(commands.next_cid().is_none() && commands.free() == 0);
            assert!((0..=u16::MAX).filter(|&cid| commands.find(cid).is_some()).eq({
                let mut sorted = cids.clone();
                sorted.sort_unstable();
                sorted
            }));
            for (i, cid) in cids.iter().enumerate() {
                let index = commands.find(*cid).unwrap();
                assert_eq!(commands.cid(index), *cid);
                assert_eq!(commands.remove(index), (i as u64, 0));
                assert_eq!(commands.find(*cid), None);
            }
            assert_eq!((commands.len(), commands.oldest_unreported(0)), (0, None));
        }
    }

    #[test]
    fn a_cid_returns_only_after_all_generations_and_is_never_ffff() {
        for depth in [1, 2, 1024, DEPTH_MAX] {
            let mut commands = Commands::new(depth);
            let first = submit(&mut commands, 0, 0);
            commands.remove(commands.find(first).unwrap());
            let mut uses = 1;
            loop {
                let cid = submit(&mut commands, 0, 0);
                assert_ne!(cid, u16::MAX);
                commands.remove(commands.find(cid).unwrap());
                if cid == first {
                    break;
                }
                uses += 1;
            }
            assert_eq!(uses, u32::from(commands.generations) * u32::from(depth), "{depth}");
            assert!(uses >= 15, "{depth}");
        }
    }

    #[test]
    fn a_free_slot_is_used_after_all_others() {
        let mut commands = Commands::new(4);
        let held = submit(&mut commands, 0, 0);
        let next = |commands: &mut Commands| {
            let cid = submit(commands, 0, 0);
            commands.remove(commands.find(cid).unwrap());
            cid
        };
        let mut seen = vec![next(&mut commands)];
        // The other three slots have all generations of CIDs before one returns.
        loop {
            let cid = next(&mut commands);
            if cid == seen[0] {
                break;
            }
            assert!(!seen.contains(&cid) && cid != held);
            seen.push(cid);
        }
        assert_eq!(seen.len(), 3 * usize::from(commands.generations));
        commands.remove(commands.find(held).unwrap());
        assert_eq!((0..4).map(|_| submit(&mut commands, 0, 0) & 3).fold(0, |all, slot| all | 1 << slot), 15);
        assert!(commands.next_cid().is_none());
        commands.remove(2);
        assert_eq!(commands.next_cid().unwrap().0, 2);
    }

    #[test]
    fn late_commands_are_reported_once_per_stage_in_order() {
        let mut commands = Commands::new(8);
        let cids: Vec<u16> = (0..5).map(|i| submit(&mut commands, i, 10 * i)).collect();
        assert_eq!(commands.take_late(0, 9), Some(0));
        assert_eq!(commands.take_late(0, 9), None);
        commands.remove(commands.find(cids[1]).unwrap());
        assert_eq!((commands.take_late(0, 20), commands.take_late(0, 20)), (Some(2), None));
        assert_eq!((commands.take_late(1, 20), commands.take_late(1, 20)), (Some(0), Some(2)));
        commands.remove(commands.find(cids[0]).unwrap());
        assert_eq!((commands.oldest_unreported(0), commands.oldest_unreported(1)), (Some(30), Some(30)));
        commands.restart_clock(100);
        assert_eq!((commands.take_late(0, 99), commands.take_late(0, 100)), (None, Some(2)));
    }

    #[test]
    fn random_use_keeps_the_list_in_the_order_of_submission() {
        let mut random = fastrand::Rng::with_seed(1);
        let mut commands = Commands::new(17);
        let mut model: Vec<(u16, u64)> = Vec::new();
        for token in 0..20_000 {
            if random.bool() && commands.next_cid().is_some() {
                model.push((submit(&mut commands, token, token), token));
            } else if !model.is_empty() {
                let (cid, token) = model.remove(random.usize(..model.len()));
                let index = commands.find(cid).unwrap();
                assert_eq!(commands.remove(index).0, token);
            }
            assert!(
                commands.in_order().map(|index| commands.slot(index).token).eq(model.iter().map(|m| m.1))
            );
            assert_eq!(commands.oldest_unreported(0), model.first().map(|m| m.1));
        }
    }
}
