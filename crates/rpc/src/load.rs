//! Loads configuration files: makes the calls of a `save_config` output, of SPDK or Aryk, one after another. Used by
//! `load_config`, and for the file with which the daemon starts. Control context.
//!
//! The daemon may have restored objects from the state store before it loads the file. Objects that both contain are compared by
//! meaning: an equal object is left as it is, and a different one is an error, since the daemon cannot know which of them is
//! intended.

use crate::config::{Call, Subsystem};
use crate::methods::{crypto, keyring, rbd};
use crate::{Control, Error, Methods, restore};
use aryk_reactor::CoreSet;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::fmt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Parameters of `load_config`: the output of `save_config`. Other members of the file, such as the number of cores, are ignored.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct LoadConfig {
    /// Subsystems, as in the output of `save_config`.
    #[schemars(with = "Vec<crate::methods::SavedSubsystem>")]
    subsystems: Vec<LoadSubsystem>,
}

#[derive(Debug, Deserialize)]
struct LoadSubsystem {
    #[serde(rename = "subsystem")]
    name: String,
    /// SPDK writes `null` for a subsystem without configuration.
    config: Option<Vec<LoadElement>>,
}

/// A call; or several, which SPDK makes at the same time, and Aryk one after another.
#[derive(Debug)]
struct LoadElement(Vec<LoadCall>);

impl<'de> Deserialize<'de> for LoadElement {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let element = Box::<RawValue>::deserialize(from)?;
        let calls = match element.get().starts_with('[') {
            true => serde_json::from_str(element.get()),
            false => serde_json::from_str(element.get()).map(|call| vec![call]),
        };
        calls.map(Self).map_err(D::Error::custom)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoadCall {
    method: String,
    params: Option<Box<RawValue>>,
}

/// Without the parameters, which may be secret.
impl fmt::Debug for LoadCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadCall").field("method", &self.method).finish_non_exhaustive()
    }
}

impl LoadConfig {
    /// The calls, each with its position for error messages.
    fn into_calls(self) -> impl Iterator<Item = (String, LoadCall)> {
        self.subsystems.into_iter().flat_map(|LoadSubsystem { name, config }| {
            let calls = config.into_iter().flatten().flat_map(|element| element.0);
            calls.map(move |call| (format!("{} of subsystem '{name}'", call.method), call))
        })
    }
}

/// Makes all calls in order, up to the first that fails: objects created before it stay.
pub(crate) async fn load_config(methods: &Methods<Control>, p: LoadConfig) -> Result<bool, Error> {
    for (place, call) in p.into_calls() {
        methods.call(&call.method, call.params).await.map_err(|error| error.at(&place))?;
    }
    Ok(true)
}

/// The configuration file with which the daemon starts.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    config: LoadConfig,
}

/// Why a file is not loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file cannot be read.
    #[error("{}: {source}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file is not a configuration.
    #[error("{} is no configuration as save_config writes it: {source}", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: serde_json::Error,
    },
    /// A call of the file has failed.
    #[error("{}: {error}", .path.display())]
    Failed {
        /// The file.
        path: PathBuf,
        /// The failed call, and the cause.
        error: Error,
    },
}

/// Results of a file's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Loaded {
    /// Calls that succeeded.
    pub made: usize,
    /// Calls whose objects existed already, or are being retried.
    pub there: usize,
    /// Calls that failed and were skipped.
    pub failed: usize,
}

impl File {
    /// Reads and parses the file.
    ///
    /// # Errors
    /// [`LoadError`].
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        let path = path.to_owned();
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(source) => return Err(LoadError::Unreadable { path, source }),
        };
        match serde_json::from_str(&text) {
            Ok(config) => Ok(Self { path, config }),
            Err(source) => Err(LoadError::Malformed { path, source }),
        }
    }

    /// Makes the file's calls, except those whose objects all exist, up to the first that fails, unless failed calls are to be
    /// skipped. Needs a tokio `LocalSet`.
    ///
    /// # Errors
    /// [`LoadError::Failed`].
    pub async fn load(
        self,
        control: &Rc<Control>,
        methods: &Rc<Methods<Control>>,
        leave_out: bool,
    ) -> Result<Loaded, LoadError> {
        let mut loaded = Loaded::default();
        for (place, call) in self.config.into_calls() {
            let mut outcome = make(control, methods, &call).await;
            if outcome.is_err() && !control.config.absent().is_empty() {
                // The call may need an object that the state store could not create again, and which may have waited for objects
                // of the file.
                restore::round(control, methods).await.report(control);
                outcome = make(control, methods, &call).await;
            }
            match outcome.map_err(|error| error.at(&place)) {
                Ok(Made::Now) => loaded.made += 1,
                Ok(Made::Before) => loaded.there += 1,
                Err(error) if leave_out => {
                    tracing::error!(file = %self.path.display(), %error, "a call of the file has failed and is skipped");
                    loaded.failed += 1;
                }
                Err(error) => return Err(LoadError::Failed { path: self.path, error }),
            }
        }
        Ok(loaded)
    }
}

