//! `cargo xtask bench`: runs the crate in `bench/`.

use anyhow::Result;

use crate::{install, workspace};

/// The crate in `bench/` parses all arguments itself.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Arguments of the benchmark
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    install::ensure(&[install::QEMU_STORAGE_DAEMON, install::FIO, install::VALGRIND])?;
    let mut cargo = workspace::cargo();
    cargo.args(["build", "--release", "-p", "arykd"]);
    workspace::run(&mut cargo)?;
    let mut cargo = workspace::cargo();
    cargo.args(["run", "--release", "-p", "aryk-bench", "--"]).args(&args.arguments);
    workspace::run(&mut cargo)
}
