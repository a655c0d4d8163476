//! The behaviour of a disk's parts beyond that of every disk.

use aryk_bdev::{Access, Bdev, Blocks, Bytes, Env, Error, Event, Identity, Op, Status};
use aryk_bdev_conformance::{Bench, Shape, contents};
use aryk_bdev_split::{Config, Error as SplitError};
use std::sync::Arc;

const BLOCK: u32 = 512;

fn null(env: &Env, name: &str, blocks: u64) {
    let identity = Identity::named(name);
    let config = aryk_bdev_null::Config {
        identity,
        block_size: BLOCK,
        physical_block_size: BLOCK,
        blocks: Blocks(blocks),
    };
    aryk_bdev_null::create(env, config).expect("it can be made");
}

fn malloc(env: &Env, blocks: u64) {
    let config = aryk_bdev_malloc::Config {
        identity: Identity::named("base"),
        block_size: BLOCK,
        physical_block_size: BLOCK,
        blocks: Blocks(blocks),
        optimal_io_blocks: Blocks::ZERO,
    };
    aryk_bdev_malloc::create(env, config).expect("it can be made");
}

fn cut(env: &Env, bench: &mut Bench, count: u32, bytes: Option<u64>) -> Result<Vec<Arc<Bdev>>, SplitError> {
    let config = Config { base: "base".to_owned(), count, bytes: bytes.map(Bytes) };
    bench.wait("the parts", aryk_bdev_split::create(env, config))
}

fn names(parts: &[Arc<Bdev>]) -> Vec<&str> {
    parts.iter().map(|p| p.name()).collect()
}

#[test]
fn parts_are_as_large_and_as_many_as_told_or_as_there_is_room_for() {
    let mut bench = Bench::new();
    for (count, bytes, expected) in [
        (3, None, Some((3, 333))),
        (1000, None, Some((1000, 1))),
        (1001, None, None),
        (0, None, None),
        (2, Some(100 * 512), Some((2, 100))),
        (20, Some(100 * 512), Some((10, 100))),
        (2, Some(1001 * 512), None),
        (2, Some(100), None),
        (2, Some(0), None),
    ] {
        let env = Env::default();
        null(&env, "base", 1000);
        match (cut(&env, &mut bench, count, bytes), expected) {
            (Ok(parts), Some((count, blocks))) => {
                assert_eq!((parts.len(), parts[0].blocks().0), (count, blocks));
                assert!(parts.iter().all(|p| p.blocks() == Blocks(blocks)));
            }
            (Err(SplitError::Size { .. }), None) => {
                assert!(env.registry().open("base", Access::Exclusive, "me", |_| ()).is_ok());
            }
            (other, _) => panic!("{count} of {bytes:?}: {other:?}"),
        }
    }
}

#[test]
fn a_part_ends_where_the_next_begins() {
    let env = Env::default();
    malloc(&env, 300);
    let mut bench = Bench::new();
    let parts = cut(&env, &mut bench, 3, None).unwrap();
    assert_eq!(names(&parts), ["basep0", "basep1", "basep2"]);
    let offset = |name: &str| {
        aryk_bdev_split::offset_in(&env.registry().find(name).unwrap(), &env.registry().find("base").unwrap())
    };
    assert_eq!(
        [offset("basep0"), offset("basep2"), offset("base")],
        [Some(Blocks(0)), Some(Blocks(200)), None]
    );
    let refused = env.registry().open("base", Access::Shared, "me", |_| ());
    assert!(matches!(refused, Err(Error::Claimed { owner, .. }) if owner == "the parts of base"));
    let mut base = bench.open(env.registry(), "base", Access::Read, 4, 300 * BLOCK);
    for (i, part) in parts.iter().enumerate() {
        let mut part = bench.open(env.registry(), part.name(), Access::Exclusive, 4, 100 * BLOCK);
        part.write(0, &contents(i as u64 + 1, 0, 100, BLOCK), Shape::Odd, &mut bench);
        assert_eq!(part.finish(&mut bench).status, Status::Ok);
        for (op, lba, blocks) in [(Op::Unmap, 99, 2), (Op::WriteZeroes, 100, 1), (Op::WriteZeroes, 0, 101)] {
            part.command(op, lba, blocks, &mut bench);
            assert_eq!(part.finish(&mut bench).status, Status::OutOfRange);
        }
        part.copy(98, 99, 2, &mut bench);
        assert_eq!(part.finish(&mut bench).status, Status::OutOfRange);
        part.close(&mut bench);
    }
    base.read(0, 300, Shape::Single, &mut bench);
    let all = [1, 2, 3].map(|seed| contents(seed, 0, 100, BLOCK)).concat();
    assert_eq!(base.finish(&mut bench).data, all);
    base.close(&mut bench);
}

#[test]
fn the_disk_is_free_again_when_the_last_part_has_gone() {
    let env = Env::default();
    null(&env, "base", 300);
    let mut bench = Bench::new();
    cut(&env, &mut bench, 2, None).unwrap();
    assert!(matches!(cut(&env, &mut bench, 2, None), Err(SplitError::Registry(Error::Claimed { .. }))));
    bench.wait("a removal", env.registry().remove("basep0")).unwrap();
    assert!(env.registry().open("base", Access::Exclusive, "me", |_| ()).is_err());
    let left = aryk_bdev_split::parts(env.registry(), &env.registry().find("base").unwrap());
    assert_eq!(names(&left), ["basep1"]);
    bench.wait("a removal", env.registry().remove("basep1")).unwrap();
    assert!(env.registry().open("base", Access::Exclusive, "me", |_| ()).is_ok());
    // With a name that is taken, no part is created, and the disk has no opener.
    null(&env, "basep1", 1);
    assert!(matches!(cut(&env, &mut bench, 3, None), Err(SplitError::Registry(Error::Exists(_)))));
    assert!(env.registry().find("basep0").is_err());
    assert!(env.registry().open("base", Access::Exclusive, "me", |_| ()).is_ok());
    bench.wait("a removal", env.registry().remove("basep1")).unwrap();
    // Removing the disk removes its parts.
    let uuids = |parts: Vec<Arc<Bdev>>| parts.iter().map(|p| p.identity().uuid).collect::<Vec<_>>();
    let first = uuids(cut(&env, &mut bench, 3, None).unwrap());
    for name in ["basep0", "basep1", "basep2"] {
        bench.wait("a removal", env.registry().remove(name)).unwrap();
    }
    assert_eq!(uuids(cut(&env, &mut bench, 3, None).unwrap()), first, "UUIDs stay");
    bench.wait("a removal", env.registry().remove("base")).unwrap();
    assert_eq!(env.registry().list().len(), 0);
}

#[test]
fn parts_shrink_with_the_disk_and_grow_back_but_no_further() {
    let env = Env::default();
    null(&env, "base", 300);
    let mut bench = Bench::new();
    let parts = cut(&env, &mut bench, 3, None).unwrap();
    let disk = bench.open(env.registry(), "basep1", Access::Exclusive, 1, BLOCK);
    let blocks = || parts.iter().map(|p| p.blocks().0).collect::<Vec<_>>();
    for (size, expected) in [(150, [100, 50, 0]), (250, [100, 100, 50]), (999, [100, 100, 100])] {
        aryk_bdev_null::resize(env.registry(), "base", Blocks(size)).unwrap();
        assert_eq!(blocks(), expected);
    }
    assert_eq!(
        disk.events(),
        [Event::Resized { blocks: Blocks(50) }, Event::Resized { blocks: Blocks(100) }]
    );
    disk.close(&mut bench);
}
