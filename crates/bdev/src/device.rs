//! What a bdev module implements. Control context; channels are opened in reactor context.

use crate::{Base, Bdev, Channel, Failure, Op, OpSet};
use aryk_reactor::{Cx, Handle, RootId};
use std::any::Any;
use std::pin::Pin;
use std::sync::Arc;

/// A future that a device gives, boxed so that a `dyn Device` can give it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The shape of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Bytes in a block, the unit of requests: a power of two from 512 on.
    pub block_size: u32,
    /// Bytes in a block of the store below: requests aligned to these cost no read-modify-write.
    pub physical_block_size: u32,
    /// Blocks on the disk.
    pub blocks: u64,
    /// Blocks in a stripe or the like, for front-ends to tell guests of; 0 for none.
    pub optimal_io_blocks: u32,
}

impl Geometry {
    /// A disk without any structure.
    pub const fn plain(block_size: u32, blocks: u64) -> Self {
        Self { block_size, physical_block_size: block_size, blocks, optimal_io_blocks: 0 }
    }
}

/// What a device can take. The block layer splits and queues, so that it never sees more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Requests in flight on one channel.
    pub depth: u32,
    /// Blocks in one read or write.
    pub transfer_blocks: u32,
    /// Pieces of memory in one read or write.
    pub segments: u32,
    /// Blocks in one unmap.
    pub unmap_blocks: u64,
    /// Blocks in one write-zeroes.
    pub write_zeroes_blocks: u64,
    /// No read, write or compare crosses a multiple of this many blocks; 0 for none.
    pub boundary_blocks: u32,
    /// Blocks in one compare, for a device that does it ([`Device::ops`]). Longer ones are made of reads.
    pub compare_blocks: u64,
    /// Blocks in one compare-and-write, for a device that does it.
    pub compare_and_write_blocks: u64,
    /// Blocks in one copy, for a device that does it.
    pub copy_blocks: u64,
    /// Whether other hosts may change the store too. Then a compare-and-write or a copy that the device does not do, or not in this size, is refused: made of
    /// reads and writes, they would be apart from this host's changes only.
    pub is_shared: bool,
}

impl Limits {
    /// The most blocks of one compare-and-write that the channels of a device with these limits and `ops` take.
    pub const fn compare_and_write_max(&self, ops: OpSet) -> u64 {
        match (self.is_shared, ops.contains(Op::CompareAndWrite)) {
            (false, _) => u64::MAX,
            (true, true) => self.compare_and_write_blocks,
            (true, false) => 0,
        }
    }
}

impl Default for Limits {
    /// 256 requests in flight, otherwise none.
    fn default() -> Self {
        Self {
            depth: 256,
            transfer_blocks: u32::MAX,
            segments: u32::MAX,
            unmap_blocks: u64::MAX,
            write_zeroes_blocks: u64::MAX,
            boundary_blocks: 0,
            compare_blocks: u64::MAX,
            compare_and_write_blocks: u64::MAX,
            copy_blocks: u64::MAX,
            is_shared: false,
        }
    }
}

/// Why a channel cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The device is being removed.
    #[error("the disk is being removed")]
    Removed,
    /// Something that the channel needs is not to be had.
    #[error("{0}")]
    Unavailable(String),
}

/// What happens to a disk that another is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BaseEvent {
    /// The base is to be removed. The disk that is made of it answers whether it stays.
    ///
    /// If it does, each of its channels reads from the base no more, but changes it on, for not all channels may know yet. Channels that are opened from
    /// now on do the same.
    Removing,
    /// The disk stays without the base, and each of its channels has been told [`BaseEvent::Removing`]. It lets go of the base ([`Base::close`]) and no
    /// longer names it among [`Device::bases`]. Each of its channels sends nothing more to the base, and closes the base's channel as soon as
    /// what is in flight there has completed. The base works until all of them have been told.
    Removed,
    /// The base's limits, operations or read-only state have changed.
    Changed,
}

/// Whether a disk stays without one that it is made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stay {
    /// It goes on.
    Stay,
    /// It is removed first.
    Remove,
}

/// A disk, as its module makes it; `Any`, so that the module finds what is its own.
pub trait Device: Any + Send + Sync {
    /// What kind of disk it is, for people.
    fn product(&self) -> &'static str;

    /// Its shape. Only the number of blocks may change, and [`crate::Registry::resized`] is called when it has.
    fn geometry(&self) -> Geometry;

