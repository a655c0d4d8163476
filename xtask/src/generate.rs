//! `cargo xtask generate`: files generated from the types of the RPC methods: the OpenRPC document, the reference, the
//! clients.
//!
//! The document comes from the daemon's own types (`aryk_rpc::openrpc`); everything else is generated from the document.
//! The repository contains the generated files, for users who copy a client from there; `cargo xtask check` finds stale
//! ones.

mod go;
mod model;
mod python;
mod reference;

use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::workspace;

/// Writes all generated files.
pub(crate) fn run() -> Result<()> {
    for (path, content) in files()? {
        let file = workspace::root().join(path);
        if std::fs::read_to_string(&file).is_ok_and(|before| before == content) {
            continue;
        }
        std::fs::create_dir_all(file.parent().context("a file is in a directory")?)?;
        std::fs::write(&file, content).with_context(|| path.to_owned())?;
        println!("{path}");
    }
    Ok(())
}

/// The generated files whose content is out of date.
pub(crate) fn stale() -> Result<Vec<String>> {
    let is_stale = |(path, content): &(&str, String)| {
        std::fs::read_to_string(workspace::root().join(path)).ok().as_ref() != Some(content)
    };
    let stale = files()?.into_iter().filter(is_stale);
    Ok(stale.map(|(path, _)| format!("{path}: stale; run `cargo xtask generate`")).collect())
}

/// Path, relative to the root, and content of each file.
fn files() -> Result<Vec<(&'static str, String)>> {
    let document = document()?;
    let api = model::Api::read(&document)?;
    let mut files = vec![("docs/rpc/openrpc.json", document)];
    files.extend(reference::files(&api));
    files.extend(python::files(&api)?);
    files.extend(go::files(&api));
    Ok(files)
}

fn document() -> Result<String> {
    // Built with the features that the tests' build has: what is compiled here is not compiled again there.
    workspace::run(workspace::cargo().args(["build", "--quiet", "--workspace", "--example", "openrpc"]))?;
    let output = Command::new(workspace::target()?.join("debug/examples/openrpc")).output();
    let output = output.context("running the example openrpc")?;
    if !output.status.success() {
        bail!("generating the document failed: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}
