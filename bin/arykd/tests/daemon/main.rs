//! Tests of the real `arykd` over its socket, and with the real `aryk`.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod abuse;
mod access;
mod block_layer;
mod browser;
mod churn;
mod claims;
mod cores;
mod cuts;
mod dashboard;
mod discovery;
mod front_end;
mod gateways;
mod harness;
mod keys;
mod links;
mod log;
mod luks;
mod mdns;
mod metrics;
mod moving;
mod network;
mod notify;
mod nvme;
mod nvme_commands;
mod nvme_observed;
mod open_metrics;
mod proxy;
mod qos;
mod rbd;
mod rbd_scale;
mod rekey;
mod remote;
mod reservations;
mod sandbox;
mod scheduling;
mod secrets;
mod shards;
mod sleep;
mod spdk;
mod state;
mod stuck;
mod supervise;
mod tls;
mod unit;
mod verified;
mod vm;
mod volumes;
mod web;

use front_end::FrontEnd;
use harness::{Daemon, code};
use serde_json::{Value, json};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::time::Duration;

#[test]
fn it_starts_and_ends() {
    let daemon = Daemon::start(&[]);
    let version = daemon.call("spdk_get_version", json!({})).unwrap();
    assert!(version["version"].as_str().unwrap().starts_with("Aryk v"));
    assert_eq!(version["fields"]["major"], 0);
    let printed = daemon.end();
    assert!(printed.contains("is ready"), "{printed}");
    assert!(printed.lines().all(|line| line.chars().count() <= 80), "{printed}");
}

#[test]
fn every_policy_on_every_engine() {
    for policy in ["poll", "adaptive", "interrupt"] {
        for engine in ["auto", "epoll"] {
            let daemon = Daemon::start(&["--sleep-policy", policy, "--io-engine", engine]);
            daemon.aryk(&["disk", "create", "d", "--file", "d.img", "--size", "1M"]).unwrap();
            daemon.aryk(&["attach", "d"]).unwrap();
            assert!(daemon.aryk(&["status"]).unwrap().contains("1, 0 connected"));
            std::fs::remove_file(daemon.dir().join("d.img")).unwrap();
            let printed = daemon.end();
            assert_eq!(printed.contains("epoll"), engine == "epoll", "{printed}");
        }
    }
}

#[test]
fn a_second_daemon_is_refused() {
    let daemon = Daemon::start(&[]);
    let second = daemon.run_another();
    assert!(!second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("another daemon serves"), "{second:?}");
    daemon.call("spdk_get_version", json!({})).unwrap();
}

#[test]
fn a_killed_daemon_has_a_successor() {
    let mut daemon = Daemon::start(&[]);
    daemon.call("bdev_null_create", json!({"name": "n", "block_size": 512, "num_blocks": 8})).unwrap();
    daemon.kill_and_restart();
    assert_eq!(daemon.call("bdev_get_bdevs", json!({})).unwrap(), json!([]));
}

#[test]
fn start_up_waits_with_wait_for_rpc() {
    let daemon = Daemon::start(&["--wait-for-rpc"]);
    assert_eq!(code(daemon.call("bdev_get_bdevs", json!({}))), -1);
    let current = daemon.call("rpc_get_methods", json!({"current": true})).unwrap();
    assert!(!current.as_array().unwrap().contains(&json!("bdev_get_bdevs")));
    assert_eq!(daemon.call("framework_start_init", json!({})).unwrap(), json!(true));
    assert_eq!(daemon.call("framework_wait_init", json!({})).unwrap(), json!(true));
    assert_eq!(daemon.call("bdev_get_bdevs", json!({})).unwrap(), json!([]));
    assert_eq!(code(daemon.call("framework_start_init", json!({}))), -1);
}

