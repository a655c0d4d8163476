//! `cargo xtask test`: all stages, from unit tests to guests, and one line that sums up the results.
//!
//! Stages run one after the other, all of them even after failures. A stage that fails without test results (a broken
//! build) counts as one failure. At the end the failures are printed again, and the duration of each stage.

pub(crate) mod binaries;
mod ceph;
mod clients;
mod docs;
pub(crate) mod guests;
pub(crate) mod lanes;
mod package;
mod suites;

use anyhow::{Result, bail};

use crate::progress::{self, Clock};
use crate::{budget, crash, fuzz, install};

/// Seconds per fuzzer.
const FUZZ_SECONDS: u32 = 5;

/// The extent of the tests.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Include the long matrices
    #[arg(long)]
    all: bool,
    /// Only these stages
    #[arg(long, value_enum, value_name = "STAGE")]
    only: Vec<Stage>,
    /// Only guest tests whose name contains this
    #[arg(long, value_name = "PART")]
    guest: Option<String>,
    /// Only Ceph tests whose name contains this
    #[arg(long, value_name = "PART")]
    ceph: Option<String>,
    /// Seconds for each fuzzer
    #[arg(long, default_value_t = FUZZ_SECONDS)]
    fuzz_seconds: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Stage {
    /// `cargo test`
    Unit,
    /// Loom models of concurrent threads
    Loom,
    /// Instructions of a request, compared with the recorded ones
    Instructions,
    /// Hostile front-ends beside a measured VM
    Adversary,
    /// Fuzzers, 5 seconds each unless set
    Fuzz,
    /// `arykd` killed under load
    Crash,
    /// Disks on a Ceph cluster
    Ceph,
    /// Linux guests on arykd's disks
    Guest,
    /// The Python and Go clients, against arykd
    Clients,
    /// The Debian package, installed and used
    Package,
    /// The commands in the documentation
    Docs,
}

const STAGES: [Stage; 11] = [
    Stage::Unit,
    Stage::Loom,
    Stage::Instructions,
    Stage::Adversary,
    Stage::Fuzz,
    Stage::Crash,
    Stage::Ceph,
    Stage::Guest,
    Stage::Clients,
    Stage::Package,
    Stage::Docs,
];

/// The numbers of passed, failed and skipped tests, and the output of the failed ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    pub(crate) skipped: u32,
    /// The name and the last lines of output of each failed test.
    pub(crate) failures: Vec<String>,
}

impl Tally {
    /// Counts one test and prints its result.
    pub(crate) fn count(&mut self, name: &str, result: Result<()>) {
        match result {
            Ok(()) => {
                self.passed += 1;
                println!("{name} ... ok");
            }
            Err(error) => {
                println!("{name} ... FAILED\n{error:#}\n");
                self.fail(format!("{name}\n{error:#}"));
            }
        }
    }

    /// Counts one failure. `text` is printed again after all stages.
    fn fail(&mut self, text: String) {
        self.failed += 1;
        self.failures.push(text);
    }

    fn counts(&self) -> String {
        let Self { passed, failed, skipped, .. } = self;
        format!("{passed} passed, {failed} failed, {skipped} skipped")
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.failures.extend(other.failures);
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    install::ensure(install::ALL)?;
    let mut tally = Tally::default();
    let clock = Clock::start();
    let mut costs = Vec::new();
    let stages: Vec<_> =
        STAGES.into_iter().filter(|s| args.only.is_empty() || args.only.contains(s)).collect();
    for (n, stage) in stages.iter().enumerate() {
        println!("\n── {stage:?}: stage {} of {}, after {} s", n + 1, stages.len(), clock.seconds());
        let (began, cpu) = (clock.seconds(), progress::cpu_seconds()?);
        let ended = run_stage(*stage, args);
        let cost = Cost { stage: *stage, wall: clock.seconds() - began, cpu: progress::cpu_seconds()? - cpu };
        println!("── {stage:?}: {} in {} s", ended.counts(), cost.wall);
        costs.push(cost);
        tally.add(ended);
        aryk_guest_tests::process::check_interrupt()?;
    }
    for failure in &tally.failures {
        println!("\n── Failed: {failure}");
    }
    println!("\n{}\n\n{} in {} s", table(&costs), tally.counts(), clock.seconds());
    // Running only a part of a stage takes less than the stage.
    if args.guest.is_none() && args.ceph.is_none() {
        budget::keep(costs.iter().map(|cost| (name(cost.stage), cost.cpu)))?;
    }
    if tally.failed > 0 {
        bail!("{} failed", tally.failed);
    }
    Ok(())
}

fn name(stage: Stage) -> String {
    format!("{stage:?}")
}

/// The names of the stages, as in the table of a run.
#[cfg(test)]
pub(crate) fn stage_names() -> Vec<String> {
    STAGES.into_iter().map(name).collect()
}

/// The cost of a stage, in seconds.
#[derive(Debug)]
struct Cost {
    stage: Stage,
    wall: u64,
    /// Processor time of all programs that the stage ran.
    cpu: u64,
}

fn table(costs: &[Cost]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_preset(comfy_table::presets::ASCII_MARKDOWN).set_header([
        "stage",
        "seconds",
        "processor seconds",
    ]);
    for cost in costs {
        table.add_row([name(cost.stage), cost.wall.to_string(), cost.cpu.to_string()]);
    }
    table.add_row(["all".into(), sum(costs, |c| c.wall), sum(costs, |c| c.cpu)]);
    table
}

fn sum(costs: &[Cost], part: fn(&Cost) -> u64) -> String {
    costs.iter().map(part).sum::<u64>().to_string()
}

/// The crash test, counted as one test.
fn crashes(long: bool) -> Result<Tally> {
    let mut tally = Tally::default();
    tally.count("crashes under load", crash::check(long));
    Ok(tally)
}

fn run_stage(stage: Stage, args: &Args) -> Tally {
    let result = match stage {
        Stage::Unit => suites::workspace(args.all),
        Stage::Loom => suites::loom(),
        Stage::Instructions => suites::instructions(),
        Stage::Adversary => binaries::run_adversary("", &[]),
        Stage::Fuzz => fuzz::run_all(args.fuzz_seconds),
        Stage::Crash => crashes(args.all),
        Stage::Ceph => ceph::run(args.ceph.as_deref().unwrap_or_default()),
        Stage::Guest => guests::run(args.all, args.guest.as_deref().unwrap_or_default()),
        Stage::Clients => clients::run(),
        Stage::Package => package::run(),
        Stage::Docs => docs::run(),
    };
    result.unwrap_or_else(|error| {
        println!("{stage:?} stopped: {error:#}");
        let mut tally = Tally::default();
        tally.fail(format!("{stage:?}\n{error:#}"));
        tally
    })
}
