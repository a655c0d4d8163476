//! A read-only HTTP server on TCP or a UNIX socket. Control context.
//!
//! Each resource that a client can hold is limited: connections, idle time, and time per request. When the number of connections
//! is at its limit, a new client replaces the one that has been idle longest.

use crate::scrape::ScrapeBody;
use aryk_unix_listener::{ListenError, Listener, SocketOptions};
use http_body_util::Full;
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::cell::Cell;
use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::str::FromStr;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

/// Connected clients at a time.
const CONNECTIONS_MAX: usize = 1024;
/// How long a client may stay connected without a request.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// How long a request may take, until the client has read the last of the reply.
const REQUEST_MAX: Duration = Duration::from_secs(30);
/// How often the two time limits are checked.
const CHECK_PERIOD: Duration = Duration::from_secs(1);
/// Bytes of a request's head.
const HEAD_MAX: usize = 16 * 1024;
/// The pause after an accept failed because descriptors or memory ran out.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// How long clients have to read their last replies when the daemon ends.
const SHUTDOWN_GRACE: Duration = Duration::from_millis(200);

/// A request. Its body is ignored.
pub type Request = hyper::Request<Incoming>;
/// A reply.
pub type Reply = Response<Bytestream>;

/// A reply's body.
#[derive(Debug)]
pub struct Bytestream {
    content: Content,
    /// The client's activity: it becomes idle when the body has been sent.
    activity: Option<Rc<Activity>>,
}

#[derive(Debug)]
enum Content {
    /// A body in one piece.
    Whole(Full<Bytes>),
    /// A body that is made piece by piece.
    Pieces(ScrapeBody),
}

impl From<ScrapeBody> for Bytestream {
    fn from(telling: ScrapeBody) -> Self {
        Self { content: Content::Pieces(telling), activity: None }
    }
}

impl From<Bytes> for Bytestream {
    fn from(bytes: Bytes) -> Self {
        Self { content: Content::Whole(Full::new(bytes)), activity: None }
    }
}

impl Drop for Bytestream {
    fn drop(&mut self) {
        if let Some(activity) = &self.activity {
            activity.begin(Phase::Idle);
        }
    }
}

impl Body for Bytestream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut self.get_mut().content {
            Content::Whole(whole) => Pin::new(whole).poll_frame(cx),
            Content::Pieces(pieces) => Pin::new(pieces).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Whole(whole) => whole.is_end_stream(),
            Content::Pieces(pieces) => pieces.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(whole) => whole.size_hint(),
            Content::Pieces(pieces) => pieces.size_hint(),
        }
    }
}

/// A reply with a plain text.
pub fn plain(status: StatusCode, text: &'static str) -> Reply {
    let mut reply = Response::new(Bytestream::from(Bytes::from_static(text.as_bytes())));
    *reply.status_mut() = status;
    reply
}

/// An address to listen at.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// TCP.
    Tcp(SocketAddr),
    /// A UNIX socket.
    Unix(PathBuf),
}

/// The text is not an address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("neither ADDRESS:PORT, nor a port of this host, nor the path of a socket")]
pub struct AddressError;

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if text.contains('/') {
            return Ok(Self::Unix(text.into()));
        }
        let port = text.parse().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        port.or_else(|_| text.parse()).map(Self::Tcp).map_err(|_| AddressError)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}/"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Why the server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The UNIX socket cannot be created.
    #[error(transparent)]
    Unix(#[from] ListenError),
    /// A system call failed.
    #[error("cannot listen at {address}: {source}")]
    System {
        /// The address.
        address: Address,
        /// The system's error.
        source: io::Error,
    },
}

#[derive(Debug)]
enum ListeningSocket {
    Tcp(TcpListener),
    Unix { watched: UnixListener, _listener: Listener },
}

/// A bound address.
#[derive(Debug)]
pub struct Server(ListeningSocket);

impl Server {
    /// Listens at `address`; a UNIX socket gets the permissions `mode`. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`BindError`].
    pub async fn bind(address: &Address, mode: u32) -> Result<Self, BindError> {
        let system = |source| BindError::System { address: address.clone(), source };
        match address {
            Address::Tcp(tcp) => {
                Ok(Self(ListeningSocket::Tcp(TcpListener::bind(tcp).await.map_err(system)?)))
            }
            Address::Unix(path) => {
                let listener = Listener::bind(path, SocketOptions::with_mode(mode))?;
                let watched = listener.socket().and_then(UnixListener::from_std).map_err(system)?;
                Ok(Self(ListeningSocket::Unix { watched, _listener: listener }))
            }
        }
    }

