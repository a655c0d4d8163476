//! The state on which the methods work: the daemon, as its control thread sees it. Control context.

use crate::config::{Config, Subsystem, first_part};
use crate::journal::Done;
use crate::methods::details::Details;
use crate::methods::keyring::Keyring;
use crate::methods::log::{LogSettings, PrintLevel};
use crate::methods::nvme::is_disk_of;
use crate::restore::{StartUp, Unfinished};
use crate::scheduler::Scheduler;
use crate::wrapping::Wrapping;
use crate::{Disks, Error, Outcome};
use aryk_bdev::{Bdev, Env, Memory, QosGroup};
use aryk_bdev_rbd::Clusters;
use aryk_metrics::{Collector, Controller, Inventory};
use aryk_reactor::{Clock, Handle, Nanos, Reactors};
use aryk_state::WriteError;
use aryk_vhost_device::{Controllers, Info};
use aryk_vhost_scsi::ScsiControllers;
use rustix::io::Errno;
use serde::Serialize;
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// How long the end of the daemon waits for a pool on a disk of several hosts.
const CLOSING: Duration = Duration::from_secs(3);

/// The daemon.
pub struct Control {
    /// Environment in which modules create disks.
    pub env: Env,
    /// The reactors, on which I/O runs.
    pub reactors: Rc<Reactors>,
    /// The disks.
    pub disks: Disks,
    /// The controllers, of all kinds.
    pub controllers: Rc<Controllers>,
    /// The vhost-user-scsi controllers among them, and their logical units.
    pub scsi: ScsiControllers,
    /// Moves queues between reactors.
    pub(crate) scheduler: Scheduler,
    /// The configuration.
    pub config: Config,
    /// The NVMe controllers.
    pub(crate) nvme: crate::methods::nvme::State,
    /// Secrets by name, for methods that need one.
    pub keyring: Keyring,
    /// Wraps key material before it enters the configuration.
    pub(crate) wrapping: Wrapping,
    /// The clients of Ceph clusters.
    pub(crate) rbd: crate::methods::rbd::State,
    /// The keys of encrypted disks.
    pub(crate) keys: crate::methods::crypto::Keys,
    /// Rotations of these keys.
    pub(crate) rekeys: crate::methods::rekey::State,
    /// The disks with LUKS headers.
    pub(crate) luks: crate::methods::luks::State,
    /// The targets of NVMe over TCP.
    pub(crate) nvmf: Rc<crate::methods::nvmf::State>,
    /// The pools of volumes.
    pub(crate) volumes: Rc<crate::methods::volumes::State>,
    /// Collects statistics.
    pub collector: Collector,
    /// Whether methods of run time may be called.
    started: watch::Sender<bool>,
    /// Operations of the start-up for which clients wait.
    pub(crate) start_up: Rc<StartUp>,
    /// Whether the daemon is ending: nothing is created any more.
    closing: Cell<bool>,
    /// When the daemon was started.
    born: Nanos,
    log: RefCell<LogSettings>,
    apply_log: Box<dyn Fn(&LogSettings)>,
    /// Records of the trace before this time are not reported any more.
    pub(crate) trace_cleared: Cell<Option<Nanos>>,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("reactors", &self.reactors).finish_non_exhaustive()
    }
}

impl Control {
    /// A daemon that runs on `reactors`, creates its controllers' sockets in `vhost_dir`, limits their queues to `queue_size_max`
    /// descriptors, and waits for start-up. `apply_log` applies the log settings.
    pub fn new(
        reactors: Rc<Reactors>,
        vhost_dir: &Path,
        queue_size_max: u16,
        level: PrintLevel,
        apply_log: impl Fn(&LogSettings) + 'static,
    ) -> Self {
        let disks = Disks::default();
        let registry = Arc::clone(&disks.registry);
        let (memory, reactors_of) = (registry.memory().clone(), Rc::clone(&reactors));
        let controllers = Rc::new(Controllers::new(vhost_dir, queue_size_max, memory, reactors_of));
        let env = Env::new(Arc::clone(&registry), &reactors);
        let nvmf = Rc::new(crate::methods::nvmf::State::new(env.clone()));
        let volumes = Rc::default();
        Self {
            scheduler: Scheduler::new(&reactors, &controllers, &nvmf, &volumes),
            scsi: ScsiControllers::new(Rc::clone(&controllers), registry),
            controllers,
            env,
            reactors,
            disks,
            config: Config::default(),
            nvme: crate::methods::nvme::State::default(),
            keyring: Keyring::default(),
            rbd: crate::methods::rbd::State::default(),
            wrapping: Wrapping::default(),
            keys: crate::methods::crypto::Keys::default(),
            rekeys: crate::methods::rekey::State::default(),
            luks: crate::methods::luks::State::default(),
            nvmf,
            volumes,
            collector: Collector::default(),
            started: watch::Sender::new(false),
            start_up: Rc::default(),
            closing: Cell::new(false),
            born: Clock::Monotonic.now(),
            log: RefCell::new(LogSettings::new(level)),
            apply_log: Box::new(apply_log),
            trace_cleared: Cell::new(None),
        }
    }

