//! Volume keys and random bytes. Control context.

use aryk_secrets::SecretBytes;
use ring::rand::{SecureRandom, SystemRandom};

use crate::error::Error;

/// The key that encrypts a volume's data: the two keys of AES-XTS, one after the other, in memory for secrets.
pub struct VolumeKey(SecretBytes);

impl VolumeKey {
    pub(crate) const fn new(bytes: SecretBytes) -> Self {
        Self(bytes)
    }

    pub(crate) fn random(len: usize) -> Result<Self, Error> {
        let mut bytes = SecretBytes::zeroed(len);
        random(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The key: 32 bytes for AES-128, 64 bytes for AES-256.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Fills `bytes` from the system's random number generator.
pub(crate) fn random(bytes: &mut [u8]) -> Result<(), Error> {
    SystemRandom::new().fill(bytes).map_err(|_| Error::Random)
}
