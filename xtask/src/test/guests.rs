//! Guests on disks that `arykd` serves.

use anyhow::Result;
use aryk_guest_tests::{Image, cases};

use super::{Tally, binaries};
use crate::{install, workspace};

/// Runs the harness's own tests, then all cases whose name contains `part`.
pub(crate) fn run(all: bool, part: &str) -> Result<Tally> {
    install::ensure(install::ALL)?;
    let bin = workspace::build_programs()?;
    let image = Image::prepare(&workspace::target()?.join("guest"))?;
    let mut tally = if part.is_empty() { binaries::run_guests_harness()? } else { Tally::default() };
    let lab = cases::Lab { image, bin };
    for case in cases::list(all) {
        if case.name.contains(part) {
            tally.count(&format!("guest {}", case.name), case.run(&lab));
            aryk_guest_tests::process::check_interrupt()?;
        }
    }
    Ok(tally)
}
