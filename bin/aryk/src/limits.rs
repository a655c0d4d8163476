//! Limits in the notation of the command line: `--iops 3k --bandwidth 125M --burst 2s`.

use crate::commands::{number, object};
use crate::size::Size;
use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fmt;
use std::str::FromStr;

/// The limits of a disk or a group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// Requests per second: 3000, 10k. 0 means no limit, here and below
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<Rate>,
    /// Reads per second
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<Rate>,
    /// Writes per second, including all other requests that are not reads
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<Rate>,
    /// Bytes per second: 125M, 1G
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
    /// Bytes read per second
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bandwidth: Option<Bandwidth>,
    /// Bytes written per second
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_bandwidth: Option<Bandwidth>,
    /// Burst: the unused budget of how much time may accumulate: 2s, 1m
    #[arg(long, value_name = "TIME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<Burst>,
    /// Combine both limits on one scale: requests of 4 KiB reach the limit of requests, requests of 4 MiB the limit of bytes
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub combined: Option<bool>,
}

/// A number of requests, with powers of 1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "u64")]
pub struct Rate(pub u64);

/// A number of bytes, a multiple of 1 MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Size", into = "Size")]
pub struct Bandwidth(pub Size);

/// A duration in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "u64")]
pub struct Burst(pub u64);

/// A number, or a text of one.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Number(u64),
    Text(String),
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || "give a whole number, with k or M (powers of 1000), such as 10k; 0 means no limit".to_owned();
        let (digits, unit) = match text.trim() {
            text if text.ends_with(['k', 'K']) => (&text[..text.len() - 1], 1_000),
            text if text.ends_with(['m', 'M']) => (&text[..text.len() - 1], 1_000_000),
            text => (text, 1),
        };
        let count: u64 = digits.parse().map_err(|_| wrong())?;
        count.checked_mul(unit).map(Self).ok_or_else(wrong)
    }
}

impl FromStr for Bandwidth {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.parse::<Size>()?.try_into()
    }
}

impl FromStr for Burst {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit: Option<u64> = match &text[digits.len()..] {
            "s" | "" => Some(1),
            "m" => Some(60),
            "h" => Some(3600),
            _ => None,
        };
        let seconds = unit.and_then(|unit| digits.parse::<u64>().ok()?.checked_mul(unit));
        let wrong = || "give a whole number with s, m or h, up to a day, such as 2s".to_owned();
        seconds.filter(|&s| s <= 86_400).map(Self).ok_or_else(wrong)
    }
}

impl TryFrom<Written> for Rate {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Number(count) => Ok(Self(count)),
            Written::Text(text) => text.parse(),
        }
    }
}

impl TryFrom<Written> for Burst {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Number(seconds) => seconds.to_string().parse(),
            Written::Text(text) => text.parse(),
        }
    }
}

impl TryFrom<Size> for Bandwidth {
    type Error = String;

    fn try_from(size: Size) -> Result<Self, String> {
        let is_whole = size.0.is_multiple_of(1 << 20);
        is_whole.then_some(Self(size)).ok_or_else(|| format!("{size} per second is not a multiple of 1M"))
    }
}

impl From<Rate> for u64 {
    fn from(rate: Rate) -> Self {
        rate.0
    }
}

impl From<Bandwidth> for Size {
    fn from(bandwidth: Bandwidth) -> Self {
        bandwidth.0
    }
}

impl From<Burst> for u64 {
    fn from(burst: Burst) -> Self {
        burst.0
    }
}

impl Limits {
    /// The parameters of the call that sets these limits.
    pub fn params(&self, name: &str) -> Value {
        let count = |rate: Option<Rate>| rate.map(|rate| json!(rate.0));
        let mbytes = |bandwidth: Option<Bandwidth>| bandwidth.map(|b| json!(b.0.0 >> 20));
        object([
            ("name", Some(json!(name))),
            ("rw_ios_per_sec", count(self.iops)),
            ("rw_mbytes_per_sec", mbytes(self.bandwidth)),
            ("r_mbytes_per_sec", mbytes(self.read_bandwidth)),
            ("w_mbytes_per_sec", mbytes(self.write_bandwidth)),
            ("r_ios_per_sec", count(self.read_iops)),
            ("w_ios_per_sec", count(self.write_iops)),
            ("burst_seconds", self.burst.map(|burst| json!(burst.0))),
            ("combined", self.combined.map(|combined| json!(combined))),
        ])
    }

