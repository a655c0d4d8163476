//! What the daemon has been given, and cannot serve or has lost.

use super::{Check, State};
use crate::absent;
use crate::client::Client;
use crate::commands::{elements, text};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// What is absent, and disks in memory that have lost what they held; nothing if no daemon answers, which is told already.
pub fn configured(socket: &Path, timeout: Duration) -> Vec<Check> {
    let asked = Client::connect(socket, timeout)
        .and_then(|mut client| Ok((absent::ask(&mut client)?, client.call("bdev_get_bdevs", json!({}))?)));
    let Ok((absent, disks)) = asked else { return Vec::new() };
    let is_emptied = |disk: &&Value| disk["driver_specific"]["malloc"]["emptied"] == true;
    let emptied = elements(&disks).iter().filter(is_emptied);
    absent.iter().map(absent_of).chain(emptied.map(emptied_of)).collect()
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

pub(super) fn emptied_of(disk: &Value) -> Check {
    let name = text(disk, "name");
    let found = format!("disk '{name}' is in memory, and empty since the daemon was started anew");
    let fix = format!("fill it again, or make it in a file: aryk disk create {name} --file PATH --size SIZE");
    Check::lacks("disk in memory", State::Worse, found, "what it held before", fix)
}
