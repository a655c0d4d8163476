//! `cargo xtask bench`: runs the crate in `bench/`.

use anyhow::Result;
use std::process::Command;

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
    if args.arguments.iter().any(|word| word == "nvme-guest" || word == "nvmf") {
        install::ensure(install::GUEST)?;
    }
    if args.arguments.iter().any(|word| word == "rbd") {
        install::ensure(install::CEPH)?;
        install::ensure(&[install::QEMU_RBD])?;
    }
    let bench = workspace::build_programs()?.join("aryk-bench");
    workspace::run(workspace::at_root(Command::new(bench)).args(&args.arguments))
}
