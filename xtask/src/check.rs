//! `cargo xtask check`: the house rules that a program can check.
//!
//! Each check returns a list of findings; all checks run, and all findings are printed.

mod edges;
mod files;
mod licences;

use std::time::Instant;

use anyhow::{Result, bail};
use serde_json::Value;

use crate::{budget, generate, workspace};

/// The workspaces of this repository; the second is built with other flags.
const MANIFESTS: [&str; 2] = ["Cargo.toml", "fuzz/Cargo.toml"];

/// The name of a check, and the function that returns its findings.
type Check = (&'static str, fn() -> Result<Vec<String>>);

/// These take seconds.
const QUICK_CHECKS: [Check; 5] = [
    ("format", format),
    ("dependency edges", || edges::check(&members()?)),
    ("unsafe code", || files::check_unsafe(&members()?)),
    ("files", files::check_files),
    ("licences", licences::check),
];

/// These compile the workspace.
const OTHER_CHECKS: [Check; 3] =
    [("generated files", generate::stale), ("clippy", clippy), ("fuzz targets", fuzz_targets)];

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only the checks that compile nothing: they take seconds
    #[arg(long)]
    quick: bool,
}

#[expect(clippy::disallowed_methods, reason = "the output shows the duration of each check")]
pub(crate) fn run(args: &Args) -> Result<()> {
    let others: &[Check] = if args.quick { &[] } else { &OTHER_CHECKS };
    let mut failed = Vec::new();
    for &(name, check) in QUICK_CHECKS.iter().chain(others) {
        let started = Instant::now();
        let findings = check().unwrap_or_else(|error| vec![format!("{error:#}")]);
        let seconds = started.elapsed().as_secs_f32();
        let verdict = if findings.is_empty() { "ok" } else { "FAILED" };
        println!("{name} ... {verdict} ({seconds:.1} s)");
        for finding in &findings {
            println!("  {finding}");
        }
        if !findings.is_empty() {
            failed.push(name);
        }
    }
    for warning in budget::warnings()? {
        println!("warning: {warning}");
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

fn format() -> Result<Vec<String>> {
    for manifest in MANIFESTS {
        workspace::run(workspace::cargo().args(["fmt", "--all", "--check", "--manifest-path", manifest]))?;
    }
    Ok(Vec::new())
}

/// Also denies warnings about missing documentation.
fn clippy() -> Result<Vec<String>> {
    let mut cargo = workspace::cargo();
    cargo.args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    workspace::run(&mut cargo)?;
    Ok(Vec::new())
}

/// The fuzz targets, whose workspace is another one: a change of what they test would be noticed late.
fn fuzz_targets() -> Result<Vec<String>> {
    let mut cargo = workspace::cargo();
    cargo.args(["check", "--quiet", "--bins", "--manifest-path", MANIFESTS[1]]);
    workspace::run(cargo.env("RUSTFLAGS", "--cfg fuzzing"))?;
    Ok(Vec::new())
}

/// The packages of the main workspace, from `cargo metadata`.
fn members() -> Result<Vec<Value>> {
    let mut metadata = workspace::metadata("Cargo.toml", &["--no-deps"])?;
    match metadata["packages"].take() {
        Value::Array(packages) => Ok(packages),
        other => bail!("cargo metadata reports {other} as packages"),
    }
}
