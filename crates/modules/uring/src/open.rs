//! Finding, creating and measuring what holds a disk. Control context; blocks.

use crate::locks::{self, Holder, LockError, Uses};
use crate::ranges::Ranges;
use crate::store::{Alignment, Counts, Kind, Store};
use crate::{Config, Direct, Error, Forced, Lock};
use aryk_dma::{Buffer, PAGE};
use aryk_uring::blocking;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

/// Larger alignments than this are not worth it: the file is used through the page cache.
const ALIGNMENT_MAX: u32 = 64 * 1024;

/// Bytes in a block of a file, where none are asked for: every guest can boot from it.
const BLOCK_SIZE: u32 = 512;

/// Largest block of a file system that is told to guests as the physical one. Some network file systems tell their transfer size instead.
const PHYSICAL_MAX: u64 = 4096;

/// How long to wait for the last requests of a process that has ended, for one that may have been killed just now and is still to be seen, and for a
/// disk of ours that is just being removed.
const PATIENCE: Duration = Duration::from_secs(30);
const SEEN_PATIENCE: Duration = Duration::from_secs(1);
const OWN_PATIENCE: Duration = Duration::from_millis(250);
const PATIENCE_STEP: Duration = Duration::from_millis(10);

fn os(action: &'static str, path: &Path) -> impl Fn(Errno) -> Error {
    move |errno| match errno {
        Errno::ACCESS | Errno::PERM => crate::error::refused(action, path),
        _ => Error::Os { action, path: path.to_owned(), error: errno.into() },
    }
}

/// Opens what `config` names, creates it if it is to be, locks it, and finds out what it is like.
pub(crate) fn open(config: &Config, forced: Forced) -> Result<Store, Error> {
    if let Some(size) = config.block_size
        && !(size.is_power_of_two() && (512..=65_536).contains(&size))
    {
        return Err(Error::BlockSize(size));
    }
    let path = &config.path;
    let created = kind_of(path)?.is_none();
    if created {
        if config.size.is_none() || config.read_only {
            return Err(Error::Missing(path.clone()));
        }
        create(path)?;
    }
    let store = open_existing(config, forced);
    if created && store.is_err() {
        // The first error is the one to tell.
        let _ = std::fs::remove_file(path);
    }
    store
}

/// What is at `path`; `None` if nothing.
fn kind_of(path: &Path) -> Result<Option<Kind>, Error> {
    let stat = match rustix::fs::stat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(os("find", path)(errno)),
    };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok(Some(Kind::File)),
        FileType::BlockDevice => Ok(Some(Kind::BlockDevice)),
        FileType::Directory => Err(Error::Directory(path.to_owned())),
        _ => Err(Error::NotAFile(path.to_owned())),
    }
}

fn create(path: &Path) -> Result<(), Error> {
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map(drop).map_err(os("create", path))
}

fn open_existing(config: &Config, forced: Forced) -> Result<Store, Error> {
    let path = &config.path;
    let kind = kind_of(path)?.ok_or_else(|| Error::Missing(path.clone()))?;
    let file = open_locked(config, kind)?;
    let mut size = size_of(&file, path)?;
    if size == 0 {
        let wanted = config.size.filter(|_| kind == Kind::File && !config.read_only);
        size = wanted.ok_or_else(|| Error::Empty(path.clone()))?;
        grow_empty(&file, path, size)?;
    }
    let block_size = match (config.block_size, kind) {
        (Some(block_size), _) => block_size,
        (None, Kind::File) => BLOCK_SIZE,
        (None, Kind::BlockDevice) => rustix::fs::ioctl_blksszget(&file).map_err(os("measure", path))?,
    };
    check_multiple(path, size, block_size.into())?;
    let alignment = match (forced.alignment, config.direct) {
        (Some(alignment), _) => {
            find_alignment(&file, kind, size);
            alignment
        }
        (None, Direct::Auto) => find_alignment(&file, kind, size),
        (None, Direct::Never) => Alignment::NONE,
    };
    let has_device = alignment != Alignment::NONE && !is_in_memory(&file);
    tracing::debug!(path = %path.display(), size, block_size, ?alignment, "opened");
    if config.lock == Lock::InUse {
        locks::unlock(&file).map_err(|errno| os("unlock", path)(Errno::from_raw_os_error(errno as i32)))?;
    }
    Ok(Store {
        physical_block_size: physical_block_size(&file, kind, path)?.max(block_size).max(alignment.offset),
        file,
        path: path.clone(),
        kind,
        block_size,
        alignment,
        has_device,
        blocking: forced.blocking,
        read_only: config.read_only,
        on_full: config.on_full,
        blocks: AtomicU64::new(size / u64::from(block_size)),
        ranges: (block_size < alignment.offset).then(Ranges::default),
        unmaps: AtomicBool::new(true),
        zeroes: AtomicBool::new(true),
        lost: AtomicBool::new(false),
        counts: Counts::default(),
        uses: (config.lock == Lock::InUse).then(Uses::default),
        bdev: OnceLock::new(),
    })
}

