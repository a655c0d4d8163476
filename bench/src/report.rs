//! Results: runs and their medians, records for programs, tables for people.

use crate::plot::Plot;
use anyhow::{Context, Result};
use serde::Serialize;
use std::fmt::Write;
use std::path::Path;

/// The values of the alternating runs of one measurement.
#[derive(Clone, Debug, Default)]
pub struct Runs(Vec<f64>);

impl FromIterator<f64> for Runs {
    fn from_iter<I: IntoIterator<Item = f64>>(runs: I) -> Self {
        Self(runs.into_iter().collect())
    }
}

impl Runs {
    /// Adds a run.
    pub fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// The same runs in another unit.
    #[must_use]
    pub fn scaled(&self, factor: f64) -> Self {
        Self(self.0.iter().map(|value| value * factor).collect())
    }

    /// The ratio of each run to the run of `other` in the same turn.
    #[must_use]
    pub fn over(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(one, other)| one / other).collect())
    }

    /// The difference between each run and the run of `other` in the same turn.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(ours, theirs)| ours - theirs).collect())
    }

    /// The greater one of each run and the run of `other` in the same turn.
    #[must_use]
    pub fn greatest(&self, other: &Self) -> Self {
        Self(self.0.iter().zip(&other.0).map(|(one, other)| one.max(*other)).collect())
    }

    /// Number of runs.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// The middle run, or the mean of the two in the middle. `None` without runs.
    pub fn median(&self) -> Option<f64> {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let high = *sorted.get(middle)?;
        Some(if sorted.len() % 2 == 1 { high } else { (sorted[middle - 1] + high) / 2.0 })
    }

    /// The least and the greatest run.
    pub fn spread(&self) -> Option<[f64; 2]> {
        let least = self.0.iter().copied().min_by(f64::total_cmp)?;
        let greatest = self.0.iter().copied().max_by(f64::total_cmp)?;
        Some([least, greatest])
    }

    /// Half of the distance between the least and the greatest run, as a part of the median: how far a run may be from the median
    /// by chance. `None` with fewer than two runs.
    pub fn noise(&self) -> Option<f64> {
        let ([least, greatest], median) = self.spread().zip(self.median()).filter(|_| self.len() > 1)?;
        Some((greatest - least) / 2.0 / median)
    }
}

/// The least and greatest run of each side.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Spread {
    /// `arykd`'s.
    pub aryk: Option<[f64; 2]>,
    /// The peer's.
    pub peer: Option<[f64; 2]>,
}

/// One measurement, as an element of `--json`. All values but the ratio are in `unit`.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// The case, such as `null/randread-4k/qd32`.
    pub case: String,
    /// The measured quantity.
    pub metric: String,
    /// The unit of the values.
    pub unit: &'static str,
    /// `arykd`'s median.
    pub aryk: Option<f64>,
    /// The peer's median.
    pub peer: Option<f64>,
    /// `arykd`'s median divided by the peer's; `None` where the front-end was the limit.
    pub ratio: Option<f64>,
    /// The least and greatest run of each side.
    pub spread: Spread,
    /// Number of runs of each side.
    pub runs: usize,
}

impl Record {
    /// Compares `aryk`'s runs with `peer`'s.
    pub fn new(case: &str, metric: &str, unit: &'static str, aryk: &Runs, peer: &Runs) -> Self {
        let (ours, theirs) = (aryk.median(), peer.median());
        Self {
            case: case.to_owned(),
            metric: metric.to_owned(),
            unit,
            aryk: ours,
            peer: theirs,
            ratio: ours.zip(theirs).filter(|&(_, theirs)| theirs > 0.0).map(|(ours, theirs)| ours / theirs),
            spread: Spread { aryk: aryk.spread(), peer: peer.spread() },
            runs: aryk.len().max(peer.len()),
        }
    }
}

/// A part of the report: a table with its introduction, and plots.
#[derive(Clone, Debug)]
pub struct Section {
    title: String,
    intro: String,
    header: Vec<String>,
    rows: Vec<Vec<String>>,
    plots: Vec<Plot>,
}

impl Section {
    /// Creates an empty table with these columns.
    pub fn new(title: &str, intro: &str, columns: Vec<String>) -> Self {
        Self {
            title: title.to_owned(),
            intro: intro.to_owned(),
            header: columns,
            rows: Vec::new(),
            plots: Vec::new(),
        }
    }

    /// Adds a row, one cell per column.
    ///
    /// # Panics
    /// If there are more or fewer cells.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.header.len(), "a cell for each column of {}", self.title);
        self.rows.push(cells);
    }

    /// Adds a plot.
    pub fn plot(&mut self, plot: Plot) {
        self.plots.push(plot);
    }

    /// Whether the table has no rows.
    pub const fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Markdown, with columns that are also aligned in a terminal.
    pub fn markdown(&self) -> String {
        let width = |i: usize| {
            let cells = std::iter::once(&self.header).chain(&self.rows).map(|row| row[i].chars().count());
            cells.max().unwrap_or(0).max(3)
        };
        let widths: Vec<usize> = (0..self.header.len()).map(width).collect();
        let line = |cells: &[String]| {
            let cells = cells.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}"));
            format!("| {} |\n", cells.collect::<Vec<_>>().join(" | "))
        };
        let rule: Vec<String> = widths.iter().map(|&width| "-".repeat(width)).collect();
        let mut out = format!("## {}\n\n{}\n\n{}{}", self.title, self.intro, line(&self.header), line(&rule));
        for row in &self.rows {
            out.push_str(&line(row));
        }
        out
    }
}

