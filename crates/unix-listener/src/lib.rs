//! UNIX sockets that are listened on: of controllers, of RPC, of those who watch. Control context; nothing here blocks.
//!
//! - [`Listener`]: a socket in the file system, in place of what a dead process left there, never with other rights than were asked for while it can be
//!   connected to, and removed when it is dropped, unless another has taken its place.
//! - [`Lock`]: what tells beforehand that somebody serves a socket, so that of two who start at the same time one has it.
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

/// Bytes of a socket's path: what `sun_path` holds, less its final zero.
pub const PATH_MAX: usize = 107;

/// Those who may wait to be accepted.
const BACKLOG: i32 = 128;

/// Who may connect. An owner or group that is not given is the process's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketOptions {
    /// User id of the socket's owner.
    pub owner: Option<u32>,
    /// Group id.
    pub group: Option<u32>,
    /// Permission bits; if none are given, 0660 where a group is, and 0600 otherwise, whatever the umask: to connect one needs
    /// the right to write.
    pub mode: Option<u32>,
}

impl SocketOptions {
    /// These permission bits, and nothing else.
    pub const fn with_mode(mode: u32) -> Self {
        Self { owner: None, group: None, mode: Some(mode) }
    }

    /// The permission bits that a socket gets. Who names a group wants it to connect.
    fn mode(self) -> Mode {
        let unless_given = if self.group.is_some() { 0o660 } else { 0o600 };
        Mode::from_raw_mode(self.mode.unwrap_or(unless_given))
    }
}

/// Why a socket cannot be listened on, or connected to.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The path is longer than a socket's address.
    #[error("{path}: a socket's path has at most {max} bytes")]
    PathTooLong {
        /// Where.
        path: PathBuf,
        /// Bytes allowed.
        max: usize,
    },
    /// Someone listens there.
    #[error("{0}: another process listens on this socket")]
    InUse(PathBuf),
    /// There is something else.
    #[error("{0}: exists and is not a socket")]
    NotASocket(PathBuf),
    /// Its owner, group or mode cannot be set.
    #[error("{path}: cannot set the socket's {what}: {source}")]
    Rights {
        /// Where.
        path: PathBuf,
        /// Which of them.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The kernel refused.
    #[error("{path}: cannot {action}: {source}")]
    Os {
        /// Where.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// A socket that is listened on, until it is dropped: then it is removed.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
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
        let listener = Self::reserve(path, options)?;
        listener.listen()?;
        Ok(listener)
    }

    /// As [`Listener::bind`], but nobody can connect before [`Listener::listen`]. Meanwhile it looks as if a dead process had left it: a [`Lock`] keeps others off.
    ///
    /// # Errors
    /// As [`ListenError`] says.
    pub fn reserve(path: impl Into<PathBuf>, options: SocketOptions) -> Result<Self, ListenError> {
        let path = path.into();
        let address = address(&path)?;
        remove_stale(&path, &address)?;
        let socket = stream_socket().map_err(os(&path, "make a socket"))?;
        // Linux gives the socket's file the permissions of the descriptor, less the umask; so the umask has its say later only, which can but
        // widen.
        rustix::fs::fchmod(&socket, options.mode()).map_err(os(&path, "prepare the socket"))?;
        rustix::net::bind(&socket, &address).map_err(os(&path, "bind"))?;
        let stat = rustix::fs::lstat(&path).map_err(os(&path, "look at the socket"))?;
        let listener = Self { socket: socket.into(), path, file: (stat.st_dev, stat.st_ino) };
        listener.set_rights(options)?;
        Ok(listener)
    }

    /// Lets clients connect.
    ///
    /// # Errors
    /// [`ListenError::Os`].
    pub fn listen(&self) -> Result<(), ListenError> {
        rustix::net::listen(&self.socket, BACKLOG).map_err(os(&self.path, "listen"))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The socket, to be watched: it never waits. It goes on listening after `self` is gone, but cannot be found any more.
    ///
    /// # Errors
    /// There are no descriptors left.
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
        // Another process may have put its own socket there since.
        let still_ours = rustix::fs::lstat(&self.path).is_ok_and(|s| (s.st_dev, s.st_ino) == self.file);
        if still_ours && let Err(error) = rustix::fs::unlink(&self.path) {
            tracing::warn!("cannot remove {}: {error}", self.path.display());
        }
    }
}

/// The address of a socket at `path`.
///
/// # Errors
/// [`ListenError::PathTooLong`]; [`ListenError::Os`] for a path that can be none.
pub fn address(path: &Path) -> Result<SocketAddrUnix, ListenError> {
    if path.as_os_str().len() > PATH_MAX {
        return Err(ListenError::PathTooLong { path: path.to_owned(), max: PATH_MAX });
    }
    SocketAddrUnix::new(path).map_err(os(path, "use the path"))
}

/// A stream socket that never waits.
///
/// # Errors
/// There are no descriptors, or no memory, left.
pub fn stream_socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Makes `path` free, if what is there is a socket without a listener.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), ListenError> {
    let stat = match rustix::fs::lstat(path) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(()),
        Err(e) => return Err(os(path, "look at it")(e)),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(ListenError::NotASocket(path.into()));
    }
    let probe = stream_socket().map_err(os(path, "make a socket"))?;
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

#[cfg(test)]
mod tests;
