//! Back-pressure, on a store whose writes of the index are slow: the backlog stays below its limit, volumes share what there is,
//! and one that writes little does not wait.

use super::rig::{Rig, facts, settings};
use crate::levels::{LEVELS_MAX, MERGE};
use crate::outbox::Owner;
use crate::*;
use std::collections::HashMap;

/// Turns for each write of the index that the store completes.
const TURNS_PER_WRITE: u64 = 8;

const LIMIT: u64 = 4 << 20;

/// A volume with so many writes under way.
struct Writer {
    volume: VolumeId,
    units: u64,
    /// Its writes are at so many places.
    places: u64,
    in_flight: u64,
    next: u64,
    /// Bytes of writes that have ended.
    done: u64,
}

struct Load {
    rig: Rig,
    writers: Vec<Writer>,
    /// Whose write a tag is.
    tags: HashMap<Tag, usize>,
    turns: u64,
    unflushed_max: u64,
    levels_max: usize,
}

impl Load {
    fn new(seed: u64, flush_bytes: u64) -> Self {
        // Entries have a limit of their own, of four flushes: writes of blocks do not meet it.
        let settings =
            Settings { flush_bytes, flush_entries: 4096, unflushed_bytes_max: LIMIT, ..settings() };
        let rig = Rig::with(seed, settings, facts());
        Self { rig, writers: Vec::new(), tags: HashMap::new(), turns: 0, unflushed_max: 0, levels_max: 0 }
    }

    fn add(&mut self, bytes: u64, places: u64) {
        let units = bytes / u64::from(UNIT);
        let volume = self.rig.create(&format!("{}", self.writers.len()), units * places, Origin::Empty);
        self.writers.push(Writer { volume, units, places, in_flight: 0, next: 0, done: 0 });
    }

    /// Has a volume write until so many of its writes are under way.
    fn fill(&mut self, number: usize, depth: u64) {
        while self.writers[number].in_flight < depth {
            let Writer { volume, units, places, next, .. } = self.writers[number];
            let data = vec![next as u8; (units * u64::from(UNIT)) as usize];
            let tag = self.rig.submit_write(volume, next % places * units, &data, false);
            self.tags.insert(tag, number);
            self.writers[number].in_flight += 1;
            self.writers[number].next += 1;
        }
    }

    fn waits(&self, number: usize) -> bool {
        !self.rig.pool.runtimes[&self.writers[number].volume].queue.is_empty()
    }

    /// A turn of the pool. The store completes all but writes of the index, and one of these now and then.
    fn turn(&mut self) {
        self.turn_and(|load| {
            load.rig.run_those(|owner| !matches!(owner, Owner::IndexWrite { .. }));
            if load.turns.is_multiple_of(TURNS_PER_WRITE) {
                load.rig.step();
            }
        });
    }

    fn turn_and(&mut self, serve: impl FnOnce(&mut Self)) {
        self.turns += 1;
        self.rig.turn();
        serve(self);
        for reply in std::mem::take(&mut self.rig.replies) {
            assert_eq!(reply.status, Status::Ok);
            self.rig.forget(reply.tag);
            let writer = &mut self.writers[self.tags.remove(&reply.tag).expect("a write")];
            writer.in_flight -= 1;
            writer.done += writer.units * u64::from(UNIT);
        }
        let levels = self.rig.pool.partitions.iter().map(|partition| partition.index.levels().len());
        self.levels_max = self.levels_max.max(levels.max().unwrap_or(0));
        let stats = self.rig.pool.stats();
        self.unflushed_max = self.unflushed_max.max(stats.unflushed_bytes);
        assert!(stats.unflushed_bytes <= LIMIT, "{stats:?}");
    }
}

/// A share of a volume beside another one is a third of a sixteenth of the limit for each flush, 85 KiB here: one that writes
/// less is admitted in the turn in which it submits.
#[test]
fn a_light_volume_waits_for_no_turn_beside_a_heavy_one() {
    let mut load = Load::new(1, LIMIT);
    let (heavy, light) = (0, 1);
    load.add(64 << 10, 256);
    load.add(4 << 10, 1024);
    let mut waits = 0;
    for turn in 0..1500_u64 {
        load.fill(heavy, 64);
        if turn.is_multiple_of(8) {
            load.fill(light, 1);
            assert!(!load.waits(light), "turn {turn}: {:?}", load.rig.pool.stats());
        }
        waits += u64::from(load.waits(heavy));
        load.turn();
    }
    let flushes = load.rig.pool.jobs.freezes;
    assert!(waits > 750, "the heavy volume waits in {waits} turns only");
    assert!(load.writers[light].done > (1500 / 8 - 20) * 4096, "{}", load.writers[light].done);
    // Each flush lets the writes of a quarter of the limit go, besides the first one and the last one.
    assert!(
        load.writers[heavy].done >= (flushes - 2) * LIMIT / 4,
        "{} in {flushes}",
        load.writers[heavy].done
    );
    assert!(load.unflushed_max > LIMIT / 4, "{}", load.unflushed_max);
}

/// Volumes that always have more to write get the same bytes, whatever the size of their writes: they differ by two quanta, two
/// writes, and what they have under way at most.
#[test]
fn a_hundred_heavy_volumes_share_by_bytes() {
    let mut load = Load::new(2, LIMIT);
    for number in 0..100 {
        let (bytes, places) = if number % 2 == 0 { (64 << 10, 8) } else { (16 << 10, 32) };
        load.add(bytes, places);
    }
    let mut begin = vec![0; 100];
    while load.writers.iter().map(|writer| writer.done).sum::<u64>() < 240 << 20 {
        for number in 0..100 {
            load.fill(number, (512 << 10) / (load.writers[number].units * u64::from(UNIT)));
        }
        load.turn();
        assert!(load.turns < 1_000_000, "{:?}", load.rig.pool.stats());
        // From the first turn on in which all wait.
        if begin == [0; 100] && (0..100).all(|number| load.waits(number)) {
            begin = load.writers.iter().map(|writer| writer.done).collect();
        }
    }
    let done: Vec<u64> = load.writers.iter().zip(&begin).map(|(writer, begin)| writer.done - begin).collect();
    let (least, most) = (done.iter().min().unwrap(), done.iter().max().unwrap());
    assert!(*least > 1 << 20, "{done:?}");
    assert!(most - least <= (2 * 256 + 2 * 64 + 512) << 10, "{least} to {most}");
}

/// Merges that do not end: no more levels than the limit are added, and writes wait for the backlog, until they end.
#[test]
fn a_flush_waits_for_merges_that_are_behind() {
    let mut load = Load::new(3, 64 << 10);
    load.add(64 << 10, 64);
    let is_merge = |owner: &Owner| matches!(owner, Owner::IndexWrite { job: MERGE });
    let (mut flushes, mut turns) = (0, 0);
    while turns < 100 {
        load.fill(0, 64);
        load.turn_and(|load| load.rig.run_those(|owner| !is_merge(owner)));
        turns = if load.rig.pool.jobs.freezes == flushes { turns + 1 } else { 0 };
        flushes = load.rig.pool.jobs.freezes;
        assert!(load.turns < 10_000, "{:?}", load.rig.pool.stats());
    }
    assert!(load.rig.pool.price_percent() == 100 && load.waits(0));
    assert_eq!(load.levels_max, LEVELS_MAX);
    let done = load.writers[0].done;
    for _ in 0..500 {
        load.fill(0, 64);
        load.turn_and(|load| load.rig.run_those(|_| true));
    }
    assert!(load.writers[0].done > done + 4 * LIMIT, "{}", load.writers[0].done);
}
