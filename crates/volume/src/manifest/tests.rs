//! Tests of the manifest.

use super::*;
use crate::{Label, Recovered, WhenFull};
use aryk_volume_index::{Key, Place, RunShape, Slot};

const FACTS: StoreFacts = StoreFacts { alignment: 512, blob_units: 65_536, blobs: 100 };

fn run(id: u64, blob: u32) -> Run {
    let key = |range| Key::new(TimelineId(1), range, Slot::FIRST, Commit::new(9).unwrap());
    let shape = RunShape {
        pages: 5,
        leaves: 4,
        entries: 300,
        range_entries: 2,
        first: key(0),
        last: key(7),
        oldest: Commit::ZERO,
        newest: Commit::new(9).unwrap(),
    };
    Run { id: RunId(id), place: Place { blob: BlobId(blob), unit: 8 }, shape }
}

fn edits() -> Vec<Edit> {
    let cut = std::array::from_fn(|at| Commit::new(at as u64 * 1000).unwrap());
    let volume = |name: &str, cut| Volume {
        label: Label { name: name.to_owned(), uuid: [4; 16] },
        units: 1 << 30,
        block_size: 512,
        when_full: WhenFull::Fail,
        is_thick: false,
        timeline: TimelineId(1),
        cut,
    };
    let blob = |kind| Blob { kind, life: 1 << 40, live: 0 };
    let foreign = Foreign { name: "image".to_owned(), units: 77 };
    vec![
        Edit::Opened { opening: 3 },
        Edit::Timeline {
            id: TimelineId(1),
            timeline: Timeline { shift: 15, base: Some(Base::Foreign(foreign)) },
        },
        Edit::Timeline {
            id: TimelineId(2),
            timeline: Timeline { shift: 15, base: Some(Base::View { timeline: TimelineId(1), cut }) },
        },
        Edit::Volume { id: VolumeId(0), volume: volume("a", None) },
        Edit::Volume { id: VolumeId(5), volume: volume("b", Some(cut)) },
        Edit::Volume { id: VolumeId(6), volume: volume("c", Some(cut)) },
        Edit::VolumeGone { id: VolumeId(6) },
        Edit::Blob { id: BlobId(7), blob: blob(BlobKind::Index) },
        Edit::Blob { id: BlobId(8), blob: blob(BlobKind::Log) },
        Edit::Blob { id: BlobId(9), blob: blob(BlobKind::Data) },
        Edit::BlobGone { id: BlobId(9) },
        Edit::Live { id: BlobId(8), change: 800 },
        Edit::Live { id: BlobId(8), change: -80 },
        Edit::Flushed { partition: 2, flushed: 50, runs: vec![run(1, 7)] },
        Edit::Flushed { partition: 2, flushed: 60, runs: vec![run(2, 7)] },
        Edit::Flushed { partition: 2, flushed: 70, runs: vec![run(3, 7)] },
        Edit::Merged { partition: 2, first: 0, count: 2, runs: vec![run(4, 7), run(5, 7)] },
        Edit::Note(vec![1, 2, 3]),
        Edit::Log(LogTail { sequence: 44, unit: 16, blobs: vec![BlobId(8)] }),
    ]
}

fn record<'a>(manifest: &Manifest, edits: impl IntoIterator<Item = &'a Edit>) -> Vec<u8> {
    let edits: Vec<_> = edits.into_iter().collect();
    let (bytes, count) = edit::encode(manifest, usize::MAX, edits.iter().copied());
    assert_eq!(count, edits.len());
    bytes
}

fn load(from: &Recovered, uuid: [u8; 16], facts: &StoreFacts) -> Result<Manifest, OpenError> {
    crate::loading::load(facts, uuid, from)
}

fn recovered() -> (Manifest, Recovered) {
    let mut manifest = Manifest::new([1; 16], &FACTS);
    let checkpoint = checkpoint::encode(&manifest);
    let bytes = edits().iter().map(|edit| record(&manifest, [edit])).collect();
    edits().into_iter().for_each(|edit| manifest.apply(edit).unwrap());
    (manifest, Recovered { checkpoint, edits: bytes })
}

