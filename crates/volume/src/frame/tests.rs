//! Tests of frames.

use super::*;

fn head() -> Head {
    Head { uuid: [3; 16], life: 77, sequence: 12, stream: 1, unit: 40, durable: 9 }
}

fn records() -> Vec<Record> {
    let record = |kind, block, blocks, data| Record {
        timeline: TimelineId(5),
        partition: 3,
        kind,
        commit: Commit::new(99).unwrap(),
        block,
        blocks,
        data,
    };
    vec![record(Kind::Data, 7, 2, 0), record(Kind::Zero, 100, 9, 2), record(Kind::Data, 1 << 40, 1, 2)]
}

fn encoded(alignment: u32) -> Vec<u8> {
    encoded_as(&head(), alignment)
}

fn encoded_as(head: &Head, alignment: u32) -> Vec<u8> {
    let mut out = vec![0xaa; header_bytes(3, 3, alignment) as usize];
    checksums_mut(&mut out, 3, 3).copy_from_slice(&[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
    encode(&mut out, head, &records(), 3);
    out
}

#[test]
fn a_header_is_read_as_it_was_written() {
    for alignment in [512, 4096] {
        let bytes = encoded(alignment);
        assert_eq!(bytes.len(), alignment as usize);
        let frame = Frame::parse(&bytes).unwrap();
        assert_eq!(frame.head(), head());
        assert_eq!(frame.records().collect::<Vec<_>>(), records());
        assert_eq!((0..3).map(|at| frame.checksum(at)).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(frame.units(), alignment / UNIT + 24);
    }
}

#[test]
fn a_frame_moves_to_another_place() {
    let mut bytes = encoded(512);
    relocate(&mut bytes, 78, 0);
    let frame = Frame::parse(&bytes).unwrap();
    assert_eq!(frame.head(), Head { life: 78, unit: 0, ..head() });
    assert_eq!(frame.records().collect::<Vec<_>>(), records());
}

#[test]
fn every_changed_bit_is_found() {
    let bytes = encoded(512);
    for bit in 0..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(Frame::parse(&changed).is_err(), "bit {bit}");
    }
    assert!(Frame::parse(&bytes[..511]).is_err());
}

#[test]
fn wrong_fields_with_a_right_checksum_are_refused() {
    for (at, value) in
        [(6, 0), (52, 2), (52, 255), (44, 2), (47, 255), (68, 16), (69, 4), (92, 1), (69, 3), (88, 0)]
    {
        let mut bytes = encoded(512);
        bytes[at] = value;
        seal(&mut bytes);
        assert!(Frame::parse(&bytes).is_err(), "{value} at {at}");
    }
}

/// What version 1 of the format wrote.
#[test]
fn a_header_of_version_1_is_read_and_written_as_then() {
    let fixture = include_bytes!("../../fixtures/frame-v1");
    // The first writers of this version wrote a zero for what is durable.
    assert_eq!(encoded_as(&Head { durable: 0, ..head() }, 512), fixture);
    assert_eq!(Frame::parse(fixture).unwrap().records().collect::<Vec<_>>(), records());
}
