//! The report of a run: as JSON, and as a page. Test tool, one thread.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;

use crate::life::{Plan, Record};

/// A run.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The seed of all random decisions.
    pub seed: u64,
    /// Number of crashes.
    pub rounds: usize,
    /// Lives with a violation.
    pub violations: usize,
    /// Requests that were completed.
    pub requests: u64,
    /// Sectors whose content was checked.
    pub sectors_checked: u64,
    /// Deaths by their planned step, and how many of them happened there.
    pub steps: BTreeMap<&'static str, Reached>,
    /// Gaps of kills by the test, by connection mode.
    pub gaps: BTreeMap<String, Gaps>,
    /// The longest time between two completions without a crash, by connection mode.
    pub control: BTreeMap<String, Gaps>,
    /// The lives, each of one front-end.
    pub lives: Vec<Record>,
}

/// How often a step was planned, and reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reached {
    /// Planned deaths.
    pub planned: u32,
    /// Deaths that happened at the step.
    pub reached: u32,
}

/// A distribution, in microseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Gaps {
    /// Number of values.
    pub count: usize,
    /// The median.
    pub p50_us: u64,
    /// The 99th percentile.
    pub p99_us: u64,
    /// The maximum.
    pub max_us: u64,
    /// All values, sorted.
    #[serde(skip)]
    sorted: Vec<u64>,
}

impl Gaps {
    fn new(mut values: Vec<u64>) -> Self {
        values.sort_unstable();
        let at = |percent: usize| {
            let rank = (values.len() * percent).div_ceil(100).max(1);
            values.get(rank - 1).copied().unwrap_or_default()
        };
        Self { count: values.len(), p50_us: at(50), p99_us: at(99), max_us: at(100), sorted: values }
    }
}

/// The first paragraph of the page.
const INTRODUCTION: &str = "\
Written by `cargo xtask crash --markdown FILE`. A front-end keeps its queues full of reads and overlapping writes of a small area, and
checks all that it reads, while `arykd` is killed under it: by the test, some time after its first completion or during its recovery, and by
itself at every labelled step of a request. In one life of seven the disk is encrypted, its key is rotated all the time, and the steps are
those of the rotation; in one of six it is a volume, whose pool is checked at the end. Under a supervisor it runs for a second first, because
the supervisor delays the restart of a
daemon that dies earlier.
";

/// The section about volumes.
const VOLUMES: &str = "\
## Volumes

In a life with a volume, or with `--volume` in all, the disk is a volume of a pool of 256 MiB in a file. The engine writes the pool, and the
first content of the volume, in the test's own process before the first daemon starts. Each daemon finds the pool on its disk; the
controller waits for the volume. After the last daemon, the test's process opens the pool and verifies all references and checksums:
damage, space that nothing refers to, or a damaged copy of a superblock or of the manifest is a violation. It then reads the
volume, whose content must be what the front-end's requests allow, as that of any disk.

A killed process loses nothing that it has given to the kernel. What a host loses with its power is simulated:
`cargo xtask simulate volume`.
";

/// Upper bound of a small number of requests in flight.
const SMALL: usize = 32;

impl Report {
    /// Adds up the results of lives.
    #[must_use]
    pub fn new(seed: u64, lives: Vec<Record>) -> Self {
        let mut steps: BTreeMap<_, Reached> = BTreeMap::new();
        let (mut gaps, mut control) = (BTreeMap::<_, Vec<u64>>::new(), BTreeMap::<_, Vec<u64>>::new());
        for life in &lives {
            let mode = format!("{:?}", life.shape.mode).to_lowercase();
            control.entry(mode.clone()).or_default().push(life.control_us);
            for crash in &life.crashes {
                if let Plan::Step { step, .. } = crash.plan {
                    let reached = steps.entry(step).or_default();
                    reached.planned += 1;
                    reached.reached += u32::from(crash.reached);
                } else if let Some(gap) = crash.gap_us {
                    let backlog = if crash.outstanding <= SMALL { "at most 32" } else { "more than 32" };
                    let by = if life.shape.supervised { "by the supervisor" } else { "by the test" };
                    gaps.entry(format!("{mode}, restarted {by}, {backlog} in flight")).or_default().push(gap);
                }
            }
        }
        let summed =
            |gaps: BTreeMap<String, Vec<u64>>| gaps.into_iter().map(|(k, v)| (k, Gaps::new(v))).collect();
        Self {
            seed,
            rounds: lives.iter().map(|life| life.crashes.len()).sum(),
            violations: lives.iter().filter(|life| life.violation.is_some()).count(),
            requests: lives.iter().map(|life| life.counts.requests).sum(),
            sectors_checked: lives.iter().map(|life| life.counts.sectors_checked).sum(),
            steps,
            gaps: summed(gaps),
            control: summed(control),
            lives,
        }
    }

