//! The journal after each step, after each step that does not happen, and after damage.

use super::*;
use crate::rekey::check_value_of;
use crate::tests::{key, noise};
use crate::tweaks::Layout;
use crate::{Key, TweakMode};
use std::sync::Arc;
use tempfile::TempDir;

const BLOCK: u32 = 4096;

fn cipher(seed: u64) -> Cipher {
    let key: Arc<Key> = key(seed);
    Cipher { key, layout: Layout::new(TweakMode::SimpleLba, BLOCK).unwrap() }
}

fn check(seed: u64) -> CheckValue {
    let Cipher { key, layout } = cipher(seed);
    check_value_of(&key, &layout)
}

fn create(dir: &TempDir) -> (PathBuf, Journal) {
    let path = dir.path().join("journal");
    let journal = Journal::create(&path, BLOCK, [7; 16], [check(1), check(2)]).unwrap();
    (path, journal)
}

/// The position, and the data of the zone that the file holds.
fn state(path: &Path) -> (u64, Option<Vec<u8>>) {
    let mut journal = Journal::open(path).unwrap();
    let pending = journal.pending().unwrap();
    (journal.position().0, pending.map(|(_, _, buffer)| buffer.bytes().to_vec()))
}

#[test]
fn zones_are_recorded_and_advanced_over() {
    let dir = TempDir::new().unwrap();
    let (path, mut journal) = create(&dir);
    assert!(journal.is_untouched() && journal.is_from(check(1)) && journal.is_to(check(2)));
    assert!(!journal.is_from(check(2)));
    let zone = zone_blocks(BLOCK);
    let mut at = Lba::ZERO;
    for blocks in [zone, zone, Blocks(3)] {
        let len = blocks.to_bytes(BLOCK).0 as usize;
        let plain = noise(at.0, len);
        let mut data = plain.clone();
        let Cipher { key, layout } = cipher(1);
        key.encrypt_in_place(layout.sector, layout.tweaks(at), &mut data).unwrap();
        journal.record(at, &mut data, &cipher(1), &cipher(2)).unwrap();
        assert_eq!(state(&path), (at.0, Some(data.clone())));
        let Cipher { key, layout } = cipher(2);
        key.decrypt_in_place(layout.sector, layout.tweaks(at), &mut data).unwrap();
        assert!(data == plain, "the zone has the new key");
        at += blocks;
        journal.advance(at).unwrap();
        assert_eq!(state(&path), (at.0, None));
        assert!(!journal.is_untouched());
    }
    journal.advance(Lba::MAX).unwrap();
    assert!(Journal::open(&path).unwrap().is_complete());
}

#[test]
fn a_zone_whose_header_was_not_written_is_none() {
    let dir = TempDir::new().unwrap();
    let (path, mut journal) = create(&dir);
    journal.advance(Lba(256)).unwrap();
    let before = fs::read(&path).unwrap();
    journal.record(Lba(256), &mut noise(1, 4096), &cipher(1), &cipher(2)).unwrap();
    // The data of the zone arrived, also in part, and the header did not.
    let mut after = fs::read(&path).unwrap();
    after[..DATA as usize].copy_from_slice(&before[..DATA as usize]);
    after[DATA as usize] ^= 1;
    fs::write(&path, after).unwrap();
    assert_eq!(state(&path), (256, None));
}

#[test]
fn a_failed_header_is_written_again_to_its_place() {
    let dir = TempDir::new().unwrap();
    let (path, mut journal) = create(&dir);
    let writable = std::mem::replace(&mut journal.file, File::open(&path).unwrap());
    // The data of the zone cannot be written either: nothing is uncertain.
    let failed = journal.record(Lba::ZERO, &mut noise(1, 4096), &cipher(1), &cipher(2));
    assert!(matches!(failed, Err((JournalError::Io(..), false))), "{failed:?}");
    journal.is_uncertain = true;
    assert!(journal.pending().is_err());
    journal.file = writable;
    assert!(journal.pending().unwrap().is_none());
    assert!(!journal.is_uncertain);
    assert_eq!(journal.header.sequence, 2);
    journal.file = File::open(&path).unwrap();
    assert!(journal.advance(Lba(7)).is_err());
    assert_eq!(journal.header.sequence, 2, "a header that was not written is not the last");
    assert_eq!(state(&path), (0, None));
}

