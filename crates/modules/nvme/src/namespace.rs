//! The disk of a namespace. Control context; channels are opened in reactor context.

use crate::channel::{NamespaceChannel, PairedChannel};
use crate::control::Command;
use crate::driver;
use crate::shared::{Shared, lock};
use crate::{DATA_MAX, PIECES_MAX, RANGES_MAX};
use aryk_bdev::{
    Blocks, BoxFuture, Channel, Device, Failure, Failures, ForwardChannel, Geometry, Lba, Limits, Op, OpSet,
    OpenError,
};
use aryk_nvme::claims::{self, ControllerInfo};
use aryk_nvme::errors::{Class, classify};
use aryk_nvme::io::Commands;
use aryk_nvme::spec::status;
use aryk_reactor::{Cx, Handle, RootId};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::oneshot;

/// Bytes of one deallocation, and of one Write Zeroes command. Drives take a time for them that grows with the bytes, some of
/// them that of writes. The driver limits the bytes of all that are in progress.
pub(crate) const UNMAP_MAX: u64 = 128 << 20;
const ZEROES_MAX: u64 = 8 << 20;

/// A namespace that is a disk, with what its channels share.
#[derive(Debug)]
pub(crate) struct Namespace {
    shared: Arc<Shared>,
    nsid: u32,
    /// The disk's name.
    disk: String,
    depth: u16,
    state: Mutex<NamespaceState>,
    durability: Durability,
    failures: Failures,
}

/// The times of changes and flushes of a namespace, from which follows whether the drive's volatile cache may hold changes of it.
#[derive(Debug, Default)]
pub(crate) struct Durability {
    /// Submission time of the last flush that succeeded.
    flushed: AtomicU64,
    /// For each channel, when a change completed last; the channel's reactor writes it.
    changes: Mutex<Vec<Arc<AtomicU64>>>,
}

impl Durability {
    /// Adds a channel, and merges those that are closed.
    pub(crate) fn add_channel(&self) -> Arc<AtomicU64> {
        let (mut changes, channel) = (lock(&self.changes), Arc::<AtomicU64>::default());
        let closed = changes.extract_if(.., |change| Arc::get_mut(change).is_some());
        let last = closed.map(|change| change.load(Ordering::Relaxed)).max();
        changes.extend(last.map(|last| Arc::new(last.into())));
        changes.push(Arc::clone(&channel));
        channel
    }

    /// A flush that was submitted at this time has succeeded, or a shutdown has begun at this time.
    pub(crate) fn flushed(&self, submitted: u64) {
        self.flushed.fetch_max(submitted, Ordering::Relaxed);
    }

    /// Whether changes have completed that no later flush covers.
    pub(crate) fn has_unflushed(&self) -> bool {
        let flushed = self.flushed.load(Ordering::Relaxed);
        lock(&self.changes).iter().any(|change| change.load(Ordering::Relaxed) > flushed)
    }
}

/// What the controller says about the namespace.
#[derive(Clone, Debug)]
struct NamespaceState {
    claims: claims::Namespace,
    commands: Commands,
    /// The drive reported at its start that blocks are locked (TCG Opal).
    is_locked: bool,
}

impl NamespaceState {
    fn of(namespace: &claims::Namespace, controller: &ControllerInfo) -> Self {
        Self {
            claims: namespace.clone(),
            commands: Commands::new(namespace, controller),
            is_locked: controller.locking.is_some_and(|locking| locking.is_locked),
        }
    }
}

impl Namespace {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        disk: String,
        depth: u16,
        namespace: &claims::Namespace,
        controller: &ControllerInfo,
    ) -> Self {
        let state = NamespaceState::of(namespace, controller);
        let (shared, state, failures) = (Arc::clone(shared), Mutex::new(state), Failures::default());
        let durability = Durability::default();
        Self { shared, nsid: namespace.nsid, disk, depth, state, durability, failures }
    }

    pub(crate) const fn durability(&self) -> &Durability {
        &self.durability
    }

    pub(crate) const fn nsid(&self) -> u32 {
        self.nsid
    }

    pub(crate) fn disk(&self) -> &str {
        &self.disk
    }

    pub(crate) fn claims(&self) -> claims::Namespace {
        lock(&self.state).claims.clone()
    }

    /// The commands of the namespace, as it is now.
    pub(crate) fn commands(&self) -> Commands {
        lock(&self.state).commands
    }

    /// The name of an error of the drive for people: that of its status, or the reason for it that is known.
    pub(crate) fn name_of(&self, status: status::Status) -> &'static str {
        let is_locked = classify(status, [0; 3]).class == Class::Locked && lock(&self.state).is_locked;
        if is_locked { "the drive is locked (TCG Opal): unlock it first" } else { status.code().name() }
    }

    /// Takes over what the controller says now.
    pub(crate) fn update(&self, namespace: &claims::Namespace, controller: &ControllerInfo) {
        *lock(&self.state) = NamespaceState::of(namespace, controller);
    }

    /// Opens a channel of this reactor's own queue pair, or of both.
    fn open_own(self: &Arc<Self>, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        let unprepared = || OpenError::Unavailable(format!("{} has no queue pair here", self.shared.name));
        let driver = driver::find_for_channel(self.shared.key, cx).ok_or_else(unprepared)?;
        let channel = NamespaceChannel::new(driver, self, root);
        Ok(match driver::find_for_channel(self.shared.waking_key, cx) {
            Some(waking) => Box::new(PairedChannel::new(channel, waking, self, root)),
            None => Box::new(channel),
        })
    }

    /// Records and logs a failed request.
    pub(crate) fn failed(&self, failure: Failure) {
        self.failures.add(&self.disk, failure);
    }
}

