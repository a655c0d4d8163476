//! Rotations under load on several reactors, with errors, and after a crash.

use super::*;
use crate::rekey::{self, CheckValue, Error as RekeyError, Journal, Rekey, State, check_value};
use aryk_bdev::{AsyncChannel, Descriptor, Lba};
use aryk_bdev_conformance::{block_on, contents};
use aryk_dma::Buffer;
use aryk_reactor::{CoreSet, Options, Reactors};
use futures_channel::oneshot;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

const SIZE: u32 = 512;
/// The uuid of "error".
const BASE: [u8; 16] = [7; 16];
/// Some zones of 2048 blocks, and a part of one.
const DISK: Blocks = Blocks(8 * 2048 + 100);
const MODES: [TweakMode; 3] = [TweakMode::SimpleLba, TweakMode::Incr512FullLba, TweakMode::JoinNegLbaWithLba];

fn check(seed: u64) -> CheckValue {
    check_value(&key(seed), MODES[seed as usize % 3], SIZE).unwrap()
}

/// A disk "disk" with the key 1 on "error" on "base", and reactors on two cores or more.
struct Rig {
    env: Env,
    dir: TempDir,
    reactors: Reactors,
}

impl Rig {
    fn new() -> Self {
        let options = Options { cores: CoreSet::allowed(), ..Options::default() };
        let reactors = Reactors::start(&options).unwrap();
        let env = Env::new(Registry::new().into(), &reactors);
        let base = aryk_bdev_malloc::Config {
            identity: Identity::named("base"),
            block_size: SIZE,
            physical_block_size: SIZE,
            blocks: DISK,
            optimal_io_blocks: Blocks::ZERO,
        };
        aryk_bdev_malloc::create(&env, base).unwrap();
        let uuid = "07070707-0707-0707-0707-070707070707".parse().unwrap();
        let identity = Identity { uuid, ..Identity::named("error") };
        let error = aryk_bdev_error::Config { identity, base: "base".to_owned() };
        aryk_bdev_error::create(&env, error).unwrap();
        Self { env, dir: TempDir::new().unwrap(), reactors }
    }

    fn config(seed: u64) -> Config {
        Config { key: key(seed), ..config("disk", "error", MODES[seed as usize % 3]) }
    }

    fn create(&self, seed: u64) -> Arc<Bdev> {
        create(&self.env, Self::config(seed)).unwrap()
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("journal")
    }

    fn rekey(journal: Journal, to: u64) -> rekey::Config {
        rekey::Config { key: key(to), tweak_mode: MODES[to as usize % 3], journal, bytes_per_second: 0 }
    }

    fn begin(&self, bdev: &Arc<Bdev>, from: u64, to: u64) -> Rekey {
        let journal = Journal::create(&self.path(), SIZE, BASE, [check(from), check(to)]).unwrap();
        Rekey::begin(bdev, Self::rekey(journal, to)).unwrap()
    }

    /// Creates the disk again, which was removed during the rotation from key 1 to key 2.
    fn create_rotating(&self, is_stopped: bool) -> Result<Arc<Bdev>, RekeyError> {
        let journal = Journal::open(&self.path()).expect("the journal is whole");
        create_rotating(&self.env, Self::config(1), Self::rekey(journal, 2), is_stopped)
    }

    /// Makes so many requests of the base fail. The base may get several for a zone.
    fn inject(&self, op: Op, count: u32) {
        self.inject_fault(aryk_bdev_error::Fault::Failure, op, count);
    }

    /// Waits until the rotation has failed because no attempt to write a zone has succeeded, and mends the base.
    fn fail_writes(&self, rekey: &Rekey) -> String {
        self.inject(Op::Write, u32::MAX);
        rekey.run(&self.env, 0).unwrap();
        let State::Failed(why) = block_on(rekey.ended()) else { panic!("a write has failed") };
        self.inject(Op::Write, 0);
        why
    }

    fn inject_fault(&self, fault: aryk_bdev_error::Fault, op: Op, count: u32) {
        let injection = aryk_bdev_error::Injection { fault, ops: OpSet::of(&[op]), count, queue_depth: 0 };
        aryk_bdev_error::inject(self.env.registry(), "error", injection).unwrap();
    }

