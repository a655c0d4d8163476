//! `aryk latency`: a disk's latency by layer, as bars.

use crate::bars::bar;
use crate::client::Client;
use crate::commands::stat::latency;
use crate::error::Error;
use crate::output::{Column, Output};
use crate::watch;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::time::Duration;

/// Width of a bar in columns.
const BAR: usize = 24;

/// A disk's latencies by layer, as in `aryk_latency_get`.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub struct Latencies {
    pub name: String,
    tick_rate: u64,
    layers: Vec<Layer>,
}

/// The requests' times in one layer.
#[derive(Debug, Clone, Deserialize, Serialize)]
struct Layer {
    layer: String,
    ops: u64,
    latency_ticks: u64,
    buckets: Buckets,
}

/// Latencies: the buckets that are not empty, in their order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(transparent)]
pub struct Buckets(Vec<Bucket>);

/// Requests that took less than `end_ticks`, and at least the end of the bucket before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
struct Bucket {
    end_ticks: u64,
    ops: u64,
}

impl Buckets {
    /// The increase since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let old = |end| before.0.iter().find(|b| b.end_ticks == end).map_or(0, |b| b.ops);
        let grown = |b: &Bucket| Bucket { ops: b.ops.saturating_sub(old(b.end_ticks)), ..*b };
        Self(self.0.iter().map(grown).filter(|b| b.ops > 0).collect())
    }

    /// The end in ticks of the bucket that this part (0 to 1) of all requests does not exceed; `None` without requests.
    pub fn quantile(&self, quantile: f64) -> Option<u64> {
        let total: u64 = self.0.iter().map(|b| b.ops).sum();
        let wanted = ((total as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        let reaches = |b: &&Bucket| {
            seen += b.ops;
            seen >= wanted
        };
        self.0.iter().find(reaches).map(|b| b.end_ticks)
    }
}

#[cfg(test)]
impl<const N: usize> From<[(u64, u64); N]> for Buckets {
    /// By the end of each, and its requests.
    fn from(buckets: [(u64, u64); N]) -> Self {
        Self(buckets.map(|(end_ticks, ops)| Bucket { end_ticks, ops }).into())
    }
}

impl Layer {
    /// The increase since `before`.
    fn since(&self, before: &Self) -> Self {
        Self {
            layer: self.layer.clone(),
            ops: self.ops.saturating_sub(before.ops),
            latency_ticks: self.latency_ticks.saturating_sub(before.latency_ticks),
            buckets: self.buckets.since(&before.buckets),
        }
    }
}

impl Latencies {
    /// Reads the latencies from the daemon.
    pub fn read(name: &str, client: &mut Client) -> Result<Self, Error> {
        let value = client.call("aryk_latency_get", json!({"name": name}));
        let value = value.map_err(|error| error.hinted(&crate::commands::disk::HINTS))?;
        serde_json::from_value(value).map_err(|e| Error::Protocol(format!("sent an unknown reply: {e}")))
    }

    /// The increase since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let old = |layer: &Layer| before.layers.iter().find(|b| b.layer == layer.layer);
        let layers = self.layers.iter().map(|now| old(now).map_or_else(|| now.clone(), |old| now.since(old)));
        Self { layers: layers.collect(), ..self.clone() }
    }

    fn time(&self, ticks: u64) -> String {
        latency(u128::from(ticks) * 1_000_000_000 / u128::from(self.tick_rate.max(1)))
    }

    /// The total over all layers.
    fn whole(&self) -> Option<&Layer> {
        self.layers.iter().find(|layer| layer.layer == "total").filter(|whole| whole.ops > 0)
    }

    /// The table of times, one line per layer.
    pub fn layers(&self, out: &Output) -> String {
        let Some(whole) = self.whole() else { return "No request has completed.".into() };
        let (sum, ops) = (whole.latency_ticks.max(1), whole.ops);
        let row = |layer: &Layer| {
            let share = layer.latency_ticks as f64 / sum as f64;
            let at = |q| layer.buckets.quantile(q).map_or_else(|| "-".into(), |ticks| self.time(ticks));
            let is_part = layer.layer != "total";
            vec![
                layer.layer.clone(),
                self.time(layer.latency_ticks / ops),
                at(0.5),
                at(0.99),
                at(0.999),
                if is_part { format!("{:.0}%", share * 100.0) } else { String::new() },
                if is_part { bar(share, BAR) } else { String::new() },
            ]
        };
        let columns: [Column; 7] = [
            ("LAYER", false),
            ("MEAN", true),
            ("P50", true),
            ("P99", true),
            ("P99.9", true),
            ("SHARE", true),
            ("", false),
        ];
        out.table(&columns, self.layers.iter().map(row))
    }

    /// The distribution of latencies, one line per power of two.
    pub fn spread(&self, out: &Output) -> String {
        let Some(whole) = self.whole() else { return String::new() };
        let mut octaves: Vec<(u64, u64)> = Vec::new();
        for &Bucket { end_ticks, ops: count } in &whole.buckets.0 {
            let end = end_ticks.checked_next_power_of_two().unwrap_or(u64::MAX);
            match octaves.last_mut() {
                Some((last, sum)) if *last == end => *sum += count,
                _ => octaves.push((end, count)),
            }
        }
        let most = octaves.iter().map(|(_, count)| *count).max().unwrap_or(1).max(1);
        let all: u64 = octaves.iter().map(|(_, count)| count).sum();
        let row = |&(end, count): &(u64, u64)| {
            vec![
                self.time(end),
                count.to_string(),
                format!("{:.1}%", count as f64 * 100.0 / all.max(1) as f64),
                bar(count as f64 / most as f64, 40),
            ]
        };
        let columns: [Column; 4] = [("BELOW", true), ("REQUESTS", true), ("SHARE", true), ("", false)];
        out.table(&columns, octaves.iter().map(row))
    }

    fn page(&self, out: &Output) -> String {
        let Some(whole) = self.whole() else { return format!("{}: no request has completed.", self.name) };
        let mean = self.time(whole.latency_ticks / whole.ops);
        let head = format!("{}: {} requests, {mean} each", crate::output::printable(&self.name), whole.ops);
        format!("{head}\n\n{}\n\n{}", self.layers(out), self.spread(out))
    }
}

