//! JSON-RPC 2.0 over a byte stream, without I/O. Any context.
//!
//! SPDK's dialect has no framing: requests follow one another, with or without white space between them, in pieces of any size.
//! [`Decoder`] finds their ends in one pass over the bytes, however they are split, and leaves the parsing to `serde_json`. The
//! result is either a call or the error that answers it; after [`Error::Parse`] the position of the next request is unknown, and
//! the connection must be closed.
//!
//! The decoder holds at most one request of [`REQUEST_LEN_MAX`] and the bytes pushed last.

mod call;
mod decoder;
pub(crate) mod numbers;
mod reply;

#[cfg(test)]
mod tests;

#[cfg(doc)]
use crate::Error;
pub use call::{Call, Id, Message, Rejected};
pub use decoder::Decoder;
pub use reply::{response, to_batch};

/// Bytes of one request or one batch, at most.
pub const REQUEST_LEN_MAX: usize = 8 << 20;
/// Nesting depth of arrays and objects in one request, at most, as in SPDK.
pub const DEPTH_MAX: u32 = 64;
/// Calls in one batch, at most.
pub const BATCH_LEN_MAX: usize = 4096;
