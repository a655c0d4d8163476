//! Licences of all crates that are linked or built: each dependency must offer one that the project may use.

use std::collections::BTreeSet;

use anyhow::{Context, Result};

use super::MANIFESTS;
use crate::workspace;

/// Licences compatible with Apache-2.0 that require no more than a notice.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "NCSA",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

pub(super) fn check() -> Result<Vec<String>> {
    let mut findings = BTreeSet::new();
    for manifest in MANIFESTS {
        let options = ["--locked", "--filter-platform", "x86_64-unknown-linux-gnu"];
        let metadata = workspace::metadata(manifest, &options)?;
        for package in metadata["packages"].as_array().context("metadata without packages")? {
            let licence = package["license"].as_str().unwrap_or("none");
            if !is_allowed(licence) {
                findings.insert(format!("{} {}: {licence}", package["name"], package["version"]));
            }
        }
    }
    Ok(findings.into_iter().collect())
}

/// Whether the allowed licences satisfy an SPDX expression. `/` is how old packages write OR.
fn is_allowed(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<_> = spaced.split_whitespace().collect();
    let mut rest = words.as_slice();
    any_of(&mut rest) && rest.is_empty()
}

fn any_of(words: &mut &[&str]) -> bool {
    let mut allowed = all_of(words);
    while let Some(("OR", rest)) = words.split_first().map(|(word, rest)| (*word, rest)) {
        *words = rest;
        // No short circuit: the call consumes words.
        allowed |= all_of(words);
    }
    allowed
}

fn all_of(words: &mut &[&str]) -> bool {
    let mut allowed = one(words);
    while let Some(("AND", rest)) = words.split_first().map(|(word, rest)| (*word, rest)) {
        *words = rest;
        allowed &= one(words);
    }
    allowed
}

fn one(words: &mut &[&str]) -> bool {
    match **words {
        ["(", ref rest @ ..] => {
            *words = rest;
            let allowed = any_of(words);
            let Some(rest) = words.strip_prefix(&[")"]) else { return false };
            *words = rest;
            allowed
        }
        [licence, "WITH", exception, ref rest @ ..] => {
            *words = rest;
            ALLOWED.contains(&format!("{licence} WITH {exception}").as_str())
        }
        [licence, ref rest @ ..] => {
            *words = rest;
            ALLOWED.contains(&licence)
        }
        [] => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_allowed_alternative_is_enough() {
        for good in [
            "MIT",
            "MIT/Apache-2.0",
            "GPL-2.0 OR MIT",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR GPL-3.0",
        ] {
            assert!(is_allowed(good), "{good}");
        }
    }

    #[test]
    fn every_conjunct_must_be_allowed() {
        for bad in ["", "none", "GPL-2.0", "MIT AND GPL-2.0", "(MIT OR GPL-2.0) AND AGPL-3.0", "(MIT"] {
            assert!(!is_allowed(bad), "{bad}");
        }
    }
}
