//! Digests: CRC32C over a header, or over the data of a PDU. NVMe TCP Transport 1.0 §3.4. Any context.

use crc_fast::{CrcAlgorithm, Digest};

/// Bytes of a digest on the wire, where it is little endian.
pub const DIGEST_LEN: usize = 4;

/// The digest of a header.
pub(super) fn of_header(header: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(header)
}

/// The digest of data that comes in pieces.
#[derive(Clone, Debug)]
pub struct DataDigest(Digest);

impl Default for DataDigest {
    fn default() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }
}

impl DataDigest {
    /// Adds the next bytes of the data.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes so far.
    pub fn value(&self) -> u32 {
        self.0.finalize() as u32
    }

    /// As [`Self::value`], as the wire has it.
    pub fn to_wire(&self) -> [u8; DIGEST_LEN] {
        self.value().to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_have_the_check_value_of_crc32c() {
        let mut pieces = DataDigest::default();
        for piece in [&b"1234"[..], b"", b"56789"] {
            pieces.update(piece);
        }
        assert_eq!((pieces.value(), of_header(b"123456789")), (0xe306_9283, 0xe306_9283));
        assert_eq!(pieces.to_wire(), [0x83, 0x92, 0x06, 0xe3]);
    }
}
