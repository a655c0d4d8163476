//! Parameters and results match `openrpc::document`, without missing or additional members.

use serde_json::Value;
use std::collections::BTreeMap;

pub struct Schemas {
    methods: BTreeMap<String, Value>,
    types: Value,
}

impl Schemas {
    pub fn new() -> Self {
        let mut document = aryk_rpc::openrpc::document();
        let Value::Array(methods) = document["methods"].take() else { panic!("no methods") };
        let by_name = |method: Value| (method["name"].as_str().unwrap().to_owned(), method);
        Self {
            methods: methods.into_iter().map(by_name).collect(),
            types: document["components"]["schemas"].take(),
        }
    }

    /// Checks a call that succeeded.
    pub fn check_call(&self, method: &str, params: &Value, result: &Value) {
        let described_method = &self.methods[method];
        let described = described_method["params"].as_array().unwrap();
        let given = params.as_object().unwrap();
        for param in described {
            let name = param["name"].as_str().unwrap();
            let place = format!("{method}({name})");
            match given.get(name) {
                Some(value) => self.fits(&place, value, &param["schema"]).unwrap(),
                None => assert!(param["required"] == false, "{place} is required"),
            }
        }
        let known = |name: &String| described.iter().any(|param| param["name"] == *name);
        assert!(given.keys().all(known), "{method} {params}");
        self.fits(method, result, &described_method["result"]["schema"]).unwrap();
    }

    fn fits(&self, place: &str, value: &Value, schema: &Value) -> Result<(), String> {
        let wrong = || Err(format!("{place}: {value} is not {schema}"));
        if let Some(reference) = schema["$ref"].as_str() {
            let name = reference.rsplit('/').next().unwrap();
            return self.fits(place, value, &self.types[name]);
        }
        if let Some(all) = schema["allOf"].as_array() {
            return all.iter().try_for_each(|one| self.fits(place, value, one));
        }
        if let Some(choice) = schema["anyOf"].as_array().or_else(|| schema["oneOf"].as_array()) {
            let fits = choice.iter().any(|one| self.fits(place, value, one).is_ok());
            return if fits { Ok(()) } else { wrong() };
        }
        if let Some(values) = schema["enum"].as_array() {
            return if values.contains(value) { Ok(()) } else { wrong() };
        }
        let types = match &schema["type"] {
            Value::Array(types) => types.as_slice(),
            one => std::slice::from_ref(one),
        };
        let kind = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        // `true` is the schema of any value.
        if *schema != true && !types.iter().any(|t| t == kind) {
            return wrong();
        }
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| self.fits(place, item, &schema["items"])),
            Value::Object(_) if schema["additionalProperties"] == true => Ok(()),
            Value::Object(members) => self.members_fit(place, members, schema),
            _ => Ok(()),
        }
    }

    fn members_fit(
        &self,
        place: &str,
        members: &serde_json::Map<String, Value>,
        schema: &Value,
    ) -> Result<(), String> {
        for (name, member) in members {
            let place = format!("{place}.{name}");
            let any = schema.get("additionalProperties").filter(|any| any.is_object());
            match schema["properties"].get(name).or(any) {
                Some(schema) => self.fits(&place, member, schema)?,
                None => return Err(format!("{place} is not described")),
            }
        }
        let mut required = schema["required"].as_array().into_iter().flatten();
        match required.find(|name| !members.contains_key(name.as_str().unwrap())) {
            Some(name) => Err(format!("{place} lacks {name}")),
            None => Ok(()),
        }
    }
}
