//! The address space over a kernel that the tests script.

use super::*;
use aryk_dma::Mapping;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread::{spawn, yield_now};

/// Mappings by IOVA: address and length; and the failures that are to come.
#[derive(Debug, Default)]
struct Kernel {
    maps: BTreeMap<u64, (u64, u64)>,
    map_fails: Option<(usize, Errno)>,
    unmap_fails: Option<Errno>,
    calls: usize,
    /// Mappings at these addresses do not return while they are listed.
    stuck: BTreeSet<u64>,
    /// Threads that wait for that.
    waiting: usize,
}

#[derive(Clone, Debug, Default)]
struct Fake(Arc<Mutex<Kernel>>);

impl Fake {
    fn kernel(&self) -> MutexGuard<'_, Kernel> {
        self.0.lock().unwrap()
    }
}

impl Iommu for Fake {
    fn ranges(&self) -> Result<Vec<(u64, u64)>, Errno> {
        Ok(vec![(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)])
    }

    fn map(&self, address: u64, iova: u64, len: u64) -> Result<(), Errno> {
        let is_stuck = || self.kernel().stuck.contains(&address);
        if is_stuck() {
            self.kernel().waiting += 1;
            while is_stuck() {
                yield_now();
            }
        }
        let mut kernel = self.kernel();
        kernel.calls += 1;
        if let Some((call, errno)) = kernel.map_fails
            && call == kernel.calls
        {
            return Err(errno);
        }
        assert!(kernel.maps.range(..iova + len).next_back().is_none_or(|(at, (_, n))| at + n <= iova));
        kernel.maps.insert(iova, (address, len));
        Ok(())
    }

    fn unmap(&self, iova: u64, len: u64) -> Result<u64, Errno> {
        let mut kernel = self.kernel();
        match (kernel.unmap_fails.take(), kernel.maps.get(&iova)) {
            (Some(errno), _) => Err(errno),
            (None, None) => Ok(0),
            (None, Some(&(_, mapped))) => {
                assert_eq!(mapped, len, "the kernel does not cut a mapping");
                kernel.maps.remove(&iova);
                Ok(len)
            }
        }
    }
}

fn space(mappings_max: u32) -> (Fake, Space) {
    let fake = Fake::default();
    let space = Space::new(Box::new(fake.clone()), mappings_max).unwrap();
    (fake, space)
}

/// Address space without memory: pages are allocated when they are written, and nothing writes.
fn memory(len: u64) -> Arc<Mapping> {
    Arc::new(Mapping::anonymous(len).unwrap())
}

#[test]
fn large_memory_is_mapped_in_pieces_at_one_range() {
    let (fake, space) = space(MAPPINGS_MAX);
    let mapping = memory(3 << 30);
    let range = mapping.dma_range(PAGE, (3 << 30) - 2 * PAGE).unwrap();
    let iova = space.map(&range).unwrap();
    assert_eq!(iova % (1 << 30), range.addr() % (1 << 30), "large pages of both sides coincide");
    let mut at = iova;
    for (start, (address, len)) in &fake.kernel().maps {
        assert_eq!((*start, address - range.addr()), (at, at - iova));
        assert!(*len <= CHUNK);
        at += len;
    }
    assert_eq!(at - iova, range.len());
    assert!((12..=14).contains(&fake.kernel().maps.len()));
    space.unmap(iova, range.len()).unwrap();
    assert!(fake.kernel().maps.is_empty());
    assert_eq!(space.map(&range).unwrap(), iova, "the range is free again");
}

#[test]
fn equal_memory_shares_one_mapping_until_its_last_user() {
    let (fake, space) = space(MAPPINGS_MAX);
    let mapping = memory(8 * PAGE);
    let range = mapping.dma_range(0, 4 * PAGE).unwrap();
    let iova = space.map(&range).unwrap();
    assert_eq!(space.map(&mapping.dma_range(0, 4 * PAGE).unwrap()).unwrap(), iova);
    let part = space.map(&mapping.dma_range(0, 2 * PAGE).unwrap()).unwrap();
    assert_ne!(part, iova, "a part is other memory");
    assert_eq!(fake.kernel().maps.len(), 2);
    space.unmap(iova, 4 * PAGE).unwrap();
    assert!(fake.kernel().maps.contains_key(&iova));
    space.unmap(iova, 4 * PAGE).unwrap();
    assert!(!fake.kernel().maps.contains_key(&iova));
    for (iova, len) in [(iova, 4 * PAGE), (part, PAGE), (part + PAGE, PAGE), (0, 0)] {
        assert!(matches!(space.unmap(iova, len), Err(PciError::NotMapped { .. })));
    }
    space.unmap(part, 2 * PAGE).unwrap();
}

