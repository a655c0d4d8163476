//! Listening UNIX sockets: of controllers, of JSON-RPC, of the metrics. Control context; nothing here blocks.
//!
//! - [`Listener`]: a socket in the file system. It replaces the socket file of a dead process, has its final permissions before a
//!   client can connect, and is removed when dropped, unless another process has replaced the file.
//! - [`Lock`]: a lock file beside the socket, taken before the socket exists, so that of two processes that start at the same
//!   time only one serves the socket.
#![forbid(unsafe_code)]

mod lock;

pub use lock::Lock;

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

/// Longest path of a socket in bytes: the size of `sun_path` less its terminating zero.
pub const PATH_MAX: usize = 107;

/// Clients that may wait in the backlog for an accept.
const BACKLOG: i32 = 128;

/// Permissions of a socket. An absent owner or group means the process's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketOptions {
    /// User id of the socket's owner.
    pub owner: Option<u32>,
    /// Group id.
    pub group: Option<u32>,
    /// Permission bits. Absent: 0660 if a group is given, 0600 otherwise. The umask has no effect. A client needs the right to
    /// write in order to connect.
    pub mode: Option<u32>,
}

impl SocketOptions {
    /// Options with these permission bits, and the process's owner and group.
    pub const fn with_mode(mode: u32) -> Self {
        Self { owner: None, group: None, mode: Some(mode) }
    }

    /// The socket's permission bits. A group is named to let its members connect.
    fn mode(self) -> Mode {
        let unless_given = if self.group.is_some() { 0o660 } else { 0o600 };
        Mode::from_raw_mode(self.mode.unwrap_or(unless_given))
    }
}

/// Why a process cannot listen on a socket or connect to one.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The path is longer than a socket's address.
    #[error("{path}: a socket's path has at most {max} bytes")]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Bytes allowed.
        max: usize,
    },
    /// Another process listens on this socket.
    #[error("{0}: another process listens on this socket")]
    InUse(PathBuf),
    /// The path exists and is not a socket.
    #[error("{0}: exists and is not a socket")]
    NotASocket(PathBuf),
    /// The owner, group or mode of the socket cannot be set.
    #[error("{path}: cannot set the socket's {what}: {source}")]
    Rights {
        /// The socket's path.
        path: PathBuf,
        /// The attribute: `owner or group`, or `mode`.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{path}: cannot {action}: {source}")]
    Os {
        /// The path.
        path: PathBuf,
        /// The failed action, as a verb with its object.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// A listening socket. Dropping it removes the socket's file.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// Device and inode of the socket's file.
    file: (u64, u64),
}

impl Listener {
    /// Creates a socket at `path` and listens on it. A stale socket, on which no process listens, is replaced. The permissions
    /// are set before any client can connect.
    ///
    /// # Errors
    /// As [`ListenError`] says.
    pub fn bind(path: impl Into<PathBuf>, options: SocketOptions) -> Result<Self, ListenError> {
        let listener = Self::reserve(path, options)?;
        listener.listen()?;
        Ok(listener)
    }

    /// Like [`Listener::bind`], but no client can connect before [`Listener::listen`]. Until then the socket looks stale to other
    /// processes, so the caller holds a [`Lock`] to keep them from replacing it.
    ///
    /// # Errors
    /// As [`ListenError`] says.
    pub fn reserve(path: impl Into<PathBuf>, options: SocketOptions) -> Result<Self, ListenError> {
        let path = path.into();
        let address = address(&path)?;
        remove_stale(&path, &address)?;
        let socket = stream_socket().map_err(os(&path, "create a socket"))?;
        // Linux gives the socket's file the permissions of the descriptor, less the umask. The `chmod` in `set_rights` corrects
        // what the umask removed; it can only widen the permissions.
        rustix::fs::fchmod(&socket, options.mode())
            .map_err(os(&path, "set the permissions of the socket"))?;
        rustix::net::bind(&socket, &address).map_err(os(&path, "bind"))?;
        let stat = rustix::fs::lstat(&path).map_err(os(&path, "read the status of the socket"))?;
        let listener = Self { socket: socket.into(), path, file: (stat.st_dev, stat.st_ino) };
        listener.set_rights(options)?;
        Ok(listener)
    }

    /// Starts listening, so that clients can connect.
    ///
    /// # Errors
    /// [`ListenError::Os`].
    pub fn listen(&self) -> Result<(), ListenError> {
        rustix::net::listen(&self.socket, BACKLOG).map_err(os(&self.path, "listen"))
    }

    /// The path of the socket's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A duplicate of the socket, non-blocking, for polling. It goes on listening after `self` is dropped, but clients cannot
    /// reach it then because its file is removed.
    ///
    /// # Errors
    /// No file descriptors are left.
    pub fn socket(&self) -> io::Result<UnixListener> {
        self.socket.try_clone()
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
        rustix::fs::chmod(&self.path, options.mode()).map_err(failed("mode"))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Another process may have put its own socket there.
        let still_ours = rustix::fs::lstat(&self.path).is_ok_and(|s| (s.st_dev, s.st_ino) == self.file);
        if still_ours && let Err(error) = rustix::fs::unlink(&self.path) {
            tracing::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// The address of a socket at `path`.
///
/// # Errors
/// [`ListenError::PathTooLong`]; [`ListenError::Os`] for a path that cannot be an address, such as one with a zero byte.
pub fn address(path: &Path) -> Result<SocketAddrUnix, ListenError> {
    if path.as_os_str().len() > PATH_MAX {
        return Err(ListenError::PathTooLong { path: path.to_owned(), max: PATH_MAX });
    }
    SocketAddrUnix::new(path).map_err(os(path, "use the path"))
}

/// A non-blocking stream socket.
///
/// # Errors
/// No file descriptors or no memory are left.
pub fn stream_socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Removes the file at `path` if it is a socket on which no process listens.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), ListenError> {
    let stat = match rustix::fs::lstat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(os(path, "read its status")(e)),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(ListenError::NotASocket(path.into()));
    }
    let probe = stream_socket().map_err(os(path, "create a socket"))?;
    match rustix::net::connect(&probe, address) {
        Err(Errno::CONNREFUSED) => {
            tracing::info!("replacing the stale socket {}: no process listens on it", path.display());
            rustix::fs::unlink(path).map_err(os(path, "remove the stale socket"))
        }
        // EAGAIN means a full backlog, which belongs to a live listener.
        Ok(()) | Err(Errno::AGAIN) => Err(ListenError::InUse(path.into())),
        Err(e) => Err(os(path, "find out whether another process listens on it")(e)),
    }
}

fn os(path: &Path, action: &'static str) -> impl FnOnce(Errno) -> ListenError {
    let path = path.to_owned();
    move |e| ListenError::Os { path, action, source: e.into() }
}

#[cfg(test)]
mod tests;
