//! LUKS headers of any content: LUKS1 structures, LUKS2 copies as they are, and LUKS2 copies with a right checksum around any
//! JSON text.
//!
//! For any input, no code panics, reading allocates little, and unlocking does no work beyond its limits. The parts of an
//! accepted header are in bounds. A header without one of its key slots is written and read again. An error text has no control
//! characters.
#![no_main]

use std::io;

use aryk_luks::{Error, Header, Limits, Store, Version};
use libfuzzer_sys::fuzz_target;
use ring::digest::{SHA256, digest};

/// Bytes of the smallest copy of a LUKS2 header, and before its JSON text.
const COPY: usize = 16 << 10;
const BINARY: usize = 4096;
/// Bytes of the store: the rest is zeroes.
const LEN: u64 = 1 << 40;
const LIMITS: Limits =
    Limits { memory_max: 1 << 20, steps_max: 2000, json_len_max: 64 << 10, json_values_max: 1000 };

/// A large store of which only the start is kept; it counts what is read.
struct Sparse {
    start: Vec<u8>,
    read: u64,
}

impl Store for Sparse {
    fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        if offset.checked_add(buffer.len() as u64).is_none_or(|end| end > LEN) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.read += buffer.len() as u64;
        buffer.fill(0);
        let kept = self.start.get(offset as usize..).unwrap_or_default();
        let len = kept.len().min(buffer.len());
        buffer[..len].copy_from_slice(&kept[..len]);
        Ok(())
    }

    fn write_at(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        // What is behind the kept part is key material, which no test reads again.
        if let Some(kept) = self.start.get_mut(offset as usize..) {
            let len = kept.len().min(data.len());
            kept[..len].copy_from_slice(&data[..len]);
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The start of a store with a LUKS2 header of this text.
fn with_text(text: &[u8]) -> Vec<u8> {
    let mut start = vec![0; 2 * COPY];
    let len = text.len().min(COPY - BINARY);
    for (copy, magic, offset) in [(0, b"LUKS\xba\xbe", 0_u64), (COPY, b"SKUL\xba\xbe", COPY as u64)] {
        let copy = &mut start[copy..copy + COPY];
        copy[..6].copy_from_slice(magic);
        copy[7] = 2;
        copy[8..16].copy_from_slice(&(COPY as u64).to_be_bytes());
        copy[72..78].copy_from_slice(b"sha256");
        copy[256..264].copy_from_slice(&offset.to_be_bytes());
        copy[BINARY..][..len].copy_from_slice(&text[..len]);
        let checksum = digest(&SHA256, copy);
        copy[448..480].copy_from_slice(checksum.as_ref());
    }
    start
}

fn check(store: &mut Sparse, header: &mut Header, is_slow: bool) {
    let segment = header.segment();
    assert!(matches!(segment.sector_size, 512 | 1024 | 2048 | 4096));
    assert!(segment.offset.is_multiple_of(512) && matches!(segment.cipher.key_len(), 32 | 64));
    assert!(segment.size.is_none_or(|size| size > 0 && segment.offset.checked_add(size).is_some()));
    let numbers: Vec<_> = header.key_slots().iter().map(|slot| slot.number()).collect();
    assert!(numbers.is_sorted_by(|a, b| a < b) && numbers.len() <= 32);
    let nothing = Limits { steps_max: 0, ..LIMITS };
    let rounds = [nothing, LIMITS];
    for limits in &rounds[..if is_slow { 2 } else { 1 }] {
        store.read = 0;
        match header.unlock(store, b"secret", None, limits) {
            Ok(unlocked) => assert_eq!(unlocked.key.as_bytes().len(), segment.cipher.key_len()),
            Err(Error::TooExpensive { .. } | Error::WrongSecret | Error::Io(_) | Error::Invalid(_)) => {}
            Err(error) => panic!("{error}"),
        }
        // At most one area of the largest key for each step of a digest.
        assert!(store.read <= limits.steps_max.min(32) << 20);
    }
    for &number in &numbers {
        if header.remove_key_slot(store, number).is_ok() {
            let remaining: Vec<_> = header.key_slots().iter().map(|slot| slot.number()).collect();
            assert!(!remaining.contains(&number) && remaining.len() < numbers.len());
            let again = Header::read(store, &LIMITS).expect("a header that was written");
            assert_eq!(again.key_slots(), header.key_slots());
            assert_eq!(again.segment(), segment);
            assert!(!again.is_degraded());
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&kind, data)) = data.split_first() else { return };
    let start = match kind % 4 {
        // A structure or a copy as it is.
        0 | 1 => {
            let mut start = data.to_vec();
            start.resize(start.len().max(160 << 10), 0);
            start
        }
        _ => with_text(data),
    };
    let mut store = Sparse { start, read: 0 };
    let result = Header::read(&mut store, &LIMITS);
    // Two copies, and the places of a second copy.
    assert!(store.read <= 4 * LIMITS.json_len_max + 64 * 4096);
    store.read = 0;
    match result {
        Ok(mut header) => {
            assert!(header.version() == Version::V1 || kind % 4 > 1 || data.len() > BINARY);
            check(&mut store, &mut header, kind % 64 == 3);
        }
        Err(error) => {
            let text = error.to_string();
            assert!(text.len() < 600 && !text.contains(|c: char| c.is_control()), "{text:?}");
        }
    }
});
