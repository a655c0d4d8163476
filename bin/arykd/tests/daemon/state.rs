//! The configuration survives: after kill -9, with missing disks, with a full or damaged store.

use crate::harness::{Daemon, code};
use aryk_slow_store::{Hold, SlowStore};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const KEPT: &[&str] = &["--state-dir", "DIR/state"];

#[expect(clippy::disallowed_methods, reason = "the test measures a real daemon")]
fn now() -> Instant {
    Instant::now()
}

fn null(name: &str) -> Value {
    json!({"name": name, "block_size": 512, "num_blocks": 2048})
}

/// The configuration as clients see it.
fn seen(daemon: &Daemon) -> [Value; 4] {
    let sessions = |mut all: Value| {
        all.as_array_mut().unwrap().iter_mut().for_each(|c| c["statistics"] = Value::Null);
        all
    };
    [
        daemon.call("bdev_get_bdevs", json!({})).unwrap(),
        sessions(daemon.call("vhost_get_controllers", json!({})).unwrap()),
        daemon.call("save_config", json!({})).unwrap(),
        daemon.call("log_get_print_level", json!({})).unwrap(),
    ]
}

#[test]
fn waiting_disks_wait_after_a_restart() {
    let mut daemon = Daemon::start(KEPT);
    daemon.call("bdev_passthru_create", json!({"name": "top", "base_bdev_name": "middle"})).unwrap();
    daemon.call("bdev_passthru_create", json!({"name": "middle", "base_bdev_name": "bottom"})).unwrap();
    daemon.kill_and_restart();
    let absent = daemon.call("aryk_absent_get", json!({})).unwrap();
    assert_eq!(absent.as_array().unwrap().len(), 2, "{absent}");
    daemon.call("bdev_null_create", null("bottom")).unwrap();
    let wait = json!({"name": "top", "timeout": 10_000});
    let before = daemon.call("bdev_get_bdevs", wait).unwrap();
    daemon.kill_and_restart();
    assert_eq!(daemon.call("bdev_get_bdevs", json!({"name": "top"})).unwrap(), before);
    assert_eq!(daemon.call("aryk_absent_get", json!({})).unwrap(), json!([]));
}

#[test]
fn the_configuration_is_restored() {
    let mut daemon = Daemon::start(KEPT);
    let file = daemon.dir().join("image");
    let disk = json!({"name": "f", "filename": file, "size": 1 << 20, "lock": "in_use"});
    daemon.call("bdev_uring_create", disk).unwrap();
    daemon.call("bdev_null_create", null("n")).unwrap();
    daemon.call("bdev_null_create", null("gone")).unwrap();
    let delay = json!({"name": "d", "base_bdev_name": "n", "avg_read_latency": 1, "p99_read_latency": 1,
        "avg_write_latency": 1, "p99_write_latency": 1});
    daemon.call("bdev_delay_create", delay).unwrap();
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "f"})).unwrap();
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "other", "dev_name": "d"})).unwrap();
    daemon.call("bdev_null_delete", json!({"name": "gone"})).unwrap();
    daemon.call("vhost_delete_controller", json!({"ctrlr": "other"})).unwrap();
    let slower = json!({"delay_bdev_name": "d", "latency_type": "avg_read", "latency_us": 9});
    daemon.call("bdev_delay_update_latency", slower).unwrap();
    daemon.call("bdev_uring_resize", json!({"name": "f", "size": 2 << 20})).unwrap();
    daemon.call("bdev_null_resize", json!({"name": "n", "new_size": 3})).unwrap();
    daemon.call("log_set_print_level", json!({"level": "WARNING"})).unwrap();
    let before = seen(&daemon);
    for _ in 0..2 {
        daemon.kill_and_restart();
        assert_eq!(seen(&daemon), before);
    }
    assert_eq!(code(daemon.call("bdev_null_create", null("n"))), -17);
    daemon.call("bdev_null_delete", json!({"name": "n"})).unwrap();
    daemon.kill_and_restart();
    let names: Vec<Value> =
        seen(&daemon)[0].as_array().unwrap().iter().map(|disk| disk["name"].clone()).collect();
    assert_eq!(names, ["f"], "the delay disk went with its base");
}

