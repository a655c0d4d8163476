//! `cargo xtask adversary`: hostile front-ends beside a victim, in the long form. Its short form is the daemon's test of the same name, whose code this runs.

use anyhow::Result;

use crate::workspace;

/// How long, and what.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How many seconds each attack lasts
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// What the attacks are drawn from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only scenes with this in their name
    #[arg(default_value = "")]
    scene: String,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut test = workspace::cargo();
    test.args([
        "test",
        "--release",
        "-p",
        "arykd",
        "--test",
        "daemon",
        "--",
        "--nocapture",
        "--test-threads=1",
    ]);
    test.arg(format!("adversary::{}", args.scene));
    test.env("ARYK_ADVERSARY_SECONDS", args.seconds.to_string())
        .env("ARYK_ADVERSARY_SEED", args.seed.to_string());
    workspace::run(&mut test)
}
