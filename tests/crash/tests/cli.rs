//! The command line of the crash test.

use std::process::Command;

#[test]
fn a_run_whose_daemon_does_not_start_fails() {
    let disks = tempfile::tempdir().unwrap();
    let mut crash = Command::new(env!("CARGO_BIN_EXE_aryk-crash-tests"));
    crash
        .args(["--rounds", "1", "--life", "0", "--arykd", "/nonexistent/arykd", "--disks"])
        .arg(disks.path());
    let output = crash.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("the RPC socket"), "{said}");
}
