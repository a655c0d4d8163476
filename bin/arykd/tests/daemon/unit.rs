//! The systemd unit in the package.

use crate::harness::ARYKD;
use std::process::Command;
use tempfile::TempDir;

const UNIT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/systemd/arykd.service");

#[test]
fn systemd_accepts_the_unit() {
    let unit = std::fs::read_to_string(UNIT).unwrap();
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("arykd.service");
    // systemd-analyze looks for the program, which is not installed here.
    std::fs::write(&path, unit.replace("/usr/bin/arykd", ARYKD)).unwrap();
    let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output();
    let Ok(output) = verified else { return eprintln!("skipped: no systemd-analyze here") };
    let printed = String::from_utf8_lossy(&output.stderr);
    // It may also report problems of other units of this host.
    let ours: Vec<_> = printed.lines().filter(|line| line.contains("arykd")).collect();
    assert!(output.status.success() && ours.is_empty(), "{printed}");
}

/// Guests' pages count as the daemon's memory, so with a memory limit one guest could end the daemon for all.
#[test]
fn the_unit_has_no_memory_limit() {
    let unit = std::fs::read_to_string(UNIT).unwrap();
    let settings: Vec<_> = unit.lines().filter(|line| !line.starts_with('#')).collect();
    for limit in ["MemoryMax=", "MemoryHigh=", "MemoryLimit="] {
        assert!(!settings.iter().any(|line| line.starts_with(limit)), "{limit}");
    }
    assert!(settings.contains(&"OOMScoreAdjust=-900") && settings.contains(&"OOMPolicy=continue"));
}
