//! Opening, creating and measuring the store of a disk. Control context; blocks.

use crate::locks::{self, Holder, LockError, Uses};
use crate::ranges::Ranges;
use crate::store::{Alignment, Counts, Kind, Store};
use crate::{Config, Direct, Error, Forced, Lock};
use aryk_bdev::{Bytes, Failures};
use aryk_dma::{Buffer, PAGE};
use aryk_uring::blocking;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

/// The largest alignment of direct I/O that is used: a file that needs a larger alignment is used through the page cache.
const ALIGNMENT_MAX: u32 = 64 * 1024;

/// Default block size of a file in bytes: every guest can boot from such a disk.
const BLOCK_SIZE: u32 = 512;

/// The largest block of a file system that is reported to guests as the physical block. Some network file systems report their
/// transfer size as the block size.
const PHYSICAL_MAX: u64 = 4096;

/// How long to wait for the last requests of a process that has ended; and how long for a visible process that may have just
/// been killed, or for a disk of this process that is being removed.
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

/// A disk's store, opened.
pub(crate) struct Opened {
    pub store: Store,
    /// This call created the file and has locked it, so no other opener has it: [`remove`] may delete it.
    pub is_ours: bool,
}

/// The result of finding or creating the file of a path.
enum Found {
    There(Kind),
    /// An empty file, which this call created.
    Created(OwnedFd),
    /// Another process created the file and removed it in between.
    Gone,
}

/// The maximum number of attempts while other processes create and remove files at the path.
const TRIES: u32 = 100;

/// Opens the store that `config` names, or creates it if `config` has a size; then locks and measures it.
pub(crate) fn open(config: &Config, forced: Forced) -> Result<Opened, Error> {
    if let Some(size) = config.block_size
        && !(size.is_power_of_two() && (512..=65_536).contains(&size))
    {
        return Err(Error::BlockSize(size));
    }
    let path = &config.path;
    if config.size == Some(Bytes::ZERO) {
        return Err(Error::NoSize(path.clone()));
    }
    for _ in 0..TRIES {
        let (file, kind, is_ours) = match find_or_create(config)? {
            Found::Gone => continue,
            Found::There(kind) => match open_locked(config, kind)? {
                Some(file) => (file, kind, false),
                None => continue,
            },
            Found::Created(file) => match locks::lock(&file, true) {
                Ok(()) => (file, Kind::File, true),
                // Another process has opened and locked the file since: from now on it is an existing file.
                Err(LockError::Held) => continue,
                Err(error) => (without_lock(error, file, path)?, Kind::File, false),
            },
        };
        // The process that created the file may have removed it before it was locked here.
        if is_at(&file, path)? {
            return into_store(config, forced, kind, file, is_ours);
        }
    }
    Err(os("create", path)(Errno::EXIST))
}

fn find_or_create(config: &Config) -> Result<Found, Error> {
    let path = &config.path;
    if let Some(kind) = kind_of(path)? {
        return Ok(Found::There(kind));
    }
    if config.size.is_none() || config.read_only {
        return Err(missing(path));
    }
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Ok(Found::Created(file)),
        Err(Errno::NOENT) => Err(missing(path)),
        Err(Errno::EXIST) if is_dangling(path) => Err(Error::Dangling(path.clone())),
        Err(Errno::EXIST) => Ok(Found::Gone),
        Err(errno) => Err(os("create", path)(errno)),
    }
}

/// The error for a missing file: its directory may be missing too.
fn missing(path: &Path) -> Error {
    let directory = directory_of(path);
    match rustix::fs::stat(directory) {
        Err(Errno::NOENT) => Error::NoDirectory { path: path.to_owned(), directory: directory.to_owned() },
        _ => Error::Missing(path.to_owned()),
    }
}

/// Whether `path` is a symbolic link whose target does not exist.
fn is_dangling(path: &Path) -> bool {
    let is_link = |stat: rustix::fs::Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Symlink;
    rustix::fs::lstat(path).is_ok_and(is_link) && matches!(rustix::fs::stat(path), Err(Errno::NOENT))
}

