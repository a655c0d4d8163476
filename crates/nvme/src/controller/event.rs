//! What a controller reports to its owner, and the owner's choices.

use aryk_pci::PciError;

use crate::claims::BadClaim;
use crate::memory::MemoryError;
use crate::queue::{DmaEnded, QueueError, QueuePair, Restart, Timeouts};
use crate::spec::feature::{Arbitration, AsyncEvent};
use crate::spec::log::{SanitizeStatus, SmartLog};
use crate::spec::status::Status;

/// A second, in nanoseconds.
pub const SECOND: u64 = 1_000_000_000;

/// The owner's choices. All times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// I/O queue pairs to ask the controller for; it may allow fewer.
    pub pairs: u16,
    /// Limits of time for I/O commands.
    pub io: Timeouts,
    /// Limit for admin commands of [`crate::admin::Patience::Normal`]. All commands of a start may take twice as long together.
    pub admin: u64,
    /// Limit for admin commands of [`crate::admin::Patience::Long`].
    pub admin_long: u64,
    /// For how long a reset waits until the owners of the queue pairs have quiesced them.
    pub quiesce: u64,
    /// Time between two reads of CSTS.
    pub watch: u64,
    /// Keep-alive timer; 0 for none. NVMe 2.0 §3.9.
    pub keep_alive: u64,
    /// The arbitration that is set at each start; `None`: the default of the controller.
    pub arbitration: Option<Arbitration>,
    /// Most pieces of data of a command, which size the lists for SGLs.
    pub pieces: u32,
    /// Attempts to bring a controller up before it is removed.
    pub attempts: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            pairs: 128,
            io: Timeouts { command: 30 * SECOND, grace: 10 * SECOND },
            admin: 120 * SECOND,
            admin_long: 3600 * SECOND,
            quiesce: SECOND,
            watch: SECOND / 20,
            keep_alive: 0,
            arbitration: None,
            pieces: 128,
            attempts: 3,
        }
    }
}

/// Why a controller cannot be used, or no longer.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The device does not answer: registers read as all ones, or the transport reports it gone.
    #[error("the controller vanished: {0}")]
    Vanished(String),
    /// The controller did not leave the ready state within CAP.TO, and the function's reset failed.
    #[error("CSTS.RDY did not become 0 within {0} ms, and the function-level reset failed")]
    NotDisabled(u64),
    /// The controller did not become ready within CAP.TO.
    #[error("CSTS.RDY did not become 1 within {0} ms")]
    NotEnabled(u64),
    /// CSTS.CFS was set while the controller started.
    #[error("the controller reports a fatal status (CSTS.CFS)")]
    Fatal,
    /// A claim of the controller cannot be true.
    #[error(transparent)]
    BadClaim(#[from] BadClaim),
    /// After a reset, another device answered.
    #[error("another device answers after the reset: serial number {now}, not {before}")]
    AnotherDevice {
        /// SN before.
        before: String,
        /// SN now.
        now: String,
    },
    /// A command of the start failed.
    #[error("{step} failed: {status}")]
    Step {
        /// The command.
        step: &'static str,
        /// Status of the command.
        status: Status,
    },
    /// The commands of the start took too long together.
    #[error(
        "the controller was not identified within {seconds} s: {read} of {listed} namespaces were read, and the command {step} was running"
    )]
    StartTooLong {
        /// The limit: twice [`Options::admin`].
        seconds: u64,
        /// The command that was running.
        step: &'static str,
        /// Namespaces that were read.
        read: usize,
        /// Namespaces that the controller had listed by then.
        listed: usize,
    },
    /// An admin command was not completed in time.
    #[error("an admin command was not completed in time ({0})")]
    AdminTimeout(&'static str),
    /// The admin completion queue is not correct.
    #[error(transparent)]
    AdminQueue(#[from] QueueError),
    /// The controller failed again and again, soon after each reset.
    #[error("the controller failed again soon after each of several resets; the last reason: {0:?}")]
    Unstable(ResetReason),
    /// CSTS.PP stayed set.
    #[error("the controller did not process commands (CSTS.PP) for more than {0} ms")]
    Paused(u64),
    /// There is no memory for the driver's queues.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The transport failed.
    #[error(transparent)]
    Pci(#[from] PciError),
}

/// Why a controller is reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetReason {
    /// The owner asked.
    Request,
    /// A command was late, and its abort did not help.
    CommandTimeout,
    /// An admin command was late.
    AdminTimeout,
    /// CSTS.CFS is set.
    Fatal,
    /// The transport reported an error, for example an uncorrectable PCIe error.
    BusError,
    /// CSTS.RDY is 0 although CC.EN is 1.
    NotReady,
    /// The controller paused (CSTS.PP) for longer than it claims to (MTFA).
    Paused,
    /// The admin queue, or the deletion of a queue pair, went wrong.
    QueueError,
}

/// How a controller ended.
#[derive(Debug)]
pub enum End {
    /// The owner shut it down.
    Stopped {
        /// The controller reported the end of the shutdown (CSTS.SHST = 10b): its volatile cache holds no data any more.
        is_clean: bool,
    },
    /// It failed for good; its bus mastering is off.
    Failed(Failure),
}

/// A step of a recovery, with its duration, for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecoveryStep {
    /// An Abort was answered; whether it reports that it aborted the command.
    Abort {
        /// The command's queue.
        sqid: u16,
        /// The command.
        cid: u16,
        /// DW0 bit 0 is 0.
        did_abort: bool,
    },
    /// All owners have quiesced their queue pairs, or the time for that is over.
    Quiesced,
    /// CSTS.RDY became 0.
    Disabled,
    /// The function was reset, because CSTS.RDY did not become 0 or an earlier attempt failed.
    FunctionReset,
    /// CSTS.RDY became 1.
    Enabled,
}

