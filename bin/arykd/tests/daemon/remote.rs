//! A disk of one daemon that another uses over NVMe/TCP: cut connections, dead targets, and restarts of both.

#![expect(clippy::disallowed_methods, reason = "the test waits for other processes")]

use super::front_end::FrontEnd;
use super::harness::{Daemon, code, wait_for};
use super::proxy::Proxy;
use aryk_reactor::CoreSet;
use aryk_rpc_client::Reply;
use base64::Engine as _;
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

pub const NQN: &str = "nqn.2016-06.io.spdk:remote";
const BLOCK: usize = 4096;
const BLOCKS: u64 = 32;

/// A port of 127.0.0.1 that was free.
pub fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A daemon that shares a disk, and one that uses it through a proxy.
pub struct Pair {
    pub target: Daemon,
    pub host: Daemon,
    pub proxy: Proxy,
    /// The port of the target's metrics.
    metrics: u16,
}

impl Pair {
    pub fn start() -> Self {
        Self::start_with(json!({}))
    }

    /// Starts both, the host with these `bdev_nvme_set_options`.
    pub fn start_with(options: Value) -> Self {
        let target = Daemon::start(&["--state-dir", "DIR/state", "--metrics", "0"]);
        // The only one on which it listens until it shares a disk.
        let metrics = target.port();
        let address = SocketAddr::from(([127, 0, 0, 1], port()));
        target
            .aryk(&["disk", "create", "data", "--file", "data.img", "--size", "1M", "--block-size", "4096"])
            .unwrap();
        target.aryk(&["share", "data", "--listen", &address.to_string(), "--nqn", NQN]).unwrap();
        let proxy = Proxy::start(address);
        let host = Daemon::start(&["--state-dir", "DIR/state", "--metrics", "0"]);
        host.call("bdev_nvme_set_options", options).unwrap();
        let through = proxy.address().to_string();
        host.aryk(&["disk", "create", "far", "--nvme-tcp", &through, "--subsystem", NQN]).unwrap();
        host.aryk(&["attach", "far"]).unwrap();
        Self { target, host, proxy, metrics }
    }

    fn front_end(&self) -> FrontEnd {
        let path = self.socket();
        wait_for("the controller", || FrontEnd::open(&path, false).is_ok());
        FrontEnd::connect(&path)
    }

    /// What the host knows of the controller.
    fn controller(&self) -> Value {
        controller(&self.host)
    }

    /// The socket of the disk's controller.
    pub fn socket(&self) -> PathBuf {
        self.host.dir().join("vhost/far")
    }
}

/// What a host knows of the controller `far`.
pub fn controller(host: &Daemon) -> Value {
    host.call("bdev_nvme_get_controllers", json!({"name": "far"})).unwrap()[0].take()
}

/// Times that a host has lost the controller `far`.
pub fn losses(host: &Daemon) -> u64 {
    controller(host)["remote"]["losses"].as_u64().unwrap()
}

fn block(lba: u64, round: u64) -> Vec<u8> {
    (0..BLOCK as u64).map(|at| (at ^ (lba * 31) ^ (round * 7)).wrapping_add(at >> 8) as u8).collect()
}

/// Writes each block once more, and then reads all.
fn verify(disk: &mut FrontEnd, round: u64) {
    for lba in 0..BLOCKS {
        assert_eq!(disk.write(lba * BLOCK as u64, &block(lba, round)), Ok(()), "block {lba}");
    }
    for lba in 0..BLOCKS {
        assert!(disk.read(lba * BLOCK as u64, BLOCK).unwrap() == block(lba, round), "block {lba}");
    }
}