#[test]
fn a_rotation_whose_end_was_perhaps_stored_is_not_complete() {
    let dir = TempDir::new().unwrap();
    let (path, mut journal) = create(&dir);
    journal.advance(Lba(256)).unwrap();
    let before = journal.header;
    let writable = std::mem::replace(&mut journal.file, File::open(&path).unwrap());
    let failed = journal.advance(Lba::MAX);
    assert!(matches!(failed, Err((JournalError::Io(..), true))), "{failed:?}");
    // The header arrived nevertheless.
    let end = Header { position: Lba::MAX, sequence: before.sequence + 1, ..before };
    writable.write_all_at(&end.encode(), end.sequence % 2 * STRIDE).unwrap();
    journal.file = writable;
    assert!(journal.pending().unwrap().is_none());
    assert_eq!(state(&path), (256, None));
    // With a zone in the journal, both headers lead to the same data.
    journal.record(Lba(256), &mut noise(1, 4096), &cipher(1), &cipher(2)).unwrap();
    let writable = std::mem::replace(&mut journal.file, File::open(&path).unwrap());
    assert!(matches!(journal.advance(Lba(257)), Err((JournalError::Io(..), true))));
    journal.file = writable;
    assert!(journal.pending().unwrap().is_some());
    journal.advance(Lba(257)).unwrap();
    assert_eq!(state(&path), (257, None));
}

#[test]
fn the_header_that_is_found_is_stored_again() {
    let dir = TempDir::new().unwrap();
    let (path, mut journal) = create(&dir);
    journal.record(Lba::ZERO, &mut noise(1, 8192), &cipher(1), &cipher(2)).unwrap();
    let whole = fs::read(&path).unwrap();
    let long_ago = std::time::SystemTime::UNIX_EPOCH;
    journal.file.set_modified(long_ago).unwrap();
    Journal::open(&path).unwrap();
    assert!(fs::metadata(&path).unwrap().modified().unwrap() > long_ago, "the file was written");
    assert!(fs::read(&path).unwrap() == whole, "with the same content");
}

#[test]
fn each_damaged_byte_of_what_counts_is_found() {
    let dir = TempDir::new().unwrap();
    let (path, mut journal) = create(&dir);
    journal.record(Lba::ZERO, &mut noise(1, 8192), &cipher(1), &cipher(2)).unwrap();
    let whole = fs::read(&path).unwrap();
    let of_headers = (0..CHECKED + 4).flat_map(|at| [at, STRIDE as usize + at]);
    let of_data = (0..8192).step_by(97).map(|at| DATA as usize + at);
    for at in of_headers.chain(of_data) {
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        fs::write(&path, damaged).unwrap();
        let opened = Journal::open(&path);
        assert!(matches!(opened, Err(JournalError::Damaged(..))), "byte {at}: {opened:?}");
    }
    for len in [0, 511, 4096, 4096 + 511, DATA, DATA + 8191] {
        fs::write(&path, &whole[..len as usize]).unwrap();
        assert!(matches!(Journal::open(&path), Err(JournalError::Damaged(..))), "{len} bytes");
    }
    // Headers of different times do not belong together, even if each is valid.
    let mut mixed = whole.clone();
    let old = Header { sequence: 7, ..journal.header };
    mixed[STRIDE as usize..STRIDE as usize + HEADER].copy_from_slice(&old.encode());
    fs::write(&path, mixed).unwrap();
    assert!(matches!(Journal::open(&path), Err(JournalError::Damaged(..))));
    fs::write(&path, whole).unwrap();
    assert!(Journal::open(&path).is_ok());
}

#[test]
fn a_journal_replaces_no_other_and_is_removed_once() {
    let dir = TempDir::new().unwrap();
    let (path, _) = create(&dir);
    let again = Journal::create(&path, BLOCK, [7; 16], [check(3), check(4)]);
    assert!(matches!(again, Err(JournalError::Exists(_))), "{again:?}");
    assert!(Journal::open(&path).unwrap().is_from(check(1)));
    remove_journal(&path).unwrap();
    remove_journal(&path).unwrap();
    assert!(matches!(Journal::open(&path), Err(JournalError::Missing(_))));
}

#[test]
fn check_values_tell_keys_tweak_modes_and_block_sizes_apart() {
    let modes = [
        TweakMode::SimpleLba,
        TweakMode::JoinNegLbaWithLba,
        TweakMode::Incr512FullLba,
        TweakMode::Incr512UpperLba,
        TweakMode::Plain64 { iv_offset: 0, sector_size: 512, iv_large_sectors: false },
        TweakMode::Plain64 { iv_offset: 8, sector_size: 512, iv_large_sectors: false },
        TweakMode::Plain64 { iv_offset: 0, sector_size: 4096, iv_large_sectors: false },
        TweakMode::Plain64 { iv_offset: 0, sector_size: 4096, iv_large_sectors: true },
    ];
    let mut seen = Vec::new();
    for seed in [1, 2] {
        for mode in modes {
            let value = crate::rekey::check_value(&key(seed), mode, BLOCK).unwrap();
            assert!(!seen.contains(&value), "{mode:?}");
            seen.push(value);
        }
    }
}
