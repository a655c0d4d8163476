//! `cargo xtask bench`: measures `arykd` and `qemu-storage-daemon` under one front-end from outside the project.
//!
//! - [`frontend`]: the polled front-end, on a core of its own; [`workload`]: its requests.
//! - [`backend`], [`process`], [`rpc`], [`fio`]: the measured programs, on the other core.
//! - [`ceiling`], [`target`]: the front-end's own limit; [`closed`], [`open`], [`idle`]: the measurements, repeated in
//!   comparable [`rounds`].
//! - [`frontends`]: the front-end of `aryk bench`, compared with this one.
//! - [`scsi`]: SCSI hosts compared with block devices, both of `arykd`.
//! - [`scale`]: thousands of disks, and [`fleet`], their front-ends.
//! - [`calls`]: the control plane, and its effect on I/O.
//! - [`qos`]: accuracy and fairness of limits.
//! - [`nvme`], [`driver`]: the NVMe driver compared with a bare loop, and the path from a VM's queue to it.
//! - [`nvmf`]: the NVMe/TCP target compared with a bare loop.
//! - [`nvme_guest`]: the NVMe driver compared with the kernel's, in a guest whose clock counts instructions.
//! - [`crypto`]: the cipher alone, and what it adds to a request.
//! - [`instructions`], [`stack`], [`turns`]: the path within one process, counted instead of timed.
//! - [`rbd`]: images of a Ceph cluster, beside `qemu-storage-daemon` and fio.
//! - [`volume`]: volumes beside the disk of their pool, and beside qcow2 images.
//! - [`report`], [`machine`]: medians, records, tables, and the environment of the results.
//!
//! A tool: it runs on its main thread, waits, and reads the wall clock. It never measures two back-ends at a time: the
//! others are stopped by SIGSTOP.
#![deny(unsafe_code)]
#![expect(clippy::disallowed_methods, reason = "a benchmark measures wall time, and waits")]

mod backend;
mod calls;
mod ceiling;
mod closed;
mod crowd;
mod crypto;
mod driver;
mod fio;
mod fleet;
mod frontend;
mod frontends;
mod idle;
mod instructions;
mod limited;
mod load;
mod machine;
mod nvme;
mod nvme_guest;
mod nvmf;
mod open;
mod plot;
mod process;
mod qos;
mod rbd;
mod report;
mod rounds;
mod rpc;
mod scale;
mod scanner;
mod scsi;
mod settings;
mod stack;
mod target;
mod turns;
mod volume;
mod workload;

use anyhow::{Context, Result};
use backend::Policy;
use ceiling::Ceilings;
use clap::Parser;
use machine::Stolen;
use report::Report;
use settings::Settings;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The page of a full run's tables.
const RESULTS: &str = "docs/bench/results.md";
/// The page of `rpc`.
const RPC_RESULTS: &str = "docs/bench/rpc.md";
/// The page of `scsi`.
const SCSI_RESULTS: &str = "docs/bench/scsi.md";
/// The page of `qos`.
const QOS_RESULTS: &str = "docs/bench/qos.md";
/// The page of `scale`.
const SCALE_RESULTS: &str = "docs/bench/scale.md";
/// The page of `open`.
const OPEN_RESULTS: &str = "docs/bench/open.md";
/// The page of `crypto`.
const CRYPTO_RESULTS: &str = "docs/bench/crypto.md";
/// The page of `volume`.
const VOLUME_RESULTS: &str = "docs/bench/volume.md";
/// The page of `rbd`.
const RBD_RESULTS: &str = "docs/bench/rbd.md";
/// The page of `nvme`.
const NVME_RESULTS: &str = "docs/bench/nvme.md";

/// The page of `nvmf`.
const NVMF_RESULTS: &str = "docs/bench/nvmf.md";
/// The page of `nvme-guest`.
const NVME_GUEST_RESULTS: &str = "docs/bench/nvme-guest.md";

/// Measures arykd and its peers.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench")]
struct Args {
    #[command(subcommand)]
    command: Option<Subcommand>,
    /// Quick instead of exact: a full run takes less than a minute.
    #[arg(long, global = true)]
    quick: bool,
    /// Only cases whose name contains this, such as "null", "memory/randread-4k/qd32", "idle", "ceiling",
    /// "front-end".
    #[arg(long, value_name = "PART", global = true)]
    case: Vec<String>,
    /// Runs of each measurement, on each side in turn [default: 5, or 1 with --quick].
    #[arg(long, value_name = "N", global = true)]
    runs: Option<usize>,
    /// Seconds of each run [default: 2, or 0.5 for crypto, 0.8 for rbd, 0.3 for nvme, 0.1 with --quick].
    #[arg(long, value_name = "S", global = true)]
    seconds: Option<f64>,
    /// Sleep policy of arykd in closed loops.
    #[arg(long, value_enum, default_value = "adaptive")]
    policy: Policy,
    /// Queues of the front-end.
    #[arg(long, value_name = "N", default_value_t = 1)]
    queues: usize,
    /// Writes all results as a JSON list.
    #[arg(long, value_name = "FILE", global = true)]
    json: Option<PathBuf>,
    /// Writes the tables as a page [default: docs/bench/results.md, after a full run without --quick].
    #[arg(long, value_name = "FILE", global = true)]
    markdown: Option<PathBuf>,
    /// The date to put on the page [default: the system's].
    #[arg(long, global = true)]
    date: Option<String>,
    /// The arykd to measure [default: the release build of this workspace].
    #[arg(long, value_name = "FILE", global = true)]
    arykd: Option<PathBuf>,
    /// Directory for files on a disk.
    #[arg(long, value_name = "DIR", default_value = "/var/tmp", global = true)]
    dir: PathBuf,
}

