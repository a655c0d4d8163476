//! The output of `aryk bench`: a table for people, an object for programs.

use super::args::BenchArgs;
use super::load::Measured;
use super::{Outcome, blocks_of};
use crate::commands::stat::latency;
use crate::output::{Column, Output};
use crate::size::Size;
use hdrhistogram::Histogram;
use serde_json::{Value, json};

/// The result of a run.
pub struct Report<'a> {
    pub args: &'a BenchArgs,
    pub measured: Option<Outcome>,
    /// The limit of this front-end, in requests per second.
    pub ceiling: Option<f64>,
}

impl Report<'_> {
    /// The JSON output, as described in `docs/cli.md`.
    pub fn json(&self) -> Value {
        let args = self.args;
        let mut value = json!({
            "workload": {
                "rw": args.rw.to_string(),
                "bs": args.bs.0,
                "qd": args.qd,
                "queues": args.queues,
                "ring": args.ring,
                "scsi": args.scsi.map(|unit| unit.to_string()),
                "rate": args.rate,
            },
            "ceiling": self.ceiling.map(|iops| json!({"iops": iops.round() as u64})),
        });
        let Some(Outcome { disk, load, checked }) = &self.measured else { return value };
        let [read, write] = &load.latency;
        let extra = json!({
            "disk": {"bytes": disk.bytes, "block_size": disk.block_size, "readonly": disk.readonly},
            "area": blocks_of(args, disk.bytes) * args.bs.0,
            "seconds": load.elapsed.as_secs_f64(),
            "requests": load.requests(),
            "iops": load.rate().round() as u64,
            "bytes_per_second": (load.rate() * args.bs.0 as f64).round() as u64,
            "busy": load.busy,
            "read": self.side_json(load, read),
            "write": self.side_json(load, write),
            "verified_blocks": checked,
        });
        let (Some(all), Value::Object(extra)) = (value.as_object_mut(), extra) else {
            unreachable!("both are objects")
        };
        all.extend(extra);
        value
    }

    /// The JSON of reads or of writes; null if there were none.
    fn side_json(&self, load: &Measured, side: &Histogram<u64>) -> Value {
        if side.is_empty() {
            return Value::Null;
        }
        let iops = rate(load, side);
        let at = |quantile| side.value_at_quantile(quantile);
        json!({
            "requests": side.len(),
            "iops": iops.round() as u64,
            "bytes_per_second": (iops * self.args.bs.0 as f64).round() as u64,
            "latency_ns": {
                "min": side.min(), "mean": side.mean().round() as u64,
                "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "p99.9": at(0.999),
                "max": side.max(),
            },
        })
    }

    /// The output for people.
    pub fn text(&self, out: &Output) -> String {
        let mut lines = Vec::new();
        if let Some(Outcome { load, checked, .. }) = &self.measured {
            lines.push(self.table(load, out));
            lines.push(String::new());
            let (requests, seconds, busy) = (load.requests(), load.elapsed.as_secs_f64(), 100.0 * load.busy);
            lines.push(format!(
                "{requests} requests in {seconds:.1} s; this front-end was busy {busy:.0}% of the time"
            ));
            lines.extend(
                checked.map(|n| format!("{n} blocks of {} verified: all correct", Size(self.args.bs.0))),
            );
        }
        lines.extend(self.ceiling.map(|iops| self.ceiling_text(iops)));
        lines.join("\n")
    }

    fn table(&self, load: &Measured, out: &Output) -> String {
        const COLUMNS: [Column; 8] = [
            ("", false),
            ("IOPS", true),
            ("MB/S", true),
            ("P50", true),
            ("P90", true),
            ("P99", true),
            ("P99.9", true),
            ("MAX", true),
        ];
        let row = |(name, side): (&str, &Histogram<u64>)| {
            let iops = rate(load, side);
            let at = |quantile| latency(side.value_at_quantile(quantile).into());
            vec![
                name.to_owned(),
                format!("{iops:.0}"),
                format!("{:.1}", iops * self.args.bs.0 as f64 / 1e6),
                at(0.5),
                at(0.9),
                at(0.99),
                at(0.999),
                latency(side.max().into()),
            ]
        };
        let sides = ["read", "write"].into_iter().zip(&load.latency);
        out.table(&COLUMNS, sides.filter(|(_, side)| !side.is_empty()).map(row))
    }

    fn ceiling_text(&self, ceiling: f64) -> String {
        let text = format!("front-end's own limit: {ceiling:.0} IOPS");
        let Some(measured) = &self.measured else { return text };
        let share = 100.0 * measured.load.rate() / ceiling.max(1.0);
        format!("{text}; the result is {share:.0}% of it")
    }
}

fn rate(load: &Measured, side: &Histogram<u64>) -> f64 {
    side.len() as f64 / load.elapsed.as_secs_f64().max(1e-9)
}
