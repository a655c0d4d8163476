//! Frames of volumes: headers as they are, and with a right checksum around any content.
//!
//! No content makes the reader panic. What it accepts has its records within the frame's data, and encodes to a header that reads
//! the same.
#![no_main]

use aryk_volume::frame::{Frame, checksums_mut, encode, header_bytes};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    check(data);
    // The same bytes as a header of one to four units, with its magic and checksum.
    let units = 1 + data.first().map_or(0, |byte| usize::from(*byte % 4));
    let mut header = vec![0; units * 512];
    let len = data.len().min(header.len());
    header[..len].copy_from_slice(&data[..len]);
    header[..4].copy_from_slice(b"AVF1");
    header[4..6].copy_from_slice(&1_u16.to_le_bytes());
    header[6..8].copy_from_slice(&(units as u16).to_le_bytes());
    let end = header.len() - 4;
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &header[..end]) as u32;
    header[end..].copy_from_slice(&crc.to_le_bytes());
    check(&header);
});

fn check(bytes: &[u8]) {
    let Ok(frame) = Frame::parse(bytes) else { return };
    let records: Vec<_> = frame.records().collect();
    for record in &records {
        assert!(record.data + record.data_blocks() <= frame.data_blocks());
        assert!(usize::from(record.partition) < aryk_volume::PARTITIONS && record.blocks > 0);
    }
    let blocks = frame.data_blocks();
    assert_eq!(frame.units(), frame.header_units() + blocks * aryk_volume::BLOCK_UNITS);
    let mut again = vec![0xff; header_bytes(records.len(), blocks as usize, 512) as usize];
    checksums_mut(&mut again, records.len(), blocks as usize).copy_from_slice(frame.checksums());
    encode(&mut again, &frame.head(), &records, blocks);
    let second = Frame::parse(&again).expect("encoded");
    assert_eq!(second.head(), frame.head());
    assert!(second.records().eq(records.iter().copied()));
    assert!((0..blocks).all(|at| second.checksum(at) == frame.checksum(at)));
}
