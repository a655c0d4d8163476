//! What the log's formats look like to who reads them.

use crate::harness::ARYKD;
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// The log of a daemon that starts and is told to end.
fn log_of(dir: &Path, flags: &[&str], stream: impl Fn(&File) -> String) -> String {
    let path = dir.join("log");
    let log = File::create(&path).unwrap();
    let socket = dir.join("rpc.sock");
    let mut daemon = Command::new(ARYKD)
        .arg("-r")
        .arg(&socket)
        .arg("-S")
        .arg(dir.join("vhost"))
        .args(flags)
        .env("JOURNAL_STREAM", stream(&log))
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .unwrap();
    for _ in 0..1000 {
        if std::os::unix::net::UnixStream::connect(&socket).is_ok() {
            break;
        }
        std::thread::park_timeout(Duration::from_millis(10));
    }
    assert!(Command::new("kill").arg(daemon.id().to_string()).status().unwrap().success());
    assert!(daemon.wait().unwrap().success());
    std::fs::read_to_string(path).unwrap()
}

fn its_own(log: &File) -> String {
    let meta = log.metadata().unwrap();
    format!("{}:{}", meta.dev(), meta.ino())
}

fn of_another(_: &File) -> String {
    "1:1".into()
}

#[test]
fn journald_gets_priorities() {
    let dir = TempDir::new().unwrap();
    for (flags, stream) in [(&[][..], its_own as fn(&File) -> _), (&["--log-format", "journal"], of_another)]
    {
        let log = log_of(dir.path(), flags, stream);
        assert!(log.lines().any(|line| line.starts_with("<5>") && line.contains("ending")), "{log}");
        assert!(log.lines().all(|line| line.starts_with('<')), "{log}");
    }
}

#[test]
fn others_get_text_unless_they_ask() {
    let dir = TempDir::new().unwrap();
    let log = log_of(dir.path(), &[], of_another);
    assert!(log.lines().any(|line| line.contains(" INFO ") && line.contains("ending")), "{log}");
    let log = log_of(dir.path(), &["--log-format", "json"], its_own);
    let events: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let ready = events.iter().find(|event| event["message"] == "ready").unwrap();
    assert_eq!(ready["version"], env!("CARGO_PKG_VERSION"));
    assert!(ready["rpc"].as_str().unwrap().ends_with("rpc.sock"), "{ready}");
    assert!(events.iter().all(|event| event["level"] == "INFO"), "{log}");
}
