//! The clients in other languages: their own checks, and their own tests against the built `arykd`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::Tally;
use crate::workspace;

pub(crate) fn run() -> Result<Tally> {
    let arykd = workspace::build_programs()?.join("arykd");
    let mut tally = Tally::default();
    tally.count("Python client: types", workspace::run(Command::new("mypy").current_dir(python())));
    tally.count("Python client: calls", workspace::run(&mut python_tests(&arykd)));
    tally.count("Go client: format", go_format());
    tally.count("Go client: vet", workspace::run(go().args(["vet", "./..."])));
    tally.count("Go client: calls", workspace::run(go_tests().env("ARYKD", &arykd)));
    Ok(tally)
}

fn python() -> PathBuf {
    workspace::root().join("clients/python")
}

/// Python's warnings, such as one about an unclosed connection, count as errors.
fn python_tests(arykd: &Path) -> Command {
    let mut python3 = Command::new("python3");
    python3.args(["-W", "error", "-m", "unittest", "discover", "-s", "tests"]).current_dir(python());
    python3.env("ARYKD", arykd).env("PYTHONPATH", "src").env("PYTHONDONTWRITEBYTECODE", "1");
    python3
}

fn go() -> Command {
    let mut go = Command::new("go");
    go.current_dir(workspace::root().join("clients/go"));
    // The build needs no version-control state, which may be unknown.
    go.env("GOFLAGS", "-buildvcs=false");
    go
}

/// With the race detector: many goroutines share one client.
fn go_tests() -> Command {
    let mut tests = go();
    tests.args(["test", "-race", "-count=1", "-timeout=120s", "./..."]);
    tests
}

fn go_format() -> Result<()> {
    let mut gofmt = Command::new("gofmt");
    let output = gofmt.args(["-l", "."]).current_dir(workspace::root().join("clients/go")).output();
    let output = output.context("running gofmt")?;
    if !output.status.success() || !output.stdout.is_empty() {
        bail!("not formatted by gofmt: {}", String::from_utf8_lossy(&output.stdout));
    }
    Ok(())
}