#[test]
fn requests_survive_cut_connections() {
    let pair = Pair::start();
    let mut disk = pair.front_end();
    assert_eq!(disk.capacity(), 1 << 20);
    verify(&mut disk, 0);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(20));
                if pair.controller()["ctrlrs"][0]["state"] == "enabled" {
                    pair.proxy.cut();
                }
            }
        });
        for round in 1.. {
            verify(&mut disk, round);
            if losses(&pair.host) >= 8 {
                break;
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
    verify(&mut disk, 0);
    let controller = pair.controller();
    assert_eq!(
        (&controller["failed_by_reset"], &controller["remote"]["ends_earlier"]),
        (&json!(0), &json!(true))
    );
    assert_eq!(controller["trid"]["subnqn"], NQN);
    let shares: Value = serde_json::from_str(&pair.target.aryk(&["--json", "hosts"]).unwrap()).unwrap();
    let traffic = &shares[0]["controllers"][0]["traffic"];
    assert!(traffic["reads"].as_u64().unwrap() > 0 && traffic["writes"].as_u64().unwrap() > 0, "{traffic}");
    let metrics = crate::metrics::scrape(pair.metrics);
    let controller = shares[0]["controllers"][0]["cntlid"].to_string();
    let host = shares[0]["controllers"][0]["hostnqn"].as_str().unwrap();
    let labels = [("subsystem", NQN), ("host", host), ("controller", &controller), ("op", "read")];
    assert_eq!(metrics.value("aryk_host_bytes_total", &labels), traffic["read_bytes"].as_f64());
    let reads_ns = traffic["read_ns"].as_u64().unwrap();
    assert!(reads_ns > 0);
    assert_eq!(metrics.value("aryk_host_latency_seconds_sum", &labels), Some(reads_ns as f64 / 1e9));
    assert_eq!(metrics.value("aryk_host_latency_seconds_count", &labels), traffic["reads"].as_f64());
    let counts = pair.target.call("aryk_stats_get", json!({})).unwrap();
    let host = &counts["hosts"][0];
    let buckets = host["latency_buckets"].as_array().unwrap();
    let ops: u64 = buckets.iter().map(|bucket| bucket["ops"].as_u64().unwrap()).sum();
    let all = ["read_ops", "write_ops", "other_ops"].map(|kind| host[kind].as_u64().unwrap());
    assert_eq!(ops, all.iter().sum::<u64>(), "{host}");
    drop(disk);
    pair.host.aryk(&["detach", "far"]).unwrap();
    pair.host.aryk(&["disk", "remove", "far"]).unwrap();
    wait_for("the host to leave", || pair.target.aryk(&["hosts"]).unwrap().contains("none"));
}

#[test]
fn a_host_is_limited_also_after_a_restart() {
    let mut pair = Pair::start();
    let mut disk = pair.front_end();
    verify(&mut disk, 0);
    let shown = |pair: &Pair| -> Value {
        let hosts = pair.target.aryk(&["--json", "hosts"]).unwrap();
        let shares: Value = serde_json::from_str(&hosts).unwrap();
        shares[0].clone()
    };
    let host = shown(&pair)["controllers"][0]["hostnqn"].as_str().unwrap().to_owned();
    let limit = |pair: &Pair, limits: &[&str]| pair.target.aryk(&[&["qos", "host", "data"], limits].concat());
    limit(&pair, &["--iops", "1M"]).unwrap();
    let printed = limit(&pair, &["--host", &host, "--iops", "50", "--burst", "1s"]).unwrap();
    assert!(printed.contains(&host) && printed.contains("50 iops, burst 1s"), "{printed}");
    let of_host = |pair: &Pair| {
        let share = &shown(pair);
        share["controllers"][0]["assigned_rate_limits"]["rw_ios_per_sec"].clone()
    };
    assert_eq!(of_host(&pair), 50);
    let expected = shown(&pair)["host_limits"].clone();
    let rates = [0, 1].map(|at| expected[at]["assigned_rate_limits"]["rw_ios_per_sec"].as_u64().unwrap());
    assert_eq!((rates, &expected[1]["host"]), ([1_000_000, 50], &json!(host)));

    // The round has 64 requests, and the host has saved nothing up.
    let begun = std::time::Instant::now();
    verify(&mut disk, 1);
    assert!(begun.elapsed() > Duration::from_secs(1));
    pair.target.kill_and_restart();
    wait_for("the host to be back", || of_host(&pair) == 50);
    verify(&mut disk, 2);
    assert_eq!(shown(&pair)["host_limits"], expected);
    let trace = pair.target.aryk(&["trace", "--count", "200"]).unwrap();
    assert!(trace.contains("front-end") && trace.contains("queue 1"), "{trace}");

    limit(&pair, &["--host", &host, "--iops", "0", "--burst", "0"]).unwrap();
    assert_eq!(of_host(&pair), 1_000_000);
    limit(&pair, &["--iops", "0"]).unwrap();
    assert_eq!((of_host(&pair), shown(&pair)["host_limits"].clone()), (json!(0), json!(null)));
    let saved = pair.target.call("framework_get_config", json!({"name": "nvmf"})).unwrap().to_string();
    assert!(!saved.contains("set_host_limits"), "{saved}");
    let call = |params| pair.target.call("nvmf_subsystem_set_host_limits", params);
    assert_eq!(code(call(json!({"nqn": NQN}))), -22);
    assert_eq!(code(call(json!({"nqn": NQN, "rw_ios_per_sec": 2_000_000_000}))), -22);
    assert_eq!(code(call(json!({"nqn": NQN, "host": "nobody", "rw_ios_per_sec": 1}))), -22);
    assert_eq!(code(call(json!({"nqn": "nqn.2016-06.io.spdk:x", "rw_ios_per_sec": 1}))), -19);
    assert_eq!(code(call(json!({"nqn": NQN, "ios": 1}))), -32602);
}

#[test]
fn queues_of_hosts_leave_a_reactor_that_ends() {
    let pair = Pair::start();
    let mut disk = pair.front_end();
    verify(&mut disk, 1);
    let cores: Vec<u64> = CoreSet::allowed().iter().take(2).map(u64::from).collect();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut round = 2;
            while !is_over.load(Ordering::Relaxed) {
                verify(&mut disk, round);
                round += 1;
            }
            round
        });
        let mut reactors = pair.target.call("framework_get_reactors", json!({})).unwrap();
        let home = reactors["reactors"][0]["lcore"].take();
        let other = cores.iter().map(|core| json!(core)).find(|core| *core != home).unwrap();
        let go = |from, to| {
            pair.target.call("aryk_core_add", json!({"core": to}))?;
            pair.target.call("aryk_core_remove", json!({"core": from}))?;
            let qpairs = pair.target.call("nvmf_subsystem_get_qpairs", json!({"nqn": NQN}))?;
            let cores = qpairs.as_array().unwrap().iter().filter_map(|qpair| qpair.get("core").cloned());
            Reply::Ok(cores.collect())
        };
        let went = [(&home, &other), (&other, &home), (&home, &other)].map(|(from, to)| go(from, to));
        is_over.store(true, Ordering::Relaxed);
        assert!(load.join().unwrap() > 3);
        for (cores, to) in went.into_iter().zip([&other, &home, &other]) {
            let cores = cores.unwrap();
            let cores = cores.as_array().unwrap();
            assert!(!cores.is_empty() && cores.iter().all(|core| core == to), "{cores:?}, not {to}");
        }
    });
    assert_eq!(pair.controller()["remote"]["losses"], 0, "the host has noticed nothing");
    drop(disk);
}

