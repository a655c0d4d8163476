//! Tests of the bounds of one turn's work for a guest that submits as much as it can.

use super::{Bench, DATA, HEADER, NEXT, Recorded, STATUS, WRITE};
use crate::guest::{FREE, Guest};
use aryk_bdev::{
    Blocks, Channel, Completion, Device, Geometry, Io, Limits, OpSet, OpenError, Outbox, Status, Tag,
};
use aryk_dma::{DirtyLog, Mapping, PAGE, Region};
use aryk_reactor::{Cx, RootId};
use aryk_vhost_user::QueueLog;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio_bindings::bindings::virtio_blk::*;

const INDIRECT: u16 = 4;
/// Polls of a queue in one turn: once as a promoted queue, once as a woken queue.
const POLLS: usize = 2;
/// The memory of a guest with large requests, in bytes; unused memory is not allocated.
const LARGE_MEMORY: u64 = 8 << 30;

/// A disk that moves no data, and completes requests when the test allows it.
struct IdleDisk {
    recorded: Recorded,
    completes: Arc<AtomicBool>,
}

struct IdleChannel {
    recorded: Recorded,
    completes: Arc<AtomicBool>,
    outbox: Outbox,
}

impl Device for IdleDisk {
    fn product(&self) -> &'static str {
        "void"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(512, Blocks(1 << 40))
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let (recorded, completes) = (Arc::clone(&self.recorded), Arc::clone(&self.completes));
        Ok(Box::new(IdleChannel { recorded, completes, outbox: Outbox::new(root) }))
    }
}

impl Channel for IdleChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.recorded.lock().unwrap().push((io.op, io.fua, io.lba.0, io.blocks.0));
        self.outbox.push(io.tag, Status::Ok, cx);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        if self.completes.load(Ordering::Relaxed) {
            self.outbox.take(out);
        }
    }
}

/// A guest with much memory on such a disk, the disk's recorded requests, and the flag that lets it complete them.
fn large() -> (Guest, Recorded, Arc<AtomicBool>) {
    let (recorded, completes) = (Recorded::default(), Arc::new(AtomicBool::new(false)));
    let void = IdleDisk { recorded: Arc::clone(&recorded), completes: Arc::clone(&completes) };
    let memory = Mapping::anonymous(LARGE_MEMORY).expect("reserve address space");
    (Guest::with_memory(Arc::new(void), true, memory), recorded, completes)
}

/// Submits reads of two descriptors: header, and data with status in one buffer.
fn offer_reads(guest: &mut Guest, count: u16, bytes: u32) {
    for i in 0..count {
        let header = FREE + 64 * u64::from(i);
        guest.memory.write(header as usize, &VIRTIO_BLK_T_IN);
        guest.memory.write(header as usize + 8, &0_u64);
        guest.describe(2 * i, header, 16, NEXT, 2 * i + 1);
        guest.describe(2 * i + 1, 1 << 32, bytes + 1, WRITE, 0);
        guest.offer(2 * i);
    }
}

fn count_used(guest: &mut Guest) -> usize {
    std::iter::from_fn(|| guest.used()).count()
}

/// A dirty log of all of a guest's memory, and its file.
fn log(bytes_of_memory: u64) -> (OwnedFd, QueueLog) {
    let len = bytes_of_memory / PAGE / 8;
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    let log = Arc::new(DirtyLog::map(file.as_fd(), 0, len).unwrap());
    (file, QueueLog::new(log, [(0, 1), (0, 1)]))
}

/// The marked pages, without the ring's page. Clears the marks.
fn take_marked(file: &OwnedFd) -> Vec<u64> {
    let mut bits = vec![0; rustix::fs::fstat(file).unwrap().st_size as usize];
    rustix::io::pread(file, &mut bits[..], 0).unwrap();
    rustix::io::pwrite(file, &vec![0; bits.len()], 0).unwrap();
    (1..bits.len() as u64 * 8).filter(|page| bits[(page / 8) as usize] & (1 << (page % 8)) != 0).collect()
}

