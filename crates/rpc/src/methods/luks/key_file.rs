//! Key files: secrets of LUKS key slots, in files that only their owner may read. Control context, on threads that may block.

use crate::Error;
use crate::secret_file::{Rights, SecretFile, SecretFileError};
use aryk_secrets::SecretBytes;
use rustix::fs::Stat;
use rustix::io::Errno;
use std::path::Path;

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

fn read_now(path: &Path) -> Result<KeyFile, Error> {
    let shown = path.display();
    if !path.is_absolute() {
        return Err(Error::invalid(format!("key file {shown}: give the whole path, from / on")));
    }
    let failed = |error: SecretFileError| {
        let (errno, hint) = match &error {
            SecretFileError::Io(error) => {
                let errno = Errno::from_io_error(error).unwrap_or(Errno::IO);
                (errno, hint_of(errno))
            }
            SecretFileError::TooLarge(_) => (Errno::INVAL, ""),
            SecretFileError::NotAFile | SecretFileError::Mode(_) | SecretFileError::Owner { .. } => {
                (Errno::ACCESS, "")
            }
        };
        Error::errno(errno, format!("key file {shown} {error}{hint}"))
    };
    let file = SecretFile::open(path, Rights::OwnerOnly, LEN_MAX).map_err(failed)?;
    let secret = file.read().map_err(failed)?;
    if secret.is_empty() {
        return Err(Error::invalid(format!("key file {shown} is empty")));
    }
    Ok(KeyFile { secret, version: FileVersion::of(&file.stat) })
}

const fn hint_of(errno: Errno) -> &'static str {
    match errno {
        Errno::NOENT => "; the daemon tries again when the disk is created again",
        Errno::ACCESS | Errno::PERM => {
            ": the daemon's user must be allowed to read it; with --allow-dir, it must be below an allowed directory"
        }
        _ => "",
    }
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
