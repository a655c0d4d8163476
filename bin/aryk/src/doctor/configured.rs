//! Configured objects that the daemon cannot serve, that are at risk, or whose data is lost.

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

/// Absent, deleted, failing and emptied disks; empty if no daemon responds, which another check reports.
pub fn configured(socket: &Path, timeout: Duration) -> Vec<Check> {
    let mut checks = Vec::new();
    if let Ok(mut client) = Client::connect(socket, timeout)
        && let Err(error) = add_checks(&mut client, &mut checks)
    {
        checks.push(unknown(&error));
    }
    checks
}

/// Adds the findings. If the daemon refuses one call, a check says so, and the findings of the other calls are added.
fn add_checks(client: &mut Client, checks: &mut Vec<Check>) -> Result<(), Error> {
    let absent = reply_or_null(absent::read(client).map(Value::Array), checks)?;
    checks.extend(elements(&absent).iter().map(absent_of));
    let disks = reply_or_null(client.call("bdev_get_bdevs", json!({})), checks)?;
    checks.extend(deleted(elements(&disks), &Deleted::of(client)));
    let stats = reply_or_null(client.call("aryk_stats_get", json!({})), checks)?;
    checks.extend(elements(&stats["disks"]).iter().filter_map(failing_of));
    let is_emptied = |disk: &&Value| disk["driver_specific"]["malloc"]["emptied"] == true;
    checks.extend(elements(&disks).iter().filter(is_emptied).map(emptied_of));
    Ok(())
}

/// The daemon's reply; null, and a check, if the daemon refuses.
fn reply_or_null(answer: Result<Value, Error>, checks: &mut Vec<Check>) -> Result<Value, Error> {
    answer.or_else(|error| match error {
        Error::Refused { .. } => {
            checks.push(unknown(&error));
            Ok(Value::Null)
        }
        error => Err(error),
    })
}

fn unknown(error: &Error) -> Check {
    let found = format!("the state of the configured objects is not fully known: {error}");
    Check::lacks("daemon", State::Worse, found, "reports of absent, deleted or failing disks", "aryk logs")
}

/// The disks whose files are deleted; or one check that this is unknown, if there are disks in files.
pub(super) fn deleted(disks: &[Value], deleted: &Deleted) -> Vec<Check> {
    if !deleted.is_known() && disks.iter().any(|disk| disk::path(disk).is_some()) {
        let brings = "reports of data that is lost when the daemon ends";
        let found = "deleted files: not known, run as root";
        return vec![Check::lacks("deleted", State::Worse, found, brings, "sudo aryk doctor")];
    }
    let of = |disk| Some(deleted_of(disk, disk::path(disk)?, deleted.copy(disk::path(disk)?)?));
    disks.iter().filter_map(of).collect()
}

pub(super) fn absent_of(absent: &Value) -> Check {
    let found = format!("{}; retried: {}", absent::why(absent), absent::retry_text(absent));
    let mend = match absent::file(absent) {
        // Without the right to search its directory, the file may exist.
        Some(file) if matches!(Path::new(file).try_exists(), Ok(false)) => {
            format!("put {file} back, and the daemon creates the disk by itself")
        }
        _ if absent["tried_since"].is_null() => "create the object that it waits for".into(),
        _ => "correct that, and the daemon creates it by itself".into(),
    };
    let forget =
        absent::forget_command(absent).map_or_else(String::new, |how| format!("; or forget it: {how}"));
    let brings = "serving the configured objects";
    Check::lacks("absent", State::Missing, found, brings, format!("{mend}{forget}"))
}

pub(super) fn deleted_of(disk: &Value, path: &str, copy: &Path) -> Check {
    let name = text(disk, "name");
    let found =
        format!("the file of disk '{name}', {path}, is deleted: its data is lost when the daemon ends");
    // The copy must not overwrite another disk's file.
    let (other, then, target) = match Path::new(path).try_exists() {
        Ok(false) => ("", "", path.to_owned()),
        _ => (
            "another file is there, so copy beside it: ",
            "; then move the other file away, and the copy to its place",
            format!("{path}.rescued"),
        ),
    };
    let (copy, target) = (quoted(&copy.to_string_lossy()), quoted(&target));
    let fix = format!(
        "shut its VM down; {other}cp --sparse=always --preserve=mode,ownership {copy} {target}{then}; then restart the daemon ('aryk stop --force' ends it): until then it serves the deleted file"
    );
    Check::lacks("deleted", State::Missing, found, "the disk's data after the daemon's next start", fix)
}

/// A disk whose store failed a request.
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
        _ => "'aryk logs' and the kernel's log (dmesg) have details",
    };
    Some(Check::lacks("store", State::Worse, found, "requests without errors", fix))
}

pub(super) fn emptied_of(disk: &Value) -> Check {
    let name = text(disk, "name");
    let found = format!("disk '{name}' is in memory, and empty since the daemon was restarted");
    let quoted = quoted(name);
    let fix = format!(
        "fill it again (this line stays until the daemon ends), or shut its VM down, 'aryk disk remove {quoted} --force', and create it in a file: aryk disk create {quoted} --file PATH --size SIZE"
    );
    Check::lacks("disk in memory", State::Worse, found, "the disk's former data", fix)
}
