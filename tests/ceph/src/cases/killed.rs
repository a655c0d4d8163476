//! `arykd` is killed under verified load, and its successor goes on: no write is lost, and no late write of the killed daemon
//! lands behind a newer one.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Case, Site};

/// Crashes of a case in all, in lives of ten each.
const ROUNDS: &str = "20";

pub(super) const CASES: [Case; 2] = [
    Case { name: "killed/crashes", body: |site| crashes(site, &[]) },
    // The killed daemon's writes are held back by its exclusion from the cluster only, and not by a lock of the image.
    Case { name: "killed/without-lock", body: |site| crashes(site, &["--ceph-features", "layering"]) },
];

/// Runs the crash test on images of the cluster.
fn crashes(site: &Site<'_>, options: &[&str]) -> Result<()> {
    let bin = &site.lab.bin;
    let output = Command::new(bin.join("aryk-crash-tests"))
        .arg("--arykd")
        .arg(bin.join("arykd"))
        .arg("--disks")
        .arg(site.directory)
        .arg("--ceph")
        .arg(site.cluster().conf())
        .args(options)
        .args(["--rounds", ROUNDS])
        .output()
        .context("running the crash test")?;
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{}", said.lines().last().unwrap_or_default());
    ensure!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
