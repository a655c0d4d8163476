//! Stage of disks on a real Ceph cluster.

use anyhow::Result;
use aryk_ceph_tests::{Cluster, Kind, cases};
use aryk_guest_tests::Image;

use super::{Tally, binaries, docs};
use crate::progress::Clock;
use crate::{install, workspace};

/// The pages whose commands need a cluster.
const PAGES: [&str; 1] = ["docs/examples/ceph-stack.md"];

/// Starts one cluster, and runs the conformance suite on it, then the cases that `part` names ([`cases::named`]), one at a time:
/// some stop its daemons.
pub(crate) fn run(part: &str) -> Result<Tally> {
    install::ensure(install::ALL)?;
    let bin = binaries::build_for_guests()?;
    let image = Image::prepare(&workspace::target()?.join("guest"))?;
    let clock = Clock::start();
    let mut lab = cases::Lab { cluster: Cluster::start(&Kind::SMALL)?, bin, image };
    println!("a Ceph cluster runs after {} s", clock.seconds());
    let mut tally =
        if part.is_empty() { binaries::run_on_ceph(&lab.cluster.conf())? } else { Tally::default() };
    for page in PAGES.into_iter().filter(|page| page.contains(part)) {
        let clock = Clock::start();
        let result = docs::run_page(page, &lab.bin, &[("CEPH_CONF", &lab.cluster.conf())]);
        tally.count(&format!("ceph {page} ({} s)", clock.seconds()), result);
    }
    for case in cases::named(part) {
        let clock = Clock::start();
        let result = case.run(&mut lab);
        let name = format!("ceph {} ({} s)", case.name, clock.seconds());
        if let Ok(cases::Ended::Skipped(why)) = result {
            println!("{name} ... SKIPPED: {why}");
            tally.skipped += 1;
        } else {
            tally.count(&name, result.map(drop));
        }
        aryk_guest_tests::process::check_interrupt()?;
    }
    Ok(tally)
}
