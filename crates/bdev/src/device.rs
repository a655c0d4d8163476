//! The traits that a bdev module implements. Control context; channels are opened in reactor context.

use crate::{Base, Bdev, Blocks, Channel, Failure, Lba, Op, OpSet};
use aryk_reactor::{Cx, Handle, RootId};
use std::any::Any;
use std::pin::Pin;
use std::sync::Arc;

/// A future that a device returns, boxed so that a `dyn Device` can return it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The shape of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Bytes in a block, the unit of requests: a power of two from 512 on.
    pub block_size: u32,
    /// Bytes in a block of the store below: requests aligned to these cost no read-modify-write.
    pub physical_block_size: u32,
    /// The size of the disk.
    pub blocks: Blocks,
    /// A stripe or similar unit, which front-ends report to guests; no blocks if there is none.
    pub optimal_io_blocks: Blocks,
}

impl Geometry {
    /// A disk without any structure.
    pub const fn plain(block_size: u32, blocks: Blocks) -> Self {
        Self { block_size, physical_block_size: block_size, blocks, optimal_io_blocks: Blocks::ZERO }
    }
}

/// The limits of a device. The block layer splits and queues requests, so the device never gets more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Requests in flight on one channel.
    pub depth: u32,
    /// Blocks in one read or write.
    pub transfer_blocks: Blocks,
    /// Pieces of memory in one read or write.
    pub segments: u32,
    /// Blocks in one unmap.
    pub unmap_blocks: Blocks,
    /// Blocks in one write-zeroes.
    pub write_zeroes_blocks: Blocks,
    /// No read, write or compare crosses a multiple of this many blocks; no blocks if there is no boundary.
    pub boundary_blocks: Blocks,
    /// Blocks in one compare, for a device that does it ([`Device::ops`]). Longer ones are made of reads.
    pub compare_blocks: Blocks,
    /// Blocks in one compare-and-write, for a device that does it.
    pub compare_and_write_blocks: Blocks,
    /// Blocks in one copy, for a device that does it.
    pub copy_blocks: Blocks,
    /// Blocks that one write stores entirely or not at all, also when power fails; at least one. A write that the block layer
    /// splits, at another of these limits, is several.
    pub atomic_blocks: Blocks,
    /// Whether other hosts may change the store too. Then a compare-and-write or a copy that the device does not do, or not in
    /// this size, is refused: made of reads and writes, they would be apart from this host's changes only.
    pub is_shared: bool,
    /// Whether other hosts are meant to use the store at the same time. Then no host changes alone what all must know, such as
    /// the key of an encrypted disk.
    pub has_other_hosts: bool,
}

impl Limits {
    /// The most blocks of one compare-and-write that the channels of a device with these limits and `ops` take.
    pub const fn compare_and_write_max(&self, ops: OpSet) -> Blocks {
        match (self.is_shared, ops.contains(Op::CompareAndWrite)) {
            (false, _) => Blocks::MAX,
            (true, true) => self.compare_and_write_blocks,
            (true, false) => Blocks::ZERO,
        }
    }

    /// The most blocks of one copy that the channels of a device with these limits and `ops` take. A device that others share may
    /// refuse a copy whose ranges overlap.
    pub const fn copy_max(&self, ops: OpSet) -> Blocks {
        let is_made_of_others = !self.is_shared && ops.contains(Op::Read) && ops.contains(Op::Write);
        match (is_made_of_others, ops.contains(Op::Copy)) {
            (true, _) => Blocks::MAX,
            (false, true) => self.copy_blocks,
            (false, false) => Blocks::ZERO,
        }
    }
}

impl Default for Limits {
    /// 256 requests in flight, single blocks written at once, and no other limit.
    fn default() -> Self {
        Self {
            depth: 256,
            transfer_blocks: Blocks::MAX,
            segments: u32::MAX,
            unmap_blocks: Blocks::MAX,
            write_zeroes_blocks: Blocks::MAX,
            boundary_blocks: Blocks::ZERO,
            compare_blocks: Blocks::MAX,
            compare_and_write_blocks: Blocks::MAX,
            copy_blocks: Blocks::MAX,
            atomic_blocks: Blocks(1),
            is_shared: false,
            has_other_hosts: false,
        }
    }
}

