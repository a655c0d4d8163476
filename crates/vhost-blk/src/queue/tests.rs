//! Tests of requests from a guest's ring to a disk in memory and back.

mod bounds;

use crate::guest::{AVAIL, FREE, Guest, MEMORY, SIZE};
use aryk_bdev::{
    Access, Bytes, Channel, Completion, Device, Geometry, Io, Limits, Op, OpSet, OpenError, Outbox, Registry,
    Status, Tag,
};
use aryk_dma::Mapping;
use aryk_reactor::{Cx, RootId};
use aryk_vhost_device::Trouble;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use virtio_bindings::bindings::virtio_blk::*;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const HEADER: u64 = FREE;
const STATUS: u64 = FREE + 0x100;
const DATA: u64 = FREE + 0x1000;
/// Sectors of the disk.
const SECTORS: u64 = 64;

/// Operation, durability, first block and number of blocks of each request, shared.
type Recorded = Arc<Mutex<Vec<(Op, bool, u64, u64)>>>;
/// A data descriptor: address, length, flags.
type Data = (u64, u32, u16);

/// A disk in memory that records its requests.
struct RecordingDisk {
    block_size: u32,
    store: Arc<Mutex<Vec<u8>>>,
    recorded: Recorded,
}

struct RecordingChannel {
    block_size: u32,
    store: Arc<Mutex<Vec<u8>>>,
    recorded: Recorded,
    outbox: Outbox,
}

impl Device for RecordingDisk {
    fn product(&self) -> &'static str {
        "disk"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(self.block_size, Bytes(SECTORS * 512).whole_blocks(self.block_size))
    }

    fn limits(&self) -> Limits {
        Limits { depth: 2, ..Limits::default() }
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(RecordingChannel {
            block_size: self.block_size,
            store: Arc::clone(&self.store),
            recorded: Arc::clone(&self.recorded),
            outbox: Outbox::new(root),
        }))
    }
}

impl Channel for RecordingChannel {
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.recorded.lock().unwrap().push((io.op, io.fua, io.lba.0, io.blocks.0));
        let mut store = self.store.lock().unwrap();
        let start = io.lba.to_bytes(self.block_size).0 as usize;
        let range = start..start + io.blocks.to_bytes(self.block_size).0 as usize;
        match io.op {
            Op::Read => io.data.write(0, &store[range]),
            Op::Write => io.data.read(0, &mut store[range]),
            Op::WriteZeroes | Op::Unmap => store[range].fill(0),
            _ => {}
        }
        self.outbox.push(io.tag, Status::Ok, cx);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        self.outbox.take(out);
    }
}

/// A guest of a recording disk, the disk's data, and its recorded requests.
struct Bench {
    guest: Guest,
    store: Arc<Mutex<Vec<u8>>>,
    recorded: Recorded,
}

impl Bench {
    fn new(block_size: u32, flushes: bool) -> Self {
        let content = (0..SECTORS * 512).map(|i| (i / 512 + i % 251) as u8).collect();
        let (store, recorded) = (Arc::new(Mutex::new(content)), Arc::default());
        let disk = RecordingDisk { block_size, store: Arc::clone(&store), recorded: Arc::clone(&recorded) };
        Self { guest: Guest::new(Arc::new(disk), flushes), store, recorded }
    }

    fn header(&self, kind: u32, sector: u64) {
        self.guest.memory.write(HEADER as usize, &kind);
        self.guest.memory.write(HEADER as usize + 8, &sector);
        self.guest.memory.write(STATUS as usize, &0xffu8);
    }

    fn status(&self) -> u32 {
        self.guest.memory.read::<u8>(STATUS as usize).into()
    }

    /// Submits a request of header, `data` and status. Returns its status and the length of its used element.
    fn request(&mut self, kind: u32, sector: u64, data: &[Data]) -> (u32, u32) {
        self.header(kind, sector);
        self.guest.describe(0, HEADER, 16, NEXT, 1);
        for (i, &(addr, len, flags)) in data.iter().enumerate() {
            self.guest.describe(i as u16 + 1, addr, len, NEXT | flags, i as u16 + 2);
        }
        self.guest.describe(data.len() as u16 + 1, STATUS, 1, WRITE, 0);
        self.guest.offer(0);
        let (head, written) = self.guest.wait();
        assert_eq!(head, 0);
        (self.status(), written)
    }
}

