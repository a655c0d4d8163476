//! Secrets in the form in which people keep them: `DHHC-1:HH:BASE64:`. NVMe 2.0 §8.13.5.8. Any context.

use super::Hash;
use crate::nqn::Nqn;
use aryk_secrets::SecretBytes;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use crc_fast::{CrcAlgorithm, Digest};
use ring::hmac;

/// What a secret begins with.
const PREFIX: &[u8] = b"DHHC-1:";
/// Bytes of a checksum.
const CRC_LEN: usize = 4;
/// Text that is longer is no secret.
const TEXT_MAX: usize = 256;
/// What a key is transformed with, behind the name of its owner.
const TRANSFORMED_WITH: &[u8] = b"NVMe-over-Fabrics";

/// Why text is not a secret. None of these has a part of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// It does not have the form.
    #[error("a secret has the form DHHC-1:HH:BASE64:")]
    Form,
    /// The hash is unknown.
    #[error("a secret's hash is 00, 01, 02 or 03")]
    Hash,
    /// It has a wrong number of bytes.
    #[error("a secret has 32, 48 or 64 bytes, and a checksum")]
    Length,
    /// The checksum is wrong.
    #[error("the secret's checksum is wrong: it was copied with an error")]
    Checksum,
}

/// A secret.
#[derive(Debug)]
pub struct Secret {
    /// How the key is transformed before it is used.
    hash: Option<Hash>,
    key: SecretBytes,
}

impl Secret {
    /// Reads the text of a secret, which a line's end may follow.
    ///
    /// # Errors
    /// [`SecretError`].
    pub fn parse(text: &[u8]) -> Result<Self, SecretError> {
        let text = text.trim_ascii_end();
        if text.len() > TEXT_MAX {
            return Err(SecretError::Form);
        }
        let rest = text.strip_prefix(PREFIX).ok_or(SecretError::Form)?;
        let Some((&[b'0', id, b':'], rest)) = rest.split_first_chunk() else { return Err(SecretError::Form) };
        let encoded = rest.strip_suffix(b":").ok_or(SecretError::Form)?;
        let hash = match id {
            b'0' => None,
            id => Some(Hash::with_id(id.wrapping_sub(b'0')).ok_or(SecretError::Hash)?),
        };
        let mut key = SecretBytes::zeroed(TEXT_MAX);
        let len = STANDARD.decode_slice(encoded, &mut key).map_err(|_| SecretError::Form)?;
        let len = len.checked_sub(CRC_LEN).filter(|len| matches!(len, 32 | 48 | 64));
        let len = len.ok_or(SecretError::Length)?;
        let mut crc = Digest::new(CrcAlgorithm::Crc32IsoHdlc);
        crc.update(&key[..len]);
        if key[len..][..CRC_LEN] != (crc.finalize() as u32).to_le_bytes() {
            return Err(SecretError::Checksum);
        }
        key.truncate(len);
        Ok(Self { hash, key })
    }

    /// The key with which the owner of the secret proves to know it.
    pub(super) fn key_of(&self, owner: &Nqn) -> SecretBytes {
        let Some(hash) = self.hash else { return SecretBytes::copy_of(&self.key) };
        let mut context = hmac::Context::with_key(&hmac::Key::new(hash.hmac(), &self.key));
        context.update(owner.as_str().as_bytes());
        context.update(TRANSFORMED_WITH);
        SecretBytes::copy_of(context.sign().as_ref())
    }
}
