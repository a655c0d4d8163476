//! TLS between two daemons, over restarts, and with OpenSSL's client.

use super::code;
use super::front_end::FrontEnd;
use super::harness::{Daemon, wait_for};
use aryk_nvme_fabrics::psk::{ConfiguredPsk, Version};
use serde_json::json;
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::OpenOptionsExt;
use std::process::{Command, Stdio};

const NQN: &str = "nqn.2016-06.io.spdk:secure";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:913fc008-79a7-447f-b2c4-c73543638c31";
const KEY: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
/// The same bytes, without a hash.
const OTHER: &str = "NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
const LONG: &str =
    "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";
const BLOCK: usize = 4096;

fn add_key(daemon: &Daemon, name: &str, text: &str) {
    let path = daemon.dir().join(name);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).unwrap();
    writeln!(file, "{text}").unwrap();
    daemon.call("keyring_file_add_key", json!({"name": name, "path": path})).unwrap();
}

/// A daemon that shares a disk with TLS.
fn share(text: &str) -> (Daemon, SocketAddr) {
    let target = Daemon::start(&["--state-dir", "DIR/state"]);
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    add_key(&target, "t", text);
    target
        .aryk(&["disk", "create", "data", "--file", "data.img", "--size", "1M", "--block-size", "4096"])
        .unwrap();
    let listen = address.to_string();
    target
        .aryk(&["share", "data", "--listen", &listen, "--nqn", NQN, "--host", HOST, "--tls-key", "t"])
        .unwrap();
    (target, address)
}

fn block(lba: u64, round: u64) -> Vec<u8> {
    (0..BLOCK as u64).map(|at| (at ^ (lba * 31) ^ (round * 7)).wrapping_add(at >> 8) as u8).collect()
}

/// Writes blocks, and reads them again.
fn verify(disk: &mut FrontEnd, round: u64) {
    for lba in 0..64 {
        disk.write(lba * BLOCK as u64, &block(lba, round)).unwrap();
    }
    for lba in 0..64 {
        assert!(disk.read(lba * BLOCK as u64, BLOCK).unwrap() == block(lba, round), "block {lba}");
    }
}

