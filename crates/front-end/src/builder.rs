//! What a type of device adds: how its requests look. The front-end's thread; nothing is allocated for a request.

use crate::Piece;
use aryk_dma::GuestArea;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// From the disk to memory.
    Read,
    /// From memory to the disk.
    Write,
}

/// Where a request lies in the memory.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Offset of [`Builder::SPACE`] bytes for all but the data.
    pub head: u64,
    /// Offset of the data.
    pub data: u64,
    /// Bytes of data.
    pub len: u32,
}

/// What a device did wrong to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    /// It answered with an error.
    #[error("a request was answered by {0}")]
    Failed(&'static str),
    /// It answered with something that is none of the answers.
    #[error("a request was answered by {0:#x}, which means nothing")]
    Nonsense(u8),
    /// It answered with sense data.
    #[error("a command ended with sense key {key:x}h, code {code:02x}h, qualifier {qualifier:02x}h")]
    Sense {
        /// Sense key.
        key: u8,
        /// Additional sense code.
        code: u8,
        /// And its qualifier.
        qualifier: u8,
    },
    /// It says that it wrote less, or more, than it had to.
    #[error("a read came back with {written} bytes written, not {expected}")]
    Length {
        /// What it says.
        written: u32,
        /// What it had to write.
        expected: u32,
    },
}

/// How requests of one type of device look.
///
/// A request is laid out once, and then set up for each place of the disk that it goes to.
pub trait Builder {
    /// Bytes of what is not data: a multiple of 64.
    const SPACE: u64;

    /// The pieces of a request.
    fn pieces(&self, operation: Operation, place: Place) -> [Piece; 3];

    /// Makes it a request for the disk's bytes from `offset` on, unanswered.
    fn set_up(&self, memory: &GuestArea, operation: Operation, place: Place, offset: u64);

    /// Sees how it was answered.
    ///
    /// # Errors
    /// Not well.
    fn check(
        &self,
        memory: &GuestArea,
        operation: Operation,
        place: Place,
        written: u32,
    ) -> Result<(), Trouble>;
}
