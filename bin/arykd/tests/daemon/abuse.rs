//! Much bad input during a guest's I/O: clear errors, no leaks, no stalls.
//!
//! `ARYK_RPC_CALLS` sets the number of random calls instead of ten thousand; `cargo xtask test --all` uses a hundred thousand.

use crate::front_end::FrontEnd;
use crate::harness::{Daemon, code, run_in};
use crate::state::Small;
use fastrand::Rng;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const CONNECTIONS: u64 = 8;
/// The longest permitted request of the guest on a busy test machine. On a free machine a request takes some microseconds.
const STALL: Duration = Duration::from_secs(3);
/// The permitted growth of the daemon's memory, in KiB, after all objects are removed: allocators keep some memory.
const GROWTH_MAX: u64 = 16 << 10;

#[expect(clippy::disallowed_methods, reason = "the test measures a real daemon")]
fn now() -> Instant {
    Instant::now()
}

/// The resources of a process.
#[derive(Debug, Clone, Copy)]
struct Resources {
    fds: usize,
    kib: u64,
}

impl Resources {
    fn now(daemon: &Daemon) -> Self {
        let proc = format!("/proc/{}", daemon.pid());
        let fds = std::fs::read_dir(format!("{proc}/fd")).unwrap().count();
        let status = std::fs::read_to_string(format!("{proc}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        Self { fds, kib: line.trim().trim_end_matches(" kB").parse().unwrap() }
    }

    /// Fails if the process holds more than before, after clients have disconnected.
    #[track_caller]
    fn check_since(self, daemon: &Daemon) {
        let deadline = now() + Duration::from_secs(20);
        let mut after = Self::now(daemon);
        while after.fds > self.fds && now() < deadline {
            std::thread::park_timeout(Duration::from_millis(20));
            after = Self::now(daemon);
        }
        eprintln!("before {self:?}, after {after:?}");
        assert!(after.fds <= self.fds, "descriptors: {self:?}, {after:?}");
        assert!(after.kib < self.kib + GROWTH_MAX, "memory: {self:?}, {after:?}");
    }
}

/// A daemon with a disk in memory and its controller.
fn daemon(flags: &[&str]) -> Daemon {
    with_disk(Daemon::start(flags))
}

fn with_disk(daemon: Daemon) -> Daemon {
    daemon.call("bdev_malloc_create", json!({"name": "io", "block_size": 512, "num_blocks": 8192})).unwrap();
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "io", "dev_name": "io"})).unwrap();
    daemon
}

/// Writes and reads back, like a guest, while `test` runs. Checks that no request takes long.
fn beside_io<T>(daemon: &Daemon, test: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    let mut disk = FrontEnd::connect(&daemon.dir().join("vhost/io"));
    // The session has all its descriptors now.
    disk.write(0, &[0; 512]).unwrap();
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let (mut requests, mut longest) = (0_u64, Duration::ZERO);
            while !stop.load(Ordering::Relaxed) {
                let (start, data) = ((requests % 1024) * 4096, [requests as u8; 4096]);
                let began = now();
                disk.write(start, &data).unwrap();
                longest = longest.max(began.elapsed());
                assert_eq!(disk.read(start, 4096).unwrap(), data);
                requests += 1;
                std::thread::park_timeout(Duration::from_micros(200));
            }
            (requests, longest)
        });
        let stop_at_the_end = Stop(&stop);
        let result = test();
        drop(stop_at_the_end);
        let (requests, longest) = guest.join().unwrap();
        eprintln!("{requests} writes beside it, the longest {longest:?}");
        assert!(requests > 0 && longest < STALL, "{requests} requests, the longest {longest:?}");
        result
    })
}

/// Stops the guest when dropped, also when the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Names of all kinds: the daemon does not interpret their contents.
const NAMES: [&str; 12] = [
    "a",
    "b",
    "диск",
    "磁盘 1",
    "\u{202e}drawkcab",
    "e\u{301}",
    "\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}",
    "nul\0inside",
    "../../etc/passwd",
    "tab\tquote\"back\\slash\nline",
    "\u{ffff}\u{10ffff}",
    "",
];

const VALUES: [&str; 14] = [
    "null",
    "true",
    "-1",
    "0",
    "1e400",
    "18446744073709551616",
    "0.5",
    "\"\"",
    "[]",
    "{}",
    "[[[[]]]]",
    "\"0x10\"",
    "{\"a\":{\"b\":[null]}}",
    "\"\\ud800\"",
];

