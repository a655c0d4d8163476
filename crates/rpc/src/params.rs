//! Parameter types that several methods share. Control context.

use aryk_reactor::CoreSet;
use nix::unistd::{Group, User};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;
use std::fmt;

/// A number, which some clients write as a string.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(transparent)]
pub struct Count(pub u64);

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl serde::de::Visitor<'_> for Visitor {
            type Value = Count;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a non-negative integer")
            }
            fn visit_u64<E>(self, n: u64) -> Result<Count, E> {
                Ok(Count(n))
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Count, E> {
                let wrong = |_| E::invalid_value(serde::de::Unexpected::Str(text), &self);
                text.parse().map(Count).map_err(wrong)
            }
        }
        from.deserialize_any(Visitor)
    }
}

impl JsonSchema for Count {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Count".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        if generator.contract().is_serialize() {
            return u64::json_schema(generator);
        }
        json_schema!({"type": ["integer", "string"], "format": "uint64", "minimum": 0, "pattern": "^[0-9]+$"})
    }
}

/// A set of cores: a mask such as `0x3`, or a list such as `[0,2-3]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuMask(pub CoreSet);

impl<'de> Deserialize<'de> for CpuMask {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map(Self).map_err(D::Error::custom)
    }
}

impl Serialize for CpuMask {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&self.0)
    }
}

/// Permissions, in octal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketMode(pub u32);

impl<'de> Deserialize<'de> for SocketMode {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        match u32::from_str_radix(&text, 8) {
            Ok(mode @ ..=0o777) => Ok(Self(mode)),
            Ok(_) | Err(_) => {
                Err(D::Error::custom(format!("`{text}` is not a mode: use octal digits, such as 660")))
            }
        }
    }
}

impl Serialize for SocketMode {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&format_args!("{:o}", self.0))
    }
}

/// A user, by name or number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct SocketOwner {
    text: String,
    /// User ID.
    #[serde(skip)]
    pub id: u32,
}

impl<'de> Deserialize<'de> for SocketOwner {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let by_name = |name: &str| Ok(User::from_name(name)?.map(|user| user.uid.as_raw()));
        let (text, id) = principal(from, "user", by_name)?;
        Ok(Self { text, id })
    }
}

/// A group, by name or number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct SocketGroup {
    text: String,
    /// Group ID.
    #[serde(skip)]
    pub id: u32,
}

impl<'de> Deserialize<'de> for SocketGroup {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let by_name = |name: &str| Ok(Group::from_name(name)?.map(|group| group.gid.as_raw()));
        let (text, id) = principal(from, "group", by_name)?;
        Ok(Self { text, id })
    }
}

/// The text as written, and the ID that it stands for.
fn principal<'de, D: Deserializer<'de>>(
    from: D,
    what: &str,
    by_name: impl FnOnce(&str) -> nix::Result<Option<u32>>,
) -> Result<(String, u32), D::Error> {
    let text = String::deserialize(from)?;
    if let Ok(id) = text.parse() {
        return Ok((text, id));
    }
    match by_name(&text) {
        Ok(Some(id)) => Ok((text, id)),
        Ok(None) => Err(D::Error::custom(format!("there is no {what} `{text}`"))),
        Err(error) => Err(D::Error::custom(format!("cannot look up {what} `{text}`: {error}"))),
    }
}

/// Implements the schema of a type that is a string on the wire.
macro_rules! is_text {
    ($type:ty, $description:literal) => {
        impl JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({"type": "string", "description": $description})
            }
        }
    };
}

is_text!(CpuMask, "A set of cores: a mask such as `0x3`, or a list such as `[0,2-3]`.");
is_text!(SocketMode, "Permissions, in octal digits.");
is_text!(SocketOwner, "A user, by name or number.");
is_text!(SocketGroup, "A group, by name or number.");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts() {
        for (text, count) in [("7", 7), ("\"7\"", 7), ("18446744073709551615", u64::MAX)] {
            assert_eq!(serde_json::from_str::<Count>(text).unwrap(), Count(count));
        }
        for text in ["-1", "1.5", "\"\"", "\"x\"", "true", "null", "18446744073709551616", "[]"] {
            assert!(serde_json::from_str::<Count>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn masks() {
        let mask: CpuMask = serde_json::from_str("\"[0,2-3]\"").unwrap();
        assert_eq!(serde_json::to_string(&mask).unwrap(), "\"0xd\"");
        assert!(serde_json::from_str::<CpuMask>("\"many\"").is_err());
        assert!(serde_json::from_str::<CpuMask>("3").is_err());
    }

    #[test]
    fn rights() {
        let mode: SocketMode = serde_json::from_str("\"0660\"").unwrap();
        assert_eq!((mode.0, serde_json::to_string(&mode).unwrap()), (0o660, "\"660\"".into()));
        for text in ["\"999\"", "\"7777\"", "\"rw\"", "660"] {
            assert!(serde_json::from_str::<SocketMode>(text).is_err(), "{text}");
        }
        let owner: SocketOwner = serde_json::from_str("\"root\"").unwrap();
        assert_eq!((owner.id, serde_json::to_string(&owner).unwrap()), (0, "\"root\"".into()));
        assert_eq!(serde_json::from_str::<SocketGroup>("\"7\"").unwrap().id, 7);
        assert!(serde_json::from_str::<SocketGroup>("\"no such group\"").is_err());
    }
}