/// Why a channel cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The device is being removed.
    #[error("the disk is being removed")]
    Removed,
    /// Something that the channel needs is not available.
    #[error("{0}")]
    Unavailable(String),
}

/// An event of a base: a disk that another disk is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BaseEvent {
    /// The base will be removed. The device of the disk above answers whether the disk stays.
    ///
    /// If the disk stays, its channels stop reading from the base, but still write to it, because other channels may not have got
    /// the event yet. Channels that are opened from now on do the same.
    Removing,
    /// The disk stays, and all of its channels have got [`BaseEvent::Removing`]. The device closes the base ([`Base::close`]) and
    /// removes it from [`Device::bases`]. Each channel sends nothing more to the base, and closes its channel of the base as soon
    /// as its requests there have completed. The base does not fail requests until all channels have got this event.
    Removed,
    /// The limits, the operations or the read-only state of the base have changed.
    Changed,
}

/// Whether a disk stays without one of its bases.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stay {
    /// The disk stays.
    Stay,
    /// The disk is removed before the base.
    Remove,
}

/// The implementation of a disk by its module. It is `Any`, so that the module finds its own devices again.
pub trait Device: Any + Send + Sync {
    /// The kind of disk, for people.
    fn product(&self) -> &'static str;

    /// The shape of the disk. Only the number of blocks may change; the module then calls [`crate::Registry::resized`].
    fn geometry(&self) -> Geometry;

    /// The limits of its channels. When they have changed, the module calls [`crate::Registry::changed`].
    fn limits(&self) -> Limits;

    /// The operations of its channels. When they have changed, the module calls [`crate::Registry::changed`]. The block layer
    /// makes what is missing of reads and writes: write-zeroes and compound operations.
    fn ops(&self) -> OpSet;

    /// Whether the disk is read-only. When that has changed, the module calls [`crate::Registry::changed`].
    fn is_read_only(&self) -> bool {
        false
    }

    /// The bases: the disks that this disk is made of. A base is removed after this disk, unless this disk stays without the base
    /// ([`Device::base_event`]).
    fn bases(&self) -> Vec<Arc<Bdev>> {
        Vec::new()
    }

    /// Handles an event of a base. The device gets the event first, and then each of its channels, on every reactor
    /// ([`Channel::base_event`]); the next event comes when all channels have got this one. The method must not call the
    /// registry. If a removal is cancelled and started again, its events are repeated.
    ///
    /// The answer matters for [`BaseEvent::Removing`] only. By default, the disk is removed before its base.
    fn base_event(&self, base: &Arc<Bdev>, event: BaseEvent) -> Stay {
        let _ = base;
        match event {
            BaseEvent::Removing => Stay::Remove,
            BaseEvent::Removed | BaseEvent::Changed => Stay::Stay,
        }
    }

    /// A base has another size now. Returns the new number of blocks of this disk, if that follows.
    fn base_resized(&self) -> Option<Blocks> {
        None
    }

    /// The last failure of its store.
    fn last_failure(&self) -> Option<Failure> {
        None
    }

    /// The block that its store has named for the latest failure of one of these blocks; `None` if it named none. Must not wait:
    /// front-ends ask on reactors, after a request has ended with [`crate::Status::Medium`].
    fn failed_block(&self, lba: Lba, blocks: Blocks) -> Option<Lba> {
        let _ = (lba, blocks);
        None
    }

    /// Logs how many lines about this device were left out, if it is time. Called now and then in control context.
    fn tell_left_out(&self) {}

