//! Shell completion: the words of the command line, the names of disks, controllers and groups, and the addresses of drives.
//!
//! The script that `aryk completions` prints calls this program with the line so far, and `main` calls [`answer`] first.

use crate::cli::{Cli, default_socket};
use crate::client::Client;
use crate::commands::{elements, text};
use crate::error::Error;
use aryk_pci::sysfs::Sysfs;
use clap::CommandFactory;
use clap_complete::env::Shells;
use clap_complete::{CompleteEnv, CompletionCandidate, Shell};
use serde_json::json;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

/// The environment variable that marks a call by the script.
const VARIABLE: &str = "COMPLETE";

/// The longest time that a completion may take.
const TIMEOUT: Duration = Duration::from_millis(500);

/// bash splits words at colons, which PCI addresses and names of disks contain. This function joins such words again, and
/// completes the part after the last colon.
const COLONS: &str = r#"
_aryk() {
    local line=${COMP_LINE:0:COMP_POINT}
    if [[ $COMP_WORDBREAKS != *:* || $line != *:* || $line == *[\"\'\\]* ]]; then
        _clap_complete_aryk "$@"
        return
    fi
    local COMP_CWORD COMP_WORDS word=${line##*[[:space:]]}
    read -ra COMP_WORDS <<<"$line"
    [[ $word ]] || COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _clap_complete_aryk "$1" "$word"
    local start=${word%"${word##*:}"}
    COMPREPLY=("${COMPREPLY[@]#"$start"}")
}
complete -o nospace -o bashdefault -o nosort -F _aryk aryk 2>/dev/null ||
    complete -o nospace -o bashdefault -F _aryk aryk
"#;

/// Replies to the completion script and exits, if the script has called.
pub fn answer() {
    CompleteEnv::with_factory(Cli::command).var(VARIABLE).complete();
}

/// Prints the script for a shell.
pub fn script(shell: Shell) -> Result<(), Error> {
    let name = shell.to_string();
    let unknown = || Error::Usage(format!("there is no completion for {name}"));
    let all = Shells::builtins();
    let mut script = Vec::new();
    all.completer(&name).ok_or_else(unknown)?.write_registration(
        VARIABLE,
        "aryk",
        "aryk",
        "aryk",
        &mut script,
    )?;
    if shell == Shell::Zsh {
        // As a file in zsh's path, the script is loaded by the first completion, which it must answer.
        writeln!(script, "[[ $funcstack[1] = _aryk ]] && _clap_dynamic_completer_aryk \"$@\"")?;
    }
    if shell == Shell::Bash {
        script.extend_from_slice(COLONS.as_bytes());
    }
    io::stdout().lock().write_all(&script)?;
    Ok(())
}

/// The names of the disks.
pub fn disks() -> Vec<CompletionCandidate> {
    names("bdev_get_bdevs", "name")
}

/// The names of the controllers.
pub fn controllers() -> Vec<CompletionCandidate> {
    names("vhost_get_controllers", "ctrlr")
}

/// The names of both.
pub fn disks_and_controllers() -> Vec<CompletionCandidate> {
    let mut all = controllers();
    let disks = disks().into_iter().filter(|disk| !all.contains(disk)).collect::<Vec<_>>();
    all.extend(disks);
    all
}

/// The names of the groups of disks.
pub fn groups() -> Vec<CompletionCandidate> {
    names("bdev_qos_groups_get", "name")
}

/// The names of the keys of encrypted disks.
pub fn keys() -> Vec<CompletionCandidate> {
    names("accel_crypto_keys_get", "name")
}

/// The names of the pools.
pub fn pools() -> Vec<CompletionCandidate> {
    names("aryk_pools_get", "name")
}

/// The volumes and snapshots, as POOL/VOLUME.
pub fn volumes() -> Vec<CompletionCandidate> {
    names("aryk_volumes_get", "alias")
}

/// The snapshots, and the volumes, as POOL/VOLUME.
pub fn snapshots() -> Vec<CompletionCandidate> {
    volumes()
}

/// The names of the RPC methods.
pub fn methods() -> Vec<CompletionCandidate> {
    crate::reference::methods().map(CompletionCandidate::new).collect()
}

/// The addresses of the NVMe drives that can be bound to vfio-pci.
pub fn unbound_drives() -> Vec<CompletionCandidate> {
    drives(false)
}

/// The addresses of the NVMe drives that are bound to vfio-pci.
pub fn bound_drives() -> Vec<CompletionCandidate> {
    drives(true)
}

fn drives(is_bound: bool) -> Vec<CompletionCandidate> {
    let all = Sysfs::default().nvme_functions().unwrap_or_default();
    let wanted = all.into_iter().filter(|drive| drive.is_bound_to_vfio() == is_bound);
    wanted.map(|drive| CompletionCandidate::new(drive.address.to_string())).collect()
}

/// The member of each element; none if no daemon replies.
fn names(method: &str, member: &str) -> Vec<CompletionCandidate> {
    let words = std::env::args().skip_while(|word| word != "--").collect();
    let all = Client::connect(&socket(words), TIMEOUT).and_then(|mut client| client.call(method, json!({})));
    let all = all.unwrap_or_default();
    elements(&all).iter().map(|element| CompletionCandidate::new(text(element, member))).collect()
}

/// The socket of the daemon that the command line addresses.
fn socket(words: Vec<String>) -> PathBuf {
    let mut words = words.into_iter();
    let named = words.find_map(|word| match word.strip_prefix("--socket") {
        Some(rest) if rest.starts_with('=') => Some(Some(rest[1..].to_owned())),
        Some("") => Some(None),
        _ => (word == "-s").then_some(None),
    });
    let named = named.and_then(|inline| inline.or_else(|| words.next()));
    let named = named.map(PathBuf::from).or_else(|| std::env::var_os("ARYK_SOCKET").map(PathBuf::from));
    named.unwrap_or_else(default_socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_names_the_socket() {
        let of = |line: &str| socket(line.split(' ').map(str::to_owned).collect());
        assert_eq!(of("-- aryk -s /a disk show"), PathBuf::from("/a"));
        assert_eq!(of("-- aryk --socket /b disk"), PathBuf::from("/b"));
        assert_eq!(of("-- aryk --socket=/c disk"), PathBuf::from("/c"));
    }
}
