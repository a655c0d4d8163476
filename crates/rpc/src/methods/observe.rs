//! `bdev_set_qd_sampling_period`, `bdev_*_histogram*`, `bdev_set_io_timeout`: settings that monitor disks. Control context.
//!
//! Each method's setting for a disk has its own note, which is removed with the disk.

use super::framework::TICK_RATE;
use super::{Control, Count, Error, Name, Phase, Table};
use crate::config::Subsystem;
use crate::error::INTERNAL;
use aryk_bdev::{Deadline, Histogram, OnDeadline, Op, Recording};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        SAMPLE,
        Phase::RunTime,
        "Samples a disk's queue depth, for `bdev_get_iostat`.",
        set_qd_sampling_period,
    );
    table.add(RECORD, Phase::RunTime, "Starts or stops the latency histogram of a disk.", enable_histogram);
    table.add(
        "bdev_get_histogram",
        Phase::RunTime,
        "Reports the latency histogram of a disk.",
        get_histogram,
    );
    table.add(
        "bdev_get_histogram_borders",
        Phase::RunTime,
        "Reports how many requests of a disk did not exceed each of the given latencies.",
        get_histogram_borders,
    );
    table.add(
        LIMIT,
        Phase::RunTime,
        "Sets the deadline for requests of a disk, and the action for requests that exceed it.",
        set_io_timeout,
    );
}

/// Parameters of `bdev_set_qd_sampling_period`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetQdSamplingPeriod {
    /// Name, alias or uuid.
    name: String,
    /// Sampling period in microseconds; 0 stops the sampling.
    period: Count,
}

/// Notes a setting of a disk, or removes the note.
fn note(control: &Control, method: &'static str, disk: &str, set: Option<&impl Serialize>) {
    let object = format!("{method} {disk}");
    match set {
        Some(params) => control.config.made(Subsystem::Watch, &object, method, params),
        None => {
            control.config.forget(Subsystem::Watch, &object);
        }
    }
}

/// The disk of a note: no method's name contains a space.
fn disk_of(object: &str) -> &str {
    object.split_once(' ').map_or("", |(_, disk)| disk)
}

/// Removes the notes of settings of disks that no longer exist.
pub(crate) fn forget_gone(control: &Control) {
    control.config.retain(Subsystem::Watch, |object| control.disks.find(disk_of(object)).is_ok());
}

/// Removes the notes of settings of a disk that does not exist and is no longer expected.
pub(crate) fn forget_absent(control: &Control, disk: &str) {
    control.config.forget_all_absent(Subsystem::Watch, |object| disk_of(object) == disk);
}

const SAMPLE: &str = "bdev_set_qd_sampling_period";
const RECORD: &str = "bdev_enable_histogram";
const LIMIT: &str = "bdev_set_io_timeout";

async fn set_qd_sampling_period(control: &Control, mut p: SetQdSamplingPeriod) -> Result<bool, Error> {
    let bdev = control.disks.find(&p.name)?;
    let period = Some(Duration::from_micros(p.period.0)).filter(|p| !p.is_zero());
    let sampled = bdev.sample_queue_depth(period, &control.reactors.least_loaded(None)).await;
    sampled.map_err(|gone| Error::errno(Errno::SHUTDOWN, gone.to_string()))?;
    p.name = bdev.name().to_owned();
    note(control, SAMPLE, bdev.name(), period.is_some().then_some(&p));
    Ok(true)
}

/// Parameters of `bdev_enable_histogram`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct EnableHistogram {
    /// Name, alias or uuid.
    name: String,
    /// Whether to record latencies.
    enable: bool,
    /// Operation to record. Default: all operations.
    #[serde(skip_serializing_if = "Option::is_none")]
    opc: Option<String>,
    /// Ignored: `bdev_get_histogram` reports the granularity in use.
    #[serde(default, skip_serializing, rename = "granularity")]
    _granularity: Option<u8>,
    /// Shorter latencies, in nanoseconds, share one bucket. Default: 1000.
    #[serde(skip_serializing_if = "Option::is_none")]
    min_nsec: Option<Count>,
    /// Longer latencies, in nanoseconds, share one bucket. Default: two minutes.
    #[serde(skip_serializing_if = "Option::is_none")]
    max_nsec: Option<Count>,
}

