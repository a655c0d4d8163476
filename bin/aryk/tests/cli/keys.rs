//! Keys, and the disks that they encrypt.

use crate::harness::{Daemon, outcome};
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

fn keys(daemon: &Daemon) -> Value {
    daemon.json(&["key", "list"])
}

fn disks(daemon: &Daemon) -> Vec<String> {
    let all = daemon.json(&["disk", "list"]);
    all.as_array().unwrap().iter().map(|disk| disk["name"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_disk_is_encrypted_from_its_creation_to_its_removal() {
    let mut daemon = Daemon::start_keeping();
    assert!(daemon.ok(&["key", "list"]).contains("aryk key create NAME"));
    let (_, stderr) =
        daemon.fails(&["disk", "create", "d", "--file", "d.img", "--size", "1M", "--encrypt", "k1"]);
    assert!(stderr.contains("there is no key 'k1'") && stderr.contains("aryk key create NAME"), "{stderr}");
    assert!(!daemon.dir().join("d.img").exists() && disks(&daemon).is_empty());
    let said = daemon.ok(&["key", "create", "k1"]);
    assert!(said.starts_with("Key 'k1' of 256 bits is ready."), "{said}");
    let said = daemon.ok(&["disk", "create", "d", "--file", "d.img", "--size", "1M", "--encrypt", "k1"]);
    assert!(said.starts_with("Disk 'd' of 1M, encrypted by key 'k1', is ready."), "{said}");
    daemon.ok(&["key", "create", "k2", "--bits", "128", "--tweak-mode", "join-neg-lba-with-lba"]);
    let expected = json!([
        {"name": "k1", "cipher": "AES_XTS", "tweak_mode": "SIMPLE_LBA", "state": "present", "used_by": ["d"]},
        {"name": "k2", "cipher": "AES_XTS", "tweak_mode": "JOIN_NEG_LBA_WITH_LBA", "state": "present", "used_by": []},
    ]);
    assert_eq!(keys(&daemon), expected);
    let table = daemon.ok(&["key", "list"]);
    let words: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(words[1], ["k1", "AES_XTS", "SIMPLE_LBA", "d"]);
    daemon.restart(|_| {});
    assert_eq!(keys(&daemon), expected);
    assert_eq!(disks(&daemon), ["d.store", "d"]);
    // All are checked before the first is deleted.
    let (code, stderr) = daemon.fails(&["key", "delete", "k2", "k1"]);
    assert!(
        code == 1 && stderr.contains("disk 'd' uses key 'k1'") && stderr.contains("aryk disk remove"),
        "{stderr}"
    );
    let (_, stderr) = daemon.fails(&["disk", "remove", "d.store"]);
    assert!(stderr.contains("disk 'd' is on top of it"), "{stderr}");
    assert_eq!(keys(&daemon), expected);
    daemon.ok(&["disk", "resize", "d", "2M"]);
    let sizes = ["d", "d.store"].map(|disk| daemon.json(&["disk", "show", disk])["num_blocks"].clone());
    assert_eq!(sizes, [4096, 4096]);
    let said = daemon.ok(&["disk", "remove", "d"]);
    assert!(said.contains("Disk 'd' is removed and so is its store 'd.store'."), "{said}");
    assert!(disks(&daemon).is_empty() && daemon.dir().join("d.img").exists());
    assert_eq!(daemon.ok(&["key", "delete", "k2", "k1"]), "Key 'k2' is deleted.\nKey 'k1' is deleted.\n");
    assert_eq!(keys(&daemon), json!([]));
    let (code, stderr) = daemon.fails(&["key", "delete", "k1"]);
    assert!(code == 1 && stderr.contains("there is no key 'k1'"), "{stderr}");
}

#[test]
fn a_file_with_a_known_format_is_encrypted_only_on_request() {
    let daemon = Daemon::start();
    daemon.ok(&["key", "create", "k"]);
    let file = daemon.dir().join("d.img");
    let mut data = vec![0; 1 << 20];
    data[..4].copy_from_slice(b"XFSB");
    std::fs::write(&file, &data).unwrap();
    let create = ["disk", "create", "d", "--file", "d.img", "--encrypt", "k"];
    let (_, stderr) = daemon.fails(&create);
    assert!(stderr.contains("holds an XFS file system") && stderr.contains("--overwrite"), "{stderr}");
    assert!(disks(&daemon).is_empty() && std::fs::read(&file).unwrap() == data);
    daemon.ok(&[&create[..], &["--overwrite"]].concat());
    daemon.ok(&["disk", "remove", "d"]);
    // What the disk itself has written is no known format.
    std::fs::write(&file, vec![0xa5; 1 << 20]).unwrap();
    daemon.ok(&create);
}

#[test]
fn a_disk_gets_another_key() {
    let mut daemon = Daemon::start_keeping();
    for key in ["k1", "k2", "k3"] {
        daemon.ok(&["key", "create", key]);
    }
    daemon.ok(&["disk", "create", "d", "--file", "d.img", "--size", "3M", "--encrypt", "k1"]);
    let (_, stderr) = daemon.fails(&["disk", "rekey", "d.store", "k2"]);
    assert!(stderr.contains("disk 'd.store' is not encrypted"), "{stderr}");
    let (_, stderr) = daemon.fails(&["disk", "rekey", "d", "none"]);
    assert!(stderr.contains("'none'") && stderr.contains("aryk key create"), "{stderr}");
    let (_, stderr) = daemon.fails(&["disk", "rekey", "d", "k1"]);
    assert!(stderr.contains("encrypted with this key"), "{stderr}");
    let (_, stderr) = daemon.fails(&["disk", "rekey", "d", "--stop"]);
    assert!(stderr.contains("is not being rotated") && stderr.contains("aryk disk show"), "{stderr}");
    let begun = daemon.json(&["disk", "rekey", "d", "k2", "--bandwidth", "1M"]);
    assert_eq!((&begun["key_name"], &begun["rekey"]["key_name"]), (&json!("k1"), &json!("k2")));
    let said = daemon.ok(&["disk", "rekey", "d", "--stop"]);
    assert!(said.contains("needs both keys. To continue: aryk disk rekey d k2"), "{said}");
    let (_, stderr) = daemon.fails(&["disk", "rekey", "d", "k3"]);
    assert!(stderr.contains("the rotation to the key 'k2' is not complete"), "{stderr}");
    daemon.restart(|_| {});
    let shown = daemon.ok(&["disk", "show", "d"]);
    assert!(shown.contains("new key") && shown.contains("of 3M have key 'k2'; stopped"), "{shown}");
    assert!(daemon.ok(&["disk", "list"]).contains("%, stopped)"));
    for key in ["k1", "k2"] {
        let (_, stderr) = daemon.fails(&["key", "delete", key]);
        assert!(stderr.contains(&format!("disk 'd' uses key '{key}'")), "{stderr}");
    }
    let said = daemon.ok(&["disk", "rekey", "d", "k2", "--wait"]);
    assert_eq!(said, "All of disk 'd' is encrypted by key 'k2'.\n");
    assert!(!daemon.ok(&["disk", "show", "d"]).contains("new key"));
    daemon.ok(&["key", "delete", "k1"]);
    let ended = daemon.json(&["disk", "rekey", "d", "k3", "--wait"]);
    assert_eq!((&ended["key_name"], &ended["rekey"]), (&json!("k3"), &Value::Null));
}

#[test]
fn a_luks_disk_is_resized_by_its_base() {
    let daemon = Daemon::start();
    let key = daemon.dir().join("key");
    std::fs::write(&key, "secret").unwrap();
    std::fs::set_permissions(&key, PermissionsExt::from_mode(0o600)).unwrap();
    daemon.ok(&["disk", "create", "base", "--memory", "--size", "18M"]);
    let cheap = ["--key-file", "key", "--pbkdf", "pbkdf2", "--iter-time", "1"];
    daemon.ok(&[&["luks", "format", "base"], &cheap[..]].concat());
    daemon.ok(&["luks", "open", "base", "l", "--key-file", "key"]);
    let (code, stderr) = daemon.fails(&["disk", "resize", "l", "4M"]);
    assert!(code == 2 && stderr.contains("'l' is a LUKS disk: resize its base 'base'"), "{stderr}");
}

#[test]
fn a_store_with_other_users_stays() {
    let daemon = Daemon::start();
    daemon.ok(&["key", "create", "k"]);
    daemon.ok(&["disk", "create", "d", "--memory", "--size", "1M", "--encrypt", "k"]);
    daemon.ok(&["disk", "remove", "d.store", "d"]);
    assert!(disks(&daemon).is_empty(), "both were named");
    // A store that an operator has created under another name is not removed.
    daemon.ok(&["disk", "create", "m", "--memory", "--size", "1M"]);
    daemon.ok(&["rpc", "bdev_crypto_create", r#"{"name": "d", "base_bdev_name": "m", "key_name": "k"}"#]);
    daemon.ok(&["disk", "remove", "d"]);
    assert_eq!(disks(&daemon), ["m"]);
    let (_, stderr) = daemon.fails(&["disk", "create", "m", "--memory", "--size", "1M", "--encrypt", "k"]);
    assert!(stderr.contains("there is a disk 'm' already"), "{stderr}");
    assert_eq!(disks(&daemon), ["m"]);
}

#[test]
fn keys_come_from_files() {
    let daemon = Daemon::start();
    let dir = daemon.dir();
    std::fs::write(dir.join("raw"), [[1; 32], [2; 32]].concat()).unwrap();
    std::fs::write(dir.join("digits"), format!("{}{}\n", "01".repeat(32), "02".repeat(32))).unwrap();
    std::fs::write(dir.join("equal"), [7; 32]).unwrap();
    std::fs::write(dir.join("short"), [7; 31]).unwrap();
    for name in ["raw", "digits"] {
        let said = daemon.ok(&["key", "create", name, "--from-file", name]);
        assert!(said.contains("of 256 bits") && !said.contains("0101"), "{said}");
    }
    let mut piped = daemon.aryk(&["key", "create", "piped", "--from-file", "-"]);
    assert_eq!(outcome(piped.stdin(Stdio::from(File::open(dir.join("raw")).unwrap()))).code, 0);
    for (file, why) in [("equal", "halves"), ("short", "is no key"), ("none", "No such file")] {
        let (code, stderr) = daemon.fails(&["key", "create", "k", "--from-file", file]);
        assert!(code == 1 && stderr.contains(why), "{stderr}");
    }
    let (_, stderr) = daemon.fails(&["key", "create", "raw"]);
    assert!(stderr.contains("a key 'raw' exists") && stderr.contains("aryk key list"), "{stderr}");
    let (_, stderr) = daemon.fails(&["key", "create", &"n".repeat(4097)]);
    assert!(stderr.contains("a key's name has 1 to 4096 bytes"), "{stderr}");
    assert_eq!(keys(&daemon).as_array().unwrap().len(), 3);
}

#[test]
fn a_missing_wrapping_key_is_shown() {
    let mut daemon = Daemon::start_keeping();
    daemon.ok(&["key", "create", "k"]);
    daemon.ok(&["disk", "create", "d", "--memory", "--size", "1M", "--encrypt", "k"]);
    daemon.restart(|dir| std::fs::remove_file(dir.join("state/wrapping.key")).unwrap());
    let listed = keys(&daemon);
    let why = listed[0]["why"].as_str().unwrap();
    assert!(why.contains("wrapping.key does not exist"), "{listed}");
    assert_eq!((&listed[0]["state"], &listed[0]["used_by"]), (&json!("absent"), &json!(["d"])));
    let table = daemon.ok(&["key", "list"]);
    assert!(table.starts_with("ABSENT") && table.contains("\nk "), "{table}");
    assert!(daemon.ok(&["disk", "list"]).contains("key 'k' cannot be used"));
    let (_, stderr) = daemon.fails(&["key", "create", "other"]);
    assert!(stderr.contains("right wrapping key"), "{stderr}");
    let said = daemon.ok(&["disk", "remove", "d"]);
    assert!(said.contains("and so is its store 'd.store'"), "{said}");
    daemon.ok(&["key", "delete", "k"]);
    daemon.ok(&["key", "create", "other"]);
}
