//! `aryk bench` against `arykd`, and against faulty back-ends.

mod fake;

use crate::harness::Daemon;
use fake::{Fake, Fault};
use serde_json::{Value, json};
use std::time::Instant;

/// A daemon with one disk and its controller. Returns the disk's socket.
fn with_disk(kind: &[&str]) -> (Daemon, String) {
    let daemon = Daemon::start();
    daemon.ok(&[&["disk", "create", "d"], kind].concat());
    daemon.ok(&["attach", "d", "--queues", "4"]);
    let socket = daemon.dir().join("vhost/d").display().to_string();
    (daemon, socket)
}

/// Reads and writes of the disk.
fn requests(daemon: &Daemon) -> u64 {
    let stat = daemon.json(&["disk", "stat"]);
    let ops = |name: &str| stat["bdevs"][0][name].as_u64().unwrap();
    ops("num_read_ops") + ops("num_write_ops")
}

#[test]
fn all_kinds_of_load() {
    let (daemon, socket) = with_disk(&["--memory", "--size", "16M"]);
    // The disk was searched for a pool.
    let before = requests(&daemon);
    let ways: [&[&str]; 9] = [
        &[],
        &["--ring", "packed"],
        &["--queues", "3", "--qd", "5"],
        &["--qd", "1"],
        // Too many requests for direct descriptors.
        &["--qd", "500"],
        &["--rw", "read", "--bs", "64k"],
        &["--rw", "mix:70", "--destroy"],
        &["--rw", "randwrite", "--bs", "512", "--destroy"],
        &["--rw", "write", "--ring", "packed", "--queues", "2", "--qd", "200", "--destroy"],
    ];
    for way in ways {
        let value = daemon.json(&[&["bench", &socket, "--requests", "5k"], way].concat());
        assert_eq!(value["requests"], 5_000, "{way:?}: {value}");
        let count = |side: &str| value[side]["requests"].as_u64().unwrap_or(0);
        assert_eq!(count("read") + count("write"), 5_000, "{value}");
        assert_eq!(count("write") > 0, way.contains(&"--destroy"), "{value}");
        let side = if count("read") > 0 { &value["read"] } else { &value["write"] };
        let at = |name: &str| side["latency_ns"][name].as_u64().unwrap();
        assert!(0 < at("min") && at("min") <= at("p50") && at("p50") <= at("p99.9"), "{value}");
        assert!(at("p99.9") <= at("max") && value["iops"].as_u64().unwrap() > 0, "{value}");
    }
    // The daemon has the same count: no request is left in flight.
    assert_eq!(requests(&daemon) - before, 9 * 5_000);
    assert_eq!(daemon.json(&["bench", &socket, "--requests", "10"])["disk"]["bytes"], 16 << 20);
}

#[test]
fn a_disk_of_a_scsi_host() {
    let daemon = Daemon::start();
    let socket = daemon.dir().join("vhost/vm").display().to_string();
    for (disk, target) in [("d", "0"), ("e", "5")] {
        daemon.ok(&["disk", "create", disk, "--memory", "--size", "16M"]);
        let attach = ["attach", disk, "--scsi", "--controller", "vm", "--target", target];
        daemon.ok(&attach);
    }
    let ways: [&[&str]; 5] = [
        &[],
        &["--ring", "packed", "--queues", "3"],
        // Too many requests for direct descriptors.
        &["--qd", "500", "--rw", "mix:70", "--destroy", "--bs", "512"],
        &["--rw", "read", "--bs", "128k", "--rate", "10k"],
        &["--rw", "mix:50", "--destroy", "--verify", "--queues", "2"],
    ];
    for way in ways {
        let bench = ["bench", &socket, "--scsi=5", "--requests", "5k"];
        let value = daemon.json(&[&bench, way].concat());
        assert_eq!(value["requests"], 5_000, "{way:?}: {value}");
        assert_eq!((&value["workload"]["scsi"], &value["disk"]["bytes"]), (&json!("5:0"), &json!(16 << 20)));
    }
    let stat = daemon.json(&["disk", "stat"]);
    let disks = stat["bdevs"].as_array().unwrap();
    let of = |name: &str| disks.iter().find(|disk| disk["name"] == name).unwrap();
    assert!(of("e")["num_read_ops"].as_u64().unwrap() > 15_000, "{stat}");
    assert_eq!(of("d")["num_write_ops"], 0, "{stat}");
    let fails = |unit: &str| daemon.fails(&["bench", &socket, unit, "--requests", "1"]);
    assert!(fails("--scsi=1").1.contains("'bad target'"));
    assert!(fails("--scsi=5:1").1.contains("sense key 5h, code 25h"));
    let (code, stderr) = daemon.fails(&["bench", &socket, "--requests", "1"]);
    assert!(code == 2 && stderr.contains("add --scsi"), "{stderr}");
}