/// Parameters of methods, and one that no method has.
const PARAMS: [&str; 12] = [
    "name",
    "block_size",
    "num_blocks",
    "uuid",
    "base_bdev_name",
    "ctrlr",
    "dev_name",
    "filename",
    "size",
    "names",
    "timeout",
    "colour",
];

const METHODS: [&str; 16] = [
    "bdev_null_create",
    "bdev_malloc_create",
    "bdev_passthru_create",
    "bdev_delay_create",
    "bdev_error_create",
    "bdev_split_create",
    "bdev_uring_create",
    "vhost_create_blk_controller",
    "bdev_get_bdevs",
    "bdev_get_iostat",
    "load_config",
    "framework_get_config",
    "bdev_set_options",
    "no_such_method",
    "",
    "bdev_examine",
];

/// A call that is valid, or may be.
fn sensible(random: &mut Rng) -> (&'static str, Value) {
    let (name, other) = (random.choice(NAMES).unwrap(), random.choice(NAMES).unwrap());
    match random.usize(..16) {
        0..=3 => ("bdev_null_create", json!({"name": name, "block_size": 512, "num_blocks": 2048})),
        4 => ("bdev_malloc_create", json!({"name": name, "block_size": 4096, "num_blocks": 64})),
        5 => ("bdev_passthru_create", json!({"name": name, "base_bdev_name": other})),
        6 => ("bdev_error_create", json!({"base_name": name})),
        7 => ("bdev_split_create", json!({"base_bdev": name, "split_count": 3})),
        8 => ("vhost_create_blk_controller", json!({"ctrlr": name, "dev_name": other})),
        9 => ("vhost_delete_controller", json!({"ctrlr": name})),
        10 => ("bdev_null_delete", json!({"name": name})),
        11 => ("bdev_malloc_delete", json!({"name": name})),
        12 => ("bdev_passthru_delete", json!({"name": name})),
        13 => ("bdev_get_bdevs", json!({})),
        14 => ("bdev_get_iostat", json!({})),
        _ => ("save_config", json!({})),
    }
}

/// A request as text.
fn request(random: &mut Rng, id: u64) -> String {
    let quoted = |text: &str| Value::from(text).to_string();
    match random.usize(..8) {
        0..=4 => {
            let (method, params) = sensible(random);
            json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).to_string()
        }
        5 => {
            let params: BTreeSet<&str> =
                (0..random.usize(..5)).map(|_| random.choice(PARAMS).unwrap()).collect();
            let params: Vec<String> = params
                .iter()
                .map(|param| {
                    let name = quoted(random.choice(NAMES).unwrap());
                    let value =
                        if random.usize(..2) == 0 { name } else { random.choice(VALUES).unwrap().to_owned() };
                    format!("{}:{value}", quoted(param))
                })
                .collect();
            let method = quoted(random.choice(METHODS).unwrap());
            format!("{{\"id\":{id},\"method\":{method},\"params\":{{{}}}}}", params.join(","))
        }
        6 => format!(
            "{{\"id\":{id},\"method\":{},\"params\":{}}}",
            random.choice(VALUES).unwrap().replace("1e400", "1"),
            random.choice(VALUES).unwrap()
        ),
        _ => {
            let (method, params) = sensible(random);
            let call = json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params});
            format!("\t[{call},\r\n{{}},\"{id}\"]\n")
        }
    }
}

/// Checks a reply; the reply to a batch is an array of replies.
fn check_reply(reply: &Value, request: &str) {
    if let Some(batch) = reply.as_array() {
        return batch.iter().for_each(|reply| check_reply(reply, request));
    }
    assert_eq!(reply["jsonrpc"], "2.0", "{reply}");
    let Some(error) = reply.get("error") else {
        return assert!(reply.get("result").is_some(), "{reply}");
    };
    let code = error["code"].as_i64().unwrap();
    let is_known = matches!(code, -32603..=-32600 | -32700 | -133..=-1);
    // An empty text or "Internal error" would be a bug of the daemon.
    let is_reported =
        error["message"].as_str().is_some_and(|text| !text.is_empty() && text != "Internal error");
    assert!(is_known && is_reported, "{request}: {error}");
}

