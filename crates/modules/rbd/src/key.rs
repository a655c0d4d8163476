//! The key of a Ceph user, in memory for secrets. Any context.
//!
//! librados has a copy of its own, in ordinary memory, for as long as it has the client.

use aryk_secrets::SecretBytes;
use std::ffi::CStr;
use std::fmt;
use std::sync::Arc;

/// A key, as `ceph auth print-key` prints it.
#[derive(Clone)]
pub struct UserKey(Arc<SecretBytes>);

/// The bytes are not a key. They are not repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a key of Ceph, which `ceph auth print-key client.USER` prints")]
pub struct NotAKey;

impl UserKey {
    /// Takes the text of a key, with or without white space around it.
    ///
    /// # Errors
    /// [`NotAKey`]: there is something else than the digits of one number in base 64.
    pub fn new(text: &[u8]) -> Result<Self, NotAKey> {
        let text = text.trim_ascii();
        let is_digit = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=');
        if text.is_empty() || !text.iter().all(is_digit) {
            return Err(NotAKey);
        }
        // With the zero that ends a text of C.
        let mut bytes = SecretBytes::zeroed(text.len() + 1);
        bytes[..text.len()].copy_from_slice(text);
        Ok(Self(Arc::new(bytes)))
    }

    /// The key's text.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.as_c_str().to_bytes()
    }

    pub(crate) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_with_nul(&self.0).expect("a key has no zero, and ends with one")
    }
}

impl PartialEq for UserKey {
    fn eq(&self, other: &Self) -> bool {
        self.0.len() == other.0.len()
            && self.0.iter().zip(&**other.0).fold(0, |all, (a, b)| all | (a ^ b)) == 0
    }
}

impl Eq for UserKey {}

impl fmt::Debug for UserKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

#[cfg(test)]
mod tests {
    use super::{NotAKey, UserKey};

    #[test]
    fn a_key_is_one_number_and_is_not_printed() {
        let key = UserKey::new(b"AQBk+/==\n").unwrap();
        assert_eq!((key.as_bytes(), key.as_c_str()), (&b"AQBk+/=="[..], c"AQBk+/=="));
        assert_eq!(format!("{key:?}"), "(secret)");
        assert!(key == UserKey::new(b" AQBk+/==").unwrap() && key != UserKey::new(b"AQBk+/=A").unwrap());
        for other in [&b""[..], b"\n", b"[client.vms]\n\tkey = AQ==\n", b"AQ\0==", b"AQ== AQ=="] {
            assert_eq!(UserKey::new(other).unwrap_err(), NotAKey);
        }
    }
}
