//! The progress of long work: the current step, its duration, and where the details are.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Interval of polling a running program.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Interval of progress lines where a line cannot be overwritten.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// Lines of a failed program's output that are shown.
const LAST_LINES: usize = 20;

/// Prints messages with the time since its creation.
#[derive(Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    #[expect(clippy::disallowed_methods, reason = "the output shows durations")]
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// Prints a line with the time before it.
    pub(crate) fn say(&self, text: &str) {
        println!("[{:>4} s] {text}", self.0.elapsed().as_secs());
    }

    /// Whole seconds since the creation.
    pub(crate) fn seconds(&self) -> u64 {
        self.0.elapsed().as_secs()
    }
}

/// User and system time of this process and of all children that it has waited for, in seconds.
pub(crate) fn cpu_seconds() -> Result<u64> {
    let stat = std::fs::read_to_string("/proc/self/stat").context("reading /proc/self/stat")?;
    // The name in parentheses may contain spaces. Field 3 follows it; fields 14 to 17 are the times, in ticks.
    let (_, fields) = stat.rsplit_once(')').context("no name in /proc/self/stat")?;
    let ticks: u64 = fields.split_whitespace().skip(11).take(4).map(|t| t.parse().unwrap_or(0)).sum();
    Ok(ticks / rustix::param::clock_ticks_per_second())
}

/// Runs a program whose output is appended to the file `log`, and prints the duration. If the program fails, the error
/// contains the last lines of its output.
pub(crate) fn run_logged(what: &str, log: &Path, command: &mut Command) -> Result<()> {
    let clock = Clock::start();
    let shown = log.display();
    let mut file =
        File::options().create(true).append(true).open(log).with_context(|| format!("opening {shown}"))?;
    writeln!(file, "\n$ {command:?}")?;
    println!("{what} (details: {shown})");
    let child = command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).spawn();
    let mut child = child.with_context(|| format!("running {command:?}"))?;
    let status = wait(&mut child, &clock)?;
    if !status.success() {
        let said = std::fs::read_to_string(log).unwrap_or_default();
        let lines: Vec<_> = said.lines().collect();
        let last = lines[lines.len().saturating_sub(LAST_LINES)..].join("\n");
        bail!("{command:?}: {status}. The last lines of {shown}:\n{last}");
    }
    println!("  done in {} s", clock.seconds());
    Ok(())
}

/// Waits until the child has ended. On a terminal one line counts the seconds; elsewhere a line is printed at intervals.
fn wait(child: &mut Child, clock: &Clock) -> Result<ExitStatus> {
    let mut out = std::io::stdout();
    let is_terminal = out.is_terminal();
    let mut due = if is_terminal { Duration::ZERO } else { LINE_INTERVAL };
    loop {
        if let Some(status) = child.try_wait()? {
            if is_terminal {
                write!(out, "\r\x1b[K")?;
            }
            return Ok(status);
        }
        if clock.0.elapsed() >= due {
            match is_terminal {
                true => write!(out, "\r  {} s", clock.seconds())?,
                false => writeln!(out, "  {} s …", clock.seconds())?,
            }
            out.flush()?;
            due += if is_terminal { Duration::from_secs(1) } else { LINE_INTERVAL };
        }
        std::thread::park_timeout(POLL_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_goes_to_the_log_and_the_last_of_it_into_the_error() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        run_logged("It works", &log, Command::new("sh").args(["-c", "echo fine; echo oh >&2"])).unwrap();
        assert!(std::fs::read_to_string(&log).unwrap().ends_with("fine\noh\n"));
        let error =
            run_logged("It fails", &log, Command::new("sh").args(["-c", "seq 100; exit 3"])).unwrap_err();
        let told = format!("{error:#}");
        assert!(told.contains("exit status: 3") && told.ends_with("\n99\n100"), "{told}");
        assert_eq!(told.lines().count(), 1 + LAST_LINES);
    }

    #[test]
    fn the_processors_time_of_children_is_counted() {
        let before = cpu_seconds().unwrap();
        let burn = "i=0; while [ $i -lt 1000000 ]; do i=$((i+1)); done";
        while cpu_seconds().unwrap() == before {
            assert!(Command::new("sh").args(["-c", burn]).status().unwrap().success());
        }
    }
}
