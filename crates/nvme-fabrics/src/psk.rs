//! Pre-shared keys of TLS: from the text that people keep, `NVMeTLSkey-1:HH:BASE64:`, to the identity and the secret of one host
//! at one subsystem. NVMe TCP Transport Specification 1.0 §3.6.1. Any context but a reactor.
//!
//! | key | how it comes about |
//! | --- | --- |
//! | configured | the text has it, and the hash for the next step |
//! | retained | HKDF of the configured key, with the name of the host; without a hash, the configured key itself |
//! | of TLS | HKDF of the retained key, with the identity (version 0) or with its digest (version 1) |
//!
//! **Invariants.** Keys are zeroed when they are freed. Neither `Debug` nor an error has a part of one. An identity contains
//! exactly one pair of names: names with a space have none.

use crate::nqn::Nqn;
use aryk_secrets::SecretBytes;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use crc_fast::{CrcAlgorithm, Digest};
use ring::{hkdf, hmac};

/// What a key's text begins with.
const PREFIX: &[u8] = b"NVMeTLSkey-1:";
/// Bytes of a checksum.
const CRC_LEN: usize = 4;
/// Text that is longer is no key.
const TEXT_MAX: usize = 256;
/// Bytes of the longest context of a derivation: its length is one byte.
const CONTEXT_MAX: usize = u8::MAX as usize;

/// The hash of a derivation, by its identifier. The same hash is the one of the cipher suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Hash {
    /// SHA-256, with TLS_AES_128_GCM_SHA256.
    Sha256 = 1,
    /// SHA-384, with TLS_AES_256_GCM_SHA384.
    Sha384 = 2,
}

impl Hash {
    /// The hash of keys with `len` bytes.
    fn of_len(len: usize) -> Option<Self> {
        [Self::Sha256, Self::Sha384].into_iter().find(|hash| hash.value_len() == len)
    }

    /// Bytes of a value, and of each key.
    pub const fn value_len(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha384 => 48,
        }
    }

    fn hkdf(self) -> hkdf::Algorithm {
        match self {
            Self::Sha256 => hkdf::HKDF_SHA256,
            Self::Sha384 => hkdf::HKDF_SHA384,
        }
    }
}

/// The version of an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Version {
    /// The names only. SPDK has this version only.
    Names = 0,
    /// The names, and a digest of the retained key.
    Digest = 1,
}

impl Version {
    /// Both versions, the newer first.
    pub const ALL: [Self; 2] = [Self::Digest, Self::Names];
}

/// Why there is no key. None of these has a part of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PskError {
    /// It does not have the form.
    #[error("a TLS key has the form NVMeTLSkey-1:HH:BASE64:")]
    Form,
    /// The hash is unknown.
    #[error("a TLS key's hash is 00, 01 or 02")]
    Hash,
    /// It has a wrong number of bytes.
    #[error("a TLS key has a checksum, and 32 bytes with hash 01, 48 with hash 02, either with hash 00")]
    Length,
    /// The checksum is wrong.
    #[error("the TLS key's checksum is wrong: it was copied with an error")]
    Checksum,
    /// The identity of version 0 is the context of a derivation, which has a limit.
    #[error("the names of the host and of the subsystem are too long: together, TLS allows 245 bytes")]
    NamesTooLong,
    /// A space separates the names.
    #[error("TLS needs names of hosts and subsystems without spaces")]
    NameWithSpace,
}

/// A key as it is configured.
#[derive(Debug)]
pub struct ConfiguredPsk {
    hash: Hash,
    /// Whether the key that is retained is derived from this one.
    is_derived: bool,
    key: SecretBytes,
}

/// The key of one host at one subsystem.
#[derive(Debug)]
pub struct TlsPsk {
    /// What the host sends, so that the target finds the key. Not secret.
    pub identity: String,
    /// The hash of the cipher suite.
    pub hash: Hash,
    /// The key, of the hash's length.
    pub secret: SecretBytes,
}

