//! A disk cut into equal parts, each of which is a disk. Control context; their channels in reactor context.
//!
//! The parts share the disk: it is open for one writer, which is all of them, until the last has gone. A part has its size
//! also if the disk grows; if the disk shrinks, so do the parts that reach beyond its end, until it grows again.
#![forbid(unsafe_code)]

use aryk_bdev::{
    Base, Bdev, BdevChannel, BoxFuture, Channel, Completion, Device, Geometry, Identity, Io, Limits, Op,
    OpSet, OpenError, Registry, Tag,
};
use aryk_reactor::{Cx, RootId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// How to cut.
#[derive(Clone, Debug)]
pub struct Config {
    /// The disk.
    pub base: String,
    /// How many parts, at most: no more than there is room for.
    pub count: u32,
    /// Bytes in each, if they are not to be as large as possible.
    pub bytes: Option<u64>,
}

/// Why a disk cannot be cut.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// There is no such disk, or it is in use, or a part's name is taken.
    #[error(transparent)]
    Registry(#[from] aryk_bdev::Error),
    /// The parts would have no blocks, or a part of one, or be none.
    #[error("`{base}`, of {blocks} blocks of {block_size} bytes, cannot be cut like that")]
    Size {
        /// The disk.
        base: String,
        /// Its blocks.
        blocks: u64,
        /// Bytes in each.
        block_size: u32,
    },
}

/// Cuts a disk. Its parts are named after it, with `p0`, `p1` and so on behind, and their UUIDs follow from its own.
///
/// # Errors
/// [`Error`]; then there is no part.
pub async fn create(registry: &Registry, config: Config) -> Result<Vec<Arc<Bdev>>, Error> {
    let bdev = registry.find(&config.base)?;
    let (blocks, count) = cut(&bdev, &config)?;
    let owner = format!("the parts of {}", bdev.name());
    let shared =
        Arc::new(Shared { base: Base::open(registry, bdev.name(), &owner)?, left: AtomicU32::new(count) });
    let mut parts = Vec::new();
    for i in 0..count {
        let mut identity = Identity::named(format!("{}p{i}", bdev.name()));
        let offset = u64::from(i) * blocks;
        identity.uuid = bdev.identity().uuid_of_part(offset, blocks);
        let part = Part { shared: Arc::clone(&shared), offset, blocks, closed: AtomicBool::new(false) };
        match registry.register(identity, Arc::new(part)) {
            Ok(part) => parts.push(part),
            Err(error) => {
                for part in &parts {
                    // Someone who removes it at the same time does it as well.
                    let _ = registry.remove(part.name()).await;
                }
                shared.base.close();
                return Err(error.into());
            }
        }
    }
    Ok(parts)
}

/// The parts of a disk, in order.
pub fn parts(registry: &Registry, base: &Bdev) -> Vec<Arc<Bdev>> {
    let is_part = |b: &Arc<Bdev>| offset_in(b, base).is_some();
    registry.list().into_iter().filter(is_part).collect()
}

/// The block of `base` with which a part of it begins; `None` if it is none.
pub fn offset_in(part: &Bdev, base: &Bdev) -> Option<u64> {
    let part = part.device_as::<Part>()?;
    std::ptr::eq(&raw const **part.shared.base.bdev(), base).then_some(part.offset)
}

/// Blocks of each part, and how many.
fn cut(bdev: &Bdev, config: &Config) -> Result<(u64, u32), Error> {
    let Geometry { block_size, blocks, .. } = bdev.geometry();
    let each = match config.bytes {
        Some(bytes) if !bytes.is_multiple_of(block_size.into()) => 0,
        Some(bytes) => bytes / u64::from(block_size),
        None => blocks.checked_div(config.count.into()).unwrap_or_default(),
    };
    let count = blocks.checked_div(each).unwrap_or_default().min(config.count.into()) as u32;
    if count == 0 {
        return Err(Error::Size { base: bdev.name().to_owned(), blocks, block_size });
    }
    Ok((each, count))
}

/// What the parts of a disk hold of it.
struct Shared {
    base: Base,
    /// Parts that have not gone.
    left: AtomicU32,
}

struct Part {
    shared: Arc<Shared>,
    offset: u64,
    blocks: u64,
    /// It has let go of the disk.
    closed: AtomicBool,
}

impl Part {
    fn base(&self) -> &Arc<Bdev> {
        self.shared.base.bdev()
    }
}

impl Device for Part {
    fn product(&self) -> &'static str {
        "Split Disk"
    }

    fn geometry(&self) -> Geometry {
        let base = self.base().geometry();
        let blocks = self.blocks.min(base.blocks.saturating_sub(self.offset));
        let is_aligned =
            base.optimal_io_blocks > 0 && self.offset.is_multiple_of(base.optimal_io_blocks.into());
        Geometry { blocks, optimal_io_blocks: if is_aligned { base.optimal_io_blocks } else { 0 }, ..base }
    }

    /// The base's, but for its boundary, which lies elsewhere in each part: the base's own channel sees to it.
    fn limits(&self) -> Limits {
        Limits { boundary_blocks: 0, ..self.base().device().limits() }
    }

    fn ops(&self) -> OpSet {
        self.base().device().ops()
    }

    fn is_read_only(&self) -> bool {
        self.base().device().is_read_only()
    }

    fn bases(&self) -> Vec<Arc<Bdev>> {
        vec![Arc::clone(self.base())]
    }

    fn base_resized(&self) -> Option<u64> {
        Some(self.geometry().blocks)
    }

    /// The last part lets go of the disk.
    fn close(&self) -> BoxFuture<'_, ()> {
        let is_first_time = !self.closed.swap(true, Ordering::AcqRel);
        if is_first_time && self.shared.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.base.close();
        }
        Box::pin(std::future::ready(()))
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Ok(Box::new(PartChannel { base: self.shared.base.open_channel(root, cx)?, offset: self.offset }))
    }
}

struct PartChannel {
    base: BdevChannel,
    offset: u64,
}

impl Channel for PartChannel {
    #[inline]
    fn submit(&mut self, io: Io, cx: &mut Cx) {
        let shift = |lba: u64| lba + self.offset;
        let lba = if io.op == Op::Flush { io.lba } else { shift(io.lba) };
        let source = if io.op == Op::Copy { shift(io.source) } else { 0 };
        self.base.submit(Io { lba, source, ..io }, cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        self.base.abort(tag, cx);
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        self.base.poll(cx, out);
    }
}
