//! The first bytes of TLS connections, of any content, to both sides, among those that the sides send each other; and the text of
//! keys.
//!
//! For any input, no code panics, what a side answers and takes is bounded, no handshake with another key completes, and records
//! that were changed give no data.
#![no_main]

use aryk_nvme_fabrics::psk::ConfiguredPsk;
use aryk_tls::{HANDSHAKE_MAX, Hash, Progress, Psk, Psks, Session, TlsError};
use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, LazyLock};

fn keys(byte: u8) -> [Psk; 2] {
    [("short", Hash::Sha256), ("long", Hash::Sha384)]
        .map(|(identity, hash)| Psk::new(identity, &[byte; 48], hash).expect("valid"))
}

static OFFERED: LazyLock<[Psk; 2]> = LazyLock::new(|| keys(1));
static KNOWN: LazyLock<[Arc<Psks>; 2]> = LazyLock::new(|| {
    [1, 2].map(|byte| Arc::new(keys(byte).into_iter().map(|key| (key.identity().into(), key)).collect()))
});

/// Gives a side bytes in pieces. Returns what it found.
fn feed(side: &mut Session, bytes: &[u8], piece: usize, output: &mut Vec<u8>) -> Result<Progress, TlsError> {
    let mut found = Ok(Progress::Pending);
    for piece in bytes.chunks(piece) {
        let mut input = piece;
        found = side.handshake(&mut input, output);
        if found != Ok(Progress::Pending) {
            break;
        }
        assert!(input.is_empty(), "a side that waits has taken all");
    }
    found
}

fuzz_target!(|input: &[u8]| {
    let _ = ConfiguredPsk::parse(input);
    let Some((&[kind, piece], mut rest)) = input.split_first_chunk() else { return };
    let (is_known, piece) = (kind & 1 == 0, usize::from(piece) + 1);
    let known = &KNOWN[usize::from(!is_known)];
    let mut host = Session::connect(OFFERED.to_vec()).expect("a side");
    let mut target = Session::accept(Arc::clone(known)).expect("a side");
    let (mut to_target, mut to_host) = (Vec::new(), Vec::new());
    host.handshake(&mut &[][..], &mut to_target).expect("it begins");
    let mut found = [Ok(Progress::Pending); 2];
    let mut is_changed = false;
    for round in 0..4 {
        // A byte says how the bytes of the other side are changed: not, in one place, or by those of the input.
        let Some((&[how, at, byte], after)) = rest.split_first_chunk() else { return };
        rest = after;
        let from = if round % 2 == 0 { &mut to_target } else { &mut to_host };
        let mut bytes = std::mem::take(from);
        match how % 3 {
            1 if !bytes.is_empty() && byte != 0 => {
                let at = (usize::from(at) * bytes.len()) >> 8;
                bytes[at] ^= byte;
                is_changed = true;
            }
            2 => {
                let (taken, after) = rest.split_at(rest.len().min(usize::from(at) * 16));
                is_changed |= taken != bytes;
                (bytes, rest) = (taken.to_vec(), after);
            }
            _ => {}
        }
        let (side, output) =
            if round % 2 == 0 { (&mut target, &mut to_host) } else { (&mut host, &mut to_target) };
        if found[round % 2] == Ok(Progress::Pending) {
            found[round % 2] = feed(side, &bytes, piece, output);
        }
        assert!(output.len() <= HANDSHAKE_MAX, "an answer is short");
        assert!(is_known || found[round % 2] != Ok(Progress::Complete), "another key");
    }
    if found == [Ok(Progress::Complete); 2] {
        let mut records = Vec::new();
        host.write(b"data", &mut records).expect("sent");
        let mut plain = [0; 64];
        let read = target.read(&mut &records[..], &mut plain);
        assert!(is_changed || read == Ok(4) && plain[..4] == *b"data", "{read:?}");
        let len = rest.len().min(records.len());
        if rest[..len] != records[..len] {
            assert!(!matches!(target.read(&mut &rest[..], &mut plain), Ok(1..)), "records of nobody");
        }
    }
});
