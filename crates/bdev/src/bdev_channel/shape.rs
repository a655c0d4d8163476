//! What a channel may be asked for, and how a request is cut into pieces that its device takes. Pure; reactor context.

use super::request::Request;
use crate::{Blocks, Bytes, Device, Io, Lba, Limits, Op, OpSet, Status};
use aryk_dma::Sgl;

/// Bytes of zeroes to write at one time where a device has no write-zeroes, unless one block has more.
const ZEROES: Bytes = Bytes(64 * 1024);

/// A disk's properties as its channels go by them.
pub(super) struct Shape {
    pub limits: Limits,
    pub block_size: u32,
    block_shift: u32,
    /// Blocks of zeroes to write at one time.
    pub zero_blocks: Blocks,
    /// Operations of the device.
    native: OpSet,
    /// Operations that the device does or that are made of its reads and writes, without changes if this opening may not write.
    permitted: OpSet,
    /// Reads and writes, as far as they are permitted.
    plain: OpSet,
    writable: bool,
}

/// The next piece of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Piece {
    /// So many blocks of the request as it is.
    Blocks(Blocks),
    /// So many blocks of a write-zeroes, as a write of zeroes.
    Zeroes(Blocks),
}

/// How a compound request is carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Route {
    /// By the device.
    Native,
    /// As reads and writes of the channel.
    Emulated,
    /// Not at all: the device does not do it, or not in this size, and reads and writes would not keep other hosts away.
    Refused,
}

impl Shape {
    /// # Panics
    /// If the device's limits let nothing through.
    pub fn new(device: &dyn Device, writable: bool) -> Self {
        let (limits, native, block_size) = (device.limits(), device.ops(), device.geometry().block_size);
        assert!(limits.depth > 0 && limits.segments > 0, "a device takes some request: {limits:?}");
        let least = limits.transfer_blocks.min(limits.unmap_blocks).min(limits.write_zeroes_blocks);
        assert!(least > Blocks::ZERO, "a device takes requests of some block: {limits:?}");
        assert!(block_size.is_power_of_two(), "a disk of blocks of {block_size} bytes is not registered");
        let offered = offered(native, limits.is_shared);
        let permitted = if writable { offered } else { offered.without_changes() };
        let plain = [Op::Read, Op::Write].into_iter().filter(|&op| permitted.contains(op));
        Self {
            limits,
            block_size,
            block_shift: block_size.trailing_zeros(),
            zero_blocks: ZEROES.whole_blocks(block_size).max(Blocks(1)),
            native,
            permitted,
            plain: plain.fold(OpSet::of(&[]), OpSet::with),
            writable,
        }
    }

    /// Checks a request to a disk of `disk_blocks` blocks.
    ///
    /// # Errors
    /// The status to refuse it with.
    #[inline]
    pub fn check(&self, io: &Io, disk_blocks: Blocks) -> Result<(), Status> {
        if !self.permitted.contains(io.op) {
            return Err(self.why_not_permitted(io.op));
        }
        if io.op == Op::Flush {
            return if io.blocks == Blocks::ZERO && io.data.is_empty() {
                Ok(())
            } else {
                Err(Status::Invalid)
            };
        }
        if io.blocks == Blocks::ZERO {
            return Err(Status::Invalid);
        }
        if !is_within(io.lba, io.blocks, disk_blocks) {
            return Err(Status::OutOfRange);
        }
        let (data_blocks, is_whole) = self.blocks_in(io.data);
        let expected = match io.op {
            Op::Read | Op::Write => io.blocks,
            Op::Unmap | Op::WriteZeroes => Blocks::ZERO,
            Op::Compare | Op::CompareAndWrite | Op::Copy | Op::Flush => {
                return self.check_compound(&Io { ..*io }, disk_blocks);
            }
        };
        if data_blocks == expected && is_whole { Ok(()) } else { Err(Status::Invalid) }
    }