#[derive(Debug, clap::Subcommand)]
enum Subcommand {
    /// Counts the instructions of a request within one process, with valgrind.
    Instructions {
        /// Fails if a request takes over 5% more instructions than recorded.
        #[arg(long)]
        check: bool,
        /// Records the current counts.
        #[arg(long, conflicts_with = "check")]
        record: bool,
        /// Shows which layers execute the instructions, for the cases of the null disk.
        #[arg(long, conflicts_with_all = ["check", "record"])]
        layers: bool,
    },
    /// Measures RPC calls of the daemon, and their effect on I/O.
    Rpc,
    /// Measures the processor time and the latency of a request at low rates, for each sleep policy.
    Open,
    /// Compares disks of a SCSI host with block devices.
    Scsi,
    /// Measures encryption: the cipher, what it adds to a request, and encrypted disks in memory.
    Crypto,
    /// Measures the NVMe driver, and the path from a VM's queue to it, on a model controller.
    Nvme,
    /// Counts the instructions of a request of the NVMe driver and of Linux's, in a guest.
    NvmeGuest,
    /// Measures the NVMe/TCP target, beside a bare loop over the same socket.
    Nvmf,
    /// Measures images of a Ceph cluster, and compares their cost with that of other users of librbd.
    Rbd,
    /// Measures volumes, beside the disk of their pool and beside qcow2 images.
    Volume,
    /// Measures how exact and how fair limits are.
    Qos,
    /// Measures thousands of attached disks, a few of which are used.
    Scale,
    /// Runs the path that valgrind counts.
    #[command(hide = true)]
    Stack { case: String, batches: u32 },
}

impl Args {
    fn settings(&self) -> Result<Settings> {
        let (runs, seconds, idle) = match self.command {
            _ if self.quick => (1, 0.1, 2.0),
            Some(Subcommand::Nvme) => (5, nvme::SECONDS, 10.0),
            Some(Subcommand::Crypto) => (5, 0.5, 10.0),
            Some(Subcommand::Rbd) => (5, 0.8, 10.0),
            _ => (5, 2.0, 10.0),
        };
        let span = Duration::from_secs_f64(self.seconds.unwrap_or(seconds));
        let temporary = |dir: &std::path::Path| {
            tempfile::Builder::new()
                .prefix("aryk-bench-")
                .tempdir_in(dir)
                .with_context(|| format!("making a directory in {}", dir.display()))
        };
        Ok(Settings {
            runs: self.runs.unwrap_or(runs).max(1),
            span,
            warm_up: span / 5,
            idle: Duration::from_secs_f64(idle),
            quick: self.quick,
            cases: self.case.clone(),
            policy: self.policy,
            queues: self.queues.max(1),
            arykd: self.arykd.clone().map_or_else(backend::build_arykd, Ok)?,
            sockets: temporary(&std::env::temp_dir())?,
            files: temporary(&self.dir)?,
            memory: temporary("/dev/shm".as_ref())?,
        })
    }

