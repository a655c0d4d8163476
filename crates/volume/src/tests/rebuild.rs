//! Pools whose manifest is lost, and what a rebuild makes of them.

use super::random::World;
use super::rig::{Disk, Rig, UUID, settings};
use crate::frame::Frame;
use crate::*;
use std::collections::HashMap;

/// A rebuild on a disk, which keeps the blobs that the disk does not have.
struct Bench<'a> {
    disk: &'a mut Disk,
    others: HashMap<BlobId, Vec<u8>>,
    /// Operations before the process is killed.
    limit: u64,
    checkpoint: Option<Vec<u8>>,
}

impl Bench<'_> {
    fn run(&mut self, copy: Option<&[u8]>, is_writing: bool) -> Option<Result<RebuildReport, RebuildError>> {
        let facts = self.disk.facts;
        let mut rebuild = Rebuild::new(facts, UUID, copy, is_writing);
        let mut turns = 0;
        loop {
            let mut has_more = rebuild.turn();
            while let Some((id, op)) = rebuild.next_op() {
                has_more = true;
                self.limit = self.limit.checked_sub(1)?;
                let (data, result) = self.execute(op);
                rebuild.completed(Done { id, data, result });
            }
            if let Some(result) = rebuild.take_result() {
                return Some(result);
            }
            turns += 1;
            assert!(has_more && turns < 1_000_000, "the rebuild does not end: {:?}", rebuild.progress());
        }
    }

    fn execute(&mut self, op: StoreOp) -> (Option<aryk_dma::Buffer>, Result<(), StoreError>) {
        let len_max = self.disk.facts.blob_bytes() as usize;
        let end = self.disk.facts.blobs;
        let at = |unit: u32| unit as usize * UNIT as usize;
        match op {
            StoreOp::Read { blob, unit, mut data, len } => {
                let is_other = blob.0 >= end;
                if self.disk.unreadable.is_some_and(|(of, from)| of == blob && unit + len / UNIT > from) {
                    return (Some(data), Err(StoreError::Medium));
                }
                let bytes = if is_other { self.others.get(&blob) } else { self.disk.blobs.get(&blob) };
                let out = &mut data.bytes_mut()[..len as usize];
                match bytes {
                    Some(bytes) => out.copy_from_slice(&bytes[at(unit)..at(unit) + len as usize]),
                    None => out.fill(0),
                }
                (Some(data), Ok(()))
            }
            StoreOp::Write { blob, unit, data, len } => {
                let is_other = blob.0 >= end;
                let bytes = if is_other {
                    self.others.entry(blob).or_insert_with(|| vec![0; len_max])
                } else {
                    self.disk.blobs.entry(blob).or_insert_with(|| vec![0; len_max])
                };
                bytes[at(unit)..at(unit) + len as usize].copy_from_slice(&data.bytes()[..len as usize]);
                (Some(data), Ok(()))
            }
            StoreOp::Checkpoint { bytes } => {
                self.checkpoint = Some(bytes);
                (None, Ok(()))
            }
            StoreOp::Discard { blob } => {
                assert!(blob.0 >= end, "segments stay as they are until the checkpoint");
                self.others.remove(&blob);
                (None, Ok(()))
            }
            other => panic!("a rebuild does not do this: {other:?}"),
        }
    }
}

/// Rebuilds the pool of a rig, and opens it.
fn rebuild(rig: &mut Rig, copy: Option<&[u8]>) -> RebuildReport {
    let mut bench = Bench { disk: &mut rig.disk, others: HashMap::new(), limit: u64::MAX, checkpoint: None };
    let report = bench.run(copy, true).expect("no limit").expect("a rebuilt pool");
    let checkpoint = bench.checkpoint.take().expect("a checkpoint");
    rig.disk.manifest = Recovered { checkpoint, edits: Vec::new() };
    assert_eq!(rig.try_reopen(settings()), State::Ready);
    report
}

/// A pool with a history.
fn world(seed: u64, actions: usize, keeps_discarded: bool) -> World {
    let mut world = World::new(seed);
    world.rig.disk.keeps_discarded = keeps_discarded;
    world.create();
    for _ in 0..actions {
        world.act();
    }
    world
}

/// The pool of a history ends: it is closed, or its host loses power.
fn end(world: &mut World, is_power_loss: bool) {
    if is_power_loss {
        world.rig.disk.crash(&mut world.rig.rng);
        world.forget();
    } else {
        world.rig.settle();
        world.drain();
        world.rig.disk.flush();
    }
}

