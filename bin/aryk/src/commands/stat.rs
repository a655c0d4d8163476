//! `aryk disk stat`: counts of disks, or rates per second.

use super::{elements, number, object, text};
use crate::client::Client;
use crate::error::Error;
use crate::output::{Column, Output};
use crate::size::Size;
use crate::watch;
use serde_json::{Value, json};
use std::time::Duration;

/// Prints counts since the disks were created; with an interval, rates since the last print.
pub fn stat(
    name: Option<&str>,
    every: Option<Duration>,
    client: &mut Client,
    out: &Output,
) -> Result<(), Error> {
    let mut before = read(name, client)?;
    let Some(every) = every else {
        return out.print(&before, || table(&before, out));
    };
    loop {
        watch::wait(every);
        let now = read(name, client)?;
        let rates = rates(&before, &now);
        out.print(&rates, || rates_table(&rates, out))?;
        before = now;
    }
}

fn read(name: Option<&str>, client: &mut Client) -> Result<Value, Error> {
    let names = name.map(|name| json!([name]));
    let stats = client.call("bdev_get_iostat", object([("names", names)]));
    stats.map_err(|error| error.hinted(&super::disk::HINTS))
}

/// Counters of failed requests, by kind.
const ERRORS: [&str; 8] = [
    "num_read_errors",
    "num_write_errors",
    "num_flush_errors",
    "num_unmap_errors",
    "num_write_zeroes_errors",
    "num_copy_errors",
    "num_compare_errors",
    "num_compare_and_write_errors",
];

fn table(stats: &Value, out: &Output) -> String {
    if elements(&stats["bdevs"]).is_empty() {
        return super::disk::NONE.into();
    }
    let tick_rate = number(stats, "tick_rate").max(1);
    let row = |disk: &Value| {
        let mean = |ticks: &str, ops: &str| match number(disk, ops) {
            0 => "-".to_owned(),
            ops => latency(nanoseconds(number(disk, ticks), tick_rate) / u128::from(ops)),
        };
        vec![
            text(disk, "name").to_owned(),
            number(disk, "num_read_ops").to_string(),
            Size(number(disk, "bytes_read")).to_string(),
            mean("read_latency_ticks", "num_read_ops"),
            number(disk, "num_write_ops").to_string(),
            Size(number(disk, "bytes_written")).to_string(),
            mean("write_latency_ticks", "num_write_ops"),
            ERRORS.map(|member| number(disk, member)).iter().sum::<u64>().to_string(),
        ]
    };
    let columns: [Column; 8] = [
        ("NAME", false),
        ("READS", true),
        ("BYTES", true),
        ("MEAN", true),
        ("WRITES", true),
        ("BYTES", true),
        ("MEAN", true),
        ("ERRORS", true),
    ];
    out.table(&columns, elements(&stats["bdevs"]).iter().map(row))
}

/// Rates per second between two reads; a disk that was created between them starts from zero.
fn rates(before: &Value, now: &Value) -> Value {
    let tick_rate = number(now, "tick_rate").max(1);
    let ticks = number(now, "ticks").saturating_sub(number(before, "ticks")).max(1);
    let rate = |disk: &Value| {
        let is_same = |b: &&Value| b["name"] == disk["name"];
        let old = elements(&before["bdevs"]).iter().find(is_same).unwrap_or(&Value::Null);
        let grown = |member: &str| number(disk, member).saturating_sub(number(old, member));
        let per_second = |member: &str| {
            let all = u128::from(grown(member)) * u128::from(tick_rate) / u128::from(ticks);
            u64::try_from(all).unwrap_or(u64::MAX)
        };
        let mean_ns = |spent: &str, ops: &str| match grown(ops) {
            0 => Value::Null,
            ops => json!((nanoseconds(grown(spent), tick_rate) / u128::from(ops)) as u64),
        };
        json!({
            "name": disk["name"],
            "reads": per_second("num_read_ops"),
            "bytes_read": per_second("bytes_read"),
            "read_ns": mean_ns("read_latency_ticks", "num_read_ops"),
            "writes": per_second("num_write_ops"),
            "bytes_written": per_second("bytes_written"),
            "write_ns": mean_ns("write_latency_ticks", "num_write_ops"),
            "errors": ERRORS.map(grown).iter().sum::<u64>(),
            "in_flight": disk["queue_depth"],
        })
    };
    let disks: Vec<_> = elements(&now["bdevs"]).iter().map(rate).collect();
    json!({"seconds": ticks as f64 / tick_rate as f64, "per_second": disks})
}

