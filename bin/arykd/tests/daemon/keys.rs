//! Keys of encrypted disks: what the state directory and the log have of them, and the wrapping key.

use crate::harness::{Daemon, code, wait_for};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const KEY: &str = "00112233445566778899aabbccddeeff0a1b2c3d4e5f60718293a4b5c6d7e8f9";
const KEY2: &str = "f9e8d7c6b5a4938271605f4e3d2c1b0affeeddccbbaa99887766554433221100";
const KEPT: &[&str] = &["--state-dir", "DIR/state", "-L", "debug"];

fn key(name: &str) -> Value {
    json!({"cipher": "AES_XTS", "key": KEY, "key2": KEY2, "name": name})
}

/// Creates the disk 'x' with the key 'k1'.
fn make_disk(daemon: &Daemon) {
    daemon.call("accel_crypto_key_create", key("k1")).unwrap();
    daemon
        .call("bdev_malloc_create", json!({"name": "m", "block_size": 512, "num_blocks": 64, "uuid": UUID}))
        .unwrap();
    daemon.call("bdev_crypto_create", json!({"name": "x", "base_bdev_name": "m", "key_name": "k1"})).unwrap();
}

/// The first half of [`KEY2`].
const RAW: [u8; 16] = 0xf9e8_d7c6_b5a4_9382_7160_5f4e_3d2c_1b0a_u128.to_be_bytes();

const UUID: &str = "6a61c1a4-7f9c-4f0c-8a7e-0d5b2f1f9d11";

/// Whether bytes have a key, as bytes or as digits. Half a key counts.
fn has_key(bytes: &[u8]) -> bool {
    let digits = |text: &str| text.as_bytes().to_vec();
    let raw = |text: &str| {
        let byte = |pair| u8::from_str_radix(pair, 16).unwrap();
        (0..text.len() / 2).map(|at| byte(&text[2 * at..2 * at + 2])).collect::<Vec<u8>>()
    };
    let halves = [&KEY[..32], &KEY[32..], &KEY2[..32], &KEY2[32..]];
    let texts = halves.into_iter().flat_map(|half| [digits(half), digits(&half.to_uppercase()), raw(half)]);
    texts.into_iter().any(|text| bytes.windows(text.len()).any(|window| window == text))
}

/// The files of the state directory that have a key.
fn files_with_key(dir: &Path) -> Vec<PathBuf> {
    let files: Vec<PathBuf> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.iter().any(|file| file.ends_with("state.redb")), "{files:?}");
    // A file may be a copy that is being renamed.
    let read = |file: &PathBuf| std::fs::read(file).unwrap_or_default();
    files.into_iter().filter(|file| has_key(&read(file))).collect()
}

fn absent(daemon: &Daemon) -> Vec<(String, String)> {
    let absent = daemon.call("aryk_absent_get", json!({})).unwrap();
    let text = |object: &Value, member: &str| object[member].as_str().unwrap().to_owned();
    absent.as_array().unwrap().iter().map(|object| (text(object, "name"), text(object, "why"))).collect()
}

#[test]
fn neither_files_nor_replies_nor_the_log_have_a_key() {
    assert!(has_key(KEY.as_bytes()) && has_key(&[&[0, 0x11][..], &RAW].concat()) && !has_key(b"k1"));
    let mut daemon = Daemon::start(KEPT);
    let state = daemon.dir().join("state");
    make_disk(&daemon);
    daemon
        .call("bdev_crypto_create", json!({"name": "y", "base_bdev_name": "none", "key_name": "k1"}))
        .unwrap();
    for method in ["save_config", "aryk_absent_get", "accel_crypto_keys_get", "bdev_get_bdevs"] {
        let reply = daemon.call(method, json!({})).unwrap().to_string();
        assert!(reply.contains("k1") && !has_key(reply.as_bytes()), "{method}: {reply}");
    }
    assert_eq!(files_with_key(&state), [] as [PathBuf; 0]);
    daemon.kill_and_restart();
    assert_eq!(daemon.call("bdev_get_bdevs", json!({"name": "x"})).unwrap()[0]["name"], "x");
    assert_eq!(files_with_key(&state), [] as [PathBuf; 0]);
    for disk in ["x", "y"] {
        daemon.call("bdev_crypto_delete", json!({"name": disk})).unwrap();
    }
    daemon.call("accel_crypto_key_destroy", json!({"key_name": "k1"})).unwrap();
    assert_eq!(files_with_key(&state), [] as [PathBuf; 0]);
}

