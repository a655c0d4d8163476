//! Manifests of pools: a checkpoint and an edit as they are, and with a right head and checksum around any content.
//!
//! No content makes the reader panic or allocate much; a pool that opens on it can tell its volumes and its sizes, and starts to
//! read its log.
#![no_main]

use aryk_volume::{Pool, Recovered, Settings, StoreFacts};
use libfuzzer_sys::fuzz_target;

const FACTS: StoreFacts = StoreFacts { alignment: 512, blob_units: 65_536, blobs: 64 };
const UUID: [u8; 16] = [7; 16];

fuzz_target!(|data: (&[u8], &[u8])| {
    let (checkpoint, edit) = data;
    open(checkpoint.to_vec(), edit.to_vec());
    open(whole(checkpoint, true), whole(edit, false));
});

fn whole(body: &[u8], is_checkpoint: bool) -> Vec<u8> {
    let mut bytes = b"AVM1\x01\x00".to_vec();
    bytes.push(u8::from(is_checkpoint));
    bytes.extend_from_slice(&UUID);
    bytes.extend_from_slice(&FACTS.alignment.to_le_bytes());
    bytes.extend_from_slice(&FACTS.blob_units.to_le_bytes());
    bytes.extend_from_slice(body);
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &bytes) as u32;
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes
}

fn open(checkpoint: Vec<u8>, edit: Vec<u8>) {
    let settings = Settings { cache_bytes: 1 << 20, ..Settings::default() };
    let from = Recovered { checkpoint, edits: vec![edit] };
    let Ok(mut pool) = Pool::open(|_| settings, FACTS, UUID, &from) else { return };
    assert!(pool.volumes().all(|(_, volume)| volume.units <= aryk_volume::VOLUME_UNITS_MAX));
    let _ = (pool.stats(), pool.foreign_disks());
    pool.turn();
}
