//! The cost of a layer: nanoseconds per request of a null disk, alone and under up to three passthrus, by queue depth.
//!
//! `cargo run --release -p aryk-bdev-conformance --example stack`. The best of many short measurements counts, because
//! other programs run at the same time. The channel is driven by plain calls, as a front-end's root does within one turn,
//! so that the numbers exclude the reactor's turn.
#![expect(clippy::disallowed_methods, reason = "it measures wall time")]

use aryk_bdev::{Access, Bdev, BdevChannel, Blocks, Completion, Env, Identity, Io, Lba, Op, Tag};
use aryk_dma::Buffer;
use aryk_reactor::{Clock, CoreSet, Cx, Engine, Reactor, Root, RootId, SleepPolicy};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

const REQUESTS: u32 = 50_000;
const ROUNDS: usize = 300;

struct Idle;

impl Root for Idle {
    fn poll(&mut self, _: &mut Cx) -> bool {
        false
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut reactor = Reactor::new(0, SleepPolicy::Poll, Engine::Epoll, Clock::Monotonic)?;
    let cx = reactor.cx();
    let thread = cx.add_thread("load", CoreSet::from_iter([0]));
    let root = cx.add_root(thread, "load", |_, _| Ok::<_, Infallible>(Idle))?.id();
    let env = Env::default();
    for layers in 0..=3 {
        let top = stack(&env, layers)?;
        let descriptor = env.registry().open(top.name(), Access::Exclusive, "load", |_| ())?;
        let mut channel = descriptor.open_channel(root, cx)?;
        for depth in [1, 32] {
            let best = (0..ROUNDS).map(|_| measure(&mut channel, root, depth, cx)).fold(f64::MAX, f64::min);
            println!("{layers} passthru, QD {depth:2}: {best:6.1} ns a request");
        }
    }
    Ok(())
}

/// A null disk with `layers` passthrus on it.
fn stack(env: &Env, layers: u32) -> Result<Arc<Bdev>, aryk_bdev::Error> {
    let identity = Identity::named(format!("null{layers}"));
    let config = aryk_bdev_null::Config {
        identity,
        block_size: 512,
        physical_block_size: 512,
        blocks: Blocks(1 << 30),
    };
    let mut top = aryk_bdev_null::create(env, config)?;
    for layer in 1..=layers {
        let identity = Identity::named(format!("pass{layers}.{layer}"));
        let config = aryk_bdev_passthru::Config { identity, base: top.name().to_owned() };
        top = aryk_bdev_passthru::create(env, config)?;
    }
    Ok(top)
}

fn measure(channel: &mut BdevChannel, root: RootId, depth: u32, cx: &mut Cx) -> f64 {
    let mut buffer = Buffer::new(4096, 4096);
    let data = buffer.lend();
    let mut completions: Vec<Completion> = Vec::with_capacity(depth as usize);
    let start = Instant::now();
    let (mut submitted, mut completed) = (0, 0);
    while completed < REQUESTS {
        while submitted - completed < depth {
            let lba = u64::from(submitted) * 8 % (1 << 20);
            let io = Io {
                tag: Tag(submitted.into()),
                op: Op::Read,
                fua: false,
                may_unmap: false,
                lba: Lba(lba),
                blocks: Blocks(8),
                source: Lba::ZERO,
                data,
            };
            channel.submit(io, cx);
            submitted += 1;
        }
        channel.poll(cx, &mut completions);
        cx.clear_wake(root);
        completed += completions.len() as u32;
        completions.clear();
    }
    let took = start.elapsed().as_nanos() as f64;
    while channel.in_flight() > 0 {
        channel.poll(cx, &mut completions);
    }
    buffer.reclaim();
    took / f64::from(REQUESTS)
}