#[test]
fn edits_and_checkpoints_make_the_same_manifest() {
    let (manifest, from) = recovered();
    assert_eq!(load(&from, [1; 16], &FACTS).as_ref(), Ok(&manifest));
    assert_eq!(manifest.blobs.get(BlobId(7)).unwrap().live, 3 * 40);
    assert_eq!(manifest.blobs.get(BlobId(8)).unwrap().live, 720);
    assert_eq!(
        manifest.partitions[2].levels.iter().flatten().map(|run| run.id.0).collect::<Vec<_>>(),
        [4, 5, 1]
    );
    assert_eq!((manifest.next_timeline, manifest.next_volume), (3, 7));
    let checkpoint = checkpoint::encode(&manifest);
    let from = Recovered { checkpoint, edits: Vec::new() };
    assert_eq!(load(&from, [1; 16], &FACTS), Ok(manifest));
}

#[test]
fn damage_is_found() {
    let (_, from) = recovered();
    for at in 0..from.edits[2].len() {
        let mut changed = from.clone();
        changed.edits[2][at] ^= 1;
        assert!(load(&changed, [1; 16], &FACTS).is_err(), "byte {at}");
    }
    let mut missing = from.clone();
    missing.edits.remove(1);
    assert!(load(&missing, [1; 16], &FACTS).is_err());
    assert_eq!(load(&from, [2; 16], &FACTS), Err(OpenError::Foreign));
    assert_eq!(load(&from, [1; 16], &StoreFacts { blobs: 8, ..FACTS }), Err(OpenError::Shorter(8)));
    assert_eq!(load(&from, [1; 16], &StoreFacts { alignment: 4096, ..FACTS }), Err(OpenError::Geometry));
}

#[test]
fn numbers_that_no_pool_has_are_damage() {
    let (manifest, recovered) = recovered();
    let with = |edit: Edit| {
        let mut from = recovered.clone();
        from.edits.push(record(&manifest, [&edit]));
        load(&from, manifest.uuid, &FACTS).map(|_| ())
    };
    let of_blob =
        |live| with(Edit::Blob { id: BlobId(60), blob: Blob { kind: BlobKind::Data, life: 1, live } });
    assert_eq!(of_blob(i64::from(FACTS.blob_units)), Ok(()));
    assert!(matches!(of_blob(i64::from(FACTS.blob_units) + 1), Err(OpenError::Damaged(_))));
    assert!(matches!(of_blob(-1), Err(OpenError::Damaged(_))));

    let of_run = |entries, range_entries| {
        let mut run = run(99, 7);
        (run.shape.entries, run.shape.range_entries) = (entries, range_entries);
        with(Edit::Flushed { partition: 3, flushed: 1 << 30, runs: vec![run] })
    };
    assert_eq!(of_run(4 * 4096, 0), Ok(()));
    assert!(matches!(of_run(4 * 4096 + 1, 0), Err(OpenError::Damaged(_))));
    assert!(matches!(of_run(3, 4), Err(OpenError::Damaged(_))));

    // Numbers that have a successor.
    let is_damage = |edit| matches!(with(edit), Err(OpenError::Damaged(_)));
    assert!(is_damage(Edit::Opened { opening: u32::MAX }));
    assert!(is_damage(Edit::Log(LogTail { sequence: u64::MAX, ..LogTail::default() })));
    let runs = vec![run(u64::MAX, 7)];
    assert!(is_damage(Edit::Flushed { partition: 3, flushed: 1 << 30, runs }));
}

#[test]
fn views_of_a_timeline_are_its_snapshots_and_the_bases_of_clones() {
    let (manifest, _) = recovered();
    assert_eq!(manifest.cuts_of(TimelineId(1)).count(), 2);
    assert!(manifest.is_live(TimelineId(1)) && !manifest.is_live(TimelineId(2)));
}

