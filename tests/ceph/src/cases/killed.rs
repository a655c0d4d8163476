//! `arykd` is killed under verified load, and its successor goes on: no write is lost, and no late write of the killed daemon
//! lands behind a newer one.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Case, Site};

/// Crashes of a case in all, in lives of ten each.
const TWO_LIVES: [&str; 2] = ["--rounds", "20"];
/// The first life whose disk is encrypted, and has rotations of its key without end.
const ENCRYPTED_LIFE: [&str; 4] = ["--rounds", "40", "--life", "3"];

pub(super) const CASES: [Case; 3] = [
    Case { name: "killed/crashes", body: |site| crashes(site, &TWO_LIVES).map(drop) },
    // The killed daemon's writes are held back by its exclusion from the cluster only, and not by a lock of the image.
    Case { name: "killed/without-lock", body: without_lock },
    Case { name: "killed/rotation", body: rotation },
];

fn without_lock(site: &Site<'_>) -> Result<()> {
    crashes(site, &[&TWO_LIVES[..], &["--ceph-features", "layering"]].concat()).map(drop)
}

fn rotation(site: &Site<'_>) -> Result<()> {
    let said = crashes(site, &ENCRYPTED_LIFE)?;
    ensure!(said.contains(" encrypted=true "), "no life had an encrypted disk: {said}");
    Ok(())
}

/// Runs the crash test on images of the cluster; returns what it prints.
fn crashes(site: &Site<'_>, options: &[&str]) -> Result<String> {
    let bin = &site.lab.bin;
    let output = Command::new(bin.join("aryk-crash-tests"))
        .arg("--arykd")
        .arg(bin.join("arykd"))
        .arg("--disks")
        .arg(site.directory)
        .arg("--ceph")
        .arg(site.cluster().conf())
        .args(options)
        .output()
        .context("running the crash test")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{}", said.lines().last().unwrap_or_default());
    ensure!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    Ok(said)
}
