//! Programs that share disks by SPDK's calls: ceph-nvmeof's gateway, OPI's bridge and spdk-csi. Each test makes a program's
//! calls in its order, and a second daemon is the host.

use super::harness::{Daemon, code, wait_for};
use serde_json::{Value, json};
use std::net::TcpListener;

const NQN: &str = "nqn.2016-06.io.spdk:gateway";

fn port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string()
}

fn address(port: &str) -> Value {
    json!({"trtype": "TCP", "adrfam": "ipv4", "traddr": "127.0.0.1", "trsvcid": port})
}

/// A daemon that is the host of a subsystem.
struct Host {
    daemon: Daemon,
    nqn: String,
}

impl Host {
    fn new(nqn: &str) -> Self {
        Self { daemon: Daemon::start(&[]), nqn: nqn.to_owned() }
    }

    fn connect(&self, port: &str, hostnqn: &str) -> aryk_rpc_client::Reply {
        let mut params = json!({"name": "far", "subnqn": self.nqn, "hostnqn": hostnqn});
        params.as_object_mut().unwrap().extend(address(port).as_object().unwrap().clone());
        self.daemon.call("bdev_nvme_attach_controller", params)
    }

    /// The sizes of the disks that it sees, in bytes.
    fn sizes(&self) -> Vec<u64> {
        let disks = self.daemon.call("bdev_get_bdevs", json!({})).unwrap();
        let of = |disk: &Value| disk["num_blocks"].as_u64().unwrap() * disk["block_size"].as_u64().unwrap();
        disks.as_array().unwrap().iter().map(of).collect()
    }

    fn disconnect(&self) {
        self.daemon.call("bdev_nvme_detach_controller", json!({"name": "far"})).unwrap();
    }
}

/// The subsystem in the list of all.
fn listed(daemon: &Daemon, nqn: &str) -> Option<Value> {
    let all = daemon.call("nvmf_get_subsystems", json!({})).unwrap();
    all.as_array().unwrap().iter().find(|of| of["nqn"] == nqn).cloned()
}

