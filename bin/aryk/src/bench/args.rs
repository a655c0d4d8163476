//! The arguments of `aryk bench`.

use crate::size::Size;
use aryk_front_end::Format;
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  aryk bench vm1                                  a disk or controller by its name
  aryk bench vm1.sock                             random reads of 4K, 32 in flight
  aryk bench vm1.sock --rw read --bs 128k --qd 8  one after another
  aryk bench vm1.sock --rate 10k --time 1m        10,000 a second, come what may
  aryk bench vm1.sock --rw mix:70 --destroy       70% reads, 30% writes
  aryk bench vm1.sock --rw write --area 256M --requests 64k --verify --destroy
                                                  write, and read it all back
  aryk bench vm1.sock --scsi=3                    target 3 of a SCSI host
  aryk bench --ceiling --qd 128                   how fast this front-end can be";

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct BenchArgs {
    /// The disk's vhost-user socket, or the name of a controller or disk of the daemon. No other front-end may be connected
    #[arg(value_name = "SOCKET|NAME", required_unless_present = "ceiling")]
    pub target: Option<PathBuf>,
    /// The socket is a SCSI host's: its target, and the target's unit [without: a block device's]
    #[arg(long, value_name = "TARGET[:LUN]", num_args = 0..=1, require_equals = true, default_missing_value = "0")]
    pub scsi: Option<Unit>,
    /// Kind of requests: randread, randwrite, read, write (sequential), or mix:70 (70% reads, at random)
    #[arg(long, default_value = "randread")]
    pub rw: Mix,
    /// Bytes of a request
    #[arg(long, value_name = "SIZE", default_value = "4k")]
    pub bs: Size,
    /// Requests in flight per queue; with --rate, the maximum
    #[arg(long, value_name = "N", default_value = "32", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub qd: u16,
    /// Number of queues
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub queues: u16,
    /// Duration: 10s, 500ms, 2m [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "requests")]
    pub time: Option<Duration>,
    /// Number of requests instead of a duration: 100k
    #[arg(long, value_name = "N", value_parser = count)]
    pub requests: Option<u64>,
    /// Requests per second: 10k. They are due at random times, independent of the disk's speed; latency counts from when each was
    /// due
    #[arg(long, value_name = "N", value_parser = count)]
    pub rate: Option<u64>,
    /// Stamp the written data, and check the read data. Without writes, check the data of an earlier run with --verify
    #[arg(long)]
    pub verify: bool,
    /// Allow overwriting the disk's data
    #[arg(long)]
    pub destroy: bool,
    /// Layout of the virtqueues
    #[arg(long, value_enum, default_value = "split")]
    pub ring: Layout,
    /// Core to run on; the back-end should run on another
    #[arg(long, value_name = "N")]
    pub cpu: Option<u32>,
    /// Also measure the limit of this front-end itself, without a back-end; needs a second core
    #[arg(long, conflicts_with_all = ["rate", "verify"])]
    pub ceiling: bool,
    /// Size of the part of the disk to use, from its beginning [default: all; with --verify, 1G]
    #[arg(long, value_name = "SIZE")]
    pub area: Option<Size>,
}

/// A disk of a SCSI host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Number of the target.
    pub target: u8,
    /// Number of the unit in the target.
    pub lun: u16,
}

impl FromStr for Unit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (target, lun) = text.split_once(':').unwrap_or((text, "0"));
        let unit = target.parse().ok().zip(lun.parse().ok().filter(|lun| *lun < 1 << 14));
        let (target, lun) = unit.ok_or("give a target, 0 to 255, with an optional unit: 3, or 3:0")?;
        Ok(Self { target, lun })
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.target, self.lun)
    }
}

/// The kind and order of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mix {
    /// Random instead of sequential blocks.
    pub is_random: bool,
    /// Percentage of reads.
    pub reads: u8,
}

impl Mix {
    /// Whether there are writes.
    pub const fn writes(self) -> bool {
        self.reads < 100
    }
}

impl FromStr for Mix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (is_random, reads) = match text {
            "randread" => (true, Some(100)),
            "randwrite" => (true, Some(0)),
            "read" => (false, Some(100)),
            "write" => (false, Some(0)),
            _ => {
                let share = text.strip_prefix("mix:").map(|share| share.strip_suffix('%').unwrap_or(share));
                (true, share.and_then(|share| share.parse().ok()).filter(|share| *share <= 100))
            }
        };
        let reads = reads.ok_or("give randread, randwrite, read, write, or mix:70 for 70% reads")?;
        Ok(Self { is_random, reads })
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.is_random, self.reads) {
            (true, 100) => f.write_str("randread"),
            (true, 0) => f.write_str("randwrite"),
            (true, reads) => write!(f, "mix:{reads}"),
            (false, 100) => f.write_str("read"),
            (false, _) => f.write_str("write"),
        }
    }
}

/// Layout of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// Split ring, supported by all back-ends
    Split,
    /// Packed ring, newer
    Packed,
}

impl From<Layout> for Format {
    fn from(layout: Layout) -> Self {
        match layout {
            Layout::Split => Self::Split,
            Layout::Packed => Self::Packed,
        }
    }
}

/// A number with an optional suffix k or M (powers of 1000).
fn count(text: &str) -> Result<u64, String> {
    let wrong = || "give a whole number above 0, with k or M (powers of 1000), such as 10k".to_owned();
    let (number, unit) = match text.trim().strip_suffix(['k', 'K']) {
        Some(number) => (number, 1_000),
        None => text.trim().strip_suffix(['m', 'M']).map_or((text, 1), |number| (number, 1_000_000)),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number.checked_mul(unit).filter(|&n| n > 0).ok_or_else(wrong)
}

/// A duration; in seconds if there is no unit.
pub fn time(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "ms" => Some(1),
        "s" | "" => Some(1_000),
        "m" => Some(60_000),
        "h" => Some(3_600_000),
        _ => None,
    };
    let millis = unit.and_then(|unit: u64| digits.parse::<u32>().ok()?.checked_mul(unit as u32));
    let wrong = || "give a whole number above 0 with ms, s, m or h, such as 10s".to_owned();
    millis.filter(|&n| n > 0).map(|n| Duration::from_millis(n.into())).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_durations_parse() {
        assert_eq!(count("10k"), Ok(10_000));
        assert_eq!(count("3M"), Ok(3_000_000));
        assert_eq!(time("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(time("2m"), Ok(Duration::from_secs(120)));
        assert_eq!(time("7"), Ok(Duration::from_secs(7)));
        for wrong in ["", "0", "k", "1.5k", "-1", "99999999999999999999k"] {
            assert!(count(wrong).is_err(), "{wrong}");
        }
        for wrong in ["", "0s", "s", "1d", "1 s", "99999999h", "µs"] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn units_parse() {
        assert_eq!("3".parse(), Ok(Unit { target: 3, lun: 0 }));
        assert_eq!("255:16383".parse(), Ok(Unit { target: 255, lun: 16_383 }));
        for wrong in ["", ":", "3:", "256", "-1", "3:16384", "0:0:0"] {
            assert!(wrong.parse::<Unit>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn mixes_print_as_they_parse() {
        for text in ["randread", "randwrite", "read", "write", "mix:70", "mix:1"] {
            assert_eq!(text.parse::<Mix>().map(|mix| mix.to_string()), Ok(text.to_owned()));
        }
        assert_eq!("mix:30%".parse(), Ok(Mix { is_random: true, reads: 30 }));
        for wrong in ["", "mix", "mix:", "mix:101", "mix:-1", "rw"] {
            assert!(wrong.parse::<Mix>().is_err(), "{wrong}");
        }
    }
}
