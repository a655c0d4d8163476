//! Calls that make disks and controllers: what they make, what they need, what undoes them, and when two are the same.

use crate::size::Size;
use aryk_reactor::CoreSet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// A call of the daemon, as its `save_config` and SPDK's configuration files have it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Call {
    pub method: String,
    #[serde(default, skip_serializing_if = "Map::is_empty", deserialize_with = "or_empty")]
    pub params: Map<String, Value>,
}

/// SPDK's files have `null` too.
fn or_empty<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Map<String, Value>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// What a call makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Disk,
    Controller,
    /// Nothing that can be named: a setting.
    Setting,
}

impl Kind {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Controller => "controller",
            Self::Setting => "setting",
        }
    }
}

/// A method that makes something.
struct Maker {
    method: &'static str,
    /// The parameter that holds the name of what is made.
    name: &'static str,
    /// What is put before it.
    prefix: &'static str,
    /// The parameter that names the disk below.
    base: Option<&'static str>,
    delete: &'static str,
}

const fn disk(method: &'static str, delete: &'static str) -> Maker {
    Maker { method, name: "name", prefix: "", base: None, delete }
}

const MAKERS: [Maker; 8] = [
    disk("bdev_uring_create", "bdev_uring_delete"),
    disk("bdev_aio_create", "bdev_aio_delete"),
    disk("bdev_malloc_create", "bdev_malloc_delete"),
    disk("bdev_null_create", "bdev_null_delete"),
    Maker { base: Some("base_bdev_name"), ..disk("bdev_passthru_create", "bdev_passthru_delete") },
    Maker { base: Some("base_bdev_name"), ..disk("bdev_delay_create", "bdev_delay_delete") },
    Maker {
        name: "base_name",
        prefix: "EE_",
        base: Some("base_name"),
        ..disk("bdev_error_create", "bdev_error_delete")
    },
    Maker { name: "ctrlr", base: Some("dev_name"), ..disk(CONTROLLER, "vhost_delete_controller") },
];

/// The method that makes controllers.
pub const CONTROLLER: &str = "vhost_create_blk_controller";

/// Parameters that a saved call has only where they were given: where they are not, they are as if never given.
const UNSET_BY_ABSENCE: [&str; 9] = [
    "readonly",
    "enospc",
    "lock",
    "cpumask",
    "num_queues",
    "connect",
    "socket_mode",
    "socket_owner",
    "socket_group",
];

/// Parameters that the daemon takes and that change nothing of what is made.
const WITHOUT_EFFECT: [&str; 5] = ["fallocate", "nowait", "transport", "packed_ring", "exclusive"];

/// Parameters that some clients write as a string of digits.
const NUMBERS: [&str; 4] = ["num_blocks", "block_size", "size", "num_queues"];

