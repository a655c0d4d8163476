//! A guest's memory as its front-end announces it: regions are added and removed, and each change creates a new epoch. Control
//! context.
//!
//! A region that is announced again without any change keeps its mapping; only removed regions are unmapped. Descriptors here
//! are known to be memory files ([`crate::connection`]), on which the kernel answers calls from memory. See "Memory access" and
//! "Memory regions description" of the specification.

use crate::Error;
use crate::message::RegionDesc;
use aryk_dma::{Limits, MapError, Mapping, MemTable, PAGE, Peer, Region};
use rustix::fs::{fstat, fstatfs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Number of memory slots offered: as many as the kernel's vhost and KVM on x86 have, for which front-ends are made.
pub(crate) const SLOTS_MAX: usize = 509;

/// The number of regions that each guest may have, however many regions other guests have: as many as fit into one message,
/// which is enough for most guests.
const SLOTS_GUARANTEED: usize = 8;

/// Identity of a file, while it is open or mapped.
pub(crate) type FileId = (u64, u64);

#[derive(Clone, Debug)]
struct Slot {
    desc: RegionDesc,
    file: FileId,
    mapping: Arc<Mapping>,
    /// Offset of the region's first byte in the mapping, which starts at a page boundary.
    offset: u64,
}

/// Mappings that a change has removed from the current table. Queues and requests may still use them.
#[must_use = "removed mappings must be retired"]
#[derive(Debug, Default)]
pub(crate) struct Removed(Vec<Arc<Mapping>>);

#[derive(Debug)]
pub(crate) struct GuestMemory {
    slots: Vec<Slot>,
    table: Arc<MemTable>,
    peer: Peer,
}

impl GuestMemory {
    /// Creates the empty memory of a peer's guest.
    pub(crate) fn new(peer: Peer) -> Self {
        Self { slots: Vec::new(), table: Arc::default(), peer }
    }

    /// The peer whose memory limit applies.
    pub(crate) const fn peer(&self) -> &Peer {
        &self.peer
    }

    /// Waits until mappings of these sizes fit beside the current ones. As long as mappings that this front-end, or one before
    /// it, has released wait to be unmapped, all mappings together may not exceed a table and its replacement.
    pub(crate) async fn room_for(&self, sizes: impl Iterator<Item = u64>) {
        const POLL_INTERVAL: Duration = Duration::from_millis(1);
        let announced = mapped(&self.slots).chain(sizes);
        let sum = |(bytes, mappings): (u64, u64), size| (bytes.saturating_add(size), mappings + 1);
        let (bytes, mappings) = announced.fold((0, 0), sum);
        let bytes_max = Limits::get().peer.saturating_mul(2).saturating_sub(bytes);
        let mappings_max = (2 * SLOTS_MAX as u64).saturating_sub(mappings);
        loop {
            let (bytes, mappings) = self.peer.awaiting_unmap();
            if mappings == 0 || bytes <= bytes_max && mappings <= mappings_max {
                return;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// The current epoch.
    pub(crate) fn table(&self) -> Arc<MemTable> {
        Arc::clone(&self.table)
    }

    /// The files that hold the memory.
    pub(crate) fn files(&self) -> impl Iterator<Item = FileId> {
        self.slots.iter().map(|slot| slot.file)
    }

    /// Replaces all regions. Changes nothing on an error.
    pub(crate) fn set(&mut self, descs: &[RegionDesc], fds: &[OwnedFd]) -> Result<Removed, Error> {
        check_size(descs.iter().map(|desc| desc.size))?;
        let slots = descs.iter().zip(fds).map(|(desc, fd)| self.slot(*desc, fd.as_fd()));
        let slots = slots.collect::<Result<Vec<_>, _>>()?;
        check_size(mapped(&slots))?;
        self.replace(slots)
    }

    /// Adds a region. Changes nothing on an error.
    pub(crate) fn add(&mut self, desc: RegionDesc, fd: &OwnedFd) -> Result<Removed, Error> {
        if self.slots.len() == SLOTS_MAX {
            return Err(Error::TooManyRegions(SLOTS_MAX));
        }
        if self.slots.len() >= SLOTS_GUARANTEED && are_regions_scarce() {
            return Err(Error::RegionsShort(self.slots.len()));
        }
        check_size(self.slots.iter().map(|slot| slot.desc.size).chain([desc.size]))?;
        let mut slots = self.slots.clone();
        slots.push(self.slot(desc, fd.as_fd())?);
        check_size(mapped(&slots))?;
        self.replace(slots)
    }

    /// Removes the region that has the addresses and the size of `desc`.
    pub(crate) fn remove(&mut self, desc: &RegionDesc) -> Result<Removed, Error> {
        let is_it = |s: &Slot| {
            (s.desc.guest_addr, s.desc.user_addr, s.desc.size) == (desc.guest_addr, desc.user_addr, desc.size)
        };
        let at = self.slots.iter().position(is_it).ok_or(Error::NoSuchRegion(desc.guest_addr))?;
        let mut slots = self.slots.clone();
        slots.remove(at);
        self.replace(slots)
    }

    /// Removes all regions.
    pub(crate) fn clear(&mut self) -> Removed {
        self.replace(Vec::new()).expect("an empty table is valid")
    }

    fn replace(&mut self, slots: Vec<Slot>) -> Result<Removed, Error> {
        let regions = slots.iter().map(|s| Region {
            guest_addr: s.desc.guest_addr,
            user_addr: s.desc.user_addr,
            len: s.desc.size,
            offset: s.offset,
            mapping: Arc::clone(&s.mapping),
        });
        self.table = Arc::new(MemTable::new(regions.collect())?);
        let mut old = std::mem::replace(&mut self.slots, slots);
        old.retain(|o| !self.slots.iter().any(|s| Arc::ptr_eq(&s.mapping, &o.mapping)));
        Ok(Removed(old.into_iter().map(|s| s.mapping).collect()))
    }

    /// A slot for the region: the existing slot of an unchanged region, or a new one.
    fn slot(&self, desc: RegionDesc, fd: BorrowedFd<'_>) -> Result<Slot, Error> {
        let guest_addr = desc.guest_addr;
        let os = |e: rustix::io::Errno| Error::Map { guest_addr, source: e.into() };
        let stat = fstat(fd).map_err(os)?;
        let file = (stat.st_dev, stat.st_ino);
        if let Some(same) = self.slots.iter().find(|s| s.desc == desc && s.file == file) {
            return Ok(same.clone());
        }
        // Otherwise a ring that is aligned in the front-end's address space would not be aligned in this process.
        let base = desc.mmap_offset % PAGE;
        if desc.user_addr % PAGE != base || desc.guest_addr % PAGE != base {
            return Err(Error::Misaligned(guest_addr));
        }
        let map = |source| Error::Map { guest_addr, source };
        let bad = || map(MapError::BadRange { offset: desc.mmap_offset, len: desc.size });
        let page = page_size(fd).map_err(os)?;
        let end = desc.mmap_offset.checked_add(desc.size).filter(|_| desc.size > 0).ok_or_else(bad)?;
        // Huge pages can only be mapped as a whole; the kernel handles the rest of a small page.
        let end = if page > PAGE { end.checked_next_multiple_of(page).ok_or_else(bad)? } else { end };
        let start = desc.mmap_offset - desc.mmap_offset % page;
        let mapping = Mapping::shared(fd, start, end - start).map_err(map)?.given_by(&self.peer);
        Ok(Slot { desc, file, mapping: Arc::new(mapping), offset: desc.mmap_offset - start })
    }
}

/// Whether one front-end may announce regions of these sizes. While one table replaces another, both are mapped; so a guest may
/// map up to twice as much.
fn check_size(sizes: impl Iterator<Item = u64>) -> Result<(), Error> {
    let (requested, max) = (sizes.fold(0, u64::saturating_add), Limits::get().peer);
    if requested > max { Err(Error::TooMuchMemory { requested, max }) } else { Ok(()) }
}

/// Bytes that are mapped for each of `slots`: more than were announced if pages are huge.
fn mapped(slots: &[Slot]) -> impl Iterator<Item = u64> {
    slots.iter().map(|slot| slot.mapping.len())
}

/// Whether the remaining mappings of the process are reserved for guests with few regions.
fn are_regions_scarce() -> bool {
    aryk_dma::mapped().1 >= Limits::get().mappings / 2
}

/// The page size of the file.
fn page_size(fd: BorrowedFd<'_>) -> rustix::io::Result<u64> {
    const HUGETLBFS_MAGIC: i64 = 0x9584_58f6; // Linux's include/uapi/linux/magic.h
    let stat = fstatfs(fd)?;
    Ok(if stat.f_type == HUGETLBFS_MAGIC { stat.f_bsize.cast_unsigned() } else { PAGE })
}

/// How long requests may use removed memory: short requests end before.
pub(crate) const GRACE: Duration = Duration::from_secs(1);

impl Removed {
    /// Waits until no queue and no request uses any of the mappings; another thread unmaps them soon after. After `grace`, calls
    /// `revoke`, and again until it returns that the memory may be replaced under its users, which ends the wait: the mappings
    /// then keep their addresses until the last user has gone.
    pub(crate) async fn retire(self, grace: Duration, revoke: impl AsyncFn() -> bool) {
        /// About the duration of a short request, so that most waits are short; a check costs next to nothing.
        const POLL_INTERVAL: Duration = Duration::from_millis(1);
        const RETRY: Duration = Duration::from_millis(50);
        let began = Instant::now();
        let mut next_try = grace;
        while self.used().next().is_some() {
            if began.elapsed() >= next_try {
                if next_try == GRACE {
                    tracing::warn!("requests have used removed guest memory for a second: the disk is slow");
                }
                if revoke().await && self.replace().await {
                    return;
                }
                next_try = began.elapsed() + RETRY;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// The mappings that have other users.
    fn used(&self) -> impl Iterator<Item = &Arc<Mapping>> {
        self.0.iter().filter(|mapping| Arc::strong_count(mapping) > 1)
    }

    /// Replaces the memory under its users. Returns whether that succeeded.
    async fn replace(&self) -> bool {
        let used: Vec<_> = self.used().cloned().collect();
        let bytes: u64 = used.iter().map(|mapping| mapping.len()).sum();
        // The kernel takes long for much memory.
        let replacing =
            tokio::task::spawn_blocking(move || used.iter().try_for_each(|mapping| mapping.revoke()));
        match replacing.await.expect("replacing does not panic") {
            Ok(()) => {
                tracing::warn!(
                    "{bytes} bytes of the guest's memory were released before the last requests have ended: their addresses \
                     stay in use until then"
                );
                true
            }
            Err(error) => {
                tracing::warn!("removed guest memory cannot be released yet: {error}");
                false
            }
        }
    }
}
