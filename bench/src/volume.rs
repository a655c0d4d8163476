//! Volumes: a pool over a disk, beside that disk without a pool, and beside `qemu-storage-daemon` with a qcow2 image.

mod cold;
mod huge;
mod many;
mod reactors;
mod snapshots;
mod sustained;

use crate::backend::{self, BackEnd, Store};
use crate::frontend::FrontEnd;
use crate::process::{BACK_END_CORE, Process};
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds;
use crate::rpc::Rpc;
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// What a pool is on.
const BASES: [&str; 2] = ["memory", "file"];

const INTRO: &str = "Thousand requests per second (4 MiB: GB/s), as median (least–greatest), each side in turn. *Raw* is the disk \
    without a pool, in an arykd of its own; the pool is twice as large as its volume, which was filled with requests of 4 MiB first. \
    The rows are in the order of the measurements: those before the random writes have found the data as the fill has left it. Random \
    writes to the volume take twelve times as long as other runs. *Amplification* is what the pool wrote to its disk for each byte of \
    the front-end's, in all runs of the row. The aim for random writes is 1.5 times the raw disk's requests, or as many as 0.8 of the raw \
    disk's bandwidth (of 4 MiB writes) carries at that amplification, if that is less. Busy time is that of arykd's reactor, with \
    the pool's background work and the disk below. A fresh image is made for each run.";

/// The most busy time of a request over memory, in ns: a write's, with the pool's background work, and a read's.
const BUSY_AIMS: [f64; 2] = [1400.0, 700.0];
/// A run of random writes to the volume takes so many spans.
const WRITE_SPANS: u32 = 12;

/// Measures the selected cases.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    for base in BASES {
        closed(settings, base, report)?;
    }
    reactors::measure(settings, report)?;
    sustained::measure(settings, report)?;
    snapshots::measure(settings, report)?;
    cold::measure(settings, report)?;
    huge::measure(settings, report)?;
    many::measure(settings, report)
}

/// An arykd with a pool over one disk, and one volume in it, which a vhost-user-blk controller serves.
#[derive(Debug)]
struct Pool {
    back_end: BackEnd,
}

/// Counters of a pool.
#[derive(Clone, Copy, Debug)]
struct Counters {
    user_written: f64,
    /// All that was written to the pool's disk.
    written: f64,
    used: f64,
    live: f64,
    /// Bytes of the disk read for users, and of the index.
    data_read: f64,
    index_read: f64,
    /// Pages of the index that were looked at.
    lookups: f64,
}

impl Counters {
    /// What the pool has written since then, for each byte of its users.
    fn amplification(&self, since: &Self) -> f64 {
        (self.written - since.written) / (self.user_written - since.user_written).max(1.0)
    }
}

impl Pool {
    /// Starts arykd with a pool over `base`, and a filled volume of this share of the pool.
    fn start(settings: &Settings, base: &Store, dir: &Path, share: f64) -> Result<Self> {
        let (process, mut rpc) = backend::arykd(&settings.arykd, settings.policy, dir, None)?;
        backend::create_disk(&mut rpc, "base", base, dir)?;
        rpc.call("aryk_pool_create", json!({"name": "p", "base_bdev_name": "base", "force": true}))?;
        let total = pool(&mut rpc)?["total_bytes"].as_f64().context("a pool has a size")?;
        let size = (total * share) as u64 / FILLED * FILLED;
        create_volume(&mut rpc, "v", size)?;
        let volume = Self::serve(process, rpc, dir)?;
        FrontEnd::fill(&volume.back_end.socket)?;
        Ok(volume)
    }

    /// Starts arykd on a pool that another one has left: nothing of it is in memory.
    fn reopen(settings: &Settings, base: &Store, dir: &Path) -> Result<Self> {
        let (process, mut rpc) = backend::arykd(&settings.arykd, settings.policy, dir, None)?;
        backend::create_disk(&mut rpc, "base", base, dir)?;
        // The call has waited until the pool was found; its volumes appear a moment later.
        rpc.call("bdev_get_bdevs", json!({"name": "p/v", "timeout": 10_000}))?;
        Self::serve(process, rpc, dir)
    }

    fn serve(mut process: Process, mut rpc: Rpc, dir: &Path) -> Result<Self> {
        rpc.call("vhost_create_blk_controller", json!({"ctrlr": "v", "dev_name": "p/v"}))?;
        let socket = dir.join("v");
        process.wait_for(&socket)?;
        Ok(Self { back_end: BackEnd { process, socket, rpc: Some(rpc) } })
    }

