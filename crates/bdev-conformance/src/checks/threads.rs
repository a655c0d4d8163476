//! Checks on several reactors at once.

use crate::{Fixture, block_on, contents, fill};
use aryk_bdev::{Access, AsyncChannel, Bdev, Blocks, Descriptor, Lba, Op, Status};
use aryk_dma::Buffer;
use aryk_reactor::{CoreSet, Handle, Options, Reactors};

/// Channels on each reactor, each with a writer.
const CHANNELS: u64 = 2;
const WRITES: u64 = 100;
/// Blocks of each write.
const BLOCKS: Blocks = Blocks(4);
/// Blocks that all writers share.
const SHARED: u64 = 16;

/// Channels on all cores, each with blocks of its own, and some shared blocks: each block holds in the end the data of
/// one of its writers. During the writes the disk is reset and its statistics are read; in the end they add up.
///
/// # Panics
/// If the disk fails the check.
pub fn several_threads<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let bdev = fixture.registry().find(fixture.name()).expect("it is registered");
    let options = Options { cores: CoreSet::allowed(), ..Options::default() };
    let reactors = Reactors::start(&options).expect("reactors start");
    let descriptor = fixture.registry().open(fixture.name(), Access::Exclusive, "threads", |_| ());
    let descriptor = descriptor.expect("the disk has no other opener");
    let mut writers = Vec::new();
    for (handle, writer) in reactors.handles().iter().cycle().zip(0..2 * CHANNELS) {
        writers.push(block_on(start(handle, &descriptor, writer)));
    }
    let (all, mut seen) = (2 * CHANNELS * (2 * WRITES + 1), 0);
    for _ in 0..20 {
        let now = block_on(bdev.stats()).op(Op::Write).ops;
        assert!(now >= seen && now <= all, "{now} writes of {all}, after {seen}");
        seen = now;
        assert!(block_on(bdev.reset()));
    }
    let mut failed = 0;
    for writer in writers {
        failed += block_on(writer).expect("a writer ends");
    }
    let verified = block_on(verify(&reactors.handles()[0], &descriptor, fixture.features().data));
    assert_eq!(verified, Ok(()));
    let stats = block_on(bdev.stats());
    let writes = stats.op(Op::Write);
    assert_eq!(writes.errors, failed);
    assert_eq!(writes.ops, all);
    drop(descriptor);
    assert_eq!(block_on(fixture.registry().remove(fixture.name())), Ok(()));
}

type Ended = futures_channel::oneshot::Receiver<u64>;

/// Starts a writer; it returns the number of its writes that a reset aborted, all of which it repeated.
async fn start(handle: &Handle, descriptor: &Descriptor, writer: u64) -> Ended {
    descriptor.prepare(handle).await.expect("the reactor can be prepared");
    let descriptor = descriptor.clone();
    let (ended, wait) = futures_channel::oneshot::channel();
    let on_reactor = move |cx: &mut aryk_reactor::Cx| {
        let thread = cx.add_thread(format!("writer {writer}"), CoreSet::allowed());
        let channel = AsyncChannel::open(&descriptor, thread, cx).expect("a channel can be opened");
        let task = async move {
            let failed = write(&channel, descriptor.bdev(), writer).await;
            drop((channel, descriptor));
            let _ = ended.send(failed);
        };
        cx.local().spawn(task).detach();
    };
    handle.call(on_reactor).await.expect("the reactor runs");
    wait
}

/// The first of a writer's own blocks.
const fn own(writer: u64) -> u64 {
    SHARED + writer * BLOCKS.0
}

async fn write(channel: &AsyncChannel, bdev: &Bdev, writer: u64) -> u64 {
    let block_size = bdev.geometry().block_size;
    let mut failed = 0;
    for i in 0..WRITES {
        let shared = (i * 7 + writer) % (SHARED - BLOCKS.0 + 1);
        let seed = writer + 1;
        failed += write_once(channel, shared, seed, block_size).await;
        failed += write_once(channel, own(writer), seed + i * 100, block_size).await;
    }
    failed + write_once(channel, own(writer), writer + 1, block_size).await
}

/// Writes until it succeeds; returns the number of aborted attempts.
async fn write_once(channel: &AsyncChannel, lba: u64, seed: u64, block_size: u32) -> u64 {
    let mut aborted = 0;
    loop {
        let data = Buffer::from_slice(&contents(seed, lba, BLOCKS.0, block_size));
        match channel.write(Lba(lba), BLOCKS, data).await {
            Ok(_) => return aborted,
            Err(status) => assert_eq!(status, Status::Aborted),
        }
        aborted += 1;
    }
}

/// Reads all blocks; returns a description of the first wrong one.
async fn verify(handle: &Handle, descriptor: &Descriptor, has_data: bool) -> Result<(), String> {
    descriptor.prepare(handle).await.expect("the reactor can be prepared");
    let descriptor = descriptor.clone();
    let (ended, wait) = futures_channel::oneshot::channel();
    let on_reactor = move |cx: &mut aryk_reactor::Cx| {
        let thread = cx.add_thread("reader", CoreSet::allowed());
        let channel = AsyncChannel::open(&descriptor, thread, cx).expect("a channel can be opened");
        let block_size = descriptor.bdev().geometry().block_size;
        let task = async move {
            let blocks = Blocks(own(2 * CHANNELS));
            let buffer = Buffer::new(blocks.to_bytes(block_size).0 as usize, 4096);
            let buffer = channel.read(Lba::ZERO, blocks, buffer).await.expect("the disk can be read");
            drop((channel, descriptor));
            let _ = ended.send(if has_data { look(buffer.bytes(), block_size) } else { Ok(()) });
        };
        cx.local().spawn(task).detach();
    };
    handle.call(on_reactor).await.expect("the reactor runs");
    wait.await.expect("the reader ends")
}

fn look(bytes: &[u8], block_size: u32) -> Result<(), String> {
    for (block, lba) in bytes.chunks_exact(block_size as usize).zip(0..) {
        let writers = if lba < SHARED {
            0..2 * CHANNELS
        } else {
            (lba - SHARED) / BLOCKS.0..(lba - SHARED) / BLOCKS.0 + 1
        };
        let mut expected = vec![0; block.len()];
        let mut is = |seed: u64| {
            fill(seed, lba, &mut expected);
            block == expected
        };
        if !writers.clone().any(|w| is(w + 1)) {
            return Err(format!("block {lba} holds what none of {writers:?} wrote"));
        }
    }
    Ok(())
}
