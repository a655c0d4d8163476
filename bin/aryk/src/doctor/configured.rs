//! What the daemon has been given, and cannot serve, is about to lose, or has lost.

use super::{Check, State};
use crate::absent::{self, duration};
use crate::client::Client;
use crate::commands::controller::quoted;
use crate::commands::{disk, elements, text};
use crate::deleted::Deleted;
use crate::error::Error;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// What is absent, deleted, failing and lost; nothing if no daemon answers, which is told already.
pub fn configured(socket: &Path, timeout: Duration) -> Vec<Check> {
    let mut checks = Vec::new();
    if let Ok(mut client) = Client::connect(socket, timeout)
        && let Err(error) = all(&mut client, &mut checks)
    {
        checks.push(unknown(&error));
    }
    checks
}

/// Adds what is found. What one refused call would have told is missing, and that is said; what the others tell is not.
fn all(client: &mut Client, checks: &mut Vec<Check>) -> Result<(), Error> {
    let absent = told(absent::ask(client).map(Value::Array), checks)?;
    checks.extend(elements(&absent).iter().map(absent_of));
    let disks = told(client.call("bdev_get_bdevs", json!({})), checks)?;
    checks.extend(deleted(elements(&disks), &Deleted::of(client)));
    let stats = told(client.call("aryk_stats_get", json!({})), checks)?;
    checks.extend(elements(&stats["disks"]).iter().filter_map(failing_of));
    let is_emptied = |disk: &&Value| disk["driver_specific"]["malloc"]["emptied"] == true;
    checks.extend(elements(&disks).iter().filter(is_emptied).map(emptied_of));
    Ok(())
}

/// What the daemon has told; of what it refuses to tell, nothing.
fn told(answer: Result<Value, Error>, checks: &mut Vec<Check>) -> Result<Value, Error> {
    answer.or_else(|error| match error {
        Error::Refused { .. } => {
            checks.push(unknown(&error));
            Ok(Value::Null)
        }
        error => Err(error),
    })
}

fn unknown(error: &Error) -> Check {
    let found = format!("not all is known of what was configured: {error}");
    Check::lacks("daemon", State::Worse, found, "knowing what is absent, deleted or failing", "aryk logs")
}

/// The disks whose files are deleted; or that this is not known of disks in files.
pub(super) fn deleted(disks: &[Value], deleted: &Deleted) -> Vec<Check> {
    if !deleted.is_known() && disks.iter().any(|disk| disk::path(disk).is_some()) {
        let brings = "knowing of data that ends with the daemon";
        let found = "deleted files: not known, run as root";
        return vec![Check::lacks("deleted", State::Worse, found, brings, "sudo aryk doctor")];
    }
    let of = |disk| Some(deleted_of(disk, disk::path(disk)?, deleted.copy(disk::path(disk)?)?));
    disks.iter().filter_map(of).collect()
}

pub(super) fn absent_of(absent: &Value) -> Check {
    let found = format!("{}; tried again: {}", absent::why(absent), absent::tried(absent));
    let mend = match absent::file(absent) {
        // Without the right to look, it may be there.
        Some(file) if matches!(Path::new(file).try_exists(), Ok(false)) => {
            format!("put {file} back, and the daemon makes the disk by itself")
        }
        _ if absent["tried_since"].is_null() => "make what it waits for".into(),
        _ => "mend that, and the daemon makes it by itself".into(),
    };
    let forget =
        absent::how_to_forget(absent).map_or_else(String::new, |how| format!("; or forget it: {how}"));
    let brings = "serving what was configured";
    Check::lacks("absent", State::Missing, found, brings, format!("{mend}{forget}"))
}

pub(super) fn deleted_of(disk: &Value, path: &str, copy: &Path) -> Check {
    let name = text(disk, "name");
    let found = format!("the file of disk '{name}', {path}, is deleted: its data ends with the daemon");
    // A copy must not be written over another disk's file.
    let (other, then, target) = match Path::new(path).try_exists() {
        Ok(false) => ("", "", path.to_owned()),
        _ => (
            "another file is there, so copy beside it: ",
            "; move the other file away and this one to its place",
            format!("{path}.rescued"),
        ),
    };
    let (copy, target) = (quoted(&copy.to_string_lossy()), quoted(&target));
    let fix = format!(
        "shut its VM down; {other}cp --sparse=always --preserve=mode,ownership {copy} {target}{then}; then start the daemon anew ('aryk stop --force' ends it): until then it serves the deleted file"
    );
    Check::lacks("deleted", State::Missing, found, "the disk's data after the daemon's next start", fix)
}

/// A disk whose store has failed a request.
pub(super) fn failing_of(disk: &Value) -> Option<Check> {
    const NO_SPACE: i64 = 28;
    let error = disk["last_error"].as_object()?;
    let at = UNIX_EPOCH + Duration::from_secs(error["time"].as_u64()?);
    let ago = duration(at.elapsed().unwrap_or_default());
    let (op, why) = (text(&disk["last_error"], "op"), text(&disk["last_error"], "error"));
    let found = format!("the store of disk '{}' failed a {op} {ago} ago: {why}", text(disk, "name"));
    let fix = match error["errno"].as_i64() {
        Some(NO_SPACE) => {
            "make room: 'df' shows which file system is full; 'aryk disk list' which disks are in it"
        }
        _ => "'aryk logs' and the kernel's log (dmesg) say more",
    };
    Some(Check::lacks("store", State::Worse, found, "requests that do not fail", fix))
}

pub(super) fn emptied_of(disk: &Value) -> Check {
    let name = text(disk, "name");
    let found = format!("disk '{name}' is in memory, and empty since the daemon was started anew");
    let quoted = quoted(name);
    let fix = format!(
        "fill it again (this line stays until the daemon ends), or shut its VM down, 'aryk disk remove {quoted} --force', and make it in a file: aryk disk create {quoted} --file PATH --size SIZE"
    );
    Check::lacks("disk in memory", State::Worse, found, "what it held before", fix)
}
