//! A daemon that follows the discovery service of another.

use super::harness::{Daemon, code, wait_for};
use serde_json::{Value, json};
use std::net::TcpListener;

/// A daemon that shares disks at a port of its own.
struct Target {
    daemon: Daemon,
    port: String,
}

impl Target {
    fn start() -> Self {
        Self { daemon: Daemon::start(&["--state-dir", "DIR/state"]), port: Self::free_port() }
    }

    /// A port that no connection takes as its own meanwhile: the kernel chooses these from 32768 on.
    fn free_port() -> String {
        let mut ports = std::iter::repeat_with(|| fastrand::u16(20_000..32_000));
        let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
        ports.find(is_free).unwrap().to_string()
    }

    fn share(&self, disk: &str) {
        let listen = format!("127.0.0.1:{}", self.port);
        self.daemon.aryk(&["disk", "create", disk, "--memory", "--size", "1M"]).unwrap();
        self.daemon.aryk(&["share", disk, "--listen", &listen, "--nqn", &nqn(disk)]).unwrap();
    }

    fn unshare(&self, disk: &str) {
        self.daemon.call("nvmf_delete_subsystem", json!({"nqn": nqn(disk)})).unwrap();
    }

    fn address(&self) -> Value {
        json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": self.port})
    }

    fn follow(&self, name: &str, extra: Value) -> Value {
        let mut params = json!({"name": name});
        for more in [self.address(), extra] {
            params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        }
        params
    }
}

fn nqn(disk: &str) -> String {
    format!("nqn.2016-06.io.spdk:{disk}")
}

const START: &str = "bdev_nvme_start_discovery";

fn waiting() -> Value {
    json!({"wait_for_attach": true, "detach_delay_sec": 1})
}

/// The controllers of a host, each with its subsystem.
fn controllers(host: &Daemon) -> Vec<(String, String)> {
    let listed = host.call("bdev_nvme_get_controllers", json!({})).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of = |controller: &Value| (text(&controller["name"]), text(&controller["trid"]["subnqn"]));
    // One that is being connected for the first time is not attached yet.
    let is_attached = |controller: &&Value| controller["ctrlrs"][0]["state"] != "resetting";
    listed.as_array().unwrap().iter().filter(is_attached).map(of).collect()
}

fn expected(disks: &[(&str, &str)]) -> Vec<(String, String)> {
    disks.iter().map(|(name, disk)| ((*name).to_owned(), nqn(disk))).collect()
}

#[test]
fn what_a_service_names_is_attached_and_detached() {
    let (target, mut host) = (Target::start(), Daemon::start(&["--state-dir", "DIR/state"]));
    target.share("a");
    target.share("b");
    host.call(START, target.follow("far", waiting())).unwrap();
    assert_eq!(controllers(&host), expected(&[("far0", "a"), ("far1", "b")]));
    assert_eq!(code(host.call(START, target.follow("far", json!({})))), -17);
    host.aryk(&["attach", "far1n1"]).unwrap();

    target.share("c");
    wait_for("c", || controllers(&host) == expected(&[("far0", "a"), ("far1", "b"), ("far2", "c")]));
    target.unshare("a");
    wait_for("the end of a", || controllers(&host) == expected(&[("far1", "b"), ("far2", "c")]));

    // What a client detaches stays detached.
    host.call("bdev_nvme_detach_controller", json!({"name": "far2"})).unwrap();
    // The number of another subsystem is not used again: a VM would get the wrong disk.
    target.share("d");
    wait_for("d", || controllers(&host) == expected(&[("far1", "b"), ("far3", "d")]));

    // Names of disks stay; what has gone meanwhile is detached.
    host.kill();
    target.unshare("d");
    host.restart();
    wait_for("a restart", || controllers(&host) == expected(&[("far1", "b"), ("far2", "c")]));
    wait_for("the end of d", || {
        !host.call("aryk_absent_get", json!({})).unwrap().to_string().contains("far3")
    });
    wait_for("the VM's disk", || host.dir().join("vhost/far1n1").exists());
    let saved = host.call("framework_get_config", json!({"name": "bdev"})).unwrap().to_string();
    assert!(saved.contains(START), "{saved}");
    assert!(!saved.contains("attach_controller") && !saved.contains("numbers"), "{saved}");

    host.call("bdev_nvme_stop_discovery", json!({"name": "far"})).unwrap();
    assert_eq!(controllers(&host), []);
    assert_eq!(host.call("bdev_nvme_get_discovery_info", json!({})).unwrap(), json!([]));
    assert_eq!(code(host.call("bdev_nvme_stop_discovery", json!({"name": "far"}))), -19);
    wait_for("the hosts to leave", || {
        let hosts: Value = serde_json::from_str(&target.daemon.aryk(&["--json", "hosts"]).unwrap()).unwrap();
        hosts.as_array().unwrap().iter().all(|share| share["controllers"] == json!([]))
    });
}