#[test]
fn only_pages_that_were_written_are_marked() {
    let mut b = Bench::new(512, true);
    let (file, log) = log(crate::guest::MEMORY.next_multiple_of(PAGE * PAGE * 8));
    b.guest.set_log(Some(log));
    let (status_page, data_page) = (STATUS / PAGE, DATA / PAGE);
    let much = [(DATA, 40 * 4096, WRITE)];
    let cases: [(u32, &[super::Data], &[u64]); 6] = [
        // Answered at once, however much room there is for data.
        (99, &much, &[status_page]),
        (VIRTIO_BLK_T_GET_ID, &much, &[status_page, data_page]),
        (VIRTIO_BLK_T_FLUSH, &much, &[status_page]),
        // The request's blocks are beyond the disk, which is checked before data is written.
        (VIRTIO_BLK_T_OUT, &[(DATA, 4096, 0)], &[status_page]),
        (VIRTIO_BLK_T_IN, &[(DATA, 4096 + 512, WRITE)], &[status_page, data_page, data_page + 1]),
        (VIRTIO_BLK_T_IN, &[(DATA, 100, WRITE)], &[status_page]),
    ];
    for (kind, data, expected) in cases {
        b.request(kind, 0, data);
        assert_eq!(take_marked(&file), expected, "of a request of kind {kind}");
    }
}

#[test]
fn large_marks_are_spread_over_turns_and_none_is_lost() {
    const READS: u16 = 8;
    const BYTES: u32 = 2 << 30;
    let (mut guest, recorded, completes) = large();
    let (file, log) = log(LARGE_MEMORY);
    guest.set_log(Some(log));
    offer_reads(&mut guest, READS, BYTES);
    while recorded.lock().unwrap().len() < READS.into() {
        guest.turn();
    }
    completes.store(true, Ordering::Relaxed);
    let mut turns = Vec::new();
    while turns.iter().sum::<usize>() < READS.into() {
        guest.turn();
        turns.push(count_used(&mut guest));
    }
    // The dirty marks of two of these reads are 16,384 words of the log.
    assert!(turns.iter().all(|reads| *reads <= 2 * POLLS), "{turns:?}");
    let first = (1_u64 << 32) / PAGE;
    assert!(take_marked(&file).into_iter().eq(first..=first + u64::from(BYTES) / PAGE));
    completes.store(false, Ordering::Relaxed);
    assert_eq!(guest.stop(), READS.into());
}

#[test]
fn a_stop_waits_for_unmarked_pages() {
    let (mut guest, recorded, completes) = large();
    guest.set_log(Some(log(LARGE_MEMORY).1));
    offer_reads(&mut guest, 8, 2 << 30);
    while recorded.lock().unwrap().len() < 8 {
        guest.turn();
    }
    completes.store(true, Ordering::Relaxed);
    guest.turn();
    assert!(count_used(&mut guest) < 8);
    // The stop waits for the remaining marks.
    assert_eq!(guest.stop(), 8);
}

#[test]
fn bytes_that_go_to_the_disk_are_spread_over_turns() {
    let (mut guest, recorded, completes) = large();
    completes.store(true, Ordering::Relaxed);
    offer_reads(&mut guest, 8, 2 << 20);
    guest.turn();
    let sent = recorded.lock().unwrap().len();
    // Each poll sends one request before it polls the disk, and one after.
    assert!(sent <= 2 * POLLS, "{sent} requests of 2 MiB in one turn");
    let back = (0..20).map(|_| {
        guest.turn();
        count_used(&mut guest)
    });
    assert_eq!(back.sum::<usize>(), 8);
}

#[test]
fn descriptors_of_a_turn_are_limited_over_all_chains() {
    let mut b = Bench::new(512, true);
    // An indirect table of the longest chain without a writable descriptor, so without a place for the answer.
    let table = DATA;
    for i in 0..1024_u64 {
        let at = (table + 16 * i) as usize;
        b.guest.memory.write(at, &HEADER);
        b.guest.memory.write(at + 8, &1_u32);
        b.guest.memory.write(at + 12, &if i == 1023 { 0 } else { NEXT });
        b.guest.memory.write(at + 14, &(i as u16 + 1));
    }
    for head in 0..12 {
        b.guest.describe(head, table, 16 * 1024, INDIRECT, 0);
        b.guest.offer(head);
    }
    let mut turns = Vec::new();
    while turns.iter().sum::<usize>() < 12 {
        b.guest.turn();
        turns.push(count_used(&mut b.guest));
    }
    assert!(turns.iter().all(|chains| *chains <= POLLS), "{turns:?}");
    assert_eq!(b.guest.errors.unanswerable.load(Ordering::Relaxed), 12);
    // A chain that is too long is used with length 0.
    b.guest.describe(0, table, 16 * 1025, INDIRECT, 0);
    b.guest.offer(0);
    assert_eq!(b.guest.wait(), (0, 0));
    assert_eq!(b.guest.errors.bad_chains.load(Ordering::Relaxed), 1);
}

