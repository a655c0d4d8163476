//! `aryk logs` and `aryk stop`: the daemon as a process of this host, possibly a systemd service.

use super::{disk, elements, number, text};
use crate::cli::{Cli, LogsArgs};
use crate::client::Client;
use crate::error::Error;
use crate::output::Output;
use crate::users::Users;
use crate::watch;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The unit in the Debian package.
pub const UNIT: &str = "arykd.service";

/// Interval of the checks whether the daemon has ended.
const CHECK_PERIOD: Duration = Duration::from_millis(50);

/// The daemon's process id.
pub fn pid(client: &mut Client) -> Result<u64, Error> {
    Ok(number(&client.call("framework_get_reactors", json!({}))?, "pid"))
}

/// The systemd unit of the process, if it has one.
fn unit(pid: u64) -> Option<String> {
    unit_of(&std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?)
}

/// The service of a control group. A daemon that was started by hand is in a scope of its session.
fn unit_of(cgroup: &str) -> Option<String> {
    let last = cgroup.lines().next()?.rsplit('/').next()?;
    let is_daemon = |name: &&str| name.ends_with(".service") && name.contains("aryk");
    Some(last).filter(is_daemon).map(str::to_owned)
}

/// Shows the daemon's log: from the journal if the daemon is a service, or the file of its standard error.
pub fn logs(args: &LogsArgs, cli: &Cli) -> Result<(), Error> {
    let source = match Client::connect(&cli.socket, cli.timeout).and_then(|mut client| pid(&mut client)) {
        Ok(pid) => Source::of(pid)?,
        // The journal has the lines of a daemon that has ended.
        Err(Error::NoDaemon(_)) if has_unit() => Source::Journal(UNIT.into()),
        Err(error) => return Err(error),
    };
    let mut command = source.command(args);
    let status =
        command.status().map_err(|e| Error::File(format!("cannot run {:?}: {e}", command.get_program())))?;
    if status.success() || status.code().is_none() {
        return Ok(());
    }
    Err(Error::File(format!("{:?} ended with {status}", command.get_program())))
}

fn has_unit() -> bool {
    ["/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"]
        .iter()
        .any(|dir| Path::new(dir).join(UNIT).exists())
}

/// The place of the log.
#[derive(Debug, PartialEq, Eq)]
enum Source {
    /// The journal of this unit.
    Journal(String),
    File(PathBuf),
}

impl Source {
    /// The log of the daemon with this process id.
    fn of(pid: u64) -> Result<Self, Error> {
        if let Some(unit) = unit(pid) {
            return Ok(Self::Journal(unit));
        }
        let link = format!("/proc/{pid}/fd/2");
        let target = std::fs::read_link(&link).map_err(|e| {
            Error::File(format!(
                "cannot find the log of the daemon, process {pid} ({e}): run this as the daemon's user or root"
            ))
        })?;
        if target.is_file() {
            return Ok(Self::File(target));
        }
        let target = target.display();
        Err(Error::File(format!(
            "the daemon writes its log to {target}; start it with 'arykd 2>> arykd.log' to write the log to a file"
        )))
    }

    fn command(&self, args: &LogsArgs) -> Command {
        let lines = args.lines.to_string();
        let mut command = match self {
            Self::Journal(unit) => {
                let mut command = Command::new("journalctl");
                command.args(["--no-pager", "--unit", unit, "--lines", &lines]);
                command
            }
            Self::File(path) => {
                let mut command = Command::new("tail");
                command.args(["-n", &lines, "--"]).arg(path);
                command
            }
        };
        if args.follow {
            // Options must come before `--`.
            let mut following = Command::new(command.get_program());
            following.arg("-f").args(command.get_args());
            command = following;
        }
        command
    }
}

/// Stops the daemon in order, and waits until it has ended.
pub fn stop(force: bool, cli: &Cli, client: &mut Client, out: &Output) -> Result<(), Error> {
    let refusal = |users: &Users| {
        if force {
            return None;
        }
        let what =
            "VMs or hosts are connected; their disks would not respond until a daemon runs again".into();
        let hint = "Shut them down first; or stop the daemon nevertheless: --force";
        let last_data = elements(&users.disks).iter().filter_map(|disk| users.last_data(disk)).collect();
        Error::in_use(what, users.connected(), hint, last_data)
    };
    let users = Users::read_until_free(client, refusal)?;
    for loss in losses(&users, client.process().as_deref()) {
        eprintln!("aryk: {loss}");
    }
    let pid = pid(client)?;
    match unit(pid) {
        // systemd would restart the daemon after a signal.
        Some(unit) => {
            let status = Command::new("systemctl").args(["stop", &unit]).status()?;
            if !status.success() {
                return Err(Error::File(format!("'systemctl stop {unit}' ended with {status}")));
            }
        }
        None => {
            client.call("spdk_kill_instance", json!({"sig_name": "SIGTERM"}))?;
            wait_for_end(pid, cli)?;
        }
    }
    out.print(&json!({"ended": pid}), || format!("The daemon, process {pid}, has ended."))
}

