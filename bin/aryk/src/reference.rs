//! `aryk rpc METHOD --help`: a method's parameters and result, from the OpenRPC document that is generated from its types.

use crate::commands::{elements, text};
use crate::error::{Error, NO_METHOD};
use crate::output::{Column, Output};
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// The document of this version's daemon.
static DOCUMENT: LazyLock<Value> = LazyLock::new(|| {
    serde_json::from_str(include_str!("../../../docs/rpc/openrpc.json"))
        .expect("the document is generated and checked")
});

/// Hints for an unknown method.
pub const HINTS: [(i64, &str); 1] = [(NO_METHOD, "'aryk rpc rpc_get_methods' lists the methods.")];

/// The names of all methods.
pub fn methods() -> impl Iterator<Item = &'static str> {
    elements(&DOCUMENT["methods"]).iter().map(|method| text(method, "name"))
}

/// A note for a method that the daemon accepts for compatibility and that has no effect.
pub fn without_effect(name: &str) -> Option<&'static str> {
    let method = elements(&DOCUMENT["methods"]).iter().find(|method| text(method, "name") == name)?;
    let summary = text(method, "summary");
    let says_so = ["Without effect: ", "does nothing", "They are not delayed"];
    says_so.iter().any(|part| summary.contains(part)).then_some(summary)
}

/// Prints the help of a method.
pub fn show(name: &str, out: &Output) -> Result<(), Error> {
    let found = elements(&DOCUMENT["methods"]).iter().find(|method| text(method, "name") == name);
    let none = || Error::Refused {
        code: NO_METHOD,
        message: format!("there is no method '{name}'"),
        detail: None,
        hint: None,
    };
    let method = found.ok_or_else(|| none().hinted(&HINTS))?;
    out.print(method, || help(method, out))
}

fn help(method: &Value, out: &Output) -> String {
    let (name, params) = (text(method, "name"), elements(&method["params"]));
    let mut help = format!("{}\n\n", text(method, "summary"));
    if params.is_empty() {
        help.push_str("It takes no parameters.\n");
    } else {
        let row = |param: &Value| {
            let default = match &param["schema"]["default"] {
                Value::Null => String::new(),
                default => format!(" [default: {default}]"),
            };
            let is_required = param["required"].as_bool().unwrap_or_default();
            vec![
                text(param, "name").to_owned(),
                kind(&param["schema"]),
                if is_required { "yes" } else { "" }.to_owned(),
                format!("{}{default}", text(param, "description")),
            ]
        };
        let columns: [Column; 4] =
            [("PARAMETER", false), ("TYPE", false), ("REQUIRED", false), ("DESCRIPTION", false)];
        help.push_str(&out.table(&columns, params.iter().map(row)));
        help.push('\n');
    }
    help.push_str(&format!("\nResult: {}\n\nExample:\n  aryk rpc {name}", kind(&method["result"]["schema"])));
    let example = example(params);
    if !example.is_empty() {
        help.push_str(&format!(" '{}'", Value::Object(example)));
    }
    help
}

/// Values for the required parameters; if there are none, for the first parameter.
fn example(params: &[Value]) -> Map<String, Value> {
    let needed = params.iter().filter(|param| param["required"] == true);
    let given: Vec<_> = match needed.clone().next() {
        Some(_) => needed.collect(),
        None => params.iter().take(1).collect(),
    };
    given.into_iter().map(|param| (text(param, "name").to_owned(), sample(param))).collect()
}

fn sample(param: &Value) -> Value {
    let schema = resolved(&param["schema"]);
    if let Some(first) = elements(&schema["enum"]).first().or_else(|| elements(&schema["oneOf"]).first()) {
        return first.get("const").unwrap_or(first).clone();
    }
    match (text(param, "name"), &*kind(schema)) {
        ("filename", _) => json!("/var/lib/aryk/disks/vm1.img"),
        ("uuid", _) => json!("6e2b1a9c-3c1f-4c62-9f53-0d1c6a2f8b11"),
        ("block_size", _) => json!(512),
        ("num_blocks", _) => json!(2048),
        (_, kind) if kind.starts_with("number") => json!(1),
        (_, kind) if kind.starts_with("true") => json!(true),
        (_, kind) if kind.starts_with("list") => json!([]),
        (_, kind) if kind.starts_with("object") => json!({}),
        _ => json!("vm1"),
    }
}

/// The schema behind a reference.
fn resolved(schema: &Value) -> &Value {
    match schema["$ref"].as_str().and_then(|path| path.strip_prefix('#')) {
        Some(path) => DOCUMENT.pointer(path).unwrap_or(&Value::Null),
        None => schema,
    }
}

/// A short name of a schema's type; for an enumeration, its values.
fn kind(schema: &Value) -> String {
    if let Some(path) = schema["$ref"].as_str().and_then(|path| path.strip_prefix('#')) {
        return DOCUMENT.pointer(path).map(kind).unwrap_or_default();
    }
    let choices =
        elements(&schema["enum"]).iter().chain(elements(&schema["oneOf"]).iter().map(|one| &one["const"]));
    let choices: Vec<_> = choices.filter_map(Value::as_str).collect();
    if !choices.is_empty() {
        return choices.join("|");
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        several => elements(several).iter().filter_map(Value::as_str).filter(|t| *t != "null").collect(),
    };
    match types.first().copied() {
        Some("integer" | "number") => "number".into(),
        Some("boolean") => "true or false".into(),
        Some("array") => format!("list of: {}", kind(&schema["items"])),
        Some(other) => other.into(),
        None => elements(&schema["anyOf"]).first().map_or_else(|| "any".into(), kind),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_has_help_with_an_example_that_is_json() {
        for method in elements(&DOCUMENT["methods"]) {
            let help = help(method, &Output::plain());
            let table = help.lines().skip(1).take_while(|line| *line != "Example:");
            assert!({ table }.all(|line| line.chars().count() <= 80), "{help}");
            let example = help.rsplit_once("aryk rpc ").unwrap().1;
            if let Some((_, params)) = example.split_once(' ') {
                let params: Value = serde_json::from_str(params.trim_matches('\'')).unwrap();
                let needed = elements(&method["params"]).iter().filter(|p| p["required"] == true);
                assert!(needed.clone().all(|param| params.get(text(param, "name")).is_some()), "{help}");
            }
        }
        assert!(methods().any(|name| name == "bdev_uring_create"));
    }
}
