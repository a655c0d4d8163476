//! The disk of a namespace. Control context; channels are opened in reactor context.

use super::DATA_MAX;
use super::control::Command;
use super::driver::{PathTable, RemoteChannel, Traffic};
use super::shared::Shared;
use crate::disks;
use crate::namespace::{self, UNMAP_MAX};
use crate::shared::lock;
use aryk_bdev::{
    Blocks, BoxFuture, Channel, Device, Failure, Failures, ForwardChannel, Geometry, Lba, Limits, OpSet,
    OpenError,
};
use aryk_nvme::claims::{self, ControllerInfo};
use aryk_nvme::io::Commands;
use aryk_reactor::{Cx, Handle, RootId};
use std::sync::{Arc, Mutex};
use tokio::sync::oneshot;

/// Bytes of one Write Zeroes command: the target may write them.
const ZEROES_MAX: u64 = 8 << 20;

/// A namespace that is a disk, with what its channels share.
#[derive(Debug)]
pub(super) struct Namespace {
    shared: Arc<Shared>,
    nsid: u32,
    /// The disk's name.
    disk: String,
    depth: u16,
    /// What the controller says about it.
    state: Mutex<(claims::Namespace, Commands)>,
    /// What the paths are for it.
    pub(super) paths: PathTable,
    /// What they have carried for it.
    pub(super) traffic: Traffic,
    failures: Failures,
}

impl Namespace {
    pub(super) fn new(
        shared: &Arc<Shared>,
        disk: String,
        depth: u16,
        namespace: &claims::Namespace,
        controller: &ControllerInfo,
    ) -> Self {
        let state = (namespace.clone(), Commands::new(namespace, controller));
        let policy = lock(&shared.policies).get(&namespace.nsid).copied().unwrap_or(shared.config.policy);
        Self {
            shared: Arc::clone(shared),
            nsid: namespace.nsid,
            disk,
            depth,
            state: Mutex::new(state),
            paths: PathTable::new(policy),
            traffic: Traffic::default(),
            failures: Failures::default(),
        }
    }

    pub(super) const fn nsid(&self) -> u32 {
        self.nsid
    }

    pub(super) const fn depth(&self) -> u16 {
        self.depth
    }

    /// The commands of the namespace, as it is now.
    pub(super) fn commands(&self) -> Commands {
        lock(&self.state).1
    }

    /// Records and logs a failed request.
    pub(super) fn failed(&self, failure: Failure) {
        self.failures.add(&self.disk, failure);
    }
}

impl disks::Namespace for Namespace {
    fn disk(&self) -> &str {
        &self.disk
    }

    fn claims(&self) -> claims::Namespace {
        lock(&self.state).0.clone()
    }

    fn update(&self, claims: &claims::Namespace, controller: &ControllerInfo) {
        *lock(&self.state) = (claims.clone(), Commands::new(claims, controller));
    }
}

/// The device of a namespace.
#[derive(Debug)]
pub(super) struct RemoteDevice(pub(super) Arc<Namespace>);

impl Device for RemoteDevice {
    fn product(&self) -> &'static str {
        "NVMe disk"
    }

    fn geometry(&self) -> Geometry {
        namespace::geometry(&lock(&self.0.state).0)
    }

    fn limits(&self) -> Limits {
        let state = lock(&self.0.state);
        let (claims, commands) = &*state;
        let (_, each, all) = commands.deallocate_max();
        let within = |bytes: u64| bytes >> claims.block_shift;
        let transfer = commands.transfer_max().min(within(DATA_MAX));
        Limits {
            depth: self.0.depth.into(),
            transfer_blocks: Blocks(transfer),
            unmap_blocks: Blocks(all.min(each.into()).min(within(UNMAP_MAX))),
            write_zeroes_blocks: Blocks(commands.write_zeroes_max().min(within(ZEROES_MAX))),
            boundary_blocks: Blocks(claims.optimal_boundary.into()),
            compare_blocks: Blocks(transfer),
            compare_and_write_blocks: Blocks(commands.compare_write_max().min(transfer)),
            // Where the controller has boundaries of its own for it, only single blocks are promised.
            atomic_blocks: match claims.atomic_boundary {
                Some(_) => Blocks(1),
                None => Blocks(claims.atomic_power_fail.into()),
            },
            is_shared: claims.is_shared,
            has_other_hosts: claims.is_shared,
            ..Limits::default()
        }
    }

    fn ops(&self) -> OpSet {
        namespace::ops(&self.0.commands(), self.0.depth)
    }

    fn is_read_only(&self) -> bool {
        lock(&self.0.state).0.is_write_protected
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
        let namespace = Arc::clone(&self.0);
        let open = move |root, cx: &mut Cx| -> Result<Box<dyn Channel>, OpenError> {
            Ok(Box::new(RemoteChannel::open(&namespace.shared, &namespace, root, cx)))
        };
        match self.0.shared.owner_for(cx.handle()) {
            Some(owner) => Ok(Box::new(ForwardChannel::open(&owner, Arc::new(open), root, cx))),
            None => open(root, cx),
        }
    }
}