/// The losses that the daemon's end causes, one line each.
fn losses(users: &Users, process: Option<&Path>) -> Vec<String> {
    let is_in_memory = |disk: &&Value| text(disk, "product_name") == disk::IN_MEMORY;
    let in_memory = elements(&users.disks).iter().filter(is_in_memory).map(|disk| text(disk, "name"));
    let in_memory = in_memory.collect::<Vec<_>>().join(", ");
    let arguments = process.and_then(|process| std::fs::read(process.join("cmdline")).ok());
    let forgets = arguments.is_some_and(|arguments| !keeps_state(&arguments));
    let has_any = !elements(&users.disks).is_empty() || !elements(&users.controllers).is_empty();
    let mut lines = Vec::new();
    if !in_memory.is_empty() {
        lines.push(format!("disks in memory lose their data: {in_memory}"));
    }
    if forgets && has_any {
        lines.push("the daemon has no --state-dir: its disks and controllers are not stored".into());
    }
    lines
}

/// Whether a daemon with these arguments, each terminated by zero, stores its configuration.
fn keeps_state(arguments: &[u8]) -> bool {
    let is_state = |argument: &[u8]| argument == b"--state-dir" || argument.starts_with(b"--state-dir=");
    arguments.split(|byte| *byte == 0).any(is_state)
}

/// Waits while the daemon completes the requests in flight.
fn wait_for_end(pid: u64, cli: &Cli) -> Result<(), Error> {
    let process = PathBuf::from(format!("/proc/{pid}"));
    let mut left = cli.timeout;
    let answers = || !matches!(Client::connect(&cli.socket, cli.timeout), Err(Error::NoDaemon(_)));
    while is_running(&process) || answers() {
        if left.is_zero() {
            return Err(Error::File(format!(
                "the daemon, process {pid}, is ending, but still completes requests in flight; --timeout sets how long to wait"
            )));
        }
        watch::wait(CHECK_PERIOD);
        left = left.saturating_sub(CHECK_PERIOD);
    }
    Ok(())
}

/// Whether a process runs, and is not a zombie.
fn is_running(process: &Path) -> bool {
    let stat = std::fs::read_to_string(process.join("stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

/// The age of a process of this host.
pub fn uptime(pid: u64) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let host = std::fs::read_to_string("/proc/uptime").ok()?;
    let now: f64 = host.split_whitespace().next()?.parse().ok()?;
    let started = started(&stat)? as f64 / rustix::param::clock_ticks_per_second() as f64;
    Some(Duration::from_secs_f64((now - started).max(0.0)))
}

/// `starttime` of `proc_pid_stat(5)`, in clock ticks: field 22. Field 2, the name, may contain any characters.
fn started(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_in_a_session_is_not_a_service() {
        assert_eq!(unit_of("0::/system.slice/arykd.service\n").as_deref(), Some("arykd.service"));
        assert_eq!(unit_of("0::/user.slice/user-0.slice/session-1.scope\n"), None);
        assert_eq!(unit_of("0::/system.slice/ssh.service\n"), None);
        assert_eq!(unit_of(""), None);
    }

    #[test]
    fn logs_come_from_the_journal_or_the_file() {
        let args = LogsArgs { follow: true, lines: 7 };
        let words = |source: Source| format!("{:?}", source.command(&args)).replace('"', "");
        assert_eq!(words(Source::File("/a".into())), "tail -f -n 7 -- /a");
        assert_eq!(
            words(Source::Journal("arykd.service".into())),
            "journalctl -f --no-pager --unit arykd.service --lines 7"
        );
    }

    #[test]
    fn a_state_directory_is_found_in_the_arguments() {
        assert!(keeps_state(b"arykd\0--state-dir\0/s\0") && keeps_state(b"arykd\0--state-dir=/s\0"));
        assert!(!keeps_state(b"arykd\0-r\0/state-dir\0") && !keeps_state(b""));
    }

    #[test]
    fn a_process_has_an_uptime() {
        assert_eq!(started(&format!("7 (a) b) S {}42 1", "0 ".repeat(18))), Some(42));
        let own = uptime(std::process::id().into()).unwrap();
        assert!(own < Duration::from_secs(86_400), "{own:?}");
        assert_eq!(uptime(0), None);
    }
}