/// Prints latencies since the disk was created; with an interval, since the last print.
pub fn show(name: &str, every: Option<Duration>, client: &mut Client, out: &Output) -> Result<(), Error> {
    let mut before = Latencies::read(name, client)?;
    let print = |latencies: &Latencies| {
        let json = serde_json::to_value(latencies).expect("they were parsed from JSON");
        out.print(&json, || latencies.page(out))
    };
    let Some(every) = every else { return print(&before) };
    loop {
        watch::wait(every);
        let now = Latencies::read(name, client)?;
        print(&now.since(&before))?;
        before = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer<const N: usize>(name: &str, ops: u64, latency_ticks: u64, buckets: [(u64, u64); N]) -> Layer {
        Layer { layer: name.into(), ops, latency_ticks, buckets: buckets.into() }
    }

    fn latencies() -> Latencies {
        Latencies {
            name: "vm1".into(),
            tick_rate: 1_000_000_000,
            layers: vec![
                layer("queue", 100, 2_000_000, [(18_432, 100)]),
                layer("module", 1000, 8_000_000, [(4_096, 500), (16_384, 500)]),
                layer("total", 1000, 10_000_000, [(4_096, 500), (14_336, 400), (32_768, 100)]),
            ],
        }
    }

    #[test]
    fn shares_are_of_the_whole() {
        let text = latencies().page(&Output::plain());
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "vm1: 1000 requests, 10us each");
        let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(cells(lines[3]), ["queue", "2000ns", "18us", "18us", "18us", "20%", "████▊"]);
        assert_eq!(cells(lines[4])[..6], ["module", "8000ns", "4096ns", "16us", "16us", "80%"]);
        assert_eq!(cells(lines[5]), ["total", "10us", "4096ns", "32us", "32us"]);
        assert!(text.contains("10.0%") && text.lines().all(|l| l.chars().count() <= 80), "{text}");
    }

    #[test]
    fn increase_since_an_earlier_read() {
        let (before, mut now) = (latencies(), latencies());
        now.layers[2] = layer("total", 1010, 10_500_000, [(4_096, 500), (14_336, 410), (32_768, 100)]);
        let since = now.since(&before);
        let whole = since.whole().unwrap();
        assert_eq!(
            (whole.ops, whole.latency_ticks, &*whole.buckets.0),
            (10, 500_000, &[Bucket { end_ticks: 14_336, ops: 10 }][..])
        );
        assert!(before.since(&before).page(&Output::plain()).contains("no request"));
    }
}