#[test]
fn reads_and_writes_of_any_shape() {
    let mut b = Bench::new(512, true);
    let (status, written) = b.request(VIRTIO_BLK_T_IN, 3, &[(DATA, 1000, WRITE), (DATA + 5000, 24, WRITE)]);
    assert_eq!((status, written), (VIRTIO_BLK_S_OK, 1025));
    let expected = b.store.lock().unwrap()[1536..2560].to_vec();
    let read = |at: u64| b.guest.memory.read::<u8>(at as usize);
    let got: Vec<u8> =
        (0..1000).map(|i| read(DATA + i)).chain((0..24).map(|i| read(DATA + 5000 + i))).collect();
    assert_eq!(got, expected);
    let (status, written) = b.request(VIRTIO_BLK_T_OUT, 60, &[(DATA, 512, 0), (DATA + 512, 512, 0)]);
    assert_eq!((status, written), (VIRTIO_BLK_S_OK, 1));
    assert_eq!(b.store.lock().unwrap()[60 * 512..][..1000], expected[..1000]);
    assert_eq!(*b.recorded.lock().unwrap(), [(Op::Read, false, 3, 2), (Op::Write, false, 60, 2)]);
    assert_eq!(b.guest.stop(), 2);
}

#[test]
fn a_header_and_status_in_pieces_beside_data() {
    let mut b = Bench::new(512, true);
    b.header(VIRTIO_BLK_T_IN, 1);
    // The header in three descriptors; data and status in one.
    b.guest.describe(5, HEADER, 3, NEXT, 6);
    b.guest.describe(6, HEADER + 3, 9, NEXT, 7);
    b.guest.describe(7, HEADER + 12, 4, NEXT, 8);
    b.guest.describe(8, DATA, 513, WRITE, 0);
    b.guest.offer(5);
    assert_eq!(b.guest.wait(), (5, 513));
    let last = b.guest.memory.read::<u8>(DATA as usize + 512);
    assert_eq!(u32::from(last), VIRTIO_BLK_S_OK);
    assert_eq!(b.guest.memory.read::<u8>(DATA as usize), b.store.lock().unwrap()[512]);
}

#[test]
fn without_flush_every_write_is_durable() {
    for (flushes, fua) in [(true, false), (false, true)] {
        let mut b = Bench::new(512, flushes);
        assert_eq!(b.request(VIRTIO_BLK_T_OUT, 0, &[(DATA, 512, 0)]).0, VIRTIO_BLK_S_OK);
        assert_eq!(b.request(VIRTIO_BLK_T_FLUSH, 0, &[]).0, VIRTIO_BLK_S_OK);
        assert_eq!(*b.recorded.lock().unwrap(), [(Op::Write, fua, 0, 1), (Op::Flush, false, 0, 0)]);
    }
}

#[test]
fn ranges_are_discarded_and_zeroed() {
    let mut b = Bench::new(512, true);
    let range = |b: &Bench, sector: u64, sectors: u32, flags: u32| {
        b.guest.memory.write(DATA as usize, &sector);
        b.guest.memory.write(DATA as usize + 8, &sectors);
        b.guest.memory.write(DATA as usize + 12, &flags);
    };
    range(&b, 4, 3, 0);
    assert_eq!(b.request(VIRTIO_BLK_T_DISCARD, 0, &[(DATA, 16, 0)]).0, VIRTIO_BLK_S_OK);
    range(&b, 9, 1, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP);
    // The 16 bytes in two descriptors.
    let pieces = [(DATA, 7, 0), (DATA + 7, 9, 0)];
    assert_eq!(b.request(VIRTIO_BLK_T_WRITE_ZEROES, 0, &pieces).0, VIRTIO_BLK_S_OK);
    assert_eq!(*b.recorded.lock().unwrap(), [(Op::Unmap, false, 4, 3), (Op::WriteZeroes, false, 9, 1)]);
    for (kind, flags) in [(VIRTIO_BLK_T_DISCARD, 1), (VIRTIO_BLK_T_WRITE_ZEROES, 2)] {
        range(&b, 4, 3, flags);
        assert_eq!(b.request(kind, 0, &[(DATA, 16, 0)]).0, VIRTIO_BLK_S_UNSUPP);
    }
    range(&b, SECTORS - 1, 2, 0);
    assert_eq!(b.request(VIRTIO_BLK_T_DISCARD, 0, &[(DATA, 16, 0)]).0, VIRTIO_BLK_S_IOERR);
    assert_eq!(b.request(VIRTIO_BLK_T_DISCARD, 0, &[(DATA, 32, 0)]).0, VIRTIO_BLK_S_UNSUPP);
}

