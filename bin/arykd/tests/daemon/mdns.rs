//! Daemons that announce and find discovery services by multicast DNS, each in a network namespace of its own.

use super::harness::{Daemon, code, wait_for};
use aryk_mdns::wire::{Data, Message, Record};
use aryk_mdns::{Name, text};
use rustix::process::getuid;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::{Value, json};
use std::fs::File;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::process::{Child, Command};
use std::time::Duration;

const START: &str = "bdev_nvme_start_mdns_discovery";
/// The device of each namespace.
const DEVICE: &str = "link0";
/// The addresses of the namespaces.
const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 214, 0, 1), Ipv4Addr::new(10, 214, 0, 2)];

/// Two network namespaces that a pair of virtual Ethernet devices connects. They end with the processes that hold them.
struct Network([Child; 2]);

impl Network {
    /// `None`, with a message, if this process may not create it.
    fn new() -> Option<Self> {
        if !getuid().is_root() {
            eprintln!("skipped: only root can create network namespaces");
            return None;
        }
        let hold = || Command::new("unshare").args(["-n", "sleep", "infinity"]).spawn().unwrap();
        let network = Self([hold(), hold()]);
        let own = std::fs::read_link("/proc/self/ns/net").unwrap();
        for holder in &network.0 {
            let of = format!("/proc/{}/ns/net", holder.id());
            wait_for("a network namespace", || {
                std::fs::read_link(&of).is_ok_and(|namespace| namespace != own)
            });
        }
        network.connect();
        Some(network)
    }

    /// Makes the devices, with their addresses.
    fn connect(&self) {
        let other = self.0[1].id().to_string();
        self.ip(0, &["link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", &other]);
        for (number, address) in ADDRESSES.iter().enumerate() {
            self.ip(number, &["address", "add", &format!("{address}/24"), "dev", DEVICE]);
            self.ip(number, &["link", "set", DEVICE, "up"]);
        }
    }

    fn ip(&self, number: usize, arguments: &[&str]) {
        let status = self.inside(number, || Command::new("ip").args(arguments).status().unwrap());
        assert!(status.success(), "ip {}", arguments.join(" "));
    }