#[test]
fn more_segments_than_seg_max_are_refused() {
    for (segments, expected) in [(126, VIRTIO_BLK_S_OK), (127, VIRTIO_BLK_S_IOERR)] {
        let mut b = Bench::new(512, true);
        b.header(VIRTIO_BLK_T_OUT, 0);
        let table = DATA;
        let put = |i: u64, addr: u64, len: u32, flags: u16| {
            let at = (table + 16 * i) as usize;
            b.guest.memory.write(at, &addr);
            b.guest.memory.write(at + 8, &len);
            b.guest.memory.write(at + 12, &flags);
            b.guest.memory.write(at + 14, &(i as u16 + 1));
        };
        put(0, HEADER, 16, NEXT);
        (1..segments).for_each(|i| put(i, DATA + 0x4000, 4, NEXT));
        put(segments, DATA + 0x4000, 512 - 4 * (segments as u32 - 1), NEXT);
        put(segments + 1, STATUS, 1, WRITE);
        b.guest.describe(0, table, 16 * (segments as u32 + 2), INDIRECT, 0);
        b.guest.offer(0);
        assert_eq!(b.guest.wait(), (0, 1));
        assert_eq!(b.status(), expected, "{segments} segments");
    }
}

/// Submits reads of 126 buffers each; each buffer crosses all small regions.
fn offer_scattered_reads(guest: &mut Guest, count: u16, bytes: u32) {
    for head in 0..count {
        let table = FREE + 0x1000 * u64::from(head);
        let put = |i: u64, addr: u64, len: u32, flags: u16| {
            let at = (table + 64 + 16 * i) as usize;
            guest.memory.write(at, &addr);
            guest.memory.write(at + 8, &len);
            guest.memory.write(at + 12, &flags);
            guest.memory.write(at + 14, &(i as u16 + 1));
        };
        guest.memory.write(table as usize, &[VIRTIO_BLK_T_IN, 0, 0, 0]);
        put(0, table, 16, NEXT);
        (1..=126).for_each(|i| put(i, crate::guest::MEMORY, bytes, NEXT | WRITE));
        put(127, table + 32, 1, WRITE);
        guest.describe(head, table + 64, 16 * 128, INDIRECT, 0);
        guest.offer(head);
    }
}

#[test]
#[expect(clippy::disallowed_methods, reason = "an idle queue is polled for a while")]
fn pieces_in_flight_are_limited_and_other_chains_wait() {
    const REGIONS: u64 = 17;
    const MOST: u32 = 1 << 14;
    let (recorded, completes) = (Recorded::default(), Arc::new(AtomicBool::new(false)));
    let void = IdleDisk { recorded, completes: Arc::clone(&completes) };
    let start = crate::guest::MEMORY;
    let mapping = Arc::new(Mapping::anonymous(start + REGIONS * PAGE).unwrap());
    let region =
        |at, len| Region { guest_addr: at, user_addr: at, len, offset: at, mapping: Arc::clone(&mapping) };
    let pages = (0..REGIONS).map(|i| region(start + i * PAGE, PAGE));
    let regions = [region(0, start)].into_iter().chain(pages).collect();
    let mut guest = Guest::with_regions(Arc::new(void), true, regions);
    offer_scattered_reads(&mut guest, 16, 16 * 4096);
    // Longer than an idle queue is polled.
    for _ in 0..100 {
        guest.turn();
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let each = 126 * 16 + 1;
    assert_eq!(guest.in_flight(), MOST.div_ceil(each), "the other chains wait");
    // The queue is parked. A completion of the disk must make it take the waiting chains, without a kick.
    completes.store(true, Ordering::Relaxed);
    guest.wake();
    for _ in 0..16 {
        guest.wait();
    }
    // A single request has a limit too.
    offer_scattered_reads(&mut guest, 1, 17 * 4096);
    assert_eq!(guest.wait(), (0, 1));
    assert_eq!(guest.memory.read::<u8>(FREE as usize + 32), VIRTIO_BLK_S_IOERR as u8);
    completes.store(false, Ordering::Relaxed);
    assert_eq!(guest.stop(), 17);
}