#[test]
fn who_shows_a_timeline_is_known_whatever_changes() {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut manifest = Manifest::new([1; 16], &FACTS);
    let cut = |rng: &mut fastrand::Rng| [Commit::new(rng.u64(0..5)).unwrap(); crate::PARTITIONS];
    for number in 0..5000_u32 {
        let (timeline, volume) = (TimelineId(rng.u32(0..8)), VolumeId(rng.u32(0..12)));
        let edit = match rng.u8(0..6) {
            0..2 => {
                let base = (timeline.0 > 0 && rng.bool())
                    .then(|| Base::View { timeline: TimelineId(rng.u32(0..timeline.0)), cut: cut(&mut rng) });
                Edit::Timeline { id: timeline, timeline: Timeline { shift: 0, base } }
            }
            2 => Edit::TimelineGone { id: timeline },
            3..5 => {
                let cut = rng.bool().then(|| cut(&mut rng));
                let name = number.to_string();
                let (label, when_full) = (Label { name, uuid: [number as u8; 16] }, WhenFull::Fail);
                let volume_of =
                    Volume { label, units: 8, block_size: 512, when_full, is_thick: false, timeline, cut };
                Edit::Volume { id: volume, volume: volume_of }
            }
            _ => Edit::VolumeGone { id: volume },
        };
        let _ = manifest.apply(edit);
        for id in (0..8).map(TimelineId) {
            let volumes = manifest.volumes.values().filter(|volume| volume.timeline == id);
            let live = volumes.clone().any(|volume| volume.cut.is_none());
            let bases = manifest.timelines.values().filter_map(|timeline| match &timeline.base {
                Some(Base::View { timeline, cut }) if *timeline == id => Some(cut),
                _ => None,
            });
            let mut expected: Vec<_> =
                volumes.filter_map(|volume| volume.cut.as_ref()).chain(bases).collect();
            let mut found: Vec<_> = manifest.cuts_of(id).collect();
            expected.sort_unstable();
            found.sort_unstable();
            assert_eq!((found, manifest.is_live(id)), (expected, live));
        }
        if let Some((id, volume)) = manifest.volumes.last_key_value() {
            let named = manifest.named(&volume.label.name).unwrap();
            assert_eq!(manifest.volumes[&named].label.name, volume.label.name, "{id:?}");
            assert!(manifest.has_uuid(&volume.label.uuid));
        }
    }
}

/// What version 1 of the format wrote.
#[test]
fn edits_of_version_1_are_read_and_written_as_then() {
    let fixture = include_bytes!("../../fixtures/edits-v1");
    let empty = Manifest::new([1; 16], &FACTS);
    assert_eq!(record(&empty, &edits()), fixture);
    let (mut body, is_continued) = edit::open(fixture, edit::Content::Edits, [1; 16], &FACTS).unwrap();
    assert_eq!(edit::take(&mut body, usize::MAX, is_continued).unwrap(), edits());
}

/// Edits that version 3 of the format has, for a manifest with the others.
fn thick_edits() -> Vec<Edit> {
    let label = Label { name: "thick".to_owned(), uuid: [5; 16] };
    let volume = Volume {
        label,
        units: 80_003,
        block_size: 512,
        when_full: WhenFull::Wait,
        is_thick: true,
        timeline: TimelineId(1),
        cut: None,
    };
    let own = |partition, units| Edit::Own { id: TimelineId(1), partition, units };
    vec![
        Edit::Volume { id: VolumeId(7), volume },
        Edit::Counted { id: TimelineId(1), counting: Counting::Zero },
        own(3, Some(8192)),
        own(4, None),
        Edit::Counted { id: TimelineId(2), counting: Counting::Unknown },
        Edit::Counted { id: TimelineId(2), counting: Counting::No },
    ]
}

#[test]
fn edits_of_version_3_are_read_and_written_as_then() {
    let fixture = include_bytes!("../../fixtures/edits-v3");
    let empty = Manifest::new([1; 16], &FACTS);
    assert_eq!(record(&empty, &thick_edits()), fixture);
    let (mut body, is_continued) = edit::open(fixture, edit::Content::Edits, [1; 16], &FACTS).unwrap();
    assert_eq!(edit::take(&mut body, usize::MAX, is_continued).unwrap(), thick_edits());
}

