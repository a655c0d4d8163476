//! House rules about single files.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::workspace;

/// Upper bound of a file's lines.
const LINES_MAX: usize = 1000;

/// Upper bound of the columns of a comment line. rustfmt breaks code at its own width, but never comments.
const COMMENT_WIDTH: usize = 130;

/// Packages that may hold `unsafe`: ciphers, memory, devices, the callbacks of TLS, RDMA's and Ceph's libraries and the tests'
/// substitute for the latter, and the measuring front-end, whose library requires it.
const UNSAFE_ALLOWED: &[&str] = &[
    "aryk-aes-xts",
    "aryk-bench",
    "aryk-dma",
    "aryk-librbd",
    "aryk-librbd-stub",
    "aryk-pci",
    "aryk-rdma",
    "aryk-secrets",
    "aryk-tls",
    "aryk-uring",
];

/// Checks that every root of every other package forbids `unsafe`.
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

/// Checks every Rust file: it opens with its documentation, and neither the file nor a comment line is too long.
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
        // git also lists a removed file that is still in the index.
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
    if !source.starts_with("//! ") {
        return Some(format!("{name}: does not open with //!"));
    }
    wide_comment(name, source)
}

/// Reports the first comment line that exceeds [`COMMENT_WIDTH`]. A line without a break (a table's row, a lone URL) may.
fn wide_comment(name: &str, source: &str) -> Option<String> {
    let is_wide = |line: &str| {
        let comment = line.trim_start();
        let text = comment.trim_start_matches(['/', '!']).trim_start();
        let can_break = text.contains(' ') && !text.starts_with('|');
        comment.starts_with("//") && can_break && line.chars().count() > COMMENT_WIDTH
    };
    let count = source.lines().filter(|line| is_wide(line)).count();
    let at = source.lines().position(is_wide)? + 1;
    Some(format!("{name}:{at}: a comment line of more than {COMMENT_WIDTH} columns ({count} in this file)"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_files_and_those_without_documentation_are_found() {
        assert_eq!(finding("a.rs", "//! A.\n"), None);
        assert!(finding("a.rs", "use std;\n").is_some());
        assert!(finding("a.rs", &"//! A.\n".repeat(LINES_MAX + 1)).is_some());
    }

    #[test]
    fn wide_comment_lines_are_found() {
        let after = |line: &str| finding("a.rs", &format!("//! A.\n{line}\n"));
        for start in ["//! ", "/// ", "// ", "    /// ", "        // "] {
            let fits = format!("{start}ä {}", "x".repeat(COMMENT_WIDTH - start.len() - 2));
            assert_eq!(after(&fits), None, "{fits}");
            let found = after(&format!("{fits}x")).unwrap();
            assert!(found.starts_with("a.rs:2: a comment line of more than 130 columns"), "{found}");
        }
        let wide = "x ".repeat(COMMENT_WIDTH);
        assert_eq!(after(&format!("let x = \"{wide}\";")), None, "code is rustfmt's");
        assert_eq!(after(&format!("//! | {wide} |")), None, "a table's row cannot be broken");
    }
}
