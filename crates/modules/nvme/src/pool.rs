//! Bounce buffers: pages that the controller may access, for data that it cannot access where the data is. Reactor context;
//! created in control context.
//!
//! A buffer is a list of single pages, so the pool never has free pages that do not fit a request.

use aryk_dma::{MapError, Mapping, PAGE, Sgl};
use aryk_nvme::data::Piece;
use aryk_pci::{Function, PciError};
use std::sync::Arc;

/// The end of a list of pages.
const NONE: u32 = u32::MAX;

/// Why there is no pool.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The process has no memory.
    #[error("cannot allocate {len} bytes for bounce buffers: {error}")]
    Allocate {
        /// Bytes.
        len: u64,
        /// The kernel's error.
        error: MapError,
    },
    /// The function cannot map the memory.
    #[error(transparent)]
    Map(#[from] PciError),
}

/// Memory that stays mapped for a function until it is dropped, after the function's last access.
#[derive(Debug)]
struct Mapped {
    mapping: Arc<Mapping>,
    iova: u64,
    function: Arc<dyn Function>,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        match self.function.unmap(self.iova, self.mapping.len()) {
            Ok(()) | Err(PciError::NotMapped { .. } | PciError::Gone { .. }) => {}
            // The function may still write to the memory, so that it must not be used for anything else.
            Err(_) => std::mem::forget(Arc::clone(&self.mapping)),
        }
    }
}

/// A list of pages of a pool. It is given back by [`Pool::put`].
#[derive(Debug)]
pub(crate) struct Pages {
    first: u32,
    count: u32,
}

impl Pages {
    /// No pages.
    pub(crate) const NONE: Self = Self { first: NONE, count: 0 };

    pub(crate) const fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// The pages of a pool, and which of them are free.
#[derive(Debug)]
pub(crate) struct Pool {
    memory: Mapped,
    page: u64,
    /// The page after each page, in the list of free pages or in a buffer.
    next: Box<[u32]>,
    free: u32,
    free_count: u32,
    /// The fewest pages that were free.
    low: u32,
}

impl Pool {
    /// A pool of at least `bytes` bytes, in pages of `page` bytes: a power of two, and a multiple of [`PAGE`].
    pub(crate) fn new(function: &Arc<dyn Function>, bytes: u64, page: u64) -> Result<Self, PoolError> {
        assert!(page.is_power_of_two() && page >= PAGE, "pages of {page} bytes");
        let count = bytes.div_ceil(page).clamp(1, u64::from(u32::MAX) / 2) as u32;
        let len = u64::from(count) * page;
        let mapping = Mapping::in_file(len).map_err(|error| PoolError::Allocate { len, error })?;
        let mapping = Arc::new(mapping);
        let iova = function.map(&mapping.dma_pages())?;
        if !iova.is_multiple_of(page) {
            function.unmap(iova, len)?;
            return Err(PciError::AddressSpace { len, align: page }.into());
        }
        let next = (1..=count).map(|next| if next == count { NONE } else { next }).collect();
        let memory = Mapped { mapping, iova, function: Arc::clone(function) };
        Ok(Self { memory, page, next, free: 0, free_count: count, low: count })
    }

    /// All pages.
    pub(crate) const fn pages(&self) -> u32 {
        self.next.len() as u32
    }

    /// The fewest pages that were free at any time.
    pub(crate) const fn low(&self) -> u32 {
        self.low
    }

    /// Bytes of a page.
    pub(crate) const fn page(&self) -> u64 {
        self.page
    }

    /// Takes pages for `len` bytes; `None` if fewer are free.
    pub(crate) fn take(&mut self, len: u32) -> Option<Pages> {
        let count = u64::from(len).div_ceil(self.page) as u32;
        if count == 0 || count > self.free_count {
            return None;
        }
        let first = self.free;
        let mut last = first;
        for _ in 1..count {
            last = self.next[last as usize];
        }
        self.free = std::mem::replace(&mut self.next[last as usize], NONE);
        self.free_count -= count;
        self.low = self.low.min(self.free_count);
        Some(Pages { first, count })
    }

