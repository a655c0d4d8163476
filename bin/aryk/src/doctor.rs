//! `aryk doctor`: what this host has, lacks, and would gain.
//!
//! Each check looks at one thing as the user who runs it, and says what it found, what the thing brings and the command
//! that brings it about. Only what the daemon cannot do without fails the command, and what it was given and cannot serve.

mod configured;
mod host;
mod kernel;
mod machines;

use crate::cli::Cli;
use crate::error::Error;
use crate::output::{Output, Tone};
use serde::Serialize;
use serde_json::json;

/// How a thing stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it should be.
    Ok,
    /// Not there, and only some want it.
    Option,
    /// Works, but worse than it could.
    Worse,
    /// The daemon cannot do without, or it was given it and cannot serve it.
    Missing,
}

/// One thing that was looked at.
#[derive(Debug, Serialize)]
pub struct Check {
    /// The thing.
    pub check: &'static str,
    pub state: State,
    /// What is there.
    pub found: String,
    /// What it is good for, unless all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub brings: Option<&'static str>,
    /// The command that mends it, or advice where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

impl Check {
    /// A thing that is as it should be.
    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, state: State::Ok, found: found.into(), brings: None, fix: None }
    }

    /// A thing that is not.
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

/// Looks at everything, prints it, and fails if something necessary is missing.
pub fn run(cli: &Cli, out: &Output) -> Result<(), Error> {
    let mut checks = vec![host::daemon(&cli.socket, cli.timeout)];
    checks.extend(configured::configured(&cli.socket, cli.timeout));
    checks.extend([host::rpc_directory(&cli.socket), host::machines_directory()]);
    checks.extend([host::open_files(), host::cores()]);
    checks.extend([kernel::io_uring(), kernel::aio(), kernel::memlock(), kernel::hugepages()]);
    checks.extend([machines::kvm(), machines::qemu(), machines::qemu_img(), machines::vfio()]);
    let missing = checks.iter().filter(|check| check.state == State::Missing).count();
    let report = json!({"healthy": missing == 0, "checks": checks});
    out.print(&report, || text(&checks, out))?;
    match missing {
        0 => Ok(()),
        n => Err(Error::Unhealthy(n)),
    }
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
