//! Configurations and scripts of SPDK: the daemon starts with the files, and the scripts clear all objects.

use crate::harness::{Daemon, run_in};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use tempfile::TempDir;

/// A file saved by SPDK, with `DIR` for a directory and `CORES` for the reactors' cores.
const SPDK: &str = include_str!("../../../../crates/rpc/tests/compat/spdk-config.json");
const ALL: &str = "A0 A1 D0 EE_M3 M0 M1 M2 M2p0 M2p1 M3 N0 N1 N2 PT0 U0 U1";

/// Writes that file, and the files of its disks, to `dir`.
fn write_config(dir: &Path) -> String {
    for file in ["a0", "a1", "u0", "u1"] {
        std::fs::write(dir.join(file), [0; 8192]).unwrap();
    }
    let text = SPDK.replace("DIR", dir.to_str().unwrap()).replace("\"cpumask\": \"CORES\", ", "");
    std::fs::write(dir.join("spdk.json"), &text).unwrap();
    text
}

fn names(daemon: &Daemon, method: &str, member: &str) -> String {
    let all = daemon.call(method, json!({})).unwrap();
    let names: BTreeSet<_> =
        all.as_array().unwrap().iter().map(|one| one[member].as_str().unwrap()).collect();
    names.into_iter().collect::<Vec<_>>().join(" ")
}

/// Clears a subsystem like SPDK's script: vhost from the last call to the first, disks in the order in which they are saved.
fn clear(daemon: &Daemon, subsystem: &str) {
    let mut config = daemon.call("framework_get_config", json!({"name": subsystem})).unwrap();
    let calls = config.as_array_mut().unwrap();
    if subsystem.starts_with("vhost") {
        calls.reverse();
    }
    for call in calls.iter() {
        let (method, params) = (call["method"].as_str().unwrap(), &call["params"]);
        let name = &params["name"];
        let undo = match method {
            "vhost_scsi_controller_add_target" => (
                "vhost_scsi_controller_remove_target",
                json!({"ctrlr": params["ctrlr"], "scsi_target_num": params["scsi_target_num"]}),
            ),
            "vhost_create_scsi_controller" | "vhost_create_blk_controller" => {
                ("vhost_delete_controller", json!({"ctrlr": params["ctrlr"]}))
            }
            "bdev_malloc_create" => ("bdev_malloc_delete", json!({"name": name})),
            "bdev_null_create" => ("bdev_null_delete", json!({"name": name})),
            "bdev_aio_create" => ("bdev_aio_delete", json!({"name": name})),
            "bdev_delay_create" => ("bdev_delay_delete", json!({"name": name})),
            "bdev_passthru_create" => ("bdev_passthru_delete", json!({"name": name})),
            "bdev_split_create" => ("bdev_split_delete", json!({"base_bdev": params["base_bdev"]})),
            "bdev_error_create" => {
                let name = format!("EE_{}", params["base_name"].as_str().unwrap());
                ("bdev_error_delete", json!({"name": name}))
            }
            _ => continue,
        };
        daemon.call(undo.0, undo.1.clone()).unwrap_or_else(|error| panic!("{undo:?}: {error}"));
    }
    if subsystem == "bdev" {
        assert_eq!(daemon.call("bdev_nvme_get_controllers", json!({})).unwrap(), json!([]));
        daemon.call("bdev_nvme_set_hotplug", json!({"enable": false})).unwrap();
    }
}

#[test]
fn spdks_script_clears_all_objects() {
    let dir = TempDir::new().unwrap();
    write_config(dir.path());
    let daemon = Daemon::start_in(dir, &["-c", "DIR/spdk.json"]);
    // In SPDK's order: each disk before its base.
    let latency = json!({"name": "L", "base_bdev_name": "P", "avg_read_latency": 1, "p99_read_latency": 1,
        "avg_write_latency": 1, "p99_write_latency": 1});
    daemon.call("bdev_delay_create", latency).unwrap();
    daemon.call("bdev_error_create", json!({"base_name": "L"})).unwrap();
    daemon.call("bdev_passthru_create", json!({"name": "P", "base_bdev_name": "Sp1"})).unwrap();
    daemon.call("bdev_split_create", json!({"base_bdev": "S", "split_count": 2})).unwrap();
    daemon.call("bdev_null_create", json!({"name": "S", "num_blocks": 4096, "block_size": 512})).unwrap();
    daemon.call("bdev_passthru_create", json!({"name": "waits", "base_bdev_name": "nowhere"})).unwrap();
    for ctrlr in ["vscsi.0", "vblk.0"] {
        let signals = json!({"ctrlr": ctrlr, "delay_base_us": 20, "iops_threshold": 1000});
        daemon.call("vhost_controller_set_coalescing", signals).unwrap();
    }
    daemon.call("bdev_get_bdevs", json!({"name": "EE_L", "timeout": 10_000})).unwrap();
    let subsystems = daemon.call("framework_get_subsystems", json!({})).unwrap();
    for subsystem in subsystems.as_array().unwrap().iter().rev() {
        clear(&daemon, subsystem["subsystem"].as_str().unwrap());
    }
    assert_eq!(names(&daemon, "vhost_get_controllers", "ctrlr"), "");
    assert_eq!(daemon.call("aryk_absent_get", json!({})).unwrap(), json!([]));
    // The script does not know these.
    assert_eq!(names(&daemon, "bdev_get_bdevs", "name"), "U0 U1");
    // No object is left, so nothing can fail.
    clear(&daemon, "bdev");
}

