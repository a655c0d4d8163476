//! Stage of the Linux guests on disks that `arykd` serves.

use anyhow::Result;
use aryk_guest_tests::{Image, cases};

use super::{Tally, binaries, lanes};
use crate::progress::Clock;
use crate::{install, workspace};

/// Guests at a time.
const LANES: usize = 2;
/// Guests that run alone, after the others: their tests have deadlines of seconds, or three processes that need the cores.
const ALONE: [&str; 5] =
    ["life/frozen-neighbour", "recovery/migration", "scsi/plug", "scsi/frozen", "scsi/stuck"];

/// Runs the harness's own tests, then all cases whose name contains `part`.
pub(crate) fn run(all: bool, part: &str) -> Result<Tally> {
    install::ensure(install::ALL)?;
    let bin = workspace::build_programs()?;
    let image = Image::prepare(&workspace::target()?.join("guest"))?;
    let mut tally = if part.is_empty() { binaries::run_guests_harness()? } else { Tally::default() };
    let lab = cases::Lab { image, bin, tests: binaries::build_for_guests()? };
    let run = |case: cases::Case| {
        let clock = Clock::start();
        let result = case.run(&lab);
        let mut tally = Tally::default();
        tally.count(&format!("guest {} ({} s)", case.name, clock.seconds()), result);
        Ok(tally)
    };
    let wanted = cases::list(all).into_iter().filter(|case| case.name.contains(part));
    let (alone, beside): (Vec<_>, Vec<_>) =
        wanted.partition(|case| ALONE.iter().any(|name| case.name.starts_with(name)));
    tally.add(lanes::run(beside, LANES, run)?);
    tally.add(lanes::run(alone, 1, run)?);
    Ok(tally)
}
