//! What carries an I/O queue, by one interface for all that is above it. Reactor context.

use super::tcp::Tcp;
use super::{DriverId, Loss};
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme_fabrics::Transfer;
use aryk_nvme_fabrics::tcp::HostQueue;
use aryk_reactor::Cx;
use aryk_tls::Session;
use std::io;
use std::net::TcpStream;

/// A connection that becomes an I/O queue's.
pub(crate) enum Carrier {
    /// Of TCP.
    Tcp {
        socket: TcpStream,
        /// The connection uses TLS.
        tls: Option<Session>,
        queue: HostQueue,
    },
}

/// The connection.
#[derive(Debug)]
pub(super) enum Link {
    Tcp(Tcp),
}

impl Link {
    pub(super) fn new(carrier: Carrier) -> Self {
        match carrier {
            Carrier::Tcp { socket, tls, queue } => Self::Tcp(Tcp::new(socket, tls, queue)),
        }
    }

    /// Adds a command.
    #[inline]
    pub(super) fn submit(&mut self, cid: u16, entry: SubmissionEntry, transfer: Transfer) {
        match self {
            Self::Tcp(tcp) => tcp.queue.submit(cid, entry, transfer),
        }
    }

    /// Has a driver woken by what comes.
    pub(super) fn watch(&mut self, id: DriverId, cx: &mut Cx) -> io::Result<()> {
        match self {
            Self::Tcp(tcp) => tcp.watch(id, cx),
        }
    }

    /// Whether it is time to look for what has come.
    #[inline]
    pub(super) fn is_due(&mut self, cx: &mut Cx) -> bool {
        match self {
            Self::Tcp(tcp) => tcp.is_due(cx),
        }
    }

    /// Whether what comes from here on wakes the driver; otherwise there is something to receive or to send.
    pub(super) fn arm(&mut self, id: DriverId, cx: &mut Cx) -> Result<bool, Loss> {
        match self {
            Self::Tcp(tcp) => {
                tcp.await_room(id, cx)?;
                Ok(tcp.arm())
            }
        }
    }

    /// Whether the connection uses TLS.
    pub(super) const fn has_tls(&self) -> bool {
        match self {
            Self::Tcp(tcp) => tcp.tls.is_some(),
        }
    }

    /// Ends the connection. What the target has not received does not arrive later.
    pub(super) fn close(self, cx: &mut Cx) {
        match self {
            Self::Tcp(tcp) => tcp.close(cx),
        }
    }
}