/// A difference between two readings of the namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceChange {
    /// The namespace is new.
    Added(u32),
    /// The namespace has other properties, for example another size.
    Changed(u32),
    /// The namespace is gone.
    Removed(u32),
}

/// The answer to an admin command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminAnswer {
    /// The status.
    pub status: Status,
    /// DW0.
    pub result: u32,
    /// What the controller wrote; as long as the command asked for.
    pub data: Vec<u8>,
}

/// What happened. Events are returned in order, by [`super::Controller::poll`].
#[derive(Debug)]
pub enum Event {
    /// The controller is ready for the first time: [`super::Controller::info`] and [`super::Controller::namespaces`] are known.
    Ready,
    /// A reset begins. Every owner of a queue pair calls [`QueuePair::quiesce`] and then
    /// [`super::Controller::queue_quiesced`].
    Quiesce(ResetReason),
    /// The owner quiesces its pairs, as for a reset: the controller is being shut down.
    ShuttingDown,
    /// The controller no longer accesses the memory of a pair's commands. The owner reaps, calls [`QueuePair::rewind`], and then
    /// [`super::Controller::queue_rewound`].
    DmaEnded(DmaEnded),
    /// A pair that the owner asked for.
    QueueCreated(Box<QueuePair>),
    /// The controller refused to create a pair.
    QueueFailed {
        /// The pair.
        qid: u16,
        /// Why.
        status: Status,
    },
    /// A pair can run again: the owner calls [`QueuePair::resume`].
    QueueReady(Restart),
    /// A reset is over; the time since its begin, in nanoseconds.
    Recovered {
        /// Nanoseconds.
        took: u64,
    },
    /// A step of a recovery is over.
    Step {
        /// The step.
        step: RecoveryStep,
        /// Its duration in nanoseconds.
        took: u64,
    },
    /// An attempt to bring the controller up failed; there will be another.
    AttemptFailed(Failure),
    /// The controller does not process commands for a while (CSTS.PP), for example because it activates firmware. Late commands
    /// are no failure: [`super::Controller::abort`] does nothing until [`Event::Resumed`], or a reset after `limit`.
    Paused {
        /// Nanoseconds.
        limit: u64,
    },
    /// The controller processes commands again: the owner of each queue pair calls [`QueuePair::restart_clock`].
    Resumed {
        /// Duration of the pause in nanoseconds.
        took: u64,
    },
    /// The controller refused a setting of [`Options`], and goes on without.
    NotSet {
        /// The command.
        step: &'static str,
        /// The status of the command.
        status: Status,
    },
    /// Namespaces appeared, changed or went.
    NamespacesChanged(Vec<NamespaceChange>),
    /// The namespaces were read again: after an event of the controller, or by [`super::Controller::rescan`].
    Rescanned,
    /// There are more namespaces than the driver looks at.
    TooManyNamespaces {
        /// The limit.
        max: usize,
    },
    /// An asynchronous event of the controller.
    Async(AsyncEvent),
    /// The SMART log, read because of an asynchronous event.
    Smart(Box<SmartLog>),
    /// The state of the last sanitize operation, read because the controller reported its end.
    Sanitize(SanitizeStatus),
    /// An admin command of the owner ended; `None` if a reset or the removal ended it.
    Admin {
        /// What [`super::Controller::admin`] returned.
        id: u64,
        /// The answer.
        answer: Option<AdminAnswer>,
    },
    /// The kernel or the transport asks for the function back: the owner shuts the controller down and drops it.
    RemovalRequested,
    /// The controller ended. There are no more events; the owner drops it.
    Ended(End),
}
