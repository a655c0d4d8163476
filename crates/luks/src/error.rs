//! Why a header is refused, as texts for the operator. Any context.

use std::io;

/// Longest part of a header's name that an error text shows, in characters.
const NAME_CHARS_MAX: usize = 40;

/// Why an operation on a LUKS header failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The store failed, or ends before the header does.
    #[error("the LUKS header cannot be read or written: {0}")]
    Io(#[from] io::Error),
    /// The store has neither a LUKS1 nor a LUKS2 header.
    #[error("no LUKS header found")]
    NotLuks,
    /// A newer version of LUKS.
    #[error("LUKS version {0} is not supported")]
    Version(u16),
    /// One copy of the header is whole, and the caller has found something else in the place of the other.
    #[error("a copy of the LUKS header was overwritten by {0}")]
    Overwritten(&'static str),
    /// The header contradicts its format.
    #[error("the LUKS header is invalid: {0}")]
    Invalid(String),
    /// The header, or the caller, requires something that this crate does not do.
    #[error("the LUKS {what} {name} is not supported")]
    Unsupported {
        /// What kind of thing.
        what: &'static str,
        /// Its name; if it is the header's, escaped and shortened.
        name: String,
    },
    /// No key slot opens with the secret.
    #[error("no key slot opens with this passphrase or key file")]
    WrongSecret,
    /// No cheaper key slot opens with the secret, and this one costs more than [`crate::Limits`] allow.
    #[error(
        "key slot {slot} needs {memory} bytes of memory and {steps} steps of key derivation, more than the limits allow"
    )]
    TooExpensive {
        /// The key slot.
        slot: u32,
        /// Bytes of memory.
        memory: u64,
        /// Steps, as in [`crate::Limits::steps_max`].
        steps: u64,
    },
    /// The system has no memory for a key derivation.
    #[error("no memory for a key derivation that needs {0} bytes")]
    NoMemory(u64),
    /// The key slot is not in use.
    #[error("key slot {0} is not in use")]
    NoSuchSlot(u32),
    /// The key slot is in use, or its number is beyond the last key slot.
    #[error("key slot {0} is in use or does not exist")]
    SlotTaken(u32),
    /// Every key slot is in use, or the header has no room for another one.
    #[error("the LUKS header has no room for another key slot")]
    NoRoom,
    /// The key slot is the last one: without it, the data would be lost.
    #[error("key slot {0} is the last one that opens the volume")]
    LastSlot(u32),
    /// The volume key is that of another header.
    #[error("the volume key does not belong to this LUKS header")]
    WrongKey,
    /// The key of an area cannot be used.
    #[error("a key slot's area cannot be encrypted: {0}")]
    Key(#[from] aryk_aes_xts::KeyError),
    /// The system has no random bytes.
    #[error("the system's random number generator failed")]
    Random,
}

impl Error {
    pub(crate) fn invalid(why: impl Into<String>) -> Self {
        Self::Invalid(why.into())
    }

    pub(crate) fn unsupported(what: &'static str, name: &str) -> Self {
        Self::Unsupported { what, name: shown(name) }
    }
}

/// A name from a header, safe for a log line: quoted, escaped, shortened.
pub(crate) fn shown(name: &str) -> String {
    let short: String = name.chars().take(NAME_CHARS_MAX).collect();
    let more = if short.len() < name.len() { "…" } else { "" };
    format!("{short:?}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_header_are_escaped_and_shortened() {
        assert_eq!(shown("serpent"), "\"serpent\"");
        assert_eq!(shown("a\n\u{1b}[2Jb"), "\"a\\n\\u{1b}[2Jb\"");
        let long = shown(&"ü".repeat(1000));
        assert_eq!(long.chars().count(), NAME_CHARS_MAX + 3);
        assert!(long.ends_with("\"…"), "{long}");
    }
}
