//! The lock file beside a socket. Control context; does not block.

use crate::{ListenError, os};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// The exclusive right to serve a socket: `flock` on a file with the socket's name and `.lock`. SPDK uses the same file, so the
/// two exclude each other. The kernel frees the lock when its holder dies; dropping this value removes the file.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    _file: OwnedFd,
}

impl Lock {
    /// Locks the socket at `socket`.
    ///
    /// # Errors
    /// [`ListenError::InUse`] if another process holds the lock; [`ListenError::Os`].
    pub fn take(socket: &Path) -> Result<Self, ListenError> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        loop {
            let file = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600))
                .map_err(os(&path, "create the lock file"))?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(ListenError::InUse(socket.to_owned())),
                Err(e) => return Err(os(&path, "lock the lock file")(e)),
            }
            // The last holder may have removed the file between open and lock: then this lock locks nothing.
            let ours =
                rustix::fs::fstat(&file).map_err(os(&path, "read the status of the lock file"))?.st_ino;
            if rustix::fs::stat(&path).is_ok_and(|there| there.st_ino == ours) {
                return Ok(Self { path, _file: file });
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // If another process has removed the file already, nothing is left to do.
        let _ = rustix::fs::unlink(&self.path);
    }
}