/// Whether `path` names the open `file` now.
fn is_at(file: impl AsFd, path: &Path) -> Result<bool, Error> {
    let ours = rustix::fs::fstat(file).map_err(os("find", path))?;
    match rustix::fs::stat(path) {
        Ok(there) => Ok((there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(os("find", path)(errno)),
    }
}

/// Deletes a file that is [`Opened::is_ours`], unless another file is at its path now.
pub(crate) fn remove(file: impl AsFd, path: &Path) {
    if is_at(file, path).is_ok_and(|is| is)
        && let Err(error) = std::fs::remove_file(path)
    {
        tracing::warn!(path = %path.display(), %error, "cannot delete the file of a disk whose creation failed");
    }
}

/// The kind of the file at `path`; `None` if there is no file.
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

/// Properties of a store.
struct Measured {
    size: Bytes,
    block_size: u32,
    physical_block_size: u32,
    alignment: Alignment,
    allocation: u32,
}

/// Measures a locked file, and sets the size of an empty one.
fn measure(config: &Config, forced: Forced, kind: Kind, file: &OwnedFd) -> Result<Measured, Error> {
    let path = &config.path;
    let mut size = size_of(file, path)?;
    if size == Bytes::ZERO {
        let wanted = config.size.filter(|_| kind == Kind::File && !config.read_only);
        size = wanted.ok_or_else(|| Error::Empty(path.clone()))?;
        check_multiple(path, size, config.block_size.unwrap_or(BLOCK_SIZE))?;
        grow_empty(file, path, size)?;
    } else if let Some(requested) = config.size.filter(|requested| *requested != size) {
        return Err(Error::OtherSize { path: path.clone(), size, requested });
    }
    let sector = match kind {
        Kind::File => 1,
        Kind::BlockDevice => rustix::fs::ioctl_blksszget(file).map_err(os("measure", path))?,
    };
    let block_size = config.block_size.unwrap_or(sector.max(BLOCK_SIZE));
    check_multiple(path, size, block_size)?;
    let found = match config.direct {
        Direct::Auto => find_alignment(file, kind, size, path)?,
        Direct::Never => Alignment::NONE,
    };
    let alignment = forced.alignment.unwrap_or(found);
    tracing::debug!(path = %path.display(), size = size.0, block_size, ?alignment, "opened");
    let physical = physical_block_size(file, kind, path)?;
    Ok(Measured {
        size,
        block_size,
        physical_block_size: physical.max(block_size).max(alignment.offset),
        alignment,
        allocation: alignment.offset.max(sector),
    })
}

fn into_store(
    config: &Config,
    forced: Forced,
    kind: Kind,
    file: OwnedFd,
    is_ours: bool,
) -> Result<Opened, Error> {
    let path = &config.path;
    let measured = measure(config, forced, kind, &file);
    if measured.is_err() && is_ours {
        remove(&file, path);
    }
    let Measured { size, block_size, physical_block_size, alignment, allocation } = measured?;
    let locks_in_use = config.lock == Lock::InUse;
    if locks_in_use {
        locks::unlock(&file).map_err(|errno| os("unlock", path)(Errno::from_raw_os_error(errno as i32)))?;
    }
    let store = Store {
        physical_block_size,
        enospc_is_own: enospc_is_own(kind, &file),
        has_device: alignment != Alignment::NONE && !is_in_memory(&file),
        file,
        path: path.clone(),
        kind,
        product: config.product,
        block_size,
        alignment,
        allocation,
        blocking: forced.blocking,
        read_only: config.read_only,
        on_full: config.on_full,
        blocks: AtomicU64::new(size.whole_blocks(block_size).0),
        resizing: AtomicBool::new(false),
        ranges: (block_size < alignment.offset).then(Ranges::default),
        punches: AtomicBool::new(true),
        zeroes: AtomicBool::new(true),
        lost: AtomicBool::new(false),
        counts: Counts::default(),
        failures: Failures::default(),
        uses: locks_in_use.then(Uses::default),
        bdev: OnceLock::new(),
    };
    Ok(Opened { store, is_ours: is_ours && !locks_in_use })
}

/// Whether ENOSPC of a write refers to that write: the file systems listed here allocate its space before they complete it.
/// An unknown file system may report the ENOSPC of earlier writes, as NFS does.
fn enospc_is_own(kind: Kind, file: &OwnedFd) -> bool {
    /// The magic number of OpenZFS, which the headers of Linux do not define.
    const ZFS_SUPER_MAGIC: rustix::fs::FsWord = 0x2fc1_2fc1;
    const OWN: [rustix::fs::FsWord; 6] = [
        libc::EXT4_SUPER_MAGIC,
        libc::XFS_SUPER_MAGIC,
        libc::BTRFS_SUPER_MAGIC,
        libc::F2FS_SUPER_MAGIC,
        libc::TMPFS_MAGIC,
        ZFS_SUPER_MAGIC,
    ];
    kind == Kind::BlockDevice || rustix::fs::fstatfs(file).is_ok_and(|fs| OWN.contains(&fs.f_type))
}

/// Whether the file is on a tmpfs, which supports direct I/O (Linux 6.6) and has no device.
fn is_in_memory(file: &OwnedFd) -> bool {
    rustix::fs::fstatfs(file).is_ok_and(|fs| fs.f_type == libc::TMPFS_MAGIC)
}

pub(crate) fn check_multiple(path: &Path, size: Bytes, unit: u32) -> Result<(), Error> {
    if size > Bytes::ZERO && size.0.is_multiple_of(unit.into()) {
        return Ok(());
    }
    Err(Error::NotAMultiple { path: path.to_owned(), size, unit })
}

/// Opens and locks the file; `None` if it no longer exists. Waits for a lock whose holder may be about to end.
fn open_locked(config: &Config, kind: Kind) -> Result<Option<OwnedFd>, Error> {
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
    reason = "opening a file blocks anyway, and the kernel does not report a released lock"
)]
fn pause() {
    std::thread::sleep(PATIENCE_STEP);
}

fn try_open_locked(config: &Config, kind: Kind) -> Result<Option<OwnedFd>, Error> {
    let Config { path, read_only, lock, .. } = config;
    let mut flags = OFlags::CLOEXEC | if *read_only { OFlags::RDONLY } else { OFlags::RDWR };
    if kind == Kind::BlockDevice && !read_only && *lock == Lock::Always {
        flags |= OFlags::EXCL;
    }
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Err(Errno::BUSY) => return Err(in_use(path)),
        Err(Errno::NOENT) => return Ok(None),
        file => file.map_err(os("open", path))?,
    };
    match locks::lock(&file, !read_only) {
        Ok(()) => Ok(Some(file)),
        // Another process has the file locked now. Until this process can lock it, the file only needs a size.
        Err(LockError::Held) if *lock == Lock::InUse && size_of(&file, path)? > Bytes::ZERO => Ok(Some(file)),
        Err(error) => without_lock(error, file, path).map(Some),
    }
}