    /// Gives pages back.
    pub(crate) fn put(&mut self, pages: Pages) {
        let Pages { first, count } = pages;
        if count == 0 {
            return;
        }
        let mut last = first;
        for _ in 1..count {
            last = self.next[last as usize];
        }
        self.next[last as usize] = self.free;
        self.free = first;
        self.free_count += count;
        debug_assert!(self.free_count <= self.pages(), "pages are given back once");
    }

    /// Calls `each` with the offset in the pool's memory and the length of each page's part of `len` bytes from `start` of a
    /// buffer. `start` is a multiple of the page.
    fn parts(&self, pages: &Pages, start: u32, len: u32, mut each: impl FnMut(u64, u32)) {
        let page = self.page as u32;
        let mut at = pages.first;
        for _ in 0..start / page {
            at = self.next[at as usize];
        }
        let mut left = len;
        while left > 0 {
            let part = left.min(page);
            each(u64::from(at) * self.page, part);
            left -= part;
            at = if left > 0 { self.next[at as usize] } else { at };
        }
    }

    /// Adds the pieces of `len` bytes from `start` of a buffer to `pieces`. `start` is a multiple of the page.
    pub(crate) fn pieces(&self, pages: &Pages, start: u32, len: u32, pieces: &mut Vec<Piece>) {
        let iova = self.memory.iova;
        self.parts(pages, start, len, |offset, len| pieces.push(Piece { iova: iova + offset, len }));
    }

    /// Copies a request's data to a buffer, from `start` on. Reads each byte once.
    pub(crate) fn fill(&self, pages: &Pages, start: u32, data: &Sgl) {
        let mut from = 0;
        self.parts(pages, start, data.len(), |offset, len| {
            data.slice(from, len).store_to(&self.memory.mapping, offset);
            from += len;
        });
    }

    /// Copies a buffer to a request's memory.
    pub(crate) fn empty(&self, pages: &Pages, data: &Sgl) {
        let mut to = 0;
        self.parts(pages, 0, data.len(), |offset, len| {
            data.slice(to, len).load_from(&self.memory.mapping, offset);
            to += len;
        });
    }

    /// Writes bytes to the first page of a buffer, from `at` on.
    pub(crate) fn write(&self, pages: &Pages, at: u32, bytes: &[u8]) {
        let end = u64::from(at) + bytes.len() as u64;
        assert!(end <= self.page && !pages.is_empty(), "{end} bytes of a page");
        let offset = u64::from(pages.first) * self.page + u64::from(at);
        let range = self.memory.mapping.dma_range(offset, bytes.len() as u64);
        let is_written = range.is_some_and(|range| range.write(0, bytes));
        assert!(is_written, "the pool's own memory");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_nvme_model::{Config, Model};

    fn pool(pages: u64) -> Pool {
        let model = Model::new("model", Config::default()).unwrap();
        let function: Arc<dyn Function> = model;
        Pool::new(&function, pages * PAGE, PAGE).unwrap()
    }

    #[test]
    fn pages_are_taken_and_given_back_in_any_order() {
        let mut pool = pool(8);
        assert!(pool.take(0).is_none() && pool.take(8 * 4096 + 1).is_none());
        let (one, five) = (pool.take(1).unwrap(), pool.take(5 * 4096).unwrap());
        assert_eq!((pool.free_count, pool.low()), (2, 2));
        assert!(pool.take(3 * 4096).is_none());
        pool.put(one);
        let three = pool.take(2 * 4096 + 1).unwrap();
        assert!(pool.take(1).is_none());
        pool.put(five);
        pool.put(three);
        pool.put(Pages::NONE);
        let all = pool.take(8 * 4096).unwrap();
        let mut pieces = Vec::new();
        pool.pieces(&all, 0, 8 * 4096, &mut pieces);
        let mut starts: Vec<u64> = pieces.iter().map(|piece| piece.iova).collect();
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(starts.len(), 8, "each page once");
        assert_eq!((pool.pages(), pool.low()), (8, 0));
    }
}
