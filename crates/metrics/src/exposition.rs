//! The text of OpenMetrics 1.0: families, samples, labels, numbers. Any context; pure.

use std::fmt::Write;
use std::time::Duration;

/// What a family's samples are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// It only grows.
    Counter,
    /// It is as it is.
    Gauge,
    /// Counts of values by size.
    Histogram,
    /// Its labels are what it tells.
    Info,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Info => "info",
        }
    }

    /// What the name of a sample has that its family's has not.
    const fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Gauge | Self::Histogram => "",
            Self::Info => "_info",
        }
    }
}

/// A family of metrics.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// Its name, without the suffixes of samples; it ends with the unit if there is one.
    pub name: &'static str,
    /// What its samples are.
    pub kind: Kind,
    /// `seconds`, `bytes`, or nothing.
    pub unit: &'static str,
    /// What it means.
    pub help: &'static str,
}

/// A label: its name, and its value.
pub type Label<'a> = (&'static str, &'a str);

/// The end of an exposition.
pub const END: &str = "# EOF\n";

/// Text that is being written.
#[derive(Debug, Default)]
pub struct Text(pub String);

impl Text {
    /// Begins a family, whose samples follow.
    pub fn begin(&mut self, family: &Family) {
        let Family { name, kind, unit, help } = family;
        let kind = kind.name();
        let unit = if unit.is_empty() { String::new() } else { format!("# UNIT {name} {unit}\n") };
        self.write(format_args!("# TYPE {name} {kind}\n{unit}# HELP {name} {help}\n"));
    }

    /// A sample with a whole number.
    pub fn count(&mut self, family: &Family, labels: &[Label<'_>], value: u64) {
        self.series(family, family.kind.suffix(), labels, None);
        self.write(format_args!(" {value}\n"));
    }

    /// A sample with a time, given in nanoseconds, told in seconds.
    pub fn seconds(&mut self, family: &Family, labels: &[Label<'_>], ns: u64) {
        self.series(family, family.kind.suffix(), labels, None);
        self.write(format_args!(" {}\n", Seconds(ns)));
    }

    /// The samples of a histogram: counts of the buckets that end at these powers of two, in nanoseconds, and of the last, which has no end; and
    /// the sum of all values.
    pub fn histogram(
        &mut self,
        family: &Family,
        labels: &[Label<'_>],
        (bounds_log2, counts): (&[u32], &[u64]),
        sum_ns: u64,
    ) {
        let mut total = 0;
        for (i, count) in counts.iter().enumerate() {
            total += count;
            let bound = bounds_log2.get(i).map_or(Bound::Infinite, |&log2| Bound::Log2(log2));
            self.series(family, "_bucket", labels, Some(bound));
            self.write(format_args!(" {total}\n"));
        }
        self.series(family, "_count", labels, None);
        self.write(format_args!(" {total}\n"));
        self.series(family, "_sum", labels, None);
        self.write(format_args!(" {}\n", Seconds(sum_ns)));
    }

    fn series(&mut self, family: &Family, suffix: &str, labels: &[Label<'_>], bound: Option<Bound>) {
        self.0.push_str(family.name);
        self.0.push_str(suffix);
        let mut opening = '{';
        for (name, value) in labels {
            self.0.push(opening);
            self.0.push_str(name);
            self.0.push_str("=\"");
            self.escape(value);
            self.0.push('"');
            opening = ',';
        }
        match bound {
            Some(Bound::Log2(log2)) => self.write(format_args!("{opening}le=\"{}\"", Seconds(1 << log2))),
            Some(Bound::Infinite) => self.write(format_args!("{opening}le=\"+Inf\"")),
            None => {}
        }
        if bound.is_some() || !labels.is_empty() {
            self.0.push('}');
        }
    }

    /// A label's value, in which a quote would end it and a line feed the line.
    fn escape(&mut self, value: &str) {
        for c in value.chars() {
            match c {
                '\\' => self.0.push_str("\\\\"),
                '"' => self.0.push_str("\\\""),
                '\n' => self.0.push_str("\\n"),
                c => self.0.push(c),
            }
        }
    }

    fn write(&mut self, text: std::fmt::Arguments<'_>) {
        self.0.write_fmt(text).expect("a string takes all");
    }
}

/// Where a bucket ends.
#[derive(Clone, Copy)]
enum Bound {
    Log2(u32),
    Infinite,
}

/// Nanoseconds, told in seconds, exactly: no float has as many digits.
struct Seconds(u64);

impl std::fmt::Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let time = Duration::from_nanos(self.0);
        let (whole, part) = (time.as_secs(), time.subsec_nanos());
        match part {
            0 => write!(f, "{whole}.0"),
            part => {
                let zeroes = (0..9).take_while(|n| part.is_multiple_of(10_u32.pow(n + 1))).count();
                write!(f, "{whole}.{:0width$}", part / 10_u32.pow(zeroes as u32), width = 9 - zeroes)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMES: Family =
        Family { name: "x_seconds", kind: Kind::Histogram, unit: "seconds", help: "Times." };

    #[test]
    fn histograms_add_up() {
        let mut text = Text::default();
        text.begin(&TIMES);
        text.histogram(&TIMES, &[("disk", "a\"b\\\n")], (&[10, 30], &[1, 0, 2]), 1_500_000_000);
        let expected = r#"# TYPE x_seconds histogram
# UNIT x_seconds seconds
# HELP x_seconds Times.
x_seconds_bucket{disk="a\"b\\\n",le="0.000001024"} 1
x_seconds_bucket{disk="a\"b\\\n",le="1.073741824"} 1
x_seconds_bucket{disk="a\"b\\\n",le="+Inf"} 3
x_seconds_count{disk="a\"b\\\n"} 3
x_seconds_sum{disk="a\"b\\\n"} 1.5
"#;
        assert_eq!(text.0, expected);
    }

    #[test]
    fn seconds_are_exact() {
        for (ns, told) in [
            (0, "0.0"),
            (1, "0.000000001"),
            (10, "0.00000001"),
            (1_000_000_000, "1.0"),
            (u64::MAX, "18446744073.709551615"),
        ] {
            assert_eq!(Seconds(ns).to_string(), told);
        }
    }
}
