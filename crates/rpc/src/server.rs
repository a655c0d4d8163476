//! The UNIX socket to which clients connect. Control context.

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

/// Clients that may be connected at the same time; further clients wait to be accepted.
const CONNECTIONS_MAX: usize = 1024;
/// How long clients have to read their last replies when the daemon ends.
const FAREWELL: Duration = Duration::from_secs(1);
/// The pause after an accept that failed for lack of file descriptors or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Why a socket could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another process listens there.
    #[error("another daemon serves {0}")]
    InUse(PathBuf),
    /// Any other error.
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

/// A socket that was created. No other process can create it until this is dropped, which also removes the name. The creation
/// needs rights in the socket's directory that a daemon may drop afterwards.
#[derive(Debug)]
pub struct Socket {
    /// Dropped before the lock.
    listener: Listener,
    _lock: Lock,
}

impl Socket {
    /// Creates `path`, in place of the socket of an ended daemon. Clients cannot connect yet.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(path: &Path, options: SocketOptions) -> Result<Self, BindError> {
        let lock = Lock::take(path)?;
        let listener = Listener::reserve(path, options)?;
        Ok(Self { listener, _lock: lock })
    }
}

/// A socket with a server.
#[derive(Debug)]
pub struct Server {
    watched: UnixListener,
    rules: Rules,
    _socket: Socket,
}

impl Server {
    /// Opens `path`, in place of the socket of an ended daemon. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind(path: &Path, options: SocketOptions) -> Result<Self, BindError> {
        Self::new(Socket::bind(path, options)?)
    }

    /// A server of an existing socket: clients can connect, and wait. Needs a tokio runtime.
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

    /// Gives clients the rights that `rules` define.
    #[must_use]
    pub fn with_rules(mut self, rules: Rules) -> Self {
        self.rules = rules;
        self
    }

    /// Serves clients until `stop` turns true or its sender is dropped; then answers the pending requests, and returns. Needs a
    /// tokio `LocalSet`.
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

    /// The rights of a client. A client without rights receives an error.
    fn admit(&self, stream: &UnixStream) -> Option<Rights> {
        let peer = stream.peer_cred().map(Peer::from);
        let unknown = |e: io::Error| {
            Error::errno(Errno::ACCESS, format!("the kernel does not report the client's credentials: {e}"))
        };
        match peer.map_err(unknown).and_then(|peer| self.rules.rights(peer)) {
            Ok(rights) => Some(rights),
            Err(error) => {
                tracing::info!(%error, "RPC client refused");
                connection::refuse(stream, &error);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests;
