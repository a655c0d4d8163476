//! Compare-and-write concurrent with other changes, on several reactors.

use crate::probe::unshared;
use crate::{Fixture, block_on, contents};
use aryk_bdev::{Access, AsyncChannel, Blocks, Descriptor, Lba, Op, Status};
use aryk_dma::Buffer;
use aryk_reactor::{CoreSet, Cx, Handle, Options, Reactors};
use futures_channel::oneshot::{self, Receiver};

/// Reactors on each core of the affinity mask, at least two.
fn reactors() -> Reactors {
    let options = Options { cores: CoreSet::allowed(), ..Options::default() };
    Reactors::start(&options).expect("reactors start")
}

/// Runs `job` with a channel of its own on a reactor. The receiver returns its result.
fn start<R: Send + 'static>(
    handle: &Handle,
    descriptor: &Descriptor,
    job: impl AsyncFnOnce(&AsyncChannel) -> R + Send + 'static,
) -> Receiver<R> {
    block_on(descriptor.prepare(handle)).expect("the reactor can be prepared");
    let descriptor = descriptor.clone();
    let (ended, wait) = oneshot::channel();
    let on_reactor = move |cx: &mut Cx| {
        let thread = cx.add_thread("job", CoreSet::allowed());
        let channel = AsyncChannel::open(&descriptor, thread, cx).expect("a channel can be opened");
        let task = async move {
            let result = job(&channel).await;
            drop((channel, descriptor));
            let _ = ended.send(result);
        };
        cx.local().spawn(task).detach();
    };
    block_on(handle.call(on_reactor)).expect("the reactor runs");
    wait
}

/// Blocks of each request.
const BLOCKS: Blocks = Blocks(4);

/// Two jobs on each reactor increment a number in the same blocks by compare-and-write: no increment is lost. And a write
/// that is in flight beside a compare-and-write is applied before it, which then miscompares, or after it: it is never
/// overwritten.
///
/// # Panics
/// If the disk fails the check.
pub fn compare_and_write_is_atomic<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    if !fixture.features().data {
        return;
    }
    let reactors = reactors();
    let unshared = unshared(&fixture);
    let (registry, name) = unshared
        .as_ref()
        .map_or_else(|| (fixture.registry(), fixture.name()), |registry| (registry, "probe"));
    let descriptor = registry.open(name, Access::Exclusive, "jobs", |_| ());
    let descriptor = descriptor.expect("the disk has no other opener");
    let size = descriptor.bdev().geometry().block_size;
    let block = move |seed: u64| contents(seed, 0, BLOCKS.0, size);
    let zero = async move |channel: &AsyncChannel| {
        channel.write(Lba::ZERO, BLOCKS, Buffer::from_slice(&block(0))).await.map(drop)
    };
    assert_eq!(block_on(start(&reactors.handles()[0], &descriptor, zero)), Ok(Ok(())));
    count_up(&reactors, &descriptor, size);
    for round in 1..60 {
        let seed = 3 * round + 1000;
        let ends: Vec<_> = [seed, seed + 1, seed + 2].map(block).into();
        let (first, second) = (ends[0].clone(), ends[1].clone());
        let set = async move |channel: &AsyncChannel| {
            channel.write(Lba::ZERO, BLOCKS, Buffer::from_slice(&first)).await.map(drop)
        };
        let handles = reactors.handles();
        let handle = |i: u64| &handles[i as usize % handles.len()];
        assert_eq!(block_on(start(handle(round), &descriptor, set)), Ok(Ok(())));
        let both = [&ends[0][..], &second[..]].concat();
        let third = ends[2].clone();
        let swap = start(handle(round), &descriptor, async move |channel: &AsyncChannel| {
            channel.compare_and_write(Lba::ZERO, BLOCKS, Buffer::from_slice(&both)).await.map(drop)
        });
        let write = start(handle(round + 1), &descriptor, async move |channel: &AsyncChannel| {
            channel.write(Lba::ZERO, BLOCKS, Buffer::from_slice(&third)).await.map(drop)
        });
        let (swapped, written) = (block_on(swap).expect("it ends"), block_on(write).expect("it ends"));
        assert!([Ok(()), Err(Status::Miscompare)].contains(&swapped) && written == Ok(()), "{swapped:?}");
        let read = start(handle(round), &descriptor, async move |channel: &AsyncChannel| {
            let buffer =
                channel.read(Lba::ZERO, BLOCKS, Buffer::new(BLOCKS.to_bytes(size).0 as usize, 4096)).await;
            buffer.map(|b| b.bytes().to_vec())
        });
        assert!(block_on(read) == Ok(Ok(ends[2].clone())), "the write of round {round} is gone: {swapped:?}");
    }
}

