//! The disk of a volume or of a snapshot. Control context; channels are opened in reactor context.

use crate::branch::Branch;
use crate::gate::Gate;
use crate::inbox::{Inbox, Inboxes, VolumeChannel};
use crate::part::Place;
use crate::striped::StripedChannel;
use aryk_bdev::{Bdev, Blocks, BoxFuture, Bytes, Channel, Device, Geometry, Limits, OpSet, OpenError};
use aryk_reactor::{Cx, Handle, RootId};
use aryk_volume::{BLOCK, UNIT, VolumeId};
use std::rc::Rc;
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
    /// How each part of the pool identifies it.
    pub ids: Vec<VolumeId>,
    pub block_size: u32,
    pub blocks: AtomicU64,
    /// The parts of the pool.
    pub places: Vec<Arc<Place>>,
    /// Holds back writes while the parts take a snapshot.
    pub gate: Gate,
    /// The base of the pool.
    pub bases: Vec<Arc<Bdev>>,
    pub is_snapshot: bool,
}

impl VolumeDisk {
    /// The blocks of a volume of so many units.
    pub const fn blocks_of(units: u64, block_size: u32) -> Blocks {
        Blocks(units / (block_size / UNIT) as u64)
    }

    /// What the channels of a part on this reactor share.
    fn inbox(place: &Arc<Place>, cx: &mut Cx) -> Result<Rc<Inbox>, OpenError> {
        let owner = place.owner()?;
        match cx.local_state::<Inboxes>().find(place.number) {
            Some(inbox) => Ok(inbox),
            None if *owner == *cx.handle() => Err(OpenError::Removed),
            None => Branch::start(place, owner, cx),
        }
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

    /// A reactor needs a channel of the pool's base, also where a part runs, which may move. Only parts have channels of images.
    fn prepare(&self, reactor: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        let reactor = reactor.clone();
        Box::pin(async move {
            match self.places.first() {
                Some(place) => place.base()?.prepare(&reactor).await,
                None => Ok(()),
            }
        })
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let block_units = self.block_size / UNIT;
        let mut channels = Vec::new();
        for (place, &id) in self.places.iter().zip(&self.ids) {
            let inbox = Self::inbox(place, cx)?;
            channels.push(VolumeChannel::open(inbox, VolumeKey { id, block_units }, root, cx));
        }
        match channels.len() {
            1 => Ok(Box::new(channels.remove(0))),
            _ => Ok(Box::new(StripedChannel::new(channels, block_units, self.gate.local(cx), root))),
        }
    }
}
