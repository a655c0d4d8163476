//! Tests of the parser: PDUs as the encoder writes them, divided in all ways, and each error that ends a connection.

use super::*;
use crate::tcp::{C2hData, H2cData, HEADER_MAX, R2t};
use aryk_nvme::spec::entry::{CompletionEntry, SubmissionEntry};
use aryk_nvme::spec::status::Code;
use proptest::prelude::*;

const LIMITS: Limits = Limits { capsule_data_max: 8192, data_max: 65536 };
const REQUEST: IcReq = IcReq { alignment: 3, header_digest: true, data_digest: true, max_r2t: 15 };

/// The bytes of a PDU; byte `i` of its data is `seed + i`.
fn bytes_of(header: &Header, format: &Format, seed: u8) -> Vec<u8> {
    let mut bytes = vec![0xee; HEADER_MAX];
    let start = header.encode(format, &mut bytes);
    bytes.truncate(start);
    let data: Vec<u8> = (0..header.data_len()).map(|i| seed.wrapping_add(i as u8)).collect();
    bytes.extend(&data);
    if !data.is_empty() && format.has_data_digest(header.kind()) {
        let mut digest = DataDigest::default();
        digest.update(&data);
        bytes.extend(digest.to_wire());
    }
    assert_eq!(bytes[4..8], (bytes.len() as u32).to_le_bytes(), "PLEN counts everything");
    bytes
}

/// What the parser reports, with adjacent pieces of data joined.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Header(Header),
    Data(Vec<u8>),
    End(bool),
    Failed(Fatal),
}

/// Passes `stream` to a new parser in pieces of these lengths, over and over; the format is settled at the first PDU.
fn parse(receiver: Side, format: Format, stream: &[u8], pieces: &[usize]) -> Vec<Seen> {
    let mut parser = Parser::new(receiver, LIMITS);
    let mut seen = Vec::new();
    let mut lens = pieces.iter().cycle();
    let mut stream = stream;
    while !stream.is_empty() {
        let mut piece = take(&mut stream, *lens.next().unwrap());
        loop {
            match parser.next(&mut piece) {
                Ok(None) => break,
                Ok(Some(Event::Header(header))) => {
                    seen.push(Seen::Header(header));
                    if header.kind().is_initial() {
                        parser.establish(format);
                    }
                }
                Ok(Some(Event::Data { offset, bytes })) => match seen.last_mut() {
                    Some(Seen::Data(data)) => {
                        assert_eq!(offset as usize, data.len(), "data comes in order");
                        data.extend(bytes);
                    }
                    _ => {
                        assert_eq!(offset, 0);
                        seen.push(Seen::Data(bytes.to_vec()));
                    }
                },
                Ok(Some(Event::End { is_intact })) => seen.push(Seen::End(is_intact)),
                Err(fatal) => {
                    assert_eq!(parser.next(&mut &[0; 200][..]), Err(fatal), "an error stays");
                    seen.push(Seen::Failed(fatal));
                    return seen;
                }
            }
        }
        assert!(piece.is_empty(), "the parser takes all input");
    }
    seen
}

fn command(data_len: u32) -> Header {
    let entry = SubmissionEntry::new(0x01, 7).with_cid(0x1234).with_sgl([0, u64::from(data_len) | 1 << 56]);
    Header::Command { entry, data_len }
}

fn from_host() -> Vec<Header> {
    vec![
        command(0),
        command(4096),
        Header::H2cData(H2cData { cid: 1, tag: 2, offset: 4096, len: 8192, is_last: true }),
        command(8192),
        Header::H2cData(H2cData { cid: 0xffff, tag: 0xfffe, offset: 0, len: 4, is_last: false }),
        Header::TermReq {
            from: Side::Host,
            fatal: Fatal { status: FatalStatus(6), information: 8 },
            data_len: 24,
        },
    ]
}