#[test]
fn the_log_has_no_key() {
    let mut daemon = Daemon::start_logging(&["-L", "debug"]);
    make_disk(&daemon);
    let mut equal = key("k2");
    equal["key2"] = KEY.into();
    let mut long = key("k2");
    long["key"] = format!("{KEY}00").into();
    let mut unknown = key("k2");
    unknown["key3"] = KEY.into();
    for wrong in [equal, long, unknown, key("k1"), json!([KEY])] {
        let error = daemon.call("accel_crypto_key_create", wrong).unwrap_err().to_string();
        assert!(!has_key(error.as_bytes()), "{error}");
    }
    assert_eq!(daemon.signal_and_wait("TERM", Duration::from_secs(20)), Some(0));
    let log = std::fs::read_to_string(daemon.dir().join("log")).unwrap();
    assert!(log.contains("accel_crypto_key_create") && !has_key(log.as_bytes()), "{log}");
}

#[test]
fn the_wrapping_key_decides() {
    let mut daemon = Daemon::start(KEPT);
    let state = daemon.dir().join("state");
    let own = state.join("wrapping.key");
    assert!(!own.exists());
    make_disk(&daemon);
    assert_eq!(own.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    daemon.kill();
    let right = std::fs::read(&own).unwrap();
    for (content, why) in
        [(None, "does not exist"), (Some([7; 32]), "is not the one that key 'k1' was wrapped by")]
    {
        match content {
            None => std::fs::remove_file(&own).unwrap(),
            Some(content) => {
                std::fs::write(&own, content).unwrap();
                std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o600)).unwrap();
            }
        }
        daemon.restart();
        let absent = absent(&daemon);
        let names: Vec<&str> = absent.iter().map(|(name, _)| &**name).collect();
        assert_eq!(names, ["crypto key k1", "x"]);
        assert!(
            absent.iter().all(|(_, is)| is.contains(why) && is.contains(own.to_str().unwrap())),
            "{absent:?}"
        );
        assert_eq!(daemon.call("bdev_get_bdevs", json!({"name": "m"})).unwrap()[0]["name"], "m");
        for name in ["k1", "k2"] {
            assert_eq!(code(daemon.call("accel_crypto_key_create", key(name))), -129, "EKEYREJECTED");
        }
        assert_eq!(std::fs::read(&own).ok().as_deref(), content.as_ref().map(|content| &content[..]));
        daemon.kill();
    }
    std::fs::write(&own, right).unwrap();
    daemon.restart();
    assert_eq!(absent(&daemon), []);
    assert_eq!(daemon.call("bdev_get_bdevs", json!({"name": "x"})).unwrap()[0]["name"], "x");
}

#[test]
fn a_sandboxed_daemon_creates_its_wrapping_key() {
    let dir = tempfile::TempDir::new().unwrap();
    std::fs::create_dir(dir.path().join("disks")).unwrap();
    let mut daemon = Daemon::start_in(dir, &[KEPT, &["--allow-dir", "DIR/disks"]].concat());
    make_disk(&daemon);
    daemon.kill_and_restart();
    assert_eq!(absent(&daemon), []);
}

#[test]
fn the_wrapping_key_is_a_file_of_the_operator() {
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("operator.key");
    std::fs::write(&file, format!("{}\n", "5c".repeat(32))).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let flags = [KEPT, &["--wrapping-key", "DIR/operator.key"]].concat();
    let mut daemon = Daemon::start_in(dir, &flags);
    make_disk(&daemon);
    assert!(!daemon.dir().join("state/wrapping.key").exists());
    daemon.kill_and_restart();
    assert_eq!(absent(&daemon), []);
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    daemon.kill_and_restart();
    let has_reason = || absent(&daemon).iter().all(|(_, why)| why.contains("(mode 644): 'chmod 600' it"));
    wait_for("the reason is known", has_reason);
}
