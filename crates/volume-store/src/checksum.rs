//! CRC32C, the checksum of the pool's own structures. Any context.

use crc_fast::{CrcAlgorithm, Digest};

/// CRC32C of the concatenated parts.
pub(crate) fn of(parts: &[&[u8]]) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    digest.finalize() as u32
}

/// CRC32C of bytes that come in pieces.
#[derive(Debug)]
pub(crate) struct Running(Digest);

impl Default for Running {
    fn default() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }
}

impl Running {
    pub(crate) fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes so far.
    pub(crate) fn finish(&self) -> u32 {
        self.0.finalize() as u32
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_check_value_of_crc32c() {
        assert_eq!(super::of(&[b"1234", b"", b"56789"]), 0xe306_9283);
    }
}