fn from_controller() -> Vec<Header> {
    let completion = CompletionEntry::new(9, Code::LBA_OUT_OF_RANGE.status(), 5).with_sqhd(3);
    vec![
        Header::R2t(R2t { cid: 5, tag: 6, offset: 65536, len: 1 << 20 }),
        Header::Response(completion),
        Header::C2hData(C2hData { cid: 7, offset: 0, len: 512, is_last: false, is_success: false }),
        Header::C2hData(C2hData { cid: 7, offset: 512, len: 65536, is_last: true, is_success: true }),
        Header::TermReq { from: Side::Controller, fatal: Fatal::of(FatalStatus::SEQUENCE), data_len: 0 },
    ]
}

/// A connection's whole stream of one direction, and what a parser reports.
fn stream(first: Header, headers: &[Header], format: &Format) -> (Vec<u8>, Vec<Seen>) {
    let mut bytes = bytes_of(&first, &Format::default(), 0);
    let mut expected = vec![Seen::Header(first), Seen::End(true)];
    for (i, header) in headers.iter().enumerate() {
        let pdu = bytes_of(header, format, i as u8);
        expected.push(Seen::Header(*header));
        if header.data_len() != 0 {
            expected
                .push(Seen::Data((0..header.data_len()).map(|n| (i as u8).wrapping_add(n as u8)).collect()));
        }
        expected.push(Seen::End(true));
        bytes.extend(pdu);
    }
    (bytes, expected)
}

fn answer() -> IcResp {
    IcResp { alignment: 31, header_digest: true, data_digest: false, h2c_data_max: 65536 }
}

fn formats() -> impl Strategy<Value = Format> {
    (any::<bool>(), any::<bool>(), 0_u8..32).prop_map(|(header_digest, data_digest, alignment)| Format {
        header_digest,
        data_digest,
        alignment,
    })
}

proptest! {
    #[test]
    fn any_division_of_a_stream_gives_the_same_events(
        format in formats(),
        pieces in proptest::collection::vec(1_usize..200, 1..40),
        is_host in any::<bool>(),
    ) {
        let (receiver, first, headers) = match is_host {
            true => (Side::Host, Header::IcResp(answer()), from_controller()),
            false => (Side::Controller, Header::IcReq(REQUEST), from_host()),
        };
        let (bytes, expected) = stream(first, &headers, &format);
        prop_assert!(parse(receiver, format, &bytes, &[bytes.len()]) == expected);
        prop_assert!(parse(receiver, format, &bytes, &pieces) == expected);
    }

    #[test]
    fn any_division_of_a_damaged_stream_gives_the_same_events(
        format in formats(),
        pieces in proptest::collection::vec(1_usize..80, 1..40),
        damage in proptest::collection::vec((128_usize..700, any::<u8>()), 1..4),
    ) {
        let (mut bytes, _) = stream(Header::IcReq(REQUEST), &from_host(), &format);
        damage.iter().for_each(|(at, byte)| bytes[*at] = *byte);
        let whole = parse(Side::Controller, format, &bytes, &[bytes.len()]);
        prop_assert!(whole == parse(Side::Controller, format, &bytes, &pieces));
        prop_assert!(whole == parse(Side::Controller, format, &bytes, &[1]));
    }
}

const PLAIN: Format = Format { header_digest: false, data_digest: false, alignment: 0 };
const DIGESTS: Format = Format { header_digest: true, data_digest: true, alignment: 31 };

/// The error for a PDU with these bytes changed, after the first PDU.
fn error(header: &Header, format: Format, change: &[(usize, u8)]) -> Fatal {
    let (receiver, first) = match header.kind().sender() {
        Side::Host => (Side::Controller, Header::IcReq(REQUEST)),
        Side::Controller => (Side::Host, Header::IcResp(answer())),
    };
    let mut pdu = bytes_of(header, &format, 0);
    change.iter().for_each(|&(at, byte)| pdu[at] = byte);
    let mut bytes = bytes_of(&first, &Format::default(), 0);
    bytes.extend(pdu);
    match parse(receiver, format, &bytes, &[bytes.len()]).pop() {
        Some(Seen::Failed(fatal)) => fatal,
        other => panic!("no error, but {other:?}"),
    }
}