#[test]
fn a_target_that_dies_is_awaited() {
    let mut pair = Pair::start();
    let mut disk = pair.front_end();
    verify(&mut disk, 1);
    pair.target.kill();
    wait_for("the loss", || {
        pair.host.call("bdev_get_bdevs", json!({"name": "far"})).unwrap()[0]["stalled"] == true
    });
    let writer = thread::spawn(move || {
        verify(&mut disk, 2);
        disk
    });
    pair.target.restart();
    let mut disk = writer.join().unwrap();
    verify(&mut disk, 3);
}

#[test]
fn the_disk_is_there_again_after_a_restart() {
    let mut pair = Pair::start();
    let mut disk = pair.front_end();
    verify(&mut disk, 1);
    drop(disk);
    pair.host.kill_and_restart();
    let mut disk = pair.front_end();
    assert!(disk.read(0, BLOCK).unwrap() == block(0, 1));
    drop(disk);
    // Without its target, the disk is absent, and comes back with it.
    pair.target.kill();
    pair.host.kill_and_restart();
    let absent = pair.host.call("aryk_absent_get", json!({})).unwrap();
    assert!(absent.to_string().contains("far"), "{absent}");
    pair.target.restart();
    wait_for("the disk", || pair.host.call("bdev_get_bdevs", json!({"name": "far"})).is_ok());
    let mut disk = pair.front_end();
    assert!(disk.read(0, BLOCK).unwrap() == block(0, 1));
}

