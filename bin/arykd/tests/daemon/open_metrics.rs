//! A strict parser of OpenMetrics 1.0, written from the specification: each scraper accepts what it accepts.

use std::collections::{BTreeMap, HashSet};

/// Labels, by name.
type Labels = BTreeMap<String, String>;

/// A valid exposition.
#[derive(Debug, Default)]
pub struct Exposition {
    /// Samples: name with suffix, labels, value.
    pub samples: Vec<(String, Labels, f64)>,
    /// Families: name, type.
    pub families: BTreeMap<String, String>,
}

impl Exposition {
    /// Parses `text`; the error has the line number.
    pub fn read(text: &str) -> Result<Self, String> {
        let body = text.strip_suffix("# EOF\n").ok_or("it does not end with # EOF")?;
        let mut all = Self::default();
        let mut reader = Reader::default();
        for (number, line) in body.split_terminator('\n').enumerate() {
            let read = match line.strip_prefix("# ") {
                Some(descriptor) => reader.descriptor(descriptor, &mut all),
                None => reader.sample(line, &mut all),
            };
            read.map_err(|why| format!("line {}: {why}: {line}", number + 1))?;
        }
        reader.end_histogram()?;
        Ok(all)
    }

    /// The value of the sample with this name whose labels include these.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let fits = |of: &Labels| labels.iter().all(|(k, v)| of.get(*k).is_some_and(|value| value == v));
        self.samples.iter().find(|(n, l, _)| n == name && fits(l)).map(|(_, _, value)| *value)
    }
}

/// The family of the present samples.
struct Family {
    name: String,
    kind: String,
    has_samples: bool,
}

/// The present histogram: its labels, the last bound and count, and its total once known.
struct Buckets {
    of: String,
    bound: f64,
    count: f64,
    total: Option<f64>,
}

#[derive(Default)]
struct Reader {
    family: Option<Family>,
    seen: HashSet<String>,
    buckets: Option<Buckets>,
}

impl Reader {
    fn descriptor(&mut self, line: &str, all: &mut Exposition) -> Result<(), String> {
        let mut words = line.splitn(3, ' ');
        let (what, name, rest) = (words.next(), words.next(), words.next());
        let (Some(what), Some(name), Some(rest)) = (what, name, rest) else { return Err("too short".into()) };
        if !is_name(name) {
            return Err("no name".into());
        }
        if self.family.as_ref().is_none_or(|family| family.name != name) {
            self.end_histogram()?;
            if all.families.insert(name.to_owned(), "unknown".into()).is_some() {
                return Err("the family is repeated or interleaved".into());
            }
            self.family = Some(Family { name: name.to_owned(), kind: "unknown".into(), has_samples: false });
        }
        let family = self.family.as_mut().expect("just set");
        if family.has_samples {
            return Err("a descriptor after samples".into());
        }
        match what {
            "TYPE" if ["counter", "gauge", "histogram", "info", "unknown"].contains(&rest) => {
                family.kind = rest.into();
                all.families.insert(name.to_owned(), rest.into());
            }
            "UNIT" if name.ends_with(&format!("_{rest}")) && family.kind != "info" => {}
            "HELP" if !rest.is_empty() => {}
            _ => return Err("an unknown descriptor".into()),
        }
        Ok(())
    }

