//! Stage of the Linux guests on disks that `arykd` serves.

use anyhow::Result;
use aryk_guest_tests::{Image, cases};

use super::{Tally, binaries, lanes};
use crate::progress::Clock;
use crate::{install, workspace};

/// Guests at a time.
const LANES: usize = 2;
/// Groups that neither kill processes nor measure under load: two of their guests can share the cores.
const BESIDE_ANOTHER: [&str; 4] = ["verify/", "disks/", "contrib/", "nvme/"];

/// Runs the harness's own tests, then all cases whose name contains `part`.
pub(crate) fn run(all: bool, part: &str) -> Result<Tally> {
    install::ensure(install::ALL)?;
    let bin = workspace::build_programs()?;
    let image = Image::prepare(&workspace::target()?.join("guest"))?;
    let mut tally = if part.is_empty() { binaries::run_guests_harness()? } else { Tally::default() };
    let lab = cases::Lab { image, bin };
    let run = |case: cases::Case| {
        let clock = Clock::start();
        let result = case.run(&lab);
        let mut tally = Tally::default();
        tally.count(&format!("guest {} ({} s)", case.name, clock.seconds()), result);
        Ok(tally)
    };
    let wanted = cases::list(all).into_iter().filter(|case| case.name.contains(part));
    let (beside, alone): (Vec<_>, Vec<_>) =
        wanted.partition(|case| BESIDE_ANOTHER.iter().any(|group| case.name.starts_with(group)));
    tally.add(lanes::run(beside, LANES, run)?);
    tally.add(lanes::run(alone, 1, run)?);
    Ok(tally)
}
