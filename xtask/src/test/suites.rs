//! The suites that cargo runs itself, their results added up from what they print.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::Tally;
use crate::workspace;

/// Random calls of the long form, in the place of ten thousand.
const RPC_CALLS: &str = "100000";

/// All tests of the workspace, some in their long form if that is asked for. Those that need a guest count as guests' (see [`harness`]).
pub(crate) fn workspace(long: bool) -> Result<Tally> {
    let mut cargo = workspace::cargo();
    cargo.args(["test", "--workspace", "--no-fail-fast", "--exclude", "aryk-guest-tests"]);
    if long {
        cargo.env("ARYK_RPC_CALLS", RPC_CALLS);
    }
    summed(&mut cargo)
}

/// The harness's own tests, with those that boot guests. One at a time: each guest wants the cores.
pub(crate) fn harness() -> Result<Tally> {
    let mut cargo = workspace::cargo();
    cargo.args(["test", "--no-fail-fast", "-p", "aryk-guest-tests", "--", "--include-ignored"]);
    cargo.arg("--test-threads=1");
    summed(&mut cargo)
}

/// `tests/loom.rs` of each crate that has one, built for loom in a directory of its own.
pub(crate) fn loom() -> Result<Tally> {
    let mut tally = Tally::default();
    let metadata = workspace::metadata("Cargo.toml", &["--no-deps"])?;
    for package in metadata["packages"].as_array().context("a workspace without packages")? {
        let targets = package["targets"].as_array().context("a package without targets")?;
        if !targets.iter().any(|target| target["name"] == "loom" && target["kind"][0] == "test") {
            continue;
        }
        let name = package["name"].as_str().context("a package without a name")?;
        let mut cargo = workspace::cargo();
        cargo.args(["test", "--release", "-p", name, "--test", "loom", "--target-dir"]);
        cargo.arg(workspace::target()?.join("loom")).env("RUSTFLAGS", "--cfg loom");
        tally.add(summed(&mut cargo)?);
    }
    Ok(tally)
}

/// Whether a request costs as many instructions as was recorded, or fewer. One test.
pub(crate) fn instructions() -> Result<Tally> {
    let mut cargo = workspace::cargo();
    cargo.args(["run", "--release", "-p", "aryk-bench", "--", "instructions", "--check"]);
    let mut tally = Tally::default();
    tally.count("instructions of a request", workspace::run(&mut cargo));
    Ok(tally)
}

/// Runs `cargo test`, passes on what it prints, and adds up its results.
fn summed(cargo: &mut Command) -> Result<Tally> {
    let mut child = cargo.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("running cargo")?;
    let output = child.stdout.take().context("stdout was piped")?;
    let mut tally = Tally::default();
    for line in BufReader::new(output).lines() {
        let line = line?;
        println!("{line}");
        if let Some(result) = result_line(&line) {
            tally.add(result);
        }
    }
    if !child.wait()?.success() && tally.failed == 0 {
        // It did not compile, or ended without a result.
        tally.failed = 1;
    }
    Ok(tally)
}

/// `test result: ok. 8 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; …`
fn result_line(line: &str) -> Option<Tally> {
    let counts = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let count = |what: &str| {
        let part = counts.split(';').find_map(|part| part.trim().strip_suffix(what))?;
        part.trim().parse().ok()
    };
    Some(Tally { passed: count("passed")?, failed: count("failed")?, skipped: count("ignored")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read_off_cargos_lines() {
        let line = "test result: FAILED. 8 passed; 2 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.1s";
        assert_eq!(result_line(line), Some(Tally { passed: 8, failed: 2, skipped: 1 }));
        assert_eq!(result_line("test a::b ... ok"), None);
    }
}
