//! `cargo xtask cuts`: cuts of the connections to a disk of another host under verified writes, in the long form. The short
//! form is arykd's test of the same name, whose code this command runs.

use anyhow::Result;

use crate::workspace;

/// Number and seed of the cuts.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Rounds, each of one cut or of two in succession
    #[arg(long, default_value_t = 1000)]
    rounds: u64,
    /// Seed of the requests and of the cuts
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut test = workspace::cargo();
    test.args(["test", "-p", "arykd", "--test", "daemon", "--", "--nocapture", "cuts::"]);
    test.env("ARYK_CUTS", args.rounds.to_string()).env("ARYK_CUTS_SEED", args.seed.to_string());
    workspace::run(&mut test)
}
