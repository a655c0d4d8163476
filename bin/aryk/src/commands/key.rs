//! `aryk key …`: keys of encrypted disks.
//!
//! A new key is random, unless a file has it. It goes to the daemon and nowhere else: no output has key material.

use super::{elements, text};
use crate::absent;
use crate::apply::call::KEY;
use crate::cli::{KeyCommand, KeyCreateArgs};
use crate::client::Client;
use crate::error::{BUSY, EXISTS, Error, NO_FILE};
use crate::output::Output;
use crate::users::Users;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use zeroize::Zeroizing;

/// Bytes of a file that are read: the longest key in hexadecimal digits, and a line's end.
const FILE_MAX: u64 = 2 * 64 + 2;

/// Hints for a key that cannot be created, found or deleted.
pub const HINTS: [(i64, &str); 3] = [
    (EXISTS, "Choose another name; 'aryk key list' shows the keys."),
    (NO_FILE, "'aryk key list' shows the keys; to create one: aryk key create NAME."),
    (BUSY, "'aryk key list' shows the disks that use it."),
];

const NONE: &str = "There are no keys. Create one: aryk key create NAME";

/// The prefix that the daemon's names of absent keys have.
const ABSENT_PREFIX: &str = "crypto key ";

pub fn run(command: &KeyCommand, client: &mut Client, out: &Output) -> Result<(), Error> {
    match command {
        KeyCommand::Create(args) => create(args, client, out),
        KeyCommand::List => list(client, out),
        KeyCommand::Delete { names } => delete(names, client, out),
    }
}

fn create(args: &KeyCreateArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let bytes = match &args.from_file {
        Some(path) if path == Path::new("-") => read_key(&mut io::stdin().lock(), "the standard input")?,
        Some(path) => {
            let name = path.display().to_string();
            let mut file = File::open(path).map_err(|error| Error::File(format!("{name}: {error}")))?;
            read_key(&mut file, &name)?
        }
        None => random_key(args.bits.map_or(256, |bits| bits.number()) / 8 * 2)?,
    };
    let (key, key2) = bytes.split_at(bytes.len() / 2);
    if key == key2 {
        return Err(Error::File("the two halves of the key are equal, which weakens AES-XTS".into()));
    }
    let mode = args.tweak_mode.map(|mode| json!(mode.name()));
    let params = super::object([
        ("name", Some(json!(args.name))),
        ("cipher", Some(json!("AES_XTS"))),
        ("key", Some(json!(*hex(key)))),
        ("key2", Some(json!(*hex(key2)))),
        ("tweak_mode", mode),
    ]);
    client.call(KEY, params).map_err(|error| error.hinted(&HINTS))?;
    let keys = client.call("accel_crypto_keys_get", json!({"key_name": args.name}))?;
    let (name, bits) = (&args.name, key.len() * 8);
    out.print(&keys[0], || {
        format!("Key '{name}' of {bits} bits is ready. Encrypt a disk by it: aryk disk create DISK … --encrypt {name}")
    })
}

fn random_key(len: u64) -> Result<Zeroizing<Vec<u8>>, Error> {
    let mut bytes = Zeroizing::new(Vec::with_capacity(usize::try_from(len).expect("a key is short")));
    File::open("/dev/urandom")?.take(len).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A key of 32 or 64 bytes, or of twice as many hexadecimal digits.
fn read_key(from: &mut impl Read, name: &str) -> Result<Zeroizing<Vec<u8>>, Error> {
    // Enough room, so that no copy is left behind by a reallocation.
    let mut content = Zeroizing::new(Vec::with_capacity(FILE_MAX as usize + 1));
    let read = from.take(FILE_MAX + 1).read_to_end(&mut content);
    read.map_err(|error| Error::File(format!("{name}: {error}")))?;
    let digits = content.trim_ascii();
    if matches!(digits.len(), 64 | 128) && digits.iter().all(u8::is_ascii_hexdigit) {
        let digit = |byte: u8| char::from(byte).to_digit(16).expect("a hexadecimal digit") as u8;
        let pairs = digits.as_chunks::<2>().0.iter();
        return Ok(Zeroizing::new(pairs.map(|&[high, low]| digit(high) << 4 | digit(low)).collect()));
    }
    match content.len() {
        32 | 64 => Ok(content),
        _ => Err(Error::File(format!(
            "{name} is no key: both keys of AES-XTS together have 32 or 64 bytes, or 64 or 128 hexadecimal digits"
        ))),
    }
}

fn hex(bytes: &[u8]) -> Zeroizing<String> {
    let mut text = Zeroizing::new(String::with_capacity(2 * bytes.len()));
    for byte in bytes {
        write!(text, "{byte:02x}").expect("a string takes any text");
    }
    text
}

/// All keys, each with the disks that use it; absent keys have a reason.
fn read_all(users: &Users, client: &mut Client) -> Result<Vec<Value>, Error> {
    let keys = client.call("accel_crypto_keys_get", json!({}))?;
    let absent = users.absent.iter().filter(|absent| text(absent, "method") == KEY).map(|absent| {
        let mut key = absent["params"].clone();
        key["state"] = json!(absent::ABSENT);
        key["why"] = absent["why"].clone();
        key
    });
    let mut all: Vec<Value> = elements(&keys).to_vec();
    all.iter_mut().for_each(|key| key["state"] = json!(absent::PRESENT));
    all.extend(absent);
    for key in &mut all {
        key["used_by"] = json!(disks_with(text(key, "name"), users));
    }
    Ok(all)
}

/// The disks that use a key, present or absent; a disk whose key is being replaced uses both keys.
fn disks_with<'a>(key: &str, users: &'a Users) -> Vec<&'a str> {
    let has = |of: &Value| of["key_name"] == key || of["rekey"]["key_name"] == key;
    let present = elements(&users.disks).iter().filter(|disk| has(&disk["driver_specific"]["crypto"]));
    let absent = users.absent.iter().filter(|disk| absent::is_disk(disk) && has(&disk["params"]));
    present.chain(absent).map(|disk| text(disk, "name")).collect()
}

