//! `cargo xtask crash`: runs the crate in `tests/crash/`, which kills `arykd` at its crash points, or crashes `arykd` under
//! Linux guests.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use aryk_guest_tests::cases;

use crate::{test, workspace};

/// Number of crashes in `cargo xtask test`, and in its long form.
const ROUNDS: u32 = 50;
const LONG_ROUNDS: u32 = 1000;

/// The crate in `tests/crash/` parses its arguments itself.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Args {
    /// Kill arykd under Linux guests instead, 20 times during each guest's run
    #[arg(long)]
    guests: bool,
    /// Write the guests' results into this page, in place of its section about guests
    #[arg(long, value_name = "FILE", requires = "guests")]
    page: Option<PathBuf>,
    /// Arguments of the crash test
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.guests {
        ensure!(args.arguments.is_empty(), "--guests allows no {}", args.arguments[0]);
        return guests(args.page.as_deref());
    }
    workspace::run(command()?.args(&args.arguments))
}

/// Runs the crash test as a stage of `cargo xtask test`.
pub(crate) fn check(long: bool) -> Result<()> {
    let rounds = if long { LONG_ROUNDS } else { ROUNDS };
    workspace::run(command()?.args(["--rounds", &rounds.to_string()]))
}

/// The crash test, with the daemon of the tests' build: that one has crash points, the release build has none.
fn command() -> Result<Command> {
    let disks = workspace::target()?.join("crash");
    std::fs::create_dir_all(&disks)?;
    let built = test::binaries::build()?;
    let mut test = Command::new(built.program("aryk-crash-tests")?);
    test.arg("--arykd").arg(built.program("arykd")?).arg("--disks").arg(disks);
    Ok(test)
}

/// The heading of the page's last section, about guests.
const GUESTS: &str = "## Guests\n";

/// Runs the guests whose daemon is killed, or that migrate, in the long form.
#[expect(clippy::disallowed_methods, reason = "the report contains the duration")]
fn guests(page: Option<&Path>) -> Result<()> {
    let names =
        cases::list(true).into_iter().map(|case| case.name).filter(|name| name.starts_with("recovery/"));
    let mut failed = Vec::new();
    let mut section = format!(
        "{GUESTS}\nWritten by `cargo xtask crash --guests --page FILE`. Linux in QEMU writes and verifies with fio, pass after pass, while `arykd` is \
         killed\n20 times and started again with nothing but its state. QEMU connects again (`reconnect`), or listens (`server`).\n\n\
         | guest | seconds | |\n| --- | ---: | --- |\n"
    );
    for name in names {
        let started = Instant::now();
        let passed = test::guests::run(true, &name)?.failed == 0;
        let (seconds, end) = (started.elapsed().as_secs(), if passed { "no error" } else { "FAILED" });
        writeln!(section, "| {name} | {seconds} | {end} |")?;
        if !passed {
            failed.push(name);
        }
    }
    if let Some(page) = page {
        let before = std::fs::read_to_string(page).with_context(|| format!("reading {}", page.display()))?;
        let before = before.split(GUESTS).next().unwrap_or_default().trim_end();
        std::fs::write(page, format!("{before}\n\n{section}"))
            .with_context(|| format!("writing {}", page.display()))?;
    }
    ensure!(failed.is_empty(), "these guests failed: {}", failed.join(", "));
    Ok(())
}
