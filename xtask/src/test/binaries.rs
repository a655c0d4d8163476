//! The workspace's test programs: built by cargo in one call, then run by this module, two at a time.
//!
//! `cargo test` runs them one after the other. Most of them wait more than they compute (for timeouts, for a killed
//! daemon), so two at a time use both cores.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Tally, lanes, suites};
use crate::progress::Clock;
use crate::workspace;

/// Test programs at a time.
const LANES: usize = 2;
/// The package directory and the target of the test that measures an attacked daemon: it has a stage of its own.
const ADVERSARY: [(&str, &str); 1] = [("bin/arykd", "adversary")];
/// The test that needs a Ceph cluster: it belongs to the stage that starts one.
const CEPH: [(&str, &str); 1] = [("crates/modules/rbd", "cluster")];
/// The longest programs are started first, so that no lane waits for one at the end.
const FIRST: [(&str, &str); 1] = [("bin/arykd", "daemon")];

/// The programs that tests start. Cargo builds a program with the tests of its package, if these include an integration test.
const PROGRAMS: [&str; 3] = ["aryk", "arykd", "aryk-crash-tests"];

/// Variables and their values.
type Environment = Vec<(&'static str, OsString)>;

/// A test program.
#[derive(Debug)]
struct Binary {
    /// The package's directory: tests run there, as under cargo.
    directory: PathBuf,
    target: String,
    program: PathBuf,
}

impl Binary {
    fn is_in(&self, list: &[(&str, &str)]) -> bool {
        list.iter().any(|(directory, target)| self.directory.ends_with(directory) && self.target == *target)
    }

    /// Runs the program to its end and prints its output in one piece.
    fn run(&self, environment: &[(&str, OsString)], arguments: &[&str]) -> Result<Tally> {
        let clock = Clock::start();
        let directory = self.directory.strip_prefix(workspace::root()).unwrap_or(&self.directory);
        let name = format!("{} {}", directory.display(), self.target);
        let mut said = tempfile::tempfile()?;
        let mut command = Command::new(&self.program);
        command.args(arguments).current_dir(&self.directory).env("CARGO_MANIFEST_DIR", &self.directory);
        command.envs(environment.iter().cloned()).stdin(Stdio::null());
        command.stdout(said.try_clone()?).stderr(said.try_clone()?);
        let status = command.status().with_context(|| format!("running {}", self.program.display()))?;
        let said = suites::read_all(&mut said)?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "\n     Running {name}: {} s\n{said}", clock.seconds())?;
        Ok(suites::tally(&name, &said, status.success()))
    }
}

/// The result of the build.
#[derive(Debug, Default)]
pub(crate) struct Built {
    tests: Vec<Binary>,
    /// Name and path of each of [`PROGRAMS`].
    programs: Vec<(String, PathBuf)>,
}

impl Built {
    /// The path of a program in [`PROGRAMS`].
    pub(crate) fn program(&self, name: &str) -> Result<&Path> {
        let program = self.programs.iter().find(|(program, _)| program == name);
        Ok(&program.with_context(|| format!("cargo built no {name}"))?.1)
    }

    /// The environment of the tests: `ARYK` and `ARYKD` are the programs that tests of other packages start.
    fn environment(&self) -> Result<Environment> {
        let programs = [("ARYK", "aryk"), ("ARYKD", "arykd")];
        programs.into_iter().map(|(variable, name)| Ok((variable, self.program(name)?.into()))).collect()
    }
}

/// The directory of the package whose tests boot guests.
const GUESTS: &str = "tests/guest";

