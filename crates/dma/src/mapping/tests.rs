//! Tests of the accepted files, of the mapped bytes, and of unmapping.

use super::{MapError, Mapping};
use crate::{Buffer, PAGE};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;

fn memfd(len: u64) -> File {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, len).unwrap();
    File::from(fd)
}

fn bytes(mapping: &Mapping, at: usize, len: usize) -> Vec<u8> {
    assert!((at + len) as u64 <= mapping.len());
    // SAFETY: inside of the mapping, to which nothing else writes.
    unsafe { std::slice::from_raw_parts(mapping.base().as_ptr().add(at), len) }.to_vec()
}

fn is_mapped(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let hex = |text| usize::from_str_radix(text, 16).unwrap();
        (hex(start)..hex(end)).contains(&address)
    })
}

/// Whether the process maps a file: at any address, as that of a former mapping may be another test's by now.
fn is_file_mapped(file: &File) -> bool {
    let inode = rustix::fs::fstat(file).unwrap().st_ino.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| line.split_ascii_whitespace().nth(4) == Some(&inode))
}

#[test]
fn both_sides_of_a_mapping_see_the_same_bytes() {
    let mut file = memfd(16 << 10);
    file.seek(SeekFrom::Start(4096)).unwrap();
    file.write_all(b"theirs").unwrap();
    let mapping = Mapping::shared(file.as_fd(), 4096, 5000).unwrap();
    assert_eq!((mapping.len(), bytes(&mapping, 0, 6)), (5000, b"theirs".to_vec()));
    // SAFETY: the last four bytes of the mapping.
    unsafe { mapping.base().as_ptr().add(4996).cast::<[u8; 4]>().write(*b"ours") };
    file.seek(SeekFrom::Start(4096 + 4996)).unwrap();
    let mut ours = [0; 4];
    file.read_exact(&mut ours).unwrap();
    assert_eq!(&ours, b"ours");
}

#[test]
fn a_dropped_mapping_is_unmapped() {
    let file = memfd(8192);
    let makers: [&dyn Fn() -> Mapping; 2] =
        [&|| Mapping::shared(file.as_fd(), 0, 8192).unwrap(), &|| Mapping::anonymous(8192).unwrap()];
    for make in makers {
        let goes = |_| {
            let mapping = make();
            let base = mapping.base().as_ptr() as usize;
            assert!(is_mapped(base) && is_mapped(base + 8191));
            let done = crate::reclaiming().done;
            drop(mapping);
            while crate::reclaiming().done == done {
                std::thread::yield_now();
            }
            !is_mapped(base)
        };
        // Another test's thread may reuse the address at once, but not every time.
        assert!((0..50).any(goes));
    }
}

#[test]
fn anonymous_memory_is_zeroed_whole_pages() {
    let mapping = Mapping::anonymous(1).unwrap();
    assert_eq!((mapping.len(), bytes(&mapping, 0, 4096)), (4096, vec![0; 4096]));
    assert!(!mapping.is_poisoned());
    assert!(matches!(Mapping::anonymous(0), Err(MapError::BadRange { .. })));
    assert!(matches!(Mapping::anonymous(u64::MAX), Err(MapError::BadRange { .. })));
    assert!(matches!(Mapping::anonymous(1 << 60), Err(MapError::Os(_))));
}

#[test]
fn a_range_must_be_of_pages_inside_of_the_file() {
    let file = memfd(8192);
    let map = |offset, len| Mapping::shared(file.as_fd(), offset, len).unwrap_err();
    for (offset, len) in [(0, 0), (1, 4096), (4095, 1), (4096, u64::MAX), (u64::MAX - 4095, 4096)] {
        assert!(matches!(map(offset, len), MapError::BadRange { .. }), "{offset:#x}, {len:#x}");
    }
    for (offset, len) in [(0, 8193), (4096, 4097), (8192, 1), (1 << 62, 4096)] {
        assert!(matches!(map(offset, len), MapError::TooShort { size: 8192, .. }), "{offset:#x}, {len:#x}");
    }
}

