//! Measures 4 KiB random reads and writes of a file at queue depth 32, alternately through a disk's channel and with fio's
//! io_uring engine, and prints the ratio of their medians.
//!
//! `cargo run --release -p aryk-bdev-uring --example file_iops [directory]`. Both use one thread on core 0 and the same
//! file, which is written once before the measurement.
#![expect(clippy::disallowed_methods, reason = "a benchmark measures wall time")]

use aryk_bdev::{
    Access, BdevChannel, Blocks, Completion, Descriptor, Env, Io, Lba, Op, OpenError, Status, Tag,
};
use aryk_bdev_uring::Config;
use aryk_dma::{Buffer, Sgl};
use aryk_reactor::{Clock, CoreSet, Cx, Engine, Reactor, Root, SleepPolicy};
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const DEPTH: u64 = 32;
const BLOCK: u64 = 4096;
const SIZE: u64 = 1 << 30;
const SECONDS: u64 = 2;
const ROUNDS: usize = 5;

/// Keeps `DEPTH` requests in flight, each with separate memory.
struct Load {
    channel: BdevChannel,
    op: Op,
    memory: Vec<Sgl>,
    completions: Vec<Completion>,
    random: u64,
    done: u64,
    stopping: bool,
}

impl Load {
    fn submit(&mut self, tag: Tag, cx: &mut Cx) {
        // Xorshift: its cost matters more than the quality of the numbers.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let lba = self.random % (SIZE / BLOCK) * (BLOCK / 512);
        let data = self.memory[tag.0 as usize];
        let io = Io {
            tag,
            op: self.op,
            fua: false,
            may_unmap: false,
            lba: Lba(lba),
            blocks: Blocks(BLOCK / 512),
            source: Lba::ZERO,
            data,
        };
        self.channel.submit(io, cx);
    }
}

impl Root for Load {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        self.channel.poll(cx, &mut completions);
        let worked = !completions.is_empty();
        for completion in completions.drain(..) {
            assert_eq!(completion.status, Status::Ok);
            self.done += 1;
            if !self.stopping {
                self.submit(completion.tag, cx);
            }
        }
        self.completions = completions;
        worked
    }
}

fn ours(descriptor: &Descriptor, op: Op) -> Result<f64, Box<dyn Error>> {
    let mut reactor = Reactor::new(0, SleepPolicy::Adaptive, Engine::IoUring, Clock::Monotonic)?;
    let mut buffers: Vec<_> = (0..DEPTH).map(|_| Buffer::new(BLOCK as usize, BLOCK as usize)).collect();
    let memory = buffers.iter_mut().map(Buffer::lend).collect();
    let cx = reactor.cx();
    let thread = cx.add_thread("load", CoreSet::from_iter([0]));
    let root = cx.add_root(thread, "load", |id, cx| {
        let channel = descriptor.open_channel(id, cx)?;
        let completions = Vec::new();
        Ok::<_, OpenError>(Load {
            channel,
            op,
            memory,
            completions,
            random: 88_172_645_463_325_252,
            done: 0,
            stopping: false,
        })
    })?;
    let load = cx.root::<Load>(root.id()).ok_or("just added")?;
    (0..DEPTH).for_each(|i| load.borrow_mut().submit(Tag(i), cx));
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(SECONDS) {
        for _ in 0..64 {
            reactor.step();
        }
    }
    let iops = load.borrow().done as f64 / start.elapsed().as_secs_f64();
    load.borrow_mut().stopping = true;
    while load.borrow().channel.in_flight() > 0 {
        reactor.step();
    }
    buffers.iter_mut().for_each(Buffer::reclaim);
    drop(load);
    reactor.cx().remove_root(root.id());
    reactor.turn();
    Ok(iops)
}

fn fio(path: &Path, op: Op) -> Result<f64, Box<dyn Error>> {
    let rw = if op == Op::Read { "randread" } else { "randwrite" };
    let output = Command::new("fio")
        .args(["--name=f", "--ioengine=io_uring", "--direct=1", "--bs=4k", "--iodepth=32", "--time_based"])
        .args(["--norandommap", "--cpus_allowed=0", "--group_reporting", "--output-format=terse", "--thread"])
        .args([format!("--rw={rw}"), format!("--runtime={SECONDS}"), format!("--size={SIZE}")])
        .arg(format!("--filename={}", path.display()))
        .output()?;
    let terse = String::from_utf8(output.stdout)?;
    // Fields of terse version 3: read IOPS is the 8th, write IOPS the 49th.
    let field = if op == Op::Read { 7 } else { 48 };
    let iops = terse.split(';').nth(field).ok_or("fio printed no result")?;
    Ok(iops.trim().parse()?)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let below: PathBuf = std::env::args().nth(1).unwrap_or_else(|| "target".into()).into();
    let dir = tempfile::tempdir_in(below)?;
    let path = dir.path().join("image");
    let mut file = File::create(&path)?;
    let chunk = vec![0x5a; 1 << 20];
    (0..SIZE >> 20).try_for_each(|_| file.write_all(&chunk))?;
    file.sync_all()?;
    rustix::thread::sched_setaffinity(None, &{
        let mut core = rustix::thread::CpuSet::new();
        core.set(0);
        core
    })?;
    for op in [Op::Read, Op::Write] {
        let (mut aryk, mut peer) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let env = Env::default();
            aryk_bdev_uring::create(&env, Config::new("d", &path))?;
            aryk.push(ours(&env.registry().open("d", Access::Exclusive, "load", |_| ())?, op)?);
            drop(env);
            peer.push(fio(&path, op)?);
        }
        let (aryk, peer) = (median(aryk), median(peer));
        println!("{:5}: aryk {aryk:8.0} IOPS, fio {peer:8.0} IOPS, ratio {:.2}", op.name(), aryk / peer);
    }
    Ok(())
}
