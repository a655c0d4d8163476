//! Many Ceph disks on the substitute for librbd, and a stuck cluster beside a disk that is not stuck.

#![expect(clippy::disallowed_methods, reason = "the test measures time")]

use super::harness::{Daemon, librbd_stub, wait_for};
use super::stuck::Vm;
use aryk_front_end::Memory;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A call that waits for nothing takes less than this on a busy test machine.
const ANSWERED: Duration = Duration::from_secs(2);

/// The same for a call or a read beside work that is not on this reactor and not in this call's way.
const SOON: Duration = Duration::from_millis(500);

/// A turn of a reactor that waits for nothing takes less than this beside other tests, and one that waits for an image 50 ms. A
/// tenth of it is usual, but memory that the hypervisor had taken back comes slowly.
const TURN_MAX: Duration = Duration::from_millis(3);

/// The call that creates a disk in an image of the substitute.
fn create(name: &str, image: &str) -> Value {
    let params = json!({"name": name, "pool_name": "vms", "rbd_name": image, "block_size": 4096});
    json!({"jsonrpc": "2.0", "id": 1, "method": "bdev_rbd_create", "params": params})
}

/// The reply to the one call of a connection.
fn reply(mut connection: UnixStream) -> Value {
    let mut text = String::new();
    connection.shutdown(std::net::Shutdown::Write).unwrap();
    connection.read_to_string(&mut text).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Calls a method that waits for nothing. Returns how long the reply took.
fn ask(daemon: &Daemon) -> Duration {
    let began = Instant::now();
    daemon.call("spdk_get_version", json!({})).unwrap();
    began.elapsed()
}

/// For how long the reactor's thread has been ready to run so far, while another program had its core (schedstat: processor time,
/// waiting time, slices).
fn displaced(daemon: &Daemon) -> Duration {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    let is_reactor = |path: &std::path::Path| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.starts_with("reactor"))
    };
    let path = tasks.map(|task| task.unwrap().path()).find(|path| is_reactor(path)).expect("a reactor");
    let times = std::fs::read_to_string(path.join("schedstat")).unwrap();
    Duration::from_nanos(times.split(' ').nth(1).unwrap().parse().unwrap())
}

/// The longest turn of the reactor, lately.
fn longest_turn(daemon: &Daemon) -> Duration {
    let stats = daemon.call("aryk_stats_get", json!({})).unwrap();
    let ticks = stats["reactors"][0]["longest_turn_ticks"].as_u64().unwrap();
    Duration::from_secs_f64(ticks as f64 / stats["tick_rate"].as_f64().unwrap())
}

/// Clients that disks of one configuration share. Each opens up to 32 images of a pool at a time.
const CLIENTS: u64 = 4;

/// The substitute's counts: clients, the most clients, openings, the most openings, images that were opened.
fn counts(daemon: &Daemon) -> [u64; 5] {
    let text = std::fs::read_to_string(daemon.dir().join("counts")).unwrap_or_default();
    let numbers: Vec<u64> = text.split(' ').filter_map(|number| number.parse().ok()).collect();
    numbers.try_into().unwrap_or_default()
}

fn number_of_disks(daemon: &Daemon) -> usize {
    daemon.call("bdev_get_bdevs", json!({})).unwrap().as_array().unwrap().len()
}

#[test]
fn three_hundred_images_open_at_once() {
    // Other programs of the computer disturb a measurement now and then, but not each. Each round has a new daemon, because turns
    // are reported for half a minute.
    let is_undisturbed = (0..4).any(|_| {
        let (answered, turn, displaced) = open_three_hundred();
        println!("the slowest reply took {answered:?}; the longest turn {turn:?}, of which displaced up to {displaced:?}");
        answered < SOON && turn.saturating_sub(displaced) <= TURN_MAX
    });
    assert!(is_undisturbed, "openings delay calls or the reactor");
}

/// Opens images, some of which fail. Returns how long the slowest call beside that took, the longest turn of the reactor, and for
/// how long at most it was displaced between three looks.
fn open_three_hundred() -> (Duration, Duration, Duration) {
    const IMAGES: usize = 300;
    let daemon = Daemon::start(&["--librbd", &librbd_stub()]);
    let options = |i: usize| match i % 15 {
        0 => "+open=never",
        1 | 2 => "+open=5",
        3 | 4 => "+delay=50000",
        5 => "+open=1",
        _ => "+delay=100",
    };
    let begin = |i| {
        let mut connection = daemon.connect();
        let call = create(&format!("d{i}"), &format!("i{i}+size=1048576{}", options(i)));
        connection.write_all(call.to_string().as_bytes()).unwrap();
        connection
    };
    let mut looks = vec![displaced(&daemon)];
    let connections: Vec<_> = (0..IMAGES).map(begin).collect();
    let mut answered = Duration::ZERO;
    let never = (0..IMAGES).filter(|i| options(*i) == "+open=never").count();
    let failing = (0..IMAGES).filter(|i| options(*i).starts_with("+open=") && i % 15 != 0).count();
    wait_for("the images are open", || {
        answered = answered.max(ask(&daemon));
        looks.push(displaced(&daemon));
        number_of_disks(&daemon) == IMAGES - never - failing
    });
    let turn = longest_turn(&daemon);
    let displaced = looks.windows(3).map(|three| three[2] - three[0]).max().unwrap_or_default();
    for (i, connection) in connections.into_iter().enumerate() {
        let expected = match options(i) {
            "+open=never" => continue,
            "+open=5" => Some("Input/output error"),
            "+open=1" => Some("Operation not permitted"),
            _ => None,
        };
        let reply = reply(connection);
        match expected {
            Some(text) => assert!(reply["error"].to_string().contains(text), "{i}: {reply}"),
            None => assert_eq!(reply["result"], format!("d{i}"), "{reply}"),
        }
    }
    assert!(counts(&daemon)[3] <= 32 * CLIENTS, "{:?}", counts(&daemon));
    (answered, turn, displaced)
}

