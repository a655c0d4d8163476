//! Volume keys and random bytes. Control context.

use ring::rand::{SecureRandom, SystemRandom};
use zeroize::Zeroizing;

use crate::error::Error;

/// The key that encrypts a volume's data: the two keys of AES-XTS, one after the other. Cleared when it is dropped.
pub struct VolumeKey(Zeroizing<Vec<u8>>);

impl VolumeKey {
    /// `bytes` are never moved to a larger allocation, which would leave a copy behind.
    pub(crate) const fn new(bytes: Zeroizing<Vec<u8>>) -> Self {
        Self(bytes)
    }

    pub(crate) fn random(len: usize) -> Result<Self, Error> {
        let mut bytes = Zeroizing::new(vec![0; len]);
        random(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The key: 32 bytes for AES-128, 64 bytes for AES-256. The caller clears its own copies.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Fills `bytes` from the system's random number generator.
pub(crate) fn random(bytes: &mut [u8]) -> Result<(), Error> {
    SystemRandom::new().fill(bytes).map_err(|_| Error::Random)
}