/// All results of a run of the bench.
#[derive(Debug, Default)]
pub struct Report {
    /// The results for programs.
    pub records: Vec<Record>,
    /// The results for people.
    pub sections: Vec<Section>,
    /// The commands that were started, in order, without duplicates.
    pub commands: Vec<String>,
}

impl Report {
    /// Adds a section and prints it at once.
    pub fn section(&mut self, section: Section) {
        if !section.is_empty() {
            println!("{}", section.markdown());
            self.sections.push(section);
        }
    }

    /// Adds a command that was started, unless it is listed already.
    pub fn command(&mut self, command: &str) {
        if !self.commands.iter().any(|known| known == command) {
            self.commands.push(command.to_owned());
        }
    }

    /// Writes the records as a JSON list.
    pub fn write_json(&self, file: &Path) -> Result<()> {
        let mut json = serde_json::to_string_pretty(&self.records)?;
        json.push('\n');
        std::fs::write(file, json).with_context(|| format!("writing {}", file.display()))
    }

    /// Writes the sections as a page that starts with `preface`, and their plots beside the page.
    pub fn write_markdown(&self, file: &Path, preface: &str) -> Result<()> {
        let mut page = preface.to_owned();
        let stem = file.file_stem().context("the page has no name")?.to_string_lossy();
        for section in &self.sections {
            write!(page, "\n{}", section.markdown())?;
            for plot in &section.plots {
                let name = format!("{stem}-{}.svg", plot.name);
                plot.write(&file.with_file_name(&name))?;
                write!(page, "\n![{}]({name})\n", plot.title)?;
            }
        }
        std::fs::write(file, page).with_context(|| format!("writing {}", file.display()))
    }
}

/// A cell of a table: a median and, if there was more than one run, its spread, each formatted by `show`.
pub fn cell(runs: &Runs, show: impl Fn(f64) -> String) -> String {
    match (runs.median(), runs.spread()) {
        (Some(median), Some([least, greatest])) if runs.len() > 1 => {
            format!("{} ({}–{})", show(median), show(least), show(greatest))
        }
        (Some(median), _) => show(median),
        (None, _) => "–".to_owned(),
    }
}

/// A number with three significant digits, or with all digits before the point.
pub fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        v if v < 0.01 => format!("{value:.4}"),
        v if v < 1.0 => format!("{value:.3}"),
        v if v < 10.0 => format!("{value:.2}"),
        v if v < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Record, Runs, Section, cell, number};

    fn runs(values: &[f64]) -> Runs {
        values.iter().copied().collect()
    }

    #[test]
    fn medians_and_spreads() {
        assert_eq!(runs(&[3.0, 1.0, 2.0]).median(), Some(2.0));
        assert_eq!(runs(&[4.0, 1.0, 2.0, 3.0]).median(), Some(2.5));
        assert_eq!(runs(&[4.0, 1.0, 2.0]).spread(), Some([1.0, 4.0]));
        assert_eq!(runs(&[]).median(), None);
        assert_eq!(runs(&[]).spread(), None);
        assert_eq!(runs(&[90.0, 100.0, 120.0]).noise(), Some(0.15));
        assert_eq!(runs(&[100.0]).noise(), None);
    }

    #[test]
    fn a_record_compares_medians() {
        let record = Record::new("null/x", "IOPS", "1/s", &runs(&[10.0, 20.0, 30.0]), &runs(&[5.0]));
        assert_eq!(record.ratio, Some(4.0));
        assert_eq!(record.runs, 3);
        let alone = Record::new("null/x", "IOPS", "1/s", &runs(&[10.0]), &runs(&[]));
        assert_eq!((alone.peer, alone.ratio), (None, None));
        let keys = serde_json::to_value(&alone).unwrap();
        for key in ["case", "metric", "unit", "aryk", "peer", "ratio", "spread", "runs"] {
            assert!(keys.get(key).is_some(), "{key}");
        }
    }

    #[test]
    fn tables_line_up() {
        let mut section = Section::new("T", "Intro.", vec!["a".to_owned(), "long column".to_owned()]);
        section.row(vec!["µs".to_owned(), "1".to_owned()]);
        let page = section.markdown();
        let widths: Vec<usize> = page.lines().skip(4).map(|line| line.chars().count()).collect();
        assert_eq!(widths, [widths[0]; 3], "{page}");
    }

    #[test]
    fn numbers_for_people() {
        assert_eq!(
            ["0.0012", "0.123", "1.23", "12.3", "1234"].map(str::to_owned),
            [number(0.0012), number(0.1234), number(1.234), number(12.34), number(1234.4),]
        );
        assert_eq!(cell(&runs(&[1.0, 3.0, 2.0]), number), "2.00 (1.00–3.00)");
        assert_eq!(cell(&runs(&[]), number), "–");
    }
}
