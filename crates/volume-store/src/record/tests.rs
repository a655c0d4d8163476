//! Records of any content.

use super::*;

fn sample() -> (Header, Vec<u8>) {
    let payload: Vec<u8> = (0..10_000_u32).map(|n| n as u8).collect();
    let mut header = Header::new(Kind::Edits, Uuid::from_u128(77), 5, &payload);
    (header.sequence, header.previous) = (9, 0x1234_5678);
    (header, payload)
}

#[test]
fn a_header_is_read_as_it_was_written() {
    let (header, payload) = sample();
    assert_eq!(Header::parse(&header.encode()), Some(header));
    assert!(header.is_of(&payload));
    assert_eq!(header.bytes(), 12288);
    assert_eq!(record_bytes(4096 - HEADER_BYTES), 4096);
    assert_eq!(record_bytes(4096 - HEADER_BYTES + 1), 8192);
}

#[test]
fn each_changed_bit_is_found() {
    let (header, mut payload) = sample();
    let bytes = header.encode();
    for n in 0..HEADER_BYTES * 8 {
        let mut changed = bytes;
        changed[n / 8] ^= 1 << (n % 8);
        assert_eq!(Header::parse(&changed), None);
    }
    assert_eq!(Header::parse(&bytes[..HEADER_BYTES - 1]), None);
    for n in (0..payload.len() * 8).step_by(97) {
        payload[n / 8] ^= 1 << (n % 8);
        assert!(!header.is_of(&payload));
        payload[n / 8] ^= 1 << (n % 8);
    }
}

#[test]
fn the_link_depends_on_all_but_the_successor() {
    let (header, _) = sample();
    assert_eq!(Header { successor: 8, ..header }.link(), header.link());
    assert_ne!(Header { previous: 8, ..header }.link(), header.link());
    assert_ne!(Header { payload: 8, ..header }.link(), header.link());
}

#[test]
fn a_checkpoint_is_the_first_record_and_edits_are_not() {
    let (header, _) = sample();
    assert_eq!(Header::parse(&Header { sequence: 0, ..header }.encode()), None);
    assert_eq!(Header::parse(&Header { kind: Kind::Checkpoint, ..header }.encode()), None);
    let checkpoint = Header { kind: Kind::Checkpoint, sequence: 0, ..header };
    assert_eq!(Header::parse(&checkpoint.encode()), Some(checkpoint));
}

#[test]
fn edits_come_back_in_their_order() {
    let all = [b"one".to_vec(), Vec::new(), vec![3; 5000]];
    let mut payload = Vec::new();
    for edit in &all {
        assert!(push_edit(&mut payload, edit));
    }
    assert_eq!(edits(&payload).unwrap(), all);
    for len in [1, 3, 6, payload.len() - 1] {
        assert_eq!(edits(&payload[..len]), None, "{len}");
    }
    payload.extend_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(edits(&payload), None);
    let mut long = vec![0; EDITS_BYTES_MAX - 8];
    assert!(!push_edit(&mut long, &[0; 5]));
    assert!(push_edit(&mut long, &[0; 4]));
}

#[test]
fn the_fixture_is_read_for_ever() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/edits-v1.bin");
    let mut payload = Vec::new();
    assert!(push_edit(&mut payload, b"first edit") && push_edit(&mut payload, b"second"));
    let mut header = Header::new(Kind::Edits, Uuid::from_u128(77), 5, &payload);
    (header.sequence, header.previous) = (1, 0x1234_5678);
    if std::env::var_os("ARYK_WRITE_FIXTURES").is_some() {
        std::fs::write(path, [&header.encode()[..], &payload].concat()).unwrap();
    }
    let bytes = std::fs::read(path).expect("a fixture of version 1");
    let read = Header::parse(&bytes).expect("a header of version 1");
    assert_eq!(read, header);
    assert!(read.is_of(&bytes[HEADER_BYTES..]));
    assert_eq!(edits(&bytes[HEADER_BYTES..]).unwrap(), [b"first edit".to_vec(), b"second".to_vec()]);
}
