//! The scrub: damage that it finds, what it costs, and what it gives way to.

use super::rig::{Rig, settings};
use crate::*;

/// Bytes of a volume of random blocks.
const UNITS: u64 = 20_000;

/// A pool with a volume and a snapshot of an earlier state of it, all flushed and merged.
fn filled(seed: u64) -> (Rig, VolumeId, VolumeId) {
    let mut rig = Rig::new(seed);
    let volume = rig.create("a", UNITS, Origin::Empty);
    let mut data = vec![0; 64 << 10];
    for unit in (0..UNITS - 128).step_by(128) {
        rig.rng.fill(&mut data);
        rig.write(volume, unit, &data);
    }
    let snapshot = rig.snapshot(volume, "s");
    for _ in 0..100 {
        let unit = rig.rng.u64(0..UNITS / 8 - 1) * 8;
        rig.rng.fill(&mut data[..4096]);
        rig.write(volume, unit, &data[..4096]);
    }
    assert!(
        matches!(rig.command(Command::Check { data: true, repair: false }), Ok(Answer::Check(report)) if report.is_clean())
    );
    rig.settle();
    rig.disk.flush();
    (rig, volume, snapshot)
}

/// Runs a pass to its end, by grants of so many bytes. Returns how many there were.
fn pass(rig: &mut Rig, grant: u64) -> u64 {
    rig.pool.start_scrub();
    let mut grants = 0;
    while let Scrub::Running { .. } = rig.pool.scrub() {
        rig.pool.grant_scrub(grant);
        rig.settle();
        grants += 1;
        assert!(grants < 1_000_000, "the pass does not end");
    }
    assert_eq!(rig.pool.scrub(), Scrub::Done);
    grants
}

/// A byte of the data of a volume's block, on the disk.
fn byte_of(rig: &mut Rig, volume: VolumeId, block: u64) -> (BlobId, usize) {
    let wanted = rig.read(volume, block * 8, 8);
    let found = rig.disk.blobs.iter().find_map(|(&blob, bytes)| {
        let unit = bytes.chunks(UNIT as usize).position(|unit| unit == &wanted[..UNIT as usize])?;
        Some((blob, unit * UNIT as usize))
    });
    found.expect("the block is on the disk")
}

fn flip(rig: &mut Rig, (blob, byte): (BlobId, usize)) {
    rig.disk.blobs.get_mut(&blob).expect("the blob was written")[byte + 77] ^= 4;
}

#[test]
fn a_clean_pool_is_read_once() {
    let (mut rig, ..) = filled(1);
    let before = rig.pool.stats();
    pass(&mut rig, 1 << 20);
    let after = rig.pool.stats();
    let read = after.scrub_read_bytes - before.scrub_read_bytes;
    let live = after.live_bytes + after.index_bytes;
    // Pages of the index are read by the way to entries, too, if they are not in memory.
    assert!((live..live + after.index_bytes).contains(&read), "{read} of {live}");
    assert_eq!((after.scrub_damaged_blocks, rig.pool.take_scrub_damage()), (0, Vec::new()));
}

#[test]
fn a_flipped_byte_is_told_with_its_volume_and_block() {
    let (mut rig, volume, snapshot) = filled(2);
    let names = |rig: &mut Rig| pass_damage(rig);
    for (of, block) in [(volume, 0), (volume, 777), (snapshot, 1500)] {
        let place = byte_of(&mut rig, of, block);
        let shown =
            if rig.read(volume, block * 8, 8) == rig.read(snapshot, block * 8, 8) { volume } else { of };
        flip(&mut rig, place);
        let damage = names(&mut rig);
        let [damage] = &damage[..] else { panic!("{damage:?}") };
        assert_eq!((damage.block, damage.blocks), (block, 1));
        assert_eq!(damage.volume, Some(shown));
        assert_eq!(damage.what, "data does not match its checksum");
        flip(&mut rig, place);
    }
    assert_eq!(rig.pool.stats().scrub_damaged_blocks, 3);
    assert_eq!(rig.pool.stats().damaged_blocks, 3);
    assert_eq!(names(&mut rig), Vec::new());
}

fn pass_damage(rig: &mut Rig) -> Vec<Damage> {
    pass(rig, 1 << 20);
    rig.pool.take_scrub_damage()
}

#[test]
fn data_that_cannot_be_read_is_told() {
    let (mut rig, volume, _) = filled(3);
    let (blob, byte) = byte_of(&mut rig, volume, 2400);
    rig.disk.unreadable = Some((blob, byte as u32 / UNIT));
    let damage = pass_damage(&mut rig);
    assert!(damage.iter().any(|damage| damage.block <= 2400 && 2400 < damage.block + damage.blocks));
    assert!(damage.iter().all(|damage| damage.what == "data cannot be read"), "{damage:?}");
}