#[test]
fn only_a_pool_with_thick_volumes_needs_version_3() {
    let (mut manifest, mut from) = recovered();
    let version = |bytes: &[u8]| u16::from_le_bytes([bytes[4], bytes[5]]);
    assert_eq!(version(&checkpoint::encode(&manifest)), 1);
    for edit in thick_edits() {
        let bytes = record(&manifest, [&edit]);
        assert_eq!(version(&bytes), 3);
        from.edits.push(bytes);
        manifest.apply(edit).unwrap();
    }
    // The size is whole blocks; one partition has 8,192 units, the others none.
    assert_eq!(manifest.reserved_units(&manifest.volumes[&VolumeId(7)], Shard::ALL), 80_008 - 8192);
    assert!(manifest.is_thick(TimelineId(1)) && !manifest.is_thick(TimelineId(2)));
    assert_eq!(load(&from, [1; 16], &FACTS).as_ref(), Ok(&manifest));
    let checkpoint = checkpoint::encode(&manifest);
    assert_eq!(version(&checkpoint), 3);
    let from = Recovered { checkpoint, edits: Vec::new() };
    assert_eq!(load(&from, [1; 16], &FACTS).as_ref(), Ok(&manifest));
    let volume = Volume { is_thick: false, ..manifest.volumes[&VolumeId(7)].clone() };
    manifest.apply(Edit::Volume { id: VolumeId(7), volume }).unwrap();
    manifest.apply(Edit::Counted { id: TimelineId(1), counting: Counting::No }).unwrap();
    assert_eq!(version(&checkpoint::encode(&manifest)), 1);
    // What is not counted has no units.
    let own = Edit::Own { id: TimelineId(1), partition: 0, units: None };
    assert!(matches!(manifest.apply(own), Err(OpenError::Damaged(_))));
    let counted = Edit::Counted { id: TimelineId(40), counting: Counting::Zero };
    assert!(matches!(manifest.apply(counted), Err(OpenError::Damaged(_))));
}

/// An edit that fits the manifest.
fn any_edit(manifest: &Manifest, rng: &mut fastrand::Rng, next: &mut u64) -> Edit {
    *next += 1;
    let any = |rng: &mut fastrand::Rng, kind: BlobKind| {
        let of_kind: Vec<_> =
            manifest.blobs.iter().filter(|(_, blob)| blob.kind == kind).map(|(id, _)| id).collect();
        rng.choice(&of_kind).copied()
    };
    let partition = rng.u8(0..16);
    let id = BlobId(rng.u32(0..FACTS.blobs));
    match rng.u8(0..14) {
        0..3 if !manifest.blobs.contains(id) => {
            let kind = *rng.choice(&[BlobKind::Log, BlobKind::Data, BlobKind::Index]).unwrap();
            Edit::Blob { id, blob: Blob { kind, life: *next, live: 0 } }
        }
        3 if manifest.blobs.get(id).is_some_and(|blob| blob.live == 0) => Edit::BlobGone { id },
        4 | 5 => match any(rng, BlobKind::Data) {
            Some(id) => {
                let live = manifest.blobs.get(id).unwrap().live;
                Edit::Live { id, change: rng.i64(0..500) - live }
            }
            None => Edit::Note(next.to_le_bytes().to_vec()),
        },
        6 | 7 => match any(rng, BlobKind::Index) {
            Some(BlobId(blob)) => {
                let runs = vec![run(*next * 2, blob), run(*next * 2 + 1, blob)];
                Edit::Flushed { partition, flushed: *next, runs }
            }
            None => Edit::Opened { opening: *next as u32 },
        },
        8 if !manifest.partitions[usize::from(partition)].levels.is_empty() => {
            let levels = manifest.partitions[usize::from(partition)].levels.len() as u32;
            let first = rng.u32(0..levels);
            Edit::Merged { partition, first, count: rng.u32(1..=levels - first), runs: Vec::new() }
        }
        9 => {
            let timeline = Timeline { shift: rng.u8(0..16), base: None };
            Edit::Timeline { id: TimelineId(rng.u32(0..50)), timeline }
        }
        10 if !manifest.timelines.is_empty() => {
            let of: Vec<_> = manifest.timelines.keys().copied().collect();
            let (timeline, label) = (*rng.choice(&of).unwrap(), next.to_string());
            let label = Label { name: label, uuid: [0; 16] };
            let (when_full, cut) = (WhenFull::Wait, None);
            let is_thick = rng.bool();
            let volume = Volume { label, units: 8, block_size: 512, when_full, is_thick, timeline, cut };
            Edit::Volume { id: VolumeId(rng.u32(0..50)), volume }
        }
        11 if !manifest.volumes.is_empty() => {
            let of: Vec<_> = manifest.volumes.keys().copied().collect();
            Edit::VolumeGone { id: *rng.choice(&of).unwrap() }
        }
        12 if !manifest.timelines.is_empty() => {
            let of: Vec<_> = manifest.timelines.keys().copied().collect();
            let counting = *rng.choice(&[Counting::No, Counting::Unknown, Counting::Zero]).unwrap();
            Edit::Counted { id: *rng.choice(&of).unwrap(), counting }
        }
        13 if !manifest.own.is_empty() => {
            let of: Vec<_> = manifest.own.keys().copied().collect();
            let units = rng.bool().then(|| rng.u64(0..1 << 20));
            Edit::Own { id: *rng.choice(&of).unwrap(), partition, units }
        }
        _ => Edit::Log(LogTail { sequence: *next, unit: 0, blobs: Vec::new() }),
    }
}

