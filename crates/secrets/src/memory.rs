//! The memory of secrets: arenas of locked pages, in parts. Any context; creating and freeing a part takes a lock.
//!
//! A page for each secret would use up the limit of locked memory with two thousand keys. So an arena of [`ARENA`] bytes is
//! divided into units of [`ALIGNMENT`] bytes, and a part is a run of free units. A larger secret gets an arena of its own. Free
//! units are zero.

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mlock, mmap_anonymous, munmap};
use std::alloc::{Layout, handle_alloc_error};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use zeroize::Zeroize;

/// Bytes in a unit: a cache line, and the alignment of each part.
pub(crate) const ALIGNMENT: usize = 64;
/// Bytes in an arena of several parts.
pub(crate) const ARENA: usize = 16 << 10;
const UNITS: usize = ARENA / ALIGNMENT;
/// Arenas are whole pages, also of 64 KiB.
const PAGE: usize = 64 << 10;

static ARENAS: Mutex<Vec<Arena>> = Mutex::new(Vec::new());
static UNLOCKED: AtomicU64 = AtomicU64::new(0);

/// Bytes of secrets' memory that the kernel did not lock, because of `RLIMIT_MEMLOCK`.
#[must_use]
pub fn unlocked_bytes() -> u64 {
    UNLOCKED.load(Ordering::Relaxed)
}

fn arenas() -> MutexGuard<'static, Vec<Arena>> {
    // No code panics while it changes the list.
    ARENAS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Mapped pages, which are left out of core dumps.
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    lock: Lock,
}

/// Whether the kernel keeps pages in memory.
#[derive(PartialEq, Eq)]
enum Lock {
    Held,
    /// `RLIMIT_MEMLOCK` allows no more.
    Refused,
    /// The pages are too many for that limit.
    Unwanted,
}

// SAFETY: the mapping belongs to this value, whichever thread has it.
unsafe impl Send for Mapping {}

// SAFETY: a shared mapping gives out its address only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Locked pages, if the limit allows it.
    fn locked(len: usize) -> Self {
        let Some(mut mapping) = Self::unlocked(len) else {
            let layout = Layout::from_size_align(len, ALIGNMENT).expect("a size within the address space");
            handle_alloc_error(layout)
        };
        // SAFETY: locking does not change the content of the mapping.
        let locked = unsafe { mlock(mapping.base().cast(), len) };
        mapping.lock = match locked {
            Ok(()) => Lock::Held,
            Err(errno) => {
                UNLOCKED.fetch_add(len as u64, Ordering::Relaxed);
                warn_unlocked(errno);
                Lock::Refused
            }
        };
        mapping
    }

    /// Zeroes; `None` if the system has no memory.
    pub fn unlocked(len: usize) -> Option<Self> {
        let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping, at an address that the kernel chooses, replaces none.
        let base = unsafe { mmap_anonymous(null_mut(), len, access, kind) };
        let base = NonNull::new(base.ok()?.cast::<u8>())?;
        for advice in [Advice::LinuxDontDump, Advice::LinuxWipeOnFork] {
            // Fails only on kernels before 4.14, which do not know the second advice.
            // SAFETY: the advice concerns core dumps and children; this process sees no change in the new mapping.
            let _ = unsafe { madvise(base.as_ptr().cast(), len, advice) };
        }
        Some(Self { base, len, lock: Lock::Unwanted })
    }

    pub const fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.lock == Lock::Refused {
            UNLOCKED.fetch_sub(self.len as u64, Ordering::Relaxed);
        }
        // The kernel zeroes pages before another process gets them.
        // SAFETY: the mapping has these bytes, and no part of it is in use: its owner is being dropped.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn warn_unlocked(error: Errno) {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!(%error, "memory of keys cannot be locked, so that it may be written to swap: raise the limit of locked memory (RLIMIT_MEMLOCK)");
    });
}

/// A mapping with parts.
struct Arena {
    mapping: Mapping,
    /// Whether each unit is in use.
    is_used: [bool; UNITS],
}

impl Arena {
    fn new() -> Self {
        Self { mapping: Mapping::locked(ARENA), is_used: [false; UNITS] }
    }

    fn take(&mut self, units: usize) -> Option<NonNull<u8>> {
        let first = self.is_used.windows(units).position(|run| run.iter().all(|is_used| !is_used))?;
        self.is_used[first..first + units].fill(true);
        // SAFETY: `first` is a unit of the arena, so the address is within its mapping.
        Some(unsafe { self.mapping.base.add(first * ALIGNMENT) })
    }

    fn unit_of(&self, part: NonNull<u8>) -> Option<usize> {
        let distance = part.addr().get().checked_sub(self.mapping.base.addr().get())?;
        (distance < ARENA).then_some(distance / ALIGNMENT)
    }

    fn is_empty(&self) -> bool {
        self.is_used.iter().all(|is_used| !is_used)
    }
}

/// Memory of one secret: zero at first, and zeroed when it is dropped.
pub(crate) struct Part {
    base: NonNull<u8>,
    units: usize,
    /// The part's own mapping, if it is larger than an arena.
    own: Option<Mapping>,
}

// SAFETY: the part's memory belongs to this value, and any thread may free it.
unsafe impl Send for Part {}
// SAFETY: a shared part gives out its address only.
unsafe impl Sync for Part {}

impl Part {
    /// At least `len` bytes.
    pub fn new(len: usize) -> Self {
        let units = len.div_ceil(ALIGNMENT).max(1);
        if units > UNITS {
            let own = Mapping::locked(len.next_multiple_of(PAGE));
            return Self { base: own.base, units, own: Some(own) };
        }
        let mut arenas = arenas();
        let free = arenas.iter_mut().find_map(|arena| arena.take(units));
        let base = free.unwrap_or_else(|| {
            let mut arena = Arena::new();
            let base = arena.take(units).expect("an empty arena has these units");
            arenas.push(arena);
            base
        });
        Self { base, units, own: None }
    }

    pub const fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // SAFETY: the part has these units, all of them initialized, and no reference to them is left.
        unsafe { std::slice::from_raw_parts_mut(self.base(), self.units * ALIGNMENT) }.zeroize();
        if self.own.is_some() {
            return;
        }
        let mut arenas = arenas();
        let place = arenas.iter().position(|arena| arena.unit_of(self.base).is_some());
        let place = place.expect("each part is in an arena");
        let first = arenas[place].unit_of(self.base).expect("the arena was just found");
        arenas[place].is_used[first..first + self.units].fill(false);
        // One empty arena is kept, for secrets that live shortly.
        if arenas[place].is_empty() && arenas.len() > 1 {
            arenas.swap_remove(place);
        }
    }
}
