//! The malloc disk: a disk in memory, which is zeroed at its creation and lost at the end of the process. Control context; its
//! channels run in reactor context.
//!
//! A request is executed when its channel is polled, so the work of a poll is bounded for any number of submitted requests.
//! Pages that were never written, or were unmapped or zeroed since, take no memory.
#![forbid(unsafe_code)]

use aryk_bdev::{
    Bdev, Blocks, Bytes, Channel, Completion, Device, Env, Geometry, Identity, Io, Limits, Op, OpSet,
    OpenError, Status, Tag,
};
use aryk_dma::{MapError, Mapping};
use aryk_reactor::{Cx, RootId};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes that one poll copies, and the maximum of one read or write: about 40 µs.
const COPY_MAX: Bytes = Bytes(256 << 10);

/// The cost of copying a byte divided by the cost of freeing one.
const DISCARD_DISCOUNT: u64 = 4;

/// Configuration of a malloc disk.
#[derive(Clone, Debug)]
pub struct Config {
    /// Names and UUID of the disk.
    pub identity: Identity,
    /// Bytes in a block.
    pub block_size: u32,
    /// Bytes in a physical block that the disk reports: `block_size`, or a larger power of two.
    pub physical_block_size: u32,
    /// The number of blocks.
    pub blocks: Blocks,
    /// A stripe, which front-ends report to guests; no blocks if there is none.
    pub optimal_io_blocks: Blocks,
}

/// An error of creating a malloc disk.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The name is taken, or the geometry is not valid.
    #[error(transparent)]
    Registry(#[from] aryk_bdev::Error),
    /// The memory cannot be mapped.
    #[error("cannot allocate {blocks} blocks of {block_size} bytes: {error}")]
    Memory {
        /// The number of blocks.
        blocks: Blocks,
        /// Bytes in a block.
        block_size: u32,
        /// The kernel's error.
        error: MapError,
    },
}

/// Creates a malloc disk.
///
/// # Errors
/// [`Error`].
pub fn create(env: &Env, config: Config) -> Result<Arc<Bdev>, Error> {
    let Config { identity, block_size, physical_block_size, blocks, optimal_io_blocks } = config;
    let len = blocks.checked_to_bytes(block_size).unwrap_or(Bytes::MAX);
    let memory = |error| Error::Memory { blocks, block_size, error };
    let store = Arc::new(Mapping::anonymous(len.0).map_err(memory)?);
    let geometry = Geometry { block_size, physical_block_size, blocks, optimal_io_blocks };
    Ok(env.registry().register(identity, Arc::new(Malloc { geometry, store }))?)
}

struct Malloc {
    geometry: Geometry,
    store: Arc<Mapping>,
}

impl Device for Malloc {
    fn product(&self) -> &'static str {
        "Malloc disk"
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn limits(&self) -> Limits {
        let copied = COPY_MAX.whole_blocks(self.geometry.block_size).max(Blocks(1));
        let discarded = copied * DISCARD_DISCOUNT;
        Limits {
            transfer_blocks: copied,
            unmap_blocks: discarded,
            write_zeroes_blocks: discarded,
            ..Limits::default()
        }
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let (store, block_size) = (Arc::clone(&self.store), self.geometry.block_size);
        Ok(Box::new(MallocChannel { root, store, block_size, submitted: VecDeque::new() }))
    }
}

struct MallocChannel {
    root: RootId,
    store: Arc<Mapping>,
    block_size: u32,
    submitted: VecDeque<Io>,
}

impl Channel for MallocChannel {
    #[inline]
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.submitted.push_back(*io);
        cx.wake(self.root);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        let mut budget = COPY_MAX;
        while let Some(io) = self.submitted.pop_front() {
            if let Some(next) = self.submitted.front() {
                self.prefetch(next);
            }
            let cost = self.execute(&io);
            out.push(Completion { tag: io.tag, status: Status::Ok });
            if cost >= budget {
                break;
            }
            budget -= cost;
        }
        if !self.submitted.is_empty() {
            cx.wake(self.root);
        }
    }
}

impl MallocChannel {
    /// Prefetches the memory that a request copies from, while the request before it is copied.
    #[inline]
    fn prefetch(&self, io: &Io) {
        match io.op {
            Op::Read => self.store.prefetch(io.lba.to_bytes(self.block_size).0, io.data.len()),
            Op::Write => io.data.prefetch(),
            _ => {}
        }
    }

    /// Executes a request and returns its cost, in bytes copied.
    #[inline]
    fn execute(&self, io: &Io) -> Bytes {
        let (Bytes(offset), len) = (io.lba.to_bytes(self.block_size), io.blocks.to_bytes(self.block_size));
        match io.op {
            Op::Read => io.data.load_from(&self.store, offset),
            Op::Write => io.data.store_to(&self.store, offset),
            Op::Flush => {}
            Op::Unmap | Op::WriteZeroes => {
                self.store.zero(offset, len.0);
                return len / DISCARD_DISCOUNT;
            }
            Op::Compare | Op::CompareAndWrite | Op::Copy => {
                unreachable!("the block layer builds it from other operations")
            }
        }
        len
    }
}
