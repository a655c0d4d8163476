//! Resizing a disk. Control context; blocks.
//!
//! A disk shrinks in steps, because an earlier request must not make its file grow again. First the disk gets its new size,
//! against which each request is checked before it starts; then the requests behind the new end that the kernel already has
//! complete; only then the file is truncated.

use crate::open::{cannot_lock, check_multiple, set_size, size_of};
use crate::store::{Kind, Store};
use crate::{Error, store_of};
use aryk_bdev::{Bdev, Blocks, Bytes, Lba, Registry};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The new size of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Size {
    /// This number of bytes, at least the present size.
    GrowTo(Bytes),
    /// This number of bytes, even if the present size is larger: the data behind the new end is destroyed.
    Exactly(Bytes),
    /// The present size of the file or block device.
    Rescan,
}

/// The state of a resize.
#[derive(Debug)]
pub enum Resized {
    /// The disk has this number of bytes.
    Done(Bytes),
    /// The disk has shrunk, and its file is not truncated yet.
    Shrinking(Shrinking),
}

/// Excludes other resizes of the disk until this is dropped.
#[derive(Debug)]
struct Resizing {
    store: Arc<Store>,
    has_entered: bool,
}

impl Resizing {
    fn begin(store: &Arc<Store>, name: &str) -> Result<Self, Error> {
        if store.resizing.swap(true, Ordering::Acquire) {
            return Err(Error::Resizing(name.to_owned()));
        }
        Ok(Self { store: Arc::clone(store), has_entered: false })
    }

    /// Locks the file: another opener that has locked it relies on its size.
    fn enter(&mut self) -> Result<(), Error> {
        self.store.enter().map_err(|error| cannot_lock(error, &self.store.path))?;
        self.has_entered = true;
        Ok(())
    }

    /// Sets the disk's size to `bytes` and notifies its openers.
    fn publish(&self, registry: &Registry, name: &str, size: Bytes) -> Result<(), Error> {
        let blocks = size.whole_blocks(self.store.block_size);
        self.store.blocks.store(blocks.0, Ordering::Relaxed);
        Ok(registry.resized(name, blocks)?)
    }
}

impl Drop for Resizing {
    fn drop(&mut self) {
        if self.has_entered {
            self.store.leave();
        }
        self.store.resizing.store(false, Ordering::Release);
    }
}

/// Resizes the disk `name` and notifies its openers.
///
/// # Errors
/// [`Error`].
pub fn resize(registry: &Registry, name: &str, size: Size) -> Result<Resized, Error> {
    let bdev = registry.find(name)?;
    let store = store_of(&bdev).ok_or_else(|| Error::NotOurs(name.to_owned()))?;
    let mut resizing = Resizing::begin(store, name)?;
    let path = &store.path;
    let unit = store.block_size.max(store.alignment.offset);
    let now = size_of(&store.file, path)?;
    let new = match size {
        Size::Rescan => {
            // An incomplete block at the end is not used.
            let whole = now.whole_blocks(unit).to_bytes(unit);
            resizing.publish(registry, name, whole)?;
            return Ok(Resized::Done(whole));
        }
        Size::GrowTo(new) | Size::Exactly(new) => new,
    };
    if store.kind == Kind::BlockDevice || store.read_only {
        return Err(Error::FixedSize(name.to_owned()));
    }
    check_multiple(path, new, unit)?;
    if new < now && matches!(size, Size::GrowTo(_)) {
        return Err(Error::Shrinks { name: name.to_owned(), from: now, to: new });
    }
    resizing.enter()?;
    if new < now {
        // The file may have been truncated from outside, with requests in flight behind its end.
        let reachable = bdev.blocks().max(now.whole_blocks(store.block_size));
        resizing.publish(registry, name, new)?;
        return Ok(Resized::Shrinking(Shrinking { resizing, bdev, reachable, from: now, to: new }));
    }
    set_size(&store.file, path, new)?;
    resizing.publish(registry, name, new)?;
    Ok(Resized::Done(new))
}

/// A disk that has shrunk, and whose file is not truncated yet.
#[derive(Debug)]
pub struct Shrinking {
    resizing: Resizing,
    bdev: Arc<Bdev>,
    /// The blocks that requests in flight may reach.
    reachable: Blocks,
    /// The former size of the file.
    from: Bytes,
    to: Bytes,
}

impl Shrinking {
    /// Waits until no request changes the range behind the new end any more. Any context.
    pub async fn settle(self) -> Settled {
        let block_size = self.resizing.store.block_size;
        let end = Lba::ZERO + self.to.whole_blocks(block_size);
        self.bdev.settle(end..Lba::ZERO + self.reachable).await;
        Settled(self)
    }
}

/// A disk that has shrunk, and whose file may be truncated now.
#[derive(Debug)]
pub struct Settled(Shrinking);

impl Settled {
    /// Truncates the file and returns the disk's size in bytes. If that fails, the disk gets its former size back.
    ///
    /// # Errors
    /// [`Error`].
    pub fn cut(self, registry: &Registry) -> Result<Bytes, Error> {
        let Shrinking { resizing, bdev, from, to, .. } = self.0;
        let store = &resizing.store;
        match set_size(&store.file, &store.path, to) {
            Ok(()) => Ok(to),
            Err(error) => {
                let now = size_of(&store.file, &store.path).unwrap_or(from);
                let unit = store.block_size.max(store.alignment.offset);
                resizing.publish(registry, bdev.name(), now.whole_blocks(unit).to_bytes(unit))?;
                Err(error)
            }
        }
    }
}
