//! A disk of another host over links that are bad without being cut: bytes that dribble, and links that stall or close in one
//! direction.

use super::harness::{Daemon, wait_for};
use super::proxy::{Direction, Link};
use super::remote::{NQN, Pair, losses, port};
use super::verified::VerifiedDisk;
use serde_json::{Value, json};
use std::net::SocketAddr;

const DIRECTIONS: [Direction; 2] = [Direction::ToTarget, Direction::ToHost];

/// Times for a host that notices a dead link after a second.
pub fn impatient() -> Value {
    json!({
        "timeout_us": 1_000_000,
        "timeout_admin_us": 1_000_000,
        "tcp_connect_timeout_ms": 1000,
        "keep_alive_timeout_ms": 1000,
        "reconnect_delay_sec": 1,
    })
}

/// Whether the disk's share has no host.
pub fn has_no_hosts(target: &Daemon) -> bool {
    let shares: Value = serde_json::from_str(&target.aryk(&["--json", "hosts"]).unwrap()).unwrap();
    let share = shares.as_array().unwrap().iter().find(|share| share["nqn"] == NQN).unwrap();
    share["controllers"].as_array().is_none_or(Vec::is_empty)
}

#[test]
fn bytes_that_dribble_are_a_slow_link() {
    let pair = Pair::start();
    let mut disk = VerifiedDisk::start(&pair.socket(), 1);
    disk.run(100);
    pair.proxy.set(Link::Dribbles);
    disk.run(40);
    pair.proxy.set(Link::Good);
    // At least 24 requests began while the link dribbled; each moves 4 KiB, by 7 bytes at most.
    assert!(pair.proxy.pieces() > 24 * 4096 / 7, "{}", pair.proxy.pieces());
    disk.run(100);
    disk.finish();
    assert_eq!(losses(&pair.host), 0);
}

#[test]
fn a_link_that_stalls_in_one_direction_is_lost() {
    const NEAR: &str = "nqn.2016-06.io.spdk:near";
    let pair = Pair::start_with(impatient());
    let address = SocketAddr::from(([127, 0, 0, 1], port())).to_string();
    pair.target.aryk(&["disk", "create", "other", "--memory", "--size", "1M"]).unwrap();
    pair.target.aryk(&["share", "other", "--listen", &address, "--nqn", NEAR]).unwrap();
    // A busy computer is no reason to lose it.
    pair.host.call("bdev_nvme_set_options", json!({})).unwrap();
    pair.host.aryk(&["disk", "create", "near", "--nvme-tcp", &address, "--subsystem", NEAR]).unwrap();
    pair.host.aryk(&["attach", "near"]).unwrap();
    let mut near = VerifiedDisk::start(&pair.host.dir().join("vhost/near"), 2);
    let mut disk = VerifiedDisk::start(&pair.socket(), 1);
    for direction in DIRECTIONS {
        disk.run(100);
        let before = losses(&pair.host);
        pair.proxy.set(Link::Stalls(direction));
        near.run(200);
        wait_for("the loss", || losses(&pair.host) > before);
        if direction == Direction::ToTarget {
            wait_for("the end of the target's keep-alive timer", || has_no_hosts(&pair.target));
        }
        near.run(200);
        pair.proxy.set(Link::Good);
        disk.run(100);
    }
    disk.finish();
    near.finish();
    let all = pair.host.call("bdev_nvme_get_controllers", json!({"name": "near"})).unwrap();
    assert_eq!(all[0]["remote"]["losses"], 0);
}

#[test]
fn a_link_that_closes_in_one_direction_is_lost() {
    let pair = Pair::start();
    let mut disk = VerifiedDisk::start(&pair.socket(), 1);
    for round in 0..3 {
        for direction in DIRECTIONS {
            disk.run(50 + round);
            let before = losses(&pair.host);
            pair.proxy.close(direction);
            wait_for("the loss", || losses(&pair.host) > before);
            disk.run(50);
        }
    }
    disk.finish();
}
