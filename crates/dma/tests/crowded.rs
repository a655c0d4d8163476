//! Tests a process with as many mappings as the kernel allows. A separate test program with one test, because mappings are
//! counted for the whole process.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use aryk_dma::{Mapping, mapped, reclaiming};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::null_mut;
use std::time::Duration;

const PAGE: usize = 4096;
const GIB: u64 = 1 << 30;

/// Fills the process with unused mappings, up to the limit.
struct Crowd(*mut c_void, usize);

impl Crowd {
    fn gather() -> Self {
        let most: usize =
            std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse().unwrap();
        let len = 2 * most * PAGE;
        // SAFETY: a new mapping, at an address that the kernel chooses, changes no existing memory.
        let base = unsafe { mmap_anonymous(null_mut(), len, ProtFlags::empty(), MapFlags::PRIVATE) }.unwrap();
        let crowd = Self(base, len);
        // Every other page gets other rights than its neighbours.
        let full = (0..len).step_by(2 * PAGE).find_map(|at| {
            // SAFETY: a page of the mapping that was just made, which no code uses.
            unsafe { mprotect(base.wrapping_byte_add(at), PAGE, MprotectFlags::READ) }.err()
        });
        assert_eq!(full, Some(Errno::NOMEM));
        crowd
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, and no code uses it.
        unsafe { munmap(self.0, self.1) }.unwrap();
    }
}

#[expect(clippy::disallowed_methods, reason = "another thread unmaps at the same time")]
fn sleep() {
    std::thread::sleep(Duration::from_millis(10));
}

/// Maps three parts of a file in the order of the file, so that the kernel merges the mappings into one.
fn adjacent(file: BorrowedFd<'_>) -> [Mapping; 3] {
    let base = |mapping: &Mapping| mapping.base().as_ptr() as u64;
    for _ in 0..10 {
        // The kernel allocates addresses downwards, unless another thread takes some of them.
        let three = [2, 1, 0].map(|i| Mapping::shared(file, i * GIB, GIB).unwrap());
        let [high, middle, low] = three.each_ref().map(base);
        if low + GIB == middle && middle + GIB == high {
            return three;
        }
        three.into_iter().for_each(std::mem::forget);
    }
    panic!("the kernel does not place mappings side by side");
}

#[test]
fn failed_unmapping_is_retried() {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, 3 * GIB).unwrap();
    let [_high, middle, _low] = adjacent(fd.as_fd());
    let (bytes, count) = mapped();

    let crowd = Crowd::gather();
    // Removing the middle mapping would split the merged mapping in two.
    drop(middle);
    (0..30).for_each(|_| sleep());
    assert_eq!((reclaiming().pending, reclaiming().done), (1, 0), "the unmapping waits for a retry");
    assert_eq!(mapped(), (bytes, count), "the memory still counts");
    drop(crowd);
    for _ in 0..1000 {
        if reclaiming().pending == 0 {
            break;
        }
        sleep();
    }
    assert_eq!((reclaiming().pending, mapped()), (0, (bytes - GIB, count - 1)));
}
