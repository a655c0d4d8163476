//! A disk that does nothing: writes go nowhere, and reads leave the memory that they are to fill as it was, for what is measured
//! with it is everything else. Control context; its channels in reactor context.
//!
//! Reads give no zeroes, and no data that was written: whoever must not see what its own memory held before is served by
//! another module.
#![forbid(unsafe_code)]

use aryk_bdev::{
    Bdev, Channel, Completion, Device, Error, Geometry, Identity, Io, Limits, OpSet, OpenError, Outbox,
    Registry, Status, Tag,
};
use aryk_reactor::{Cx, RootId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What it is to be.
#[derive(Clone, Debug)]
pub struct Config {
    /// By what it is found.
    pub identity: Identity,
    /// Bytes in a block.
    pub block_size: u32,
    /// Bytes in a block of the store that it plays: `block_size`, or a larger power of two.
    pub physical_block_size: u32,
    /// Blocks.
    pub blocks: u64,
}

/// Makes one.
///
/// # Errors
/// As [`Registry::register`].
pub fn create(registry: &Registry, config: Config) -> Result<Arc<Bdev>, Error> {
    let Config { identity, block_size, physical_block_size, blocks } = config;
    let shape = Geometry { physical_block_size, ..Geometry::plain(block_size, blocks) };
    registry.register(identity, Arc::new(Null { shape, blocks: AtomicU64::new(blocks) }))
}

/// Gives the disk `name` another size.
///
/// # Errors
/// [`Error::NotFound`] if there is no such disk of this module.
pub fn resize(registry: &Registry, name: &str, blocks: u64) -> Result<(), Error> {
    let bdev = registry.find(name)?;
    let null = bdev.device_as::<Null>().ok_or_else(|| Error::NotFound(name.to_owned()))?;
    null.blocks.store(blocks, Ordering::Relaxed);
    registry.resized(name, blocks)
}

struct Null {
    shape: Geometry,
    blocks: AtomicU64,
}

impl Device for Null {
    fn product(&self) -> &'static str {
        "Null disk"
    }

    fn geometry(&self) -> Geometry {
        Geometry { blocks: self.blocks.load(Ordering::Relaxed), ..self.shape }
    }

    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn open_channel(&self, root: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(NullChannel(Outbox::new(root))))
    }
}

struct NullChannel(Outbox);

impl Channel for NullChannel {
    #[inline]
    fn submit(&mut self, io: Io, cx: &mut Cx) {
        self.0.push(io.tag, Status::Ok, cx);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    #[inline]
    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        self.0.take(out);
    }
}
