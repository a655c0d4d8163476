//! Rotations of keys, as calls start, stop and restore them.

use super::*;
use aryk_rpc::wrapping::Source;
use aryk_state::Store;
use std::path::{Path, PathBuf};

/// A daemon that keeps its state in a directory, after its start-up.
async fn daemon_in(dir: &Path) -> Daemon {
    let daemon = Daemon::with(Wrapping::read(Source::Own(dir.join("wrapping.key"))));
    let (store, records) = Store::open(dir).unwrap();
    daemon.control.config.keep_in(store, records).unwrap();
    aryk_rpc::follow_disks(&daemon.control, &daemon.methods);
    daemon.call("framework_start_init", &json!({})).await.unwrap();
    aryk_rpc::restore::restore(&daemon.control, &daemon.methods).await;
    daemon
}

async fn make_disk(daemon: &Daemon) {
    for (name, digit) in [("k1", "1"), ("k2", "2"), ("k3", "3")] {
        let (key, key2) = (digit.repeat(32), "f".repeat(32));
        let key = json!({"cipher": "AES_XTS", "key": key, "key2": key2, "name": name});
        daemon.call("accel_crypto_key_create", &key).await.unwrap();
    }
    let base = json!({"name": "m", "block_size": 512, "num_blocks": 3 * 2048 + 1});
    daemon.call("bdev_malloc_create", &base).await.unwrap();
    daemon.call("bdev_crypto_create", &plain("k1")).await.unwrap();
}

fn plain(key: &str) -> Value {
    json!({"name": "x", "base_bdev_name": "m", "key_name": key})
}

async fn details(daemon: &Daemon) -> Value {
    let mut disks = daemon.call("bdev_get_bdevs", &json!({"name": "x"})).await.unwrap();
    disks[0]["driver_specific"]["crypto"].take()
}

/// Waits for a state of the disk.
async fn until(daemon: &Daemon, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    for _ in 0..2000 {
        let details = details(daemon).await;
        if is_so(&details) {
            return details;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what} does not come: {}", details(daemon).await);
}

/// Rotates the key of a new disk to k2, and stops after the first zone or a later one. Returns the number of blocks that have the
/// new key.
async fn stop_in_the_middle(daemon: &Daemon) -> Value {
    make_disk(daemon).await;
    let slowly = json!({"name": "x", "key_name": "k2", "mbytes_per_sec": 1});
    daemon.call("bdev_crypto_rekey", &slowly).await.unwrap();
    until(daemon, "the first zone", |details| details["rekey"]["done_blocks"] != 0).await;
    daemon.call("bdev_crypto_rekey_stop", &json!({"name": "x"})).await.unwrap();
    let mut rekey = details(daemon).await["rekey"].take();
    assert_eq!(rekey["state"], "stopped");
    rekey["done_blocks"].take()
}

fn journals(dir: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|end| end == "journal")).collect()
}

async fn code(daemon: &Daemon, method: &str, params: Value) -> i32 {
    daemon.call(method, &params).await.unwrap_err().code()
}

