//! How much one turn does for a guest that asks for as much as it can.

use super::{Asked, Bench, DATA, HEADER, NEXT, STATUS, WRITE};
use crate::guest::{FREE, Guest};
use aryk_bdev::{Channel, Completion, Device, Geometry, Io, Limits, OpSet, OpenError, Outbox, Status, Tag};
use aryk_dma::{DirtyLog, Mapping, PAGE, Region};
use aryk_reactor::{Cx, RootId};
use aryk_vhost_user::QueueLog;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use virtio_bindings::bindings::virtio_blk::*;

const INDIRECT: u16 = 4;
/// Polls of a queue in one turn: as one that is promoted, and as one that was woken.
const POLLS: usize = 2;
/// Bytes of memory of a guest whose requests are large; it costs none before it is used.
const LARGE_MEMORY: u64 = 8 << 30;

/// A disk that moves nothing, and completes when it is told to.
struct Void {
    asked: Asked,
    completes: Arc<AtomicBool>,
}

struct VoidChannel {
    asked: Asked,
    completes: Arc<AtomicBool>,
    outbox: Outbox,
}

impl Device for Void {
    fn product(&self) -> &'static str {
        "void"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(512, 1 << 40)
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let (asked, completes) = (Arc::clone(&self.asked), Arc::clone(&self.completes));
        Ok(Box::new(VoidChannel { asked, completes, outbox: Outbox::new(root) }))
    }
}

impl Channel for VoidChannel {
    fn submit(&mut self, io: Io, cx: &mut Cx) {
        self.asked.lock().unwrap().push((io.op, io.fua, io.lba, io.blocks));
        self.outbox.push(io.tag, Status::Ok, cx);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        if self.completes.load(Ordering::Relaxed) {
            self.outbox.take(out);
        }
    }
}

/// A guest of much memory on such a disk, what that was asked, and what lets it complete.
fn large() -> (Guest, Asked, Arc<AtomicBool>) {
    let (asked, completes) = (Asked::default(), Arc::new(AtomicBool::new(false)));
    let void = Void { asked: Arc::clone(&asked), completes: Arc::clone(&completes) };
    let memory = Mapping::anonymous(LARGE_MEMORY).expect("memory that is not used");
    (Guest::with_memory(Arc::new(void), true, memory), asked, completes)
}

/// Reads that have header, and data and status in one buffer, and two descriptors.
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

fn came_back(guest: &mut Guest) -> usize {
    std::iter::from_fn(|| guest.used()).count()
}

/// A log of all of a guest's memory, and its file.
fn log(bytes_of_memory: u64) -> (OwnedFd, QueueLog) {
    let len = bytes_of_memory / PAGE / 8;
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    let log = Arc::new(DirtyLog::map(file.as_fd(), 0, len).unwrap());
    (file, QueueLog::new(log, [(0, 1), (0, 1)]))
}

/// Pages that are marked, but for that of the ring, which are unmarked.
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
        // Answered at once, whatever there is room for.
        (99, &much, &[status_page]),
        (VIRTIO_BLK_T_GET_ID, &much, &[status_page, data_page]),
        (VIRTIO_BLK_T_FLUSH, &much, &[status_page]),
        // The disk has no such block, and that shows before anything is written.
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
    let (mut guest, asked, completes) = large();
    let (file, log) = log(LARGE_MEMORY);
    guest.set_log(Some(log));
    offer_reads(&mut guest, READS, BYTES);
    while asked.lock().unwrap().len() < READS.into() {
        guest.turn();
    }
    completes.store(true, Ordering::Relaxed);
    let mut turns = Vec::new();
    while turns.iter().sum::<usize>() < READS.into() {
        guest.turn();
        turns.push(came_back(&mut guest));
    }
    // Two of them are 16,384 words of the log.
    assert!(turns.iter().all(|reads| *reads <= 2 * POLLS), "{turns:?}");
    let first = (1_u64 << 32) / PAGE;
    assert!(take_marked(&file).into_iter().eq(first..=first + u64::from(BYTES) / PAGE));
    completes.store(false, Ordering::Relaxed);
    assert_eq!(guest.stop(), READS.into());
}

#[test]
fn a_queue_that_stops_gives_back_what_was_not_noted_yet() {
    let (mut guest, asked, completes) = large();
    guest.set_log(Some(log(LARGE_MEMORY).1));
    offer_reads(&mut guest, 8, 2 << 30);
    while asked.lock().unwrap().len() < 8 {
        guest.turn();
    }
    completes.store(true, Ordering::Relaxed);
    guest.turn();
    assert!(came_back(&mut guest) < 8);
    // It waits for the rest.
    assert_eq!(guest.stop(), 8);
}

#[test]
fn bytes_that_go_to_the_disk_are_spread_over_turns() {
    let (mut guest, asked, completes) = large();
    completes.store(true, Ordering::Relaxed);
    offer_reads(&mut guest, 8, 2 << 20);
    guest.turn();
    let sent = asked.lock().unwrap().len();
    // In each poll one before the disk is looked at, and one after.
    assert!(sent <= 2 * POLLS, "{sent} requests of 2 MiB in one turn");
    let back = (0..20).map(|_| {
        guest.turn();
        came_back(&mut guest)
    });
    assert_eq!(back.sum::<usize>(), 8);
}

#[test]
fn descriptors_of_a_turn_are_limited_whatever_chains_they_are_of() {
    let mut b = Bench::new(512, true);
    // A table of the longest chain, nothing of which can be written to: there is no place for an answer.
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
        turns.push(came_back(&mut b.guest));
    }
    assert!(turns.iter().all(|chains| *chains <= POLLS), "{turns:?}");
    assert_eq!(b.guest.errors.unanswerable.load(Ordering::Relaxed), 12);
    // And one too long, which is given back empty.
    b.guest.describe(0, table, 16 * 1025, INDIRECT, 0);
    b.guest.offer(0);
    assert_eq!(b.guest.wait(), (0, 0));
    assert_eq!(b.guest.errors.bad_chains.load(Ordering::Relaxed), 1);
}

#[test]
fn more_segments_than_the_guest_was_told_are_refused() {
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

/// Reads of 126 buffers each, which cross as many regions.
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
    let (asked, completes) = (Asked::default(), Arc::new(AtomicBool::new(false)));
    let void = Void { asked, completes: Arc::clone(&completes) };
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
    assert_eq!(guest.in_flight(), MOST.div_ceil(each), "the others wait");
    // The queue is parked. What the disk tells it of lets the others in, though nobody kicks.
    completes.store(true, Ordering::Relaxed);
    guest.wake();
    for _ in 0..16 {
        guest.wait();
    }
    // Of one request there is an end too.
    offer_scattered_reads(&mut guest, 1, 17 * 4096);
    assert_eq!(guest.wait(), (0, 1));
    assert_eq!(guest.memory.read::<u8>(FREE as usize + 32), VIRTIO_BLK_S_IOERR as u8);
    completes.store(false, Ordering::Relaxed);
    assert_eq!(guest.stop(), 17);
}
