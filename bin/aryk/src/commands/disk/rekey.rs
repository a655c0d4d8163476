//! `aryk disk rekey`: starts, follows and stops the rotation of the key of an encrypted disk. The daemon does the work: the
//! rotation continues when this command ends.

use super::{find, text};
use crate::cli::RekeyArgs;
use crate::client::Client;
use crate::commands::{number, object};
use crate::error::{BUSY, Error, NO_FILE};
use crate::output::Output;
use crate::size::Size;
use crate::watch;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::time::Duration;

/// Between two looks at a rotation.
const INTERVAL: Duration = Duration::from_millis(250);

/// The unit of the daemon's limit.
const MIB: u64 = 1 << 20;

const BEGIN_HINTS: [(i64, &str); 2] = [
    (NO_FILE, "'aryk key list' shows the keys; to create one: aryk key create NAME."),
    (BUSY, "'aryk disk show' shows the disk's new key, and how far its rotation is."),
];

const STOP_HINTS: [(i64, &str); 2] = [
    (NO_FILE, "'aryk disk show' shows a disk's key, and how far its rotation is."),
    (BUSY, "Another command starts or stops the rotation: try again."),
];

pub(super) fn run(args: &RekeyArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let disk = find(client, &args.name)?;
    refuse_other_kinds(&disk)?;
    let name = text(&disk, "name");
    let Some(key) = &args.key else { return stop(name, client, out) };
    begin(name, key, args.bandwidth, client)?;
    if args.wait {
        let crypto = wait(name, key, client, out)?;
        return out.print(&crypto, || format!("All of disk '{name}' is encrypted by key '{key}'."));
    }
    let disk = find(client, name)?;
    out.print(&disk["driver_specific"]["crypto"], || {
        format!(
            "The daemon encrypts disk '{name}' by key '{key}'. To see how far it is: aryk disk show {name}"
        )
    })
}

/// Refuses disks that have no key of `aryk key create`.
fn refuse_other_kinds(disk: &Value) -> Result<(), Error> {
    let (name, details) = (text(disk, "name"), &disk["driver_specific"]);
    if details["crypto"].is_object() {
        return Ok(());
    }
    let why = match details["luks"].is_object() {
        true => {
            "is a LUKS disk, whose volume key cannot be replaced; 'aryk luks add-key' and 'remove-key' replace its key files"
        }
        false => "is not encrypted",
    };
    Err(Error::Usage(format!("disk '{name}' {why}")))
}

fn begin(name: &str, key: &str, bandwidth: Option<Size>, client: &mut Client) -> Result<(), Error> {
    let mbytes = bandwidth.map(|Size(bytes)| match bytes {
        0 => Err(Error::Usage("a bandwidth of 0 would never end: use --stop".into())),
        // The daemon counts in MiB: less than the operator permits, but not nothing.
        bytes => Ok(json!((bytes / MIB).max(1))),
    });
    let params = object([
        ("name", Some(json!(name))),
        ("key_name", Some(json!(key))),
        ("mbytes_per_sec", mbytes.transpose()?),
    ]);
    client.call("bdev_crypto_rekey", params).map_err(|error| error.hinted(&BEGIN_HINTS))?;
    Ok(())
}

/// Waits until the disk has the new key only, and returns the details of the disk. Draws a progress bar on a terminal.
fn wait(name: &str, key: &str, client: &mut Client, out: &Output) -> Result<Value, Error> {
    let style = "{bar:40} {percent:>3}%  {binary_bytes} of {binary_total_bytes}, {eta} left";
    let style = ProgressStyle::with_template(style).expect("the template is valid");
    let bar = if out.json { ProgressBar::hidden() } else { ProgressBar::new(0).with_style(style) };
    loop {
        let mut disk = find(client, name)?;
        let crypto = disk["driver_specific"]["crypto"].take();
        let failed = |why: String| Error::Rotation { disk: name.to_owned(), why };
        match &crypto["rekey"] {
            Value::Null if crypto["key_name"] == key => {
                bar.finish_and_clear();
                return Ok(crypto);
            }
            Value::Null => return Err(failed("the disk was created again".into())),
            rekey if rekey["key_name"] != key => {
                return Err(failed(format!(
                    "the disk is encrypted by key '{}' now",
                    text(rekey, "key_name")
                )));
            }
            rekey => {
                let block = number(&disk, "block_size");
                bar.set_length(number(rekey, "num_blocks").saturating_mul(block));
                bar.set_position(number(rekey, "done_blocks").saturating_mul(block));
                match text(rekey, "state") {
                    "failed" => return Err(failed(text(rekey, "error").to_owned())),
                    "stopped" => return Err(failed("'aryk disk rekey --stop' has stopped it".into())),
                    _ => {}
                }
            }
        }
        watch::wait(INTERVAL);
    }
}

