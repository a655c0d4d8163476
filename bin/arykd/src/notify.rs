//! What the daemon tells the service manager that started it: that it is ready, that it lives, that it ends. Control context.
//!
//! The protocol is systemd's, `sd_notify(3)`: datagrams of `NAME=value` lines to the socket that `NOTIFY_SOCKET` names. Without that variable nobody is told.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The service manager, or nobody.
#[derive(Debug, Default)]
pub struct Manager {
    socket: Option<UnixDatagram>,
    /// How long we may be silent.
    watchdog: Option<Duration>,
}

impl Manager {
    /// The one that the environment names. `supervisor` is the process that it takes us for, if we are not what it started.
    pub fn find(supervisor: Option<u32>) -> Self {
        let Some(name) = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Self::default();
        };
        let number = |name: &str| std::env::var(name).ok()?.parse().ok();
        let is_ours =
            |pid: u64| pid == u64::from(std::process::id()) || Some(pid) == supervisor.map(u64::from);
        let watched = number("WATCHDOG_PID").is_none_or(is_ours);
        let watchdog = number("WATCHDOG_USEC").filter(|&usec| usec > 0 && watched).map(Duration::from_micros);
        match connect(&name) {
            Ok(socket) => Self { socket: Some(socket), watchdog },
            Err(error) => {
                tracing::warn!(%error, socket = %name.display(), "the service manager cannot be told how things are");
                Self::default()
            }
        }
    }

    /// Calls are answered, and what was configured is there again.
    pub fn ready(&self) {
        self.tell("READY=1\nSTATUS=Serving");
    }

    /// No more calls are taken.
    pub fn ending(&self) {
        self.tell("STOPPING=1\nSTATUS=Finishing the requests that run");
    }

    /// Says that we live, as often as it is asked for, for as long as the thread that takes calls does. Never ends.
    pub async fn keep_telling(&self) {
        let Some(silence) = self.watchdog else { return std::future::pending().await };
        loop {
            self.tell("WATCHDOG=1");
            tokio::time::sleep(silence / 2).await;
        }
    }

    fn tell(&self, state: &str) {
        if let Some(socket) = &self.socket
            && let Err(error) = socket.send(state.as_bytes())
        {
            tracing::warn!(%error, state, "the service manager cannot be told");
        }
    }
}

/// Names that begin with `@` are of no file.
fn connect(name: &OsStr) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(name)?,
    };
    socket.connect_addr(&address)?;
    // A manager that does not read must not hold calls up.
    socket.set_nonblocking(true)?;
    Ok(socket)
}