    /// Runs a job with a channel of a disk, on the reactor of this number.
    fn start<R: Send + 'static>(
        &self,
        disk: &str,
        reactor: usize,
        job: impl AsyncFnOnce(&AsyncChannel) -> R + Send + 'static,
    ) -> oneshot::Receiver<R> {
        let access = if disk == "base" { Access::Read } else { Access::Shared };
        let descriptor: Descriptor = self.env.registry().open(disk, access, "job", |_| ()).unwrap();
        let handle = self.reactors.handles()[reactor % self.reactors.handles().len()].clone();
        block_on(descriptor.prepare(&handle)).unwrap();
        let (ended, wait) = oneshot::channel();
        let on_reactor = move |cx: &mut Cx| {
            let thread = cx.add_thread("job", CoreSet::allowed());
            let channel = AsyncChannel::open(&descriptor, thread, cx).unwrap();
            let task = async move {
                let result = job(&channel).await;
                drop(descriptor);
                channel.close().await;
                let _ = ended.send(result);
            };
            cx.local().spawn(task).detach();
        };
        block_on(handle.call(on_reactor)).unwrap();
        wait
    }

    fn run<R: Send + 'static>(
        &self,
        disk: &str,
        job: impl AsyncFnOnce(&AsyncChannel) -> R + Send + 'static,
    ) -> R {
        block_on(self.start(disk, 0, job)).expect("the job ends")
    }

    fn fill(&self) {
        self.run("disk", async |channel: &AsyncChannel| {
            let data = Buffer::from_slice(&contents(5, 0, DISK.0, SIZE));
            channel.write(Lba::ZERO, DISK, data).await.unwrap();
        });
    }

    fn read(&self, disk: &str, lba: u64, blocks: u64) -> Result<Vec<u8>, Status> {
        self.read_blocks(disk, lba, blocks, SIZE)
    }

    fn read_blocks(&self, disk: &str, lba: u64, blocks: u64, size: u32) -> Result<Vec<u8>, Status> {
        self.run(disk, async move |channel: &AsyncChannel| {
            let buffer = Buffer::new(blocks as usize * size as usize, 4096);
            let read = channel.read(Lba(lba), Blocks(blocks), buffer).await;
            read.map(|buffer| buffer.bytes().to_vec())
        })
    }

    fn expect_filled(&self) {
        assert!(self.read("disk", 0, DISK.0).unwrap() == contents(5, 0, DISK.0, SIZE));
    }

    /// The blocks that the base has, from `lba` on, have the key `seed`.
    fn expect_key(&self, seed: u64, lba: u64, blocks: u64, plain: &[u8]) {
        let mut stored = self.read("base", lba, blocks).unwrap();
        let layout = Layout::new(MODES[seed as usize % 3], SIZE).unwrap();
        key(seed).decrypt_in_place(layout.sector, layout.tweaks(Lba(lba)), &mut stored).unwrap();
        assert!(stored == plain, "blocks from {lba} on do not have the key {seed}");
    }

    fn remove_disk(&self) {
        block_on(self.env.registry().remove("disk")).unwrap();
    }
}

