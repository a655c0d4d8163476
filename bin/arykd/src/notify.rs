//! Notifies the service manager: ready, alive, stopping. Control context.
//!
//! The protocol is systemd's `sd_notify(3)`: datagrams of `NAME=value` lines to the socket that `NOTIFY_SOCKET` names. Without
//! that variable nothing is sent.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The service manager, if there is one.
#[derive(Debug, Default)]
pub struct Manager {
    socket: Option<UnixDatagram>,
    /// The longest silence that the manager's watchdog accepts.
    watchdog: Option<Duration>,
}

impl Manager {
    /// The manager that the environment names. `supervisor` is the process that the manager started, if that is not this one.
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
                tracing::warn!(%error, socket = %name.display(), "cannot connect to the service manager: it gets no status of the daemon");
                Self::default()
            }
        }
    }

    /// Reports how many of all configured objects are restored.
    pub fn restoring(&self, absent: usize, all: usize) {
        let restored = all.saturating_sub(absent);
        self.send(&format!("STATUS=Restoring the configuration: {restored} of {all} objects"));
    }

    /// Reports that RPCs are served and the configuration is restored.
    pub fn ready(&self) {
        self.send("READY=1\nSTATUS=Serving");
    }

    /// Reports that no more RPCs are accepted.
    pub fn ending(&self) {
        self.send("STOPPING=1\nSTATUS=Completing the requests in flight");
    }

    /// Reports that the daemon is alive, at half of the watchdog's period, for as long as the control thread works. Never
    /// returns.
    pub async fn send_watchdog(&self) {
        let Some(silence) = self.watchdog else { return std::future::pending().await };
        loop {
            self.send("WATCHDOG=1");
            tokio::time::sleep(silence / 2).await;
        }
    }

    fn send(&self, state: &str) {
        if let Some(socket) = &self.socket
            && let Err(error) = socket.send(state.as_bytes())
        {
            tracing::warn!(%error, state, "cannot notify the service manager");
        }
    }
}

/// A name that begins with `@` is abstract: it has no file.
fn connect(name: &OsStr) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(name)?,
    };
    socket.connect_addr(&address)?;
    // A manager that does not read must not delay RPCs.
    socket.set_nonblocking(true)?;
    Ok(socket)
}
