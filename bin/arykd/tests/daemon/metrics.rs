//! `--metrics`: replies to scrapers, and limits on scrapers.

use crate::front_end::FrontEnd;
use crate::harness::{Daemon, wait_for};
use crate::open_metrics::Exposition;
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);

/// Requests `path`. Returns the head and the body of the reply.
pub fn get(mut stream: impl Read + Write, path: &str) -> (String, String) {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|w| w == b"\r\n\r\n").expect("a head") + 4;
    let head = String::from_utf8(answer[..end].to_vec()).unwrap();
    let body = if head.contains("chunked") { unchunk(&answer[end..]) } else { answer[end..].to_vec() };
    (head, String::from_utf8(body).unwrap())
}

/// Decodes the chunked transfer coding (RFC 9112, section 7.1).
fn unchunk(mut bytes: &[u8]) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        let end = bytes.windows(2).position(|w| w == b"\r\n").expect("a chunk's head");
        let len = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        if len == 0 {
            return all;
        }
        let data = end + 2;
        all.extend(&bytes[data..data + len]);
        bytes = &bytes[data + len + 2..];
    }
}

pub fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// A scrape, checked for validity.
pub fn scrape(port: u16) -> Exposition {
    let (head, body) = get(connect(port), "/metrics");
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("application/openmetrics-text"), "{head}");
    Exposition::read(&body).unwrap()
}

#[test]
fn metrics_of_disks() {
    let daemon = Daemon::start(&["--metrics", "0"]);
    let port = daemon.port();
    // A name that would add a label or a line if it were not escaped.
    let name = "d\",disk=\"\\x\n";
    for name in [name, "idle"] {
        let params = json!({"name": name, "block_size": 512, "num_blocks": 2048});
        daemon.call("bdev_malloc_create", params).unwrap();
    }
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": name})).unwrap();
    let before = scrape(port);
    assert_eq!(before.value("aryk_disk_ops_total", &[("disk", name), ("op", "read")]), Some(0.0));
    let mut guest = FrontEnd::connect(&daemon.dir().join("vhost/c"));
    for _ in 0..7 {
        guest.read(0, 4096).unwrap();
    }
    std::thread::park_timeout(Duration::from_millis(250));
    let now = scrape(port);
    let of = |what: &str, disk: &str| now.value(what, &[("disk", disk), ("op", "read")]).unwrap();
    assert_eq!(of("aryk_disk_ops_total", name), 7.0);
    assert_eq!(of("aryk_disk_bytes_total", name), 7.0 * 4096.0);
    assert_eq!(of("aryk_disk_latency_seconds_count", name), 7.0);
    assert_eq!(of("aryk_disk_ops_total", "idle"), 0.0);
    assert_eq!(now.value("aryk_controller_connected", &[("controller", "c")]), Some(1.0));
    assert_eq!(now.value("aryk_controller_disk", &[("controller", "c"), ("disk", name)]), Some(1.0));
    assert!(now.value("aryk_reactor_seconds_total", &[("state", "busy")]).unwrap() > 0.0);
    daemon.call("bdev_malloc_delete", json!({"name": "idle"})).unwrap();
    std::thread::park_timeout(Duration::from_millis(250));
    assert_eq!(scrape(port).value("aryk_disk_ops_total", &[("disk", "idle")]), None);
}

#[test]
fn metrics_of_groups_and_reactors() {
    let daemon = Daemon::start(&["--metrics", "0"]);
    let port = daemon.port();
    let params = json!({"name": "d", "block_size": 512, "num_blocks": 2048});
    daemon.call("bdev_malloc_create", params).unwrap();
    for (name, parent) in [("vm", None), ("root", Some("vm")), ("other", None)] {
        daemon.call("bdev_qos_group_create", json!({"name": name, "parent": parent})).unwrap();
    }
    daemon.call("bdev_qos_group_set_limit", json!({"name": "vm", "rw_ios_per_sec": 20})).unwrap();
    daemon.call("bdev_qos_group_add_bdev", json!({"name": "root", "bdev_name": "d"})).unwrap();
    daemon.call("vhost_create_scsi_controller", json!({"ctrlr": "c"})).unwrap();
    let target = json!({"ctrlr": "c", "scsi_target_num": 0, "bdev_name": "d"});
    daemon.call("vhost_scsi_controller_add_target", target).unwrap();
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "b", "dev_name": "d"})).unwrap();
    let mut guest = FrontEnd::connect(&daemon.dir().join("vhost/b"));
    (0..5).for_each(|_| _ = guest.read(0, 4096).unwrap());
    let now = scrape(port);
    for union in [("group", "vm"), ("group", "root"), ("controller", "c"), ("core", "0")] {
        let prefix = if union.0 == "core" { "aryk_reactor" } else { &format!("aryk_{}", union.0) };
        let of = |what: &str, label| now.value(&format!("{prefix}_{what}"), &[union, label]);
        assert_eq!(of("ops_total", ("op", "read")), Some(5.0), "{union:?}");
        assert_eq!(of("latency_seconds_count", ("op", "read")), Some(5.0), "{union:?}");
        assert_eq!(of("layer_seconds_count", ("layer", "module")), Some(5.0), "{union:?}");
        assert!(of("layer_seconds_sum", ("layer", "throttle")).unwrap() > 0.1, "{union:?}");
    }
    assert_eq!(now.value("aryk_group_ops_total", &[("group", "other"), ("op", "read")]), Some(0.0));
    assert_eq!(now.value("aryk_controller_ops_total", &[("controller", "b")]), None);
    assert_eq!(now.value("aryk_group_info", &[("group", "root"), ("parent", "vm")]), Some(1.0));
    assert_eq!(now.value("aryk_group_limit", &[("group", "vm"), ("of", "ops")]), Some(20.0));
    assert_eq!(now.value("aryk_group_disk", &[("group", "root"), ("disk", "d")]), Some(1.0));
    // The group's counts stay after the disk is gone.
    daemon.call("bdev_qos_group_remove_bdev", json!({"name": "root", "bdev_name": "d"})).unwrap();
    guest.read(0, 4096).unwrap();
    std::thread::park_timeout(Duration::from_millis(250));
    let now = scrape(port);
    assert_eq!(now.value("aryk_group_ops_total", &[("group", "vm"), ("op", "read")]), Some(5.0));
    assert_eq!(now.value("aryk_reactor_ops_total", &[("core", "0"), ("op", "read")]), Some(6.0));
}

