//! The clients of other languages: their own checks, and their own tests against the built `arykd`.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::Tally;
use crate::workspace;

pub(crate) fn run() -> Result<Tally> {
    let arykd = workspace::build_programs()?.join("arykd");
    let mut tally = Tally::default();
    tally.count("Python client: types", workspace::run(Command::new("mypy").current_dir(python())));
    tally.count("Python client: calls", workspace::run(&mut python_tests(&arykd)));
    Ok(tally)
}

fn python() -> std::path::PathBuf {
    workspace::root().join("clients/python")
}

/// Whatever Python warns of, such as a connection that was not closed, is an error.
fn python_tests(arykd: &Path) -> Command {
    let mut python3 = Command::new("python3");
    python3.args(["-W", "error", "-m", "unittest", "discover", "-s", "tests"]).current_dir(python());
    python3.env("ARYKD", arykd).env("PYTHONPATH", "src").env("PYTHONDONTWRITEBYTECODE", "1");
    python3
}