#[test]
fn wrong_fields_of_the_common_header_are_named_by_their_offset() {
    let field = Fatal::field;
    let data = Header::H2cData(H2cData { cid: 1, tag: 2, offset: 0, len: 512, is_last: true });
    for kind in [5, 7, 8, 9, 10, 0xff] {
        assert_eq!(error(&command(0), PLAIN, &[(0, kind)]), field(0), "a type of the other side, or unknown");
    }
    assert_eq!(error(&command(0), PLAIN, &[(1, 1)]), field(1), "a header digest that was not settled");
    assert_eq!(error(&command(4096), PLAIN, &[(1, 2)]), field(1));
    assert_eq!(error(&command(4096), DIGESTS, &[(1, 1)]), field(1), "no data digest");
    assert_eq!(error(&command(0), DIGESTS, &[(1, 3)]), field(1), "a digest of no data");
    assert_eq!(error(&command(0), PLAIN, &[(2, 71)]), field(2));
    assert_eq!(error(&data, PLAIN, &[(2, 72)]), field(2));
    assert_eq!(error(&data, PLAIN, &[(3, 20)]), field(3), "data inside of the header");
    assert_eq!(error(&data, PLAIN, &[(3, 25)]), field(3), "not a multiple of 4");
    assert_eq!(error(&data, DIGESTS, &[(3, 64)]), field(3), "not a multiple of 128");
    assert_eq!(error(&command(0), PLAIN, &[(4, 71)]), field(4));
    assert_eq!(error(&command(4), DIGESTS, &[(3, 128), (4, 132)]), field(4), "a digest, but no data");
    assert_eq!(error(&command(4), DIGESTS, &[(3, 128), (4, 131)]), field(4));
    let response = Header::Response(CompletionEntry::default());
    assert_eq!(error(&response, PLAIN, &[(4, 28)]), field(4), "a response has no data");
}

#[test]
fn wrong_fields_of_data_pdus_are_named_by_their_offset() {
    let data = Header::H2cData(H2cData { cid: 1, tag: 2, offset: 8, len: 512, is_last: true });
    assert_eq!(error(&data, PLAIN, &[(12, 9)]), Fatal::field(12), "DATAO is a number of dwords");
    assert_eq!(
        error(&data, PLAIN, &[(12, 0), (13, 0xff), (14, 0xff), (15, 0xff), (16, 0)]),
        Fatal::field(12)
    );
    assert_eq!(error(&data, PLAIN, &[(16, 4)]), Fatal::field(16), "DATAL is not what PLEN says");
    assert_eq!(error(&data, PLAIN, &[(17, 0), (4, 24)]), Fatal::field(16), "no data");
    let odd = Header::H2cData(H2cData { cid: 1, tag: 2, offset: 8, len: 511, is_last: true });
    assert_eq!(error(&odd, PLAIN, &[]), Fatal::field(16));
    let read = Header::C2hData(C2hData { cid: 1, offset: 0, len: 512, is_last: true, is_success: true });
    assert_eq!(error(&read, PLAIN, &[(1, 8)]), Fatal::field(1), "SUCCESS before the last PDU");
    let r2t = Header::R2t(R2t { cid: 1, tag: 1, offset: 0, len: 4096 });
    assert_eq!(error(&r2t, PLAIN, &[(17, 0)]), Fatal::field(16), "an R2T for nothing");
}

#[test]
fn data_beyond_the_limits_and_wrong_header_digests_end_the_connection() {
    let limit = Fatal::of(FatalStatus::LIMIT_EXCEEDED);
    assert_eq!(error(&command(8196), PLAIN, &[]), limit);
    let data = |len| Header::H2cData(H2cData { cid: 1, tag: 2, offset: 0, len, is_last: true });
    assert_eq!(error(&data(65540), DIGESTS, &[]), limit);
    let long = Header::TermReq { from: Side::Host, fatal: Fatal::of(FatalStatus::SEQUENCE), data_len: 129 };
    assert_eq!(error(&long, PLAIN, &[]), Fatal::field(4));
    let bytes = bytes_of(&data(512), &DIGESTS, 0);
    let received = u32::from_le_bytes(*bytes[24..].first_chunk().unwrap());
    let expected = Fatal { status: FatalStatus::HEADER_DIGEST, information: received };
    assert_eq!(error(&data(512), DIGESTS, &[(9, 1)]), expected);
}

