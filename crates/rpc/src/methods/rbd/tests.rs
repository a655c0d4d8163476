//! Disks in images of a substitute for librbd, over restarts of the daemon.

use super::*;
use crate::Methods;
use crate::methods::log::PrintLevel;
use crate::restore::{Restored, restore};
use crate::wrapping::{Source, Wrapping};
use aryk_librbd_stub::{add_image, blocklist, exclusions_of, is_blocklisted, library, option};
use aryk_reactor::{Options, Reactors};
use aryk_state::Store;
use serde_json::json;
use serde_json::value::to_raw_value;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::rc::Rc;

/// A daemon with its state and its wrapping key in `dir`.
fn daemon(dir: &Path) -> (Rc<Control>, Rc<Methods<Control>>) {
    daemon_with(dir, Wrapping::read(Source::Own(dir.join("wrapping.key"))))
}

fn daemon_with(dir: &Path, wrapping: Wrapping) -> (Rc<Control>, Rc<Methods<Control>>) {
    let reactors = Rc::new(Reactors::start(&Options::default()).unwrap());
    let control = Control::new(reactors, dir, 1024, PrintLevel::Error, |_| {});
    let control = control.with_rbd(Clusters::with_library(library())).with_wrapping(wrapping);
    let control = Rc::new(control);
    let (store, records) = Store::open(dir).unwrap();
    control.config.keep_in(store, records).unwrap();
    control.start();
    let methods = crate::methods::table(Rc::clone(&control));
    (control, methods)
}

async fn call(methods: &Methods<Control>, method: &str, params: Value) -> Result<Value, Error> {
    let reply = methods.call(method, Some(to_raw_value(&params).unwrap())).await?;
    Ok(serde_json::from_str(reply.get()).unwrap())
}

fn in_local_set(test: impl AsyncFnOnce(&Path)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let dir = tempfile::TempDir::new().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test(dir.path()));
}

fn clients(control: &Control, disk: &str) -> Vec<String> {
    let params = control.config.noted(Subsystem::Bdev, disk).unwrap().params;
    serde_json::from_value(params[CLIENTS].clone()).unwrap()
}

#[test]
fn a_restarted_daemon_excludes_its_predecessor_and_opens_the_images_again() {
    in_local_set(async |dir| {
        let image = add_image("restart", "image", 1 << 20);
        let (before, methods) = daemon(dir);
        call(&methods, REGISTER, json!({"name": "c", "config_param": {"key": "secret"}})).await.unwrap();
        let disk = json!({"name": "d", "pool_name": "restart", "rbd_name": "image", "block_size": 512,
            "cluster_name": "c"});
        assert_eq!(call(&methods, CREATE, disk).await.unwrap(), "d");
        let first = clients(&before, "d");
        assert_eq!(first, [before.rbd.clusters.list()[0].addresses.clone()]);
        assert!(!is_blocklisted(&first[0]));
        let saved = call(&methods, "save_config", json!({})).await.unwrap().to_string();
        assert!(
            saved.contains("restart") && !saved.contains("secret") && !saved.contains(&first[0]),
            "{saved}"
        );
        // A killed daemon closes nothing.
        std::mem::forget(before.rbd.clusters.clone());
        drop((before, methods));
        let (after, methods) = daemon(dir);
        assert_eq!(restore(&after, &methods).await, Restored { made: 2, absent: 0 });
        assert!(is_blocklisted(&first[0]));
        let second = clients(&after, "d");
        assert_ne!(first, second);
        assert!(!is_blocklisted(&second[0]));
        assert_eq!(image.handles(), 2, "that of the killed daemon is still there");
        call(&methods, "bdev_rbd_delete", json!({"name": "d"})).await.unwrap();
        assert_eq!(image.handles(), 1);
        call(&methods, "bdev_rbd_unregister_cluster", json!({"name": "c"})).await.unwrap();
        assert_eq!(call(&methods, "bdev_rbd_get_clusters_info", json!({})).await.unwrap(), json!([]));
    });
}

