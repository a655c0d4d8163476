//! The address space of devices behind an IOMMU: which memory is mapped at which IOVA. Control context: mapping pins memory,
//! which takes long.
//!
//! Functions of one process share an address space where the kernel allows it: memory that several of them map is pinned, and
//! counted against RLIMIT_MEMLOCK, once.

use crate::PciError;
use crate::iova::Allocator;
use aryk_dma::{DmaRange, PAGE};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Mutex, MutexGuard};

/// The kernel pins and maps at most this much in one call, during which other threads wait for their own mappings.
const CHUNK: u64 = 256 << 20;
/// At most about this many calls, and so mappings of the kernel, for one range.
const CHUNKS_MAX: u64 = 1024;
/// The kernel's default limit of a container's mappings.
pub(super) const MAPPINGS_MAX: u32 = 65_535;

/// The kernel's side of an address space.
pub(super) trait Iommu: Send + Sync + Debug {
    /// First and last addresses that can be mapped.
    fn ranges(&self) -> Result<Vec<(u64, u64)>, Errno>;
    /// Pins and maps memory.
    fn map(&self, address: u64, iova: u64, len: u64) -> Result<(), Errno>;
    /// Unmaps what is mapped in a range; returns the bytes that were.
    fn unmap(&self, iova: u64, len: u64) -> Result<u64, Errno>;
}

/// An address space, with all its mappings.
#[derive(Debug)]
pub(super) struct Space {
    iommu: Box<dyn Iommu>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    allocator: Allocator,
    /// By IOVA.
    mapped: BTreeMap<u64, Mapped>,
    /// The IOVA of each mapped range of addresses: the newest, where the same addresses had several mappings.
    by_address: BTreeMap<(u64, u64), u64>,
    /// Mappings of the kernel, and their limit.
    chunks: u32,
    chunks_max: u32,
}

#[derive(Debug)]
struct Mapped {
    memory: DmaRange,
    /// How often it was mapped.
    users: u32,
    chunks: u32,
}

impl Space {
    /// An address space without mappings, which has room for `mappings_max` of the kernel's.
    pub(super) fn new(iommu: Box<dyn Iommu>, mappings_max: u32) -> Result<Self, PciError> {
        let state = State {
            allocator: Allocator::default(),
            mapped: BTreeMap::new(),
            by_address: BTreeMap::new(),
            chunks: 0,
            chunks_max: mappings_max,
        };
        let space = Self { iommu, state: Mutex::new(state) };
        space.refresh()?;
        Ok(space)
    }

    /// Reads the ranges that the kernel allows, which change when a device joins.
    pub(super) fn refresh(&self) -> Result<(), PciError> {
        let ranges =
            self.iommu.ranges().map_err(|errno| PciError::os("read the IOMMU's address ranges", errno))?;
        self.state().allocator.allow(&ranges);
        Ok(())
    }