/// Writes and reads random blocks of a part of the disk until it is told to stop, and returns what the blocks have.
async fn load(channel: &AsyncChannel, part: std::ops::Range<u64>, seed: u64, ends: &AtomicBool) -> Vec<u64> {
    let mut has = vec![5; (part.end - part.start) as usize];
    let mut random = seed;
    let mut below = |limit: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % limit
    };
    let data_of = |has: &[u64], from: usize, blocks: usize| -> Vec<u8> {
        let each = has[from..from + blocks].iter().zip(part.start + from as u64..);
        each.flat_map(|(&seed, lba)| contents(seed, lba, 1, SIZE)).collect()
    };
    let mut round = 0;
    while !ends.load(Ordering::Relaxed) || round < 50 {
        round += 1;
        let blocks = 1 + below(64);
        let from = below(has.len() as u64 - blocks) as usize;
        let (lba, count) = (Lba(part.start + from as u64), Blocks(blocks));
        let before = data_of(&has, from, blocks as usize);
        let seed = seed << 32 | round;
        let new = contents(seed, lba.0, blocks, SIZE);
        match below(4) {
            0 => {
                let buffer = Buffer::new(before.len(), 4096);
                let read = channel.read(lba, count, buffer).await.unwrap();
                assert!(read.bytes() == before, "{blocks} blocks from {lba:?} on");
                continue;
            }
            1 => {
                channel.compare(lba, count, Buffer::from_slice(&before)).await.unwrap();
                continue;
            }
            2 => {
                let both = [before, new].concat();
                channel.compare_and_write(lba, count, Buffer::from_slice(&both)).await.unwrap();
            }
            _ => drop(channel.write(lba, count, Buffer::from_slice(&new)).await.unwrap()),
        }
        has[from..from + blocks as usize].fill(seed);
    }
    has
}

#[test]
fn a_disk_under_load_gets_one_key_after_the_other() {
    const WORKERS: u64 = 4;
    let rig = Rig::new();
    let bdev = rig.create(1);
    rig.fill();
    let ends = Arc::new(AtomicBool::new(false));
    let part = |worker: u64| worker * DISK.0 / WORKERS..(worker + 1) * DISK.0 / WORKERS;
    let start = |worker: u64| {
        let ends = Arc::clone(&ends);
        let job = async move |channel: &AsyncChannel| load(channel, part(worker), worker + 1, &ends).await;
        rig.start("disk", worker as usize, job)
    };
    let loads: Vec<_> = (0..WORKERS).map(start).collect();
    for (from, to) in [(1, 2), (2, 3), (3, 1), (1, 2), (2, 1), (1, 3)] {
        let rekey = rig.begin(&bdev, from, to);
        assert_eq!(rekey.progress().state, State::Stopped);
        rekey.run(&rig.env, 0).unwrap();
        assert_eq!(block_on(rekey.ended()), State::Complete);
        assert_eq!(rekey.progress().done, DISK);
        assert!(Journal::open(&rig.path()).unwrap().is_complete());
        block_on(rekey.conclude(&bdev));
        assert!(Rekey::of(&bdev).is_none());
        rekey::remove_journal(&rig.path()).unwrap();
    }
    ends.store(true, Ordering::Relaxed);
    for (load, worker) in loads.into_iter().zip(0..) {
        let (has, part) = (block_on(load).unwrap(), part(worker));
        let each = has.iter().zip(part.clone());
        let plain: Vec<u8> = each.flat_map(|(&seed, lba)| contents(seed, lba, 1, SIZE)).collect();
        assert!(rig.read("disk", part.start, part.end - part.start).unwrap() == plain);
        rig.expect_key(3, part.start, part.end - part.start, &plain);
    }
    rig.remove_disk();
}

#[test]
fn a_rotation_stops_and_goes_on_with_a_limit() {
    let rig = Rig::new();
    let bdev = rig.create(1);
    rig.fill();
    let rekey = rig.begin(&bdev, 1, 2);
    // The first zone is done at once, the second one an hour later.
    rekey.run(&rig.env, (1 << 20) / 3600).unwrap();
    while rekey.progress().done == Blocks::ZERO {
        std::thread::yield_now();
    }
    block_on(rekey.stop());
    let progress = rekey.progress();
    assert_eq!((progress.state, progress.done.0, progress.blocks), (State::Stopped, 2048, DISK));
    rig.expect_filled();
    rig.expect_key(2, 0, 2048, &contents(5, 0, 2048, SIZE));
    rig.expect_key(1, 2048, 2048, &contents(5, 2048, 2048, SIZE));
    assert!(matches!(
        Rekey::begin(&bdev, Rig::rekey(Journal::open(&rig.path()).unwrap(), 2)),
        Err(RekeyError::UnderWay)
    ));
    // A disk that was stopped stays so when it is created again.
    drop((rekey, bdev));
    rig.remove_disk();
    let bdev = rig.create_rotating(true).unwrap();
    let rekey = Rekey::of(&bdev).unwrap();
    assert_eq!(block_on(rekey.ended()), State::Stopped);
    rig.expect_filled();
    rekey.run(&rig.env, 0).unwrap();
    assert_eq!(block_on(rekey.ended()), State::Complete);
    // Before the end is recorded elsewhere, the journal is enough.
    drop((rekey, bdev));
    rig.remove_disk();
    let bdev = rig.create_rotating(false).unwrap();
    let rekey = Rekey::of(&bdev).unwrap();
    assert_eq!(rekey.progress().state, State::Complete);
    rig.expect_filled();
    block_on(rekey.conclude(&bdev));
    rig.expect_filled();
}