#[test]
fn a_flipped_byte_of_an_index_page_is_told_although_the_page_is_in_memory() {
    let (mut rig, volume, _) = filled(4);
    // All pages are in memory.
    rig.read(volume, 0, UNITS);
    let runs: Vec<_> = rig
        .pool
        .keeper
        .manifest
        .partitions
        .iter()
        .flat_map(|partition| partition.levels.iter().flatten())
        .collect();
    let run = *runs[rig.rng.usize(0..runs.len())];
    let place = run.place_of(rig.rng.u32(0..run.shape.pages));
    let byte = (place.blob, usize::from(place.unit) * UNIT as usize);
    flip(&mut rig, byte);
    let damage = pass_damage(&mut rig);
    let [damage] = &damage[..] else { panic!("{damage:?}") };
    assert!(damage.volume.is_none() && damage.what.starts_with("an index page of partition"), "{damage:?}");
    flip(&mut rig, byte);
    assert_eq!(pass_damage(&mut rig), Vec::new());
}

/// The pages of an index are damaged one after the other: of the leaves, and of the pages above them.
#[test]
fn what_is_not_on_a_damaged_index_page_is_verified() {
    let (mut rig, volume, _) = filled(5);
    let data = [0, 600, 1200, 1800, 2400].map(|block| (block, byte_of(&mut rig, volume, block)));
    let runs =
        rig.pool.keeper.manifest.partitions.iter().flat_map(|partition| partition.levels.iter().flatten());
    let largest = *runs.max_by_key(|run| run.shape.pages).expect("the index has a run");
    assert!(largest.shape.pages > 8, "{largest:?}");
    for page in 0..largest.shape.pages {
        let place = largest.place_of(page);
        let byte = (place.blob, usize::from(place.unit) * UNIT as usize);
        flip(&mut rig, byte);
        rig.reopen(false);
        let mut left_out: Vec<_> = pass_damage(&mut rig);
        left_out.retain(|damage| damage.what.starts_with("not verified"));
        assert!(!left_out.is_empty() && left_out.iter().all(|damage| damage.volume.is_some()));
        let is_left_out = |block| left_out.iter().any(|d| (d.block..d.block + d.blocks).contains(&block));
        let last_block = left_out.iter().map(|damage| damage.block + damage.blocks).max();
        assert!(last_block <= Some(UNITS / 8), "{left_out:?}");
        let is_leaf = left_out.iter().map(|damage| damage.blocks).sum::<u64>() < 1000;
        assert!(is_leaf || page + 2 >= largest.shape.pages, "page {page}: {left_out:?}");
        for (block, place) in data {
            flip(&mut rig, place);
            let found = pass_damage(&mut rig);
            let is_found = found.iter().any(|damage| {
                damage.what.starts_with("data")
                    && (damage.block..damage.block + damage.blocks).contains(&block)
            });
            assert!(is_found || is_left_out(block), "page {page}, block {block}: {found:?}");
            flip(&mut rig, place);
        }
        flip(&mut rig, byte);
    }
}

#[test]
fn damage_of_a_dense_range_is_told() {
    let large = StoreFacts { blob_units: 20_480, ..super::rig::facts() };
    let mut rig = Rig::with(10, Settings { dense_writes: true, ..settings() }, large);
    let volume = rig.create("a", UNITS, Origin::Empty);
    let mut data = vec![0; (RANGE_BLOCKS * BLOCK) as usize];
    rig.rng.fill(&mut data);
    rig.write(volume, 8192, &data);
    rig.settle();
    rig.disk.flush();
    assert_eq!(pass_damage(&mut rig), Vec::new());
    let block = byte_of(&mut rig, volume, 1024 + 99);
    // Its header, which has the checksums, is before it.
    let (blob, header) = (block.0, block.1 - 99 * BLOCK as usize - 4096 - 512);
    assert!(rig.disk.blobs[&blob][header..].starts_with(b"AVF1"));
    for (place, found) in [(block, (1024 + 99, 1)), ((blob, header), (1024, 1024))] {
        flip(&mut rig, place);
        let damage = pass_damage(&mut rig);
        let damage: Vec<_> =
            damage.iter().map(|damage| (damage.volume, (damage.block, damage.blocks))).collect();
        assert_eq!(damage, [(Some(volume), found)]);
        flip(&mut rig, place);
    }
    assert_eq!(pass_damage(&mut rig), Vec::new());
}

