//! A hostile driver's queue, split or packed: arbitrary bytes in guest memory, rings included, changed between the steps
//! of a device like virtio-blk. The device also loses and regains part of the memory, dies, and is replaced by a
//! successor that reads an in-flight region of arbitrary bytes.
//!
//! For any input, a chain is in flight at most once, chains are within their limits and in order, scatter lists are as
//! long as their pieces, and a broken queue stays broken. The first byte chooses format, size and features; steps follow.
#![no_main]

use aryk_dma::{GuestArea, Mapping, MemTable, Region, SgTable};
use aryk_virtqueue::{
    CHAIN_MAX, Chain, Config, ConfigError, Format, Popped, Virtqueue, inflight_len, used_idx,
};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Two adjacent regions of guest memory, at an address whose low half overflows within them.
const BASE: u64 = 0xffff_0000;
const REGION: u64 = 16 << 10;
/// Offsets of the queue's parts, each with more space than it needs.
const DESC: u64 = 0;
const DRIVER: u64 = 0x1000;
const DEVICE: u64 = 0x1800;
const PART: u64 = 0x800;
/// Flags of a packed ring's descriptors.
const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// Bytes of the in-flight region, of which a queue uses as much as it needs.
const INFLIGHT_LEN: u64 = 8 << 10;
/// The disk.
const DISK: u64 = 64 << 10;

thread_local! {
    static MAPPINGS: [Arc<Mapping>; 2] =
        [(); 2].map(|()| Arc::new(Mapping::anonymous(REGION).expect("16 KiB of memory")));
    static INFLIGHT: Arc<Mapping> = Arc::new(Mapping::anonymous(INFLIGHT_LEN).expect("8 KiB of memory"));
    static STORE: Mapping = Mapping::anonymous(DISK).expect("64 KiB of memory");
}

struct Device {
    memory: Arc<MemTable>,
    choice: Choice,
    queue: Virtqueue,
    chain: Chain,
    sg: SgTable,
    /// Chains that were taken and not completed, and the address of their status byte.
    in_flight: Vec<(u16, Option<u64>)>,
    /// Whether a chain was completed since the last `publish`.
    has_given: bool,
    desc: GuestArea,
    driver: GuestArea,
    device: GuestArea,
    /// The next position of a packed ring's driver, and its wrap counter.
    next: (u16, bool),
    inflight: Option<GuestArea>,
}

/// The fields of the first byte.
#[derive(Clone, Copy)]
struct Choice {
    format: Format,
    size: u16,
    event_idx: bool,
    indirect: bool,
    base: u32,
    inflight: bool,
}

impl From<u8> for Choice {
    fn from(byte: u8) -> Self {
        let format = if byte & 64 == 0 { Format::Split } else { Format::Packed };
        let base = match (format, byte & 32 != 0) {
            (Format::Packed, _) => 0x8000_8000,
            (Format::Split, true) => u32::from(u16::MAX - 1),
            (Format::Split, false) => 0,
        };
        let (event_idx, indirect) = (byte & 8 != 0, byte & 16 != 0);
        Self { format, size: 1 << (byte & 7), event_idx, indirect, base, inflight: byte & 128 != 0 }
    }
}

fn memory(regions: usize) -> Arc<MemTable> {
    let region = |i: usize| Region {
        guest_addr: BASE + REGION * i as u64,
        user_addr: REGION * i as u64,
        len: REGION,
        offset: 0,
        mapping: MAPPINGS.with(|mappings| Arc::clone(&mappings[i])),
    };
    Arc::new(MemTable::new((0..regions).map(region).collect()).expect("two sound regions"))
}

fn queue(
    choice: Choice,
    [desc, driver, device]: [&GuestArea; 3],
    inflight: Option<&GuestArea>,
    base: u32,
) -> std::result::Result<Virtqueue, ConfigError> {
    Virtqueue::new(Config {
        format: choice.format,
        size: choice.size,
        desc: desc.clone(),
        driver: driver.clone(),
        device: device.clone(),
        event_idx: choice.event_idx,
        indirect: choice.indirect,
        base,
        inflight: inflight.cloned(),
    })
}

