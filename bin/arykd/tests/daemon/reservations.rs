//! Reservations of hosts over NVMe/TCP: in the state directory, and in replies.

use super::harness::Daemon;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::opcode::io;
use aryk_nvme::spec::status::Code;
use aryk_rpc_client::Reply;
use host::{Connection, Options};
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener};
use target::{BLOCK, SUBSYSTEM};

#[path = "../../../../crates/nvme-fabrics/tests/loopback/host.rs"]
#[expect(dead_code, reason = "the tests of the target need more of it")]
mod host;

mod target {
    pub const SUBSYSTEM: &str = "nqn.2016-06.io.spdk:cnode1";
    pub const BLOCK: usize = 4096;
    pub const IN_CAPSULE_MAX: u32 = 8192;
}

const PERSISTS: u32 = 3 << 30;
const WRITE_EXCLUSIVE: u32 = 1 << 8;

/// A host with one I/O queue.
struct Host {
    _admin_queue: Connection,
    queue: Connection,
}

impl Host {
    fn connect(address: SocketAddr, number: u8) -> Self {
        let (admin_queue, id) = Connection::admin(address, Options::default(), SUBSYSTEM, number);
        let queue = Connection::io(address, Options::default(), id, 1, number).unwrap();
        Self { _admin_queue: admin_queue, queue }
    }

    fn reserve(&mut self, opcode: u8, cdw10: u32, keys: [u64; 2]) -> Result<(), Code> {
        let entry = SubmissionEntry::new(opcode, 1).with_cdw10_11(cdw10, 0);
        let data: Vec<u8> = keys.iter().flat_map(|key| key.to_le_bytes()).collect();
        self.queue.run(entry, &data, 0).map(drop)
    }

    fn write(&mut self) -> Result<(), Code> {
        self.queue.write(0, &[1; BLOCK])
    }
}

fn add_namespace(daemon: &Daemon, ptpl_file: Option<&str>) -> Reply {
    let mut namespace = json!({"bdev_name": "data", "nsid": 1});
    if let Some(file) = ptpl_file {
        namespace["ptpl_file"] = file.into();
    }
    daemon.call("nvmf_subsystem_add_ns", json!({"nqn": SUBSYSTEM, "namespace": namespace}))
}

fn share(daemon: &Daemon, ptpl_file: Option<&str>) -> SocketAddr {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    daemon
        .aryk(&["disk", "create", "data", "--file", "data.img", "--size", "1M", "--block-size", "4096"])
        .unwrap();
    daemon.call("nvmf_create_transport", json!({"trtype": "TCP"})).unwrap();
    let subsystem = json!({"nqn": SUBSYSTEM, "allow_any_host": true});
    daemon.call("nvmf_create_subsystem", subsystem).unwrap();
    add_namespace(daemon, ptpl_file).unwrap();
    let listener = json!({"trtype": "TCP", "traddr": "127.0.0.1", "trsvcid": address.port().to_string()});
    daemon
        .call("nvmf_subsystem_add_listener", json!({"nqn": SUBSYSTEM, "listen_address": listener}))
        .unwrap();
    address
}

/// What `nvmf_get_subsystems` shows of namespace 1.
fn shown(daemon: &Daemon) -> Value {
    let shown = daemon.call("nvmf_get_subsystems", json!({"nqn": SUBSYSTEM})).unwrap();
    shown[0]["namespaces"][0]["reservations"].clone()
}

#[test]
fn reservations_outlive_the_daemon_and_end_with_their_namespace() {
    let mut daemon = Daemon::start(&["--state-dir", "DIR/state"]);
    let address = share(&daemon, Some("/nowhere/ptpl"));
    let expected = |ptpl: bool| {
        let hostid = "01010101-0101-0101-0101-010101010101";
        let registrants = json!([{"hostid": hostid, "rkey": "7", "is_holder": true}]);
        json!({"registrants": registrants, "rtype": "write_exclusive", "ptpl": ptpl})
    };
    let mut a = Host::connect(address, 1);
    assert_eq!(shown(&daemon), Value::Null);
    a.reserve(io::RESERVATION_REGISTER, 0, [0, 7]).unwrap();
    a.reserve(io::RESERVATION_ACQUIRE, WRITE_EXCLUSIVE, [7, 0]).unwrap();
    assert_eq!(shown(&daemon), expected(false));
    daemon.kill_and_restart();
    let (mut a, mut b) = (Host::connect(address, 1), Host::connect(address, 2));
    assert_eq!(shown(&daemon), expected(false));
    assert_eq!((a.write(), b.write()), (Ok(()), Err(Code::RESERVATION_CONFLICT)));
    a.reserve(io::RESERVATION_REGISTER, 2 | PERSISTS, [7, 7]).unwrap();
    daemon.end_and_restart();
    assert_eq!(shown(&daemon), expected(true));
    assert_eq!(Host::connect(address, 2).write(), Err(Code::RESERVATION_CONFLICT));

    // The next namespace with this identifier is another one.
    let namespace = json!({"nqn": SUBSYSTEM, "nsid": 1});
    daemon.call("nvmf_subsystem_remove_ns", namespace).unwrap();
    std::fs::write(daemon.dir().join("ptpl"), "{}").unwrap();
    let refused = add_namespace(&daemon, daemon.dir().join("ptpl").to_str()).unwrap_err();
    assert!(refused.to_string().contains("are not read"), "{refused}");
    add_namespace(&daemon, None).unwrap();
    assert_eq!(shown(&daemon), Value::Null);
    daemon.kill_and_restart();
    assert_eq!((shown(&daemon), Host::connect(address, 2).write()), (Value::Null, Ok(())));
}

#[test]
fn nothing_persists_without_a_state_directory() {
    let daemon = Daemon::start(&[]);
    let address = share(&daemon, None);
    let mut a = Host::connect(address, 1);
    assert_eq!(a.reserve(io::RESERVATION_REGISTER, PERSISTS, [0, 7]), Err(Code::INVALID_FIELD));
    a.reserve(io::RESERVATION_REGISTER, 0, [0, 7]).unwrap();
    daemon.call("nvmf_subsystem_remove_ns", json!({"nqn": SUBSYSTEM, "nsid": 1})).unwrap();
    let refused = add_namespace(&daemon, Some("/nowhere/ptpl"));
    assert!(refused.unwrap_err().to_string().contains("state directory"));
    add_namespace(&daemon, None).unwrap();
}
