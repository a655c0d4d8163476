//! Records the chains of a split queue that are in flight, in memory that outlives the process ("Inflight I/O tracking"
//! of the vhost-user specification). Created in control context, used by the queue in reactor context.
//!
//! The region tells a successor which chains were taken and not completed, and whether a batch was being completed. The order
//! of the stores is essential: the kernel completes a killed process's stores in program order, which the fences preserve.
//!
//! **Invariant.** The region is shared with the front-end: it is read once, at the start, and checked. Values that are needed
//! later are kept in this process.

use crate::error::{ConfigError, InflightError};
use aryk_crash_point::{Step, step};
use aryk_dma::GuestArea;
use std::sync::atomic::{Ordering, compiler_fence};

/// The only defined version.
const VERSION: u16 = 1;

/// Offsets in the header; the descriptors' states follow.
const FEATURES: usize = 0;
const VERSION_AT: usize = 8;
const DESC_NUM: usize = 10;
const LAST_BATCH_HEAD: usize = 12;
const USED_IDX: usize = 14;
const STATES: usize = 16;

/// Bytes of a descriptor's state, and offsets in it.
const STATE_LEN: usize = 16;
const INFLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;
const _: () = assert!(USED_IDX + 2 == STATES && COUNTER + 8 == STATE_LEN, "the layout of the specification");

/// Bytes of a queue's part, without padding.
pub(crate) const fn len(size: u16) -> u64 {
    (STATES + STATE_LEN * size as usize) as u64
}

#[derive(Debug)]
pub(super) struct Inflight {
    area: GuestArea,
    /// The next chain's position in the order of arrival.
    counter: u64,
    last_batch_head: u16,
    /// Heads of the chains completed since the last publication.
    batch: Vec<u16>,
    is_new: bool,
}

impl Inflight {
    /// Takes over a predecessor's region, or initializes a region of zeroes. Returns the heads of the chains in flight, in the
    /// order of their arrival. `used_idx` is the used ring's index.
    pub fn attach(area: GuestArea, size: u16, used_idx: u16) -> Result<(Self, Vec<u16>), ConfigError> {
        let needed = len(size);
        if area.len() < needed {
            return Err(ConfigError::TooShort { part: "in-flight region", len: area.len(), needed });
        }
        if !area.is_aligned(8) {
            return Err(ConfigError::Unaligned { part: "in-flight region", align: 8 });
        }
        let mut inflight = Self {
            area,
            counter: 0,
            last_batch_head: 0,
            batch: Vec::with_capacity(size.into()),
            is_new: false,
        };
        let heads = match inflight.area.read::<u16>(VERSION_AT) {
            0 => {
                inflight.is_new = true;
                inflight.initialise(size, used_idx);
                Vec::new()
            }
            VERSION => inflight.recover(size, used_idx)?,
            version => return Err(InflightError::Version(version).into()),
        };
        Ok((inflight, heads))
    }

    fn initialise(&mut self, size: u16, used_idx: u16) {
        self.area.write(FEATURES, &0_u64);
        self.area.write(DESC_NUM, &size);
        self.area.write(LAST_BATCH_HEAD, &0_u16);
        self.area.write(USED_IDX, &used_idx);
        compiler_fence(Ordering::SeqCst);
        self.area.write(VERSION_AT, &VERSION);
    }

    fn recover(&mut self, size: u16, used_idx: u16) -> Result<Vec<u16>, InflightError> {
        let desc_num = self.area.read::<u16>(DESC_NUM);
        if desc_num != size {
            return Err(InflightError::Size { region: desc_num, queue: size });
        }
        self.settle_batch(size, used_idx)?;
        step(Step::Recovered);
        let mut heads = Vec::new();
        for head in 0..size {
            match self.area.read::<u8>(state(head) + INFLIGHT) {
                0 => {}
                1 => heads.push((self.area.read::<u64>(state(head) + COUNTER), head)),
                value => return Err(InflightError::State { head, value }),
            }
        }
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
        Ok(heads.into_iter().map(|(_, head)| head).collect())
    }

    /// The used ring's index has advanced since the region recorded it: the batch that advanced it is no longer in flight,
    /// whatever its descriptors' states are.
    fn settle_batch(&mut self, size: u16, used_idx: u16) -> Result<(), InflightError> {
        let noted = self.area.read::<u16>(USED_IDX);
        let count = used_idx.wrapping_sub(noted);
        if count > size {
            return Err(InflightError::UsedIndex { region: noted, ring: used_idx });
        }
        let mut head = self.area.read::<u16>(LAST_BATCH_HEAD);
        for _ in 0..count {
            if head >= size {
                return Err(InflightError::Head(head));
            }
            self.area.write(state(head) + INFLIGHT, &0_u8);
            head = self.area.read::<u16>(state(head) + NEXT);
        }
        compiler_fence(Ordering::SeqCst);
        self.area.write(USED_IDX, &used_idx);
        Ok(())
    }

    /// Records that a chain has been taken.
    #[inline]
    pub fn begin(&mut self, head: u16) {
        self.area.write(state(head) + COUNTER, &self.counter);
        self.counter = self.counter.wrapping_add(1);
        compiler_fence(Ordering::SeqCst);
        self.area.write(state(head) + INFLIGHT, &1_u8);
        compiler_fence(Ordering::SeqCst);
    }

    /// Records that a chain's used element has been written; it is not visible yet.
    #[inline]
    pub fn end(&mut self, head: u16) {
        self.area.write(state(head) + NEXT, &self.last_batch_head);
        compiler_fence(Ordering::SeqCst);
        self.last_batch_head = head;
        self.area.write(LAST_BATCH_HEAD, &head);
        self.batch.push(head);
    }

    /// Records that the batch is visible: the used ring's index is `used_idx`.
    #[inline]
    pub fn published(&mut self, used_idx: u16) {
        compiler_fence(Ordering::SeqCst);
        for head in self.batch.drain(..) {
            self.area.write(state(head) + INFLIGHT, &0_u8);
            step(Step::Clearing);
        }
        compiler_fence(Ordering::SeqCst);
        step(Step::Cleared);
        self.area.write(USED_IDX, &used_idx);
    }

    /// Whether no device has used the region before.
    pub const fn is_new(&self) -> bool {
        self.is_new
    }

    pub fn is_poisoned(&self) -> bool {
        self.area.is_poisoned()
    }
}

const fn state(head: u16) -> usize {
    STATES + STATE_LEN * head as usize
}