#[test]
fn the_trace_has_the_latest_events() {
    let (daemon, socket) = with_disk(&["--memory", "--size", "1M"]);
    assert!(daemon.ok(&["trace"]).contains("There are no events"));
    daemon.ok(&["bench", &socket, "--requests", "100", "--qd", "1"]);
    let trace = daemon.json(&["trace", "--count", "40"]);
    let records = trace["records"].as_array().unwrap();
    assert_eq!(records.len(), 40, "{trace}");
    // One request at a time: down through the layers, and up again.
    let last: Vec<_> = records[36..].iter().map(|r| (r["layer"].as_str(), r["point"].as_str())).collect();
    let (front_end, bdev) = (Some("front-end"), Some("bdev"));
    let (submit, complete) = (Some("submit"), Some("complete"));
    let expected = [(front_end, submit), (bdev, submit), (bdev, complete), (front_end, complete)];
    assert_eq!(last, expected, "{trace}");
    assert!(records.is_sorted_by_key(|record| record["ticks"].as_u64()));
    let all = daemon.ok(&["trace", "d", "--count", "4"]);
    assert!(all.lines().count() == 5 && all.contains("submit"), "{all}");
}

#[test]
fn an_open_loop_keeps_its_rate() {
    let (daemon, socket) = with_disk(&["--null", "--size", "1G"]);
    let value = daemon.json(&["bench", &socket, "--rate", "2k", "--time", "1s"]);
    let requests = value["requests"].as_u64().unwrap();
    assert!((1_600..2_400).contains(&requests), "{value}");
    assert_eq!(value["workload"]["rate"], 2_000);
}

