//! Calls that create disks and controllers: the object that a call creates, the objects that it needs, the call that undoes it,
//! and the comparison of two calls.

use crate::size::Size;
use aryk_reactor::CoreSet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// A call of the daemon, in the form of `save_config` and of SPDK's configuration files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Call {
    pub method: String,
    #[serde(default, skip_serializing_if = "Map::is_empty", deserialize_with = "or_empty")]
    pub params: Map<String, Value>,
}

/// SPDK's files contain `null` too.
fn or_empty<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Map<String, Value>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// The kind of object that a call creates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Disk,
    Controller,
    /// A disk's place in a SCSI controller.
    Target,
    /// No object with a name: a setting.
    Setting,
}

impl Kind {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Controller => "controller",
            Self::Target => "target",
            Self::Setting => "setting",
        }
    }
}

/// A method that creates an object.
struct Maker {
    method: &'static str,
    kind: Kind,
    /// The parameter with the object's name.
    name: &'static str,
    /// Prefix and suffix of the name.
    around: (&'static str, &'static str),
    /// The parameter with the name of the base.
    base: Option<&'static str>,
    delete: &'static str,
}

const fn disk(method: &'static str, delete: &'static str) -> Maker {
    Maker { method, kind: Kind::Disk, name: "name", around: ("", ""), base: None, delete }
}

const fn controller(method: &'static str) -> Maker {
    Maker { kind: Kind::Controller, name: "ctrlr", ..disk(method, "vhost_delete_controller") }
}

const MAKERS: [Maker; 14] = [
    disk("bdev_uring_create", "bdev_uring_delete"),
    disk("bdev_aio_create", "bdev_aio_delete"),
    disk("bdev_malloc_create", "bdev_malloc_delete"),
    disk("bdev_null_create", "bdev_null_delete"),
    disk("bdev_rbd_create", "bdev_rbd_delete"),
    Maker { base: Some("base_bdev_name"), ..disk("bdev_passthru_create", "bdev_passthru_delete") },
    Maker { base: Some("base_bdev_name"), ..disk("bdev_crypto_create", "bdev_crypto_delete") },
    Maker { base: Some("base_bdev_name"), ..disk("bdev_luks_create", "bdev_luks_delete") },
    Maker { base: Some("base_bdev_name"), ..disk("bdev_delay_create", "bdev_delay_delete") },
    Maker {
        name: "base_name",
        around: ("EE_", ""),
        base: Some("base_name"),
        ..disk("bdev_error_create", "bdev_error_delete")
    },
    // `bdev_split_create` creates several disks. It stands for all of them under the name of the first.
    Maker {
        name: "base_bdev",
        around: ("", "p0"),
        base: Some("base_bdev"),
        ..disk(SPLIT, "bdev_split_delete")
    },
    Maker { base: Some("dev_name"), ..controller(CONTROLLER) },
    controller(SCSI_CONTROLLER),
    Maker {
        kind: Kind::Target,
        base: Some("bdev_name"),
        delete: "vhost_scsi_controller_remove_target",
        ..controller(TARGET)
    },
];

/// The method that creates a controller of one disk.
pub const CONTROLLER: &str = "vhost_create_blk_controller";
/// The method that creates a controller with hot-plugged disks.
const SCSI_CONTROLLER: &str = "vhost_create_scsi_controller";
/// The call that adds a disk as a target of a SCSI controller.
pub const TARGET: &str = "vhost_scsi_controller_add_target";
/// The call that creates the socket of a SCSI controller whose start was delayed until its targets exist.
pub const START: &str = "vhost_start_scsi_controller";
const SPLIT: &str = "bdev_split_create";
/// The call that creates a key of encrypted disks.
pub const KEY: &str = "accel_crypto_key_create";
/// The parameter with a target's number, and the number of targets.
pub const TARGET_NUMBER: &str = "scsi_target_num";
const TARGETS: i64 = 8;

/// Parameters that a saved call has only if they were given: absence means not given.
const UNSET_BY_ABSENCE: [&str; 13] = [
    "plain64",
    "pass_discards",
    "key_slot",
    "readonly",
    "enospc",
    "lock",
    "cpumask",
    "num_queues",
    "connect",
    "transport_id",
    "socket_mode",
    "socket_owner",
    "socket_group",
];

/// Parameters that the daemon accepts and that do not change the object. `delay` has no meaning once a controller is started,
/// which is a call of its own.
pub(super) const IGNORED: [&str; 10] = [
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
];

/// Values that equal an absent parameter.
const DEFAULTS: [(&str, &str); 3] = [("enospc", "error"), ("lock", "always"), ("tweak_mode", "SIMPLE_LBA")];

impl Call {
    pub fn new(method: &str, params: Value) -> Self {
        let params = match params {
            Value::Object(params) => params,
            _ => Map::new(),
        };
        Self { method: method.to_owned(), params }
    }

