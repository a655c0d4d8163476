//! The systemd unit that is shipped.

use crate::harness::ARYKD;
use std::process::Command;
use tempfile::TempDir;

const UNIT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/systemd/arykd.service");

#[test]
fn systemd_accepts_the_unit() {
    let unit = std::fs::read_to_string(UNIT).unwrap();
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("arykd.service");
    // It looks for the program, which is not installed here.
    std::fs::write(&path, unit.replace("/usr/bin/arykd", ARYKD)).unwrap();
    let verified = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output();
    let Ok(output) = verified else { return eprintln!("skipped: no systemd-analyze here") };
    let said = String::from_utf8_lossy(&output.stderr);
    // Of other units of this machine it may have its own opinion.
    let ours: Vec<_> = said.lines().filter(|line| line.contains("arykd")).collect();
    assert!(output.status.success() && ours.is_empty(), "{said}");
}

/// What guests' pages cost is counted as the daemon's, so a limit would let one guest end it for all.
#[test]
fn no_guest_can_use_up_a_memory_limit_of_the_unit() {
    let unit = std::fs::read_to_string(UNIT).unwrap();
    let settings: Vec<_> = unit.lines().filter(|line| !line.starts_with('#')).collect();
    for limit in ["MemoryMax=", "MemoryHigh=", "MemoryLimit="] {
        assert!(!settings.iter().any(|line| line.starts_with(limit)), "{limit}");
    }
    assert!(settings.contains(&"OOMScoreAdjust=-900") && settings.contains(&"OOMPolicy=continue"));
}
