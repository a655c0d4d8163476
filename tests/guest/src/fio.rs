//! fio's measurements, from its `--output-format=json`.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// One direction of one job.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// Requests that completed.
    pub ios: u64,
    /// Requests a second.
    pub iops: f64,
    /// Bytes a second.
    pub bytes_per_second: f64,
    /// Completion latency, mean, nanoseconds.
    pub latency_ns_mean: f64,
    /// Completion latency, median, nanoseconds.
    pub latency_ns_p50: u64,
    /// Completion latency, 99th percentile, nanoseconds.
    pub latency_ns_p99: u64,
}

/// A job of a fio run.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// `--name`.
    pub name: String,
    /// Reads, including those of verification, if there were any.
    pub read: Option<Measured>,
    /// Writes, if there were any.
    pub write: Option<Measured>,
}

/// Parses a run's report.
///
/// # Errors
/// The report is not fio's JSON, or a job ended with an error (failed verification is one).
pub fn parse(report: &str) -> Result<Vec<Job>> {
    // fio prints warnings before the JSON on the same stream.
    let start = report.find('{').context("fio reported nothing")?;
    let mut values = serde_json::Deserializer::from_str(&report[start..]).into_iter::<Value>();
    let root = values.next().context("fio reported nothing")??;
    let jobs = root["jobs"].as_array().context("fio's report has no jobs")?;
    jobs.iter().map(job).collect()
}

fn job(job: &Value) -> Result<Job> {
    let name = job["jobname"].as_str().context("a job without a name")?.to_owned();
    let error = job["error"].as_i64().context("a job without a result")?;
    ensure!(error == 0, "fio's job {name} failed with errno {error}");
    Ok(Job { name, read: measured(&job["read"])?, write: measured(&job["write"])? })
}

fn measured(direction: &Value) -> Result<Option<Measured>> {
    let ios = direction["total_ios"].as_u64().context("a direction without total_ios")?;
    if ios == 0 {
        return Ok(None);
    }
    let latency = &direction["clat_ns"];
    let percentile = |key: &str| latency["percentile"][key].as_u64().context("no latency percentiles");
    let number = |value: &Value| value.as_f64().context("a number is missing");
    Ok(Some(Measured {
        ios,
        iops: number(&direction["iops"])?,
        bytes_per_second: number(&direction["bw_bytes"])?,
        latency_ns_mean: number(&latency["mean"])?,
        latency_ns_p50: percentile("50.000000")?,
        latency_ns_p99: percentile("99.000000")?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(error: u32) -> String {
        format!(
            r#"note: a warning
{{"jobs": [{{"jobname": "x", "error": {error},
  "read": {{"total_ios": 0, "iops": 0.0}},
  "write": {{"total_ios": 5, "iops": 2.5, "bw_bytes": 10240,
    "clat_ns": {{"mean": 12.5, "percentile": {{"50.000000": 12, "99.000000": 20}}}}}}}}]}}
trailing"#
        )
    }

    #[test]
    fn numbers_are_found_between_other_lines() {
        let jobs = parse(&report(0)).unwrap();
        let write = jobs[0].write.unwrap();
        assert_eq!((jobs[0].name.as_str(), jobs[0].read), ("x", None));
        assert_eq!((write.ios, write.latency_ns_p50, write.latency_ns_p99), (5, 12, 20));
        assert!((write.iops - 2.5).abs() < f64::EPSILON);
    }

    #[test]
    fn a_failed_job_is_an_error() {
        assert!(parse(&report(84)).unwrap_err().to_string().contains("errno 84"));
        assert!(parse("fio: engine not found").is_err());
    }
}