fn stop(name: &str, client: &mut Client, out: &Output) -> Result<(), Error> {
    let stopped = client.call("bdev_crypto_rekey_stop", json!({"name": name}));
    stopped.map_err(|error| error.hinted(&STOP_HINTS))?;
    let disk = find(client, name)?;
    let crypto = &disk["driver_specific"]["crypto"];
    out.print(crypto, || match &crypto["rekey"] {
        Value::Null => format!("All of disk '{name}' is encrypted by key '{}'.", text(crypto, "key_name")),
        rekey => format!(
            "The rotation is stopped at {} %: disk '{name}' needs both keys. To continue: aryk disk rekey {name} {}",
            percent(rekey),
            text(rekey, "key_name")
        ),
    })
}

/// Whole percents of the disk that have the new key.
fn percent(rekey: &Value) -> u64 {
    let (done, all) = (u128::from(number(rekey, "done_blocks")), u128::from(number(rekey, "num_blocks")));
    u64::try_from(done * 100 / all.max(1)).expect("a part of the disk")
}

/// The rotation of a disk in a few words, for a list of disks; `None` if the disk has none.
pub(super) fn note(disk: &Value) -> Option<String> {
    let rekey = disk["driver_specific"]["crypto"].get("rekey")?;
    let state = Some(text(rekey, "state")).filter(|state| *state != "running");
    let state = state.map(|state| format!(", {state}")).unwrap_or_default();
    Some(format!("(new key: {} %{state})", percent(rekey)))
}

/// The rotation of a disk in one line; `None` if the disk has none.
pub(super) fn line(disk: &Value) -> Option<String> {
    let rekey = disk["driver_specific"]["crypto"].get("rekey")?;
    let block = number(disk, "block_size");
    let bytes = |blocks: u64| Size(blocks.saturating_mul(block));
    let (done, all) = (bytes(number(rekey, "done_blocks")), bytes(number(rekey, "num_blocks")));
    let mut line = format!("{} %, {done} of {all} have key '{}'", percent(rekey), text(rekey, "key_name"));
    match text(rekey, "state") {
        "running" => {}
        "failed" => line.push_str(&format!("; failed: {}", text(rekey, "error"))),
        state => line.push_str(&format!("; {state}")),
    }
    if let Some(blocks) = rekey.get("unavailable") {
        let (lba, count) = (number(blocks, "lba"), number(blocks, "num_blocks"));
        line.push_str(&format!("; requests for {count} blocks from block {lba} fail until it continues"));
    }
    Some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(rekey: &Value) -> Value {
        json!({"name": "d", "block_size": 512, "driver_specific": {"crypto": {"key_name": "k1", "rekey": rekey}}})
    }

    #[test]
    fn a_rotation_is_shown() {
        let mut rekey =
            json!({"key_name": "k2", "state": "running", "done_blocks": 2048, "num_blocks": 6145});
        assert_eq!(note(&disk(&rekey)).unwrap(), "(new key: 33 %)");
        assert_eq!(line(&disk(&rekey)).unwrap(), "33 %, 1M of 3M have key 'k2'");
        rekey["state"] = json!("failed");
        rekey["error"] = json!("the base disk failed a write");
        rekey["unavailable"] = json!({"lba": 2048, "num_blocks": 2048});
        assert_eq!(note(&disk(&rekey)).unwrap(), "(new key: 33 %, failed)");
        let line = line(&disk(&rekey)).unwrap();
        assert!(line.contains("failed: the base disk failed a write; requests for 2048 blocks"), "{line}");
        let plain = json!({"name": "d", "driver_specific": {"crypto": {"key_name": "k1"}}});
        assert_eq!((note(&plain), super::line(&plain)), (None, None));
    }

    #[test]
    fn only_disks_with_a_key_are_rotated() {
        refuse_other_kinds(&disk(&Value::Null)).unwrap();
        let luks = json!({"name": "l", "driver_specific": {"luks": {"name": "l"}}});
        assert!(refuse_other_kinds(&luks).unwrap_err().to_string().contains("add-key"));
        let file = json!({"name": "f", "driver_specific": {"uring": {}}});
        assert!(refuse_other_kinds(&file).unwrap_err().to_string().contains("is not encrypted"));
    }
}
