//! The range of a command's data that an R2T requests, or that a command reads, while its PDUs arrive. NVMe TCP Transport 1.0
//! §3.3.2. Any context.

use super::fatal::{Fatal, FatalStatus};
use super::pdu::field;

/// Data that is expected, in order: what one R2T requested, or all data of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    next: u32,
    end: u32,
}

impl Span {
    /// The `len` bytes from `offset` on of a command's data.
    ///
    /// # Panics
    /// If the span ends beyond 4 GiB.
    pub const fn new(offset: u32, len: u32) -> Self {
        Self { next: offset, end: offset.checked_add(len).expect("a span ends below 4 GiB") }
    }

    /// Accounts for a PDU with `len` bytes at `offset` of the command's data. Returns whether the span is complete.
    ///
    /// # Errors
    /// The data is not what follows, goes beyond the end, or LAST_PDU (`is_last`) is set before the end, or not set at the end.
    pub const fn accept(&mut self, offset: u32, len: u32, is_last: bool) -> Result<bool, Fatal> {
        if offset != self.next || len > self.end - self.next {
            return Err(Fatal::of(FatalStatus::DATA_OUT_OF_RANGE));
        }
        let is_complete = len == self.end - self.next;
        if is_last != is_complete {
            return Err(Fatal::field(field::FLAGS));
        }
        self.next += len;
        Ok(is_complete)
    }

    /// The bytes that have not arrived.
    pub const fn missing(&self) -> u32 {
        self.end - self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_accepted_in_order_up_to_the_end() {
        let mut span = Span::new(4096, 8192);
        assert_eq!(span.accept(4096, 4096, false), Ok(false));
        let out_of_range = Err(Fatal::of(FatalStatus::DATA_OUT_OF_RANGE));
        for (offset, len) in [(4096, 4096), (8196, 4), (0, 4096), (8192, 4100), (8192, u32::MAX)] {
            assert_eq!(span.accept(offset, len, false), out_of_range, "{offset} {len}");
        }
        let flags = Err(Fatal::field(1));
        assert_eq!((span.accept(8192, 4096, false), span.accept(8192, 4092, true)), (flags, flags));
        assert_eq!((span.missing(), span.accept(8192, 4096, true)), (4096, Ok(true)));
        assert_eq!((span.missing(), span.accept(12288, 4, true)), (0, out_of_range));
    }
}