    fn maker(&self) -> Option<&'static Maker> {
        MAKERS.iter().find(|maker| maker.method == self.method)
    }

    pub fn kind(&self) -> Kind {
        self.maker().map_or(Kind::Setting, |maker| maker.kind)
    }

    pub fn text(&self, param: &str) -> Option<&str> {
        self.params.get(param).and_then(Value::as_str)
    }

    /// The name of the object; `None` if the call creates no object, or leaves the name to the daemon.
    pub fn name(&self) -> Option<String> {
        let maker = self.maker()?;
        let name = self.text(maker.name)?;
        if maker.kind == Kind::Target {
            return Some(format!("{name}/{}", self.target()?));
        }
        Some(format!("{}{name}{}", maker.around.0, maker.around.1))
    }

    /// The disk that the call needs.
    pub fn base(&self) -> Option<&str> {
        self.text(self.maker()?.base?)
    }

    /// The SCSI controller that the call needs.
    pub fn owner(&self) -> Option<&str> {
        self.text("ctrlr").filter(|_| matches!(self.kind(), Kind::Target | Kind::Setting))
    }

    /// Whether the call must come after `other` of the same file.
    pub fn needs(&self, other: &Self) -> bool {
        match other.kind() {
            Kind::Disk => other.is_called(self.base()) || other.is_called(self.set_disk()),
            Kind::Controller => self.owner().is_some_and(|owner| other.text("ctrlr") == Some(owner)),
            Kind::Target => self.method == START && self.owner() == other.owner(),
            Kind::Setting => false,
        }
    }

    fn target(&self) -> Option<i64> {
        self.params.get(TARGET_NUMBER).and_then(Value::as_i64)
    }

    /// Whether the call creates a controller whose socket waits for [`START`].
    pub fn is_delayed(&self) -> bool {
        self.method == SCSI_CONTROLLER && self.params.get("delay") == Some(&Value::Bool(true))
    }

    /// Whether the call creates a SCSI controller.
    pub fn is_scsi(&self) -> bool {
        self.method == SCSI_CONTROLLER
    }

    /// Whether the object that the call creates has `name` as its name or uuid.
    pub fn is_called(&self, name: Option<&str>) -> bool {
        let Some(name) = name else { return false };
        let is_uuid = |uuid: &str| uuid.eq_ignore_ascii_case(name);
        self.name().as_deref() == Some(name)
            || self.text("uuid").is_some_and(is_uuid)
            || (self.method == SPLIT && self.is_part(name))
    }

    /// Whether `name` is one of the split parts that the call creates.
    fn is_part(&self, name: &str) -> bool {
        let part = self.base().and_then(|base| name.strip_prefix(base)?.strip_prefix('p'));
        let part = part.and_then(|number| number.parse::<u64>().ok());
        part.zip(number(self.value("split_count"))).is_some_and(|(part, parts)| part < parts)
    }

    /// A summary of the object.
    pub fn summary(&self) -> String {
        if let Some(summary) = self.setting_summary() {
            return summary;
        }
        let what = match self.method.as_str() {
            "bdev_uring_create" | "bdev_aio_create" => self.text("filename").unwrap_or_default().to_owned(),
            "bdev_malloc_create" => "in memory".into(),
            "bdev_null_create" => "null".into(),
            CONTROLLER | TARGET => format!("of disk {}", self.base().unwrap_or_default()),
            SCSI_CONTROLLER => "SCSI".into(),
            START => self.owner().unwrap_or_default().to_owned(),
            // The key itself is in no output.
            KEY => format!("key {}", self.text("name").unwrap_or_default()),
            _ => match self.base() {
                Some(base) => format!("{} on {base}", self.method),
                None => Value::Object(self.params.clone()).to_string(),
            },
        };
        match self.size() {
            Some(bytes) => format!("{what}, {}", Size(bytes)),
            None => what,
        }
    }

    /// The call that undoes this one.
    pub fn undo(&self) -> Option<(&'static str, Value)> {
        let maker = self.maker()?;
        let params = match maker.kind {
            Kind::Controller => json!({"ctrlr": self.name()?}),
            Kind::Target => json!({"ctrlr": self.owner()?, TARGET_NUMBER: self.target()?}),
            Kind::Disk if maker.method == SPLIT => json!({"base_bdev": self.base()?}),
            Kind::Disk | Kind::Setting => json!({"name": self.name()?}),
        };
        Some((maker.delete, params))
    }

    /// Whether the data survives when the object is recreated.
    pub fn keeps_data(&self) -> bool {
        self.method != "bdev_malloc_create"
    }

    /// This call for a disk that replaces the one created by `old`: with its uuid, by which a VM identifies the disk, if this
    /// call has none.
    pub fn in_place_of(&self, old: &Self) -> Self {
        let mut call = self.clone();
        let takes_one = call.kind() == Kind::Disk && call.method != SPLIT && call.text("uuid").is_none();
        if let Some(uuid) = old.params.get("uuid").filter(|_| takes_one) {
            call.params.insert("uuid".into(), uuid.clone());
        }
        call
    }

    /// The requested size of the disk in bytes.
    pub fn size(&self) -> Option<u64> {
        let number = |param: &str| number(self.value(param));
        match self.method.as_str() {
            "bdev_uring_create" | "bdev_aio_create" => number("size"),
            _ => number("num_blocks")?.checked_mul(number("block_size")?),
        }
    }

    /// Whether the disk can grow while it is in use.
    pub fn can_grow(&self) -> bool {
        matches!(self.method.as_str(), "bdev_uring_create" | "bdev_aio_create")
    }

    /// The differences between the object of `existing`, a call of the same kind, and the object of this call, except for a size
    /// that can change. One text per difference.
    pub fn differences(&self, existing: &Self) -> Vec<String> {
        if self.method != existing.method {
            return vec![format!("{} instead of {}", self.method, existing.method)];
        }
        let is_compared = |param: &str| !(IGNORED.contains(&param) || (self.can_grow() && param == "size"));
        let mut found = Vec::new();
        for (param, to) in self.params.iter().filter(|(param, to)| is_compared(param) && !to.is_null()) {
            let is = existing.value(param);
            let is_chosen = is.is_null() && self.is_implied(param);
            if !(is_chosen || means_the_same(param, is, to)) {
                found.push(format!("{param}: {} to be {}", shown(param, is), shown(param, to)));
            }
        }
        for param in UNSET_BY_ABSENCE {
            let is = existing.value(param);
            if self.value(param).is_null() && !is_default(param, is) {
                found.push(format!("{param}: {} to be unset", shown(param, is)));
            }
        }
        found
    }

    /// Whether the parameter equals the value that applies without it.
    fn is_implied(&self, param: &str) -> bool {
        param == "physical_block_size" && means_the_same(param, self.value(param), self.value("block_size"))
    }

    /// Whether `saved` has each parameter of this call with an equal value, in any notation.
    pub fn is_within(&self, saved: &Self) -> bool {
        let is_so = |(param, value): (&String, &Value)| means_the_same(param, value, saved.value(param));
        self.method == saved.method && self.params.iter().all(is_so)
    }

    /// Whether both calls create the same object.
    pub fn is_same(&self, other: &Self) -> bool {
        self.differences(other).is_empty() && other.differences(self).is_empty()
    }

    /// The call without key material.
    pub fn without_key(&self) -> Self {
        let mut call = self.clone();
        call.params.retain(|name, _| name != "key" && name != "key2");
        call
    }

    /// The call without null parameters, because TOML has no null.
    pub fn without_nulls(&self) -> Self {
        let mut call = self.clone();
        call.params.retain(|_, value| !value.is_null());
        call
    }

    /// A parameter's value; null if it is absent.
    fn value(&self, param: &str) -> &Value {
        self.params.get(param).unwrap_or(&Value::Null)
    }
}

