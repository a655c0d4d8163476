//! The commands.

pub mod controller;
pub mod daemon;
pub mod disk;
pub mod key;
pub mod luks;
pub mod memory;
pub mod nvme;
pub mod pool;
pub mod qos;
pub mod scheduler;
pub mod service;
pub mod share;
pub mod snapshot;
pub mod stat;
pub mod trace;
pub mod volume;

use serde_json::{Map, Value};

/// A JSON object of the members that have a value.
pub fn object<const N: usize>(members: [(&str, Option<Value>); N]) -> Value {
    let present = members.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    Value::Object(present.collect::<Map<_, _>>())
}

/// The elements of a JSON array; empty for any other value.
pub fn elements(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A string member; empty if absent.
pub fn text<'a>(value: &'a Value, member: &str) -> &'a str {
    value[member].as_str().unwrap_or_default()
}

/// A number member; 0 if absent.
pub fn number(value: &Value, member: &str) -> u64 {
    value[member].as_u64().unwrap_or_default()
}
