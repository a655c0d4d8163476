//! A hostile driver's split queue: any bytes in guest memory, rings and all, changed between the steps of a device like
//! virtio-blk, which also loses and regains part of the memory.
//!
//! Whatever the guest does, a head is in flight once, chains are within their limits and in order, scatter lists are as
//! long as their pieces, and a broken queue stays broken. The first byte chooses size and features, then come steps.
#![no_main]

use aryk_dma::{GuestArea, Mapping, MemTable, Region, SgTable};
use aryk_virtqueue::{
    CHAIN_MAX, Chain, PopError, SplitConfig, SplitQueue, avail_len, desc_len, used_idx, used_len,
};
use libfuzzer_sys::arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Two adjoining regions of guest memory, at an address that one byte more would not fit into a descriptor's low half.
const BASE: u64 = 0xffff_0000;
const REGION: u64 = 16 << 10;
/// Where the driver put the queue's parts.
const DESC: u64 = 0;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x1800;
/// The disk.
const DISK: u64 = 64 << 10;

thread_local! {
    static MAPPINGS: [Arc<Mapping>; 2] =
        [(); 2].map(|()| Arc::new(Mapping::anonymous(REGION).expect("16 KiB of memory")));
    static STORE: Mapping = Mapping::anonymous(DISK).expect("64 KiB of memory");
}

struct Device {
    memory: Arc<MemTable>,
    queue: SplitQueue,
    chain: Chain,
    sg: SgTable,
    /// What was taken and not given back, and where its status byte lies.
    in_flight: Vec<(u16, Option<u64>)>,
    /// Whether something was given back since the last time that was shown.
    has_given: bool,
    avail: GuestArea,
    used: GuestArea,
    size: u16,
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

impl Device {
    fn new(choice: u8) -> Self {
        let memory = memory(2);
        memory.write_bytes(BASE, &[0; 2 * REGION as usize]).expect("all of it is there");
        let size = 1 << (choice & 7);
        let (event_idx, indirect) = (choice & 8 != 0, choice & 16 != 0);
        let start = if choice & 32 != 0 { u16::MAX - 1 } else { 0 };
        let area = |at, len| memory.area_at_guest(BASE + at, len).expect("in the first region");
        let (avail, used) = (area(AVAIL, avail_len(size, true)), area(USED, used_len(size, true)));
        avail.store_u16(2, start, Ordering::Relaxed);
        used.store_u16(2, start, Ordering::Relaxed);
        let config = SplitConfig {
            size,
            desc: area(DESC, desc_len(size)),
            avail: avail.clone(),
            used: used.clone(),
            event_idx,
            indirect,
            next_avail: start,
            next_used: used_idx(&used),
        };
        let queue = SplitQueue::new(config).expect("a sound queue");
        let sg = SgTable::new(size, Arc::clone(&memory));
        let chain = Chain::new(size);
        Self { memory, queue, chain, sg, in_flight: Vec::new(), has_given: false, avail, used, size }
    }

    fn step(&mut self, u: &mut Unstructured<'_>) -> Result<()> {
        match u.arbitrary::<u8>()? % 10 {
            0 | 1 => {
                let (at, len) = (u.arbitrary::<u16>()?, u.arbitrary::<u8>()? % 48);
                let bytes = u.bytes(len.into())?;
                // It may lie outside, which is the driver's own problem.
                let _written = self.memory.write_bytes(BASE + u64::from(at), bytes);
            }
            2 | 3 => self.offer(u.arbitrary()?),
            4 | 5 => self.pop(),
            6 => self.give_back(u.arbitrary()?),
            7 => self.publish(),
            8 => {
                let more = self.queue.enable_kicks();
                assert_eq!(more, self.avail.load_u16(2, Ordering::Relaxed) != self.queue.next_avail());
                self.queue.disable_kicks();
                self.queue.prefetch_first(self.sg.memory());
                self.queue.prefetch_next(self.sg.memory());
            }
            _ => self.sg.set_memory(memory(1 + usize::from(u.arbitrary::<bool>()?))),
        }
        assert_eq!(self.queue.in_flight() as usize, self.in_flight.len());
        assert_eq!(self.sg.in_use() as usize, self.in_flight.len());
        Ok(())
    }

    /// What a driver does to add a chain.
    fn offer(&self, head: u8) {
        let idx = self.avail.load_u16(2, Ordering::Relaxed);
        self.avail.store_u16(4 + 2 * usize::from(idx % self.size), head.into(), Ordering::Relaxed);
        self.avail.store_u16(2, idx.wrapping_add(1), Ordering::Release);
    }

    fn pop(&mut self) {
        let was_broken = self.queue.broken();
        match self.queue.pop(self.sg.memory(), &mut self.chain) {
            Ok(None) => assert_eq!(self.queue.available(), Ok(0)),
            Ok(Some(head)) => {
                let pieces = self.chain.readable().iter().chain(self.chain.writable());
                assert!(pieces.clone().count() <= usize::from(self.size.max(CHAIN_MAX)));
                assert!(pieces.clone().count() > 0 && pieces.clone().all(|piece| piece.len > 0));
                self.took(head);
                self.start(head);
            }
            Err(PopError::Chain { head, .. }) => {
                self.took(head);
                self.sg.begin(head);
            }
            Err(PopError::Queue(error)) => {
                assert!(was_broken.is_none_or(|was| was == error));
                assert_eq!((self.queue.broken(), self.queue.available()), (Some(error), Err(error)));
                return;
            }
        }
        assert_eq!(was_broken, None);
    }

    fn took(&mut self, head: u16) {
        assert!(head < self.size && self.in_flight.iter().all(|(other, _)| *other != head));
        self.in_flight.push((head, None));
    }

    /// A block request: header, data either way, a status byte.
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
        // Else the index is the driver's to scribble on.
        if std::mem::take(&mut self.has_given) {
            assert_eq!(used_idx(&self.used), self.queue.next_used());
        }
        assert!(!self.queue.publish(), "nothing is new");
    }
}

fuzz_target!(|data: &[u8]| {
    let mut u = Unstructured::new(data);
    let Ok(choice) = u.arbitrary() else { return };
    let mut device = Device::new(choice);
    while !u.is_empty() && device.step(&mut u).is_ok() {}
    while !device.in_flight.is_empty() {
        device.give_back(0);
    }
    assert!(!device.sg.has_old_users());
});
