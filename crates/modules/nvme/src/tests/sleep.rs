//! Interrupts: none while a reactor polls, one when it sleeps.

use super::OnModel;
use crate::Dma;
use aryk_bdev::{Access, AsyncChannel, Blocks, Env, Lba, Registry};
use aryk_bdev_conformance::{block_on, contents};
use aryk_dma::Buffer;
use aryk_nvme_model::{Config, Timing};
use aryk_reactor::{CoreSet, Options, Reactors, SleepPolicy};
use std::sync::Arc;
use tokio::sync::oneshot;

const REQUESTS: u64 = 30;

/// Writes and reads one block after the other on a reactor of its own. Returns the interrupts of the drive, and the time that the
/// reactor was awake, in thousandths.
fn run(policy: SleepPolicy, latency: u64) -> (u64, u64) {
    let reactors = Reactors::start(&Options { policy, ..Options::default() }).unwrap();
    let env = Env::new(Arc::new(Registry::new()), &reactors);
    let timing = Timing { io: latency..=latency, ..Timing::IMMEDIATE };
    let on = OnModel::with(env, Config { timing, ..Config::default() }, |attach| attach.dma = Dma::Pin);
    let descriptor = on.env.registry().open("nvn1", Access::Exclusive, "the test", |_| ()).unwrap();
    let handle = reactors.handles().remove(0);
    block_on(descriptor.prepare(&handle)).unwrap();
    let (done, result) = oneshot::channel();
    let start = handle.call(move |cx| {
        let thread = cx.add_thread("test", CoreSet::from_iter([cx.handle().core()]));
        let channel = AsyncChannel::open(&descriptor, thread, cx).unwrap();
        cx.local()
            .spawn(async move {
                for lba in 0..REQUESTS {
                    let data = contents(lba + 1, lba, 1, 4096);
                    let buffer = channel.write(Lba(lba), Blocks(1), Buffer::from_slice(&data)).await.unwrap();
                    let read = channel.read(Lba(lba), Blocks(1), buffer).await.unwrap();
                    assert!(read.bytes() == data);
                }
                drop(channel);
                done.send(()).unwrap();
            })
            .detach();
    });
    block_on(start).unwrap();
    block_on(result).unwrap();
    let stats = handle.stats();
    let awake = stats.busy + stats.idle;
    let awake = awake.as_nanos() * 1000 / (awake + stats.sleeping).as_nanos().max(1);
    // Vector 0 is the admin queue's.
    let interrupts = (1..17).map(|vector| on.model.with(|model| model.interrupts(vector))).sum();
    drop(on);
    (interrupts, awake as u64)
}

#[test]
fn a_reactor_that_polls_gets_no_interrupt() {
    let (interrupts, _) = run(SleepPolicy::Poll, 20_000);
    assert_eq!(interrupts, 0);
}

#[test]
fn a_reactor_that_sleeps_is_woken_by_each_completion() {
    let (interrupts, awake) = run(SleepPolicy::Interrupt, 5_000_000);
    // A masked vector may signal once more when it is unmasked.
    assert!((2 * REQUESTS..=4 * REQUESTS).contains(&interrupts), "{interrupts} interrupts");
    assert!(awake < 500, "awake for {awake} of 1000");
}
