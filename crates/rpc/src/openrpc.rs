//! The OpenRPC 1.3 document: all methods, with the schemas of parameters and results. Any context.
//!
//! The document is built from the types that the daemon parses and prints. The reference and the clients are generated from it.

use crate::{Phase, Table, methods};
use schemars::generate::SchemaSettings;
use schemars::{Schema, SchemaGenerator};
use serde_json::{Map, Value, json};
use std::rc::Weak;

/// The version of OpenRPC.
const OPENRPC: &str = "1.3.2";

/// The document of all methods.
///
/// # Panics
/// If the schema of a type is invalid.
pub fn document() -> Value {
    document_of(&methods::all(&Weak::new()))
}

pub(crate) fn document_of<C: 'static>(table: &Table<C>) -> Value {
    let mut settings = SchemaSettings::draft07();
    settings.definitions_path = "/components/schemas".into();
    settings.meta_schema = None;
    let mut requests = settings.clone().for_deserialize().into_generator();
    let mut replies = settings.for_serialize().into_generator();
    let mut methods = Vec::new();
    // The method that returns the document is not part of the service, and its name is not a valid identifier elsewhere.
    for (name, entry) in table.entries().filter(|(name, _)| *name != methods::DISCOVER) {
        methods.push(json!({
            "name": name,
            "summary": entry.summary,
            "paramStructure": "by-name",
            "params": params((entry.params)(&mut requests)),
            "result": {"name": "result", "schema": (entry.result)(&mut replies)},
            // Aryk's extensions: whether the method is refused to read-only clients, and when it may be called.
            "x-changes": entry.changes,
            "x-phase": match entry.phase {
                Phase::StartUp => "start-up",
                Phase::RunTime => "run-time",
                Phase::Any => "any",
            },
        }));
    }
    json!({
        "openrpc": OPENRPC,
        "info": {
            "title": "arykd",
            "description": "The control plane of arykd: JSON-RPC 2.0, compatible with SPDK's.",
            "version": env!("CARGO_PKG_VERSION"),
            "license": {"name": env!("CARGO_PKG_LICENSE")},
        },
        "methods": methods,
        "components": {"schemas": definitions([requests, replies])},
    })
}

/// The members of a parameter object as content descriptors, the required ones first.
fn params(schema: Schema) -> Vec<Value> {
    let mut schema = schema.to_value();
    let required: Vec<String> = match schema["required"].take() {
        Value::Array(names) => names.iter().filter_map(|name| name.as_str().map(str::to_owned)).collect(),
        _ => Vec::new(),
    };
    let place = |name: &str| required.iter().position(|required| required == name);
    let Value::Object(properties) = schema["properties"].take() else { return Vec::new() };
    let mut properties: Vec<_> = properties.into_iter().collect();
    properties.sort_by_key(|(name, _)| place(name).unwrap_or(required.len()));
    let describe = |(name, mut schema): (String, Value)| {
        let mut param = json!({"name": name, "required": place(&name).is_some()});
        if let Some(members) = schema.as_object_mut() {
            // Marks members that are not saved in a configuration; callers do not need it.
            members.remove("writeOnly");
            if let Some(description) = members.remove("description") {
                param["description"] = description;
            }
        }
        param["schema"] = schema;
        param
    };
    properties.into_iter().map(describe).collect()
}

/// The definitions to which the schemas refer. A type of parameters and results has the same definition in both.
fn definitions(generators: [SchemaGenerator; 2]) -> Map<String, Value> {
    let mut all = Map::new();
    for mut generator in generators {
        for (name, schema) in generator.take_definitions(true) {
            let before = all.insert(name.clone(), schema.clone());
            assert!(before.is_none_or(|before| before == schema), "two types '{name}'");
        }
    }
    all
}

#[cfg(test)]
mod tests;