/// When the object of a call was created.
enum Made {
    Now,
    Before,
}

/// Makes a call, unless its object is known.
async fn make(control: &Control, methods: &Methods<Control>, call: &LoadCall) -> Result<Made, Error> {
    if is_known(control, call)? {
        return Ok(Made::Before);
    }
    methods.call_of_file(&call.method, call.params.clone()).await.map(|_| Made::Now)
}

/// Parameters that are ignored in the comparison; `delay` has no effect after a controller's start, and a size is only the
/// initial size of a new file.
const IGNORED: [&str; 11] = [
    "fallocate",
    "nowait",
    "transport",
    "packed_ring",
    "exclusive",
    "numa_id",
    "md_interleave",
    "dif_is_head_of_md",
    "dif_pi_format",
    "delay",
    "size",
];

/// Whether the object of the call exists already, or is being retried because the state store has it.
///
/// # Errors
/// `EEXIST`: such an object exists or is stored, with other parameters.
fn is_known(control: &Control, call: &LoadCall) -> Result<bool, Error> {
    let params: Value = match &call.params {
        Some(params) => serde_json::from_str(params.get()).map_err(|e| Error::Undecoded(e.to_string()))?,
        None => return Ok(false),
    };
    if call.method == "vhost_start_scsi_controller" {
        let delay =
            params["ctrlr"].as_str().and_then(|name| control.config.noted(Subsystem::VhostScsi, name));
        return Ok(delay.is_some_and(|noted| noted.params["delay"] == false));
    }
    let Some((object, noted)) = noted(control, &call.method, &params) else { return Ok(false) };
    let exists = |how: String| {
        let detail = format!(
            "'{object}' is there already, by {} of the state store or earlier in the file, with other parameters: {how}. Remove the unwanted one",
            noted.method
        );
        Error::errno(Errno::EXIST, detail)
    };
    if noted.method != call.method {
        return Err(exists(format!("the call is {}", call.method)));
    }
    let differences = differences(control, &call.method, &params, &noted.params);
    if differences.is_empty() { Ok(true) } else { Err(exists(differences.join(", "))) }
}

/// The noted call of the object that a call creates, and the object's name.
fn noted(control: &Control, method: &str, params: &Value) -> Option<(String, Call)> {
    let text = |param: &str| params[param].as_str();
    let find = |subsystem, object: String| {
        let noted = control.config.noted(subsystem, &object)?;
        Some((object, noted))
    };
    match method {
        "bdev_error_create" => find(Subsystem::Bdev, format!("EE_{}", text("base_name")?)),
        "bdev_split_create" => find(Subsystem::Bdev, format!("{}p0", text("base_bdev")?)),
        crate::methods::nvme::ATTACH => find(Subsystem::Nvme, text("name")?.to_owned()),
        crate::methods::nvme::START_DISCOVERY => find(Subsystem::Discovery, text("name")?.to_owned()),
        crate::methods::nvme::START_MDNS => find(Subsystem::Mdns, text("name")?.to_owned()),
        crypto::CREATE_KEY => find(Subsystem::Daemon, crypto::object(text("name")?)),
        keyring::ADD_FILE => find(Subsystem::Keyring, keyring::object(text("name")?)),
        "bdev_qos_group_create" => find(Subsystem::Qos, crate::methods::group_object(text("name")?)),
        "vhost_create_blk_controller" => find(Subsystem::VhostBlk, text("ctrlr")?.to_owned()),
        "vhost_create_scsi_controller" => find(Subsystem::VhostScsi, text("ctrlr")?.to_owned()),
        "vhost_scsi_controller_add_target" => {
            let of = |number: i64| find(Subsystem::VhostScsi, format!("{}/{number}", text("ctrlr")?));
            match params["scsi_target_num"].as_i64()? {
                // Any target: the one that has this disk.
                -1 => {
                    (0..8).filter_map(of).find(|(_, noted)| noted.params["bdev_name"] == params["bdev_name"])
                }
                number => of(number),
            }
        }
        _ if method.starts_with("nvmf_") => {
            find(Subsystem::Nvmf, crate::methods::nvmf::object(method, params)?)
        }
        _ if method.starts_with("bdev_") && method.ends_with("_create") => {
            find(Subsystem::Bdev, text("name")?.to_owned())
        }
        _ => None,
    }
}

