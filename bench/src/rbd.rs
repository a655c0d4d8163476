//! `cargo xtask bench rbd`: images of a Ceph cluster, served by `arykd` and by `qemu-storage-daemon` to the same front-end, and
//! used by fio's `rbd` engine without any front-end. All three use librbd. The cluster has one OSD, which keeps its objects in
//! memory and runs on the same cores, so throughput says how much of them the client leaves to the cluster. The measure is the
//! client's processor time per request. Each side has an image of its own, and a new process in each round.
//!
//! - [`clients`]: which disks should share a client.
//! - [`layers`]: what the layers above the store cost.

mod clients;
mod layers;

use crate::backend::{self, Policy};
use crate::frontend::FrontEnd;
use crate::process::{self, BACK_END_CORE, Process};
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::rounds;
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::{Context, Result, ensure};
use aryk_ceph_tests::{Cluster, Kind, cluster::POOL};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The sides, in the order of all arrays here.
const SIDES: [&str; 4] = ["arykd", "arykd, one core", "qemu-storage-daemon", "fio rbd"];
/// The side of `arykd` that has what fio has: one core, on which its threads sleep as soon as they have no work.
const LIKE_FIO: usize = 1;
/// fio's side.
const FIO: usize = 3;
/// Bytes of a side's image: the cluster keeps all of them in memory.
const IMAGE_BYTES: u64 = 128 << 20;
/// What is compared: its name, its unit, and the value of a run.
type Metric = (&'static str, &'static str, fn(&Run) -> f64);
const METRICS: [Metric; 2] =
    [("throughput", "IOPS", |run| run.rate), ("processor time per request", "ns", |run| run.cpu)];
/// The aims of the ratios to fio: at most this part of its processor time per request, and this part of its throughput.
const CPU_AIM: f64 = 1.0;
const RATE_AIM: f64 = 1.0;
/// How long the exclusive lock of a killed client's image keeps the next one waiting.
const LOCK_EXPIRES: Duration = Duration::from_secs(31);
/// Timeout of a run of fio beyond its time: it connects to the cluster first.
const FIO_START: Duration = Duration::from_secs(30);

const INTRO: &str = "Requests per second, and microseconds of processor time per request of the whole client process (its polling included), as median \
    (least–greatest). Each side has an image of its own on one cluster: one monitor and one OSD with its objects in memory, on the same two cores as \
    everything else, without cephx and with `rbd cache = false`. `arykd` has its reactor on core 0, which polls before it sleeps, and \
    librbd's threads on core 1, beside the front-end and the OSD: the defaults of a host with two cores. `arykd, one core` has core 0 \
    only, as `qemu-storage-daemon` and fio have, for the reactor and librbd's threads (`--client-cpus 0x1`), and does not poll \
    (`--sleep-policy interrupt`). fio has no front-end: its process makes the requests itself, and a thread that polls keeps core 1 as busy as the front-end does. The \
    ratios are those of `arykd, one core` to fio in the same round. The aims: at most 1 for processor time; 1 for requests per second, \
    less the noise. The noise is how far the two sides' own rounds are from their medians: half of the distance between the least and \
    the greatest, as a part of the median, of the noisier side.";

/// The results of one side in one round.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    /// Requests per second.
    rate: f64,
    /// Processor time of the client per request, in ns.
    cpu: f64,
}

/// Measures the selected workloads.
pub fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let wants = |workload: &Workload| settings.wants(&format!("rbd/{}", workload.name()));
    let workloads: Vec<_> = workloads().into_iter().filter(wants).collect();
    let cluster = process::unpinned(|| Cluster::start(&Kind::SMALL))??;
    compare_all(settings, &cluster, workloads, report)?;
    clients::measure(settings, &cluster, report)?;
    // Its daemons would take time from the layers.
    drop(cluster);
    layers::measure(settings, report)
}

