//! A volume of a TiB, whose index is larger than the pool's cache: memory, and how soon the pool opens.

use super::{Pool, create_volume};
use crate::backend::{self, Store};
use crate::frontend::FrontEnd;
use crate::report::{Report, Section, number};
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::Result;
use serde_json::json;
use std::fs::File;
use std::time::{Duration, Instant};

const INTRO: &str = "A volume of 1 TiB in a pool over a sparse file, with a cache of 64 MiB, is written at random all over, 4 KiB at a time, \
    QD32. Memory is the process's anonymous memory, beyond that before the pool was created. The budget is the cache, a memtable \
    that is flushed and one that is filled, and what the log may have before it is flushed. The last row is after `kill -9`: the time from the \
    call that creates the disk below until the volume is there.";

const CACHE: u64 = 64 << 20;
const VOLUME: u64 = 1 << 40;
/// Bytes of memory that the pool may take: the cache, and the 256 MiB of the log that may be unflushed.
const BUDGET: u64 = CACHE + (256 << 20);
/// Blocks that are written before each row.
const ROWS: [u64; 4] = [250_000, 500_000, 1_000_000, 2_000_000];

/// Measures the case, if it is selected.
pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    if !settings.wants("volume/huge") {
        return Ok(());
    }
    let columns = ["blocks written", "K requests/s", "index, MiB", "memory, MiB", "budget, MiB"];
    let mut section = Section::new("1 TiB, all over", INTRO, columns.map(str::to_owned).to_vec());
    let path = settings.files.path().join("huge");
    File::create(&path)?.set_len(VOLUME + VOLUME / 4)?;
    let (base, dir) = (Store::File { path }, settings.sockets.path().join("huge"));
    let (process, mut rpc) = backend::arykd(&settings.arykd, settings.policy, &dir, None)?;
    backend::create_disk(&mut rpc, "base", &base, &dir)?;
    let idle = process.memory()?;
    rpc.call(
        "aryk_pool_create",
        json!({"name": "p", "base_bdev_name": "base", "force": true, "cache_bytes": CACHE}),
    )?;
    create_volume(&mut rpc, "v", VOLUME)?;
    let mut pool = Pool::serve(process, rpc, &dir)?;
    let mut writes = FrontEnd::connect(&pool.back_end.socket, 1, Workload::random(100, 4 << 10, 32))?;
    let mib = |bytes: f64| number(bytes / f64::from(1 << 20));
    for count in &ROWS[..if settings.quick { 1 } else { ROWS.len() }] {
        let closed = writes.count(*count)?;
        let index = super::pool(pool.rpc())?["counters"]["index_bytes"].as_f64().unwrap_or_default();
        let memory = pool.back_end.process.memory()?.saturating_sub(idle);
        section.row(vec![
            count.to_string(),
            number(closed.rate() / 1e3),
            mib(index),
            mib(memory as f64) + if memory > BUDGET { " **missed**" } else { "" },
            mib(BUDGET as f64),
        ]);
    }
    drop(writes);
    // Dropping the process kills it.
    drop(pool);
    let opened = open(settings, &base, &dir)?;
    let opened = format!("opened after `kill -9` in {} ms (aim 3,000)", opened.as_millis());
    section.row([opened].into_iter().chain(std::iter::repeat_n(String::new(), 4)).collect());
    report.section(section);
    Ok(())
}

fn open(settings: &Settings, base: &Store, dir: &std::path::Path) -> Result<Duration> {
    let (_process, mut rpc) = backend::arykd(&settings.arykd, settings.policy, dir, None)?;
    let start = Instant::now();
    backend::create_disk(&mut rpc, "base", base, dir)?;
    rpc.call("bdev_get_bdevs", json!({"name": "p/v", "timeout": 10_000}))?;
    Ok(start.elapsed())
}