#[test]
fn disks_come_and_go() {
    let daemon = Daemon::start(&[]);
    let null = json!({"name": "диск", "block_size": 512, "num_blocks": 2048, "uuid": "2b6601ba-eada-44fb-9a83-a20eb9eb9e90"});
    assert_eq!(daemon.call("bdev_null_create", null.clone()).unwrap(), "диск");
    assert_eq!(code(daemon.call("bdev_null_create", null)), -17);
    let malloc = json!({"block_size": 4096, "num_blocks": "16", "optimal_io_boundary": 8});
    assert_eq!(daemon.call("bdev_malloc_create", malloc.clone()).unwrap(), "Malloc0");
    assert_eq!(daemon.call("bdev_malloc_create", malloc).unwrap(), "Malloc1");
    let passthru = json!({"name": "p", "base_bdev_name": "2B6601BA-EADA-44FB-9A83-A20EB9EB9E90"});
    assert_eq!(daemon.call("bdev_passthru_create", passthru).unwrap(), "p");
    let all = daemon.call("bdev_get_bdevs", json!(null)).unwrap();
    let names: Vec<_> = all.as_array().unwrap().iter().map(|b| b["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["диск", "Malloc0", "Malloc1", "p"]);
    assert_eq!((&all[0]["claimed"], &all[1]["claimed"]), (&json!(true), &json!(false)));
    assert_eq!(all[1]["supported_io_types"]["unmap"], true);
    daemon.call("bdev_null_resize", json!({"name": "диск", "new_size": 2})).unwrap();
    assert_eq!(daemon.call("bdev_get_bdevs", json!({"name": "p"})).unwrap()[0]["num_blocks"], 4096);
    assert_eq!(code(daemon.call("bdev_malloc_delete", json!({"name": "p"}))), -19);
    daemon.call("bdev_null_delete", json!({"name": "диск"})).unwrap();
    assert_eq!(code(daemon.call("bdev_get_bdevs", json!({"name": "p"}))), -19);
    assert_eq!(daemon.call("bdev_get_bdevs", json!({})).unwrap().as_array().unwrap().len(), 2);
}

#[test]
fn disks_that_delay_and_fail() {
    let daemon = Daemon::start(&[]);
    daemon.call("bdev_null_create", json!({"name": "n", "block_size": 512, "num_blocks": 8})).unwrap();
    let delay = json!({"name": "d", "base_bdev_name": "n", "avg_read_latency": "15", "p99_read_latency": 50,
        "avg_write_latency": 40, "p99_write_latency": "110"});
    assert_eq!(daemon.call("bdev_delay_create", delay).unwrap(), "d");
    let update = json!({"delay_bdev_name": "d", "latency_type": "avg_read", "latency_us": "100"});
    assert_eq!(daemon.call("bdev_delay_update_latency", update).unwrap(), json!(true));
    let described = &daemon.call("bdev_get_bdevs", json!({"name": "d"})).unwrap()[0];
    assert_eq!(described["driver_specific"]["delay"]["avg_read_latency"], 100);
    let saved = &daemon.call("framework_get_config", json!({"name": "bdev"})).unwrap()[0];
    assert_eq!(
        (&saved["method"], &saved["params"]["avg_read_latency"]),
        (&json!("bdev_delay_create"), &json!(100))
    );
    assert_eq!(daemon.call("bdev_error_create", json!({"base_name": "d"})).unwrap(), json!(true));
    let inject = |io_type: &str, error_type: &str| {
        daemon.call(
            "bdev_error_inject_error",
            json!({"name": "EE_d", "io_type": io_type, "error_type": error_type, "num": 1}),
        )
    };
    assert_eq!(inject("write", "pending").unwrap(), json!(true));
    assert_eq!(inject("clear", "failure").unwrap(), json!(true));
    assert_eq!(code(inject("write", "corrupt_data")), -22);
    assert_eq!(code(inject("write", "explosion")), -32603);
    daemon.call("bdev_error_delete", json!({"name": "EE_d"})).unwrap();
    daemon.call("bdev_delay_delete", json!({"name": "d"})).unwrap();
    assert_eq!(
        code(daemon.call(
            "bdev_delay_update_latency",
            json!({"delay_bdev_name": "n", "latency_type": "avg_read", "latency_us": 1})
        )),
        -32600
    );
}

#[test]
fn wrong_parameters_have_different_codes() {
    let daemon = Daemon::start(&[]);
    for params in [
        json!({"name": "n", "block_size": 512}),
        json!({"name": "n", "block_size": 512, "num_blocks": 1, "colour": "red"}),
        json!({"name": "n", "block_size": "big", "num_blocks": 1}),
        json!({"name": "n", "block_size": 512, "num_blocks": 1, "uuid": "x"}),
    ] {
        assert_eq!(code(daemon.call("bdev_null_create", params.clone())), -32603, "{params}");
    }
    for params in [
        json!({"name": "", "block_size": 512, "num_blocks": 1}),
        json!({"name": "n", "block_size": 500, "num_blocks": 1}),
        json!({"name": "n", "block_size": 512, "num_blocks": 0}),
        json!({"name": "n", "block_size": 512, "num_blocks": 1, "md_size": 8}),
        json!({"name": "n", "block_size": 4096, "num_blocks": 1, "physical_block_size": 512}),
    ] {
        assert_eq!(code(daemon.call("bdev_null_create", params.clone())), -22, "{params}");
    }
    let huge = json!({"name": "m", "block_size": 4096, "num_blocks": u64::MAX});
    assert_eq!(code(daemon.call("bdev_malloc_create", huge)), -12);
}

#[test]
fn get_bdevs_waits_for_a_disk() {
    let daemon = Daemon::start(&[]);
    assert_eq!(code(daemon.call("bdev_get_bdevs", json!({"name": "n", "timeout": 50}))), -110);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| daemon.call("bdev_get_bdevs", json!({"name": "n", "timeout": 20_000})));
        daemon.call("bdev_null_create", json!({"name": "n", "block_size": 512, "num_blocks": 8})).unwrap();
        assert_eq!(waiting.join().unwrap().unwrap()[0]["num_blocks"], 8);
    });
}

