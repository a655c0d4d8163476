//! The controller's side of the PCI bus: memory by IOVA, and MSI-X vectors. Context: the holder of the controller.
//!
//! Every access of the controller to the host's memory goes through [`Bus::read`], [`Bus::write`] or
//! [`Bus::post_completion`], which check it as an IOMMU and the bus-master bit would. An access that the IOMMU refuses is
//! a [`Violation`] of the host: it unmapped or freed memory while the controller still owned a command with that memory.
//!
//! **Invariant.** `mappings` is sorted by IOVA and its ranges do not overlap. A mapping's memory is kept mapped only from
//! its first access until [`Bus::unpin`], at the end of a step: afterwards the host may free it.

use crate::wire::CompletionEntry;
use aryk_dma::{DmaPin, DmaRange};
use aryk_pci::Registers;
use std::fs::File;
use std::io::Write as _;
use zerocopy::IntoBytes as _;

/// DMA mappings that the kernel's VFIO type 1 driver allows by default.
pub(crate) const MAPPINGS_MAX: usize = 65_535;
/// Unmapped IOVAs between two mappings, so that an access that runs over the end of one hits no other.
const GUARD: u64 = 2 << 20;
const PAGE: u64 = aryk_dma::PAGE;
/// Bytes of an entry of the MSI-X table, and the offset of its vector control, whose lowest bit masks the vector.
pub(crate) const MSIX_ENTRY: u64 = 16;
const MSIX_CONTROL: u64 = 12;
/// Recorded violations; further ones are only counted.
const VIOLATIONS_KEPT: usize = 64;

/// An error of the host that the model noticed. A correct driver causes none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The controller accessed an IOVA that is not mapped. The memory may have been unmapped while a command used it.
    Unmapped {
        /// First byte.
        iova: u64,
        /// Bytes.
        len: u64,
        /// Whether the access was a write.
        is_write: bool,
    },
    /// The memory of a mapping was freed before it was unmapped from the device.
    Freed {
        /// First byte.
        iova: u64,
    },
    /// A register access that the specification forbids or leaves undefined.
    Register {
        /// Offset in BAR 0.
        offset: u64,
        /// The reason.
        reason: &'static str,
    },
    /// A doorbell got a value that its queue cannot have, or has no queue.
    Doorbell {
        /// Queue identifier.
        qid: u16,
        /// Whether the doorbell is a completion queue's.
        is_cq: bool,
        /// The value.
        value: u32,
    },
}

/// Violations since the controller was built.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Violations {
    /// All of them.
    pub count: u64,
    /// The first 64.
    pub first: Vec<Violation>,
    /// Accesses that did not happen because the bus-master bit was clear. These are no violations: a host clears the bit
    /// to be sure that a controller accesses no memory any more.
    pub blocked: u64,
}

impl Violations {
    pub(crate) fn add(&mut self, violation: Violation) {
        self.count += 1;
        if self.first.len() < VIOLATIONS_KEPT {
            self.first.push(violation);
        }
    }
}

/// The access was refused; the violation is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BusError;

#[derive(Debug)]
struct Mapped {
    iova: u64,
    len: u64,
    range: DmaRange,
    /// The memory, kept mapped until the end of the step.
    pin: Option<DmaPin>,
}

#[derive(Debug, Default)]
struct Vector {
    eventfd: Option<File>,
    is_pending: bool,
    signals: u64,
}

/// Why the bus refuses a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MapRefusal {
    /// An address or the length is not a multiple of 4 KiB.
    NotPages,
    /// Another mapping has some of these IOVAs.
    Overlap,
    /// There are [`MAPPINGS_MAX`] mappings.
    TooMany,
}

#[derive(Debug)]
pub(crate) struct Bus {
    mappings: Vec<Mapped>,
    /// Index of the mapping that served the last access.
    last: usize,
    /// Indices of mappings with a pin.
    pinned: Vec<usize>,
    next_iova: u64,
    pub(crate) is_master: bool,
    pub(crate) violations: Violations,
    vectors: Vec<Vector>,
    /// The MSI-X table, whose masks the host writes at any time.
    table: Registers,
    /// The pending vectors: each once.
    pending: Vec<u16>,
}

