//! What a subsystem consists of, as one host sees it through one listener. Any context.
//!
//! A target makes a new [`View`] for each change, and each controller compares it with the one before
//! ([`crate::controller::Controller::update`]).

use std::collections::BTreeMap;

use aryk_nvme::spec::identify::Descriptors;

use crate::discovery::Page;
use crate::nqn::Nqn;
use crate::sgl::DataBlocks;

/// What the controllers of a subsystem report about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// SUBNQN.
    pub nqn: Nqn,
    /// Serial number, of which a controller reports 20 bytes.
    pub serial: String,
    /// Model number, of which a controller reports 40 bytes.
    pub model: String,
    /// Firmware revision, of which a controller reports 8 bytes.
    pub firmware: String,
    /// The SGL descriptors of the listener's transport.
    pub sgls: DataBlocks,
    /// What the subsystem serves.
    pub service: Service,
}

/// What a subsystem serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Service {
    /// Namespaces.
    Io(Io),
    /// The discovery log page.
    Discovery(Page),
}

/// Namespaces, and what commands may do with them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Io {
    /// NN: the largest NSID that a namespace can have.
    pub nsid_max: u32,
    /// The namespaces by NSID, all at most `nsid_max`.
    pub namespaces: BTreeMap<u32, Namespace>,
    /// The states of ANA groups; `None`: no ANA reporting.
    pub ana: Option<Ana>,
    /// Bytes of the largest transfer: a power of two, at least 4,096.
    pub transfer_max: u32,
    /// Bytes of data that a command of an I/O queue may have in its capsule: a multiple of 16.
    pub in_capsule_max: u32,
    /// I/O queues of each controller, at least 1.
    pub queues: u16,
    /// The I/O commands besides those that every controller has.
    pub commands: Commands,
    /// CRDT1 to CRDT3: delays before a retry, in units of 100 ms.
    pub retry_delays: [u16; 3],
}

/// Optional I/O commands that the target executes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Commands {
    /// Compare.
    pub compare: bool,
    /// Compare and write, fused.
    pub compare_and_write: bool,
    /// Dataset Management: deallocate.
    pub deallocate: bool,
    /// Write Zeroes.
    pub write_zeroes: bool,
    /// Verify.
    pub verify: bool,
    /// Copy, to namespaces whose disks can.
    pub copy: bool,
    /// The commands of reservations.
    pub reservations: bool,
}

/// A namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Namespace {
    /// The namespace's size.
    pub blocks: u64,
    /// The size of a block as a power of two, at least 9.
    pub block_shift: u8,
    /// EUI-64, NGUID and UUID. The controller ignores the command set, which is always NVM.
    pub ids: Descriptors,
    /// ANAGRPID, 0 without ANA.
    pub ana_group: u32,
    /// Writes fail.
    pub is_read_only: bool,
    /// Blocks of a source of Copy that the disk takes; 0: it cannot copy.
    pub copy_blocks: u64,
    /// Blocks of the preferred granularity of writes; 1 for none.
    pub optimal_write_blocks: u16,
    /// Reservations can persist through a loss of power.
    pub can_persist: bool,
    /// PTPL: reservations persist.
    pub persists: bool,
}

/// Sources of a Copy command, at most.
pub(crate) const SOURCES_MAX: u16 = 128;
/// Bytes of a source of Copy, and of all sources of a command, at most, unless one block has more: a queue that is full of copies
/// keeps its disk busy for seconds, not minutes.
const SOURCE_BYTES: u64 = 1 << 20;
const COPY_BYTES: u64 = 4 << 20;

/// The limits of Copy in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyLimits {
    /// MSSRL: blocks of a source; 0: the disk cannot copy.
    pub source: u16,
    /// MCL: blocks of all sources.
    pub all: u32,
}

impl Namespace {
    /// The limits of Copy.
    pub(crate) fn copy_limits(&self) -> CopyLimits {
        let most = |bytes: u64| (bytes >> self.block_shift).max(1);
        let source = self.copy_blocks.min(most(SOURCE_BYTES)).min(u16::MAX.into());
        CopyLimits { source: source as u16, all: if source > 0 { most(COPY_BYTES) as u32 } else { 0 } }
    }
}

/// The ANA state of a group. NVMe 2.0 §5.16.1.13.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum AnaState {
    /// The best path.
    Optimized = 1,
    /// A path that works, but is not the best one.
    NonOptimized = 2,
    /// Commands fail for now.
    Inaccessible = 3,
    /// Commands will never succeed again.
    PersistentLoss = 4,
    /// The state is changing.
    Change = 15,
}

/// ANA groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ana {
    /// The largest ANAGRPID that a group can have.
    pub group_max: u32,
    /// The groups.
    pub groups: BTreeMap<u32, AnaGroup>,
    /// How often any state changed.
    pub changes: u64,
}

/// An ANA group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnaGroup {
    /// The state of the group.
    pub state: AnaState,
    /// [`Ana::changes`] at its last change.
    pub changes: u64,
}