    /// The bytes of a valid read or write that the device takes in one piece; `None` for any other request: ask
    /// [`Shape::check`] what it is.
    #[inline(always)]
    pub fn bytes_if_plain(&self, io: &Io, disk_blocks: Blocks) -> Option<Bytes> {
        let limits = &self.limits;
        let is_plain = self.plain.contains(io.op)
            && (Blocks(1)..=limits.transfer_blocks).contains(&io.blocks)
            && is_within(io.lba, io.blocks, disk_blocks)
            && io.data.segments() <= limits.segments
            && (limits.boundary_blocks == Blocks::ZERO
                || io.blocks <= to_boundary(io.lba, limits.boundary_blocks));
        // Exact if the blocks are on the disk.
        let bytes = Bytes(io.blocks.0 << self.block_shift);
        (is_plain && bytes == Bytes(io.data.len().into())).then_some(bytes)
    }

    #[cold]
    const fn why_not_permitted(&self, op: Op) -> Status {
        if op.is_change() && !self.writable { Status::ReadOnly } else { Status::Unsupported }
    }

    #[cold]
    fn check_compound(&self, io: &Io, disk_blocks: Blocks) -> Result<(), Status> {
        if io.op == Op::Copy && !is_within(io.source, io.blocks, disk_blocks) {
            return Err(Status::OutOfRange);
        }
        let expected = match io.op {
            Op::Compare => Some(io.blocks),
            Op::CompareAndWrite => io.blocks.0.checked_mul(2).map(Blocks),
            _ => Some(Blocks::ZERO),
        };
        let (data_blocks, is_whole) = self.blocks_in(io.data);
        if expected != Some(data_blocks) || !is_whole {
            return Err(Status::Invalid);
        }
        match self.route(io) {
            Route::Native | Route::Emulated => Ok(()),
            Route::Refused => Err(Status::Unsupported),
        }
    }

    /// How many blocks `data` has, and whether they are all of it.
    #[inline]
    const fn blocks_in(&self, data: Sgl) -> (Blocks, bool) {
        let bytes = data.len();
        (Blocks((bytes >> self.block_shift) as u64), bytes & (self.block_size - 1) == 0)
    }

    /// The bytes of a request for `blocks` blocks, which are on the disk.
    #[inline]
    pub const fn bytes_of(&self, blocks: Blocks) -> Bytes {
        blocks.to_bytes(self.block_size)
    }

    /// The blocks of a request of `bytes` bytes.
    #[inline]
    pub const fn blocks_of(&self, bytes: Bytes) -> Blocks {
        Blocks(bytes.0 >> self.block_shift)
    }

    /// The bytes of data of a piece: its request has more, and no request has 4 GiB.
    #[inline]
    pub const fn data_len(&self, blocks: Blocks) -> u32 {
        debug_assert!(blocks.0 << self.block_shift <= u32::MAX as u64, "a piece has less than 4 GiB of data");
        (blocks.0 << self.block_shift) as u32
    }

    /// How a compound request is carried out.
    pub fn route(&self, io: &Io) -> Route {
        let (limit, is_change) = match io.op {
            Op::Compare => (self.limits.compare_blocks, false),
            Op::CompareAndWrite => (self.limits.compare_and_write_blocks, true),
            Op::Copy => (self.limits.copy_blocks, true),
            Op::Read | Op::Write | Op::Flush | Op::Unmap | Op::WriteZeroes => return Route::Native,
        };
        let crosses = self.limits.boundary_blocks > Blocks::ZERO
            && io.op != Op::Copy
            && io.blocks > to_boundary(io.lba, self.limits.boundary_blocks);
        // Devices leave open what they read of blocks that the same request writes.
        let overlaps = io.op == Op::Copy && io.lba.0.abs_diff(io.source.0) < io.blocks.0;
        if self.native.contains(io.op)
            && io.blocks <= limit
            && !overlaps
            && io.data.segments() <= self.limits.segments
            && !crosses
        {
            Route::Native
        } else if is_change && self.limits.is_shared {
            Route::Refused
        } else {
            Route::Emulated
        }
    }

