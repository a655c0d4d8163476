//! Damage of the log: told from its end where a later frame proves that the damaged one was durable.

use super::rig::{Rig, settings};
use crate::frame::Frame;
use crate::*;

/// A frame of the log on the disk.
#[derive(Clone, Copy, Debug)]
struct Found {
    blob: BlobId,
    unit: u32,
    units: u32,
    life: u64,
    sequence: u64,
    durable: u64,
}

/// The frames of the tail of the log that are on the disk, by sequence.
fn frames(rig: &Rig) -> Vec<Found> {
    let manifest = &rig.pool.keeper.manifest;
    let mut found = Vec::new();
    for &blob in &manifest.log.blobs {
        let Some(bytes) = rig.disk.blobs.get(&blob) else { continue };
        let life = manifest.blobs.get(blob).expect("a blob of the log").life;
        let mut unit = 0;
        while unit < rig.disk.facts.blob_units {
            let frame = Frame::parse(&bytes[unit as usize * UNIT as usize..]).ok();
            let Some(frame) = frame.filter(|frame| frame.head().life == life && frame.head().unit == unit)
            else {
                unit += 1;
                continue;
            };
            let (head, units) = (frame.head(), frame.units());
            found.push(Found { blob, unit, units, life, sequence: head.sequence, durable: head.durable });
            unit += units;
        }
    }
    found.retain(|frame| frame.sequence >= manifest.log.sequence);
    // What an opening has left out is there beside what came in its place.
    found.sort_by_key(|frame| (frame.sequence, std::cmp::Reverse(frame.life)));
    found.dedup_by_key(|frame| frame.sequence);
    found
}

/// Writes some frames, with a flush of the volume now and then.
fn write_frames(rig: &mut Rig, volume: VolumeId, count: u64) {
    for n in 0..count {
        let mut data = vec![0; 512 * rig.rng.usize(1..65)];
        rig.rng.fill(&mut data);
        let unit = rig.rng.u64(0..60_000);
        rig.write(volume, unit, &data);
        if n == count / 2 || rig.rng.u8(0..6) == 0 {
            rig.flush(volume);
        }
    }
}

fn flip(rig: &mut Rig, frame: Found) {
    let bit = rig.rng.usize(0..frame.units as usize * UNIT as usize * 8);
    let bytes = rig.disk.blobs.get_mut(&frame.blob).expect("the blob was written");
    bytes[frame.unit as usize * UNIT as usize + bit / 8] ^= 1 << (bit % 8);
}

#[test]
fn a_damaged_frame_that_was_durable_is_named() {
    let (mut named, mut ends) = (0, 0);
    for seed in 0..60 {
        let mut rig = Rig::new(seed);
        let volume = rig.create("a", 80_000, Origin::Empty);
        write_frames(&mut rig, volume, 30);
        if rig.rng.bool() {
            // The tail is of two lives.
            rig.reopen(rig.rng.clone().bool());
            write_frames(&mut rig, volume, 20);
        }
        rig.disk.flush();
        let all = frames(&rig);
        let damaged = all[rig.rng.usize(0..all.len())];
        let is_proven = all.iter().any(|frame| frame.durable > damaged.sequence);
        flip(&mut rig, damaged);
        let state = rig.try_reopen(settings());
        if is_proven {
            // The missing frame may be one that is the first of a blob: then its place is the end of the blob before.
            let State::Damaged(place) = state else { panic!("seed {seed}: {state:?}") };
            let is_exact = (place.blob, place.unit) == (damaged.blob, damaged.unit);
            assert!(is_exact || damaged.unit == 0, "seed {seed}: {damaged:?} named as {place:?}");
            named += 1;
            // What is known to be lost can be given up.
            let accepts = Settings { accepts_damaged_log: true, ..settings() };
            assert_eq!(rig.try_reopen(accepts), State::Ready, "seed {seed}");
            assert_eq!(rig.pool.log_damage(), Some(place));
            rig.settle();
            rig.write(volume, 0, &[7; 4096]);
            rig.reopen(false);
            assert_eq!(rig.read(volume, 0, 8), [7; 4096], "seed {seed}");
            assert_eq!(rig.pool.log_damage(), None);
        } else {
            assert_eq!(state, State::Ready, "seed {seed}: {damaged:?} is not proven");
            ends += 1;
        }
    }
    assert!(named > 20 && ends > 5, "{named} named, {ends} ends");
}

#[test]
fn what_lies_behind_the_end_can_be_unreadable() {
    let mut rig = Rig::new(3);
    let volume = rig.create("a", 80_000, Origin::Empty);
    write_frames(&mut rig, volume, 10);
    rig.disk.flush();
    let last = *frames(&rig).last().expect("frames");
    let end = last.unit + last.units;
    for bytes in [2 << 20, 1 << 20, 64 << 10, 2 * BLOCK] {
        rig.disk.unreadable = Some((last.blob, end + bytes / UNIT));
        assert_eq!(rig.try_reopen(settings()), State::Ready, "{bytes} bytes behind the end");
    }
    // The next frame may be there.
    rig.disk.unreadable = Some((last.blob, end));
    assert_eq!(rig.try_reopen(settings()), State::Failed(StoreError::Medium));
}