#[test]
fn a_wrong_data_digest_fails_one_pdu_only() {
    let (mut bytes, mut expected) = stream(Header::IcReq(REQUEST), &[command(512), command(0)], &DIGESTS);
    bytes[128 + 128 + 512] ^= 1;
    expected[4] = Seen::End(false);
    assert_eq!(parse(Side::Controller, DIGESTS, &bytes, &[77]), expected);
}

#[test]
fn the_first_pdu_opens_the_connection_once() {
    let sequence = Fatal::of(FatalStatus::SEQUENCE);
    let first = bytes_of(&command(0), &PLAIN, 0);
    assert_eq!(parse(Side::Controller, PLAIN, &first, &[100]), [Seen::Failed(sequence)]);
    assert_eq!(error(&Header::IcReq(REQUEST), PLAIN, &[]), sequence);

    let mut parser = Parser::new(Side::Controller, LIMITS);
    let (bytes, _) = stream(Header::IcReq(REQUEST), &[command(0)], &PLAIN);
    let mut input = &bytes[..];
    assert_eq!(parser.next(&mut input), Ok(Some(Event::Header(Header::IcReq(REQUEST)))));
    assert_eq!(parser.next(&mut input), Ok(Some(Event::End { is_intact: true })));
    assert_eq!(parser.next(&mut input), Err(sequence), "a command before the format is settled");
    assert_eq!(parser.failed_header(), &bytes[128..136]);
}

#[test]
fn parameters_of_the_first_pdu_are_checked() {
    let failure = |receiver, header, at: usize, byte| {
        let mut bytes = bytes_of(&header, &PLAIN, 0);
        bytes[at] = byte;
        let Some(Seen::Failed(fatal)) = parse(receiver, PLAIN, &bytes, &[50]).pop() else {
            panic!("accepted")
        };
        fatal
    };
    let (request, response) = (Header::IcReq(REQUEST), Header::IcResp(answer()));
    assert_eq!(failure(Side::Controller, request, 9, 1), Fatal::unsupported(8));
    assert_eq!(failure(Side::Host, response, 8, 1), Fatal::unsupported(8));
    assert_eq!(failure(Side::Controller, request, 10, 32), Fatal::field(10));
    assert_eq!(failure(Side::Host, response, 12, 2), Fatal::field(12));
    assert_eq!(failure(Side::Host, response, 14, 0), Fatal::field(12), "MAXH2CDATA is at least 4,096");
    assert_eq!(failure(Side::Controller, request, 4, 0), Fatal::field(4));
    assert_eq!(failure(Side::Controller, request, 4, 129), Fatal::field(4));
}

#[test]
fn digests_are_used_where_both_sides_want_them() {
    let supported = IcResp { header_digest: true, data_digest: true, ..answer() };
    let request = IcReq { data_digest: false, ..REQUEST };
    let answer = request.answer(supported);
    assert_eq!((answer.header_digest, answer.data_digest, answer.alignment), (true, false, 31));
    assert_eq!(request.check(&answer), Ok(()));
    assert_eq!(request.check(&supported), Err(Fatal::field(11)));
    assert_eq!((request.c2h_format(&answer).alignment, answer.h2c_format().alignment), (3, 31));
}

#[test]
fn parsing_and_encoding_allocate_nothing() {
    let (bytes, _) = stream(Header::IcReq(REQUEST), &from_host(), &DIGESTS);
    let mut parser = Parser::new(Side::Controller, LIMITS);
    let mut out = [0; HEADER_MAX];
    let count = allocation_counter::measure(|| {
        for mut piece in bytes.chunks(50) {
            while let Ok(Some(event)) = parser.next(&mut piece) {
                match event {
                    Event::Header(Header::IcReq(_)) => parser.establish(DIGESTS),
                    Event::Header(header) => {
                        header.encode(&DIGESTS, &mut out);
                    }
                    _ => {}
                }
            }
        }
    });
    assert_eq!(count.count_total, 0);
}
