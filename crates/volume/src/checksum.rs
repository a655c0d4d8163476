//! CRC32C of blocks, headers and manifests. Any context.

use crate::BLOCK;
use crc_fast::{CrcAlgorithm, checksum};

/// The checksum of a header or a manifest.
pub(crate) fn of(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The checksum of a block's data, mixed with the block's number in its volume, so that a block in a wrong place does not pass.
/// The block keeps its checksum when it moves to another blob.
pub(crate) fn of_block(block: u64, data: &[u8]) -> u32 {
    debug_assert_eq!(data.len(), BLOCK as usize);
    of(data) ^ (block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_of_crc32c() {
        assert_eq!(of(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn equal_data_of_two_blocks_has_two_checksums() {
        let data = [7; BLOCK as usize];
        let all: std::collections::HashSet<_> = (0..1000).map(|block| of_block(block, &data)).collect();
        assert_eq!(all.len(), 1000);
    }
}
