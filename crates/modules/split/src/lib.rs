//! Split disks: a disk is divided into equal parts, each of which is a disk. Control context; their channels run in reactor
//! context.
//!
//! All parts share one exclusive open of the disk, until the last part is removed. A part keeps its size if the disk grows. If
//! the disk shrinks, the parts that extend beyond its end shrink too, until it grows again.
#![forbid(unsafe_code)]

use aryk_bdev::{
    Base, Bdev, BdevChannel, Blocks, BoxFuture, Bytes, Channel, Completion, Device, Env, Geometry, Identity,
    Io, Lba, Limits, Op, OpSet, OpenError, Registry, Tag,
};
use aryk_reactor::{Cx, RootId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// How to split a disk.
#[derive(Clone, Debug)]
pub struct Config {
    /// The disk to split.
    pub base: String,
    /// The maximum number of parts. There may be fewer, as many as fit on the disk.
    pub count: u32,
    /// Size of each part in bytes; `None` for the largest size that fits.
    pub bytes: Option<Bytes>,
}

/// An error of splitting a disk.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The disk does not exist or is in use, or the name of a part is taken.
    #[error(transparent)]
    Registry(#[from] aryk_bdev::Error),
    /// The parts would have no blocks or an incomplete one, or there would be no part.
    #[error(
        "cannot split `{base}` ({blocks} blocks of {block_size} bytes) into parts of this number and size"
    )]
    Size {
        /// The disk.
        base: String,
        /// The number of its blocks.
        blocks: Blocks,
        /// Bytes in each.
        block_size: u32,
    },
}

/// Splits a disk. The name of each part is the disk's name followed by `p0`, `p1` and so on; its UUID is derived from the
/// disk's UUID.
///
/// # Errors
/// [`Error`]; then no part is left.
pub async fn create(env: &Env, config: Config) -> Result<Vec<Arc<Bdev>>, Error> {
    let bdev = env.registry().find(&config.base)?;
    let (blocks, count) = cut(&bdev, &config)?;
    let owner = format!("the parts of {}", bdev.name());
    let shared = Arc::new(Shared {
        base: Base::open(env.registry(), bdev.name(), &owner)?,
        left: AtomicU32::new(count),
    });
    let mut parts = Vec::new();
    for i in 0..count {
        let mut identity = Identity::named(format!("{}p{i}", bdev.name()));
        let offset = blocks * u64::from(i);
        identity.uuid = bdev.identity().uuid_of_part(offset, blocks);
        let part = Part { shared: Arc::clone(&shared), offset, blocks, closed: AtomicBool::new(false) };
        match env.registry().register(identity, Arc::new(part)) {
            Ok(part) => parts.push(part),
            Err(error) => {
                for part in &parts {
                    // An error means that another caller is removing the part.
                    let _ = env.registry().remove(part.name()).await;
                }
                shared.base.close();
                return Err(error.into());
            }
        }
    }
    Ok(parts)
}

/// The parts of a disk, in the order of their creation.
pub fn parts(registry: &Registry, base: &Bdev) -> Vec<Arc<Bdev>> {
    let is_part = |b: &Arc<Bdev>| offset_in(b, base).is_some();
    registry.list().into_iter().filter(is_part).collect()
}

/// The blocks of `base` before `part`; `None` if `part` is not a part of `base`.
pub fn offset_in(part: &Bdev, base: &Bdev) -> Option<Blocks> {
    let part = part.device_as::<Part>()?;
    std::ptr::eq(&raw const **part.shared.base.bdev(), base).then_some(part.offset)
}

/// The number of blocks of each part, and the number of parts.
fn cut(bdev: &Bdev, config: &Config) -> Result<(Blocks, u32), Error> {
    let Geometry { block_size, blocks, .. } = bdev.geometry();
    let each = match config.bytes {
        Some(bytes) => bytes.to_blocks(block_size).unwrap_or_default(),
        None => Blocks(blocks.0.checked_div(config.count.into()).unwrap_or_default()),
    };
    let count = blocks.0.checked_div(each.0).unwrap_or_default().min(config.count.into()) as u32;
    if count == 0 {
        return Err(Error::Size { base: bdev.name().to_owned(), blocks, block_size });
    }
    Ok((each, count))
}

/// The open base disk, which its parts share.
struct Shared {
    base: Base,
    /// Parts that are not closed.
    left: AtomicU32,
}

struct Part {
    shared: Arc<Shared>,
    /// The blocks of the base before the part.
    offset: Blocks,
    blocks: Blocks,
    /// The part has released the base.
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

    fn failed_block(&self, lba: Lba, blocks: Blocks) -> Option<Lba> {
        let offset = self.offset.0;
        let failed = self.base().device().failed_block(Lba(lba.0 + offset), blocks)?;
        failed.0.checked_sub(offset).map(Lba)
    }

    fn geometry(&self) -> Geometry {
        let base = self.base().geometry();
        let blocks = self.blocks.min(base.blocks.saturating_sub(self.offset));
        let is_aligned = self.offset.is_multiple_of(base.optimal_io_blocks);
        let optimal_io_blocks = if is_aligned { base.optimal_io_blocks } else { Blocks::ZERO };
        Geometry { blocks, optimal_io_blocks, ..base }
    }

    /// The limits of the base without its boundary, whose offset differs in each part: the base's channel splits there, also
    /// writes that it would otherwise store at once.
    fn limits(&self) -> Limits {
        let base = self.base().device().limits();
        let atomic_blocks = if base.boundary_blocks == Blocks::ZERO { base.atomic_blocks } else { Blocks(1) };
        Limits { boundary_blocks: Blocks::ZERO, atomic_blocks, ..base }
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

    fn base_resized(&self) -> Option<Blocks> {
        Some(self.geometry().blocks)
    }

    /// Releases the part's share of the base; the last part closes the base.
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
    offset: Blocks,
}

impl Channel for PartChannel {
    #[inline]
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        let lba = if io.op == Op::Flush { io.lba } else { io.lba + self.offset };
        let source = if io.op == Op::Copy { io.source + self.offset } else { Lba::ZERO };
        self.base.submit(Io { lba, source, ..*io }, cx);
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        self.base.abort(tag, cx);
    }

    fn is_revocable(&self, tag: Tag) -> bool {
        self.base.are_revocable(|t| t == tag)
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        self.base.poll(cx, out);
    }
}
