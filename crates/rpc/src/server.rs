//! The UNIX socket that clients connect to. Control context.

use crate::rights::{Peer, Rights, Rules};
use crate::{Error, Methods, connection};
use rustix::fs::{AtFlags, CWD, FlockOperation, Gid, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;
use std::{fs, io};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Clients that may be connected at a time; others wait to be accepted.
const CONNECTIONS_MAX: usize = 1024;
/// How long clients have to read their last replies when the daemon ends.
const FAREWELL: Duration = Duration::from_secs(1);
/// The pause after an accept that failed for want of descriptors or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Why a socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Somebody serves there.
    #[error("another daemon serves {0}")]
    InUse(PathBuf),
    /// A file of another kind has that name.
    #[error("{0} exists and is no socket")]
    NotASocket(PathBuf),
    /// The system's refusal.
    #[error("cannot open {path}: {source}")]
    System {
        /// The socket or its lock file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A bound socket. Nobody else can bind it until this is dropped, and the name goes with it.
#[derive(Debug)]
pub struct Server {
    listener: UnixListener,
    path: PathBuf,
    inode: u64,
    rules: Rules,
    /// Held for life: what tells a stale socket from a served one, as in SPDK, with which it is shared.
    _lock: OwnedFd,
    lock_path: PathBuf,
}

impl Server {
    /// Opens `path` with the permissions `mode`, in place of what a dead daemon left there. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(path: &Path, mode: u32) -> Result<Self, BindError> {
        let lock_path = PathBuf::from(format!("{}.lock", path.display()));
        let lock = take_lock(&lock_path).map_err(|e| match e {
            Errno::WOULDBLOCK => BindError::InUse(path.to_owned()),
            e => BindError::System { path: lock_path.clone(), source: e.into() },
        })?;
        let system = |source| BindError::System { path: path.to_owned(), source };
        remove_stale(path)?;
        let listener = listen(path, mode).map_err(|e| system(e.into()))?;
        let inode = fs::symlink_metadata(path).map_err(system)?.ino();
        let listener = UnixListener::from_std(listener.into()).map_err(system)?;
        Ok(Self { listener, path: path.to_owned(), inode, rules: Rules::none(), _lock: lock, lock_path })
    }

    /// Gives the socket to a group.
    ///
    /// # Errors
    /// [`BindError::System`].
    pub fn give_to(&self, gid: u32) -> Result<(), BindError> {
        let gid = Some(Gid::from_raw(gid));
        rustix::fs::chownat(CWD, &self.path, None, gid, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| BindError::System { path: self.path.clone(), source: e.into() })
    }

    /// Lets clients do what `rules` say.
    #[must_use]
    pub fn ruled_by(mut self, rules: Rules) -> Self {
        self.rules = rules;
        self
    }

    /// Serves clients until `stop` turns true, or its sender is gone; then answers what was asked, and returns. Needs
    /// a tokio `LocalSet`.
    pub async fn serve<C: 'static>(self, methods: Rc<Methods<C>>, mut stop: watch::Receiver<bool>) {
        let mut clients = JoinSet::new();
        let stop_clients = stop.clone();
        loop {
            tokio::select! {
                accepted = self.listener.accept(), if clients.len() < CONNECTIONS_MAX => match accepted {
                    Ok((stream, _)) => {
                        if let Some(rights) = self.admit(&stream) {
                            let serving = connection::serve(stream, Rc::clone(&methods), rights, stop_clients.clone());
                            clients.spawn_local(serving);
                        }
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept an RPC client");
                        tokio::time::sleep(ACCEPT_RETRY).await;
                    }
                },
                Some(_) = clients.join_next() => {}
                _ = stop.wait_for(|stop| *stop) => break,
            }
        }
        let _ = tokio::time::timeout(FAREWELL, clients.join_all()).await;
    }

    /// What a client may do. One who may do nothing is told so.
    fn admit(&self, stream: &UnixStream) -> Option<Rights> {
        let peer = stream.peer_cred().map(Peer::from);
        let unknown =
            |e: io::Error| Error::errno(Errno::ACCESS, format!("the kernel does not say who calls: {e}"));
        match peer.map_err(unknown).and_then(|peer| self.rules.rights(peer)) {
            Ok(rights) => Some(rights),
            Err(error) => {
                tracing::info!(%error, "an RPC client is refused");
                connection::refuse(stream, &error);
                None
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|meta| meta.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
        let _ = fs::remove_file(&self.lock_path);
    }
}

/// A lock that dies with its holder.
fn take_lock(path: &Path) -> Result<OwnedFd, Errno> {
    loop {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let lock = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))?;
        rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        // The last holder may have removed the file between the two: then this lock locks nothing.
        let ours = rustix::fs::fstat(&lock)?.st_ino;
        if rustix::fs::stat(path).is_ok_and(|there| there.st_ino == ours) {
            return Ok(lock);
        }
    }
}

/// Removes a socket that nobody listens on.
fn remove_stale(path: &Path) -> Result<(), BindError> {
    let system = |source| BindError::System { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(system(e)),
        Ok(meta) if !meta.file_type().is_socket() => return Err(BindError::NotASocket(path.to_owned())),
        Ok(_) => {}
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => Err(BindError::InUse(path.to_owned())),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(system),
        Err(e) => Err(system(e)),
    }
}

/// A listening socket that never had other permissions than `mode`.
fn listen(path: &Path, mode: u32) -> Result<OwnedFd, Errno> {
    const BACKLOG: i32 = 128;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Linux gives the socket's file the permissions of the descriptor, less the umask; so the umask has its say
    // in the second call only, which can but widen.
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::fs::chmod(path, Mode::from_raw_mode(mode))?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

#[cfg(test)]
mod tests;