#[test]
fn sampling_histograms_and_deadlines_are_restored_and_deleted_with_their_disks() {
    let mut daemon = Daemon::start(KEPT);
    for name in ["a", "b", "c"] {
        daemon.call("bdev_null_create", null(name)).unwrap();
        daemon.call("bdev_set_qd_sampling_period", json!({"name": name, "period": 5000})).unwrap();
        let recorded = json!({"name": name, "enable": true, "opc": "write", "max_nsec": 1 << 30});
        daemon.call("bdev_enable_histogram", recorded).unwrap();
        let limit = json!({"name": name, "timeout_ms": 7000, "action": "abort"});
        daemon.call("bdev_set_io_timeout", limit).unwrap();
    }
    // Turned off for one disk; gone with another, whose name is used again.
    daemon.call("bdev_set_qd_sampling_period", json!({"name": "b", "period": 0})).unwrap();
    daemon.call("bdev_enable_histogram", json!({"name": "b", "enable": false})).unwrap();
    daemon.call("bdev_set_io_timeout", json!({"name": "b", "timeout_ms": 0})).unwrap();
    daemon.call("bdev_null_delete", json!({"name": "c"})).unwrap();
    daemon.call("bdev_null_create", null("c")).unwrap();
    let watched = |daemon: &Daemon, name: &str| {
        let stats = &daemon.call("bdev_get_iostat", json!({"name": name})).unwrap()["bdevs"][0];
        let histogram = daemon.call("bdev_get_histogram", json!({"name": name}));
        (stats["queue_depth_polling_period"].as_u64().is_some_and(|period| period > 0), histogram.is_ok())
    };
    let before = seen(&daemon);
    let methods = |config: &Value| -> Vec<String> {
        let calls = config["subsystems"][0]["config"].as_array().unwrap();
        calls.iter().map(|c| format!("{} {}", c["method"].as_str().unwrap(), c["params"]["name"])).collect()
    };
    let saved = methods(&before[2]);
    for method in ["bdev_set_qd_sampling_period", "bdev_enable_histogram", "bdev_set_io_timeout"] {
        let of: Vec<_> = saved.iter().filter(|call| call.starts_with(method)).collect();
        assert_eq!(of, [&format!("{method} \"a\"")], "{saved:?}");
    }
    for _ in 0..2 {
        daemon.kill_and_restart();
        assert_eq!(seen(&daemon), before);
        assert_eq!(watched(&daemon, "a"), (true, true));
        assert_eq!((watched(&daemon, "b"), watched(&daemon, "c")), ((false, false), (false, false)));
    }
    // Another daemon can load the saved configuration.
    let other = Daemon::start(&[]);
    other.call("load_config", before[2].clone()).unwrap();
    assert_eq!(methods(&seen(&other)[2]), saved);
    assert_eq!(watched(&other, "a"), (true, true));
}

/// Waits until the disk `name` exists.
fn wait_for(daemon: &Daemon, name: &str) {
    daemon.call("bdev_get_bdevs", json!({"name": name, "timeout": 20_000})).unwrap();
}