#[test]
fn an_error_of_the_base_stops_the_rotation_and_the_disk_goes_on() {
    let rig = Rig::new();
    let bdev = rig.create(1);
    rig.fill();
    let rekey = rig.begin(&bdev, 1, 2);
    rekey.run(&rig.env, (1 << 20) / 3600).unwrap();
    while rekey.progress().done == Blocks::ZERO {
        std::thread::yield_now();
    }
    block_on(rekey.stop());
    // A read fails: the zone still has the old key.
    rig.inject(Op::Read, 1);
    rekey.run(&rig.env, 0).unwrap();
    let State::Failed(why) = block_on(rekey.ended()) else { panic!("a read has failed") };
    assert_eq!(why, "cannot read 2048 blocks from LBA 2048 on of 'error': Medium");
    assert_eq!(rekey.progress().unavailable, None);
    rig.expect_filled();
    // A write fails: nothing is known about the zone, and only requests for it fail.
    let why = rig.fail_writes(&rekey);
    assert_eq!(why, "cannot write 2048 blocks from LBA 2048 on of 'error': Medium");
    let progress = rekey.progress();
    assert_eq!((progress.done, progress.unavailable), (Blocks(2048), Some(Lba(2048)..Lba(4096))));
    for (lba, blocks) in [(2048, 1), (4095, 1), (2047, 2), (4095, 2)] {
        assert_eq!(rig.read("disk", lba, blocks), Err(Status::Medium));
    }
    for (lba, blocks) in [(0, 2048), (4096, DISK.0 - 4096)] {
        assert!(rig.read("disk", lba, blocks).unwrap() == contents(5, lba, blocks, SIZE));
    }
    rekey.run(&rig.env, 0).unwrap();
    assert_eq!(block_on(rekey.ended()), State::Complete);
    rig.expect_filled();
    rig.expect_key(2, 0, DISK.0, &contents(5, 0, DISK.0, SIZE));
}

#[test]
fn a_zone_that_is_partly_written_is_written_again_before_the_disk_is_served() {
    for written in [0, 1, 1000, 2048] {
        let rig = Rig::new();
        let bdev = rig.create(1);
        rig.fill();
        let rekey = rig.begin(&bdev, 1, 2);
        rig.fail_writes(&rekey);
        drop((rekey, bdev));
        rig.remove_disk();
        // A part of the zone is neither old nor new.
        if written > 0 {
            rig.run("error", async move |channel: &AsyncChannel| {
                let torn = Buffer::from_slice(&noise(written, written as usize * SIZE as usize));
                channel.write(Lba::ZERO, Blocks(written), torn).await.unwrap();
            });
        }
        let bdev = rig.create_rotating(true).unwrap();
        // The first request waits until the zone is whole.
        rig.expect_filled();
        let progress = Rekey::of(&bdev).unwrap().progress();
        assert_eq!((progress.done, progress.unavailable), (Blocks(2048), None));
        rig.expect_key(2, 0, 2048, &contents(5, 0, 2048, SIZE));
        rig.expect_key(1, 2048, 2048, &contents(5, 2048, 2048, SIZE));
    }
}

