//! `cargo xtask bench nvme-guest`: the instructions of a read, of the NVMe driver in user space, of `arykd` and of Linux's
//! driver, on one emulated drive in one guest.
//!
//! QEMU's clock counts instructions (`-icount`): while the guest's only processor is busy, an instruction takes a nanosecond.
//! So busy time is a count, of user space, kernel and interrupts together. Other load of the host does not change what a sequence
//! of instructions counts, but changes how many completions the guest finds at a time: the tables show interrupts and doorbells.

use crate::machine;
use crate::report::{Record, Report, Runs, Section, cell, number};
use anyhow::{Context, Result, ensure};
use aryk_guest_tests::vm::Report as Output;
use aryk_guest_tests::{Guest, Image, Nvme, Vm};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const SCRIPT: &str = include_str!("nvme_guest.sh");
/// Instructions of the driver's read, as a multiple of those of the kernel's best path.
const AIM: f64 = 0.5;
/// Instructions of the loop that checks the clock.
const LOOP: f64 = 200_000_000.0;
/// The greatest error of that check: the loop's process and the timer's interrupts count too.
const LOOP_ERROR: f64 = 0.01;
/// Bytes of the drive, which answers without data.
const DRIVE: u64 = 256 << 20;
/// The drive's place in the guest, of QEMU and of Linux.
const SLOT: &str = "18.0";
const ADDRESS: &str = "0000:00:18.0";
/// Time limit of the guest.
const TIMEOUT: Duration = Duration::from_secs(3600);

/// What is counted.
struct Plan {
    rounds: usize,
    depths: &'static [u16],
    /// Seconds in which the kernel's path is counted with one command in flight.
    window: u32,
    /// Requests of the driver.
    requests: u64,
    /// Requests of the daemon's shorter run.
    daemon_requests: u64,
}

/// Counts, adds the tables to `report`, and returns the head of their page. A quick run counts less, once.
pub fn measure(
    rounds: Option<usize>,
    is_quick: bool,
    date: Option<&str>,
    report: &mut Report,
) -> Result<String> {
    let plan = if is_quick {
        Plan { rounds: 1, depths: &[1, 32], window: 1, requests: 5_000, daemon_requests: 1_000 }
    } else {
        Plan { rounds: 3, depths: &[1, 32, 128], window: 4, requests: 50_000, daemon_requests: 5_000 }
    };
    let plan = Plan { rounds: rounds.unwrap_or(plan.rounds).max(1), ..plan };
    let (programs, target) = build()?;
    let image = Image::prepare(&target.join("guest"))?;
    let directory = tempfile::tempdir()?;
    let Plan { rounds, depths, window, requests, daemon_requests } = &plan;
    let depths: Vec<String> = depths.iter().map(u16::to_string).collect();
    let script = format!(
        "rounds={rounds} depths='{}' long={window} requests={requests} daemon_requests={daemon_requests} \
         drive={ADDRESS}\n{SCRIPT}",
        depths.join(" ")
    );
    let output = Guest::boot(&image, &vm(programs), &script, directory.path())?.finish(TIMEOUT)?;
    let counts = Counts::read(&output)?;
    ensure!(
        (counts.check - 1.0).abs() < LOOP_ERROR,
        "a loop of {LOOP} instructions was counted as {:.4} of that: the guest's clock counts something else",
        counts.check
    );
    counts.tables(report)?;
    Ok(preface(&plan, &counts, &image, date))
}

/// Builds the program for the guest. Returns its path and those of the daemon and its command line, and cargo's target directory.
fn build() -> Result<(Vec<PathBuf>, PathBuf)> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["build", "--quiet", "--release", "--package", "aryk-nvme", "--example", "load"])
        .status()
        .context("running cargo")?;
    ensure!(status.success(), "the program `load` cannot be built");
    let own = std::env::current_exe()?;
    let target = own.parent().and_then(Path::parent).context("this program is not in a target directory")?;
    let programs = ["examples/load", "arykd", "aryk"].map(|name| target.join("release").join(name));
    Ok((programs.into(), target.to_owned()))
}

