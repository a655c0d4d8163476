//! Tests that reads return the data that was written, on every path of the data.

use super::harness::{Bench, MIB, STRICT, directory, disk, pattern, sparse};
use crate::{Config, Direct};
use aryk_bdev::{Op, Status};
use aryk_reactor::Engine;
use std::fs;
use std::path::Path;

/// Runs `test` on each kind of store with each engine.
fn on_all_stores(test: impl Fn(&mut Bench)) {
    let on = |below: &Path, alignment, direct, engine| {
        let dir = directory(below);
        let config = Config { direct, ..sparse(dir.path(), 8 * MIB) };
        test(&mut Bench::new(config, alignment, engine));
    };
    let disk = &disk();
    on(disk, None, Direct::Auto, Engine::IoUring);
    on(disk, None, Direct::Auto, Engine::Epoll);
    on(disk, None, Direct::Never, Engine::IoUring);
    on(disk, Some(STRICT), Direct::Auto, Engine::IoUring);
    on(disk, Some(STRICT), Direct::Auto, Engine::Epoll);
    on(Path::new("/dev/shm"), None, Direct::Auto, Engine::IoUring);
}

#[test]
fn reads_return_written_data() {
    on_all_stores(|bench| {
        for (lba, blocks, skew) in
            [(0, 8, 0), (8, 1, 0), (17, 3, 512), (100, 1, 1), (1000, 2048, 0), (5001, 1111, 3)]
        {
            let data = pattern(blocks * 512, lba);
            assert_eq!(bench.write_skewed(lba, &data, skew, lba % 2 == 1), Status::Ok);
            assert_eq!(bench.command(Op::Flush, 0, 0), Status::Ok);
            assert!(bench.read_skewed(lba, blocks as u64, skew) == data, "{lba} {blocks} {skew}");
            assert!(bench.read(lba, blocks as u64) == data);
            let file = fs::read(bench.path()).unwrap();
            assert!(file[lba as usize * 512..][..data.len()] == data);
        }
    });
}

#[test]
fn a_write_keeps_the_rest_of_a_store_block() {
    on_all_stores(|bench| {
        let mut model = pattern(64 * 512, 1);
        assert_eq!(bench.write(0, &model), Status::Ok);
        for (lba, blocks) in [(1, 1), (7, 2), (8, 1), (15, 17), (3, 21), (40, 24)] {
            let data = pattern(blocks * 512, 77 + lba);
            model[lba as usize * 512..][..data.len()].copy_from_slice(&data);
            assert_eq!(bench.write(lba, &data), Status::Ok);
            assert!(bench.read(0, 64) == model, "{lba} {blocks}");
        }
        for (lba, blocks) in [(2, 1), (9, 3), (20, 30)] {
            model[lba as usize * 512..][..blocks * 512].fill(0);
            assert_eq!(bench.command(Op::WriteZeroes, lba, blocks as u64), Status::Ok);
            assert!(bench.read(0, 64) == model, "{lba} {blocks}");
        }
    });
}
