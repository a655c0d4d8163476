//! What the thread, the disks and the drivers of a controller share. Any context; nothing here blocks.

use super::control::Command;
use super::driver::Live;
use super::{RemoteConfig, RemoteInfo};
use crate::shared::lock;
use aryk_reactor::{DriverKey, Handle, Hold};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::sync::mpsc::UnboundedSender;

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
    /// Losses so far: queues of earlier generations are not used.
    generation: AtomicU64,
    /// Requests that a loss kept have not ended: others wait.
    pub(crate) is_gated: AtomicBool,
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
        Arc::new(Self {
            config,
            key: DriverKey::unique(),
            commands,
            info: Mutex::new(info),
            prepared: Mutex::default(),
            routes: Mutex::default(),
            generation: AtomicU64::new(0),
            is_gated: AtomicBool::new(false),
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

    /// The generation of queues.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// All queues are lost.
    pub(crate) fn begin_generation(&self) {
        self.is_gated.store(true, Ordering::Release);
        self.generation.fetch_add(1, Ordering::AcqRel);
        lock(&self.prepared).clear();
    }

    /// Keeps a connected queue for the first channel of a reactor.
    pub(crate) fn keep_prepared(&self, reactor: Handle, live: Box<Live>) {
        lock(&self.prepared).push((reactor, live));
    }

    /// The connected queue of a reactor.
    pub(crate) fn take_prepared(&self, reactor: &Handle) -> Option<Box<Live>> {
        let mut prepared = lock(&self.prepared);
        let place = prepared.iter().position(|(of, _)| of == reactor)?;
        Some(prepared.swap_remove(place).1)
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