/// Makes calls; some are garbage that ends the connection, and some replies are not read.
fn misbehave(daemon: &Daemon, seed: u64, calls: u64) {
    let mut random = Rng::with_seed(seed);
    let mut stream = BufReader::new(daemon.connect());
    for id in 0..calls {
        match random.usize(..40) {
            0 => {
                // The daemon replies to garbage, then closes the stream.
                let garbage = random
                    .choice(["GET / HTTP/1.1\r\n\r\n", "}", "{\"id\":1,\"method\":tru", "\u{feff}{}"])
                    .unwrap();
                // The daemon may close the stream before all of it is written.
                let _ = stream.get_mut().write_all(garbage.as_bytes());
                let _ = stream.get_mut().shutdown(std::net::Shutdown::Write);
                let mut rest = String::new();
                if stream.read_to_string(&mut rest).is_ok() {
                    assert!(rest.contains("-32700"), "{garbage:?}: {rest}");
                }
                stream = BufReader::new(daemon.connect());
            }
            1 => {
                // Disconnects before the reply, or in the middle of it.
                let _ = stream.get_mut().write_all(b"{\"id\":1,\"method\":\"bdev_get_bdevs\"}");
                if random.usize(..2) == 0 {
                    let _ = stream.get_mut().read(&mut [0; 7]);
                }
                stream = BufReader::new(daemon.connect());
            }
            _ => {
                let request = request(&mut random, id);
                let cut = random.usize(..request.len());
                let cut = (0..=cut).rev().find(|at| request.is_char_boundary(*at)).unwrap();
                let (head, tail) = request.split_at(cut);
                stream.get_mut().write_all(head.as_bytes()).unwrap();
                stream.get_mut().write_all(tail.as_bytes()).unwrap();
                let mut line = String::new();
                stream.read_line(&mut line).unwrap();
                let reply =
                    serde_json::from_str(&line).unwrap_or_else(|e| panic!("{request}: {line:?}: {e}"));
                check_reply(&reply, &request);
            }
        }
    }
}

/// Removes all but the guest's disk.
fn clean_up(daemon: &Daemon) {
    let controllers = daemon.call("vhost_get_controllers", json!({})).unwrap();
    for controller in controllers.as_array().unwrap().iter().filter(|c| c["ctrlr"] != "io") {
        daemon.call("vhost_delete_controller", json!({"ctrlr": controller["ctrlr"]})).unwrap();
    }
    for round in 0.. {
        let disks = daemon.call("bdev_get_bdevs", json!({})).unwrap();
        let disks: Vec<&Value> =
            disks.as_array().unwrap().iter().map(|d| &d["name"]).filter(|name| *name != "io").collect();
        if disks.is_empty() {
            return;
        }
        assert!(round < 10, "{disks:?} stay");
        for name in disks {
            // Tries all modules' methods; the disk may also have gone with another.
            for method in
                ["bdev_null_delete", "bdev_malloc_delete", "bdev_passthru_delete", "bdev_error_delete"]
            {
                let _ = daemon.call(method, json!({"name": name}));
            }
            let _ = daemon.call("bdev_split_delete", json!({"base_bdev": name}));
        }
    }
}

fn random_calls(daemon: &Daemon, seed: u64, calls: u64) {
    std::thread::scope(|scope| {
        for connection in 0..CONNECTIONS {
            scope.spawn(move || misbehave(daemon, seed + connection, calls / CONNECTIONS));
        }
    });
    clean_up(daemon);
}

#[test]
fn random_calls_beside_io() {
    let calls = std::env::var("ARYK_RPC_CALLS").map_or(10_000, |calls| calls.parse().unwrap());
    for flags in [&[][..], &["--state-dir", "DIR/state"]] {
        let daemon = daemon(flags);
        beside_io(&daemon, || {
            random_calls(&daemon, 1, calls / 4);
            let before = Resources::now(&daemon);
            random_calls(&daemon, 1_000, calls);
            before.check_since(&daemon);
        });
    }
}