#[test]
fn a_daemon_restores_thousands_of_disks_beside_its_work() {
    const DISKS: usize = 3000;
    /// Disks of each kind that does not open as it should.
    const EACH: usize = DISKS / 100;
    let options = |i: usize| match i % 100 {
        0 => "+delay=300+open=5+if=bad",
        1 => "+delay=300+open=never+if=bad",
        2 => "+delay=40000",
        _ => "+delay=300",
    };
    let dir = TempDir::new().unwrap();
    let mut daemon = Daemon::start_in(dir, &["--librbd", &librbd_stub(), "--state-dir", "DIR/state"]);
    let image = |i: usize| format!("i{i}+size=65536{}", options(i));
    let calls: Vec<Value> = (0..DISKS).map(|i| create(&format!("d{i}"), &image(i))).collect();
    let config: Vec<_> =
        calls.iter().map(|call| json!({"method": call["method"], "params": call["params"]})).collect();
    let began = Instant::now();
    daemon.call("load_config", json!({"subsystems": [{"subsystem": "bdev", "config": config}]})).unwrap();
    println!("created {DISKS} disks in {:?}", began.elapsed());
    daemon.aryk(&["disk", "create", "memory", "--memory", "--size", "1M"]).unwrap();
    daemon.aryk(&["attach", "memory"]).unwrap();
    daemon.kill();
    let bad = daemon.dir().join("bad");
    std::fs::write(&bad, "").unwrap();
    let began = Instant::now();
    daemon.begin_restart();
    let first = ask(&daemon);
    println!("the successor answered {:?} after its start, the first call took {first:?}", began.elapsed());
    assert!(first < SOON);
    let (mut answered, mut longest_read) = (Duration::ZERO, Duration::ZERO);
    let socket = daemon.dir().join("vhost").join("memory");
    wait_for("the controller is restored", || UnixStream::connect(&socket).is_ok());
    println!("the controller of another disk was there after {:?}", began.elapsed());
    let absent = daemon.call("aryk_absent_get", json!({})).unwrap();
    assert!(absent.as_array().unwrap().len() > DISKS / 2, "a disk in memory waited for the images");
    let mut vm = Vm::connect(&socket);
    wait_for("the disks are restored that open", || {
        answered = answered.max(ask(&daemon));
        longest_read = longest_read.max(read(&mut vm));
        number_of_disks(&daemon) == DISKS - 2 * EACH + 1
    });
    std::fs::remove_file(bad).unwrap();
    wait_for("the disks are restored whose openings had failed", || {
        answered = answered.max(ask(&daemon));
        longest_read = longest_read.max(read(&mut vm));
        number_of_disks(&daemon) == DISKS - EACH + 1
    });
    let absent = daemon.call("aryk_absent_get", json!({})).unwrap();
    assert_eq!(absent.as_array().unwrap().len(), EACH, "{absent}");
    let [clients, clients_max, _, opening_max, opened] = counts(&daemon);
    println!(
        "restored after {:?}; the slowest reply took {answered:?}, the slowest read {longest_read:?}; {opening_max} openings at a time, {clients_max} clients",
        began.elapsed()
    );
    assert!(answered < SOON, "a call waited for the restoration: {answered:?}");
    assert!(longest_read < SOON, "a read waited for the restoration: {longest_read:?}");
    assert_eq!((clients, opened), (CLIENTS, (DISKS - EACH) as u64));
    assert!(
        (2..=32 * CLIENTS).contains(&opening_max) && clients_max <= 2 * CLIENTS,
        "{opening_max} openings, {clients_max} clients"
    );
}

