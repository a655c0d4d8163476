//! The document is complete, and its types have usable names.

use super::*;

fn references(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            if let Some(Value::String(reference)) = members.get("$ref") {
                found.push(reference.clone());
            }
            members.values().for_each(|member| references(member, found));
        }
        Value::Array(items) => items.iter().for_each(|item| references(item, found)),
        _ => {}
    }
}

#[test]
fn each_method_is_described() {
    let document = document();
    for method in document["methods"].as_array().unwrap() {
        let summary = method["summary"].as_str().unwrap();
        assert!(summary.ends_with('.') && summary.len() > 10, "{method}");
        assert!(method["result"]["schema"].is_object(), "{method}");
        for param in method["params"].as_array().unwrap() {
            assert!(param["description"].is_string(), "{}: {param}", method["name"]);
        }
    }
}

#[test]
fn types_have_unique_names() {
    let document = document();
    let schemas = document["components"]["schemas"].as_object().unwrap();
    let mut found = Vec::new();
    references(&document, &mut found);
    assert!(!found.is_empty());
    for reference in found {
        let name = reference.strip_prefix("#/components/schemas/").unwrap();
        assert!(schemas.contains_key(name), "{reference}");
    }
    for name in schemas.keys() {
        // A second type with the same name would get a number.
        assert!(!name.ends_with(|c: char| c.is_ascii_digit()), "{name}");
    }
}

#[test]
fn parameters_are_described() {
    let document = document();
    let methods = document["methods"].as_array().unwrap();
    let method = methods.iter().find(|method| method["name"] == "bdev_uring_resize").unwrap();
    assert_eq!(
        method["params"],
        json!([
            {"name": "name", "required": true, "description": "Name, alias or uuid.", "schema": {"type": "string"}},
            {
                "name": "size",
                "required": true,
                "description": "New size in bytes.",
                "schema":
                    {"type": ["integer", "string"], "format": "uint64", "minimum": 0, "pattern": "^[0-9]+$"},
            },
            {
                "name": "shrink",
                "required": false,
                "description": "Allow a smaller size, and discard the data beyond it.",
                "schema": {"type": "boolean", "default": false},
            },
        ])
    );
}