/// Increments of each job.
const COUNTS: u64 = 25;

fn count_up(reactors: &Reactors, descriptor: &Descriptor, size: u32) {
    let jobs = 2 * reactors.handles().len().max(2) as u64;
    let mut ends = Vec::new();
    for (handle, _) in reactors.handles().iter().cycle().zip(0..jobs) {
        ends.push(start(handle, descriptor, async move |channel: &AsyncChannel| {
            let bytes = BLOCKS.to_bytes(size).0 as usize;
            let mut done = 0;
            while done < COUNTS {
                let read =
                    channel.read(Lba::ZERO, BLOCKS, Buffer::new(bytes, 4096)).await.expect("it can be read");
                let holds = |&count: &u64| contents(count, 0, BLOCKS.0, size) == read.bytes();
                // A read beside a write may see a part of the write.
                let Some(count) = (0..jobs * COUNTS).find(holds) else { continue };
                let both = [read.bytes(), &contents(count + 1, 0, BLOCKS.0, size)].concat();
                match channel.compare_and_write(Lba::ZERO, BLOCKS, Buffer::from_slice(&both)).await {
                    Ok(_) => done += 1,
                    Err(status) => assert_eq!(status, Status::Miscompare),
                }
            }
        }));
    }
    ends.into_iter().for_each(|end| block_on(end).expect("a job ends"));
    let last = start(&reactors.handles()[0], descriptor, async move |channel: &AsyncChannel| {
        let expected = contents(jobs * COUNTS, 0, BLOCKS.0, size);
        channel.compare(Lba::ZERO, BLOCKS, Buffer::from_slice(&expected)).await.map(drop)
    });
    assert_eq!(block_on(last), Ok(Ok(())), "each count is the previous one plus one");
    let stats = block_on(descriptor.bdev().stats());
    assert_eq!(stats.op(Op::CompareAndWrite).ops, jobs * COUNTS);
}

/// Writes and copies over the same blocks from all reactors, while channels are opened and closed: all complete.
///
/// # Panics
/// If the disk fails the check.
pub fn no_request_is_held_off_forever<F: Fixture>(make: &impl Fn() -> F) {
    let fixture = make();
    let reactors = reactors();
    let unshared = unshared(&fixture);
    let (registry, name) = unshared
        .as_ref()
        .map_or_else(|| (fixture.registry(), fixture.name()), |registry| (registry, "probe"));
    let descriptor = registry.open(name, Access::Exclusive, "jobs", |_| ());
    let descriptor = descriptor.expect("the disk has no other opener");
    let size = descriptor.bdev().geometry().block_size;
    let mut ends = Vec::new();
    for (handle, i) in reactors.handles().iter().cycle().zip(0..24_u64) {
        ends.push(start(handle, &descriptor, async move |channel: &AsyncChannel| {
            for j in 0..6 {
                let lba = (i + j) % 5;
                let data = Buffer::from_slice(&contents(i, lba, BLOCKS.0, size));
                channel.write(Lba(lba), BLOCKS, data).await?;
                channel.copy(Lba(lba), Lba(9 - lba), BLOCKS).await?;
            }
            Ok::<_, Status>(())
        }));
    }
    for end in ends {
        assert_eq!(block_on(end), Ok(Ok(())));
    }
}
