//! The documentation's commands: runs each page's `console` blocks as one session of a new user.
//!
//! A line that starts with `$ ` is a command. A page's commands run in order, in an empty directory, with the built
//! programs in `PATH`. The session has its own process and mount namespaces: its daemons die with it, and the directories
//! of the default sockets are its own. Commands of cargo and git are skipped: they are already running this stage.
//!
//! Pages that need more, such as a cluster, are in `docs/examples/`; the stage that has it runs them ([`run_page`]).

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::Tally;
use crate::workspace;

/// Programs whose commands the session skips.
const LEFT_OUT: &[&str] = &["cargo", "git", "cd"];

/// Prepares the namespaces; `$0` is the session's directory, `$1` its script.
const ENTER: &str = r#"
mount --bind "$0/var-tmp" /var/tmp
mount --bind "$0/run" /run
cd "$0/home"
exec bash -euo pipefail "$1"
"#;

pub(crate) fn run() -> Result<Tally> {
    let bin = workspace::build_programs()?;
    let mut tally = Tally::default();
    for page in pages()? {
        let commands = commands(&std::fs::read_to_string(&page)?);
        if !commands.is_empty() {
            let name = page.strip_prefix(workspace::root())?.display().to_string();
            tally.count(&format!("{name}: {} commands", commands.len()), session(&commands, &bin, &[]));
        }
    }
    Ok(tally)
}

/// Runs the commands of `page`, whose path is relative to the root, with further variables.
pub(super) fn run_page(page: &str, bin: &Path, environment: &[(&str, &Path)]) -> Result<()> {
    let commands = commands(&std::fs::read_to_string(workspace::root().join(page))?);
    ensure!(!commands.is_empty(), "no commands in {page}");
    session(&commands, bin, environment)
}

/// The markdown pages at the root, in `docs/` and in `docs/rpc/`.
fn pages() -> Result<Vec<PathBuf>> {
    let mut pages = Vec::new();
    for directory in ["", "docs", "docs/rpc"] {
        for entry in std::fs::read_dir(workspace::root().join(directory))? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "md") {
                pages.push(path);
            }
        }
    }
    pages.sort();
    Ok(pages)
}

fn commands(page: &str) -> Vec<String> {
    let mut inside = false;
    let mut commands = Vec::new();
    for line in page.lines() {
        if let Some(kind) = line.strip_prefix("```") {
            inside = kind == "console";
        } else if let Some(command) = line.strip_prefix("$ ").filter(|_| inside) {
            let program = command.split_whitespace().next().unwrap_or_default();
            if !LEFT_OUT.contains(&program) {
                commands.push(command.to_owned());
            }
        }
    }
    commands
}

fn session(commands: &[String], bin: &Path, environment: &[(&str, &Path)]) -> Result<()> {
    let home = tempfile::tempdir()?;
    for directory in ["home", "run", "var-tmp"] {
        std::fs::create_dir(home.path().join(directory))?;
    }
    let script = home.path().join("script");
    std::fs::write(&script, script_of(commands))?;
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Command::new("unshare")
        .args(["--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"])
        .args(["timeout", "60", "sh", "-euc", ENTER])
        .args([home.path(), &script])
        .env("PATH", format!("{}:{path}", bin.display()))
        .env_remove("XDG_RUNTIME_DIR")
        .envs(environment.iter().copied())
        .stdin(Stdio::null())
        .output()
        .context("running unshare")?;
    if !output.status.success() {
        let (said, erred) = (&output.stdout, &output.stderr);
        bail!("{}\n{}{}", output.status, String::from_utf8_lossy(said), String::from_utf8_lossy(erred));
    }
    Ok(())
}

/// The script of a session: the commands as a user types them; it waits for a daemon put in the background before it
/// continues.
fn script_of(commands: &[String]) -> String {
    let mut script = String::new();
    for command in commands {
        let quoted = command.replace('\'', r"'\''");
        script.push_str(&format!("echo '$ {quoted}'\n{command}\n"));
        if command.starts_with("arykd ") && command.ends_with('&') {
            script.push_str("for _ in $(seq 50); do aryk status >/dev/null 2>&1 && break; sleep 0.1; done\n");
        }
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found_in_console_blocks_only() {
        let page =
            "$ no\n```console\n$ arykd &\nready\n$ cargo build\n$ aryk status\n```\n```sh\n$ no\n```\n";
        assert_eq!(commands(page), ["arykd &", "aryk status"]);
    }
}