#[test]
fn get_id_writes_as_much_as_fits() {
    let mut b = Bench::new(512, true);
    let (status, written) = b.request(VIRTIO_BLK_T_GET_ID, 0, &[(DATA, 20, WRITE)]);
    assert_eq!((status, written), (VIRTIO_BLK_S_OK, 21));
    assert_eq!(b.guest.memory.read::<[u8; 20]>(DATA as usize), *b"a disk of the tests\0");
    let (status, written) =
        b.request(VIRTIO_BLK_T_GET_ID, 0, &[(DATA + 100, 2, WRITE), (DATA + 200, 3, WRITE)]);
    assert_eq!((status, written), (VIRTIO_BLK_S_OK, 6));
    assert_eq!(b.guest.memory.read::<[u8; 3]>(DATA as usize + 200), *b"dis");
}

/// The data of a request without a valid status address is not written either.
#[test]
fn get_id_without_a_status_address_writes_nothing() {
    let mut b = Bench::new(512, true);
    b.header(VIRTIO_BLK_T_GET_ID, 0);
    b.guest.describe(0, HEADER, 16, NEXT, 1);
    b.guest.describe(1, DATA, 20, NEXT | WRITE, 2);
    b.guest.describe(2, MEMORY, 1, WRITE, 0);
    b.guest.offer(0);
    assert_eq!(b.guest.wait(), (0, 0));
    assert_eq!(b.guest.errors.unanswerable.load(Ordering::Relaxed), 1);
    assert_eq!(b.guest.memory.read::<[u8; 20]>(DATA as usize), [0; 20]);
}

#[test]
fn invalid_requests_are_answered_by_an_error() {
    let mut b = Bench::new(4096, true);
    let cases: [(u32, u64, &[Data], u32); 8] = [
        (99, 0, &[], VIRTIO_BLK_S_UNSUPP),
        (VIRTIO_BLK_T_IN, SECTORS, &[(DATA, 4096, WRITE)], VIRTIO_BLK_S_IOERR),
        (VIRTIO_BLK_T_IN, u64::MAX, &[(DATA, 4096, WRITE)], VIRTIO_BLK_S_IOERR),
        (VIRTIO_BLK_T_IN, 1, &[(DATA, 4096, WRITE)], VIRTIO_BLK_S_IOERR),
        (VIRTIO_BLK_T_IN, 0, &[(DATA, 512, WRITE)], VIRTIO_BLK_S_IOERR),
        (VIRTIO_BLK_T_IN, 0, &[], VIRTIO_BLK_S_IOERR),
        (VIRTIO_BLK_T_OUT, 0, &[(MEMORY - 10, 4096, 0)], VIRTIO_BLK_S_IOERR),
        (VIRTIO_BLK_T_OUT, 0, &[(u64::MAX - 10, 4096, 0)], VIRTIO_BLK_S_IOERR),
    ];
    for (i, (kind, sector, data, expected)) in cases.into_iter().enumerate() {
        assert_eq!(b.request(kind, sector, data), (expected, 1), "case {i}");
    }
    assert!(b.recorded.lock().unwrap().is_empty());
    // The queue continues after the errors.
    assert_eq!(b.request(VIRTIO_BLK_T_IN, 8, &[(DATA, 4096, WRITE)]), (VIRTIO_BLK_S_OK, 4097));
}

