//! What is found on disks after crashes, with damage, and on disks of others.

use super::*;
use crate::error::Structure;
use crate::ram::{AREA, POOL, Ram, SIZE};
use crate::superblock::{COPY_BYTES, COPY_PLACES, Invalid, PLACES, SUPERBLOCK_BYTES, Superblock};
use aryk_volume::{OpId, StoreError, StoreOp};

/// A pool with a replaced checkpoint and three edits; the byte offsets of the area in use.
fn pool() -> (Ram, Box<Store>, [u64; 2]) {
    let (mut ram, mut store) = Ram::pool();
    ram.commit(&mut store, b"old").unwrap();
    ram.checkpoint(&mut store, b"second").unwrap();
    for edit in [b"a", b"b", b"c"] {
        ram.commit(&mut store, edit).unwrap();
    }
    let at = store.superblock().areas[1].mirrors.map(|place| place.offset);
    (ram, store, at)
}

fn error(ram: &mut Ram, expected: Expected) -> Error {
    ram.try_open(expected).map(|opened| panic!("{opened:?}")).unwrap_err()
}

#[test]
fn one_damaged_copy_of_anything_is_found_and_replaced() {
    let (whole, _, at) = pool();
    let expected = ("second".to_owned(), "a b c".to_owned());
    for mirror in at {
        for record in 0..4 {
            for byte in [0, 40, 63, 64, 66] {
                let mut ram = whole.clone();
                let offset = mirror + record * 4096 + byte;
                ram.bytes[offset as usize] ^= 0x10;
                let opened = ram.try_open(Expected::default()).unwrap();
                let is_last = record == 3;
                assert_eq!(opened.findings.len(), usize::from(!is_last), "{record} {byte}");
                let mut store = opened.store;
                assert_eq!(ram.read().map(|found| (found.0, found.1)), Ok(expected.clone()));
                ram.commit(&mut store, b"d").unwrap();
                let found = ram.read().unwrap();
                assert_eq!((found.1.as_str(), found.2), ("a b c d", usize::from(!is_last)));
                ram.checkpoint(&mut store, b"third").unwrap();
                assert_eq!(ram.read(), Ok(("third".to_owned(), String::new(), 0)));
            }
        }
    }
}

#[test]
fn an_unreadable_page_of_one_mirror_is_replaced() {
    let (whole, _, at) = pool();
    for mirror in at {
        for record in 0..5 {
            let mut ram = whole.clone();
            ram.unreadable = vec![(mirror + record * 4096, mirror + record * 4096 + 512)];
            assert_eq!(ram.read().map(|found| (found.0, found.1)), Ok(("second".into(), "a b c".into())));
        }
    }
}

#[test]
fn two_damaged_copies_are_an_error_that_names_the_place() {
    let (whole, _, at) = pool();
    let damage = |record: u64| {
        let mut ram = whole.clone();
        for mirror in at {
            ram.bytes[(mirror + record * 4096 + 66) as usize] ^= 1;
        }
        ram
    };
    let what = Structure::AllEdits;
    assert_eq!(error(&mut damage(1), Expected::default()), Error::Damaged { what, offset: at[0] + 4096 });
    assert_eq!(error(&mut damage(2), Expected::default()), Error::Damaged { what, offset: at[0] + 8192 });
    let may = Expected { may_lack_checkpoint: true, ..Expected::default() };
    let mut ram = damage(1);
    let opened = ram.try_open(may).unwrap();
    assert!(opened.recovered.is_none());
    let mut store = opened.store;
    ram.checkpoint(&mut store, b"rebuilt").unwrap();
    ram.commit(&mut store, b"x").unwrap();
    assert_eq!(ram.read(), Ok(("rebuilt".into(), "x".into(), 0)));
}

/// Damages both copies of the checkpoint in an area, behind the header.
fn lose_checkpoint(ram: &mut Ram, store: &Store, area: usize) {
    for place in store.superblock().areas[area].mirrors {
        ram.bytes[place.offset as usize + 66] ^= 1;
    }
}