    /// The same daemon, with another wrapping key than one of this process.
    #[must_use]
    pub fn with_wrapping(self, wrapping: Wrapping) -> Self {
        Self { wrapping, ..self }
    }

    /// Sets the clients of Ceph clusters, which by default use the dynamic linker's librbd and the cores of this thread.
    #[must_use]
    pub fn with_rbd(mut self, clusters: Clusters) -> Self {
        self.rbd = crate::methods::rbd::State::new(clusters);
        self
    }

    /// Sets how long a VM's new memory waits for devices to register it: as [`Memory::set_patience`].
    pub fn set_memory_patience(&self, patience: Duration) {
        self.disks.registry.memory().set_patience(patience);
    }

    /// Time since the start of the daemon.
    pub(crate) fn age(&self) -> Duration {
        Duration::from_nanos(Clock::Monotonic.now().0.saturating_sub(self.born.0))
    }

    /// Permits calls of run-time methods.
    pub fn start(&self) {
        self.started.send_replace(true);
    }

    /// Whether methods of run time may be called.
    pub fn has_started(&self) -> bool {
        *self.started.borrow()
    }

    /// Delays the end of start-up until the result is dropped, while the configuration is restored. With `loads_file`, clients'
    /// calls at run time wait until then.
    pub fn begin_start_up(&self, loads_file: bool) -> Unfinished {
        self.start_up.begin(loads_file)
    }

    /// Waits until start-up is complete: run-time methods may be called, and the configuration was restored as far as possible.
    pub async fn until_started(&self) {
        // The sender lives as long as the borrowed `self`.
        let _ = self.started.subscribe().wait_for(|started| *started).await;
        self.start_up.until_over().await;
    }

