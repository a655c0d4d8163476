//! Byte vectors written by hand from "Message Specification", little-endian.

use super::*;

fn decode(bytes: &[u8]) -> Result<Vec<Message>, Error> {
    decode_in_steps(bytes, usize::MAX)
}

/// Feeds at most `step` bytes at a time.
fn decode_in_steps(mut bytes: &[u8], step: usize) -> Result<Vec<Message>, Error> {
    let (mut decoder, mut messages) = (Decoder::default(), Vec::new());
    while !bytes.is_empty() {
        let space = decoder.space();
        assert!(!space.is_empty());
        let n = space.len().min(bytes.len()).min(step);
        space[..n].copy_from_slice(&bytes[..n]);
        bytes = &bytes[n..];
        messages.extend(decoder.filled(n)?);
    }
    assert_eq!(decoder.pending(), 0, "the bytes end with a message");
    Ok(messages)
}

fn one(bytes: &[u8]) -> Message {
    let mut messages = decode(bytes).expect("decodes");
    assert_eq!(messages.len(), 1);
    messages.pop().expect("one")
}

/// `[request, flags, size]` and the payload.
fn raw(code: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![code, 0, 0, 0, flags, 0, 0, 0];
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(payload);
    bytes
}

#[rustfmt::skip]
const SET_VRING_ADDR: &[u8] = &[
    9, 0, 0, 0,  9, 0, 0, 0,  40, 0, 0, 0,
    3, 0, 0, 0,  0, 0, 0, 0,
    0x00, 0x10, 0, 0, 1, 0, 0, 0, // descriptor table
    0x00, 0x30, 0, 0, 1, 0, 0, 0, // used ring, which comes first
    0x00, 0x20, 0, 0, 1, 0, 0, 0, // the available ring
    0, 0, 0, 0, 0, 0, 0, 0,
];

#[test]
fn addresses_of_a_ring() {
    let addr = VringAddr {
        index: 3,
        flags: 0,
        desc: 0x1_0000_1000,
        used: 0x1_0000_3000,
        avail: 0x1_0000_2000,
        log: 0,
    };
    let message = one(SET_VRING_ADDR);
    assert_eq!(message.request, Request::SetVringAddr(addr));
    assert!(message.need_reply);
    assert_eq!(message.code.to_string(), "SET_VRING_ADDR");
}

#[test]
fn kick_with_and_without_fd() {
    let with = one(&raw(12, 1, &[5, 0, 0, 0, 0, 0, 0, 0])).request;
    assert_eq!(with, Request::SetVringKick(VringFd { index: 5, has_fd: true }));
    assert_eq!(with.fds(), (1..=1, FdKind::Event));
    let without = one(&raw(12, 1, &[5, 1, 0, 0, 0, 0, 0, 0])).request;
    assert_eq!(without, Request::SetVringKick(VringFd { index: 5, has_fd: false }));
    assert_eq!(without.fds(), (0..=0, FdKind::Event));
}

/// A region whose fields are `n`, `n + 1`, `n + 2` and `n + 3`.
fn region(n: u8) -> (RegionDesc, Vec<u8>) {
    let bytes = (0..4).flat_map(|i| u64::from(n + i).to_le_bytes()).collect();
    let [guest_addr, size, user_addr, mmap_offset] = [0, 1, 2, 3].map(|i| u64::from(n + i));
    (RegionDesc { guest_addr, size, user_addr, mmap_offset }, bytes)
}

#[test]
fn memory_table_with_and_without_unused_regions() {
    let ((a, a_bytes), (b, b_bytes)) = (region(10), region(20));
    let exact = [&[2, 0, 0, 0, 0, 0, 0, 0], &a_bytes[..], &b_bytes].concat();
    let expected = Request::SetMemTable(vec![a, b]);
    assert_eq!(one(&raw(5, 1, &exact)).request, expected);
    assert_eq!(expected.fds(), (2..=2, FdKind::Memory));
    let mut all = exact.clone();
    all.resize(8 + 8 * 32, 0xff);
    assert_eq!(one(&raw(5, 1, &all)).request, expected);
    all.push(0);
    assert!(matches!(decode(&raw(5, 1, &all)), Err(Error::BadSize { .. })));
    assert!(matches!(decode(&raw(5, 1, &exact[..71])), Err(Error::BadSize { .. })));
    let nine = [&[9, 0, 0, 0, 0, 0, 0, 0], &[0; 9 * 32][..]].concat();
    assert!(matches!(decode(&raw(5, 1, &nine)), Err(Error::BadPayload { .. })));
}

#[test]
fn single_region_has_padding_before_it() {
    let (desc, bytes) = region(1);
    let padded = [&[0xee; 8], &bytes[..]].concat();
    assert_eq!(one(&raw(37, 1, &padded)).request, Request::AddMemReg(desc));
    assert_eq!(one(&raw(38, 1, &padded)).request, Request::RemMemReg(desc));
    assert!(decode(&raw(37, 1, &bytes)).is_err());
}