impl Device {
    fn new(choice: Choice) -> Self {
        let memory = memory(2);
        memory.write_bytes(BASE, &[0; 2 * REGION as usize]).expect("all of it is there");
        let area = |at| memory.area_at_guest(BASE + at, PART).expect("in the first region");
        let (desc, driver, device) = (area(DESC), area(DRIVER), area(DEVICE));
        if choice.format == Format::Split {
            driver.store_u16(2, choice.base as u16, Ordering::Relaxed);
            device.store_u16(2, choice.base as u16, Ordering::Relaxed);
        }
        let inflight = choice.inflight.then(|| {
            let len = inflight_len(choice.format, choice.size);
            let area = INFLIGHT.with(|mapping| GuestArea::new(mapping, 0, len)).expect("room for it");
            (0..len as usize / 8).for_each(|word| area.write(8 * word, &0_u64));
            area
        });
        let queue =
            queue(choice, [&desc, &driver, &device], inflight.as_ref(), choice.base).expect("a sound queue");
        let sg = SgTable::new(choice.size, Arc::clone(&memory));
        Self {
            memory,
            choice,
            queue,
            chain: Chain::default(),
            sg,
            in_flight: Vec::new(),
            has_given: false,
            desc,
            driver,
            device,
            next: (0, true),
            inflight,
        }
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 12 {
            0 | 1 => {
                let (at, len) = (u.arbitrary::<u16>()?, u.arbitrary::<u8>()? % 48);
                let bytes = u.bytes(len.into())?;
                // The address may lie outside of the memory; then nothing is written.
                let _written = self.memory.write_bytes(BASE + u64::from(at), bytes);
            }
            2 | 3 => self.offer(u.arbitrary()?),
            4 | 5 => self.pop(),
            6 => self.give_back(u.arbitrary()?),
            7 => self.publish(),
            8 => {
                let more = self.queue.enable_kicks();
                if let (Virtqueue::Split(queue), None) = (&self.queue, &self.inflight) {
                    assert_eq!(more, self.driver.load_u16(2, Ordering::Relaxed) != queue.next_avail());
                }
                self.queue.disable_kicks();
                self.queue.prefetch_first(self.sg.memory());
                self.queue.prefetch_next(self.sg.memory());
            }
            10 => self.scribble(u)?,
            11 => return self.crash(),
            _ => self.sg.set_memory(memory(1 + usize::from(u.arbitrary::<bool>()?))),
        }
        assert_eq!(self.queue.in_flight() as usize, self.in_flight.len());
        assert_eq!(self.sg.in_use() as usize, self.in_flight.len());
        Ok(())
    }

    /// Makes a chain available as a driver does; in a packed ring, one descriptor, whose other fields stay unchanged.
    fn offer(&mut self, head: u8) {
        let size = self.choice.size;
        if self.choice.format == Format::Split {
            let idx = self.driver.load_u16(2, Ordering::Relaxed);
            self.driver.store_u16(4 + 2 * usize::from(idx % size), head.into(), Ordering::Relaxed);
            self.driver.store_u16(2, idx.wrapping_add(1), Ordering::Release);
            return;
        }
        let (index, wrap) = self.next;
        let at = 16 * usize::from(index);
        let other = self.desc.load_u16(at + 14, Ordering::Relaxed) & !(AVAIL | USED);
        self.desc.store_u16(at + 12, u16::from(head), Ordering::Relaxed);
        self.desc.store_u16(at + 14, other | if wrap { AVAIL } else { USED }, Ordering::Release);
        self.next = if index + 1 == size { (0, !wrap) } else { (index + 1, wrap) };
    }

    /// Writes to the in-flight region as a front-end can.
    fn scribble(&self, u: &mut Unstructured<'_>) -> Result<()> {
        let Some(region) = &self.inflight else { return Ok(()) };
        let (at, len) = (u.arbitrary::<u16>()?, u.arbitrary::<u8>()? % 24);
        for (i, byte) in u.bytes(len.into())?.iter().enumerate() {
            region.write((usize::from(at) + i) % region.len() as usize, byte);
        }
        Ok(())
    }

