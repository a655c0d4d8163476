//! What operators see of an NVMe drive: latencies by layer, the trace, metrics, `aryk top drives`.

use crate::front_end::FrontEnd;
use crate::harness::{Daemon, wait_for};
use crate::metrics::scrape;
use crate::nvme::{Drive, attach, connect};
use aryk_nvme_model::{Action, Queue, Rule};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const READ: u8 = 2;
const READS: u64 = 20;
/// The time of each read in the drive, and the least that counts as it: the model's clock may be behind.
const DELAY: Duration = Duration::from_millis(5);
const SLOW: Duration = Duration::from_millis(4);

/// A VM on a drive whose next reads take a time.
fn slow_drive(daemon: &Daemon) -> (Drive, FrontEnd) {
    let socket = daemon.dir().join("drive");
    let drive = Drive::new(&socket, "S1");
    attach(daemon, &socket);
    daemon.call("vhost_create_blk_controller", json!({"ctrlr": "vm", "dev_name": "Nvme0n1"})).unwrap();
    let mut vm = connect(daemon, "vm");
    vm.write(0, &[7; 4096]).unwrap();
    let rule = Rule::once(Queue::Io, READ, Action::Delay(DELAY.as_nanos() as u64));
    drive.model.with(|model| model.faults().add(Rule { times: u64::MAX, ..rule }));
    (drive, vm)
}

#[test]
fn the_time_in_the_drive_is_apart_from_ours() {
    let daemon = Daemon::start(&["--metrics", "0"]);
    let (drive, mut vm) = slow_drive(&daemon);
    daemon.call("bdev_reset_iostat", json!({})).unwrap();
    daemon.call("trace_clear", json!({})).unwrap();
    for _ in 0..READS {
        assert_eq!(vm.read(0, 4096).unwrap(), [7; 4096]);
    }
    let latency = daemon.call("aryk_latency_get", json!({"name": "Nvme0n1"})).unwrap();
    let of = |name: &str, field: &str| {
        let mut layers = latency["layers"].as_array().unwrap().iter();
        layers.find(|layer| layer["layer"] == name).unwrap()[field].as_u64().unwrap()
    };
    let slow = SLOW.as_nanos() as u64 * READS;
    assert_eq!(of("module", "ops"), READS, "{latency}");
    assert!(of("module", "latency_ticks") >= slow, "the drive's time is the module's: {latency}");
    let rest = ["throttle", "queue", "front-end"].map(|layer| of(layer, "latency_ticks")).iter().sum::<u64>();
    assert!(rest < slow / 2, "the drive's time is in another layer: {latency}");

    // The trace has each read in each layer, and the drive's time between two points.
    let trace = daemon.call("aryk_trace_get", json!({"count": 4000})).unwrap();
    let records = trace["records"].as_array().unwrap();
    let at = |layer: &str, point: &str| -> Vec<u64> {
        let is_it = |record: &&Value| record["layer"] == layer && record["point"] == point;
        records.iter().filter(is_it).map(|record| record["ticks"].as_u64().unwrap()).collect()
    };
    for layer in ["front-end", "bdev"] {
        let (submitted, completed) = (at(layer, "submit"), at(layer, "complete"));
        assert_eq!((submitted.len() as u64, completed.len() as u64), (READS, READS), "{layer}: {trace}");
        // One read after the other.
        let is_slow = |(from, to): (&u64, &u64)| to - from >= SLOW.as_nanos() as u64;
        assert!(submitted.iter().zip(&completed).all(is_slow), "{layer}: {trace}");
    }
    assert!(records.iter().any(|record| record["object"] == "Nvme0n1"), "{trace}");

    let port = daemon.port();
    let value = |name: &str| scrape(port).value(name, &[("nvme", "Nvme0")]).unwrap();
    wait_for("the reads among the metrics", || value("aryk_nvme_commands_total") >= (READS + 1) as f64);
    assert!(value("aryk_nvme_doorbells_total") > READS as f64);
    assert_eq!((value("aryk_nvme_ready"), value("aryk_nvme_resets_total")), (1.0, 0.0));
    drop((vm, daemon, drive));
}

#[test]
fn top_shows_the_commands_of_a_drive() {
    let daemon = Daemon::start(&[]);
    let (drive, mut vm) = slow_drive(&daemon);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                vm.read(0, 4096).unwrap();
            }
        });
        let text = daemon.aryk(&["top", "drives", "--once", "--every", "1"]);
        let all = daemon.aryk(&["top", "drives", "--once", "--every", "1", "--json"]);
        is_over.store(true, Ordering::Relaxed);
        let text = text.unwrap();
        let row = text.lines().find(|line| line.contains("Nvme0")).unwrap_or_else(|| panic!("{text}"));
        // At most one command in 5 ms.
        let is_rate = |word: &str| word.parse::<u64>().is_ok_and(|rate| (20..=200).contains(&rate));
        assert!(row.split_whitespace().any(is_rate), "{text}");
        let all: Value = serde_json::from_str(&all.unwrap()).unwrap();
        let commands = all["per_second"]["drives"][0]["commands"].as_u64().unwrap_or_else(|| panic!("{all}"));
        assert!((20..=200).contains(&commands), "{all}");
    });
    drop((vm, daemon, drive));
}
