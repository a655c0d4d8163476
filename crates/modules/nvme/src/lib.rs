//! The nvme module: disks in namespaces of NVMe controllers that this process drives itself, without the kernel's block layer.
//!
//! | file | contents |
//! | --- | --- |
//! | `control` | the thread of a controller: its life, resets, namespaces, queue pairs, devices for tools, times without it |
//! | `driver` | the queue pair of a reactor; `attempt`: a command, its data; `reset`: the pair's life; `waking`: a second pair |
//! | `channel` | one opener's use of that pair, or of both |
//! | `disks` | the disks of a controller: names, identities, changes of namespaces |
//! | `namespace` | the disk of a namespace |
//! | `fabrics` | controllers of other hosts |
//! | `injection` | errors that an operator injects into commands |
//! | `memory` | registration of guests' memory |
//! | `pool` | bounce buffers |
//! | `status` | what a controller's status means for a request |
//!
//! A controller has one **control thread**, which may block in the kernel, and at most one queue pair on each reactor; two if
//! interrupts cannot be masked, of which the second has an interrupt for requests in flight while the reactor sleeps. The device
//! moves data to and from guests' memory where that is registered ([`Dma`]), and otherwise through bounce buffers.
//!
//! **Reset.** The control thread makes every reactor stop submitting, disables the controller, collects what each pair has
//! changed lately, and lets each reactor decide about its requests in flight: they are submitted again, in order, unless that
//! could be seen. A controller that vanishes is awaited for [`Config::grace`]; its requests wait, and go on when the same drive
//! is back, also at another place once that is attached.
#![forbid(unsafe_code)]

mod channel;
mod control;
mod controllers;
mod disks;
mod driver;
pub mod fabrics;
mod injection;
mod memory;
mod namespace;
mod pool;
mod shared;
mod status;
#[cfg(test)]
mod tests;

pub use controllers::{AttachedController, Controllers};
pub use injection::{Commands, Injection};
pub use pool::PoolError;

use aryk_cuse::CuseError;
use aryk_nvme::controller::{Failure, Options};
use aryk_nvme::spec::log::SmartLog;
use aryk_nvme::spec::status::CodeType;
use aryk_pci::{Address, Function, PciError};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The most bytes of one read or write, also if the controller takes more: a larger one would keep others of its reactor waiting.
const DATA_MAX: u64 = 1 << 20;
/// The most pieces of memory of one read or write.
const PIECES_MAX: u32 = 128;
/// The most ranges of one Dataset Management or Copy command: they fit in a page.
const RANGES_MAX: usize = 128;

/// Where a controller is.
#[derive(Clone, Debug)]
pub enum Location {
    /// A function of this host, bound to vfio-pci.
    Pci(Address),
    /// The socket of a vfio-user server.
    Socket(PathBuf),
    /// A model in this process.
    Model(Arc<dyn Function>),
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pci(address) => address.fmt(f),
            Self::Socket(path) => path.display().fmt(f),
            Self::Model(function) => f.write_str(function.name()),
        }
    }
}

/// Which memory of guests the controller accesses by itself. The kernel pins that memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dma {
    /// Memory of huge pages is pinned; the rest is copied through bounce buffers. Guests must not give whole huge pages back.
    #[default]
    Auto,
    /// All memory is pinned. Then guests must not give pages back: no balloon, free page reporting or post-copy migration.
    Pin,
    /// All data is copied through bounce buffers.
    Bounce,
}

/// What the driver does about a command that has not ended within [`aryk_nvme::queue::Timeouts::command`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnTimeout {
    /// The log gets a line; the request waits on.
    Log,
    /// The command is aborted. If it has not ended [`aryk_nvme::queue::Timeouts::grace`] later, the controller is reset.
    #[default]
    Abort,
    /// The controller is reset.
    Reset,
}

/// [`Config::retries`]: a command is tried again as often as its status allows it.
pub const WITHOUT_LIMIT: u16 = u16::MAX;

/// Which namespaces become disks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exposed {
    /// All: namespace N is the disk `NAMEnN`, where NAME is the controller's.
    All,
    /// One namespace, as a disk of this name.
    One {
        /// NSID.
        nsid: u32,
        /// The disk's name.
        disk: String,
    },
}

