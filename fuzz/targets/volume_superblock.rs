//! Superblocks and claims of volume pools: any bytes, and changed ones with a right checksum.
//!
//! An accepted superblock is written and read again without a change, every segment is inside its device, and segments overlap
//! neither each other nor the superblocks.
#![no_main]

use aryk_volume_store::{CLAIM_BYTES, Claim, SUPERBLOCK_BYTES, Superblock};
use crc_fast::{CrcAlgorithm, checksum};
use libfuzzer_sys::fuzz_target;

/// Where the checksum is.
const CHECKSUM: std::ops::Range<usize> = 12..16;

fn check(superblock: &Superblock) {
    assert_eq!(Superblock::parse(&superblock.encode()[..]).as_ref(), Ok(superblock));
    let segments = superblock.segments();
    assert_eq!(superblock.segment(segments), None);
    let bytes = u64::from(superblock.segment_bytes);
    let mut last = None;
    for blob in (0..segments).take(1000).chain(segments.checked_sub(1)) {
        let place = superblock.segment(blob).expect("a blob has a segment");
        let device = &superblock.devices[place.device as usize];
        assert!(place.offset + bytes <= device.bytes && place.offset >= SUPERBLOCK_BYTES as u64);
        if let Some((before, its)) = last.replace((blob, place)) {
            assert!(before == blob || its != place, "two blobs have one segment");
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let mut bytes = data.to_vec();
    bytes.resize(SUPERBLOCK_BYTES, 0);
    if let Ok(superblock) = Superblock::parse(&bytes) {
        check(&superblock);
    }
    let _ = Superblock::parse(data);
    let claim = &mut bytes.clone()[..CLAIM_BYTES];
    claim[CHECKSUM].fill(0);
    let sum = checksum(CrcAlgorithm::Crc32Iscsi, claim) as u32;
    claim[CHECKSUM].copy_from_slice(&sum.to_le_bytes());
    for bytes in [data, claim] {
        if let Some(claim) = Claim::parse(bytes) {
            assert_eq!(Claim::parse(&claim.encode()).map(|again| again.beat), Some(claim.beat));
        }
    }
    bytes[CHECKSUM].fill(0);
    let sum = checksum(CrcAlgorithm::Crc32Iscsi, &bytes) as u32;
    bytes[CHECKSUM].copy_from_slice(&sum.to_le_bytes());
    if let Ok(superblock) = Superblock::parse(&bytes) {
        check(&superblock);
    }
});
