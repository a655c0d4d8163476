//! What can be wrong with a queue or with what a guest put into it. Any context.

/// Why a queue cannot be made as it was announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The number of descriptors is not a power of two from 1 to 32,768.
    #[error("a split queue of {0} descriptors: not a power of two up to 32768")]
    Size(u16),
    /// A packed queue has 1 to 32,768 descriptors.
    #[error("a packed queue of {0} descriptors: not 1 to 32768")]
    PackedSize(u16),
    /// A packed queue cannot go on there.
    #[error("a packed queue of this size cannot go on at {0:#x}")]
    Base(u32),
    /// An area is shorter than the queue's size asks for.
    #[error("the {part} has {len} bytes, but needs {needed}")]
    TooShort {
        /// Which area.
        part: &'static str,
        /// Bytes in it.
        len: u64,
        /// Bytes needed.
        needed: u64,
    },
    /// An area's address is not a multiple of what section 2.7 or 2.8 asks for.
    #[error("the {part} is not aligned to {align} bytes")]
    Unaligned {
        /// Which area.
        part: &'static str,
        /// Bytes.
        align: usize,
    },
    /// What the in-flight region says cannot be.
    #[error("the in-flight region is of no use: {0}")]
    Inflight(#[from] InflightError),
}

/// What is wrong with what an in-flight region says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InflightError {
    /// It is of another version.
    #[error("its version is {0}")]
    Version(u16),
    /// It was made for another queue.
    #[error("it was made for {region} descriptors, and the queue has {queue}")]
    Size {
        /// What it says.
        region: u16,
        /// What the queue has.
        queue: u16,
    },
    /// A descriptor is neither in flight nor not.
    #[error("descriptor {head}'s state is {value}")]
    State {
        /// Which.
        head: u16,
        /// What it says.
        value: u8,
    },
    /// It knows of another used index than one that this ring had lately.
    #[error("its used index is {region}, the ring's {ring}")]
    UsedIndex {
        /// What it says.
        region: u16,
        /// What the ring says.
        ring: u16,
    },
    /// It names a descriptor beyond the table's end.
    #[error("it names descriptor {0}")]
    Head(u16),
    /// Descriptors that it says to be a chain in flight are none.
    #[error("the descriptors from {0} on are no chain")]
    Chain(u16),
}

/// Why a chain was refused. The queue goes on; give the head back with a length of 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// A `next` field names a descriptor beyond the table's end.
    #[error("descriptor index {0} is out of range")]
    Index(u16),
    /// The chain runs in a circle, or has more descriptors than it may.
    #[error("the descriptor chain loops or is too long")]
    TooLong,
    /// A buffer of no bytes.
    #[error("a descriptor of length 0")]
    Empty,
    /// A buffer for the device to read, after one for it to write.
    #[error("a device-readable descriptor follows a device-writable one")]
    Order,
    /// An indirect descriptor, though the feature was not negotiated.
    #[error("an indirect descriptor, which was not negotiated")]
    IndirectNotNegotiated,
    /// An indirect descriptor inside of an indirect table.
    #[error("an indirect table inside of another")]
    IndirectNested,
    /// An indirect descriptor that says that there is a next one.
    #[error("an indirect descriptor with the NEXT flag")]
    IndirectNext,
    /// An indirect table of no descriptors, of too many, or of a fraction of one.
    #[error("an indirect table of {0} bytes")]
    IndirectLength(u32),
    /// An indirect table that is not in the guest's memory.
    #[error("the indirect table at {0:#x} is not in guest memory")]
    IndirectAddress(u64),
}

/// Why a queue can go no further: stop it, and report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The available index moved by more than the queue's size.
    #[error("the available index jumped from {from} to {to}")]
    IndexJump {
        /// The last index that made sense.
        from: u16,
        /// What the guest wrote.
        to: u16,
    },
    /// The available ring names a descriptor, or a packed ring a buffer id, beyond the table's end.
    #[error("the ring names chain {0}, which is out of range")]
    HeadIndex(u16),
    /// The ring names a chain that has not been given back.
    #[error("the ring names chain {0}, which is in flight")]
    HeadInFlight(u16),
    /// More descriptors of a packed ring were made available than it has.
    #[error("more descriptors are available than the ring has")]
    Overrun,
}

/// Why a chain could not be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PopError {
    /// A malformed chain. It counts as taken: its head must be given back, with a length of 0.
    #[error("chain {head}: {error}")]
    Chain {
        /// The chain's first descriptor, its name in the used ring.
        head: u16,
        /// What is wrong with it.
        error: ChainError,
    },
    /// The queue is broken: nothing more will come out of it.
    #[error(transparent)]
    Queue(#[from] QueueError),
}
