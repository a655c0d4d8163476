//! Keys, and the disks that they encrypt.

use super::*;
use aryk_rpc::load::File;
use aryk_rpc::wrapping::Source;
use aryk_state::Store;
use std::path::Path;

const KEY: &str = "00112233445566778899aabbccddeeff";
const KEY2: &str = "ffeeddccbbaa99887766554433221100";

fn key(name: &str, key: &str, key2: &str) -> Value {
    json!({"cipher": "AES_XTS", "key": key, "key2": key2, "tweak_mode": "JOIN_NEG_LBA_WITH_LBA", "name": name})
}

fn has_key(value: &Value) -> bool {
    let text = value.to_string();
    text.contains(KEY) || text.contains(KEY2)
}

async fn make_disks(daemon: &Daemon) {
    daemon.call("framework_start_init", &json!({})).await.unwrap();
    daemon.call("accel_crypto_key_create", &key("k", KEY, KEY2)).await.unwrap();
    daemon
        .call("bdev_malloc_create", &json!({"name": "m", "block_size": 512, "num_blocks": 64}))
        .await
        .unwrap();
    let disk = json!({"name": "x", "base_bdev_name": "m", "key_name": "k"});
    assert_eq!(daemon.call("bdev_crypto_create", &disk).await.unwrap(), "x");
}

#[test]
fn no_reply_has_the_key() {
    in_daemon(async |daemon| {
        make_disks(daemon).await;
        let waits = json!({"name": "later", "base_bdev_name": "nothing", "key_name": "k"});
        daemon.call("bdev_crypto_create", &waits).await.unwrap();
        let keys = daemon.call("accel_crypto_keys_get", &json!({"key_name": "k"})).await.unwrap();
        let expected = json!([{"name": "k", "cipher": "AES_XTS", "tweak_mode": "JOIN_NEG_LBA_WITH_LBA"}]);
        assert_eq!(keys, expected);
        let disk = daemon.call("bdev_get_bdevs", &json!({"name": "x"})).await.unwrap();
        let details = json!({"crypto": {"base_bdev_name": "m", "name": "x", "key_name": "k"}});
        assert_eq!(disk[0]["driver_specific"], details);
        assert_eq!(disk[0]["product_name"], "crypto");
        assert_eq!(disk[0]["supported_io_types"]["unmap"], false);
        for method in ["save_config", "aryk_absent_get"] {
            let reply = daemon.call(method, &json!({})).await.unwrap();
            assert!(
                reply.to_string().contains("bdev_crypto_create") && !has_key(&reply),
                "{method}: {reply}"
            );
        }
    });
}

#[test]
fn keys_that_are_none_are_refused_without_being_repeated() {
    in_daemon(async |daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let short = &KEY[2..];
        let long = KEY.repeat(2);
        let strange = KEY.replace('8', "x");
        for (first, second) in
            [(KEY, KEY), (short, short), (KEY, &*long), (&*strange, KEY2), (KEY, &*strange)]
        {
            let error = daemon.call("accel_crypto_key_create", &key("k", first, second)).await.unwrap_err();
            assert_eq!(error.code(), -22, "{error}");
            assert!(
                !error.to_string().contains(&KEY[..8]) && !error.to_string().contains(&KEY2[..8]),
                "{error}"
            );
        }
        let mut alone = key("k", KEY, KEY2);
        alone.as_object_mut().unwrap().remove("key2");
        assert_eq!(daemon.call("accel_crypto_key_create", &alone).await.unwrap_err().code(), -22);
        let mut unquoted = key("k", KEY, KEY2);
        unquoted["key"] = 1_122_334_455_667_788_u64.into();
        let error = daemon.call("accel_crypto_key_create", &unquoted).await.unwrap_err();
        assert!(error.code() == -32602 && !error.to_string().contains("1122"), "{error}");
        let mut cbc = key("k", KEY, KEY2);
        cbc["cipher"] = "AES_CBC".into();
        let error = daemon.call("accel_crypto_key_create", &cbc).await.unwrap_err();
        assert!(error.to_string().contains("AES_CBC") && !error.to_string().contains(KEY), "{error}");
        assert_eq!(daemon.call("accel_crypto_keys_get", &json!({})).await.unwrap(), json!([]));
        daemon.call("accel_crypto_key_create", &key("k", &long, &KEY2.repeat(2))).await.unwrap();
        let again = daemon.call("accel_crypto_key_create", &key("k", KEY, KEY2)).await.unwrap_err();
        assert_eq!(again.code(), -17);
    });
}

