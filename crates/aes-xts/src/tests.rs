//! Each implementation against AWS-LC and against vectors of IEEE 1619 ([`vectors`]), within the bounds of its buffers
//! ([`guarded`]).

mod guarded;
mod vectors;

use super::*;
use aryk_dma::{Mapping, MemTable, Region, SgTable};
use aws_lc_sys as aws;
use proptest::prelude::*;
use std::io::Write;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Generates the tests of an implementation.
macro_rules! implementations {
    ($($module:ident: $implementation:ident)*) => {$(
        mod $module {
            use super::*;
            const THIS: Implementation = Implementation::$implementation;

            #[test]
            fn ieee_1619() {
                vectors::check(THIS);
            }

            #[test]
            fn no_byte_outside_of_the_buffers_is_accessed() {
                guarded::check(THIS);
            }

            #[test]
            fn every_length_in_one_sector() {
                check_lengths(THIS);
            }

            #[test]
            fn tweaks_carry_and_wrap() {
                check_carries(THIS);
            }

            #[test]
            fn any_sectors() {
                proptest!(ProptestConfig::with_cases(200), |(case in cases())| check_case(THIS, &case)?);
            }

            #[test]
            fn guest_memory_in_any_pieces() {
                check_guest_memory(THIS);
            }

            #[test]
            fn a_guest_that_changes_its_data_gets_a_mixture() {
                check_changing_memory(THIS);
            }
        }
    )*};
}

implementations! {
    vaes_512: Vaes512
    vaes_256: Vaes256
    aes_ni: AesNi
    aws_lc: AwsLc
}

/// A key for an implementation; `None` if the processor cannot run it. That is written to the descriptor, once, because what a
/// test prints is not shown if the test passes.
fn key(bytes: &[u8], implementation: Implementation) -> Option<Key> {
    static TOLD: Mutex<Vec<Implementation>> = Mutex::new(Vec::new());
    match Key::with(bytes, implementation) {
        Err(KeyError::Unavailable(_)) => {
            let mut told = TOLD.lock().unwrap();
            if !told.contains(&implementation) {
                told.push(implementation);
                let line = format!(
                    "NOT TESTED: this processor cannot run {implementation}; its tests pass without it\n"
                );
                std::io::stderr().write_all(line.as_bytes()).unwrap();
            }
            None
        }
        result => Some(result.unwrap()),
    }
}

fn hex(text: &str) -> Vec<u8> {
    let digit = |byte: u8| (byte as char).to_digit(16).unwrap() as u8;
    text.as_bytes().chunks_exact(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
}

/// Bytes that are reproducible and of no pattern.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut word = seed | 1;
    let next = || {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (word >> 56) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn sector(bytes: usize) -> SectorSize {
    SectorSize::new(bytes).unwrap()
}

/// A context of AWS-LC.
struct Context(*mut aws::EVP_CIPHER_CTX);

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was created by `EVP_CIPHER_CTX_new`.
        unsafe { aws::EVP_CIPHER_CTX_free(self.0) };
    }
}

/// AES-256-XTS of AWS-LC.
fn aws_xts_256(key: &[u8], tweak: u128, data: &[u8]) -> Vec<u8> {
    let (mut out, mut len, tweak) = (vec![0; data.len()], 0, tweak.to_le_bytes());
    // SAFETY: no argument.
    let context = Context(unsafe { aws::EVP_CIPHER_CTX_new() });
    // SAFETY: the key has 64 bytes, the tweak 16, and `out` the length of the data.
    let results = unsafe {
        [
            aws::EVP_EncryptInit_ex(
                context.0,
                aws::EVP_aes_256_xts(),
                ptr::null_mut(),
                key.as_ptr(),
                tweak.as_ptr(),
            ),
            aws::EVP_EncryptUpdate(
                context.0,
                out.as_mut_ptr(),
                &raw mut len,
                data.as_ptr(),
                data.len() as i32,
            ),
        ]
    };
    assert_eq!((results, len as usize), ([1; 2], data.len()));
    out
}

