//! Configurations of SPDK loaded by Aryk, and the reverse.
//!
//! `spdk-config.json` is a configuration as SPDK writes it, with `DIR` for a directory and `CORES` for the reactors' cores: disks
//! come before their base disks, and options are included whether or not they are at their defaults.

use crate::facts::Facts;
use crate::{Daemon, in_daemon};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

/// Methods of the file that save nothing.
const UNSAVED: [&str; 3] = ["_options", "bdev_wait_for_examine", "vhost_start_scsi_controller"];

/// The file, adapted to this daemon.
fn spdk_config(daemon: &Daemon) -> Value {
    for file in ["a0", "a1", "u0", "u1"] {
        std::fs::write(daemon.dir.path().join(file), [0; 8192]).unwrap();
    }
    let core = daemon.reactors.handles()[0].core();
    let text = include_str!("spdk-config.json").replace("DIR", daemon.dir.path().to_str().unwrap());
    serde_json::from_str(&text.replace("CORES", &format!("{:x}", 1_u64 << core))).unwrap()
}

/// The calls of a configuration.
fn calls(config: &Value) -> Vec<&Value> {
    let subsystems = config["subsystems"].as_array().unwrap().iter();
    subsystems.flat_map(|subsystem| subsystem["config"].as_array().into_iter().flatten()).collect()
}

async fn call(daemon: &Daemon, method: &str, params: Value) -> Value {
    daemon.call(method, &params).await.unwrap_or_else(|error| panic!("{method} {params}: {error}"))
}

/// Checks that the disks and controllers of the file exist.
async fn check_all(daemon: &Daemon) {
    let disks = call(daemon, "bdev_get_bdevs", json!({})).await;
    let names: BTreeSet<_> = disks.as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    let all = "A0 A1 D0 EE_M3 M0 M1 M2 M2p0 M2p1 M3 N0 N1 N2 PT0 U0 U1";
    assert_eq!(names.into_iter().collect::<Vec<_>>(), all.split(' ').collect::<Vec<_>>());
    assert_eq!(call(daemon, "aryk_absent_get", json!({})).await, json!([]));
    let controllers = call(daemon, "vhost_get_controllers", json!({})).await;
    assert_eq!(controllers.as_array().unwrap().len(), 5);
    assert_eq!(call(daemon, "scsi_get_devices", json!({})).await.as_array().unwrap().len(), 3);
}

#[test]
fn an_spdk_configuration_is_loaded_call_by_call() {
    in_daemon(async |daemon| {
        let config = spdk_config(daemon);
        let known = call(daemon, "rpc_get_methods", json!({})).await;
        call(daemon, "framework_start_init", json!({})).await;
        for element in calls(&config) {
            assert!(known.as_array().unwrap().contains(&element["method"]), "{element}");
            let params = element.get("params").cloned().unwrap_or_else(|| json!({}));
            assert_ne!(call(daemon, element["method"].as_str().unwrap(), params).await, json!(null));
        }
        check_all(daemon).await;
        daemon.control.close().await;
    });
}

#[test]
fn an_spdk_configuration_is_loaded_at_once_and_saved_again() {
    in_daemon(async |daemon| {
        call(daemon, "framework_start_init", json!({})).await;
        let mut config = spdk_config(daemon);
        // Some files have further members, and calls that SPDK makes at the same time.
        config["comment"] = json!("by hand");
        // If SPDK does not examine disks by itself, it saves the examine calls before the disks.
        let early = json!([{"method": "bdev_examine", "params": {"name": "PT0"}}]);
        config["subsystems"].as_array_mut().unwrap().insert(0, json!({"subsystem": "bdev", "config": early}));
        config["subsystems"].as_array_mut().unwrap().push(json!({"subsystem": "bdev", "config": [[
            {"method": "bdev_wait_for_examine"},
            {"method": "bdev_examine", "params": {"name": "PT0"}},
        ]], "comment": 1}));
        call(daemon, "load_config", config.clone()).await;
        check_all(daemon).await;

        let saved = call(daemon, "save_config", json!({})).await;
        let saved = calls(&saved);
        for before in calls(&config).into_iter().filter(|element| element.is_object()) {
            let method = before["method"].as_str().unwrap();
            if !is_saved(method) {
                continue;
            }
            let is_it = |after: &&&Value| after["method"] == method && is_of_the_same(before, after);
            let after = saved.iter().find(is_it).unwrap_or_else(|| panic!("not saved: {before}"));
            for (param, value) in after["params"].as_object().unwrap() {
                let same = match param.as_str() {
                    "cpumask" | "delay" => true,
                    // SPDK's file does not set the uuid.
                    "uuid" => method == "bdev_error_create" || before["params"][param] == *value,
                    "period" | "load_limit" | "core_limit" | "core_busy" => {
                        method == "framework_set_scheduler"
                    }
                    _ => before["params"][param] == *value,
                };
                assert!(same, "{param}: {value}, not as in {before}");
            }
        }
        let fallocate = |name: &str| {
            let is_it = |c: &&&Value| c["method"] == "bdev_aio_create" && c["params"]["name"] == name;
            saved.iter().find(is_it).unwrap()["params"].get("fallocate")
        };
        assert_eq!((fallocate("A0"), fallocate("A1")), (None, Some(&json!(true))));
        daemon.control.close().await;
    });
}

fn is_saved(method: &str) -> bool {
    let is_default = |part: &str| method.contains(part);
    !UNSAVED.into_iter().any(is_default)
        && !["_set_opts", "_set_hotplug", "nvmf_", "sock_", "bdev_examine"].into_iter().any(is_default)
}