#[test]
fn unread_replies_take_bounded_memory() {
    let daemon = daemon(&[]);
    for n in 0..1_000 {
        let disk = json!({"name": format!("n{n}"), "block_size": 512, "num_blocks": 8});
        daemon.call("bdev_null_create", disk).unwrap();
    }
    let reply = daemon.call("bdev_get_bdevs", json!({})).unwrap().to_string().len() as u64;
    beside_io(&daemon, || {
        let before = Resources::now(&daemon);
        let unread: Vec<UnixStream> = (0..CONNECTIONS).map(|_| flood(&daemon)).collect();
        let began = now();
        daemon.call("spdk_get_version", json!({})).unwrap();
        let (took, held) = (began.elapsed(), Resources::now(&daemon));
        eprintln!(
            "{before:?}, {held:?} with {CONNECTIONS} times {reply} bytes unread; another is answered in {took:?}"
        );
        assert!(took < STALL, "{took:?}");
        // For each connection, one MiB and a few replies may be queued, as text and as JSON values.
        let bound = CONNECTIONS * (1024 + 4 * reply / 1024);
        assert!(held.kib < before.kib + bound + GROWTH_MAX, "{before:?}, {held:?}, bound {bound}");
        drop(unread);
        Resources { kib: before.kib + bound, ..before }.check_since(&daemon);
    });
}

/// Sends as many requests as the daemon accepts, and reads no reply.
fn flood(daemon: &Daemon) -> UnixStream {
    let mut stream = daemon.connect();
    stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let request = b"{\"id\":1,\"method\":\"bdev_get_bdevs\"}".repeat(100);
    loop {
        match stream.write(&request) {
            Ok(_) => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return stream,
            Err(e) => panic!("{e}"),
        }
    }
}

#[test]
fn names_are_returned_unchanged() {
    let daemon = daemon(&["--state-dir", "DIR/state"]);
    let long = "\u{10ffff}".repeat(1_024);
    let longer = json!({"name": long.clone() + "!", "block_size": 512, "num_blocks": 8});
    assert_eq!(code(daemon.call("bdev_null_create", longer)), -22);
    for name in NAMES.into_iter().chain([long.as_str()]).filter(|name| !name.is_empty()) {
        let disk = json!({"name": name, "block_size": 512, "num_blocks": 8});
        assert_eq!(daemon.call("bdev_null_create", disk).unwrap(), name);
        assert_eq!(daemon.call("bdev_get_bdevs", json!({"name": name})).unwrap()[0]["name"], name);
        // The same name with each character escaped.
        let escaped: String = name.encode_utf16().map(|unit| format!("\\u{unit:04x}")).collect();
        let mut stream = daemon.connect();
        let request =
            format!("{{\"id\":1,\"method\":\"bdev_null_delete\",\"params\":{{\"name\":\"{escaped}\"}}}}");
        stream.write_all(request.as_bytes()).unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap()["result"], true, "{name:?}: {line}");
    }
}

#[test]
fn a_full_state_directory_leaks_nothing() {
    let dir = TempDir::new().unwrap();
    let Some(small) = Small::mount(&dir.path().join("state"), 2) else { return };
    let daemon = with_disk(Daemon::start_in(dir, &["--state-dir", "DIR/state"]));
    let fill = small.fill();
    beside_io(&daemon, || {
        let is_refused = |n: usize| {
            let name = format!("{n}{}", "x".repeat(4_000));
            let made =
                daemon.call("bdev_null_create", json!({"name": name, "block_size": 512, "num_blocks": 8}));
            made.is_err_and(|error| error["code"] == -28)
        };
        let full = (0..1_000).find(|n| is_refused(*n)).expect("it is full");
        let before = Resources::now(&daemon);
        let refused = (full + 1..full + 301).filter(|n| is_refused(*n)).count();
        assert!(refused > 250, "{refused} of 300 are refused");
        // The store's own descriptors, which it opens again after a failure.
        Resources { fds: before.fds + 1, ..before }.check_since(&daemon);
        std::fs::remove_file(&fill).unwrap();
        daemon.call("bdev_null_create", json!({"name": "n", "block_size": 512, "num_blocks": 8})).unwrap();
    });
}

#[test]
fn a_read_only_state_directory_is_reported() {
    let dir = TempDir::new().unwrap();
    let state = dir.path().join("state");
    let Some(_small) = Small::mount(&state, 2) else { return };
    assert!(Command::new("mount").args(["-o", "remount,ro"]).arg(&state).status().unwrap().success());
    let output = run_in(dir.path(), &["--state-dir", state.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let printed = String::from_utf8(output.stderr).unwrap();
    assert!(printed.contains("Read-only file system") && printed.contains("state"), "{printed}");
    assert!(!printed.contains("panicked"), "{printed}");
}