#[test]
fn names_of_keys_have_limits() {
    in_daemon(async |daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        for name in ["", &"n".repeat(4097)] {
            let error = daemon.call("accel_crypto_key_create", &key(name, KEY, KEY2)).await.unwrap_err();
            assert!(error.code() == -22 && error.to_string().ends_with("a key's name has 1 to 4096 bytes"));
        }
        let strange = "a:b\"'\\\u{1b}[31m\n\0é";
        for name in [strange, &"n".repeat(4096)] {
            daemon.call("accel_crypto_key_create", &key(name, KEY, KEY2)).await.unwrap();
            let keys = daemon.call("accel_crypto_keys_get", &json!({"key_name": name})).await.unwrap();
            assert_eq!(keys[0]["name"], name);
            daemon.call("accel_crypto_key_destroy", &json!({"key_name": name})).await.unwrap();
        }
        assert_eq!(daemon.call("accel_crypto_keys_get", &json!({})).await.unwrap(), json!([]));
    });
}

#[test]
fn a_key_is_kept_while_a_disk_uses_it() {
    in_daemon(async |daemon| {
        make_disks(daemon).await;
        let destroy = async || daemon.call("accel_crypto_key_destroy", &json!({"key_name": "k"})).await;
        assert_eq!(destroy().await.unwrap_err().code(), -16);
        daemon.call("bdev_crypto_delete", &json!({"name": "x"})).await.unwrap();
        let waits = json!({"name": "x", "base_bdev_name": "nothing", "key_name": "k"});
        daemon.call("bdev_crypto_create", &waits).await.unwrap();
        assert_eq!(destroy().await.unwrap_err().code(), -16, "the disk waits for its base");
        daemon.call("bdev_crypto_delete", &json!({"name": "x"})).await.unwrap();
        destroy().await.unwrap();
        assert_eq!(destroy().await.unwrap_err().code(), -32602);
    });
}

/// A daemon before its start-up, and the state directory that a killed daemon with a key and a disk has left.
async fn successor(dir: &Path) -> Daemon {
    let open = || {
        let daemon = Daemon::with(Wrapping::read(Source::Own(dir.join("wrapping.key"))));
        let (store, records) = Store::open(dir).unwrap();
        daemon.control.config.keep_in(store, records).unwrap();
        daemon
    };
    {
        let before = open();
        make_disks(&before).await;
        let notes = format!("{:?}", before.control.config);
        assert!(notes.contains("accel_crypto_key_create") && !notes.contains(KEY), "{notes}");
    }
    open()
}

#[test]
fn a_key_that_is_not_there_yet_is_listed_without_its_material() {
    in_daemon(async |other| {
        let daemon = successor(other.dir.path()).await;
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let absent = daemon.call("aryk_absent_get", &json!({})).await.unwrap();
        assert_eq!(
            (absent[0]["name"].as_str(), absent[0]["method"].as_str()),
            (Some("crypto key k"), Some("accel_crypto_key_create"))
        );
        assert!(!has_key(&absent) && !absent.to_string().contains("wrapped"), "{absent}");
        aryk_rpc::restore::restore(&daemon.control, &daemon.methods).await;
        assert_eq!(daemon.call("aryk_absent_get", &json!({})).await.unwrap(), json!([]));
        assert_eq!(daemon.call("bdev_get_bdevs", &json!({"name": "x"})).await.unwrap()[0]["name"], "x");
    });
}

