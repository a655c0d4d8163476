//! What a result depends on besides the code: the machine, the kernel, versions, the date.

use std::fmt::Write;
use std::process::Command;
use std::time::Duration;

/// Lines of a list for the head of a report. What cannot be found out is left out.
/// `round_trips` were measured before and after.
pub fn describe(date: Option<&str>, round_trips: [Duration; 2]) -> String {
    let date = date.map_or_else(|| output("date", &["--utc", "+%F"]), |date| Some(date.to_owned()));
    let [before, after] = round_trips.map(|time| time.as_nanos());
    let facts = [
        ("date", date),
        ("commit", output("git", &["describe", "--always", "--dirty"])),
        ("processor", processor()),
        ("memory", memory()),
        ("a cache line from core to core and back", Some(format!("{before} ns before, {after} ns after"))),
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
fn output(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.lines().next().map(str::to_owned))?
}

fn processor() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let model = info.lines().find(|line| line.starts_with("model name"))?;
    let cores = info.lines().filter(|line| line.starts_with("processor")).count();
    Some(format!("{}, {cores} cores", model.split_once(':')?.1.trim()))
}

fn memory() -> Option<String> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = info.lines().next()?.split_whitespace().nth(1)?.parse().ok()?;
    Some(format!("{} GiB", (kib + (1 << 19)) >> 20))
}