#[test]
fn configuration_space() {
    let header = [20, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0];
    let get = Request::GetConfig { offset: 20, size: 2, flags: 0 };
    assert_eq!(one(&raw(24, 1, &[&header[..], &[0, 0]].concat())).request, get);
    assert_eq!(one(&raw(24, 1, &header)).request, get);
    let set = Request::SetConfig { offset: 20, data: vec![7, 8] };
    assert_eq!(one(&raw(25, 1, &[&header[..], &[7, 8]].concat())).request, set);
    assert!(matches!(decode(&raw(25, 1, &header)), Err(Error::BadSize { .. })));
    let beyond = [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    assert!(matches!(decode(&raw(24, 1, &beyond)), Err(Error::BadPayload { .. })));
    let wrapping = [0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 0, 0, 0];
    assert!(matches!(decode(&raw(24, 1, &wrapping)), Err(Error::BadPayload { .. })));
}

#[test]
fn in_flight_regions_with_and_without_padding() {
    #[rustfmt::skip]
    let bytes = [0, 0x10, 0, 0, 0, 0, 0, 0,  0, 0x20, 0, 0, 0, 0, 0, 0,  4, 0,  0, 1];
    let desc = InflightDesc { size: 0x1000, offset: 0x2000, num_queues: 4, queue_size: 256, padding: [0; 4] };
    let padded = [&bytes[..], &[0xee; 4]].concat();
    assert_eq!(one(&raw(31, 1, &bytes)).request, Request::GetInflightFd { desc, padded: false });
    assert_eq!(one(&raw(31, 1, &padded)).request, Request::GetInflightFd { desc, padded: true });
    assert_eq!(one(&raw(32, 1, &bytes)).request, Request::SetInflightFd(desc));
    assert_eq!(one(&raw(32, 1, &padded)).request.fds(), (1..=1, FdKind::Memory));
    for len in [0, 16, 19, 21, 23, 25] {
        let error = decode(&raw(32, 1, &[0; 25][..len])).expect_err("length");
        assert!(matches!(error, Error::BadSize { .. }), "{len}: {error}");
    }
    assert_eq!(reply_inflight(&desc, false), raw(31, 5, &bytes));
    assert_eq!(reply_inflight(&desc, true), raw(31, 5, &[&bytes[..], &[0; 4]].concat()));
}

#[test]
fn logs_status_and_reset() {
    let log = Request::SetLogBase(LogDesc { size: 0x100, offset: 0x200 });
    assert_eq!(one(&raw(6, 1, &[0, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0])).request, log);
    assert_eq!(log.fds(), (1..=1, FdKind::Memory));
    assert!(
        matches!(decode(&raw(6, 1, &[0; 8])), Err(Error::BadSize { .. })),
        "the kernel's form, with an address"
    );
    assert_eq!(one(&raw(7, 1, &[])).request, Request::SetLogFd);
    assert_eq!(one(&raw(34, 1, &[])).request, Request::ResetDevice);
    assert_eq!(one(&raw(39, 1, &[15, 0, 0, 0, 0, 0, 0, 0])).request, Request::SetStatus(15));
    assert_eq!(one(&raw(40, 1, &[])).request, Request::GetStatus);
}

#[test]
fn replies() {
    assert_eq!(reply_u64(Code(1), 0x0102), raw(1, 5, &[2, 1, 0, 0, 0, 0, 0, 0]));
    let config = [4, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 9, 8, 7];
    assert_eq!(reply_config(4, 0, &[9, 8, 7]), raw(24, 5, &config));
    assert_eq!(config_change(), raw(2, 1, &[]));
}

#[test]
fn bad_headers() {
    for flags in [0, 2, 3, 5] {
        let error = decode(&raw(1, flags, &[])).expect_err("flags");
        assert!(matches!(error, Error::BadVersion { .. }), "{flags}: {error}");
    }
    let mut long = raw(1, 1, &[]);
    long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(decode(&long), Err(Error::TooLong { size: u32::MAX, .. })));
    let error = decode(&raw(200, 1, &[])).expect_err("unknown");
    assert_eq!(error.to_string(), "request 200: unknown request");
    assert!(matches!(decode(&raw(1, 1, &[0])), Err(Error::BadSize { .. })));
}

#[test]
fn messages_may_arrive_in_any_pieces() {
    let bytes = [SET_VRING_ADDR, &raw(1, 1, &[]), &raw(8, 1, &[1, 0, 0, 0, 0, 1, 0, 0])].concat();
    let whole = decode(&bytes).expect("decodes");
    assert_eq!(whole.len(), 3);
    for step in 1..bytes.len() {
        assert_eq!(decode_in_steps(&bytes, step).expect("decodes"), whole, "{step} bytes at a time");
    }
}

proptest::proptest! {
    #[test]
    fn any_bytes(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..600), code in 0_u32..45) {
        if let Ok(request) = Request::parse(Code(code), &bytes) {
            let (count, _) = request.fds();
            proptest::prop_assert!(*count.end() <= FDS_MAX);
        }
    }
}