/// AES-128-XTS by the definition in IEEE 1619, byte by byte, over the block cipher of AWS-LC.
fn defined_xts_128(key: &[u8], tweak: u128, data: &[u8]) -> Vec<u8> {
    let encrypt = |key: &[u8], block: [u8; 16]| {
        let (mut schedule, mut out) = (aws::AES_KEY { rd_key: [0; 60], rounds: 0 }, [0; 16]);
        // SAFETY: the key has 16 bytes, and so have the blocks.
        unsafe {
            assert_eq!(aws::AES_set_encrypt_key(key.as_ptr(), 128, &raw mut schedule), 0);
            aws::AES_encrypt(block.as_ptr(), out.as_mut_ptr(), &raw const schedule);
        }
        out
    };
    let mut tweak = encrypt(&key[16..], tweak.to_le_bytes());
    let mut out = Vec::new();
    for block in data.chunks_exact(16) {
        let masked: [u8; 16] = std::array::from_fn(|i| block[i] ^ tweak[i]);
        let block = encrypt(&key[..16], masked);
        out.extend(block.iter().zip(tweak).map(|(byte, mask)| byte ^ mask));
        let mut carry = 0;
        for byte in &mut tweak {
            (*byte, carry) = (*byte << 1 | carry, *byte >> 7);
        }
        tweak[0] ^= carry * 0x87;
    }
    out
}

/// What a key makes of sectors, according to AWS-LC.
fn expected(key: &[u8], sector: usize, tweaks: Tweaks, data: &[u8]) -> Vec<u8> {
    let xts = if key.len() == 64 { aws_xts_256 } else { defined_xts_128 };
    let mut tweak = tweaks.start;
    let mut out = Vec::new();
    for data in data.chunks_exact(sector) {
        out.extend(xts(key, tweak, data));
        tweak = tweak.wrapping_add(tweaks.step);
    }
    out
}

fn check_lengths(implementation: Implementation) {
    for len in [32, 64] {
        let bytes = noise(len as u64, len);
        let Some(key) = key(&bytes, implementation) else { return };
        for len in (16..=8192).step_by(16) {
            let (plain, tweaks) = (noise(len as u64, len), Tweaks { start: len as u128, step: 0 });
            let mut cipher = vec![0; len];
            key.encrypt(sector(len), tweaks, &plain, &mut cipher).unwrap();
            assert_eq!(cipher, expected(&bytes, len, tweaks, &plain), "{len} bytes");
            let mut decrypted = vec![0; len];
            key.decrypt(sector(len), tweaks, &cipher, &mut decrypted).unwrap();
            assert_eq!(decrypted, plain, "{len} bytes");
        }
    }
}

fn check_carries(implementation: Implementation) {
    let bytes = noise(5, 64);
    let Some(key) = key(&bytes, implementation) else { return };
    let plain = noise(6, 40 * 512);
    let numbers = [0, 1, u128::from(u64::MAX) - 3, u128::MAX - 3, 1 << 127, u128::MAX << 64];
    let steps = [0, 1, -1, 1 << 64, 1 - (1 << 64), i128::from(u64::MAX)].map(i128::cast_unsigned);
    for tweaks in numbers.into_iter().flat_map(|start| steps.map(|step| Tweaks { start, step })) {
        let mut data = plain.clone();
        key.encrypt_in_place(sector(512), tweaks, &mut data).unwrap();
        assert_eq!(data, expected(&bytes, 512, tweaks, &plain), "{tweaks:x?}");
        // The second part of the sectors on its own.
        let mut rest = plain[17 * 512..].to_vec();
        key.encrypt_in_place(sector(512), tweaks.skip(17), &mut rest).unwrap();
        assert_eq!(rest, data[17 * 512..], "{tweaks:x?}");
    }
}

#[derive(Clone, Debug)]
struct Case {
    key_len: usize,
    sector: usize,
    sectors: usize,
    tweaks: Tweaks,
    from: usize,
    to: usize,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let sectors = prop_oneof![
        (Just(512_usize), 0..50_usize),
        (Just(4096), 0..20_usize),
        ((1..80_usize).prop_map(|blocks| blocks * 16), 0..40_usize),
    ];
    let number = || prop_oneof![any::<u128>(), (0..100_u128), (0..100_u128).prop_map(|n| u128::MAX - n)];
    let places = (0..64_usize, 0..64_usize);
    (prop_oneof![Just(32), Just(64)], sectors, number(), number(), places, any::<u64>()).prop_map(
        |(key_len, (sector, sectors), start, step, (from, to), seed)| Case {
            key_len,
            sector,
            sectors,
            tweaks: Tweaks { start, step },
            from,
            to,
            seed,
        },
    )
}

fn check_case(implementation: Implementation, case: &Case) -> Result<(), TestCaseError> {
    let &Case { key_len, sector: size, sectors, tweaks, from, to, seed } = case;
    let bytes = noise(seed, key_len);
    let Some(key) = key(&bytes, implementation) else { return Ok(()) };
    let len = size * sectors;
    let memory = noise(seed ^ 7, from + len);
    let plain = &memory[from..];
    let cipher = expected(&bytes, size, tweaks, plain);
    // Bytes before and after the destination, which must stay.
    let mut room = vec![0xee; to + len + 64];
    key.encrypt(sector(size), tweaks, plain, &mut room[to..to + len]).unwrap();
    prop_assert_eq!(&room[to..to + len], &cipher);
    key.decrypt_in_place(sector(size), tweaks, &mut room[to..to + len]).unwrap();
    prop_assert_eq!(&room[to..to + len], plain);
    prop_assert!(room[..to].iter().chain(&room[to + len..]).all(|byte| *byte == 0xee));
    Ok(())
}

