//! Back-end processes: pinned to the back-end's core, measured, and ended with the bench.

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The core of the back-ends.
pub const BACK_END_CORE: usize = 0;
/// The core of the front-end.
pub const FRONT_END_CORE: usize = 1;

/// Timeout until a back-end listens.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Pins the calling thread to a core.
pub fn pin(core: usize) -> Result<()> {
    let mut cores = CpuSet::new();
    cores.set(core);
    sched_setaffinity(None, &cores).with_context(|| format!("core {core} is not there: two are needed"))
}

/// Calls `f` while the calling thread and its children may run on both cores.
pub fn unpinned<T>(f: impl FnOnce() -> T) -> Result<T> {
    let before = sched_getaffinity(None)?;
    let mut both = CpuSet::new();
    both.set(BACK_END_CORE);
    both.set(FRONT_END_CORE);
    sched_setaffinity(None, &both)?;
    let value = f();
    sched_setaffinity(None, &before)?;
    Ok(value)
}

/// A child process; dropping it ends the process.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: &'static str,
    /// The command line, quoted for a shell.
    pub command: String,
}

impl Process {
    /// Starts `program`. The kernel ends it when the bench process ends for any reason.
    pub fn start<A: AsRef<OsStr>>(name: &'static str, program: &Path, args: &[A]) -> Result<Self> {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program).args(args);
        let shown = args.iter().fold(program.display().to_string(), |all, arg| {
            format!("{all} {}", arg.as_ref().to_string_lossy())
        });
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = unpinned(|| command.spawn())?.with_context(|| format!("starting {shown}"))?;
        Ok(Self { child, name, command: shown })
    }

    /// Waits until the process has created `socket`.
    pub fn wait_for(&mut self, socket: &Path) -> Result<()> {
        let start = Instant::now();
        while !socket.exists() {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended with {status}: {}", self.name, self.command);
            }
            ensure!(start.elapsed() < START_TIMEOUT, "{} has not created {}", self.name, socket.display());
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// The number of the process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Stops the process with SIGSTOP, so that it does not disturb other measurements.
    pub fn pause(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Continues the process.
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.child.id().cast_signed()).context("a child has a pid")?;
        kill_process(pid, signal).with_context(|| format!("signalling {}", self.name))
    }

    /// Lets the process end by SIGTERM, and waits for that: unlike a killed one, it gives back what others wait for.
    pub fn end(mut self) -> Result<()> {
        ensure!(self.ends()?, "{} does not end: {}", self.name, self.command);
        Ok(())
    }

    /// As [`end`](Self::end), but a process that does not end is killed. Returns whether it has ended by itself.
    pub fn end_or_kill(mut self) -> Result<bool> {
        self.ends()
    }

    fn ends(&mut self) -> Result<bool> {
        self.signal(Signal::TERM)?;
        let start = Instant::now();
        while self.child.try_wait()?.is_none() {
            if start.elapsed() > START_TIMEOUT {
                return Ok(false);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(true)
    }

    /// Processor time of all its threads so far.
    pub fn cpu(&self) -> Result<Duration> {
        Ok(self.cpu_by_thread()?.into_values().sum())
    }

    /// Processor time of all its threads since `before`, without threads that have ended since then.
    pub fn cpu_since(&self, before: &BTreeMap<OsString, Duration>) -> Result<Duration> {
        let now = self.cpu_by_thread()?;
        let used = |(thread, now): (&OsString, &Duration)| {
            now.saturating_sub(before.get(thread).copied().unwrap_or_default())
        };
        Ok(now.iter().map(used).sum())
    }

    /// Processor time of each of its threads so far.
    pub fn cpu_by_thread(&self) -> Result<BTreeMap<OsString, Duration>> {
        let mut times = BTreeMap::new();
        let tasks = format!("/proc/{}/task", self.child.id());
        for task in std::fs::read_dir(&tasks).with_context(|| format!("{} has ended", self.name))? {
            let task = task?;
            // A thread that ends in between has no file.
            let stat = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            let time = stat.split_whitespace().next().and_then(|ns| ns.parse::<u64>().ok());
            times.insert(task.file_name(), Duration::from_nanos(time.unwrap_or(0)));
        }
        Ok(times)
    }

    /// Waits until the process ends by itself, successfully; returns the processor time of all its threads, which is read so
    /// often that little is missed. The calling thread polls, as a front-end does: so its core is as busy as beside a back-end.
    pub fn cpu_until_end(&mut self, timeout: Duration) -> Result<Duration> {
        const INTERVAL: Duration = Duration::from_millis(2);
        let start = Instant::now();
        let mut threads = BTreeMap::new();
        loop {
            if let Some(status) = self.child.try_wait()? {
                ensure!(status.success(), "{} ended with {status}: {}", self.name, self.command);
                return Ok(threads.into_values().sum());
            }
            for (thread, time) in self.cpu_by_thread().unwrap_or_default() {
                let known: &mut Duration = threads.entry(thread).or_default();
                *known = time.max(*known);
            }
            ensure!(start.elapsed() < timeout, "{} does not end: {}", self.name, self.command);
            let read = Instant::now();
            while read.elapsed() < INTERVAL {
                std::hint::spin_loop();
            }
        }
    }

    /// Bytes of anonymous memory of the process.
    pub fn memory(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.with_context(|| format!("{} has ended", self.name))?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kilobytes =
            line.and_then(|line| line.trim().strip_suffix(" kB")).context("the kernel reports no RssAnon")?;
        Ok(kilobytes.parse::<u64>()? * 1024)
    }

    /// Number of open file descriptors.
    pub fn descriptors(&self) -> Result<usize> {
        let open = std::fs::read_dir(format!("/proc/{}/fd", self.child.id()));
        Ok(open.with_context(|| format!("{} has ended", self.name))?.count())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have ended by itself, or be stopped.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
