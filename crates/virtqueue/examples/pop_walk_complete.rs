//! Measures the device's side of one block request of three descriptors: popping and walking its chain, taking the header and
//! the status byte, making a scatter list of the data, and completing the request. Driver and device take turns on one thread,
//! so no cache line moves between cores: the result is the cost of the instructions.
//!
//! `cargo run --release -p aryk-virtqueue --example pop_walk_complete`
#![expect(clippy::disallowed_methods, reason = "a benchmark measures wall time")]

use aryk_dma::{GuestArea, Mapping, MemTable, Region, SgTable};
use aryk_virtqueue::{Chain, Config, Format, Popped, Virtqueue, avail_len, desc_len, used_len};
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
const PACKED_AVAIL: u16 = 1 << 7;
const PACKED_USED: u16 = 1 << 15;

struct Bench {
    memory: Arc<MemTable>,
    desc: GuestArea,
    avail: GuestArea,
    format: Format,
    indirect: bool,
    /// The driver's state. Split: chains made available. Packed: position in the ring, and wrap counter.
    next: u16,
    wrap: bool,
    queue: Virtqueue,
    sg: SgTable,
    chain: Chain,
}

impl Bench {
    fn new(format: Format, indirect: bool, regions: u64) -> Result<Self, Box<dyn Error>> {
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
        let config = Config {
            format,
            size: SIZE,
            desc: desc.clone(),
            driver: avail.clone(),
            device: used,
            event_idx: true,
            indirect: true,
            base: if format == Format::Packed { 0x8000_8000 } else { 0 },
            inflight: None,
        };
        let sg = SgTable::new(SIZE, Arc::clone(&memory));
        let queue = Virtqueue::new(config)?;
        let chain = Chain::default();
        let bench = Self { memory, desc, avail, format, indirect, next: 0, wrap: true, queue, sg, chain };
        bench.write_descriptors(indirect)?;
        Ok(bench)
    }

    /// Writes the descriptors of all requests once: header, 4 KiB of data, status beside the header.
    fn write_descriptors(&self, indirect: bool) -> Result<(), Box<dyn Error>> {
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
            if indirect && self.format == Format::Split {
                self.write_desc(16 * head, GUEST + table, 48, INDIRECT, 0)?;
            }
        }
        assert!(!self.desc.is_empty());
        Ok(())
    }

    fn write_desc(&self, at: u64, addr: u64, len: u32, flags: u16, next: u16) -> Result<(), Box<dyn Error>> {
        self.memory.write(GUEST + at, &addr)?;
        self.memory.write(GUEST + at + 8, &len)?;
        let (third, fourth) = match self.format {
            Format::Split => (flags, next),
            Format::Packed => (0, flags),
        };
        self.memory.write(GUEST + at + 12, &third)?;
        Ok(self.memory.write(GUEST + at + 14, &fourth)?)
    }

    fn offer(&mut self) {
        match self.format {
            Format::Split => self.offer_split(),
            Format::Packed => self.offer_packed(),
        }
    }

    /// Makes chains available with the same buffers as the split ring's. The device overwrites descriptors, so each chain
    /// writes them again.
    fn offer_packed(&mut self) {
        for request in 0..BATCH {
            let header = GUEST + HEADERS + 64 * u64::from(request);
            let table = GUEST + TABLES + 64 * u64::from(request);
            let direct = [
                (header, 16, NEXT),
                (GUEST + DATA + 4096 * u64::from(request), 4096, NEXT | WRITE),
                (header + 16, 1, WRITE),
            ];
            let descs = if self.indirect { &[(table, 48, INDIRECT)][..] } else { &direct[..] };
            for &(addr, len, flags) in descs {
                let at = 16 * usize::from(self.next);
                self.desc.write::<u64>(at, &addr);
                self.desc.write::<u32>(at + 8, &len);
                self.desc.write(at + 12, &request);
                let side = if self.wrap { PACKED_AVAIL } else { PACKED_USED };
                self.desc.store_u16(at + 14, flags | side, Ordering::Release);
                self.next = (self.next + 1) % SIZE;
                self.wrap ^= self.next == 0;
            }
        }
        // The driver disables calls: event suppression DISABLE.
        self.avail.store_u16(2, 1, Ordering::Relaxed);
    }

    fn offer_split(&mut self) {
        let idx = self.next;
        for request in 0..BATCH {
            let place = usize::from(idx.wrapping_add(request) % SIZE);
            self.avail.store_u16(4 + 2 * place, 3 * request, Ordering::Relaxed);
        }
        let idx = idx.wrapping_add(BATCH);
        self.next = idx;
        // The driver requests one call, at the end of each batch.
        self.avail.store_u16(4 + 2 * usize::from(SIZE), idx.wrapping_sub(1), Ordering::Relaxed);
        self.avail.store_u16(2, idx, Ordering::Release);
    }

    /// Pops and walks chains, and completes them at once.
    fn rings_only(&mut self) -> u64 {
        let mut sum = 0;
        while let Popped::Chain(head) = self.queue.pop(&self.memory, &mut self.chain) {
            sum += self.chain.writable_len();
            self.queue.push_used(head, 4097);
        }
        sum + u64::from(self.queue.publish())
    }

    /// All work of a block front-end on a request, without the disk.
    fn whole_request(&mut self) -> u64 {
        let mut sum = 0;
        let mut status = [(0, 0); BATCH as usize];
        let mut count = 0;
        while let Popped::Chain(head) = self.queue.pop(&self.memory, &mut self.chain) {
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
                self.offer();
                let start = Instant::now();
                black_box(turn(self));
                taken += start.elapsed();
            }
            best = best.min(taken);
        }
        let base = self.queue.base();
        let expected = match self.format {
            Format::Split => u32::from(self.next),
            Format::Packed => 0x1_0001 * (u32::from(self.next) | u32::from(self.wrap) << 15),
        };
        assert_eq!((base, self.queue.in_flight()), (expected, 0), "all requests were completed");
        best.as_secs_f64() * 1e9 / f64::from(TURNS) / f64::from(BATCH)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    println!("ns per request             rings only   with header, status, scatter list");
    for (name, format, indirect, regions) in [
        ("direct, 1 region", Format::Split, false, 1),
        ("indirect, 1 region", Format::Split, true, 1),
        ("direct, 3 regions", Format::Split, false, 3),
        ("indirect, 3 regions", Format::Split, true, 3),
        ("packed, direct, 1 region", Format::Packed, false, 1),
        ("packed, indirect, 1 region", Format::Packed, true, 1),
    ] {
        let mut bench = Bench::new(format, indirect, regions)?;
        let rings = bench.measure(Bench::rings_only);
        let whole = bench.measure(Bench::whole_request);
        println!("{name:<26} {rings:10.1}   {whole:10.1}");
    }
    Ok(())
}
