//! `arykd` is killed under verified load, and its successor goes on: no write is lost, and no late write of the killed daemon
//! lands behind a newer one.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Case, Site};

/// Crashes in all, in lives of ten each.
const ROUNDS: &str = "20";

pub(super) const CASES: [Case; 1] = [Case { name: "killed/crashes", body: crashes }];

/// Runs the crash test on images of the cluster.
fn crashes(site: &Site<'_>) -> Result<()> {
    let bin = &site.lab.bin;
    let output = Command::new(bin.join("aryk-crash-tests"))
        .arg("--arykd")
        .arg(bin.join("arykd"))
        .arg("--disks")
        .arg(site.directory)
        .arg("--ceph")
        .arg(site.cluster().conf())
        .args(["--rounds", ROUNDS])
        .output()
        .context("running the crash test")?;
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{}", said.lines().last().unwrap_or_default());
    ensure!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