/// A guest's memory with a list of these pieces, given as offsets and lengths.
fn guest(len: u64, pieces: &[(u64, u32)]) -> (Arc<MemTable>, SgTable) {
    let mapping = Arc::new(Mapping::anonymous(len).unwrap());
    let region = Region { guest_addr: 0, user_addr: 0, len, offset: 0, mapping };
    let table = Arc::new(MemTable::new(vec![region]).unwrap());
    let mut lists = SgTable::new(1, Arc::clone(&table));
    lists.begin(0);
    for &(at, len) in pieces {
        lists.push(0, at, len).unwrap();
    }
    (table, lists)
}

fn check_guest_memory(implementation: Implementation) {
    const LEN: usize = 8192;
    let bytes = noise(11, 64);
    let Some(key) = key(&bytes, implementation) else { return };
    let tweaks = Tweaks { start: 77, step: 3 };
    let shapes: [&[(u64, u32)]; 5] = [
        &[(0, 8192)],
        &[(1, 4096), (8192, 1024), (20_000, 3072)],
        &[(0, 512), (5000, 7680)],
        &[(3, 1), (100, 511), (1000, 513), (4096, 7167)],
        &[(0, 256), (512, 256), (1024, 7680)],
    ];
    for pieces in shapes {
        let plain = noise(LEN as u64, LEN);
        let (table, mut lists) = guest(1 << 16, pieces);
        let list = lists.sgl(0);
        list.write(0, &plain);
        let mut buffer = vec![0; LEN];
        key.encrypt_from(sector(512), tweaks, &list, &mut buffer).unwrap();
        assert_eq!(buffer, expected(&bytes, 512, tweaks, &plain), "{pieces:?}");
        let mut unchanged = vec![0; LEN];
        list.read(0, &mut unchanged);
        assert_eq!(unchanged, plain, "a guest's memory is only read");

        table.write_bytes(0, &vec![0xee; 1 << 16]).unwrap();
        key.decrypt_to(sector(512), tweaks, &mut buffer, &list).unwrap();
        let mut all = vec![0; 1 << 16];
        table.read_bytes(0, &mut all).unwrap();
        let mut rest = plain.as_slice();
        for &(at, len) in pieces {
            let (here, after) = rest.split_at(len as usize);
            let piece = at as usize..at as usize + len as usize;
            assert_eq!(&all[piece.clone()], here, "{pieces:?}");
            all[piece].fill(0xee);
            rest = after;
        }
        assert!(all.iter().all(|byte| *byte == 0xee), "{pieces:?}: written outside of the list");
        lists.end(0);
    }
}

/// The guest changes its memory between two patterns while it is encrypted. Each byte that is stored is of one of them: a byte
/// that was read twice could make its whole block something else. Sectors that the guest leaves alone are stored as they are.
fn check_changing_memory(implementation: Implementation) {
    const LEN: usize = 8192;
    const CHANGED: usize = 6144;
    let Some(key) = key(&noise(11, 64), implementation) else { return };
    let tweaks = Tweaks { start: 1, step: 1 };
    for at in [0, 7] {
        let pieces: [(u64, u32); 2] = [(at, 4096 + at as u32), (16_384, 4096 - at as u32)];
        let (table, mut lists) = guest(1 << 16, &pieces);
        let list = lists.sgl(0);
        list.write(0, &[0xaa; LEN]);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let second = CHANGED - pieces[0].1 as usize;
                while !done.load(Ordering::Relaxed) {
                    for pattern in [[0x55; LEN], [0xaa; LEN]] {
                        table.write_bytes(at, &pattern[..pieces[0].1 as usize]).unwrap();
                        table.write_bytes(16_384, &pattern[..second]).unwrap();
                    }
                }
            });
            for _ in 0..300 {
                let mut stored = vec![0; LEN];
                key.encrypt_from(sector(512), tweaks, &list, &mut stored).unwrap();
                key.decrypt_in_place(sector(512), tweaks, &mut stored).unwrap();
                assert!(stored.iter().all(|byte| matches!(byte, 0x55 | 0xaa)));
                assert!(stored[CHANGED..].iter().all(|byte| *byte == 0xaa));
            }
            done.store(true, Ordering::Relaxed);
        });
        lists.end(0);
    }
}