async fn enable_histogram(control: &Control, mut p: EnableHistogram) -> Result<bool, Error> {
    let bdev = control.disks.find(&p.name)?;
    let op = p.opc.as_ref().map(|opc| {
        let named = Op::ALL.into_iter().find(|op| op.name() == *opc);
        named.ok_or_else(|| Error::invalid(format!("there is no operation `{opc}`")).coded(INTERNAL))
    });
    let recording = Recording {
        op: op.transpose()?,
        min_ns: p.min_nsec.as_ref().map_or(1000, |n| n.0),
        max_ns: p.max_nsec.as_ref().map_or(120_000_000_000, |n| n.0),
    };
    if recording.min_ns >= recording.max_ns {
        return Err(Error::invalid("min_nsec must be less than max_nsec"));
    }
    bdev.record_latencies(p.enable.then_some(recording)).await;
    p.name = bdev.name().to_owned();
    note(control, RECORD, bdev.name(), p.enable.then_some(&p));
    Ok(true)
}

/// Result of `bdev_get_histogram`.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "Histogram")]
struct EncodedHistogram {
    /// The counts of all buckets from the first octave to the last, 8 bytes each, least significant byte first, in base64.
    histogram: String,
    /// The binary logarithm of the number of buckets in an octave.
    granularity: u32,
    /// The first octave: its first bucket also counts all lower values.
    min_range: u32,
    /// The last octave: its last bucket also counts all higher values.
    max_range: u32,
    /// Units of the latencies per second.
    tsc_rate: u64,
}

impl EncodedHistogram {
    fn new(recording: &Recording, histogram: &Histogram) -> Self {
        let per_octave = Histogram::PER_OCTAVE;
        let first = Histogram::octave(recording.min_ns);
        let last = Histogram::octave(recording.max_ns - 1).max(first);
        let counts = histogram.counts();
        let mut in_range = counts[first * per_octave..(last + 1) * per_octave].to_vec();
        let (below, above) = (&counts[..first * per_octave], &counts[(last + 1) * per_octave..]);
        *in_range.first_mut().expect("an octave has buckets") += below.iter().sum::<u64>();
        *in_range.last_mut().expect("an octave has buckets") += above.iter().sum::<u64>();
        let bytes: Vec<u8> = in_range.iter().flat_map(|count| count.to_le_bytes()).collect();
        Self {
            histogram: BASE64.encode(bytes),
            granularity: per_octave.ilog2(),
            min_range: first as u32,
            max_range: last as u32,
            tsc_rate: TICK_RATE,
        }
    }
}

async fn get_histogram(control: &Control, p: Name) -> Result<EncodedHistogram, Error> {
    let (recording, histogram) = recorded(control, &p.name).await?;
    Ok(EncodedHistogram::new(&recording, &histogram))
}

async fn recorded(control: &Control, name: &str) -> Result<(Recording, Histogram), Error> {
    let recorded = control.disks.find(name)?.recorded().await;
    recorded.ok_or_else(|| {
        Error::errno(Errno::FAULT, format!("the histogram of '{name}' is not enabled")).coded(INTERNAL)
    })
}

/// Borders in one call, at most.
const BORDERS: usize = 1024;

/// Parameters of `bdev_get_histogram_borders`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetHistogramBorders {
    /// Name, alias or uuid.
    name: String,
    /// Latencies in microseconds, ascending.
    borders: Vec<Count>,
}

/// Result of `bdev_get_histogram_borders`.
#[derive(Debug, Serialize, JsonSchema)]
struct HistogramBorders {
    /// For each border the number of requests that did not exceed it, with the histogram's precision of one eighth; then the
    /// number of all requests.
    borders_count: Vec<u64>,
}

async fn get_histogram_borders(control: &Control, p: GetHistogramBorders) -> Result<HistogramBorders, Error> {
    if p.borders.is_empty() || p.borders.len() > BORDERS || !p.borders.is_sorted_by(|a, b| a.0 < b.0) {
        return Err(Error::invalid(format!("borders must be 1 to {BORDERS} ascending values")));
    }
    let (_, histogram) = recorded(control, &p.name).await?;
    let borders = p.borders.iter().map(|border| border.0.saturating_mul(1000));
    Ok(HistogramBorders { borders_count: cumulative(&histogram, borders) })
}