fn list(client: &mut Client, out: &Output) -> Result<(), Error> {
    let users = Users::read(client)?;
    let keys = read_all(&users, client)?;
    out.print(&json!(keys), || {
        if keys.is_empty() {
            return NONE.into();
        }
        let row = |key: &Value| {
            let used_by: Vec<_> = elements(&key["used_by"]).iter().filter_map(Value::as_str).collect();
            let mode = if key["tweak_mode"].is_null() { "SIMPLE_LBA" } else { text(key, "tweak_mode") };
            vec![
                text(key, "name").to_owned(),
                text(key, "cipher").to_owned(),
                mode.to_owned(),
                if used_by.is_empty() { "-".into() } else { used_by.join(", ") },
            ]
        };
        let columns = [("NAME", false), ("CIPHER", false), ("TWEAK MODE", false), ("USED BY", false)];
        let (present, missing): (Vec<&Value>, Vec<&Value>) =
            keys.iter().partition(|key| !absent::is_absent(key));
        let table = match present.is_empty() {
            true => String::new(),
            false => out.table(&columns, present.into_iter().map(row)),
        };
        let why: Vec<_> = missing.iter().map(|key| absent_key(key, users.absent.as_slice())).collect();
        absent::append_table(table, &why.iter().collect::<Vec<_>>(), out)
    })
}

/// An absent key as an absent object, with its own name.
fn absent_key(key: &Value, absent: &[Value]) -> Value {
    let name = format!("{ABSENT_PREFIX}{}", text(key, "name"));
    let mut object = absent.iter().find(|object| text(object, "name") == name).cloned().unwrap_or_default();
    object["name"] = key["name"].clone();
    object
}

/// Deletes keys. All are checked before the first is deleted.
fn delete(names: &[String], client: &mut Client, out: &Output) -> Result<(), Error> {
    let users = Users::read(client)?;
    let keys = read_all(&users, client)?;
    let mut used = Vec::new();
    for name in names {
        if !keys.iter().any(|key| text(key, "name") == name) {
            let (code, message) = (NO_FILE, "No such file or directory".into());
            let detail = Some(format!("there is no key '{name}'"));
            return Err(Error::Refused { code, message, detail, hint: None }.hinted(&HINTS));
        }
        let disks = disks_with(name, &users);
        used.extend(disks.into_iter().map(|disk| format!("disk '{disk}' uses key '{name}'")));
    }
    let hint = "Remove the disk first, with 'aryk disk remove': without its key, its data cannot be read.";
    if let Some(error) = Error::in_use("a key is in use".into(), used, hint, Vec::new()) {
        return Err(error);
    }
    for name in names {
        client
            .call("accel_crypto_key_destroy", json!({"key_name": name}))
            .map_err(|error| error.hinted(&HINTS))?;
    }
    out.print(&json!(names), || {
        let lines: Vec<_> = names.iter().map(|name| format!("Key '{name}' is deleted.")).collect();
        lines.join("\n")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: &[u8]) -> Result<Vec<u8>, Error> {
        read_key(&mut &*content, "f").map(|key| key.to_vec())
    }

    #[test]
    fn keys_in_files() {
        assert_eq!(read(&[7; 32]).unwrap(), [7; 32]);
        assert_eq!(read(&[0xff; 64]).unwrap(), [0xff; 64]);
        assert_eq!(read(format!("{}\n", "0a".repeat(32)).as_bytes()).unwrap(), [10; 32]);
        assert_eq!(read("AB".repeat(64).as_bytes()).unwrap(), [0xab; 64]);
        for wrong in [&b""[..], &[7; 31], &[7; 33], &[7; 65], "0a".repeat(31).as_bytes(), &[b'a'; 200]] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(error.starts_with("f is no key: "), "{error}");
        }
        let text = "0a".repeat(63) + "xy";
        assert!(!read(text.as_bytes()).unwrap_err().to_string().contains("0a0a"));
    }

    #[test]
    fn random_keys_have_their_length() {
        for len in [32, 64] {
            let key = random_key(len).unwrap();
            assert_eq!(key.len() as u64, len);
            assert_ne!(key, random_key(len).unwrap());
        }
        assert_eq!(*hex(&[0, 0xa5]), "00a5");
    }
}
