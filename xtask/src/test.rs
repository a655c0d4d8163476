//! `cargo xtask test`: everything, from units to guests, and one line that adds it up.
//!
//! Stages run one after the other and all to the end, whatever fails; what a stage cannot count for itself
//! (a build that breaks) counts as one failure.

mod clients;
mod docs;
pub(crate) mod guests;
mod package;
mod suites;

use anyhow::{Result, bail};

use crate::progress::Clock;
use crate::{crash, fuzz, install};

/// Seconds of each fuzzer.
const FUZZ_SECONDS: u32 = 20;

/// What to run.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The long matrices too
    #[arg(long)]
    all: bool,
    /// Only these stages
    #[arg(long, value_enum, value_name = "STAGE")]
    only: Vec<Stage>,
    /// Only guest tests whose name contains this
    #[arg(long, value_name = "PART")]
    guest: Option<String>,
    /// Seconds for each fuzzer
    #[arg(long, default_value_t = FUZZ_SECONDS)]
    fuzz_seconds: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Stage {
    /// `cargo test`
    Unit,
    /// Models of what threads may do to each other
    Loom,
    /// Instructions of a request, against those recorded
    Instructions,
    /// Fuzzers, a while each
    Fuzz,
    /// `arykd` killed under load
    Crash,
    /// Linux guests on arykd's disks
    Guest,
    /// The Python and Go clients, against arykd
    Clients,
    /// The Debian package, installed and used
    Package,
    /// The commands in the documentation
    Docs,
}

const STAGES: [Stage; 9] = [
    Stage::Unit,
    Stage::Loom,
    Stage::Instructions,
    Stage::Fuzz,
    Stage::Crash,
    Stage::Guest,
    Stage::Clients,
    Stage::Package,
    Stage::Docs,
];

/// How many tests ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    pub(crate) skipped: u32,
}

impl Tally {
    /// Counts one test and says how it ended.
    pub(crate) fn count(&mut self, name: &str, result: Result<()>) {
        match result {
            Ok(()) => {
                self.passed += 1;
                println!("{name} ... ok");
            }
            Err(error) => {
                self.failed += 1;
                println!("{name} ... FAILED\n{error:#}\n");
            }
        }
    }

    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    install::ensure(install::ALL)?;
    let mut tally = Tally::default();
    let clock = Clock::start();
    let stages: Vec<_> =
        STAGES.into_iter().filter(|s| args.only.is_empty() || args.only.contains(s)).collect();
    for (n, stage) in stages.iter().enumerate() {
        println!("\n── {stage:?}: stage {} of {}, after {} s", n + 1, stages.len(), clock.seconds());
        tally.add(run_stage(*stage, args));
        aryk_guest_tests::process::check_interrupt()?;
    }
    let Tally { passed, failed, skipped } = tally;
    println!("\n{passed} passed, {failed} failed, {skipped} skipped in {} s", clock.seconds());
    if tally.failed > 0 {
        bail!("{} failed", tally.failed);
    }
    Ok(())
}

/// The crash test, as one test.
fn crashes(long: bool) -> Result<Tally> {
    let mut tally = Tally::default();
    tally.count("crashes under load", crash::check(long));
    Ok(tally)
}

fn run_stage(stage: Stage, args: &Args) -> Tally {
    let clock = Clock::start();
    let result = match stage {
        Stage::Unit => suites::workspace(args.all),
        Stage::Loom => suites::loom(),
        Stage::Instructions => suites::instructions(),
        Stage::Fuzz => fuzz::run_all(args.fuzz_seconds),
        Stage::Crash => crashes(args.all),
        Stage::Guest => guests::run(args.all, args.guest.as_deref().unwrap_or_default()),
        Stage::Clients => clients::run(),
        Stage::Package => package::run(),
        Stage::Docs => docs::run(),
    };
    let tally = result.unwrap_or_else(|error| {
        println!("{stage:?} stopped: {error:#}");
        Tally { failed: 1, ..Tally::default() }
    });
    let Tally { passed, failed, skipped } = tally;
    println!("── {stage:?}: {passed} passed, {failed} failed, {skipped} skipped in {} s", clock.seconds());
    tally
}