#[test]
fn chains_without_a_status_are_used_with_length_0() {
    let mut b = Bench::new(512, true);
    // A chain without a writable descriptor; a status outside of guest memory; a chain that is a loop.
    b.guest.describe(0, HEADER, 16, 0, 0);
    b.guest.describe(1, HEADER, 16, NEXT, 2);
    b.guest.describe(2, MEMORY, 1, WRITE, 0);
    b.guest.describe(3, HEADER, 16, NEXT, 3);
    for head in [0, 1, 3] {
        b.guest.offer(head);
        assert_eq!(b.guest.wait(), (head.into(), 0));
    }
    let errors = &b.guest.errors;
    assert_eq!(errors.unanswerable.load(Ordering::Relaxed), 2);
    assert_eq!(errors.bad_chains.load(Ordering::Relaxed), 1);
    assert_eq!(b.request(VIRTIO_BLK_T_IN, 0, &[(DATA, 512, WRITE)]).0, VIRTIO_BLK_S_OK);
}

#[test]
fn an_invalid_available_index_ends_the_session() {
    let mut b = Bench::new(512, true);
    b.guest.memory.store_u16(AVAIL as usize + 2, SIZE + 1, Ordering::Release);
    for _ in 0..100 {
        b.guest.turn();
    }
    assert!(matches!(*b.guest.trouble.lock().unwrap(), Some(Trouble::Broken(0, _))));
    assert_eq!(b.guest.errors.broken_queues.load(Ordering::Relaxed), 1);
    assert_eq!(b.guest.stop(), 0);
}

#[test]
fn truncated_guest_memory_ends_only_its_own_session() {
    aryk_dma::install_fault_handler();
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, MEMORY).unwrap();
    let mut other = Bench::new(512, true);
    let disk = RecordingDisk { block_size: 512, store: Arc::clone(&other.store), recorded: Arc::default() };
    let mapping = Mapping::shared(file.as_fd(), 0, MEMORY).unwrap();
    let mut guest = Guest::with_memory(Arc::new(disk), true, mapping);
    guest.turn();
    assert_eq!(*guest.trouble.lock().unwrap(), None);
    ftruncate(&file, 0).unwrap();
    for _ in 0..10 {
        guest.turn();
    }
    assert_eq!(*guest.trouble.lock().unwrap(), Some(Trouble::MemoryLost));
    guest.stop();
    assert_eq!(other.request(VIRTIO_BLK_T_IN, 0, &[(DATA, 512, WRITE)]).0, VIRTIO_BLK_S_OK);
    assert_eq!(*other.guest.trouble.lock().unwrap(), None);
}

#[test]
fn requests_beyond_the_depth_of_the_disk_wait() {
    let mut b = Bench::new(512, true);
    for head in 0..4u16 {
        let at = HEADER + u64::from(head) * 64;
        b.guest.memory.write(at as usize, &VIRTIO_BLK_T_IN);
        b.guest.memory.write(at as usize + 8, &u64::from(head));
        b.guest.describe(head * 3, at, 16, NEXT, head * 3 + 1);
        b.guest.describe(head * 3 + 1, DATA + u64::from(head) * 512, 512, NEXT | WRITE, head * 3 + 2);
        b.guest.describe(head * 3 + 2, at + 32, 1, WRITE, 0);
        b.guest.offer(head * 3);
    }
    let mut heads: Vec<_> = (0..4).map(|_| b.guest.wait().0).collect();
    heads.sort_unstable();
    assert_eq!(heads, [0, 3, 6, 9]);
    assert_eq!(b.guest.memory.read::<u8>(DATA as usize + 3 * 512), b.store.lock().unwrap()[3 * 512]);
}

#[test]
fn a_read_only_controller_offers_no_discard_and_no_write_zeroes() {
    let registry = Registry::new();
    let disk = RecordingDisk { block_size: 512, store: Arc::default(), recorded: Arc::default() };
    registry.register(aryk_bdev::Identity::named("d"), Arc::new(disk)).unwrap();
    let disk = registry.open("d", Access::Read, "test", |_| ()).unwrap();
    let features = crate::config::features(disk.bdev(), true);
    assert_ne!(features & 1 << VIRTIO_BLK_F_RO, 0);
    assert_eq!(features & (1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES), 0);
}