    fn rpc(&mut self) -> &mut Rpc {
        self.back_end.rpc.as_mut().expect("arykd has an RPC")
    }

    /// The busy time of arykd's reactor, in ns.
    fn busy(&mut self) -> Result<f64> {
        self.back_end.busy()?.context("arykd reports its busy time")
    }

    fn counters(&mut self) -> Result<Counters> {
        let pool = pool(self.rpc())?;
        let get =
            |name: &str| pool["counters"][name].as_f64().with_context(|| format!("a pool counts {name}"));
        Ok(Counters {
            user_written: get("user_write_bytes")?,
            written: get("log_write_bytes")?
                + get("moved_write_bytes")?
                + get("index_write_bytes")?
                + get("manifest_write_bytes")?,
            used: get("used_bytes")?,
            live: get("live_bytes")?,
            data_read: get("data_read_bytes")?,
            index_read: get("index_read_bytes")?,
            lookups: get("cache_hits")? + get("cache_misses")?,
        })
    }
}

/// A volume has a multiple of this many bytes, so that it is filled wholly.
const FILLED: u64 = 4 << 20;

fn create_volume(rpc: &mut Rpc, name: &str, size: u64) -> Result<Value> {
    rpc.call("aryk_volume_create", json!({"pool": "p", "name": name, "size": size, "when_full": "wait"}))
}

fn pool(rpc: &mut Rpc) -> Result<Value> {
    let mut pools = rpc.call("aryk_pools_get", json!({}))?;
    ensure!(pools[0].is_object(), "the daemon has no pool");
    Ok(pools[0].take())
}

/// Bytes of the disk under a pool: twice those of the disk beside it, and segments enough for a cleaner to choose from.
const fn pool_bytes(settings: &Settings) -> u64 {
    if settings.quick { 1 << 30 } else { 2 * settings.size() }
}

/// The disk under a pool.
fn base(settings: &Settings, name: &str, kind: &str) -> Result<Store> {
    let size = pool_bytes(settings);
    Ok(match kind {
        "memory" => Store::Memory { size, peer: PathBuf::new() },
        _ => Store::File { path: settings.filled(name, size)? },
    })
}

/// The sides of a row, which take turns.
struct Sides {
    volume: Pool,
    raw: BackEnd,
    /// A qcow2 image whose clusters were allocated when it was created.
    preallocated: BackEnd,
    images: Images,
}

/// Where images are made.
struct Images {
    dir: PathBuf,
    sockets: PathBuf,
    size: u64,
    is_direct: bool,
}

impl Images {
    fn start(&self, name: &str, preallocation: &str) -> Result<BackEnd> {
        let (image, dir) = (self.dir.join(format!("{name}.qcow2")), self.sockets.join(name));
        std::fs::create_dir_all(&dir)?;
        let created = Command::new("qemu-img")
            .args(["create", "-q", "-f", "qcow2", "-o", &format!("preallocation={preallocation}")])
            .arg(&image)
            .arg(self.size.to_string())
            .status();
        ensure!(created.context("running qemu-img")?.success(), "qemu-img cannot create {}", image.display());
        let socket = dir.join("d0");
        // That of the run before says nothing about this one.
        if socket.exists() {
            std::fs::remove_file(&socket)?;
        }
        let direct = if self.is_direct { "on" } else { "off" };
        let aio = if self.is_direct { "io_uring" } else { "threads" };
        let blockdev = format!(
            "driver=qcow2,node-name=d0,file.driver=file,file.filename={},file.aio={aio},file.cache.direct={direct}",
            image.display()
        );
        let export = format!(
            "type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={},writable=on,iothread=t0",
            socket.display()
        );
        let core = BACK_END_CORE.to_string();
        let program = ["-c", &core, "qemu-storage-daemon", "--object", "iothread,id=t0"];
        let args = [&program[..], &["--blockdev", &blockdev, "--export", &export]].concat();
        let mut process = Process::start("qemu-storage-daemon", Path::new("taskset"), &args)?;
        process.wait_for(&socket)?;
        Ok(BackEnd { process, socket, rpc: None })
    }
}

/// A row: a workload, and a suffix of its name.
#[derive(Clone, Copy, Debug)]
struct Case {
    workload: Workload,
    when: &'static str,
}

impl Case {
    fn name(&self) -> String {
        self.workload.name() + self.when
    }

