//! The base of a pool that no daemon has open: a file or a block device. Either nothing of it changes, and writes stay in memory,
//! or it is locked and claimed as a daemon does that.

use super::Options;
use super::claim::Guard;
use crate::error::Error;
use aryk_volume::{Shard, StoreError, UNIT};
use aryk_volume_store::{
    Base, ClaimPace, DiskDone, DiskOp, DiskRequest, SUPERBLOCK_BYTES, SUPERBLOCK_PLACES, Superblock,
    share_bytes, share_places,
};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Bytes of what the engine may write to memory, at most. It writes little: its index, and what it finds at the end of the log.
const WRITTEN_MAX: usize = 1 << 30;

/// The bytes of QEMU's locks, which `arykd` takes as well: of a permission that an opener uses, and of one that it refuses to
/// others.
const USED: libc::off_t = 100;
const REFUSED: libc::off_t = 200;
/// The permissions to read what is consistent, to write, to write the same data, and to resize.
const READS: libc::off_t = 0;
const WRITES: libc::off_t = 1;
const REWRITES: libc::off_t = 2;
const RESIZES: libc::off_t = 3;

/// The disk.
pub struct Disk {
    path: PathBuf,
    /// The claim of its pool, if other hosts reach the pool.
    claim: Option<Guard>,
    file: File,
    /// Bytes of the file.
    bytes: u64,
    /// The shard whose part of the file is used.
    shard: Shard,
    /// Sectors that were written, by their numbers; `None` if writes change the disk.
    written: Option<HashMap<u64, Box<[u8]>>>,
}

impl Disk {
    /// Opens the disk at `path`, which changes only for a repair. This may take a while if other hosts reach the disk.
    ///
    /// # Errors
    /// [`Error::File`]: it cannot be opened, or a daemon has it open.
    pub fn open(path: &Path, options: Options) -> Result<Self, Error> {
        let is_writable = options.repairs;
        let failed = |why: String| Error::File(format!("{}: {why}", path.display()));
        let mut how = OpenOptions::new();
        how.read(true).write(is_writable);
        if is_writable && path.metadata().is_ok_and(|metadata| metadata.file_type().is_block_device()) {
            // The kernel refuses a device that is mounted, or that a daemon has open.
            how.custom_flags(libc::O_EXCL);
        }
        let mut file = how.open(path).map_err(|error| failed(format!("cannot be opened: {error}")))?;
        if is_held(&file, USED + WRITES)? || (is_writable && !try_lock(&file)?) {
            let why = "a daemon has it open: check the pool there, without --offline";
            return Err(failed(why.to_owned()));
        }
        let bytes = file.seek(SeekFrom::End(0))?;
        let claim = Guard::new(path, ClaimPace::default(), is_writable, options.is_json)
            .map_err(|error| failed(error.to_string()))?;
        let written = (!is_writable).then(HashMap::new);
        Ok(Self { path: path.to_owned(), claim, file, bytes, shard: Shard::ALL, written })
    }

    /// Looks at the claim of the pool if it is time to, and renews it for a repair. To be called again and again.
    ///
    /// # Errors
    /// [`Error::File`]: another process has the pool now.
    pub fn renew_claim(&mut self) -> Result<(), Error> {
        let renewed = self.claim.as_mut().map_or(Ok(()), Guard::renew);
        renewed.map_err(|error| Error::File(format!("{}: {error}", self.path.display())))
    }

    /// The number of shards of the pool, as far as a superblock says it.
    pub fn shards(&self) -> u32 {
        let superblock = SUPERBLOCK_PLACES.into_iter().find_map(|offset| {
            let mut bytes = [0; SUPERBLOCK_BYTES];
            self.file.read_exact_at(&mut bytes, offset).ok()?;
            Superblock::parse(&bytes).ok()
        });
        superblock.map_or(1, |superblock| superblock.shard.count())
    }

