//! Parameter types that several methods share. Control context.

use aryk_reactor::CoreSet;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
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
                f.write_str("a whole number that is not negative")
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

/// A set of cores: a mask as `0x3`, or a list as `[0,2-3]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuMask(pub CoreSet);

impl<'de> Deserialize<'de> for CpuMask {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        text.parse().map(Self).map_err(serde::de::Error::custom)
    }
}

impl Serialize for CpuMask {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(&self.0)
    }
}

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
}