/// The geometry of a namespace's disk.
pub(crate) fn geometry(claims: &claims::Namespace) -> Geometry {
    Geometry {
        optimal_io_blocks: Blocks(claims.optimal_boundary.into()),
        ..Geometry::plain(claims.block_size(), Blocks(claims.blocks))
    }
}

/// The operations of a namespace's disk with so many commands in flight, without Copy.
pub(crate) fn ops(commands: &Commands, depth: u16) -> OpSet {
    let supported = commands.supported();
    let optional = [
        (supported.dataset_management, Op::Unmap),
        (supported.write_zeroes, Op::WriteZeroes),
        (supported.compare, Op::Compare),
        // Two commands at a time.
        (supported.compare_and_write && depth > 1, Op::CompareAndWrite),
    ];
    let plain = OpSet::of(&[Op::Read, Op::Write, Op::Flush]);
    let has = optional.into_iter().filter(|(is_supported, _)| *is_supported);
    has.fold(plain, |ops, (_, op)| ops.with(op))
}

/// The device of a namespace.
#[derive(Debug)]
pub(crate) struct NamespaceDevice(pub(crate) Arc<Namespace>);

impl Device for NamespaceDevice {
    fn product(&self) -> &'static str {
        "NVMe disk"
    }

    fn geometry(&self) -> Geometry {
        geometry(&lock(&self.0.state).claims)
    }

    fn limits(&self) -> Limits {
        let state = lock(&self.0.state);
        let NamespaceState { claims, commands, .. } = &*state;
        let (_, each, all) = commands.deallocate_max();
        let (ranges, copied, copied_all) = commands.copy_max();
        let ranges = u64::from(ranges).min(RANGES_MAX as u64);
        Limits {
            depth: self.0.depth.into(),
            transfer_blocks: Blocks(commands.transfer_max().min(DATA_MAX >> claims.block_shift)),
            segments: PIECES_MAX,
            unmap_blocks: Blocks(all.min(each.into()).min(UNMAP_MAX >> claims.block_shift)),
            write_zeroes_blocks: Blocks(commands.write_zeroes_max().min(ZEROES_MAX >> claims.block_shift)),
            boundary_blocks: Blocks(claims.optimal_boundary.into()),
            compare_blocks: Blocks(commands.transfer_max().min(DATA_MAX >> claims.block_shift)),
            compare_and_write_blocks: Blocks(
                commands.compare_write_max().min((DATA_MAX / 2) >> claims.block_shift),
            ),
            copy_blocks: Blocks(copied_all.min(ranges * u64::from(copied))),
            // Where the controller has boundaries of its own for it, only single blocks are promised.
            atomic_blocks: match claims.atomic_boundary {
                Some(_) => Blocks(1),
                None => Blocks(claims.atomic_power_fail.into()),
            },
            is_shared: claims.is_shared,
            has_other_hosts: claims.is_shared,
        }
    }

    fn ops(&self) -> OpSet {
        let commands = self.0.commands();
        let ops = ops(&commands, self.0.depth);
        if commands.supported().copy { ops.with(Op::Copy) } else { ops }
    }

    fn is_read_only(&self) -> bool {
        lock(&self.0.state).claims.is_write_protected
    }

    fn last_failure(&self) -> Option<Failure> {
        self.0.failures.last()
    }

    fn failed_block(&self, lba: Lba, blocks: Blocks) -> Option<Lba> {
        self.0.failures.failed_block(lba, blocks)
    }

    fn tell_left_out(&self) {
        self.0.failures.tell_left_out(&self.0.disk);
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.0.shared.send(Command::Closed(self.0.nsid));
        Box::pin(std::future::ready(()))
    }

    fn prepare(&self, reactor: &Handle) -> BoxFuture<'_, Result<(), OpenError>> {
        let (reply, answer) = oneshot::channel();
        self.0.shared.send(Command::Prepare { reactor: reactor.clone(), reply });
        Box::pin(async move { answer.await.unwrap_or(Err(OpenError::Removed)) })
    }

    fn open_channel(&self, root: RootId, cx: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        if let Some(owner) = self.0.shared.owner_for(cx.handle()) {
            let namespace = Arc::clone(&self.0);
            let open = move |root, cx: &mut Cx| namespace.open_own(root, cx);
            return Ok(Box::new(ForwardChannel::open(&owner, Arc::new(open), root, cx)));
        }
        self.0.open_own(root, cx)
    }
}
