//! A module: read-only disks whose blocks hold a pattern, the number of each block over and over. Such a disk is as large
//! as you like and takes no memory.
#![forbid(unsafe_code)]

use aryk_bdev::{
    Bdev, Channel, Completion, Device, Env, Error, Geometry, Identity, Io, Limits, Op, OpSet, OpenError,
    Status, Tag,
};
use aryk_reactor::{Cx, RootId};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes in a block.
pub const BLOCK_SIZE: u32 = 4096;
/// Blocks that one poll of a channel fills at most: a core must not stay long with one disk.
const BLOCKS_PER_POLL: u64 = 64;

/// What a disk is to be.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its name, aliases and UUID.
    pub identity: Identity,
    /// Its size in blocks.
    pub blocks: u64,
}

/// Makes a disk.
///
/// # Errors
/// As `Registry::register`: its name is taken.
pub fn create(env: &Env, config: Config) -> Result<Arc<Bdev>, Error> {
    env.registry().register(config.identity, Arc::new(Pattern { blocks: config.blocks }))
}

/// What block `lba` of each disk holds.
pub fn block(lba: u64) -> [u8; BLOCK_SIZE as usize] {
    let mut block = [0; BLOCK_SIZE as usize];
    block.as_chunks_mut().0.fill(lba.to_le_bytes());
    block
}

/// A disk, shared by all that use it.
struct Pattern {
    blocks: u64,
}

impl Device for Pattern {
    fn product(&self) -> &'static str {
        "Pattern disk"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(BLOCK_SIZE, self.blocks)
    }

    fn limits(&self) -> Limits {
        // The block layer splits what is longer.
        Limits { transfer_blocks: BLOCKS_PER_POLL as u32, ..Limits::default() }
    }

    fn ops(&self) -> OpSet {
        OpSet::of(&[Op::Read])
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(PatternChannel { root, submitted: VecDeque::new() }))
    }
}

/// What one queue has of a disk: it belongs to that queue and its core alone, so nothing in it is locked.
struct PatternChannel {
    root: RootId,
    submitted: VecDeque<Io>,
}

impl Channel for PatternChannel {
    fn submit(&mut self, io: Io, cx: &mut Cx) {
        self.submitted.push_back(io);
        // Polls the queue, and so this channel, in this turn of the core or the next.
        cx.wake(self.root);
    }

    /// Requests complete at once: there is nothing to abort.
    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        let mut filled = 0;
        while filled < BLOCKS_PER_POLL
            && let Some(io) = self.submitted.pop_front()
        {
            // The block layer has checked the range, and lets nothing but reads through.
            for n in 0..io.blocks {
                io.data.write(n as u32 * BLOCK_SIZE, &block(io.lba + n));
            }
            filled += io.blocks;
            out.push(Completion { tag: io.tag, status: Status::Ok });
        }
        if !self.submitted.is_empty() {
            cx.wake(self.root);
        }
    }
}
