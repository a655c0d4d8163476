//! The kernel's initiator with fio, at `arykd` and at the kernel's own target, in one guest whose clock counts instructions: QEMU
//! executes one for each nanosecond in which the guest's only processor is busy (`-icount`). So other load of this computer
//! changes little, and all of a request counts: fio, both sides' TCP, the target.

use crate::report::{Record, Report, Runs, Section, cell, number};
use crate::settings::Settings;
use anyhow::{Context, Result, ensure};
use aryk_guest_tests::{Guest, Image, Vm};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

const SCRIPT: &str = include_str!("linux.sh");
const CASE: &str = "nvmf/linux";
/// The kernel's target, beside the sleep policies of `arykd`.
const PEER: &str = "nvmet";
/// Time limit of the guest.
const TIMEOUT: Duration = Duration::from_secs(3600);

const INTRO: &str = "fio on Linux' own NVMe/TCP initiator reaches `arykd` (a malloc disk) and Linux' own target (`nvmet-tcp`, a brd disk) over \
    loopback, in turns, in one guest with one processor. QEMU emulates the guest, and its clock advances by a nanosecond for each \
    instruction while the processor is busy (`-icount shift=0`): **only the ratios mean something**, no real processor does an \
    instruction in each nanosecond. *Instructions* are those of the whole guest for each request, fio, initiator, both sides' TCP and the target \
    together; what a run costs at its start and its end cancels out (two runs, one three times as long). *Its threads* is the part that the \
    threads of the daemon have run (`/proc/PID/task/TID/schedstat`). The kernel's target has no threads of its own to count. A reactor that \
    polls (`adaptive`) takes its only processor from fio.";

/// Counts of a request, for each run.
#[derive(Clone, Debug, Default, PartialEq)]
struct Counted {
    instructions: Vec<f64>,
    /// Of the daemon's threads.
    of_threads: Vec<f64>,
    /// Requests per second of the guest's clock.
    rate: Vec<f64>,
}

/// By workload and depth, then by target.
type Counts = BTreeMap<(String, u16), BTreeMap<String, Counted>>;

pub(super) fn measure(settings: &Settings, report: &mut Report) -> Result<()> {
    if !settings.wants(CASE) {
        return Ok(());
    }
    let (rounds, requests) = if settings.quick { (1, 500) } else { (settings.runs, 4000) };
    let script = format!("rounds={rounds} depths='1 32 128' requests={requests}\n{SCRIPT}");
    let directory = tempfile::tempdir()?;
    let programs = ["arykd", "aryk"].map(|name| settings.arykd.with_file_name(name));
    let vm = Vm {
        cpus: 1,
        memory_mib: 1024,
        programs: programs.into(),
        counts_instructions: true,
        ..Vm::with_disks(Vec::new())
    };
    let output = Guest::boot(&image(settings)?, &vm, &script, directory.path())?.finish(TIMEOUT)?;
    let counts = read(&output.lines, f64::from(requests))?;
    let section = table(&counts, report)?;
    report.section(section);
    Ok(())
}

/// The guest's image, which the tests use, too.
pub(super) fn image(settings: &Settings) -> Result<Image> {
    Image::prepare(&target(settings)?.join("guest"))
}

/// Cargo's target directory.
fn target(settings: &Settings) -> Result<PathBuf> {
    let of_program = settings.arykd.parent().and_then(Path::parent);
    Ok(of_program.context("arykd is not in a target directory")?.to_owned())
}

/// The lines of the script, of runs with so many requests and three times as many.
fn read(lines: &[String], requests: f64) -> Result<Counts> {
    let mut counts = Counts::new();
    for line in lines.iter().filter_map(|line| line.strip_prefix("count ")) {
        let context = || format!("the guest printed {line:?}");
        let words: Vec<&str> = line.split_whitespace().collect();
        let [target, workload, depth, numbers @ ..] = &words[..] else { anyhow::bail!("{}", context()) };
        let numbers: Result<Vec<f64>, _> = numbers.iter().map(|word| word.parse()).collect();
        let numbers = numbers.with_context(context)?;
        let &[now, busy, ran, now_between, busy_between, ran_between, now_after, busy_after, ran_after] =
            &numbers[..]
        else {
            anyhow::bail!("{}", context());
        };
        let more = |before: f64, between: f64, after: f64| {
            ((after - between) - (between - before)) / (2.0 * requests)
        };
        let span = more(now, now_between, now_after);
        ensure!(span > 0.0, "{}: the longer run took no longer", context());
        let of_workload = counts.entry((workload.to_string(), depth.parse()?)).or_default();
        let counted = of_workload.entry(target.to_string()).or_default();
        counted.instructions.push(more(busy, busy_between, busy_after));
        counted.of_threads.push(more(ran, ran_between, ran_after));
        counted.rate.push(1e9 / span);
    }
    Ok(counts)
}