/// Values that are as if nothing were given.
const DEFAULTS: [(&str, &str); 2] = [("enospc", "error"), ("lock", "always")];

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
        match self.maker() {
            Some(_) if self.method == CONTROLLER => Kind::Controller,
            Some(_) => Kind::Disk,
            None => Kind::Setting,
        }
    }

    pub fn text(&self, param: &str) -> Option<&str> {
        self.params.get(param).and_then(Value::as_str)
    }

    /// The name of what it makes; `None` if it makes nothing, or leaves the choice to the daemon.
    pub fn name(&self) -> Option<String> {
        let maker = self.maker()?;
        Some(format!("{}{}", maker.prefix, self.text(maker.name)?))
    }

    /// The disk that it needs.
    pub fn base(&self) -> Option<&str> {
        self.text(self.maker()?.base?)
    }

    /// Whether the disk that it makes goes by `name`, or has it for its uuid.
    pub fn is_called(&self, name: Option<&str>) -> bool {
        let Some(name) = name else { return false };
        let is_uuid = |uuid: &str| uuid.eq_ignore_ascii_case(name);
        self.name().as_deref() == Some(name) || self.text("uuid").is_some_and(is_uuid)
    }

    /// What it makes, in a few words.
    pub fn summary(&self) -> String {
        if let Some(summary) = self.setting_summary() {
            return summary;
        }
        let what = match self.method.as_str() {
            "bdev_uring_create" | "bdev_aio_create" => self.text("filename").unwrap_or_default().to_owned(),
            "bdev_malloc_create" => "in memory".into(),
            "bdev_null_create" => "null".into(),
            CONTROLLER => format!("of disk {}", self.base().unwrap_or_default()),
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

    /// The call that undoes it.
    pub fn undo(&self) -> Option<(&'static str, Value)> {
        let maker = self.maker()?;
        let name = if self.kind() == Kind::Controller { "ctrlr" } else { "name" };
        Some((maker.delete, json!({name: self.name()?})))
    }

    /// Whether what it makes keeps its data when it is made anew.
    pub fn keeps_data(&self) -> bool {
        self.method != "bdev_malloc_create"
    }

    /// The bytes of the disk that it asks for.
    pub fn size(&self) -> Option<u64> {
        let number = |param: &str| normal(param, self.params.get(param)?).as_u64();
        match self.method.as_str() {
            "bdev_uring_create" | "bdev_aio_create" => number("size"),
            _ => number("num_blocks")?.checked_mul(number("block_size")?),
        }
    }

    /// Whether its disk can be made larger while it is used.
    pub fn can_grow(&self) -> bool {
        matches!(self.method.as_str(), "bdev_uring_create" | "bdev_aio_create")
    }

    /// How `existing`, which was made by such a call, differs from what this one would make, but for a size that can
    /// change: each difference in words.
    pub fn differences(&self, existing: &Self) -> Vec<String> {
        if self.method != existing.method {
            return vec![format!("{} instead of {}", self.method, existing.method)];
        }
        let is_compared = |param: &&String| !(self.can_grow() && *param == "size");
        let wanted = self.params.iter().filter(|(param, _)| is_compared(param));
        let mut found = Vec::new();
        for (param, value) in wanted {
            let (is, to) = (existing.value(param), normal(param, value));
            let changes_nothing = WITHOUT_EFFECT.contains(&param.as_str())
                || (is.is_null() && !existing.params.contains_key(param) && is_default(param, &to));
            if is != to && !changes_nothing {
                found.push(format!("{param}: {} to be {}", shown(&is), shown(&to)));
            }
        }
        for param in UNSET_BY_ABSENCE {
            let is = existing.value(param);
            if !self.params.contains_key(param) && !is_default(param, &is) {
                found.push(format!("{param}: {} to be unset", shown(&is)));
            }
        }
        found
    }

    /// Whether both make the same.
    pub fn is_same(&self, other: &Self) -> bool {
        self.differences(other).is_empty() && other.differences(self).is_empty()
    }

    /// TOML has no null.
    pub fn without_nulls(&self) -> Self {
        let mut call = self.clone();
        call.params.retain(|_, value| !value.is_null());
        call
    }

    fn value(&self, param: &str) -> Value {
        self.params.get(param).map_or(Value::Null, |value| normal(param, value))
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "unset".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn is_default(param: &str, value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_u64() == Some(0),
        Value::String(text) => text.is_empty() || DEFAULTS.contains(&(param, text)),
        Value::Bool(true) | Value::Array(_) | Value::Object(_) => false,
    }
}

/// One way to write a value of which there are several.
fn normal(param: &str, value: &Value) -> Value {
    let Value::String(text) = value else { return value.clone() };
    match param {
        "uuid" => json!(text.to_ascii_lowercase()),
        "cpumask" => text.parse::<CoreSet>().map_or_else(|_| value.clone(), |set| json!(set.to_string())),
        _ if NUMBERS.contains(&param) => text.parse::<u64>().map_or_else(|_| value.clone(), |n| json!(n)),
        _ => value.clone(),
    }
}
