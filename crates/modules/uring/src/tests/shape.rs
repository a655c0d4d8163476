//! Tests of the files that can be disks, of the geometry of these disks, and of resizes.

use super::harness::{Bench, MIB, directory, disk, disk_directory, pattern, resized, sparse};
use crate::{Config, Direct, Error, Size, create};
use aryk_bdev::{Access, Blocks, Bytes, Env, Event, Op, Status};
use aryk_reactor::Engine;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex};

fn failure(config: Config) -> Error {
    create(&Env::default(), config).unwrap_err()
}

#[test]
fn a_file_of_the_requested_size_is_created_and_opened_again() {
    let dir = disk_directory();
    let env = Env::default();
    let config = Config { block_size: Some(4096), ..sparse(dir.path(), 1 << 40) };
    let bdev = create(&env, config.clone()).unwrap();
    assert_eq!((bdev.blocks(), bdev.geometry().block_size), (Blocks(1 << 28), 4096));
    let meta = fs::metadata(dir.path().join("image")).unwrap();
    assert_eq!((meta.len(), meta.blocks(), meta.permissions().mode() & 0o777), (1 << 40, 0, 0o600));
    drop((bdev, env));
    // A size that differs from the file's size is refused.
    let other = failure(Config { size: Some(Bytes(MIB)), ..config.clone() });
    assert!(
        matches!(other, Error::OtherSize { size: Bytes(0x100_0000_0000), requested: Bytes(MIB), .. }),
        "{other}"
    );
    for size in [None, config.size] {
        let bdev = create(&Env::default(), Config { size, ..config.clone() }).unwrap();
        assert_eq!(bdev.blocks(), Blocks(1 << 28));
    }
}

#[test]
fn an_empty_file_is_grown() {
    let dir = disk_directory();
    let path = dir.path().join("image");
    File::create(&path).unwrap();
    assert!(matches!(failure(Config::new("d", &path)), Error::Empty(_)));
    let bdev = create(&Env::default(), sparse(dir.path(), MIB)).unwrap();
    assert_eq!(bdev.blocks(), Blocks(2048));
}

#[test]
fn files_that_cannot_be_disks_are_refused_with_a_reason() {
    let dir = disk_directory();
    let path = dir.path().join("image");
    assert_eq!(
        failure(Config::new("d", &path)).to_string(),
        format!("`{}` does not exist; to create it, give a size", path.display())
    );
    assert!(matches!(failure(Config { read_only: true, ..sparse(dir.path(), MIB) }), Error::Missing(_)));
    assert!(matches!(failure(Config::new("d", dir.path())), Error::Directory(_)));
    assert!(matches!(failure(Config::new("d", "/dev/null")), Error::NotAFile(_)));
    for config in [sparse(Path::new("/no/such/place"), MIB), Config::new("d", "/no/such/place/image")] {
        let why = failure(config).to_string();
        assert!(why.starts_with("the directory `/no/such/place` does not exist"), "{why}");
    }
    std::os::unix::fs::symlink("/no/such/place", &path).unwrap();
    assert!(matches!(failure(sparse(dir.path(), MIB)), Error::Dangling(_)));
    fs::remove_file(&path).unwrap();
    assert!(matches!(
        failure(Config { size: Some(Bytes::ZERO), ..Config::new("d", &path) }),
        Error::NoSize(_)
    ));
    for size in [0, 256, 1000, 128 * 1024] {
        let config = Config { block_size: Some(size), ..sparse(dir.path(), MIB) };
        assert!(matches!(failure(config), Error::BlockSize(s) if s == size));
    }
    assert!(matches!(
        failure(sparse(dir.path(), 1000)),
        Error::NotAMultiple { size: Bytes(1000), unit: 512, .. }
    ));
    // The failed call leaves no file behind.
    assert!(!path.exists());
    File::create(&path).unwrap().set_len(1000).unwrap();
    assert!(matches!(failure(Config::new("d", &path)), Error::NotAMultiple { .. }));
    assert_eq!(fs::metadata(&path).unwrap().len(), 1000);
}