#[test]
fn a_client_asks_a_target_and_disables_its_controller() {
    let pair = Pair::start();
    let far = || json!({"name": "far"});
    let health = pair.host.call("bdev_nvme_get_controller_health_info", far()).unwrap();
    assert_eq!(health["traddr"], "127.0.0.1");
    // Identify Controller, and Format NVM.
    let send = |opcode: u8| {
        let mut command = [0; 64];
        (command[0], command[40]) = (opcode, 1);
        let cmdbuf = base64::engine::general_purpose::URL_SAFE.encode(command);
        let of_kind = json!({"cmd_type": "admin", "data_direction": "c2h", "data_len": 4096});
        let mut params = json!({"name": "far", "cmdbuf": cmdbuf});
        params.as_object_mut().unwrap().extend(of_kind.as_object().unwrap().clone());
        pair.host.call("bdev_nvme_send_cmd", params)
    };
    assert!(send(6).unwrap()["data"].as_str().unwrap().len() > 4096);
    assert_eq!(super::code(send(0x80)), -1);
    let mut disk = pair.front_end();
    verify(&mut disk, 1);
    assert_eq!(super::code(pair.host.call("bdev_nvme_enable_controller", far())), -114);
    pair.host.call("bdev_nvme_disable_controller", far()).unwrap();
    assert_eq!(pair.controller()["ctrlrs"][0]["state"], "disabled");
    assert_eq!(super::code(pair.host.call("bdev_nvme_get_controller_health_info", far())), -11);
    pair.host.call("bdev_nvme_enable_controller", far()).unwrap();
    verify(&mut disk, 2);
}

/// Each path of the disk to these addresses has carried something, which a client and an operator can see.
fn check_traffic(host: &Daemon, addresses: &[SocketAddr]) {
    let traffic = host.call("bdev_nvme_get_path_iostat", json!({"name": "far"})).unwrap();
    for (path, address) in traffic["stats"].as_array().unwrap().iter().zip(addresses) {
        assert_eq!(path["trid"]["trsvcid"], address.port().to_string());
        assert!(path["stat"]["num_write_ops"].as_u64() > Some(0), "{traffic}");
    }
    let shown = host.aryk(&["disk", "show", "far"]).unwrap();
    assert_eq!(shown.matches("127.0.0.1, port ").count(), addresses.len(), "{shown}");
    assert_eq!(super::code(host.call("bdev_nvme_get_path_iostat", json!({"name": "near"}))), -19);
}

#[test]
fn a_disk_has_several_paths() {
    let mut target = Daemon::start(&["--state-dir", "DIR/state"]);
    let addresses = [(); 3].map(|()| SocketAddr::from(([127, 0, 0, 1], port())));
    let at = |address: SocketAddr| json!({"trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": address.port().to_string()});
    target
        .aryk(&["disk", "create", "data", "--file", "data.img", "--size", "1M", "--block-size", "4096"])
        .unwrap();
    let subsystem = json!({"nqn": NQN, "allow_any_host": true, "ana_reporting": true});
    target.call("nvmf_create_transport", json!({"trtype": "TCP"})).unwrap();
    target.call("nvmf_create_subsystem", subsystem).unwrap();
    target.call("nvmf_subsystem_add_ns", json!({"nqn": NQN, "namespace": {"bdev_name": "data"}})).unwrap();
    for address in addresses {
        target
            .call("nvmf_subsystem_add_listener", json!({"nqn": NQN, "listen_address": at(address)}))
            .unwrap();
    }
    let mut host = Daemon::start(&["--state-dir", "DIR/state"]);
    let [first, second, third] = addresses.map(|address| address.to_string());
    host.aryk(&["disk", "create", "far", "--nvme-tcp", &first, "--nvme-tcp", &second, "--subsystem", NQN])
        .unwrap();
    let mut path = at(addresses[2]);
    path.as_object_mut().unwrap().extend([("name".into(), json!("far")), ("subnqn".into(), json!(NQN))]);
    let mut refused = path.clone();
    refused["multipath"] = json!("disable");
    assert_eq!(super::code(host.call("bdev_nvme_attach_controller", refused)), -114);
    let added = host.call("bdev_nvme_attach_controller", path.clone()).unwrap();
    assert_eq!(added, json!(["far"]));
    assert_eq!(super::code(host.call("bdev_nvme_attach_controller", path)), -114, "{third}");
    let policy = json!({"name": "far", "policy": "active_active", "selector": "round_robin", "rr_min_io": 2});
    host.call("bdev_nvme_set_multipath_policy", policy).unwrap();
    host.aryk(&["attach", "far"]).unwrap();
    let current = |host: &Daemon| {
        let groups = host.call("bdev_nvme_get_io_paths", json!({"name": "far"})).unwrap();
        let paths = groups["poll_groups"][0]["io_paths"].as_array().cloned().unwrap_or_default();
        paths.iter().filter(|path| path["current"] == true).count()
    };
    let front_end = |host: &Daemon| {
        let path = host.dir().join("vhost/far");
        wait_for("the controller", || FrontEnd::open(&path, false).is_ok());
        FrontEnd::connect(&path)
    };
    let mut disk = front_end(&host);
    verify(&mut disk, 1);
    wait_for("all paths", || current(&host) == 3);
    verify(&mut disk, 5);
    check_traffic(&host, &addresses);
    // One path goes for maintenance, another one for ever.
    let state = json!({"nqn": NQN, "listen_address": at(addresses[0]), "ana_state": "inaccessible"});
    target.call("nvmf_subsystem_listener_set_ana_state", state).unwrap();
    wait_for("the state", || current(&host) == 2);
    let removed = json!({"name": "far", "traddr": "127.0.0.1", "trsvcid": addresses[1].port().to_string()});
    host.call("bdev_nvme_detach_controller", removed.clone()).unwrap();
    assert_eq!(super::code(host.call("bdev_nvme_detach_controller", removed)), -19);
    verify(&mut disk, 2);
    assert_eq!(current(&host), 1);
    drop(disk);
    // Without its first path, the disk is there again by another one, with its policy.
    target
        .call("nvmf_subsystem_remove_listener", json!({"nqn": NQN, "listen_address": at(addresses[0])}))
        .unwrap();
    host.kill_and_restart();
    let mut disk = front_end(&host);
    verify(&mut disk, 3);
    let controller = host.call("bdev_nvme_get_controllers", json!({"name": "far"})).unwrap()[0].take();
    let states: Vec<_> =
        controller["ctrlrs"].as_array().unwrap().iter().map(|path| path["state"].clone()).collect();
    assert_eq!(states, ["reconnect_is_delayed", "enabled"]);
    target
        .call("nvmf_subsystem_add_listener", json!({"nqn": NQN, "listen_address": at(addresses[0])}))
        .unwrap();
    wait_for("the first path", || current(&host) == 2);
    target.kill_and_restart();
    verify(&mut disk, 4);
}

