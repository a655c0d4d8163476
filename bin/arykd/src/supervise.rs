//! `--supervise`: a process that does nothing but have a daemon run. It starts no reactor and no runtime.
//!
//! The daemon is a child with the same arguments. When it dies of a signal, or ends with an error, another takes its place: at once, and after a while if it
//! does not live for a second. If we are killed, nobody would restart it any more, and it would keep its successor from its sockets and disks; so it asks the
//! kernel for SIGTERM in that case, finishes what runs and ends, and whoever starts a supervisor again starts from an orderly state.
//!
//! The daemon reads nothing, so its standard input is a pipe the other way round: there it leaves its last words, which we log beside the signal it died of.

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

/// Holds the supervisor's process number, in the daemon's environment.
const SUPERVISOR: &str = "ARYK_SUPERVISOR";

/// A daemon that has lived so long has not failed to start.
const LIVED: Duration = Duration::from_secs(1);
/// The pauses between daemons that do not live: the second one's, and the longest.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// In a daemon that has a supervisor: ends with it, and returns which process it is.
///
/// # Errors
/// It is gone already.
pub fn follow() -> anyhow::Result<Option<u32>> {
    let Some(supervisor) = std::env::var(SUPERVISOR).ok().and_then(|pid| pid.parse::<i32>().ok()) else {
        return Ok(None);
    };
    set_parent_process_death_signal(Some(Signal::TERM)).context("cannot follow the supervisor")?;
    // It may have died before that.
    anyhow::ensure!(getppid() == Pid::from_raw(supervisor), "the supervisor is gone");
    Ok(Some(supervisor.unsigned_abs()))
}

/// In a daemon that has a supervisor: says why it dies. Does not wait.
pub fn tell_supervisor(why: &str) {
    // Whom that does not reach learns the signal.
    let _ = rustix::io::write(std::io::stdin(), why.as_bytes());
}

/// Has a daemon run until it ends by itself, or as it is told to; its exit code.
///
/// # Errors
/// The system does not let us.
pub fn run(cli: &Cli) -> anyhow::Result<ExitCode> {
    // Its handle would change the level, which is the daemon's affair.
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
        if !supervisor.rest(pause) {
            return Ok(exit_code(status));
        }
        pause = (pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
    }
}

struct Supervisor {
    events: Receiver<i32>,
    /// Whether we were told to end.
    ending: bool,
}

impl Supervisor {
    /// Starts a daemon, and passes signals on to it until it has ended; how it has, and what it said of that.
    fn run_daemon(&mut self) -> anyhow::Result<(ExitStatus, String)> {
        let (words, said) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let mut daemon = spawn(said)?;
        loop {
            if let Some(status) = daemon.try_wait()? {
                return Ok((status, read_what_there_is(&words)));
            }
            let signal = self.events.recv().context("nobody takes signals any more")?;
            if signal != SIGCHLD {
                self.ending = true;
                pass_on(signal, &daemon);
            }
        }
    }

    /// Waits; tells whether to go on.
    fn rest(&mut self, pause: Duration) -> bool {
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

/// A daemon with our arguments. It is the program that is now where ours was, so an upgrade takes effect.
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

fn read_what_there_is(words: &OwnedFd) -> String {
    let mut bytes = [0; 4096];
    let len = rustix::io::read(words, &mut bytes).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

fn pass_on(signal: i32, daemon: &Child) {
    let signal = if signal == SIGINT { Signal::INT } else { Signal::TERM };
    // It has not been waited for, so the number is still its own.
    if let Err(errno) = kill_process(Pid::from_child(daemon), signal) {
        tracing::warn!(%errno, "cannot pass a signal on");
    }
}

/// As a shell tells it.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or_default());
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}