    /// Closes the device during the removal of its disk, after the last channel and the last opener. References to the device may
    /// still exist. The device closes its connections, frees its queue pairs and everything that [`Device::prepare`] created, and
    /// closes its bases ([`Base::close`]). The removal ends when the future is ready, which may take seconds.
    ///
    /// If the caller drops the future, the removal is not over: the next removal calls this method again.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Prepares a reactor for channels of this disk: creates the queue pair or the connection that the channels share there.
    /// Every opener awaits this method each time before it opens a channel, so it must be cheap for a reactor that is prepared
    /// already. It may take seconds. The opener cancels it by dropping the future, and so does the removal of the disk. The
    /// device keeps what it has created, also if no channel uses it, until [`Device::close`] at the latest.
    ///
    /// By default, the bases prepare the reactor.
    ///
    /// # Errors
    /// [`OpenError`]; then the opener opens no channel there.
    fn prepare(&self, reactor: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        let (bases, reactor) = (self.bases(), reactor.clone());
        Box::pin(async move {
            for base in bases {
                base.prepare(&reactor).await?;
            }
            Ok(())
        })
    }

    /// Opens a channel on the calling reactor, which is prepared. This must not take longer than microseconds. Completions of the
    /// channel wake `root`.
    ///
    /// # Errors
    /// [`OpenError`].
    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError>;
}

/// A disk on one base whose channels change requests on their way. Shape, limits and operations are those of the base, and the
/// size follows the base; a module overrides those that differ.
pub trait Decorator: Send + Sync + 'static {
    /// The kind of disk, for people.
    fn product(&self) -> &'static str;

    /// The base.
    fn base(&self) -> &Base;

    /// As [`Device::geometry`]: by default that of the base. Called again when the base is resized.
    fn geometry(&self) -> Geometry {
        self.base().bdev().geometry()
    }

    /// As [`Device::limits`]: by default those of the base.
    fn limits(&self) -> Limits {
        self.base().bdev().device().limits()
    }

    /// As [`Device::ops`]: by default those of the base.
    fn ops(&self) -> OpSet {
        self.base().bdev().device().ops()
    }

    /// As [`Device::is_read_only`]: by default that of the base.
    fn is_read_only(&self) -> bool {
        self.base().bdev().device().is_read_only()
    }

    /// As [`Device::failed_block`]: by default that of the base, whose blocks are those of this disk.
    fn failed_block(&self, lba: Lba, blocks: Blocks) -> Option<Lba> {
        self.base().bdev().device().failed_block(lba, blocks)
    }

    /// Prepares a reactor, as [`Device::prepare`]. By default, the base prepares it.
    ///
    /// # Errors
    /// [`OpenError`].
    fn prepare(&self, reactor: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        let reactor = reactor.clone();
        Box::pin(async move { self.base().prepare(&reactor).await })
    }

    /// Closes the decorator before its base is closed, as [`Device::close`]. By default, there is nothing to close.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Opens a channel on the calling reactor, as [`Device::open_channel`].
    ///
    /// # Errors
    /// [`OpenError`].
    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError>;
}

impl<D: Decorator> Device for D {
    fn product(&self) -> &'static str {
        Decorator::product(self)
    }

    fn geometry(&self) -> Geometry {
        Decorator::geometry(self)
    }

    fn limits(&self) -> Limits {
        Decorator::limits(self)
    }

    fn ops(&self) -> OpSet {
        Decorator::ops(self)
    }

    fn is_read_only(&self) -> bool {
        Decorator::is_read_only(self)
    }

    fn bases(&self) -> Vec<Arc<Bdev>> {
        vec![Arc::clone(self.base().bdev())]
    }

    fn last_failure(&self) -> Option<Failure> {
        self.base().bdev().device().last_failure()
    }

    fn failed_block(&self, lba: Lba, blocks: Blocks) -> Option<Lba> {
        Decorator::failed_block(self, lba, blocks)
    }

    fn base_resized(&self) -> Option<Blocks> {
        Some(Decorator::geometry(self).blocks)
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            Decorator::close(self).await;
            self.base().close();
        })
    }

    fn prepare(&self, reactor: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        Decorator::prepare(self, reactor)
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Decorator::open_channel(self, root, cx)
    }
}
