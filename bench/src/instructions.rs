//! Instructions per request of the path within one process, and of the NVMe driver alone, counted by valgrind. Unlike times, the
//! counts are the same in every run, so a longer path is detected at once. A file beside the code records them.

pub mod layers;

use crate::{driver, stack};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// The file of recorded counts, in the workspace.
const RECORDS: &str = "bench/instructions.json";
/// Growth beyond this fails: it is no accident of the compiler any more.
const GROWTH_MAX: f64 = 1.05;
/// Requests of the two runs whose difference is counted.
const FEW: u32 = 2_048;
const MANY: u32 = 12_288;

/// A counted case.
struct Case {
    name: &'static str,
    /// Requests in flight.
    depth: u32,
    /// Patterns of the functions whose instructions count; empty for all.
    counted: &'static [&'static str],
}

fn cases() -> impl Iterator<Item = Case> {
    let paths = stack::CASES.iter().map(|case| Case {
        name: case.name,
        depth: case.depth(),
        counted: case.counted(),
    });
    let drivers = driver::CASES.iter();
    paths.chain(drivers.map(|case| Case {
        name: case.name,
        depth: case.depth.into(),
        counted: &driver::COUNTED,
    }))
}

/// Executes `batches` times as many requests as the case has in flight at a time.
pub fn run(case: &str, batches: u32) -> Result<()> {
    let is_driver = driver::CASES.iter().any(|known| known.name == case);
    if is_driver { driver::run(case, batches) } else { stack::run(case, batches) }
}

/// Instructions per request, by case.
pub type Counts = BTreeMap<String, f64>;

/// Instructions per request of the cases whose names `is_wanted` accepts.
pub fn counts(is_wanted: impl Fn(&str) -> bool) -> Result<Counts> {
    cases()
        .filter(|case| is_wanted(case.name))
        .map(|case| Ok((case.name.to_owned(), count(&case)?)))
        .collect()
}

/// Counts, and prints each count beside the recorded one. With `record`, writes the records; with `check`, fails if a
/// case has grown by more than a twentieth.
pub fn instructions(check: bool, record: bool) -> Result<()> {
    let before = read()?;
    let now = counts(|_| true)?;
    println!("| instructions per request | now | recorded |\n| --- | --- | --- |");
    for (case, count) in &now {
        let known = before.get(case).map_or("–".to_owned(), |known| format!("{known:.0}"));
        println!("| {case} | {count:.0} | {known} |");
    }
    if record {
        let mut json = serde_json::to_string_pretty(&now)?;
        json.push('\n');
        std::fs::write(RECORDS, json).with_context(|| format!("writing {RECORDS}"))?;
    } else if check {
        let grown = grown(&before, &now);
        ensure!(
            grown.is_empty(),
            "{}: the path has become longer. To accept that, run `cargo xtask bench instructions --record`",
            grown.join(", ")
        );
    }
    Ok(())
}

/// The cases that have grown too much, or have no record.
fn grown(before: &Counts, now: &Counts) -> Vec<String> {
    let has_grown = |case: &str, now: f64| before.get(case).is_none_or(|&before| now > before * GROWTH_MAX);
    now.iter().filter(|&(case, &now)| has_grown(case, now)).map(|(case, _)| case.clone()).collect()
}

fn read() -> Result<Counts> {
    if !Path::new(RECORDS).exists() {
        return Ok(Counts::new());
    }
    let json = std::fs::read_to_string(RECORDS)?;
    serde_json::from_str(&json).with_context(|| format!("{RECORDS} is not a JSON object of counts"))
}

fn count(case: &Case) -> Result<f64> {
    let batches = |requests: u32| requests / case.depth;
    let (few, many) = (batches(FEW), batches(MANY));
    let more = executed(case, many)? - executed(case, few)?;
    Ok((more as f64 / f64::from((many - few) * case.depth)).round())
}

/// The instructions of a run of `batches` batches.
fn executed(case: &Case, batches: u32) -> Result<u64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .args(case.counted.iter().map(|pattern| format!("--toggle-collect={pattern}")))
        .arg(std::env::current_exe()?)
        .args(["stack", case.name, &batches.to_string()])
        .output()
        .context("running valgrind (apt install valgrind)")?;
    let log = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("{} under valgrind: {log}", case.name);
    }
    collected(&log).with_context(|| format!("valgrind prints no count: {log}"))
}

/// The count in valgrind's summary.
fn collected(log: &str) -> Option<u64> {
    log.lines().find_map(|line| line.split_once("Collected : ")?.1.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::{Counts, collected, grown};

    #[test]
    fn growth_beyond_a_twentieth_is_reported() {
        let counts = |null: f64| Counts::from([("null".to_owned(), null)]);
        assert!(grown(&counts(100.0), &counts(104.0)).is_empty());
        assert_eq!(grown(&counts(100.0), &counts(106.0)), ["null"]);
        assert_eq!(grown(&Counts::new(), &counts(1.0)), ["null"], "never recorded");
    }

    #[test]
    fn valgrinds_summary_is_parsed() {
        let log = "==12== Events    : Ir\n==12== Collected : 1234567\n==12== \n";
        assert_eq!(collected(log), Some(1_234_567));
        assert_eq!(collected("==12== Events    : Ir\n"), None);
    }
}