/// Whether the file lies on a tmpfs, which takes direct I/O (Linux 6.6) and has no device.
fn is_in_memory(file: &OwnedFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| fs.f_type == libc::TMPFS_MAGIC)
}

pub(crate) fn check_multiple(path: &Path, size: u64, unit: u64) -> Result<(), Error> {
    if size > 0 && size.is_multiple_of(unit) {
        return Ok(());
    }
    Err(Error::NotAMultiple { path: path.to_owned(), size, unit })
}

/// Opens and locks. Waits a while for one who is just about to leave.
fn open_locked(config: &Config, kind: Kind) -> Result<OwnedFd, Error> {
    let mut waited = Duration::ZERO;
    loop {
        let error = match try_open_locked(config, kind) {
            Err(error @ (Error::Locked { .. } | Error::InUse(_))) if config.waits => error,
            result => return result,
        };
        let patience = match &error {
            Error::Locked { holder: Holder::Process { .. }, .. } => SEEN_PATIENCE,
            Error::Locked { holder: Holder::Ourselves, .. } => OWN_PATIENCE,
            _ => PATIENCE,
        };
        if waited >= patience {
            return Err(error);
        }
        pause();
        waited += PATIENCE_STEP;
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "opening a file blocks anyway, and no one can be told to wake us"
)]
fn pause() {
    std::thread::sleep(PATIENCE_STEP);
}

fn try_open_locked(config: &Config, kind: Kind) -> Result<OwnedFd, Error> {
    let Config { path, read_only, lock, .. } = config;
    let mut flags = OFlags::CLOEXEC | if *read_only { OFlags::RDONLY } else { OFlags::RDWR };
    if kind == Kind::BlockDevice && !read_only && *lock == Lock::Always {
        flags |= OFlags::EXCL;
    }
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Err(Errno::BUSY) => return Err(in_use(path)),
        file => file.map_err(os("open", path))?,
    };
    match locks::lock(&file, !read_only) {
        Ok(()) => Ok(file),
        // Another has it now; that it has a size is all that is asked of it until we may.
        Err(LockError::Held) if *lock == Lock::InUse && size_of(&file, path)? > 0 => Ok(file),
        Err(LockError::Held) => Err(Error::Locked { path: path.clone(), holder: holder(path) }),
        Err(LockError::Os(errno)) => {
            let path = path.display();
            tracing::warn!(%path, %errno, "no locks here: nothing keeps another process from writing to it");
            Ok(file)
        }
    }
}

/// Who has locked what is at `path`.
pub(crate) fn holder(path: &Path) -> Holder {
    rustix::fs::stat(path).map_or(Holder::Unknown, |stat| locks::holder(stat.st_dev, stat.st_ino))
}

/// The block device has an exclusive opener.
fn in_use(path: &Path) -> Error {
    match holder(path) {
        Holder::Unknown => Error::InUse(path.to_owned()),
        holder => Error::Locked { path: path.to_owned(), holder },
    }
}

