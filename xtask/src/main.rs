//! The project's commands, as `cargo xtask …`: everything that a person or CI does here but plain `cargo build`.
//!
//! Each command is a module; what they share is where things are ([`workspace`]) and what must be installed
//! ([`install`]). A tool on an ordinary thread: it runs other programs and waits for them.
#![forbid(unsafe_code)]

mod adversary;
mod bench;
mod check;
mod churn;
mod crash;
mod deb;
mod demo;
mod fuzz;
mod generate;
mod hotplug;
mod install;
mod progress;
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

/// What to do.
#[derive(Debug, Subcommand)]
enum Command {
    /// Boot a Linux guest on a disk that arykd serves, and show what happens
    Demo,
    /// Run all tests: units, models, fuzzers, guests, the documentation's commands
    Test(test::Args),
    /// Check format, lints, dependency edges, licences and house rules
    Check,
    /// Fuzz what reads hostile bytes
    Fuzz(fuzz::Args),
    /// Measure arykd and its peers; `bench -- --help` lists what it takes
    Bench(bench::Args),
    /// Kill arykd under load, and check all that a front-end reads; `crash -- --help` lists what it takes
    Crash(crash::Args),
    /// Plug and unplug disks of a running Linux guest, hundreds of times
    Hotplug(hotplug::Args),
    /// Make, use and remove disks at random, thousands of times, beside machines that verify theirs
    Churn(churn::Args),
    /// Attack arykd as hostile VMs do, beside a VM that is measured
    Adversary(adversary::Args),
    /// Make the RPC reference and the clients anew from the types of the methods
    Generate,
    /// Build the Debian package
    Deb(deb::Args),
    /// Install what the commands need (as root), or say what is missing
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
        Command::Check => check::run(),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Crash(args) => crash::run(&args),
        Command::Hotplug(args) => hotplug::run(&args),
        Command::Adversary(args) => adversary::run(&args),
        Command::Churn(args) => churn::run(&args),
        Command::Generate => generate::run(),
        Command::Deb(args) => deb::run(&args),
        Command::Install => {
            install::ensure(install::ALL)?;
            println!("All that the commands need is installed.");
            Ok(())
        }
    }
}

/// Lets Ctrl-C and its kin unwind through whatever runs, so that nothing is left running.
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
