//! What a target of NVMe over TCP sends to a host: any bytes after ICResp, in pieces of any size, while commands are in flight.
//!
//! For any input, no code panics. Data lies within what its command reads, a command completes once, and the host sends no data
//! beyond what the command writes. What is reported does not depend on how the bytes are divided.
#![no_main]

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::opcode::io;
use aryk_nvme_fabrics::Transfer;
use aryk_nvme_fabrics::tcp::{Format, HEADER_MAX, Header, HostQueue, HostReceived, IcReq, IcResp};
use libfuzzer_sys::fuzz_target;

const COMMANDS: u16 = 6;
const DATA_MAX: u32 = 1 << 16;

/// What came of some bytes: data with its place, completions, and whether the connection goes on.
#[derive(Debug, Default, PartialEq)]
struct Seen {
    data: Vec<(u16, u32, u8)>,
    completed: Vec<(u16, u16, bool)>,
    has_ended: bool,
}

const fn transfer(cid: u16) -> Transfer {
    match cid {
        0 | 1 => Transfer::ToHost(4096 * (cid as u32 + 1)),
        2 | 3 => Transfer::ToController(16_384 * (cid as u32 - 1)),
        _ => Transfer::None,
    }
}

/// Gives a host the bytes in pieces. With `answers`, it sends what was requested after each piece.
fn play(flags: u8, bytes: &[u8], piece: usize, answers: bool) -> Seen {
    let (header_digest, data_digest) = (flags & 1 != 0, flags & 2 != 0);
    let request = IcReq { alignment: 0, header_digest, data_digest, max_r2t: 0 };
    let mut host = HostQueue::new(request, COMMANDS, DATA_MAX);
    let mut out = vec![0; 1 << 17];
    host.encode(&mut out, |_, _, _| {});
    let answer = IcResp { alignment: 0, header_digest, data_digest, h2c_data_max: 4096 };
    let mut first = [0; HEADER_MAX];
    let len = Header::IcResp(answer).encode(&Format::default(), &mut first);
    let mut input = &first[..len];
    assert_eq!(host.receive(&mut input), Ok(Some(HostReceived::Established)));
    for cid in 0..COMMANDS {
        let opcode = if cid < 2 { io::READ } else { io::WRITE };
        host.submit(cid, SubmissionEntry::new(opcode, 1), transfer(cid));
    }
    let (mut seen, mut is_running) = (Seen::default(), [true; COMMANDS as usize]);
    host.encode(&mut out, |_, _, _| {});
    for mut input in bytes.chunks(piece) {
        loop {
            match host.receive(&mut input) {
                Ok(None) => break,
                Ok(Some(HostReceived::Data { cid, offset, bytes })) => {
                    let Transfer::ToHost(len) = transfer(cid) else { panic!("data of a command without") };
                    assert!(is_running[usize::from(cid)] && offset + bytes.len() as u32 <= len);
                    seen.data.extend(bytes.iter().zip(offset..).map(|(byte, at)| (cid, at, *byte)));
                }
                Ok(Some(HostReceived::Completed { cid, status, is_intact, .. })) => {
                    assert!(std::mem::take(&mut is_running[usize::from(cid)]), "a command completes once");
                    seen.completed.push((cid, status.bits(), is_intact));
                }
                Ok(Some(HostReceived::Established)) => panic!("the connection was established before"),
                Ok(Some(HostReceived::Terminated(_))) | Err(_) => {
                    seen.has_ended = true;
                    return seen;
                }
            }
        }
        if !answers {
            continue;
        }
        host.encode(&mut out, |cid, offset, to| {
            let Transfer::ToController(len) = transfer(cid) else { panic!("no data is sent of it") };
            assert!(offset + to.len() as u32 <= len, "no more than the command writes");
            to.fill(cid as u8);
        });
    }
    seen
}

fuzz_target!(|input: &[u8]| {
    let [flags, piece, bytes @ ..] = input else { return };
    let piece = usize::from(*piece) + 1;
    assert_eq!(play(*flags, bytes, bytes.len().max(1), false), play(*flags, bytes, piece, false));
    play(*flags, bytes, piece, true);
});
