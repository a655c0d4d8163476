//! `--watch`, man pages and completions.

use crate::harness::Daemon;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::Stdio;

/// The first `count` lines of a command that does not end.
fn first_lines(daemon: &Daemon, args: &[&str], count: usize) -> Vec<String> {
    let mut child = daemon.aryk(args).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().take(count);
    let lines = lines.map(Result::unwrap).collect();
    child.kill().unwrap();
    child.wait().unwrap();
    lines
}

#[test]
fn watch_appends_without_a_terminal() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--null", "--size", "1M"]);
    let list = first_lines(&daemon, &["disk", "list", "--watch=0.1"], 6);
    assert!(list[0].starts_with("NAME") && list[1].starts_with('d') && list[2].is_empty(), "{list:?}");
    assert_eq!(list[..3], list[3..]);
    let rates = first_lines(&daemon, &["disk", "stat", "--watch=0.1", "d"], 2);
    assert!(rates[0].contains("READ/s") && rates[1].starts_with('d'), "{rates:?}");
    assert!(daemon.ok(&["memory"]).starts_with("No device accesses the memory of VMs"));
    for args in
        [&["disk", "stat"][..], &["status"], &["controller", "list"], &["reactor", "list"], &["memory"]]
    {
        let lines = first_lines(&daemon, &[args, &["--watch=0.1", "--json"]].concat(), 2);
        assert!(lines.iter().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{lines:?}");
    }
}

#[test]
fn watch_ends_when_its_output_closes() {
    let daemon = Daemon::start();
    let mut aryk = daemon.aryk(&["status", "--watch=0.1"]);
    let mut child = aryk.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[test]
fn pages_and_completions_name_all_commands() {
    let daemon = Daemon::start();
    daemon.ok(&["man", "pages"]);
    let page = |name: &str| std::fs::read_to_string(daemon.dir().join("pages").join(name)).unwrap();
    assert!(page("aryk.1").contains("Exit codes"));
    assert!(page("aryk-disk-create.1").contains("enospc"));
    assert!(page("aryk-apply.1").contains("prune"));
    assert!(page("aryk-man.1").contains("manual pages into a directory"));
    for shell in ["bash", "zsh", "fish"] {
        assert!(daemon.ok(&["completions", shell]).contains("COMPLETE"), "{shell}");
    }
}
