//! What is configured and not there: disks whose file is missing, and all that waits for a disk.

use crate::apply::call::Call;
use crate::client::Client;
use crate::commands::{elements, text};
use crate::error::{BUSY, Error, NO_METHOD};
use crate::output::Output;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

/// The `state` of what is absent, and of what is there.
pub const ABSENT: &str = "absent";
pub const PRESENT: &str = "present";

/// Kinds of objects that can be absent, and forgotten by their names.
const DISK: &str = "disk";
const CONTROLLER: &str = "controller";
const TARGET: &str = "target";

/// Asks the daemon for all that is absent. Older daemons do not tell.
pub fn ask(client: &mut Client) -> Result<Vec<Value>, Error> {
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

/// Whether this is what the daemon says of an absent object, and not of one that is there.
pub fn is_absent(object: &Value) -> bool {
    text(object, "state") == ABSENT
}

pub fn is_disk(absent: &Value) -> bool {
    text(absent, "kind") == DISK
}

/// Whether it is a controller, or a target of one.
pub fn is_offer(absent: &Value) -> bool {
    [CONTROLLER, TARGET].contains(&text(absent, "kind"))
}

pub fn is_controller(absent: &Value) -> bool {
    text(absent, "kind") == CONTROLLER
}

/// Whether it goes by this name or uuid.
pub fn is_called(absent: &Value, name: &str) -> bool {
    let is_uuid = || text(&absent["params"], "uuid").eq_ignore_ascii_case(name);
    // One without a uuid is not called by none: an unset variable of a script's.
    !name.is_empty() && (text(absent, "name") == name || is_uuid())
}

/// The disk that it offers, or is made of.
pub fn base(absent: &Value) -> Option<&str> {
    let bases = ["dev_name", "bdev_name", "base_bdev_name", "base_bdev", "base_name"];
    bases.iter().find_map(|param| absent["params"][param].as_str())
}

/// The file that an absent disk is in.
pub fn file(absent: &Value) -> Option<&str> {
    absent["params"]["filename"].as_str()
}

/// For how long it has been tried again; `None` if it is not.
fn tried_for(absent: &Value) -> Option<Duration> {
    let since = UNIX_EPOCH + Duration::from_secs(absent["tried_since"].as_u64()?);
    Some(since.elapsed().unwrap_or_default())
}

/// Whether it is tried again, for people.
pub fn tried(absent: &Value) -> String {
    tried_for(absent).map_or_else(|| "no".into(), |time| format!("for {}", duration(time)))
}

/// In the two largest units.
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

/// A table of what is absent, after one of what is there.
pub fn below(present: String, absent: &[&Value], out: &Output) -> String {
    if absent.is_empty() {
        return present;
    }
    let columns = [("ABSENT", false), ("TRIED AGAIN", false), ("WHY", false)];
    let row = |absent: &&Value| {
        vec![text(absent, "name").to_owned(), tried(absent), text(absent, "why").to_owned()]
    };
    let table = out.table(&columns, absent.iter().map(row));
    if present.is_empty() { table } else { format!("{present}\n\n{table}") }
}

/// Has the daemon forget an absent object. What it was made of stays: files, and their data.
///
/// The daemon has no call that forgets only: the same call removes what is there. So what has come back since the caller
/// looked is left alone; between this look and the call, in the time of one round trip, it can still come back.
pub fn forget(absent: &Value, client: &mut Client) -> Result<(), Error> {
    let object = text(absent, "object");
    refuse_what_is_back(|now| text(now, "object") == object, object, client)?;
    let call = Call::new(text(absent, "method"), absent["params"].clone());
    let (method, params) = call.undo().ok_or_else(|| Error::Usage(why(absent)))?;
    client.call(method, params).map(drop)
}

/// Refuses to go on with an object, called `name`, that is not absent any more.
pub fn refuse_what_is_back(
    is_it: impl Fn(&Value) -> bool,
    name: &str,
    client: &mut Client,
) -> Result<(), Error> {
    if ask(client)?.iter().any(is_it) {
        return Ok(());
    }
    Err(Error::Refused {
        code: BUSY,
        message: "Device or resource busy".into(),
        detail: Some(format!("{name} is not absent any more")),
        hint: Some(
            "'aryk disk list' and 'aryk controller list' show whether it has come back, and who uses it.",
        ),
    })
}

/// The command that has it forgotten, if there is one.
pub fn how_to_forget(absent: &Value) -> Option<String> {
    let name = text(absent, "name");
    match text(absent, "kind") {
        DISK => Some(format!("aryk disk remove {name}")),
        CONTROLLER | TARGET => Some(format!("aryk detach {name}")),
        _ => None,
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
    let lines: Vec<_> = ask(client)?.iter().filter(|absent| is_replaced(absent)).map(advice).collect();
    if lines.is_empty() { Ok(()) } else { Err(Error::Absent(lines)) }
}

fn replaces(call: &Call, absent: &Value) -> bool {
    let is_name = is_disk(absent) && call.name().is_some_and(|name| is_called(absent, &name));
    let file = call.text("filename").map(Path::new);
    let is_file = file.is_some()
        && file.map(resolved) == absent["params"]["filename"].as_str().map(Path::new).map(resolved);
    // A disk whose file has come back may be made at once.
    let is_back = is_name && is_file && file.is_some_and(Path::exists);
    (is_name || is_file) && !is_back
}

/// The path of a file that may be missing, without links and `..` before its name.
pub fn resolved(file: &Path) -> PathBuf {
    let dir = file.parent().and_then(|dir| dir.canonicalize().ok());
    dir.zip(file.file_name()).map_or_else(|| file.to_owned(), |(dir, name)| dir.join(name))
}

fn advice(absent: &Value) -> String {
    match how_to_forget(absent) {
        Some(command) => format!("{}; to forget it: {command}", why(absent)),
        None => why(absent),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read};

    #[test]
    fn what_has_come_back_is_not_forgotten() {
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
        assert_eq!(daemon.join().unwrap(), 0, "the daemon is asked for nothing more");
    }

    #[test]
    fn times_have_two_units() {
        let known = [(0, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3_600, "1 h 0 min"), (90_061, "1 d 1 h")];
        for (seconds, text) in known {
            assert_eq!(duration(Duration::from_secs(seconds)), text);
        }
    }
}