#[test]
fn damage_that_no_view_sees_is_not_told() {
    let mut rig = Rig::with(
        5,
        Settings { flush_entries: 1 << 20, flush_bytes: 1 << 40, ..settings() },
        super::rig::facts(),
    );
    let volume = rig.create("a", UNITS, Origin::Empty);
    let mut data = vec![0; 4096];
    rig.rng.fill(&mut data);
    rig.write(volume, 80, &data);
    rig.settle();
    rig.disk.flush();
    let old = byte_of(&mut rig, volume, 10);
    // The index has the old version until levels are merged.
    let snapshot = rig.snapshot(volume, "s");
    rig.settle();
    rig.rng.fill(&mut data);
    rig.write(volume, 80, &data);
    rig.settle();
    flip(&mut rig, old);
    let damage = pass_damage(&mut rig);
    assert_eq!(
        damage.iter().map(|damage| (damage.volume, damage.block)).collect::<Vec<_>>(),
        [(Some(snapshot), 10)]
    );
    assert_eq!(rig.command(Command::Delete(snapshot)), Ok(Answer::Done));
    assert_eq!(pass_damage(&mut rig), Vec::new());
}

#[test]
fn a_pass_reads_no_more_than_it_is_granted() {
    let (mut rig, ..) = filled(6);
    rig.pool.start_scrub();
    rig.settle();
    let begin = rig.pool.stats().scrub_read_bytes;
    let (mut granted, mut largest) = (0, 0);
    while let Scrub::Running { .. } = rig.pool.scrub() {
        let before = rig.pool.stats().scrub_read_bytes;
        assert!(before - begin <= granted + (256 << 10), "{before}: {granted} were granted");
        rig.pool.grant_scrub(64 << 10);
        granted += 64 << 10;
        rig.settle();
        largest = largest.max(rig.pool.stats().scrub_read_bytes - before);
        assert!(rig.pool.is_idle());
    }
    assert!(largest <= 320 << 10, "{largest} bytes after one grant");
    // A grant that is not used is lost.
    rig.pool.grant_scrub(1 << 40);
    rig.pool.start_scrub();
    assert!(!rig.turn(), "a pass begins without a grant");
}

#[test]
fn a_pass_gives_way_to_requests() {
    let (mut rig, volume, _) = filled(7);
    rig.pool.start_scrub();
    // The read is not answered.
    let tag = rig.submit_read(volume, 0, 8);
    let reads = |rig: &mut Rig, bytes| {
        let before = rig.pool.stats().scrub_read_bytes;
        let in_flight = rig.pool.out.in_flight();
        rig.pool.grant_scrub(bytes);
        while rig.pool.turn() {}
        let now = rig.pool.out.in_flight() - in_flight;
        (rig.pool.stats().scrub_read_bytes - before, now)
    };
    let (bytes, in_flight) = reads(&mut rig, 1 << 20);
    assert!(bytes <= 512 << 10 && in_flight <= 1, "{bytes} bytes in {in_flight} reads");
    assert_eq!(rig.wait(tag).status, Status::Ok);
    rig.forget(tag);
    rig.settle();
    let (_, in_flight) = reads(&mut rig, 16 << 20);
    assert!((2..=4).contains(&in_flight), "{in_flight} reads");
    pass(&mut rig, 1 << 20);
}

#[test]
fn a_pass_ends_while_writes_and_the_cleaner_go_on() {
    for seed in 0..2 {
        let (mut rig, volume, snapshot) = filled(seed);
        rig.pool.start_scrub();
        let mut data = vec![0; 64 << 10];
        let mut writes = 0;
        while let Scrub::Running { .. } = rig.pool.scrub() {
            rig.pool.grant_scrub(3 << 10);
            rig.rng.fill(&mut data);
            let unit = rig.rng.u64(0..UNITS / 8 - 16) * 8;
            rig.write(volume, unit, &data);
            writes += 1;
            if writes == 500 {
                assert_eq!(rig.command(Command::Delete(snapshot)), Ok(Answer::Done));
            }
            assert!(writes < 100_000, "the pass does not end");
        }
        assert_eq!(rig.pool.scrub(), Scrub::Done);
        assert_eq!((rig.pool.take_scrub_damage(), rig.pool.stats().scrub_damaged_blocks), (Vec::new(), 0));
        assert!(rig.pool.stats().moved_write_bytes > 0, "nothing was cleaned in {writes} writes");
    }
}

#[test]
fn a_pass_can_be_stopped_and_started_again() {
    let (mut rig, ..) = filled(8);
    rig.pool.start_scrub();
    rig.pool.grant_scrub(1 << 20);
    for _ in 0..20 {
        rig.turn();
    }
    rig.pool.stop_scrub();
    assert_eq!(rig.pool.scrub(), Scrub::Idle);
    rig.settle();
    assert!(rig.pool.is_idle());
    // Its reads may be in flight when the next one begins.
    for _ in 0..5 {
        rig.pool.start_scrub();
        rig.pool.grant_scrub(1 << 20);
        for _ in 0..20 {
            rig.turn();
        }
        rig.pool.stop_scrub();
    }
    pass(&mut rig, 1 << 20);
    assert_eq!(rig.pool.take_scrub_damage(), Vec::new());
    // A pool that was opened again has begun none.
    rig.reopen(false);
    assert_eq!(rig.pool.scrub(), Scrub::Idle);
}
