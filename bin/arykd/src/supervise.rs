//! `--supervise`: a process that only runs a daemon as its child. It starts no reactor and no runtime.
//!
//! The daemon has the same arguments. When it dies by a signal or exits with an error, the supervisor starts another: at once,
//! and after a pause if the daemon did not live for a second. If the supervisor is killed, its daemon must not stay, because it
//! would hold sockets and disks that a new one needs, and nothing would restart it. So the daemon makes the kernel send it
//! SIGTERM in that case, completes its requests and exits, and a new supervisor starts from an orderly state.
//!
//! The daemon reads no input, so its standard input is a pipe in the other direction: there it writes the reason of a panic,
//! which the supervisor logs beside the exit status.

use crate::cli::Cli;
use crate::log::{self, Format};
use anyhow::Context;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Environment variable of the daemon with the supervisor's process id.
const SUPERVISOR: &str = "ARYK_SUPERVISOR";

/// A daemon that has lived this long counts as started.
const LIVED: Duration = Duration::from_secs(1);
/// The pause before the second attempt to start a daemon, and the longest pause.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// In a daemon with a supervisor: makes the daemon end with it, and returns its process id.
///
/// # Errors
/// The supervisor is gone already.
pub fn follow() -> anyhow::Result<Option<u32>> {
    let Some(supervisor) = std::env::var(SUPERVISOR).ok().and_then(|pid| pid.parse::<i32>().ok()) else {
        return Ok(None);
    };
    set_parent_process_death_signal(Some(Signal::TERM)).context("cannot follow the supervisor")?;
    // The supervisor may have died before that call.
    anyhow::ensure!(getppid() == Pid::from_raw(supervisor), "the supervisor is gone");
    Ok(Some(supervisor.unsigned_abs()))
}

/// In a daemon with a supervisor: reports why the daemon dies. Does not block.
pub fn report_to_supervisor(why: &str) {
    // If the write fails, the supervisor still logs the signal.
    let _ = rustix::io::write(std::io::stdin(), why.as_bytes());
}

/// Runs daemons until one exits without an error, or a signal ends them. Returns the exit code.
///
/// # Errors
/// A system call failed.
pub fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    // The returned function would change the level, which only the daemon does.
    drop(log::start(cli.log, Format::choose(cli.log_format)));
    log::write_behind();
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGCHLD])?;
    let (sender, events) = channel();
    let forward = move || signals.forever().try_for_each(|signal| sender.send(signal));
    std::thread::Builder::new().name("signals".into()).spawn(forward)?;
    let mut supervisor = Supervisor { events, ending: false };
    let mut pause = Duration::ZERO;
    loop {
        let started = now();
        let (status, last_words) = supervisor.run_daemon()?;
        if status.success() || supervisor.ending {
            return Ok(exit_code(status));
        }
        if started.elapsed() >= LIVED {
            pause = Duration::ZERO;
        }
        let why = (!last_words.is_empty()).then_some(&*last_words);
        tracing::error!(%status, why, lived = ?started.elapsed(), ?pause, "the daemon has died; another is started");
        if !supervisor.pause(pause) {
            return Ok(exit_code(status));
        }
        pause = (pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
    }
}

struct Supervisor {
    events: Receiver<i32>,
    /// Whether a signal has requested the end.
    ending: bool,
}

impl Supervisor {
    /// Starts a daemon and forwards signals to it until it has exited. Returns its exit status and its last words.
    fn run_daemon(&mut self) -> anyhow::Result<(ExitStatus, String)> {
        let (read_end, write_end) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let mut daemon = spawn(write_end)?;
        loop {
            if let Some(status) = daemon.try_wait()? {
                return Ok((status, read_available(&read_end)));
            }
            let signal = self.events.recv().context("the thread that receives signals is gone")?;
            if signal != SIGCHLD {
                self.ending = true;
                forward_signal(signal, &daemon);
            }
        }
    }

    /// Waits for `pause`, or until a signal ends the supervisor. Returns whether to go on.
    fn pause(&mut self, pause: Duration) -> bool {
        let until = now() + pause;
        loop {
            match self.events.recv_timeout(until.saturating_duration_since(now())) {
                Ok(SIGCHLD) => {}
                Ok(_) | Err(RecvTimeoutError::Disconnected) => return false,
                Err(RecvTimeoutError::Timeout) => return true,
            }
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "no reactor runs here")]
fn now() -> Instant {
    Instant::now()
}

/// Starts a daemon with our arguments. It runs the program that is now at our program's path, so an upgrade takes effect.
fn spawn(last_words: OwnedFd) -> anyhow::Result<Child> {
    let program = std::env::current_exe()?;
    let program = program.to_str().map_or(program.clone(), |p| p.trim_end_matches(" (deleted)").into());
    Command::new(&program)
        .args(std::env::args_os().skip(1).filter(|arg| arg != "--supervise"))
        .env(SUPERVISOR, std::process::id().to_string())
        .stdin(last_words)
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))
}

fn read_available(read_end: &OwnedFd) -> String {
    let mut bytes = [0; 4096];
    let len = rustix::io::read(read_end, &mut bytes).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

fn forward_signal(signal: i32, daemon: &Child) {
    let signal = if signal == SIGINT { Signal::INT } else { Signal::TERM };
    // The daemon has not been waited for, so its process id is still its own.
    if let Err(errno) = kill_process(Pid::from_child(daemon), signal) {
        tracing::warn!(%errno, "cannot forward a signal to the daemon");
    }
}

/// The exit code as a shell reports it.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}