/// The copy of the manifest is written after the answer to a command: power loss may leave one without the latest volumes.
fn forget_newest(world: &mut World, report: &RebuildReport) {
    let newest = report.volumes.iter().map(|(id, _)| *id).max();
    world.models.retain(|id, _| Some(*id) <= newest);
}

#[test]
fn the_copy_makes_the_pool_as_it_was() {
    let mut copies = 0;
    for seed in 0..8 {
        let mut world = world(seed, 1500, seed.is_multiple_of(2));
        let is_power_loss = seed % 3 == 0;
        end(&mut world, is_power_loss);
        let copy = world.rig.disk.copy.clone();
        let report = rebuild(&mut world.rig, Some(&copy));
        assert!(report.recipe == Recipe::Copy || is_power_loss, "seed {seed}: {report:?}");
        if is_power_loss {
            forget_newest(&mut world, &report);
        }
        if report.recipe == Recipe::Copy {
            copies += 1;
            assert_eq!(report.damage, [], "seed {seed}");
            world.verify();
            check(&mut world.rig, seed);
        }
    }
    assert!(copies >= 5, "{copies} copies");
}

/// Damages a page of the first run, so that the index is to be made anew.
fn damage_index(rig: &mut Rig) -> bool {
    let manifest = &rig.pool.keeper.manifest;
    let runs = manifest.partitions.iter().flat_map(|partition| partition.levels.iter().flatten());
    let Some(place) = runs.map(|run| run.place).next() else { return false };
    let bytes = rig.disk.blobs.get_mut(&place.blob).expect("it has a run");
    bytes[usize::from(place.unit) * UNIT as usize + 100] ^= 4;
    true
}

/// What was written as zeroes may be older data where the report says so.
fn may_be_old(report: &RebuildReport) -> impl Fn(VolumeId, u64, &[u32]) -> bool {
    let damage = report.damage.clone();
    move |id, unit, now| {
        let block = unit / u64::from(BLOCK_UNITS);
        let is_told = |damage: &Damage| {
            damage.volume == Some(id)
                && damage.what.starts_with("blocks that were discarded")
                && (damage.block..damage.block + damage.blocks).contains(&block)
        };
        now.contains(&0) && damage.iter().any(is_told)
    }
}

#[test]
fn the_index_is_made_of_headers() {
    let mut made = 0;
    for seed in 0..8 {
        let mut world = world(seed, 1500, seed.is_multiple_of(2));
        let is_power_loss = seed % 3 == 0;
        end(&mut world, is_power_loss);
        if !damage_index(&mut world.rig) {
            continue;
        }
        let copy = world.rig.disk.copy.clone();
        let report = rebuild(&mut world.rig, Some(&copy));
        if is_power_loss {
            forget_newest(&mut world, &report);
        }
        if report.recipe == Recipe::Copy {
            // The copy is one merge older than the run.
            world.verify();
            continue;
        }
        made += 1;
        assert!(!report.damage.is_empty(), "seed {seed}: {report:?}");
        world.verify_without(may_be_old(&report));
        check(&mut world.rig, seed);
        world.verify_without(may_be_old(&report));
    }
    assert!(made > 4, "{made} rebuilt");
}

#[test]
fn without_a_copy_each_history_is_a_volume() {
    for seed in 0..5 {
        let mut world = world(seed, 1200, seed.is_multiple_of(2));
        end(&mut world, false);
        let manifest = &world.rig.pool.keeper.manifest;
        let timelines: HashMap<_, _> = manifest
            .volumes
            .iter()
            .filter(|(_, volume)| volume.cut.is_none() && manifest.timelines[&volume.timeline].base.is_none())
            .map(|(id, volume)| (*id, volume.timeline))
            .collect();
        let report = rebuild(&mut world.rig, None);
        assert_eq!(report.recipe, Recipe::HeadersOnly);
        let found: HashMap<_, _> =
            world.rig.pool.volumes().map(|(id, volume)| (volume.timeline, (id, volume.units))).collect();
        let models: Vec<_> = std::mem::take(&mut world.models).into_iter().collect();
        for (id, mut model) in models {
            let Some((new, units)) = timelines.get(&id).and_then(|timeline| found.get(timeline)) else {
                continue;
            };
            model.cells.retain(|unit, _| unit < units);
            (model.units, model.foreign_units) = (*units, 0);
            world.models.insert(*new, model);
            assert!(
                report.damage.iter().any(|damage| damage.volume == Some(*new)),
                "seed {seed}: {report:?}"
            );
        }
        world.verify_without(may_be_old(&report));
        check(&mut world.rig, seed);
    }
}