    /// Whether no limit is given.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// These limits with each absent one set to "no limit".
    pub fn complete(&self) -> Self {
        let none = Bandwidth(Size(0));
        Self {
            iops: Some(self.iops.unwrap_or(Rate(0))),
            read_iops: Some(self.read_iops.unwrap_or(Rate(0))),
            write_iops: Some(self.write_iops.unwrap_or(Rate(0))),
            bandwidth: Some(self.bandwidth.unwrap_or(none)),
            read_bandwidth: Some(self.read_bandwidth.unwrap_or(none)),
            write_bandwidth: Some(self.write_bandwidth.unwrap_or(none)),
            burst: Some(self.burst.unwrap_or(Burst(0))),
            combined: Some(self.combined.unwrap_or_default()),
        }
    }

    /// The limits in a reply of the daemon; 0 means absent.
    pub fn of(limits: &Value) -> Self {
        let rate = |member: &str| Some(number(limits, member)).filter(|&n| n > 0).map(Rate);
        let bandwidth = |member: &str| {
            let mbytes = Some(number(limits, member)).filter(|&n| n > 0);
            mbytes.map(|n| Bandwidth(Size(n.saturating_mul(1 << 20))))
        };
        Self {
            iops: rate("rw_ios_per_sec"),
            read_iops: rate("r_ios_per_sec"),
            write_iops: rate("w_ios_per_sec"),
            bandwidth: bandwidth("rw_mbytes_per_sec"),
            read_bandwidth: bandwidth("r_mbytes_per_sec"),
            write_bandwidth: bandwidth("w_mbytes_per_sec"),
            burst: Some(number(limits, "burst_seconds")).filter(|&s| s > 0).map(Burst),
            combined: limits["combined"].as_bool().filter(|&combined| combined),
        }
    }
}

impl fmt::Display for Limits {
    /// Formats limits such as `3000 iops, 125M/s, burst 2s`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = |rate: Option<Rate>, what: &str| rate.map(|rate| format!("{} {what}", rate.0));
        let bandwidth = |b: Option<Bandwidth>, what: &str| b.map(|b| format!("{}/s{what}", b.0));
        let parts = [
            rate(self.iops, "iops"),
            rate(self.read_iops, "read iops"),
            rate(self.write_iops, "write iops"),
            bandwidth(self.bandwidth, ""),
            bandwidth(self.read_bandwidth, " read"),
            bandwidth(self.write_bandwidth, " written"),
            self.combined.map(|_| "combined".to_owned()),
            self.burst.map(|burst| format!("burst {}s", burst.0)),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        f.write_str(if parts.is_empty() { "none" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_parse() {
        assert_eq!("10k".parse(), Ok(Rate(10_000)));
        assert_eq!("0".parse(), Ok(Rate(0)));
        assert_eq!("125M".parse(), Ok(Bandwidth(Size(125 << 20))));
        assert_eq!(("2".parse(), "5m".parse()), (Ok(Burst(2)), Ok(Burst(300))));
        for wrong in ["", "k", "-1", "1.5k", "99999999999999999999"] {
            assert!(wrong.parse::<Rate>().is_err(), "{wrong}");
        }
        for wrong in ["1", "100K", "-1M", "1MB"] {
            assert!(wrong.parse::<Bandwidth>().is_err(), "{wrong}");
        }
        for wrong in ["", "-1s", "2d", "1.5s", "100000s"] {
            assert!(wrong.parse::<Burst>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn limits_convert_to_parameters_and_back() {
        let text =
            r#"{"iops": "3k", "read_iops": 7, "write_bandwidth": "2G", "burst": "2s", "combined": true}"#;
        let limits: Limits = serde_json::from_str(text).unwrap();
        assert_eq!(limits.to_string(), "3000 iops, 7 read iops, 2G/s written, combined, burst 2s");
        assert_eq!(Limits::of(&limits.params("d")), limits);
        assert_eq!(Limits::of(&limits.complete().params("d")), limits);
        assert_eq!(Limits::of(&Limits::default().complete().params("d")).to_string(), "none");
        assert!(serde_json::from_str::<Limits>(r#"{"iops": -1}"#).is_err());
    }
}
