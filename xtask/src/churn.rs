//! `cargo xtask churn`: random creation, use and deletion of disks under load, in the long form. The short form is
//! arykd's test of the same name, whose code this command runs.

use anyhow::Result;

use crate::workspace;

/// Number and seed of the calls.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Random calls, over four connections together
    #[arg(long, default_value_t = 10_000)]
    rounds: u64,
    /// Seed of the random calls
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut test = workspace::cargo();
    test.args(["test", "--release", "-p", "arykd", "--test", "daemon", "--", "--nocapture", "churn::"]);
    test.env("ARYK_CHURN", args.rounds.to_string()).env("ARYK_CHURN_SEED", args.seed.to_string());
    workspace::run(&mut test)
}
