//! How a controller and its front-end connect. Control context.

use aryk_vhost_user::{Client, Device, ListenError, Listener, Server, Snapshot, SocketOptions};
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Which side connects.
#[derive(Clone, Debug)]
pub enum Link {
    /// The front-end connects, to a socket of the controller's name with these rights.
    Listen(SocketOptions),
    /// The controller connects, to the front-end's socket.
    Connect(PathBuf),
}

/// Why a controller cannot be reached.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// The socket cannot be made.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The socket cannot be watched.
    #[error("cannot serve the socket: {0}")]
    Os(#[from] std::io::Error),
}

/// The controller's end of its [`Link`].
#[derive(Debug)]
pub enum Endpoint {
    /// It listens.
    Server(Server),
    /// It connects.
    Client(Client),
}

impl Endpoint {
    /// Serves `device`, by a socket of this name in `directory` unless the link says where.
    ///
    /// # Errors
    /// [`EndpointError`].
    pub fn start<D: Device>(
        name: &str,
        link: Link,
        directory: &Path,
        device: Rc<D>,
    ) -> Result<Self, EndpointError> {
        Ok(match link {
            Link::Listen(rights) => {
                let listener = Listener::bind(directory.join(name), rights)?;
                Self::Server(Server::start(name, listener, device)?)
            }
            Link::Connect(path) => Self::Client(Client::start(name, path, device)?),
        })
    }

    /// The socket.
    pub fn path(&self) -> &Path {
        match self {
            Self::Server(server) => server.path(),
            Self::Client(client) => client.path(),
        }
    }

    /// What its sessions have come to.
    pub fn stats(&self) -> Snapshot {
        match self {
            Self::Server(server) => server.stats(),
            Self::Client(client) => client.stats(),
        }
    }

    /// Tells the log how many lines about its front-end were left out, if it is time.
    pub fn tell_left_out(&self) {
        match self {
            Self::Server(server) => server.tell_left_out(),
            Self::Client(client) => client.tell_left_out(),
        }
    }

    /// Disconnects the front-end, stops its queues, and removes a socket of its own.
    pub async fn stop(self) {
        match self {
            Self::Server(server) => server.stop().await,
            Self::Client(client) => client.stop().await,
        }
    }
}
