//! The crash test's command line; `cargo xtask crash` builds the daemon and runs it. One thread, and one for signals.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use aryk_crash_tests::life::{self, Settings};
use aryk_crash_tests::random::Random;
use aryk_crash_tests::ring::Format;
use aryk_crash_tests::shape::{Mode, Shape};
use clap::Parser;

/// Kills arykd under load, and checks everything that a front-end reads.
#[derive(Debug, Parser)]
#[command(name = "crash", bin_name = "cargo xtask crash --", max_term_width = 80)]
struct Cli {
    /// The daemon
    #[arg(long, value_name = "PATH")]
    arykd: PathBuf,
    /// Where disks are made: on a real file system
    #[arg(long, value_name = "DIR", default_value = ".")]
    disks: PathBuf,
    /// What is drawn: requests, shapes, delays
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Lives of front-ends
    #[arg(long, default_value_t = 5)]
    lives: u64,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<bool> {
    let settings = Settings { arykd: &cli.arykd, disks: &cli.disks, control: Duration::from_millis(300) };
    let mut clean = true;
    for life in 0..cli.lives {
        let shape = Shape::draw(&mut Random::new(cli.seed, life), &[Mode::Server], &[Format::Split]);
        println!("life {life}: {}", shape.summary());
        let record = life::live(settings, cli.seed, life, &shape)?;
        println!("  {}", serde_json::to_string(&record)?);
        clean &= record.violation.is_none();
    }
    Ok(clean)
}
