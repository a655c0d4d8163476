//! The null disk: writes are discarded, and reads leave their memory unchanged, so that measurements show the cost of
//! everything else. Control context; its channels run in reactor context.
//!
//! Reads return neither zeroes nor data that was written. A client that must not see the former content of its own memory
//! needs another module.
#![forbid(unsafe_code)]

use aryk_bdev::{
    Bdev, Blocks, Channel, Completion, Device, Env, Error, Geometry, Identity, Io, Limits, OpSet, OpenError,
    Outbox, Registry, Status, Tag,
};
use aryk_reactor::{Cx, RootId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Configuration of a null disk.
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
}

/// Creates a null disk.
///
/// # Errors
/// As [`aryk_bdev::Registry::register`].
pub fn create(env: &Env, config: Config) -> Result<Arc<Bdev>, Error> {
    let Config { identity, block_size, physical_block_size, blocks } = config;
    let shape = Geometry { physical_block_size, ..Geometry::plain(block_size, blocks) };
    env.registry().register(identity, Arc::new(Null { shape, blocks: AtomicU64::new(blocks.0) }))
}

/// Resizes the disk `name` to `blocks` blocks.
///
/// # Errors
/// [`Error::NotFound`] if `name` is not a null disk, [`Error::TooLarge`].
pub fn resize(registry: &Registry, name: &str, blocks: Blocks) -> Result<(), Error> {
    let bdev = registry.find(name)?;
    let null = bdev.device_as::<Null>().ok_or_else(|| Error::NotFound(name.to_owned()))?;
    registry.resized(name, blocks)?;
    null.blocks.store(blocks.0, Ordering::Relaxed);
    Ok(())
}

struct Null {
    shape: Geometry,
    /// The size in [`Blocks`].
    blocks: AtomicU64,
}

impl Device for Null {
    fn product(&self) -> &'static str {
        "Null disk"
    }

    fn geometry(&self) -> Geometry {
        Geometry { blocks: Blocks(self.blocks.load(Ordering::Relaxed)), ..self.shape }
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
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        self.0.push(io.tag, Status::Ok, cx);
    }

    fn abort(&mut self, _: Tag, _: &mut Cx) {}

    #[inline]
    fn poll(&mut self, _: &mut Cx, out: &mut Vec<Completion>) {
        self.0.take(out);
    }
}
