//! Disks of a SCSI controller that are plugged and unplugged while their guest uses them.
//!
//! | module     | owns                                                                             |
//! | ---------- | -------------------------------------------------------------------------------- |
//! | `agent`    | a guest that executes the host's commands, and reports its kernel's events       |
//! | `bench`    | a daemon, a controller, and disks with their expected content                    |
//! | [`rounds`] | eight disks under load, some of which are unplugged and plugged in each round    |
//! | `scenes`   | a frozen VM, one without hotplug events, a stuck store, a file system            |
//! | `sg`       | the disks' responses to sg3-utils, command by command                            |
//! | [`report`] | the results of a long run, as a page and as JSON                                 |
//!
//! The scenes, and a few rounds, are guest tests ([`crate::cases`]); [`run`] is the long form. Ordinary threads, in wall time.

mod agent;
mod bench;
pub mod report;
pub mod rounds;
pub(crate) mod scenes;
pub(crate) mod sg;

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::cases::{Lab, with_site};
use report::{Report, Scene};
use rounds::Settings;

/// Runs all rounds and scenes: `rounds` rounds, half of them with split and half with packed rings, or as many as
/// `patience` allows; then each scene.
///
/// # Errors
/// A round failed. (A failed scene is in the report.)
pub fn run(lab: &Lab, rounds: u32, seed: u64, patience: Option<Duration>) -> Result<Report> {
    let mut all = Vec::new();
    for (packed, rounds) in [(false, rounds.div_ceil(2)), (true, rounds / 2)] {
        let rings = if packed { "packed" } else { "split" };
        println!("{rounds} rounds, {rings} rings, seed {seed}");
        let settings = Settings { rounds, seed, packed, patience: patience.map(|all| all / 2) };
        let done = with_site(lab, |site| rounds::run(site, settings));
        all.push((rings, done.with_context(|| format!("rounds with {rings} rings"))?));
    }
    let mut scenes = Vec::new();
    for (name, what, scene) in scenes::ALL {
        println!("{name}");
        let begun = Instant::now();
        let failure = with_site(lab, scene).err().map(|error| format!("{error:#}"));
        scenes.push(Scene { name, what, elapsed: begun.elapsed(), failure });
    }
    Ok(Report { seed, kernel: lab.image.kernel.clone(), rounds: all, scenes })
}