#[test]
fn a_rotation_stops_and_continues_and_ends_with_one_key() {
    in_daemon(async |other| {
        let daemon = daemon_in(other.dir.path()).await;
        stop_in_the_middle(&daemon).await;
        let rekey = json!({"key_name": "k2", "mbytes_per_sec": 1, "stopped": true});
        let saved = daemon.call("save_config", &json!({})).await.unwrap().to_string();
        assert!(saved.contains(&format!("\"rekey\":{rekey}")), "{saved}");
        assert_eq!(journals(other.dir.path()).len(), 1);
        for key in ["k1", "k2"] {
            assert_eq!(code(&daemon, "accel_crypto_key_destroy", json!({"key_name": key})).await, -16);
        }
        assert_eq!(code(&daemon, "bdev_crypto_rekey", json!({"name": "x", "key_name": "k3"})).await, -16);
        daemon.call("bdev_crypto_rekey", &json!({"name": "x", "key_name": "k2"})).await.unwrap();
        let details = until(&daemon, "the end", |details| details["rekey"].is_null()).await;
        assert_eq!(details["key_name"], "k2");
        for _ in 0..2000 {
            tokio::time::sleep(Duration::from_millis(10)).await;
            if journals(other.dir.path()).is_empty() {
                break;
            }
        }
        assert!(journals(other.dir.path()).is_empty());
        assert!(!daemon.call("save_config", &json!({})).await.unwrap().to_string().contains("rekey"));
        daemon.call("accel_crypto_key_destroy", &json!({"key_name": "k1"})).await.unwrap();
        assert_eq!(code(&daemon, "bdev_crypto_rekey_stop", json!({"name": "x"})).await, -2);
        assert_eq!(code(&daemon, "bdev_crypto_rekey", json!({"name": "x", "key_name": "k2"})).await, -22);
        assert_eq!(code(&daemon, "bdev_crypto_rekey", json!({"name": "x", "key_name": "k1"})).await, -2);
        assert_eq!(code(&daemon, "bdev_crypto_rekey", json!({"name": "m", "key_name": "k3"})).await, -19);
    });
}

#[test]
fn a_rotation_needs_a_state_directory() {
    in_daemon(async |daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        make_disk(daemon).await;
        assert_eq!(code(daemon, "bdev_crypto_rekey", json!({"name": "x", "key_name": "k2"})).await, -95);
        assert!(details(daemon).await["rekey"].is_null());
    });
}

#[test]
fn a_restarted_daemon_has_both_keys_or_no_disk() {
    in_daemon(async |other| {
        let dir = other.dir.path();
        let done = stop_in_the_middle(&daemon_in(dir).await).await;
        let journal = journals(dir).remove(0);
        let whole = std::fs::read(&journal).unwrap();
        let mut damaged = whole.clone();
        damaged[20] ^= 1;
        for (content, why) in [(Some(&damaged), "damaged"), (None, "does not exist"), (Some(&whole), "")] {
            match content {
                Some(content) => std::fs::write(&journal, content).unwrap(),
                None => std::fs::remove_file(&journal).unwrap(),
            }
            let daemon = daemon_in(dir).await;
            let absent = daemon.call("aryk_absent_get", &json!({})).await.unwrap();
            if why.is_empty() {
                assert_eq!(absent, json!([]));
                let rekey = &details(&daemon).await["rekey"];
                assert_eq!((&rekey["state"], &rekey["done_blocks"]), (&json!("stopped"), &done));
                daemon.call("bdev_crypto_rekey", &json!({"name": "x", "key_name": "k2"})).await.unwrap();
                until(&daemon, "the end", |details| details["key_name"] == "k2").await;
            } else {
                assert_eq!(absent[0]["name"], "x");
                assert!(absent[0]["why"].as_str().unwrap().contains(why), "{absent}");
            }
        }
    });
}

#[test]
fn a_removed_disk_is_created_again_with_both_keys_only() {
    in_daemon(async |other| {
        let daemon = daemon_in(other.dir.path()).await;
        stop_in_the_middle(&daemon).await;
        daemon.call("bdev_crypto_delete", &json!({"name": "x"})).await.unwrap();
        for key in ["k1", "k2"] {
            assert_eq!(code(&daemon, "bdev_crypto_create", plain(key)).await, -16);
        }
        let with = |rekey: Value| {
            let mut params = plain("k1");
            params["rekey"] = rekey;
            params
        };
        // EUCLEAN: the journal is that of other keys.
        assert_eq!(code(&daemon, "bdev_crypto_create", with(json!({"key_name": "k3"}))).await, -117);
        daemon.call("bdev_crypto_create", &with(json!({"key_name": "k2"}))).await.unwrap();
        until(&daemon, "the end", |details| details["key_name"] == "k2").await;
        daemon.call("bdev_crypto_delete", &json!({"name": "x"})).await.unwrap();
        daemon.call("bdev_crypto_create", &plain("k2")).await.unwrap();
    });
}
