//! The dirty log of a migrating guest: one bit per page of guest memory, set by this process, read and cleared by the
//! front-end. Created in control context, marked in reactor context.

use crate::{MapError, Mapping, PAGE, Peer};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages whose bits lie in one byte.
const PAGES_PER_BYTE: u64 = 8;
/// Pages whose bits lie in one word.
const PAGES_PER_WORD: u64 = 64;
const _: () = assert!(PAGES_PER_WORD == PAGES_PER_BYTE * size_of::<u64>() as u64, "a page has one bit");
const _: () = assert!(cfg!(target_endian = "little"), "a word's bits are those of its bytes, in order");

/// Upper bound of the mapped bytes of a log: for guest addresses up to 128 TiB.
const LEN_MAX: u64 = 4 << 30;

/// A log shared with a front-end. "Migration" of the vhost-user specification: bit `n % 8` of byte `n / 8` stands for the
/// 4 KiB from guest address `n * 4096`.
///
/// The front-end may change the log, and truncate its file, at any time: this process never reads from it.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: Mapping,
    /// Number of marked pages beyond the log's end.
    beyond: AtomicU64,
}

impl DirtyLog {
    /// Maps a log of `len` bytes from `offset` of the front-end's memory file, at most the useful part.
    ///
    /// # Errors
    /// As [`Mapping::shared`].
    pub fn map(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<Self, MapError> {
        Ok(Self { mapping: Mapping::shared_start(fd, offset, len, LEN_MAX)?, beyond: AtomicU64::new(0) })
    }

    /// As [`Mapping::given_by`].
    #[must_use]
    pub fn given_by(self, peer: &Peer) -> Self {
        Self { mapping: self.mapping.given_by(peer), ..self }
    }

    /// Whether the log has a bit for each of `len` bytes of guest memory from address 0 on.
    pub fn covers(&self, len: u64) -> bool {
        len.div_ceil(PAGE).div_ceil(PAGES_PER_BYTE) <= self.mapping.len()
    }

    /// Marks the pages of `len` bytes at `guest_addr` as written. Call it after the write: if the front-end cleared the mark
    /// before the bytes were written, the mark would be lost. Pages beyond the log's end are only counted. Returns the number
    /// of changed log words.
    pub fn mark(&self, guest_addr: u64, len: u64) -> u64 {
        if len == 0 {
            return 0;
        }
        let pages = self.mapping.len().saturating_mul(PAGES_PER_BYTE);
        let (first, last) = (guest_addr / PAGE, guest_addr.saturating_add(len - 1) / PAGE);
        if last >= pages {
            self.beyond.fetch_add(last + 1 - first.max(pages), Ordering::Relaxed);
        }
        let end = (last + 1).min(pages);
        let (mut page, mut words) = (first, 0);
        while page < end {
            let until = end.min((page / PAGES_PER_WORD + 1) * PAGES_PER_WORD);
            let (from, count) = (page % PAGES_PER_WORD, until - page);
            // `count` is 1 to 64.
            let mask = (u64::MAX >> (PAGES_PER_WORD - count)) << from;
            self.word(page / PAGES_PER_WORD).fetch_or(mask, Ordering::Release);
            page = until;
            words += 1;
        }
        debug_assert!(words <= len / PAGE / PAGES_PER_WORD + 2, "{words} words for {len} bytes");
        words
    }

    /// Number of marked pages without a bit in the log.
    pub fn beyond(&self) -> u64 {
        self.beyond.load(Ordering::Relaxed)
    }

    /// Whether the log's file was truncated; see [`Mapping::is_poisoned`].
    pub fn is_poisoned(&self) -> bool {
        self.mapping.is_poisoned()
    }

    /// A word of the log; the last word may extend beyond the log's end.
    fn word(&self, at: u64) -> &AtomicU64 {
        let at = size_of::<u64>() as u64 * at;
        assert!(at < self.mapping.len(), "byte {at} of a log of {}", self.mapping.len());
        let ptr = self.mapping.base().as_ptr().wrapping_add(at as usize);
        assert!(ptr.cast::<AtomicU64>().is_aligned(), "a mapping begins at a page");
        // SAFETY: the address is aligned, as checked above, and its first byte is inside of the mapping, whose last page
        // is mapped to its end; so the whole word is mapped. The mapping lives as long as `self`. The front-end may
        // change the word at any time, as an atomic allows; bits beyond the log's end are not changed.
        unsafe { AtomicU64::from_ptr(ptr.cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::{AsFd, OwnedFd};

    fn file(len: u64) -> OwnedFd {
        let fd = memfd_create("log", MemfdFlags::CLOEXEC).expect("memfd");
        ftruncate(&fd, len).expect("ftruncate");
        fd
    }

    fn contents(fd: &OwnedFd, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        assert_eq!(rustix::io::pread(fd, &mut bytes, 0).expect("pread"), len);
        bytes
    }

    /// The expected log, bit by bit as in the specification.
    fn expected(marks: &[(u64, u64)], len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        for page in 0..len as u64 * 8 {
            let (start, end) = (page * 4096, page * 4096 + 4096);
            if marks.iter().any(|&(at, n)| n > 0 && at < end && at.saturating_add(n) > start) {
                bytes[(page / 8) as usize] |= 1 << (page % 8);
            }
        }
        bytes
    }

    #[test]
    fn pages_are_marked_and_no_others() {
        let sets: [&[(u64, u64)]; 6] = [
            &[(0, 1)],
            &[(4095, 2), (7 * 4096, 4096), (40960, 0)],
            &[(8 * 4096 - 1, 1), (8 * 4096, 8 * 4096)],
            &[(3 * 4096 + 5, 100 * 4096)],
            &[(511 * 8 * 4096, 8 * 4096)],
            &[(0, 4096 * 8 * 512), (u64::MAX, 1), (u64::MAX - 3, 100)],
        ];
        for marks in sets {
            let fd = file(512);
            let log = DirtyLog::map(fd.as_fd(), 0, 512).expect("a log");
            for &(at, len) in marks {
                log.mark(at, len);
            }
            assert_eq!(contents(&fd, 512), expected(marks, 512), "{marks:?}");
        }
    }

    #[test]
    fn pages_beyond_the_log_are_counted() {
        let fd = file(4096 + 1);
        let log = DirtyLog::map(fd.as_fd(), 4096, 1).expect("a log of 8 pages");
        assert!(log.covers(8 * 4096) && !log.covers(8 * 4096 + 1) && log.covers(0));
        log.mark(7 * 4096, 3 * 4096);
        assert_eq!(log.beyond(), 2);
        log.mark(1 << 40, 1);
        log.mark(u64::MAX, u64::MAX);
        assert_eq!(log.beyond(), 4);
        let bytes = contents(&fd, 4097);
        assert!(bytes[..4096].iter().all(|&b| b == 0) && bytes[4096] == 0x80);
        // Existing marks stay, and a truncated file is harmless.
        log.mark(0, 1);
        assert_eq!(contents(&fd, 4097)[4096], 0x81);
        crate::install_fault_handler();
        ftruncate(&fd, 0).expect("ftruncate");
        log.mark(0, 8 * 4096);
        assert!(log.is_poisoned());
    }

    #[test]
    fn a_long_range_is_marked_by_words() {
        const BYTES: u64 = 1 << 17;
        // The last word is incomplete.
        for len in [BYTES, BYTES + 4097] {
            let fd = file(len);
            let log = DirtyLog::map(fd.as_fd(), 0, len).expect("a log of 4 GiB and more");
            assert_eq!(log.mark(0, 4 << 30), BYTES / 8);
            log.mark(4 << 30, 4 << 30);
            assert!(contents(&fd, len as usize).iter().all(|byte| *byte == 0xff));
        }
    }

    #[test]
    fn hostile_sizes() {
        let fd = file(4096);
        for (offset, len) in [(0, 0), (0, 4097), (1, 8), (4096, 1), (u64::MAX - 4095, 4096), (0, u64::MAX)] {
            assert!(DirtyLog::map(fd.as_fd(), offset, len).is_err(), "{offset}+{len}");
        }
    }
}
