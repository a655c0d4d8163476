//! Random writes for as long as it takes to write a pool several times over, in pools that are half and nearly full.

use super::{Counters, Pool, at_least, at_most, base};
use crate::frontend::FrontEnd;
use crate::plot::{Data, Plot};
use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::settings::Settings;
use crate::workload::Workload;
use anyhow::Result;
use std::time::Duration;

/// Shares of the pool that the volume has, and their names.
const SHARES: [(f64, &str); 2] = [(0.5, "50"), (0.9, "90")];

/// How often the pool is written over.
const TURNS: f64 = 5.0;

/// The least sustained throughput, as a share of the first.
const AIM: f64 = 0.69;
/// The most bytes written for one of the user, and the most used space for one byte of data.
const AMPLIFICATION_AIM: f64 = 3.5;
const SPACE_AIM: f64 = 2.0;

const INTRO: &str = "4 KiB random writes, QD32, on a filled volume that has this share of its pool: thousand requests per second at first, \
    and after the pool was written over five times (once with --quick). Amplification is of the last fifth of that time: bytes \
    that the pool wrote for each byte of the front-end's, and bytes in use for each byte of data. Busy time is that of arykd's \
    reactor: at first the pool has free segments, and the cleaner has nothing to do.";

/// Measures the selected cases.
pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    let columns = [
        "pool",
        "at first",
        "sustained",
        "share",
        "busy ns at first",
        "busy ns sustained",
        "write amplification",
        "space amplification",
    ];
    let columns = columns.map(str::to_owned).to_vec();
    let mut section = Section::new("Sustained random writes", INTRO, columns);
    let (mut curves, mut amplifications) = (Vec::new(), Vec::new());
    for kind in super::BASES {
        for (share, percent) in SHARES {
            let name = format!("volume/sustained/{kind}-{percent}");
            if !settings.wants(&name) {
                continue;
            }
            let dir = settings.sockets.path().join(format!("sustained-{kind}-{percent}"));
            let mut pool = Pool::start(settings, &base(settings, "sustained", kind)?, &dir, share)?;
            let measured = sustain(settings, &mut pool)?;
            let (first, last) = (measured.part(0, |point| point.rate), measured.part(4, |point| point.rate));
            let busy = [0, 4].map(|fifth| cell(&measured.part(fifth, |point| point.busy), number));
            let record = Record::new(&name, "throughput, peer the first fifth", "IOPS", &last, &first);
            let ratio = record.ratio.map_or_else(String::new, |ratio| at_least(ratio, Some(AIM)));
            let rate = |runs: &Runs| cell(runs, |rate| number(rate / 1e3));
            let [busy_first, busy_last] = busy;
            let of = |value: f64, aim| number(value) + &at_most(value, Some(aim));
            section.row(vec![
                format!("{kind}, {percent}%"),
                rate(&first),
                rate(&last),
                ratio,
                busy_first,
                busy_last,
                of(measured.write_amplification, AMPLIFICATION_AIM),
                of(measured.space_amplification, SPACE_AIM),
            ]);
            report.records.push(record);
            let label =
                if kind == "file" { ["file, 50%", "file, 90%"] } else { ["memory, 50%", "memory, 90%"] };
            let label = label[usize::from(percent == "90")];
            curves.push((label, measured.curve(|point| point.rate / 1e3)));
            amplifications.push((label, measured.curve(|point| point.amplification)));
        }
    }
    if !curves.is_empty() {
        section.plot(Plot {
            name: "sustained",
            title: "Random writes while the pool is written over".to_owned(),
            axis: "bytes written ÷ bytes of the pool".to_owned(),
            data: Data::Lines { axis: "thousand requests per second", curves },
        });
        section.plot(Plot {
            name: "amplification",
            title: "Write amplification while the pool is written over".to_owned(),
            axis: "bytes written ÷ bytes of the pool".to_owned(),
            data: Data::Lines { axis: "bytes that the pool wrote for each byte", curves: amplifications },
        });
        report.section(section);
    }
    Ok(())
}

/// What was measured in half a second.
#[derive(Clone, Copy, Debug)]
struct Point {
    /// How often the pool was written over before.
    turned: f64,
    /// Requests per second.
    rate: f64,
    /// Busy time for each request, in ns.
    busy: f64,
    /// Bytes that the pool wrote for each byte.
    amplification: f64,
}

struct Measured {
    points: Vec<Point>,
    write_amplification: f64,
    space_amplification: f64,
}

impl Measured {
    /// The values in a fifth of the time.
    fn part(&self, fifth: usize, value: fn(&Point) -> f64) -> Runs {
        let len = self.points.len().div_ceil(5);
        self.points.iter().skip(fifth * len).take(len).map(value).collect()
    }

    fn curve(&self, value: fn(&Point) -> f64) -> Vec<(f64, f64)> {
        self.points.iter().map(|point| (point.turned, value(point))).collect()
    }
}

fn sustain(settings: &Settings, pool: &mut Pool) -> Result<Measured> {
    let turns = if settings.quick { 1.0 } else { TURNS };
    let bytes = super::pool_bytes(settings) as f64;
    let mut front_end = FrontEnd::connect(&pool.back_end.socket, 1, Workload::random(100, 4 << 10, 32))?;
    let start = pool.counters()?;
    let (mut before, mut busy_before) = (start, pool.busy()?);
    let mut before_last: Option<Counters> = None;
    let mut points = Vec::new();
    loop {
        let closed = front_end.closed(Duration::from_millis(500))?;
        let now = pool.counters()?;
        let busy = pool.busy()?;
        let turned = (now.user_written - start.user_written) / bytes;
        points.push(Point {
            turned,
            rate: closed.rate(),
            busy: (busy - busy_before) / closed.requests as f64,
            amplification: now.amplification(&before),
        });
        (before, busy_before) = (now, busy);
        if turned >= turns * 0.8 && before_last.is_none() {
            before_last = Some(now);
        }
        if turned >= turns {
            let since = before_last.unwrap_or(start);
            return Ok(Measured {
                points,
                write_amplification: now.amplification(&since),
                space_amplification: now.used / now.live,
            });
        }
    }
}
