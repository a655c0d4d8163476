//! Paths of the repository, and how programs are run from there.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// The repository's root.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a directory of the root")
}

/// Cargo, run at the root.
pub(crate) fn cargo() -> Command {
    at_root(Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())))
}

/// A command that runs at the root, and may run Cargo.
pub(crate) fn at_root(mut command: Command) -> Command {
    command.current_dir(root());
    // Cargo sets these variables for this process; a nested cargo must not mistake them for its own package's.
    for (name, _) in std::env::vars_os().filter(|(name, _)| {
        name.to_str().is_some_and(|n| n.starts_with("CARGO_PKG_") || n.starts_with("CARGO_MANIFEST_"))
    }) {
        command.env_remove(name);
    }
    command
}

/// Runs a command to its end; any exit status but 0 is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("running {command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}

/// `cargo metadata` of the workspace whose manifest is `manifest`, relative to the root.
pub(crate) fn metadata(manifest: &str, options: &[&str]) -> Result<Value> {
    let mut command = cargo();
    command.args(["metadata", "--format-version=1", "--manifest-path", manifest]).args(options);
    let output = command.output().context("running cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata of {manifest}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Cargo's target directory.
pub(crate) fn target() -> Result<PathBuf> {
    let metadata = metadata("Cargo.toml", &["--no-deps"])?;
    Ok(metadata["target_directory"].as_str().context("cargo metadata names no target directory")?.into())
}

/// Builds the delivered programs and `aryk-bench` for release; returns their directory. It is always the same choice of
/// packages: another choice gives the libraries other features, and rebuilds all of them.
pub(crate) fn build_programs() -> Result<PathBuf> {
    let mut build = cargo();
    build.args(["build", "--release"]);
    for package in ["arykd", "aryk", "aryk-bench"] {
        build.args(["-p", package]);
    }
    run(&mut build)?;
    Ok(target()?.join("release"))
}
