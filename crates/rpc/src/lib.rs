//! The control plane's interface: JSON-RPC 2.0 on a UNIX socket, compatible with SPDK's in method names, parameters, result
//! shapes and error codes.
//!
//! [`wire`] turns bytes into calls, [`Methods`] finds the handler, [`server`] does the I/O; [`methods`] holds the handlers, which
//! work on a [`Control`]. All code runs in control context: one ordinary thread with a tokio `LocalSet`, never a reactor.
//! Handlers reach reactors by messages; a handler that awaits an answer does not block other calls.
#![forbid(unsafe_code)]

pub mod config;
mod connection;
pub mod control;
mod cores;
mod disks;
mod dispatch;
mod error;
mod hot_plug;
pub mod http;
pub mod journal;
pub mod left_out;
pub mod load;
pub mod methods;
pub mod openrpc;
pub mod params;
pub mod pool_care;
mod pool_positions;
pub mod restore;
pub mod rights;
mod scheduler;
mod secret;
mod secret_file;
pub mod server;
mod table;
pub mod units;
pub mod wire;
pub mod wrapping;

pub use control::Control;
pub use disks::Disks;
pub use dispatch::{Methods, NoParams, Outcome};
pub use error::{Error, WireError};
pub use hot_plug::follow_disks;
pub use methods::nvmf::keep as keep_reservations;
pub use table::{Phase, Table};
