//! What carries an I/O queue, by one interface for all that is above it. Reactor context.

use super::rdma::Rdma;
use super::tcp::Tcp;
use super::{DriverId, Loss, copy_data};
use crate::fabrics::rdma::{Way, Wire};
use aryk_bdev::Io;
use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme_fabrics::Transfer;
use aryk_nvme_fabrics::tcp::HostQueue;
use aryk_rdma::Ending;
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
    /// Of RDMA.
    Rdma(Wire),
}

/// The connection.
#[derive(Debug)]
pub(super) enum Link {
    Tcp(Tcp),
    Rdma(Rdma),
}

impl Link {
    pub(super) fn new(carrier: Carrier) -> Self {
        match carrier {
            Carrier::Tcp { socket, tls, queue } => Self::Tcp(Tcp::new(socket, tls, queue)),
            Carrier::Rdma(wire) => Self::Rdma(Rdma::new(wire)),
        }
    }

    /// How the data of so many commands of a request goes. `None`: there are too few buffers for it now.
    #[inline]
    pub(super) fn way(&mut self, count: usize, transfer: Transfer, io: &Io) -> Option<Way> {
        match self {
            // Data is copied when it is sent, or is received.
            Self::Tcp(_) => Some(Way::Copied),
            Self::Rdma(rdma) => rdma.wire.way(count, transfer, &io.data),
        }
    }

    /// Whether there are buffers for so many commands with this data while no others have any.
    pub(super) fn can_have(&self, count: usize, transfer: Transfer) -> bool {
        match self {
            Self::Tcp(_) => true,
            Self::Rdma(rdma) => rdma.wire.can_have(count, transfer),
        }
    }

    /// Adds a command of a request, whose data goes a way of [`Link::way`].
    #[inline]
    pub(super) fn submit(
        &mut self,
        cid: u16,
        entry: SubmissionEntry,
        transfer: Transfer,
        way: Way,
        (io, is_second): (&Io, bool),
    ) {
        match self {
            Self::Tcp(tcp) => tcp.queue.submit(cid, entry, transfer),
            Self::Rdma(rdma) => {
                rdma.wire.submit(cid, entry, transfer, way, |to| copy_data(io, is_second, to))
            }
        }
    }

    /// Has a driver woken by what comes.
    pub(super) fn watch(&mut self, id: DriverId, cx: &mut Cx) -> io::Result<()> {
        match self {
            Self::Tcp(tcp) => tcp.watch(id, cx),
            Self::Rdma(rdma) => rdma.watch(id, cx),
        }
    }

    /// Whether it is time to look for what has come.
    #[inline]
    pub(super) fn is_due(&mut self, cx: &mut Cx) -> bool {
        match self {
            Self::Tcp(tcp) => tcp.is_due(cx),
            // A look is no system call.
            Self::Rdma(_) => true,
        }
    }

    /// Whether what comes from here on wakes the driver; otherwise there is something to receive or to send.
    pub(super) fn arm(&mut self, id: DriverId, cx: &mut Cx) -> Result<bool, Loss> {
        match self {
            Self::Tcp(tcp) => {
                tcp.await_room(id, cx)?;
                Ok(tcp.arm())
            }
            Self::Rdma(rdma) => Ok(!rdma.wire.arm()?),
        }
    }

    /// Whether the connection uses TLS.
    pub(super) const fn has_tls(&self) -> bool {
        match self {
            Self::Tcp(tcp) => tcp.tls.is_some(),
            Self::Rdma(_) => false,
        }
    }

    /// Ends the connection. What the target has not received does not arrive later. Returns the end if the target may access the
    /// memory of requests until then.
    pub(super) fn close(self, cx: &mut Cx) -> Option<Ending> {
        match self {
            Self::Tcp(tcp) => {
                tcp.close(cx);
                None
            }
            Self::Rdma(rdma) => rdma.close(cx),
        }
    }
}