fn table(counts: &Counts, report: &mut Report) -> Result<Section> {
    let columns = [
        "workload",
        "sleep policy of arykd",
        "instructions, arykd",
        "its threads",
        "instructions, nvmet",
        "ratio",
        "thousand requests/s, arykd",
        "nvmet",
        "ratio",
    ];
    let mut section =
        Section::new("Linux' initiator, and Linux' target", INTRO, columns.map(str::to_owned).to_vec());
    for ((workload, depth), targets) in counts {
        let peer = targets.get(PEER).context("the counts of the kernel's target are missing")?;
        let runs = |values: &[f64]| values.iter().copied().collect::<Runs>();
        let (their_instructions, their_rate) = (runs(&peer.instructions), runs(&peer.rate));
        for (policy, counted) in targets.iter().filter(|(name, _)| *name != PEER) {
            let (instructions, rate) = (runs(&counted.instructions), runs(&counted.rate));
            let thousands = |rate: &Runs| cell(rate, |rate| number(rate / 1e3));
            let case = format!("{CASE}/{policy}/{workload}-4k/qd{depth}");
            let metric = "a request, host included; peer nvmet";
            report.records.push(Record::new(
                &case,
                metric,
                "instructions",
                &instructions,
                &their_instructions,
            ));
            report.records.push(Record::new(&case, "throughput, peer nvmet", "IOPS", &rate, &their_rate));
            section.row(vec![
                format!("{workload}-4k/qd{depth}"),
                policy.clone(),
                cell(&instructions, number),
                cell(&runs(&counted.of_threads), number),
                cell(&their_instructions, number),
                cell(&instructions.over(&their_instructions), number),
                thousands(&rate),
                thousands(&their_rate),
                cell(&rate.over(&their_rate), number),
            ]);
        }
    }
    Ok(section)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn counts_are_those_of_the_longer_run_less_the_shorter_one() {
        // A run costs 1,000 by itself; a request takes 50 of time, 40 of work, and 10 of the daemon's.
        let text = "count interrupt randread 32 0 0 0 6000 5000 1500 22000 18000 5000\n\
            count nvmet randread 32 0 0 0 6000 3000 0 22000 9000 0\nanother line";
        let counts = read(&lines(text), 100.0).unwrap();
        let of = &counts[&("randread".to_owned(), 32)];
        let ours = &of["interrupt"];
        assert_eq!((ours.instructions[0], ours.of_threads[0], ours.rate[0]), (40.0, 10.0, 2e7));
        let mut report = Report::default();
        let text = table(&counts, &mut report).unwrap().markdown();
        assert!(text.contains("| interrupt ") && !text.contains("| nvmet  "), "{text}");
        let ratios: Vec<_> = report.records.iter().map(|record| record.ratio).collect();
        assert_eq!(ratios, [Some(40.0 / 15.0), Some(1.0)]);
    }

    #[test]
    fn lines_that_do_not_count_are_errors() {
        for line in [
            "count nvmet randread 32 0 0 0 1 1 1 2 2",
            "count nvmet randread many 0 0 0 1 1 1 9 9 9",
            "count nvmet randread 32 0 0 0 5 5 5 9 9 9",
            "count nvmet",
        ] {
            assert!(read(&lines(line), 1.0).is_err(), "{line}");
        }
        let alone = read(&lines("count interrupt randread 32 0 0 0 1 1 1 9 9 9"), 1.0).unwrap();
        assert!(table(&alone, &mut Report::default()).is_err());
    }
}