#[test]
fn a_subsystem_that_moves_is_attached_at_its_new_address() {
    let (target, host) = (Target::start(), Daemon::start(&[]));
    target.share("a");
    target.share("b");
    let other = Target::start();
    let listener = |target: &Target| json!({"nqn": nqn("a"), "listen_address": target.address()});
    host.call(START, target.follow("far", waiting())).unwrap();
    target.daemon.call("nvmf_subsystem_add_listener", listener(&other)).unwrap();
    target.daemon.call("nvmf_subsystem_remove_listener", listener(&target)).unwrap();
    let port = |name| {
        let listed = host.call("bdev_nvme_get_controllers", json!({"name": name})).ok();
        listed.map(|listed| listed[0]["trid"]["trsvcid"].clone())
    };
    wait_for("the move", || port("far0") == Some(json!(other.port)));
    assert_eq!(port("far1"), Some(json!(target.port)));
}

#[test]
fn a_subsystem_has_a_path_to_each_address_at_which_it_is_named() {
    let (target, mut host) = (Target::start(), Daemon::start(&["--state-dir", "DIR/state"]));
    target.share("a");
    let ports: Vec<String> = (0..4).map(|_| Target::free_port()).collect();
    let listener = |port: &str| {
        let address = json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port});
        json!({"nqn": nqn("a"), "listen_address": address})
    };
    let listen = |port: &str| target.daemon.call("nvmf_subsystem_add_listener", listener(port)).unwrap();
    listen(&ports[0]);
    host.call(START, target.follow("far", waiting())).unwrap();
    let paths = |host: &Daemon| {
        let listed = host.call("bdev_nvme_get_controllers", json!({"name": "far0"})).ok()?;
        let mut ports: Vec<String> = listed[0]["ctrlrs"]
            .as_array()?
            .iter()
            .filter(|path| path["state"] == "enabled")
            .map(|path| path["trid"]["trsvcid"].as_str().unwrap().to_owned())
            .collect();
        ports.sort();
        Some(ports)
    };
    let are = |host: &Daemon, expected: &[&String]| {
        let mut expected: Vec<String> = expected.iter().map(|port| (*port).clone()).collect();
        expected.sort();
        wait_for("the paths", || paths(host).as_ref() == Some(&expected));
    };
    are(&host, &[&target.port, &ports[0]]);
    listen(&ports[1]);
    are(&host, &[&target.port, &ports[0], &ports[1]]);
    target.daemon.call("nvmf_subsystem_remove_listener", listener(&ports[0])).unwrap();
    are(&host, &[&target.port, &ports[1]]);
    // One that a client has removed stays so.
    let path = json!({"name": "far0", "traddr": "127.0.0.1", "trsvcid": ports[1]});
    host.call("bdev_nvme_detach_controller", path).unwrap();
    listen(&ports[2]);
    are(&host, &[&target.port, &ports[2]]);
    host.kill_and_restart();
    are(&host, &[&target.port, &ports[1], &ports[2]]);
    // So does a subsystem that a client has detached, also when it is named at another address.
    target.share("b");
    wait_for("b", || controllers(&host) == expected(&[("far0", "a"), ("far1", "b")]));
    host.call("bdev_nvme_detach_controller", json!({"name": "far0"})).unwrap();
    listen(&ports[3]);
    target.share("c");
    wait_for("c", || controllers(&host) == expected(&[("far1", "b"), ("far2", "c")]));
}