#[test]
fn space_of_volumes_and_snapshots() {
    let daemon = Daemon::start(&["--metrics", "0"]);
    let port = daemon.port();
    let file = daemon.dir().join("store.img").display().to_string();
    daemon.aryk(&["disk", "create", "store", "--file", &file, "--size", "1G"]).unwrap();
    daemon.aryk(&["pool", "create", "p", "--disk", "store"]).unwrap();
    daemon.aryk(&["volume", "create", "p/vm", "--size", "64M"]).unwrap();
    daemon.aryk(&["attach", "p/vm", "--controller", "c"]).unwrap();
    let mut guest = FrontEnd::connect(&daemon.dir().join("vhost/c"));
    (0..16).for_each(|n| guest.write(n * 65536, &[7; 65536]).unwrap());
    let space = |of: &str, volume: &str| {
        scrape(port).value("aryk_volume_space_bytes", &[("pool", "p"), ("volume", volume), ("of", of)])
    };
    // The daemon counts by itself some seconds after it has opened the pool.
    wait_for("the first count", || space("own", "vm").is_some());
    assert_eq!(space("shared", "vm"), Some(0.0));
    assert!(scrape(port).value("aryk_pool_counted_seconds", &[("pool", "p")]).unwrap() < 60.0);
    daemon.aryk(&["snapshot", "create", "p/vm@old"]).unwrap();
    guest.write(0, &[8; 65536]).unwrap();
    // The daemon reports what an operator counts, too.
    daemon.aryk(&["volume", "space", "p"]).unwrap();
    wait_for("the second count", || space("own", "vm@old") == Some(65536.0));
    assert_eq!(space("shared", "vm@old"), Some(f64::from(15 * 65536)));
    let top = daemon.aryk(&["--json", "top", "volumes", "--once", "--every", "0.2"]).unwrap();
    let top: serde_json::Value = serde_json::from_str(&top).unwrap();
    let volume = &top["per_second"]["volumes"][1];
    assert_eq!((&volume["name"], &volume["kind"]), (&json!("p/vm@old"), &json!("snapshot")), "{top}");
    assert_eq!((&volume["own_bytes"], &volume["shared_bytes"]), (&json!(65536), &json!(15 * 65536)));
    daemon.aryk(&["snapshot", "delete", "p/vm@old"]).unwrap();
    wait_for("the end of the snapshot", || space("own", "vm@old").is_none());
}

#[test]
fn metrics_on_a_unix_socket() {
    let daemon = Daemon::start(&["--metrics", "DIR/metrics.sock"]);
    let path = daemon.dir().join("metrics.sock");
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o660);
    let ask = |of: &str| get(UnixStream::connect(&path).unwrap(), of);
    Exposition::read(&ask("/metrics").1).unwrap();
    assert!(ask("/nothing").0.starts_with("HTTP/1.1 404"));
    drop(daemon.end());
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the test measures time")]
fn scrapers_that_never_read_do_not_block_others() {
    let daemon = Daemon::start(&["--metrics", "0"]);
    let port = daemon.port();
    for i in 0..500 {
        let params = json!({"name": format!("disk-{i}"), "block_size": 512, "num_blocks": 2048});
        daemon.call("bdev_null_create", params).unwrap();
    }
    // More clients than may scrape and than may connect; some never read the reply, others never finish the request.
    let mut hung = Vec::new();
    for i in 0..1100 {
        let mut stream = connect(port);
        if i % 100 == 0 {
            write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        } else if i % 100 == 1 {
            write!(stream, "GET /metrics HTTP/1.1\r\nHo").unwrap();
        }
        hung.push(stream);
    }
    let start = Instant::now();
    let (head, _) = get(connect(port), "/");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    daemon.call("bdev_get_bdevs", json!({"name": "disk-7"})).unwrap();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    let memory = std::fs::read_to_string(format!("/proc/{}/statm", daemon.pid())).unwrap();
    let pages: u64 = memory.split(' ').nth(1).unwrap().parse().unwrap();
    assert!(pages * 4096 < 200 << 20, "{pages} pages");
    drop(hung);
    scrape(port);
}
