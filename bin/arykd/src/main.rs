//! `arykd`: the daemon, with the modules that are part of it.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    aryk_daemon::run(|_| {})
}
