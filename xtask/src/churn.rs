//! `cargo xtask churn`: disks that come and go under load, in the long form. Its short form is the test of the same name among the daemon's, whose code this runs.

use anyhow::Result;

use crate::workspace;

/// How often.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Random things that are done, by four connections together
    #[arg(long, default_value_t = 10_000)]
    rounds: u64,
    /// What they are drawn from
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut test = workspace::cargo();
    test.args(["test", "--release", "-p", "arykd", "--test", "daemon", "--", "--nocapture", "churn::"]);
    test.env("ARYK_CHURN", args.rounds.to_string()).env("ARYK_CHURN_SEED", args.seed.to_string());
    workspace::run(&mut test)
}
