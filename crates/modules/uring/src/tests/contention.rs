//! Tests of a disk of 512-byte blocks on a store of 4 KiB blocks, which two reactors change at the same time: no acknowledged
//! write may be lost.

use super::harness::{MIB, STRICT, disk_directory, pattern, sparse};
use crate::{Forced, create_forced};
use aryk_bdev::{Access, AsyncChannel, Blocks, Descriptor, Env, Lba, Op, Status};
use aryk_bdev_conformance::block_on;
use aryk_dma::Buffer;
use aryk_reactor::{CoreSet, Engine, Options, Reactors};
use std::sync::mpsc;

/// The operation that a task repeats, and then checks.
#[derive(Clone, Copy, Debug)]
struct Work {
    op: Op,
    lba: u64,
    blocks: u64,
    /// The number of blocks from `lba` on that no other task changes.
    mine: usize,
}

const ROUNDS: u64 = 150;

async fn work(channel: AsyncChannel, work: Work) -> Result<(), String> {
    let Work { op, lba, blocks, mine } = work;
    let failed = |status: Status| format!("{work:?}: {status:?}");
    for round in 0..ROUNDS {
        let data = if op == Op::WriteZeroes {
            channel.command(op, Lba(lba), Blocks(blocks)).await.map_err(failed)?;
            vec![0; blocks as usize * 512]
        } else {
            let data = pattern(blocks as usize * 512, lba << 32 | round);
            channel.write(Lba(lba), Blocks(blocks), Buffer::from_slice(&data)).await.map_err(failed)?;
            data
        };
        let back =
            channel.read(Lba(lba), Blocks(blocks), Buffer::new(data.len(), 4096)).await.map_err(failed)?;
        if back.bytes()[..mine * 512] != data[..mine * 512] {
            return Err(format!("{work:?} in round {round} was undone"));
        }
    }
    Ok(())
}

/// Runs all of `works`, alternating between the reactors.
fn run(engine: Engine, works: &[Work]) {
    let dir = disk_directory();
    let env = Env::default();
    let strict = Forced { alignment: Some(STRICT), blocking: false };
    create_forced(&env, sparse(dir.path(), MIB), strict).unwrap();
    let descriptor = env.registry().open("d", Access::Shared, "test", |_| {}).unwrap();
    let options = Options { cores: CoreSet::allowed(), engine, ..Options::default() };
    let reactors = Reactors::start(&options).unwrap();
    if reactors.handles().len() < 2 {
        eprintln!("only one core: the reactors' contention is not tested");
    }
    let (ended, results) = mpsc::channel();
    for (i, &work) in works.iter().enumerate() {
        let handle = &reactors.handles()[i % reactors.handles().len()];
        block_on(start(handle, descriptor.clone(), work, ended.clone()));
    }
    drop(ended);
    let results: Vec<_> = results.iter().collect();
    assert_eq!(results, vec![Ok(()); works.len()]);
    drop(descriptor);
    block_on(env.registry().remove("d")).unwrap();
}

async fn start(
    handle: &aryk_reactor::Handle,
    descriptor: Descriptor,
    what: Work,
    ended: mpsc::Sender<Result<(), String>>,
) {
    let on_reactor = move |cx: &mut aryk_reactor::Cx| {
        let thread = cx.add_thread("test", CoreSet::allowed());
        let channel = AsyncChannel::open(&descriptor, thread, cx).unwrap();
        let task = async move { ended.send(work(channel, what).await).unwrap() };
        cx.local().spawn(task).detach();
    };
    handle.call(on_reactor).await.unwrap();
}

const ENGINES: [Engine; 2] = [Engine::IoUring, Engine::Epoll];

#[test]
fn writes_to_one_store_block_do_not_undo_each_other() {
    let works: Vec<_> = (0..8).map(|lba| Work { op: Op::Write, lba, blocks: 1, mine: 1 }).collect();
    ENGINES.iter().for_each(|&engine| run(engine, &works));
}

#[test]
fn writes_across_store_blocks_do_not_undo_each_other() {
    let works: Vec<_> =
        (0..6).map(|i| Work { op: Op::Write, lba: 5 + 11 * i, blocks: 11, mine: 11 }).collect();
    ENGINES.iter().for_each(|&engine| run(engine, &works));
}

#[test]
fn a_partial_write_does_not_undo_a_write_of_whole_blocks() {
    for (engine, op) in [(ENGINES[0], Op::Write), (ENGINES[1], Op::Write), (ENGINES[0], Op::WriteZeroes)] {
        let whole = Work { op, lba: 16, blocks: 8, mine: 6 };
        let part = |lba| Work { op: Op::Write, lba, blocks: 1, mine: 0 };
        run(engine, &[whole, part(22), part(23), part(23)]);
    }
}