#[test]
fn the_best_implementation_of_this_processor_is_used() {
    let best = Key::new(&noise(1, 64)).unwrap().implementation();
    let first = Implementation::ALL.into_iter().find(|i| i.is_available());
    assert_eq!(Some(best), first);
}

/// Otherwise the tests of an implementation would pass without running it.
#[test]
#[cfg(target_arch = "x86_64")]
fn an_implementation_is_available_if_the_kernel_lists_its_instructions() {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap();
    let flags: Vec<&str> =
        cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap().split(' ').collect();
    let aes_ni = ["aes", "avx", "pclmulqdq"];
    let vaes = ["avx2", "vaes", "vpclmulqdq"];
    let avx512 = ["avx512f", "avx512bw", "avx512dq", "avx512vl"];
    for (implementation, needed) in [
        (Implementation::AesNi, &[&aes_ni[..]][..]),
        (Implementation::Vaes256, &[&aes_ni, &vaes]),
        (Implementation::Vaes512, &[&aes_ni, &vaes, &avx512]),
    ] {
        let has_all = needed.iter().copied().flatten().all(|flag| flags.contains(flag));
        assert_eq!(implementation.is_available(), has_all, "{implementation}");
    }
    assert!(Implementation::AwsLc.is_available());
}

#[test]
fn bytes_that_are_no_key_are_refused() {
    for len in [0, 16, 31, 33, 48, 63, 65, 128] {
        assert_eq!(Key::new(&noise(1, len)).unwrap_err(), KeyError::Length(len));
    }
    for half in [16, 32] {
        let twice = noise(1, half).repeat(2);
        assert_eq!(Key::new(&twice).unwrap_err(), KeyError::EqualHalves);
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused_before_anything_is_written() {
    for bytes in [0, 1, 15, 17, 520, (1 << 24) + 16] {
        assert_eq!(SectorSize::new(bytes), Err(SizeError::Sector(bytes)));
    }
    assert_eq!(sector(1 << 24).bytes(), 1 << 24);
    let (key, tweaks) = (Key::new(&noise(1, 64)).unwrap(), Tweaks { start: 0, step: 1 });
    let mut data = vec![0xee; 1000];
    let result = key.encrypt_in_place(sector(512), tweaks, &mut data);
    assert_eq!(result, Err(SizeError::Data { bytes: 1000, sector: 512 }));
    let result = key.decrypt(sector(512), tweaks, &[0; 512], &mut data);
    assert_eq!(result, Err(SizeError::Lengths { from: 512, to: 1000 }));
    let (_, mut lists) = guest(4096, &[(0, 1000)]);
    let list = lists.sgl(0);
    let result = key.encrypt_from(sector(512), tweaks, &list, &mut data);
    assert_eq!(result, Err(SizeError::Data { bytes: 1000, sector: 512 }));
    let result = key.decrypt_to(sector(512), tweaks, &mut data[..512], &list);
    assert_eq!(result, Err(SizeError::Lengths { from: 512, to: 1000 }));
    lists.end(0);
    assert!(data.iter().all(|byte| *byte == 0xee));
    key.encrypt_in_place(sector(512), tweaks, &mut []).unwrap();
}

#[test]
fn no_text_contains_a_key() {
    let key = Key::with(&noise(1, 64), Implementation::AwsLc).unwrap();
    assert_eq!(format!("{key:?}"), "Key(AES-256-XTS by AWS-LC)");
    assert_eq!(key.bits(), 256);
}

#[test]
fn schedules_are_in_memory_for_secrets() {
    for implementation in Implementation::ALL.into_iter().filter(|i| i.is_available()) {
        let key = key(&noise(3, 64), implementation).unwrap();
        let (words, address) = match &key.schedule {
            Schedule::X86(schedule) => (schedule.words(), (&raw const **schedule).addr()),
            Schedule::AwsLc(schedule) => (schedule.words(), (&raw const **schedule).addr()),
        };
        assert!(words.iter().filter(|word| **word != 0).count() > 150);
        // The kernel leaves this memory out of core dumps (dd), and children find zeroes in it (wf).
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let number = |text: &str| usize::from_str_radix(text, 16).ok();
        let starts_there = |line: &&str| {
            let range = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
            let range = range.and_then(|(from, to)| Some(number(from)?..number(to)?));
            range.is_some_and(|range| range.contains(&address))
        };
        let mut lines = smaps.lines().skip_while(|line| !starts_there(line));
        let flags = lines.find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.contains(" dd") && flags.contains(" wf"), "{implementation}: {flags}");
    }
}
