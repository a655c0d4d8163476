//! Names of secrets, and how methods read the secrets.

use super::*;
use aryk_rpc::wrapping::Source;
use aryk_state::Store;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

fn write(path: &Path, content: &[u8], mode: u32) {
    std::fs::write(path, content).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

async fn add(daemon: &Daemon, name: &str, path: &Path) -> Result<Value, Error> {
    daemon.call("keyring_file_add_key", &json!({"name": name, "path": path})).await
}

#[test]
fn secrets_are_read_when_they_are_used() {
    in_daemon(async |daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let path = daemon.dir.path().join("secret");
        write(&path, b"first", 0o600);
        assert_eq!(add(daemon, "k", &path).await.unwrap(), true);
        let secret = async || daemon.control.keyring.secret("k").await;
        assert_eq!(&*secret().await.unwrap(), b"first");
        write(&path, b"second\n", 0o400);
        assert_eq!(&*secret().await.unwrap(), b"second\n");
        let expected = json!([{"name": "k", "module": "keyring_file", "removed": false, "probed": false, "refcnt": 1,
            "path": path}]);
        assert_eq!(daemon.call("keyring_get_keys", &json!({})).await.unwrap(), expected);
        let saved = daemon.call("save_config", &json!({})).await.unwrap();
        let call = json!({"method": "keyring_file_add_key", "params": {"name": "k", "path": path}});
        assert_eq!(saved["subsystems"][0], json!({"subsystem": "keyring", "config": [call]}));
        assert!(!saved.to_string().contains("second"));
        write(&path, b"third", 0o604);
        let error = secret().await.unwrap_err();
        assert!(error.code() == -1 && error.to_string().contains("(mode 604): 'chmod 600' it"), "{error}");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(secret().await.unwrap_err().code(), -2);
        let remove = async || daemon.call("keyring_file_remove_key", &json!({"name": "k"})).await;
        remove().await.unwrap();
        assert_eq!(remove().await.unwrap_err().code(), -2);
        assert_eq!(secret().await.unwrap_err().code(), -2);
        assert_eq!(daemon.call("keyring_get_keys", &json!({})).await.unwrap(), json!([]));
    });
}

#[test]
fn what_is_no_secret_is_refused() {
    in_daemon(async |daemon| {
        let path = |name: &str| daemon.dir.path().join(name);
        write(&path("good"), b"s", 0o600);
        write(&path("open"), b"s", 0o660);
        std::fs::create_dir(path("dir")).unwrap();
        std::fs::set_permissions(path("dir"), std::fs::Permissions::from_mode(0o700)).unwrap();
        let large = std::fs::File::create(path("large")).unwrap();
        large.set_len((1 << 20) + 1).unwrap();
        large.set_permissions(std::fs::Permissions::from_mode(0o600)).unwrap();
        add(daemon, "good", &path("good")).await.unwrap();
        for (name, path, code, why) in [
            ("k", PathBuf::from("good"), -1, "must be absolute"),
            ("k", path("none"), -2, "/none cannot be read: No such file"),
            ("k", path("open"), -1, "mode 660"),
            ("k", path("dir"), -22, "not a regular file"),
            ("k", path("large"), -105, "more than 1048576 bytes"),
            ("good", path("good"), -17, "a key 'good' exists"),
            ("", path("good"), -22, "1 to 4096 bytes"),
            (&"n".repeat(4097), path("good"), -22, "1 to 4096 bytes"),
        ] {
            let error = add(daemon, name, &path).await.unwrap_err();
            assert!(error.code() == code && error.to_string().contains(why), "{error}");
        }
    });
}

#[test]
fn the_kernel_is_asked_only_if_it_is_enabled() {
    in_daemon(async |daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let secret =
            async || daemon.control.keyring.secret("aryk-test-no-such-key").await.unwrap_err().to_string();
        assert!(secret().await.contains("there is no key"), "{}", secret().await);
        let set = async |enable: &Value| daemon.call("keyring_linux_set_options", enable).await.unwrap();
        set(&json!({"enable": true})).await;
        set(&json!({})).await;
        assert!(secret().await.contains("the kernel's keyring"), "{}", secret().await);
        let saved = daemon.call("framework_get_config", &json!({"name": "keyring"})).await.unwrap();
        assert_eq!(saved, json!([{"method": "keyring_linux_set_options", "params": {"enable": true}}]));
        set(&json!({"enable": false})).await;
        assert!(secret().await.contains("there is no key"));
        assert_eq!(
            daemon.call("framework_get_config", &json!({"name": "keyring"})).await.unwrap(),
            json!([])
        );
    });
}

