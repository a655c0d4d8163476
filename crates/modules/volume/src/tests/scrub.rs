//! The scrub of pools: passes over all shards, and what they find.

use super::*;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

/// Bytes of a stripe.
const STRIPE: u64 = 16 * MIB;
/// The time of the tests, in seconds since 1970.
const NOW: u64 = 1_800_000_000;
const DAY: u64 = 86_400;

/// A pool of two shards on two reactors, over a file, with a volume that has data in both shards. Returns what that is.
fn stack() -> (Stack, [Vec<u8>; 2]) {
    let dir = TempDir::new_in("/var/tmp").expect("a directory can be made");
    let path = dir.path().join("base");
    std::fs::File::create(&path).and_then(|file| file.set_len(512 * MIB)).expect("a file can be made");
    let stack = Stack { shards: 2, volume: Bytes(2 * STRIPE), ..Stack::on(512, 2) };
    stack.file("base", &path, Some(512));
    let mut stack = stack.pool().with_volume();
    stack._dir = Some(dir);
    let random = |seed| {
        let mut data = vec![0; 2 * MIB as usize];
        fastrand::Rng::with_seed(seed).fill(&mut data);
        data
    };
    let data = [0, 1].map(random);
    for (shard, data) in data.iter().enumerate() {
        stack.write(&disk(&stack), shard as u64 * STRIPE, data);
    }
    (stack, data)
}

fn disk(stack: &Stack) -> Arc<Bdev> {
    stack.env.registry().find("p/v").expect("it has a disk")
}

/// Flips a bit of the base, in the block with this data.
fn damage(stack: &Stack, data: &[u8]) {
    let path = stack._dir.as_ref().expect("the base is in it").path().join("base");
    let bytes = std::fs::read(&path).expect("it can be read");
    let place = bytes.chunks(512).position(|sector| *sector == data[..512]).expect("the data is there");
    let file = std::fs::File::options().write(true).open(&path).expect("it can be opened");
    file.write_all_at(&[data[100] ^ 1], place as u64 * 512 + 100).expect("it can be written");
}

/// Goes on with a pass until it ends; `f` is called after each piece of it. Returns how it ended.
fn run(pool: &Pool, now: u64, mut f: impl FnMut()) -> ScrubState {
    loop {
        block_on(pool.scrub(now));
        let state = pool.scrub_report().state;
        if !matches!(state, ScrubState::Running { .. }) {
            return state;
        }
        f();
    }
}

#[test]
fn damage_in_each_shard_is_found_while_shards_move() {
    let (stack, data) = stack();
    let pool = stack.the_pool();
    // Blocks 3 of the first stripe, and 5 of the second.
    let places = [(0, 3), (1, 5)];
    for (shard, block) in places {
        damage(&stack, &data[shard][block * 4096..]);
    }
    block_on(pool.set_scrub(ScrubSettings { bytes_per_second: 1 << 20, ..ScrubSettings::default() }))
        .expect("stored");
    assert_eq!(pool.scrub_report().state, ScrubState::None);
    pool.start_scrub().expect("none is under way");
    assert!(matches!(pool.start_scrub(), Err(Error::Busy(_))));
    let cores: Vec<u16> = stack.env.reactors().handles().into_iter().map(|reactor| reactor.core()).collect();
    let mut moves = 0;
    let state = run(&pool, NOW, || {
        if moves < 4 && cores.len() == 2 {
            let shard = moves % 2;
            let there = cores.iter().find(|core| **core != pool.cores()[shard]).expect("there are two");
            let to = stack.env.reactors().hold_for_arrival(*there).expect("the reactor stays");
            block_on(pool.prepare_move(shard, &to)).expect("it can be prepared");
            block_on(pool.move_shard(shard, to, Duration::from_secs(60))).expect("it moves");
            moves += 1;
        }
    });
    assert_eq!((state, moves), (ScrubState::Complete, if cores.len() == 2 { 4 } else { 0 }));
    let report = pool.scrub_report();
    let volume = pool.find("v").expect("it is there").id;
    let mut found: Vec<_> =
        report.damage.iter().map(|damage| (damage.volume, damage.block, damage.blocks)).collect();
    found.sort_unstable_by_key(|(_, block, _)| *block);
    assert_eq!(
        found,
        places.map(|(shard, block)| (Some(volume), shard as u64 * STRIPE / 4096 + block as u64, 1))
    );
    let stats = block_on(pool.stats()).expect("it is open");
    assert_eq!((stats.scrub_damaged_blocks, stats.damaged_blocks), (2, 2));
    assert!(stats.scrub_read_bytes >= 4 * MIB);
}

#[test]
fn passes_begin_by_themselves_and_the_pool_remembers_the_last_one() {
    let (stack, _) = stack();
    let pool = stack.the_pool();
    // Not at once after the opening.
    let wait = block_on(pool.scrub(NOW));
    assert_eq!((wait, pool.scrub_report().state), (Duration::from_secs(60), ScrubState::None));
    assert_eq!(run(&pool, NOW + 60, || ()), ScrubState::Complete);
    assert_eq!(pool.scrub_report().complete_since, Some(NOW + 60));
    // Nothing is to be done for two weeks but a look at the clock.
    assert_eq!(block_on(pool.scrub(NOW + 61)), Duration::from_secs(3600));
    let settings = ScrubSettings { days: 3, bytes_per_second: 64 << 20 };
    block_on(pool.set_scrub(settings)).expect("it is stored");
    assert_eq!(block_on(pool.scrub(NOW + 50 + 3 * DAY)), Duration::from_secs(10));
    for disk in pool.members().into_iter().filter_map(|member| member.disk) {
        block_on(stack.env.registry().remove(disk.name())).expect("it can be removed");
    }
    block_on(stack.pools.close(&pool));
    drop(pool);
    let pool = block_on(stack.pools.examine(&stack.env, "base", Settings::default(), |_| Vec::new()));
    let pool = pool.expect("it can be opened").expect("there is a pool");
    let report = pool.scrub_report();
    assert_eq!((report.settings, report.complete_since), (settings, Some(NOW + 60)));
    assert_eq!(report.state, ScrubState::None);
    assert_eq!(block_on(pool.scrub(NOW + 4 * DAY)), Duration::from_secs(60));
    assert_eq!(run(&pool, NOW + 5 * DAY, || ()), ScrubState::Complete);
    assert!(pool.scrub_report().damage.is_empty());
}

#[test]
fn a_pass_is_stopped_and_not_started_again_at_once() {
    let (stack, _) = stack();
    let pool = stack.the_pool();
    assert!(!pool.stop_scrub());
    pool.start_scrub().expect("none is under way");
    block_on(pool.scrub(NOW));
    assert!(matches!(pool.scrub_report().state, ScrubState::Running { entries, .. } if entries > 0));
    assert!(pool.stop_scrub());
    block_on(pool.scrub(NOW));
    assert_eq!(pool.scrub_report().state, ScrubState::Stopped);
    block_on(pool.scrub(NOW + DAY));
    assert_eq!((pool.scrub_report().state, pool.scrub_report().complete_since), (ScrubState::Stopped, None));
    // One that is stopped before it has begun.
    pool.start_scrub().expect("none is under way");
    assert!(pool.stop_scrub());
    assert_eq!(run(&pool, NOW, || ()), ScrubState::Stopped);
    assert_eq!(run(&pool, NOW + 15 * DAY, || ()), ScrubState::Complete);
}
