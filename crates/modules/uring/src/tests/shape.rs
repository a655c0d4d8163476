//! What files become disks, of which shape, and how that changes.

use super::harness::{Bench, MIB, directory, disk, disk_directory, pattern, sparse};
use crate::{Config, Direct, Error, Size, create, resize};
use aryk_bdev::{Access, Event, Op, Registry, Status};
use aryk_reactor::Engine;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex};

fn failure(config: Config) -> Error {
    create(&Registry::new(), config).unwrap_err()
}

#[test]
fn a_file_of_the_asked_size_is_created_and_found_again() {
    let dir = disk_directory();
    let registry = Registry::new();
    let config = Config { block_size: Some(4096), ..sparse(dir.path(), 1 << 40) };
    let bdev = create(&registry, config.clone()).unwrap();
    assert_eq!((bdev.blocks(), bdev.geometry().block_size), (1 << 28, 4096));
    let meta = fs::metadata(dir.path().join("image")).unwrap();
    assert_eq!((meta.len(), meta.blocks(), meta.permissions().mode() & 0o777), (1 << 40, 0, 0o600));
    drop((bdev, registry));
    // The size is for a new file only.
    let bdev = create(&Registry::new(), Config { size: Some(MIB), ..config }).unwrap();
    assert_eq!(bdev.blocks(), 1 << 28);
}

#[test]
fn an_empty_file_is_grown() {
    let dir = disk_directory();
    let path = dir.path().join("image");
    File::create(&path).unwrap();
    assert!(matches!(failure(Config::new("d", &path)), Error::Empty(_)));
    let bdev = create(&Registry::new(), sparse(dir.path(), MIB)).unwrap();
    assert_eq!(bdev.blocks(), 2048);
}

#[test]
fn what_is_no_disk_is_refused_with_a_reason() {
    let dir = disk_directory();
    let path = dir.path().join("image");
    assert_eq!(
        failure(Config::new("d", &path)).to_string(),
        format!("`{}` does not exist; to have it created, give a size", path.display())
    );
    assert!(matches!(failure(Config { read_only: true, ..sparse(dir.path(), MIB) }), Error::Missing(_)));
    assert!(matches!(failure(Config::new("d", dir.path())), Error::Directory(_)));
    assert!(matches!(failure(Config::new("d", "/dev/null")), Error::NotAFile(_)));
    assert!(matches!(failure(sparse(Path::new("/no/such/place"), MIB)), Error::Os { action: "create", .. }));
    for size in [0, 256, 1000, 128 * 1024] {
        let config = Config { block_size: Some(size), ..sparse(dir.path(), MIB) };
        assert!(matches!(failure(config), Error::BlockSize(s) if s == size));
    }
    assert!(matches!(failure(sparse(dir.path(), 1000)), Error::NotAMultiple { size: 1000, unit: 512, .. }));
    // What was not there before is not there afterwards.
    assert!(!path.exists());
    File::create(&path).unwrap().set_len(1000).unwrap();
    assert!(matches!(failure(Config::new("d", &path)), Error::NotAMultiple { .. }));
    assert_eq!(fs::metadata(&path).unwrap().len(), 1000);
}

#[test]
fn a_name_that_is_taken_creates_no_file() {
    let dir = disk_directory();
    let registry = Registry::new();
    create(&registry, sparse(dir.path(), MIB)).unwrap();
    let again = Config { path: dir.path().join("other"), ..sparse(dir.path(), MIB) };
    assert!(matches!(create(&registry, again), Err(Error::Bdev(aryk_bdev::Error::Exists(_)))));
    assert!(!dir.path().join("other").exists());
}

#[test]
fn the_shape_is_the_stores() {
    let dir = directory("/dev/shm");
    let bench = Bench::new(sparse(dir.path(), MIB), None, Engine::IoUring);
    assert_eq!(bench.bdev().geometry().physical_block_size, 4096);
    let dir = disk_directory();
    let bench = Bench::new(sparse(dir.path(), MIB), None, Engine::IoUring);
    let alignment = bench.store().alignment;
    assert!(alignment.offset >= 512, "the root disk takes direct I/O: {alignment:?}");
    assert_eq!(bench.bdev().geometry().physical_block_size, 4096);
    drop(bench);
    let cached = Config { direct: Direct::Never, ..sparse(dir.path(), MIB) };
    assert_eq!(Bench::new(cached, None, Engine::IoUring).store().alignment.offset, 1);
}

fn allocated(path: &Path) -> u64 {
    fs::metadata(path).unwrap().blocks() * 512
}

#[test]
fn unmapped_and_zeroed_blocks_take_no_room() {
    for below in [disk(), "/dev/shm".into()] {
        let dir = directory(below);
        let mut bench = Bench::new(sparse(dir.path(), 4 * MIB), None, Engine::IoUring);
        let path = bench.path();
        for op in [Op::Unmap, Op::WriteZeroes] {
            assert_eq!(bench.write(0, &pattern(MIB as usize, 5)), Status::Ok);
            assert!(allocated(&path) >= MIB);
            assert_eq!(bench.command(op, 1024, 1024), Status::Ok);
            assert!((MIB / 2..MIB).contains(&allocated(&path)), "{op:?}");
            assert!(bench.read(1024, 1024).iter().all(|&b| b == 0));
            assert!(bench.read(0, 1024) == pattern(MIB as usize, 5)[..MIB as usize / 2]);
            assert_eq!(bench.command(op, 0, 8192), Status::Ok);
            assert_eq!((allocated(&path), fs::metadata(&path).unwrap().len()), (0, 4 * MIB));
        }
    }
}

#[test]
fn openers_are_told_of_a_new_size() {
    let dir = disk_directory();
    let mut bench = Bench::new(sparse(dir.path(), MIB), None, Engine::IoUring);
    let events = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&events);
    let _open = bench.registry.open("d", Access::Read, "t", move |e| told.lock().unwrap().push(e)).unwrap();
    let registry = Arc::clone(&bench.registry);
    assert_eq!(resize(&registry, "d", Size::GrowTo(2 * MIB)).unwrap(), 2 * MIB);
    assert_eq!(bench.write(2048, &pattern(4096, 1)), Status::Ok);
    assert!(matches!(
        resize(&registry, "d", Size::GrowTo(MIB)),
        Err(Error::Shrinks { from: 0x20_0000, to: 0x10_0000, .. })
    ));
    assert!(matches!(resize(&registry, "d", Size::GrowTo(3 * MIB + 1)), Err(Error::NotAMultiple { .. })));
    assert_eq!(resize(&registry, "d", Size::Exactly(MIB)).unwrap(), MIB);
    assert_eq!(bench.command(Op::WriteZeroes, 2048, 1), Status::OutOfRange);
    File::options().write(true).open(bench.path()).unwrap().set_len(3 * MIB + 100).unwrap();
    assert_eq!(resize(&registry, "d", Size::Rescan).unwrap(), 3 * MIB);
    assert!(bench.read(2048, 8).iter().all(|&b| b == 0));
    let resized = [4096, 2048, 6144].map(|blocks| Event::Resized { blocks });
    assert_eq!(*events.lock().unwrap(), resized);
}
