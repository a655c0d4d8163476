//! The socket that front-ends connect to. Control context; binding does not block.

use crate::ListenError;
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Stat, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// What `sun_path` holds, with its final zero.
pub(crate) const PATH_MAX: usize = 107;

/// Who may connect. What is not given is as the process' user and umask make it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketOptions {
    /// User id of the socket's owner.
    pub owner: Option<u32>,
    /// Group id.
    pub group: Option<u32>,
    /// Permission bits: to connect one needs the right to write.
    pub mode: Option<u32>,
}

/// A socket that is listened on, until it is dropped: then it is removed.
#[derive(Debug)]
pub struct Listener {
    socket: std::os::unix::net::UnixListener,
    path: PathBuf,
    /// Device and inode of the socket's file.
    file: (u64, u64),
}

impl Listener {
    /// Makes and listens on a socket at `path`. A socket that nobody listens on any more is replaced. Rights are set
    /// before anybody can connect.
    ///
    /// # Errors
    /// As [`ListenError`] says.
    pub fn bind(path: impl Into<PathBuf>, options: SocketOptions) -> Result<Self, ListenError> {
        let path = path.into();
        if path.as_os_str().len() > PATH_MAX {
            return Err(ListenError::PathTooLong { path, max: PATH_MAX });
        }
        let address = SocketAddrUnix::new(&path).map_err(os(&path, "use the path"))?;
        remove_stale(&path, &address)?;
        let socket = new_socket().map_err(os(&path, "make a socket"))?;
        rustix::net::bind(&socket, &address).map_err(os(&path, "bind"))?;
        let stat = rustix::fs::lstat(&path).map_err(os(&path, "look at the socket"))?;
        let listener = Self { socket: socket.into(), path, file: (stat.st_dev, stat.st_ino) };
        listener.set_rights(options)?;
        rustix::net::listen(&listener.socket, 16).map_err(os(&listener.path, "listen"))?;
        Ok(listener)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The socket, to be watched; it goes on listening after `self` is gone, but cannot be found any more.
    pub(crate) fn watched(&self) -> std::io::Result<tokio::net::UnixListener> {
        tokio::net::UnixListener::from_std(self.socket.try_clone()?)
    }

    fn set_rights(&self, options: SocketOptions) -> Result<(), ListenError> {
        let failed = |what| {
            let path = self.path.clone();
            move |e: Errno| ListenError::Rights { path, what, source: e.into() }
        };
        let (owner, group) = (options.owner.map(Uid::from_raw), options.group.map(Gid::from_raw));
        if owner.is_some() || group.is_some() {
            rustix::fs::chownat(CWD, &self.path, owner, group, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(failed("owner or group"))?;
        }
        if let Some(mode) = options.mode {
            rustix::fs::chmod(&self.path, Mode::from_raw_mode(mode)).map_err(failed("mode"))?;
        }
        Ok(())
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another process may have put its own socket there since.
        let still_ours = rustix::fs::lstat(&self.path).is_ok_and(|s| (s.st_dev, s.st_ino) == self.file);
        if still_ours && let Err(error) = rustix::fs::unlink(&self.path) {
            tracing::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// A stream socket that never waits.
pub(crate) fn new_socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Makes `path` free, if what is there is a socket without a listener.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), ListenError> {
    let stat: Stat = match rustix::fs::lstat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(os(path, "look at it")(e)),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(ListenError::NotASocket(path.into()));
    }
    let probe = new_socket().map_err(os(path, "make a socket"))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {
            tracing::info!("replacing {}: nobody listens on it", path.display());
            rustix::fs::unlink(path).map_err(os(path, "remove the stale socket"))
        }
        // A full backlog (EAGAIN) is somebody's, too.
        Ok(()) | Err(Errno::AGAIN) => Err(ListenError::InUse(path.into())),
        Err(e) => Err(os(path, "find out whether another process listens on it")(e)),
    }
}

fn os(path: &Path, action: &'static str) -> impl FnOnce(Errno) -> ListenError {
    let path = path.to_owned();
    move |e| ListenError::Os { path, action, source: e.into() }
}
