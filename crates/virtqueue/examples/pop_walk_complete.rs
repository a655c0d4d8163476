//! How long the device's side of one block request of three descriptors takes: popping and walking its chain, taking the
//! header and the status byte, making a scatter list of the data, and completing it. Driver and device take turns on
//! one thread, so no cache line travels: this is the instructions' share.
//!
//! `cargo run --release -p aryk-virtqueue --example pop_walk_complete`
#![expect(clippy::disallowed_methods, reason = "a benchmark measures wall time")]

use aryk_dma::{GuestArea, Mapping, MemTable, Region, SgTable};
use aryk_virtqueue::{Chain, SplitConfig, SplitQueue, avail_len, desc_len, used_len};
use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const SIZE: u16 = 128;
/// Requests in flight, three descriptors each.
const BATCH: u16 = 32;
const GUEST: u64 = 0x1_0000_0000;
const MIB: u64 = 1 << 20;
const MEMORY_LEN: u64 = 64 * MIB;
const TABLES: u64 = MIB;
const HEADERS: u64 = 2 * MIB;
const DATA: u64 = 4 * MIB;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

struct Bench {
    memory: Arc<MemTable>,
    desc: GuestArea,
    avail: GuestArea,
    used: GuestArea,
    queue: SplitQueue,
    sg: SgTable,
    chain: Chain,
}

impl Bench {
    fn new(indirect: bool, regions: u64) -> Result<Self, Box<dyn Error>> {
        let mapping = Arc::new(Mapping::anonymous(MEMORY_LEN)?);
        let region = |i| Region {
            guest_addr: GUEST - i * MEMORY_LEN,
            user_addr: GUEST - i * MEMORY_LEN,
            len: MEMORY_LEN,
            offset: 0,
            mapping: Arc::clone(&mapping),
        };
        let memory = Arc::new(MemTable::new((0..regions).map(region).collect())?);
        let area = |at, len| memory.area_at_guest(GUEST + at, len).ok_or("the queue is in guest memory");
        let desc = area(0, desc_len(SIZE))?;
        let avail = area(64 << 10, avail_len(SIZE, true))?;
        let used = area(128 << 10, used_len(SIZE, true))?;
        let config = SplitConfig {
            size: SIZE,
            desc: desc.clone(),
            avail: avail.clone(),
            used: used.clone(),
            event_idx: true,
            indirect: true,
            next_avail: 0,
            next_used: 0,
        };
        let sg = SgTable::new(SIZE, Arc::clone(&memory));
        let queue = SplitQueue::new(config)?;
        let bench = Self { memory, desc, avail, used, queue, sg, chain: Chain::new(SIZE) };
        bench.lay_out(indirect)?;
        Ok(bench)
    }

    /// Writes the descriptors of all requests, once: header, 4 KiB of data, status beside the header.
    fn lay_out(&self, indirect: bool) -> Result<(), Box<dyn Error>> {
        for request in 0..u64::from(BATCH) {
            let header = GUEST + HEADERS + 64 * request;
            let chain = [
                (header, 16, NEXT),
                (GUEST + DATA + 4096 * request, 4096, NEXT | WRITE),
                (header + 16, 1, WRITE),
            ];
            let table = TABLES + 64 * request;
            let head = 3 * request;
            for (i, (addr, len, flags)) in chain.into_iter().enumerate() {
                let at = if indirect { table } else { 16 * head } + 16 * i as u64;
                let next = if indirect { i } else { head as usize + i } + 1;
                self.write_desc(at, addr, len, flags, next as u16)?;
            }
            if indirect {
                self.write_desc(16 * head, GUEST + table, 48, INDIRECT, 0)?;
            }
        }
        assert!(!self.desc.is_empty());
        Ok(())
    }

    fn write_desc(&self, at: u64, addr: u64, len: u32, flags: u16, next: u16) -> Result<(), Box<dyn Error>> {
        self.memory.write(GUEST + at, &addr)?;
        self.memory.write(GUEST + at + 8, &len)?;
        self.memory.write(GUEST + at + 12, &flags)?;
        Ok(self.memory.write(GUEST + at + 14, &next)?)
    }

    fn offer(&self, idx: u16) {
        for request in 0..BATCH {
            let place = usize::from(idx.wrapping_add(request) % SIZE);
            self.avail.store_u16(4 + 2 * place, 3 * request, Ordering::Relaxed);
        }
        let idx = idx.wrapping_add(BATCH);
        // The driver wants one call, at the end of each batch.
        self.avail.store_u16(4 + 2 * usize::from(SIZE), idx.wrapping_sub(1), Ordering::Relaxed);
        self.avail.store_u16(2, idx, Ordering::Release);
    }

    /// Pops and walks, and gives back at once.
    fn rings_only(&mut self) -> u64 {
        let mut sum = 0;
        while let Ok(Some(head)) = self.queue.pop(&self.memory, &mut self.chain) {
            sum += self.chain.writable_len();
            self.queue.push_used(head, 4097);
        }
        sum + u64::from(self.queue.publish())
    }

    /// All that a block front-end does around a request, except for the disk.
    fn whole(&mut self) -> u64 {
        let mut sum = 0;
        let mut status = [(0, 0); BATCH as usize];
        let mut count = 0;
        while let Ok(Some(head)) = self.queue.pop(&self.memory, &mut self.chain) {
            let header = self.chain.take_header::<[u64; 2]>(&self.memory);
            let status_addr = self.chain.take_last_writable().unwrap_or_default();
            self.sg.begin(head);
            for piece in self.chain.writable() {
                sum += u64::from(self.sg.push(head, piece.addr, piece.len).is_ok());
            }
            sum += header.ok().flatten().map_or(0, |h| h[1]) + u64::from(self.sg.sgl(head).len());
            status[count] = (head, status_addr);
            count += 1;
        }
        for &(head, addr) in &status[..count] {
            sum += u64::from(self.memory.write(addr, &0_u8).is_ok());
            self.sg.end(head);
            self.queue.push_used(head, 4097);
        }
        sum + u64::from(self.queue.publish())
    }

    /// The best of several measurements, in ns per request.
    fn measure(&mut self, mut turn: impl FnMut(&mut Self) -> u64) -> f64 {
        const TURNS: u32 = 4_000;
        let mut best = Duration::MAX;
        for _ in 0..20 {
            let mut taken = Duration::ZERO;
            for _ in 0..TURNS {
                self.offer(self.queue.next_avail());
                let start = Instant::now();
                black_box(turn(self));
                taken += start.elapsed();
            }
            best = best.min(taken);
        }
        assert_eq!(aryk_virtqueue::used_idx(&self.used), self.queue.next_avail(), "all came back");
        best.as_secs_f64() * 1e9 / f64::from(TURNS) / f64::from(BATCH)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    println!("ns per request             rings only   with header, status, scatter list");
    for (name, indirect, regions) in [
        ("direct, 1 region", false, 1),
        ("indirect, 1 region", true, 1),
        ("direct, 3 regions", false, 3),
        ("indirect, 3 regions", true, 3),
    ] {
        let mut bench = Bench::new(indirect, regions)?;
        let rings = bench.measure(Bench::rings_only);
        let whole = bench.measure(Bench::whole);
        println!("{name:<26} {rings:10.1}   {whole:10.1}");
    }
    Ok(())
}