#[test]
fn a_name_that_is_taken_creates_no_file() {
    let dir = disk_directory();
    let env = Env::default();
    create(&env, sparse(dir.path(), MIB)).unwrap();
    let again = Config { path: dir.path().join("other"), ..sparse(dir.path(), MIB) };
    assert!(matches!(create(&env, again), Err(Error::Bdev(aryk_bdev::Error::Exists(_)))));
    assert!(!dir.path().join("other").exists());
}

#[test]
fn an_alias_that_is_taken_leaves_no_file() {
    let dir = disk_directory();
    let env = Env::default();
    create(&env, sparse(dir.path(), MIB)).unwrap();
    let (name, path) = ("e".into(), dir.path().join("other"));
    let again = Config { name, path, aliases: vec!["d".into()], ..sparse(dir.path(), MIB) };
    assert!(matches!(create(&env, again), Err(Error::Bdev(aryk_bdev::Error::Exists(_)))));
    assert!(!dir.path().join("other").exists() && dir.path().join("image").exists());
}

#[test]
fn the_geometry_is_that_of_the_store() {
    let dir = directory("/dev/shm");
    let bench = Bench::new(sparse(dir.path(), MIB), None, Engine::IoUring);
    assert_eq!(bench.bdev().geometry().physical_block_size, 4096);
    let dir = disk_directory();
    let bench = Bench::new(sparse(dir.path(), MIB), None, Engine::IoUring);
    let alignment = bench.store().alignment;
    assert!(alignment.offset >= 512, "the root disk supports direct I/O: {alignment:?}");
    assert_eq!(bench.bdev().geometry().physical_block_size, 4096);
    drop(bench);
    let cached = Config { direct: Direct::Never, ..sparse(dir.path(), MIB) };
    assert_eq!(Bench::new(cached, None, Engine::IoUring).store().alignment.offset, 1);
}

