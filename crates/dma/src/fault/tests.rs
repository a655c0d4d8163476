//! Tests with a peer that truncates its memory: real SIGBUS in this process.

use super::{faults, install};
use crate::{GuestArea, Mapping, MemTable, Region};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::Arc;

const LEN: u64 = 64 << 10;

fn shared() -> (OwnedFd, Arc<Mapping>) {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, LEN).unwrap();
    let mapping = Mapping::shared(fd.as_fd(), 0, LEN).unwrap();
    (fd, Arc::new(mapping))
}

fn area(mapping: &Arc<Mapping>) -> GuestArea {
    GuestArea::new(mapping, 0, LEN).unwrap()
}

#[test]
fn a_truncated_file_poisons_its_mapping_only() {
    install();
    install();
    let before = faults();
    let (theirs, mapping) = shared();
    let (_others, other) = shared();
    area(&mapping).write(100, &7_u64);
    area(&other).write(100, &8_u64);
    ftruncate(&theirs, 0).unwrap();
    assert!(!mapping.is_poisoned(), "the missing page was not accessed yet");

    assert_eq!(area(&mapping).read::<u64>(8192), 0, "the access reads zeroes");
    assert!(mapping.is_poisoned() && area(&mapping).is_poisoned());
    assert!(faults() > before);
    area(&mapping).write(8192, &9_u64);
    area(&mapping).write(LEN as usize - 8, &10_u64);
    assert_eq!((area(&mapping).read(8192), area(&mapping).read(LEN as usize - 8)), (9_u64, 10_u64));
    assert!(!other.is_poisoned());
    assert_eq!(area(&other).read::<u64>(100), 8);

    // The mapping that reuses the entry is not poisoned.
    drop(mapping);
    let (_fd, next) = shared();
    assert!(!next.is_poisoned());
}

/// Replacing the whole mapping would take time in proportion to a size that the peer chooses.
#[test]
fn only_the_part_around_the_hole_is_replaced() {
    const BIG: u64 = 2 << 20;
    install();
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, BIG).unwrap();
    let mapping = Arc::new(Mapping::shared(fd.as_fd(), 0, BIG).unwrap());
    let area = GuestArea::new(&mapping, 0, BIG).unwrap();
    ftruncate(&fd, BIG - 4096).unwrap();
    assert_eq!(area.read::<u64>(BIG as usize - 8), 0);
    assert!(mapping.is_poisoned());
    for (at, is_shared) in [(0, true), (BIG / 2, true), (BIG - 4096, false)] {
        rustix::io::pwrite(&fd, &7_u64.to_ne_bytes(), at).unwrap();
        assert_eq!(area.read::<u64>(at as usize) == 7, is_shared, "{at}");
    }
}

/// The number of a process's mappings is limited, too.
#[test]
fn a_mapping_is_split_into_few_parts() {
    const MIB: u64 = 1 << 20;
    const BIG: u64 = 64 * MIB;
    install();
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, BIG).unwrap();
    let mapping = Arc::new(Mapping::shared(fd.as_fd(), 0, BIG).unwrap());
    let area = GuestArea::new(&mapping, 0, BIG).unwrap();
    ftruncate(&fd, 0).unwrap();
    for at in (0..BIG).step_by(MIB as usize) {
        area.write(at as usize, &at);
    }
    let base = mapping.base().as_ptr() as u64;
    let is_part = |line: &&str| {
        let start = line.split('-').next().and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap();
        (base..base + BIG).contains(&start)
    };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let parts = maps.lines().filter(is_part).count();
    assert!(parts <= 20, "{parts} mappings");
    assert!((0..BIG).step_by(MIB as usize).all(|at| area.read::<u64>(at as usize) == at), "no write is lost");
}

#[test]
fn a_write_into_the_hole_continues() {
    install();
    let (fd, mapping) = shared();
    let region = Region { guest_addr: 0, user_addr: 0, len: LEN, offset: 0, mapping: Arc::clone(&mapping) };
    let table = MemTable::new(vec![region]).unwrap();
    ftruncate(&fd, 4096).unwrap();
    assert!(table.write_bytes(0, &[1; 4096]).is_ok() && !table.is_poisoned());
    // From the last existing page into the first missing one.
    let data: Vec<u8> = (0..8192_u32).map(|i| i as u8).collect();
    table.write_bytes(0, &data).unwrap();
    assert!(table.is_poisoned());
    let mut back = [0; 4096];
    table.read_bytes(4096, &mut back).unwrap();
    assert_eq!(back, data[4096..], "bytes stored after the fault are readable");
}

#[test]
fn many_truncations_on_many_threads() {
    install();
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            scope.spawn(move || {
                for round in 0..50 {
                    let (fd, mapping) = shared();
                    let (_fd, sound) = shared();
                    area(&sound).write(0, &(thread << 32 | round));
                    ftruncate(&fd, 0).unwrap();
                    area(&mapping).write(4096 * (round % 16) as usize, &round);
                    assert!(mapping.is_poisoned() && !sound.is_poisoned());
                    assert_eq!(area(&sound).read::<u64>(0), thread << 32 | round);
                }
            });
        }
    });
}

/// Runs this test again in a separate process.
#[test]
fn any_other_fault_is_fatal() {
    const CHILD: &str = "ARYK_DMA_TEST_FAULTS";
    if std::env::var_os(CHILD).is_some() {
        install();
        let fd = memfd_create("ours", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 4096).unwrap();
        let (prot, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        // SAFETY: a new mapping changes no existing memory.
        let page = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, prot, flags, &fd, 0) }.unwrap();
        ftruncate(&fd, 0).unwrap();
        // SAFETY: it is mapped; the kernel ends the process, because no guard watches it.
        unsafe { page.cast::<u8>().read_volatile() };
        unreachable!("the page is gone");
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "fault::tests::any_other_fault_is_fatal"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    assert_eq!(child.status.signal(), Some(libc::SIGBUS), "{child:?}");
}
