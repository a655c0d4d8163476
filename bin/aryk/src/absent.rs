//! Absent objects: configured but not there, such as a disk whose file is missing, and objects that wait for such a disk.

use crate::apply::call::Call;
use crate::client::Client;
use crate::commands::{elements, text};
use crate::error::{BUSY, Error, NO_METHOD};
use crate::output::Output;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

/// The `state` of an absent object, and of a present one.
pub const ABSENT: &str = "absent";
pub const PRESENT: &str = "present";

/// Kinds of objects that can be absent, and that can be forgotten by name.
const DISK: &str = "disk";
const CONTROLLER: &str = "controller";
const TARGET: &str = "target";
const SHARE: &str = "share";
/// The method that shares a disk.
pub const ADD_NS: &str = "nvmf_subsystem_add_ns";

/// Reads all absent objects from the daemon. Older daemons do not report them.
pub fn read(client: &mut Client) -> Result<Vec<Value>, Error> {
    let mut all = match client.call("aryk_absent_get", json!({})) {
        Ok(absent) => elements(&absent).to_vec(),
        Err(Error::Refused { code: NO_METHOD, .. }) => Vec::new(),
        Err(error) => return Err(error),
    };
    for absent in &mut all {
        absent["state"] = json!(ABSENT);
    }
    Ok(all)
}

/// Whether `object` is the daemon's description of an absent object.
pub fn is_absent(object: &Value) -> bool {
    text(object, "state") == ABSENT
}

pub fn is_disk(absent: &Value) -> bool {
    text(absent, "kind") == DISK
}

/// Whether it is a controller, a target of one, or a part of a share.
pub fn is_offer(absent: &Value) -> bool {
    [CONTROLLER, TARGET, SHARE].contains(&text(absent, "kind"))
}

pub fn is_controller(absent: &Value) -> bool {
    text(absent, "kind") == CONTROLLER
}

/// Whether this name or uuid is the object's.
pub fn is_called(absent: &Value, name: &str) -> bool {
    let is_uuid = || text(&absent["params"], "uuid").eq_ignore_ascii_case(name);
    // An empty name, as from an unset variable of a script, does not match an object without a uuid.
    !name.is_empty() && (text(absent, "name") == name || is_uuid())
}

/// The disk that the object offers or is built on.
pub fn base(absent: &Value) -> Option<&str> {
    let bases = ["dev_name", "bdev_name", "base_bdev_name", "base_bdev", "base_name"];
    let shared = absent["params"]["namespace"]["bdev_name"].as_str();
    bases.iter().find_map(|param| absent["params"][param].as_str()).or(shared)
}

/// The file of an absent disk.
pub fn file(absent: &Value) -> Option<&str> {
    absent["params"]["filename"].as_str()
}

/// For how long the daemon has retried; `None` if it does not retry.
fn retried_for(absent: &Value) -> Option<Duration> {
    let since = UNIX_EPOCH + Duration::from_secs(absent["tried_since"].as_u64()?);
    Some(since.elapsed().unwrap_or_default())
}

/// Whether the daemon retries, as a text for people.
pub fn retry_text(absent: &Value) -> String {
    retried_for(absent).map_or_else(|| "no".into(), |time| format!("for {}", duration(time)))
}

/// A duration in its two largest units.
pub fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    let parts = [
        (seconds / 86_400, "d"),
        (seconds / 3_600 % 24, "h"),
        (seconds / 60 % 60, "min"),
        (seconds % 60, "s"),
    ];
    let shown: Vec<_> =
        parts.iter().skip_while(|(n, _)| *n == 0).take(2).map(|(n, unit)| format!("{n} {unit}")).collect();
    if shown.is_empty() { "0 s".into() } else { shown.join(" ") }
}

/// The table of present objects, followed by one of absent objects.
pub fn append_table(present: String, absent: &[&Value], out: &Output) -> String {
    if absent.is_empty() {
        return present;
    }
    let columns = [("ABSENT", false), ("RETRIED", false), ("WHY", false)];
    let row = |absent: &&Value| {
        vec![text(absent, "name").to_owned(), retry_text(absent), text(absent, "why").to_owned()]
    };
    let table = out.table(&columns, absent.iter().map(row));
    if present.is_empty() { table } else { format!("{present}\n\n{table}") }
}

