//! Errors: reasons for which a session ends, a request is refused, or a socket cannot be used. Control context.

use crate::device::DeviceError;
use crate::message::{Code, FdKind};
use aryk_dma::{MapError, TableError};
use std::io;

/// Advice for operators whose front-end does not share its guest memory.
pub(crate) const SHARE: &str = "guest memory must be shared with the back-end, \
     e.g. `-object memory-backend-memfd,share=on,…` in QEMU, `shared=on` in Cloud Hypervisor";

/// An error of the front-end, or a failed operation on its behalf.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection failed.
    #[error("connection: {0}")]
    Io(#[from] io::Error),
    /// The rest of a message did not arrive.
    #[error("the front-end sent {0} bytes of a message and then {1}")]
    HalfMessage(usize, &'static str),
    /// The front-end does not read its replies.
    #[error("the front-end does not read its replies")]
    NotReading,
    /// Not a request of protocol version 1.
    #[error("{code}: flags {flags:#x} are not those of a version 1 request")]
    BadVersion {
        /// The request.
        code: Code,
        /// The header's flags.
        flags: u32,
    },
    /// A payload longer than that of any message.
    #[error("{code}: a payload of {size} bytes is longer than that of any request")]
    TooLong {
        /// The request.
        code: Code,
        /// Length in bytes.
        size: u32,
    },
    /// A payload whose length does not match the request.
    #[error("{code}: a payload of {size} bytes does not fit this request")]
    BadSize {
        /// The request.
        code: Code,
        /// Length in bytes.
        size: usize,
    },
    /// An invalid payload.
    #[error("{code}: {what}")]
    BadPayload {
        /// The request.
        code: Code,
        /// The error.
        what: &'static str,
    },
    /// An unknown request.
    #[error("{0}: unknown request")]
    UnknownRequest(Code),
    /// A request of a protocol feature that is not offered.
    #[error("{0}: the protocol feature was not negotiated")]
    NotNegotiated(Code),
    /// More file descriptors than a message may carry, or than this process may open.
    #[error(
        "file descriptors of a message were lost: more than 8, or the back-end's limit of open files was reached"
    )]
    FdsLost,
    /// The front-end has replaced the back-end channel too often.
    #[error("SET_BACKEND_REQ_FD: the channel was replaced {0} times")]
    TooManyChannels(usize),
    /// The number of file descriptors does not match the request.
    #[error("{code}: the message has {got} file descriptors, which does not match the request")]
    WrongFdCount {
        /// The request.
        code: Code,
        /// Number of descriptors received.
        got: usize,
    },
    /// Fewer memory files than regions.
    #[error("{0}: the message has fewer memory files than regions; {SHARE}")]
    MemoryNotShared(Code),
    /// A file descriptor of the wrong kind.
    #[error("{code}: expected {want}, got {got}")]
    WrongFdKind {
        /// The request.
        code: Code,
        /// Expected kind.
        want: FdKind,
        /// Actual file, as the kernel names it.
        got: String,
    },
    /// Guest memory that is not a memory file.
    #[error("{code}: guest memory is in {got}, which is not memory (memfd, tmpfs or hugetlbfs); {SHARE}")]
    NotMemory {
        /// The request.
        code: Code,
        /// Actual file, as the kernel names it.
        got: String,
    },
    /// Features that were not offered.
    #[error("{code}: bits {bits:#x} were not offered")]
    UnknownFeatures {
        /// The request.
        code: Code,
        /// The bits that were not offered.
        bits: u64,
    },
    /// The queue does not exist.
    #[error("{code}: queue {index} does not exist; the device has {queues} queues")]
    BadQueue {
        /// The request.
        code: Code,
        /// Index in the request.
        index: u32,
        /// Number of queues of the device.
        queues: usize,
    },
    /// A queue that is larger than its device allows.
    #[error(
        "{code}: a queue of {size} descriptors is larger than the maximum of {max} (start arykd with a larger --queue-size-max, or the VM with a smaller queue-size)"
    )]
    QueueTooLarge {
        /// The request.
        code: Code,
        /// Requested number of descriptors.
        size: u16,
        /// The maximum.
        max: u16,
    },
    /// A memory region cannot be mapped.
    #[error("memory region at guest address {guest_addr:#x}: {source}")]
    Map {
        /// Guest address of the region.
        guest_addr: u64,
        /// The cause.
        source: MapError,
    },
    /// The region's addresses and its file offset differ within a page.
    #[error("memory region at guest address {0:#x}: addresses and file offset differ within a page")]
    Misaligned(u64),
    /// The memory regions do not form a valid table.
    #[error("{0}")]
    Table(#[from] TableError),
    /// More memory regions than slots.
    #[error("the front-end announces more than {0} memory regions")]
    TooManyRegions(usize),
    /// More memory than one front-end may announce.
    #[error(
        "{requested} bytes of guest memory exceed the limit of one front-end, {max} (--guest-memory-max)"
    )]
    TooMuchMemory {
        /// Bytes announced.
        requested: u64,
        /// Bytes allowed.
        max: u64,
    },
    /// A region was refused to a guest with many regions, because the regions of all guests approach the process's limit.
    #[error(
        "a guest with {0} memory regions cannot add another, because the regions of all guests approach the limit (sysctl vm.max_map_count)"
    )]
    RegionsShort(usize),
    /// A request to remove a memory region that does not exist.
    #[error("there is no memory region at guest address {0:#x} to remove")]
    NoSuchRegion(u64),
    /// The in-flight region cannot be created or mapped.
    #[error("{code}: in-flight region: {source}")]
    Inflight {
        /// The request.
        code: Code,
        /// The cause.
        source: MapError,
    },
    /// An in-flight region that is too small for its queues.
    #[error("{code}: the in-flight region has {got} bytes, but its queues need {needed}")]
    InflightTooSmall {
        /// The request.
        code: Code,
        /// Size of the region in bytes.
        got: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// The dirty log cannot be mapped.
    #[error("{code}: dirty log: {source}")]
    Log {
        /// The request.
        code: Code,
        /// The cause.
        source: MapError,
    },
    /// A dirty log that does not cover all guest memory.
    #[error("{code}: the dirty log of {got} bytes has no bits for guest memory up to {end:#x}")]
    LogTooSmall {
        /// The request.
        code: Code,
        /// Size of the log in bytes.
        got: u64,
        /// End of the guest's memory.
        end: u64,
    },
    /// The device refused the request.
    #[error("{code}: {source}")]
    Device {
        /// The request.
        code: Code,
        /// The cause.
        source: DeviceError,
    },
    /// The device ended the session.
    #[error("{0}")]
    Ended(String),
}

