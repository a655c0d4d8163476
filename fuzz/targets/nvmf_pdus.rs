//! A peer's stream of NVMe/TCP PDUs: arbitrary bytes, for a controller or a host, with any format.
//!
//! For any input, no code panics, the events do not depend on how the stream is divided, data stays within its PDU and the
//! limits, and what was accepted is accepted again when it is written by the encoder.
#![no_main]

use aryk_nvme_fabrics::tcp::{
    DataDigest, Event, Fatal, Format, HEADER_MAX, Header, IcReq, IcResp, Limits, Parser, Side,
};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;

const LIMITS: Limits = Limits { capsule_data_max: 8192, data_max: 16384 };

/// What the parser reported; data as its length and digest.
#[derive(Debug, PartialEq)]
enum Seen {
    Header(Header),
    Data(u32, u32),
    End(bool),
    Failed(Fatal),
}

fn parse(side: Side, format: Format, stream: &[u8], mut piece_len: impl FnMut() -> usize) -> Vec<Seen> {
    let mut parser = Parser::new(side, LIMITS);
    let (mut seen, mut left) = (Vec::new(), stream);
    let (mut header, mut digest, mut len) = (None::<Header>, DataDigest::default(), 0);
    while !left.is_empty() {
        let (mut piece, rest) = left.split_at(piece_len().clamp(1, left.len()));
        left = rest;
        loop {
            match parser.next(&mut piece) {
                Ok(None) => break,
                Ok(Some(Event::Header(new))) => {
                    assert!(header.is_none() && new.data_len() <= 16384);
                    seen.push(Seen::Header(new));
                    (header, digest, len) = (Some(new), DataDigest::default(), 0);
                    if matches!(new, Header::IcReq(_) | Header::IcResp(_)) {
                        parser.establish(format);
                    }
                }
                Ok(Some(Event::Data { offset, bytes })) => {
                    assert!(offset == len && !bytes.is_empty());
                    digest.update(bytes);
                    len += bytes.len() as u32;
                }
                Ok(Some(Event::End { is_intact })) => {
                    assert_eq!(header.take().map(|header| header.data_len()), Some(len));
                    seen.push(Seen::Data(len, digest.value()));
                    seen.push(Seen::End(is_intact));
                }
                Err(fatal) => {
                    assert!(parser.failed_header().len() <= HEADER_MAX);
                    seen.push(Seen::Failed(fatal));
                    return seen;
                }
            }
        }
        assert!(piece.is_empty());
    }
    seen
}

/// Writes a header again, with data, and reads it.
fn write_again(side: Side, format: Format, header: &Header) {
    let first = match side {
        Side::Controller => {
            Header::IcReq(IcReq { alignment: 0, header_digest: false, data_digest: false, max_r2t: 0 })
        }
        Side::Host => Header::IcResp(IcResp {
            alignment: 0,
            header_digest: false,
            data_digest: false,
            h2c_data_max: 4096,
        }),
    };
    let mut stream = vec![0; 2 * HEADER_MAX];
    let start = first.encode(&Format::default(), &mut stream);
    let end = start + header.encode(&format, &mut stream[start..]);
    stream.truncate(end);
    stream.resize(end + header.data_len() as usize, 0);
    let seen = parse(side, format, &stream, || usize::MAX);
    // The first PDU has a header, no data, and an end.
    assert_eq!(seen.get(3), Some(&Seen::Header(*header)));
}

fn run(mut u: Unstructured<'_>) -> Result<()> {
    let side = if u.arbitrary()? { Side::Controller } else { Side::Host };
    let format = Format {
        header_digest: u.arbitrary()?,
        data_digest: u.arbitrary()?,
        alignment: u.int_in_range(0..=31)?,
    };
    let pieces: [u8; 4] = u.arbitrary()?;
    let stream = u.take_rest();
    let mut next = pieces.iter().cycle();
    let whole = parse(side, format, stream, || usize::MAX);
    let divided = parse(side, format, stream, || usize::from(*next.next().expect("a cycle")));
    assert_eq!(whole, divided);
    for seen in &whole {
        match seen {
            Seen::Header(header) if !matches!(header, Header::IcReq(_) | Header::IcResp(_)) => {
                write_again(side, format, header);
            }
            _ => {}
        }
    }
    Ok(())
}

fuzz_target!(|data: &[u8]| {
    let _ = run(Unstructured::new(data));
});