/// How a controller is attached.
#[derive(Clone, Debug)]
pub struct Config {
    /// The controller's name.
    pub name: String,
    /// Where it is.
    pub location: Location,
    /// The serial number that the drive must have; `None`: any.
    pub serial: Option<String>,
    /// Which namespaces become disks.
    pub exposed: Exposed,
    /// Which memory of guests is pinned.
    pub dma: Dma,
    /// Commands in flight on each reactor; lowered to what the controller's queues hold.
    pub depth: u16,
    /// Bytes of bounce buffers on each reactor; at least those of the two largest transfers.
    pub bounce_bytes: u64,
    /// How long requests wait for a controller that has vanished. None: the disks are removed at once.
    pub grace: Duration,
    /// How long requests wait for such a controller before they fail, until it is back. `None`: for the whole grace time.
    pub fast_fail: Option<Duration>,
    /// Time between two attempts to open such a controller.
    pub return_interval: Duration,
    /// Attempts after a status that allows another; [`WITHOUT_LIMIT`]: any number.
    pub retries: u16,
    /// The reaction to a late command.
    pub on_timeout: OnTimeout,
    /// Times and limits of the driver.
    pub options: Options,
}

impl Config {
    /// The default of [`Config::return_interval`].
    pub const RETURN_INTERVAL: Duration = Duration::from_millis(250);

    /// A controller with the defaults.
    pub fn new(name: impl Into<String>, location: Location) -> Self {
        Self {
            name: name.into(),
            location,
            serial: None,
            exposed: Exposed::All,
            dma: Dma::default(),
            depth: 255,
            bounce_bytes: 4 << 20,
            grace: Duration::from_secs(15),
            fast_fail: None,
            return_interval: Self::RETURN_INTERVAL,
            retries: 4,
            on_timeout: OnTimeout::default(),
            options: Options { pieces: PIECES_MAX, ..Options::default() },
        }
    }
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another controller has the name.
    #[error("there is a controller {0} already")]
    Exists(String),
    /// Another controller has the name, and waits for its drive, which may be at this place.
    #[error(
        "there is a controller {name} already, which waits for its drive: if that is at {location} now, attach it under any other name, and {name} goes on with it there"
    )]
    Awaited {
        /// The controller.
        name: String,
        /// The place.
        location: String,
    },
    /// The function is attached already.
    #[error("{location} is attached already, as {name}")]
    Attached {
        /// Where.
        location: String,
        /// The controller's name.
        name: String,
    },
    /// There is no such controller.
    #[error("there is no NVMe controller {0}")]
    NotFound(String),
    /// The controller has no such namespace, or the driver does not serve it.
    #[error("namespace {nsid} of {name}: {reason}")]
    Namespace {
        /// The controller's name.
        name: String,
        /// NSID.
        nsid: u32,
        /// Why there is no disk of it.
        reason: String,
    },
    /// Another drive is there than the one that is wanted.
    #[error("the drive at {location} has the serial number '{serial}', not '{wanted}'")]
    OtherDrive {
        /// Where.
        location: String,
        /// The serial number of the drive.
        serial: String,
        /// [`Config::serial`].
        wanted: String,
    },
    /// The drive is that of a controller that waits for it, and goes on with it.
    #[error(
        "the drive at {location} (serial number '{serial}') has moved: the controller {name} goes on with it there"
    )]
    Moved {
        /// Where.
        location: String,
        /// The serial number of the drive.
        serial: String,
        /// The controller that goes on with it.
        name: String,
    },
    /// The controller does not start.
    #[error(transparent)]
    Failure(#[from] Failure),
    /// The function cannot be opened.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// A disk cannot be registered.
    #[error(transparent)]
    Registry(#[from] aryk_bdev::Error),
    /// The controller refused a command, or cannot take one now.
    #[error("{0}")]
    Refused(String),
    /// The command would break the driver.
    #[error(
        "the admin command {0:#04x} is not sent: it would break the driver (queues, doorbells, events, its features), or change namespaces below their disks"
    )]
    Forbidden(u8),
    /// The command may destroy data in use.
    #[error("the admin command {opcode:#04x} may destroy data of a disk that is in use: {user}")]
    InUse {
        /// The opcode of the command.
        opcode: u8,
        /// A disk that is open, and by whom.
        user: String,
    },
    /// The data has not the length or the direction of the command.
    #[error("the data of the admin command {opcode:#04x}: {reason}")]
    WrongData {
        /// The opcode of the command.
        opcode: u8,
        /// What is wrong.
        reason: String,
    },
    /// The controller is away, resets, or has ended.
    #[error("the controller {0} is not ready")]
    NotReady(String),
    /// The controller to enable is not disabled.
    #[error("the controller {0} is not disabled")]
    NotDisabled(String),
    /// The controller was enabled, and does not start.
    #[error("the controller {name} does not start: {reason}")]
    NotEnabled {
        /// The controller's name.
        name: String,
        /// The failure.
        reason: String,
    },
    /// The character devices for tools cannot be created.
    #[error(transparent)]
    Tools(#[from] CuseError),
    /// The kernel refused a thread or a descriptor.
    #[error("cannot start the controller's thread: {0}")]
    Thread(#[from] std::io::Error),
}

/// How far a controller is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It is being opened and enabled.
    Starting,
    /// It serves I/O.
    Ready,
    /// It is being reset; requests wait.
    Resetting,
    /// It has vanished, or asks to be removed; requests wait for it to come back.
    Away,
    /// A caller has disabled it; requests wait.
    Disabled,
    /// It is being shut down.
    Stopping,
    /// It is over.
    Ended,
}

