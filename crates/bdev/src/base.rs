//! What a disk that is made of another holds of that one. Control context; channels are opened in reactor context.

use crate::bdev::lock;
use crate::{Access, Bdev, BdevChannel, Descriptor, Error, OpenError, Registry};
use aryk_reactor::{Cx, Handle, RootId};
use std::fmt;
use std::sync::{Arc, Mutex};

/// A disk that another is made of: open from that one's making until [`Base::close`], which its [`crate::Device::close`] calls.
///
/// It needs to hear of no events: [`Registry`] removes what is made of a disk before the disk, and asks it to follow when the disk is resized.
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
    /// Opens the disk `name` as its one writer, for the disk `owner` that is to be made of it.
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

    /// Makes a reactor ready for channels of the disk, as [`Descriptor::prepare`].
    ///
    /// # Errors
    /// [`OpenError`].
    pub async fn prepare(&self, reactor: &Handle) -> Result<(), OpenError> {
        self.descriptor()?.prepare(reactor).await
    }

    /// A channel of the disk for the calling reactor, whose completions wake `root`.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<BdevChannel, OpenError> {
        self.descriptor()?.open_channel(root, cx)
    }

    fn descriptor(&self) -> Result<Descriptor, OpenError> {
        lock(&self.descriptor).clone().ok_or(OpenError::Removed)
    }

    /// Lets go of it. Channels that are open keep it until they are closed.
    pub fn close(&self) {
        let descriptor = lock(&self.descriptor).take();
        drop(descriptor);
    }
}