    /// The TCP address on which the server listens; `None` for a UNIX socket.
    pub fn address(&self) -> Option<SocketAddr> {
        match &self.0 {
            ListeningSocket::Tcp(tcp) => tcp.local_addr().ok(),
            ListeningSocket::Unix { .. } => None,
        }
    }

    /// Serves clients with the replies of `answer`, until `stop` turns true or its sender is gone. Needs a tokio `LocalSet`.
    pub async fn serve<F>(self, answer: F, mut stop: watch::Receiver<bool>)
    where
        F: AsyncFn(Request) -> Reply + 'static,
    {
        let answer = Rc::new(answer);
        let mut clients = Clients::default();
        loop {
            let accepted = tokio::select! {
                accepted = self.accept() => accepted,
                Some(_) = clients.tasks.join_next() => continue,
                _ = stop.wait_for(|stop| *stop) => break,
            };
            match accepted {
                Ok(stream) => clients.add(stream, Rc::clone(&answer)),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept an HTTP client of the metrics or the web page");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            }
        }
        let _ = tokio::time::timeout(SHUTDOWN_GRACE, clients.tasks.join_all()).await;
    }

    async fn accept(&self) -> io::Result<Box<dyn Stream>> {
        Ok(match &self.0 {
            ListeningSocket::Tcp(tcp) => Box::new(tcp.accept().await?.0),
            ListeningSocket::Unix { watched, .. } => Box::new(watched.accept().await?.0),
        })
    }
}

trait Stream: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Stream for T {}

/// What a client is doing.
#[derive(Clone, Copy, Debug)]
enum Phase {
    Idle,
    Asking,
}

/// A client's phase, and since when.
#[derive(Debug)]
struct Activity(Cell<(Phase, Instant)>);

impl Activity {
    fn begin(&self, phase: Phase) {
        self.0.set((phase, Instant::now()));
    }

    fn idle_since(&self) -> Option<Instant> {
        let (phase, since) = self.0.get();
        matches!(phase, Phase::Idle).then_some(since)
    }

    fn is_expired(&self) -> bool {
        let (phase, since) = self.0.get();
        let most = match phase {
            Phase::Idle => IDLE_MAX,
            Phase::Asking => REQUEST_MAX,
        };
        since.elapsed() > most
    }
}

/// The connected clients.
#[derive(Default)]
struct Clients {
    tasks: JoinSet<()>,
    connections: Vec<(Rc<Activity>, AbortHandle)>,
}

impl Clients {
    fn add<F>(&mut self, stream: Box<dyn Stream>, answer: Rc<F>)
    where
        F: AsyncFn(Request) -> Reply + 'static,
    {
        if self.connections.len() >= CONNECTIONS_MAX {
            self.connections.retain(|(_, task)| !task.is_finished());
        }
        if self.connections.len() >= CONNECTIONS_MAX {
            let oldest = self
                .connections
                .iter()
                .enumerate()
                .filter_map(|(i, (activity, _))| Some((activity.idle_since()?, i)));
            // If no client is idle, the new one is closed.
            let Some((_, i)) = oldest.min() else { return };
            self.connections.swap_remove(i).1.abort();
        }
        let activity = Rc::new(Activity(Cell::new((Phase::Idle, Instant::now()))));
        let task = self.tasks.spawn_local(serve_client(stream, answer, Rc::clone(&activity)));
        self.connections.push((activity, task));
    }
}

async fn serve_client<F>(stream: Box<dyn Stream>, answer: Rc<F>, activity: Rc<Activity>)
where
    F: AsyncFn(Request) -> Reply + 'static,
{
    let service = service_fn(|request| {
        let (answer, activity) = (Rc::clone(&answer), Rc::clone(&activity));
        async move {
            activity.begin(Phase::Asking);
            let mut reply = answer(request).await;
            reply.body_mut().activity = Some(activity);
            Ok::<_, Infallible>(reply)
        }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(REQUEST_MAX).max_buf_size(HEAD_MAX);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    loop {
        tokio::select! {
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "an HTTP client has disconnected");
                }
                return;
            }
            () = tokio::time::sleep(CHECK_PERIOD) => {}
        }
        if activity.is_expired() {
            tracing::debug!("an HTTP client exceeded its time limit; its connection is closed");
            return;
        }
    }
}
