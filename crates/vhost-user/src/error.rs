//! Why a session ends or a request is refused, and why a socket cannot be used. Control context.

use crate::device::DeviceError;
use crate::message::{Code, FdKind};
use aryk_dma::{MapError, TableError};
use std::io;

/// What to tell operators whose guest memory does not reach us.
pub(crate) const SHARE: &str = "guest memory must be shared with the back end, \
     e.g. `-object memory-backend-memfd,share=on,…` in QEMU, `shared=on` in Cloud Hypervisor";

/// What a front-end did wrong, or what failed on its behalf.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection failed.
    #[error("connection: {0}")]
    Io(#[from] io::Error),
    /// The rest of a message did not come.
    #[error("the front-end sent {0} bytes of a message and then {1}")]
    HalfMessage(usize, &'static str),
    /// The front-end does not read its replies.
    #[error("the front-end takes no replies")]
    NotReading,
    /// Not a request of protocol version 1.
    #[error("{code}: flags {flags:#x} are not those of a version 1 request")]
    BadVersion {
        /// Which request.
        code: Code,
        /// The header's flags.
        flags: u32,
    },
    /// A payload longer than any message's.
    #[error("{code}: a payload of {size} bytes")]
    TooLong {
        /// Which request.
        code: Code,
        /// Bytes.
        size: u32,
    },
    /// A payload of another length than the request's.
    #[error("{code}: a payload of {size} bytes does not fit this request")]
    BadSize {
        /// Which request.
        code: Code,
        /// Bytes.
        size: usize,
    },
    /// A payload that makes no sense.
    #[error("{code}: {what}")]
    BadPayload {
        /// Which request.
        code: Code,
        /// What is wrong.
        what: &'static str,
    },
    /// A request that is unknown here.
    #[error("{0}: not a request that this back end knows")]
    UnknownRequest(Code),
    /// A request of a protocol feature that is not offered.
    #[error("{0}: the protocol feature was not negotiated")]
    NotNegotiated(Code),
    /// More file descriptors than a message may have, or than this process may open.
    #[error("file descriptors of a message were lost: more than 8, or our own limit was reached")]
    FdsLost,
    /// The back-end's channel was replaced again and again.
    #[error("SET_BACKEND_REQ_FD: the channel was replaced {0} times")]
    TooManyChannels(usize),
    /// Another number of file descriptors than the request's.
    #[error("{code}: {got} file descriptors came with it")]
    WrongFdCount {
        /// Which request.
        code: Code,
        /// How many came.
        got: usize,
    },
    /// Fewer memory files than regions.
    #[error("{0}: memory regions came without their files; {SHARE}")]
    MemoryNotShared(Code),
    /// A file descriptor of another kind.
    #[error("{code}: expected {want}, got {got}")]
    WrongFdKind {
        /// Which request.
        code: Code,
        /// What it should be.
        want: FdKind,
        /// What it is, as the kernel names it.
        got: String,
    },
    /// Guest memory that is not a memory file.
    #[error("{code}: guest memory is in {got}, which is not memory (memfd, tmpfs or hugetlbfs); {SHARE}")]
    NotMemory {
        /// Which request.
        code: Code,
        /// What it is, as the kernel names it.
        got: String,
    },
    /// Features that were not offered.
    #[error("{code}: bits {bits:#x} were not offered")]
    UnknownFeatures {
        /// Which request.
        code: Code,
        /// Those that were not.
        bits: u64,
    },
    /// No such queue.
    #[error("{code}: queue {index} of a device with {queues}")]
    BadQueue {
        /// Which request.
        code: Code,
        /// Queue asked for.
        index: u32,
        /// Queues that there are.
        queues: usize,
    },
    /// A queue that is larger than its device allows.
    #[error(
        "{code}: a queue of {size} descriptors is larger than the {max} that are allowed (start arykd with a larger --queue-size-max, or the machine with a smaller queue-size)"
    )]
    QueueTooLarge {
        /// Which request.
        code: Code,
        /// Descriptors asked for.
        size: u16,
        /// Descriptors allowed.
        max: u16,
    },
    /// A memory region cannot be mapped.
    #[error("memory region at guest address {guest_addr:#x}: {source}")]
    Map {
        /// Where it was to be.
        guest_addr: u64,
        /// Why not.
        source: MapError,
    },
    /// A memory region's addresses are not page by page those of its file.
    #[error("memory region at guest address {0:#x}: addresses and file offset differ within a page")]
    Misaligned(u64),
    /// Memory regions make no table.
    #[error("{0}")]
    Table(#[from] TableError),
    /// More memory regions than slots.
    #[error("more than {0} memory regions")]
    TooManyRegions(usize),
    /// More memory than one front-end may announce.
    #[error(
        "{asked} bytes of guest memory are more than one front-end may announce: at most {max} (--guest-memory-max)"
    )]
    TooMuchMemory {
        /// Bytes announced.
        asked: u64,
        /// Bytes allowed.
        max: u64,
    },
    /// More regions than a guest needs, while those of all guests are getting many.
    #[error(
        "a guest with {0} memory regions can have no more while there are so many in all (sysctl vm.max_map_count)"
    )]
    RegionsShort(usize),
    /// A memory region that is not there cannot be removed.
    #[error("there is no memory region at guest address {0:#x} to remove")]
    NoSuchRegion(u64),
    /// The in-flight region cannot be made or mapped.
    #[error("{code}: in-flight region: {source}")]
    Inflight {
        /// Which request.
        code: Code,
        /// Why not.
        source: MapError,
    },
    /// An in-flight region without room for its queues.
    #[error("{code}: an in-flight region of {got} bytes, but its queues need {needed}")]
    InflightTooSmall {
        /// Which request.
        code: Code,
        /// Bytes that it has.
        got: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// The dirty log cannot be mapped.
    #[error("{code}: dirty log: {source}")]
    Log {
        /// Which request.
        code: Code,
        /// Why not.
        source: MapError,
    },
    /// A dirty log without bits for all guest memory.
    #[error("{code}: a dirty log of {got} bytes has no bits for guest memory up to {end:#x}")]
    LogTooSmall {
        /// Which request.
        code: Code,
        /// Bytes that it has.
        got: u64,
        /// End of the guest's memory.
        end: u64,
    },
    /// The device refused.
    #[error("{code}: {source}")]
    Device {
        /// Which request.
        code: Code,
        /// Why.
        source: DeviceError,
    },
    /// The device ended the session.
    #[error("{0}")]
    Ended(String),
}

/// What to count an error as.
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
