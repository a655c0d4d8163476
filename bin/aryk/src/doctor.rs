//! `aryk doctor`: checks of this host's setup.
//!
//! Each check examines one subject with the rights of the calling user. It reports the finding, the benefit of a correction, and
//! the command for it. The command fails only if the daemon cannot run, or cannot serve a configured object.

mod configured;
mod host;
mod kernel;
mod nvme;
mod vms;

use crate::cli::Cli;
use crate::error::Error;
use crate::output::{Output, Tone};
use clap::Subcommand;
use serde::Serialize;
use serde_json::json;

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// In order.
    Ok,
    /// Absent, and needed only for some uses.
    Option,
    /// Works, but with a disadvantage.
    Worse,
    /// The daemon needs it to run, or it is a configured object that the daemon cannot serve.
    Missing,
}

/// A check with its result.
#[derive(Debug, Serialize)]
pub struct Check {
    /// The subject.
    pub check: &'static str,
    pub state: State,
    /// The finding.
    pub found: String,
    /// The benefit of a correction; `None` if all is in order.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub brings: Option<&'static str>,
    /// The command that corrects it, or advice if there is no such command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Check {
    /// A check in order.
    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, state: State::Ok, found: found.into(), brings: None, fix: None }
    }

    /// A check that is not in order.
    fn lacks(
        check: &'static str,
        state: State,
        found: impl Into<String>,
        brings: &'static str,
        fix: impl Into<String>,
    ) -> Self {
        Self { check, state, found: found.into(), brings: Some(brings), fix: Some(fix.into()) }
    }
}

impl State {
    const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Option => "option",
            Self::Worse => "worse",
            Self::Missing => "MISSING",
        }
    }

    const fn tone(self) -> Tone {
        match self {
            Self::Ok => Tone::Good,
            Self::Option => Tone::Plain,
            Self::Worse => Tone::Warning,
            Self::Missing => Tone::Bad,
        }
    }
}

/// What the command checks instead of the host in general.
#[derive(Debug, Clone, Copy, Subcommand)]
pub enum Subject {
    /// Check what Aryk needs to drive NVMe drives itself, and each drive
    Nvme,
}

/// Runs all checks, prints them, and fails if something necessary is missing.
pub fn run(cli: &Cli, subject: Option<Subject>, out: &Output) -> Result<(), Error> {
    let checks = match subject {
        None => host_checks(cli),
        Some(Subject::Nvme) => nvme::checks()?,
    };
    let missing = checks.iter().filter(|check| check.state == State::Missing).count();
    let report = json!({"healthy": missing == 0, "checks": checks});
    out.print(&report, || text(&checks, out))?;
    match missing {
        0 => Ok(()),
        n => Err(Error::Unhealthy(n)),
    }
}

fn host_checks(cli: &Cli) -> Vec<Check> {
    let mut checks = vec![host::daemon(&cli.socket, cli.timeout)];
    checks.extend(configured::configured(&cli.socket, cli.timeout));
    checks.extend([host::rpc_directory(&cli.socket), host::sockets_directory()]);
    checks.extend([host::open_files(), host::cores()]);
    checks.extend([kernel::io_uring(), kernel::aio(), kernel::memlock(), kernel::hugepages()]);
    checks.extend([vms::kvm(), vms::qemu(), vms::qemu_img(), vms::vfio()]);
    checks
}

fn text(checks: &[Check], out: &Output) -> String {
    let mut rows = Vec::new();
    for check in checks {
        let first = [check.state.name(), check.check, &check.found].map(str::to_owned);
        rows.push((check.state.tone(), first.to_vec()));
        let more = [("for", check.brings), ("do", check.fix.as_deref())];
        for (label, what) in more {
            let Some(what) = what else { continue };
            rows.push((Tone::Plain, vec![String::new(), String::new(), format!("{label}: {what}")]));
        }
    }
    let columns = [("STATE", false), ("CHECK", false), ("FOUND", false)];
    let table = out.toned_table(&columns, rows);
    match checks.iter().any(|check| check.state == State::Missing) {
        true => table,
        false => format!("{table}\n\nNothing necessary is missing."),
    }
}

#[cfg(test)]
mod tests;
