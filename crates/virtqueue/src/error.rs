//! Errors of a queue and of the guest's descriptors. Any context.

/// The reason for which a queue with these parameters cannot be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The number of descriptors is not a power of two from 1 to 32,768.
    #[error("a split queue has {0} descriptors, which is not a power of two up to 32768")]
    Size(u16),
    /// A packed queue has 1 to 32,768 descriptors.
    #[error("a packed queue has {0} descriptors, which is not in the range 1 to 32768")]
    PackedSize(u16),
    /// A packed queue cannot start at this position.
    #[error("a packed queue of this size cannot start at {0:#x}")]
    Base(u32),
    /// An area is too short for the queue's size.
    #[error("the {part} has {len} bytes, but needs {needed}")]
    TooShort {
        /// The area.
        part: &'static str,
        /// The area's length in bytes.
        len: u64,
        /// The required bytes.
        needed: u64,
    },
    /// An area's address is not a multiple of the alignment in section 2.7 or 2.8.
    #[error("the {part} is not aligned to {align} bytes")]
    Unaligned {
        /// The area.
        part: &'static str,
        /// The required alignment in bytes.
        align: usize,
    },
    /// The content of the in-flight region is invalid.
    #[error("the in-flight region is invalid: {0}")]
    Inflight(#[from] InflightError),
}

/// The reason for which the content of an in-flight region is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InflightError {
    /// The region has another version.
    #[error("version {0} is not supported")]
    Version(u16),
    /// The region was made for another queue size.
    #[error("the region was created for {region} descriptors, and the queue has {queue}")]
    Size {
        /// The region's queue size.
        region: u16,
        /// The queue's size.
        queue: u16,
    },
    /// A descriptor's state is neither "in flight" nor "not in flight".
    #[error("descriptor {head}'s state is {value}")]
    State {
        /// The descriptor.
        head: u16,
        /// The state.
        value: u8,
    },
    /// The region's used index is not one that this ring had recently.
    #[error("the region's used index is {region}, the ring's is {ring}")]
    UsedIndex {
        /// The region's used index.
        region: u16,
        /// The ring's used index.
        ring: u16,
    },
    /// The region names a descriptor beyond the table's end.
    #[error("the region names descriptor {0}, which is out of range")]
    Head(u16),
    /// The descriptors of a chain in flight, as the region lists them, do not form a chain.
    #[error("the descriptors from {0} on are not a chain")]
    Chain(u16),
}

/// The reason for which a chain was refused. The queue continues; complete the head with a length of 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// A `next` field names a descriptor beyond the table's end.
    #[error("descriptor index {0} is out of range")]
    Index(u16),
    /// The chain is a loop, or has more descriptors than allowed.
    #[error("the descriptor chain loops or is too long")]
    TooLong,
    /// A buffer of no bytes.
    #[error("a descriptor has length 0")]
    Empty,
    /// A device-readable buffer after a device-writable one.
    #[error("a device-readable descriptor follows a device-writable one")]
    Order,
    /// An indirect descriptor, though the feature was not negotiated.
    #[error("an indirect descriptor, although the feature was not negotiated")]
    IndirectNotNegotiated,
    /// An indirect descriptor inside of an indirect table.
    #[error("an indirect table contains an indirect descriptor")]
    IndirectNested,
    /// An indirect descriptor with the NEXT flag.
    #[error("an indirect descriptor has the NEXT flag")]
    IndirectNext,
    /// An indirect table of no descriptors, of too many, or of a fraction of one.
    #[error("an indirect table has an invalid length of {0} bytes")]
    IndirectLength(u32),
    /// An indirect table that is not in the guest's memory.
    #[error("the indirect table at {0:#x} is not in guest memory")]
    IndirectAddress(u64),
}

/// The reason for which a queue is broken: stop it, and report the error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The available index moved by more than the queue's size.
    #[error("the available index jumped from {from} to {to}")]
    IndexJump {
        /// The last valid index.
        from: u16,
        /// The index that the guest wrote.
        to: u16,
    },
    /// The available ring names a descriptor, or a packed ring a buffer id, beyond the table's end.
    #[error("the ring names chain {0}, which is out of range")]
    HeadIndex(u16),
    /// The ring names a chain that is still in flight.
    #[error("the ring names chain {0}, which is in flight")]
    HeadInFlight(u16),
    /// More descriptors of a packed ring were made available than it has.
    #[error("more descriptors are available than the ring has")]
    Overrun,
}

/// The reason for which no chain could be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PopError {
    /// A malformed chain. It counts as taken: its head must be completed, with a length of 0.
    #[error("chain {head}: {error}")]
    Chain {
        /// The chain's first descriptor, its id in the used ring.
        head: u16,
        /// The reason.
        error: ChainError,
    },
    /// The queue is broken: no more chains can be taken from it.
    #[error(transparent)]
    Queue(#[from] QueueError),
}