#[test]
fn a_zone_that_cannot_be_written_again_is_unavailable_and_the_rest_is_served() {
    let rig = Rig::new();
    let bdev = rig.create(1);
    rig.fill();
    let rekey = rig.begin(&bdev, 1, 2);
    rig.fail_writes(&rekey);
    drop((rekey, bdev));
    rig.remove_disk();
    rig.inject(Op::Write, u32::MAX);
    let bdev = rig.create_rotating(false).unwrap();
    assert_eq!(rig.read("disk", 0, 8), Err(Status::Medium));
    assert!(rig.read("disk", 2048, 8).unwrap() == contents(5, 2048, 8, SIZE));
    let rekey = Rekey::of(&bdev).unwrap();
    assert!(matches!(block_on(rekey.ended()), State::Failed(_)));
    rig.inject(Op::Write, 0);
    rekey.run(&rig.env, 0).unwrap();
    assert_eq!(block_on(rekey.ended()), State::Complete);
    rig.expect_filled();
}

#[test]
fn a_journal_of_other_keys_or_disks_is_refused() {
    let rig = Rig::new();
    let bdev = rig.create(1);
    let refuse = |block_size, from, to| {
        let journal = Journal::create(&rig.path(), block_size, BASE, [from, to]).unwrap();
        let refused = Rekey::begin(&bdev, Rig::rekey(journal, 2));
        rekey::remove_journal(&rig.path()).unwrap();
        assert!(matches!(refused, Err(RekeyError::OtherKeys(_))), "{refused:?}");
    };
    refuse(SIZE, check(3), check(2));
    refuse(SIZE, check(1), check(3));
    refuse(4096, check(1), check(2));
    let journal = Journal::create(&rig.path(), SIZE, [8; 16], [check(1), check(2)]).unwrap();
    let refused = Rekey::begin(&bdev, Rig::rekey(journal, 2));
    rekey::remove_journal(&rig.path()).unwrap();
    assert!(matches!(refused, Err(RekeyError::OtherDisk(_))), "{refused:?}");
    assert!(Rekey::of(&bdev).is_none());
    let base = rig.env.registry().open("base", Access::Read, "test", |_| ()).unwrap();
    let journal = Journal::create(&rig.path(), SIZE, BASE, [check(1), check(2)]).unwrap();
    let refused = Rekey::begin(base.bdev(), Rig::rekey(journal, 2));
    assert!(matches!(refused, Err(RekeyError::OtherModule)));
    // The same key in another mode is not a new one.
    let path = rig.dir.path().join("of the same key");
    let new = check_value(&key(1), MODES[2], SIZE).unwrap();
    let journal = Journal::create(&path, SIZE, BASE, [check(1), new]).unwrap();
    let same = rekey::Config { key: key(1), ..Rig::rekey(journal, 2) };
    let refused = Rekey::begin(&bdev, same);
    assert!(matches!(refused, Err(RekeyError::Tweak(TweakError::SameKey))), "{refused:?}");
    drop((base, bdev));
    rig.remove_disk();
    let journal = Journal::open(&rig.path()).unwrap();
    let refused = create_rotating(&rig.env, Rig::config(3), Rig::rekey(journal, 2), false);
    assert!(matches!(refused, Err(RekeyError::OtherKeys(_))));
    // The refused disk has left its base free.
    rig.create(1);
}