/// Bytes of the file or block device.
pub(crate) fn size_of(file: impl AsFd, path: &Path) -> Result<u64, Error> {
    rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).map_err(os("measure", path))
}

/// Sets the size, so that it is there after a crash.
pub(crate) fn set_size(file: impl AsFd, path: &Path, size: u64) -> Result<(), Error> {
    rustix::fs::ftruncate(&file, size).map_err(os("set the size of", path))?;
    rustix::fs::fsync(&file).map_err(os("sync", path))
}

/// Gives a new file its size, and makes it and its name durable.
fn grow_empty(file: impl AsFd, path: &Path, size: u64) -> Result<(), Error> {
    set_size(file, path, size)?;
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(directory, flags, Mode::empty()).map_err(os("open", directory))?;
    rustix::fs::fsync(opened).map_err(os("sync", directory))
}

/// Bytes in a block of what lies below.
fn physical_block_size(file: impl AsFd, kind: Kind, path: &Path) -> Result<u32, Error> {
    let measured = os("measure", path);
    match kind {
        Kind::BlockDevice => rustix::fs::ioctl_blkpbszget(file).map_err(measured),
        Kind::File => {
            let block = rustix::fs::fstat(file).map_err(measured)?.st_blksize.cast_unsigned();
            let power = if block.is_power_of_two() { block } else { PHYSICAL_MAX };
            Ok(power.clamp(512, PHYSICAL_MAX) as u32)
        }
    }
}

/// Has `file` pass by the page cache if it can, and says what alignment that takes.
fn find_alignment(file: &OwnedFd, kind: Kind, size: u64) -> Alignment {
    if set_direct(file, true).is_err() {
        return Alignment::NONE;
    }
    let found = ask_alignment(file, kind).unwrap_or_else(|| probe_alignment(file));
    // The last block would have to be cut.
    if let Some(alignment) = found
        && alignment.offset <= ALIGNMENT_MAX
        && size.is_multiple_of(alignment.offset.into())
    {
        return alignment;
    }
    // It was not set when the file was opened, so it can be unset.
    let _ = set_direct(file, false);
    Alignment::NONE
}

fn set_direct(file: &OwnedFd, on: bool) -> Result<(), Errno> {
    let mut flags = rustix::fs::fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, on);
    rustix::fs::fcntl_setfl(file, flags)
}

/// What the kernel says: an alignment, or that there is no direct I/O (`Some(None)`); `None` if it does not know.
fn ask_alignment(file: &OwnedFd, kind: Kind) -> Option<Option<Alignment>> {
    let statx = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    if let Some(s) = statx.filter(|s| StatxFlags::from_bits_retain(s.stx_mask).contains(StatxFlags::DIOALIGN))
    {
        let alignment = Alignment { memory: s.stx_dio_mem_align, offset: s.stx_dio_offset_align };
        let is = alignment.memory.is_power_of_two() && alignment.offset.is_power_of_two();
        return Some(is.then_some(alignment));
    }
    if kind == Kind::BlockDevice {
        let sector = rustix::fs::ioctl_blksszget(file).ok()?;
        return Some(Some(Alignment { memory: sector, offset: sector }));
    }
    None
}

/// Finds the smallest alignment with which a read succeeds.
fn probe_alignment(file: &OwnedFd) -> Option<Alignment> {
    let sizes = std::iter::successors(Some(512), |&size| Some(size * 2)).take_while(|&s| s <= ALIGNMENT_MAX);
    for size in sizes {
        // Aligned to `size`, and to nothing larger.
        let mut buffer = Buffer::new(2 * size as usize, 2 * size.max(PAGE as u32) as usize);
        let result = blocking::read(file.as_fd(), &buffer.lend().slice(size, size), 0);
        buffer.reclaim();
        if result >= 0 {
            return Some(Alignment { memory: size, offset: size });
        }
        if result != -libc::EINVAL {
            return None;
        }
    }
    None
}
