//! The lock beside a socket. Control context; does not block.

use crate::{ListenError, os};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// The right to serve a socket: a file of its name and `.lock`, as SPDK has it, with which it is shared. Its lock dies with its holder; the file goes when this is
/// dropped.
#[derive(Debug)]
pub struct Lock {
    path: PathBuf,
    _file: OwnedFd,
}

impl Lock {
    /// Takes the right to serve the socket at `socket`.
    ///
    /// # Errors
    /// [`ListenError::InUse`] if another has it; [`ListenError::Os`].
    pub fn take(socket: &Path) -> Result<Self, ListenError> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".lock");
        let path = PathBuf::from(path);
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        loop {
            let file = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600))
                .map_err(os(&path, "make the lock file"))?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Err(ListenError::InUse(socket.to_owned())),
                Err(e) => return Err(os(&path, "lock it")(e)),
            }
            // The last holder may have removed the file between the two: then this lock locks nothing.
            let ours = rustix::fs::fstat(&file).map_err(os(&path, "look at the lock file"))?.st_ino;
            if rustix::fs::stat(&path).is_ok_and(|there| there.st_ino == ours) {
                return Ok(Self { path, _file: file });
            }
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Whoever removed it before has done what was to be done.
        let _ = rustix::fs::unlink(&self.path);
    }
}