#[test]
fn names_survive_a_restart_and_missing_files_are_retried() {
    in_daemon(async |other| {
        let dir = other.dir.path();
        let path = dir.join("secret");
        write(&path, b"s", 0o600);
        let start = async || {
            let daemon = Daemon::with(Wrapping::read(Source::Process));
            let (store, records) = Store::open(&dir.join("state")).unwrap();
            daemon.control.config.keep_in(store, records).unwrap();
            daemon.call("framework_start_init", &json!({})).await.unwrap();
            aryk_rpc::restore::restore(&daemon.control, &daemon.methods).await;
            daemon
        };
        let daemon = start().await;
        add(&daemon, "k", &path).await.unwrap();
        daemon.call("keyring_linux_set_options", &json!({"enable": true})).await.unwrap();
        drop(daemon);
        let daemon = start().await;
        assert_eq!(&*daemon.control.keyring.secret("k").await.unwrap(), b"s");
        assert!(daemon.control.keyring.secret("none").await.unwrap_err().to_string().contains("kernel"));
        drop(daemon);
        std::fs::remove_file(&path).unwrap();
        let daemon = start().await;
        let absent = daemon.call("aryk_absent_get", &json!({})).await.unwrap();
        assert_eq!(
            (&absent[0]["object"], &absent[0]["kind"]),
            (&json!("keyring's 'file/k'"), &json!("setting"))
        );
        daemon.call("keyring_file_remove_key", &json!({"name": "k"})).await.unwrap();
        assert_eq!(daemon.call("aryk_absent_get", &json!({})).await.unwrap(), json!([]));
    });
}

#[test]
fn hosts_have_keys_by_name_and_no_reply_has_a_secret() {
    in_daemon(async |daemon| {
        const NQN: &str = "nqn.2016-06.io.spdk:cnode1";
        const HOST: &str = "nqn.2016-06.io.spdk:host1";
        const SECRET: &str = "DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let path = |name: &str| daemon.dir.path().join(name);
        write(&path("good"), SECRET.as_bytes(), 0o600);
        write(&path("wrong"), SECRET.replace("AAEC", "AAED").as_bytes(), 0o600);
        for name in ["good", "wrong"] {
            add(daemon, name, &path(name)).await.unwrap();
        }
        let call = async |method: &str, params: Value| daemon.call(method, &params).await;
        call("nvmf_create_transport", json!({"trtype": "TCP"})).await.unwrap();
        call("nvmf_create_subsystem", json!({"nqn": NQN})).await.unwrap();
        let host = |extra: Value| {
            let mut params = json!({"nqn": NQN, "host": HOST});
            params.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            params
        };
        let good = json!({"dhchap_key": "good", "dhchap_ctrlr_key": "good"});
        let early = call("nvmf_subsystem_set_keys", host(good.clone())).await.unwrap_err();
        assert_eq!(early.code(), -2, "{early}");
        for (keys, why) in [
            (json!({"dhchap_key": "none"}), "no key 'none'"),
            (json!({"dhchap_key": "wrong"}), "key 'wrong': the secret's checksum is wrong"),
            (json!({"dhchap_ctrlr_key": "good"}), "needs a dhchap_key"),
        ] {
            let error = call("nvmf_subsystem_add_host", host(keys)).await.unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
        call("nvmf_subsystem_add_host", host(good)).await.unwrap();
        let shown = async || {
            let shown = call("nvmf_get_subsystems", json!({"nqn": NQN})).await.unwrap();
            let saved = call("framework_get_config", json!({"name": "nvmf"})).await.unwrap();
            assert!(!format!("{shown}{saved}").contains("DHHC"), "{shown} {saved}");
            let note =
                saved.as_array().unwrap().iter().find(|call| call["method"] == "nvmf_subsystem_add_host");
            (shown[0]["hosts"].clone(), note.unwrap()["params"].clone())
        };
        let keys = json!({"dhchap_key": "good", "dhchap_ctrlr_key": "good"});
        let listed = json!([{"nqn": HOST, "dhchap_key": "good", "dhchap_ctrlr_key": "good"}]);
        assert_eq!(shown().await, (listed.clone(), host(keys.clone())));
        call("nvmf_subsystem_add_host", host(json!({}))).await.unwrap();
        assert_eq!(shown().await, (listed, host(keys)), "a host that is there keeps its keys");
        call("nvmf_subsystem_set_keys", host(json!({"dhchap_key": "good"}))).await.unwrap();
        let listed = json!([{"nqn": HOST, "dhchap_key": "good"}]);
        assert_eq!(shown().await, (listed, host(json!({"dhchap_key": "good"}))));
        call("nvmf_subsystem_set_keys", host(json!({}))).await.unwrap();
        assert_eq!(shown().await, (json!([{"nqn": HOST}]), host(json!({}))));
        call("nvmf_delete_subsystem", json!({"nqn": NQN})).await.unwrap();
    });
}