#[test]
fn a_new_disk_gets_a_new_client_at_once_if_the_cluster_had_excluded_the_old_one() {
    in_local_set(async |dir| {
        add_image("excluded", "image", 1 << 20);
        let (control, methods) = daemon(dir);
        call(&methods, REGISTER, json!({"name": "c"})).await.unwrap();
        let first = control.rbd.clusters.list()[0].addresses.clone();
        blocklist(&first);
        let disk = json!({"name": "d", "pool_name": "excluded", "rbd_name": "image", "block_size": 512,
            "cluster_name": "c"});
        assert_eq!(call(&methods, CREATE, disk).await.unwrap(), "d");
        assert_ne!(clients(&control, "d"), [first]);
        call(&methods, "bdev_rbd_delete", json!({"name": "d"})).await.unwrap();
        call(&methods, "bdev_rbd_unregister_cluster", json!({"name": "c"})).await.unwrap();
    });
}

/// Has no task of the daemon retry absent disks, so that only the calls of clients try them.
fn leave_tries_to_clients(control: &Control) {
    control.start_up.retries.set(true);
}

#[test]
fn an_image_that_cannot_be_opened_keeps_its_predecessor_in_its_note() {
    in_local_set(async |dir| {
        let image = add_image("unopened", "image", 1 << 20);
        let (before, methods) = daemon(dir);
        let disk = json!({"name": "d", "pool_name": "unopened", "rbd_name": "image", "block_size": 512});
        call(&methods, CREATE, disk.clone()).await.unwrap();
        let first = clients(&before, "d");
        std::mem::forget(before.rbd.clusters.clone());
        drop((before, methods));
        image.script(|script| script.open = Errno::IO.raw_os_error());
        let (after, methods) = daemon(dir);
        leave_tries_to_clients(&after);
        assert_eq!(restore(&after, &methods).await, Restored { made: 0, absent: 1 });
        // Each further try has a new client, and changes neither the note nor the cluster.
        for _ in 0..3 {
            assert_eq!((clients(&after, "d"), exclusions_of(&first[0])), (first.clone(), 1));
            call(&methods, CREATE, disk.clone()).await.unwrap_err();
        }
        image.script(|script| script.open = 0);
        call(&methods, CREATE, disk).await.unwrap();
        assert_ne!(clients(&after, "d"), first);
    });
}

