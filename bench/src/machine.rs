//! The environment of a result: the test machine, the kernel, versions, the date.

use std::fmt::Write;
use std::process::Command;
use std::time::{Duration, Instant};

/// Processor time that the hypervisor took from this machine since a moment.
#[derive(Debug)]
pub struct Stolen {
    since: Instant,
    before: Option<u64>,
}

impl Stolen {
    /// Starts watching.
    pub fn watch() -> Self {
        Self { since: Instant::now(), before: stolen_ticks() }
    }

    /// The share of time taken until now.
    fn share(&self) -> Option<String> {
        let ticks = stolen_ticks()?.checked_sub(self.before?)? as f64;
        // The kernel reports USER_HZ, hundredths of a second (proc(5)).
        let cores = cores(&std::fs::read_to_string("/proc/cpuinfo").ok()?) as f64;
        let share = ticks / (self.since.elapsed().as_secs_f64() * cores);
        Some(format!("{share:.1} % of the time"))
    }
}

/// The ticks stolen from all cores, as `/proc/stat` reports.
fn stolen_ticks() -> Option<u64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    stat.lines().next()?.split_whitespace().nth(8)?.parse().ok()
}

/// The lines of a list for the head of a report; omits facts that cannot be determined. `round_trips` were measured
/// before and after.
pub fn describe(date: Option<&str>, stolen: &Stolen, round_trips: [Duration; 2]) -> String {
    let date = date.map_or_else(|| output("date", &["--utc", "+%F"]), |date| Some(date.to_owned()));
    let [before, after] = round_trips.map(|time| time.as_nanos());
    let facts = [
        ("date", date),
        ("commit", output("git", &["describe", "--always", "--dirty"])),
        ("processor", processor()),
        ("memory", memory()),
        ("a cache line from core to core and back", Some(format!("{before} ns before, {after} ns after"))),
        ("taken by the hypervisor during the run", stolen.share()),
        ("kernel", output("uname", &["-srm"])),
        ("compiler", output("rustc", &["--version"])),
        ("peer", output("qemu-storage-daemon", &["--version"])),
        ("fio", output("fio", &["--version"])),
    ];
    facts.into_iter().fold(String::new(), |mut list, (name, fact)| {
        if let Some(fact) = fact {
            writeln!(list, "- {name}: {fact}").expect("a string takes all");
        }
        list
    })
}

/// The first line that a command prints.
pub fn output(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.lines().next().map(str::to_owned))?
}

fn processor() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let model = info.lines().find(|line| line.starts_with("model name"))?;
    Some(format!("{}, {} cores", model.split_once(':')?.1.trim(), cores(&info)))
}

/// The number of cores that `/proc/cpuinfo` lists.
fn cores(info: &str) -> usize {
    info.lines().filter(|line| line.starts_with("processor")).count()
}

fn memory() -> Option<String> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = info.lines().next()?.split_whitespace().nth(1)?.parse().ok()?;
    Some(format!("{} GiB", (kib + (1 << 19)) >> 20))
}