    /// The shard whose part is used.
    pub const fn shard(&self) -> Shard {
        self.shard
    }

    /// Uses the part of a shard from now on.
    pub const fn use_shard(&mut self, shard: Shard) {
        self.shard = shard;
    }

    /// The part that is used. The pool says how its data is aligned; here all can be read.
    pub const fn base(&self) -> Base {
        Base { bytes: share_bytes(self.shard, self.bytes), block: UNIT }
    }

    /// Runs an operation.
    pub fn run(&mut self, op: DiskOp) -> DiskDone {
        let DiskOp { tag, request } = op;
        let (buffer, result) = match request {
            DiskRequest::Read { offset, mut buffer, len } => {
                let mut rest = &mut buffer.bytes_mut()[..len as usize];
                let read = share_places(self.shard, offset, len.into()).try_for_each(|(place, len)| {
                    let (piece, others) = std::mem::take(&mut rest).split_at_mut(len as usize);
                    rest = others;
                    self.read(place, piece)
                });
                (Some(buffer), read.map_err(|_| StoreError::Medium))
            }
            DiskRequest::Write { offset, buffer, len } => {
                let mut rest = &buffer.bytes()[..len as usize];
                let written = share_places(self.shard, offset, len.into()).try_for_each(|(place, len)| {
                    let (piece, others) = rest.split_at(len as usize);
                    rest = others;
                    self.write(place, piece)
                });
                (Some(buffer), written)
            }
            DiskRequest::Flush if self.written.is_none() => {
                (None, self.file.sync_data().map_err(|_| StoreError::Medium))
            }
            DiskRequest::Flush | DiskRequest::Discard { .. } => (None, Ok(())),
        };
        DiskDone { tag, buffer, result }
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, offset)?;
        let Some(written) = self.written.as_ref().filter(|written| !written.is_empty()) else {
            return Ok(());
        };
        for (sector, number) in into.chunks_mut(UNIT as usize).zip(offset / u64::from(UNIT)..) {
            if let Some(written) = written.get(&number) {
                sector.copy_from_slice(&written[..sector.len()]);
            }
        }
        Ok(())
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let Some(written) = &mut self.written else {
            let mut result = self.file.write_all_at(bytes, offset);
            if self.claim.is_some() {
                // The kernel would write it some time later, when another host may have the pool.
                result = result.and_then(|()| self.file.sync_data());
            }
            return result.map_err(|error| match error.raw_os_error() {
                Some(libc::ENOSPC | libc::EDQUOT) => StoreError::NoSpace,
                _ => StoreError::Medium,
            });
        };
        if (written.len() + bytes.len() / UNIT as usize) * UNIT as usize > WRITTEN_MAX {
            return Err(StoreError::NoSpace);
        }
        let sectors = bytes.chunks(UNIT as usize);
        written.extend(sectors.zip(offset / u64::from(UNIT)..).map(|(data, number)| (number, data.into())));
        Ok(())
    }
}

fn byte(kind: libc::c_int, start: libc::off_t) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: 1,
        l_pid: 0,
    }
}

/// Whether another process has locked this byte.
fn is_held(file: &File, start: libc::off_t) -> io::Result<bool> {
    let mut lock = byte(libc::F_WRLCK, start);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

/// Locks the file for writing, as a daemon does. Returns whether no other process uses it.
fn try_lock(file: &File) -> io::Result<bool> {
    let all = [READS, WRITES, REWRITES, RESIZES];
    for start in all.iter().map(|used| USED + used).chain(all[1..].iter().map(|refused| REFUSED + refused)) {
        fcntl(file, FcntlArg::F_OFD_SETLK(&byte(libc::F_RDLCK, start)))?;
    }
    for start in all.iter().map(|used| REFUSED + used).chain(all[1..].iter().map(|refused| USED + refused)) {
        if is_held(file, start)? {
            return Ok(false);
        }
    }
    Ok(true)
}