fn vm(programs: Vec<PathBuf>) -> Vm {
    let drive =
        Nvme { images: Vec::new(), slot: SLOT, is_pluggable: false, properties: "drive=zeroes".to_owned() };
    Vm {
        cpus: 1,
        memory_mib: 1024,
        nvme: vec![drive],
        programs,
        counts_instructions: true,
        // The IOMMU would cost the kernel's driver two calls for each request. The driver in user space maps once.
        kernel: "iommu=pt".to_owned(),
        arguments: vec![
            "-blockdev".to_owned(),
            format!("driver=null-co,node-name=zeroes,size={DRIVE},read-zeroes=off"),
        ],
        ..Vm::with_disks(Vec::new())
    }
}

/// The instructions of a read on one of the kernel's paths, by run.
#[derive(Debug, Default, PartialEq)]
struct Kernel {
    all: Vec<f64>,
    interrupts: Vec<f64>,
}

/// The driver's, by run.
#[derive(Debug, Default, PartialEq)]
struct Driver {
    /// Without polls that found nothing.
    useful: Vec<f64>,
    /// Polls of a request that found nothing.
    empty_polls: Vec<f64>,
    /// Instructions of such a poll.
    empty_poll: Vec<f64>,
    doorbells: Vec<f64>,
}

/// What the guest counted, for a request.
#[derive(Debug, Default, PartialEq)]
struct Counts {
    /// The loop's instructions by the clock, as a multiple of its instructions.
    check: f64,
    /// fio's own instructions, by depth and run.
    fio: BTreeMap<u16, Vec<f64>>,
    /// By depth and path.
    kernel: BTreeMap<(u16, String), Kernel>,
    /// By depth.
    driver: BTreeMap<u16, Driver>,
    /// Of the daemon's threads, by sleep policy and depth, by run.
    daemon: BTreeMap<(String, u16), Vec<f64>>,
}

impl Counts {
    fn read(output: &Output) -> Result<Self> {
        let mut counts = Self::default();
        for (name, text) in &output.files {
            let depth = name.split(' ').nth(1).and_then(|word| word.parse().ok());
            let depth = depth.with_context(|| format!("a file {name:?}"))?;
            counts.fio.entry(depth).or_default().push(fio(text)?);
        }
        let (mut once, mut nothing) = (0.0, 0.0);
        for line in &output.lines {
            counts
                .line(line, &mut once, &mut nothing)
                .with_context(|| format!("the guest printed {line:?}"))?;
        }
        Ok(counts)
    }