#[test]
fn a_lost_checkpoint_is_made_again_from_the_one_before() {
    for edits in [&[][..], &[b"c"], &[b"c", b"d"]] {
        let (mut ram, mut store) = Ram::pool();
        // The first page of the checkpoint, which has the mark, has only a part of it.
        let long = vec![b'x'; 10_000];
        ram.checkpoint(&mut store, &long).unwrap();
        ram.commit(&mut store, b"a").unwrap();
        ram.commit(&mut store, b"b").unwrap();
        ram.checkpoint(&mut store, b"third").unwrap();
        for edit in edits {
            ram.commit(&mut store, *edit).unwrap();
        }
        lose_checkpoint(&mut ram, &store, 0);
        let all: Vec<_> = [&["a", "b"][..], &["c", "d"][..edits.len()]].concat();
        let expected = (String::from_utf8(long).unwrap(), all.join(" "), 1);
        assert_eq!(ram.read(), Ok(expected.clone()));
        // Edits go on behind it, and the next checkpoint, which is due, ends the damage.
        let opened = ram.try_open(Expected::default()).unwrap();
        assert_eq!(opened.findings[0].what, Structure::RemadeCheckpoint);
        let mut store = opened.store;
        assert!(store.is_checkpoint_due());
        ram.commit(&mut store, b"e").unwrap();
        assert_eq!(ram.read(), Ok((expected.0, expected.1 + " e", 1)));
        ram.checkpoint(&mut store, b"fourth").unwrap();
        assert!(!store.is_checkpoint_due());
        assert_eq!(ram.read(), Ok(("fourth".into(), String::new(), 0)));
    }
}

#[test]
fn a_crash_while_a_lost_checkpoint_is_replaced_loses_nothing() {
    let (mut ram, mut store) = Ram::pool();
    let long = "x".repeat(30_000);
    ram.checkpoint(&mut store, long.as_bytes()).unwrap();
    ram.commit(&mut store, b"a").unwrap();
    ram.checkpoint(&mut store, b"third").unwrap();
    ram.commit(&mut store, b"b").unwrap();
    lose_checkpoint(&mut ram, &store, 0);
    // One mirror of the checkpoint before may lack a record.
    for damaged in [None, Some(0), Some(1)] {
        let mut whole = ram.clone();
        if let Some(mirror) = damaged {
            let place = store.superblock().areas[1].mirrors[mirror];
            whole.bytes[place.offset as usize + 32_768 + 65] ^= 1;
        }
        let (mut before, mut after) = (0, 0);
        for ops in 0.. {
            let mut ram = whole.clone();
            let mut store = ram.try_open(Expected::default()).unwrap().store;
            store.submit(OpId(1), StoreOp::Checkpoint { bytes: "y".repeat(30_000).into_bytes() });
            let done = (0..ops).take_while(|_| {
                let op = store.next_op();
                let is_some = op.is_some();
                op.into_iter().for_each(|op| store.completed(ram.run(op)));
                is_some
            });
            let is_complete = done.count() < ops;
            let (checkpoint, edits, _) = ram.read().unwrap();
            match edits.as_str() {
                "a b" => assert_eq!((checkpoint == long, is_complete), (true, false), "{damaged:?} {ops}"),
                _ => assert_eq!((checkpoint, edits), ("y".repeat(30_000), String::new())),
            }
            (before, after) = (before + u32::from(ram.read().unwrap().1 == "a b"), after + 1);
            if is_complete {
                break;
            }
        }
        assert!(before >= 3 && after > before + 3, "{before} before, {after} in all");
    }
}

/// The copy of the manifest that a rebuild gets.
fn copy_of(ram: &Ram, store: &Store) -> Option<Vec<u8>> {
    let mut ram = ram.clone();
    for place in store.superblock().areas.iter().flat_map(|area| area.mirrors) {
        ram.bytes[place.offset as usize..][..AREA as usize].fill(0);
    }
    assert!(ram.try_open(Expected::default()).is_err());
    let expected = Expected { may_lack_checkpoint: true, ..Expected::default() };
    let opened = ram.try_open(expected).unwrap();
    assert!(opened.recovered.is_none() && !opened.findings.is_empty());
    // What the rebuild writes is found.
    let mut store = opened.store;
    ram.checkpoint(&mut store, b"rebuilt").unwrap();
    assert_eq!(ram.read(), Ok(("rebuilt".into(), String::new(), 0)));
    opened.copy
}

#[test]
fn the_newest_intact_copy_of_the_manifest_is_found() {
    let (mut ram, mut store) = Ram::pool();
    assert_eq!(copy_of(&ram, &store), None);
    for n in 0..5_u8 {
        let bytes = vec![n; 100_000];
        ram.op(&mut store, StoreOp::Copy { bytes: bytes.clone() }).unwrap();
        assert_eq!(copy_of(&ram, &store).as_ref(), Some(&bytes));
        // Also by a later opening.
        *store = ram.try_open(Expected::default()).unwrap().store;
    }
    // The other place has the one before.
    let newest = COPY_PLACES[0] as usize;
    for byte in [0, 50, 64, 5000, 100_063] {
        let mut ram = ram.clone();
        ram.bytes[newest + byte] ^= 1;
        assert_eq!(copy_of(&ram, &store), Some(vec![3; 100_000]));
        // It is not overwritten next.
        let mut store = ram.try_open(Expected::default()).unwrap().store;
        ram.op(&mut store, StoreOp::Copy { bytes: b"next".to_vec() }).unwrap();
        ram.bytes[newest..][..4096].fill(0);
        assert_eq!(copy_of(&ram, &store), Some(vec![3; 100_000]));
    }
    // What does not fit is not there, and neither is what is old.
    let bytes = vec![7; COPY_BYTES as usize];
    assert_eq!(ram.op(&mut store, StoreOp::Copy { bytes }), Err(StoreError::NoSpace));
    assert_eq!(copy_of(&ram, &store), None);
}