#[test]
fn absent_objects_are_created_later_or_forgotten() {
    let mut daemon = Daemon::start(KEPT);
    let file = daemon.dir().join("image");
    let disk = json!({"name": "f", "filename": file, "size": 1 << 20});
    daemon.call("bdev_uring_create", disk).unwrap();
    let lost =
        json!({"name": "lost", "filename": daemon.dir().join("lost"), "size": 1 << 20, "readonly": false});
    daemon.call("bdev_uring_create", lost).unwrap();
    daemon.call("bdev_null_create", null("n")).unwrap();
    daemon.call("bdev_passthru_create", json!({"name": "p", "base_bdev_name": "f"})).unwrap();
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "p"})).unwrap();
    let before = seen(&daemon);
    let away = daemon.dir().join("away");
    for name in ["image", "lost"] {
        let path = daemon.dir().join(name);
        std::fs::rename(&path, away.with_extension(name)).unwrap();
    }
    daemon.kill_and_restart();
    assert_eq!(seen(&daemon)[0].as_array().unwrap().len(), 1, "the null disk");
    // It is still in the store.
    daemon.kill_and_restart();
    assert!(!file.exists(), "a lost disk is not replaced by an empty one");
    std::fs::rename(away.with_extension("image"), &file).unwrap();
    wait_for(&daemon, "p");
    assert_eq!(daemon.call("bdev_uring_delete", json!({"name": "lost"})), Ok(json!(true)));
    assert_eq!(code(daemon.call("bdev_uring_delete", json!({"name": "lost"}))), -19);
    let deadline = now() + Duration::from_secs(20);
    while daemon.call("vhost_get_controllers", json!({"name": "c"})).is_err() {
        assert!(now() < deadline);
    }
    let now = seen(&daemon);
    assert_eq!(now[1], before[1]);
    daemon.kill_and_restart();
    assert_eq!(seen(&daemon)[0].as_array().unwrap().len(), 3, "f, n, p");
}

#[test]
fn a_locked_disk_is_retried_in_the_background() {
    let mut daemon = Daemon::start(KEPT);
    let file = daemon.dir().join("image");
    daemon.call("bdev_uring_create", json!({"name": "f", "filename": file, "size": 1 << 20})).unwrap();
    daemon.call("bdev_passthru_create", json!({"name": "p", "base_bdev_name": "f"})).unwrap();
    daemon.kill();
    let mut other = Daemon::start(&[]);
    other.call("bdev_uring_create", json!({"name": "f", "filename": file})).unwrap();
    let started = now();
    daemon.restart();
    assert!(
        started.elapsed() < Duration::from_secs(4),
        "the start does not wait for the lock: {:?}",
        started.elapsed()
    );
    assert_eq!(seen(&daemon)[0], json!([]));
    other.kill();
    wait_for(&daemon, "p");
}

/// The successor of a killed daemon, with a disk `slow` that cannot be opened now and a disk `fast`, each with a controller.
fn with_a_stuck_disk() -> Option<(Daemon, SlowStore)> {
    let mut daemon = Daemon::start(KEPT);
    let elsewhere = std::env::temp_dir();
    let store = SlowStore::new(&elsewhere, 1 << 20)
        .inspect_err(|error| eprintln!("skipped: FUSE needs root and kernel support: {error}"))
        .ok()?;
    daemon.call("bdev_uring_create", json!({"name": "slow", "filename": store.path()})).unwrap();
    daemon.call("bdev_null_create", null("fast")).unwrap();
    for (controller, disk) in [("of-slow", "slow"), ("of-fast", "fast")] {
        let params = json!({"ctrlr": controller, "dev_name": disk});
        daemon.call("vhost_create_blk_controller", params).unwrap();
    }
    daemon.kill();
    store.hold(Hold::All);
    daemon.begin_restart();
    assert!(store.await_held(1, Duration::from_secs(20)), "the disk is being opened");
    Some((daemon, store))
}