    /// A summary in one line.
    #[must_use]
    pub fn summary(&self) -> String {
        format!(
            "{} crashes in {} lives, seed {}: {} requests, {} sectors compared, {} violations",
            self.rounds,
            self.lives.len(),
            self.seed,
            self.requests,
            self.sectors_checked,
            self.violations
        )
    }

    /// The report as a Markdown page.
    #[must_use]
    pub fn markdown(&self) -> String {
        let mut page = format!("# Crash test\n\n{INTRODUCTION}\n{}.\n", self.summary());
        self.write_page(&mut page).expect("a string takes all");
        page
    }

    fn write_page(&self, page: &mut String) -> std::fmt::Result {
        writeln!(page, "\n## Gaps\n")?;
        writeln!(page, "From `kill -9` until the front-end sees the next daemon's first completion, in ms.")?;
        writeln!(
            page,
            "The control is the longest time between two completions without a kill, per life.\n"
        )?;
        writeln!(page, "| | kills | p50 | p99 | max |\n| --- | ---: | ---: | ---: | ---: |")?;
        for (name, gaps) in self.gaps.iter().map(|(n, g)| (n.clone(), g)) {
            write_row(page, &name, gaps)?;
        }
        for (mode, gaps) in &self.control {
            write_row(page, &format!("control, {mode}"), gaps)?;
        }
        for (name, gaps) in &self.gaps {
            writeln!(page, "\n{name}:\n\n```text")?;
            write_histogram(page, gaps)?;
            writeln!(page, "```")?;
        }
        writeln!(page, "\n## Steps\n\nDeaths at labelled steps of a request or a queue.\n")?;
        writeln!(page, "| step | planned | reached |\n| --- | ---: | ---: |")?;
        for (step, reached) in &self.steps {
            writeln!(page, "| {step} | {} | {} |", reached.planned, reached.reached)?;
        }
        writeln!(
            page,
            "\n## Front-ends\n\n| shape | lives | crashes | requests |\n| --- | ---: | ---: | ---: |"
        )?;
        for (shape, [lives, crashes, requests]) in self.shapes() {
            writeln!(page, "| {shape} | {lives} | {crashes} | {requests} |")?;
        }
        write!(page, "\n{VOLUMES}")
    }

    /// Lives, crashes and requests by the main properties of a shape.
    fn shapes(&self) -> BTreeMap<String, [u64; 3]> {
        let mut shapes: BTreeMap<String, [u64; 3]> = BTreeMap::new();
        for life in &self.lives {
            let shape = &life.shape;
            let indirect = if shape.indirect { ", indirect" } else { "" };
            let event = if shape.event_idx { ", event index" } else { "" };
            let name = format!("{:?} {:?} {:?}{indirect}{event}", shape.device, shape.mode, shape.format)
                .to_lowercase();
            let counts = [1, life.crashes.len() as u64, life.counts.requests];
            let sums = shapes.entry(name).or_default();
            for (sum, count) in sums.iter_mut().zip(counts) {
                *sum += count;
            }
        }
        shapes
    }
}

fn write_row(page: &mut String, name: &str, gaps: &Gaps) -> std::fmt::Result {
    let ms = |us: u64| format!("{:.1}", us as f64 / 1000.0);
    let [p50, p99, max] = [gaps.p50_us, gaps.p99_us, gaps.max_us].map(ms);
    writeln!(page, "| {name} | {} | {p50} | {p99} | {max} |", gaps.count)
}

/// A histogram with bars of equal width in time; the longest bar is as wide as the page.
fn write_histogram(page: &mut String, gaps: &Gaps) -> std::fmt::Result {
    const BARS: u64 = 20;
    const WIDTH: usize = 60;
    let width_us = (gaps.max_us / BARS + 1).next_multiple_of(1000);
    let mut counts = vec![0_usize; (gaps.max_us / width_us + 1) as usize];
    for gap in &gaps.sorted {
        counts[(gap / width_us) as usize] += 1;
    }
    let most = counts.iter().copied().max().unwrap_or(1).max(1);
    for (i, count) in (1..).zip(counts) {
        let bar = "#".repeat((count * WIDTH).div_ceil(most));
        writeln!(page, "< {:>5} ms {count:>5} {bar}", i * width_us / 1000)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_seen() {
        let gaps = Gaps::new((1..=200).rev().collect());
        assert_eq!((gaps.count, gaps.p50_us, gaps.p99_us, gaps.max_us), (200, 100, 198, 200));
        assert_eq!(Gaps::new(Vec::new()), Gaps::default());
        let mut page = String::new();
        write_histogram(&mut page, &Gaps::new(vec![500, 1500, 1600, 30_000])).unwrap();
        let counts: Vec<_> = page.lines().filter_map(|line| line.split_whitespace().nth(3)).collect();
        assert_eq!((counts.len(), counts[0], counts[15]), (16, "3", "1"), "{page}");
    }
}
