//! The uring module: disks in regular files and block devices, over the reactor's io_uring, or over blocking calls in
//! threads where io_uring is forbidden.
//!
//! | file | contents |
//! | --- | --- |
//! | `open` | opening, creating and measuring the store |
//! | `locks` | locks that keep other processes from the store |
//! | `store` | the device, which all channels share |
//! | `channel` | the requests of one opener |
//! | `request` | the steps of one request |
//! | `ranges` | claims of requests that rewrite a block of the store |
//! | `resize` | changing the size of a disk |
//! | `room` | thin provisioning: sizes of sparse files and free space |
//!
//! **Direct I/O** is used if the file supports it, with the alignment that the kernel reports. Unaligned data is copied
//! through a bounce buffer, and a write of less than a block of the store reads that block first.
//!
//! Data is **durable** once it was written and a later flush has completed, or once its write with FUA has completed. Ranges
//! that were unmapped, or written with zeroes, are **sparse**. The file is **locked**, with locks that QEMU's tools understand,
//! for as long as a request may still write to it.
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

use aryk_bdev::{Bdev, Bytes, Env, Identity};
use open::Opened;
use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;
use store::{Alignment, FileDevice, Store};
use uuid::Uuid;

/// Handling of a write that finds the store full.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum OnFull {
    /// The write fails with [`aryk_bdev::Status::NoSpace`].
    #[default]
    Error,
    /// The write is held, and retried until there is room, it is aborted, or the disk is removed.
    Hold,
}

/// Whether direct I/O is used, which bypasses the page cache.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Direct {
    /// Direct I/O is used where the file system supports it.
    #[default]
    Auto,
    /// All I/O goes through the page cache.
    Never,
}

/// For how long the file is locked against other processes and disks.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Lock {
    /// The file is locked for as long as the disk exists.
    #[default]
    Always,
    /// The file is locked from the first channel to the last. Two daemons can then have a disk of the same file, and the VM
    /// that migrates from one to the other decides which daemon uses it. A block device is then protected only against
    /// programs that check locks, as Aryk and QEMU do.
    InUse,
}

/// Configuration of a new disk.
#[derive(Clone, Debug)]
pub struct Config {
    /// The disk's name.
    pub name: String,
    /// The product name that the disk reports.
    pub product: &'static str,
    /// Further names of the disk.
    pub aliases: Vec<String>,
    /// The disk's UUID; a random one if `None`.
    pub uuid: Option<Uuid>,
    /// The regular file or block device.
    pub path: PathBuf,
    /// Bytes in a block; by default 512 for a file, and the logical sector for a block device, but no less than 512.
    pub block_size: Option<u32>,
    /// Whether the disk is never written. Several disks and processes may then read the file at the same time.
    pub read_only: bool,
    /// The size of the sparse file to be created if the file is missing or empty. A file that has another size is refused.
    pub size: Option<Bytes>,
    /// Handling of writes that find the store full.
    pub on_full: OnFull,
    /// Whether direct I/O is used.
    pub direct: Direct,
    /// For how long the file is locked.
    pub lock: Lock,
    /// Whether to wait some seconds for a lock whose holder may be about to release it. If not, [`Error::Locked`] is returned
    /// at once.
    pub waits: bool,
}

impl Config {
    /// Configures a disk of an existing file, with the defaults.
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

/// Creates a disk. Control context; the call blocks, so it must not run on a reactor.
///
/// # Errors
/// [`Error`].
pub fn create(env: &Env, config: Config) -> Result<Arc<Bdev>, Error> {
    create_forced(env, config, Forced::default())
}

/// Properties that tests force on a store that does not have them.
#[derive(Clone, Copy, Default, Debug)]
struct Forced {
    /// Replaces the store's alignment.
    alignment: Option<Alignment>,
    /// Uses blocking calls in threads, also where there is a ring.
    blocking: bool,
}

fn create_forced(env: &Env, config: Config, forced: Forced) -> Result<Arc<Bdev>, Error> {
    // Checked before the file is created.
    if env.registry().find(&config.name).is_ok() {
        return Err(aryk_bdev::Error::Exists(config.name).into());
    }
    let Opened { store, is_ours } = open::open(&config, forced)?;
    let store = Arc::new(store);
    let Config { name, aliases, uuid, .. } = config;
    let identity = Identity { name, aliases, uuid: uuid.unwrap_or_else(Uuid::new_v4) };
    let bdev =
        env.registry().register(identity, Arc::new(FileDevice(Arc::clone(&store)))).inspect_err(|_| {
            if is_ours {
                open::remove(&store.file, &store.path);
            }
        })?;
    store.bdev.set(Arc::downgrade(&bdev)).expect("set once, here");
    Ok(bdev)
}

/// Counters of a disk of this module, in addition to those of the block layer.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stats {
    /// Requests that are held now because the store is full.
    pub held: u64,
    /// Requests that were ever held, since the disk was created.
    pub held_total: u64,
}

/// Returns the counters of `bdev`; `None` if it is not a disk of this module.
pub fn stats(bdev: &Bdev) -> Option<Stats> {
    store_of(bdev).map(|store| store.stats())
}

fn store_of(bdev: &Bdev) -> Option<&Arc<Store>> {
    let device: &dyn Any = bdev.device().as_ref();
    device.downcast_ref::<FileDevice>().map(|device| &device.0)
}