#[test]
fn a_disk_is_used_with_tls_also_after_restarts_of_both_daemons() {
    let (mut target, address) = share(KEY);
    let mut host = Daemon::start(&["--state-dir", "DIR/state"]);
    add_key(&host, "h", KEY);
    let address = address.to_string();
    let create = ["disk", "create", "far", "--nvme-tcp", &address, "--subsystem", NQN, "--host-nqn", HOST];
    host.aryk(&[&create[..], &["--tls-key", "h"]].concat()).unwrap();
    host.aryk(&["attach", "far"]).unwrap();
    let path = host.dir().join("vhost/far");
    let front_end = || {
        wait_for("the controller", || FrontEnd::open(&path, false).is_ok());
        FrontEnd::connect(&path)
    };
    let mut disk = front_end();
    verify(&mut disk, 1);
    target.kill_and_restart();
    verify(&mut disk, 2);
    drop(disk);
    host.kill_and_restart();
    let mut disk = front_end();
    assert!(disk.read(0, BLOCK).unwrap() == block(0, 2));
    verify(&mut disk, 3);
    drop(disk);

    let shown = target.call("nvmf_get_subsystems", json!({"nqn": NQN})).unwrap();
    assert_eq!(shown[0]["hosts"], json!([{"nqn": HOST, "psk": "t"}]));
    let listeners = target.call("nvmf_subsystem_get_listeners", json!({"nqn": NQN})).unwrap();
    assert_eq!(listeners[0]["secure_channel"], true);
    let parts = target.call("framework_get_config", json!({"name": "nvmf"})).unwrap().to_string();
    assert!(parts.contains(r#""secure_channel":true"#) && parts.contains(r#""psk":"t""#), "{parts}");
    assert!(!parts.contains("VRLbt"));
}

#[test]
fn a_discovery_service_is_followed_with_tls_also_after_a_restart() {
    let (target, address) = share(KEY);
    // The service names a subsystem without TLS, too.
    let plain = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    target.aryk(&["disk", "create", "open", "--memory", "--size", "1M"]).unwrap();
    target.aryk(&["share", "open", "--listen", &plain.to_string()]).unwrap();
    let mut host = Daemon::start(&["--state-dir", "DIR/state"]);
    add_key(&host, "h", KEY);
    let start = |host: &Daemon, more: serde_json::Value| {
        let mut params = json!({
            "name": "far", "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": address.port().to_string(),
            "wait_for_attach": true,
        });
        params.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        host.call("bdev_nvme_start_discovery", params)
    };
    let attached = |host: &Daemon| {
        let listed = host.call("bdev_nvme_get_controllers", json!({})).unwrap();
        let of = |controller: &serde_json::Value| controller["trid"]["subnqn"].as_str().unwrap().to_owned();
        listed.as_array().unwrap().iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(code(start(&host, json!({"psk": "h"}))), -22, "a key is one of a host");
    assert_eq!(code(start(&host, json!({"hostnqn": HOST}))), -5, "the listener wants TLS");
    start(&host, json!({"psk": "h", "hostnqn": HOST})).unwrap();
    assert_eq!(attached(&host), [NQN]);
    host.aryk(&["attach", "far0n1"]).unwrap();
    let path = host.dir().join("vhost/far0n1");
    let mut vm = FrontEnd::connect(&path);
    verify(&mut vm, 1);
    let top = target.aryk(&["--json", "top", "hosts", "--once", "--every", "0.1"]).unwrap();
    let top: serde_json::Value = serde_json::from_str(&top).unwrap();
    let of_host = top["per_second"]["hosts"].as_array().unwrap().iter().find(|seen| {
        seen["name"].as_str().unwrap().contains("913fc008-79a7-447f-b2c4-c73543638c31")
            && seen["queues"].as_u64().unwrap() > 0
    });
    assert!(of_host.is_some(), "{top}");
    drop(vm);
    host.kill_and_restart();
    wait_for("the controller", || FrontEnd::open(&path, false).is_ok());
    verify(&mut FrontEnd::connect(&path), 2);
    assert_eq!(attached(&host), [NQN]);
    host.call("bdev_nvme_stop_discovery", json!({"name": "far"})).unwrap();
    assert!(attached(&host).is_empty());
}

#[test]
fn wrong_keys_and_sides_without_tls_are_refused_by_name() {
    let (target, address) = share(KEY);
    let host = Daemon::start(&[]);
    for (name, text) in [("h", KEY), ("other", OTHER), ("long", LONG), ("broken", "NVMeTLSkey-1:01:AAAA:")] {
        add_key(&host, name, text);
    }
    let attach = |address: &str, nqn: &str, key: &[&str]| {
        let create = ["disk", "create", "far", "--nvme-tcp", address, "--subsystem", NQN, "--host-nqn", nqn];
        host.aryk(&[&create[..], key].concat()).unwrap_err().1
    };
    let secure = address.to_string();
    let refused = attach(&secure, HOST, &["--tls-key", "other"]);
    assert!(refused.contains("another key by the same identity"), "{refused}");
    let refused = attach(&secure, HOST, &["--tls-key", "long"]);
    assert!(refused.contains("does not know the identity"), "{refused}");
    let refused = attach(&secure, "nqn.2016-06.io.spdk:stranger", &["--tls-key", "h"]);
    assert!(refused.contains("does not know the identity"), "{refused}");
    let refused = attach(&secure, HOST, &["--tls-key", "broken"]);
    assert!(refused.contains("a TLS key has a checksum"), "{refused}");
    let refused = attach(&secure, HOST, &["--tls-key", "missing"]);
    assert!(refused.contains("there is no key 'missing'"), "{refused}");
    let refused = attach(&secure, HOST, &[]);
    assert!(refused.contains("the target wants TLS"), "{refused}");

    // A listener without TLS.
    let plain = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let listener = json!({"trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": plain.port().to_string()});
    target.call("nvmf_subsystem_add_listener", json!({"nqn": NQN, "listen_address": listener})).unwrap();
    let refused = attach(&plain.to_string(), HOST, &["--tls-key", "h"]);
    assert!(refused.contains("does not use TLS"), "{refused}");
    let refused = attach(&plain.to_string(), HOST, &[]);
    assert!(refused.contains("Connect"), "{refused}");
    let both = json!({"nqn": NQN, "listen_address": {
        "trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": address.port().to_string(),
    }});
    assert_eq!(code(target.call("nvmf_subsystem_add_listener", both)), -32602);
    let stats = target.call("nvmf_get_stats", json!({})).unwrap();
    assert_eq!(stats["failed_authentications"], 4, "{stats}");
}

/// What OpenSSL's client says, with this key by this identity.
fn s_client(address: SocketAddr, identity: &str, secret: &[u8], suite: &str) -> String {
    let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut client = Command::new("openssl")
        .args(["s_client", "-connect", &address.to_string(), "-tls1_3", "-ciphersuites", suite])
        .args(["-psk_identity", identity, "-psk", &hex, "-brief"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It ends at the end of its input.
    drop(client.stdin.take());
    let mut said = String::new();
    client.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    client.wait().unwrap();
    said
}

#[test]
fn the_client_of_openssl_completes_the_handshake() {
    let (target, address) = share(KEY);
    let psk = |version| {
        let key = ConfiguredPsk::parse(KEY.as_bytes()).unwrap();
        key.of_tls(version, &HOST.parse().unwrap(), &NQN.parse().unwrap()).unwrap()
    };
    for version in Version::ALL {
        let psk = psk(version);
        let said = s_client(address, &psk.identity, &psk.secret, "TLS_AES_128_GCM_SHA256");
        assert!(said.contains("CONNECTION ESTABLISHED") && said.contains("TLSv1.3"), "{said}");
        assert!(said.contains("TLS_AES_128_GCM_SHA256"), "{said}");
    }
    let psk = psk(Version::Names);
    let said = s_client(address, &psk.identity, &[1; 32], "TLS_AES_128_GCM_SHA256");
    assert!(!said.contains("CONNECTION ESTABLISHED") && said.contains("decrypt error"), "{said}");
    let said = s_client(address, "stranger", &psk.secret, "TLS_AES_128_GCM_SHA256");
    assert!(!said.contains("CONNECTION ESTABLISHED"), "{said}");
    assert_eq!(target.call("nvmf_get_stats", json!({})).unwrap()["failed_authentications"], 2);
}