#[test]
fn the_first_checkpoint_is_that_of_an_empty_pool() {
    let (mut ram, mut store) = Ram::pool();
    ram.commit(&mut store, b"a").unwrap();
    lose_checkpoint(&mut ram, &store, 0);
    assert_eq!(ram.read(), Ok((String::new(), "a".into(), 1)));
}

#[test]
fn a_lost_checkpoint_is_an_error_if_an_edit_before_it_is_lost() {
    let pool = || {
        let (mut ram, mut store) = Ram::pool();
        ram.checkpoint(&mut store, b"second").unwrap();
        for edit in [b"a", b"b"] {
            ram.commit(&mut store, edit).unwrap();
        }
        ram.checkpoint(&mut store, b"third").unwrap();
        lose_checkpoint(&mut ram, &store, 0);
        (ram, store)
    };
    let (ram, store) = pool();
    let areas = &store.superblock().areas;
    let what = Structure::Checkpoints;
    let damaged = Error::Damaged { what, offset: areas[0].mirrors[0].offset };
    // The checkpoint before, its edits, and the mark that says which was the last.
    for byte in [66, 4096, 4096 + 66, 8192, 8192 + 66] {
        let mut ram = ram.clone();
        for place in areas[1].mirrors {
            ram.bytes[place.offset as usize + byte] ^= 1;
        }
        assert_eq!(error(&mut ram, Expected::default()), damaged, "{byte}");
    }
    // Nothing of the newer checkpoint can be recognised.
    let (mut ram, _) = pool();
    for place in areas[0].mirrors {
        ram.bytes[place.offset as usize..][..4096].fill(0);
    }
    let Error::Damaged { what, .. } = error(&mut ram, Expected::default()) else { panic!("damage") };
    assert_eq!(what, Structure::AllCheckpoints);
}

#[test]
fn an_interrupted_checkpoint_is_ignored() {
    let (mut ram, mut store) = Ram::pool();
    ram.commit(&mut store, b"a").unwrap();
    let before = ram.clone();
    ram.checkpoint(&mut store, b"second").unwrap();
    let areas = store.superblock().areas.clone();
    // The new checkpoint's header without its payload's end, in one mirror or in both.
    for mirrors in 1..4 {
        let mut torn = before.clone();
        for (n, place) in areas[1].mirrors.iter().enumerate() {
            if mirrors & (1 << n) != 0 {
                let at = place.offset as usize;
                torn.bytes[at..at + 64].copy_from_slice(&ram.bytes[at..at + 64]);
            }
        }
        assert_eq!(torn.read(), Ok(("first".into(), "a".into(), 0)));
        let mut store = torn.try_open(Expected::default()).unwrap().store;
        torn.commit(&mut store, b"b").unwrap();
        torn.checkpoint(&mut store, b"third").unwrap();
        assert_eq!(torn.read(), Ok(("third".into(), String::new(), 0)));
    }
    // The new checkpoint complete, and the old one not marked: the new one counts, and the mark is made up for.
    let mut unmarked = before.clone();
    for place in areas[1].mirrors {
        let at = place.offset as usize;
        unmarked.bytes[at..at + 4096].copy_from_slice(&ram.bytes[at..at + 4096]);
    }
    let mut store = unmarked.try_open(Expected::default()).unwrap().store;
    unmarked.commit(&mut store, b"c").unwrap();
    assert_eq!(unmarked.read(), Ok(("second".into(), "c".into(), 0)));
    for place in areas[1].mirrors {
        unmarked.bytes[place.offset as usize..][..8192].fill(0);
    }
    assert!(matches!(error(&mut unmarked, Expected::default()), Error::Damaged { .. }));
}

#[test]
fn a_second_checkpoint_after_an_unmarked_one_is_not_overwritten_by_the_mark() {
    let (mut ram, mut store) = Ram::pool();
    let before = ram.clone();
    ram.checkpoint(&mut store, b"second").unwrap();
    let areas = store.superblock().areas.clone();
    for place in areas[0].mirrors {
        let at = place.offset as usize;
        ram.bytes[at..at + 4096].copy_from_slice(&before.bytes[at..at + 4096]);
    }
    let mut store = ram.try_open(Expected::default()).unwrap().store;
    ram.checkpoint(&mut store, b"third").unwrap();
    assert_eq!(ram.read(), Ok(("third".into(), String::new(), 0)));
}