/// Continues with a file that could not be locked if the file system does not support locks.
fn without_lock(error: LockError, file: OwnedFd, path: &Path) -> Result<OwnedFd, Error> {
    match error {
        LockError::None(errno) => {
            let path = path.display();
            tracing::warn!(%path, %errno, "the file system has no locks: another process may open the file and write to it");
            Ok(file)
        }
        error => Err(cannot_lock(error, path)),
    }
}

/// Converts an error of locking a file to an error of the disk.
pub(crate) fn cannot_lock(error: LockError, path: &Path) -> Error {
    match error {
        LockError::Held => Error::Locked { path: path.to_owned(), holder: holder(path) },
        LockError::None(errno) | LockError::Os(errno) => {
            os("lock", path)(Errno::from_raw_os_error(errno as i32))
        }
    }
}

/// Finds the holder of the lock of the file at `path`.
pub(crate) fn holder(path: &Path) -> Holder {
    rustix::fs::stat(path).map_or(Holder::Unknown, |stat| locks::holder(stat.st_dev, stat.st_ino))
}

/// The error for a block device that has an exclusive opener.
fn in_use(path: &Path) -> Error {
    match holder(path) {
        Holder::Unknown => Error::InUse(path.to_owned()),
        holder => Error::Locked { path: path.to_owned(), holder },
    }
}

/// The size of the file or block device.
pub(crate) fn size_of(file: impl AsFd, path: &Path) -> Result<Bytes, Error> {
    rustix::fs::seek(file, rustix::fs::SeekFrom::End(0)).map(Bytes).map_err(os("measure", path))
}

/// Sets the size and makes it durable.
pub(crate) fn set_size(file: impl AsFd, path: &Path, size: Bytes) -> Result<(), Error> {
    rustix::fs::ftruncate(&file, size.0).map_err(os("set the size of", path))?;
    rustix::fs::fsync(&file).map_err(os("sync", path))
}

/// The directory of a file.
fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    }
}

/// Sets the size of a new file, and makes the size and the file's name durable.
fn grow_empty(file: impl AsFd, path: &Path, size: Bytes) -> Result<(), Error> {
    set_size(file, path, size)?;
    let directory = directory_of(path);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(directory, flags, Mode::empty()).map_err(os("open", directory))?;
    rustix::fs::fsync(opened).map_err(os("sync", directory))
}

/// The physical block size of the device or file system, in bytes.
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

/// Enables direct I/O of `file` if the file supports it, and returns the alignment that it needs.
fn find_alignment(file: &OwnedFd, kind: Kind, size: Bytes, path: &Path) -> Result<Alignment, Error> {
    match set_direct(file, true) {
        Ok(()) => {}
        // File systems without direct I/O return these errors.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Alignment::NONE),
        Err(errno) => return Err(os("set direct I/O of", path)(errno)),
    }
    let found = ask_alignment(file, kind).unwrap_or_else(|| probe_alignment(file));
    // With another size, the last block would be incomplete.
    if let Some(alignment) = found
        && alignment.offset <= ALIGNMENT_MAX
        && size.0.is_multiple_of(alignment.offset.into())
    {
        return Ok(alignment);
    }
    // The file was opened without the flag, so the flag can be cleared; with it, unaligned writes would fail.
    set_direct(file, false).map_err(os("unset direct I/O of", path))?;
    Ok(Alignment::NONE)
}

fn set_direct(file: &OwnedFd, on: bool) -> Result<(), Errno> {
    let mut flags = rustix::fs::fcntl_getfl(file)?;
    flags.set(OFlags::DIRECT, on);
    rustix::fs::fcntl_setfl(file, flags)
}

/// Asks the kernel for the alignment; `Some(None)` if there is no direct I/O, `None` if the kernel does not report it.
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
        // The store fails, or has no direct I/O after all: the page cache is always safe, and later reads report the error.
        if result != -libc::EINVAL {
            return None;
        }
    }
    None
}