    /// Replaces the device by a successor, if the region's content is valid.
    fn crash(&mut self) -> Result<()> {
        self.in_flight.drain(..).for_each(|(id, _)| self.sg.end(id));
        self.has_given = false;
        let areas = [&self.desc, &self.driver, &self.device];
        match queue(self.choice, areas, self.inflight.as_ref(), self.queue.base()) {
            Ok(successor) => self.queue = successor,
            Err(_) => return Err(libfuzzer_sys::arbitrary::Error::IncorrectFormat),
        }
        Ok(())
    }

    fn pop(&mut self) {
        let was_broken = self.queue.broken();
        match self.queue.pop(self.sg.memory(), &mut self.chain) {
            Popped::Nothing => assert_eq!(self.queue.available(), Ok(0)),
            Popped::Chain(head) => {
                let pieces = self.chain.readable().iter().chain(self.chain.writable());
                assert!(pieces.clone().count() <= usize::from(CHAIN_MAX));
                assert!(pieces.clone().count() > 0 && pieces.clone().all(|piece| piece.len > 0));
                self.took(head);
                self.start(head);
            }
            Popped::Malformed(head) => {
                self.took(head);
                self.sg.begin(head);
            }
            Popped::Broken => {
                let error = self.queue.broken().expect("a broken queue says why");
                assert!(was_broken.is_none_or(|was| was == error));
                assert_eq!(self.queue.available(), Err(error));
                return;
            }
        }
        assert_eq!(was_broken, None);
    }

    fn took(&mut self, head: u16) {
        assert!(head < self.choice.size && self.in_flight.iter().all(|(other, _)| *other != head));
        self.in_flight.push((head, None));
    }

    /// A block request: header, data in either direction, a status byte.
    fn start(&mut self, head: u16) {
        let before = (self.chain.readable_len(), self.chain.writable_len());
        let status = self.chain.take_last_writable();
        let header = self.chain.take_header::<[u64; 2]>(self.sg.memory());
        if let Ok(Some(_)) = header {
            let after =
                (self.chain.readable_len() + 16, self.chain.writable_len() + u64::from(status.is_some()));
            assert_eq!(after, before);
        }
        self.sg.begin(head);
        let last = self.in_flight.last_mut().expect("just taken");
        last.1 = status;
        let Ok(Some([kind, sector])) = header else { return };
        let write = kind & 1 != 0;
        let pieces = if write { self.chain.readable() } else { self.chain.writable() };
        let mut len = 0_u32;
        for piece in pieces {
            if self.sg.push(head, piece.addr, piece.len).is_ok() {
                len += piece.len;
            }
        }
        let data = self.sg.sgl(head);
        assert_eq!(data.len(), len);
        assert_eq!(data.pieces().map(|piece| piece.len()).sum::<usize>(), len as usize);
        let at = sector.wrapping_mul(512);
        if at.checked_add(len.into()).is_none_or(|end| end > DISK) {
            return;
        }
        STORE.with(|store| if write { data.store_to(store, at) } else { data.load_from(store, at) });
    }

    fn give_back(&mut self, which: u8) {
        if self.in_flight.is_empty() {
            return;
        }
        let (head, status) = self.in_flight.swap_remove(usize::from(which) % self.in_flight.len());
        if let Some(addr) = status {
            let written = self.sg.memory_of(head).write(addr, &which);
            assert!(written.is_err() || self.sg.memory_of(head).read(addr) == Ok(which));
        }
        self.sg.end(head);
        self.queue.push_used(head, which.into());
        self.has_given = true;
    }

    fn publish(&mut self) {
        let _called = self.queue.publish();
        // Otherwise the driver may have overwritten the index.
        if std::mem::take(&mut self.has_given) {
            if let Virtqueue::Split(queue) = &self.queue {
                assert_eq!(used_idx(&self.device), queue.next_used());
            }
        }
        assert!(!self.queue.publish(), "nothing is new");
    }
}

fuzz_target!(|data: &[u8]| {
    let mut u = Unstructured::new(data);
    let Ok(choice) = u.arbitrary::<u8>() else { return };
    let mut device = Device::new(choice.into());
    while !u.is_empty() && device.step(&mut u).is_ok() {}
    while !device.in_flight.is_empty() {
        device.give_back(0);
    }
    assert!(!device.sg.has_old_users());
});
