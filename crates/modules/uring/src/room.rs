//! Thin provisioning: whether file systems have the space that their sparse disks promise. Control context; blocks.
//!
//! A sparse file takes no space before it is written, so files can promise more bytes than the file system has. Guests' writes
//! fail when the file system is full. Overcommitment may be intended, so it is reported and not refused.

use crate::store::{Kind, Store};
use crate::{Error, store_of};
use aryk_bdev::Registry;
use rustix::io::Errno;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The space that disks in files of one file system promise, and the space that it has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Room {
    /// Where the file system is mounted.
    pub path: PathBuf,
    /// Disks in files of this file system.
    pub disks: u64,
    /// The sum of the disks' sizes, in bytes.
    pub promised: u64,
    /// Bytes that the files have allocated already; no file counts more than its size.
    pub allocated: u64,
    /// Free bytes of the file system for users other than root.
    pub free: u64,
}

impl Room {
    /// Bytes that are promised, but neither allocated nor free.
    pub const fn missing(&self) -> u64 {
        self.promised.saturating_sub(self.allocated).saturating_sub(self.free)
    }
}

/// Lists the file systems of the disks in files of `registry`, in the order of the disks. Read-only disks are omitted, because
/// they are not written. If `of` names a disk, only that disk's file system is listed.
///
/// # Errors
/// [`Error::Os`].
pub fn rooms(registry: &Registry, of: Option<&str>) -> Result<Vec<Room>, Error> {
    let only = match of {
        Some(disk) => Some(device_of(registry, disk)?),
        None => None,
    };
    let mut rooms: Vec<(u64, Room)> = Vec::new();
    for bdev in registry.list() {
        let Some(store) = store_of(&bdev).filter(|store| store.kind == Kind::File && !store.read_only) else {
            continue;
        };
        let measured = |errno: Errno| os(store, errno);
        let stat = rustix::fs::fstat(&store.file).map_err(measured)?;
        if only.is_some_and(|device| device != Some(stat.st_dev)) {
            continue;
        }
        let room = match rooms.iter_mut().find(|(device, _)| *device == stat.st_dev) {
            Some((_, room)) => room,
            None => {
                let fs = rustix::fs::fstatvfs(&store.file).map_err(measured)?;
                let free = fs.f_bavail.saturating_mul(fs.f_frsize);
                let path = mounted_at(&store.path, stat.st_dev);
                rooms.push((stat.st_dev, Room { path, disks: 0, promised: 0, allocated: 0, free }));
                &mut rooms.last_mut().expect("just pushed").1
            }
        };
        let size = stat.st_size.cast_unsigned();
        room.disks += 1;
        room.promised = room.promised.saturating_add(size);
        room.allocated += (stat.st_blocks.cast_unsigned() * 512).min(size);
    }
    Ok(rooms.into_iter().map(|(_, room)| room).collect())
}

/// The device number of the file system that a disk's file is in; `None` if the disk is not in a file.
fn device_of(registry: &Registry, disk: &str) -> Result<Option<u64>, Error> {
    let bdev = registry.find(disk)?;
    let Some(store) = store_of(&bdev).filter(|store| store.kind == Kind::File) else { return Ok(None) };
    let stat = rustix::fs::fstat(&store.file).map_err(|errno| os(store, errno))?;
    Ok(Some(stat.st_dev))
}

/// The mount point of the file system `device` with the file `path`: the uppermost parent directory that is on `device`.
/// If the file no longer exists, its path.
fn mounted_at(path: &Path, device: u64) -> PathBuf {
    let is_of_it = |path: &&Path| path.metadata().is_ok_and(|meta| meta.dev() == device);
    let Ok(whole) = path.canonicalize() else { return path.to_owned() };
    whole.ancestors().take_while(is_of_it).last().map_or_else(|| path.to_owned(), Path::to_owned)
}

fn os(store: &Store, errno: Errno) -> Error {
    Error::Os { action: "measure", path: store.path.clone(), error: errno.into() }
}
