//! Disks of a SCSI controller that come and go while their guest uses them.
//!
//! | module     | owns                                                                             |
//! | ---------- | -------------------------------------------------------------------------------- |
//! | `agent`    | a guest that does as it is told, and passes on what its kernel says              |
//! | `bench`    | a daemon, a controller, and disks with what is known of them                     |
//! | [`rounds`] | eight disks under load, some of which go and come back in each round             |
//! | `scenes`   | a frozen machine, one that hears nothing, a stuck store, a file system           |
//! | `sg`       | what the disks say to sg3-utils, command by command                              |
//! | [`report`] | what a long run came to, as a page and as JSON                                   |
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

/// Runs everything: so many rounds, half of them with rings of either kind, or as many as `patience` allows; and each scene.
///
/// # Errors
/// A round found something wrong. (A scene that did is in the report.)
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
