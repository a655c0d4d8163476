//! Rebuilds of pools: copies of a manifest and segments of any content, with right checksums around it.
//!
//! A rebuild ends, without a panic and without an operation beyond the store. If it writes a checkpoint, the pool opens with it.
#![no_main]

use aryk_volume::{Done, Pool, Rebuild, Recovered, Settings, StoreFacts, StoreOp};
use crc_fast::{CrcAlgorithm, checksum};
use libfuzzer_sys::fuzz_target;
use std::collections::HashMap;

const FACTS: StoreFacts = StoreFacts { alignment: 512, blob_units: 10_240, blobs: 3 };
const UUID: [u8; 16] = [7; 16];
const UNIT: usize = 512;

/// What is put into a segment: where, whether as a page, and its content.
type Piece<'a> = (u8, u16, bool, &'a [u8]);

fn crc(bytes: &[u8]) -> [u8; 4] {
    (checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32).to_le_bytes()
}

fn copy(body: &[u8]) -> Vec<u8> {
    let mut bytes = b"AVM1\x01\x00\x02".to_vec();
    bytes.extend_from_slice(&UUID);
    bytes.extend_from_slice(&FACTS.alignment.to_le_bytes());
    bytes.extend_from_slice(&FACTS.blob_units.to_le_bytes());
    bytes.extend_from_slice(body);
    let crc = crc(&bytes);
    bytes.extend_from_slice(&crc);
    bytes
}

/// A page, or a header of two units, of this content behind what says so.
fn sealed(unit: u32, is_page: bool, content: &[u8]) -> Vec<u8> {
    let (len, skip) = if is_page { (4096, 8) } else { (2 * UNIT, 24) };
    let mut bytes = vec![0; len];
    let used = content.len().min(len - skip);
    bytes[skip..skip + used].copy_from_slice(&content[..used]);
    if is_page {
        bytes[..4].copy_from_slice(b"AVIX");
        let crc = crc(&bytes[8..]);
        bytes[4..8].copy_from_slice(&crc);
    } else {
        bytes[..8].copy_from_slice(b"AVF1\x01\x00\x02\x00");
        bytes[8..24].copy_from_slice(&UUID);
        bytes[48..52].copy_from_slice(&unit.to_le_bytes());
        let crc = crc(&bytes[..len - 4]);
        bytes[len - 4..].copy_from_slice(&crc);
    }
    bytes
}

fuzz_target!(|data: (&[u8], Vec<Piece<'_>>)| {
    let (body, pieces) = data;
    let mut blobs: HashMap<u32, Vec<u8>> = HashMap::new();
    let len = FACTS.blob_bytes() as usize;
    for (blob, unit, is_page, content) in pieces {
        let bytes = blobs.entry(u32::from(blob) % FACTS.blobs).or_insert_with(|| vec![0; len]);
        let unit = u32::from(unit) % 64;
        let sealed = sealed(unit, is_page, content);
        bytes[unit as usize * UNIT..][..sealed.len()].copy_from_slice(&sealed);
    }
    let copy = copy(body);
    let mut rebuild = Rebuild::new(FACTS, UUID, Some(&copy), true);
    let mut checkpoint = None;
    let result = loop {
        let mut has_more = rebuild.turn();
        while let Some((id, op)) = rebuild.next_op() {
            has_more = true;
            let data = match op {
                StoreOp::Read { blob, unit, mut data, len } => {
                    let at = unit as usize * UNIT;
                    let out = &mut data.bytes_mut()[..len as usize];
                    out.fill(0);
                    if let Some(bytes) = blobs.get(&blob.0) {
                        out.copy_from_slice(&bytes[at..at + len as usize]);
                    }
                    Some(data)
                }
                StoreOp::Write { blob, unit, data, len: bytes } => {
                    let blob = blobs.entry(blob.0).or_insert_with(|| vec![0; len]);
                    let at = unit as usize * UNIT;
                    blob[at..at + bytes as usize].copy_from_slice(&data.bytes()[..bytes as usize]);
                    Some(data)
                }
                StoreOp::Checkpoint { bytes } => {
                    checkpoint = Some(bytes);
                    None
                }
                StoreOp::Discard { blob } if blob.0 >= FACTS.blobs => None,
                other => panic!("a rebuild does not do this: {other:?}"),
            };
            rebuild.completed(Done { id, data, result: Ok(()) });
        }
        if let Some(result) = rebuild.take_result() {
            break result;
        }
        assert!(has_more, "a rebuild goes on: {:?}", rebuild.progress());
    };
    assert_eq!(result.is_ok(), checkpoint.is_some());
    if let Some(checkpoint) = checkpoint {
        let settings = Settings { cache_bytes: 1 << 20, ..Settings::default() };
        let from = Recovered { checkpoint, edits: Vec::new() };
        Pool::open(|_| settings, FACTS, UUID, &from).expect("a rebuilt pool opens");
    }
});
