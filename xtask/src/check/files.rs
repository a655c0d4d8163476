//! House rules that a file either keeps or breaks.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::workspace;

/// Beyond this a file is split, whatever it holds.
const LINES_MAX: usize = 1000;

/// Packages that may hold `unsafe`: memory and devices, and the measuring front-end, whose library asks for it.
const UNSAFE_ALLOWED: &[&str] = &["aryk-dma", "aryk-uring", "aryk-bench"];

/// Every root of every package forbids `unsafe`, but for the few.
pub(super) fn check_unsafe(packages: &[Value]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for package in packages {
        let name = package["name"].as_str().context("a package without a name")?;
        if UNSAFE_ALLOWED.contains(&name) {
            continue;
        }
        for target in package["targets"].as_array().context("a package without targets")? {
            let kind = target["kind"][0].as_str().unwrap_or_default();
            let root = target["src_path"].as_str().context("a target without a source")?;
            if matches!(kind, "lib" | "bin") {
                let source = std::fs::read_to_string(root).with_context(|| root.to_owned())?;
                if !source.lines().any(|line| line == "#![forbid(unsafe_code)]") {
                    findings.push(format!("{root}: lacks #![forbid(unsafe_code)]"));
                }
            }
        }
    }
    Ok(findings)
}

/// Every Rust file says first what it is, and stays short enough to be read.
pub(super) fn check_files() -> Result<Vec<String>> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "--", "*.rs"])
        .current_dir(workspace::root())
        .output()
        .context("running git")?;
    ensure!(output.status.success(), "git ls-files: {}", String::from_utf8_lossy(&output.stderr));
    let listing = String::from_utf8(output.stdout)?;
    let mut findings = Vec::new();
    for name in listing.lines() {
        // A file that was removed but not yet from the index is listed too.
        let Ok(source) = std::fs::read_to_string(workspace::root().join(name)) else { continue };
        findings.extend(finding(name, &source));
    }
    Ok(findings)
}

fn finding(name: &str, source: &str) -> Option<String> {
    let lines = source.lines().count();
    if lines > LINES_MAX {
        return Some(format!("{name}: {lines} lines, more than {LINES_MAX}"));
    }
    (!source.starts_with("//! ")).then(|| format!("{name}: does not open with //!"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_and_silent_ones_are_found() {
        assert_eq!(finding("a.rs", "//! A.\n"), None);
        assert!(finding("a.rs", "use std;\n").is_some());
        assert!(finding("a.rs", &"//! A.\n".repeat(LINES_MAX + 1)).is_some());
    }
}