#[test]
fn an_image_that_cannot_be_opened_is_not_tried_again_at_once() {
    in_local_set(async |dir| {
        let image = add_image("waiting", "image", 1 << 20);
        let (before, methods) = daemon(dir);
        let disk = json!({"name": "d", "pool_name": "waiting", "rbd_name": "image", "block_size": 512});
        call(&methods, CREATE, disk).await.unwrap();
        std::mem::forget(before.rbd.clusters.clone());
        drop((before, methods));
        image.script(|script| script.open = Errno::IO.raw_os_error());
        let (after, methods) = daemon(dir);
        let began = tokio::time::Instant::now();
        assert_eq!(restore(&after, &methods).await, Restored { made: 0, absent: 1 });
        image.script(|script| script.open = 0);
        while after.disks.find("d").is_err() {
            assert!(began.elapsed() < Duration::from_secs(20), "the disk is not tried again");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(began.elapsed() > Duration::from_millis(900), "{:?}", began.elapsed());
    });
}

#[test]
fn a_client_that_creates_an_absent_disk_again_excludes_the_predecessor_too() {
    in_local_set(async |dir| {
        let image = add_image("again", "image", 1 << 20);
        let (before, methods) = daemon(dir);
        let disk = json!({"name": "d", "pool_name": "again", "rbd_name": "image", "block_size": 512});
        call(&methods, CREATE, disk.clone()).await.unwrap();
        let first = clients(&before, "d");
        std::mem::forget(before.rbd.clusters.clone());
        drop((before, methods));
        image.script(|script| script.open = Errno::IO.raw_os_error());
        let (after, methods) = daemon(dir);
        leave_tries_to_clients(&after);
        assert_eq!(restore(&after, &methods).await, Restored { made: 0, absent: 1 });
        image.script(|script| script.open = 0);
        call(&methods, CREATE, disk).await.unwrap();
        assert!(is_blocklisted(&first[0]));
        assert_eq!(clients(&after, "d").len(), 1, "the predecessor is excluded for good");
    });
}

#[test]
fn keys_in_options_that_are_text_are_in_no_reply() {
    let options = r#"{"mon_host": "10.0.0.1", "key ": "secret"}"#;
    for (method, param) in [(CREATE, "config"), (REGISTER, "config_param")] {
        let output = for_output(Call { method: method.into(), params: json!({param: options}) });
        assert_eq!(output.params, json!({param: r#"{"mon_host":"10.0.0.1"}"#}));
    }
    let output = for_output(Call { method: CREATE.into(), params: json!({"config": "key=secret"}) });
    assert_eq!(output.params, json!({"config": "{}"}));
}

/// All bytes of the files in a directory.
fn bytes_of(dir: &Path) -> Vec<u8> {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.is_file()).flat_map(|path| std::fs::read(path).unwrap()).collect()
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}

/// The key that the only client with this name, or without one, gave to librados.
fn key_of(control: &Control, name: Option<&str>) -> Option<String> {
    let list = control.rbd.clusters.list();
    let client = list.iter().find(|client| client.name.as_deref() == name).unwrap();
    option(&client.addresses, "key")
}

#[test]
fn the_state_store_has_keys_of_users_wrapped_only() {
    in_local_set(async |dir| {
        const KEYS: [&str; 2] = ["AQAregistered12345678==", "AQAshared1234567890123=="];
        add_image("keys", "image", 1 << 20);
        let (before, methods) = daemon(dir);
        let cluster = json!({"name": "c", "config_param": {"mon_host": "10.0.0.1", "key": KEYS[0]}});
        call(&methods, REGISTER, cluster).await.unwrap();
        // Ceph takes this name as `key`.
        let text = json!({"mon_host": "10.0.0.1", " key": KEYS[1]}).to_string();
        let disk =
            json!({"name": "d", "pool_name": "keys", "rbd_name": "image", "block_size": 512, "config": text});
        call(&methods, CREATE, disk).await.unwrap();
        let keys = |control: &Control| [Some("c"), None].map(|name| key_of(control, name).unwrap());
        assert_eq!(keys(&before), KEYS);
        for call in before.config.calls(Subsystem::Bdev) {
            assert!(!KEYS.iter().any(|key| call.params.to_string().contains(key)), "{}", call.params);
        }
        std::mem::forget(before.rbd.clusters.clone());
        drop((before, methods));
        let stored = bytes_of(dir);
        assert!(contains(&stored, "wrapped:1:") && !KEYS.iter().any(|key| contains(&stored, key)));
        let (after, methods) = daemon_with(dir, Wrapping::default());
        assert_eq!(restore(&after, &methods).await, Restored { made: 0, absent: 2 });
        let why = after.config.why_absent_object(Subsystem::Rbd, "c").unwrap();
        assert!(why.contains("the key of 'c' is wrapped by the wrapping key with id"), "{why}");
        let other = json!({"name": "o", "config_param": {"key": KEYS[0]}});
        let refused = call(&methods, REGISTER, other).await.unwrap_err();
        assert!(refused.to_string().contains("cannot unwrap"), "{refused}");
    });
}

#[test]
fn a_restarted_daemon_has_the_keys_of_users_again() {
    in_local_set(async |dir| {
        const KEYS: [&str; 2] = ["AQAagain1234567890123==", "AQAnamed1234567890123=="];
        let file = dir.join("named.secret");
        std::fs::write(&file, format!("{}\n", KEYS[1])).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let (before, methods) = daemon(dir);
        let named = json!({"name": "vms", "path": file});
        call(&methods, "keyring_file_add_key", named).await.unwrap();
        call(&methods, REGISTER, json!({"name": "a", "config_param": {"key": KEYS[0]}})).await.unwrap();
        call(&methods, REGISTER, json!({"name": "b", "key_name": "vms"})).await.unwrap();
        std::mem::forget(before.rbd.clusters.clone());
        drop((before, methods));
        let (after, methods) = daemon(dir);
        assert_eq!(restore(&after, &methods).await, Restored { made: 3, absent: 0 });
        assert_eq!([Some("a"), Some("b")].map(|name| key_of(&after, name).unwrap()), KEYS);
        for (more, code) in [
            (json!({"key_name": "none"}), -2),
            (json!({"key_name": "vms", "key_file": "/k"}), -22),
            (json!({"key_name": "vms", "config_param": {"key": "AQ=="}}), -22),
            (json!({"config_param": {"key": "[client.vms]"}}), -22),
        ] {
            let mut params = json!({"name": "x"});
            params.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
            let refused = call(&methods, REGISTER, params).await.unwrap_err();
            assert_eq!(refused.code(), code, "{more}: {refused}");
        }
    });
}

#[test]
fn hundreds_of_disks_are_created_at_once_and_calls_are_answered_meanwhile() {
    const DISKS: usize = 300;
    in_local_set(async |dir| {
        let (control, methods) = daemon(dir);
        let one = |n: usize| {
            let methods = Rc::clone(&methods);
            async move {
                let image = format!("{n}+size=65536+delay=2000");
                let disk = json!({"name": format!("d{n}"), "pool_name": "many", "rbd_name": image, "block_size": 512});
                call(&methods, CREATE, disk).await.unwrap();
            }
        };
        let mut stuck = tokio::task::JoinSet::new();
        let of_stuck = Rc::clone(&methods);
        stuck.spawn_local(async move {
            let disk = json!({"name": "s", "pool_name": "many", "rbd_name": "s+size=65536+open=never",
                "block_size": 512});
            call(&of_stuck, CREATE, disk).await
        });
        let mut creating = tokio::task::JoinSet::new();
        (0..DISKS).for_each(|n| drop(creating.spawn_local(one(n))));
        assert!(call(&methods, "spdk_get_version", json!({})).await.is_ok());
        while let Some(created) = creating.join_next().await {
            created.unwrap();
        }
        let list = control.rbd.clusters.list();
        let opens: u64 = list.iter().map(|client| client.counts.opens).sum();
        assert_eq!((list.len(), opens), (aryk_bdev_rbd::SHARED_MAX, DISKS as u64));
        assert!(stuck.try_join_next().is_none(), "an open that never ends delays only its own disk");
    });
}

#[test]
fn bad_parameters_are_refused_without_a_client() {
    in_local_set(async |dir| {
        let (control, methods) = daemon(dir);
        let with = |more: Value| {
            let mut disk = json!({"name": "d", "pool_name": "p", "rbd_name": "i", "block_size": 512});
            disk.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
            disk
        };
        for (more, code) in [
            (json!({"rbd_name": "@s"}), -22),
            (json!({"rbd_name": "i@"}), -22),
            (json!({"pool_name": ""}), -22),
            (json!({"config": "no JSON"}), -22),
            (json!({"cluster_name": "c"}), -2),
            (json!({"cluster_name": "c", "user_id": "u"}), -22),
            (json!({"user_id": "nobody"}), -13),
            (json!({"config_file": "/nowhere/ceph.conf"}), -2),
        ] {
            let error = call(&methods, CREATE, with(more.clone())).await.unwrap_err();
            assert_eq!(error.code(), code, "{more}: {error}");
        }
        assert!(control.rbd.clusters.list().is_empty());
    });
}

#[test]
fn an_image_shows_its_snapshots_and_locks() {
    in_local_set(async |dir| {
        let (control, methods) = daemon(dir);
        let image = add_image("info", "image", 1 << 20);
        let disk = json!({"name": "d", "pool_name": "info", "rbd_name": "image", "block_size": 512});
        call(&methods, CREATE, disk).await.unwrap();
        image.take_snapshot("before");
        let address = control.rbd.clusters.list()[0].addresses.clone();
        image.take_lock("client.1", "auto 7", &address);
        let info = call(&methods, "bdev_rbd_get_image_info", json!({"name": "d"})).await.unwrap();
        assert_eq!(info["snapshots"], json!([{"id": 1, "name": "before", "size": 1 << 20}]));
        assert_eq!(info["locks"], json!([{"client": "client.1", "id": "auto 7", "address": address}]));
        assert_eq!((&info["exclusive_lock"], &info["lock_owner"]), (&json!(true), &json!(true)));
        assert_eq!((&info["image_name"], &info["luks_version"]), (&json!("image"), &Value::Null));
        let other = json!({"name": "m", "num_blocks": 8, "block_size": 512});
        call(&methods, "bdev_malloc_create", other).await.unwrap();
        let refused = call(&methods, "bdev_rbd_get_image_info", json!({"name": "m"})).await;
        assert!(refused.is_err(), "{refused:?}");
    });
}
