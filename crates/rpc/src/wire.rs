//! JSON-RPC 2.0 over a byte stream, without I/O. Any context.
//!
//! SPDK's dialect has no framing: requests follow one another, with or without white space between, in any pieces.
//! [`Decoder`] finds their ends in one pass over the bytes, however they are cut, and leaves the parsing to
//! `serde_json`. What comes out is either a call or the error that answers it; after [`Error::Parse`] the
//! stream cannot be trusted any more, and the connection must be closed.
//!
//! It holds at most one request of [`REQUEST_LEN_MAX`] and what was pushed last.

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

/// Bytes of one request, or of one batch.
pub const REQUEST_LEN_MAX: usize = 8 << 20;
/// Levels of arrays and objects in one request, as in SPDK.
pub const DEPTH_MAX: u32 = 64;
/// Calls in one batch.
pub const BATCH_LEN_MAX: usize = 4096;
