//! A disk that one daemon uses from another, each in a network namespace of its own, while the link between them is cut, is
//! silent, is slow, or is not what one of them believes. Needs root.
//!
//! The namespaces have no names: they end with their daemons, also if the test fails.

#![expect(clippy::disallowed_methods, reason = "the test measures time")]

use super::harness::{Daemon, wait_for};
use super::links::{has_no_hosts, impatient};
use super::remote::{NQN, controller, losses};
use super::verified::VerifiedDisk;
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};

const HOST: &str = "10.0.0.1/24";
const TARGET: &str = "10.0.0.2/24";
const LISTEN: &str = "10.0.0.2:4420";
/// The link's name in both namespaces.
const LINK: &str = "link0";

/// A daemon that shares a disk, one that uses it, and a link between their namespaces.
struct Net {
    target: Daemon,
    host: Daemon,
}

/// Runs a program in the namespace of a daemon.
fn run(daemon: &Daemon, command: &str) {
    let pid = daemon.pid().to_string();
    let output = Command::new("nsenter").args(["-t", &pid, "-n"]).args(command.split(' ')).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {said}");
}

impl Net {
    /// Starts both, the host with these `bdev_nvme_set_options`, and a VM with the disk.
    fn start(options: Value) -> (Self, VerifiedDisk) {
        let [target, host] = [(); 2].map(|()| Daemon::start_in_network(&["--state-dir", "DIR/state"]));
        let net = Self { target, host };
        run(&net.host, &format!("ip link add {LINK} type veth peer name {LINK} netns {}", net.target.pid()));
        for (daemon, address) in [(&net.host, HOST), (&net.target, TARGET)] {
            run(daemon, &format!("ip address add {address} dev {LINK}"));
            run(daemon, &format!("ip link set {LINK} up"));
        }
        net.target
            .aryk(&["disk", "create", "data", "--file", "data.img", "--size", "1M", "--block-size", "4096"])
            .unwrap();
        net.target.aryk(&["share", "data", "--listen", LISTEN, "--nqn", NQN]).unwrap();
        net.host.call("bdev_nvme_set_options", options).unwrap();
        net.host.aryk(&["disk", "create", "far", "--nvme-tcp", LISTEN, "--subsystem", NQN]).unwrap();
        net.host.aryk(&["attach", "far"]).unwrap();
        let disk = VerifiedDisk::start(&net.host.dir().join("vhost/far"), 1);
        (net, disk)
    }

    /// Breaks the link with requests in flight until both sides have noticed, and repairs it.
    fn interrupt(&self, disk: &mut VerifiedDisk, broken: (&Daemon, &str), repaired: (&Daemon, &str)) {
        disk.run(100);
        let before = losses(&self.host);
        run(broken.0, broken.1);
        wait_for("the loss", || losses(&self.host) > before);
        wait_for("the end of the target's keep-alive timer", || has_no_hosts(&self.target));
        assert_ne!(controller(&self.host)["ctrlrs"][0]["state"], "enabled");
        run(repaired.0, repaired.1);
        disk.run(100);
    }

    /// Reads all blocks, and checks that no request has failed.
    fn finish(self, disk: VerifiedDisk) {
        disk.finish();
        assert_eq!(controller(&self.host)["failed_by_reset"], 0);
    }
}

#[test]
fn a_link_that_goes_down_comes_back() {
    let (net, mut disk) = Net::start(impatient());
    let (down, up) = (format!("ip link set {LINK} down"), format!("ip link set {LINK} up"));
    for side in [&net.host, &net.target] {
        net.interrupt(&mut disk, (side, &down), (side, &up));
    }
    net.finish(disk);
}

#[test]
fn an_address_that_vanishes_leaves_the_other_side_half_open() {
    let (net, mut disk) = Net::start(impatient());
    for (side, address) in [(&net.host, HOST), (&net.target, TARGET)] {
        let [gone, back] = ["del", "add"].map(|what| format!("ip address {what} {address} dev {LINK}"));
        net.interrupt(&mut disk, (side, &gone), (side, &back));
    }
    net.finish(disk);
}

/// The target carries out requests whose replies vanish, and the host submits them again; and the other way round.
#[test]
fn packets_that_vanish_in_one_direction_are_a_lost_link() {
    let (net, mut disk) = Net::start(impatient());
    // No packet is as short as the bucket: the kernel drops all.
    let (drop, pass) = (
        format!("tc qdisc add dev {LINK} root tbf rate 1kbit burst 10 limit 10"),
        format!("tc qdisc del dev {LINK} root"),
    );
    for side in [&net.host, &net.target] {
        net.interrupt(&mut disk, (side, &drop), (side, &pass));
    }
    net.finish(disk);
}

#[test]
fn a_link_with_a_long_queue_is_slow() {
    const REQUESTS: u64 = 500;
    let (net, mut disk) = Net::start(json!({}));
    for side in [&net.host, &net.target] {
        // A packet waits for up to 50 ms; then packets are dropped.
        run(side, &format!("tc qdisc add dev {LINK} root tbf rate 20mbit burst 10k latency 50ms"));
    }
    let begun = Instant::now();
    disk.run(REQUESTS);
    // Half of the requests move their 4 KiB in each direction.
    let least = Duration::from_secs_f64(REQUESTS as f64 / 4.0 * 4096.0 * 8.0 / 20e6);
    assert!(begun.elapsed() > least, "the link was not slow: {:?}", begun.elapsed());
    assert_eq!(losses(&net.host), 0);
    net.finish(disk);
}
