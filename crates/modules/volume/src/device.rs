//! The disk of a volume or of a snapshot. Control context; channels are opened in reactor context.

use crate::branch::Branch;
use crate::inbox::{Inboxes, VolumeChannel};
use crate::pool::Place;
use aryk_bdev::{Bdev, Blocks, BoxFuture, Bytes, Channel, Device, Geometry, Limits, OpSet, OpenError};
use aryk_reactor::{Cx, Handle, RootId};
use aryk_volume::{BLOCK, UNIT, VolumeId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a read or write, at most: the engine's frames have as many.
const TRANSFER: Bytes = Bytes(1 << 20);
/// Bytes of an unmap or a write-zeroes, at most: 4,096 ranges.
const ZEROED: Bytes = Bytes(16 << 30);
/// Requests in flight of one channel.
const DEPTH: u32 = 256;

/// A volume of a pool, with its unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VolumeKey {
    pub id: VolumeId,
    /// Units of a block.
    pub block_units: u32,
}

/// The disk.
pub(crate) struct VolumeDisk {
    pub id: VolumeId,
    pub block_size: u32,
    pub blocks: AtomicU64,
    pub place: Arc<Place>,
    /// The base of the pool.
    pub bases: Vec<Arc<Bdev>>,
    pub is_snapshot: bool,
}

impl VolumeDisk {
    /// The blocks of a volume of so many units.
    pub const fn blocks_of(units: u64, block_size: u32) -> Blocks {
        Blocks(units / (block_size / UNIT) as u64)
    }
}

impl Device for VolumeDisk {
    fn product(&self) -> &'static str {
        "Logical Volume"
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            block_size: self.block_size,
            physical_block_size: BLOCK,
            blocks: Blocks(self.blocks.load(Ordering::Relaxed)),
            optimal_io_blocks: Blocks::ZERO,
        }
    }

    fn limits(&self) -> Limits {
        let zeroed = ZEROED.whole_blocks(self.block_size);
        Limits {
            depth: DEPTH,
            transfer_blocks: TRANSFER.whole_blocks(self.block_size),
            unmap_blocks: zeroed,
            write_zeroes_blocks: zeroed,
            ..Limits::default()
        }
    }

    fn ops(&self) -> OpSet {
        OpSet::PLAIN
    }

    fn is_read_only(&self) -> bool {
        self.is_snapshot
    }

    fn bases(&self) -> Vec<Arc<Bdev>> {
        self.bases.clone()
    }

    /// A reactor needs a channel of the pool's base; that of the pool was prepared for it. Only that one has channels of images.
    fn prepare(&self, reactor: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        let reactor = reactor.clone();
        Box::pin(async move {
            if *self.place.owner()? == reactor { Ok(()) } else { self.place.base()?.prepare(&reactor).await }
        })
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let owner = self.place.owner()?;
        let volume = VolumeKey { id: self.id, block_units: self.block_size / UNIT };
        let inbox = match cx.local_state::<Inboxes>().find(self.place.number) {
            Some(inbox) => inbox,
            None if *owner == *cx.handle() => return Err(OpenError::Removed),
            None => Branch::start(&self.place, owner, cx)?,
        };
        Ok(Box::new(VolumeChannel::open(inbox, volume, root, cx)))
    }
}
