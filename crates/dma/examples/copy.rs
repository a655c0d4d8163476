//! Compares ways to copy a request's data between a guest's buffers and a large disk in memory, under the conditions of a
//! memory disk: the guest's side runs on another core, and fills the buffers before a write and reads them after a read; blocks
//! of the disk are random or sequential; requests come in batches. `src/copy.rs` chooses its methods from the printed table.
//!
//! `cargo run --release -p aryk-dma --example copy`
#![expect(clippy::disallowed_methods, reason = "a benchmark measures wall time")]

#[path = "../src/copy.rs"]
#[expect(dead_code, reason = "the file of the crate; the example uses a part of it")]
mod copy;

use aryk_dma::Mapping;
use std::arch::asm;
use std::arch::x86_64::{_mm512_loadu_si512, _mm512_storeu_si512};
use std::error::Error;
use std::hint::spin_loop;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

const DISK: u64 = 1 << 30;
const BUFFERS: usize = 2 << 20;
/// Bytes that one method copies before the next method's turn.
const ROUND_BYTES: usize = 128 << 20;

/// Copies a request's bytes: destination, source, length, and the source of the next request.
type Copy = unsafe fn(*mut u8, *const u8, usize, *const u8);

unsafe fn plain(dst: *mut u8, src: *const u8, len: usize, _: *const u8) {
    // SAFETY: the caller's promise: both ranges are mapped and apart.
    unsafe { copy::to_shared(dst, src, len) };
}

unsafe fn plain_next(dst: *mut u8, src: *const u8, len: usize, next: *const u8) {
    copy::prefetch(next, len);
    // SAFETY: as in `plain`.
    unsafe { copy::to_shared(dst, src, len) };
}

unsafe fn movsb(dst: *mut u8, src: *const u8, len: usize, _: *const u8) {
    // SAFETY: as in `plain`.
    unsafe {
        asm!("rep movsb", inout("rcx") len => _, inout("rdi") dst => _, inout("rsi") src => _,
            options(nostack, preserves_flags));
    }
}

unsafe fn streaming(dst: *mut u8, src: *const u8, len: usize, _: *const u8) {
    // SAFETY: as in `plain`.
    unsafe { copy::streaming(dst, src, len) };
    copy::settle();
}

unsafe fn streaming_next(dst: *mut u8, src: *const u8, len: usize, next: *const u8) {
    copy::prefetch(next, len);
    // SAFETY: as in `plain`.
    unsafe { copy::streaming(dst, src, len) };
    copy::settle();
}

/// Copies one cache line of each of four pages in turn: the processor's prefetcher stops at the end of a page, so it works on
/// four pages at once. All four lines are loaded before one is stored, because a load would wait for a store to the same offset
/// of another page.
#[target_feature(enable = "avx512f")]
unsafe fn interleaved_512(dst: *mut u8, src: *const u8, len: usize) {
    const PAGE: usize = 4096;
    const STEP: usize = 4 * PAGE;
    let body = len / STEP * STEP;
    let starts = (0..body).step_by(STEP).flat_map(|block| (block..block + PAGE).step_by(64));
    for start in starts {
        let at = [start, start + PAGE, start + 2 * PAGE, start + 3 * PAGE];
        // SAFETY: as in `plain`.
        let lines = unsafe { at.map(|at| _mm512_loadu_si512(src.add(at).cast())) };
        for (at, line) in at.into_iter().zip(lines) {
            // SAFETY: as in `plain`.
            unsafe { _mm512_storeu_si512(dst.add(at).cast(), line) };
        }
    }
    // SAFETY: as in `plain`.
    unsafe { copy::to_shared(dst.add(body), src.add(body), len - body) };
}

unsafe fn interleaved(dst: *mut u8, src: *const u8, len: usize, next: *const u8) {
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: as in `plain`; the processor has the feature.
        unsafe { interleaved_512(dst, src, len) };
    } else {
        // SAFETY: as in `plain`.
        unsafe { plain(dst, src, len, next) };
    }
}

unsafe fn page_ahead(dst: *mut u8, src: *const u8, len: usize, _: *const u8) {
    for at in (0..len).step_by(4096) {
        let n = (len - at).min(4096);
        copy::prefetch(src.wrapping_add(at + 4096), if at + 4096 < len { n } else { 0 });
        // SAFETY: as in `plain`.
        unsafe { copy::to_shared(dst.wrapping_add(at), src.wrapping_add(at), n) };
    }
}

const WAYS: [(&str, Copy); 7] = [
    ("plain memcpy", plain),
    ("  next source prefetched", plain_next),
    ("rep movsb", movsb),
    ("non-temporal stores", streaming),
    ("  next source prefetched", streaming_next),
    ("four pages side by side", interleaved),
    ("source a page ahead", page_ahead),
];

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    write: bool,
    len: usize,
    batch: usize,
    random: bool,
}

