//! What creating a pool refuses, and what an interrupted creation leaves.

use super::*;
use crate::Expected;
use crate::ram::{POOL, Ram, SIZE};
use crate::superblock::PLACES;
use uuid::Uuid;

#[test]
fn the_data_of_others_is_destroyed_by_force_only() {
    let mut ram = Ram::new(SIZE);
    ram.bytes[..6].copy_from_slice(b"LUKS\xba\xbe");
    let error = ram.create(false).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the disk has a LUKS encrypted volume; to destroy it and create a pool, force the creation"
    );
    assert!(ram.log.is_empty());
    let mut store = ram.create(true).unwrap();
    ram.checkpoint(&mut store, b"new").unwrap();
    assert_eq!(ram.read(), Ok(("new".into(), String::new(), 0)));
}

#[test]
fn a_pool_is_destroyed_by_force_only_and_leaves_nothing() {
    let (mut ram, mut store) = Ram::pool();
    ram.checkpoint(&mut store, b"second").unwrap();
    ram.commit(&mut store, b"a").unwrap();
    assert_eq!(ram.create(false).unwrap_err(), Error::Pool { pool: POOL, name: "test".into() });
    let whole = ram.clone();
    let mut store = ram.create(true).unwrap();
    assert!(
        matches!(ram.try_open(Expected::default()), Err(Error::NotAPool { .. })),
        "not before its checkpoint"
    );
    ram.checkpoint(&mut store, b"new").unwrap();
    // The same identity, as here, does not happen otherwise; with another one, old records are not of the pool.
    assert_eq!(whole.clone().read().unwrap().0, "second");
}

#[test]
fn a_disk_that_cannot_be_read_is_not_taken_for_an_empty_one() {
    let mut ram = Ram::new(SIZE);
    ram.unreadable = vec![(0, 512)];
    assert_eq!(ram.create(false).unwrap_err(), Error::Medium(0));
    ram.unreadable.clear();
    ram.unwritable = vec![(PLACES[1], PLACES[1] + 1)];
    assert_eq!(ram.create(false).unwrap_err(), Error::Medium(0));
}

#[test]
fn an_erased_pool_does_not_exist() {
    let (mut ram, _) = Ram::pool();
    let mut erasing = Erasing::new(Base { bytes: SIZE as u64, block: 512 });
    let result = loop {
        let op = erasing.next_op().unwrap();
        let done = ram.run(op);
        if let Some(result) = erasing.completed(done) {
            break result;
        }
    };
    assert_eq!(result, Ok(()));
    assert_eq!(ram.log.last(), Some(&('f', 0)));
    assert!(matches!(ram.try_open(Expected::default()), Err(Error::NotAPool { .. })));
    ram.create(false).expect("the disk is blank where that is looked for");
}

#[test]
fn names_and_sizes_out_of_range_are_refused() {
    let options = Options::new(POOL, Uuid::nil(), "pool", 512);
    let base = Base { bytes: 1 << 30, block: 4096 };
    let new = |base, options| Formatting::new(base, &options, false).unwrap_err();
    assert_eq!(new(base, options.clone()), Error::BlockSize { disk: 4096, pool: 512 });
    let base = Base { bytes: 1 << 20, block: 512 };
    assert!(matches!(new(base, options.clone()), Error::TooSmall { .. }));
    assert_eq!(new(base, Options { name: "x".repeat(65), ..options.clone() }), Error::Name);
    assert_eq!(new(base, Options { name: "a\nb".into(), ..options }), Error::Name);
}