impl Bus {
    pub(crate) fn new(vectors: u16, table: Registers) -> Self {
        Self {
            mappings: Vec::new(),
            last: 0,
            pinned: Vec::new(),
            // Far from any address of this process: a driver that uses an address for an IOVA fails at once.
            next_iova: 1 << 40,
            is_master: false,
            violations: Violations::default(),
            vectors: (0..vectors).map(|_| Vector::default()).collect(),
            table,
            pending: Vec::new(),
        }
    }

    /// Maps memory and returns its IOVA.
    pub(crate) fn map(&mut self, range: &DmaRange) -> Result<u64, MapRefusal> {
        let iova = self.next_iova;
        self.map_at(iova, range)?;
        self.next_iova += (range.len() + GUARD).next_multiple_of(GUARD);
        Ok(iova)
    }

    /// Maps memory at an IOVA that the caller chose.
    pub(crate) fn map_at(&mut self, iova: u64, range: &DmaRange) -> Result<(), MapRefusal> {
        let is_page = |n: u64| n.is_multiple_of(PAGE);
        let end = iova.checked_add(range.len()).ok_or(MapRefusal::NotPages)?;
        if !is_page(iova) || !is_page(range.addr()) || !is_page(range.len()) {
            return Err(MapRefusal::NotPages);
        }
        if self.mappings.len() >= MAPPINGS_MAX {
            return Err(MapRefusal::TooMany);
        }
        let index = self.mappings.partition_point(|m| m.iova < end);
        if index.checked_sub(1).is_some_and(|before| {
            let before = &self.mappings[before];
            before.iova + before.len > iova
        }) {
            return Err(MapRefusal::Overlap);
        }
        self.unpin();
        self.mappings.insert(index, Mapped { iova, len: range.len(), range: range.clone(), pin: None });
        self.last = 0;
        Ok(())
    }

    /// Ends a mapping; `false` if no mapping has this address and length.
    pub(crate) fn unmap(&mut self, iova: u64, len: u64) -> bool {
        let Ok(index) = self.mappings.binary_search_by_key(&iova, |m| m.iova) else { return false };
        if self.mappings[index].len != len {
            return false;
        }
        self.unpin();
        self.mappings.remove(index);
        self.last = 0;
        true
    }

    pub(crate) const fn mapping_count(&self) -> usize {
        self.mappings.len()
    }

    /// Releases the memory that accesses of this step kept mapped.
    pub(crate) fn unpin(&mut self) {
        for index in self.pinned.drain(..) {
            self.mappings[index].pin = None;
        }
    }

    /// The memory of `len` bytes from `iova` on, and the offset of `iova` in it.
    fn resolve(&mut self, iova: u64, len: u64, is_write: bool) -> Result<(&DmaPin, u64), BusError> {
        if !self.is_master {
            self.violations.blocked += 1;
            return Err(BusError);
        }
        let end = iova.saturating_add(len);
        let contains = |m: &Mapped| m.iova <= iova && end <= m.iova + m.len;
        if !self.mappings.get(self.last).is_some_and(contains) {
            let after = self.mappings.partition_point(|m| m.iova <= iova);
            let found = after.checked_sub(1).filter(|&i| contains(&self.mappings[i]));
            let Some(found) = found else {
                self.violations.add(Violation::Unmapped { iova, len, is_write });
                return Err(BusError);
            };
            self.last = found;
        }
        if self.mappings[self.last].pin.is_none() {
            let Some(pin) = self.mappings[self.last].range.pin() else {
                self.violations.add(Violation::Freed { iova });
                return Err(BusError);
            };
            self.mappings[self.last].pin = Some(pin);
            self.pinned.push(self.last);
        }
        let mapping = &self.mappings[self.last];
        let pin = mapping.pin.as_ref().ok_or(BusError)?;
        Ok((pin, iova - mapping.iova))
    }