/// Builds all tests and runs those that boot no guest, with `settings` in their environment.
pub(super) fn run_without_guests(settings: &[(&'static str, &str)]) -> Result<Tally> {
    let built = build()?;
    let mut environment = built.environment()?;
    environment.extend(settings.iter().map(|&(name, value)| (name, value.into())));
    let mut tests = built.tests;
    tests.retain(|test| !test.directory.ends_with(GUESTS) && !test.is_in(&ADVERSARY) && !test.is_in(&CEPH));
    tests.sort_by_key(|test| !test.is_in(&FIRST));
    lanes::run(tests, LANES, |test: Binary| test.run(&environment, &[]))
}

/// Runs the scenes whose name contains `scene` of the hostile front-ends, against the `arykd` of the release build: the test has
/// bounds in milliseconds, and the checks of a debug build take longer. `settings` are variables of the test.
pub(crate) fn run_adversary(scene: &str, settings: &[(&'static str, String)]) -> Result<Tally> {
    let arykd = workspace::build_programs()?.join("arykd");
    let mut environment = vec![("ARYKD", arykd.into())];
    environment.extend(settings.iter().map(|(name, value)| (*name, value.into())));
    let mut tests = build()?.tests;
    tests.retain(|test| test.is_in(&ADVERSARY));
    ensure!(!tests.is_empty(), "cargo built no test of hostile front-ends");
    let arguments: &[&str] = if scene.is_empty() { &[] } else { &[scene] };
    lanes::run(tests, 1, |test: Binary| test.run(&environment, arguments))
}

/// Runs the tests that need a Ceph cluster, on the cluster with the configuration file `conf`.
pub(super) fn run_on_ceph(conf: &Path) -> Result<Tally> {
    let mut tests = build()?.tests;
    tests.retain(|test| test.is_in(&CEPH));
    ensure!(!tests.is_empty(), "cargo built no test of Ceph");
    let environment = [("CEPH_CONF", conf.into())];
    lanes::run(tests, 1, |test: Binary| test.run(&environment, &["--include-ignored"]))
}

/// Builds all tests, with the programs that they start and the examples; returns the directory of the programs.
pub(crate) fn build_for_guests() -> Result<PathBuf> {
    build()?;
    Ok(workspace::target()?.join("debug"))
}

/// Runs the harness's own tests, including those that boot guests. One at a time: each guest needs both cores.
pub(super) fn run_guests_harness() -> Result<Tally> {
    let built = build()?;
    let environment = built.environment()?;
    let mut tests = built.tests;
    tests.retain(|test| test.directory.ends_with(GUESTS));
    lanes::run(tests, 1, |test: Binary| test.run(&environment, &["--include-ignored", "--test-threads=1"]))
}

/// Builds all tests with cargo, and the programs that they start: always the same choice of packages, because another one
/// gives the libraries other features.
pub(crate) fn build() -> Result<Built> {
    let mut cargo = workspace::cargo();
    cargo.args(["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
    let mut child = cargo.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("running cargo")?;
    let output = child.stdout.take().context("stdout was piped")?;
    let mut built = Built::default();
    for line in BufReader::new(output).lines() {
        let message = serde_json::from_str(&line?)?;
        built.tests.extend(test_program(&message));
        built.programs.extend(our_program(&message));
    }
    ensure!(child.wait()?.success(), "the tests do not compile");
    ensure!(!built.tests.is_empty(), "cargo built no tests");
    Ok(built)
}

/// The name and the path of one of [`PROGRAMS`], if cargo's message reports it as built.
fn our_program(message: &Value) -> Option<(String, PathBuf)> {
    let name = message["target"]["name"].as_str()?;
    let is_program = message["profile"]["test"] == Value::Bool(false) && PROGRAMS.contains(&name);
    is_program.then(|| Some((name.to_owned(), message["executable"].as_str()?.into())))?
}

/// The test program that one of cargo's messages reports as built.
fn test_program(message: &Value) -> Option<Binary> {
    if message["profile"]["test"] != Value::Bool(true) {
        return None;
    }
    let directory = PathBuf::from(message["manifest_path"].as_str()?).parent()?.to_path_buf();
    let target = message["target"]["name"].as_str()?.to_owned();
    Some(Binary { directory, target, program: message["executable"].as_str()?.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_found_among_cargos_messages() {
        let message = serde_json::json!({
            "reason": "compiler-artifact", "manifest_path": "/w/crates/bdev/Cargo.toml", "target": { "name": "split" },
            "profile": { "test": true }, "executable": "/w/target/debug/deps/split-1",
        });
        let binary = test_program(&message).unwrap();
        assert!(binary.is_in(&[("crates/bdev", "split")]) && !binary.is_in(&[("crates/bdev", "bdev")]));
        assert!(our_program(&message).is_none());
        let program = serde_json::json!({
            "manifest_path": "/w/bin/arykd/Cargo.toml", "target": { "name": "arykd" },
            "profile": { "test": false }, "executable": "/w/target/debug/arykd",
        });
        assert!(test_program(&program).is_none());
        assert_eq!(our_program(&program), Some(("arykd".into(), "/w/target/debug/arykd".into())));
        let ended = serde_json::json!({ "reason": "build-finished", "success": true });
        assert!(test_program(&ended).is_none() && our_program(&ended).is_none());
    }
}