/// The number of values in buckets that do not exceed each border, and the number of all values.
fn cumulative(histogram: &Histogram, borders: impl Iterator<Item = u64>) -> Vec<u64> {
    let (mut buckets, mut sum) = (histogram.buckets().peekable(), 0);
    let below = borders.map(|border| {
        while let Some((_, _, count)) = buckets.next_if(|(_, end, _)| *end <= border.saturating_add(1)) {
            sum += count;
        }
        sum
    });
    let mut counts: Vec<_> = below.collect();
    counts.push(histogram.total());
    counts
}

/// Parameters of `bdev_set_io_timeout`, a method of Aryk only.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetIoTimeout {
    /// Name, alias or uuid.
    name: String,
    /// Deadline in milliseconds; 0 for no deadline.
    timeout_ms: Count,
    /// Action for requests that exceed the deadline.
    #[serde(default)]
    action: Action,
}

/// Action for a request that exceeds the deadline.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "TimeoutAction")]
pub(super) enum Action {
    #[default]
    Report,
    Abort,
    Reset,
}

impl From<OnDeadline> for Action {
    fn from(action: OnDeadline) -> Self {
        match action {
            OnDeadline::Report => Self::Report,
            OnDeadline::Abort => Self::Abort,
            OnDeadline::Reset => Self::Reset,
        }
    }
}

async fn set_io_timeout(control: &Control, mut p: SetIoTimeout) -> Result<bool, Error> {
    let bdev = control.disks.find(&p.name)?;
    let action = match p.action {
        Action::Report => OnDeadline::Report,
        Action::Abort => OnDeadline::Abort,
        Action::Reset => OnDeadline::Reset,
    };
    let after = Duration::from_millis(p.timeout_ms.0);
    bdev.set_deadline((!after.is_zero()).then_some(Deadline { after, action })).await;
    p.name = bdev.name().to_owned();
    note(control, LIMIT, bdev.name(), (!after.is_zero()).then_some(&p));
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borders_count_values_up_to_them() {
        let mut histogram = Histogram::default();
        [1, 5, 5, 7, 100, 1 << 40].into_iter().for_each(|v| histogram.record(v));
        assert_eq!(cumulative(&histogram, [0, 1, 5, 6, 200, u64::MAX].into_iter()), [0, 1, 3, 3, 5, 6, 6]);
        assert_eq!(cumulative(&Histogram::default(), [3].into_iter()), [0, 0]);
    }

    #[test]
    fn a_histogram_has_all_values_within_its_octaves() {
        let mut histogram = Histogram::default();
        // Buckets of one value each, and from 16 on of two values each.
        [1, 9, 20, 21, 40, 1 << 40].into_iter().for_each(|v| histogram.record(v));
        let decode = |min_ns, max_ns| {
            let recording = Recording { op: None, min_ns, max_ns };
            let encoded = EncodedHistogram::new(&recording, &histogram);
            let bytes = BASE64.decode(&encoded.histogram).unwrap();
            let counts: Vec<_> =
                bytes.chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().unwrap())).collect();
            assert_eq!((encoded.granularity, encoded.tsc_rate), (3, 1_000_000_000));
            let ranges = (encoded.min_range, encoded.max_range);
            assert_eq!(counts.len() as u32, 8 * (ranges.1 - ranges.0 + 1));
            assert_eq!(counts.iter().sum::<u64>(), 6);
            (ranges, counts)
        };
        let (ranges, counts) = decode(8, 32);
        assert_eq!(ranges, (1, 2));
        // 8 and below, 9, …; 16 and 17, 18 and 19, 20 and 21, …, 30 and above.
        assert_eq!(counts, [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2]);
        let (ranges, counts) = decode(0, u64::MAX);
        assert_eq!((ranges, counts[1], counts[9], counts[18], counts[26]), ((0, 34), 1, 1, 2, 1));
        assert_eq!(counts.last(), Some(&1));
    }
}