#[test]
fn calls_are_answered_while_a_disk_is_opened() {
    let Some((daemon, store)) = with_a_stuck_disk() else { return };
    let disks = daemon.call("bdev_get_bdevs", json!({})).unwrap();
    assert_eq!(disks.as_array().unwrap().iter().map(|disk| &disk["name"]).collect::<Vec<_>>(), ["fast"]);
    for method in ["spdk_get_version", "framework_get_subsystems"] {
        daemon.call(method, json!({})).unwrap();
    }
    // Objects that do not need the stuck disk exist already.
    daemon.call("vhost_get_controllers", json!({"name": "of-fast"})).unwrap();
    daemon.call("bdev_null_create", null("new")).unwrap();
    let saved = daemon.call("save_config", json!({})).unwrap().to_string();
    assert!(saved.contains("\"slow\"") && saved.contains("\"of-slow\""), "{saved}");
    let wait = Duration::from_millis(300);
    std::thread::scope(|scope| {
        let again = json!({"name": "slow", "filename": store.path()});
        let calls = [
            ("bdev_uring_create", again, true),
            ("vhost_create_blk_controller", json!({"ctrlr": "of-slow", "dev_name": "fast"}), true),
            ("framework_wait_init", json!({}), false),
        ];
        let calls = calls.map(|(method, params, exists)| {
            let daemon = &daemon;
            (exists, scope.spawn(move || daemon.call(method, params)))
        });
        std::thread::park_timeout(wait);
        assert!(calls.iter().all(|(_, call)| !call.is_finished()), "the calls wait for the disk");
        store.pass();
        store.let_go();
        for (exists, call) in calls {
            let error = call.join().unwrap().err().unwrap_or_default().to_string();
            assert_eq!(error.contains("exists"), exists, "{error}");
        }
    });
    daemon.call("vhost_get_controllers", json!({"name": "of-slow"})).unwrap();
    assert_eq!(daemon.call("aryk_absent_get", json!({})).unwrap(), json!([]));
}

#[test]
fn a_daemon_ends_while_a_disk_is_opened() {
    let Some((mut daemon, store)) = with_a_stuck_disk() else { return };
    // The kernel does not end a process with a request in FUSE; the rest of the daemon has ended before.
    assert_eq!(daemon.signal_and_wait("TERM", Duration::from_secs(4)), None);
    assert!(daemon.try_connect().is_none() && !daemon.dir().join("rpc.sock").exists());
    store.pass();
    store.let_go();
    assert_eq!(daemon.wait(Duration::from_secs(10)), Some(0));
    daemon.restart();
    daemon.call("vhost_get_controllers", json!({"name": "of-slow"})).unwrap();
}

#[test]
fn pipelined_calls_share_commits() {
    let mut daemon = Daemon::start(KEPT);
    const DISKS: usize = 3000;
    let mut stream = daemon.connect();
    let replies = BufReader::new(stream.try_clone().unwrap());
    let started = now();
    let writer = std::thread::spawn(move || {
        for n in 0..DISKS {
            let params = null(&format!("n{n}"));
            let call = json!({"jsonrpc": "2.0", "id": n, "method": "bdev_null_create", "params": params});
            stream.write_all(call.to_string().as_bytes()).unwrap();
        }
        stream
    });
    for line in replies.lines().take(DISKS) {
        let reply: Value = serde_json::from_str(&line.unwrap()).unwrap();
        assert!(reply.get("error").is_none(), "{reply}");
    }
    let took = started.elapsed();
    drop(writer.join().unwrap());
    eprintln!("{DISKS} disks in {took:?}");
    assert!(took < Duration::from_secs(6), "{took:?}");
    daemon.kill_and_restart();
    assert_eq!(seen(&daemon)[0].as_array().unwrap().len(), DISKS);
}