#[test]
fn the_configuration_is_the_calls_that_made_it() {
    let daemon = Daemon::start(&[]);
    daemon.call("bdev_malloc_create", json!({"block_size": 512, "num_blocks": 64})).unwrap();
    daemon.call("bdev_passthru_create", json!({"name": "p", "base_bdev_name": "Malloc0"})).unwrap();
    let saved = daemon.call("save_config", json!({})).unwrap();
    let config = saved["subsystems"][0]["config"].as_array().unwrap().clone();
    assert_eq!((&saved["subsystems"][0]["subsystem"], config.len()), (&json!("bdev"), 2));
    let before = daemon.call("bdev_get_bdevs", json!({})).unwrap();
    daemon.call("bdev_malloc_delete", json!({"name": "Malloc0"})).unwrap();
    assert_eq!(daemon.call("framework_get_config", json!({"name": "bdev"})).unwrap(), json!([]));
    for call in config {
        daemon.call(call["method"].as_str().unwrap(), call["params"].clone()).unwrap();
    }
    assert_eq!(daemon.call("bdev_get_bdevs", json!({})).unwrap(), before);
    daemon.call("bdev_malloc_delete", json!({"name": "Malloc0"})).unwrap();
    assert_eq!(daemon.call("load_config", saved.clone()).unwrap(), json!(true));
    assert_eq!(daemon.call("bdev_get_bdevs", json!({})).unwrap(), before);
    let again = daemon.call("load_config", saved).unwrap_err();
    assert_eq!((&again["code"], &again["message"]), (&json!(-17), &json!("File exists")));
    assert!(
        again["data"].as_str().unwrap().starts_with("bdev_passthru_create of subsystem 'bdev'"),
        "{again}"
    );
    let unknown = json!({"subsystems": [{"subsystem": "scsi", "config": null}, {"subsystem": "x", "config": [{"method": "y"}]}]});
    assert_eq!(code(daemon.call("load_config", unknown)), -32602);
}

#[test]
fn statistics_of_idle_disks_are_zeroes() {
    let daemon = Daemon::start(&[]);
    daemon.call("bdev_null_create", json!({"name": "n", "block_size": 512, "num_blocks": 8})).unwrap();
    let stat = daemon.call("bdev_get_iostat", json!({"names": ["n"], "per_channel": false})).unwrap();
    assert_eq!(stat["tick_rate"], 1_000_000_000);
    assert_eq!((&stat["bdevs"][0]["name"], &stat["bdevs"][0]["num_read_ops"]), (&json!("n"), &json!(0)));
    assert_eq!(code(daemon.call("bdev_get_iostat", json!({"names": ["x"]}))), -19);
    daemon.call("bdev_reset_iostat", json!({})).unwrap();
    daemon.call("bdev_reset", json!({"name": "n"})).unwrap();
}

#[test]
fn the_log_level_is_set() {
    let daemon = Daemon::start(&["-L", "warning"]);
    assert_eq!(daemon.call("log_get_print_level", json!({})).unwrap(), "WARNING");
    daemon.call("log_set_print_level", json!({"level": "DEBUG"})).unwrap();
    assert_eq!(daemon.call("log_get_print_level", json!({})).unwrap(), "DEBUG");
    assert_eq!(code(daemon.call("log_set_print_level", json!({"level": "LOUD"}))), -32602);
}

