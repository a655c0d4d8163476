//! The project's commands, as `cargo xtask …`: all tasks of developers and CI except plain `cargo build`.
//!
//! Each command is a module; they share the paths ([`workspace`]) and the required packages ([`install`]). A tool on an
//! ordinary thread: it runs other programs and waits for them.
#![forbid(unsafe_code)]

mod adversary;
mod bench;
mod budget;
mod ceph;
mod check;
mod churn;
mod crash;
mod cuts;
mod deb;
mod demo;
mod fuzz;
mod generate;
mod hotplug;
mod install;
mod progress;
mod simulate;
mod test;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// The project's commands.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 80)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The command to run.
#[derive(Debug, Subcommand)]
enum Command {
    /// Boot a Linux guest on a disk that arykd serves, and show what happens
    Demo,
    /// Run all tests: units, models, fuzzers, guests, the documentation's commands
    Test(test::Args),
    /// Check format, lints, dependency edges, licences and house rules
    Check(check::Args),
    /// Fuzz the parsers of untrusted input
    Fuzz(fuzz::Args),
    /// Measure arykd and its peers; `bench -- --help` lists its arguments
    Bench(bench::Args),
    /// Kill arykd under load, and check all that a front-end reads; `crash -- --help` lists its arguments
    Crash(crash::Args),
    /// Plug and unplug disks of a running Linux guest, hundreds of times
    Hotplug(hotplug::Args),
    /// Create, use and delete disks at random, thousands of times, beside VMs that verify theirs
    Churn(churn::Args),
    /// Cut the connections to a disk of another host, a thousand times, under verified writes
    Cuts(cuts::Args),
    /// Simulate a part of Aryk by seed, on stores that fail
    #[command(subcommand)]
    Simulate(simulate::What),
    /// Attack arykd as hostile VMs do, beside a VM that is measured
    Adversary(adversary::Args),
    /// Start a Ceph cluster on this host for trying out, until Ctrl-C
    Ceph(ceph::Args),
    /// Regenerate the RPC reference and the clients from the types of the methods
    Generate,
    /// Build the Debian package
    Deb(deb::Args),
    /// Install the packages that the commands need (as root), or name the missing ones
    Install,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match interrupt_on_signals().and_then(|()| run(cli.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    match command {
        Command::Demo => demo::run(),
        Command::Test(args) => test::run(&args),
        Command::Ceph(args) => ceph::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Crash(args) => crash::run(&args),
        Command::Hotplug(args) => hotplug::run(&args),
        Command::Adversary(args) => adversary::run(&args),
        Command::Churn(args) => churn::run(&args),
        Command::Cuts(args) => cuts::run(&args),
        Command::Simulate(what) => simulate::run(&what),
        Command::Generate => generate::run(),
        Command::Deb(args) => deb::run(&args),
        Command::Install => {
            install::ensure(install::ALL)?;
            println!("All packages that the commands need are installed.");
            Ok(())
        }
    }
}

/// Makes SIGINT and other terminating signals unwind the running command, so that it ends its children.
fn interrupt_on_signals() -> Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    std::thread::spawn(move || {
        for _ in signals.forever() {
            aryk_guest_tests::process::interrupt();
        }
    });
    Ok(())
}
