//! JSON-RPC by HTTP POST with Basic authentication (RFC 9110, RFC 7617), for clients without UNIX sockets. Control context.
//!
//! One HTTP request carries one JSON-RPC request, or one batch, to any path. JSON-RPC errors have the status 200, as clients of
//! SPDK's proxy expect; other statuses report HTTP errors. Without [`Tls`] the connection is not encrypted, and anyone who can
//! read the traffic learns the password: listen only on a loopback address, or behind a proxy that encrypts.

mod clients;
mod tls;

use crate::wire::{self, Decoder, Message, REQUEST_LEN_MAX};
use crate::{Error, Methods};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, AUTHORIZATION, CONTENT_TYPE, WWW_AUTHENTICATE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;

use clients::{Authenticated, Clients};
use tls::Handshakes;
pub use tls::{Tls, TlsError};

/// Timeout for a request's head, and for its body.
const REQUEST_TIME: Duration = Duration::from_secs(30);
/// Delay of the reply to a wrong password.
const REFUSAL_DELAY: Duration = Duration::from_millis(500);
/// How long clients have to read their last replies when the daemon ends.
const FAREWELL: Duration = Duration::from_secs(1);
/// The pause after an accept that failed for lack of file descriptors or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// The users that may call methods: lines `user:password`.
pub struct Passwords(Vec<String>);

impl std::fmt::Debug for Passwords {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passwords", self.0.len())
    }
}

/// Why the passwords cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PasswordsError {
    /// The system's error.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Users other than the owner may read the file.
    #[error("other users can read {0}: remove their rights with chmod 600")]
    Exposed(PathBuf),
    /// A line without a user or a password.
    #[error("{path}, line {line}: not of the form user:password")]
    Line {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
    },
    /// The file has no entries, so no client could call a method.
    #[error("{0} has no line user:password")]
    Empty(PathBuf),
}

impl Passwords {
    /// Reads a file that only its owner may read. Empty lines, and lines that begin with `#`, are ignored.
    ///
    /// # Errors
    /// [`PasswordsError`].
    pub fn read(path: &Path) -> Result<Self, PasswordsError> {
        let failed = |source| PasswordsError::Read { path: path.to_owned(), source };
        if std::fs::metadata(path).map_err(failed)?.permissions().mode() & 0o077 != 0 {
            return Err(PasswordsError::Exposed(path.to_owned()));
        }
        let text = std::fs::read_to_string(path).map_err(failed)?;
        let mut all = Vec::new();
        for (index, line) in text.lines().enumerate().filter(|(_, l)| !l.is_empty() && !l.starts_with('#')) {
            match line.split_once(':') {
                Some((user, password)) if !user.is_empty() && !password.is_empty() => {
                    all.push(line.to_owned());
                }
                _ => return Err(PasswordsError::Line { path: path.to_owned(), line: index + 1 }),
            }
        }
        match all.is_empty() {
            true => Err(PasswordsError::Empty(path.to_owned())),
            false => Ok(Self(all)),
        }
    }

    /// Whether a request's `Authorization` header has one of the passwords: RFC 7617, section 2.
    fn admit(&self, header: Option<&[u8]>) -> bool {
        let given = header.and_then(|header| {
            let (scheme, credentials) = header.split_at_checked("Basic ".len())?;
            let credentials = credentials.trim_ascii();
            scheme.eq_ignore_ascii_case(b"Basic ").then(|| BASE64.decode(credentials).ok())?
        });
        // All entries are compared in full: the duration reveals nothing about them.
        let is_one = |given: &[u8]| self.0.iter().fold(false, |any, one| any | same(one.as_bytes(), given));
        given.is_some_and(|given| is_one(&given))
    }
}

/// Compares in a time that depends only on the lengths.
fn same(a: &[u8], b: &[u8]) -> bool {
    let differences = a.iter().zip(b).fold(0, |all, (a, b)| all | std::hint::black_box(a ^ b));
    a.len() == b.len() && differences == 0
}

/// A bound address.
#[derive(Debug)]
pub struct HttpServer {
    listener: TcpListener,
    passwords: Rc<Passwords>,
    tls: Option<Tls>,
}