#[test]
fn verify_finds_wrong_data() {
    let (daemon, socket) = with_disk(&["--file", "d.img", "--size", "8M"]);
    let bench = |more: &[&'static str]| [&["bench", &socket, "--verify"], more].concat();
    for ring in ["split", "packed"] {
        let mixed =
            bench(&["--rw", "mix:50", "--destroy", "--queues", "2", "--requests", "4k", "--ring", ring]);
        let value = daemon.json(&mixed);
        assert!(value["verified_blocks"].as_u64().unwrap() > 1_000, "{value}");
    }
    let image = daemon.dir().join("d.img");
    let write_all = || {
        daemon.ok(&bench(&["--rw", "write", "--destroy", "--requests", "2048"]));
        std::fs::read(&image).unwrap()
    };
    let (older, good) = (write_all(), write_all());
    let text = daemon.ok(&bench(&["--rw", "read", "--requests", "2048"]));
    assert!(text.contains("2048 blocks of 4K verified"), "{text}");
    // Three faults in the file: a changed byte, a block at the place of another, and a torn write, of which some sectors are old.
    daemon.ok(&["detach", "d"]);
    let mut bad = good.clone();
    bad[40_960 + 1_000] ^= 1;
    let stderr = |bytes: &[u8]| {
        std::fs::write(&image, bytes).unwrap();
        daemon.ok(&["attach", "d"]);
        let (code, stderr) = daemon.fails(&bench(&["--rw", "read", "--requests", "2048"]));
        daemon.ok(&["detach", "d"]);
        assert_eq!(code, 1, "{stderr}");
        stderr
    };
    let flipped = stderr(&bad);
    assert!(flipped.contains("at offset 40960") && flipped.contains("checksum"), "{flipped}");
    for kept in [12_288..12_800, 15_872..16_384, 12_800..15_872] {
        let mut torn = good.clone();
        torn[kept.clone()].copy_from_slice(&older[kept]);
        let torn = stderr(&torn);
        assert!(torn.contains("at offset 12288") && torn.contains("checksum"), "{torn}");
    }
    bad = good;
    bad.copy_within(8_192..12_288, 4_096);
    let misplaced = stderr(&bad);
    assert!(
        misplaced.contains("at offset 4096") && misplaced.contains("the block of offset 8192"),
        "{misplaced}"
    );
}

#[test]
fn writes_need_destroy_and_arguments_are_checked() {
    let (daemon, socket) = with_disk(&["--memory", "--size", "1M"]);
    for rw in ["write", "randwrite", "mix:99"] {
        let (code, stderr) = daemon.fails(&["bench", &socket, "--rw", rw, "--requests", "1"]);
        assert!(code == 2 && stderr.contains("add --destroy"), "{stderr}");
    }
    let wrong: [(&[&str], &str); 6] = [
        (&["--bs", "700"], "not a multiple of the disk's 512B"),
        (&["--bs", "0"], "not a multiple"),
        (&["--area", "2M"], "more than the disk's 1M"),
        (&["--area", "1K"], "0 blocks of 4K are too few"),
        (&["--verify", "--area", "64K"], "16 blocks of 4K are too few: 33 are needed"),
        (&["--cpu", "5000"], "may not run on core 5000"),
    ];
    for (args, expected) in wrong {
        let (code, stderr) = daemon.fails(&[&["bench", &socket], args].concat());
        assert!(code == 2 && stderr.contains(expected), "{args:?}: {stderr}");
    }
    let (code, stderr) = daemon.fails(&["bench", "/nowhere", "--requests", "1"]);
    assert!(code == 3 && stderr.contains("aryk attach"), "{stderr}");
    assert_eq!(daemon.json(&["disk", "stat"])["bdevs"][0]["num_write_ops"], 0);
}

#[test]
fn controllers_and_disks_are_found_by_name() {
    let daemon = Daemon::start();
    for disk in ["d", "e"] {
        daemon.ok(&["disk", "create", disk, "--memory", "--size", "16M"]);
    }
    daemon.ok(&["attach", "d", "--controller", "c"]);
    daemon.ok(&["attach", "e", "--scsi", "--controller", "s", "--target", "3"]);
    for target in [&["c"][..], &["d"], &["e", "--scsi=3"], &["s", "--scsi=3"]] {
        let value = daemon.json(&[&["bench", "--requests", "100"], target].concat());
        assert_eq!(value["requests"], 100, "{target:?}");
    }
    daemon.ok(&["attach", "d", "--controller", "again", "--shared"]);
    let wrong: [(&[&str], &str); 5] = [
        (&["d"], "is offered by the controllers 'again' and 'c': give the name of one"),
        (&["e"], "is target 3 of the SCSI controller 's': add --scsi=3"),
        (&["s"], "is a SCSI host: add --scsi=TARGET"),
        (&["c", "--scsi"], "is not a SCSI host"),
        (&["nothing"], "`aryk controller list`"),
    ];
    for (target, expected) in wrong {
        let (code, stderr) = daemon.fails(&[&["bench", "--requests", "1"], target].concat());
        assert!(code == 2 && stderr.contains(expected), "{target:?}: {stderr}");
    }
}

#[test]
fn a_read_only_disk() {
    let daemon = Daemon::start();
    daemon.ok(&["disk", "create", "d", "--memory", "--size", "1M"]);
    daemon.ok(&["attach", "d", "--readonly"]);
    let socket = daemon.dir().join("vhost/d").display().to_string();
    let (code, stderr) = daemon.fails(&["bench", &socket, "--rw", "write", "--destroy"]);
    assert!(code == 2 && stderr.contains("read-only"), "{stderr}");
    assert_eq!(daemon.json(&["bench", &socket, "--requests", "10"])["disk"]["readonly"], true);
}

#[test]
fn the_limit_of_the_front_end() {
    let daemon = Daemon::start();
    if std::thread::available_parallelism().unwrap().get() < 2 {
        let (code, stderr) = daemon.fails(&["bench", "--ceiling"]);
        assert!(code == 2 && stderr.contains("two cores"), "{stderr}");
        return;
    }
    for ring in ["split", "packed"] {
        for more in [&[][..], &["--scsi"]] {
            let value = daemon.json(&[&["bench", "--ceiling", "--ring", ring, "--qd", "8"], more].concat());
            assert!(value["ceiling"]["iops"].as_u64().unwrap() > 0, "{value}");
            assert_eq!((&value["requests"], &value["workload"]["qd"]), (&Value::Null, &json!(8)));
        }
    }
}

#[test]
fn a_daemon_that_dies_under_load() {
    let (mut daemon, socket) = with_disk(&["--null", "--size", "1G"]);
    let before = requests(&daemon);
    let bench = daemon.aryk(&["bench", &socket, "--time", "1m"]).stderr(std::process::Stdio::piped()).spawn();
    let bench = bench.unwrap();
    while requests(&daemon) == before {
        std::thread::park_timeout(std::time::Duration::from_millis(5));
    }
    daemon.kill();
    let output = bench.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && stderr.contains("disconnected with 32"), "{stderr}");
}

