//! The hash functions of a header, by their names. Any context.

use std::num::NonZeroU32;

use ring::{digest, pbkdf2};

use crate::error::Error;

/// A hash function of PBKDF2, of anti-forensic stripes, or of a LUKS2 header's checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hash {
    /// SHA-1: LUKS1 headers of old systems.
    Sha1,
    /// SHA-256.
    Sha256,
    /// SHA-512.
    Sha512,
}

impl Hash {
    pub(crate) fn parse(name: &str) -> Result<Self, Error> {
        Ok(match name {
            "sha1" => Self::Sha1,
            "sha256" => Self::Sha256,
            "sha512" => Self::Sha512,
            _ => return Err(Error::unsupported("hash", name)),
        })
    }

    /// The name that headers use.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha1 => "sha1",
            Self::Sha256 => "sha256",
            Self::Sha512 => "sha512",
        }
    }

    /// Length of a digest, in bytes.
    pub(crate) const fn len(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }

    /// The digest of all `parts`, one after the other.
    pub(crate) fn digest(self, parts: &[&[u8]]) -> digest::Digest {
        let mut context = digest::Context::new(match self {
            Self::Sha1 => &digest::SHA1_FOR_LEGACY_USE_ONLY,
            Self::Sha256 => &digest::SHA256,
            Self::Sha512 => &digest::SHA512,
        });
        for part in parts {
            context.update(part);
        }
        context.finish()
    }

    pub(crate) fn pbkdf2(self, iterations: NonZeroU32, salt: &[u8], secret: &[u8], derived: &mut [u8]) {
        let algorithm = match self {
            Self::Sha1 => pbkdf2::PBKDF2_HMAC_SHA1,
            Self::Sha256 => pbkdf2::PBKDF2_HMAC_SHA256,
            Self::Sha512 => pbkdf2::PBKDF2_HMAC_SHA512,
        };
        pbkdf2::derive(algorithm, iterations, salt, secret, derived);
    }

    /// HMACs that PBKDF2 computes for `len` bytes.
    pub(crate) fn pbkdf2_steps(self, iterations: NonZeroU32, len: usize) -> u64 {
        u64::from(iterations.get()) * len.div_ceil(self.len()) as u64
    }
}