    /// Whether the device takes a request as it is, in one piece. An emulated compound request it does not take.
    #[inline]
    pub fn is_one_piece(&self, io: &Io) -> bool {
        let limits = &self.limits;
        match io.op {
            Op::Read | Op::Write => {
                io.blocks <= limits.transfer_blocks
                    && io.data.segments() <= limits.segments
                    && (limits.boundary_blocks == Blocks::ZERO
                        || io.blocks <= to_boundary(io.lba, limits.boundary_blocks))
            }
            Op::Flush => true,
            Op::Unmap => io.blocks <= limits.unmap_blocks,
            Op::WriteZeroes => {
                self.native.contains(Op::WriteZeroes) && io.blocks <= limits.write_zeroes_blocks
            }
            Op::Compare | Op::CompareAndWrite | Op::Copy => self.route(&Io { ..*io }) == Route::Native,
        }
    }

    /// The next piece of what is left of a request.
    ///
    /// # Errors
    /// The status that it fails with: no whole block of it fits the device's limits, for its segments are small; or the
    /// device's properties have changed, and it no longer does this.
    #[inline]
    pub fn next_piece(&self, request: &Request) -> Result<Piece, Status> {
        let (limits, blocks) = (&self.limits, request.blocks);
        let piece = match request.op {
            Op::Read | Op::Write => Piece::Blocks(self.transfer_blocks(request).ok_or(Status::Invalid)?),
            Op::Unmap => Piece::Blocks(blocks.min(limits.unmap_blocks)),
            Op::WriteZeroes if self.native.contains(Op::WriteZeroes) => {
                Piece::Blocks(blocks.min(limits.write_zeroes_blocks))
            }
            Op::WriteZeroes => Piece::Zeroes(blocks.min(self.zeroes_at(request.lba))),
            Op::Flush => Piece::Blocks(Blocks::ZERO),
            // The device takes its own compound operations whole.
            Op::Compare | Op::CompareAndWrite | Op::Copy => match self.route(&request.rest()) {
                Route::Native => Piece::Blocks(blocks),
                Route::Emulated | Route::Refused => return Err(Status::Unsupported),
            },
        };
        Ok(piece)
    }

    /// How many blocks of what is left of a read or write go into the next piece.
    fn transfer_blocks(&self, request: &Request) -> Option<Blocks> {
        let limits = &self.limits;
        let mut blocks = request.blocks.min(limits.transfer_blocks);
        if limits.boundary_blocks > Blocks::ZERO {
            blocks = blocks.min(to_boundary(request.lba, limits.boundary_blocks));
        }
        if request.data.segments() <= limits.segments {
            return Some(blocks);
        }
        let pieces = request.data.pieces().take(limits.segments as usize);
        let fits: Bytes = pieces.map(|piece| Bytes(piece.len() as u64)).sum();
        blocks = blocks.min(self.blocks_of(fits));
        (blocks > Blocks::ZERO).then_some(blocks)
    }

    /// How many blocks of zeroes to write at `lba` at one time.
    fn zeroes_at(&self, lba: Lba) -> Blocks {
        let blocks = self.zero_blocks.min(self.limits.transfer_blocks);
        match self.limits.boundary_blocks {
            Blocks::ZERO => blocks,
            boundary => blocks.min(to_boundary(lba, boundary)),
        }
    }
}

/// The operations that may be asked for of a device that does `native`.
const fn offered(native: OpSet, is_shared: bool) -> OpSet {
    let (reads, writes) = (native.contains(Op::Read), native.contains(Op::Write));
    let mut offered = native;
    if writes {
        offered = offered.with(Op::WriteZeroes);
    }
    if reads {
        offered = offered.with(Op::Compare);
    }
    // The fences that keep other channels away do not keep other hosts away.
    if reads && writes && !is_shared {
        offered = offered.with(Op::CompareAndWrite).with(Op::Copy);
    }
    offered
}

#[inline]
fn is_within(lba: Lba, blocks: Blocks, disk_blocks: Blocks) -> bool {
    lba.checked_add(blocks).is_some_and(|end| end <= Lba::ZERO + disk_blocks)
}

#[inline]
fn to_boundary(lba: Lba, boundary: Blocks) -> Blocks {
    boundary - lba % boundary
}

#[cfg(test)]
mod tests;
