//! The bases of a disk: the disks that it is made of. Control context; channels are opened in reactor context.

use crate::bdev::lock;
use crate::{Access, AsyncChannel, Bdev, BdevChannel, Descriptor, Error, OpenError, Registry};
use aryk_reactor::{Cx, Handle, RootId, ThreadId};
use std::fmt;
use std::sync::{Arc, Mutex};

/// A disk that another disk is made of. It is open from the creation of that disk until [`Base::close`], which
/// [`crate::Device::close`] calls, or [`crate::Device::base_event`] if the disk stays without this base.
///
/// It needs no listener for events: [`Registry`] calls the device above when the base is removed, resized or changed.
pub struct Base {
    bdev: Arc<Bdev>,
    descriptor: Mutex<Option<Descriptor>>,
}

impl fmt::Debug for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "base {}", self.bdev.name())
    }
}

impl Base {
    /// Opens the disk `name` as its only writer, for the disk `owner` that will be made of it.
    ///
    /// # Errors
    /// As [`Registry::open`].
    pub fn open(registry: &Registry, name: &str, owner: &str) -> Result<Self, Error> {
        let descriptor = registry.open(name, Access::Exclusive, owner, |_| ())?;
        Ok(Self { bdev: Arc::clone(descriptor.bdev()), descriptor: Mutex::new(Some(descriptor)) })
    }

    /// The disk.
    pub const fn bdev(&self) -> &Arc<Bdev> {
        &self.bdev
    }

    /// Prepares a reactor for channels of the base, as [`Descriptor::prepare`].
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn prepare(&self, reactor: &Handle) -> Result<(), OpenError> {
        self.descriptor()?.prepare(reactor).await
    }

    /// Opens a channel of the base on the calling reactor. Its completions wake `root`.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<BdevChannel, OpenError> {
        self.descriptor()?.open_channel(root, cx)
    }

    /// Opens a channel of the base on the calling reactor, in `thread`, for tasks.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_async_channel(&self, thread: ThreadId, cx: &mut Cx) -> Result<AsyncChannel, OpenError> {
        AsyncChannel::open(&self.descriptor()?, thread, cx)
    }

    /// The opening of the base, for a caller that opens channels beside those of the disk above: it keeps the base open.
    ///
    /// # Errors
    /// [`OpenError::Removed`] after [`Base::close`].
    pub fn descriptor(&self) -> Result<Descriptor, OpenError> {
        lock(&self.descriptor).clone().ok_or(OpenError::Removed)
    }

    /// Closes the base. Channels that are open keep it open until they are closed.
    pub fn close(&self) {
        let descriptor = lock(&self.descriptor).take();
        drop(descriptor);
    }
}