    /// Notes a disk that `module` has just created, and the call that creates it again. Returns its name, the methods' result.
    pub(crate) fn made_disk(
        &self,
        bdev: &Bdev,
        module: &'static str,
        details: Details,
        (method, params): (&'static str, &impl Serialize),
    ) -> String {
        self.disks.made(bdev, module, details);
        self.config.made(Subsystem::Bdev, bdev.name(), method, params);
        bdev.name().to_owned()
    }

    /// Records a disk that `module` has created, and the call that creates it again after a restart: for methods of modules
    /// that are not part of this crate. Returns the disk's name, the usual result of such a method.
    pub fn made_by(
        &self,
        bdev: &Bdev,
        module: &'static str,
        call: (&'static str, &impl Serialize),
    ) -> String {
        self.made_disk(bdev, module, Details::default(), call)
    }

    /// All disks, in the order in which the calls of the configuration create them one by one; a restart creates them in another
    /// order.
    pub(crate) fn list_disks(&self) -> Vec<Arc<Bdev>> {
        let mut disks = self.disks.registry.list();
        disks.sort_by_cached_key(|disk| self.creation_order(disk));
        disks
    }

    /// The place of the call that creates a disk, or of a later one that creates a disk below it, which the disk waits for;
    /// and the number of disks between the two.
    fn creation_order(&self, disk: &Bdev) -> (u64, u32) {
        let noted = |name: &str| self.config.place(Subsystem::Bdev, name);
        let with_controller =
            || self.config.place_that(Subsystem::Nvme, |call| is_disk_of(disk.name(), &call.params));
        let place = noted(disk.name()).or_else(|| noted(&first_part(disk.name())?));
        let place = place.or_else(with_controller).unwrap_or(u64::MAX);
        let after = |base: &Arc<Bdev>| {
            let (place, between) = self.creation_order(base);
            (place, between + 1)
        };
        disk.device().bases().iter().map(after).fold((place, 0), Ord::max)
    }

    /// Removes a disk that `module` has created, and the disks built on it; or forgets a disk that is configured and absent.
    ///
    /// # Errors
    /// `ENODEV`: `module` has created no disk of that name. `EBUSY`: the disk is being removed.
    pub async fn remove_disk(&self, module: &'static str, name: &str) -> Result<bool, Error> {
        if self.disks.find(name).is_err() && self.config.forget_absent(Subsystem::Bdev, name) {
            self.config.forget(Subsystem::Unit, name);
            crate::methods::observe::forget_absent(self, name);
            crate::methods::qos::forget_absent(self, name);
            return Ok(true);
        }
        let removed = self.disks.remove(module, name).await;
        self.forget_removed_disks();
        removed.map(|()| true)
    }

    /// Removes the configuration of disks that were removed with their controller, and of the disks that were built on them.
    pub(crate) fn forget_disks_of(&self, removed: &[String]) {
        self.disks.note_gone(removed);
        self.forget_removed_disks();
    }

    fn forget_removed_disks(&self) {
        for name in self.disks.take_gone() {
            self.config.removed(Subsystem::Bdev, &name);
            self.config.forget(Subsystem::Unit, &name);
            crate::methods::qos::forget(self, &name);
        }
        crate::methods::observe::forget_gone(self);
        // A removed disk has been removed from its targets.
        crate::methods::vhost_scsi::forget_gone(self);
        crate::methods::nvmf::forget_gone(self);
        crate::methods::volumes::forget_gone(self);
    }

    /// Waits until the changes of a call are in the state store, then creates the objects that waited for them. If the changes
    /// cannot be stored, the objects that the call created are removed.
    pub(crate) async fn settle(&self, outcome: Outcome, mut done: Done) -> Outcome {
        let Err(error) = done.written().await else {
            self.make_waiting_for(&done).await;
            return outcome;
        };
        let errno = error.as_ref().and_then(WriteError::errno).map_or(Errno::IO, Errno::from_raw_os_error);
        let why = error.map_or_else(|| "the state store's writer has ended".into(), |e| e.to_string());
        if done.made.is_empty() {
            let detail = format!("the change was made, but may be lost or undone by a restart: {why}");
            return outcome.and(Err(Error::errno(errno, detail)));
        }
        for (subsystem, name) in done.made.into_iter().rev() {
            if let Err(error) = self.unmake(subsystem, &name).await {
                tracing::error!(%error, name, "cannot remove the object that could not be stored");
            }
        }
        outcome.and(Err(Error::errno(errno, format!("nothing was made: {why}"))))
    }

    /// Opens the pools on the disks that a call has created, and creates the disks that waited for them.
    pub(crate) async fn make_waiting_for(&self, done: &Done) {
        for (subsystem, name) in &done.made {
            let disks = match subsystem {
                Subsystem::Bdev => vec![name.clone()],
                Subsystem::Nvme => crate::methods::nvme::disks_of(self, name),
                _ => Vec::new(),
            };
            for disk in disks {
                crate::methods::volumes::examine(self, &disk).await;
                let aliases = self.disks.find(&disk).map(|bdev| bdev.aliases()).unwrap_or_default();
                for name in [disk].into_iter().chain(aliases) {
                    crate::methods::waiting::make_waiting(self, &name).await;
                }
            }
        }
    }

    /// Removes what a restoring call has created, if a client removed the absent object while the call ran; returns whether one
    /// did.
    pub(crate) async fn undo_revived(&self, done: &Done) -> bool {
        // Another object may have the name by now.
        let is_ours = |(subsystem, name, key): &(Subsystem, String, u64)| {
            self.config.place(*subsystem, name) == Some(*key)
        };
        if done.revived.iter().any(is_ours) {
            for (subsystem, name) in done.made.iter().rev() {
                if let Err(error) = self.unmake(*subsystem, name).await {
                    tracing::error!(%error, name, "cannot remove the object, which was removed while it was being created");
                }
            }
        }
        !done.revived.is_empty()
    }

    async fn unmake(&self, subsystem: Subsystem, name: &str) -> Result<(), Error> {
        match subsystem {
            Subsystem::Bdev => {
                let undone = self.disks.unmake(name).await;
                self.forget_removed_disks();
                undone
            }
            Subsystem::VhostBlk | Subsystem::VhostScsi => {
                crate::methods::vhost::unmake(self, subsystem, name).await
            }
            Subsystem::Nvme => crate::methods::nvme::unmake(self, name).await,
            Subsystem::Discovery => crate::methods::nvme::unmake_discovery(self, name).await,
            Subsystem::Mdns => crate::methods::nvme::unmake_mdns(self, name).await,
            Subsystem::Rbd => crate::methods::rbd::unmake(self, name).await,
            Subsystem::Nvmf => crate::methods::nvmf::unmake(self, name).await,
            Subsystem::Watch
            | Subsystem::Qos
            | Subsystem::Signals
            | Subsystem::Sleep
            | Subsystem::Unit
            | Subsystem::Reservations
            | Subsystem::Pools
            | Subsystem::Scheduler
            | Subsystem::Keyring
            | Subsystem::Daemon => Ok(()),
        }
    }

    /// Removes all objects: no request runs afterwards.
    pub async fn close(&self) {
        self.closing.set(true);
        self.scheduler.stop();
        self.controllers.delete_all().await;
        self.nvmf.close().await;
        crate::pool_positions::save_all(self).await;
        // The daemon of another host need not wait until their claims are old. A disk that does not answer is not waited for.
        let mut closing = tokio::task::JoinSet::new();
        for pool in self.volumes.pools.list().into_iter().filter(|pool| pool.has_claim()) {
            closing.spawn_local(async move {
                let _ = tokio::time::timeout(CLOSING, pool.close()).await;
            });
        }
        while closing.join_next().await.is_some() {}
        self.disks.close().await;
        crate::methods::nvme::close(self).await;
        self.rbd.clusters.close().await;
    }

    /// Whether the daemon is ending: nothing may be created any more.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.get()
    }

    /// Checks that the daemon is not ending.
    ///
    /// # Errors
    /// [`Error::State`].
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        if self.is_closing() { Err(Error::State("the daemon is ending".into())) } else { Ok(()) }
    }