    /// Maps memory, or counts one user more if exactly this memory is mapped; returns its IOVA.
    pub(super) fn map(&self, memory: &DmaRange) -> Result<u64, PciError> {
        let (address, len) = (memory.addr(), memory.len());
        if !address.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return Err(PciError::OutOfBounds { what: "memory for DMA", offset: address, len });
        }
        let mut state = self.state();
        if let Some(iova) = state.share(memory) {
            return Ok(iova);
        }
        let align = alignment(len);
        let no_room = PciError::AddressSpace { len, align };
        let iova = state.allocator.allocate(len, align, address % align).ok_or(no_room)?;
        match self.map_chunks(&mut state, address, iova, len) {
            Ok(chunks) => {
                state.mapped.insert(iova, Mapped { memory: memory.clone(), users: 1, chunks });
                state.by_address.insert((address, len), iova);
                Ok(iova)
            }
            Err(Failed { error, is_clean }) => {
                // A range that may still be mapped is never allocated again. Its memory stays pinned, so that nothing else is
                // damaged.
                if is_clean {
                    state.allocator.release(iova);
                }
                Err(error)
            }
        }
    }

    /// Removes one user, and the mapping with its last.
    pub(super) fn unmap(&self, iova: u64, len: u64) -> Result<(), PciError> {
        let mut state = self.state();
        let not_mapped = PciError::NotMapped { iova, len };
        let Some(mapped) = state.mapped.get_mut(&iova).filter(|mapped| mapped.memory.len() == len) else {
            return Err(not_mapped);
        };
        if mapped.users > 1 {
            mapped.users -= 1;
            return Ok(());
        }
        self.unmap_chunks(iova, len, chunk_of(len))?;
        state.forget(iova);
        Ok(())
    }

    fn map_chunks(&self, state: &mut State, address: u64, iova: u64, len: u64) -> Result<u32, Failed> {
        let mut chunks = 0;
        let chunk = chunk_of(len);
        for (start, piece) in pieces(iova, len, chunk) {
            let result = if state.chunks + chunks >= state.chunks_max {
                Err(Errno::NOSPC)
            } else {
                self.iommu.map(address + (start - iova), start, piece)
            };
            if let Err(errno) = result {
                let is_clean = start == iova || self.unmap_chunks(iova, start - iova, chunk).is_ok();
                let error = map_error(errno, len, state.chunks_max);
                return Err(Failed { error, is_clean });
            }
            chunks += 1;
        }
        state.chunks += chunks;
        Ok(chunks)
    }

    /// Unmaps a range piece by piece. After an error, pieces may still be mapped; the caller may try again.
    fn unmap_chunks(&self, iova: u64, len: u64, chunk: u64) -> Result<(), PciError> {
        let what = "unmap memory for DMA";
        for (start, piece) in pieces(iova, len, chunk) {
            // 0 bytes: an earlier attempt has unmapped this piece.
            let unmapped = self.iommu.unmap(start, piece).map_err(|errno| PciError::os(what, errno))?;
            if unmapped != piece && unmapped != 0 {
                return Err(PciError::os(what, Errno::IO));
            }
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while holding it")
    }
}

struct Failed {
    error: PciError,
    /// Whether nothing of the range is mapped.
    is_clean: bool,
}

impl State {
    /// Counts one user more of exactly this memory, if it is mapped.
    fn share(&mut self, memory: &DmaRange) -> Option<u64> {
        let iova = *self.by_address.get(&(memory.addr(), memory.len()))?;
        let mapped = self.mapped.get_mut(&iova).filter(|mapped| mapped.memory.is_same(memory))?;
        mapped.users += 1;
        Some(iova)
    }

    fn forget(&mut self, iova: u64) {
        let Some(mapped) = self.mapped.remove(&iova) else { return };
        let key = (mapped.memory.addr(), mapped.memory.len());
        if self.by_address.get(&key) == Some(&iova) {
            self.by_address.remove(&key);
        }
        self.chunks -= mapped.chunks;
        self.allocator.release(iova);
    }
}

/// The alignment with which the IOMMU can use its large pages for memory in large pages.
const fn alignment(len: u64) -> u64 {
    match len {
        0x4000_0000.. => 1 << 30,
        0x20_0000.. => 2 << 20,
        _ => PAGE,
    }
}

/// The largest piece of a range of this length.
fn chunk_of(len: u64) -> u64 {
    CHUNK.max((len / CHUNKS_MAX).next_power_of_two())
}

/// The pieces in which a range is mapped: address and length. The same for unmapping: the kernel does not cut mappings.
fn pieces(iova: u64, len: u64, chunk: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut start = iova;
    std::iter::from_fn(move || {
        let rest = iova + len - start;
        let piece = (chunk - start % chunk).min(rest);
        let at = start;
        start += piece;
        (piece > 0).then_some((at, piece))
    })
}

/// The meaning of a failed mapping.
fn map_error(errno: Errno, len: u64, limit: u32) -> PciError {
    match errno {
        // The kernel reports ENOMEM for the limit of locked memory, and for a lack of memory.
        Errno::NOMEM => match getrlimit(Resource::Memlock).current {
            Some(limit) => PciError::LockLimit { len, limit: format!("{} KiB", limit / 1024) },
            None => PciError::os("pin memory for DMA", errno),
        },
        Errno::NOSPC => PciError::MappingLimit { limit },
        // EFAULT: the memory is not mapped in this process. EINVAL, EEXIST: the range overlaps, or the IOMMU cannot reach it; the
        // allocator prevents both. Each is a fault of this process.
        errno => PciError::os("map memory for DMA", errno),
    }
}

#[cfg(test)]
mod tests;
