//! The suite of all modules on crypto disks, and what crypto disks store.

mod stored;

use super::*;
use aryk_bdev::{Access, Registry, Status};
use aryk_bdev_conformance::{Bench, Features, Fixture, Shape, conformance};

const BLOCKS: Blocks = Blocks(8192);

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut word = seed | 1;
    let next = || {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (word >> 56) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn key(seed: u64) -> Arc<Key> {
    Arc::new(Key::new(&noise(seed, 64)).expect("it is a key"))
}

fn config(name: &str, base: &str, tweak_mode: TweakMode) -> Config {
    Config {
        identity: Identity::named(name),
        base: base.to_owned(),
        key: key(1),
        tweak_mode,
        passes_discards: false,
    }
}

fn malloc(env: &Env, name: &str, block_size: u32) {
    let config = aryk_bdev_malloc::Config {
        identity: Identity::named(name),
        block_size,
        physical_block_size: block_size,
        blocks: BLOCKS,
        optimal_io_blocks: Blocks::ZERO,
    };
    aryk_bdev_malloc::create(env, config).expect("it can be made");
}

struct Stack(Env);

impl Fixture for Stack {
    fn registry(&self) -> &Registry {
        self.0.registry()
    }

    fn features(&self) -> Features {
        Features { data: true, unmap_zeroes: false }
    }
}

impl Stack {
    fn new(block_size: u32) -> Self {
        let env = Env::default();
        malloc(&env, "base", block_size);
        Self(env)
    }

    /// Adds a crypto disk, on reactors whose pools have `pool_bytes` bytes.
    fn crypto(self, name: &str, base: &str, mode: TweakMode, pool_bytes: usize) -> Self {
        create_with_pool(&self.0, config(name, base, mode), pool_bytes).expect("it can be made");
        self
    }

    /// Makes all blocks of the disk read as zeroes, as the suite expects of a new disk.
    fn zeroed(self) -> Self {
        let mut bench = Bench::new();
        let mut disk = bench.open(self.registry(), "disk", Access::Exclusive, 1, 4096);
        disk.command(Op::WriteZeroes, 0, BLOCKS.0, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Ok);
        disk.close(&mut bench);
        self
    }
}

mod simple_lba {
    use super::*;
    conformance!(|| Stack::new(512).crypto("disk", "base", TweakMode::SimpleLba, POOL_BYTES).zeroed());
}

mod blocks_of_4096 {
    use super::*;
    const MODE: TweakMode = TweakMode::Plain64 { iv_offset: 8, sector_size: 4096, iv_large_sectors: false };
    conformance!(|| Stack::new(4096).crypto("disk", "base", MODE, POOL_BYTES).zeroed());
}

/// Requests are carried out one after the other in the channel's own buffer.
mod without_a_pool {
    use super::*;
    conformance!(|| Stack::new(512).crypto("disk", "base", TweakMode::JoinNegLbaWithLba, 0).zeroed());
}

/// The disks share a pool that has room for a few requests of either.
mod crypto_on_crypto {
    use super::*;
    conformance!(|| {
        let lower = Stack::new(512).crypto("lower", "base", TweakMode::Incr512UpperLba, 48 << 10);
        lower.crypto("disk", "lower", TweakMode::SimpleLba, 48 << 10).zeroed()
    });
}

#[test]
fn discards_are_refused_unless_they_are_passed_on() {
    for passes_discards in [false, true] {
        let stack = Stack::new(512);
        let config = Config { passes_discards, ..config("disk", "base", TweakMode::SimpleLba) };
        create(&stack.0, config).unwrap();
        let mut bench = Bench::new();
        let mut disk = bench.open(stack.registry(), "disk", Access::Exclusive, 1, 4096);
        let mut base = bench.open(stack.registry(), "base", Access::Read, 1, 4096);
        disk.write(0, &noise(3, 4096), Shape::Single, &mut bench);
        assert_eq!(disk.finish(&mut bench).status, Status::Ok);
        disk.command(Op::Unmap, 0, 8, &mut bench);
        let expected = if passes_discards { Status::Ok } else { Status::Unsupported };
        assert_eq!(disk.finish(&mut bench).status, expected);
        base.read(0, 8, Shape::Single, &mut bench);
        assert_eq!(base.finish(&mut bench).data == [0; 4096], passes_discards);
        base.close(&mut bench);
        disk.close(&mut bench);
    }
}

#[test]
fn zeroes_are_stored_encrypted() {
    let stack = Stack::new(512).crypto("disk", "base", TweakMode::SimpleLba, POOL_BYTES).zeroed();
    let mut bench = Bench::new();
    let mut base = bench.open(stack.registry(), "base", Access::Read, 1, 8192);
    base.read(100, 16, Shape::Single, &mut bench);
    let stored = base.finish(&mut bench).data;
    assert!(stored.chunks_exact(16).all(|block| block != [0; 16]));
    base.close(&mut bench);
}

#[test]
fn a_failed_read_changes_no_memory() {
    let stack = Stack::new(512);
    let error = aryk_bdev_error::Config { identity: Identity::named("error"), base: "base".to_owned() };
    aryk_bdev_error::create(&stack.0, error).unwrap();
    let stack = stack.crypto("disk", "error", TweakMode::SimpleLba, POOL_BYTES);
    let injection = aryk_bdev_error::Injection {
        fault: aryk_bdev_error::Fault::Failure,
        ops: OpSet::of(&[Op::Read]),
        count: 2,
        queue_depth: 0,
    };
    aryk_bdev_error::inject(stack.registry(), "error", injection).unwrap();
    let mut bench = Bench::new();
    let mut disk = bench.open(stack.registry(), "disk", Access::Read, 1, 4096);
    for shape in [Shape::Single, Shape::Odd] {
        disk.read(7, 2, shape, &mut bench);
        let outcome = disk.finish(&mut bench);
        assert_eq!((outcome.status, outcome.data), (Status::Medium, vec![0xdd; 1024]));
    }
    disk.read(7, 2, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    disk.close(&mut bench);
}

#[test]
fn tweak_modes_that_do_not_fit_the_disk_are_refused() {
    let stack = Stack::new(512);
    let create = |iv_offset, sector_size| {
        let mode = TweakMode::Plain64 { iv_offset, sector_size, iv_large_sectors: false };
        create(&stack.0, config("disk", "base", mode)).map(|_| ())
    };
    assert_eq!(create(0, 520), Err(TweakError::SectorSize(520).into()));
    assert_eq!(create(0, 8192), Err(TweakError::SectorSize(8192).into()));
    let larger = TweakError::LargerThanBlock { sector_size: 4096, block_size: 512 };
    assert_eq!(create(0, 4096), Err(larger.into()));
    let wraps = u64::MAX - (1 << 55) + 2;
    assert_eq!(create(wraps, 512), Err(TweakError::Offset(wraps).into()));
    assert_eq!(Layout::new(TweakMode::SimpleLba, 1 << 25).err(), Some(TweakError::BlockSize(1 << 25)));
    // A refused disk leaves its base free.
    assert_eq!(create(wraps - 1, 512), Ok(()));
}
