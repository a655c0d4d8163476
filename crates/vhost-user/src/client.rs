//! A controller in client mode: it connects to the socket that a front-end listens on, again and again. Control context.
//!
//! A socket that is not there costs nothing until it appears ([`crate::presence`]). One that nobody listens on, or that has no
//! room, is tried again from 5 ms to 1 s apart.

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

/// A session that has lasted for this long was one; after a shorter one the next try waits.
const LASTING: Duration = Duration::from_secs(1);

thread_local! {
    /// Whether this thread has complained that it has no inotify.
    static UNWATCHED: Cell<bool> = const { Cell::new(false) };
}

/// A controller that connects to its front-end. Dropping it stops it in the background.
#[derive(Debug)]
pub struct Client(Service);

impl Client {
    /// Serves `device` to the front-end that listens at `path`, whenever there is one. `name` is what the log calls it.
    ///
    /// # Errors
    /// [`ListenError::PathTooLong`]; [`ListenError::Os`] for a path that can be none.
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
            let dialer = Dialer { address, path: absolute, backoff: Backoff::default(), said: None };
            Connect { dialer, pause: Backoff::default(), stop }.run(device, shared)
        })))
    }

    /// The front-end's socket.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// What its sessions have come to.
    pub fn stats(&self) -> Snapshot {
        self.0.stats()
    }

    /// Tells the log how many lines about its front-end were left out, if it is time.
    pub fn tell_left_out(&self) {
        self.0.tell_left_out();
    }

    /// Tells the front-end, if there is one, that the configuration space has changed.
    pub fn config_changed(&self) {
        self.0.config_changed();
    }

    /// Stops serving: disconnects from the front-end, if there is one, and stops its queues.
    pub async fn stop(self) {
        self.0.stop().await;
    }
}

struct Connect {
    dialer: Dialer,
    /// Between sessions.
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

/// Time between tries: none, 5 ms, and then doubling to 1 s.
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

/// What to do after a try that has failed.
enum Next {
    /// Wait until something appears.
    Absent,
    /// Try again after a while; something may be put in its place meanwhile.
    Later,
}

struct Dialer {
    address: SocketAddrUnix,
    /// The same, absolute.
    path: PathBuf,
    /// Between tries.
    backoff: Backoff,
    /// What was last logged, so that it is logged once.
    said: Option<String>,
}

impl Dialer {
    /// Connects, however long it takes. Cancelling the future loses nothing.
    async fn connect(&mut self, shared: &Shared) -> UnixStream {
        let mut watching: Option<Watching> = None;
        loop {
            let next = match self.dial() {
                Ok(stream) => {
                    self.said = None;
                    self.backoff.reset();
                    return stream;
                }
                Err(errno) => self.explain(errno, shared),
            };
            let Some(watch) = &watching else {
                // And look again.
                watching = self.watch();
                if watching.is_none() {
                    sleep(Backoff::LAST).await;
                }
                continue;
            };
            match next {
                Next::Absent => {
                    watch.changed().await;
                    // A directory on the way may be what has come, and a socket is there before it is listened on.
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
        // Never waits: a full backlog is an error.
        rustix::net::connect(&socket, &self.address)?;
        UnixStream::from_std(socket.into()).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::NOMEM))
    }

    /// Logs why there is no connection, if that is news.
    fn explain(&mut self, errno: Errno, shared: &Shared) -> Next {
        let (path, mistake) = (self.path.display(), self.mistake(errno));
        let absent = errno == Errno::NOENT && mistake.is_none();
        let text = match mistake {
            Some(mistake) => format!("{path}: {mistake}"),
            None if absent => format!("{path}: not there yet"),
            None => format!("{path}: {errno}"),
        };
        if self.said.as_ref() != Some(&text) {
            if mistake.is_some() {
                tracing::warn!("cannot connect to {text}; it is tried again");
                shared.stats.not_connected(&text);
            } else {
                tracing::info!("waits for a front-end at {text}");
            }
            self.said = Some(text);
        }
        if absent { Next::Absent } else { Next::Later }
    }

    /// What an operator has to put right, if it is not just a front-end that is not there.
    fn mistake(&self, errno: Errno) -> Option<&'static str> {
        match errno {
            Errno::AGAIN => None,
            // The kernel says of any file but a socket that nobody listens on it.
            Errno::CONNREFUSED => {
                let is_socket = |m: std::fs::Metadata| m.file_type().is_socket();
                let other = self.path.metadata().is_ok_and(|metadata| !is_socket(metadata));
                other.then_some("exists and is not a socket")
            }
            Errno::NOENT => self.path.symlink_metadata().is_ok().then_some("a symbolic link to nothing"),
            Errno::NOTDIR => Some("what should be one of its directories is none"),
            Errno::PROTOTYPE => Some("a socket, but not a stream socket"),
            Errno::ACCESS | Errno::PERM => Some("this process may not connect to it"),
            Errno::MFILE | Errno::NFILE => Some("no more file descriptors can be opened"),
            Errno::LOOP => Some("symbolic links that go round in a circle"),
            _ => Some("the kernel refuses the connection"),
        }
    }

    /// `None` if it cannot be watched.
    fn watch(&self) -> Option<Watching> {
        let error = match Watching::new(&self.path) {
            Ok(watching) => return Some(watching),
            Err(error) => error,
        };
        // Nothing to watch is not for want of watches.
        let no_directory = matches!(Errno::from_io_error(&error), Some(Errno::NOTDIR | Errno::NOENT));
        if !no_directory && !UNWATCHED.replace(true) {
            tracing::warn!(
                "{}: cannot be watched, and is looked for every second: {error}",
                self.path.display()
            );
        }
        None
    }
}