/// The NQNs of the hosts that are connected.
fn hosts(daemon: &Daemon, nqn: &str) -> Vec<String> {
    let all = daemon.call("nvmf_subsystem_get_controllers", json!({"nqn": nqn})).unwrap();
    all.as_array().unwrap().iter().map(|host| host["hostnqn"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn the_calls_of_ceph_nvmeofs_gateway() {
    let gateway = Daemon::start(&[]);
    let call = |method: &str, params: Value| {
        gateway.call(method, params.clone()).unwrap_or_else(|error| panic!("{method} {params}: {error}"))
    };
    let (port, host) = (port(), "nqn.2014-08.org.nvmexpress:uuid:913fc008-79a7-447f-b2c4-c73543638c31");
    assert!(call("spdk_get_version", json!({}))["version"].is_string());
    call("log_set_print_level", json!({"level": "WARNING"}));
    call("nvmf_set_max_subsystems", json!({"max_subsystems": 128}));
    let transport = json!({"trtype": "TCP", "in_capsule_data_size": 8192, "max_io_qpairs_per_ctrlr": 7});
    call("nvmf_create_transport", transport);
    // A gateway has a range of controller identifiers of its own.
    let subsystem = json!({"nqn": NQN, "serial_number": "Ceph0001", "model_number": "Ceph bdev Controller",
        "max_namespaces": 256, "min_cntlid": 2041, "max_cntlid": 4080, "ana_reporting": true});
    assert_eq!(call("nvmf_create_subsystem", subsystem.clone()), true);
    assert_eq!(code(gateway.call("nvmf_create_subsystem", subsystem)), -32602);
    let uuid = "5f3a7c9e-1d2b-4c4d-8e6f-7a8b9c0d1e2f";
    let image = json!({"name": "bdev_1", "num_blocks": 4096, "block_size": 512, "uuid": uuid});
    assert_eq!(call("bdev_malloc_create", image), "bdev_1");
    let namespace =
        json!({"bdev_name": "bdev_1", "nsid": 1, "anagrpid": 2, "uuid": uuid, "no_auto_visible": true});
    assert_eq!(call("nvmf_subsystem_add_ns", json!({"nqn": NQN, "namespace": namespace})), 1);
    assert_eq!(call("nvmf_subsystem_add_host", json!({"nqn": NQN, "host": host})), true);
    assert_eq!(call("nvmf_ns_add_host", json!({"nqn": NQN, "nsid": 1, "host": host})), true);
    let listener = json!({"nqn": NQN, "listen_address": address(&port)});
    assert_eq!(call("nvmf_subsystem_add_listener", listener.clone()), true);
    // All groups are inaccessible until the gateway has their lead.
    for group in 1..=4 {
        let mut state = listener.clone();
        state["anagrpid"] = json!(group);
        state["ana_state"] = json!(if group == 2 { "optimized" } else { "inaccessible" });
        assert_eq!(call("nvmf_subsystem_listener_set_ana_state", state), true);
    }
    let listeners = call("nvmf_subsystem_get_listeners", json!({"nqn": NQN}));
    assert_eq!(listeners[0]["ana_states"], json!([{"ana_group": 2, "ana_state": "optimized"}]));
    let found = listed(&gateway, NQN).unwrap();
    assert_eq!(
        (&found["namespaces"][0]["bdev_name"], &found["namespaces"][0]["anagrpid"], &found["hosts"]),
        (&json!("bdev_1"), &json!(2), &json!([{"nqn": host}]))
    );

    let far = Host::new(NQN);
    assert!(
        far.connect(&port, "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000001").is_err()
    );
    far.connect(&port, host).unwrap();
    assert_eq!((far.sizes(), hosts(&gateway, NQN)), (vec![4096 * 512], vec![host.to_owned()]));
    let controllers = call("nvmf_subsystem_get_controllers", json!({"nqn": NQN}));
    assert!((2041..=4080).contains(&controllers[0]["cntlid"].as_u64().unwrap()), "{controllers}");
    let queues = call("nvmf_subsystem_get_qpairs", json!({"nqn": NQN}));
    assert_eq!(queues[0]["qid"], 0, "the admin queue: nothing has opened the disk there yet");
    assert!(call("nvmf_get_stats", json!({}))["poll_groups"].is_array());
    call("bdev_set_qos_limit", json!({"name": "bdev_1", "rw_ios_per_sec": 10_000, "rw_mbytes_per_sec": 0}));
    assert_eq!(call("bdev_get_iostat", json!({"name": "bdev_1"}))["bdevs"][0]["name"], "bdev_1");
    // Another gateway takes the lead of the group.
    let mut state = listener.clone();
    (state["anagrpid"], state["ana_state"]) = (json!(2), json!("inaccessible"));
    call("nvmf_subsystem_listener_set_ana_state", state);
    call("nvmf_subsystem_set_ns_ana_group", json!({"nqn": NQN, "nsid": 1, "anagrpid": 1}));
    assert_eq!(listed(&gateway, NQN).unwrap()["namespaces"][0]["anagrpid"], 1);

    assert_eq!(call("nvmf_ns_remove_host", json!({"nqn": NQN, "nsid": 1, "host": host})), true);
    wait_for("the namespace to be hidden", || far.sizes().is_empty());
    assert_eq!(call("nvmf_subsystem_remove_ns", json!({"nqn": NQN, "nsid": 1})), true);
    assert_eq!(call("bdev_malloc_delete", json!({"name": "bdev_1"})), true);
    assert_eq!(call("nvmf_subsystem_remove_host", json!({"nqn": NQN, "host": host})), true);
    assert_eq!(call("nvmf_subsystem_remove_listener", listener), true);
    assert_eq!(call("nvmf_delete_subsystem", json!({"nqn": NQN})), true);
    assert_eq!(listed(&gateway, NQN), None);
}

#[test]
fn the_calls_of_opis_bridge() {
    let bridge = Daemon::start(&[]);
    let call = |method: &str, params: Value| {
        bridge.call(method, params.clone()).unwrap_or_else(|error| panic!("{method} {params}: {error}"))
    };
    let port = port();
    assert!(call("spdk_get_version", json!({}))["fields"]["major"].is_u64());
    call("nvmf_create_transport", json!({"trtype": "TCP"}));
    // The backend: a disk, with a limit.
    let null = json!({"name": "volume", "num_blocks": 8192, "block_size": 512});
    assert_eq!(call("bdev_null_create", null), "volume");
    assert_eq!(call("bdev_get_bdevs", json!({"name": "volume"}))[0]["num_blocks"], 8192);
    call("bdev_set_qos_limit", json!({"name": "volume", "rw_ios_per_sec": 2000}));
    assert_eq!(call("bdev_get_iostat", json!({"name": "volume"}))["bdevs"][0]["name"], "volume");
    // The frontend: a subsystem, a controller, which is a listener, and a namespace.
    let subsystem = json!({"nqn": NQN, "serial_number": "OpiSerialNumber", "model_number": "OpiModelNumber",
        "allow_any_host": true, "max_namespaces": 10});
    assert_eq!(call("nvmf_create_subsystem", subsystem), true);
    let listener = json!({"nqn": NQN, "listen_address": address(&port)});
    assert_eq!(call("nvmf_subsystem_add_listener", listener.clone()), true);
    let namespace = json!({"nqn": NQN, "namespace": {"nsid": 7, "bdev_name": "volume"}});
    assert_eq!(call("nvmf_subsystem_add_ns", namespace), 7);
    let found = listed(&bridge, NQN).unwrap();
    assert_eq!(
        (&found["serial_number"], &found["model_number"], &found["namespaces"][0]["nsid"]),
        (&json!("OpiSerialNumber"), &json!("OpiModelNumber"), &json!(7))
    );

    // The bridge of another host uses it as a remote controller.
    let far = Host::new(NQN);
    let names =
        far.connect(&port, "nqn.2014-08.org.nvmexpress:uuid:feb98abe-d51f-40c8-b348-2753f3571d3c").unwrap();
    assert_eq!((names, far.sizes()), (json!(["farn7"]), vec![8192 * 512]));
    let controllers = far.daemon.call("bdev_nvme_get_controllers", json!({"name": "far"})).unwrap();
    assert_eq!(controllers[0]["name"], "far");
    far.disconnect();
    assert_eq!(code(far.daemon.call("bdev_nvme_get_controllers", json!({"name": "far"}))), -19);

    assert_eq!(call("nvmf_subsystem_remove_ns", json!({"nqn": NQN, "nsid": 7})), true);
    assert_eq!(call("nvmf_subsystem_remove_listener", listener), true);
    assert_eq!(call("nvmf_delete_subsystem", json!({"nqn": NQN})), true);
    assert_eq!(call("bdev_null_delete", json!({"name": "volume"})), true);
    assert_eq!(code(bridge.call("bdev_get_bdevs", json!({"name": "volume"}))), -19);
}

#[test]
fn the_calls_of_spdk_csi() {
    let node = Daemon::start(&["--state-dir", "DIR/state"]);
    let call = |method: &str, params: Value| {
        node.call(method, params.clone()).unwrap_or_else(|error| panic!("{method} {params}: {error}"))
    };
    let port = port();
    std::fs::File::create(node.dir().join("store.img")).unwrap().set_len(2 << 30).unwrap();
    let file = node.dir().join("store.img");
    call("bdev_aio_create", json!({"name": "store", "filename": file, "block_size": 4096}));
    call("bdev_lvol_create_lvstore", json!({"bdev_name": "store", "lvs_name": "lvs0"}));
    let stores = call("bdev_lvol_get_lvstores", json!({}));
    assert_eq!(stores[0]["name"], "lvs0");
    let free = stores[0]["free_clusters"].as_u64().unwrap() * stores[0]["cluster_size"].as_u64().unwrap();
    assert!(free > 64 << 20);
    // CreateVolume
    let volume = json!({"lvol_name": "pvc-1", "size_in_mib": 64, "lvs_name": "lvs0", "clear_method": "unmap",
        "thin_provision": true});
    let id = call("bdev_lvol_create", volume);
    let id = id.as_str().unwrap();
    // PublishVolume
    assert_eq!(call("bdev_get_bdevs", json!({"name": id}))[0]["name"], id);
    assert_eq!(call("nvmf_get_transports", json!({})), json!([]));
    call("nvmf_create_transport", json!({"trtype": "TCP"}));
    let nqn = format!("nqn.2020-04.io.spdk.csi:uuid:{id}");
    let subsystem =
        json!({"nqn": nqn, "allow_any_host": true, "serial_number": "spdkcsi-sn", "model_number": id});
    assert_eq!(call("nvmf_create_subsystem", subsystem), true);
    assert_eq!(call("nvmf_subsystem_add_ns", json!({"nqn": nqn, "namespace": {"bdev_name": id}})), 1);
    let listener = json!({"nqn": nqn, "listen_address": address(&port)});
    assert_eq!(call("nvmf_subsystem_add_listener", listener), true);

    let far = Host::new(&nqn);
    far.connect(&port, "nqn.2014-08.org.nvmexpress:uuid:913fc008-79a7-447f-b2c4-c73543638c31").unwrap();
    assert_eq!(far.sizes(), [64 << 20]);
    // CreateSnapshot, while the volume is used
    let snapshot = call("bdev_lvol_snapshot", json!({"lvol_name": id, "snapshot_name": "snap-1"}));
    far.disconnect();
    wait_for("the host to leave", || hosts(&node, &nqn).is_empty());
    // UnpublishVolume
    let found = listed(&node, &nqn).unwrap();
    let namespace = found["namespaces"].as_array().unwrap().iter().find(|of| of["name"] == id).unwrap();
    let remove = json!({"nqn": nqn, "nsid": namespace["nsid"]});
    assert_eq!(call("nvmf_subsystem_remove_ns", remove), true);
    assert_eq!(call("nvmf_delete_subsystem", json!({"nqn": nqn})), true);
    assert_eq!(code(node.call("nvmf_delete_subsystem", json!({"nqn": nqn}))), -32602);
    // DeleteVolume, DeleteSnapshot
    assert_eq!(call("bdev_lvol_delete", json!({"name": id})), true);
    assert_eq!(call("bdev_lvol_delete", json!({"name": snapshot})), true);
    assert_eq!(code(node.call("bdev_get_bdevs", json!({"name": id}))), -19);
}

#[test]
fn a_share_for_a_network_without_keys_is_logged() {
    let daemon = Daemon::start_logging(&[]);
    let warnings = || -> Vec<String> {
        let log = std::fs::read_to_string(daemon.dir().join("log")).unwrap();
        let is_meant = |line: &&str| line.contains("served to a network without authentication");
        log.lines().filter(is_meant).map(str::to_owned).collect()
    };
    daemon.call("nvmf_create_transport", json!({"trtype": "TCP"})).unwrap();
    let share = |nqn: &str| {
        daemon.call("nvmf_create_subsystem", json!({"nqn": nqn, "allow_any_host": true})).unwrap();
    };
    let listen = |nqn: &str, ip: &str, is_secure: bool| {
        let address = json!({"trtype": "TCP", "traddr": ip, "trsvcid": port()});
        let listener = json!({"nqn": nqn, "listen_address": address, "secure_channel": is_secure});
        daemon.call("nvmf_subsystem_add_listener", listener).unwrap();
    };
    let [near, closed, open] = ["near", "closed", "open"].map(|name| format!("nqn.2016-06.io.spdk:{name}"));
    share(&near);
    listen(&near, "127.0.0.1", false);
    share(&closed);
    listen(&closed, "0.0.0.0", true);
    share(&open);
    listen(&open, "0.0.0.0", false);
    // The log has the lines in their order: one about another share would come before.
    wait_for("the warning", || !warnings().is_empty());
    let warnings = warnings();
    assert!(
        warnings.len() == 1 && warnings[0].contains("WARN") && warnings[0].contains(&open),
        "{warnings:?}"
    );
}
