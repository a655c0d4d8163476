//! What is configured and not there: disks whose file is missing, and all that waits for a disk.

use crate::apply::call::Call;
use crate::client::Client;
use crate::commands::{elements, text};
use crate::error::{Error, NO_METHOD};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Asks the daemon for all that is absent. Older daemons do not tell.
pub fn ask(client: &mut Client) -> Result<Vec<Value>, Error> {
    match client.call("aryk_absent_get", json!({})) {
        Ok(absent) => Ok(elements(&absent).to_vec()),
        Err(Error::Refused { code: NO_METHOD, .. }) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// What an absent object is, and why it is absent.
pub fn why(absent: &Value) -> String {
    format!("{}: {}", text(absent, "object"), text(absent, "why"))
}

/// Refuses calls that would make a new disk, or a new and empty file, in the place of an absent one.
pub fn refuse_replacing<'a>(calls: impl Iterator<Item = &'a Call>, client: &mut Client) -> Result<(), Error> {
    let calls: Vec<_> = calls.collect();
    if calls.is_empty() {
        return Ok(());
    }
    let is_replaced = |absent: &Value| calls.iter().any(|call| replaces(call, absent));
    let lines: Vec<_> = ask(client)?.iter().filter(|absent| is_replaced(absent)).map(how_to_forget).collect();
    if lines.is_empty() { Ok(()) } else { Err(Error::Absent(lines)) }
}

fn replaces(call: &Call, absent: &Value) -> bool {
    let is_name = call.name().is_some_and(|name| text(absent, "object") == format!("disk '{name}'"));
    let file = call.text("filename").map(Path::new);
    let is_file = file.is_some()
        && file.map(resolved) == absent["params"]["filename"].as_str().map(Path::new).map(resolved);
    // A disk whose file has come back may be made at once.
    let is_back = is_name && is_file && file.is_some_and(Path::exists);
    (is_name || is_file) && !is_back
}

/// The path of a file that may be missing, without links and `..` before its name.
fn resolved(file: &Path) -> PathBuf {
    let dir = file.parent().and_then(|dir| dir.canonicalize().ok());
    dir.zip(file.file_name()).map_or_else(|| file.to_owned(), |(dir, name)| dir.join(name))
}

fn how_to_forget(absent: &Value) -> String {
    let params = absent["params"].as_object().cloned().unwrap_or_default();
    let call = Call { method: text(absent, "method").to_owned(), params };
    match call.undo() {
        Some((method, params)) => format!("{}; to forget it: aryk rpc {method} '{params}'", why(absent)),
        None => why(absent),
    }
}
