//! LUKS1 and LUKS2 headers, read and written: which part of a disk is encrypted and how, and its volume key behind passphrases
//! and key files. Control context: deriving a key from a passphrase takes seconds and up to a gibibyte of memory, so callers do
//! it on a thread that may block.
//!
//! | module | what it owns |
//! | --- | --- |
//! | `header` | [`Header`]: what both formats have in common; unlocking, and key slots added and removed |
//! | `format` | [`format()`]: a new header |
//! | `v1`, `v2` | the two formats on the disk; `metadata` is the JSON text of LUKS2 |
//! | `slot` | one key slot: secret, key derivation, encrypted area, anti-forensic stripes (`stripes`) |
//! | `kdf`, `hash` | key derivation and its cost |
//!
//! **Scope.** The cipher is aes-xts-plain64, for the data and for the areas of key slots. Other ciphers, integrity, several
//! segments and unfinished reencryption are refused by name. Data is not encrypted here: [`Segment`] says how to.
//!
//! **Hostile headers.** All fields of a header are checked once, when it is read. [`Limits`] bound the time and the memory that a
//! header can cost. A name from a header is escaped and shortened before it enters an error text.
//!
//! **Secrets.** Volume keys, derived keys, stripes and the memory of Argon2 are in memory for secrets (`aryk_secrets`).
//! [`VolumeKey`] has neither `Debug` nor `Clone`.
//!
//! Written from the LUKS1 on-disk format specification, version 1.2.3, and the LUKS2 specification, version 1.1.
#![forbid(unsafe_code)]

mod error;
mod format;
mod hash;
mod header;
mod kdf;
mod key;
mod limits;
mod metadata;
mod segment;
mod slot;
mod store;
mod stripes;
mod v1;
mod v2;

pub use error::Error;
pub use format::{Options, format};
pub use hash::Hash;
pub use header::{Header, Unlocked, Version};
pub use kdf::{Argon2Variant, Kdf};
pub use key::VolumeKey;
pub use limits::Limits;
pub use segment::{Cipher, Segment};
pub use slot::{KeySlot, Priority};
pub use store::Store;
