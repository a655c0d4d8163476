//! Tests of several calls that create a disk at the same path at the same time: the call that succeeds keeps its file.

use super::harness::{MIB, disk_directory, sparse};
use crate::{Config, Error, create, store_of};
use aryk_bdev::{Bdev, Bytes, Env};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::thread;

const ROUNDS: usize = 100;

/// Creates a disk of each of `configs` at the same time. The registries keep the disks that were created.
fn race(configs: Vec<Config>) -> Vec<(Env, Result<Arc<Bdev>, Error>)> {
    let start = Arc::new(Barrier::new(configs.len()));
    let threads = configs.into_iter().map(|config| {
        let start = Arc::clone(&start);
        thread::spawn(move || {
            let env = Env::default();
            start.wait();
            let made = create(&env, config);
            (env, made)
        })
    });
    let threads: Vec<_> = threads.collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[track_caller]
fn assert_has_its_file(bdev: &Bdev, path: &Path) {
    let file = File::from(store_of(bdev).unwrap().file.try_clone().unwrap());
    let (is, was) = (std::fs::metadata(path).expect("the disk's file exists"), file.metadata().unwrap());
    assert_eq!((is.ino(), is.len()), (was.ino(), MIB));
}

#[test]
fn failed_calls_do_not_delete_the_file_of_the_successful_call() {
    for _ in 0..ROUNDS {
        let dir = disk_directory();
        let config = Config { waits: false, ..sparse(dir.path(), MIB) };
        let made = race(vec![config.clone(); 4]);
        let winners: Vec<_> = made.iter().filter_map(|(_, made)| made.as_ref().ok()).collect();
        // Each call may have failed because of the locks of another call.
        assert!(winners.len() <= 1);
        winners.iter().for_each(|bdev| assert_has_its_file(bdev, &config.path));
        let lost = |(_, made): &(Env, Result<_, Error>)| match made {
            Ok(_) | Err(Error::Locked { .. }) => {}
            Err(error) => panic!("{error}"),
        };
        made.iter().for_each(lost);
    }
}

#[test]
fn a_failed_call_deletes_only_its_own_file() {
    for _ in 0..ROUNDS {
        let dir = disk_directory();
        let good = sparse(dir.path(), MIB);
        let bad = Config { size: Some(Bytes(1000)), waits: false, ..good.clone() };
        let mut made = race(vec![good.clone(), bad.clone(), bad]);
        for (_, made) in made.drain(1..) {
            assert!(made.is_err());
        }
        let bdev = made[0].1.as_ref().expect("the call waits for the locks of the others");
        assert_has_its_file(bdev, &good.path);
    }
}