/// Runs `aryk bench` against a faulty back-end: it fails before its timeout, and reports the reason.
#[expect(clippy::disallowed_methods, reason = "a test measures wall time")]
fn fails_on(fault: Fault, expected: &str) {
    let dir = tempfile::TempDir::new().unwrap();
    Fake::start(&dir.path().join("s"), fault);
    let start = Instant::now();
    for ring in ["split", "packed"] {
        let mut aryk = std::process::Command::new(env!("CARGO_BIN_EXE_aryk"));
        aryk.args(["bench", "--time", "1m", "--timeout", "1", "--ring", ring]).arg(dir.path().join("s"));
        let outcome = crate::harness::outcome(&mut aryk);
        assert_eq!(outcome.code, 1, "{fault:?}: {outcome:?}");
        assert!(outcome.stderr.contains(expected), "{fault:?}, {ring}: {}", outcome.stderr);
        assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
    }
    assert!(start.elapsed().as_secs() < 30, "{fault:?}");
}

#[test]
fn back_ends_that_disconnect() {
    for messages in 0..Fake::MESSAGES - 1 {
        fails_on(Fault::HangUpAfter(messages), "closed the connection");
    }
    // The queue runs already.
    fails_on(Fault::HangUpAfter(Fake::MESSAGES - 1), "disconnected with 32 requests in flight");
}

#[test]
fn back_ends_whose_messages_are_wrong() {
    fails_on(Fault::Silent, "does not reply to GET_FEATURES");
    fails_on(Fault::ShortReply, "reply to GET_FEATURES is invalid: 3 bytes");
    fails_on(Fault::LongReply, "reply to GET_FEATURES is invalid");
    fails_on(Fault::OtherReply, "reply to GET_FEATURES is invalid: message 99");
    fails_on(Fault::HalfReply, "does not reply to GET_FEATURES");
    fails_on(Fault::NoFeatures, "does not offer features");
    fails_on(Fault::ShortConfig, "reply to GET_CONFIG is invalid: 8 bytes");
    fails_on(Fault::Blocks(0), "blocks of 0 bytes");
    fails_on(Fault::Blocks(700), "blocks of 700 bytes");
    fails_on(Fault::Capacity(u64::MAX), "a disk of 18446744073709551615 sectors");
    fails_on(Fault::RefuseMemory, "refuses SET_MEM_TABLE");
}

#[test]
fn back_ends_whose_rings_are_wrong() {
    fails_on(Fault::NoAnswers, "has completed none of 32 requests");
    fails_on(Fault::Id(0xffff), "completed id 65535, which is not outstanding");
    // The slot is in use again by then, with no status written yet.
    fails_on(Fault::Twice, "undefined status 0xff");
    fails_on(Fault::Status(1), "an I/O error");
    fails_on(Fault::Status(77), "undefined status 0x4d");
    fails_on(Fault::Length(17), "17 bytes written instead of 4097");
}