#[test]
fn a_checkpoint_has_the_changes_that_are_made_while_it_is_encoded() {
    let (mut steps_max, mut restarts) = (0, 0);
    for seed in 0..200 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mut manifest, mut next) = (Manifest::new([1; 16], &FACTS), 0);
        for _ in 0..rng.u32(0..400) {
            manifest.apply(any_edit(&manifest, &mut rng, &mut next)).unwrap();
        }
        let mut encoding = checkpoint::Encoding::new(&manifest, edit::Content::Checkpoint, 0);
        let mut steps = 1;
        while !encoding.step(&manifest, rng.usize(1..400)) || rng.u8(0..4) > 0 {
            steps += 1;
            for _ in 0..rng.u32(0..6) {
                let edit = any_edit(&manifest, &mut rng, &mut next);
                manifest.apply(edit.clone()).unwrap();
                if !encoding.note(&edit) {
                    restarts += 1;
                    encoding = checkpoint::Encoding::new(&manifest, edit::Content::Checkpoint, 0);
                }
            }
        }
        steps_max = steps_max.max(steps);
        let from = Recovered { checkpoint: encoding.finish(&manifest), edits: Vec::new() };
        assert_eq!(load(&from, [1; 16], &FACTS).as_ref(), Ok(&manifest), "seed {seed}");
    }
    assert!(steps_max > 20, "{steps_max} steps at most");
    assert!(restarts > 0, "{restarts} checkpoints began again");
}

#[test]
fn edits_that_are_continued_take_effect_together_or_not_at_all() {
    let (before, from) = recovered();
    let blob = Blob { kind: BlobKind::Data, life: 1, live: 0 };
    let edits: Vec<_> = (0..40).map(|id| Edit::Blob { id: BlobId(50 + id), blob }).collect();
    let mut after = before.clone();
    edits.iter().for_each(|edit| after.apply(edit.clone()).unwrap());
    let mut parts = Vec::new();
    let mut left = &edits[..];
    while !left.is_empty() {
        let (bytes, count) = edit::encode(&before, 60, left);
        assert_eq!(u16::from_le_bytes([bytes[4], bytes[5]]), if count == left.len() { 1 } else { 2 });
        parts.push(bytes);
        left = &left[count..];
    }
    assert!(parts.len() > 3);
    let opened = record(&before, [&Edit::Opened { opening: 9 }]);
    for count in 0..=parts.len() {
        let mut from = from.clone();
        from.edits.extend_from_slice(&parts[..count]);
        let mut expected = if count == parts.len() { after.clone() } else { before.clone() };
        assert_eq!(load(&from, [1; 16], &FACTS).as_ref(), Ok(&expected), "{count} parts");
        // The next life of the pool does not take up what is incomplete.
        from.edits.push(opened.clone());
        expected.opening = 9;
        assert_eq!(load(&from, [1; 16], &FACTS).as_ref(), Ok(&expected), "{count} parts");
    }
}
