//! Tests the limits of peers' mapped memory. A separate test program with one test, because the counters are those of the whole
//! process.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use aryk_dma::{Limits, MapError, Mapping, mapped, reclaiming};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::{AsFd, OwnedFd};

const GIB: u64 = 1 << 30;

fn sparse(len: u64) -> OwnedFd {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, len).unwrap();
    fd
}

fn wait_until_all_is_unmapped() {
    while reclaiming().pending > 0 {
        std::thread::yield_now();
    }
}

#[test]
fn mappings_of_peers_are_limited() {
    let twelve_tib = sparse(12 << 40);
    let map = |len| Mapping::shared(twelve_tib.as_fd(), 0, len);
    // Eight guests; a ninth is refused without a system call.
    let guests: Vec<_> = (0..8).map(|_| map(12 << 40).unwrap()).collect();
    let refused = map(12 << 40).unwrap_err();
    assert!(
        matches!(refused, MapError::NoRoom { .. }) && refused.to_string().contains("--guest-memory-total")
    );
    // Small mappings still succeed, as do mappings of the process's own memory.
    drop(map(GIB).unwrap());
    drop(Mapping::anonymous(64 * GIB).unwrap());
    drop(guests);
    wait_until_all_is_unmapped();
    assert_eq!(mapped(), (0, 0));

    Limits { process: 1024 * GIB, mappings: 8, ..Limits::DEFAULT }.set();
    assert!(map(897 * GIB).is_err(), "the last eighth is for small mappings");
    let large = map(896 * GIB).unwrap();
    let small: Vec<_> = (0..2).map(|_| map(64 * GIB).unwrap()).collect();
    assert!(map(GIB).is_err());
    drop(small);
    wait_until_all_is_unmapped();
    let pages: Vec<_> = (0..7).map(|_| map(4096).unwrap()).collect();
    assert!(matches!(map(4096), Err(MapError::TooMany { max: 8 })));
    // A failed mapping is not counted.
    assert!(Mapping::shared(sparse(0).as_fd(), 0, 4096).is_err());
    assert_eq!(mapped(), (896 * GIB + 7 * 4096, 8));
    drop((large, pages));
    wait_until_all_is_unmapped();
    assert_eq!(mapped(), (0, 0));
}
