//! The parsed document: methods, their parameters and results, and the named types in them.
//!
//! The project writes the document itself, so an unknown construct is an error, and never ignored.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

/// The input of all generators.
#[derive(Debug)]
pub(super) struct Api {
    /// The version of the daemon and the clients.
    pub(super) version: String,
    /// Sorted by name.
    pub(super) methods: Vec<Method>,
    /// Sorted by name.
    pub(super) types: Vec<Type>,
}

#[derive(Debug)]
pub(super) struct Method {
    pub(super) name: String,
    pub(super) summary: String,
    /// Whether the method is refused to read-only clients.
    pub(super) changes: bool,
    pub(super) phase: Phase,
    /// The required parameters first.
    pub(super) params: Vec<Field>,
    pub(super) result: Kind,
}

/// The phase of the daemon in which a method is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    StartUp,
    RunTime,
    Any,
}

/// A named type.
#[derive(Debug)]
pub(super) struct Type {
    pub(super) name: String,
    pub(super) description: Option<String>,
    pub(super) shape: Shape,
}

#[derive(Debug)]
pub(super) enum Shape {
    /// The required members first.
    Struct(Vec<Field>),
    /// An enumeration of these words.
    Enum(Vec<String>),
}

/// A parameter, or a member of an object.
#[derive(Debug)]
pub(super) struct Field {
    pub(super) name: String,
    pub(super) description: Option<String>,
    pub(super) kind: Kind,
    pub(super) is_required: bool,
    pub(super) is_nullable: bool,
    /// The default value, as JSON.
    pub(super) default: Option<Value>,
}

/// The type of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Bool,
    /// The width in the document: `uint32`.
    Int(String),
    Text,
    List(Box<Self>),
    /// A named type.
    Named(String),
    /// An object with any members.
    Object,
    /// Any value.
    Any,
}

impl Api {
    pub(super) fn read(document: &str) -> Result<Self> {
        let document: Value = serde_json::from_str(document)?;
        let methods = document["methods"].as_array().context("no methods")?;
        let types = document["components"]["schemas"].as_object().context("no schemas")?;
        let read = |(name, schema): (&String, &Value)| Type::read(name, schema).context(name.clone());
        Ok(Self {
            version: text(&document["info"]["version"])?,
            methods: methods.iter().map(Method::read).collect::<Result<_>>()?,
            types: types.iter().map(read).collect::<Result<_>>()?,
        })
    }

    /// Finds a type by its name.
    pub(super) fn find(&self, name: &str) -> Option<&Type> {
        self.types.iter().find(|known| known.name == name)
    }

    /// Whether the named type is an enumeration.
    pub(super) fn is_enum(&self, name: &str) -> bool {
        self.find(name).is_some_and(|known| matches!(known.shape, Shape::Enum(_)))
    }
}

impl Method {
    fn read(method: &Value) -> Result<Self> {
        let name = text(&method["name"])?;
        let params = method["params"].as_array().context(name.clone())?;
        let param = |param: &Value| {
            let name = text(&param["name"])?;
            let mut field = Field::read(&name, &param["schema"], param["required"] == true)?;
            field.description = optional_text(&param["description"]).or(field.description);
            Ok(field)
        };
        Ok(Self {
            summary: text(&method["summary"])?,
            changes: method["x-changes"].as_bool().with_context(|| name.clone())?,
            phase: match method["x-phase"].as_str() {
                Some("start-up") => Phase::StartUp,
                Some("run-time") => Phase::RunTime,
                Some("any") => Phase::Any,
                other => bail!("{name}: the phase {other:?}"),
            },
            params: params.iter().map(param).collect::<Result<_>>().context(name.clone())?,
            result: Kind::read(&method["result"]["schema"]).context(name.clone())?.0,
            name,
        })
    }
}

impl Type {
    fn read(name: &str, schema: &Value) -> Result<Self> {
        let shape = match (schema["enum"].as_array(), schema["properties"].as_object()) {
            (Some(words), None) => Shape::Enum(words.iter().map(text).collect::<Result<_>>()?),
            (None, Some(members)) => Shape::Struct(members_of(schema, members)?),
            _ => bail!("neither an object nor an enumeration: {schema}"),
        };
        Ok(Self { name: name.to_owned(), description: optional_text(&schema["description"]), shape })
    }
}