#[test]
fn new_memory_at_the_addresses_of_dropped_memory_is_mapped_anew() {
    let (fake, space) = space(MAPPINGS_MAX);
    let first = memory(PAGE).dma_range(0, PAGE).unwrap();
    let iova = space.map(&first).unwrap();
    let mapping = memory(PAGE);
    // The allocator of addresses may choose others; only the key in `by_address` matters here.
    let second = mapping.dma_range(0, PAGE).unwrap();
    space.state().by_address.insert((second.addr(), PAGE), iova);
    let other = space.map(&second).unwrap();
    assert_ne!(other, iova);
    space.unmap(iova, PAGE).unwrap();
    assert_eq!(space.map(&second).unwrap(), other, "still found by its address");
    assert_eq!(fake.kernel().maps.len(), 1);
}

#[test]
fn a_mapping_that_fails_half_way_is_undone() {
    let (fake, space) = space(MAPPINGS_MAX);
    let mapping = memory(2 << 30);
    let range = mapping.dma_range(0, 2 << 30).unwrap();
    fake.kernel().map_fails = Some((4, Errno::NOMEM));
    let error = space.map(&range).unwrap_err();
    // Tests may run as root without a limit.
    let limit = getrlimit(Resource::Memlock).current;
    match limit {
        Some(_) => assert!(error.to_string().contains("RLIMIT_MEMLOCK is"), "{error}"),
        None => assert!(error.to_string().contains("pin memory"), "{error}"),
    }
    assert!(fake.kernel().maps.is_empty());
    let iova = space.map(&range).unwrap();

    // Where undoing fails too, the range is not allocated again.
    space.unmap(iova, range.len()).unwrap();
    let calls = fake.kernel().calls;
    fake.kernel().map_fails = Some((calls + 3, Errno::FAULT));
    fake.kernel().unmap_fails = Some(Errno::IO);
    assert!(matches!(space.map(&range), Err(PciError::Os { errno: Errno::FAULT, .. })));
    assert_ne!(space.map(&range).unwrap(), iova);
}

#[test]
fn the_limit_of_mappings_and_of_addresses_is_named() {
    let (fake, space) = space(3);
    let mapping = memory(1 << 30);
    let pages: Vec<_> = (0..4).map(|i| mapping.dma_range(i * PAGE, PAGE).unwrap()).collect();
    let first = space.map(&pages[0]).unwrap();
    space.map(&pages[1]).unwrap();
    // Two pieces: one too many.
    let two = mapping.dma_range(256 << 20, CHUNK + PAGE).unwrap();
    let error = space.map(&two).unwrap_err();
    assert!(error.to_string().contains("3 are the limit"), "{error}");
    assert!(error.to_string().contains("dma_entry_limit"), "{error}");
    assert_eq!(fake.kernel().maps.len(), 2, "the first piece was undone");
    space.map(&pages[2]).unwrap();
    assert!(matches!(space.map(&pages[3]), Err(PciError::MappingLimit { limit: 3 })));
    space.unmap(first, PAGE).unwrap();
    space.map(&pages[3]).unwrap();
}

#[test]
fn memory_that_stays_mapped_after_an_error_can_be_unmapped_again() {
    let (fake, space) = space(MAPPINGS_MAX);
    let mapping = memory(PAGE);
    let iova = space.map(&mapping.dma_range(0, PAGE).unwrap()).unwrap();
    fake.kernel().unmap_fails = Some(Errno::IO);
    assert!(space.unmap(iova, PAGE).is_err());
    assert_eq!(space.state().mapped.len(), 1);
    space.unmap(iova, PAGE).unwrap();
    assert!(space.state().mapped.is_empty() && fake.kernel().maps.is_empty());
}

#[test]
fn a_mapping_ends_piece_by_piece_and_after_an_error_from_the_beginning() {
    let (fake, space) = space(MAPPINGS_MAX);
    let (large, small) = (memory(4 * CHUNK), memory(PAGE));
    let (len, range) = (4 * CHUNK, large.dma_range(0, 4 * CHUNK).unwrap());
    let iova = space.map(&range).unwrap();
    let other = space.map(&small.dma_range(0, PAGE).unwrap()).unwrap();
    let count = fake.kernel().maps.len();
    let mut pending = PendingUnmap::new(iova, len);
    for left in (count - 2..count).rev() {
        assert!(!space.unmap_piece(&mut pending).unwrap());
        assert_eq!(fake.kernel().maps.len(), left);
    }
    assert!(matches!(space.unmap(iova, len), Err(PciError::NotMapped { .. })), "it is being unmapped");
    // Another mapping ends between two pieces.
    space.unmap(other, PAGE).unwrap();
    fake.kernel().unmap_fails = Some(Errno::IO);
    assert!(space.unmap_piece(&mut pending).is_err());
    while !space.unmap_piece(&mut pending).unwrap() {}
    assert!(space.state().mapped.is_empty() && fake.kernel().maps.is_empty() && space.state().chunks == 0);
}