    fn sample(&mut self, line: &str, all: &mut Exposition) -> Result<(), String> {
        let end = line.find(['{', ' ']).ok_or("no value")?;
        let (name, rest) = line.split_at(end);
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => read_labels(rest)?,
            None => (Labels::new(), rest),
        };
        let value = value.strip_prefix(' ').ok_or("no blank before the value")?;
        let value: f64 = match value.chars().all(|c| c.is_ascii_digit() || ".eE+-".contains(c)) {
            true => value.parse().map_err(|_| "not a number")?,
            false => return Err("not a number, or more than one".into()),
        };
        let Some(Family { name: family, kind, has_samples }) = &mut self.family else {
            return Err("no family".into());
        };
        *has_samples = true;
        let suffix = name.strip_prefix(family.as_str()).ok_or("a sample of another family")?.to_owned();
        let suffixes: &[&str] = match kind.as_str() {
            "counter" => &["_total", "_created"],
            "histogram" => &["_bucket", "_count", "_sum", "_created"],
            "info" => &["_info"],
            _ => &[""],
        };
        if !suffixes.contains(&&*suffix) {
            return Err(format!("a {kind} has no such sample"));
        }
        if kind == "info" && value != 1.0 || kind == "counter" && value < 0.0 {
            return Err("an impossible value".into());
        }
        if !self.seen.insert(format!("{name}{labels:?}")) {
            return Err("the same sample twice".into());
        }
        if kind == "histogram" {
            self.histogram_sample(&suffix, &labels, value)?;
        }
        all.samples.push((name.to_owned(), labels, value));
        Ok(())
    }

    fn histogram_sample(&mut self, suffix: &str, labels: &Labels, value: f64) -> Result<(), String> {
        let mut others = labels.clone();
        let bound = others.remove("le");
        let key = format!("{others:?}");
        if suffix != "_bucket" {
            let Some(Buckets { of, total, .. }) = &self.buckets else {
                return Err("no buckets before".into());
            };
            let matches = *of == key && (suffix != "_count" || *total == Some(value));
            return if matches { Ok(()) } else { Err("the sample does not match its buckets".into()) };
        }
        let bound = match bound.ok_or("a bucket without a bound")?.as_str() {
            "+Inf" => f64::INFINITY,
            bound => bound.parse().map_err(|_| "a bound that is not a number")?,
        };
        if self.buckets.as_ref().is_none_or(|buckets| buckets.of != key) {
            self.end_histogram()?;
            self.buckets = Some(Buckets { of: key, bound: f64::NEG_INFINITY, count: 0.0, total: None });
        }
        let buckets = self.buckets.as_mut().expect("just set");
        if bound <= buckets.bound || value < buckets.count {
            return Err("bounds or counts go down".into());
        }
        (buckets.bound, buckets.count) = (bound, value);
        buckets.total = bound.is_infinite().then_some(value);
        Ok(())
    }

    fn end_histogram(&mut self) -> Result<(), String> {
        match self.buckets.take() {
            Some(Buckets { of, total: None, .. }) => Err(format!("no last bucket: {of}")),
            _ => Ok(()),
        }
    }
}

fn is_name(name: &str) -> bool {
    let fits = |(i, c): (usize, char)| c.is_ascii_alphabetic() || c == '_' || i > 0 && c.is_ascii_digit();
    !name.is_empty() && name.chars().enumerate().all(fits)
}

/// Parses labels after an opening brace. Returns them and the rest of the line.
fn read_labels(mut text: &str) -> Result<(Labels, &str), String> {
    let mut labels = Labels::new();
    loop {
        let (name, rest) = text.split_once("=\"").ok_or("a label without a value")?;
        if !is_name(name) {
            return Err(format!("{name} is not a valid name of a label"));
        }
        let (mut value, mut chars) = (String::new(), rest.char_indices());
        let end = loop {
            match chars.next().ok_or("an unterminated value")? {
                (at, '"') => break at + 1,
                (_, '\\') => value.push(match chars.next() {
                    Some((_, 'n')) => '\n',
                    Some((_, c @ ('"' | '\\'))) => c,
                    _ => return Err("an invalid escape".into()),
                }),
                (_, c) => value.push(c),
            }
        };
        if labels.insert(name.to_owned(), value).is_some() {
            return Err(format!("{name} twice"));
        }
        match rest[end..].split_at_checked(1) {
            Some((",", more)) => text = more,
            Some(("}", more)) => return Ok((labels, more)),
            _ => return Err("neither a comma nor a brace after a label".into()),
        }
    }
}

#[test]
fn errors_are_found() {
    let head = "# TYPE a counter\n# HELP a What.\n";
    let read = |body: &str| Exposition::read(&format!("{body}# EOF\n"));
    assert!(read(&format!("{head}a_total{{x=\"1\"}} 1\na_total{{x=\"2\"}} 1.5\n")).is_ok());
    for wrong in [
        "a 1\n",
        "a_total 1\na_total 1\n",
        "a_total -1\n",
        "a_total{x=\"1\"}1\n",
        "a_total{x=\"\\q\"} 1\n",
        "a_total{x=\"1\",x=\"2\"} 1\n",
        "a_total 1 \n",
        "b_total 1\n",
        "\n",
    ] {
        assert!(read(&format!("{head}{wrong}")).is_err(), "{wrong}");
    }
    let bucket = |of: &str| read(&format!("# TYPE h histogram\n{of}"));
    assert!(bucket("h_bucket{le=\"1\"} 1\nh_bucket{le=\"+Inf\"} 2\nh_count 2\nh_sum 9\n").is_ok());
    assert!(bucket("h_bucket{le=\"1\"} 1\n").is_err());
    assert!(bucket("h_bucket{le=\"1\"} 3\nh_bucket{le=\"+Inf\"} 2\n").is_err());
    assert!(bucket("h_bucket{le=\"1\"} 1\nh_bucket{le=\"+Inf\"} 2\nh_count 3\n").is_err());
    assert!(Exposition::read(head).is_err());
}