    /// Copies bytes of the host's memory.
    pub(crate) fn read(&mut self, iova: u64, out: &mut [u8]) -> Result<(), BusError> {
        let (pin, offset) = self.resolve(iova, out.len() as u64, false)?;
        pin.read(offset, out).then_some(()).ok_or(BusError)
    }

    /// Copies bytes to the host's memory.
    pub(crate) fn write(&mut self, iova: u64, data: &[u8]) -> Result<(), BusError> {
        let (pin, offset) = self.resolve(iova, data.len() as u64, true)?;
        pin.write(offset, data).then_some(()).ok_or(BusError)
    }

    /// Checks that `len` bytes from `iova` on are accessible, without an access.
    pub(crate) fn check(&mut self, iova: u64, len: u64, is_write: bool) -> Result<(), BusError> {
        self.resolve(iova, len, is_write).map(|_| ())
    }

    /// Writes a completion queue entry. The host sees the phase tag only after the other bytes.
    pub(crate) fn post_completion(&mut self, iova: u64, entry: &CompletionEntry) -> Result<(), BusError> {
        let bytes = entry.as_bytes();
        let (pin, offset) = self.resolve(iova, bytes.len() as u64, true)?;
        // The second write comes after the first, also for a host on another core.
        let is_written = pin.write(offset, &bytes[..12]) && pin.write(offset + 12, &bytes[12..]);
        is_written.then_some(()).ok_or(BusError)
    }

    pub(crate) const fn vector_count(&self) -> u16 {
        self.vectors.len() as u16
    }

    /// Connects vector `i` with `eventfds[i]`; the other vectors lose theirs. As the kernel does, unmasks all vectors.
    pub(crate) fn set_eventfds(&mut self, eventfds: Vec<File>) {
        let mut eventfds = eventfds.into_iter();
        for vector in &mut self.vectors {
            vector.eventfd = eventfds.next();
        }
        self.clear_pending();
        self.unmask_vectors();
    }

    /// Unmasks all vectors, as the kernel does when it enables them, or restores them after a reset.
    pub(crate) fn unmask_vectors(&self) {
        for vector in 0..self.vector_count() {
            self.table.write(control(vector), 0);
        }
    }

    /// Requests an interrupt, for the next [`Bus::signal_pending`].
    pub(crate) fn raise(&mut self, vector: u16) {
        if let Some(state) = self.vectors.get_mut(usize::from(vector)).filter(|state| !state.is_pending) {
            state.is_pending = true;
            self.pending.push(vector);
        }
    }

    /// Signals each vector that is pending and not masked, once. A masked vector stays pending.
    pub(crate) fn signal_pending(&mut self) {
        let (vectors, table) = (&mut self.vectors, &self.table);
        self.pending.retain(|&vector| {
            if table.read(control(vector)) & 1 != 0 {
                return true;
            }
            let vector = &mut vectors[usize::from(vector)];
            vector.is_pending = false;
            if let Some(eventfd) = &mut vector.eventfd {
                vector.signals += 1;
                // An eventfd that is full, or of a host that is gone, needs no signal.
                let _ = eventfd.write(&1u64.to_ne_bytes());
            }
            false
        });
    }

    /// Forgets requested interrupts, as a reset of the controller does.
    pub(crate) fn clear_pending(&mut self) {
        self.vectors.iter_mut().for_each(|vector| vector.is_pending = false);
        self.pending.clear();
    }

    /// Interrupts signalled on `vector`.
    pub(crate) fn signals(&self, vector: u16) -> u64 {
        self.vectors.get(usize::from(vector)).map_or(0, |vector| vector.signals)
    }
}

/// Offset of a vector's control in the MSI-X table.
const fn control(vector: u16) -> u64 {
    vector as u64 * MSIX_ENTRY + MSIX_CONTROL
}
