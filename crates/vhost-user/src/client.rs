//! A controller in client mode, which connects to the socket at which a front-end listens, and reconnects after each session.
//! Control context.
//!
//! While the socket does not exist, the controller waits for it without polling ([`crate::presence`]). If no process listens at
//! the socket, or its backlog is full, the controller retries after 5 ms to 1 s.

use crate::device::{Device, SessionHandle};
use crate::presence::Watching;
use crate::service::{Service, Shared};
use crate::stats::Snapshot;
use aryk_unix_listener::{ListenError, stream_socket};
use rustix::io::Errno;
use rustix::net::SocketAddrUnix;
use std::cell::Cell;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// A session that lasts at least this long counts as successful; after a shorter session the next attempt is delayed.
const LASTING: Duration = Duration::from_secs(1);

thread_local! {
    /// Whether this thread has logged that inotify is not available.
    static UNWATCHED: Cell<bool> = const { Cell::new(false) };
}

/// A controller that connects to its front-end. Dropping it stops the controller in the background.
#[derive(Debug)]
pub struct Client(Service);

impl Client {
    /// Serves `device` to the front-end that listens at `path`, whenever one listens there. `name` identifies the controller in
    /// the log.
    ///
    /// # Errors
    /// [`ListenError::PathTooLong`]; [`ListenError::Os`] for an invalid path.
    ///
    /// # Panics
    /// Outside of a [`tokio::task::LocalSet`].
    pub fn start<D: Device>(
        name: &str,
        path: impl Into<PathBuf>,
        device: Rc<D>,
    ) -> Result<Self, ListenError> {
        let path = path.into();
        let address = aryk_unix_listener::address(&path)?;
        let failed = |source| ListenError::Os { path: path.clone(), action: "use the path", source };
        let absolute = std::path::absolute(&path).map_err(failed)?;
        Ok(Self(Service::start(name, &path, |shared, stop| {
            let dialer = Dialer { address, path: absolute, backoff: Backoff::default(), logged: None };
            Connect { dialer, pause: Backoff::default(), stop }.run(device, shared)
        })))
    }

    /// The front-end's socket.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Counters of the controller's sessions.
    pub fn stats(&self) -> Snapshot {
        self.0.stats()
    }

    /// Logs how many log lines about the front-end were suppressed, if such a line is due.
    pub fn tell_left_out(&self) {
        self.0.tell_left_out();
    }

    /// Notifies the front-end, if one is connected, that the configuration space has changed.
    pub fn config_changed(&self) {
        self.0.config_changed();
    }

    /// Stops serving: disconnects the front-end, if one is connected, and stops its queues.
    pub async fn stop(self) {
        self.0.stop().await;
    }
}

struct Connect {
    dialer: Dialer,
    /// Delay between sessions.
    pause: Backoff,
    stop: watch::Receiver<bool>,
}

impl Connect {
    async fn run<D: Device>(mut self, device: Rc<D>, shared: Arc<Shared>) {
        loop {
            let stream = tokio::select! {
                stream = self.dialer.connect(&shared) => stream,
                _ = self.stop.changed() => return,
            };
            let began = Instant::now();
            let session = SessionHandle::default();
            let serving = shared.serve(stream, &*device, &session);
            tokio::pin!(serving);
            tokio::select! {
                () = &mut serving => {}
                _ = self.stop.changed() => {
                    session.stop();
                    serving.await;
                    return;
                }
            }
            if began.elapsed() >= LASTING {
                self.pause.reset();
            }
            tokio::select! {
                () = sleep(self.pause.next()) => {}
                _ = self.stop.changed() => return,
            }
        }
    }
}

/// Delay before the next attempt: 0, 5 ms, and then doubled up to 1 s.
#[derive(Debug, Default)]
struct Backoff(Duration);

impl Backoff {
    const FIRST: Duration = Duration::from_millis(5);
    const LAST: Duration = Duration::from_secs(1);

    fn next(&mut self) -> Duration {
        let now = self.0;
        self.0 = (now * 2).clamp(Self::FIRST, Self::LAST);
        now
    }

    fn reset(&mut self) {
        self.0 = Duration::ZERO;
    }
}

