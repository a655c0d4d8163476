//! The checker against a correct model device, and against devices with relevant faults.

use super::{Change, Checker, Read, Write, WrongValue};
use crate::content::Content;
use crate::random::stream;
use fastrand::Rng;

const SECTORS: u64 = 24;

/// The fault of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutation {
    None,
    /// A write is completed and not applied.
    LostWrite,
    /// A read returns the content before the last completed change.
    StaleRead,
    /// A write is applied once more after a later one has completed, as by a dead process.
    LateWrite,
    /// A write-zeroes is completed and not applied.
    LostZeroes,
    /// A sector is written next to its place.
    Misplaced,
}

enum Running {
    Read(Read),
    Write(Write),
}

/// A device that applies requests in flight in any order, and sometimes again before it completes them.
struct Model {
    sectors: Vec<Content>,
    before: Vec<Content>,
    running: Vec<Running>,
    done: Vec<(u64, std::ops::Range<u64>)>,
    mutation: Mutation,
    mutated: u32,
}

impl Model {
    fn new(mutation: Mutation) -> Self {
        let sectors = vec![Content::Written(0); SECTORS as usize];
        Self { before: sectors.clone(), sectors, running: Vec::new(), done: Vec::new(), mutation, mutated: 0 }
    }

    fn apply(&mut self, write: &Write, random: &mut Rng) {
        let content = match write.change {
            Change::Write => Content::Written(write.seq),
            Change::Zeroes => Content::Zero,
            Change::Discard if random.bool() => Content::Zero,
            Change::Discard => return,
        };
        for sector in write.sectors() {
            self.sectors[sector as usize] = content;
        }
    }

    /// Whether the fault happens now.
    fn mutate(&mut self, mutation: Mutation, random: &mut Rng) -> bool {
        let now = self.mutation == mutation && random.u64(..100) < 3;
        self.mutated += u32::from(now);
        now
    }

    fn step(&mut self, checker: &mut Checker, random: &mut Rng) -> Result<(), WrongValue> {
        if self.running.len() < 8 && random.u64(..100) < 55 {
            self.submit(checker, random);
            return Ok(());
        }
        if self.running.is_empty() {
            return Ok(());
        }
        let index = random.u64(..self.running.len() as u64) as usize;
        if random.u64(..100) < 40 {
            // A crash: requests in flight may be applied by the dead process, and by its successor.
            if let Running::Write(write) = &self.running[index] {
                let again = Write { sectors: write.sectors(), ..*write };
                self.apply(&again, random);
            }
            return Ok(());
        }
        match self.running.swap_remove(index) {
            Running::Read(read) => self.answer_read(&read, checker, random),
            Running::Write(write) => {
                self.answer_write(write, checker, random);
                Ok(())
            }
        }
    }

    fn submit(&mut self, checker: &mut Checker, random: &mut Rng) {
        let start = random.u64(..SECTORS);
        let range = start..start + 1 + random.u64(..(SECTORS - start).min(6));
        self.running.push(match random.u64(..10) {
            0..=4 => Running::Read(checker.submit_read(range)),
            5..=7 => Running::Write(checker.submit_write(range, Change::Write)),
            8 => Running::Write(checker.submit_write(range, Change::Zeroes)),
            _ => Running::Write(checker.submit_write(range, Change::Discard)),
        });
    }

    fn answer_read(
        &mut self,
        read: &Read,
        checker: &mut Checker,
        random: &mut Rng,
    ) -> Result<(), WrongValue> {
        let from = if self.mutate(Mutation::StaleRead, random) { &self.before } else { &self.sectors };
        let range = read.sectors().start as usize..read.sectors().end as usize;
        checker.complete_read(read, from[range].to_vec())
    }

