//! Buffers that are used again, so that the path of a request allocates nothing once it has warmed up. Any context.

use crate::BLOCK;
use aryk_dma::{Buffer, PAGE};

/// The sizes of buffers up to this one are powers of two. Larger buffers are in one list; their sizes are multiples of
/// `LARGE_GRAIN`.
const SMALL_MAX: usize = 1 << 20;
const LARGE_GRAIN: usize = 64 << 10;

/// Bytes of unused buffers of one class that are kept.
const KEPT_BYTES: usize = 16 << 20;

/// Unused buffers.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    /// By the logarithm of their size in blocks.
    small: [Vec<Buffer>; 9],
    large: Vec<Buffer>,
}

fn class(len: usize) -> usize {
    (len / BLOCK as usize).trailing_zeros() as usize
}

impl Buffers {
    /// A buffer of at least `len` bytes, with any content.
    pub(crate) fn take(&mut self, len: u32) -> Buffer {
        let len = (len as usize).max(BLOCK as usize);
        if len <= SMALL_MAX {
            let len = len.next_power_of_two();
            return self
                .small
                .get_mut(class(len))
                .and_then(Vec::pop)
                .unwrap_or_else(|| Buffer::new(len, PAGE as usize));
        }
        let found = self.large.iter().position(|buffer| buffer.len() >= len);
        found.map_or_else(
            || Buffer::new(len.next_multiple_of(LARGE_GRAIN), PAGE as usize),
            |at| self.large.swap_remove(at),
        )
    }

    /// Keeps a buffer that is no longer used.
    pub(crate) fn give(&mut self, buffer: Buffer) {
        let len = buffer.len();
        let list = if len > SMALL_MAX { &mut self.large } else { &mut self.small[class(len)] };
        if list.len() * len < KEPT_BYTES {
            list.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_for_requests_of_its_class() {
        let mut buffers = Buffers::default();
        for len in [1, 4096, 4097, 100_000, 1 << 20, (1 << 20) + 4096, (2 << 20) - 1, 2 << 20, 5 << 20] {
            let buffer = buffers.take(len);
            assert!(buffer.len() >= len as usize);
            let at = buffer.bytes().as_ptr();
            buffers.give(buffer);
            let again = buffers.take(len);
            assert_eq!(again.bytes().as_ptr(), at);
            buffers.give(again);
        }
    }
}
