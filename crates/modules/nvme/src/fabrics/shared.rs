//! What the thread, the disks and the drivers of a controller share. Any context; nothing here blocks.

use super::control::Command;
use super::driver::{Extent, Guard, Live, PATHS_MAX, Policy};
use super::{RemoteConfig, RemoteInfo};
use crate::shared::lock;
use aryk_reactor::{DriverKey, Handle, Hold, Nanos};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::mpsc::UnboundedSender;

/// What drivers that have ended have left.
#[derive(Debug, Default)]
pub(crate) struct Departed {
    /// Changes that a controller may still make, by path.
    pub(crate) unsettled: Vec<(usize, Extent)>,
    /// What they have changed up to this time is not known any more.
    pub(crate) until: Nanos,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: RemoteConfig,
    /// The drivers of the reactors' queues.
    pub(crate) key: DriverKey,
    commands: UnboundedSender<Command>,
    info: Mutex<RemoteInfo>,
    /// Queues that are connected, and whose reactors have no driver yet.
    prepared: Mutex<Vec<(Handle, Box<Live>)>>,
    /// Reactors without a queue, each with the reactor whose queue it uses.
    routes: Mutex<Vec<(Handle, Hold)>>,
    /// The life of each path's controller: queues of earlier lives are not used.
    lives: [AtomicU64; PATHS_MAX],
    /// See [`Self::gate`].
    gate: Mutex<(u64, Option<Guard>)>,
    /// What drivers that have ended have left.
    departed: Mutex<Departed>,
    /// Counts the changes of the access to namespaces and of policies, from 1 on.
    version: AtomicU64,
    /// Queues that a path needs: one for each driver.
    pub(crate) needed: AtomicU16,
    /// Paths, a bit each, whose access to namespaces is to be read again.
    asked: AtomicU8,
    /// How the paths of disks are used, by NSID.
    pub(crate) policies: Mutex<BTreeMap<u32, Policy>>,
    /// Requests of drivers that begin without a queue fail.
    pub(crate) is_failing: AtomicBool,
    pub(crate) retried: AtomicU64,
    pub(crate) resubmitted: AtomicU64,
    pub(crate) failed_by_loss: AtomicU64,
}

impl Shared {
    pub(crate) fn new(
        config: RemoteConfig,
        commands: UnboundedSender<Command>,
        info: RemoteInfo,
    ) -> Arc<Self> {
        let policies = Mutex::new(config.policies.clone());
        Arc::new(Self {
            config,
            key: DriverKey::unique(),
            commands,
            info: Mutex::new(info),
            prepared: Mutex::default(),
            routes: Mutex::default(),
            lives: Default::default(),
            gate: Mutex::new((0, Some(Guard::default()))),
            departed: Mutex::default(),
            version: AtomicU64::new(1),
            needed: AtomicU16::new(0),
            asked: AtomicU8::new(0),
            policies,
            is_failing: AtomicBool::new(false),
            retried: AtomicU64::new(0),
            resubmitted: AtomicU64::new(0),
            failed_by_loss: AtomicU64::new(0),
        })
    }

    /// Sends a command to the thread. A controller that has ended ignores it.
    pub(crate) fn send(&self, command: Command) {
        let _ = self.commands.send(command);
    }

    /// Whether the controller has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.commands.is_closed()
    }

    /// Waits until the controller has ended.
    pub(crate) async fn ended(&self) {
        self.commands.closed().await;
    }

    /// What the thread last said of the controller.
    pub(crate) fn info(&self) -> MutexGuard<'_, RemoteInfo> {
        lock(&self.info)
    }

    /// The life of a path's controller.
    pub(crate) fn life(&self, path: usize) -> u64 {
        self.lives[path].load(Ordering::Acquire)
    }

    /// The controller of a path is lost, with all queues.
    pub(crate) fn begin_life(&self, path: usize) {
        self.lives[path].fetch_add(1, Ordering::AcqRel);
        lock(&self.prepared).retain(|(_, live)| live.path() != path);
    }

    /// Keeps what a driver leaves that ends.
    pub(crate) fn keep_departed(&self, unsettled: Vec<(usize, Extent)>, until: Nanos) {
        let mut departed = lock(&self.departed);
        departed.unsettled.extend(unsettled);
        departed.until = departed.until.max(until);
    }

    /// What drivers have left that have ended. The changes are returned once.
    pub(crate) fn take_departed(&self) -> Departed {
        let mut departed = lock(&self.departed);
        Departed { unsettled: std::mem::take(&mut departed.unsettled), until: departed.until }
    }

    /// The number of changes of the access to namespaces and of policies.
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// The access to namespaces or a policy has changed: each channel chooses its paths again.
    pub(crate) fn change_routes(&self) {
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The number of changes of the gate, and the blocks that lost connections may still change; `None`: no request starts.
    pub(crate) fn gate(&self) -> (u64, Option<Guard>) {
        lock(&self.gate).clone()
    }

    /// Sets the gate with which drivers begin.
    pub(crate) fn set_gate(&self, guard: Option<Guard>) {
        let mut gate = lock(&self.gate);
        *gate = (gate.0 + 1, guard);
    }

    /// Has the access to namespaces by a path read again. Returns whether that was not asked for already.
    pub(crate) fn ask_access(&self, path: usize) -> bool {
        self.asked.fetch_or(1 << path, Ordering::AcqRel) >> path & 1 == 0
    }

    /// The access by a path is being read.
    pub(crate) fn reads_access(&self, path: usize) {
        self.asked.fetch_and(!(1 << path), Ordering::AcqRel);
    }

    /// Keeps a connected queue for the first channel of a reactor.
    pub(crate) fn keep_prepared(&self, reactor: Handle, live: Box<Live>) {
        lock(&self.prepared).push((reactor, live));
    }

    /// The connected queues of a reactor.
    pub(crate) fn take_prepared(&self, reactor: &Handle) -> Vec<(Handle, Box<Live>)> {
        lock(&self.prepared).extract_if(.., |(of, _)| of == reactor).collect()
    }

    /// Whether a reactor's queue of a path is kept for its first channel.
    pub(crate) fn has_prepared(&self, reactor: &Handle, path: usize) -> bool {
        lock(&self.prepared).iter().any(|(of, live)| of == reactor && live.path() == path)
    }

    /// Makes a reactor without a queue use that of another.
    pub(crate) fn route(&self, reactor: Handle, owner: Hold) {
        let mut routes = lock(&self.routes);
        routes.retain(|(from, _)| *from != reactor && !from.has_ended());
        routes.push((reactor, owner));
    }

    /// The reactor whose queue this one uses.
    pub(crate) fn owner_for(&self, reactor: &Handle) -> Option<Hold> {
        lock(&self.routes).iter().find(|(from, _)| from == reactor).map(|(_, owner)| owner.clone())
    }

    /// Forgets all routes at the end of the controller.
    pub(crate) fn forget_routes(&self) {
        lock(&self.routes).clear();
    }
}