    const fn is_random_write(&self) -> bool {
        self.workload.write_percent == 100 && !self.workload.sequential
    }
}

/// All rows, in their order.
fn cases() -> [Case; 7] {
    let case = |workload, when| Case { workload, when };
    [
        case(Workload::sequential(100, 4 << 20, 4), ""),
        case(Workload::sequential(0, 4 << 20, 4), ""),
        case(Workload::random(0, 4 << 10, 32), "-filled"),
        case(Workload::random(100, 4 << 10, 32), ""),
        case(Workload::random(100, 4 << 10, 256), ""),
        case(Workload::random(0, 4 << 10, 32), "-rewritten"),
        case(Workload::sequential(100, 4 << 10, 32), ""),
    ]
}

/// Requests that so many bytes a second carry at an amplification.
fn carried(bandwidth: f64, amplification: f64) -> f64 {
    0.8 * bandwidth / (amplification * 4096.0)
}

/// The least ratio to the raw disk, to a fresh image and to a preallocated one. `carried`: what the raw disk's bandwidth
/// carries, in requests of the raw disk.
fn aims(case: &Case, carried: Option<f64>) -> [Option<f64>; 3] {
    match (case.workload.write_percent, case.workload.sequential, case.workload.block) {
        (100, false, _) => [Some(carried.map_or(1.5, |carried| carried.min(1.5))), Some(3.0), Some(1.2)],
        (0, false, _) => [Some(if case.when == "-filled" { 0.95 } else { 0.8 }), None, None],
        (_, true, 4096) => [Some(1.0), None, None],
        _ => [Some(0.9), None, None],
    }
}

fn closed(settings: &Settings, kind: &str, report: &mut Report) -> Result<()> {
    let wants = |case: &Case| settings.wants(&format!("volume/{kind}/{}", case.name()));
    let cases: Vec<_> = cases().into_iter().filter(wants).collect();
    if cases.is_empty() {
        return Ok(());
    }
    let mut sides = start(settings, kind)?;
    for process in [&sides.volume.back_end.process, &sides.raw.process, &sides.preallocated.process] {
        report.command(&process.command);
    }
    let columns =
        ["workload", "volume", "raw", "ratio", "fresh qcow2", "ratio", "preallocated qcow2", "ratio"];
    let columns = columns.into_iter().chain(["busy ns per request", "amplification"]);
    let columns = columns.map(str::to_owned).collect();
    let mut section = Section::new(&format!("Volume over {kind}"), INTRO, columns);
    let mut bandwidth = None;
    for case in &cases {
        section.row(compare(settings, kind, case, &mut sides, &mut bandwidth, report)?);
    }
    report.section(section);
    Ok(())
}

fn start(settings: &Settings, kind: &str) -> Result<Sides> {
    let is_direct = kind == "file";
    let dir = if is_direct { settings.files.path() } else { settings.memory.path() };
    let sockets = settings.sockets.path().join(format!("volume-{kind}"));
    std::fs::create_dir_all(&sockets)?;
    let images = Images { dir: dir.to_owned(), sockets: sockets.clone(), size: settings.size(), is_direct };
    let volume = Pool::start(settings, &base(settings, "pool", kind)?, &sockets.join("volume"), 0.5)?;
    volume.back_end.process.pause()?;
    let store = if is_direct {
        Store::File { path: settings.filled("raw", settings.size())? }
    } else {
        Store::Memory { size: settings.size(), peer: PathBuf::new() }
    };
    let raw = backend::aryk(&settings.arykd, settings.policy, &store, &sockets.join("raw"))?;
    FrontEnd::fill(&raw.socket)?;
    raw.process.pause()?;
    let preallocated = images.start("preallocated", "full")?;
    FrontEnd::fill(&preallocated.socket)?;
    preallocated.process.pause()?;
    Ok(Sides { volume, raw, preallocated, images })
}

struct Round {
    volume: f64,
    busy: f64,
    /// Raw, fresh, preallocated.
    others: [Option<f64>; 3],
}