/// The differences between a call's parameters and noted ones, each as text. A parameter at its default is treated as if it were
/// omitted.
fn differences(control: &Control, method: &str, given: &Value, noted: &Value) -> Vec<String> {
    let empty = Map::new();
    let [given, noted] = &[given, noted].map(|params| {
        let call = Call { method: method.to_owned().into(), params: params.clone() };
        rbd::for_output(call).params
    });
    let (given, noted) = (given.as_object().unwrap_or(&empty), noted.as_object().unwrap_or(&empty));
    let value = |of: &Map<String, Value>, param: &str| of.get(param).cloned().unwrap_or(Value::Null);
    let mut params: Vec<&String> =
        given.keys().chain(noted.keys().filter(|key| !given.contains_key(*key))).collect();
    params.retain(|param| {
        let (is, to) = (value(noted, param), value(given, param));
        // The daemon has chosen the value of an omitted parameter.
        let is_chosen =
            to.is_null() && ["uuid", "block_size", "physical_block_size", "serial"].contains(&param.as_str());
        let is_implied = **param == "physical_block_size" && is.is_null() && to == value(given, "block_size");
        let any_target = **param == "scsi_target_num" && to == -1;
        // The configuration has both keys in one parameter, wrapped.
        let is_same_key =
            crypto::is_secret(method, param) && crypto::has_same_material(control, given, noted);
        let is_fine =
            IGNORED.contains(&param.as_str()) || is_chosen || is_implied || any_target || is_same_key;
        !(is_fine || is_same(control, param, &to, &is))
    });
    let line = |param: &String| {
        if crypto::is_secret(method, param) {
            return format!("{param} is another one");
        }
        format!("{param} is {}, but {} in the file", shown(&value(noted, param)), shown(&value(given, param)))
    };
    params.into_iter().map(line).collect()
}

fn shown(value: &Value) -> String {
    if value.is_null() { "not given".into() } else { value.to_string() }
}

fn is_same(control: &Control, param: &str, a: &Value, b: &Value) -> bool {
    let disk = |name: &str| control.disks.find(name).ok().map(|disk| disk.name().to_owned());
    let are_one_disk = |(a, b)| disk(a).is_some() && disk(a) == disk(b);
    let is_disk = ["base_bdev_name", "base_bdev", "base_name", "dev_name", "bdev_name"].contains(&param);
    means_the_same(param, a, b) || (is_disk && a.as_str().zip(b.as_str()).is_some_and(are_one_disk))
}

/// Whether two values of a parameter mean the same, however they are written. `aryk apply` compares in the same way: both are
/// tested with `data/comparison.json`.
fn means_the_same(param: &str, a: &Value, b: &Value) -> bool {
    let number = |value: &Value| match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    };
    let texts = a.as_str().zip(b.as_str());
    a == b
        || (is_default(param, a) && is_default(param, b))
        || match param {
            "cpumask" => texts
                .is_some_and(|(a, b)| a.parse::<CoreSet>().is_ok_and(|a| Ok(a) == b.parse().map_err(drop))),
            "uuid" => texts.is_some_and(|(a, b)| a.eq_ignore_ascii_case(b)),
            // Some clients write numbers as strings; two strings are not compared as numbers.
            _ => texts.is_none() && number(a).is_some() && number(a) == number(b),
        }
}

fn is_default(param: &str, value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => {
            let defaults = [("enospc", "error"), ("lock", "always"), ("tweak_mode", "SIMPLE_LBA")];
            text.is_empty() || defaults.contains(&(param, text))
        }
        Value::Bool(true) | Value::Array(_) | Value::Object(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_compared_as_aryk_apply_does() {
        let known: Value = serde_json::from_str(include_str!("../data/comparison.json")).unwrap();
        // `aryk apply` handles a file's size by growing the disk.
        let compared_there = |param: &&&str| **param != "size";
        assert_eq!(
            known["unheeded"],
            serde_json::json!(IGNORED.iter().filter(compared_there).collect::<Vec<_>>())
        );
        for (member, same) in [("same", true), ("different", false)] {
            for case in known[member].as_array().unwrap() {
                let param = case[0].as_str().unwrap();
                assert_eq!(means_the_same(param, &case[1], &case[2]), same, "{case}");
                assert_eq!(means_the_same(param, &case[2], &case[1]), same, "{case}, swapped");
            }
        }
    }
}
