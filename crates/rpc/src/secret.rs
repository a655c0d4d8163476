//! [`SecretText`]: a string of a call that is secret, such as a key in hexadecimal digits. Any context.

use aryk_secrets::SecretBytes;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// Text in memory for secrets. Nothing prints it; it is serialized as a string.
pub(crate) struct SecretText(SecretBytes);

impl SecretText {
    /// A copy of `text`.
    pub(crate) fn copy_of(text: &str) -> Self {
        Self(SecretBytes::copy_of(text.as_bytes()))
    }

    /// The text.
    pub(crate) fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("the bytes are those of a text")
    }
}

impl Serialize for SecretText {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.as_str())
    }
}

impl<'de> Deserialize<'de> for SecretText {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Text)
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// Takes a string. Digits without quotes are not repeated in the error, as they would be by default.
struct Text;

impl Text {
    fn refuse<E: de::Error>() -> Result<SecretText, E> {
        Err(E::custom("a key is a string"))
    }
}

impl Visitor<'_> for Text {
    type Value = SecretText;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<SecretText, E> {
        Ok(SecretText::copy_of(text))
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> Result<SecretText, E> {
        Self::refuse()
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> Result<SecretText, E> {
        Self::refuse()
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> Result<SecretText, E> {
        Self::refuse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_error_and_no_debug_text_has_the_secret() {
        let read = |json: &str| serde_json::from_str::<SecretText>(json);
        let secret = read("\"0a1b\"").unwrap();
        assert_eq!((secret.as_str(), format!("{secret:?}").as_str()), ("0a1b", "(secret)"));
        assert_eq!(serde_json::to_string(&secret).unwrap(), "\"0a1b\"");
        for json in ["1234", "-1234", "12.34", "12e34"] {
            let error = read(json).unwrap_err().to_string();
            assert!(error.starts_with("a key is a string") && !error.contains("12"), "{error}");
        }
    }
}
