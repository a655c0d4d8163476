//! What the daemon has been given, and cannot serve, is about to lose, or has lost.

use super::{Check, State};
use crate::absent::{self, duration};
use crate::client::Client;
use crate::commands::{disk, elements, text};
use crate::deleted::Deleted;
use crate::error::Error;
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// What is absent, deleted, failing and lost; nothing if no daemon answers, which is told already.
pub fn configured(socket: &Path, timeout: Duration) -> Vec<Check> {
    Client::connect(socket, timeout).and_then(|mut client| all(&mut client)).unwrap_or_default()
}

fn all(client: &mut Client) -> Result<Vec<Check>, Error> {
    let mut checks: Vec<_> = absent::ask(client)?.iter().map(absent_of).collect();
    let disks = client.call("bdev_get_bdevs", json!({}))?;
    let deleted = Deleted::of(client);
    let deleted_of = |disk| Some(deleted_of(disk, disk::path(disk)?, deleted.copy(disk::path(disk)?)?));
    checks.extend(elements(&disks).iter().filter_map(deleted_of));
    let stats = client.call("aryk_stats_get", json!({}))?;
    checks.extend(elements(&stats["disks"]).iter().filter_map(failing_of));
    let is_emptied = |disk: &&Value| disk["driver_specific"]["malloc"]["emptied"] == true;
    checks.extend(elements(&disks).iter().filter(is_emptied).map(emptied_of));
    Ok(checks)
}

pub(super) fn absent_of(absent: &Value) -> Check {
    let found = format!("{}; tried again: {}", absent::why(absent), absent::tried(absent));
    let mend = match absent::file(absent) {
        Some(file) if !Path::new(file).exists() => {
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
    let copy = copy.display();
    let fix = format!("shut its VM down, and before the daemon ends: cp --sparse=always {copy} '{path}'");
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
    let fix = format!("fill it again, or make it in a file: aryk disk create {name} --file PATH --size SIZE");
    Check::lacks("disk in memory", State::Worse, found, "what it held before", fix)
}
