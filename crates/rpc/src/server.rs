//! The UNIX socket that clients connect to. Control context.

use crate::rights::{Peer, Rights, Rules};
use crate::{Error, Methods, connection};
use aryk_unix_listener::{Listener, Lock};
use rustix::io::Errno;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

pub use aryk_unix_listener::{ListenError, SocketOptions};

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
    /// Something else.
    #[error(transparent)]
    Listen(ListenError),
}

impl From<ListenError> for BindError {
    fn from(error: ListenError) -> Self {
        match error {
            ListenError::InUse(path) => Self::InUse(path),
            other => Self::Listen(other),
        }
    }
}

/// A socket that is made. Nobody else can make it until this is dropped, and the name goes with it. To make it takes rights in its
/// directory that a daemon may give up after.
#[derive(Debug)]
pub struct Socket {
    /// Goes before the lock.
    listener: Listener,
    _lock: Lock,
}

impl Socket {
    /// Makes `path`, in place of what a dead daemon left there. Nobody can connect yet.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(path: &Path, options: SocketOptions) -> Result<Self, BindError> {
        let lock = Lock::take(path)?;
        let listener = Listener::reserve(path, options)?;
        Ok(Self { listener, _lock: lock })
    }
}

/// A socket that is served.
#[derive(Debug)]
pub struct Server {
    watched: UnixListener,
    rules: Rules,
    _socket: Socket,
}

impl Server {
    /// Opens `path`, in place of what a dead daemon left there. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(path: &Path, options: SocketOptions) -> Result<Self, BindError> {
        Self::new(Socket::bind(path, options)?)
    }

    /// A server of a socket that is there: clients can connect, and wait. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn new(socket: Socket) -> Result<Self, BindError> {
        socket.listener.listen()?;
        let watched = socket.listener.socket().and_then(UnixListener::from_std);
        let watched = watched.map_err(|source| ListenError::Os {
            path: socket.listener.path().to_owned(),
            action: "watch the socket",
            source,
        })?;
        Ok(Self { watched, rules: Rules::none(), _socket: socket })
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
                accepted = self.watched.accept(), if clients.len() < CONNECTIONS_MAX => match accepted {
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

#[cfg(test)]
mod tests;