#[test]
fn only_memory_files_are_accepted() {
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let not_memory: [(OwnedFd, &str); 4] = [
        (pipe, "not a regular file"),
        (File::open("/dev/zero").unwrap().into(), "not a regular file"),
        (File::open("/").unwrap().into(), "not a regular file"),
        (File::open("/proc/self/status").unwrap().into(), "a file of another file system"),
    ];
    for (fd, why) in not_memory {
        let Err(MapError::NotMemory(said)) = Mapping::shared(fd.as_fd(), 0, 4096) else { panic!("{why}") };
        assert_eq!(said, why);
    }
}

#[test]
fn read_only_memory_is_refused() {
    let file = memfd(4096);
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let read_only = File::open(path).unwrap();
    assert!(matches!(Mapping::shared(read_only.as_fd(), 0, 4096), Err(MapError::Os(_))));
}

/// A front-end announces a guest's memory in huge pages as ranges with any begin and end. Mapping them allocates no huge page.
#[test]
fn ranges_of_huge_pages_may_begin_and_end_within_one() {
    let Ok(fd) = memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB) else {
        eprintln!("this kernel has no hugetlbfs");
        return;
    };
    ftruncate(&fd, 4 << 20).unwrap();
    for (offset, len) in [(0, 0xa_0000), (0xc_0000, 0x14_0000), (0xc_0000, 4096), (2 << 20, 2 << 20)] {
        let mapping = Mapping::shared(fd.as_fd(), offset, len).unwrap();
        assert_eq!(mapping.len(), len);
        assert_eq!(mapping.base().as_ptr() as u64 % (2 << 20), offset % (2 << 20));
    }
}

#[test]
fn zeroing_clears_exactly_its_range_and_frees_pages() {
    let mapping = Mapping::anonymous(4 * PAGE).unwrap();
    let mut buffer = Buffer::from_slice(&[0xa5; 4 * PAGE as usize]);
    for (offset, len) in
        [(0, 4 * PAGE), (1, 1), (10, PAGE), (PAGE - 1, 2), (100, 3 * PAGE), (PAGE, PAGE), (7, 0)]
    {
        buffer.write(0, &[0xa5; 4 * PAGE as usize]);
        buffer.lend().store_to(&mapping, 0);
        mapping.zero(offset, len);
        buffer.reclaim();
        buffer.lend().load_from(&mapping, 0);
        buffer.reclaim();
        for (at, &byte) in (0..).zip(buffer.bytes()) {
            let inside = at >= offset && at < offset + len;
            assert_eq!(byte, if inside { 0 } else { 0xa5 }, "byte {at} after {offset}+{len}");
        }
    }
}

#[test]
#[should_panic(expected = "4096+4096 of 4096")]
fn zeroing_outside_is_refused() {
    Mapping::anonymous(PAGE).unwrap().zero(PAGE, PAGE);
}

/// Freeing half a gigabyte takes some tenths of a second, which the dropping thread must not spend.
#[test]
fn dropping_much_memory_does_not_wait_for_its_unmapping() {
    const LEN: u64 = 512 << 20;
    let (file, peer) = (memfd(LEN), crate::Peer::default());
    let mapping = Mapping::shared(file.as_fd(), 0, LEN).unwrap().given_by(&peer);
    mapping.populate(0, LEN);
    let (ticket, theirs) = (Arc::new(()), OwnedFd::from(file));
    let dropper = rustix::thread::gettid();
    let spent = thread_times(dropper);
    crate::close_memory(theirs, Arc::clone(&ticket));
    drop(mapping);
    let spent = thread_times(dropper) - spent;
    while Arc::strong_count(&ticket) > 1 || peer.awaiting_unmap() != (0, 0) {
        std::thread::yield_now();
    }
    assert!(spent < 3, "the dropping thread spent {spent} hundredths of a second");
    assert!(crate::reclaiming().delay_max > std::time::Duration::from_millis(1), "{:?}", crate::reclaiming());
}

