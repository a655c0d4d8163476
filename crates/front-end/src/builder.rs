//! The layout of a device type's requests. Runs on the front-end's thread; no allocation per request.

use crate::Piece;
use aryk_dma::GuestArea;

/// The operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Reads from the disk into memory.
    Read,
    /// Writes from memory to the disk.
    Write,
}

/// Where a request lies in the guest's memory.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Offset of the [`Builder::SPACE`] bytes that hold everything but the data.
    pub head: u64,
    /// Offset of the data.
    pub data: u64,
    /// Bytes of data.
    pub len: u32,
}

/// A failed or wrongly completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The device completed the request with an error.
    #[error("a request failed: {0}")]
    Failed(&'static str),
    /// The device wrote a status that the specification does not define.
    #[error("a request was completed with the undefined status {0:#x}")]
    Nonsense(u8),
    /// The command ended with CHECK CONDITION and sense data.
    #[error("a command ended with sense key {key:x}h, code {code:02x}h, qualifier {qualifier:02x}h")]
    Sense {
        /// Sense key.
        key: u8,
        /// Additional sense code.
        code: u8,
        /// Additional sense code qualifier.
        qualifier: u8,
    },
    /// The used length differs from the bytes that the device had to write.
    #[error("a read was completed with {written} bytes written instead of {expected}")]
    Length {
        /// Bytes written, as the device reports them.
        written: u32,
        /// Bytes that the device had to write.
        expected: u32,
    },
}

/// Lays out the requests of one type of device.
///
/// A request is laid out once, and then prepared for each place of the disk that it addresses.
pub trait Builder {
    /// Bytes of a request without its data: a multiple of 64.
    const SPACE: u64;

    /// The descriptors of a request.
    fn pieces(&self, operation: Operation, place: Place) -> [Piece; 3];

    /// Prepares the request for the disk's bytes from `offset` on, and resets its status to "not completed".
    fn set_up(&self, memory: &GuestArea, operation: Operation, place: Place, offset: u64);

    /// Checks the status of a completed request.
    ///
    /// # Errors
    /// The request failed.
    fn check(
        &self,
        memory: &GuestArea,
        operation: Operation,
        place: Place,
        written: u32,
    ) -> Result<(), RequestError>;
}
