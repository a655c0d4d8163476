//! Child processes that cannot outlive this process.
//!
//! Dropping a [`Process`] kills it; if this process is killed, the kernel kills the child (`setpriv --pdeathsig`, which
//! takes effect when the *thread* that spawned it ends: spawn from a thread that lives as long as the child should).
//! [`interrupt`] makes every wait return an error, so that Ctrl-C unwinds through the drops.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
pub use rustix::process::Signal;
use rustix::process::{Pid, kill_process};

/// Poll interval of a wait: short against a guest's boot, long against a wake-up.
pub(crate) const TICK: Duration = Duration::from_millis(20);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Makes all waits in this crate fail from now on. Callable from any thread.
pub fn interrupt() {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Fails if [`interrupt`] was called.
///
/// # Errors
/// "interrupted".
pub fn check_interrupt() -> Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

/// Calls `condition` until it returns a value; fails after `timeout`.
///
/// # Errors
/// The error of `condition`, `timeout` passed ("… waiting for `what`"), or [`interrupt`] was called.
pub fn wait_until<T>(
    what: &str,
    timeout: Duration,
    mut condition: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + timeout;
    loop {
        check_interrupt()?;
        if let Some(value) = condition()? {
            return Ok(value);
        }
        if Instant::now() > deadline {
            bail!("{} s passed waiting for {what}", timeout.as_secs());
        }
        std::thread::sleep(TICK);
    }
}

/// A running child, its stderr (and stdout, unless piped) in a file.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

/// A child's standard input and output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stdin {
    /// No input; output goes to the log.
    Null,
    /// Both are pipes, which [`Process::take_pipes`] returns once.
    Piped,
}

impl Process {
    /// Starts `program` with `args`; its output is appended to `log`.
    ///
    /// # Errors
    /// The program or `setpriv` (util-linux) cannot be run, or the log cannot be written.
    pub fn spawn(program: &Path, args: &[String], stdin: Stdin, log: &Path) -> Result<Self> {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let file = File::options().create(true).append(true).open(log)?;
        let (input, output) = match stdin {
            Stdin::Null => (Stdio::null(), file.try_clone()?.into()),
            Stdin::Piped => (Stdio::piped(), Stdio::piped()),
        };
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            .args(args)
            .stdin(input)
            .stdout(output)
            .stderr(file)
            .spawn()
            .with_context(|| format!("starting {name} through setpriv"))?;
        Ok(Self { name, child, log: log.to_owned() })
    }

    /// The child's pipes, if it was spawned with them and they were not taken yet.
    pub fn take_pipes(&mut self) -> Option<(ChildStdin, ChildStdout)> {
        Some((self.child.stdin.take()?, self.child.stdout.take()?))
    }

    /// The process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// The process has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("{} has ended: {status}", self.name);
        }
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    /// Kills the process, and waits until it has ended.
    pub fn kill(&mut self) {
        // Both fail only if the child has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Its exit status, if it has ended.
    ///
    /// # Errors
    /// Those of `waitpid`.
    pub fn exited(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Waits until the process has ended.
    ///
    /// # Errors
    /// `timeout` passed, or [`interrupt`] was called.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let child = &mut self.child;
        wait_until(&format!("{} to end", self.name), timeout, || Ok(child.try_wait()?))
    }

    /// The last lines that it wrote to its log.
    #[must_use]
    pub fn log_tail(&self) -> String {
        tail(&self.log, 20)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The last `lines` lines of a file, or nothing if it cannot be read.
pub(crate) fn tail(path: &Path, lines: usize) -> String {
    let bytes = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<_> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, stdin: Stdin, log: &Path) -> Process {
        Process::spawn(Path::new("/bin/sh"), &["-c".into(), script.into()], stdin, log).unwrap()
    }

    #[test]
    fn output_is_kept_and_status_returned() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let mut child = shell("echo one; echo two >&2; exit 3", Stdin::Null, &log);
        assert_eq!(child.wait(Duration::from_secs(10)).unwrap().code(), Some(3));
        assert_eq!(child.log_tail(), "one\ntwo");
        assert!(child.signal(Signal::TERM).is_err());
    }

    #[test]
    fn a_dropped_process_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let child = shell("exec sleep 100", Stdin::Null, &directory.path().join("log"));
        let proc = PathBuf::from(format!("/proc/{}", child.pid()));
        assert!(proc.exists());
        drop(child);
        assert!(!proc.exists());
    }

    #[test]
    fn waiting_ends_at_the_deadline() {
        let waited: Result<()> = wait_until("never", Duration::from_millis(50), || Ok(None));
        assert!(waited.unwrap_err().to_string().contains("waiting for never"));
    }
}