#[test]
fn it_starts_with_spdks_file() {
    let dir = TempDir::new().unwrap();
    write_config(dir.path());
    let mut daemon = Daemon::start_in(dir, &["--json", "DIR/spdk.json", "--state-dir", "DIR/state"]);
    assert_eq!(names(&daemon, "bdev_get_bdevs", "name"), ALL, "before the first call is answered");
    let seen = |daemon: &Daemon| {
        let mut disks = daemon.call("bdev_get_bdevs", json!({})).unwrap();
        // Disks that had waited come earlier after a restart.
        disks.as_array_mut().unwrap().sort_by_key(|disk| disk["name"].to_string());
        // A disk in memory is empty after a restart.
        disks.as_array_mut().unwrap().iter_mut().for_each(|disk| disk["driver_specific"] = json!({}));
        [disks, daemon.call("save_config", json!({})).unwrap()]
    };
    let before = seen(&daemon);
    daemon.call("bdev_null_create", json!({"name": "more", "num_blocks": 8, "block_size": 512})).unwrap();
    daemon.call("bdev_null_delete", json!({"name": "N0"})).unwrap();
    let changed = seen(&daemon);
    assert_ne!(changed, before);
    // A restarted daemon needs no file, because later changes are newer.
    std::fs::remove_file(daemon.dir().join("spdk.json")).unwrap();
    daemon.kill_and_restart();
    assert_eq!(seen(&daemon), changed);
}

#[test]
fn the_first_load_of_a_file_is_compared_with_the_state_directory() {
    let dir = TempDir::new().unwrap();
    let text = write_config(dir.path());
    let mut daemon = Daemon::start_in(dir, &["--state-dir", "DIR/state"]);
    let uuid = "aaaaaaaa-0000-4000-8000-000000000001";
    let disk = json!({"name": "M0", "num_blocks": 32768, "block_size": 512, "uuid": uuid});
    daemon.call("bdev_malloc_create", disk).unwrap();
    daemon.kill();
    let path = daemon.dir().join("spdk.json");
    let flags = ["--json", "DIR/spdk.json", "--state-dir", "DIR/state"];
    let dir = daemon.dir().to_str().unwrap().to_owned();
    let flags = flags.map(|flag| flag.replace("DIR", &dir));
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let refused = run_in(daemon.dir(), &flags);
    let stderr = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{stderr}");
    for part in [
        path.to_str().unwrap(),
        "bdev_malloc_create of subsystem 'bdev'",
        "'M0' is there already",
        "num_blocks is 32768, but 65536 in the file",
        "--json-ignore-init-errors",
    ] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
    // The failed start has not loaded the file.
    std::fs::write(&path, text.replace("\"num_blocks\": 65536", "\"num_blocks\": 32768")).unwrap();
    daemon.restart_with(&flags);
    assert_eq!(names(&daemon, "bdev_get_bdevs", "name"), ALL);
}

#[test]
fn a_file_that_cannot_be_loaded_ends_the_daemon() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file.json");
    let disk =
        json!({"method": "bdev_null_create", "params": {"name": "n", "num_blocks": 8, "block_size": 512}});
    let config = |calls: Value| json!({"subsystems": [{"subsystem": "bdev", "config": calls}]}).to_string();
    let wrong = [
        (
            config(json!([disk, {"method": "bdev_malloc_create", "params": {"name": "m"}}])),
            "bdev_malloc_create of subsystem 'bdev'",
        ),
        (
            config(json!([{"method": "bdev_rbd_create", "params": {"name": "m"}}])),
            "bdev_rbd_create of subsystem 'bdev'",
        ),
        (
            config(
                json!([disk, {"method": "bdev_malloc_create", "params": {"name": "n", "num_blocks": 8, "block_size": 512}}]),
            ),
            "'n' is there already",
        ),
        ("{".into(), "is no configuration"),
        ("{}".into(), "is no configuration"),
    ];
    for (text, why) in wrong {
        std::fs::write(&file, &text).unwrap();
        let refused = run_in(dir.path(), &["-c", file.to_str().unwrap()]);
        let stderr = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(1), "{text}: {stderr}");
        assert!(stderr.contains(why) && stderr.contains("file.json"), "{why}: {stderr}");
    }
    let refused = run_in(dir.path(), &["-c", "/no/such/file"]);
    assert!(String::from_utf8(refused.stderr).unwrap().contains("/no/such/file: No such file"));
    std::fs::write(&file, config(json!([{"method": "bdev_rbd_create"}, disk]))).unwrap();
    let daemon = Daemon::start_in(dir, &["-c", "DIR/file.json", "--json-ignore-init-errors"]);
    assert_eq!(names(&daemon, "bdev_get_bdevs", "name"), "n");
}