impl HttpServer {
    /// Listens at `address`. Needs a tokio runtime.
    ///
    /// # Errors
    /// The system's error.
    pub async fn bind(address: SocketAddr, passwords: Passwords) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(address).await?, passwords: Rc::new(passwords), tls: None })
    }

    /// Enables TLS; clients without TLS are not served.
    #[must_use]
    pub fn with_tls(self, tls: Tls) -> Self {
        Self { tls: Some(tls), ..self }
    }

    /// The local address.
    ///
    /// # Errors
    /// The system's error.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves clients until `stop` turns true or its sender is dropped; then answers the pending requests, and returns. Needs a
    /// tokio `LocalSet`.
    pub async fn serve<C: 'static>(self, methods: Rc<Methods<C>>, mut stop: watch::Receiver<bool>) {
        let (mut clients, mut handshakes) = (Clients::default(), Handshakes::default());
        let shared = (methods, self.passwords);
        let stopped = stop.clone();
        loop {
            let has_room = clients.has_room();
            tokio::select! {
                accepted = self.listener.accept(), if has_room => match (accepted, &self.tls) {
                    (Ok((stream, _)), Some(tls)) => handshakes.begin(tls.clone(), stream),
                    (Ok((stream, _)), None) => {
                        clients.begin(|authenticated| serve_client(stream, shared.clone(), authenticated, stopped.clone()));
                    }
                    (Err(error), _) => {
                        tracing::warn!(%error, "cannot accept an RPC client");
                        tokio::time::sleep(ACCEPT_RETRY).await;
                    }
                },
                Some(agreed) = handshakes.next(), if has_room => if let Some(stream) = agreed {
                    clients.begin(|authenticated| serve_client(stream, shared.clone(), authenticated, stopped.clone()));
                },
                Some(()) = clients.next_gone() => {}
                _ = stop.wait_for(|stop| *stop) => break,
            }
        }
        let _ = tokio::time::timeout(FAREWELL, clients.all_gone()).await;
    }
}

type Shared<C> = (Rc<Methods<C>>, Rc<Passwords>);
type Reply = Response<Full<Bytes>>;

async fn serve_client<C: 'static>(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    shared: Shared<C>,
    authenticated: Authenticated,
    mut stop: watch::Receiver<bool>,
) {
    let service = service_fn(|request| {
        let (methods, passwords, authenticated) =
            (Rc::clone(&shared.0), Rc::clone(&shared.1), Rc::clone(&authenticated));
        async move { Ok::<_, Infallible>(respond(request, &methods, &passwords, &authenticated).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(REQUEST_TIME).half_close(true);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        _ = stop.wait_for(|stop| *stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "the HTTP RPC client has disconnected");
    }
}

async fn respond<C: 'static>(
    request: Request<Incoming>,
    methods: &Methods<C>,
    passwords: &Passwords,
    authenticated: &Authenticated,
) -> Reply {
    if !passwords.admit(request.headers().get(AUTHORIZATION).map(|header| header.as_bytes())) {
        tracing::info!("an HTTP RPC client has sent no password, or a wrong one");
        tokio::time::sleep(REFUSAL_DELAY).await;
        let mut reply = plain(StatusCode::UNAUTHORIZED, "user and password required\n");
        let challenge = r#"Basic realm="Aryk", charset="UTF-8""#.parse().expect("the text is ASCII");
        reply.headers_mut().insert(WWW_AUTHENTICATE, challenge);
        return reply;
    }
    authenticated.set(true);
    if request.method() != Method::POST {
        let mut reply = plain(StatusCode::METHOD_NOT_ALLOWED, "JSON-RPC requires POST\n");
        reply.headers_mut().insert(ALLOW, "POST".parse().expect("the text is ASCII"));
        return reply;
    }
    let body = Limited::new(request.into_body(), REQUEST_LEN_MAX).collect();
    let body = match tokio::time::timeout(REQUEST_TIME, body).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            return plain(StatusCode::PAYLOAD_TOO_LARGE, "the request is too long\n");
        }
        Ok(Err(_)) => return plain(StatusCode::BAD_REQUEST, "the request is incomplete\n"),
        Err(_) => return plain(StatusCode::REQUEST_TIMEOUT, "the request has timed out\n"),
    };
    let reply = match decode(&body) {
        Ok(message) => methods.answer(message).await,
        Err(error) => Some(wire::response(None, &Err(error))),
    };
    match reply {
        Some(json) => {
            let mut reply = Response::new(Full::from(json));
            reply.headers_mut().insert(CONTENT_TYPE, "application/json".parse().expect("the text is ASCII"));
            reply
        }
        // Notifications are not answered.
        None => plain(StatusCode::NO_CONTENT, ""),
    }
}

fn plain(status: StatusCode, text: &'static str) -> Reply {
    let mut reply = Response::new(Full::from(text));
    *reply.status_mut() = status;
    reply
}

/// The single message of a body.
fn decode(body: &[u8]) -> Result<Message, Error> {
    let mut decoder = Decoder::default();
    decoder.push(body);
    let first = decoder.next_message()?;
    let more = decoder.next_message()?;
    decoder.finish()?;
    match (first, more) {
        (Some(message), None) => Ok(message),
        (None, _) => Err(Error::Parse("the body is empty".into())),
        (Some(_), Some(_)) => Err(Error::InvalidRequest("a body must hold one request or one batch".into())),
    }
}

#[cfg(test)]
mod tests;