/// What is known of a controller.
#[derive(Clone, Debug)]
pub struct Info {
    /// The controller's name.
    pub name: String,
    /// Where it is.
    pub location: String,
    /// How far it is.
    pub phase: Phase,
    /// Its identity and abilities, once it was ready.
    pub controller: Option<aryk_nvme::claims::ControllerInfo>,
    /// PCI vendor and device.
    pub device: (u16, u16),
    /// The first 256 bytes of the configuration space.
    pub config_space: Vec<u8>,
    /// Its namespaces: each with its disk, or why it has none.
    pub namespaces: Vec<NamespaceInfo>,
    /// Queue pairs that it allows.
    pub pairs_allowed: u16,
    /// MSI-X vectors.
    pub vectors: u16,
    /// Whether reactors sleep while requests are in flight: queue pairs have interrupts.
    pub has_interrupts: bool,
    /// Which memory of guests is pinned.
    pub dma: Dma,
    /// The last reset: why, when, how long it took in nanoseconds once it is over.
    pub last_reset: Option<LastReset>,
    /// The last failure of the controller, for people.
    pub last_failure: Option<String>,
    /// The drive went away with acknowledged writes in its volatile cache, and is not taken back. Its cache may have lost them.
    pub may_have_lost_writes: bool,
    /// The SMART log as it was last read, and when.
    pub smart: Option<(Box<SmartLog>, SystemTime)>,
}

/// A reset of a controller.
#[derive(Clone, Debug)]
pub struct LastReset {
    /// Why.
    pub reason: aryk_nvme::controller::ResetReason,
    /// When it began.
    pub at: SystemTime,
    /// Its duration, once it is over.
    pub took: Option<Duration>,
}

/// A namespace of a controller.
#[derive(Clone, Debug)]
pub struct NamespaceInfo {
    /// NSID.
    pub nsid: u32,
    /// The namespace, or why the driver does not serve it.
    pub namespace: Result<aryk_nvme::claims::Namespace, aryk_nvme::claims::Unserved>,
    /// The name of its disk.
    pub disk: Option<String>,
}

/// The counters of a controller, since it was attached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Resets.
    pub resets: u64,
    /// Resets of single queue pairs.
    pub queue_resets: u64,
    /// Commands that were aborted because they were late.
    pub aborts: u64,
    /// Attempts after a status that allows another.
    pub retried: u64,
    /// Requests that resets submitted again.
    pub resubmitted: u64,
    /// Requests that failed because a reset could not submit them again.
    pub failed_by_reset: u64,
    /// Errors and health warnings that the controller reported by itself.
    pub warnings: u64,
    /// Commands, also of queue pairs that are gone.
    pub submitted: u64,
    /// Writes to doorbell registers, also of queue pairs that are gone.
    pub doorbells: u64,
    /// Commands that got an injected status.
    pub injected: u64,
    /// I/O commands that ended with an error, by type; a command that is tried again counts each time.
    pub errors: ErrorCounts,
    /// The queue pairs of each core that has had one.
    pub pairs: Vec<PairCounts>,
}

/// The counters of the queue pairs that a core has had, one after the other, since the controller was attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PairCounts {
    /// The queue pair that the core has now.
    pub qid: Option<u16>,
    /// The core of its reactor.
    pub core: u16,
    /// Commands.
    pub submitted: u64,
    /// Completions.
    pub completed: u64,
    /// Writes to the doorbell registers of submission queues.
    pub sq_doorbells: u64,
    /// Writes to the doorbell registers of completion queues.
    pub cq_doorbells: u64,
    /// Polls of completion queues.
    pub polls: u64,
    /// Polls that found no completion.
    pub idle_polls: u64,
    /// Requests that had to wait before their first attempt, because the pair was not ready or had no buffer.
    pub queued: u64,
    /// Commands in flight at the last completion.
    pub in_flight: u64,
    /// Pages of bounce buffers of the pair that the core has now, and the fewest that were free.
    pub pool: (u64, u64),
    /// Commands that ended with an error.
    pub errors: ErrorCounts,
}

/// Errors by the type of their status, in the order of [`CodeType::ALL`].
pub type ErrorCounts = [u64; CodeType::ALL.len()];
