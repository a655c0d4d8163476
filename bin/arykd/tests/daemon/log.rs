//! The log's formats.

use crate::harness::{ARYKD, wait_for};
use aryk_rpc_client::Client;
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// The log of a daemon that starts and is stopped.
fn log_of(dir: &Path, flags: &[&str], stream: impl Fn(&File) -> String) -> String {
    log_while(dir, flags, stream, |_| {})
}

/// The log of a daemon that runs while `clients` runs.
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

fn own_stream(log: &File) -> String {
    let meta = log.metadata().unwrap();
    format!("{}:{}", meta.dev(), meta.ino())
}

fn other_stream(_: &File) -> String {
    "1:1".into()
}

#[test]
fn journald_gets_priorities() {
    let dir = TempDir::new().unwrap();
    for (flags, stream) in
        [(&[][..], own_stream as fn(&File) -> _), (&["--log-format", "journal"], other_stream)]
    {
        let log = log_of(dir.path(), flags, stream);
        assert!(log.lines().any(|line| line.starts_with("<5>") && line.contains("ending")), "{log}");
        assert!(log.lines().all(|line| line.starts_with('<')), "{log}");
    }
}

#[test]
fn other_readers_get_text_by_default() {
    let dir = TempDir::new().unwrap();
    let log = log_of(dir.path(), &[], other_stream);
    assert!(log.lines().any(|line| line.contains(" NOTICE ") && line.contains("ending")), "{log}");
    // The socket replies before the daemon is ready.
    let until_ready = |_: &Path| {
        let log = || std::fs::read_to_string(dir.path().join("log")).unwrap();
        wait_for("the line 'ready'", || log().contains("ready"));
    };
    let log = log_while(dir.path(), &["--log-format", "json"], own_stream, until_ready);
    let events: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let ready = events.iter().find(|event| event["message"] == "ready").unwrap();
    assert_eq!(ready["version"], env!("CARGO_PKG_VERSION"));
    assert!(ready["rpc"].as_str().unwrap().ends_with("rpc.sock"), "{ready}");
    assert!(events.iter().all(|event| event["level"] == "NOTICE"), "{log}");
}

/// Makes calls one after another, and ignores the replies.
pub fn call(socket: &Path, calls: &[(&str, Value)]) {
    for (method, params) in calls {
        // Some of the calls fail.
        let _ = Client::connect(socket).unwrap().call(method, params).unwrap();
    }
}

#[test]
fn a_flag_enables_all_lines_of_its_part() {
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
    let log = log_while(dir.path(), &[], other_stream, clients);
    let reported: Vec<_> = log.lines().filter(|line| line.contains("no_method")).collect();
    assert_eq!(reported.len(), 2, "{log}");
    assert!(reported[0].contains("no_method_2") && reported[0].starts_with("20"), "{log}");
    assert!(reported[1].contains("no_method_3") && reported[1].trim_start().starts_with("INFO"), "{log}");
}

#[test]
fn a_pool_that_becomes_full_is_warned_of() {
    let dir = TempDir::new().unwrap();
    let clients = |socket: &Path| {
        let mut client = Client::connect(socket).unwrap();
        let mut call = |method: &str, params: Value| client.result(method, &params).unwrap();
        call("bdev_malloc_create", json!({"name": "store", "num_blocks": 1 << 20, "block_size": 512}));
        call("aryk_pool_create", json!({"name": "p", "base_bdev_name": "store"}));
        let total = call("aryk_pools_get", json!({}))[0]["total_bytes"].as_u64().unwrap();
        let size = total / 100 * 85 / 4096 * 4096;
        call("aryk_volume_create", json!({"pool": "p", "name": "v", "size": size, "thick": true}));
        let warnings = || {
            let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
            log.lines().filter(|line| line.contains("the pool becomes full")).count()
        };
        wait_for("a warning", || warnings() == 1);
    };
    let log = log_while(dir.path(), &[], other_stream, clients);
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("the pool becomes full")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains("percent=8"), "{log}");
}

/// An unread pipe must not delay the daemon: neither its start, nor calls, nor its end.
#[test]
fn an_unread_log_does_not_delay_the_daemon() {
    const CALLS: usize = 30_000;
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("rpc.sock");
    let (reader, writer) = std::io::pipe().unwrap();
    let mut daemon = Command::new(ARYKD)
        .arg("-r")
        .arg(&socket)
        .arg("-S")
        .arg(dir.path().join("vhost"))
        .args(["-L", "debug", "--log-format", "text"])
        .stdout(writer.try_clone().unwrap())
        .stderr(writer)
        .spawn()
        .unwrap();
    wait_for("arykd is up", || UnixStream::connect(&socket).is_ok());
    // Each call writes a line or more at this level; a pipe has room for some hundreds.
    let mut stream = UnixStream::connect(&socket).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut replies = serde_json::Deserializer::from_reader(stream.try_clone().unwrap()).into_iter::<Value>();
    let request = json!({"jsonrpc": "2.0", "id": 1, "method": "no_such_method"}).to_string();
    for _ in 0..CALLS / 100 {
        stream.write_all(request.repeat(100).as_bytes()).unwrap();
        (0..100).for_each(|_| assert_eq!(replies.next().unwrap().unwrap()["id"], 1));
    }
    drop(replies);
    drop(stream);
    // When the log is read again, it reports the number of lost lines.
    let printed = std::io::BufReader::new(reader);
    let mut lost = None;
    for line in std::io::BufRead::lines(printed) {
        let line = line.unwrap();
        if let Some(at) = line.find(" lines of the log were lost") {
            lost = line[..at].rsplit(' ').next().map(|count| count.parse::<usize>().unwrap());
            break;
        }
    }
    assert!(lost.is_some_and(|lost| lost > 1000 && lost < 10 * CALLS), "{lost:?}");
    assert!(Command::new("kill").arg(daemon.id().to_string()).status().unwrap().success());
    // The reader is gone too.
    assert!(daemon.wait().unwrap().success());
}

/// Lines that are never read are lost when the process ends; they do not delay the end.
#[test]
fn a_log_that_is_never_read_does_not_delay_the_end() {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("rpc.sock");
    let (_reader, mut writer) = std::io::pipe().unwrap();
    let mut daemon = Command::new(ARYKD);
    daemon.arg("-r").arg(&socket).arg("-S").arg(dir.path().join("vhost"));
    daemon.stdout(writer.try_clone().unwrap()).stderr(writer.try_clone().unwrap());
    // The pipe is full from the start, so that not even the first line fits.
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while writer.write(&[b'.'; 4096]).is_ok() {}
    let mut daemon = daemon.spawn().unwrap();
    wait_for("arykd is up", || UnixStream::connect(&socket).is_ok());
    call(&socket, &[("spdk_get_version", json!({}))]);
    assert!(Command::new("kill").arg(daemon.id().to_string()).status().unwrap().success());
    let mut ended = None;
    wait_for("arykd has ended", || {
        ended = daemon.try_wait().unwrap();
        ended.is_some()
    });
    assert!(ended.unwrap().success());
}
