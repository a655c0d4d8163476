//! Options of Ceph's configuration in calls, and the key of a Ceph user among them. Control context.
//!
//! A key comes as an option of the call, or from the keyring by its name (`key_name`). The configuration has the option wrapped
//! only ([`crate::wrapping`]), or the name. No reply, log line or saved configuration has a key.

use super::{CLIENTS, CREATE, REGISTER};
use crate::config::Call;
use crate::methods::crypto::wrapping_key;
use crate::wrapping::id_of;
use crate::{Control, Error, journal};
use aryk_bdev_rbd::{UserKey, option_name};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::PathBuf;
use zeroize::Zeroizing;

/// The option of Ceph that is a key.
pub(super) const KEY: &str = "key";

/// Options of Ceph's configuration, by name; or the same as JSON text.
#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Options {
    Members(BTreeMap<String, String>),
    Text(String),
}

/// Without the options, which may be secret.
impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Options")
    }
}

impl Options {
    fn read(&mut self) -> Result<&mut BTreeMap<String, String>, Error> {
        if let Self::Text(text) = self {
            let text = Zeroizing::new(std::mem::take(text));
            let members = serde_json::from_str(&text).map_err(|_| {
                // The text may contain a key, and is not repeated.
                Error::invalid("options of Ceph must be a JSON object whose members are strings")
            })?;
            *self = Self::Members(members);
        }
        let Self::Members(members) = self else { unreachable!("just parsed") };
        let count = members.len();
        *members =
            std::mem::take(members).into_iter().map(|(name, value)| (option_name(&name), value)).collect();
        if members.len() < count {
            return Err(Error::invalid("an option of Ceph is there twice"));
        }
        Ok(members)
    }
}

/// The call without secrets, and without what only the state store has.
pub(crate) fn for_output(mut call: Call) -> Call {
    let is_ours = matches!(&*call.method, CREATE | REGISTER);
    if let Some(params) = call.params.as_object_mut().filter(|_| is_ours) {
        params.remove(CLIENTS);
        for options in ["config", "config_param"] {
            match params.get_mut(options) {
                Some(Value::Object(options)) => options.retain(|name, _| option_name(name) != KEY),
                Some(Value::String(text)) => *text = without_key(text),
                _ => {}
            }
        }
    }
    call
}

/// Options as JSON text, without a key.
fn without_key(text: &str) -> String {
    let mut options: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
    options.retain(|name, _| option_name(name) != KEY);
    Value::Object(options).to_string()
}

/// The id of the wrapping key that has wrapped a key among the options of a call.
pub(crate) fn wrapped_by(call: &Call) -> Option<&str> {
    let options = call.params.get(if call.method == CREATE { "config" } else { "config_param" })?;
    id_of(options.get(KEY)?.as_str()?)
}

/// The call that names a user's key, and the names of its parameters that do.
pub(super) struct Source<'a> {
    /// The method, and the object that it creates, with which a wrapped key is authenticated.
    pub about: [&'a str; 2],
    pub key_name: Option<&'a str>,
    pub key_file: Option<&'a PathBuf>,
}

/// The options of a call without the key, and the key. In `options`, a key is wrapped from then on.
pub(super) async fn open(
    control: &Control,
    source: Source<'_>,
    options: &mut Option<Options>,
) -> Result<(BTreeMap<String, String>, Option<UserKey>), Error> {
    let [method, object] = source.about;
    let about = ["ceph key", method, object];
    let what = format!("the key of '{object}'");
    let bad = |name: &str, error: &dyn std::fmt::Display| Error::invalid(format!("{name} is {error}"));
    let mut plain = BTreeMap::new();
    let mut key = None;
    if let Some(options) = options {
        let members = options.read()?;
        if let Some(text) = members.get_mut(KEY) {
            let given = Zeroizing::new(std::mem::take(text));
            if source.key_name.is_some() || source.key_file.is_some() {
                return Err(Error::invalid(
                    "a user has one key: give one of `key_file`, `key_name` and the option `key`",
                ));
            }
            let is_wrapped = journal::is_restore() && id_of(&given).is_some();
            let opened = match is_wrapped {
                true => UserKey::new(&control.wrapping.unwrap(&what, &about, &given)?),
                false => UserKey::new(given.as_bytes()),
            };
            let opened = opened.map_err(|error| bad("the option `key`", &error))?;
            *text = match is_wrapped {
                true => given.to_string(),
                false => wrapping_key(control).await?.wrap(&about, opened.as_bytes())?,
            };
            key = Some(opened);
        }
        plain.clone_from(members);
        plain.remove(KEY);
    }
    if let Some(name) = source.key_name {
        if source.key_file.is_some() {
            return Err(Error::invalid("a user has one key: give `key_file` or `key_name`"));
        }
        let secret = control.keyring.secret(name).await?;
        key = Some(
            UserKey::new(&secret).map_err(|error| bad(&format!("key '{name}' of the keyring"), &error))?,
        );
    }
    Ok((plain, key))
}
