//! The address space of devices behind an IOMMU: which memory is mapped at which IOVA. Control context: mapping pins memory,
//! which takes long.
//!
//! Functions of one process share an address space where the kernel allows it: memory that several of them map is pinned, and
//! counted against RLIMIT_MEMLOCK, once. The state is locked for lookups only, never for a call of the kernel: a VM whose memory
//! is being pinned delays no other mapping by more than one piece. Threads that map the same memory at the same time share the
//! pieces.

use crate::iova::Allocator;
use crate::{PciError, PendingUnmap};
use aryk_dma::{DmaRange, PAGE};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Condvar, Mutex, MutexGuard};

/// The kernel pins and maps at most this much in one call. Meanwhile it holds the container's lock, for which mappings and
/// unmappings of other threads wait. No lock of this process is held.
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
    /// Notified at each change of a [`Stage`].
    changed: Condvar,
    /// Held while the ranges are read.
    refreshing: Mutex<()>,
}

#[derive(Debug)]
struct State {
    allocator: Allocator,
    /// By IOVA.
    mapped: BTreeMap<u64, Mapped>,
    /// The IOVA of each mapped range of addresses: the newest, where the same addresses had several mappings.
    by_address: BTreeMap<(u64, u64), u64>,
    /// Mappings of the kernel, also those to come of ranges that are being mapped; and their limit.
    chunks: u32,
    chunks_max: u32,
}

#[derive(Debug)]
struct Mapped {
    memory: DmaRange,
    /// How often it was mapped, or is being mapped.
    users: u32,
    chunks: u32,
    stage: Stage,
}

/// How far a range is.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// Its users map it piece by piece: the first IOVA that none has taken, and the pieces that the kernel maps now.
    Mapping { next: u64, at_kernel: u32 },
    /// A piece failed. Each user gets the error; the last one unmaps the other pieces.
    Failed(Errno),
    /// All of it is mapped.
    Done,
    /// Its last user unmaps it.
    Unmapping,
    /// It could not be unmapped: parts may be mapped. Its user can try again; it gets no other user.
    Torn,
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
        let space =
            Self { iommu, state: Mutex::new(state), changed: Condvar::new(), refreshing: Mutex::new(()) };
        space.refresh()?;
        Ok(space)
    }

    /// Reads the ranges that the kernel allows, which change when a device joins.
    pub(super) fn refresh(&self) -> Result<(), PciError> {
        // Of devices that join at the same time, the last reads the ranges that hold for all.
        let _last = self.refreshing.lock().expect("no thread panics while holding it");
        let ranges =
            self.iommu.ranges().map_err(|errno| PciError::os("read the IOMMU's address ranges", errno))?;
        self.state().allocator.allow(&ranges);
        Ok(())
    }

    /// Maps memory, or counts one user more if exactly this memory is mapped; returns its IOVA.
    pub(super) fn map(&self, memory: &DmaRange) -> Result<u64, PciError> {
        let iova = self.begin(memory)?;
        while !self.map_piece(iova)? {}
        Ok(iova)
    }

    /// Reserves an IOVA for memory that the caller maps by [`Space::map_piece`], or counts one user more of exactly this memory.
    pub(super) fn begin(&self, memory: &DmaRange) -> Result<u64, PciError> {
        let (address, len) = (memory.addr(), memory.len());
        if !address.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) || len == 0 {
            return Err(PciError::OutOfBounds { what: "memory for DMA", offset: address, len });
        }
        let mut state = self.state();
        while let Some((iova, mapped)) = state.find(memory) {
            match mapped.stage {
                Stage::Mapping { .. } | Stage::Done => {
                    mapped.users += 1;
                    return Ok(iova);
                }
                Stage::Failed(_) | Stage::Torn => break,
                // Its pages would be pinned twice.
                Stage::Unmapping => state = self.wait(state),
            }
        }
        state.reserve(memory)
    }

    /// Maps the next piece of a range. Returns whether all of it is mapped. After an error, the caller is no user any more.
    pub(super) fn map_piece(&self, iova: u64) -> Result<bool, PciError> {
        let mut state = self.state();
        let (address, start, piece) = loop {
            let mapped = state.mapped.get_mut(&iova).ok_or(PciError::NotMapped { iova, len: 0 })?;
            let (address, len) = (mapped.memory.addr(), mapped.memory.len());
            match &mut mapped.stage {
                Stage::Mapping { next, at_kernel } => {
                    if let Some((start, piece)) = pieces(*next, iova + len - *next, chunk_of(len)).next() {
                        (*next, *at_kernel) = (start + piece, *at_kernel + 1);
                        break (address + (start - iova), start, piece);
                    }
                    // Other users map the last pieces.
                    state = self.wait(state);
                }
                Stage::Failed(errno) => {
                    let errno = *errno;
                    return Err(self.give_up(state, iova, errno));
                }
                Stage::Done => return Ok(true),
                Stage::Unmapping | Stage::Torn => return Err(PciError::NotMapped { iova, len }),
            }
        };
        drop(state);
        let result = self.iommu.map(address, start, piece);
        let mut state = self.state();
        let mapped = state.mapped.get_mut(&iova).expect("the caller is a user of it");
        let end = iova + mapped.memory.len();
        if let Stage::Mapping { next, at_kernel } = &mut mapped.stage {
            *at_kernel -= 1;
            if *next == end && *at_kernel == 0 {
                mapped.stage = Stage::Done;
            }
        }
        let is_done = matches!(mapped.stage, Stage::Done) && result.is_ok();
        if let Err(errno) = result {
            mapped.stage = Stage::Failed(errno);
        }
        self.changed.notify_all();
        match mapped.stage {
            Stage::Failed(errno) => Err(self.give_up(state, iova, errno)),
            _ => Ok(is_done),
        }
    }

    /// Removes a user of a range of which a piece failed. The last user unmaps the other pieces: no piece is at the kernel then.
    fn give_up(&self, mut state: MutexGuard<'_, State>, iova: u64, errno: Errno) -> PciError {
        let chunks_max = state.chunks_max;
        let mapped = state.mapped.get_mut(&iova).expect("the caller is a user of it");
        let len = mapped.memory.len();
        mapped.users -= 1;
        if mapped.users == 0 {
            mapped.stage = Stage::Unmapping;
            drop(state);
            let is_clean = self.unmap_chunks(iova, len, chunk_of(len)).is_ok();
            // A range that may still be mapped is never allocated again. Its memory stays pinned, so that nothing else is
            // damaged.
            self.state().forget(iova, is_clean);
            self.changed.notify_all();
        }
        map_error(errno, len, chunks_max)
    }

    /// Removes one user, and the mapping with its last.
    pub(super) fn unmap(&self, iova: u64, len: u64) -> Result<(), PciError> {
        let mut pending = PendingUnmap::new(iova, len);
        while !self.unmap_piece(&mut pending)? {}
        Ok(())
    }

    /// Removes one user, and the next piece of the mapping with its last. Returns whether all of that is over.
    pub(super) fn unmap_piece(&self, pending: &mut PendingUnmap) -> Result<bool, PciError> {
        let (iova, len) = pending.range();
        let from = match pending.next.take() {
            Some(next) => next,
            None if self.remove_user(iova, len)? => iova,
            // Other users are left.
            None => return Ok(true),
        };
        let next = pieces(from, iova + len - from, chunk_of(len)).next();
        let result = next.map_or(Ok(()), |(start, piece)| self.unmap_chunk(start, piece));
        let end = next.map_or(iova + len, |(start, piece)| start + piece);
        if result.is_ok() && end < iova + len {
            pending.next = Some(end);
            return Ok(false);
        }
        let mut state = self.state();
        match &result {
            Ok(()) => state.forget(iova, true),
            Err(_) => state.mapped.get_mut(&iova).expect("its user is here").stage = Stage::Torn,
        }
        self.changed.notify_all();
        result.map(|()| true)
    }

    /// Removes one user. Returns whether it was the last, which now unmaps the range.
    fn remove_user(&self, iova: u64, len: u64) -> Result<bool, PciError> {
        let mut state = self.state();
        let is_whole = |mapped: &&mut Mapped| {
            mapped.memory.len() == len && matches!(mapped.stage, Stage::Done | Stage::Torn)
        };
        let Some(mapped) = state.mapped.get_mut(&iova).filter(is_whole) else {
            return Err(PciError::NotMapped { iova, len });
        };
        if mapped.users > 1 {
            mapped.users -= 1;
            return Ok(false);
        }
        mapped.stage = Stage::Unmapping;
        Ok(true)
    }

    /// Unmaps a range piece by piece. After an error, pieces may still be mapped.
    fn unmap_chunks(&self, iova: u64, len: u64, chunk: u64) -> Result<(), PciError> {
        pieces(iova, len, chunk).try_for_each(|(start, piece)| self.unmap_chunk(start, piece))
    }

    fn unmap_chunk(&self, start: u64, piece: u64) -> Result<(), PciError> {
        let what = "unmap memory for DMA";
        // 0 bytes: an earlier attempt has unmapped this piece.
        let unmapped = self.iommu.unmap(start, piece).map_err(|errno| PciError::os(what, errno))?;
        if unmapped != piece && unmapped != 0 {
            return Err(PciError::os(what, Errno::IO));
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while holding it")
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).expect("no thread panics while holding it")
    }
}

