//! Tests of disks on loop devices. Need root.

use super::harness::{Bench, MIB, disk_directory, pattern, resized};
use crate::{Config, Direct, Error, Size, create};
use aryk_bdev::{Blocks, Bytes, Env, Op, Registry, Status};
use aryk_bdev_conformance::{Features, Fixture, checks};
use aryk_reactor::Engine;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A loop device of 16 MiB, which is detached when this is dropped.
struct Loop {
    device: PathBuf,
    dir: tempfile::TempDir,
}

impl Loop {
    fn new(sector: &str) -> Option<Self> {
        let dir = disk_directory();
        let path = dir.path().join("backing");
        File::create(&path).unwrap().set_len(16 * MIB).unwrap();
        let made = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on", "--sector-size", sector])
            .arg(path)
            .output();
        match made {
            Ok(output) if output.status.success() => {
                Some(Self { device: String::from_utf8(output.stdout).unwrap().trim_end().into(), dir })
            }
            _ => {
                eprintln!("skipped: loop devices need root");
                None
            }
        }
    }

    fn config(&self) -> Config {
        Config::new("d", &self.device)
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        assert!(Command::new("losetup").arg("--detach").arg(&self.device).status().unwrap().success());
    }
}

struct OnLoop {
    env: Env,
    unmap_zeroes: bool,
    /// Dropped last.
    _device: Loop,
}

impl Fixture for OnLoop {
    fn registry(&self) -> &Registry {
        self.env.registry()
    }

    fn name(&self) -> &'static str {
        "d"
    }

    fn features(&self) -> Features {
        Features { data: true, unmap_zeroes: self.unmap_zeroes }
    }
}

fn conforms(sector: &str, block_size: Option<u32>) {
    if Loop::new(sector).is_none() {
        return;
    }
    let make = || {
        let device = Loop::new(sector).expect("loop devices are available");
        let env = Env::default();
        create(&env, Config { block_size, ..device.config() }).unwrap();
        OnLoop { env, unmap_zeroes: block_size.is_none(), _device: device }
    };
    checks::every_operation_at_every_alignment(&make);
    checks::removal_under_load(&make);
    checks::several_threads(&make);
}

#[test]
fn a_device_of_512_byte_sectors_conforms() {
    conforms("512", None);
}

#[test]
fn a_device_of_4k_sectors_conforms() {
    conforms("4096", None);
}

#[test]
fn a_disk_of_512_byte_blocks_on_4k_sectors_conforms() {
    conforms("4096", Some(512));
}

#[test]
fn a_device_reports_its_geometry_and_is_locked() {
    let Some(device) = Loop::new("4096") else { return };
    let bench = Bench::new(device.config(), None, Engine::IoUring);
    let geometry = bench.bdev().geometry();
    assert_eq!(
        (geometry.block_size, geometry.physical_block_size, geometry.blocks),
        (4096, 4096, Blocks(4096))
    );
    assert_eq!(bench.store().alignment.offset, 4096);
    let other = create(&Env::default(), device.config());
    assert!(matches!(other, Err(Error::Locked { holder: crate::Holder::Ourselves, .. })), "{other:?}");
    assert!(matches!(resized(bench.env.registry(), Size::GrowTo(Bytes(32 * MIB))), Err(Error::FixedSize(_))));
    drop(bench);
    let reader = || Config { read_only: true, ..device.config() };
    let (first, second) = (Env::default(), Env::default());
    create(&first, reader()).unwrap();
    create(&second, reader()).unwrap();
}

/// Bytes that the backing file occupies.
fn allocated(device: &Loop) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(device.dir.path().join("backing")).unwrap().blocks() * 512
}

#[test]
fn a_device_is_unmapped_and_zeroed() {
    let Some(device) = Loop::new("512") else { return };
    let mut bench = Bench::new(device.config(), None, Engine::IoUring);
    assert_eq!(bench.write(0, &pattern(MIB as usize, 1)), Status::Ok);
    let full = allocated(&device);
    assert!(full >= MIB);
    assert_eq!(bench.command(Op::Unmap, 0, 1024), Status::Ok);
    assert!(allocated(&device) <= full - MIB / 2);
    assert_eq!(bench.command(Op::WriteZeroes, 1024, 1000), Status::Ok);
    assert!(bench.read(1024, 1000).iter().all(|&b| b == 0));
    assert!(bench.read(2024, 24) == pattern(MIB as usize, 1)[2024 * 512..]);
}

/// The page cache accepts any range, but the device allocates whole sectors only.
#[test]
fn parts_of_a_sector_are_zeroed_by_writes_and_not_unmapped() {
    let Some(device) = Loop::new("4096") else { return };
    let config = Config { block_size: Some(512), direct: Direct::Never, ..device.config() };
    let mut bench = Bench::new(config, None, Engine::IoUring);
    let data = pattern(MIB as usize, 3);
    for (lba, blocks) in [(0, 8), (1, 1), (7, 2), (3, 30), (9, 1000), (2040, 8)] {
        assert_eq!(bench.write(0, &data), Status::Ok);
        assert_eq!(bench.command(Op::WriteZeroes, lba, blocks), Status::Ok, "{lba} {blocks}");
        let (start, end) = (lba as usize * 512, (lba + blocks) as usize * 512);
        let read = bench.read(0, 2048);
        assert!(read[start..end].iter().all(|&b| b == 0), "{lba} {blocks}");
        assert!(read[..start] == data[..start] && read[end..] == data[end..], "{lba} {blocks}");
        assert_eq!(bench.write(0, &data), Status::Ok);
        assert_eq!(bench.command(Op::Unmap, lba, blocks), Status::Ok);
        let (whole, last) = (start.next_multiple_of(4096), end / 4096 * 4096);
        let read = bench.read(0, 2048);
        assert!(read[..whole.min(end)] == data[..whole.min(end)] && read[end..] == data[end..]);
        assert!(whole >= last || read[whole..last].iter().all(|&b| b == 0), "{lba} {blocks}");
    }
}

#[test]
fn a_rescan_finds_the_new_size_of_a_device() {
    let Some(device) = Loop::new("512") else { return };
    let env = Env::default();
    create(&env, device.config()).unwrap();
    File::options().write(true).open(device.dir.path().join("backing")).unwrap().set_len(24 * MIB).unwrap();
    let changed = |path: &Path| Command::new("losetup").arg("--set-capacity").arg(path).status().unwrap();
    assert!(changed(&device.device).success());
    assert_eq!(resized(env.registry(), Size::Rescan).unwrap(), Bytes(24 * MIB));
    let mut bench = Bench::on(&env, Engine::IoUring);
    assert_eq!(bench.write(24 * 2048 - 8, &pattern(4096, 9)), Status::Ok);
}
