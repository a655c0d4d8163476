//! Tests of acknowledged writes that did not reach the store: every later flush reports the loss. Need FUSE.

use super::harness::{Bench, disk, pattern};
use crate::{Config, Direct, create};
use aryk_bdev::{Env, Op, Status};
use aryk_reactor::Engine;
use aryk_slow_store::SlowStore;
use std::sync::atomic::Ordering;

fn cached(store: &SlowStore, engine: Engine) -> Bench {
    let env = Env::default();
    let config = Config { direct: Direct::Never, ..Config::new("d", store.path()) };
    create(&env, config).unwrap();
    Bench::on(&env, engine)
}

#[test]
fn after_a_failed_sync_no_flush_succeeds() {
    let Ok(store) = SlowStore::new(&disk(), 64 * 1024) else {
        return eprintln!("skipped: FUSE needs root");
    };
    let data = pattern(4096, 1);
    for engine in [Engine::IoUring, Engine::Epoll] {
        // The kernel reports the failure to one kind of request that ends with a sync; all other kinds must report it later.
        for fails in 0..3 {
            let mut bench = cached(&store, engine);
            let mut durable = |i: u64| match i {
                0 => bench.command(Op::Flush, 0, 0),
                1 => bench.write_skewed(8, &data, 0, true),
                _ => {
                    let tag = bench.submit(Op::WriteZeroes, 16, 8, aryk_dma::Sgl::EMPTY, true);
                    bench.wait(tag)
                }
            };
            assert_eq!([0, 1, 2].map(&mut durable), [Status::Ok; 3]);
            store.fail_syncs(true);
            assert_eq!(durable(fails), Status::Medium);
            store.fail_syncs(false);
            assert_eq!([0, 1, 2].map(&mut durable), [Status::Medium; 3], "{fails}");
            // Requests that guarantee nothing about earlier writes still succeed.
            assert_eq!(bench.write(24, &data), Status::Ok);
            assert!(bench.read(24, 8) == data);
        }
    }
}

/// FUSE is not among the file systems whose ENOSPC is known to refer to the write itself.
#[test]
fn after_a_write_error_that_may_be_of_earlier_writes_no_flush_succeeds() {
    let Ok(store) = SlowStore::new(&disk(), 64 * 1024) else {
        return eprintln!("skipped: FUSE needs root");
    };
    let data = pattern(4096, 1);
    for engine in [Engine::IoUring, Engine::Epoll] {
        for (errno, expected) in [
            (libc::ENOSPC, Status::NoSpace),
            (libc::EDQUOT, Status::NoSpace),
            (libc::EIO, Status::Medium),
            (libc::EFBIG, Status::Medium),
            (libc::ESTALE, Status::Medium),
        ] {
            let mut bench = cached(&store, engine);
            assert_eq!((bench.write(0, &data), bench.command(Op::Flush, 0, 0)), (Status::Ok, Status::Ok));
            assert!(!bench.store().lost.load(Ordering::Relaxed));
            store.fail_writes(Some(errno));
            assert_eq!(bench.write(8, &data), expected);
            store.fail_writes(None);
            assert_eq!(bench.write(8, &data), Status::Ok);
            assert_eq!(bench.command(Op::Flush, 0, 0), Status::Medium, "{errno}");
        }
    }
}
