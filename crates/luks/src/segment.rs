//! The encrypted part of a volume. Any context.

use crate::error::Error;

/// The name of the cipher in LUKS2 headers, and in LUKS1 headers split at the first hyphen.
pub(crate) const AES_XTS: &str = "aes-xts-plain64";

/// How data is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cipher {
    /// AES-XTS with two keys of 128 bits.
    Aes128Xts,
    /// AES-XTS with two keys of 256 bits.
    Aes256Xts,
}

impl Cipher {
    /// The cipher `name` with a key of `key_len` bytes.
    pub(crate) fn parse(name: &str, key_len: u64) -> Result<Self, Error> {
        if name != AES_XTS {
            return Err(Error::unsupported("cipher", name));
        }
        match key_len {
            32 => Ok(Self::Aes128Xts),
            64 => Ok(Self::Aes256Xts),
            _ => Err(Error::invalid(format!("{AES_XTS} with a key of {key_len} bytes"))),
        }
    }

    /// Bytes of the volume key.
    pub const fn key_len(self) -> usize {
        match self {
            Self::Aes128Xts => 32,
            Self::Aes256Xts => 64,
        }
    }
}

/// Where the encrypted data is, and how it is encrypted: each `sector_size` bytes are one unit of AES-XTS, whose tweak is a
/// number of 64 bits, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Start of the data, in bytes. 0 if the header is detached: the data is on another device, from its start.
    pub offset: u64,
    /// Length of the data in bytes; `None` if it extends to the end of the device.
    pub size: Option<u64>,
    /// The cipher.
    pub cipher: Cipher,
    /// Bytes per unit of AES-XTS: 512, 1024, 2048 or 4096.
    pub sector_size: u32,
    /// Tweak of the first unit.
    pub iv_tweak: u64,
}

impl Segment {
    /// The tweak of the unit at `offset` bytes from the start of the data. It counts in 512 bytes, whatever the size of a unit.
    pub const fn tweak_at(&self, offset: u64) -> u64 {
        self.iv_tweak.wrapping_add(offset / 512)
    }
}