fn rates_table(rates: &Value, out: &Output) -> String {
    let row = |disk: &Value| {
        let mean = |ns: &Value| ns.as_u64().map_or_else(|| "-".to_owned(), |ns| latency(ns.into()));
        vec![
            text(disk, "name").to_owned(),
            number(disk, "reads").to_string(),
            Size(number(disk, "bytes_read")).to_string(),
            mean(&disk["read_ns"]),
            number(disk, "writes").to_string(),
            Size(number(disk, "bytes_written")).to_string(),
            mean(&disk["write_ns"]),
            number(disk, "in_flight").to_string(),
            number(disk, "errors").to_string(),
        ]
    };
    let columns: [Column; 9] = [
        ("NAME", false),
        ("READ/s", true),
        ("BYTES/s", true),
        ("MEAN", true),
        ("WRITE/s", true),
        ("BYTES/s", true),
        ("MEAN", true),
        ("NOW", true),
        ("ERRORS", true),
    ];
    out.table(&columns, elements(&rates["per_second"]).iter().map(row))
}

fn nanoseconds(ticks: u64, tick_rate: u64) -> u128 {
    u128::from(ticks) * 1_000_000_000 / u128::from(tick_rate)
}

/// A time for people to read.
pub fn latency(ns: u128) -> String {
    match ns {
        0..10_000 => format!("{ns}ns"),
        10_000..10_000_000 => format!("{}us", ns / 1_000),
        10_000_000.. => format!("{}ms", ns / 1_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies() {
        assert_eq!(latency(nanoseconds(1500, 1_000_000_000)), "1500ns");
        assert_eq!(latency(nanoseconds(24_000, 2_400_000_000)), "10us");
        assert_eq!(latency(nanoseconds(50_000_000, 1_000_000_000)), "50ms");
    }

    #[test]
    fn rates_are_per_second_between_two_reads() {
        let reading = |ticks: u64, reads: u64| {
            let disk = json!({"name": "d", "num_read_ops": reads, "bytes_read": reads * 4096,
                "read_latency_ticks": reads * 2000, "num_write_errors": reads / 10, "queue_depth": 3});
            json!({"tick_rate": 1000, "ticks": ticks, "bdevs": [disk]})
        };
        let rates = rates(&reading(1000, 10), &reading(3000, 210));
        assert_eq!(rates["seconds"], 2.0);
        let disk = &rates["per_second"][0];
        assert_eq!((&disk["reads"], &disk["bytes_read"]), (&json!(100), &json!(409_600)));
        assert_eq!((&disk["read_ns"], &disk["write_ns"]), (&json!(2_000_000_000_u64), &json!(null)));
        // Errors are rare: the column shows their number, not their rate.
        assert_eq!(disk["errors"], 20);
        let text = rates_table(&rates, &Output::plain());
        assert!(text.contains("400K") && text.contains("2000ms"), "{text}");
    }

    #[test]
    fn the_largest_numbers_fit_80_columns() {
        let disk = json!({"name": "x".repeat(40), "reads": 9_999_999, "bytes_read": u64::MAX, "read_ns": 999_999_999_u64,
            "writes": 9_999_999, "bytes_written": u64::MAX, "write_ns": 999_999_999_u64, "in_flight": 16384});
        let text = rates_table(&json!({"per_second": [disk]}), &Output::plain());
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("9999999  16383.9P  999ms"), "{text}");
    }
}