/// A disk whose restoration hangs has a client that other disks use. A call that creates it again gets another client, and does
/// not exclude the first one.
#[test]
fn a_disk_that_is_created_beside_its_restoration_excludes_no_client_of_the_daemon() {
    let dir = TempDir::new().unwrap();
    let mut daemon = Daemon::start_in(dir, &["--librbd", &librbd_stub(), "--state-dir", "DIR/state"]);
    let flag = daemon.dir().join("hangs");
    let image = |i: usize| match i {
        0 => "i0+size=65536+open=never+if=hangs".to_owned(),
        i => format!("i{i}+size=65536"),
    };
    let calls: Vec<Value> = (0..5).map(|i| create(&format!("d{i}"), &image(i))).collect();
    for call in &calls[..4] {
        daemon.call("bdev_rbd_create", call["params"].clone()).unwrap();
    }
    daemon.kill();
    std::fs::write(&flag, "").unwrap();
    daemon.restart();
    wait_for("the other disks are restored", || number_of_disks(&daemon) == 3);
    daemon.call("bdev_rbd_create", calls[4]["params"].clone()).unwrap();
    std::fs::remove_file(&flag).unwrap();
    daemon.call("bdev_rbd_create", calls[0]["params"].clone()).unwrap();
    let clients = daemon.call("bdev_rbd_get_clusters_info", json!({})).unwrap();
    let clients = clients.as_array().unwrap();
    assert_eq!(clients.len(), 2, "{clients:?}");
    assert!(clients.iter().all(|client| client["blocklisted"] == false), "{clients:?}");
}

/// Reads a block. Returns how long that took.
fn read(vm: &mut Vm) -> Duration {
    let sent = Instant::now();
    vm.read(0, 0, Memory::guest_addr(48 << 10));
    while vm.take().is_none() {
        assert!(sent.elapsed() < Duration::from_secs(20), "the disk does not answer");
        std::hint::spin_loop();
    }
    sent.elapsed()
}

/// Reads one block after the other for a while. Returns the latency that one in a hundred exceeds.
fn p99(vm: &mut Vm) -> Duration {
    const WINDOW: Duration = Duration::from_millis(150);
    let (began, mut latencies) = (Instant::now(), Vec::new());
    while began.elapsed() < WINDOW {
        latencies.push(read(vm));
    }
    latencies.sort_unstable();
    latencies[latencies.len() * 99 / 100]
}

/// The requests of the VM whose cluster is stuck.
const LOAD: u16 = 5;

/// Measures the neighbour while the cluster of another VM is stuck with requests, and while that VM is idle, in turn. Returns the
/// lowest of each: a window that other programs of the computer have not disturbed. A cluster that slows others does so in all.
fn compare(daemon: &Daemon, vm: &mut Vm, neighbour: &mut Vm, round: u8) -> (Duration, Duration) {
    const WINDOWS: usize = 7;
    let gate = daemon.dir().join("stuck");
    let (mut stuck, mut quiet) = (Vec::new(), Vec::new());
    for window in 0..WINDOWS {
        std::fs::write(&gate, "").unwrap();
        let byte = round * 16 + window as u8 + 1;
        vm.memory.whole().write(48 << 10, &[byte; 4096]);
        (0..LOAD).for_each(|slot| vm.write(slot, slot.into(), Memory::guest_addr(48 << 10)));
        daemon.wait_until_busy("d");
        stuck.push(p99(neighbour));
        assert!(vm.take().is_none(), "the cluster is stuck");
        assert!(ask(daemon) < ANSWERED);
        std::fs::remove_file(&gate).unwrap();
        let mut ended = 0;
        wait_for("the requests go on", || {
            ended += usize::from(vm.take().is_some());
            ended == usize::from(LOAD)
        });
        assert!((0..LOAD).all(|slot| vm.status(slot) == 0), "a request was lost");
        vm.read(LOAD, u64::from(LOAD) - 1, Memory::guest_addr(52 << 10));
        wait_for("the data is read", || vm.take().is_some());
        assert_eq!(vm.memory.whole().read::<u8>(52 << 10), byte, "a write was lost");
        quiet.push(p99(neighbour));
    }
    let lowest = |windows: Vec<Duration>| windows.into_iter().min().unwrap();
    (lowest(stuck), lowest(quiet))
}

#[test]
fn a_stuck_cluster_does_not_slow_a_neighbour_on_its_reactor() {
    let daemon = Daemon::start(&["--librbd", &librbd_stub()]);
    daemon.aryk(&["disk", "create", "d", "--rbd", "vms/d+size=1048576+gate=stuck"]).unwrap();
    daemon.aryk(&["disk", "create", "m", "--memory", "--size", "1M"]).unwrap();
    let connect = |name: &str| {
        daemon.aryk(&["attach", name]).unwrap();
        Vm::connect(&daemon.dir().join("vhost").join(name))
    };
    let (mut vm, mut neighbour) = (connect("d"), connect("m"));
    // Other programs of the computer may disturb a whole round.
    let is_undisturbed = (0..6).any(|round| {
        let (stuck, quiet) = compare(&daemon, &mut vm, &mut neighbour, round);
        println!("p99 of the neighbour: {stuck:?} while the cluster is stuck, {quiet:?} while it is not");
        stuck.as_nanos() * 2 <= quiet.as_nanos() * 3
    });
    assert!(is_undisturbed, "a stuck cluster slows the other disks of the reactor");
}
