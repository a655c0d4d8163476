//! Ceph's librados and librbd, loaded at run time, so that the daemon runs on hosts without Ceph.
//!
//! - [`Library`]: the functions of both libraries that are used here.
//! - [`Cluster`]: a client of a cluster.
//! - [`Pool`]: a pool and a namespace in it, over a client.
//! - [`Image`]: an open image. Opening, closing and I/O are asynchronous; functions that say so block.
//!
//! No function runs in reactor context: the asynchronous ones take locks of librbd, and copy the data of writes. This crate
//! contains the `unsafe` code for Ceph. Its threads run on the cores of the threads that create and connect a client.
//!
//! **Invariants.** A handle is used only between its creation and its end. [`Image`] counts its uses, refuses new ones when it
//! is closed, and ends with the last; what is dropped without being closed is leaked, since its end would block. A request's
//! memory stays in place until its completion, by the invariant of [`aryk_dma::Sgl`].
#![deny(unsafe_op_in_unsafe_fn)]

mod cluster;
mod exit;
mod gate;
mod image;
mod request;
mod state;
mod table;
mod watch;

pub use cluster::{Cluster, Pool};
pub use gate::Gate;
pub use image::{Closed, Image, Info};
pub use request::{NOTHING, Operation, Request, Sink};
pub use state::{Lock, Snapshot};
pub use table::{DEFAULT_PATH, Library, LoadError, Symbols};
pub use watch::Watch;

use std::ffi::CString;
use std::io;

/// A call of librados or librbd has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {}", io::Error::from_raw_os_error(*errno))]
pub struct CallError {
    /// The function.
    pub call: &'static str,
    /// The errno, which is positive.
    pub errno: i32,
}

impl CallError {
    /// Whether the cluster has excluded the client.
    pub const fn is_blocklisted(&self) -> bool {
        self.errno == libc::ESHUTDOWN
    }

    /// The result of the function `call`: a negative value is a negated errno.
    fn check(call: &'static str, result: i32) -> Result<i32, Self> {
        if result < 0 { Err(Self { call, errno: result.wrapping_neg() }) } else { Ok(result) }
    }
}

/// A name as C has it.
fn c_string(call: &'static str, text: &str) -> Result<CString, CallError> {
    CString::new(text).map_err(|_| CallError { call, errno: libc::EINVAL })
}