#[test]
fn a_part_of_the_base_in_larger_blocks_gets_another_key() {
    const BLOCK: u32 = 4096;
    let (offset, blocks) = (24, 600);
    let rig = Rig::new();
    let mode = TweakMode::Plain64 { iv_offset: 0, sector_size: BLOCK, iv_large_sectors: true };
    let size = Some(Bytes(blocks * u64::from(BLOCK)));
    let area = Area { offset: Bytes(offset * u64::from(SIZE)), size };
    let bdev = create(&rig.env, Config { tweak_mode: mode, area, ..Rig::config(1) }).unwrap();
    assert_eq!(bdev.geometry().blocks, Blocks(blocks));
    let whole = contents(3, 0, blocks, BLOCK);
    let data = Buffer::from_slice(&whole);
    rig.run("disk", async move |channel: &AsyncChannel| {
        drop(channel.write(Lba::ZERO, Blocks(blocks), data).await)
    });
    let end = offset + blocks * u64::from(BLOCK / SIZE);
    let around = || [rig.read("base", 0, offset).unwrap(), rig.read("base", end, DISK.0 - end).unwrap()];
    let before = around();
    let check = |seed| check_value(&key(seed), mode, BLOCK).unwrap();
    let journal = Journal::create(&rig.path(), BLOCK, BASE, [check(1), check(2)]).unwrap();
    // A mode in which the disk would have smaller blocks is refused, whatever the journal says.
    for tweak_mode in [TweakMode::SimpleLba, TweakMode::Incr512FullLba] {
        let path = rig.dir.path().join("of other blocks");
        let new = check_value(&key(2), tweak_mode, BLOCK).unwrap();
        let journal = Journal::create(&path, BLOCK, BASE, [check(1), new]).unwrap();
        let refused = Rekey::begin(&bdev, rekey::Config { tweak_mode, ..Rig::rekey(journal, 2) });
        assert!(
            matches!(refused, Err(RekeyError::Tweak(TweakError::OtherBlocks(SIZE, BLOCK)))),
            "{refused:?}"
        );
        rekey::remove_journal(&path).unwrap();
    }
    let other_blocks = TweakMode::Plain64 { iv_offset: 0, sector_size: 512, iv_large_sectors: true };
    for (tweak_mode, is_done) in [(other_blocks, false), (mode, true)] {
        let journal = Journal::open(journal.path()).unwrap();
        let config = rekey::Config { tweak_mode, ..Rig::rekey(journal, 2) };
        let Ok(rekey) = Rekey::begin(&bdev, config) else {
            assert!(!is_done);
            continue;
        };
        rekey.run(&rig.env, 0).unwrap();
        assert_eq!((block_on(rekey.ended()), is_done), (State::Complete, true));
        block_on(rekey.conclude(&bdev));
    }
    assert!(rig.read_blocks("disk", 0, blocks, BLOCK).unwrap() == whole);
    let mut stored = rig.read("base", offset, end - offset).unwrap();
    let layout = Layout::new(mode, SIZE).unwrap();
    key(2).decrypt_in_place(layout.sector, layout.tweaks(Lba::ZERO), &mut stored).unwrap();
    assert!(stored == whole && around() == before);
}

#[test]
fn a_zone_is_written_again_while_the_base_recovers() {
    let rig = Rig::new();
    let bdev = rig.create(1);
    rig.fill();
    rig.inject(Op::Write, 3);
    rig.inject(Op::Flush, 2);
    let rekey = rig.begin(&bdev, 1, 2);
    rekey.run(&rig.env, 0).unwrap();
    assert_eq!(block_on(rekey.ended()), State::Complete);
    rig.expect_filled();
    rig.expect_key(2, 0, DISK.0, &contents(5, 0, DISK.0, SIZE));
}

#[test]
fn a_zone_of_which_the_disk_has_lost_a_part_is_written_as_far_as_it_goes() {
    // The second zone is in the journal; the disk keeps a part of it, or nothing.
    for left in [2048 + 1000, 1000] {
        let rig = Rig::new();
        let bdev = rig.create(1);
        rig.fill();
        let rekey = rig.begin(&bdev, 1, 2);
        rekey.run(&rig.env, (1 << 20) / 3600).unwrap();
        while rekey.progress().done == Blocks::ZERO {
            std::thread::yield_now();
        }
        block_on(rekey.stop());
        rig.fail_writes(&rekey);
        rig.env.registry().resized("base", Blocks(left)).unwrap();
        assert_eq!(bdev.blocks(), Blocks(left));
        rekey.run(&rig.env, 0).unwrap();
        assert_eq!(block_on(rekey.ended()), State::Complete);
        rig.expect_key(2, 0, left, &contents(5, 0, left, SIZE));
    }
}

