//! RDMA connections: libibverbs and librdmacm, loaded at run time, so that the daemon runs on hosts without them.
//!
//! - [`Manager`]: the thread that manages connections. It alone makes the calls that may block: it listens, connects, registers
//!   memory, and destroys what is dropped.
//! - [`Pending`]: a connection without a queue pair: one that another computer asks for, or that it will be asked for.
//! - [`Endpoint`]: a connection's queue pair, with one completion queue and the memory of its buffers. Its owner posts requests
//!   and polls completions, usually on a reactor: neither blocks nor allocates.
//! - [`SharedReceives`]: receives that the endpoints of a device share.
//! - [`Domain`]: what several connections of a device may access together: VMs' memory, each part by a [`Registration`].
//!
//! | file | context | content |
//! | --- | --- | --- |
//! | `table`, `verbs` | any | the functions and structures of both libraries |
//! | `manager`, `manager/thread` | any; the thread | connections, and calls that may block |
//! | `endpoint` | the owner's | requests and completions |
//! | `shared` | any | receives of several endpoints |
//! | `domain` | a thread that may block | registrations of VMs' memory |
//!
//! This crate contains the `unsafe` code for RDMA.
//!
//! **Invariants.** What an [`Endpoint`] uses exists until the thread destroys it, which is after its drop. Requests name memory
//! by [`aryk_dma::Sgl`], whose owner keeps it in place until the completion; a device checks each access by the key of a
//! registration. The [`aryk_dma::Arena`] of an endpoint is registered for this computer's own requests. The other computer can
//! reach the buffers that its [`Setup`] shares, and only by this connection: the endpoint has a protection domain of its own
//! then, where the key of a buffer is worth nothing to other connections. If the [`Setup`] names a [`Domain`], the other computer
//! can reach, by each connection of that domain, what is registered there. Memory stays mapped until the queue pair is destroyed
//! ([`Ending`]), after which the device accesses it no more for this connection.
#![deny(unsafe_op_in_unsafe_fn)]

mod domain;
mod endpoint;
mod manager;
mod shared;
mod table;
mod verbs;

pub use domain::{Domain, Keys, Registration};
pub use endpoint::{Completion, Ending, Endpoint, INLINE_MAX, Kind, Remote};
pub use manager::{Device, Listener, Manager, Parameters, Pending, Requests, Setup, StartError};
pub use shared::SharedReceives;
pub use table::{Library, LoadError};

use std::io;

/// Why another computer that was asked has not connected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The other computer refuses, with this data.
    #[error("the other computer refuses the connection")]
    Refused(Vec<u8>),
    /// There is no connection.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// A call of libibverbs or librdmacm has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {}", io::Error::from_raw_os_error(*errno))]
pub struct CallError {
    /// The function.
    pub call: &'static str,
    /// The errno, which is positive.
    pub errno: i32,
}

impl CallError {
    fn new(call: &'static str, errno: i32) -> Self {
        Self { call, errno }
    }

    /// The error of a function that has set `errno`.
    fn last(call: &'static str) -> Self {
        Self::new(call, io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }

    /// The result of a function that returns 0, or -1 and sets `errno`.
    fn check(call: &'static str, result: i32) -> Result<(), Self> {
        if result == 0 { Ok(()) } else { Err(Self::last(call)) }
    }

    /// A pointer that is null if the function has failed and set `errno`.
    fn check_pointer<T>(call: &'static str, result: *mut T) -> Result<*mut T, Self> {
        if result.is_null() { Err(Self::last(call)) } else { Ok(result) }
    }
}
