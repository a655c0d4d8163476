//! What the log's formats look like to who reads them.

use crate::harness::ARYKD;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// The log of a daemon that starts and is told to end.
fn log_of(dir: &Path, flags: &[&str], stream: impl Fn(&File) -> String) -> String {
    log_while(dir, flags, stream, |_| {})
}

/// The log of a daemon that serves as long as `clients` take.
fn log_while(
    dir: &Path,
    flags: &[&str],
    stream: impl Fn(&File) -> String,
    clients: impl Fn(&Path),
) -> String {
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
        if UnixStream::connect(&socket).is_ok() {
            break;
        }
        std::thread::park_timeout(Duration::from_millis(10));
    }
    clients(&socket);
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

/// Calls one after another, whatever is answered.
fn call(socket: &Path, calls: &[(&str, Value)]) {
    for (method, params) in calls {
        let mut stream = UnixStream::connect(socket).unwrap();
        let call = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        stream.write_all(call.to_string().as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let _: Value = serde_json::from_reader(stream).unwrap();
    }
}

#[test]
fn all_of_a_part_is_told_while_its_flag_is_set() {
    let dir = TempDir::new().unwrap();
    let clients = |socket: &Path| {
        let flag = |method, flag| (method, json!({ "flag": flag }));
        call(
            socket,
            &[
                ("no_method_0", json!({})),
                flag("log_set_flag", "vhost_user"),
                ("no_method_1", json!({})),
                flag("log_set_flag", "rpc"),
                ("no_method_2", json!({})),
                ("log_enable_timestamps", json!({"enabled": false})),
                ("no_method_3", json!({})),
                flag("log_clear_flag", "all"),
                ("no_method_4", json!({})),
            ],
        );
    };
    let log = log_while(dir.path(), &[], of_another, clients);
    let told: Vec<_> = log.lines().filter(|line| line.contains("no_method")).collect();
    assert_eq!(told.len(), 2, "{log}");
    assert!(told[0].contains("no_method_2") && told[0].starts_with("20"), "{log}");
    assert!(told[1].contains("no_method_3") && told[1].trim_start().starts_with("DEBUG"), "{log}");
}
