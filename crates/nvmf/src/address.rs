//! Where a target listens. Any context.

use aryk_nvme_fabrics::discovery;
use aryk_nvme_fabrics::sgl::DataBlocks;
use std::fmt;
use std::net::SocketAddr;

/// The transports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// RDMA.
    Rdma,
}

impl Transport {
    /// All transports.
    pub const ALL: [Self; 2] = [Self::Tcp, Self::Rdma];

    /// Its name in NVMe over Fabrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Rdma => "RDMA",
        }
    }

    /// Bytes of data that a command of an I/O queue may have in its capsule.
    pub const fn in_capsule_max(self) -> u32 {
        match self {
            Self::Tcp => 8192,
            Self::Rdma => 4096,
        }
    }

    pub(crate) const fn data_blocks(self) -> DataBlocks {
        match self {
            Self::Tcp => DataBlocks::Transport,
            Self::Rdma => DataBlocks::Keyed,
        }
    }
}

impl From<Transport> for discovery::Transport {
    fn from(transport: Transport) -> Self {
        match transport {
            Transport::Tcp => Self::Tcp,
            Transport::Rdma => Self::Rdma,
        }
    }
}

/// An address of a listener. Listeners of two transports may have the same IP address and port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// The transport.
    pub transport: Transport,
    /// The IP address and the port.
    pub socket: SocketAddr,
}

impl Address {
    /// An address of TCP.
    pub const fn tcp(socket: SocketAddr) -> Self {
        Self { transport: Transport::Tcp, socket }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.transport {
            Transport::Tcp => self.socket.fmt(f),
            Transport::Rdma => write!(f, "{} (RDMA)", self.socket),
        }
    }
}