#[test]
fn superblocks_that_differ() {
    let (mut ram, _, _) = pool();
    let mut newer = Superblock::parse(&ram.bytes[..SUPERBLOCK_BYTES]).unwrap();
    newer.update += 1;
    newer.name = "new name".into();
    for place in PLACES {
        let mut ram = ram.clone();
        ram.bytes[place as usize..][..SUPERBLOCK_BYTES].copy_from_slice(&newer.encode()[..]);
        let opened = ram.try_open(Expected::default()).unwrap();
        assert_eq!((opened.store.superblock().name.as_str(), opened.findings.len()), ("new name", 1));
        let mut store = opened.store;
        ram.commit(&mut store, b"x").unwrap();
        assert_eq!(ram.read().unwrap().2, 0);
    }
    newer.pool = Uuid::from_u128(5);
    ram.bytes[PLACES[1] as usize..][..SUPERBLOCK_BYTES].copy_from_slice(&newer.encode()[..]);
    assert!(matches!(error(&mut ram, Expected::default()), Error::Damaged { .. }));
}

#[test]
fn refusals_say_why() {
    let (whole, store, _) = pool();
    let other = Uuid::from_u128(3);
    let expected = Expected { pool: Some(other), ..Expected::default() };
    assert_eq!(error(&mut whole.clone(), expected), Error::OtherPool { expected: other, found: POOL });
    let expected = Expected { pool: Some(POOL), position: Some(store.position()), ..Expected::default() };
    assert!(whole.clone().try_open(expected).is_ok());
    let mut newer = store.position();
    newer.sequence += 1;
    assert_eq!(error(&mut whole.clone(), Expected { position: Some(newer), ..expected }), Error::Older);

    let mut shorter = whole.clone();
    shorter.bytes.truncate(SIZE - 512);
    let (expected, found) = (SIZE as u64, SIZE as u64 - 512);
    assert_eq!(error(&mut shorter, Expected::default()), Error::Shorter { expected, found });

    let mut opening = Opening::new(Base { block: 4096, ..whole.base() }, Expected::default());
    let result = loop {
        let op = opening.next_op().unwrap();
        let done = whole.clone().run(op);
        if let Some(result) = opening.completed(done) {
            break result;
        }
    };
    assert_eq!(result.unwrap_err(), Error::BlockSize { disk: 4096, pool: 512 });

    let mut damaged = whole.clone();
    for place in PLACES {
        damaged.bytes[place as usize + 100] ^= 1;
    }
    let what = Structure::Superblocks;
    assert_eq!(error(&mut damaged, Expected::default()), Error::Damaged { what, offset: 0 });
    damaged.unreadable = PLACES.map(|place| (place, place + 512)).to_vec();
    assert_eq!(error(&mut damaged, Expected::default()), Error::Medium(0));

    assert_eq!(error(&mut Ram::new(SIZE), Expected::default()), Error::NotAPool { found: None });
    for size in [512, 4096, 1 << 20, (1 << 20) + 512] {
        let mut foreign = Ram::new(size);
        foreign.bytes[..8].copy_from_slice(b"SPDKBLOB");
        let text = error(&mut foreign, Expected::default()).to_string();
        assert_eq!(text, "the disk has no pool: it has an SPDK blobstore (an lvol store)");
    }
}

#[test]
fn a_newer_version_in_one_copy_is_refused() {
    let (mut ram, _, _) = pool();
    let at = PLACES[1] as usize;
    ram.bytes[at + 8] = 2;
    let sum = crate::superblock::sum(&ram.bytes[at..at + SUPERBLOCK_BYTES]);
    ram.bytes[at + 12..at + 16].copy_from_slice(&sum.to_le_bytes());
    assert_eq!(Superblock::parse(&ram.bytes[at..at + SUPERBLOCK_BYTES]), Err(Invalid::Version(2)));
    assert_eq!(error(&mut ram, Expected::default()), Error::Version(2));
}

#[test]
fn an_unknown_end_of_the_journal_is_not_taken_for_its_end() {
    let (mut ram, _, at) = pool();
    ram.unreadable = at.map(|mirror| (mirror + 3 * 4096, mirror + 4 * 4096)).to_vec();
    assert_eq!(error(&mut ram, Expected::default()), Error::Medium(at[0] + 3 * 4096));
}

#[test]
fn a_full_area_has_its_end_where_it_ends() {
    let (mut ram, mut store) = Ram::pool();
    let edits = AREA / 4096 - 1;
    for _ in 0..edits {
        ram.commit(&mut store, b"x").unwrap();
    }
    assert_eq!(ram.read().unwrap().1.len() as u64, 2 * edits - 1);
}