    /// What its channels can take. When it has changed, [`crate::Registry::changed`] is called.
    fn limits(&self) -> Limits;

    /// What its channels can do. When it has changed, [`crate::Registry::changed`] is called. The block layer makes what is missing of reads and writes:
    /// write-zeroes and compound operations.
    fn ops(&self) -> OpSet;

    /// Whether it cannot be written. When it has changed, [`crate::Registry::changed`] is called.
    fn is_read_only(&self) -> bool {
        false
    }

    /// The disks that it is made of. They are not removed while it is there, and it goes with them, unless [`Device::base_event`] says otherwise.
    fn bases(&self) -> Vec<Arc<Bdev>> {
        Vec::new()
    }

    /// Something happens to one of the disks that it is made of. The device hears of it first, and then each of its channels, on every reactor
    /// ([`Channel::base_event`]); the next event comes when all have. Must not call back into the registry. If a removal is abandoned and taken up
    /// again, so are its events.
    ///
    /// What is returned counts for [`BaseEvent::Removing`] only. By default, the disk is removed with its base.
    fn base_event(&self, base: &Arc<Bdev>, event: BaseEvent) -> Stay {
        let _ = base;
        match event {
            BaseEvent::Removing => Stay::Remove,
            BaseEvent::Removed | BaseEvent::Changed => Stay::Stay,
        }
    }

    /// One of the disks that it is made of has another size now. Returns its own new number of blocks, if that changed.
    fn base_resized(&self) -> Option<u64> {
        None
    }

    /// The last request that its store has failed.
    fn last_failure(&self) -> Option<Failure> {
        None
    }

    /// Tells the log how many lines about itself were left out, if it is time. Control context; asked now and then.
    fn tell_left_out(&self) {}

    /// Closes the disk, whose removal is under way: the last channel and the last opening of it are closed, though someone may still hold a reference to
    /// it. Ends its connections, gives its queue pairs and what it prepared back, and lets go of the disks that it is made of ([`Base::close`]). The
    /// removal is over when the future is ready, which may take seconds.
    ///
    /// If the future is dropped before, because nobody waits for the removal any more, it is called again when the removal is taken up again.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Makes a reactor ready for channels of this disk: creates the queue pair or the connection that they share there. Every opener awaits this
    /// before it opens a channel, each time, so a reactor that is ready costs nothing. It may take seconds. Dropping the future cancels it, and so
    /// does the disk's removal. What it has made and no channel uses stays with the device, until [`Device::close`] at the latest.
    ///
    /// By default, the disks that it is made of are prepared.
    ///
    /// # Errors
    /// [`OpenError`]; then no channel is opened there.
    fn prepare(&self, reactor: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        let (bases, reactor) = (self.bases(), reactor.clone());
        Box::pin(async move {
            for base in bases {
                base.prepare(&reactor).await?;
            }
            Ok(())
        })
    }

    /// A channel for the calling reactor, which has been prepared. It takes microseconds. What completes on the channel wakes `root`.
    ///
    /// # Errors
    /// [`OpenError`].
    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError>;
}

/// A disk on top of another that changes what its channels do. Its shape, limits and operations are those of its base, whose size it follows; a module
/// overrides those that differ.
pub trait Decorator: Send + Sync + 'static {
    /// What kind of disk it is, for people.
    fn product(&self) -> &'static str;

    /// The disk below.
    fn base(&self) -> &Base;

    /// As [`Device::geometry`]: by default the base's. It is asked for again when the base is resized.
    fn geometry(&self) -> Geometry {
        self.base().bdev().geometry()
    }

    /// As [`Device::limits`]: by default the base's.
    fn limits(&self) -> Limits {
        self.base().bdev().device().limits()
    }

    /// As [`Device::ops`]: by default the base's.
    fn ops(&self) -> OpSet {
        self.base().bdev().device().ops()
    }

    /// As [`Device::is_read_only`]: by default whether the base is.
    fn is_read_only(&self) -> bool {
        self.base().bdev().device().is_read_only()
    }

    /// Makes a reactor ready for channels, as [`Device::prepare`]. By default, the disk below does.
    ///
    /// # Errors
    /// [`OpenError`].
    fn prepare(&self, reactor: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        let reactor = reactor.clone();
        Box::pin(async move { self.base().prepare(&reactor).await })
    }

    /// What there is to do before the disk below is let go of, as [`Device::close`]. By default nothing.
    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// A channel for the calling reactor, as [`Device::open_channel`].
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

    fn base_resized(&self) -> Option<u64> {
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