/// The next step after a failed attempt.
enum Next {
    /// Wait until the socket or a directory on its path appears.
    Absent,
    /// Retry after a delay; the path may be replaced in the meantime.
    Later,
}

struct Dialer {
    address: SocketAddrUnix,
    /// The same path, absolute.
    path: PathBuf,
    /// Delay between attempts.
    backoff: Backoff,
    /// The last state that was logged, so that each state is logged once.
    logged: Option<String>,
}

impl Dialer {
    /// Connects, however long that takes. The future can be cancelled without loss.
    async fn connect(&mut self, shared: &Shared) -> UnixStream {
        let mut watching: Option<Watching> = None;
        loop {
            let next = match self.dial() {
                Ok(stream) => {
                    self.logged = None;
                    self.backoff.reset();
                    return stream;
                }
                Err(errno) => self.explain(errno, shared),
            };
            let Some(watch) = &watching else {
                // Try once more, now that the watch is set up.
                watching = self.watch();
                if watching.is_none() {
                    sleep(Backoff::LAST).await;
                }
                continue;
            };
            match next {
                Next::Absent => {
                    watch.changed().await;
                    // The event may concern only a directory on the path; also, a socket exists before its owner listens on it.
                    watching = None;
                    self.backoff.reset();
                }
                Next::Later => tokio::select! {
                    () = watch.changed() => self.backoff.reset(),
                    () = sleep(self.backoff.next()) => {}
                },
            }
        }
    }

    fn dial(&self) -> Result<UnixStream, Errno> {
        let socket = stream_socket()?;
        // Never blocks: a full backlog is an error.
        rustix::net::connect(&socket, &self.address)?;
        UnixStream::from_std(socket.into()).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::NOMEM))
    }

    /// Logs why the connection failed, unless the last logged reason is the same.
    fn explain(&mut self, errno: Errno, shared: &Shared) -> Next {
        let (path, operator_error) = (self.path.display(), self.operator_error(errno));
        let absent = errno == Errno::NOENT && operator_error.is_none();
        let text = match operator_error {
            Some(operator_error) => format!("{path}: {operator_error}"),
            None if absent => format!("{path}: does not exist yet"),
            None => format!("{path}: {errno}"),
        };
        if self.logged.as_ref() != Some(&text) {
            if operator_error.is_some() {
                tracing::warn!("cannot connect to {text}; retrying");
                shared.stats.not_connected(&text);
            } else {
                tracing::info!("waiting for a front-end at {text}");
            }
            self.logged = Some(text);
        }
        if absent { Next::Absent } else { Next::Later }
    }

    /// The error that the operator must correct; `None` if the front-end is only absent or busy.
    fn operator_error(&self, errno: Errno) -> Option<&'static str> {
        match errno {
            Errno::AGAIN => None,
            // The kernel returns ECONNREFUSED for any file that is not a socket.
            Errno::CONNREFUSED => {
                let is_socket = |m: std::fs::Metadata| m.file_type().is_socket();
                let other = self.path.metadata().is_ok_and(|metadata| !is_socket(metadata));
                other.then_some("exists and is not a socket")
            }
            Errno::NOENT => {
                self.path.symlink_metadata().is_ok().then_some("a symbolic link whose target does not exist")
            }
            Errno::NOTDIR => Some("a component of the path is not a directory"),
            Errno::PROTOTYPE => Some("a socket, but not a stream socket"),
            Errno::ACCESS | Errno::PERM => Some("arykd has no permission to connect"),
            Errno::MFILE | Errno::NFILE => Some("the limit of open file descriptors is reached"),
            Errno::LOOP => Some("too many levels of symbolic links"),
            _ => Some("the kernel refuses the connection"),
        }
    }

    /// Watches the path; `None` if that is not possible.
    fn watch(&self) -> Option<Watching> {
        let error = match Watching::new(&self.path) {
            Ok(watching) => return Some(watching),
            Err(error) => error,
        };
        // If the path has no directory to watch, the number of inotify watches is not the problem.
        let no_directory = matches!(Errno::from_io_error(&error), Some(Errno::NOTDIR | Errno::NOENT));
        if !no_directory && !UNWATCHED.replace(true) {
            tracing::warn!(
                "{}: cannot watch the path, checking it every second instead: {error}",
                self.path.display()
            );
        }
        None
    }
}
