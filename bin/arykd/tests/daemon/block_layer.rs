//! Features of the block layer for all kinds of disks, over RPC.

use crate::front_end::FrontEnd;
use crate::harness::{Daemon, code};
use crate::moving::{core_of, put, threads};
use serde_json::json;
use std::time::{Duration, Instant};

fn null(daemon: &Daemon, name: &str, blocks: u64) {
    daemon.call("bdev_null_create", json!({"name": name, "block_size": 512, "num_blocks": blocks})).unwrap();
}

#[test]
fn split_disks() {
    let daemon = Daemon::start(&[]);
    null(&daemon, "n", 8192);
    let parts = daemon.call("bdev_split_create", json!({"base_bdev": "n", "split_count": 4})).unwrap();
    assert_eq!(parts, json!(["np0", "np1", "np2", "np3"]));
    let part = &daemon.call("bdev_get_bdevs", json!({"name": "np3"})).unwrap()[0];
    assert_eq!((&part["product_name"], &part["num_blocks"]), (&json!("Split Disk"), &json!(2048)));
    assert_eq!(part["driver_specific"], json!({"split": {"base_bdev": "n", "offset_blocks": 6144}}));
    let again = daemon.call("bdev_split_create", json!({"base_bdev": "n", "split_count": 1}));
    assert!(again.is_err(), "the disk is claimed");
    let saved = daemon.call("framework_get_config", json!({"name": "bdev"})).unwrap();
    let expected = json!({"base_bdev": "n", "split_count": 4, "split_size_mb": 0});
    assert_eq!(saved.as_array().unwrap().len(), 2);
    assert_eq!((&saved[0]["method"], &saved[0]["params"]), (&json!("bdev_split_create"), &expected));
    assert_eq!(daemon.call("bdev_split_delete", json!({"base_bdev": "n"})).unwrap(), json!(true));
    assert_eq!(code(daemon.call("bdev_split_delete", json!({"base_bdev": "n"}))), -32602);
    assert_eq!(
        daemon.call("framework_get_config", json!({"name": "bdev"})).unwrap().as_array().unwrap().len(),
        1
    );
    let sized = json!({"base_bdev": "n", "split_count": 9, "split_size_mb": 2});
    assert_eq!(daemon.call("bdev_split_create", sized).unwrap(), json!(["np0", "np1"]));
    daemon.call("bdev_split_delete", json!({"base_bdev": "n"})).unwrap();
    for (count, mb) in [(0, 0), (1, 100), (8193, 0)] {
        let wrong = json!({"base_bdev": "n", "split_count": count, "split_size_mb": mb});
        assert_eq!(code(daemon.call("bdev_split_create", wrong)), -32602);
    }
    let waits = daemon.call("bdev_split_create", json!({"base_bdev": "x", "split_count": 1}));
    assert_eq!(waits.unwrap(), json!([]), "they wait for the disk");
}

#[test]
fn sampling_histograms_and_deadlines() {
    let daemon = Daemon::start(&[]);
    null(&daemon, "n", 8192);
    let stat = || daemon.call("bdev_get_iostat", json!({"names": ["n"]})).unwrap()["bdevs"][0].clone();
    assert!(stat().get("queue_depth_polling_period").is_none());
    daemon.call("bdev_set_qd_sampling_period", json!({"name": "n", "period": 500})).unwrap();
    let now = stat();
    assert_eq!(
        [&now["queue_depth_polling_period"], &now["queue_depth"], &now["io_time"], &now["weighted_io_time"]],
        [&json!(500), &json!(0), &json!(0), &json!(0)]
    );
    daemon.call("bdev_set_qd_sampling_period", json!({"name": "n", "period": 0})).unwrap();
    assert!(stat().get("io_time").is_none());

    assert_eq!(code(daemon.call("bdev_get_histogram", json!({"name": "n"}))), -32603);
    let enable = |params: serde_json::Value| daemon.call("bdev_enable_histogram", params);
    enable(json!({"name": "n", "enable": true, "opc": "read", "granularity": 7, "min_nsec": 1000})).unwrap();
    let histogram = daemon.call("bdev_get_histogram", json!({"name": "n"})).unwrap();
    assert_eq!(
        [&histogram["granularity"], &histogram["min_range"], &histogram["max_range"], &histogram["tsc_rate"]],
        [&json!(3), &json!(7), &json!(34), &json!(1_000_000_000)]
    );
    // Eight buckets per octave, 8 bytes each, in base64: four characters per three bytes.
    assert_eq!(histogram["histogram"].as_str().unwrap().len(), (28_usize * 8 * 8).div_ceil(3) * 4);
    assert_eq!(code(enable(json!({"name": "n", "enable": true, "opc": "sing"}))), -32603);
    assert_eq!(code(enable(json!({"name": "n", "enable": true, "min_nsec": 9, "max_nsec": 9}))), -22);
    enable(json!({"name": "n", "enable": false})).unwrap();
    assert_eq!(code(daemon.call("bdev_get_histogram", json!({"name": "n"}))), -32603);

    let disk = || daemon.call("bdev_get_bdevs", json!({"name": "n"})).unwrap()[0].clone();
    assert_eq!(disk()["supported_io_types"]["compare_and_write"], true);
    let limit = json!({"name": "n", "timeout_ms": 1500, "action": "abort"});
    daemon.call("bdev_set_io_timeout", limit).unwrap();
    assert_eq!((&disk()["io_timeout_ms"], &disk()["io_timeout_action"]), (&json!(1500), &json!("abort")));
    let wrong = json!({"name": "n", "timeout_ms": 1500, "action": "hope"});
    assert_eq!(code(daemon.call("bdev_set_io_timeout", wrong)), -32602);
    daemon.call("bdev_set_io_timeout", json!({"name": "n", "timeout_ms": 0})).unwrap();
    assert!(disk().get("io_timeout_ms").is_none());
}