/// Assigns a number to each target of the file that leaves the number to the daemon: the number that it has, or a free one.
pub fn number_targets<'a>(wanted: &mut [Call], existing: impl Iterator<Item = &'a Call> + Clone) {
    let of = |call: &Call, owner: Option<&str>| call.method == TARGET && call.owner() == owner;
    for index in 0..wanted.len() {
        if wanted[index].method != TARGET || wanted[index].target() != Some(-1) {
            continue;
        }
        let call = wanted[index].clone();
        let others = || existing.clone().filter(|e| of(e, call.owner()));
        let is_asked = |number: i64| wanted.iter().any(|w| of(w, call.owner()) && w.target() == Some(number));
        let has_it = others().filter(|e| e.base() == call.base()).filter_map(Call::target);
        let free = (0..TARGETS).filter(|&number| !others().any(|e| e.target() == Some(number)));
        if let Some(number) = has_it.chain(free).find(|&number| !is_asked(number)) {
            wanted[index].params.insert(TARGET_NUMBER.into(), json!(number));
        }
    }
}

/// A value in one canonical notation.
fn shown(param: &str, value: &Value) -> String {
    match value {
        Value::Null => "unset".into(),
        Value::String(text) if param == "uuid" => text.to_ascii_lowercase(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Whether two values of a parameter are equal in any notation. The daemon compares by the same rules: `comparison.json` tests
/// both.
pub(super) fn means_the_same(param: &str, a: &Value, b: &Value) -> bool {
    let float = |value: &Value| match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    };
    let cores = |text: &str| text.parse::<CoreSet>().ok();
    a == b
        || (is_default(param, a) && is_default(param, b))
        || match (param, a.as_str().zip(b.as_str())) {
            ("cpumask", Some((a, b))) => cores(a).is_some() && cores(a) == cores(b),
            ("uuid", Some((a, b))) => a.eq_ignore_ascii_case(b),
            // Some clients write numbers as strings; two strings are not compared as numbers.
            (_, Some(_)) => false,
            (_, None) => float(a).is_some() && float(a) == float(b),
        }
}

fn is_default(param: &str, value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty() || DEFAULTS.contains(&(param, text)),
        Value::Bool(true) | Value::Array(_) | Value::Object(_) => false,
    }
}

/// An integer, which some clients write as a string of digits.
fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}
