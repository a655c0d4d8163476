//! The RDMA transport: what hosts and controllers tell each other when they connect ([`Request`], [`Accept`], [`Reject`]), a
//! controller's side of a connection ([`Queue`]), and a host's ([`HostQueue`]). NVMe RDMA Transport Specification 1.0. Any
//! context.
//!
//! A command is a message of the host, with or without its data behind it; a completion is one of the controller. All other data
//! the controller reads from the host's memory, or writes to it, by the keyed descriptor of the command.

mod connect;
mod host;
mod queue;

pub use connect::{Accept, BadAccept, PRIVATE_DATA_LEN, Reject, Request};
pub use host::{Ended, HostQueue, Violation};
pub use queue::{Queue, Region, Reply, TooShort};