fn allocated(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn unmapped_and_zeroed_blocks_take_no_space() {
    for below in [disk(), "/dev/shm".into()] {
        let dir = directory(below);
        let mut bench = Bench::new(sparse(dir.path(), 4 * MIB), None, Engine::IoUring);
        let path = bench.path();
        let unmap = |bench: &mut Bench, lba, blocks| bench.command(Op::Unmap, lba, blocks);
        for clear in [unmap, Bench::zero_or_unmap] {
            assert_eq!(bench.write(0, &pattern(MIB as usize, 5)), Status::Ok);
            assert!(allocated(&path) >= MIB);
            assert_eq!(clear(&mut bench, 1024, 1024), Status::Ok);
            assert!((MIB / 2..MIB).contains(&allocated(&path)));
            assert!(bench.read(1024, 1024).iter().all(|&b| b == 0));
            assert!(bench.read(0, 1024) == pattern(MIB as usize, 5)[..MIB as usize / 2]);
            assert_eq!(clear(&mut bench, 0, 8192), Status::Ok);
            assert_eq!((allocated(&path), fs::metadata(&path).unwrap().len()), (0, 4 * MIB));
        }
    }
}

#[test]
fn zeroed_blocks_that_may_not_be_unmapped_stay_allocated() {
    for below in [disk(), "/dev/shm".into()] {
        let dir = directory(below);
        let mut bench = Bench::new(sparse(dir.path(), 4 * MIB), None, Engine::IoUring);
        let path = bench.path();
        assert_eq!(bench.write(0, &pattern(MIB as usize, 5)), Status::Ok);
        assert_eq!(bench.command(Op::WriteZeroes, 8, 2000), Status::Ok);
        assert!(allocated(&path) >= MIB, "{}", allocated(&path));
        assert!(bench.read(8, 2000).iter().all(|&b| b == 0));
        assert!(bench.read(0, 8) == pattern(4096, 5));
        // A range without blocks gets blocks.
        assert_eq!(bench.command(Op::WriteZeroes, 2048, 2048), Status::Ok);
        assert!(allocated(&path) >= 2 * MIB, "{}", allocated(&path));
        assert_eq!(fs::metadata(&path).unwrap().len(), 4 * MIB);
    }
}

/// Twice as many writes as the device accepts at one time, all of them in the range that is truncated.
#[test]
fn writes_waiting_during_a_shrink_do_not_grow_the_file_again() {
    for engine in [Engine::IoUring, Engine::Epoll] {
        let dir = disk_directory();
        let mut bench = Bench::new(sparse(dir.path(), 4 * MIB), None, engine);
        let mut buffer = aryk_dma::Buffer::new(4096, 4096);
        let data = buffer.lend();
        let tags: Vec<_> = (0..512).map(|i| bench.submit(Op::Write, 4096 + i * 8, 8, data, false)).collect();
        assert_eq!(bench.shrink(MIB).unwrap(), Bytes(MIB));
        let refused = tags.into_iter().filter(|&tag| bench.wait(tag) == Status::OutOfRange).count();
        buffer.reclaim();
        assert!(refused >= 256, "{refused}");
        assert_eq!(fs::metadata(bench.path()).unwrap().len(), MIB);
    }
}

/// Writes beyond the end of a file that was truncated from outside, while the disk had its former size.
#[test]
fn a_shrink_waits_for_writes_behind_the_end_of_a_truncated_file() {
    for engine in [Engine::IoUring, Engine::Epoll] {
        let dir = disk_directory();
        let mut bench = Bench::new(sparse(dir.path(), 4 * MIB), None, engine);
        File::options().write(true).open(bench.path()).unwrap().set_len(MIB + 100).unwrap();
        let mut buffer = aryk_dma::Buffer::new(4096, 4096);
        let data = buffer.lend();
        let tags: Vec<_> = (0..512).map(|i| bench.submit(Op::Write, 4096 + i * 8, 8, data, false)).collect();
        assert_eq!(bench.shrink(MIB).unwrap(), Bytes(MIB));
        for tag in tags {
            bench.wait(tag);
        }
        buffer.reclaim();
        assert_eq!(fs::metadata(bench.path()).unwrap().len(), MIB);
    }
}

#[test]
fn openers_receive_an_event_after_a_resize() {
    let dir = disk_directory();
    let mut bench = Bench::new(sparse(dir.path(), MIB), None, Engine::IoUring);
    let events = Arc::new(Mutex::new(Vec::new()));
    let received = Arc::clone(&events);
    let _open =
        bench.env.registry().open("d", Access::Read, "t", move |e| received.lock().unwrap().push(e)).unwrap();
    let env = bench.env.clone();
    assert_eq!(resized(env.registry(), Size::GrowTo(Bytes(2 * MIB))).unwrap(), Bytes(2 * MIB));
    assert_eq!(bench.write(2048, &pattern(4096, 1)), Status::Ok);
    assert!(matches!(
        resized(env.registry(), Size::GrowTo(Bytes(MIB))),
        Err(Error::Shrinks { from: Bytes(0x20_0000), to: Bytes(0x10_0000), .. })
    ));
    assert!(matches!(
        resized(env.registry(), Size::GrowTo(Bytes(3 * MIB + 1))),
        Err(Error::NotAMultiple { .. })
    ));
    assert_eq!(bench.shrink(MIB).unwrap(), Bytes(MIB));
    assert_eq!(bench.command(Op::WriteZeroes, 2048, 1), Status::OutOfRange);
    File::options().write(true).open(bench.path()).unwrap().set_len(3 * MIB + 100).unwrap();
    assert_eq!(resized(env.registry(), Size::Rescan).unwrap(), Bytes(3 * MIB));
    assert!(bench.read(2048, 8).iter().all(|&b| b == 0));
    let resized = [4096, 2048, 6144].map(|blocks| Event::Resized { blocks: Blocks(blocks) });
    assert_eq!(*events.lock().unwrap(), resized);
}
