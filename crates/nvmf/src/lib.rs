//! A target of NVMe over TCP: disks of this process for hosts on the network.
//!
//! A connection begins in control, with one command, Connect, which is admitted or refused. The connection of an admin queue
//! stays in control. That of an I/O queue moves to the reactor with the fewest roots, and has a channel of each namespace there.
//!
//! | file | context | content |
//! | --- | --- | --- |
//! | `target` | control | subsystems, their namespaces, hosts and listeners |
//! | `connection` | control | connections until Connect, and admin queues |
//! | `association` | control | the controllers of hosts, and how they end |
//! | `queue`, `pool` | reactor | I/O queues, and the buffers of a reactor |
//!
//! **Invariants.** Bytes of a host cause errors, never panics. A controller ends after all its I/O queues, and a queue after all
//! its requests: so no write of a host lands behind the first one of its next association.
#![forbid(unsafe_code)]

mod association;
mod connection;
mod pool;
mod queue;
mod status;
mod target;

pub use target::{Error, Hosts, NewSubsystem, SubsystemInfo, Target};
