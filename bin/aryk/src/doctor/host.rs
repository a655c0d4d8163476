//! The daemon, its directories, and the limits of this user.

use super::{Check, State};
use crate::client::Client;
use crate::error::Error;
use rustix::fs::{Access, access};
use rustix::process::{Resource, getrlimit, getuid};
use rustix::thread::{CpuSet, sched_getaffinity};
use serde_json::json;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Descriptors of a VM with four queues: its sockets, its memory regions, two eventfds per queue, and its disk.
const FILES_PER_VM: u64 = 24;

/// With fewer descriptors not even a few VMs can be served.
const FEWEST_FILES: u64 = 256;

/// Whether a daemon runs at `socket`.
pub fn daemon(socket: &Path, timeout: Duration) -> Check {
    let brings = "serving disks";
    let version = Client::connect(socket, timeout).and_then(|mut c| c.call("spdk_get_version", json!({})));
    match version {
        Ok(version) => {
            let version = version["version"].as_str().unwrap_or("a daemon without a version").to_owned();
            Check::ok("daemon", format!("{version} answers at {}", socket.display()))
        }
        Err(Error::NoDaemon(_)) => {
            Check::lacks("daemon", State::Option, format!("none at {}", socket.display()), brings, "arykd &")
        }
        Err(Error::Socket { source, .. }) if source.kind() == io::ErrorKind::PermissionDenied => {
            let found = format!("a daemon of another user, at {}", socket.display());
            Check::lacks(
                "daemon",
                State::Missing,
                found,
                "access to it",
                "run aryk as that user, or with sudo",
            )
        }
        Err(error) => Check::lacks("daemon", State::Worse, error.to_string(), brings, "aryk status"),
    }
}

/// The directory of the RPC socket.
pub fn rpc_directory(socket: &Path) -> Check {
    let dir = socket.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    directory("RPC socket", dir, "arykd -r $XDG_RUNTIME_DIR/aryk.sock")
}

/// The directory of the controllers' sockets: the daemon's default.
pub fn sockets_directory() -> Check {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    let (dir, parent) = match runtime {
        _ if getuid().is_root() => (PathBuf::from("/run/aryk"), PathBuf::from("/run")),
        Some(runtime) => (PathBuf::from(&runtime).join("aryk"), PathBuf::from(runtime)),
        None => (std::env::temp_dir().join(format!("aryk-{}", getuid().as_raw())), std::env::temp_dir()),
    };
    // The daemon creates the directory in its parent.
    let existing = if dir.exists() { &dir } else { &parent };
    directory("sockets", existing, "arykd -S DIR, a directory of yours")
}

fn directory(check: &'static str, dir: &Path, instead: &str) -> Check {
    let brings = "the daemon's sockets";
    match access(dir, Access::EXISTS) {
        Err(_) => {
            let fix = format!("mkdir -p {}", dir.display());
            Check::lacks(check, State::Missing, format!("there is no {}", dir.display()), brings, fix)
        }
        Ok(()) => match access(dir, Access::WRITE_OK | Access::EXEC_OK) {
            Ok(()) => Check::ok(check, format!("can be created in {}", dir.display())),
            Err(error) => {
                let found =
                    format!("cannot be created in {}: {}", dir.display(), io::Error::from(error).kind());
                Check::lacks(check, State::Missing, found, brings, instead)
            }
        },
    }
}

/// The limit of open files; the daemon raises its soft limit to the hard limit.
pub fn open_files() -> Check {
    open_files_of(getrlimit(Resource::Nofile).maximum)
}

pub(super) fn open_files_of(hard: Option<u64>) -> Check {
    let Some(hard) = hard else { return Check::ok("open files", "no limit") };
    let vms = hard / FILES_PER_VM;
    let found = format!("{hard}, enough for about {vms} VMs");
    let (brings, fix) = ("more VMs", "ulimit -n 1048576, or LimitNOFILE=1048576 in its unit");
    match hard {
        ..FEWEST_FILES => Check::lacks("open files", State::Missing, found, brings, fix),
        FEWEST_FILES..4096 => Check::lacks("open files", State::Worse, found, brings, fix),
        _ => Check::ok("open files", found),
    }
}

/// The cores on which a daemon started here may run: the affinity mask, which a cpuset restricts too.
pub fn cores() -> Check {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let quota = own_cgroup().and_then(|dir| std::fs::read_to_string(dir.join("cpu.max")).ok());
    let Ok(allowed) = sched_getaffinity(None) else { return Check::ok("cores", "unknown") };
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    cores_of(&allowed, online.trim(), quota.as_deref())
}

/// The directory of our cgroup in the unified hierarchy.
fn own_cgroup() -> Option<PathBuf> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new("/sys/fs/cgroup").join(path))
}

pub(super) fn cores_of(allowed: &[usize], online: &str, quota: Option<&str>) -> Check {
    let found = format!("may use {} of those online, {online}", ranges(allowed));
    if let Some(share) = quota.and_then(share).filter(|&share| share < 1.0) {
        let found = format!("{found}, but only {:.0}% of the time of one core", share * 100.0);
        let fix = "raise cpu.max of its cgroup: CPUQuota=100% or more in its unit";
        return Check::lacks("cores", State::Worse, found, "one core that is not throttled", fix);
    }
    if allowed.len() < 2 {
        let fix = "widen its cpuset: AllowedCPUs= in its unit, or taskset -c";
        return Check::lacks("cores", State::Option, found, "more reactors: arykd -m", fix);
    }
    Check::ok("cores", found)
}

/// The number of processors that `cpu.max` grants.
fn share(cpu_max: &str) -> Option<f64> {
    let (quota, period) = cpu_max.trim().split_once(' ')?;
    Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
}

/// Formats a list such as `0-3,6`.
fn ranges(cores: &[usize]) -> String {
    let runs = cores.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    runs.collect::<Vec<_>>().join(",")
}