const CASES: [Case; 5] = [
    Case { name: "4 KiB random read, 32", write: false, len: 4096, batch: 32, random: true },
    Case { name: "4 KiB random write, 32", write: true, len: 4096, batch: 32, random: true },
    Case { name: "16 KiB random write, 16", write: true, len: 16 << 10, batch: 16, random: true },
    Case { name: "128 KiB seq. read, 8", write: false, len: 128 << 10, batch: 8, random: false },
    Case { name: "128 KiB seq. write, 8", write: true, len: 128 << 10, batch: 8, random: false },
];

/// The two sides take turns: even numbers are the device's turns, odd numbers the guest's.
#[derive(Default)]
struct Turn {
    now: AtomicU32,
    ended: AtomicBool,
}

impl Turn {
    fn pass(&self) {
        self.now.fetch_add(1, Ordering::AcqRel);
    }

    /// Waits for a turn of this parity; `false` at the end of the measurement.
    fn wait(&self, parity: u32) -> bool {
        while self.now.load(Ordering::Acquire) % 2 != parity {
            if self.ended.load(Ordering::Relaxed) {
                return false;
            }
            spin_loop();
        }
        true
    }
}

/// Reads or writes all cache lines of the batch's buffers, as the guest's processor does.
fn guest(turn: &Turn, buffers: &Mapping, bytes: usize, write: bool) {
    let base = buffers.base().as_ptr();
    while turn.wait(1) {
        for at in (0..bytes).step_by(8) {
            let word = base.wrapping_add(at).cast::<u64>();
            // SAFETY: inside of the buffers, which are the guest's in this turn.
            let value = unsafe { word.read_volatile() };
            if write {
                // SAFETY: as above.
                unsafe { word.write_volatile(value.wrapping_add(1)) };
            }
        }
        turn.pass();
    }
}

/// Positions on the disk, one request after another.
struct Positions {
    case: Case,
    seed: u64,
    block: usize,
}

impl Positions {
    fn next(&mut self, disk: &Mapping) -> *mut u8 {
        // xorshift64.
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.block = if self.case.random { self.seed as usize } else { self.block + 1 };
        let block = self.block % (DISK as usize / self.case.len);
        disk.base().as_ptr().wrapping_add(block * self.case.len)
    }
}

/// Measures the time of several batches with one method.
fn measure(way: Copy, positions: &mut Positions, turn: &Turn, disk: &Mapping, buffers: &Mapping) -> Duration {
    let case = positions.case;
    let buffer = |i: usize| buffers.base().as_ptr().wrapping_add(i % case.batch * case.len);
    let mut taken = Duration::ZERO;
    for _ in 0..ROUND_BYTES / (case.len * case.batch) {
        let at: Vec<_> = (0..=case.batch).map(|_| positions.next(disk)).collect();
        turn.pass();
        turn.wait(0);
        let start = Instant::now();
        for (i, pair) in at.windows(2).enumerate() {
            // SAFETY: a block of the disk and a buffer, both mapped; the guest is not at work.
            unsafe {
                if case.write {
                    way(pair[0], buffer(i), case.len, buffer(i + 1));
                } else {
                    way(buffer(i), pair[0], case.len, pair[1]);
                }
            }
        }
        taken += start.elapsed();
    }
    taken
}

/// The throughput of each method in GB/s: medians of rounds in which all methods take turns.
fn compare(case: Case, disk: &Mapping, buffers: &Mapping) -> Vec<f64> {
    const ROUNDS: usize = 9;
    let turn = Turn::default();
    let mut positions = Positions { case, seed: 0x9e37_79b9_7f4a_7c15, block: 0 };
    let mut taken = [const { Vec::new() }; WAYS.len()];
    std::thread::scope(|scope| {
        scope.spawn(|| guest(&turn, buffers, case.len * case.batch, case.write));
        for _ in 0..ROUNDS {
            for (i, (_, way)) in WAYS.iter().enumerate() {
                taken[i].push(measure(*way, &mut positions, &turn, disk, buffers));
            }
        }
        turn.ended.store(true, Ordering::Relaxed);
    });
    let median = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        ROUND_BYTES as f64 / times[ROUNDS / 2].as_secs_f64() / 1e9
    };
    taken.iter_mut().map(median).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let disk = Mapping::anonymous(DISK)?;
    let buffers = Mapping::anonymous(BUFFERS as u64)?;
    for (mapping, len) in [(&disk, DISK as usize), (&buffers, BUFFERS)] {
        // SAFETY: all of a mapping of ours.
        unsafe { copy::fill(mapping.base().as_ptr(), 0x5a, len) };
    }
    for case in CASES {
        println!("{} in flight, GB/s", case.name);
        for ((name, _), speed) in WAYS.iter().zip(compare(case, &disk, &buffers)) {
            println!("    {name:<26} {speed:6.2}");
        }
    }
    Ok(())
}
