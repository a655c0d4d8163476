//! Error codes of methods: those of SPDK, on which its clients depend.
//!
//! Parameters that cannot be decoded are generated from the facts: each in turn missing, of another type, and unknown; other
//! errors are listed.

use super::facts::Facts;
use super::{Daemon, STRANGER, in_daemon};
use serde_json::{Map, Value, json};

const INVALID: i64 = -32602;
const INTERNAL: i64 = -32603;

/// The families whose methods report parameters that cannot be decoded as an internal error, and the exceptions.
const INTERNAL_FAMILIES: [&str; 13] = [
    "bdev_aio_",
    "bdev_crypto_",
    "bdev_delay_",
    "bdev_error_",
    "bdev_get_",
    "bdev_lvol_",
    "bdev_malloc_",
    "bdev_null_",
    "bdev_nvme_",
    "bdev_passthru_",
    "bdev_rbd_",
    "bdev_set_q",
    "bdev_uring_",
];
const INTERNAL_ALONE: [&str; 6] = [
    "bdev_enable_histogram",
    "bdev_reset_iostat",
    "log_clear_flag",
    "log_enable_timestamps",
    "log_set_flag",
    "vhost_get_controllers",
];

fn code_of_undecoded(method: &str) -> i64 {
    let is_internal = INTERNAL_FAMILIES.iter().any(|family| method.starts_with(family));
    match method {
        "bdev_delay_update_latency" | "bdev_nvme_set_hotplug" | "bdev_nvme_set_options" => INVALID,
        _ if is_internal || INTERNAL_ALONE.contains(&method) => INTERNAL,
        _ => INVALID,
    }
}

/// Calls with parameters that cannot be decoded.
fn undecodable(facts: &Facts, method: &str) -> Vec<Value> {
    let params = facts.params(method);
    let whole: Map<String, Value> = params
        .iter()
        .filter(|p| p.is_required)
        .map(|p| (p.name.clone(), p.samples(facts).remove(0)))
        .collect();
    let with = |name: &str, value: Value| {
        let mut call = whole.clone();
        call.insert(name.to_owned(), value);
        Value::Object(call)
    };
    let mut calls = vec![with(STRANGER, json!(0))];
    for param in &params {
        calls.push(with(&param.name, param.wrong_sample()));
        if param.is_required {
            let mut call = whole.clone();
            call.remove(&param.name);
            calls.push(Value::Object(call));
        }
    }
    calls
}