    /// The log settings.
    pub fn log_settings(&self) -> LogSettings {
        self.log.borrow().clone()
    }

    /// Changes the log settings.
    pub(crate) fn change_log(&self, change: impl FnOnce(&mut LogSettings)) {
        let mut log = self.log.borrow_mut();
        change(&mut log);
        (self.apply_log)(&log);
    }
}

impl Inventory for Control {
    fn reactors(&self) -> Vec<Handle> {
        self.reactors.handles()
    }

    fn disks(&self) -> Vec<Arc<Bdev>> {
        self.disks.registry.list()
    }

    fn groups(&self) -> Vec<Arc<QosGroup>> {
        self.disks.groups.list()
    }

    fn controllers(&self) -> Vec<Controller> {
        let controller = |info: Info| {
            let sessions = info.sessions.unwrap_or_default();
            Controller {
                name: info.name,
                kind: info.kind,
                disks: info.disks,
                connected: sessions.connected,
                queues: info.running.len() as u64,
                sessions: sessions.sessions,
                failed_sessions: sessions.failed,
                errors: [
                    ("bad_chain", info.bad_chains),
                    ("unanswerable", info.unanswerable),
                    ("broken_queue", info.broken_queues),
                ],
            }
        };
        self.controllers.list().into_iter().map(controller).collect()
    }

    fn nvme(&self) -> Vec<aryk_metrics::Nvme> {
        crate::methods::nvme::metrics(self)
    }

    fn remotes(&self) -> Vec<aryk_metrics::Remote> {
        crate::methods::nvme::remote_metrics(self)
    }

    fn rbd(&self) -> Vec<aryk_metrics::RbdClient> {
        crate::methods::rbd::metrics(self)
    }

    fn hosts(&self) -> Vec<aryk_metrics::Host> {
        crate::methods::nvmf::metrics(self)
    }

    fn pools(&self) -> aryk_metrics::LocalFuture<'_, Vec<aryk_metrics::Pool>> {
        Box::pin(crate::methods::volumes::metrics(self))
    }

    fn memory(&self) -> &Memory {
        self.disks.registry.memory()
    }

    fn file(&self, disk: &str) -> Option<PathBuf> {
        self.disks.file(disk)
    }

    fn collector(&self) -> &Collector {
        &self.collector
    }
}
