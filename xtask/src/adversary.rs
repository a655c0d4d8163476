//! `cargo xtask adversary`: hostile front-ends beside a measured VM, in the long form. The short form is arykd's test of
//! the same name, whose code this command runs.

use anyhow::Result;

use crate::workspace;

/// Duration, seed and choice of the attacks.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Seconds of each attack
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Seed of the random attacks
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only scenes whose name contains this
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