#[test]
fn a_removal_aborts_the_write_that_the_base_holds_and_nothing_starts_after_it() {
    let rig = Rig::new();
    let bdev = rig.create(1);
    rig.fill();
    rig.inject_fault(aryk_bdev_error::Fault::Pending, Op::Write, 1);
    let rekey = rig.begin(&bdev, 1, 2);
    rekey.run(&rig.env, 0).unwrap();
    // The journal gets the zone: a header of 512 bytes, whose length of the zone is at 32.
    while std::fs::read(rig.path()).unwrap()[32..40] == [0; 8] {
        std::thread::yield_now();
    }
    let registry = rig.env.registry().clone();
    let (removed, wait) = std::sync::mpsc::channel();
    std::thread::spawn(move || removed.send(block_on(registry.remove("disk"))));
    wait.recv_timeout(std::time::Duration::from_secs(20)).expect("the removal ends").unwrap();
    assert!(matches!(block_on(rekey.ended()), State::Failed(_)));
    let is_removed = |error| matches!(error, RekeyError::Create(Error::Registry(aryk_bdev::Error::Busy(_))));
    assert!(is_removed(rekey.run(&rig.env, 0).unwrap_err()));
    let bdev = rig.create_rotating(false).unwrap();
    assert_eq!(block_on(Rekey::of(&bdev).unwrap().ended()), State::Complete);
    rig.expect_filled();
    block_on(Rekey::of(&bdev).unwrap().conclude(&bdev));
    // A rotation cannot begin on a disk that was removed either.
    rig.remove_disk();
    rekey::remove_journal(&rig.path()).unwrap();
    let journal = Journal::create(&rig.path(), SIZE, BASE, [check(2), check(3)]).unwrap();
    assert!(is_removed(Rekey::begin(&bdev, Rig::rekey(journal, 3)).unwrap_err()));
}

#[test]
fn a_disk_that_cannot_be_rotated_for_want_of_reactors_is_not_created() {
    let rig = Rig::new();
    let journal = Journal::create(&rig.path(), SIZE, BASE, [check(1), check(2)]).unwrap();
    let Rig { env, dir, reactors } = rig;
    drop(reactors);
    let refused = create_rotating(&env, Rig::config(1), Rig::rekey(journal, 2), false);
    assert!(matches!(refused, Err(RekeyError::NoReactor)), "{refused:?}");
    assert!(env.registry().find("disk").is_err());
    drop(dir);
}

#[test]
fn a_journal_with_a_zone_begins_no_rotation() {
    let rig = Rig::new();
    let bdev = rig.create(1);
    rig.fill();
    let rekey = rig.begin(&bdev, 1, 2);
    rig.fail_writes(&rekey);
    drop((rekey, bdev));
    rig.remove_disk();
    // The keys are right, but the zone would be written over blocks that changed since.
    let bdev = rig.create(1);
    let refused = Rekey::begin(&bdev, Rig::rekey(Journal::open(&rig.path()).unwrap(), 2));
    assert!(matches!(refused, Err(RekeyError::Journal(rekey::JournalError::Exists(_)))), "{refused:?}");
    drop(bdev);
    rig.remove_disk();
    let bdev = rig.create_rotating(false).unwrap();
    assert_eq!(block_on(Rekey::of(&bdev).unwrap().ended()), State::Complete);
    rig.expect_filled();
}

/// A disk that other hosts use too.
struct SharedDisk(Base);

impl Decorator for SharedDisk {
    fn product(&self) -> &'static str {
        "shared"
    }

    fn base(&self) -> &Base {
        &self.0
    }

    fn limits(&self) -> Limits {
        Limits { has_other_hosts: true, ..self.0.bdev().device().limits() }
    }

    fn open_channel(&self, _: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Err(OpenError::Removed)
    }
}

#[test]
fn a_disk_on_a_base_of_several_hosts_keeps_its_key() {
    let rig = Rig::new();
    let base = Base::open(rig.env.registry(), "error", "shared").unwrap();
    rig.env.registry().register(Identity::named("shared"), Arc::new(SharedDisk(base))).unwrap();
    let bdev = create(&rig.env, Config { base: "shared".to_owned(), ..Rig::config(1) }).unwrap();
    let journal = Journal::create(&rig.path(), SIZE, BASE, [check(1), check(2)]).unwrap();
    let refused = Rekey::begin(&bdev, Rig::rekey(journal, 2)).unwrap_err();
    assert_eq!(refused.to_string(), "`shared` is in use by other hosts");
}