impl State {
    /// The newest mapping of exactly this memory.
    fn find(&mut self, memory: &DmaRange) -> Option<(u64, &mut Mapped)> {
        let iova = *self.by_address.get(&(memory.addr(), memory.len()))?;
        let mapped = self.mapped.get_mut(&iova).filter(|mapped| mapped.memory.is_same(memory))?;
        Some((iova, mapped))
    }

    /// Reserves addresses and mappings of the kernel for memory with one user.
    fn reserve(&mut self, memory: &DmaRange) -> Result<u64, PciError> {
        let (address, len) = (memory.addr(), memory.len());
        let align = alignment(len);
        let iova = self.allocator.allocate(len, align, address % align);
        let iova = iova.ok_or(PciError::AddressSpace { len, align })?;
        let chunks = pieces(iova, len, chunk_of(len)).count() as u32;
        if chunks > self.chunks_max - self.chunks {
            self.allocator.release(iova);
            return Err(map_error(Errno::NOSPC, len, self.chunks_max));
        }
        self.chunks += chunks;
        let stage = Stage::Mapping { next: iova, at_kernel: 0 };
        self.mapped.insert(iova, Mapped { memory: memory.clone(), users: 1, chunks, stage });
        self.by_address.insert((address, len), iova);
        Ok(iova)
    }

    /// Forgets a range. Its addresses and mappings can be used again if nothing of it is mapped.
    fn forget(&mut self, iova: u64, is_clean: bool) {
        let Some(mapped) = self.mapped.remove(&iova) else { return };
        let key = (mapped.memory.addr(), mapped.memory.len());
        if self.by_address.get(&key) == Some(&iova) {
            self.by_address.remove(&key);
        }
        if is_clean {
            self.chunks -= mapped.chunks;
            self.allocator.release(iova);
        }
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
