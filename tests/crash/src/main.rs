//! The crash test's command line; `cargo xtask crash` builds the daemon and runs it. One thread, and one for signals.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aryk_crash_tests::drive;
use aryk_crash_tests::life::{self, Settings};
use aryk_crash_tests::random::stream;
use aryk_crash_tests::report::Report;
use aryk_crash_tests::shape::{Device, Format, Mode, Shape};
use aryk_pci::Address;
use clap::Parser;

/// Crashes of one life. Even, so that the first crash is a kill by the test: the daemon of the control phase has no step
/// to die at.
const CRASHES: u64 = 10;
/// How long a life runs without crashes.
const CONTROL: Duration = Duration::from_millis(300);

/// Kills arykd under load, and checks everything that a front-end reads.
#[derive(Debug, Parser)]
#[command(name = "crash", bin_name = "cargo xtask crash", max_term_width = 80)]
struct Cli {
    /// The daemon
    #[arg(long, value_name = "PATH", hide = true)]
    arykd: PathBuf,
    /// Number of crashes; 0 runs each kind of front-end without crashes
    #[arg(long, default_value_t = 50)]
    rounds: u64,
    /// Seed of requests, front-ends and delays
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only this life of the run with this seed and number of crashes
    #[arg(long)]
    life: Option<u64>,
    /// Only front-ends that connect in this mode
    #[arg(long, value_enum)]
    mode: Vec<Mode>,
    /// Only disks of this device type
    #[arg(long, value_enum)]
    device: Option<Device>,
    /// Only rings of this format
    #[arg(long, value_enum)]
    format: Vec<Format>,
    /// Directory for disks, on a real file system
    #[arg(long, value_name = "DIR", default_value = ".")]
    disks: PathBuf,
    /// Instead of files: the NVMe drive at this PCI address, with one namespace of 2 MiB, whose data is lost
    #[arg(long, value_name = "ADDRESS")]
    nvme: Option<Address>,
    /// Instead of files: new images in the pool `rbd` of the Ceph cluster with this configuration file
    #[arg(long, value_name = "CONF", conflicts_with = "nvme")]
    ceph: Option<PathBuf>,
    /// Features of these images, such as `layering`, which has no exclusive lock [default: the cluster's]
    #[arg(long, value_name = "FEATURES", requires = "ceph")]
    ceph_features: Option<String>,
    /// Only volumes of pools in files
    #[arg(long, conflicts_with_all = ["nvme", "ceph"])]
    volume: bool,
    /// Write all results to this JSON file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the results as a Markdown page to this file
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    let settings = Settings {
        arykd: &cli.arykd,
        disks: &cli.disks,
        drive: cli.nvme,
        ceph: cli.ceph.as_deref(),
        ceph_features: cli.ceph_features.as_deref(),
        seed: cli.seed,
        control: CONTROL,
    };
    let or_all =
        |some: &[Mode]| if some.is_empty() { vec![Mode::Server, Mode::Client] } else { some.to_vec() };
    let modes = or_all(&cli.mode);
    let formats =
        if cli.format.is_empty() { vec![Format::Split, Format::Packed] } else { cli.format.clone() };
    let lives = cli.rounds.div_ceil(CRASHES).max(5);
    let mut records = Vec::new();
    for life in 0..lives {
        let crashes = (life * CRASHES).min(cli.rounds)..((life + 1) * CRASHES).min(cli.rounds);
        if cli.life.is_some_and(|only| only != life) || (crashes.is_empty() && cli.rounds > 0) {
            continue;
        }
        let mut shape = Shape::draw(&mut stream(cli.seed, life << 8), life, cli.device, &modes, &formats);
        if cli.volume {
            (shape.volume, shape.encrypted) = (true, false);
        } else if cli.nvme.is_some() || cli.ceph.is_some() {
            shape.volume = false;
        }
        if let Some(drive) = cli.nvme {
            shape.block_size = drive::block_size(drive)?;
        }
        println!("life {life}: {}, {} crashes", shape.summary(), crashes.end - crashes.start);
        let record = life::run_life(settings, life, &shape, crashes)?;
        if let Some(violation) = &record.violation {
            println!("VIOLATION: {violation}\n{}", record.log.as_deref().unwrap_or_default());
            let nvme = cli.nvme.map_or_else(String::new, |drive| format!(" --nvme {drive}"));
            let mut ceph =
                cli.ceph.as_ref().map_or_else(String::new, |conf| format!(" --ceph {}", conf.display()));
            let volume = if cli.volume { " --volume" } else { "" };
            if let Some(features) = &cli.ceph_features {
                ceph += &format!(" --ceph-features {features}");
            }
            println!(
                "to repeat: cargo xtask crash{nvme}{ceph}{volume} --seed {} --rounds {} --life {life}",
                cli.seed, cli.rounds
            );
        }
        records.push(record);
    }
    let report = Report::new(cli.seed, records);
    if let Some(path) = &cli.json {
        std::fs::write(path, serde_json::to_vec_pretty(&report)?)
            .with_context(|| path.display().to_string())?;
    }
    if let Some(path) = &cli.markdown {
        std::fs::write(path, report.markdown()).with_context(|| path.display().to_string())?;
    }
    for (name, gaps) in &report.gaps {
        let [p50, p99, max] = [gaps.p50_us, gaps.p99_us, gaps.max_us].map(|us| us as f64 / 1000.0);
        println!("{name}: {} gaps, p50 {p50:.1} ms, p99 {p99:.1} ms, max {max:.1} ms", gaps.count);
    }
    println!("{}", report.summary());
    ensure!(report.violations == 0, "{} violations", report.violations);
    Ok(())
}
