//! fio's `io_uring` engine on the same kind of file, without a transport: the throughput of kernel and disk alone.

use crate::process::BACK_END_CORE;
use crate::workload::Workload;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// fio's arguments for a workload on a file.
fn arguments(workload: &Workload, file: &Path, warm_up: Duration, span: Duration) -> Vec<String> {
    vec![
        "--name=b".to_owned(),
        "--ioengine=io_uring".to_owned(),
        "--direct=1".to_owned(),
        "--time_based".to_owned(),
        "--output-format=json".to_owned(),
        format!("--filename={}", file.display()),
        format!("--rw={}", workload.rw()),
        format!("--rwmixwrite={}", workload.write_percent),
        format!("--bs={}", workload.block),
        format!("--iodepth={}", workload.depth),
        format!("--ramp_time={}ms", warm_up.as_millis()),
        format!("--runtime={}ms", span.as_millis()),
        format!("--cpus_allowed={BACK_END_CORE}"),
    ]
}

/// fio's command line, for the report.
pub fn command(workload: &Workload, file: &Path, warm_up: Duration, span: Duration) -> String {
    format!("fio {}", arguments(workload, file, warm_up, span).join(" "))
}

/// Runs fio; returns requests per second.
pub fn rate(workload: &Workload, file: &Path, warm_up: Duration, span: Duration) -> Result<f64> {
    let args = arguments(workload, file, warm_up, span);
    let output = Command::new("fio").args(&args).output().context("running fio")?;
    ensure!(output.status.success(), "fio: {}", String::from_utf8_lossy(&output.stderr));
    let results: Value = serde_json::from_slice(&output.stdout).context("fio's results")?;
    let job = &results["jobs"][0];
    let sides = job["read"]["iops"].as_f64().zip(job["write"]["iops"].as_f64());
    sides.map(|(reads, writes)| reads + writes).context("fio reports no rates")
}
