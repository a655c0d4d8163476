//! The daemon with the module: a disk is made by RPC, read, kept over a restart, and removed.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use aryk_bdev::Lba;
use aryk_example_custom_module::block;
use aryk_front_end::{Announced, Format, Memory, Piece, Ring, Session, Shape, Wanted, feature, protocol};
use aryk_rpc_client::{Client, Reply};
use rustix::event::{EventfdFlags, eventfd};
use serde_json::{Value, json};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

/// Four pebibytes.
const BLOCKS: u64 = 1 << 40;

struct Daemon(Child);

impl Daemon {
    fn start(dir: &Path) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aryk-example-custom-module"));
        command.arg("-r").arg(dir.join("rpc.sock")).arg("-S").arg(dir.join("vhost"));
        let daemon = Self(command.arg("--state-dir").arg(dir.join("state")).spawn().unwrap());
        Client::connect_within(&dir.join("rpc.sock"), Duration::from_secs(30)).unwrap();
        call(dir, "framework_wait_init", json!({})).unwrap();
        daemon
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads a block as a VM does, through a ring in its own memory.
fn read(socket: &Path, lba: u64) -> [u8; 4096] {
    const HEADER: u64 = 32 << 10;
    const STATUS: u64 = HEADER + 16;
    const DATA: u64 = 48 << 10;
    let wanted = Wanted {
        features: feature::VERSION_1,
        optional: 0,
        protocol: protocol::CONFIGURE_MEM_SLOTS | protocol::REPLY_ACK,
        optional_protocol: 0,
        queues: 1,
        patience: Duration::from_secs(20),
    };
    let session = Session::connect(socket, &wanted).unwrap();
    let memory = Memory::new(64 << 10).unwrap();
    session.set_features().unwrap();
    session.share(&memory).unwrap();
    let mut ring = Ring::new(Shape { format: Format::Split, size: 16, event_idx: false }, &memory, 0);
    let (kick, call) = [(); 2].map(|()| eventfd(0, EventfdFlags::CLOEXEC).unwrap()).into();
    session
        .start(&Announced { index: 0, size: 16, ring: &ring, kick: kick.as_fd(), call: call.as_fd() })
        .unwrap();
    session.enable(1).unwrap();
    // A request to read, and its first sector of 512 bytes.
    memory.whole().write(HEADER as usize, &[0_u64, lba * 8]);
    let pieces = [
        Piece { at: HEADER, len: 16, write: false },
        Piece { at: DATA, len: 4096, write: true },
        Piece { at: STATUS, len: 1, write: true },
    ];
    ring.add(0, &pieces, None);
    if ring.publish() {
        rustix::io::write(&kick, &1_u64.to_ne_bytes()).unwrap();
    }
    while ring.take().unwrap().is_none() {
        std::thread::park_timeout(Duration::from_millis(1));
    }
    assert_eq!(memory.whole().read::<u8>(STATUS as usize), 0);
    memory.whole().read(DATA as usize)
}

fn call(dir: &Path, method: &str, params: Value) -> Reply {
    Client::connect(&dir.join("rpc.sock")).unwrap().call(method, &params).unwrap()
}

#[test]
fn a_disk_of_the_module_is_one_like_any_other() {
    let dir = tempfile::TempDir::new().unwrap();
    let dir = dir.path();
    let daemon = Daemon::start(dir);
    let methods = call(dir, "rpc_get_methods", json!({})).unwrap();
    assert!(methods.as_array().unwrap().contains(&json!("bdev_pattern_create")));
    let document = call(dir, "rpc.discover", json!({})).unwrap();
    let documented =
        document["methods"].as_array().unwrap().iter().any(|m| m["name"] == "bdev_pattern_create");
    assert!(documented);
    let create = json!({"name": "p", "num_blocks": BLOCKS});
    assert_eq!(call(dir, "bdev_pattern_create", create.clone()).unwrap(), "p");
    assert!(call(dir, "bdev_pattern_create", create).unwrap_err().to_string().contains("exists"));
    call(dir, "bdev_passthru_create", json!({"name": "top", "base_bdev_name": "p"})).unwrap();
    call(dir, "vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "top"})).unwrap();
    for lba in [0, 7, BLOCKS - 1] {
        assert_eq!(read(&dir.join("vhost/c"), lba), block(Lba(lba)));
    }
    let before = call(dir, "bdev_get_bdevs", json!({})).unwrap();
    assert_eq!(before[0]["product_name"], "Pattern disk");
    drop(daemon);
    let _daemon = Daemon::start(dir);
    assert_eq!(call(dir, "bdev_get_bdevs", json!({})).unwrap()[0]["uuid"], before[0]["uuid"]);
    call(dir, "vhost_get_controllers", json!({"name": "c"})).unwrap();
    call(dir, "bdev_pattern_delete", json!({"name": "top"})).unwrap_err();
    call(dir, "bdev_pattern_delete", json!({"name": "p"})).unwrap();
    assert_eq!(call(dir, "bdev_get_bdevs", json!({})).unwrap(), json!([]));
}

/// The reply's task of that name, when it has been granted a budget.
fn working_task(dir: &Path, name: &str) -> Value {
    for _ in 0..3000 {
        let stats = call(dir, "aryk_stats_get", json!({})).unwrap();
        let tasks = stats["tasks"].as_array().unwrap();
        if let Some(task) = tasks.iter().find(|t| t["name"] == name && t["granted"].as_u64() > Some(0)) {
            return task.clone();
        }
        std::thread::park_timeout(Duration::from_millis(10));
    }
    panic!("{name} does not work");
}

#[test]
fn a_background_task_is_seen() {
    let dir = tempfile::TempDir::new().unwrap();
    let dir = dir.path();
    let _daemon = Daemon::start(dir);
    call(dir, "bdev_pattern_create", json!({"name": "p", "num_blocks": BLOCKS, "patrol": true})).unwrap();
    let task = working_task(dir, "patrol p");
    assert!(task["busy_ticks"].as_u64() > Some(0) && task["core"].is_u64(), "{task}");
    assert_eq!(task["budget_ticks"], 50_000);
    let threads = call(dir, "thread_get_stats", json!({})).unwrap();
    let threads = threads["threads"].as_array().unwrap();
    let thread = threads.iter().find(|thread| thread["name"] == "patrol p").unwrap();
    assert!(thread["id"] == task["id"] && thread["busy"].as_u64() > Some(0), "{thread}");
    // The reactor's drivers are a thread of their own among the pollers.
    let pollers = call(dir, "thread_get_pollers", json!({})).unwrap();
    let is_reactor = |t: &&Value| t["name"] == json!(format!("reactor_{}", task["core"]));
    let reactor = pollers["threads"].as_array().unwrap().iter().find(is_reactor).unwrap();
    let driver = &reactor["active_pollers"][0];
    assert!(driver["name"] == "io_uring" || driver["name"] == "epoll", "{reactor}");
    assert!(driver["run_count"].as_u64() > Some(0) && driver["state"] == "waiting", "{reactor}");
    let is_number = |t: &Value| t["id"] == reactor["id"];
    assert!(!threads.iter().any(is_number), "no thread has its number");
    // The task has the disk open, and ends when the disk is removed.
    call(dir, "bdev_pattern_delete", json!({"name": "p"})).unwrap();
    let stats = call(dir, "aryk_stats_get", json!({})).unwrap();
    assert_eq!(stats["tasks"], json!([]));
}

#[test]
fn each_block_holds_its_number() {
    assert_eq!(block(Lba(7))[..16], [7, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(block(Lba(u64::MAX)), [0xff; 4096]);
}