#[test]
fn a_key_without_its_wrapping_key_is_destroyed_before_others_are_created() {
    in_daemon(async |other| {
        let dir = other.dir.path();
        drop(successor(dir).await);
        std::fs::remove_file(dir.join("wrapping.key")).unwrap();
        let daemon = Daemon::with(Wrapping::read(Source::Own(dir.join("wrapping.key"))));
        let (store, records) = Store::open(dir).unwrap();
        daemon.control.config.keep_in(store, records).unwrap();
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        aryk_rpc::restore::restore(&daemon.control, &daemon.methods).await;
        let disk = json!({"name": "z", "base_bdev_name": "m", "key_name": "k"});
        let error = daemon.call("bdev_crypto_create", &disk).await.unwrap_err();
        assert!(error.code() == -126 && error.to_string().contains("does not exist"), "{error}");
        let create = async || daemon.call("accel_crypto_key_create", &key("k2", KEY, KEY2)).await;
        let error = create().await.unwrap_err();
        assert!(error.code() == -129 && error.to_string().contains("crypto key k"), "{error}");
        assert!(!dir.join("wrapping.key").exists());
        daemon.call("bdev_crypto_delete", &json!({"name": "x"})).await.unwrap();
        daemon.call("accel_crypto_key_destroy", &json!({"key_name": "k"})).await.unwrap();
        create().await.unwrap();
        assert!(dir.join("wrapping.key").exists());
    });
}

#[test]
fn a_file_with_a_key_may_be_loaded_again() {
    in_daemon(async |daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let path = daemon.dir.path().join("spdk.json");
        let load = async |key: &Value| {
            let call = json!({"method": "accel_crypto_key_create", "params": key});
            let config = json!({"subsystems": [{"subsystem": "accel", "config": [call]}]});
            std::fs::write(&path, config.to_string()).unwrap();
            File::read(&path).unwrap().load(&daemon.control, &daemon.methods, false).await
        };
        assert_eq!(load(&key("k", KEY, KEY2)).await.unwrap().made, 1);
        assert_eq!(load(&key("k", &KEY.to_uppercase(), KEY2)).await.unwrap().there, 1);
        let error = load(&key("k", KEY2, KEY)).await.unwrap_err().to_string();
        assert!(error.contains("key is another one") && !error.contains(&KEY[..8]), "{error}");
    });
}

#[test]
fn disks_of_dm_crypt_have_its_options() {
    in_daemon(async |daemon| {
        make_disks(daemon).await;
        let disk = |plain64: Value| json!({"name": "plain", "base_bdev_name": "x", "key_name": "k", "plain64": plain64, "pass_discards": true});
        for (plain64, complaint) in [
            (json!({"sector_size": 520}), "520 is not 512"),
            (json!({"sector_size": 0}), "0 is not 512"),
            (json!({"sector_size": 4096, "iv_offset": 4}), "not a multiple of the sector size"),
            (json!({"iv_offset": u64::MAX}), "above 2^64 - 2^55"),
        ] {
            let error = daemon.call("bdev_crypto_create", &disk(plain64)).await.unwrap_err();
            assert!(error.code() == -22 && error.to_string().contains(complaint), "{error}");
        }
        let plain64 = json!({"sector_size": 4096, "iv_offset": 8, "iv_large_sectors": true});
        daemon.call("bdev_crypto_create", &disk(plain64.clone())).await.unwrap();
        let plain = &daemon.call("bdev_get_bdevs", &json!({"name": "plain"})).await.unwrap()[0];
        assert_eq!((&plain["block_size"], &plain["num_blocks"]), (&json!(4096), &json!(8)));
        assert_eq!(plain["driver_specific"]["crypto"]["plain64"], plain64);
        let saved = daemon.call("save_config", &json!({})).await.unwrap();
        assert!(saved.to_string().contains("\"iv_large_sectors\":true"), "{saved}");
    });
}
