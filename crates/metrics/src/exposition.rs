//! The text of OpenMetrics 1.0: families, samples, labels, numbers. Any context; pure.

use std::fmt::Write;
use std::time::Duration;

/// The kind of a family's samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// A value that only grows.
    Counter,
    /// A value that goes up and down.
    Gauge,
    /// Counts of values by size.
    Histogram,
    /// Labels that carry the information; the value is 1.
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

    /// The suffix of the names of the samples, which the family's name lacks.
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
    /// The name without the suffixes of samples; ends with the unit if there is one.
    pub name: &'static str,
    /// The kind of the samples.
    pub kind: Kind,
    /// `seconds`, `bytes`, or empty.
    pub unit: &'static str,
    /// The help text.
    pub help: &'static str,
}

/// A label: name and value.
pub type Label<'a> = (&'static str, &'a str);

/// The end of an exposition.
pub const END: &str = "# EOF\n";

/// The text of an exposition under construction.
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

    /// Writes a sample with an integer value.
    pub fn count(&mut self, family: &Family, labels: &[Label<'_>], value: u64) {
        self.series(family, family.kind.suffix(), labels, None);
        self.write(format_args!(" {value}\n"));
    }

    /// Writes a sample with a duration, given in nanoseconds, written in seconds.
    pub fn seconds(&mut self, family: &Family, labels: &[Label<'_>], ns: u64) {
        self.series(family, family.kind.suffix(), labels, None);
        self.write(format_args!(" {}\n", Seconds(ns)));
    }

    /// Writes the samples of a histogram: cumulative counts of the buckets that end at these powers of two nanoseconds and of the
    /// last, unbounded one, and the sum of all values.
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

    /// Writes a label's value with quotes, backslashes and line feeds escaped.
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
        self.0.write_fmt(text).expect("writing to a string cannot fail");
    }
}

/// The upper bound of a bucket.
#[derive(Clone, Copy)]
enum Bound {
    Log2(u32),
    Infinite,
}

/// Nanoseconds, written in seconds exactly: a float lacks the digits.
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
        for (ns, expected) in [
            (0, "0.0"),
            (1, "0.000000001"),
            (10, "0.00000001"),
            (1_000_000_000, "1.0"),
            (u64::MAX, "18446744073.709551615"),
        ] {
            assert_eq!(Seconds(ns).to_string(), expected);
        }
    }
}
