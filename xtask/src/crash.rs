//! `cargo xtask crash`: builds `arykd` with its crash points, and hands over to the crate in `tests/crash/`.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::workspace;

/// Crashes in `cargo xtask test`, and in its long form.
const ROUNDS: u32 = 50;
const LONG_ROUNDS: u32 = 1000;

/// What the test takes is its own affair.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Arguments of the crash test
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    workspace::run(command()?.args(&args.arguments))
}

/// A stage of `cargo xtask test`.
pub(crate) fn check(long: bool) -> Result<()> {
    let rounds = if long { LONG_ROUNDS } else { ROUNDS };
    workspace::run(command()?.args(["--rounds", &rounds.to_string()]))
}

/// The test, with a daemon of its own: one that dies where it is told to is nobody else's.
fn command() -> Result<Command> {
    let target: PathBuf = workspace::target()?.join("crash");
    let mut build = workspace::cargo();
    build
        .args(["build", "--release", "-p", "arykd", "--features", "crash-points", "--target-dir"])
        .arg(&target);
    workspace::run(&mut build)?;
    let mut test = workspace::cargo();
    test.args(["run", "--release", "-p", "aryk-crash-tests", "--", "--arykd"]);
    test.arg(target.join("release/arykd")).arg("--disks").arg(&target);
    Ok(test)
}