impl ConfiguredPsk {
    /// Reads the text of a key, which a line's end may follow.
    ///
    /// # Errors
    /// [`PskError`].
    pub fn parse(text: &[u8]) -> Result<Self, PskError> {
        let text = text.trim_ascii_end();
        if text.len() > TEXT_MAX {
            return Err(PskError::Form);
        }
        let rest = text.strip_prefix(PREFIX).ok_or(PskError::Form)?;
        let Some((&[tens, ones, b':'], rest)) = rest.split_first_chunk() else { return Err(PskError::Form) };
        let encoded = rest.strip_suffix(b":").ok_or(PskError::Form)?;
        let asked = match [tens, ones] {
            [b'0', b'0'] => None,
            [b'0', b'1'] => Some(Hash::Sha256),
            [b'0', b'2'] => Some(Hash::Sha384),
            _ => return Err(PskError::Hash),
        };
        let mut key = SecretBytes::zeroed(TEXT_MAX);
        let len = STANDARD.decode_slice(encoded, &mut key).map_err(|_| PskError::Form)?;
        let len = len.checked_sub(CRC_LEN).ok_or(PskError::Length)?;
        let hash = Hash::of_len(len).filter(|hash| asked.is_none_or(|asked| asked == *hash));
        let hash = hash.ok_or(PskError::Length)?;
        let mut crc = Digest::new(CrcAlgorithm::Crc32IsoHdlc);
        crc.update(&key[..len]);
        if key[len..][..CRC_LEN] != (crc.finalize() as u32).to_le_bytes() {
            return Err(PskError::Checksum);
        }
        key.truncate(len);
        Ok(Self { hash, is_derived: asked.is_some(), key })
    }

    /// The key with which `host` connects to `subsystem`, by an identity of this version.
    ///
    /// # Errors
    /// [`PskError::NamesTooLong`], of version 0 only; [`PskError::NameWithSpace`].
    pub fn of_tls(&self, version: Version, host: &Nqn, subsystem: &Nqn) -> Result<TlsPsk, PskError> {
        self.derive(version, host.as_str(), subsystem.as_str())
    }

    fn derive(&self, version: Version, host: &str, subsystem: &str) -> Result<TlsPsk, PskError> {
        if [host, subsystem].iter().any(|name| name.contains(' ')) {
            return Err(PskError::NameWithSpace);
        }
        let hash = self.hash;
        let retained = match self.is_derived {
            true => expand_label(hash, &self.key, b"tls13 HostNQN", host.as_bytes()),
            false => SecretBytes::copy_of(&self.key),
        };
        let names = format!("{host} {subsystem}");
        let id = hash as u8;
        let (identity, context) = match version {
            Version::Names => {
                let identity = format!("NVMe0R{id:02} {names}");
                (identity.clone(), identity)
            }
            Version::Digest => {
                let digest = digest(hash, &retained, &names);
                (format!("NVMe1R{id:02} {names} {digest}"), format!("{id:02} {digest}"))
            }
        };
        if context.len() > CONTEXT_MAX {
            return Err(PskError::NamesTooLong);
        }
        let secret = expand_label(hash, &retained, b"tls13 nvme-tls-psk", context.as_bytes());
        Ok(TlsPsk { identity, hash, secret })
    }
}

/// The names of the host and of the subsystem in an identity of this module.
pub fn names_of(identity: &str) -> Option<(&str, &str)> {
    let mut words = identity.split(' ').skip(1);
    words.next().zip(words.next())
}

/// The digest of a retained key that an identity of version 1 has. It tells keys of the same names apart, and is not secret.
fn digest(hash: Hash, retained: &[u8], names: &str) -> String {
    let algorithm = match hash {
        Hash::Sha256 => hmac::HMAC_SHA256,
        Hash::Sha384 => hmac::HMAC_SHA384,
    };
    let mut context = hmac::Context::with_key(&hmac::Key::new(algorithm, retained));
    context.update(names.as_bytes());
    context.update(b" NVMe-over-Fabrics");
    STANDARD.encode(context.sign())
}

/// HKDF-Extract without a salt (RFC 5869), and HKDF-Expand-Label (RFC 8446 §7.1) of it, to a key of the hash's length. `context`
/// has at most [`CONTEXT_MAX`] bytes.
fn expand_label(hash: Hash, key: &[u8], label: &[u8], context: &[u8]) -> SecretBytes {
    let extracted = hkdf::Salt::new(hash.hkdf(), &[]).extract(key);
    let len = (hash.value_len() as u16).to_be_bytes();
    let info: [&[u8]; 5] = [&len, &[label.len() as u8], label, &[context.len() as u8], context];
    let mut expanded = SecretBytes::zeroed(hash.value_len());
    let output = extracted.expand(&info, hash.hkdf()).expect("HKDF expands to 255 values");
    output.fill(&mut expanded).expect("the buffer has the length of the hash's value");
    expanded
}

#[cfg(test)]
mod tests;
