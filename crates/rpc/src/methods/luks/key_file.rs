//! Key files: secrets of LUKS key slots, in files that only their owner may read. Control context, on threads that may block.

use crate::Error;
use aryk_secrets::SecretBytes;
use rustix::fs::{FileType, Mode, OFlags, Stat, fstat, open};
use rustix::io::Errno;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Bytes of a key file, at most, as in cryptsetup.
const LEN_MAX: usize = 8 << 20;

/// The content of a key file.
pub(super) struct KeyFile {
    pub secret: SecretBytes,
    pub version: FileVersion,
}

/// Tells one content of a key file from another without being secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileVersion {
    device: u64,
    inode: u64,
    size: i64,
    changed: (i64, u64),
}

/// Reads a key file on a thread that may block.
pub(super) async fn read(path: &Path) -> Result<KeyFile, Error> {
    let path = path.to_owned();
    let read = tokio::task::spawn_blocking(move || read_now(&path)).await;
    read.map_err(|error| Error::Internal(error.to_string()))?
}

fn read_now(path: &PathBuf) -> Result<KeyFile, Error> {
    let shown = path.display();
    let failed = |errno: Errno| {
        let hint = match errno {
            Errno::NOENT => "; the daemon tries again when the disk is created again",
            Errno::ACCESS | Errno::PERM => {
                ": the daemon's user must be allowed to read it; with --allow-dir, it must be below an allowed directory"
            }
            _ => "",
        };
        Error::errno(errno, format!("key file {shown}: {}{hint}", std::io::Error::from(errno)))
    };
    if !path.is_absolute() {
        return Err(Error::invalid(format!("key file {shown}: give the whole path, from / on")));
    }
    // A FIFO must not block the thread for ever.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::from(open(path, flags, Mode::empty()).map_err(failed)?);
    let stat = fstat(&file).map_err(failed)?;
    check(&stat).map_err(|why| Error::errno(Errno::ACCESS, format!("key file {shown} {why}")))?;
    let len = match usize::try_from(stat.st_size) {
        Ok(0) => return Err(Error::invalid(format!("key file {shown} is empty"))),
        Ok(len @ ..=LEN_MAX) => len,
        _ => return Err(Error::invalid(format!("key file {shown} has more than {LEN_MAX} bytes"))),
    };
    let mut secret = SecretBytes::zeroed(len);
    let taken = (&file).read_exact(&mut secret);
    taken.map_err(|error| failed(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    Ok(KeyFile { secret, version: FileVersion::of(&stat) })
}

/// Refuses a file that other users may read or replace.
fn check(stat: &Stat) -> Result<(), String> {
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err("is not a regular file".into());
    }
    let mode = stat.st_mode & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!("may be read or changed by other users (its mode is {mode:o}): use 'chmod 600'"));
    }
    let (owner, us) = (stat.st_uid, rustix::process::geteuid().as_raw());
    if owner != 0 && owner != us {
        return Err(format!("belongs to user {owner}: it must belong to root or to the daemon's user, {us}"));
    }
    Ok(())
}

impl FileVersion {
    fn of(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
            size: stat.st_size,
            changed: (stat.st_ctime, stat.st_ctime_nsec),
        }
    }
}