#[test]
fn parameters_that_cannot_be_decoded() {
    let facts = Facts::read();
    in_daemon(async |daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let (names, mut rows, mut wrong) = (daemon.names(), 0, Vec::new());
        for method in facts.names().filter(|m| names.contains(m) && *m != "framework_start_init") {
            let code = code_of_undecoded(method);
            for params in undecodable(&facts, method) {
                rows += 1;
                match daemon.call(method, &params).await {
                    Err(error) if i64::from(error.code()) == code => {}
                    other => wrong.push(format!("{method} {params}: {other:?}, not {code}")),
                }
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(rows > 250, "{rows}");
    });
}

const EXISTS: &str = "File exists";
const NO_DEVICE: &str = "No such device";
const ARGUMENT: &str = "Invalid argument";

/// A call, and the code and optionally the text of its error, given the objects that [`prepare`] has created.
type Row = (&'static str, Value, i64, Option<&'static str>);

/// Creating and changing disks.
fn disks() -> Vec<Row> {
    let disk = |name: &str| json!({"name": name, "block_size": 512, "num_blocks": 8});
    let file = |name: &str| json!({"name": name, "filename": "/nowhere/at/all"});
    let delay = |name: &str, base: &str| {
        json!({"name": name, "base_bdev_name": base, "avg_read_latency": 1,
        "p99_read_latency": 1, "avg_write_latency": 1, "p99_write_latency": 1})
    };
    let nvme = |trtype: &str, traddr: &str| json!({"name": "z", "trtype": trtype, "traddr": traddr});
    let latency = |name: &str| json!({"delay_bdev_name": name, "latency_type": "avg_read", "latency_us": 1});
    let inject = |name: &str, kind: &str| json!({"name": name, "io_type": "read", "error_type": kind});
    vec![
        ("bdev_malloc_create", disk("n"), -17, Some(EXISTS)),
        ("bdev_null_create", disk("n"), -17, Some(EXISTS)),
        ("bdev_null_create", json!({"name": "z", "block_size": 512, "num_blocks": 0}), -22, None),
        ("bdev_null_create", json!({"name": "z", "block_size": 500, "num_blocks": 8}), -22, None),
        ("bdev_malloc_create", json!({"name": "z", "block_size": 512, "num_blocks": 0}), -22, None),
        ("bdev_malloc_create", json!({"name": "z", "block_size": 500, "num_blocks": 8}), -22, None),
        (
            "bdev_null_create",
            json!({"name": "z", "block_size": 512, "num_blocks": 8, "uuid": "z"}),
            INTERNAL,
            None,
        ),
        ("bdev_aio_create", file("n"), -17, Some(EXISTS)),
        ("bdev_uring_create", file("n"), -17, Some(EXISTS)),
        ("bdev_aio_create", file("z"), -2, Some("No such file or directory")),
        ("bdev_delay_update_latency", latency("z"), INVALID, None),
        ("bdev_delay_update_latency", latency("n"), -32600, None),
        ("bdev_delay_create", delay("p", "t"), -17, Some(EXISTS)),
        ("bdev_passthru_create", json!({"name": "p", "base_bdev_name": "t"}), -17, Some(EXISTS)),
        ("bdev_passthru_create", json!({"name": "p", "base_bdev_name": "base"}), -17, Some(EXISTS)),
        ("bdev_error_inject_error", inject("z", "failure"), -19, Some(NO_DEVICE)),
        ("bdev_error_inject_error", inject("n", "failure"), -19, Some(NO_DEVICE)),
        ("bdev_error_inject_error", inject("n", "bad luck"), INTERNAL, None),
        ("bdev_split_create", json!({"base_bdev": "t", "split_count": 0}), INVALID, Some(ARGUMENT)),
        ("bdev_split_delete", json!({"base_bdev": "t"}), INVALID, None),
        ("bdev_null_resize", json!({"name": "z", "new_size": 1}), -19, Some(NO_DEVICE)),
        ("bdev_nvme_attach_controller", nvme("PCIe", "ffff:ff:1f.7"), -19, Some(NO_DEVICE)),
        ("bdev_nvme_attach_controller", nvme("PCIe", "nowhere"), -22, Some(ARGUMENT)),
        ("bdev_nvme_attach_controller", nvme("TCP", "10.0.0.1"), -22, Some(ARGUMENT)),
        ("bdev_nvme_attach_controller", nvme("VFIOUSER", "/nowhere/at/all"), -19, Some(NO_DEVICE)),
        ("bdev_nvme_detach_controller", json!({"name": "z"}), -19, Some(NO_DEVICE)),
        ("bdev_nvme_reset_controller", json!({"name": "z"}), -19, Some(NO_DEVICE)),
        (
            "bdev_nvme_add_error_injection",
            json!({"name": "z", "cmd_type": "io", "opc": 2, "sc": 6}),
            -19,
            Some(NO_DEVICE),
        ),
        (
            "bdev_nvme_remove_error_injection",
            json!({"name": "z", "cmd_type": "io", "opc": 2}),
            -19,
            Some(NO_DEVICE),
        ),
        ("bdev_nvme_cuse_register", json!({"name": "z"}), -19, Some(NO_DEVICE)),
        ("bdev_nvme_cuse_unregister", json!({"name": "z"}), -19, Some(NO_DEVICE)),
    ]
}

/// Reading disks' properties.
fn watches() -> Vec<Row> {
    let mut rows = vec![
        ("bdev_get_bdevs", json!({"name": "z"}), -19, Some(NO_DEVICE)),
        ("bdev_get_bdevs", json!({"name": "z", "timeout": 1}), -110, Some("Connection timed out")),
        ("bdev_get_iostat", json!({"name": "z"}), -19, Some(NO_DEVICE)),
        ("bdev_get_iostat", json!({"names": ["n", "z"]}), -19, Some(NO_DEVICE)),
        ("bdev_get_iostat", json!({"name": "n", "names": ["n"]}), -22, Some(ARGUMENT)),
        ("bdev_get_iostat", json!({"per_channel": true}), -22, Some(ARGUMENT)),
        ("bdev_get_iostat", json!({"names": ["n", "t"], "per_channel": true}), -22, Some(ARGUMENT)),
        ("bdev_set_qos_limit", json!({"name": "z", "rw_ios_per_sec": 1000}), -19, Some(NO_DEVICE)),
        ("bdev_set_qos_limit", json!({"name": "n"}), -22, None),
        ("bdev_set_qd_sampling_period", json!({"name": "z", "period": 1}), -19, Some(NO_DEVICE)),
        ("bdev_enable_histogram", json!({"name": "z", "enable": true}), -19, Some(NO_DEVICE)),
        (
            "bdev_enable_histogram",
            json!({"name": "n", "enable": true, "opc": "sing"}),
            INTERNAL,
            Some(ARGUMENT),
        ),
        ("bdev_get_histogram", json!({"name": "n"}), INTERNAL, Some("Bad address")),
        ("bdev_get_histogram_borders", json!({"name": "n", "borders": [1]}), INTERNAL, Some("Bad address")),
        ("bdev_get_histogram_borders", json!({"name": "z", "borders": [1]}), -19, Some(NO_DEVICE)),
    ];
    for name in ["z", "c"] {
        for method in [
            "bdev_aio_delete",
            "bdev_aio_rescan",
            "bdev_delay_delete",
            "bdev_error_delete",
            "bdev_get_histogram",
            "bdev_malloc_delete",
            "bdev_null_delete",
            "bdev_passthru_delete",
            "bdev_reset_iostat",
            "bdev_uring_delete",
            "bdev_uring_rescan",
        ] {
            rows.push((method, json!({"name": name}), -19, Some(NO_DEVICE)));
        }
    }
    rows
}

/// Controllers.
fn controllers() -> Vec<Row> {
    let blk = |name: &str, disk: &str| json!({"ctrlr": name, "dev_name": disk});
    let target = |ctrlr: &str, number: i32, disk: &str| json!({"ctrlr": ctrlr, "scsi_target_num": number, "bdev_name": disk});
    let slot = |ctrlr: &str, number: i32| json!({"ctrlr": ctrlr, "scsi_target_num": number});
    let coalescing = json!({"ctrlr": "z", "delay_base_us": 0, "iops_threshold": 1});
    let coalescing = ("vhost_controller_set_coalescing", coalescing, INVALID, Some(NO_DEVICE));
    let policy = json!({"ctrlr": "z", "policy": "poll"});
    vec![
        coalescing,
        ("aryk_controller_set_sleep_policy", policy, -19, Some(NO_DEVICE)),
        ("vhost_create_blk_controller", blk("c", "n"), INVALID, Some(EXISTS)),
        ("vhost_create_blk_controller", blk("s", "n"), INVALID, Some(EXISTS)),
        ("vhost_create_blk_controller", blk("z", "z"), INVALID, Some(NO_DEVICE)),
        ("vhost_create_blk_controller", blk("", "n"), INVALID, Some(ARGUMENT)),
        (
            "vhost_create_blk_controller",
            json!({"ctrlr": "z", "dev_name": "n", "transport": "z"}),
            INVALID,
            None,
        ),
        (
            "vhost_create_blk_controller",
            json!({"ctrlr": "z", "dev_name": "n", "cpumask": "[900]"}),
            INVALID,
            None,
        ),
        ("vhost_create_scsi_controller", json!({"ctrlr": "c"}), INVALID, Some(EXISTS)),
        ("vhost_create_scsi_controller", json!({"ctrlr": "s"}), INVALID, Some(EXISTS)),
        ("vhost_create_scsi_controller", json!({"ctrlr": "z", "cpumask": "z"}), INVALID, None),
        ("vhost_start_scsi_controller", json!({"ctrlr": "z"}), INVALID, Some(NO_DEVICE)),
        ("vhost_scsi_controller_add_target", target("z", 1, "t"), INVALID, Some(NO_DEVICE)),
        ("vhost_scsi_controller_add_target", target("s", 1, "z"), INVALID, Some(NO_DEVICE)),
        ("vhost_scsi_controller_add_target", target("s", 0, "t"), INVALID, Some(EXISTS)),
        ("vhost_scsi_controller_add_target", target("s", 8, "t"), INVALID, Some(ARGUMENT)),
        ("vhost_scsi_controller_add_target", target("s", -2, "t"), INVALID, Some(ARGUMENT)),
        ("vhost_scsi_controller_remove_target", slot("z", 0), INVALID, Some(NO_DEVICE)),
        ("vhost_scsi_controller_remove_target", slot("s", 1), INVALID, Some(NO_DEVICE)),
        ("vhost_scsi_controller_remove_target", slot("s", 8), INVALID, Some(ARGUMENT)),
        ("vhost_delete_controller", json!({"ctrlr": "z"}), INVALID, Some(NO_DEVICE)),
        ("vhost_get_controllers", json!({"name": "z"}), INTERNAL, Some(NO_DEVICE)),
    ]
}

/// All other methods.
fn others() -> Vec<Row> {
    let mut rows = vec![
        ("framework_get_config", json!({"name": "z"}), INVALID, None),
        ("framework_set_scheduler", json!({"name": "z"}), INTERNAL, None),
        ("log_set_flag", json!({"flag": "z"}), INVALID, None),
        ("log_clear_flag", json!({"flag": "z"}), INVALID, None),
        ("log_set_print_level", json!({"level": "z"}), INVALID, None),
        ("log_set_level", json!({"level": "z"}), INVALID, None),
        ("spdk_kill_instance", json!({"sig_name": "SIGSTOP"}), INVALID, None),
        ("thread_set_cpumask", json!({"id": 99_999, "cpumask": "0x1"}), INVALID, None),
    ];
    for method in ["trace_enable_tpoint_group", "trace_disable_tpoint_group"] {
        rows.push((method, json!({"name": "z"}), INVALID, None));
    }
    for method in ["trace_set_tpoint_mask", "trace_clear_tpoint_mask"] {
        rows.push((method, json!({"name": "z", "tpoint_mask": 1}), INVALID, None));
    }
    rows
}

async fn prepare(daemon: &Daemon) {
    for (method, params) in [
        ("framework_start_init", json!({})),
        ("bdev_null_create", json!({"name": "n", "block_size": 512, "num_blocks": 8})),
        ("bdev_null_create", json!({"name": "t", "block_size": 512, "num_blocks": 8})),
        ("bdev_null_create", json!({"name": "base", "block_size": 512, "num_blocks": 8})),
        ("bdev_passthru_create", json!({"name": "p", "base_bdev_name": "base"})),
        ("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "n"})),
        ("vhost_create_scsi_controller", json!({"ctrlr": "s"})),
        ("bdev_malloc_create", json!({"name": "m", "block_size": 512, "num_blocks": 8})),
        ("vhost_scsi_controller_add_target", json!({"ctrlr": "s", "scsi_target_num": 0, "bdev_name": "m"})),
    ] {
        daemon.call(method, &params).await.unwrap_or_else(|e| panic!("{method} {params}: {e}"));
    }
}

#[test]
fn other_errors() {
    in_daemon(async |daemon| {
        prepare(daemon).await;
        let mut wrong = Vec::new();
        let rows = [disks(), watches(), controllers(), others()].into_iter().flatten();
        for (method, params, code, text) in rows {
            match daemon.call(method, &params).await {
                Err(e) if i64::from(e.code()) == code && text.is_none_or(|text| e.message() == text) => {}
                Err(e) => wrong.push(format!("{method} {params}: {} {e}, not {code} {text:?}", e.code())),
                Ok(_) => wrong.push(format!("{method} {params} does not fail")),
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    });
}

#[test]
fn whole_numbers_may_have_fractions_and_exponents() {
    in_daemon(async |daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let disk = "{\"name\":\"2e3\",\"block_size\":5.12e2,\"num_blocks\":2.048e3}";
        assert_eq!(daemon.call_with("bdev_null_create", disk).await.unwrap(), "2e3");
        let made = daemon.call("bdev_get_bdevs", &json!({"name": "2e3"})).await.unwrap();
        assert_eq!((&made[0]["num_blocks"], &made[0]["block_size"]), (&json!(2048), &json!(512)));
        let half = "{\"name\":\"h\",\"block_size\":512,\"num_blocks\":0.5}";
        assert_eq!(daemon.call_with("bdev_null_create", half).await.unwrap_err().code(), -32603);
    });
}

/// SPDK's monitor decodes these strictly: unknown members and missing members make it fail.
#[test]
fn threads_and_reactors_have_spdk_s_members() {
    in_daemon(async |daemon| {
        daemon.call("framework_start_init", &json!({})).await.unwrap();
        let members = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        let reported = daemon.call("thread_get_stats", &json!({})).await.unwrap();
        let app = &reported["threads"][0];
        assert_eq!(app["name"], "app_thread");
        assert!(app["busy"].as_u64().unwrap() > 0, "{app}");
        let counts =
            ["active_pollers_count", "busy", "cpumask", "id", "idle", "name", "paused_pollers_count"];
        assert_eq!(members(app), [&counts[..], &["timed_pollers_count"]].concat());
        let reported = daemon.call("framework_get_reactors", &json!({})).await.unwrap();
        let reactor = &reported["reactors"][0];
        let counts =
            ["busy", "idle", "in_interrupt", "irq", "lcore", "lw_threads", "numa_id", "sys", "tid", "usr"];
        assert_eq!(members(reactor), counts);
        assert!(reactor["usr"].as_u64().unwrap() > 0, "the computer has used some time: {reactor}");
        assert_eq!(reactor["lw_threads"][0]["id"], app["id"]);
        assert_eq!(members(&reactor["lw_threads"][0]), ["cpumask", "elapsed", "id", "name"]);
    });
}
