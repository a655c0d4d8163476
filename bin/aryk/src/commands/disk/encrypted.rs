//! Encrypted disks: `aryk disk create NAME … --encrypt KEY` creates two disks, the store of the ciphertext and the encrypted disk
//! on top of it; `aryk disk remove NAME` removes both.

use super::{HINTS, create_call, find, refuse_existing, remove_one, size, warn_of_missing_room};
use crate::absent;
use crate::apply::call::Call;
use crate::cli::CreateArgs;
use crate::client::Client;
use crate::commands::{elements, key, text};
use crate::error::{EXISTS, Error};
use crate::output::Output;
use crate::users::Users;
use serde_json::{Value, json};

const CREATE: &str = "bdev_crypto_create";
/// Hint for a store that holds data.
const CONTENT_HINTS: [(i64, &str); 1] = [(EXISTS, "To encrypt the disk nevertheless: --overwrite")];

/// The name of the disk with the ciphertext of the disk `name`.
fn store_name(name: &str) -> String {
    format!("{name}.store")
}

pub(super) fn create(key: &str, args: &CreateArgs, client: &mut Client, out: &Output) -> Result<(), Error> {
    let (name, store) = (&args.name, store_name(&args.name));
    let (method, mut params) = create_call(args)?;
    for param in ["name", "disk"] {
        if params.get(param).is_some() {
            params[param] = json!(store);
        }
    }
    let mut crypto = json!({"name": name, "base_bdev_name": store, "key_name": key});
    if !args.overwrite {
        crypto["refuse_content"] = json!(true);
    }
    let calls = [Call::new(method, params.clone()), Call::new(CREATE, crypto.clone())];
    absent::refuse_replacing(calls.iter(), client)?;
    refuse_existing(name, client)?;
    client
        .call("accel_crypto_keys_get", json!({"key_name": key}))
        .map_err(|error| error.hinted(&key::HINTS))?;
    client.call(method, params).map_err(|error| error.hinted(args.kind.hints()))?;
    if let Err(error) = client.call(CREATE, crypto) {
        // The file stays, as it does when a disk is removed.
        if let Some((method, params)) = calls[0].undo() {
            client.call(method, params)?;
        }
        return Err(error.hinted(&CONTENT_HINTS).hinted(&HINTS));
    }
    let disk = find(client, name)?;
    let size = size(&disk);
    out.print(&disk, || {
        format!("Disk '{name}' of {size}, encrypted by key '{key}', is ready. Attach it to a VM: aryk attach {name}")
    })?;
    if args.kind.file.is_some() {
        warn_of_missing_room(Some(&store), client);
    }
    Ok(())
}

/// The store of an encrypted disk that [`create`] has created with it, present or absent.
pub(super) fn store_of<'a>(disk: &Value, users: &'a Users) -> Option<&'a Value> {
    let base = match absent::is_absent(disk) {
        true if text(disk, "method") == CREATE => &disk["params"]["base_bdev_name"],
        true => return None,
        false => &disk["driver_specific"]["crypto"]["base_bdev_name"],
    };
    base.as_str().filter(|base| *base == store_name(text(disk, "name"))).and_then(|base| users.any_disk(base))
}

/// Removes the store of an encrypted disk that was just removed, unless the command line names the store too, or the store has
/// other users. Returns the store's name.
pub(super) fn remove_store<'a>(
    disk: &Value,
    named: &[String],
    users: &'a Users,
    client: &mut Client,
) -> Result<Option<&'a str>, Error> {
    let Some(store) = store_of(disk, users) else { return Ok(None) };
    let name = text(store, "name");
    let is_called = |word: &String| {
        absent::is_called(store, word)
            || word == text(store, "uuid")
            || elements(&store["aliases"]).iter().any(|alias| alias == word)
    };
    if named.iter().any(is_called) || !users.of_disk(name, &[text(disk, "name")]).is_empty() {
        return Ok(None);
    }
    match absent::is_absent(store) {
        true => absent::forget(store, client).map_err(|error| error.hinted(&HINTS))?,
        false => _ = remove_one(store, users, client)?,
    }
    Ok(Some(name))
}