/// Processor time of a thread in hundredths of a second.
fn thread_times(tid: rustix::thread::Pid) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{}/stat", tid.as_raw_nonzero())).unwrap();
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn pages_are_allocated_before_their_first_access() {
    let file = memfd(1 << 20);
    let mapping = Mapping::shared(file.as_fd(), 0, 1 << 20).unwrap();
    let blocks = || rustix::fs::fstat(&file).unwrap().st_blocks;
    assert_eq!(blocks(), 0);
    mapping.populate(5000, 8192);
    assert_eq!(blocks(), 3 * 8, "three pages, in sectors");
    // Bytes beyond the mapping, or beyond its file, are ignored.
    mapping.populate(0, (1 << 20) + 1);
    mapping.populate(u64::MAX, 2);
    ftruncate(&file, 0).unwrap();
    mapping.populate(0, 1 << 20);
    assert!(!mapping.is_poisoned());
}

#[derive(Debug, Default)]
struct HoldingKeeper(std::sync::Mutex<Option<crate::HeldPages>>);

impl crate::Keeper for HoldingKeeper {
    fn dropped(&self, pages: crate::HeldPages) {
        *self.0.lock().unwrap() = Some(pages);
    }
}

#[test]
fn a_keeper_delays_the_unmapping_and_the_pages_count_until_then() {
    let (file, peer) = (memfd(8192), crate::Peer::default());
    let mapping = Mapping::shared(file.as_fd(), 0, 8192).unwrap().given_by(&peer);
    let keeper = Arc::new(HoldingKeeper::default());
    assert!(mapping.set_keeper(Arc::clone(&keeper) as Arc<dyn crate::Keeper>));
    assert!(!mapping.set_keeper(Arc::new(HoldingKeeper::default())), "the first keeper stays");
    drop(mapping);
    let held = loop {
        if let Some(held) = keeper.0.lock().unwrap().take() {
            break held;
        }
        std::thread::yield_now();
    };
    assert!(is_file_mapped(&file));
    assert_eq!(peer.awaiting_unmap(), (8192, 1));
    held.release();
    while peer.awaiting_unmap() != (0, 0) {
        std::thread::yield_now();
    }
    assert!(!is_file_mapped(&file));
}

#[test]
fn pages_that_a_keeper_drops_stay_mapped_and_counted() {
    #[derive(Debug)]
    struct DroppingKeeper;
    impl crate::Keeper for DroppingKeeper {
        fn dropped(&self, _: crate::HeldPages) {}
    }
    let (file, peer) = (memfd(4096), crate::Peer::default());
    let mapping = Mapping::shared(file.as_fd(), 0, 4096).unwrap().given_by(&peer);
    let base = mapping.base().as_ptr() as usize;
    assert!(mapping.set_keeper(Arc::new(DroppingKeeper)));
    drop(mapping);
    // The thread handles jobs in order: when it has unmapped the second mapping, it has handled the first.
    let next = crate::Peer::default();
    drop(Mapping::shared(file.as_fd(), 0, 4096).unwrap().given_by(&next));
    while next.awaiting_unmap() != (0, 0) {
        std::thread::yield_now();
    }
    assert!(is_mapped(base));
    assert_eq!(peer.awaiting_unmap(), (4096, 1));
}

#[test]
fn revoked_memory_is_private_and_keeps_its_addresses() {
    let mut file = memfd(8192);
    file.write_all(b"theirs").unwrap();
    let peer = crate::Peer::default();
    let mapping = Mapping::shared(file.as_fd(), 0, 8192).unwrap().given_by(&peer);
    assert_eq!((bytes(&mapping, 0, 6), is_file_mapped(&file)), (b"theirs".to_vec(), true));
    mapping.revoke().unwrap();
    mapping.revoke().unwrap();
    assert!(!is_file_mapped(&file), "the file's memory is freed with its owner's mappings");
    assert_eq!((bytes(&mapping, 0, 6), peer.awaiting_unmap()), (vec![0; 6], (8192, 1)));
    assert!(crate::revoked() >= (8192, 1));
    // SAFETY: the first bytes of the mapping.
    unsafe { mapping.base().as_ptr().cast::<[u8; 4]>().write(*b"late") };
    let mut start = [0; 6];
    file.rewind().unwrap();
    file.read_exact(&mut start).unwrap();
    assert_eq!((&start, bytes(&mapping, 0, 4)), (b"theirs", b"late".to_vec()));
    drop(mapping);
    while peer.awaiting_unmap() != (0, 0) {
        std::thread::yield_now();
    }
}
