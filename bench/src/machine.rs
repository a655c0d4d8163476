//! What a result depends on besides the code: the machine, the kernel, versions, the date.

use crate::process::{self, BACK_END_CORE};
use std::fmt::Write;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

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

/// How long a cache line takes from the calling thread's core to the back ends' and back, at best. A virtual machine's two
/// cores may be far from each other now and close a minute later, and what they share is faster by as much.
pub fn round_trip() -> Duration {
    const ROUNDS: u32 = 1_000;
    const BATCHES: u32 = 50;
    let line = Arc::new(AtomicU32::new(0));
    let theirs = Arc::clone(&line);
    // Whoever sees the other's number answers with the next: ours are odd.
    let answering = std::thread::spawn(move || {
        let pinned = process::pin(BACK_END_CORE);
        for number in (1..2 * ROUNDS * BATCHES).step_by(2) {
            while theirs.load(Ordering::Acquire) != number {
                std::hint::spin_loop();
            }
            theirs.store(number + 1, Ordering::Release);
        }
        pinned
    });
    let mut best = Duration::MAX;
    let mut number = 0;
    for _ in 0..BATCHES {
        let start = Instant::now();
        for _ in 0..ROUNDS {
            line.store(number + 1, Ordering::Release);
            number += 2;
            while line.load(Ordering::Acquire) != number {
                std::hint::spin_loop();
            }
        }
        best = best.min(start.elapsed() / ROUNDS);
    }
    let pinned = answering.join().expect("it only counts");
    pinned.expect("the bench's own thread could be pinned");
    best
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
