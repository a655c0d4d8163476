//! One attempt to start a request: its command, and where the controller finds its data. Reactor context.

use super::{Live, Opened, Request, Start};
use crate::RANGES_MAX;
use crate::pool::Pages;
use aryk_bdev::{Io, Op, Status};
use aryk_nvme::data::Piece;
use aryk_nvme::io::{BadRequest, CopyRange, DeallocateRange, Range};
use aryk_nvme::queue::SubmitError;
use aryk_slots::Key;
use zerocopy::IntoBytes;

/// The status of a request that the driver refuses.
pub(crate) const fn refused(error: BadRequest) -> Status {
    match error {
        BadRequest::OutOfRange { .. } => Status::OutOfRange,
        BadRequest::Unsupported(_) => Status::Unsupported,
        // The limits have just changed.
        BadRequest::TooManyBlocks { .. } | BadRequest::Ranges { .. } => Status::Invalid,
    }
}

/// One attempt to start a request.
pub(super) struct Attempt<'a> {
    pub(super) request: &'a mut Request,
    pub(super) channel: &'a mut Opened,
    pub(super) live: &'a mut Live,
    pub(super) key: Key,
    pub(super) now: u64,
    pub(super) pieces: &'a mut [Vec<Piece>; 2],
    pub(super) may_take_pages: bool,
    pub(super) copied: &'a mut u64,
}