/// Compares all sides.
fn compare_all(
    settings: &Settings,
    cluster: &Cluster,
    workloads: Vec<Workload>,
    report: &mut Report,
) -> Result<()> {
    if workloads.is_empty() {
        return Ok(());
    }
    for side in 0..SIDES.len() {
        fill(settings, cluster, &image(side), IMAGE_BYTES)?;
    }
    let mut columns = vec!["workload".to_owned()];
    columns.extend(SIDES.map(str::to_owned));
    columns.extend(SIDES.map(|side| format!("{side}: µs per request")));
    columns.extend(
        ["µs per request, of fio's", "IOPS, of fio's", "noise of IOPS", "core to core, ns"]
            .map(str::to_owned),
    );
    let mut section = Section::new("Images of a Ceph cluster", INTRO, columns);
    for workload in workloads {
        section.row(compare(settings, cluster, &workload, report)?);
    }
    report.section(section);
    Ok(())
}

fn workloads() -> Vec<Workload> {
    let both = |percent| [1, 32].map(|depth| Workload::random(percent, 4 << 10, depth));
    [both(0), both(100)].concat()
}

fn image(side: usize) -> String {
    format!("side{side}")
}

/// Creates an image of so many bytes, without holes.
fn fill(settings: &Settings, cluster: &Cluster, image: &str, bytes: u64) -> Result<()> {
    let file = settings.memory.path().join("image");
    let chunk: Vec<u8> = (0..1_u32 << 18).flat_map(|i| i.wrapping_mul(0x9E37_79B9).to_le_bytes()).collect();
    std::fs::write(&file, chunk.repeat((bytes / chunk.len() as u64) as usize))?;
    let (from, to) = (file.display().to_string(), format!("{POOL}/{image}"));
    let imported = process::unpinned(|| cluster.rbd(&["import", "--no-progress", &from, &to]))?;
    std::fs::remove_file(&file)?;
    imported.map(drop)
}

/// Measures one workload on all sides in turn, and adds the table's row.
fn compare(
    settings: &Settings,
    cluster: &Cluster,
    workload: &Workload,
    report: &mut Report,
) -> Result<Vec<String>> {
    let rounds = rounds::run_comparable(settings.runs, || {
        let mut round = [Run::default(); SIDES.len()];
        for (side, run) in round.iter_mut().enumerate() {
            *run = match side {
                0 | LIKE_FIO => aryk(settings, cluster, workload, side, report)?,
                2 => peer(settings, cluster, workload, side, report)?,
                _ => fio(settings, cluster, workload, side, report)?,
            };
        }
        Ok(round)
    })?;
    let runs =
        |side: usize, of: fn(&Run) -> f64| rounds.each.iter().map(|round| of(&round[side])).collect::<Runs>();
    let case = format!("rbd/{}", workload.name());
    for (ours, theirs) in [(0, LIKE_FIO), (LIKE_FIO, 2), (LIKE_FIO, FIO)] {
        for (metric, unit, of) in METRICS {
            let metric = format!("{metric}, {}, peer {}", SIDES[ours], SIDES[theirs]);
            report.records.push(Record::new(&case, &metric, unit, &runs(ours, of), &runs(theirs, of)));
        }
    }
    let mut row = vec![workload.name()];
    row.extend((0..SIDES.len()).map(|side| cell(&runs(side, |run| run.rate), number)));
    row.extend((0..SIDES.len()).map(|side| cell(&runs(side, |run| run.cpu / 1e3), number)));
    row.extend(aims(
        [LIKE_FIO, FIO].map(|side| runs(side, |run| run.cpu)),
        [LIKE_FIO, FIO].map(|side| runs(side, |run| run.rate)),
    ));
    row.push(rounds.round_trip.as_nanos().to_string());
    Ok(row)
}

