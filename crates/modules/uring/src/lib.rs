//! The uring module: disks in regular files and block devices, over the reactor's io_uring, or over blocking calls in
//! threads where that is forbidden.
//!
//! | file | what |
//! | --- | --- |
//! | `open` | finding, creating and measuring the file |
//! | `locks` | keeping others from it |
//! | `store` | what all channels share: the device |
//! | `channel` | one opener's requests |
//! | `request` | one request's steps |
//! | `ranges` | who may rewrite which block of the store |
//! | `resize` | another size |
//! | `room` | what files promise, and what there is |
//!
//! **Direct I/O** wherever the file takes it, with its alignment as the kernel tells it. What is not aligned goes through a
//! bounce buffer, and a write of less than a block of the store reads that block first.
//!
//! **Durable** is what was written before a flush, or with FUA, has completed. **Sparse** is what was unmapped, or written
//! with zeroes. **Locked** is the file as QEMU's tools understand it, for as long as anything may still be written to it.
#![forbid(unsafe_code)]

mod channel;
mod error;
mod locks;
mod open;
mod ranges;
mod request;
mod resize;
mod room;
mod store;
#[cfg(test)]
mod tests;

pub use error::{Error, note_allowed};
pub use locks::Holder;
pub use resize::{Resized, Settled, Shrinking, Size, resize};
pub use room::{Room, rooms};

use aryk_bdev::{Bdev, Identity, Registry};
use open::Opened;
use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;
use store::{Alignment, FileDevice, Store};
use uuid::Uuid;

/// What becomes of a write that finds the store full.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum OnFull {
    /// It fails with [`aryk_bdev::Status::NoSpace`].
    #[default]
    Error,
    /// It is held, and tried again until there is room, it is aborted, or the disk is removed.
    Hold,
}

/// Whether the page cache is passed by.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Direct {
    /// Where the file system can.
    #[default]
    Auto,
    /// Never.
    Never,
}

/// For how long the file is kept from others.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Lock {
    /// For as long as the disk is there.
    #[default]
    Always,
    /// From its first channel to its last, so that two daemons can have the file, and the machine that is moved from one to
    /// the other settles who uses it. A block device is then kept from those only who look at locks, as we and QEMU do.
    InUse,
}

/// A disk to be made.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its name.
    pub name: String,
    /// What kind of disk it is called.
    pub product: &'static str,
    /// Other names of it.
    pub aliases: Vec<String>,
    /// Its UUID; a random one if there is none.
    pub uuid: Option<Uuid>,
    /// The regular file or block device.
    pub path: PathBuf,
    /// Bytes in a block; by default 512 for a file, and what it says of itself for a block device.
    pub block_size: Option<u32>,
    /// Whether it is never written. Several may then read it at the same time.
    pub read_only: bool,
    /// Bytes of the sparse file to be created if there is none, or an empty one. A file that has another size is refused.
    pub size: Option<u64>,
    /// What becomes of writes when the store is full.
    pub on_full: OnFull,
    /// Whether the page cache is passed by.
    pub direct: Direct,
    /// For how long the file is kept from others.
    pub lock: Lock,
    /// Whether to wait, for seconds, for the lock of one who is about to leave. If not, [`Error::Locked`] comes at once.
    pub waits: bool,
}

impl Config {
    /// A disk of an existing file, with the defaults.
    pub fn new(name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        Self {
            name: name.into(),
            product: "URING bdev",
            aliases: Vec::new(),
            uuid: None,
            path: path.into(),
            block_size: None,
            read_only: false,
            size: None,
            on_full: OnFull::default(),
            direct: Direct::default(),
            lock: Lock::default(),
            waits: true,
        }
    }
}

/// Makes a disk. Control context; it blocks, so not on a reactor.
///
/// # Errors
/// [`Error`].
pub fn create(registry: &Registry, config: Config) -> Result<Arc<Bdev>, Error> {
    create_forced(registry, config, Forced::default())
}

/// What tests ask for, on stores that would not.
#[derive(Clone, Copy, Default, Debug)]
struct Forced {
    /// In place of the store's.
    alignment: Option<Alignment>,
    /// Threads in place of the ring.
    blocking: bool,
}

fn create_forced(registry: &Registry, config: Config, forced: Forced) -> Result<Arc<Bdev>, Error> {
    // Before a file is created for it.
    if registry.find(&config.name).is_ok() {
        return Err(aryk_bdev::Error::Exists(config.name).into());
    }
    let Opened { store, is_ours } = open::open(&config, forced)?;
    let store = Arc::new(store);
    let Config { name, aliases, uuid, .. } = config;
    let identity = Identity { name, aliases, uuid: uuid.unwrap_or_else(Uuid::new_v4) };
    let bdev = registry.register(identity, Arc::new(FileDevice(Arc::clone(&store)))).inspect_err(|_| {
        if is_ours {
            open::remove(&store.file, &store.path);
        }
    })?;
    store.bdev.set(Arc::downgrade(&bdev)).expect("set once, here");
    Ok(bdev)
}

/// What a disk of this module counts, beside what the block layer does.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stats {
    /// Requests that are held now because the store is full.
    pub held: u64,
    /// Requests that have ever been.
    pub held_total: u64,
}

/// What `bdev` has counted; `None` if it is not of this module.
pub fn stats(bdev: &Bdev) -> Option<Stats> {
    store_of(bdev).map(|store| store.stats())
}

fn store_of(bdev: &Bdev) -> Option<&Arc<Store>> {
    let device: &dyn Any = bdev.device().as_ref();
    device.downcast_ref::<FileDevice>().map(|device| &device.0)
}
