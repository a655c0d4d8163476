//! How long the engine needs to open large pools. Their data and their indexes do not exist: an opening reads neither, only the
//! manifest and the tail of the log.

use super::rig::{Rig, UUID};
use crate::manifest::edit::Edit;
use crate::manifest::{Base, Blob, BlobKind, LogTail, Manifest, Timeline, checkpoint};
use crate::*;
use aryk_volume_index::{Key, Place, Run, RunId, RunShape, Slot};
use std::time::{Duration, Instant};

/// Units of a blob of 32 MiB.
const BLOB_UNITS: u32 = 65_536;
const BLOBS_PER_TIB: u32 = 1 << 15;
/// Bytes of the index for each block that was written at random.
const ENTRY_BYTES: u64 = 30;
/// Leaf pages of the runs.
const LEAVES: u32 = 4000;

/// A pool of used data, with volumes, of which each has snapshots.
#[derive(Clone, Copy)]
struct Size {
    tib: u32,
    volumes: u32,
    snapshots: u32,
}

fn run(id: u64, blob: BlobId, unit: u16) -> Run {
    let key = |range| Key::new(TimelineId(0), range, Slot::FIRST, Commit::new(9).unwrap());
    let shape = |pages| RunShape {
        pages,
        leaves: LEAVES,
        entries: u64::from(LEAVES) * 200,
        range_entries: 0,
        first: key(0),
        last: key(7),
        oldest: Commit::ZERO,
        newest: Commit::new(9).unwrap(),
    };
    let of = |pages| Run { id: RunId(id), place: Place { blob, unit }, shape: shape(pages) };
    (LEAVES..).map(of).find(Run::is_valid).expect("a run of so many leaves has a number of pages")
}

/// The facts of its store, and its checkpoint.
fn pool(size: Size) -> (StoreFacts, Recovered) {
    let data = size.tib * BLOBS_PER_TIB;
    let index_bytes = (u64::from(size.tib) << 40) / u64::from(BLOCK) * ENTRY_BYTES;
    let index = (index_bytes / (u64::from(BLOB_UNITS) * u64::from(UNIT))) as u32;
    let facts = StoreFacts { alignment: 4096, blob_units: BLOB_UNITS, blobs: 2 * data };
    let mut manifest = Manifest::new(UUID, &facts);
    let mut apply = |edit| manifest.apply(edit).expect("the edit fits");
    apply(Edit::Opened { opening: 1 });
    for n in 0..size.volumes {
        let id = TimelineId(n);
        apply(Edit::Timeline { id, timeline: Timeline { shift: (n % 16) as u8, base: None::<Base> } });
        for at in 0..=size.snapshots {
            let number = n * (size.snapshots + 1) + at;
            let label = Label { name: format!("volume-{number}"), uuid: u128::from(number).to_le_bytes() };
            let cut = (at > 0).then(|| std::array::from_fn(|_| Commit::new(u64::from(at)).unwrap()));
            let (units, timeline, when_full) = (1 << 31, id, WhenFull::Fail);
            let volume = Volume { label, units, block_size: 512, when_full, is_thick: false, timeline, cut };
            apply(Edit::Volume { id: VolumeId(number), volume });
        }
    }
    for n in 0..data + index {
        let kind = if n < data { BlobKind::Data } else { BlobKind::Index };
        let live = if n < data { i64::from(n % BLOB_UNITS) } else { 0 };
        let life = (1 << 32) + u64::from(n);
        apply(Edit::Blob { id: BlobId(n), blob: Blob { kind, life, live } });
    }
    for n in 0..index {
        let runs = vec![run(u64::from(n), BlobId(data + n), 0)];
        apply(Edit::Flushed { partition: (n % 16) as u8, flushed: 100, runs });
    }
    apply(Edit::Log(LogTail { sequence: 1, unit: 0, blobs: Vec::new() }));
    (facts, Recovered { checkpoint: checkpoint::encode(&manifest), edits: Vec::new() })
}

/// The time until the pool serves requests, and the longest turn in it.
#[expect(clippy::disallowed_methods, reason = "the test measures time")]
fn open(rig: &mut Rig) -> (Duration, Duration) {
    let start = Instant::now();
    let mut longest = Duration::ZERO;
    let opened = Pool::open(|_| Settings::default(), rig.disk.facts, UUID, &rig.disk.manifest);
    rig.pool = opened.expect("the manifest is right");
    while rig.pool.state() == State::Opening {
        let turn = Instant::now();
        rig.turn();
        longest = longest.max(turn.elapsed());
        rig.step();
    }
    assert_eq!(rig.pool.state(), State::Ready);
    (start.elapsed(), longest)
}

fn open_pool_of(size: Size) -> Duration {
    let (facts, recovered) = pool(size);
    let mut rig = Rig::new(1);
    (rig.disk.facts, rig.disk.manifest) = (facts, recovered);
    let bytes = rig.disk.manifest.checkpoint.len();
    let (time, longest) = open(&mut rig);
    let Size { tib, volumes, snapshots } = size;
    println!(
        "{tib} TiB in {volumes} volumes with {} snapshots: {time:?}, longest turn {longest:?}, checkpoint of {bytes} bytes",
        volumes * snapshots
    );
    time
}

/// A log of so many MiB that no index has, as a crash leaves it at the limit of the backlog.
fn open_after_a_crash(mib: u64) -> Duration {
    let facts = StoreFacts { alignment: 4096, blob_units: BLOB_UNITS, blobs: 64 };
    let settings = Settings {
        flush_bytes: 1 << 40,
        flush_entries: 1 << 40,
        unflushed_bytes_max: 1 << 40,
        ..Settings::default()
    };
    let mut rig = Rig::with(1, settings, facts);
    let volume = rig.create("a", 1 << 31, Origin::Empty);
    let mut blocks = 0;
    while rig.pool.stats().unflushed_bytes < mib << 20 {
        let tags: Vec<_> = (0..32)
            .map(|_| {
                let unit = rig.rng.u64(0..1 << 28) * 8;
                rig.submit_write(volume, unit, &[7; 4096], false)
            })
            .collect();
        for tag in tags {
            assert_eq!(rig.wait(tag).status, Status::Ok);
            rig.forget(tag);
        }
        blocks += 32;
        if blocks % 1024 == 0 {
            rig.disk.flush();
        }
    }
    rig.disk.flush();
    let (time, longest) = open(&mut rig);
    println!("a log of {mib} MiB with {blocks} blocks: {time:?}, longest turn {longest:?}");
    assert!(rig.pool.stats().log_write_bytes >= mib << 20);
    time
}

#[test]
fn large_pools_open_soon() {
    let one = open_pool_of(Size { tib: 1, volumes: 100, snapshots: 10 });
    assert!(one < Duration::from_secs(1));
    assert!(one + open_after_a_crash(256) < Duration::from_secs(3));
    assert!(open_pool_of(Size { tib: 15, volumes: 100, snapshots: 10 }) < Duration::from_secs(5));
}
