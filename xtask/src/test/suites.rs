//! The suites that cargo runs itself; their results are added up from their output.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::{Tally, binaries};
use crate::workspace;

/// Number of random calls in the long form, instead of ten thousand.
const RPC_CALLS: &str = "100000";
/// Lines of a failed suite's output that are kept for the end of the run.
const LINES_OF_A_FAILURE: usize = 60;

/// All tests of the workspace, some of them in the long form if `long`. Tests that boot a guest belong to the guests'
/// stage.
pub(crate) fn workspace(long: bool) -> Result<Tally> {
    let settings: &[_] = if long { &[("ARYK_RPC_CALLS", RPC_CALLS)] } else { &[] };
    let mut tally = binaries::run_without_guests(settings)?;
    tally.add(documentation()?);
    Ok(tally)
}

/// The documentation tests of the crates that have some: for the others, rustdoc would parse everything without a result.
fn documentation() -> Result<Tally> {
    let mut cargo = workspace::cargo();
    cargo.args(["test", "--doc", "--no-fail-fast"]);
    let metadata = workspace::metadata("Cargo.toml", &["--no-deps"])?;
    for package in metadata["packages"].as_array().context("a workspace without packages")? {
        let manifest = Path::new(package["manifest_path"].as_str().context("a package without a manifest")?);
        let sources = manifest.with_file_name("src");
        if sources.join("lib.rs").exists() && has_documentation_test(&sources)? {
            cargo.args(["-p", package["name"].as_str().context("a package without a name")?]);
        }
    }
    summed("documentation", &mut cargo)
}

/// Whether a Rust file in `directory` has a documentation code block that is not marked as text.
fn has_documentation_test(directory: &Path) -> Result<bool> {
    for entry in std::fs::read_dir(directory).with_context(|| format!("reading {}", directory.display()))? {
        let path = entry?.path();
        let found = match path.extension() {
            None => path.is_dir() && has_documentation_test(&path)?,
            Some(extension) if extension == "rs" => {
                let source = std::fs::read_to_string(&path)?;
                let fences = source.lines().filter_map(|line| {
                    let line = line.trim_start();
                    line.strip_prefix("/// ```").or_else(|| line.strip_prefix("//! ```"))
                });
                // Of each pair of fences, the first has the language of the block.
                fences.step_by(2).any(|info| !info.starts_with("text") && !info.starts_with("ignore"))
            }
            Some(_) => false,
        };
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// `tests/loom.rs` of each crate that has one, built for loom in a separate target directory.
pub(crate) fn loom() -> Result<Tally> {
    let mut cargo = workspace::cargo();
    cargo.args(["test", "--profile", "loom", "--no-fail-fast", "--test", "loom"]);
    let metadata = workspace::metadata("Cargo.toml", &["--no-deps"])?;
    for package in metadata["packages"].as_array().context("a workspace without packages")? {
        let targets = package["targets"].as_array().context("a package without targets")?;
        if targets.iter().any(|target| target["name"] == "loom" && target["kind"][0] == "test") {
            cargo.args(["-p", package["name"].as_str().context("a package without a name")?]);
        }
    }
    cargo.arg("--target-dir").arg(workspace::target()?.join("loom")).env("RUSTFLAGS", "--cfg loom");
    summed("loom", &mut cargo)
}

/// Checks that a request takes at most the recorded number of instructions. One test.
pub(crate) fn instructions() -> Result<Tally> {
    let bench = workspace::build_programs()?.join("aryk-bench");
    let mut count = Command::new(bench);
    count.args(["instructions", "--check"]).current_dir(workspace::root());
    let mut tally = Tally::default();
    tally.count("instructions of a request", workspace::run(&mut count));
    Ok(tally)
}

/// Runs `cargo test`, passes its output on, and adds up its results.
fn summed(name: &str, cargo: &mut Command) -> Result<Tally> {
    let mut child = cargo.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("running cargo")?;
    let output = child.stdout.take().context("stdout was piped")?;
    let mut said = String::new();
    for line in BufReader::new(output).lines() {
        let line = line?;
        println!("{line}");
        said += &line;
        said.push('\n');
    }
    Ok(tally(name, &said, child.wait()?.success()))
}

/// Adds up the results in the output `said` of the tests `name`. A failure without a result (compile error, killed)
/// counts as one failure.
pub(super) fn tally(name: &str, said: &str, succeeded: bool) -> Tally {
    let mut tally = Tally::default();
    for result in said.lines().filter_map(result_line) {
        tally.add(result);
    }
    if !succeeded {
        tally.failed = tally.failed.max(1);
        tally.failures.push(format!("{name}\n{}", what_failed(said)));
    }
    tally
}

/// The text that libtest prints about failed tests, between its two lines `failures:`; otherwise the last lines of the
/// output.
fn what_failed(said: &str) -> String {
    let lines: Vec<_> = said.lines().collect();
    let told: Vec<_> =
        lines.split(|line| *line == "failures:").skip(1).step_by(2).flatten().copied().collect();
    let told = if told.is_empty() { lines } else { told };
    told[told.len().saturating_sub(LINES_OF_A_FAILURE)..].join("\n")
}

/// The whole content of a file, independent of its current position.
pub(super) fn read_all(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// `test result: ok. 8 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; …`
fn result_line(line: &str) -> Option<Tally> {
    let counts = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let count = |what: &str| {
        let part = counts.split(';').find_map(|part| part.trim().strip_suffix(what))?;
        part.trim().parse().ok()
    };
    let (passed, failed, skipped) = (count("passed")?, count("failed")?, count("ignored")?);
    Some(Tally { passed, failed, skipped, ..Tally::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read_off_cargos_lines() {
        let line = "test result: FAILED. 8 passed; 2 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.1s";
        let Tally { passed, failed, skipped, .. } = result_line(line).unwrap();
        assert_eq!((passed, failed, skipped), (8, 2, 1));
        assert_eq!(result_line("test a::b ... ok"), None);
    }

    #[test]
    fn a_failure_keeps_what_was_said_of_it() {
        let said = "test a ... FAILED\n\nfailures:\n\n---- a stdout ----\nit hurts\n\nfailures:\n    a\n\n\
            test result: FAILED. 3 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.1s\n";
        let failed = tally("suite", said, false);
        assert_eq!((failed.passed, failed.failed), (3, 1));
        assert!(failed.failures[0].starts_with("suite\n"), "{failed:?}");
        assert!(
            failed.failures[0].contains("it hurts") && !failed.failures[0].contains("    a"),
            "{failed:?}"
        );
        let killed = tally("suite", "running 3 tests\n", false);
        assert_eq!((killed.failed, killed.failures.len()), (1, 1));
        assert_eq!(tally("suite", "test result: ok. 3 passed; 0 failed; 0 ignored;", true).failures.len(), 0);
    }
}
