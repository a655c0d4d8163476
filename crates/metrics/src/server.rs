//! HTTP for those who only read: on TCP or a UNIX socket. Control context.
//!
//! Everything that a client can take is bounded: connections, and the time that each may be idle, or be at one request. When there are as many as there may be, the one
//! that has been idle longest gives way to who comes.

use crate::scrape::Telling;
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

/// Clients that may be connected at a time.
const CONNECTIONS_MAX: usize = 1024;
/// How long a client may be connected without asking for anything.
const IDLE_MAX: Duration = Duration::from_secs(60);
/// How long a request may take, until the last of its answer is taken.
const REQUEST_MAX: Duration = Duration::from_secs(30);
/// How often that is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Bytes of a request's head.
const HEAD_MAX: usize = 16 * 1024;
/// The pause after an accept that failed for want of descriptors or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// How long clients have to read their last replies when the daemon ends.
const FAREWELL: Duration = Duration::from_millis(200);

/// A request, whose body nobody reads.
pub type Request = hyper::Request<Incoming>;
/// An answer.
pub type Reply = Response<Bytestream>;

/// An answer's bytes.
#[derive(Debug)]
pub struct Bytestream {
    content: Content,
    /// Whose client is idle again when it has been taken.
    life: Option<Rc<Life>>,
}

#[derive(Debug)]
enum Content {
    /// All at once.
    Whole(Full<Bytes>),
    /// As they are made.
    Pieces(Telling),
}

impl From<Telling> for Bytestream {
    fn from(telling: Telling) -> Self {
        Self { content: Content::Pieces(telling), life: None }
    }
}

impl From<Bytes> for Bytestream {
    fn from(bytes: Bytes) -> Self {
        Self { content: Content::Whole(Full::new(bytes)), life: None }
    }
}

impl Drop for Bytestream {
    fn drop(&mut self) {
        if let Some(life) = &self.life {
            life.begin(Phase::Idle);
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

/// An answer in words.
pub fn plain(status: StatusCode, text: &'static str) -> Reply {
    let mut reply = Response::new(Bytestream::from(Bytes::from_static(text.as_bytes())));
    *reply.status_mut() = status;
    reply
}

/// Where to listen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// TCP.
    Tcp(SocketAddr),
    /// A UNIX socket.
    Unix(PathBuf),
}

/// What is no address.
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

/// Why one cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// At a UNIX socket.
    #[error(transparent)]
    Unix(#[from] ListenError),
    /// The system's refusal.
    #[error("cannot listen at {address}: {source}")]
    System {
        /// Where.
        address: Address,
        /// Why.
        source: io::Error,
    },
}

#[derive(Debug)]
enum Door {
    Tcp(TcpListener),
    Unix { watched: UnixListener, _listener: Listener },
}

/// A bound address.
#[derive(Debug)]
pub struct Server(Door);

impl Server {
    /// Listens at `address`; a UNIX socket has the permissions `mode`. Needs a tokio runtime.
    ///
    /// # Errors
    /// [`BindError`].
    pub async fn bind(address: &Address, mode: u32) -> Result<Self, BindError> {
        let system = |source| BindError::System { address: address.clone(), source };
        match address {
            Address::Tcp(tcp) => Ok(Self(Door::Tcp(TcpListener::bind(tcp).await.map_err(system)?))),
            Address::Unix(path) => {
                let listener = Listener::bind(path, SocketOptions::with_mode(mode))?;
                let watched = listener.socket().and_then(UnixListener::from_std).map_err(system)?;
                Ok(Self(Door::Unix { watched, _listener: listener }))
            }
        }
    }

    /// Where it listens, if that is TCP.
    pub fn address(&self) -> Option<SocketAddr> {
        match &self.0 {
            Door::Tcp(tcp) => tcp.local_addr().ok(),
            Door::Unix { .. } => None,
        }
    }

    /// Has `answer` answer clients, until `stop` turns true or its sender is gone. Needs a tokio `LocalSet`.
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
                    tracing::warn!(%error, "cannot accept a client of the metrics");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            }
        }
        let _ = tokio::time::timeout(FAREWELL, clients.tasks.join_all()).await;
    }

    async fn accept(&self) -> io::Result<Box<dyn Stream>> {
        Ok(match &self.0 {
            Door::Tcp(tcp) => Box::new(tcp.accept().await?.0),
            Door::Unix { watched, .. } => Box::new(watched.accept().await?.0),
        })
    }
}

trait Stream: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Stream for T {}

/// What a client is at.
#[derive(Clone, Copy, Debug)]
enum Phase {
    Idle,
    Asking,
}

/// What a client is at, and since when.
#[derive(Debug)]
struct Life(Cell<(Phase, Instant)>);

impl Life {
    fn begin(&self, phase: Phase) {
        self.0.set((phase, Instant::now()));
    }

    fn idle_since(&self) -> Option<Instant> {
        let (phase, since) = self.0.get();
        matches!(phase, Phase::Idle).then_some(since)
    }

    fn is_over(&self) -> bool {
        let (phase, since) = self.0.get();
        let most = match phase {
            Phase::Idle => IDLE_MAX,
            Phase::Asking => REQUEST_MAX,
        };
        since.elapsed() > most
    }
}

/// Those who are connected.
#[derive(Default)]
struct Clients {
    tasks: JoinSet<()>,
    lives: Vec<(Rc<Life>, AbortHandle)>,
}

impl Clients {
    fn add<F>(&mut self, stream: Box<dyn Stream>, answer: Rc<F>)
    where
        F: AsyncFn(Request) -> Reply + 'static,
    {
        if self.lives.len() >= CONNECTIONS_MAX {
            self.lives.retain(|(_, task)| !task.is_finished());
        }
        if self.lives.len() >= CONNECTIONS_MAX {
            let oldest =
                self.lives.iter().enumerate().filter_map(|(i, (life, _))| Some((life.idle_since()?, i)));
            // Where none is idle, there is no room.
            let Some((_, i)) = oldest.min() else { return };
            self.lives.swap_remove(i).1.abort();
        }
        let life = Rc::new(Life(Cell::new((Phase::Idle, Instant::now()))));
        let task = self.tasks.spawn_local(serve_client(stream, answer, Rc::clone(&life)));
        self.lives.push((life, task));
    }
}

async fn serve_client<F>(stream: Box<dyn Stream>, answer: Rc<F>, life: Rc<Life>)
where
    F: AsyncFn(Request) -> Reply + 'static,
{
    let service = service_fn(|request| {
        let (answer, life) = (Rc::clone(&answer), Rc::clone(&life));
        async move {
            life.begin(Phase::Asking);
            let mut reply = answer(request).await;
            reply.body_mut().life = Some(life);
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
                    tracing::debug!(%error, "a client of the metrics is gone");
                }
                return;
            }
            () = tokio::time::sleep(LOOK) => {}
        }
        if life.is_over() {
            tracing::debug!("a client of the metrics takes too long");
            return;
        }
    }
}