#[test]
fn a_rebuild_that_is_killed_can_be_repeated() {
    for seed in 0..3 {
        let mut world = world(seed, 1200, true);
        end(&mut world, false);
        if !damage_index(&mut world.rig) {
            continue;
        }
        let copy = world.rig.disk.copy.clone();
        let run = |disk: &mut Disk, limit| {
            let mut bench = Bench { disk, others: HashMap::new(), limit, checkpoint: None };
            bench.run(Some(&copy), true).map(Result::unwrap);
            (limit - bench.limit, bench.checkpoint.is_some())
        };
        let mut disk = std::mem::replace(&mut world.rig.disk, Disk::new(crate::tests::rig::facts()));
        let before = disk.blobs.clone();
        let (ops, _) = run(&mut disk, u64::MAX);
        disk.blobs = before;
        for _ in 0..5 {
            let limit = world.rig.rng.u64(ops / 2..ops - 1);
            let (_, is_complete) = run(&mut disk, limit);
            assert!(!is_complete, "seed {seed}: killed after {limit} of {ops}");
        }
        world.rig.disk = disk;
        let report = rebuild(&mut world.rig, Some(&copy));
        world.verify_without(may_be_old(&report));
        check(&mut world.rig, seed);
    }
}

#[test]
fn a_look_changes_nothing() {
    let mut world = world(3, 1500, false);
    end(&mut world, false);
    assert!(damage_index(&mut world.rig));
    let copy = world.rig.disk.copy.clone();
    let before = world.rig.disk.blobs.clone();
    let disk = &mut world.rig.disk;
    let mut bench = Bench { disk, others: HashMap::new(), limit: u64::MAX, checkpoint: None };
    let looked = bench.run(Some(&copy), false).unwrap().unwrap();
    assert!(bench.checkpoint.is_none());
    assert!(world.rig.disk.blobs == before);
    let report = rebuild(&mut world.rig, Some(&copy));
    assert_eq!(
        (looked.recipe, looked.entries, looked.damage),
        (report.recipe, report.entries, report.damage)
    );
}

/// Damages headers of frames, and returns how many.
fn damage_headers(rig: &mut Rig, of: u32) -> usize {
    let units = rig.disk.facts.blob_units;
    let (rng, mut count) = (&mut rig.rng, 0);
    for bytes in rig.disk.blobs.values_mut() {
        for unit in 0..units as usize {
            let at = unit * UNIT as usize;
            let is_header = Frame::parse(&bytes[at..]).is_ok();
            if is_header && rng.u32(0..of) == 0 {
                let len = Frame::header_len(&bytes[at..]).unwrap();
                bytes[at + rng.usize(0..len)] ^= 1 << rng.u8(0..8);
                count += 1;
            }
        }
    }
    count
}

#[test]
fn damaged_headers_are_told() {
    let (mut damaged, mut different) = (0, 0);
    for seed in 0..12 {
        let mut world = world(seed, 1200, false);
        end(&mut world, false);
        if !damage_index(&mut world.rig) {
            continue;
        }
        let count = damage_headers(&mut world.rig, 100);
        damaged += count;
        let copy = world.rig.disk.copy.clone();
        let report = rebuild(&mut world.rig, Some(&copy));
        let is_told = report.damage.iter().any(|damage| damage.volume.is_none());
        let is_same = world.is_same(may_be_old(&report));
        assert!(is_same || is_told, "seed {seed}: {count} headers damaged, {report:?}");
        different += usize::from(!is_same);
        check(&mut world.rig, seed);
    }
    assert!(damaged > 10 && different > 0, "{damaged} headers damaged, {different} pools different");
}

/// The pool is whole.
fn check(rig: &mut Rig, seed: u64) {
    rig.settle();
    let Ok(Answer::Check(report)) = rig.command(Command::Check { data: true, repair: false }) else {
        panic!("seed {seed}: no report")
    };
    assert!(report.is_clean(), "seed {seed}: {report:?}");
}
