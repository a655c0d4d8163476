//! Tests the truncation of all mappings of a process. A separate test program, because it uses the limits of the whole process.

use aryk_dma::{GuestArea, Mapping, install_fault_handler};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::os::fd::AsFd;
use std::sync::Arc;

const MIB: u64 = 1 << 20;
const BIG: u64 = 16 * MIB;
/// A mapping smaller than a part is replaced as a whole.
const SMALL: u64 = 4096;
const SPANS: usize = 300;
/// Upper bound of separately replaced parts, of all mappings.
const PARTS_MAX: usize = 1024;

#[test]
fn all_mappings_together_are_split_into_few_parts() {
    install_fault_handler();
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, BIG).unwrap();
    let map = |offset, len| Arc::new(Mapping::shared(fd.as_fd(), offset, len).unwrap());
    let large: Vec<_> = (0..SPANS).map(|_| map(0, BIG)).collect();
    let small: Vec<_> = (0..100).map(|page| map(page * SMALL, SMALL)).collect();
    ftruncate(&fd, 0).unwrap();
    for mapping in &large {
        let area = GuestArea::new(mapping, 0, BIG).unwrap();
        (0..BIG).step_by(2 * MIB as usize).for_each(|at| area.write(at as usize, &at));
    }
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    assert!(maps < 2 * SPANS + 2 * PARTS_MAX + 500, "{maps} mappings");
    for (mapping, value) in small.iter().zip(1_u64..) {
        let area = GuestArea::new(mapping, 0, SMALL).unwrap();
        area.write(8, &value);
        assert_eq!(area.read::<u64>(8), value);
    }
}