#[test]
fn a_service_is_stopped_while_what_it_names_is_attached() {
    let (target, host) = (Target::start(), Daemon::start(&[]));
    target.share("a");
    // A connection that nobody accepts holds up its attach.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = silent.local_addr().unwrap().port().to_string();
    let at = json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port});
    target.daemon.call("nvmf_discovery_add_referral", json!({"address": at})).unwrap();
    let refused = host.call(START, target.follow("far", json!({"attach_timeout_ms": 1000})));
    assert_eq!(code(refused), -110, "the other service does not answer");
    assert_eq!(controllers(&host), []);
    host.call(START, target.follow("far", json!({}))).unwrap();
    wait_for("a", || controllers(&host) == expected(&[("far0", "a")]));
    host.call("bdev_nvme_stop_discovery", json!({"name": "far"})).unwrap();
    assert_eq!(controllers(&host), []);
}

#[test]
fn services_that_one_refers_to_are_followed_too() {
    let (first, second, host) = (Target::start(), Target::start(), Daemon::start(&[]));
    first.share("a");
    second.share("b");
    host.call(START, first.follow("far", waiting())).unwrap();
    let referral = json!({"address": second.address()});
    first.daemon.call("nvmf_discovery_add_referral", referral.clone()).unwrap();
    wait_for("b", || controllers(&host) == expected(&[("far0", "a"), ("far1", "b")]));
    let services = host.call("bdev_nvme_get_discovery_info", json!({})).unwrap();
    assert_eq!(
        (&services[0]["trid"]["trsvcid"], &services[0]["referrals"][0]["trid"]["trsvcid"]),
        (&json!(first.port), &json!(second.port))
    );
    // One that needs TLS is listed, and not followed.
    let at = json!({"trtype": "TCP", "adrfam": "IPv4", "traddr": "192.0.2.1", "trsvcid": "8009"});
    let secure = json!({"address": at, "secure_channel": true});
    first.daemon.call("nvmf_discovery_add_referral", secure.clone()).unwrap();
    let listed = first.daemon.call("nvmf_discovery_get_referrals", json!({})).unwrap();
    assert_eq!((&listed[0]["secure_channel"], &listed[1]["secure_channel"]), (&json!(false), &json!(true)));
    let refused = json!({"address": {"trtype": "RDMA", "traddr": "192.0.2.1"}, "secure_channel": true});
    assert_eq!(code(first.daemon.call("nvmf_discovery_add_referral", refused)), -32602);
    first.daemon.call("nvmf_discovery_remove_referral", referral).unwrap();
    wait_for("the end of b", || controllers(&host) == expected(&[("far0", "a")]));
    let services = host.call("bdev_nvme_get_discovery_info", json!({})).unwrap();
    assert_eq!(services[0]["referrals"], json!([]));
    first.daemon.call("nvmf_discovery_remove_referral", json!({"address": secure["address"]})).unwrap();
}

#[test]
fn a_service_that_is_away_is_awaited() {
    let (mut target, host) = (Target::start(), Daemon::start(&["--state-dir", "DIR/state"]));
    assert_eq!(code(host.call(START, target.follow("far", waiting()))), -5, "nobody listens there");
    assert_eq!(host.call("bdev_nvme_get_discovery_info", json!({})).unwrap(), json!([]));
    host.call(START, target.follow("far", json!({"reconnect_delay_sec": 1}))).unwrap();
    wait_for("the reason", || {
        host.call("bdev_nvme_get_discovery_info", json!({})).unwrap()[0]["error"].is_string()
    });
    target.share("a");
    wait_for("a", || controllers(&host) == expected(&[("far0", "a")]));
    // What it said last stays while it is away.
    target.daemon.kill();
    wait_for("the loss", || {
        host.call("bdev_nvme_get_discovery_info", json!({})).unwrap()[0]["error"].is_string()
    });
    assert_eq!(controllers(&host), expected(&[("far0", "a")]));
    target.daemon.restart();
    target.share("b");
    wait_for("b", || controllers(&host) == expected(&[("far0", "a"), ("far1", "b")]));
}

#[test]
fn wrong_parameters_are_refused() {
    let host = Daemon::start(&[]);
    for wrong in [
        json!({"name": ""}),
        json!({"trtype": "FC"}),
        json!({"traddr": "host.example"}),
        json!({"adrfam": "IPv6"}),
        json!({"hostnqn": "nonsense"}),
        json!({"ctrlr_loss_timeout_sec": 1, "fast_io_fail_timeout_sec": 2}),
    ] {
        let mut params = json!({"name": "far", "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": "1"});
        params.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
        assert_eq!(code(host.call(START, params)), -22, "{wrong}");
    }
}
