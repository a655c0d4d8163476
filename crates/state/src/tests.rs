//! Tests of stores that are written, killed, damaged and read again.

use crate::check::{self, Flaw};
use crate::open::path_in;
use crate::{META, OpenError, Record, Store, VERSION_KEY, file};
use std::fs::{self, File};
use std::path::Path;
use tempfile::TempDir;

fn record(key: u64, content: &str) -> Record {
    Record { key, content: content.into() }
}

fn put(store: &Store, key: u64, content: &str) {
    wait(store.write(key, Some(content.into()))).unwrap();
}

fn wait(mut written: crate::Written) -> Result<(), crate::WriteError> {
    loop {
        if let Some(result) = written.try_recv().unwrap() {
            return result;
        }
        std::thread::yield_now();
    }
}

/// The bytes that a process killed now would leave.
fn left(dir: &Path) -> Vec<u8> {
    fs::read(path_in(dir)).unwrap()
}

#[test]
fn records_survive_reopening() {
    let dir = TempDir::new().unwrap();
    let (store, records) = Store::open(dir.path()).unwrap();
    assert_eq!(records, []);
    put(&store, 2, "two");
    put(&store, 1, "one");
    put(&store, 2, "deux");
    put(&store, 3, "three");
    wait(store.write(3, None)).unwrap();
    drop(store);
    let (_store, records) = Store::open(dir.path()).unwrap();
    assert_eq!(records, [record(1, "one"), record(2, "deux")]);
}

#[test]
fn each_acknowledged_write_survives_a_kill() {
    let dir = TempDir::new().unwrap();
    let (store, _) = Store::open(dir.path()).unwrap();
    for key in 0..30 {
        put(&store, key, &format!("record {key}"));
        let records = check::read(left(dir.path())).unwrap();
        assert_eq!(records.len() as u64, key + 1);
    }
}

#[test]
fn a_store_has_one_owner() {
    let dir = TempDir::new().unwrap();
    let (store, _) = Store::open(dir.path()).unwrap();
    let error = Store::open(dir.path()).unwrap_err();
    assert!(error.to_string().contains(&format!("process {}", std::process::id())), "{error}");
    drop(store);
    Store::open(dir.path()).unwrap();
}

#[test]
fn a_newer_store_is_left_alone() {
    let dir = TempDir::new().unwrap();
    drop(Store::open(dir.path()).unwrap());
    let opened = File::options().read(true).write(true).open(path_in(dir.path())).unwrap();
    let database = file::database(&opened).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(META).unwrap().insert(VERSION_KEY, 7).unwrap();
    transaction.commit().unwrap();
    drop(database);
    let before = left(dir.path());
    let error = Store::open(dir.path()).unwrap_err();
    assert!(matches!(error, OpenError::Newer { version: 7, .. }), "{error}");
    assert_eq!(left(dir.path()), before);
}

/// A store killed after some writes: its last bytes, and its contents after each write.
fn history(dir: &Path) -> (Vec<u8>, Vec<Vec<Record>>) {
    let (store, _) = Store::open(dir).unwrap();
    let mut held = vec![Vec::new()];
    for key in 0..12 {
        put(&store, key, &format!("{{\"method\": \"bdev_null_create\", \"name\": \"disk{key}\"}}"));
        if key == 7 {
            wait(store.write(3, None)).unwrap();
        }
        held.push(check::read(left(dir)).unwrap());
    }
    (left(dir), held)
}

/// Checks that a store is refused, or has contents that it once had. Returns whether it is refused.
fn judge(bytes: Vec<u8>, held: &[Vec<Record>], what: &str) -> bool {
    match check::read(bytes) {
        Ok(records) => {
            assert!(held.contains(&records), "{what}: the store never held {records:?}");
            false
        }
        Err(Flaw::Damaged(_)) => true,
        Err(Flaw::Newer(version)) => panic!("{what}: version {version}"),
    }
}

#[test]
fn a_store_that_was_cut_off() {
    let dir = TempDir::new().unwrap();
    let (bytes, held) = history(dir.path());
    let cuts =
        (0..bytes.len()).filter(|&len| len < 8192 || len % 512 < 2 || len % 512 == 511 || len % 61 == 0);
    let (mut refused, mut all) = (0, 0);
    for len in cuts {
        refused += u32::from(judge(bytes[..len].to_vec(), &held, &format!("cut off at {len}")));
        all += 1;
    }
    assert!(refused > all / 2, "{refused} of {all}");
}

#[test]
fn a_store_with_bits_flipped() {
    let dir = TempDir::new().unwrap();
    let (bytes, held) = history(dir.path());
    let used = bytes.iter().rposition(|&byte| byte != 0).unwrap() + 1;
    let mut random = fastrand::Rng::with_seed(1);
    let mut next = |below: usize| random.usize(..below);
    let mut refused = 0;
    for round in 0..4000 {
        let mut bytes = bytes.clone();
        let mut places = Vec::new();
        // The first pages have the references to all other pages.
        for _ in 0..=next(3) {
            let place = if round % 3 == 0 { next(512) } else { next(used) };
            bytes[place] ^= 1 << next(8);
            places.push(place);
        }
        refused += u32::from(judge(bytes, &held, &format!("round {round}, {places:?}")));
    }
    assert!(refused > 0);
}

#[test]
fn a_damaged_store_is_left_alone_and_its_copy_is_named() {
    let dir = TempDir::new().unwrap();
    let (store, _) = Store::open(dir.path()).unwrap();
    put(&store, 1, "one");
    drop(store);
    let path = path_in(dir.path());
    fs::write(&path, b"no store at all").unwrap();
    let error = Store::open(dir.path()).unwrap_err();
    assert!(matches!(&error, OpenError::Damaged { copy: Some((_, 1)), .. }), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"no store at all");
    fs::rename(dir.path().join("state.redb.bak"), &path).unwrap();
    assert_eq!(Store::open(dir.path()).unwrap().1, [record(1, "one")]);
}

#[test]
fn many_writes_at_once() {
    let dir = TempDir::new().unwrap();
    let (store, _) = Store::open(dir.path()).unwrap();
    let written: Vec<_> = (0..3000).map(|key| store.write(key, Some(vec![b'x'; 200]))).collect();
    written.into_iter().for_each(|written| wait(written).unwrap());
    drop(store);
    assert_eq!(Store::open(dir.path()).unwrap().1.len(), 3000);
}