#[test]
fn sampling_many_disks_does_not_delay_the_end() {
    let daemon = Daemon::start(&[]);
    for i in 0..20 {
        null(&daemon, &format!("n{i}"), 8);
        daemon.call("bdev_set_qd_sampling_period", json!({"name": format!("n{i}"), "period": 20})).unwrap();
    }
    #[expect(clippy::disallowed_methods, reason = "the test has a time limit")]
    let start = Instant::now();
    daemon.call("bdev_null_delete", json!({"name": "n3"})).unwrap();
    daemon.end();
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn failed_requests_are_counted_as_in_spdk() {
    let daemon = Daemon::start(&[]);
    daemon.call("bdev_malloc_create", json!({"name": "m", "block_size": 512, "num_blocks": 2048})).unwrap();
    daemon.call("bdev_error_create", json!({"base_name": "m"})).unwrap();
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "EE_m"})).unwrap();
    let io_error = |reset: &str| {
        let params = json!({"name": "EE_m", "reset_mode": reset});
        daemon.call("bdev_get_iostat", params).unwrap()["bdevs"][0]["io_error"].clone()
    };
    assert_eq!(io_error("none"), json!({}));
    let mut disk = FrontEnd::connect(&daemon.dir().join("vhost/c"));
    daemon
        .call(
            "bdev_error_inject_error",
            json!({"name": "EE_m", "io_type": "write", "error_type": "failure", "num": 2}),
        )
        .unwrap();
    disk.write(0, &[1; 512]).unwrap_err();
    disk.write(0, &[1; 512]).unwrap_err();
    disk.write(0, &[1; 512]).unwrap();
    assert_eq!(io_error("error"), json!({"failed": 2}));
    assert_eq!(io_error("none"), json!({}));
}

#[test]
fn the_trace_has_a_request_at_its_queue_and_at_its_disk() {
    let daemon = Daemon::start(&["-m", "0x3"]);
    daemon.call("bdev_malloc_create", json!({"name": "m", "block_size": 512, "num_blocks": 2048})).unwrap();
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "c", "dev_name": "m"})).unwrap();
    let mut disk = FrontEnd::connect(&daemon.dir().join("vhost/c"));
    let id = threads(&daemon, "c.q0")[0];
    // Also after a move.
    for core in [core_of(&daemon, id), 1 - core_of(&daemon, id)] {
        put(&daemon, id, core).unwrap();
        disk.read(0, 512).unwrap();
        let trace = daemon.call("aryk_trace_get", json!({"count": 4})).unwrap();
        let records = trace["records"].as_array().unwrap();
        let seen: Vec<_> = records
            .iter()
            .map(|record| {
                assert_eq!(record["lcore"], core, "{trace}");
                (record["layer"].as_str().unwrap(), record["point"].as_str().unwrap())
            })
            .collect();
        for layer in ["front-end", "bdev"] {
            for point in ["submit", "complete"] {
                assert!(seen.contains(&(layer, point)), "{layer} {point}: {trace}");
            }
        }
        assert!(records.iter().any(|record| record["object"] == "c.q0"), "{trace}");
    }
}
