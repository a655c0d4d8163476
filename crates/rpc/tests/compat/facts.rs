//! Parses `data/spdk-methods.json`.
//!
//! A parameter is a type (`uint32`, `enum:name`, …), with `!` if it is required. A result is a shape: the name of a JSON type; an
//! object of members, of which `name?` may be missing and `*` is any; or an array of one shape.

use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

pub struct Facts(Value);

pub struct Param {
    pub name: String,
    pub is_required: bool,
    kind: String,
    class: Option<String>,
}

impl Facts {
    pub fn read() -> Self {
        Self(serde_json::from_str(include_str!("../../data/spdk-methods.json")).unwrap())
    }

    /// All methods.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0["methods"].as_object().unwrap().keys().map(String::as_str)
    }

    pub fn params(&self, method: &str) -> Vec<Param> {
        let none = Map::new();
        let params = self.0["methods"][method]["params"].as_object().unwrap_or(&none);
        params.iter().map(|(name, kind)| Param::new(name, kind.as_str().unwrap())).collect()
    }

    pub fn result(&self, method: &str) -> Option<&Value> {
        self.0["methods"][method].get("result")
    }

    fn class(&self, group: &str, name: &str) -> &Value {
        self.0[group].get(name).unwrap_or_else(|| panic!("{group} has no {name}"))
    }
}

impl Param {
    fn new(name: &str, text: &str) -> Self {
        let (kind, is_required) = text.strip_suffix('!').map_or((text, false), |kind| (kind, true));
        let (kind, class) = kind.split_once(':').map_or((kind, None), |(kind, class)| (kind, Some(class)));
        Self { name: name.into(), is_required, kind: kind.into(), class: class.map(str::to_owned) }
    }

    /// Valid values: all values of an enumeration.
    pub fn samples(&self, facts: &Facts) -> Vec<Value> {
        match (self.kind.as_str(), self.class.as_deref()) {
            ("string", _) if self.name.contains("mask") => vec![json!("0x1"), json!("[0]")],
            ("string", _) => vec![json!("x")],
            ("boolean", _) => vec![json!(true), json!(false)],
            ("uuid", _) => vec![json!("913fc008-79a7-447f-b2c4-c73543638c31")],
            ("int32" | "uint8" | "uint16" | "uint32" | "uint64", _) => vec![json!(1), json!(0)],
            ("enum", Some(class)) => facts.class("enums", class).as_array().unwrap().clone(),
            ("array", Some(class)) => {
                let item = Self::new("item", facts.class("arrays", class).as_str().unwrap());
                vec![Value::Array(item.samples(facts)), json!([])]
            }
            ("bitmask", Some(class)) => vec![facts.class("bitmasks", class).clone(), json!([])],
            ("object", Some(class)) => {
                let members = facts.class("objects", class).as_object().unwrap();
                let members: Vec<Self> =
                    members.iter().map(|(name, kind)| Self::new(name, kind.as_str().unwrap())).collect();
                let member = |member: &Self| (member.name.clone(), member.samples(facts).remove(0));
                let required = members.iter().filter(|member| member.is_required).map(member).collect();
                vec![Value::Object(members.iter().map(member).collect()), Value::Object(required)]
            }
            (kind, class) => panic!("{}: no sample value for type {kind} {class:?}", self.name),
        }
    }

    /// A value of another type.
    pub fn wrong_sample(&self) -> Value {
        match self.kind.as_str() {
            "boolean" | "array" | "bitmask" | "object" => json!("x"),
            _ => json!([true]),
        }
    }
}

/// The parts of a result that were seen.
#[derive(Default)]
pub struct Seen(BTreeSet<String>);

impl Seen {
    /// Records the parts of `value`.
    pub fn note(&mut self, path: &str, shape: &Value, value: &Value) {
        self.0.insert(path.to_owned());
        match shape {
            Value::String(kind) => assert!(is_a(kind, value), "{path} is {value}, not of type {kind}"),
            Value::Array(shape) => {
                for item in value.as_array().unwrap_or_else(|| panic!("{path} is no array: {value}")) {
                    self.note(&format!("{path}[]"), &shape[0], item);
                }
            }
            Value::Object(shape) => {
                let value = value.as_object().unwrap_or_else(|| panic!("{path} is no object: {value}"));
                for (name, member) in value {
                    let optional = format!("{name}?");
                    let named = shape.get_key_value(name).or_else(|| shape.get_key_value(&optional));
                    if let Some((name, shape)) = named.or_else(|| shape.get_key_value("*")) {
                        self.note(&format!("{path}.{name}"), shape, member);
                    }
                }
            }
            other => panic!("{other} is no shape"),
        }
    }

    /// Whether only the result itself was seen.
    pub fn is_empty(&self) -> bool {
        self.0.len() == 1
    }

    /// Parts of `shape` that were never seen, except optional ones: paths below the result.
    pub fn missing(&self, root: &str, shape: &Value) -> BTreeSet<String> {
        let mut missing = BTreeSet::new();
        self.look_for(root, root.len(), shape, &mut missing);
        missing
    }

    fn look_for(&self, path: &str, root_len: usize, shape: &Value, missing: &mut BTreeSet<String>) {
        if !self.0.contains(path) {
            missing.insert(path[root_len..].trim_start_matches("[]").trim_start_matches('.').to_owned());
            return;
        }
        match shape {
            // The facts may have an empty array as their example.
            Value::Array(shape) => {
                if let Some(shape) = shape.first() {
                    self.look_for(&format!("{path}[]"), root_len, shape, missing);
                }
            }
            Value::Object(shape) => {
                for (name, shape) in shape.iter().filter(|(name, _)| !name.ends_with('?')) {
                    self.look_for(&format!("{path}.{name}"), root_len, shape, missing);
                }
            }
            _ => {}
        }
    }
}

fn is_a(kind: &str, value: &Value) -> bool {
    match kind {
        "boolean" => value.is_boolean(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "null" => value.is_null(),
        "object" => value.is_object(),
        _ => panic!("{kind} is no type"),
    }
}
