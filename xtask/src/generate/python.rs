//! The generated part of the Python client: types, and two functions per method, one blocking and one async. The
//! transport of calls is written by hand, in other files.

use std::fmt::Write as _;

use anyhow::{Result, ensure};

use super::model::{Api, Field, Kind, Method, Shape, Type};

const TYPES: &str = r#""""What the methods take and give. Made by `cargo xtask generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from typing import NotRequired
"#;

const METHODS: &str = r#""""The methods. Made by `cargo xtask generate`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Mapping, Sequence

from . import types


def _given(**params: Any) -> dict[str, Any]:
    """The parameters that are not None."""
    return {name: value for name, value in params.items() if value is not None}
"#;

const SYNC: &str = r#"

class Methods(ABC):
    """All methods, each to be waited for."""

    @abstractmethod
    def call(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """Calls any method by its name."""
"#;

const ASYNC: &str = r#"

class AsyncMethods(ABC):
    """All methods, each to be awaited."""

    @abstractmethod
    async def call(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """Calls any method by its name."""
"#;

/// Python's keywords, which cannot be parameter names.
const KEYWORDS: &[&str] = &[
    "False", "None", "True", "and", "as", "assert", "async", "await", "break", "class", "continue", "def",
    "del", "elif", "else", "except", "finally", "for", "from", "global", "if", "import", "in", "is",
    "lambda", "nonlocal", "not", "or", "pass", "raise", "return", "self", "try", "while", "with", "yield",
];

pub(super) fn files(api: &Api) -> Result<Vec<(&'static str, String)>> {
    let version = format!("\"\"\"Made by `cargo xtask generate`.\"\"\"\n\nVERSION = \"{}\"\n", api.version);
    Ok(vec![
        ("clients/python/src/aryk/_version.py", version),
        ("clients/python/src/aryk/types.py", types(api)),
        ("clients/python/src/aryk/_methods.py", methods(api)?),
    ])
}

fn types(api: &Api) -> String {
    let mut text = TYPES.to_owned();
    // Enumerations first: Python evaluates them when it loads the module.
    for Type { name, description, shape } in &api.types {
        if let Shape::Enum(words) = shape {
            text.push('\n');
            if let Some(description) = description {
                let _ = writeln!(text, "#: {description}");
            }
            let words: Vec<_> = words.iter().map(|word| format!("\"{word}\"")).collect();
            let _ = writeln!(text, "{name} = Literal[{}]", words.join(", "));
        }
    }
    for Type { name, description, shape } in &api.types {
        if let Shape::Struct(fields) = shape {
            text.push_str(&typed_dict(name, description.as_deref(), fields));
        }
    }
    text
}

fn typed_dict(name: &str, description: Option<&str>, fields: &[Field]) -> String {
    if fields.iter().any(|field| !is_name(&field.name)) {
        let member = |field: &Field| format!("\"{}\": \"{}\"", field.name, member_type(field));
        let members: Vec<_> = fields.iter().map(member).collect();
        return format!("\n\n{name} = TypedDict(\"{name}\", {{{}}})\n", members.join(", "));
    }
    let mut text = format!("\n\nclass {name}(TypedDict):\n");
    let _ = writeln!(text, "    \"\"\"{}\"\"\"\n", description.unwrap_or("Part of a result."));
    for field in fields {
        if let Some(description) = &field.description {
            let _ = writeln!(text, "    #: {description}");
        }
        let _ = writeln!(text, "    {}: {}", field.name, member_type(field));
    }
    text
}

/// The type of a member. An optional member is omitted, not `None`.
fn member_type(field: &Field) -> String {
    let kind = kind(&field.kind, "", "list");
    match (field.is_required, field.is_nullable) {
        (false, _) => format!("NotRequired[{kind}]"),
        (true, true) => format!("{kind} | None"),
        (true, false) => kind,
    }
}

fn methods(api: &Api) -> Result<String> {
    let mut text = METHODS.to_owned();
    for (class, define, wait) in [(SYNC, "def", ""), (ASYNC, "async def", "await ")] {
        text.push_str(class);
        for method in &api.methods {
            text.push_str(&function(method, define, wait)?);
        }
    }
    Ok(text)
}

fn function(method: &Method, define: &str, wait: &str) -> Result<String> {
    let Method { name, summary, params, .. } = method;
    let result = kind(&method.result, "types.", "list");
    let mut text = format!("\n    {define} {name}(");
    if params.is_empty() {
        text.push_str("self");
    } else {
        text.push_str("\n        self,\n        *,\n");
        for param in params {
            ensure!(is_name(&param.name), "{name}: {} is no name in Python", param.name);
            let kind = kind(&param.kind, "types.", "Sequence");
            let default = if param.is_required { "" } else { " | None = None" };
            let _ = writeln!(text, "        {}: {kind}{default},", param.name);
        }
        text.push_str("    ");
    }
    let _ = write!(text, ") -> {result}:\n        \"\"\"{summary}");
    let mut described = params.iter().filter(|param| param.description.is_some()).peekable();
    if described.peek().is_some() {
        text.push_str("\n\n        Parameters:\n");
        for param in described {
            let _ = writeln!(
                text,
                "            {}: {}",
                param.name,
                param.description.as_deref().unwrap_or_default()
            );
        }
        text.push_str("        ");
    }
    text.push_str("\"\"\"\n");
    let call = if params.is_empty() {
        format!("\"{name}\"")
    } else {
        let given: String = params.iter().map(|p| format!("                {0}={0},\n", p.name)).collect();
        format!("\n            \"{name}\",\n            _given(\n{given}            ),\n        ")
    };
    let _ = write!(text, "        result: {result} = {wait}self.call({call})\n        return result\n");
    Ok(text)
}

fn kind(kind: &Kind, module: &str, list: &str) -> String {
    match kind {
        Kind::Bool => "bool".into(),
        Kind::Int(_) => "int".into(),
        Kind::Text => "str".into(),
        Kind::List(item) => format!("{list}[{}]", self::kind(item, module, list)),
        Kind::Named(name) => format!("{module}{name}"),
        Kind::Object => "dict[str, Any]".into(),
        Kind::Any => "Any".into(),
    }
}

fn is_name(word: &str) -> bool {
    !KEYWORDS.contains(&word) && word.chars().all(|c| c == '_' || c.is_ascii_alphanumeric())
}
