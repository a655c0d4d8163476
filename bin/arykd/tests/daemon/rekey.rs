//! Rotations of keys of a daemon that is killed at each of their steps.

use crate::harness::{Daemon, code, wait_for};
use crate::state::Small;
use aryk_aes_xts::{Key, SectorSize, Tweaks};
use serde_json::{Value, json};
use std::time::Duration;
use tempfile::TempDir;

const BLOCK: usize = 4096;
/// Eight zones of a rotation, and a part of one.
const BLOCKS: usize = 8 * 256 + 3;

fn digits(seed: u8) -> (String, String) {
    (format!("{seed:02x}").repeat(16), format!("{:02x}", seed + 100).repeat(16))
}

/// What a disk with this key stores, as the disk's VM sees it.
fn decrypt(stored: &[u8], seed: u8) -> Vec<u8> {
    let key = Key::new(&[[seed; 16], [seed + 100; 16]].concat()).unwrap();
    let mut plain = stored.to_vec();
    key.decrypt_in_place(SectorSize::new(BLOCK).unwrap(), Tweaks { start: 0, step: 1 << 64 }, &mut plain)
        .unwrap();
    plain
}

/// Creates the keys `k1`, `k2`, … of these seeds.
fn create_keys(daemon: &Daemon, seeds: &[u8]) {
    for seed in seeds {
        let (key, key2) = digits(*seed);
        let key = json!({"cipher": "AES_XTS", "key": key, "key2": key2, "name": format!("k{seed}")});
        daemon.call("accel_crypto_key_create", key).unwrap();
    }
}

fn details(daemon: &Daemon) -> Value {
    daemon.call("bdev_get_bdevs", json!({"name": "x"})).unwrap()[0]["driver_specific"]["crypto"].clone()
}

#[test]
fn a_daemon_that_is_killed_at_each_step_loses_no_block() {
    let mut daemon = Daemon::start(&["--state-dir", "DIR/state"]);
    let file = daemon.dir().join("base");
    let mut random = fastrand::Rng::with_seed(7);
    let before: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(BLOCKS * BLOCK).collect();
    std::fs::write(&file, &before).unwrap();
    create_keys(&daemon, &[1, 2]);
    let base = json!({"name": "b", "filename": file, "block_size": BLOCK});
    daemon.call("bdev_uring_create", base).unwrap();
    daemon.call("bdev_crypto_create", json!({"name": "x", "base_bdev_name": "b", "key_name": "k1"})).unwrap();
    // A second for each zone: the daemon is killed before the end.
    daemon.call("bdev_crypto_rekey", json!({"name": "x", "key_name": "k2", "mbytes_per_sec": 1})).unwrap();
    daemon.kill();
    let steps = [
        "rekey-recorded:1",
        // These two while the zone in the journal is written again.
        "rekey-written:1",
        "rekey-advanced:1",
        "rekey-recorded:2",
        "rekey-written:2",
        "rekey-advanced:2",
    ];
    for step in steps {
        daemon.restart_to_die_at(step);
        assert_eq!(daemon.wait(Duration::from_secs(20)), None, "killed by a signal at {step}");
    }
    daemon.restart();
    let rekey = &details(&daemon)["rekey"];
    assert!(rekey["key_name"] == "k2" && rekey["done_blocks"].as_u64().unwrap() >= 256, "{rekey}");
    daemon.call("bdev_crypto_rekey", json!({"name": "x", "key_name": "k2"})).unwrap();
    wait_for("the rotation is complete", || details(&daemon)["key_name"] == "k2");
    daemon.kill();
    let after = std::fs::read(&file).unwrap();
    for (lba, (new, old)) in
        decrypt(&after, 2).chunks(BLOCK).zip(decrypt(&before, 1).chunks(BLOCK)).enumerate()
    {
        assert!(new == old, "block {lba}");
    }
}

#[test]
fn a_key_that_only_a_journal_needs_is_not_destroyed() {
    let daemon = Daemon::start(&["--state-dir", "DIR/state"]);
    create_keys(&daemon, &[1, 2, 3]);
    daemon
        .call("bdev_malloc_create", json!({"name": "b", "num_blocks": BLOCKS, "block_size": BLOCK}))
        .unwrap();
    daemon.call("bdev_crypto_create", json!({"name": "x", "base_bdev_name": "b", "key_name": "k1"})).unwrap();
    daemon.call("bdev_crypto_rekey", json!({"name": "x", "key_name": "k2", "mbytes_per_sec": 1})).unwrap();
    wait_for("a zone has the new key", || details(&daemon)["rekey"]["done_blocks"].as_u64().unwrap() > 0);
    daemon.call("bdev_crypto_delete", json!({"name": "x"})).unwrap();
    let destroy = |name| daemon.call("accel_crypto_key_destroy", json!({"key_name": name}));
    for name in ["k1", "k2"] {
        let refused = destroy(name).unwrap_err().to_string();
        assert!(refused.contains(".journal, which loses the disk's data"), "{refused}");
    }
    assert_eq!(destroy("k3").unwrap(), true);
    // The disk can still be read.
    let again = json!({"name": "x", "base_bdev_name": "b", "key_name": "k1", "rekey": {"key_name": "k2"}});
    daemon.call("bdev_crypto_create", again).unwrap();
    wait_for("the rotation is complete", || details(&daemon)["key_name"] == "k2");
    assert_eq!(destroy("k1").unwrap(), true);
}

