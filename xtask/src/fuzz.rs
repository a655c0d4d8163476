//! `cargo xtask fuzz`: builds the fuzzers of `fuzz/` and runs them for a while.
//!
//! libFuzzer on stable Rust: `RUSTFLAGS` enables LLVM's coverage passes. An explicit `--target` keeps those flags away
//! from build scripts and procedural macros. New inputs stay under `target/`; the corpora in `fuzz/corpus` hold inputs
//! chosen by hand, and found ones with a large part of the coverage.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::test::{Tally, lanes};
use crate::{install, workspace};

/// LLVM's instrumentation, as libFuzzer needs it.
const RUSTFLAGS: &str = "-Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares \
    --cfg fuzzing";
const TARGET: &str = "x86_64-unknown-linux-gnu";
const MANIFEST: &str = "fuzz/Cargo.toml";
/// Memory limit of an input: beyond it, a target has found an allocation that a peer controls.
const RSS_LIMIT_MB: u32 = 1024;
/// Time limit of an input.
const TIMEOUT_S: u32 = 10;

/// Number of fuzzers at a time: each has one thread.
const AT_A_TIME: usize = 2;

/// Target, duration and seed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only this target [default: all, two at a time]
    target: Option<String>,
    /// Seconds for each target
    #[arg(long, default_value = "60")]
    seconds: u32,
    /// Seed of the mutations; the same seed and build try the same inputs
    #[arg(long, default_value = "1")]
    seed: u32,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut names = targets()?;
    if let Some(wanted) = &args.target {
        ensure!(names.contains(wanted), "no target {wanted}; the targets are {}", names.join(", "));
        names.retain(|name| name == wanted);
    }
    let tally = run_targets(&names, args.seconds, args.seed)?;
    if tally.failed > 0 {
        bail!("{} of {} targets failed; their inputs are in fuzz/artifacts", tally.failed, names.len());
    }
    Ok(())
}

/// Runs all targets, each as a test that passes or fails.
pub(crate) fn run_all(seconds: u32) -> Result<Tally> {
    run_targets(&targets()?, seconds, 1)
}

fn run_targets(names: &[String], seconds: u32, seed: u32) -> Result<Tally> {
    install::ensure(&[install::CXX])?;
    let programs = workspace::root().join("fuzz/target");
    let mut cargo = workspace::cargo();
    cargo.args(["build", "--release", "--manifest-path", MANIFEST, "--target", TARGET, "--target-dir"]);
    cargo.arg(&programs).env("RUSTFLAGS", RUSTFLAGS);
    for name in names {
        cargo.args(["--bin", name]);
    }
    workspace::run(&mut cargo)?;
    lanes::run(names, AT_A_TIME, |name| {
        let program = programs.join(TARGET).join("release").join(name);
        let mut tally = Tally::default();
        tally.count(&format!("fuzz {name}"), run_target(name, &program, seconds, seed));
        Ok(tally)
    })
}

fn run_target(name: &str, program: &Path, seconds: u32, seed: u32) -> Result<()> {
    let fuzz = workspace::root().join("fuzz");
    let found = fuzz.join("target/corpus").join(name);
    let artifacts = fuzz.join("artifacts").join(name);
    std::fs::create_dir_all(&found)?;
    std::fs::create_dir_all(&artifacts)?;
    let seeds = fuzz.join("corpus").join(name);
    let log_path = artifacts.join("log");
    let log = std::fs::File::create(&log_path)?;
    let status = Command::new(program)
        .arg(format!("-seed={seed}"))
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-rss_limit_mb={RSS_LIMIT_MB}"))
        .arg(format!("-timeout={TIMEOUT_S}"))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .arg("-print_final_stats=1")
        .arg(&found)
        .args(seeds.is_dir().then_some(&seeds))
        .stdout(std::process::Stdio::null())
        .stderr(log)
        .status()
        .with_context(|| format!("running {}", program.display()))?;
    let said = String::from_utf8_lossy(&std::fs::read(&log_path)?).into_owned();
    let lines: Vec<_> = said.lines().collect();
    if !status.success() {
        bail!("{status}\n{}", lines[lines.len().saturating_sub(40)..].join("\n"));
    }
    let stat = |key: &str| lines.iter().find_map(|line| line.strip_prefix(key)).unwrap_or("?").trim();
    let coverage = lines.iter().rev().find_map(|line| line.split("cov: ").nth(1)?.split(' ').next());
    println!(
        "  {name}: {} inputs, {} edges, {} MB",
        stat("stat::number_of_executed_units:"),
        coverage.unwrap_or("?"),
        stat("stat::peak_rss_mb:")
    );
    Ok(())
}

/// The names in `fuzz/targets`, sorted.
fn targets() -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(workspace::root().join("fuzz/targets"))? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|stem| stem.to_str()).context("a target without a name")?;
        names.push(name.to_owned());
    }
    names.sort();
    Ok(names)
}