/// The ratios of our processor time and of our rate to fio's, each with its aim, and the noise of the rates.
fn aims([cpu, cpu_of_fio]: [Runs; 2], [rate, rate_of_fio]: [Runs; 2]) -> [String; 3] {
    let (cpu, ratio) = (cpu.over(&cpu_of_fio), rate.over(&rate_of_fio));
    let noise = rate.noise().zip(rate_of_fio.noise()).map(|(ours, theirs)| ours.max(theirs));
    let reached = |is_reached| if is_reached { "reached" } else { "**missed**" };
    let of_cpu = cpu.median().map_or("–", |median| reached(median <= CPU_AIM));
    let of_rate =
        ratio.median().map_or("–", |median| reached(median >= RATE_AIM - noise.unwrap_or_default()));
    [
        format!("{} (aim: at most {CPU_AIM}, {of_cpu})", cell(&cpu, number)),
        format!("{} (aim: {RATE_AIM} less the noise, {of_rate})", cell(&ratio, number)),
        noise.map_or("–".to_owned(), number),
    ]
}

/// An empty directory for the sockets of a process.
fn directory(settings: &Settings, name: &str) -> Result<PathBuf> {
    let dir = settings.sockets.path().join(format!("rbd-{name}"));
    if dir.exists() {
        // The previous process's sockets would be mistaken for this one's.
        std::fs::remove_dir_all(&dir)?;
    }
    std::fs::create_dir(&dir)?;
    Ok(dir)
}

fn aryk(
    settings: &Settings,
    cluster: &Cluster,
    workload: &Workload,
    side: usize,
    report: &mut Report,
) -> Result<Run> {
    let dir = directory(settings, &image(side))?;
    let one_core = format!("{:#x}", 1 << BACK_END_CORE);
    let (policy, more) = match side {
        LIKE_FIO => (Policy::Interrupt, &["--client-cpus", one_core.as_str()][..]),
        _ => (settings.policy, &[][..]),
    };
    let (mut process, mut rpc) =
        backend::arykd_with(&settings.arykd, 1 << BACK_END_CORE, policy, &dir, None, more)?;
    report.command(&process.command);
    rpc.call("bdev_rbd_register_cluster", json!({"name": "ceph", "config_file": cluster.conf()}))?;
    let disk = json!({"name": "d0", "cluster_name": "ceph", "pool_name": POOL, "rbd_name": image(side), "block_size": 512});
    rpc.call("bdev_rbd_create", disk)?;
    rpc.call("vhost_create_blk_controller", json!({"ctrlr": "d0", "dev_name": "d0"}))?;
    let socket = dir.join("d0");
    process.wait_for(&socket)?;
    let run = run(settings, workload, &process, &socket)?;
    // The exclusive lock of a killed client's image would keep the next one waiting for 30 s.
    process.end()?;
    Ok(run)
}

fn peer(
    settings: &Settings,
    cluster: &Cluster,
    workload: &Workload,
    side: usize,
    report: &mut Report,
) -> Result<Run> {
    let socket = directory(settings, &image(side))?.join("d0");
    let conf = cluster.conf();
    let blockdev = format!(
        "driver=rbd,node-name=d0,pool={POOL},image={},conf={},cache.direct=on",
        image(side),
        conf.display()
    );
    let export = format!(
        "type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={},writable=on,iothread=t0",
        socket.display()
    );
    let core = BACK_END_CORE.to_string();
    let args = [
        "-c",
        &core,
        "qemu-storage-daemon",
        "--object",
        "iothread,id=t0",
        "--blockdev",
        &blockdev,
        "--export",
        &export,
    ];
    let mut process = Process::start("qemu-storage-daemon", Path::new("taskset"), &args)?;
    report.command(&process.command);
    process.wait_for(&socket)?;
    let run = run(settings, workload, &process, &socket)?;
    // qemu-storage-daemon 7.2 was seen to hang while it closes an image, about once in fifty times.
    if !process.end_or_kill()? {
        std::thread::sleep(LOCK_EXPIRES);
    }
    Ok(run)
}

