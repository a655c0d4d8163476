//! Another size for a disk. Control context; blocks.

use crate::locks::LockError;
use crate::open::{check_multiple, holder, set_size, size_of};
use crate::store::{Kind, Store};
use crate::{Error, store_of};
use aryk_bdev::Registry;
use std::sync::atomic::Ordering;

/// The size that a disk is to have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Size {
    /// So many bytes, and no less than now.
    GrowTo(u64),
    /// So many bytes, be it less than now: what lies behind is destroyed.
    Exactly(u64),
    /// What the file or block device has now.
    Rescan,
}

/// Gives the disk `name` another size; its openers are told. Returns its bytes.
///
/// # Errors
/// [`Error`].
pub fn resize(registry: &Registry, name: &str, size: Size) -> Result<u64, Error> {
    let bdev = registry.find(name)?;
    let store = store_of(&bdev).ok_or_else(|| Error::NotOurs(name.to_owned()))?;
    let (path, block_size) = (&store.path, u64::from(store.block_size));
    let unit = u64::from(store.block_size.max(store.alignment.offset));
    let now = size_of(&store.file, path)?;
    let publish = |bytes: u64| {
        store.blocks.store(bytes / block_size, Ordering::Relaxed);
        registry.resized(name, bytes / block_size)
    };
    let new = match size {
        Size::Rescan => {
            // A part of a block at the end is not ours.
            let whole = now - now % unit;
            publish(whole)?;
            return Ok(whole);
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
    // Whoever has it locked has looked at its size.
    store.enter().map_err(|error| refused(store, error))?;
    let set = || {
        if new < now {
            // First no more requests to what is cut off, then the cut.
            publish(new)?;
            set_size(&store.file, path, new)
        } else {
            set_size(&store.file, path, new)?;
            Ok(publish(new)?)
        }
    };
    let result = set();
    store.leave();
    result.map(|()| new)
}

fn refused(store: &Store, error: LockError) -> Error {
    let path = store.path.clone();
    match error {
        LockError::Held => Error::Locked { holder: holder(&path), path },
        LockError::Os(errno) => Error::Os { action: "lock", path, error: errno.into() },
    }
}