/// Makes the daemon forget an absent object. The files and their data stay.
///
/// The daemon has no call that only forgets: the same call removes a present object. So an object that has come back since the
/// caller's check is not removed. Between the check here and the call, for one round trip, the object can still come back.
pub fn forget(absent: &Value, client: &mut Client) -> Result<(), Error> {
    let object = text(absent, "object");
    ensure_still_absent(|now| text(now, "object") == object, object, client)?;
    let params = &absent["params"];
    let undo = match text(absent, "method") {
        ADD_NS => {
            let nsid = &params["namespace"]["nsid"];
            let of = json!({"nqn": params["nqn"], "tgt_name": params["tgt_name"], "nsid": nsid});
            Some(("nvmf_subsystem_remove_ns", of))
        }
        method => Call::new(method, params.clone()).undo(),
    };
    let (method, params) = undo.ok_or_else(|| Error::Usage(why(absent)))?;
    client.call(method, params).map(drop)
}

/// Returns an error if the object `name` is no longer absent.
pub fn ensure_still_absent(
    is_it: impl Fn(&Value) -> bool,
    name: &str,
    client: &mut Client,
) -> Result<(), Error> {
    if read(client)?.iter().any(is_it) {
        return Ok(());
    }
    Err(Error::Refused {
        code: BUSY,
        message: "Device or resource busy".into(),
        detail: Some(format!("{name} is not absent any more")),
        hint: Some(
            "'aryk disk list' and 'aryk controller list' show whether it has come back, and what uses it.",
        ),
    })
}

/// The command that makes the daemon forget the object, if there is one.
pub fn forget_command(absent: &Value) -> Option<String> {
    let name = text(absent, "name");
    match text(absent, "kind") {
        DISK => Some(format!("aryk disk remove {name}")),
        CONTROLLER | TARGET => Some(format!("aryk detach {name}")),
        _ => None,
    }
}

/// The absent object, and the reason of its absence.
pub fn why(absent: &Value) -> String {
    format!("{}: {}", text(absent, "object"), text(absent, "why"))
}

/// Refuses calls that would create a new disk, or a new and empty file, in the place of an absent one.
pub fn refuse_replacing<'a>(calls: impl Iterator<Item = &'a Call>, client: &mut Client) -> Result<(), Error> {
    let calls: Vec<_> = calls.collect();
    if calls.is_empty() {
        return Ok(());
    }
    let is_replaced = |absent: &Value| calls.iter().any(|call| replaces(call, absent));
    let lines: Vec<_> = read(client)?.iter().filter(|absent| is_replaced(absent)).map(advice).collect();
    if lines.is_empty() { Ok(()) } else { Err(Error::Absent(lines)) }
}

fn replaces(call: &Call, absent: &Value) -> bool {
    let is_name = is_disk(absent) && call.name().is_some_and(|name| is_called(absent, &name));
    let file = call.text("filename").map(Path::new);
    let is_file = file.is_some()
        && file.map(resolved) == absent["params"]["filename"].as_str().map(Path::new).map(resolved);
    // A disk whose file has come back may be created at once.
    let is_back = is_name && is_file && file.is_some_and(Path::exists);
    (is_name || is_file) && !is_back
}

/// The path of a file that may be missing, with links and `..` in its directory resolved.
pub fn resolved(file: &Path) -> PathBuf {
    let dir = file.parent().and_then(|dir| dir.canonicalize().ok());
    dir.zip(file.file_name()).map_or_else(|| file.to_owned(), |(dir, name)| dir.join(name))
}

fn advice(absent: &Value) -> String {
    match forget_command(absent) {
        Some(command) => format!("{}; to forget it: {command}", why(absent)),
        None => why(absent),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read};

    #[test]
    fn a_disk_that_came_back_is_not_removed() {
        let dir = tempfile::TempDir::new().unwrap();
        let path = dir.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let daemon = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 4096];
            let len = stream.read(&mut request).unwrap();
            assert!(request[..len].windows(15).any(|part| part == b"aryk_absent_get"));
            std::io::Write::write_all(&mut stream, br#"{"id":1,"result":[]}"#).unwrap();
            BufReader::new(stream).fill_buf().unwrap().len()
        });
        let mut client = Client::connect(&path, Duration::from_secs(5)).unwrap();
        let absent = json!({"object": "disk 'a'", "method": "bdev_uring_create", "params": {"name": "a"}});
        let error = forget(&absent, &mut client).unwrap_err();
        assert!(error.to_string().contains("disk 'a' is not absent any more"), "{error}");
        drop(client);
        assert_eq!(daemon.join().unwrap(), 0, "the daemon gets no further call");
    }

    #[test]
    fn times_have_two_units() {
        let known = [(0, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3_600, "1 h 0 min"), (90_061, "1 d 1 h")];
        for (seconds, text) in known {
            assert_eq!(duration(Duration::from_secs(seconds)), text);
        }
    }
}