#[test]
fn keys_are_used_again_after_a_restart() {
    const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:913fc008-79a7-447f-b2c4-c73543638c31";
    let (target, mut host) =
        (Daemon::start(&["--state-dir", "DIR/state"]), Daemon::start(&["--state-dir", "DIR/state"]));
    for daemon in [&target, &host] {
        let path = daemon.dir().join("key");
        let text = "DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:\n";
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .unwrap()
            .write_all(text.as_bytes())
            .unwrap();
        daemon.call("keyring_file_add_key", json!({"name": "k", "path": path})).unwrap();
    }
    let address = SocketAddr::from(([127, 0, 0, 1], port())).to_string();
    target.aryk(&["disk", "create", "data", "--memory", "--size", "1M"]).unwrap();
    target
        .aryk(&["share", "data", "--listen", &address, "--nqn", NQN, "--host", HOST, "--key", "k"])
        .unwrap();
    let create = ["disk", "create", "far", "--nvme-tcp", &address, "--subsystem", NQN, "--host-nqn", HOST];
    let (_, refused) = host.aryk(&create).unwrap_err();
    assert!(refused.contains("authentication"), "{refused}");
    host.aryk(&[&create[..], &["--key", "k"]].concat()).unwrap();
    host.kill_and_restart();
    wait_for("the disk", || host.call("bdev_get_bdevs", json!({"name": "far"})).is_ok());
}

#[test]
fn what_is_not_done_is_refused() {
    let daemon = Daemon::start(&[]);
    let attach = |extra: Value| {
        let mut params = json!({
            "name": "far", "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "1", "subnqn": NQN,
        });
        params.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        super::code(daemon.call("bdev_nvme_attach_controller", params))
    };
    for extra in [
        json!({"dhchap_ctrlr_key": "key"}),
        json!({"traddr": "host.example"}),
        json!({"adrfam": "IPv6"}),
        json!({"subnqn": "nonsense"}),
        json!({"hostid": "00000000-0000-0000-0000-000000000000"}),
        json!({"ctrlr_loss_timeout_sec": 1, "fast_io_fail_timeout_sec": 2}),
        json!({"trtype": "FC"}),
        json!({"trtype": "RDMA", "psk": "key"}),
        json!({"trtype": "RDMA", "hdgst": true}),
        json!({"trtype": "RDMA", "ddgst": true}),
    ] {
        assert_eq!(attach(extra.clone()), -22, "{extra}");
    }
    assert_eq!(attach(json!({})), -111, "no target listens there");
    assert_eq!(attach(json!({"trtype": "RDMA"})), -95, "this computer has no RDMA device");
}