#[test]
fn the_command_line_in_json() {
    let daemon = Daemon::start(&[]);
    let json = |args: &[&str]| -> Value { serde_json::from_str(&daemon.aryk(args).unwrap()).unwrap() };
    let made = json(&["--json", "disk", "create", "m", "--memory", "--size", "1M"]);
    assert_eq!((&made["num_blocks"], &made["product_name"]), (&json!(2048), &json!("Malloc disk")));
    assert_eq!(json(&["disk", "list", "--json"])[0]["name"], "m");
    assert_eq!(json(&["disk", "stat", "m", "--json"])["bdevs"][0]["name"], "m");
    let status = json(&["status", "--json"]);
    assert_eq!((&status["disks"], &status["controllers"]), (&json!(1), &json!(0)));
    assert_eq!(json(&["reactor", "list", "--json"])["reactors"].as_array().unwrap().len(), 1);
    assert_eq!(json(&["rpc", "bdev_get_bdevs", r#"{"name":"m"}"#])[0]["name"], "m");
}

#[test]
fn the_command_line_for_people() {
    let daemon = Daemon::start(&[]);
    daemon.aryk(&["disk", "create", "磁盘", "--null", "--size", "20G"]).unwrap();
    let list = daemon.aryk(&["disk", "list"]).unwrap();
    assert!(list.contains("磁盘") && list.contains("null") && list.contains("20G"), "{list}");
    for args in [&["status"][..], &["disk", "show", "磁盘"], &["disk", "stat"], &["reactor", "list"]] {
        let text = daemon.aryk(args).unwrap();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }
    assert!(daemon.aryk(&["disk", "remove", "磁盘"]).unwrap().contains("is removed"));
    assert!(daemon.aryk(&["disk", "list"]).unwrap().contains("There are no disks"));
    assert!(daemon.aryk(&["completions", "bash"]).unwrap().contains("complete"));
}

#[test]
fn exit_codes() {
    let daemon = Daemon::start(&[]);
    let refused = daemon.aryk(&["disk", "show", "nothing"]).unwrap_err();
    assert_eq!(refused.0, 1);
    assert!(refused.1.contains("No such device") && refused.1.contains("aryk disk list"), "{}", refused.1);
    assert_eq!(daemon.aryk(&["disk", "create", "x"]).unwrap_err().0, 2);
    assert_eq!(daemon.aryk(&["rpc", "spdk_get_version", "{"]).unwrap_err().0, 2);
    let missing = daemon.aryk(&["-s", "/nonexistent/sock", "status"]).unwrap_err();
    assert_eq!(missing.0, 3);
    assert!(missing.1.contains("Start one with 'arykd'"), "{}", missing.1);
}

#[test]
fn a_first_disk_in_two_commands() {
    let daemon = Daemon::start(&[]);
    let made = daemon.aryk(&["disk", "create", "vm1", "--file", "vm1.img", "--size", "20G"]).unwrap();
    assert!(made.contains("20G") && made.contains("aryk attach vm1"), "{made}");
    let file = daemon.dir().join("vm1.img").metadata().unwrap();
    assert_eq!(file.len(), 20 << 30);
    assert!(file.blocks() < 1 << 12, "the file is sparse");
    let attached = daemon.aryk(&["attach", "vm1"]).unwrap();
    let socket = daemon.dir().join("vhost/vm1");
    assert!(attached.contains(&format!("path={}", socket.display())), "{attached}");
    assert!(attached.contains("share=on"), "{attached}");
    assert!(socket.metadata().unwrap().file_type().is_socket());
    let list = daemon.aryk(&["controller", "list"]).unwrap();
    assert!(list.contains("vm1") && list.contains("waiting"), "{list}");
    assert!(daemon.aryk(&["detach", "vm1"]).unwrap().contains("is removed"));
    assert!(!socket.exists());
    assert_eq!(daemon.aryk(&["detach", "vm1"]).unwrap_err().0, 1);
    daemon.aryk(&["disk", "remove", "vm1"]).unwrap();
    assert_eq!(daemon.dir().join("vm1.img").metadata().unwrap().len(), 20 << 30);
}

#[test]
fn files_that_cannot_be_disks() {
    let daemon = Daemon::start(&[]);
    let path = |name: &str| daemon.dir().join(name).to_str().unwrap().to_owned();
    let create = |name: &str, file: String| {
        daemon.call("bdev_aio_create", json!({"name": name, "filename": file, "block_size": 512}))
    };
    std::fs::write(path("file"), [7; 8192]).unwrap();
    assert_eq!(code(create("d", path("nothing"))), -2);
    assert_eq!(code(create("d", path("."))), -21);
    assert_eq!(create("d", path("file")).unwrap(), "d");
    assert_eq!(code(create("d", path("file"))), -17);
    assert_eq!(code(create("e", path("file"))), -16);
    let disk = &daemon.call("bdev_get_bdevs", json!({"name": "d"})).unwrap()[0];
    assert_eq!(
        (&disk["num_blocks"], &disk["driver_specific"]["aio"]["filename"]),
        (&json!(16), &json!(path("file")))
    );
    std::fs::File::options().write(true).open(path("file")).unwrap().set_len(16384).unwrap();
    daemon.call("bdev_aio_rescan", json!({"name": "d"})).unwrap();
    assert_eq!(daemon.call("bdev_get_bdevs", json!({"name": "d"})).unwrap()[0]["num_blocks"], 32);
    daemon.aryk(&["disk", "resize", "d", "1M"]).unwrap();
    assert_eq!(daemon.call("bdev_get_bdevs", json!({"name": "d"})).unwrap()[0]["num_blocks"], 2048);
    assert_eq!(daemon.aryk(&["disk", "resize", "d", "4K"]).unwrap_err().0, 1);
    daemon.call("bdev_aio_delete", json!({"name": "d"})).unwrap();
    let other = json!({"name": "new", "filename": path("new"), "size": "1048576", "enospc": "hold", "readonly": false});
    daemon.call("bdev_uring_create", other).unwrap();
    daemon.call("bdev_uring_delete", json!({"name": "new"})).unwrap();
}

#[test]
fn controllers_come_and_go() {
    let daemon = Daemon::start(&[]);
    daemon.call("bdev_null_create", json!({"name": "n", "block_size": 512, "num_blocks": 8})).unwrap();
    let create = |params: Value| daemon.call("vhost_create_blk_controller", params);
    let whole = json!({"ctrlr": "диск 1", "dev_name": "n", "readonly": true, "cpumask": "[0]", "transport": "vhost_user_blk",
        "packed_ring": false, "num_queues": 2, "socket_mode": "620", "socket_owner": "0", "socket_group": "0"});
    assert_eq!(create(whole.clone()).unwrap(), json!(true));
    assert_eq!(create(whole).unwrap_err()["message"], "File exists");
    let missing = create(json!({"ctrlr": "c", "dev_name": "x"})).unwrap_err();
    assert_eq!((&missing["code"], &missing["message"]), (&json!(-32602), &json!("No such device")));
    for wrong in [
        json!({"ctrlr": "../c", "dev_name": "n"}),
        json!({"ctrlr": "", "dev_name": "n"}),
        json!({"ctrlr": "c", "dev_name": "n", "num_queues": 0}),
        json!({"ctrlr": "c", "dev_name": "n", "cpumask": "0x8000"}),
        json!({"ctrlr": "c", "dev_name": "n", "transport": "vfio_user_blk"}),
    ] {
        assert_eq!(create(wrong.clone()).unwrap_err()["message"], "Invalid argument", "{wrong}");
    }
    assert_eq!(code(create(json!({"ctrlr": "c", "dev_name": "n", "cpumask": "all"}))), -32602);
    let controller = &daemon.call("vhost_get_controllers", json!({"name": "диск 1"})).unwrap()[0];
    assert_eq!(
        controller["backend_specific"]["block"],
        json!({"readonly": true, "bdev": "n", "transport": "vhost_user_blk"})
    );
    assert_eq!((&controller["cpumask"], &controller["sessions"]), (&json!("0x1"), &json!([])));
    let mode = daemon.dir().join("vhost/диск 1").metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o620);
    let saved = daemon.call("framework_get_config", json!({"name": "vhost_blk"})).unwrap();
    assert_eq!(
        (&saved[0]["params"]["socket_mode"], &saved[0]["params"]["cpumask"]),
        (&json!("620"), &json!("0x1"))
    );
    daemon.call("bdev_null_delete", json!({"name": "n"})).unwrap();
    let orphan = &daemon.call("vhost_get_controllers", json!({})).unwrap()[0];
    assert_eq!(orphan["backend_specific"]["block"]["bdev"], Value::Null);
    daemon.call("vhost_delete_controller", json!({"ctrlr": "диск 1"})).unwrap();
    assert_eq!(code(daemon.call("vhost_delete_controller", json!({"ctrlr": "диск 1"}))), -32602);
    daemon.end();
}

#[test]
fn data_outlives_sessions_controllers_and_daemons() {
    let mut daemon = Daemon::start(&["-m", "0x3"]);
    let socket = daemon.dir().join("vhost/d");
    let data: Vec<u8> = (0..65_536_u32).map(|i| (i / 7) as u8).collect();
    daemon.aryk(&["disk", "create", "d", "--file", "d.img", "--size", "4M"]).unwrap();
    daemon.aryk(&["attach", "d"]).unwrap();
    // The disk was searched for a pool.
    daemon.call("bdev_reset_iostat", json!({"name": "d"})).unwrap();
    let mut vm = FrontEnd::connect(&socket);
    assert_eq!(vm.capacity(), 4 << 20);
    vm.write(512 * 3, &data).unwrap();
    vm.flush().unwrap();
    let list = daemon.aryk(&["controller", "list"]).unwrap();
    assert!(list.contains("connected"), "{list}");
    drop(vm);
    assert_eq!(FrontEnd::connect(&socket).read(512 * 3, data.len()).unwrap(), data);
    let stat = &daemon.call("bdev_get_iostat", json!({"names": ["d"]})).unwrap()["bdevs"][0];
    assert_eq!((&stat["num_write_ops"], &stat["bytes_written"]), (&json!(1), &json!(65_536)));
    assert_eq!((&stat["num_read_ops"], &stat["num_flush_ops"]), (&json!(1), &json!(1)));
    assert!(stat["read_latency_ticks"].as_u64().unwrap() > 0);
    daemon.kill_and_restart();
    daemon.aryk(&["disk", "create", "d", "--file", "d.img"]).unwrap();
    daemon.aryk(&["attach", "d", "--readonly", "--cpumask", "[1]", "--queues", "1"]).unwrap();
    assert!(FrontEnd::open(&socket, false).is_err(), "it is read-only");
    let mut vm = FrontEnd::open(&socket, true).unwrap();
    assert_eq!(vm.read(512 * 3, data.len()).unwrap(), data);
    let controller = &daemon.call("vhost_get_controllers", json!({})).unwrap()[0];
    assert_eq!(controller["sessions"][0]["queues"], json!([{"index": 0, "lcore": 1}]));
}

#[test]
fn a_disk_fails_and_is_deleted_under_its_vm() {
    let daemon = Daemon::start(&[]);
    let socket = daemon.dir().join("vhost/EE_d");
    daemon.aryk(&["disk", "create", "d", "--memory", "--size", "1M"]).unwrap();
    daemon.call("bdev_error_create", json!({"base_name": "d"})).unwrap();
    daemon.aryk(&["attach", "EE_d"]).unwrap();
    let mut vm = FrontEnd::connect(&socket);
    vm.write(0, &[7; 4096]).unwrap();
    let fail = json!({"name": "EE_d", "io_type": "read", "error_type": "failure", "num": 1});
    daemon.call("bdev_error_inject_error", fail).unwrap();
    vm.read(0, 4096).unwrap_err();
    assert_eq!(vm.read(0, 4096).unwrap(), [7; 4096]);
    daemon.call("bdev_malloc_delete", json!({"name": "d"})).unwrap();
    vm.read(0, 4096).unwrap_err();
    vm.write(0, &[7; 4096]).unwrap_err();
    assert_eq!(daemon.call("bdev_get_bdevs", json!({})).unwrap(), json!([]));
    daemon.aryk(&["detach", "EE_d"]).unwrap();
    daemon.end();
}

#[test]
fn a_disk_that_never_completes_delays_the_end_until_a_second_signal() {
    let mut daemon = Daemon::start(&[]);
    daemon.aryk(&["disk", "create", "d", "--null", "--size", "1M"]).unwrap();
    daemon.call("bdev_error_create", json!({"base_name": "d"})).unwrap();
    daemon.aryk(&["attach", "EE_d"]).unwrap();
    let mut vm = FrontEnd::connect(&daemon.dir().join("vhost/EE_d"));
    let hold = json!({"name": "EE_d", "io_type": "read", "error_type": "pending", "num": 1});
    daemon.call("bdev_error_inject_error", hold).unwrap();
    vm.start_read(0, 4096);
    daemon.wait_until_busy("EE_d");
    assert_eq!(daemon.signal_and_wait("TERM", Duration::from_secs(1)), None, "it drains first");
    assert_eq!(daemon.signal_and_wait("TERM", Duration::from_secs(10)), Some(3), "the second signal ends it");
}