    fn answer_write(&mut self, write: Write, checker: &mut Checker, random: &mut Rng) {
        let lost = match write.change {
            Change::Write => self.mutate(Mutation::LostWrite, random),
            Change::Zeroes => self.mutate(Mutation::LostZeroes, random),
            Change::Discard => false,
        };
        self.before.clone_from(&self.sectors);
        let moved = write.change == Change::Write && self.mutate(Mutation::Misplaced, random);
        if moved {
            let wrong = write.sectors.end % SECTORS;
            self.sectors[wrong as usize] = Content::Written(write.seq);
        }
        if !lost {
            self.apply(&write, random);
        }
        checker.complete_write(&write);
        if self.done.len() > 6 {
            let (seq, range) = self.done.remove(0);
            if self.mutate(Mutation::LateWrite, random) {
                for sector in range {
                    self.sectors[sector as usize] = Content::Written(seq);
                }
            }
        }
        if write.change == Change::Write {
            self.done.push((write.seq, write.sectors()));
        }
    }
}

/// Runs a device for a while; returns the checker's result, and how often the fault happened.
fn run(mutation: Mutation, seed: u64) -> (Result<(), WrongValue>, u32) {
    let mut random = stream(seed, 0);
    let mut checker = Checker::new(SECTORS);
    let mut model = Model::new(mutation);
    // Not every fault has an effect: a concurrent write may cover a lost write.
    for _ in 0..if mutation == Mutation::None { 3000 } else { 50_000 } {
        let seen = model.step(&mut checker, &mut random);
        if seen.is_err() {
            return (seen, model.mutated);
        }
    }
    (Ok(()), model.mutated)
}

#[test]
fn devices_that_are_right_pass() {
    for seed in 0..200 {
        let (seen, mutated) = run(Mutation::None, seed);
        assert_eq!((seen, mutated), (Ok(()), 0), "seed {seed}");
    }
}

#[test]
fn devices_that_are_wrong_are_found() {
    use Mutation::{LateWrite, LostWrite, LostZeroes, Misplaced, StaleRead};
    for mutation in [LostWrite, StaleRead, LateWrite, LostZeroes, Misplaced] {
        for seed in 0..50 {
            let (seen, mutated) = run(mutation, seed);
            assert!(mutated > 0 && seen.is_err(), "{mutation:?}, seed {seed}: {mutated} faults, none found");
        }
    }
}

fn read(checker: &mut Checker, content: Content) -> Result<(), WrongValue> {
    let read = checker.submit_read(3..4);
    checker.complete_read(&read, [content])
}

#[test]
fn writes_in_flight_may_be_seen_or_not_until_they_complete() {
    let mut checker = Checker::new(8);
    let first = checker.submit_write(3..4, Change::Write);
    let second = checker.submit_write(3..4, Change::Write);
    for seq in [0, 1, 2, 1, 0, 2] {
        read(&mut checker, Content::Written(seq)).unwrap_or_else(|_| {
            // After one of the two was read, the content before them is obsolete.
            assert_eq!(seq, 0);
        });
    }
    checker.complete_write(&first);
    checker.complete_write(&second);
    read(&mut checker, Content::Written(1)).expect("the first may have been the last to be done");
    read(&mut checker, Content::Written(2)).expect_err("the first was seen when both had completed");
}

#[test]
fn a_completed_write_ends_those_that_completed_before_its_submission() {
    let mut checker = Checker::new(8);
    let early = checker.submit_read(3..4);
    let first = checker.submit_write(3..4, Change::Write);
    checker.complete_write(&first);
    let second = checker.submit_write(3..4, Change::Write);
    read(&mut checker, Content::Written(1)).expect("the second still runs");
    checker.complete_write(&second);
    let wrong = read(&mut checker, Content::Written(1)).expect_err("it was overwritten");
    assert_eq!((wrong.sector, wrong.allowed), (3, vec!["write 2".to_owned()]));
    checker.complete_read(&early, [Content::Written(0)]).expect("it was submitted before all of them");
}

#[test]
fn a_discard_leaves_zeroes_or_nothing() {
    let mut checker = Checker::new(8);
    let discard = checker.submit_write(3..4, Change::Discard);
    checker.complete_write(&discard);
    read(&mut checker, Content::Written(0)).expect("it may do nothing");
    read(&mut checker, Content::Zero).expect_err("it has done nothing");
    checker.check_at_rest(3, Content::Written(0)).expect("nothing happened since");
    checker.check_at_rest(3, Content::Zero).expect_err("it has done nothing");
}
