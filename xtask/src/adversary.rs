//! `cargo xtask adversary`: hostile front-ends beside a measured VM, in the long form. The short form is arykd's test of
//! the same name, whose code this command runs.

use anyhow::{Result, ensure};

use crate::test::binaries;

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
    let (seconds, seed) = (args.seconds.to_string(), args.seed.to_string());
    let settings = [("ARYK_ADVERSARY_SECONDS", seconds), ("ARYK_ADVERSARY_SEED", seed)];
    let tally = binaries::run_adversary(&args.scene, &settings)?;
    ensure!(tally.failed == 0, "{} scenes failed", tally.failed);
    ensure!(tally.passed > 0, "no scene's name contains {}", args.scene);
    Ok(())
}
