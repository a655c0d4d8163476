//! `aryk doctor` on this host.

use crate::harness::{Daemon, outcome};
use serde_json::Value;

/// The check `name` of the report.
fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    report["checks"].as_array().unwrap().iter().find(|check| check["check"] == name).unwrap()
}

#[test]
fn the_daemon_and_the_kernel_are_checked() {
    let daemon = Daemon::start();
    let report = daemon.json(&["doctor"]);
    assert_eq!(report["healthy"], true);
    assert!(check(&report, "daemon")["found"].as_str().unwrap().starts_with("Aryk v"), "{report}");
    let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    if disabled.trim() == "0" {
        assert_eq!(check(&report, "io_uring")["state"], "ok", "{report}");
    }
    let text = daemon.ok(&["doctor"]);
    assert!(text.contains("Nothing necessary is missing."), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
}

#[test]
fn a_missing_directory_fails_the_command() {
    let daemon = Daemon::start();
    let nowhere = daemon.dir().join("no/such/rpc.sock");
    let mut command = daemon.aryk(&["doctor", "--json"]);
    let outcome = outcome(command.env("ARYK_SOCKET", nowhere));
    assert_eq!(outcome.code, 1, "{outcome:?}");
    let report: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(report["healthy"], false);
    assert_eq!(check(&report, "daemon")["state"], "option");
    let directory = check(&report, "RPC socket");
    assert_eq!(directory["state"], "missing");
    assert!(directory["fix"].as_str().unwrap().starts_with("mkdir -p"), "{report}");
    assert!(outcome.stderr.contains("one check needs correction"), "{outcome:?}");
}