impl Attempt<'_> {
    /// Tries again with what the controller says of the namespace now: it may have grown.
    #[cold]
    pub(super) fn run_again(&mut self) -> Result<Start, BadRequest> {
        self.channel.commands = self.channel.namespace.commands();
        self.run()
    }

    #[inline]
    pub(super) fn run(&mut self) -> Result<Start, BadRequest> {
        let Io { op, lba, blocks, fua, may_unmap, .. } = self.request.io;
        let (lba, blocks) = (lba.0, blocks.0);
        let fua = fua && self.live.has_write_cache;
        let commands = &self.channel.commands;
        let entry = match op {
            Op::Read => commands.read(lba, blocks)?,
            Op::Write => commands.write(lba, blocks, fua)?,
            Op::Compare => commands.compare(lba, blocks)?,
            Op::Flush if !self.live.has_write_cache => return Ok(Start::Ended(Status::Ok)),
            Op::Flush => return Ok(self.submit(commands.flush(), 0)),
            Op::WriteZeroes => {
                let entry = commands.write_zeroes(lba, blocks, may_unmap, fua)?;
                return Ok(self.submit(entry, 0));
            }
            Op::Unmap | Op::Copy => return self.run_ranges(fua),
            Op::CompareAndWrite => return self.run_fused(fua),
        };
        let data = self.request.io.data;
        if self.find_pieces(0, &data) {
            match self.live.pair.submit(entry, &self.pieces[0], self.key.raw(), self.now) {
                Err(SubmitError::Unfit(_)) => self.count_bounced(),
                result => return Ok(started(result)),
            }
        }
        if !self.take_pages(data.len()) {
            return Ok(Start::NoPages);
        }
        if op != Op::Read {
            self.live.pool.fill(&self.request.pages, 0, &data);
            *self.copied += u64::from(data.len());
        }
        Ok(self.submit(entry, data.len()))
    }

    /// Submits a command whose data is the first `len` bytes of the bounce buffer.
    fn submit(&mut self, entry: aryk_nvme::spec::entry::SubmissionEntry, len: u32) -> Start {
        let pieces = &mut self.pieces[0];
        pieces.clear();
        if len > 0 {
            self.live.pool.pieces(&self.request.pages, 0, len, pieces);
        }
        started(self.live.pair.submit(entry, pieces, self.key.raw(), self.now))
    }

    /// Finds where the controller accesses the data; `false` if it cannot.
    #[inline(always)]
    fn find_pieces(&mut self, list: usize, data: &aryk_dma::Sgl) -> bool {
        let Some(lookup) = &mut self.channel.lookup else { return false };
        let pieces = &mut self.pieces[list];
        pieces.clear();
        for piece in data.pieces() {
            let Some(place) = lookup.translate(&piece) else { return false };
            pieces.push(Piece { iova: place.value + place.offset, len: piece.len() as u32 });
        }
        true
    }

    /// Counts the pieces of a request whose memory is registered, but cannot be addressed by a command.
    #[cold]
    fn count_bounced(&self) {
        if let Some(lookup) = &self.channel.lookup {
            lookup.count_bounced(self.request.io.data.pieces().count());
        }
    }

    /// Takes a bounce buffer for `len` bytes; `false` if there is none now.
    fn take_pages(&mut self, len: u32) -> bool {
        debug_assert!(self.request.pages.is_empty(), "a request that waits has no buffer");
        match self.may_take_pages.then(|| self.live.pool.take(len)).flatten() {
            Some(pages) => self.request.pages = pages,
            None => return false,
        }
        true
    }

    /// Dataset Management and Copy: their data is a list of ranges.
    fn run_ranges(&mut self, fua: bool) -> Result<Start, BadRequest> {
        let Io { op, lba, blocks, source, .. } = self.request.io;
        let commands = self.channel.commands;
        let (first, each, entry_len) = match op {
            Op::Unmap => (lba.0, commands.deallocate_max().1.into(), size_of::<DeallocateRange>() as u32),
            _ => (source.0, u64::from(commands.copy_max().1), size_of::<CopyRange>() as u32),
        };
        let mut ranges = [Range { slba: 0, blocks: 0 }; RANGES_MAX];
        let Some(count) = split(first, blocks.0, each, &mut ranges) else {
            return Ok(Start::Ended(Status::Invalid));
        };
        let ranges = &ranges[..count];
        let len = count as u32 * entry_len;
        if !self.take_pages(len) {
            return Ok(Start::NoPages);
        }
        let (pool, pages) = (&self.live.pool, &self.request.pages);
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            pool.write(pages, at, bytes);
            at += entry_len;
        };
        let entry = match op {
            Op::Unmap => commands.deallocate(ranges, |range| put(range.as_bytes())),
            _ => commands.copy(ranges, lba.0, fua, |range| put(range.as_bytes())),
        };
        match entry {
            Ok(entry) => Ok(self.submit(entry, len)),
            Err(error) => {
                self.live.pool.put(std::mem::replace(&mut self.request.pages, Pages::NONE));
                Err(error)
            }
        }
    }

    /// A fused compare and write: the first half of the data is compared, the second written.
    fn run_fused(&mut self, fua: bool) -> Result<Start, BadRequest> {
        let Io { lba, blocks, data, .. } = self.request.io;
        let entries = self.channel.commands.compare_and_write(lba.0, blocks.0, fua)?;
        let half = data.len() / 2;
        let halves = [data.slice(0, half), data.slice(half, half)];
        let tokens = [self.key.raw(); 2];
        if self.find_pieces(0, &halves[0]) && self.find_pieces(1, &halves[1]) {
            let lists = [&self.pieces[0][..], &self.pieces[1][..]];
            match self.live.pair.submit_fused(entries, lists, tokens, self.now) {
                Err(SubmitError::Unfit(_)) => self.count_bounced(),
                result => return Ok(started(result)),
            }
        }
        // The second half begins on a page of its own.
        let start = half.next_multiple_of(self.live.pool.page() as u32);
        if !self.take_pages(start + half) {
            return Ok(Start::NoPages);
        }
        *self.copied += u64::from(data.len());
        let (pool, pages) = (&self.live.pool, &self.request.pages);
        for (list, (start, data)) in [0, start].into_iter().zip(&halves).enumerate() {
            pool.fill(pages, start, data);
            self.pieces[list].clear();
            pool.pieces(pages, start, half, &mut self.pieces[list]);
        }
        let lists = [&self.pieces[0][..], &self.pieces[1][..]];
        Ok(started(self.live.pair.submit_fused(entries, lists, tokens, self.now)))
    }
}

/// Splits blocks into ranges of at most `each` blocks, and returns the number of ranges; `None` if they are too many, because the
/// limits have just changed.
fn split(first: u64, blocks: u64, each: u64, ranges: &mut [Range; RANGES_MAX]) -> Option<usize> {
    let (mut slba, mut left, mut count) = (first, blocks, 0);
    while left > 0 && count < RANGES_MAX {
        let part = left.min(each.max(1));
        ranges[count] = Range { slba, blocks: part as u32 };
        (slba, left, count) = (slba + part, left - part, count + 1);
    }
    (left == 0).then_some(count)
}

fn started<T>(result: Result<T, SubmitError>) -> Start {
    match result {
        Ok(_) => Start::AtController,
        // The caller has checked both.
        Err(SubmitError::Full | SubmitError::Stopped) => unreachable!("the pair runs and has room"),
        // Bounce buffers are aligned pages, and a request is no longer than a list.
        Err(SubmitError::Unfit(_)) => Start::Ended(Status::Medium),
    }
}