/// The members in the document's order: the required ones as listed, then the others by name.
fn members_of(schema: &Value, members: &Map<String, Value>) -> Result<Vec<Field>> {
    let required = schema["required"].as_array().map_or(&[][..], Vec::as_slice);
    let place = |name: &str| required.iter().position(|required| required == name);
    let mut members: Vec<_> = members.iter().collect();
    members.sort_by_key(|(name, _)| place(name).unwrap_or(required.len()));
    members.into_iter().map(|(name, schema)| Field::read(name, schema, place(name).is_some())).collect()
}

impl Field {
    fn read(name: &str, schema: &Value, is_required: bool) -> Result<Self> {
        let (kind, is_nullable) = Kind::read(schema).context(name.to_owned())?;
        Ok(Self {
            name: name.to_owned(),
            description: optional_text(&schema["description"]),
            kind,
            is_required,
            is_nullable,
            default: schema.get("default").filter(|default| !default.is_null()).cloned(),
        })
    }
}

impl Kind {
    /// The type of a schema's values, and whether `null` is allowed.
    fn read(schema: &Value) -> Result<(Self, bool)> {
        if *schema == true {
            return Ok((Self::Any, false));
        }
        if let Some(reference) = schema["$ref"].as_str() {
            let name = reference
                .strip_prefix("#/components/schemas/")
                .context("a reference outside of the components")?;
            return Ok((Self::Named(name.to_owned()), false));
        }
        if let Some([one]) = schema["allOf"].as_array().map(Vec::as_slice) {
            return Self::read(one);
        }
        if let Some(choice) = schema["anyOf"].as_array() {
            let [one, null] = choice.as_slice() else { bail!("a choice: {schema}") };
            ensure!(null["type"] == "null", "a choice: {schema}");
            return Ok((Self::read(one)?.0, true));
        }
        let types: Vec<_> = match &schema["type"] {
            Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
            one => one.as_str().into_iter().collect(),
        };
        // A number that may also be sent as a string counts as a number.
        let kind = match types.first() {
            Some(&"boolean") => Self::Bool,
            Some(&"integer") => Self::Int(text(&schema["format"])?),
            Some(&"string") => Self::Text,
            Some(&"array") => Self::List(Box::new(Self::read(&schema["items"])?.0)),
            // Members of any name: `true`, or a schema for all of them, which is dropped.
            Some(&"object") if schema["additionalProperties"] == true => Self::Object,
            Some(&"object") if schema["additionalProperties"].is_object() => Self::Object,
            _ => bail!("unknown schema: {schema}"),
        };
        Ok((kind, types.contains(&"null")))
    }
}

fn text(value: &Value) -> Result<String> {
    value.as_str().map(str::to_owned).with_context(|| format!("{value} is no string"))
}

/// A description, joined into one line.
fn optional_text(value: &Value) -> Option<String> {
    value.as_str().map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn schemas_become_kinds() {
        let named = || Kind::Named("T".into());
        let reference = json!({"$ref": "#/components/schemas/T"});
        for (schema, kind) in [
            (json!(true), (Kind::Any, false)),
            (json!({"type": ["boolean", "null"]}), (Kind::Bool, true)),
            (json!({"type": ["integer", "string"], "format": "uint64"}), (Kind::Int("uint64".into()), false)),
            (reference.clone(), (named(), false)),
            (json!({"anyOf": [reference.clone(), {"type": "null"}]}), (named(), true)),
            (json!({"allOf": [reference.clone()], "description": "x"}), (named(), false)),
            (json!({"type": "array", "items": reference}), (Kind::List(Box::new(named())), false)),
        ] {
            assert_eq!(Kind::read(&schema).unwrap(), kind, "{schema}");
        }
        assert!(Kind::read(&json!({"type": "number"})).is_err());
    }

    #[test]
    fn required_members_keep_their_order() {
        let schema = json!({
            "type": "object",
            "properties": {"a": true, "b": true, "c": true},
            "required": ["c", "b"],
        });
        let Shape::Struct(fields) = Type::read("T", &schema).unwrap().shape else { panic!("an object") };
        let names: Vec<_> = fields.iter().map(|field| (field.name.as_str(), field.is_required)).collect();
        assert_eq!(names, [("c", true), ("b", true), ("a", false)]);
    }
}
