//! `cargo xtask simulate volume`: the simulations of volumes, in the long form. The short form is a test of `tests/volume`, whose
//! program this command runs.

use anyhow::Result;

use crate::workspace;

/// What is simulated.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum What {
    /// Volumes on a disk that crashes and fails; everything that is read is checked
    Volume {
        /// Options of the simulation: --seeds N, --seed S, --steps N, --verbose, or --help for all
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
        options: Vec<String>,
    },
}

pub(crate) fn run(what: &What) -> Result<()> {
    let What::Volume { options } = what;
    let mut simulation = workspace::cargo();
    simulation.args(["run", "--release", "-p", "aryk-volume-simulation", "--"]).args(options);
    workspace::run(&mut simulation)
}