    /// Takes a line of the script. `once` and `nothing` are of the last such lines.
    fn line(&mut self, line: &str, once: &mut f64, nothing: &mut f64) -> Result<()> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let numbers = || -> Vec<f64> { words.iter().filter_map(|word| word.parse().ok()).collect() };
        match words[..] {
            ["loop", "once", ..] => *once = change(&numbers())?[0],
            // The processes around the loop cancel out.
            ["loop", "twice", ..] => self.check = (change(&numbers())?[0] - *once) / LOOP,
            ["nothing", ..] => *nothing = change(&numbers())?[0],
            ["kernel", path, depth, ..] => {
                let [busy, reads, interrupts] = change(&numbers()[1..])?;
                ensure!(reads > 0.0, "no read completed");
                let kernel = self.kernel.entry((depth.parse()?, path.to_owned())).or_default();
                kernel.all.push((busy - *nothing) / reads);
                kernel.interrupts.push(interrupts / reads);
            }
            ["driver", depth, ..] => {
                let [_, requests, time, empty_polls, empty_poll, doorbells] = numbers()[..] else {
                    anyhow::bail!("six numbers are expected");
                };
                let driver = self.driver.entry(depth.parse()?).or_default();
                driver.useful.push((time - empty_polls * empty_poll) / requests);
                driver.empty_polls.push(empty_polls / requests);
                driver.empty_poll.push(empty_poll);
                driver.doorbells.push(doorbells / requests);
            }
            ["daemon", policy, depth, ..] => {
                let [_, requests, before, between, after] = numbers()[..] else {
                    anyhow::bail!("five numbers are expected");
                };
                ensure!(requests > 0.0, "no reads");
                // The second run is longer by so many requests twice. What a run costs at its start and its end cancels out.
                let more = (after - between) - (between - before);
                self.daemon
                    .entry((policy.to_owned(), depth.parse()?))
                    .or_default()
                    .push(more / requests / 2.0);
            }
            _ => {}
        }
        Ok(())
    }

    fn tables(&self, report: &mut Report) -> Result<()> {
        let columns =
            ["in flight", "path", "instructions", "of these fio's own", "without fio's own", "interrupts"];
        let intro = "Instructions of a read of 4 KiB, and interrupts a read. fio's own part is counted with its engine `null`, which \
            completes reads without the kernel.";
        let mut kernel = Section::new("Linux", intro, columns.map(str::to_owned).to_vec());
        let mut best: BTreeMap<u16, (String, Runs)> = BTreeMap::new();
        for ((depth, path), counted) in &self.kernel {
            let fio = runs(self.fio.get(depth).context("fio's own part is missing")?);
            let all = runs(&counted.all);
            let net = all.minus(&fio);
            kernel.row(vec![
                depth.to_string(),
                path.clone(),
                cell(&all, number),
                cell(&fio, number),
                cell(&net, number),
                cell(&runs(&counted.interrupts), number),
            ]);
            let is_best = best.get(depth).is_none_or(|(_, known)| net.median() < known.median());
            if is_best {
                best.insert(*depth, (path.clone(), net));
            }
        }
        report.section(kernel);
        let columns = [
            "in flight",
            "instructions",
            "best path of Linux",
            "ratio",
            "polls in vain",
            "instructions of one",
            "instructions with them",
            "ratio with them",
            "doorbells",
        ];
        let intro = "Instructions of a read of 4 KiB, without the polls that found no completion and with them; doorbells a read. The \
            best path is Linux's least median without fio's own part. The number of polls in vain only says how long QEMU took.";
        let mut ours = Section::new("The driver in user space", intro, columns.map(str::to_owned).to_vec());
        for (depth, counted) in &self.driver {
            let (path, peer) = best.get(depth).context("Linux's counts are missing")?;
            let useful = runs(&counted.useful);
            let vain = counted.empty_polls.iter().zip(&counted.empty_poll).map(|(polls, cost)| polls * cost);
            let with: Runs = counted.useful.iter().zip(vain).map(|(useful, vain)| useful + vain).collect();
            let name = format!("nvme-guest/randread-4k/qd{depth}");
            let metric = format!("a read, peer Linux's {path} without fio's own part");
            let record = Record::new(&name, &metric, "instructions", &useful, peer);
            let record_with =
                Record::new(&name, &format!("{metric}; with polls in vain"), "instructions", &with, peer);
            let ratio = |record: &Record| record.ratio.map_or(String::new(), |ratio| format!("{ratio:.2}"));
            ours.row(vec![
                depth.to_string(),
                cell(&useful, number),
                format!("{path}: {}", cell(peer, number)),
                format!("{} (aim {AIM})", ratio(&record)),
                cell(&runs(&counted.empty_polls), number),
                cell(&runs(&counted.empty_poll), number),
                cell(&with, number),
                ratio(&record_with),
                cell(&runs(&counted.doorbells), number),
            ]);
            report.records.extend([record, record_with]);
        }
        report.section(ours);
        self.daemon_table(&best, report)
    }

    fn daemon_table(&self, best: &BTreeMap<u16, (String, Runs)>, report: &mut Report) -> Result<()> {
        let columns = ["sleep policy", "in flight", "instructions", "best path of Linux", "ratio"];
        let columns = columns.map(str::to_owned).to_vec();
        let mut section = Section::new("arykd", DAEMON, columns);
        for ((policy, depth), counted) in &self.daemon {
            let (path, peer) = best.get(depth).context("Linux's counts are missing")?;
            let all = runs(counted);
            let name = format!("nvme-guest/arykd/{policy}/randread-4k/qd{depth}");
            let metric = format!("a read, peer Linux's {path} without fio's own part");
            let record = Record::new(&name, &metric, "instructions", &all, peer);
            section.row(vec![
                policy.clone(),
                depth.to_string(),
                cell(&all, number),
                format!("{path}: {}", cell(peer, number)),
                record.ratio.map_or(String::new(), |ratio| format!("{ratio:.2} (aim {AIM})")),
            ]);
            report.records.push(record);
        }
        report.section(section);
        Ok(())
    }
}