fn compare(
    settings: &Settings,
    kind: &str,
    case: &Case,
    sides: &mut Sides,
    bandwidth: &mut Option<f64>,
    report: &mut Report,
) -> Result<Vec<String>> {
    let workload = &case.workload;
    sides.volume.back_end.process.resume()?;
    let before = sides.volume.counters()?;
    sides.volume.back_end.process.pause()?;
    let rounds = rounds::run_comparable(settings.runs, || round(settings, case, sides))?;
    sides.volume.back_end.process.resume()?;
    let after = sides.volume.counters()?;
    sides.volume.back_end.process.pause()?;
    let runs = |of: &dyn Fn(&Round) -> Option<f64>| rounds.each.iter().filter_map(of).collect::<Runs>();
    let (ours, busy) = (runs(&|round| Some(round.volume)), runs(&|round| Some(round.busy)));
    let raw = runs(&|round| round.others[0]).median();
    if workload.sequential && workload.write_percent == 100 && workload.block == 4 << 20 {
        *bandwidth = raw.map(|rate| rate * f64::from(workload.block));
    }
    let amplification = (workload.write_percent > 0).then(|| after.amplification(&before));
    let carried = bandwidth
        .zip(raw)
        .zip(amplification)
        .map(|((bytes, raw), amplification)| carried(bytes, amplification) / raw);
    let shown = if workload.block > 1 << 20 { f64::from(workload.block) / 1e9 } else { 1e-3 };
    let name = format!("volume/{kind}/{}", case.name());
    let mut row = vec![case.name(), cell(&ours, |rate| number(rate * shown))];
    for (at, (peer, aim)) in
        ["raw", "fresh qcow2", "preallocated qcow2"].into_iter().zip(aims(case, carried)).enumerate()
    {
        let theirs = runs(&|round| round.others[at]);
        let record = Record::new(&name, &format!("throughput, peer {peer}"), "IOPS", &ours, &theirs);
        row.push(cell(&theirs, |rate| number(rate * shown)));
        row.push(record.ratio.map_or("—".to_owned(), |ratio| at_least(ratio, aim)));
        report.records.push(record);
    }
    report.records.push(Record::new(&name, "busy time per request", "ns", &busy, &Runs::default()));
    let aim = (kind == "memory" && workload.block == 4096)
        .then(|| BUSY_AIMS[usize::from(workload.write_percent == 0)]);
    row.push(cell(&busy, number) + &busy.median().map_or_else(String::new, |median| at_most(median, aim)));
    row.push(amplification.map_or("—".to_owned(), number));
    Ok(row)
}

/// A ratio, its aim, and whether it is missed.
fn at_least(ratio: f64, aim: Option<f64>) -> String {
    let aim = aim.map_or_else(String::new, |aim| {
        format!(" (aim {}){}", number(aim), if ratio < aim { " **missed**" } else { "" })
    });
    number(ratio) + &aim
}

/// An aim that a value is not to exceed, and whether it does.
fn at_most(value: f64, aim: Option<f64>) -> String {
    aim.map_or_else(String::new, |aim| {
        format!(" (aim {}){}", number(aim), if value > aim { " **missed**" } else { "" })
    })
}

fn round(settings: &Settings, case: &Case, sides: &mut Sides) -> Result<Round> {
    let workload = &case.workload;
    let raw = run(settings, &mut sides.raw, workload)?;
    let span = if case.is_random_write() { settings.span * WRITE_SPANS } else { settings.span };
    let (volume, busy) = run_for(settings.warm_up, span, &mut sides.volume.back_end, workload)?;
    let busy = busy.context("arykd reports its busy time")?;
    let fresh = if workload.write_percent == 100 {
        let mut fresh = sides.images.start("fresh", "off")?;
        Some(run(settings, &mut fresh, workload)?)
    } else {
        None
    };
    let preallocated = run(settings, &mut sides.preallocated, workload)?;
    Ok(Round { volume, busy, others: [Some(raw), fresh, Some(preallocated)] })
}

/// Requests per second of a back-end, which is stopped before and after.
fn run(settings: &Settings, back_end: &mut BackEnd, workload: &Workload) -> Result<f64> {
    run_for(settings.warm_up, settings.span, back_end, workload).map(|(rate, _)| rate)
}

fn run_for(
    warm_up: Duration,
    span: Duration,
    back_end: &mut BackEnd,
    workload: &Workload,
) -> Result<(f64, Option<f64>)> {
    back_end.process.resume()?;
    let mut front_end = FrontEnd::connect(&back_end.socket, 1, *workload)?;
    front_end.closed(warm_up)?;
    let before = back_end.busy()?;
    let closed = front_end.closed(span)?;
    let after = back_end.busy()?;
    drop(front_end);
    back_end.process.pause()?;
    Ok((closed.rate(), before.zip(after).map(|(before, after)| (after - before) / closed.requests as f64)))
}