    /// Runs `f` on a thread in a namespace. Processes that it starts are there, too.
    fn inside<T: Send>(&self, number: usize, f: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(format!("/proc/{}/ns/net", self.0[number].id())).unwrap();
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                f()
            });
            thread.join().unwrap()
        })
    }

    fn daemon(&self, number: usize) -> Daemon {
        self.inside(number, || Daemon::start(&["--state-dir", "DIR/state"]))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for holder in &mut self.0 {
            // The process has ended with the test.
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

fn nqn(disk: &str) -> String {
    format!("nqn.2016-06.io.spdk:{disk}")
}

fn share(target: &Daemon, disk: &str, listen: &str) {
    target.aryk(&["disk", "create", disk, "--memory", "--size", "1M"]).unwrap();
    target.aryk(&["share", disk, "--listen", listen, "--nqn", &nqn(disk)]).unwrap();
}

/// The disks of a host that are there.
fn disks(host: &Daemon) -> Vec<String> {
    let all = host.call("bdev_get_bdevs", json!({})).unwrap();
    let mut names: Vec<String> =
        all.as_array().unwrap().iter().map(|disk| disk["name"].as_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

/// The services that a host has found, each with its address.
fn found(host: &Daemon) -> Vec<(String, String)> {
    let listed = host.call("bdev_nvme_get_mdns_discovery_info", json!({})).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let of = |found: &Value| {
        let trid = &found["trid"];
        (text(&found["name"]), format!("{}:{}", text(&trid["traddr"]), text(&trid["trsvcid"])))
    };
    listed[0]["referrals"].as_array().into_iter().flatten().map(of).collect()
}

#[test]
fn what_is_announced_is_found_and_stays() {
    let Some(network) = Network::new() else { return };
    let (mut target, mut host) = (network.daemon(0), network.daemon(1));
    share(&target, "a", "10.214.0.1:4420");
    let publish = |target: &Daemon| target.call("nvmf_publish_mdns_prr", json!({}));
    publish(&target).unwrap();
    assert_eq!(code(publish(&target)), -17);
    assert_eq!(code(target.call("nvmf_publish_mdns_prr", json!({"tgt_name": "other"}))), -32603);

    let looking = json!({"name": "far", "svcname": "_nvme-disc._tcp"});
    host.call(START, looking.clone()).unwrap();
    wait_for("the disk", || disks(&host) == ["far00n1"]);
    assert_eq!(found(&host), [("far0".to_owned(), "10.214.0.1:4420".to_owned())]);
    for twice in [looking.clone(), json!({"name": "near", "svcname": "_nvme-disc._tcp"})] {
        assert_eq!(code(host.call(START, twice)), -17);
    }
    for wrong in [
        json!({"name": "", "svcname": "_nvme-disc._tcp"}),
        json!({"name": "x", "svcname": "nvme"}),
        json!({"name": "x", "svcname": "_a._tcp", "hostnqn": "nonsense"}),
    ] {
        assert_eq!(code(host.call(START, wrong.clone())), -22, "{wrong}");
    }

    // A daemon does not follow what it announces itself.
    target.call(START, json!({"name": "own", "svcname": "_nvme-disc._tcp"})).unwrap();

    // A listener that comes is announced, too; what comes after a restart of the target, as well.
    share(&target, "b", "10.214.0.1:4421");
    wait_for("the other service", || found(&host).len() == 2);
    wait_for("the other disk", || disks(&host).len() == 2);
    network.inside(0, || target.kill_and_restart());
    share(&target, "c", "0.0.0.0:4422");
    wait_for("the service at all addresses", || {
        found(&host).iter().any(|(_, address)| address == "10.214.0.1:4422")
    });
    wait_for("its disk", || disks(&host).len() == 3);

    assert_eq!((found(&target).len(), disks(&target).len()), (0, 3));

    // As in SPDK, disks stay when nothing is announced any more, also over a restart.
    target.call("nvmf_stop_mdns_prr", json!({})).unwrap();
    let before = (disks(&host), found(&host));
    std::thread::park_timeout(Duration::from_secs(3));
    assert_eq!((disks(&host), found(&host)), before);
    network.inside(1, || host.kill_and_restart());
    wait_for("the disks to be back", || (disks(&host), found(&host)) == before);
    let saved = host.call("framework_get_config", json!({"name": "bdev"})).unwrap().to_string();
    assert!(saved.contains(START) && !saved.contains("bdev_nvme_start_discovery"), "{saved}");

    host.call("bdev_nvme_stop_mdns_discovery", json!({"name": "far"})).unwrap();
    assert_eq!((disks(&host), found(&host)), (Vec::new(), Vec::new()));
    assert_eq!(host.call("bdev_nvme_get_discovery_info", json!({})).unwrap(), json!([]));
    assert_eq!(code(host.call("bdev_nvme_stop_mdns_discovery", json!({"name": "far"}))), -19);
    host.call(START, looking).unwrap();
}

#[test]
fn an_interface_that_is_made_again_is_used_again() {
    let Some(network) = Network::new() else { return };
    let (target, host) = (network.daemon(0), network.daemon(1));
    share(&target, "a", "10.214.0.1:4420");
    target.call("nvmf_publish_mdns_prr", json!({})).unwrap();
    host.call(START, json!({"name": "far", "svcname": "_nvme-disc._tcp"})).unwrap();
    wait_for("the disk", || disks(&host) == ["far00n1"]);
    // More often than a socket may be a member of groups, and sooner than the daemons look.
    for _ in 0..30 {
        network.ip(0, &["link", "delete", DEVICE]);
        network.connect();
    }
    share(&target, "b", "10.214.0.1:4421");
    wait_for("the other service", || found(&host).len() == 2);
}

/// The announcement of a service by `DEVICE` of the first namespace.
fn announcement(name: &str, port: u16, properties: Vec<u8>) -> Vec<u8> {
    let of_kind = Name::parse("_nvme-disc._tcp.local").unwrap();
    let (service, host) = (of_kind.within(name).unwrap(), Name::parse(&format!("{name}.local")).unwrap());
    let record = |name: &Name, data| Record { name: name.clone(), ttl: 120, flushes: false, data };
    let records = vec![
        record(&of_kind, Data::Ptr(service.clone())),
        record(&service, Data::Srv { host: host.clone(), port }),
        record(&service, Data::Txt(properties)),
        record(&host, Data::A(ADDRESSES[0])),
    ];
    Message { is_response: true, records, ..Message::default() }.encode()
}

#[test]
fn a_hostile_network_gets_no_more_than_the_limits() {
    let Some(network) = Network::new() else { return };
    let host = network.daemon(1);
    let hostile = network.inside(0, || UdpSocket::bind((ADDRESSES[0], 5353)).unwrap());
    let announce = |packet: &[u8]| hostile.send_to(packet, "224.0.0.251:5353").map(drop).unwrap();
    host.call(START, json!({"name": "far", "svcname": "_nvme-disc._tcp"})).unwrap();
    let sane = || text([("p", "tcp"), ("nqn", "nqn.2014-08.org.nvmexpress.discovery")]);
    let mut random = fastrand::Rng::with_seed(7);
    let mut round = || {
        for number in 0..200 {
            let mut packet = announcement(&format!("x{number}"), 6000 + number, sane());
            announce(&packet);
            let place = random.usize(..packet.len());
            packet[place] = random.u8(..);
            announce(&packet[..random.usize(..packet.len())]);
        }
        announce(&announcement("udp", 9, text([("p", "udp"), ("nqn", "nqn.a")])));
        announce(&announcement("text", 9, vec![255; 200]));
        announce(&announcement("name", 9, text([("p", "tcp"), ("nqn", "no name")])));
    };
    wait_for("as many services as are followed", || {
        round();
        found(&host).len() == 16
    });
    for _ in 0..20 {
        round();
        std::thread::park_timeout(Duration::from_millis(100));
    }
    let followed = found(&host);
    assert_eq!(followed.len(), 16);
    assert!(followed.iter().all(|(_, address)| address.starts_with("10.214.0.1:6")), "{followed:?}");
    assert_eq!(disks(&host), Vec::<String>::new());
    host.call("bdev_nvme_stop_mdns_discovery", json!({"name": "far"})).unwrap();
    assert_eq!(host.call("bdev_nvme_get_discovery_info", json!({})).unwrap(), json!([]));
}
