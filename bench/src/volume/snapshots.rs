//! What snapshots cost: reads through a chain of them, and the moment in which one is taken.

use super::{Pool, base};
use crate::frontend::FrontEnd;
use crate::report::{Report, Section, number};
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::{Context, Result};
use serde_json::json;
use std::time::{Duration, Instant};

/// Snapshots in the chain, in order.
const CHAIN: [u32; 4] = [0, 1, 10, 100];

const CHAIN_INTRO: &str = "4 KiB random reads, QD32, of a filled volume over memory, with this many snapshots; between two of them, 1,000 \
    blocks were written at random. The last row reads a clone of the newest snapshot. After the writes, lookups read several levels \
    of the index (*at first*), and pay for their merge; all else is counted after five seconds of reads. Aim: as many reads of the \
    disk and pages of the index for each request in every row, within a twentieth of those without snapshots.";

/// How long the pool has for that.
const MERGING: Duration = Duration::from_secs(5);

/// By how much the counts of a row may differ from those of the first.
const TOLERANCE: f64 = 0.05;

const MOMENT_INTRO: &str = "The time of the call that takes a snapshot while 4 KiB random writes run at a tenth of what the volume can, and the \
    99th percentile of the writes' latency in the window with the snapshot and in the one before it. Aims: 10 ms; 1.5.";

/// Windows with a snapshot.
const WINDOWS: usize = 10;

/// Measures the selected cases.
pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let (chain, moment) = (settings.wants("volume/chain"), settings.wants("volume/snapshot"));
    if !chain && !moment {
        return Ok(());
    }
    let dir = settings.sockets.path().join("snapshots");
    let mut pool = Pool::start(settings, &base(settings, "snapshots", "memory")?, &dir, 0.5)?;
    if moment {
        report.section(take(settings, &mut pool)?);
    }
    if chain {
        report.section(read(settings, &mut pool)?);
    }
    Ok(())
}

fn snapshot(pool: &mut Pool, name: &str) -> Result<Duration> {
    let start = Instant::now();
    pool.rpc().call("bdev_lvol_snapshot", json!({"lvol_name": "p/v", "snapshot_name": name}))?;
    Ok(start.elapsed())
}

fn read(settings: &Settings, pool: &mut Pool) -> Result<Section> {
    let columns = [
        "snapshots",
        "K requests/s",
        "reads of the disk",
        "index pages at first",
        "index pages",
        "index pages from the disk",
    ];
    let title = "Reads through snapshots, per request";
    let mut section = Section::new(title, CHAIN_INTRO, columns.map(str::to_owned).to_vec());
    let mut taken = 0;
    let mut first = None;
    let mut add = |section: &mut Section, name: &str, (at_first, per): (f64, PerRequest)| {
        let first = *first.get_or_insert(per);
        section.row(per.cells(name, at_first, &first));
    };
    for count in CHAIN {
        while taken < count {
            let mut writes = FrontEnd::connect(&pool.back_end.socket, 1, Workload::random(100, 4 << 10, 32))?;
            writes.count(1000)?;
            drop(writes);
            snapshot(pool, &format!("c{taken}"))?;
            taken += 1;
        }
        add(&mut section, &count.to_string(), reads(settings, pool)?);
    }
    pool.rpc().call("bdev_lvol_clone", json!({"snapshot_name": "p/c99", "clone_name": "clone"}))?;
    pool.rpc().call("vhost_create_blk_controller", json!({"ctrlr": "clone", "dev_name": "p/clone"}))?;
    let volume = pool.back_end.socket.clone();
    pool.back_end.socket.set_file_name("clone");
    pool.back_end.process.wait_for(&pool.back_end.socket.clone())?;
    add(&mut section, "100, and a clone", reads(settings, pool)?);
    pool.back_end.socket = volume;
    Ok(section)
}

/// What reads took, for each request.
#[derive(Clone, Copy, Debug)]
struct PerRequest {
    /// Requests per second.
    rate: f64,
    disk_reads: f64,
    index_pages: f64,
    index_reads: f64,
}

impl PerRequest {
    fn cells(&self, name: &str, at_first: f64, first: &Self) -> Vec<String> {
        let as_first = |value: f64, first: f64| {
            let missed = if value > first * (1.0 + TOLERANCE) { " **missed**" } else { "" };
            number(value) + missed
        };
        vec![
            name.to_owned(),
            number(self.rate / 1e3),
            as_first(self.disk_reads, first.disk_reads),
            number(at_first),
            as_first(self.index_pages, first.index_pages),
            number(self.index_reads),
        ]
    }
}

/// Reads at once, and after the pool has had time to merge its index. Returns the pages of the index for each request at first,
/// and what reads took later.
fn reads(settings: &Settings, pool: &mut Pool) -> Result<(f64, PerRequest)> {
    let mut reads = FrontEnd::connect(&pool.back_end.socket, 1, Workload::random(0, 4 << 10, 32))?;
    reads.closed(settings.warm_up)?;
    let at_first = count(settings, pool, &mut reads)?.index_pages;
    reads.closed(if settings.quick { settings.warm_up } else { MERGING })?;
    Ok((at_first, count(settings, pool, &mut reads)?))
}

fn count(settings: &Settings, pool: &mut Pool, reads: &mut FrontEnd) -> Result<PerRequest> {
    let before = pool.counters()?;
    let closed = reads.closed(settings.span)?;
    let after = pool.counters()?;
    let per = |count: f64| count / closed.requests as f64;
    Ok(PerRequest {
        rate: closed.rate(),
        disk_reads: per((after.data_read - before.data_read) / 4096.0),
        index_pages: per(after.lookups - before.lookups),
        index_reads: per((after.index_read - before.index_read) / 4096.0),
    })
}

fn take(settings: &Settings, pool: &mut Pool) -> Result<Section> {
    let columns = ["window", "call, ms", "p99 with it, µs", "p99 before it, µs", "ratio"].map(str::to_owned);
    let mut section = Section::new("A snapshot under load", MOMENT_INTRO, columns.to_vec());
    let workload = Workload::random(100, 4 << 10, 32);
    let mut front_end = FrontEnd::connect(&pool.back_end.socket, 1, workload)?;
    let rate = front_end.closed(settings.span)?.rate() / 10.0;
    let window = Duration::from_millis(if settings.quick { 100 } else { 500 });
    for number_of in 0..if settings.quick { 1 } else { WINDOWS } {
        let p99 = |front_end: &mut FrontEnd| -> Result<f64> {
            Ok(front_end.paced(rate, window)?.latency.value_at_quantile(0.99) as f64 / 1e3)
        };
        let before = p99(&mut front_end)?;
        let name = format!("m{number_of}");
        let (with, call) = std::thread::scope(|scope| {
            let calling = scope.spawn(|| {
                std::thread::sleep(window / 2);
                snapshot(pool, &name)
            });
            let with = p99(&mut front_end);
            (with, calling.join())
        });
        let (with, call) = (with?, call.ok().context("the thread of the call ended early")??);
        // What is overwritten stays in the pool as long as a snapshot has it: the pool would become full.
        pool.rpc().call("bdev_lvol_delete", json!({"name": format!("p/{name}")}))?;
        section.row(vec![
            (number_of + 1).to_string(),
            number(call.as_secs_f64() * 1e3),
            number(with),
            number(before),
            number(with / before),
        ]);
    }
    Ok(section)
}
