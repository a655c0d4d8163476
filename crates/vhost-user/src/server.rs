//! A controller in server mode: a listening socket, which serves one front-end after the other. Control context.
//!
//! A front-end that connects while another is served waits: a restarted QEMU may connect before the end of its predecessor was
//! detected, and is then served at once. If a second front-end waits longer, the configuration is wrong, and a warning is
//! logged. Further front-ends wait in the socket's backlog.

use crate::device::{Device, SessionHandle};
use crate::service::{Service, Shared};
use crate::stats::{Snapshot, Stats};
use aryk_log_limit::limited;
use aryk_unix_listener::Listener;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// How long a second front-end may wait before a warning is logged.
const RECONNECT_GRACE: Duration = Duration::from_secs(2);
/// A session that lasts at least this long counts as successful. After `HASTY_MAX` shorter sessions in a row, the next is delayed
/// by `HASTY_PAUSE`, so that a front-end that reconnects in a loop takes only part of the control thread's time.
const LASTING: Duration = Duration::from_secs(1);
const HASTY_MAX: u32 = 32;
const HASTY_PAUSE: Duration = Duration::from_millis(50);
/// Delay after an `accept` that failed because of a lack of file descriptors or memory.
const ACCEPT_AGAIN: Duration = Duration::from_millis(200);

/// A controller that listens. Dropping it stops the controller in the background.
#[derive(Debug)]
pub struct Server(Service);

impl Server {
    /// Serves `device` to the front-ends that connect to `listener`. `name` identifies the controller in the log.
    ///
    /// # Errors
    /// The socket cannot be polled.
    ///
    /// # Panics
    /// Outside of a [`tokio::task::LocalSet`].
    pub fn start<D: Device>(name: &str, listener: Listener, device: Rc<D>) -> io::Result<Self> {
        let path = listener.path().to_owned();
        let socket = UnixListener::from_std(listener.socket()?)?;
        Ok(Self(Service::start(name, &path, |shared, stop| {
            Accept { socket, _listener: listener, stop }.run(device, shared)
        })))
    }

    /// Path of the controller's socket.
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

    /// Stops serving: disconnects the front-end, stops its queues, and removes the socket.
    pub async fn stop(self) {
        self.0.stop().await;
    }
}

struct Accept {
    socket: UnixListener,
    /// Owns the socket's file.
    _listener: Listener,
    stop: watch::Receiver<bool>,
}

impl Accept {
    async fn run<D: Device>(mut self, device: Rc<D>, shared: Arc<Shared>) {
        let (mut waiting, mut hasty) = (None, 0);
        loop {
            let stream = match waiting.take() {
                Some(stream) => stream,
                None => tokio::select! {
                    stream = accept(&self.socket, &shared.stats) => stream,
                    _ = self.stop.changed() => return,
                },
            };
            let began = Instant::now();
            let session = SessionHandle::default();
            let serving = shared.serve(stream, &*device, &session);
            let stopped = self.until_done(serving, &session, &mut waiting, &shared.stats).await;
            if stopped {
                return;
            }
            hasty = if began.elapsed() >= LASTING { 0 } else { hasty + 1 };
            if hasty > HASTY_MAX {
                tokio::select! {
                    () = sleep(HASTY_PAUSE) => {}
                    _ = self.stop.changed() => return,
                }
            }
        }
    }

    /// Serves a session to its end. During that time, accepts the next front-end if one connects. Returns whether the controller
    /// must stop.
    async fn until_done(
        &mut self,
        serving: impl Future<Output = ()>,
        session: &SessionHandle,
        waiting: &mut Option<UnixStream>,
        stats: &Stats,
    ) -> bool {
        let mut stopping = false;
        let grace = sleep(RECONNECT_GRACE);
        tokio::pin!(serving, grace);
        let mut warned = false;
        loop {
            tokio::select! {
                () = &mut serving => return stopping,
                _ = self.stop.changed(), if !stopping => {
                    stopping = true;
                    session.stop();
                }
                stream = accept(&self.socket, stats), if waiting.is_none() => {
                    *waiting = Some(stream);
                    grace.as_mut().reset(Instant::now() + RECONNECT_GRACE);
                }
                () = &mut grace, if waiting.is_some() && !warned => {
                    warned = true;
                    limited!(
                        stats.lines.sessions,
                        warn,
                        "a second front-end has connected; it waits until the first disconnects"
                    );
                }
            }
        }
    }
}

async fn accept(socket: &UnixListener, stats: &Stats) -> UnixStream {
    loop {
        match socket.accept().await {
            Ok((stream, _)) => return stream,
            Err(error) => {
                limited!(stats.lines.sessions, warn, "cannot accept a connection: {error}");
                sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}