#[test]
fn a_journal_is_that_of_one_disk_and_can_be_moved_away() {
    let daemon = Daemon::start(&["--state-dir", "DIR/state"]);
    create_keys(&daemon, &[1, 2]);
    for base in ["b", "other"] {
        let base = json!({"name": base, "num_blocks": BLOCKS, "block_size": BLOCK});
        daemon.call("bdev_malloc_create", base).unwrap();
    }
    let disk = |base: &str| json!({"name": "x", "base_bdev_name": base, "key_name": "k1"});
    daemon.call("bdev_crypto_create", disk("b")).unwrap();
    daemon.call("bdev_crypto_rekey", json!({"name": "x", "key_name": "k2", "mbytes_per_sec": 1})).unwrap();
    wait_for("a zone has the new key", || details(&daemon)["rekey"]["done_blocks"].as_u64().unwrap() > 0);
    daemon.call("bdev_crypto_delete", json!({"name": "x"})).unwrap();
    let mut rotating = disk("other");
    rotating["rekey"] = json!({"key_name": "k2"});
    for params in [disk("other"), rotating] {
        let refused = daemon.call("bdev_crypto_create", params).unwrap_err().to_string();
        assert!(
            refused.contains("base disk with the uuid") && refused.contains("move the journal away"),
            "{refused}"
        );
    }
    let mut state = std::fs::read_dir(daemon.dir().join("state")).unwrap().map(|entry| entry.unwrap().path());
    let journal = state.find(|path| path.extension().is_some_and(|end| end == "journal")).unwrap();
    std::fs::rename(&journal, daemon.dir().join("moved")).unwrap();
    daemon.call("bdev_crypto_create", disk("other")).unwrap();
    daemon.call("bdev_crypto_rekey", json!({"name": "x", "key_name": "k2"})).unwrap();
    wait_for("the rotation is complete", || details(&daemon)["key_name"] == "k2");
}

#[test]
fn a_rotation_whose_end_cannot_be_stored_can_be_ended_later() {
    let dir = TempDir::new().unwrap();
    let Some(small) = Small::mount(&dir.path().join("state"), 4) else { return };
    let daemon = Daemon::start_logging_in(dir, &["--state-dir", "DIR/state"]);
    create_keys(&daemon, &[1, 2]);
    // A note that needs more room than others leave.
    let base = "b".repeat(4000);
    daemon
        .call("bdev_malloc_create", json!({"name": base, "num_blocks": 3 * 256, "block_size": BLOCK}))
        .unwrap();
    daemon
        .call("bdev_crypto_create", json!({"name": "x", "base_bdev_name": base, "key_name": "k1"}))
        .unwrap();
    let continues = json!({"name": "x", "key_name": "k2", "mbytes_per_sec": 1});
    daemon.call("bdev_crypto_rekey", continues.clone()).unwrap();
    // The rotation waits until the store is full.
    daemon.call("bdev_crypto_rekey_stop", json!({"name": "x"})).unwrap();
    let fill = small.keep_full();
    let create = |number: usize| {
        let name = format!("{number:0>9}{}", "n".repeat(2000));
        daemon.call("bdev_null_create", json!({"name": name, "num_blocks": 8, "block_size": 512}))
    };
    // The store opens itself again after a failure, and may find some room then.
    let mut refused = 0;
    let is_full = |number| {
        refused = if create(number).is_err() { refused + 1 } else { 0 };
        refused == 50
    };
    assert!((0..2000).any(is_full), "the store is never full");
    // The rotation goes on all the same.
    assert_eq!(code(daemon.call("bdev_crypto_rekey", continues)), -28);
    wait_for("all blocks have the new key", || details(&daemon)["rekey"]["state"] == "complete");
    let log = daemon.dir().join("log");
    let tells = || std::fs::read_to_string(&log).unwrap().contains("that cannot be recorded");
    wait_for("the log tells it", tells);
    let noted = || {
        let config = daemon.call("framework_get_config", json!({"name": "bdev"})).unwrap();
        let mut calls = config.as_array().unwrap().iter();
        calls.find(|call| call["method"] == "bdev_crypto_create").unwrap()["params"].clone()
    };
    assert_eq!((&noted()["key_name"], &noted()["rekey"]["key_name"]), (&json!("k1"), &json!("k2")));
    drop(fill);
    daemon.call("bdev_crypto_rekey", json!({"name": "x", "key_name": "k2"})).unwrap();
    wait_for("the rotation is complete", || details(&daemon)["key_name"] == "k2");
    assert_eq!((&noted()["key_name"], &noted()["rekey"]), (&json!("k2"), &Value::Null));
}