#[test]
fn a_state_directory_has_one_daemon() {
    let daemon = Daemon::start(KEPT);
    let state = daemon.dir().join("state");
    let other = TempDir::new().unwrap();
    let output = crate::harness::run_in(other.path(), &["--state-dir", state.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let printed = String::from_utf8(output.stderr).unwrap();
    assert!(printed.contains("another daemon") && printed.contains(&daemon.pid().to_string()), "{printed}");
}

#[test]
fn a_damaged_store_is_refused() {
    let mut daemon = Daemon::start(KEPT);
    daemon.call("bdev_null_create", null("n")).unwrap();
    daemon.kill();
    let store = daemon.dir().join("state/state.redb");
    let mut bytes = std::fs::read(&store).unwrap();
    bytes.truncate(5000);
    std::fs::write(&store, &bytes).unwrap();
    let output = daemon.run_another();
    assert_eq!(output.status.code(), Some(1));
    let printed = String::from_utf8(output.stderr).unwrap();
    assert!(printed.contains("is damaged") && printed.contains("mv "), "{printed}");
    assert!(!printed.contains("panicked"), "{printed}");
    assert_eq!(std::fs::read(&store).unwrap(), bytes);
}

/// A small file system at a path; unmounted when dropped.
pub struct Small(PathBuf);

impl Small {
    /// `None`, with a message, if mounting is not possible.
    pub fn mount(at: &Path, mebibytes: usize) -> Option<Self> {
        std::fs::create_dir(at).unwrap();
        let mut mount = Command::new("mount");
        let options = format!("size={mebibytes}m");
        let mounted = mount.args(["-t", "tmpfs", "-o", &*options, "tmpfs"]).arg(at).output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(at.to_owned())),
            _ => {
                eprintln!("skipped: no file system can be mounted here");
                None
            }
        }
    }
}

impl Small {
    /// Fills the file system. Returns the file that occupies it.
    pub fn fill(&self) -> PathBuf {
        let path = self.0.join("fill");
        occupy(&mut std::fs::File::create(&path).unwrap());
        path
    }

    /// Fills the file system, and keeps it full: the daemon frees space now and then, as when it has copied its store.
    pub fn keep_full(&self) -> Full {
        let path = self.fill();
        let mut file = std::fs::File::options().append(true).open(&path).unwrap();
        let (enough, is_enough) = channel::<()>();
        let filler = std::thread::spawn(move || {
            while is_enough.recv_timeout(Duration::from_millis(1)) == Err(RecvTimeoutError::Timeout) {
                occupy(&mut file);
            }
        });
        Full { path, filler: Some((enough, filler)) }
    }
}

/// Writes to the file until there is no room.
fn occupy(file: &mut std::fs::File) {
    while file.write(&[1; 4096]).is_ok_and(|len| len > 0) {}
}

/// A full file system, which has space again when this is dropped.
pub struct Full {
    path: PathBuf,
    filler: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Drop for Full {
    fn drop(&mut self) {
        if let Some((enough, filler)) = self.filler.take() {
            drop(enough);
            filler.join().unwrap();
        }
        std::fs::remove_file(&self.path).unwrap();
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // A busy file system is unmounted when it becomes free.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn a_disk_that_cannot_be_stored_is_not_created() {
    let dir = TempDir::new().unwrap();
    let Some(small) = Small::mount(&dir.path().join("state"), 2) else { return };
    let mut daemon = Daemon::start_in(dir, KEPT);
    daemon.call("bdev_null_create", null("before")).unwrap();
    daemon.call("bdev_null_create", null("goes")).unwrap();
    let fill = small.fill();
    let mut made = 0;
    let error = loop {
        let name = format!("{:0>9}{}", made, "x".repeat(4000));
        match daemon.call("bdev_null_create", null(&name)) {
            Ok(_) => made += 1,
            Err(error) => break error,
        }
        assert!(made < 1000);
    };
    assert_eq!(error["code"], -28, "{error}");
    assert!(error["data"].as_str().unwrap().starts_with("nothing was made: cannot write to"), "{error}");
    let before = seen(&daemon);
    assert_eq!(before[0].as_array().unwrap().len(), 2 + made);
    let error = daemon.call("bdev_null_delete", json!({"name": "goes"}));
    std::fs::remove_file(fill).unwrap();
    // The next change writes the missed change too.
    daemon.call("bdev_null_create", null("after")).unwrap();
    let before = seen(&daemon);
    assert_eq!(before[0].as_array().unwrap().len(), 2 + made, "{error:?}");
    daemon.kill_and_restart();
    assert_eq!(seen(&daemon), before);
}

#[test]
fn the_summary_reports_the_state_directory() {
    let printed = Daemon::start(&[]).end();
    assert!(printed.contains("state     not kept"), "{printed}");
}