#[test]
fn memory_of_parts_of_pages_is_refused() {
    let (_, space) = space(MAPPINGS_MAX);
    let mapping = memory(2 * PAGE);
    for (offset, len) in [(1, PAGE), (0, PAGE - 1), (512, 512)] {
        let range = mapping.dma_range(offset, len).unwrap();
        assert!(matches!(space.map(&range), Err(PciError::OutOfBounds { .. })));
    }
    assert!(space.state().mapped.is_empty());
}

/// Waits until so many threads are stuck in the kernel.
fn wait_for(fake: &Fake, waiting: usize) {
    while fake.kernel().waiting < waiting {
        yield_now();
    }
}

#[test]
fn memory_that_is_being_pinned_delays_no_other_mapping() {
    let (fake, space) = space(MAPPINGS_MAX);
    let space = Arc::new(space);
    let (slow, other) = (memory(4 * CHUNK), memory(PAGE));
    let (range, small) = (slow.dma_range(0, 4 * CHUNK).unwrap(), other.dma_range(0, PAGE).unwrap());
    let first = range.addr();
    fake.kernel().stuck.insert(first);
    let pin = |range: &DmaRange| {
        let (space, range) = (Arc::clone(&space), range.clone());
        spawn(move || space.map(&range))
    };
    let slowest = pin(&range);
    wait_for(&fake, 1);
    // Another VM's memory comes and goes meanwhile.
    let iova = space.map(&small).unwrap();
    space.unmap(iova, PAGE).unwrap();
    // A second user maps the other pieces, and waits for the first.
    let second = pin(&range);
    while fake.kernel().maps.is_empty() || !(4..=5).contains(&(fake.kernel().maps.len() + 1)) {
        yield_now();
    }
    assert!(!slowest.is_finished() && !second.is_finished());
    fake.kernel().stuck.clear();
    let iova = slowest.join().unwrap().unwrap();
    assert_eq!(second.join().unwrap().unwrap(), iova, "pinned once");
    let mapped: u64 = fake.kernel().maps.values().map(|(_, len)| len).sum();
    assert_eq!(mapped, 4 * CHUNK);
    space.unmap(iova, range.len()).unwrap();
    assert_eq!(fake.kernel().maps.values().map(|(_, len)| len).sum::<u64>(), 4 * CHUNK, "one user is left");
    space.unmap(iova, range.len()).unwrap();
    assert!(fake.kernel().maps.is_empty() && space.state().chunks == 0);
}

#[test]
fn users_that_map_the_same_memory_share_its_failure() {
    let (fake, space) = space(MAPPINGS_MAX);
    let space = Arc::new(space);
    let mapping = memory(4 * CHUNK);
    let range = mapping.dma_range(0, 4 * CHUNK).unwrap();
    fake.kernel().stuck.insert(range.addr());
    fake.kernel().map_fails = Some((2, Errno::FAULT));
    let pin = || {
        let (space, range) = (Arc::clone(&space), range.clone());
        spawn(move || space.map(&range))
    };
    let first = pin();
    wait_for(&fake, 1);
    // The second user maps one piece, fails with the next, and leaves what is mapped to the first.
    let error = pin().join().unwrap().unwrap_err();
    assert!(matches!(error, PciError::Os { errno: Errno::FAULT, .. }), "{error}");
    assert_eq!(fake.kernel().maps.len(), 1);
    fake.kernel().stuck.clear();
    assert!(matches!(first.join().unwrap(), Err(PciError::Os { errno: Errno::FAULT, .. })));
    let state = space.state();
    assert!(fake.kernel().maps.is_empty() && state.mapped.is_empty() && state.by_address.is_empty());
    assert_eq!(state.chunks, 0);
    drop(state);
    space.map(&range).unwrap();
}

#[test]
fn memory_that_could_not_be_unmapped_gets_no_second_user() {
    let (fake, space) = space(MAPPINGS_MAX);
    let mapping = memory(PAGE);
    let range = mapping.dma_range(0, PAGE).unwrap();
    let torn = space.map(&range).unwrap();
    fake.kernel().unmap_fails = Some(Errno::IO);
    assert!(space.unmap(torn, PAGE).is_err());
    let iova = space.map(&range).unwrap();
    assert_ne!(iova, torn);
    space.unmap(torn, PAGE).unwrap();
    assert_eq!(space.map(&range).unwrap(), iova, "still found by its address");
}