/// The counter to which an error belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    Connection,
    Protocol,
    Fds,
    Memory,
    Device,
}

impl Error {
    pub(crate) fn class(&self) -> Class {
        match self {
            Self::Io(_) | Self::HalfMessage(..) | Self::NotReading => Class::Connection,
            Self::BadVersion { .. }
            | Self::TooLong { .. }
            | Self::BadSize { .. }
            | Self::BadPayload { .. }
            | Self::UnknownRequest(_)
            | Self::NotNegotiated(_)
            | Self::UnknownFeatures { .. }
            | Self::BadQueue { .. }
            | Self::QueueTooLarge { .. } => Class::Protocol,
            Self::FdsLost
            | Self::TooManyChannels(_)
            | Self::WrongFdCount { .. }
            | Self::WrongFdKind { .. } => Class::Fds,
            Self::MemoryNotShared(_)
            | Self::NotMemory { .. }
            | Self::Map { .. }
            | Self::Misaligned(_)
            | Self::Table(_)
            | Self::TooManyRegions(_)
            | Self::TooMuchMemory { .. }
            | Self::RegionsShort(_)
            | Self::Inflight { .. }
            | Self::InflightTooSmall { .. }
            | Self::Log { .. }
            | Self::LogTooSmall { .. }
            | Self::NoSuchRegion(_) => Class::Memory,
            Self::Device { .. } | Self::Ended(_) => Class::Device,
        }
    }
}