/// Runs the workload of the front-end on a back-end.
fn run(settings: &Settings, workload: &Workload, process: &Process, socket: &Path) -> Result<Run> {
    let mut front_end = FrontEnd::connect(socket, 1, *workload)?;
    front_end.closed(settings.warm_up)?;
    let before = process.cpu()?;
    let closed = front_end.closed(settings.span)?;
    let used = process.cpu()?.saturating_sub(before);
    Ok(Run { rate: closed.rate(), cpu: used.as_nanos() as f64 / closed.requests as f64 })
}

/// Runs fio, once for the time of a measurement and once for a single request, whose processor time is that of its start.
fn fio(
    settings: &Settings,
    cluster: &Cluster,
    workload: &Workload,
    side: usize,
    report: &mut Report,
) -> Result<Run> {
    let time = settings.warm_up + settings.span;
    let timed = ["--time_based".to_owned(), format!("--runtime={}ms", time.as_millis())];
    let output = directory(settings, &image(side))?.join("fio.json");
    let (_, start) = run_fio(cluster, workload, side, &output, &["--number_ios=1".to_owned()], time)?;
    let (process, used) = run_fio(cluster, workload, side, &output, &timed, time)?;
    report.command(&process.command);
    let results: Value = serde_json::from_slice(&std::fs::read(&output)?).context("fio's results")?;
    let job = &results["jobs"][0];
    let sum = |what: &str| {
        let sides = job["read"][what].as_f64().zip(job["write"][what].as_f64());
        sides.map(|(reads, writes)| reads + writes).with_context(|| format!("fio reports no {what}"))
    };
    let (rate, requests) = (sum("iops")?, sum("total_ios")?);
    ensure!(requests > 0.0, "fio made no requests");
    Ok(Run { rate, cpu: used.saturating_sub(start).as_nanos() as f64 / requests })
}

/// Runs fio to its end; returns it and its processor time.
fn run_fio(
    cluster: &Cluster,
    workload: &Workload,
    side: usize,
    output: &Path,
    more: &[String],
    time: Duration,
) -> Result<(Process, Duration)> {
    let mut words = vec![format!("CEPH_CONF={}", cluster.conf().display()), "taskset".into(), "-c".into()];
    words.extend([BACK_END_CORE.to_string(), "fio".into(), "--name=b".into(), "--ioengine=rbd".into()]);
    words.extend([
        format!("--pool={POOL}"),
        format!("--rbdname={}", image(side)),
        "--clientname=admin".into(),
    ]);
    words.extend([format!("--rw={}", workload.rw()), format!("--bs={}", workload.block)]);
    words.extend([format!("--iodepth={}", workload.depth), "--output-format=json".into()]);
    words.push(format!("--output={}", output.display()));
    words.extend_from_slice(more);
    let mut process = Process::start("fio", Path::new("env"), &words)?;
    let used = process.cpu_until_end(FIO_START + time)?;
    Ok((process, used))
}

#[cfg(test)]
mod tests {
    use super::aims;
    use crate::report::Runs;

    #[test]
    fn a_rate_counts_as_level_within_the_noise_of_the_noisier_side() {
        let runs = |values: [f64; 3]| Runs::from_iter(values);
        let (quiet, fio) = (runs([100.0, 100.0, 100.0]), runs([100.0, 110.0, 90.0]));
        let of =
            |cpu: f64, rate: f64| aims([quiet.scaled(cpu), quiet.clone()], [quiet.scaled(rate), fio.clone()]);
        assert_eq!(
            of(0.9, 0.95),
            [
                "0.900 (0.900–0.900) (aim: at most 1, reached)",
                "0.950 (0.864–1.06) (aim: 1 less the noise, reached)",
                "0.100"
            ]
        );
        let [cpu, rate, _] = of(1.1, 0.85);
        assert!(cpu.contains("**missed**") && rate.contains("**missed**"), "{cpu}, {rate}");
        // One round has no noise.
        let one = || Runs::from_iter([99.0]);
        let [cpu, rate, noise] = aims([one(), one()], [one(), one()]);
        assert!(cpu.ends_with("reached)") && rate.ends_with("reached)"), "{cpu}, {rate}");
        assert_eq!(noise, "–");
    }
}
