//! The suite of all modules on crypto disks, and what crypto disks store.

mod guest;
mod held;
mod rotation;
mod stored;
mod stuck;

use super::*;
use aryk_aes_xts::{SectorSize, Tweaks};
use aryk_bdev::{Access, Registry, Status};
use aryk_bdev_conformance::{Bench, Features, Fixture, Shape, conformance};

const BLOCKS: Blocks = Blocks(8192);

pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut word = seed | 1;
    let next = || {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (word >> 56) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

pub(crate) fn key(seed: u64) -> Arc<Key> {
    // [`noise`] is that of odd seeds.
    Arc::new(Key::new(&noise(2 * seed - 1, 64)).expect("it is a key"))
}

fn config(name: &str, base: &str, tweak_mode: TweakMode) -> Config {
    Config {
        identity: Identity::named(name),
        product: "crypto",
        base: base.to_owned(),
        area: Area::default(),
        key: key(1),
        tweak_mode,
        passes_discards: false,
    }
}

fn malloc(env: &Env, name: &str, block_size: u32) {
    malloc_of(env, name, block_size, BLOCKS);
}

fn malloc_of(env: &Env, name: &str, block_size: u32, blocks: Blocks) {
    let config = aryk_bdev_malloc::Config {
        identity: Identity::named(name),
        block_size,
        physical_block_size: block_size,
        blocks,
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

    /// Adds a crypto disk, on reactors whose pools have `pool_bytes`.
    fn crypto(self, name: &str, base: &str, mode: TweakMode, pool_bytes: PoolBytes) -> Self {
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

/// A block of the disk is eight of its base, from the eleventh on.
mod sectors_larger_than_blocks {
    use super::*;
    const MODE: TweakMode = TweakMode::Plain64 { iv_offset: 0, sector_size: 4096, iv_large_sectors: true };

    fn stack() -> Stack {
        let stack = Stack(Env::default());
        malloc_of(&stack.0, "base", 512, BLOCKS * 8 + Blocks(11));
        let area = Area { offset: Bytes(11 * 512), size: None };
        create(&stack.0, Config { area, ..config("disk", "base", MODE) }).unwrap();
        stack.zeroed()
    }

    conformance!(stack);
}

/// Requests are carried out one after the other in the channel's own buffer.
mod without_a_pool {
    use super::*;
    conformance!(|| Stack::new(512)
        .crypto("disk", "base", TweakMode::JoinNegLbaWithLba, PoolBytes::default())
        .zeroed());
}

/// The disks share a pool that has room for a few requests of either.
mod crypto_on_crypto {
    use super::*;
    const POOL: PoolBytes = PoolBytes { common: 48 << 10, reserve: 0 };
    conformance!(|| {
        let lower = Stack::new(512).crypto("lower", "base", TweakMode::Incr512UpperLba, POOL);
        lower.crypto("disk", "lower", TweakMode::SimpleLba, POOL).zeroed()
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
    assert_eq!(create(7, 4096), Err(TweakError::Offset(7).into()));
    let wraps = u64::MAX - (1 << 55) + 2;
    assert_eq!(create(wraps, 512), Err(TweakError::Offset(wraps).into()));
    assert_eq!(Layout::new(TweakMode::SimpleLba, 1 << 25).err(), Some(TweakError::BlockSize(1 << 25)));
    // A refused disk leaves its base free.
    assert_eq!(create(wraps - 1, 512), Ok(()));
}

#[test]
fn a_disk_has_the_part_of_its_base_that_it_encrypts() {
    let stack = Stack::new(512);
    let mode = |sector_size| TweakMode::Plain64 { iv_offset: 0, sector_size, iv_large_sectors: false };
    let create = |offset, size: Option<u64>, sector_size| {
        let area = Area { offset: Bytes(offset), size: size.map(Bytes) };
        create(&stack.0, Config { area, ..config("disk", "base", mode(sector_size)) })
    };
    let end = BLOCKS.0 * 512;
    let too_small = |offset, needed| AreaError::TooSmall {
        offset: Bytes(offset),
        needed: Bytes(needed),
        base: Bytes(end),
    };
    for (offset, size, sector_size, error) in [
        (100, None, 512, AreaError::Unaligned(Bytes(100), 512)),
        (512, Some(4096 + 512), 4096, AreaError::Unaligned(Bytes(4608), 4096)),
        (end, None, 512, too_small(end, 512)),
        (end - 2048, None, 4096, too_small(end - 2048, 4096)),
        (512, Some(end), 512, too_small(512, end)),
        (u64::MAX - 511, Some(512), 512, too_small(u64::MAX - 511, 512)),
    ] {
        assert_eq!(create(offset, size, sector_size).err(), Some(Error::Area(error)));
    }
    let geometry = create(1536, Some(8192), 4096).unwrap().geometry();
    assert_eq!((geometry.block_size, geometry.physical_block_size, geometry.blocks), (4096, 4096, Blocks(2)));
    let (mut bench, plain) = (Bench::new(), noise(9, 8192));
    let mut disk = bench.open(stack.registry(), "disk", Access::Exclusive, 1, 8192);
    let mut base = bench.open(stack.registry(), "base", Access::Read, 1, 10_240);
    disk.write(0, &plain, Shape::Single, &mut bench);
    assert_eq!(disk.finish(&mut bench).status, Status::Ok);
    base.read(2, 20, Shape::Single, &mut bench);
    let mut stored = base.finish(&mut bench).data;
    assert!(stored[..512] == [0; 512] && stored[8704..] == [0; 1536], "nothing is written beside the part");
    let (sector, tweaks) = (SectorSize::new(4096).unwrap(), Tweaks { start: 0, step: 8 });
    key(1).decrypt_in_place(sector, tweaks, &mut stored[512..8704]).unwrap();
    assert!(stored[512..8704] == plain);
    base.close(&mut bench);
    disk.close(&mut bench);
}