const DAEMON: &str = "Instructions of a read of 4 KiB in all threads of `arykd`, user space and kernel: from a front-end's ring over \
    vhost-user-blk to the drive and back, with the wake-ups of a sleeping reactor and the signals to the front-end. The front-end is \
    `aryk bench` in the same guest, on the same processor, and its instructions do not count: it polls its ring while the kernel lets \
    it run, which the reactor preempts when it wakes. Counted is what the kernel says that the threads have run \
    (`/proc/PID/task/TID/schedstat`); the difference of two runs leaves out what a run costs at its start and its end. An interrupt \
    counts for the thread that it interrupts, so most of the drive's interrupts, up to one a read, are missing. A reactor with the \
    policy `interrupt` sleeps at once. With `adaptive`, it polls while a request is in flight, and these polls count: with one \
    request in flight, they are nearly all of its instructions, and the aim is missed, because QEMU takes tens of microseconds for a \
    read. The policy `poll` is not here: the reactor and the front-end would wait for each other's time slices on the only processor.";

fn runs(values: &[f64]) -> Runs {
    values.iter().copied().collect()
}

/// The change from the first three numbers to the last three.
fn change(numbers: &[f64]) -> Result<[f64; 3]> {
    let &[busy, reads, interrupts, busy_after, reads_after, interrupts_after] = numbers else {
        anyhow::bail!("six numbers are expected");
    };
    Ok([busy_after - busy, reads_after - reads, interrupts_after - interrupts])
}

/// Nanoseconds of a read of a job that never waited, from fio's report.
fn fio(text: &str) -> Result<f64> {
    // fio may say something before the report.
    let json = text.find('{').map_or("", |start| &text[start..]);
    let report: serde_json::Value = serde_json::from_str(json).context("fio's report")?;
    let iops = report["jobs"][0]["read"]["iops"].as_f64().filter(|iops| *iops > 0.0);
    Ok(1e9 / iops.context("fio's report has no rate")?)
}

/// The head of the page.
fn preface(plan: &Plan, counts: &Counts, image: &Image, date: Option<&str>) -> String {
    let date = date.map_or_else(|| machine::output("date", &["--utc", "+%F"]), |date| Some(date.to_owned()));
    let facts = [
        ("date", date),
        ("commit", machine::output("git", &["describe", "--always", "--dirty"])),
        ("emulator", machine::output("qemu-system-x86_64", &["--version"])),
        ("guest's kernel", Some(image.kernel.clone())),
        ("fio", machine::output("fio", &["--version"])),
        ("compiler", machine::output("rustc", &["--version"])),
    ];
    let facts: String =
        facts.into_iter().filter_map(|(name, fact)| fact.map(|fact| format!("- {name}: {fact}\n"))).collect();
    format!(
        "# Instructions of a read, compared with Linux\n\nWritten by `cargo xtask bench nvme-guest`: {} runs of each measurement, medians \
         (least–greatest). {HOW}\n\n{LIMITS}\n\nThe clock was checked by a loop of {LOOP} instructions, which it counted as {:.4} times that: the \
         timer's interrupts and the loop's process count too.\n\n{facts}\nCommands in the guest:\n\n```text\n{COMMANDS}\nload {ADDRESS} DEPTH \
         {}\n```\n",
        plan.rounds, counts.check, plan.requests,
    )
}

const HOW: &str = "One guest has one processor, and one emulated NVMe drive that answers without data (QEMU's `null-co`). With \
    `-icount shift=0`, the guest's clock advances by one nanosecond for each instruction while the processor is busy, so busy time \
    counts instructions: of user space, of the kernel, and of interrupts.

- **Linux**: fio, with the kernel's driver. Counted is the change of the clock less the processor's idle time (`/proc/timer_list`) \
    while fio runs, divided by the reads that completed; what the counting itself costs is subtracted. Linux has its best \
    conditions: no IOMMU for its own driver (`iommu=pt`), no mitigations, no clock reads of fio (`gtod_reduce`). A column \
    subtracts fio's own part. `fixed` means registered buffers and a registered file.