    /// The page for the tables, if the run writes one.
    fn page(&self) -> Option<PathBuf> {
        let whole = self.case.is_empty() && !self.quick;
        let page = match self.command {
            Some(Subcommand::Rpc) => RPC_RESULTS,
            Some(Subcommand::Open) => OPEN_RESULTS,
            Some(Subcommand::Crypto) => CRYPTO_RESULTS,
            Some(Subcommand::Nvme) => NVME_RESULTS,
            Some(Subcommand::NvmeGuest) => NVME_GUEST_RESULTS,
            Some(Subcommand::Nvmf) => NVMF_RESULTS,
            Some(Subcommand::Scsi) => SCSI_RESULTS,
            Some(Subcommand::Rbd) => RBD_RESULTS,
            Some(Subcommand::Volume) => VOLUME_RESULTS,
            Some(Subcommand::Qos) => QOS_RESULTS,
            Some(Subcommand::Scale) => SCALE_RESULTS,
            _ => RESULTS,
        };
        self.markdown.clone().or_else(|| whole.then(|| page.into()))
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    match &args.command {
        None => measure(&args, |settings, report| {
            let ceilings = Ceilings::measure(settings, &closed::CASES, report)?;
            for case in closed::CASES {
                closed::measure(settings, case, &ceilings, report)?;
            }
            frontends::measure(settings, &ceilings, report)?;
            idle::measure(settings, report)
        }),
        Some(Subcommand::Rpc) => measure(&args, calls::measure),
        Some(Subcommand::Open) => measure(&args, open::measure),
        Some(Subcommand::Crypto) => measure(&args, crypto::measure),
        Some(Subcommand::Nvme) => measure(&args, nvme::measure),
        Some(Subcommand::NvmeGuest) => count_in_guest(&args),
        Some(Subcommand::Nvmf) => measure(&args, nvmf::measure),
        Some(Subcommand::Scsi) => measure(&args, scsi::measure),
        Some(Subcommand::Rbd) => measure(&args, rbd::measure),
        Some(Subcommand::Volume) => measure(&args, volume::measure),
        Some(Subcommand::Qos) => measure(&args, qos::measure),
        Some(Subcommand::Scale) => measure(&args, scale::measure),
        Some(Subcommand::Instructions { layers: true, .. }) => instructions::layers::print(),
        Some(Subcommand::Instructions { check, record, .. }) => instructions::instructions(*check, *record),
        Some(Subcommand::Stack { case, batches }) => instructions::run(case, *batches),
    }
}

/// Runs the selected measurements and writes the results.
fn measure(args: &Args, what: impl FnOnce(&Settings, &mut Report) -> Result<()>) -> Result<()> {
    let settings = args.settings()?;
    process::pin(process::FRONT_END_CORE)?;
    frontend::watch();
    let (start, stolen) = (Instant::now(), Stolen::watch());
    let before = rounds::round_trip();
    let mut report = Report::default();
    what(&settings, &mut report)?;
    let round_trips = [before, rounds::round_trip()];
    println!(
        "measured in {:.0} s; a cache line's round trip: {round_trips:?}",
        start.elapsed().as_secs_f64()
    );
    if let Some(file) = &args.json {
        report.write_json(file)?;
    }
    if let Some(file) = args.page() {
        let machine = machine::describe(args.date.as_deref(), &stolen, round_trips);
        report.write_markdown(&file, &preface(args, &settings, &report, &machine))?;
    }
    Ok(())
}

/// Counts instructions in a guest, and writes the results.
fn count_in_guest(args: &Args) -> Result<()> {
    let mut report = Report::default();
    let preface = nvme_guest::measure(args.runs, args.quick, args.date.as_deref(), &mut report)?;
    if let Some(file) = &args.json {
        report.write_json(file)?;
    }
    if let Some(file) = args.page() {
        report.write_markdown(&file, &preface)?;
    }
    Ok(())
}

/// The head of the page: the measurements, how to repeat them, and the environment.
fn preface(args: &Args, settings: &Settings, report: &Report, machine: &str) -> String {
    if matches!(args.command, Some(Subcommand::Nvme)) {
        return format!(
            "# NVMe: the driver and the path\n\nWritten by `cargo xtask bench nvme`: {} runs of {:?} of each measurement, in turns. {}\n{machine}",
            settings.runs,
            settings.span,
            nvme::METHOD,
        );
    }
    let commands: Vec<String> =
        report.commands.iter().map(|command| settings.without_paths(command)).collect();
    let (command, front_end, runs) = match args.command {
        Some(Subcommand::Scale) => ("bench scale", "the project's own", scale::PAIRS),
        Some(Subcommand::Volume) => ("bench volume", "crate `blkio`", settings.runs),
        Some(Subcommand::Qos) => ("bench qos", "the project's own", settings.runs),
        Some(Subcommand::Rpc) => ("bench rpc", "crate `blkio`", settings.runs),
        Some(Subcommand::Open) => ("bench open", "crate `blkio`", settings.runs),
        Some(Subcommand::Nvmf) => ("bench nvmf", "the project's own, over TCP", settings.runs),
        Some(Subcommand::Crypto) => ("bench crypto", "crate `blkio`", settings.runs),
        Some(Subcommand::Rbd) => ("bench rbd", "crate `blkio`", settings.runs),
        Some(Subcommand::Scsi) => ("bench scsi", "`aryk bench`", settings.runs),
        _ => ("bench", "crate `blkio`", settings.runs),
    };
    format!(
        "# Measurements\n\nWritten by `cargo xtask {command}`: {runs} runs of {:?} of each measurement, in turns. Front-end: \
         {front_end}, polled, {} queue(s), on core {}; back-ends on core {}.\n\n{}\nCommands:\n\n```text\n{}\n```\n",
        settings.span,
        settings.queues,
        process::FRONT_END_CORE,
        process::BACK_END_CORE,
        machine,
        commands.join("\n"),
    )
}