/// Whether two calls of a method concern the same object.
fn is_of_the_same(a: &Value, b: &Value) -> bool {
    let named =
        ["name", "base_bdev", "base_name", "ctrlr"].into_iter().find(|n| a["params"].get(n).is_some());
    let named = named.unwrap_or_else(|| panic!("{a} has no name"));
    a["params"][named] == b["params"][named]
        && a["params"].get("scsi_target_num") == b["params"].get("scsi_target_num")
}

#[test]
fn saved_configurations_are_accepted_by_spdk() {
    let facts = Facts::read();
    in_daemon(async |daemon| {
        call(daemon, "framework_start_init", json!({})).await;
        let config = spdk_config(daemon);
        call(daemon, "load_config", config).await;
        for number in 0..2 {
            let (file, name) = (daemon.dir.path().join(format!("file{number}")), format!("plain{number}"));
            std::fs::write(&file, [0; 8192]).unwrap();
            let method = ["bdev_uring_create", "bdev_aio_create"][number];
            call(daemon, method, json!({"name": name, "filename": file})).await;
            let limits = json!({"name": name, "rw_ios_per_sec": 5000, "w_mbytes_per_sec": 7});
            call(daemon, "bdev_set_qos_limit", limits).await;
        }
        call(daemon, "framework_set_scheduler", json!({"name": "dynamic"})).await;
        let known: BTreeMap<_, BTreeSet<String>> = facts
            .names()
            .map(|method| (method, facts.params(method).into_iter().map(|param| param.name).collect()))
            .collect();
        let saved = call(daemon, "save_config", json!({})).await;
        assert!(calls(&saved).len() > 20);
        let mut wrong = Vec::new();
        for element in calls(&saved) {
            let method = element["method"].as_str().unwrap();
            let params = element["params"].as_object().unwrap();
            let strange = |param: &&String| !known[method].contains(*param);
            wrong.extend(params.keys().filter(strange).map(|param| format!("{method}: {param}")));
            for (param, value) in params {
                assert!(!value.is_null(), "{method}: {param} is null");
            }
        }
        assert_eq!(wrong, [""; 0], "parameters that SPDK does not take");
        daemon.control.close().await;
    });
}

#[test]
fn a_disk_waits_for_its_base() {
    in_daemon(async |daemon| {
        call(daemon, "framework_start_init", json!({})).await;
        let code = async |method: &str, params: Value| daemon.call(method, &params).await.unwrap_err().code();
        let passthru = |name: &str, base: &str| json!({"name": name, "base_bdev_name": base});
        // Top, middle, bottom; and parts that do not fit.
        assert_eq!(call(daemon, "bdev_passthru_create", passthru("top", "middle")).await, "top");
        call(daemon, "bdev_passthru_create", passthru("middle", "bottom")).await;
        call(daemon, "bdev_error_create", json!({"base_name": "top"})).await;
        let parts = json!({"base_bdev": "small", "split_count": 3, "split_size_mb": 100});
        assert_eq!(call(daemon, "bdev_split_create", parts.clone()).await, json!([]));
        for (method, params) in
            [("bdev_passthru_create", passthru("top", "x")), ("bdev_split_create", parts.clone())]
        {
            let refused = daemon.call(method, &params).await.unwrap_err();
            assert_eq!(refused.message(), "File exists", "{method}");
        }
        let gone = passthru("p", "913fc008-79a7-447f-b2c4-c73543638c31");
        assert_eq!(code("bdev_passthru_create", gone).await, -19, "a base named by its uuid existed before");
        assert_eq!(code("bdev_get_bdevs", json!({"name": "top"})).await, -19);
        let saved = call(daemon, "framework_get_config", json!({"name": "bdev"})).await;
        assert_eq!(saved.as_array().unwrap().len(), 4, "{saved}");

        let absent = call(daemon, "aryk_absent_get", json!({})).await;
        assert_eq!(absent[1]["object"], "disk 'middle'");
        assert_eq!(absent[1]["why"], "it waits for disk 'bottom'");
        assert_eq!(absent[1]["method"], "bdev_passthru_create");
        assert_eq!(absent[1]["params"]["base_bdev_name"], "bottom");

        let null = |name: &str| json!({"name": name, "block_size": 512, "num_blocks": 4096});
        call(daemon, "bdev_null_create", null("bottom")).await;
        call(daemon, "bdev_get_bdevs", json!({"name": "EE_top"})).await;
        call(daemon, "bdev_null_create", null("small")).await;
        let absent = call(daemon, "aryk_absent_get", json!({})).await;
        assert_eq!(absent.as_array().unwrap().len(), 1, "{absent}");
        assert!(!absent[0]["why"].as_str().unwrap().contains("waits"), "{absent}");
        call(daemon, "bdev_split_delete", json!({"base_bdev": "small"})).await;
        assert_eq!(call(daemon, "aryk_absent_get", json!({})).await, json!([]));

        call(daemon, "bdev_passthru_create", passthru("never", "x")).await;
        call(daemon, "bdev_passthru_delete", json!({"name": "never"})).await;
        assert_eq!(code("bdev_passthru_delete", json!({"name": "never"})).await, -19);
        // The saved order is the order of removal: each disk before its base.
        let saved = call(daemon, "framework_get_config", json!({"name": "bdev"})).await;
        let names: Vec<_> = saved.as_array().unwrap().iter().map(|c| c["params"]["name"].as_str()).collect();
        assert_eq!(names, [None, Some("top"), Some("middle"), Some("bottom"), Some("small")]);
    });
}