- **The driver in user space**: `crates/nvme/examples/load.rs` drives the same drive by VFIO, behind the virtual IOMMU. It polls, so \
    the processor is never idle, and everything that the processor does meanwhile counts. Each turn reads the clock, reaps, \
    chooses random blocks, submits, checks for late commands and rings the doorbell. Polls that find no completion are counted \
    by number, and their cost is measured before, by a million polls while a command is in flight whose doorbell was not rung.";

const LIMITS: &str = "**What this does not measure**: a VM on `arykd`, whose exits cost more than a front-end's system calls; [the NVMe \
    page](nvme.md) has the path from a VM's queue of a reactor that polls. And a ratio of the driver without the polls in vain is what the \
    driver adds to a processor that polls anyway: with one command in flight, and all polls counted, the driver spends nearly as \
    many instructions as Linux, which sleeps meanwhile (the column *ratio with them*).";

const COMMANDS: &str = "fio --name=load --filename=/dev/nvme0n1 --direct=1 --rw=randread --bs=4k --size=256M --norandommap \
    --gtod_reduce=1 --thread --time_based --iodepth=DEPTH --ioengine=null|io_uring|libaio [--fixedbufs --registerfiles]";

#[cfg(test)]
mod tests {
    use super::{Counts, Driver, Kernel, Output, Report};

    #[test]
    fn runs_of_the_daemon_are_compared() {
        let lines = format!("{LINES}\ndaemon adaptive 32 100 5000 105000 405000");
        let counts = Counts::read(&output(&lines)).unwrap();
        assert_eq!(counts.daemon[&("adaptive".to_owned(), 32)], [1000.0]);
        let mut report = Report::default();
        counts.tables(&mut report).unwrap();
        assert_eq!((report.sections.len(), report.records[2].ratio), (3, Some(0.125)));
    }

    const LINES: &str = "loop once 1000 0 0 200001500 0 0
loop twice 5000 0 0 400006000 0 0
nothing 100 10 0 1100 10 0
kernel io_uring 32 1000 50 7 202000 70 17
kernel libaio 32 0 0 0 301000 10 10
driver 32 requests 100 ns 90000 empty_polls 1000 empty_poll_ns 50.0 doorbells 20";

    fn output(lines: &str) -> Output {
        let mut output = Output { lines: lines.lines().map(str::to_owned).collect(), ..Output::default() };
        let report = "note\n{\"jobs\": [{\"read\": {\"iops\": 500000.0}}]}".to_owned();
        output.files.insert("fio 32 1".to_owned(), report);
        output
    }

    #[test]
    fn counts_of_a_request() {
        let counts = Counts::read(&output(LINES)).unwrap();
        assert!((counts.check - 1.000_002_5).abs() < 1e-9, "{}", counts.check);
        assert_eq!(counts.fio[&32], [2000.0]);
        let ring = &counts.kernel[&(32, "io_uring".to_owned())];
        assert_eq!(*ring, Kernel { all: vec![10_000.0], interrupts: vec![0.5] });
        let useful = vec![400.0];
        let (empty_polls, empty_poll, doorbells) = (vec![10.0], vec![50.0], vec![0.2]);
        assert_eq!(counts.driver[&32], Driver { useful, empty_polls, empty_poll, doorbells });
    }

    #[test]
    fn the_best_path_is_the_peer() {
        let mut report = Report::default();
        Counts::read(&output(LINES)).unwrap().tables(&mut report).unwrap();
        let [useful, with] = &report.records[..] else { panic!("{:?}", report.records) };
        assert_eq!((useful.aryk, useful.peer, useful.ratio), (Some(400.0), Some(8000.0), Some(0.05)));
        assert_eq!((with.aryk, with.peer), (Some(900.0), Some(8000.0)));
        assert!(useful.metric.contains("io_uring"), "{}", useful.metric);
        assert_eq!(report.sections.len(), 2);
    }

    #[test]
    fn lines_that_do_not_count_are_errors() {
        for line in [
            "kernel io_uring 32 1000 50 7 202000 50 17",
            "kernel io_uring 32 1000 50",
            "kernel io_uring many 1 2 3 4 5 6",
            "driver 32 requests 100",
            "loop once 1",
            "daemon adaptive 32 0 1 2 3",
            "daemon adaptive 32 100 1 2",
        ] {
            assert!(Counts::read(&output(line)).is_err(), "{line}");
        }
    }
}
