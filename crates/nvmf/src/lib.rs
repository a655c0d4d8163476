//! A target of NVMe over TCP and RDMA: disks of this process for hosts on the network.
//!
//! A connection begins in control, with one command, Connect, which is admitted or refused. The connection of an admin queue
//! stays in control. That of an I/O queue moves to the reactor with the fewest roots, and has a channel of each namespace there.
//!
//! | file | context | content |
//! | --- | --- | --- |
//! | `target` | control | how subsystems, namespaces, hosts and listeners come and go |
//! | `subsystem` | control | what they are, and what each host sees of them |
//! | `connection`, `stream` | control | connections until Connect, and admin queues |
//! | `rdma` | both | an RDMA connection: its messages and its buffers |
//! | `tls` | control | the keys of TLS, and which host may use which connection |
//! | `authentication` | control | how hosts prove who they are, before and during an association |
//! | `quota` | control | how many connections there may be |
//! | `association` | control | the controllers of hosts, and how they end |
//! | `limits` | control | how much a host may transfer |
//! | `reservation` | control | which hosts may use a namespace |
//! | `queue`, `pool` | reactor | I/O queues, over either transport (`queue/link`), and the buffers of a reactor |
//!
//! **Invariants.** Bytes of a host cause errors, never panics. A controller ends after all its I/O queues, and a queue after all
//! its requests: so no write of a host lands behind the first one of its next association.
#![forbid(unsafe_code)]

mod address;
mod association;
mod authentication;
mod connection;
mod limits;
mod pool;
mod queue;
mod quota;
mod rdma;
mod reservation;
mod status;
mod stream;
mod subsystem;
mod target;
mod tls;
mod traffic;

pub use address::{Address, Transport};
pub use limits::HostLimits;
pub use reservation::{SaveRequest, Saver};
pub use subsystem::{Channel, HostKeys, Hosts, NamedHost};
pub use target::{
    ControllerInfo, ENTRIES_MAX, Error, Limits, ListenerInfo, NAMESPACES_MAX, NamespaceInfo, NewNamespace,
    NewSubsystem, QUEUES_MAX, QueueLimits, SHARED_RECEIVES_MAX, SubsystemInfo, Target,
};
pub use tls::TlsKey;
pub use traffic::{Done, Traffic};
