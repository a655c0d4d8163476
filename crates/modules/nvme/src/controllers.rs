//! All controllers of the process. Control context.

use crate::control::moves::is_same;
use crate::control::{self, Command};
use crate::shared::{Shared, lock};
use crate::{Config, Counts, Error, Info, Location, NamespaceInfo, PairCounts, Phase};
use aryk_bdev::{Bdev, Env};
use aryk_cuse::Access;
use aryk_nvme::admin;
use aryk_nvme::claims::ControllerInfo;
use aryk_nvme::controller::AdminAnswer;
use aryk_pci::vfio::Vfio;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use tokio::sync::oneshot;

/// The controllers that are attached. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Controllers(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    /// One for the process: functions share IOMMU mappings.
    vfio: Arc<Vfio>,
    attached: Mutex<BTreeMap<String, Arc<AttachedController>>>,
}

/// A controller that is attached, or is being attached.
#[derive(Debug)]
pub struct AttachedController {
    pub(crate) shared: Arc<Shared>,
}

impl Controllers {
    /// Attaches a controller, and returns the disks of its namespaces, by NSID. If the future is dropped, the controller is
    /// detached again.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn attach(&self, env: &Env, config: Config) -> Result<Vec<Arc<Bdev>>, Error> {
        let (name, location) = (config.name.clone(), config.location.to_string());
        let (shared, ready) = {
            let mut attached = lock(&self.0.attached);
            attached.retain(|_, controller| !controller.shared.has_ended());
            if let Some(other) = attached.get(&name) {
                let info = other.shared.info();
                let is_awaited = info.phase == Phase::Away && info.location != location;
                return Err(if is_awaited { Error::Awaited { name, location } } else { Error::Exists(name) });
            }
            if let Some((name, _)) =
                attached.iter().find(|(_, other)| other.shared.info().location == location)
            {
                return Err(Error::Attached { location, name: name.clone() });
            }
            let (shared, ready) = control::start(env, config, &self.0.vfio, self)?;
            let controller = AttachedController { shared: Arc::clone(&shared) };
            attached.insert(name.clone(), Arc::new(controller));
            (shared, ready)
        };
        let disks = ready.await.unwrap_or_else(|_| Err(Error::NotReady(name)));
        if disks.is_err() {
            // From then on the name and the function can be used again.
            shared.ended().await;
        }
        disks
    }

    /// The controller that waits for the drive with this identity.
    pub(crate) fn away_with(&self, drive: &ControllerInfo) -> Option<Arc<Shared>> {
        let waits = |shared: &Shared| {
            let info = shared.info();
            info.phase == Phase::Away
                && info.controller.as_ref().is_some_and(|awaited| is_same(awaited, drive))
        };
        self.list().into_iter().map(|controller| Arc::clone(&controller.shared)).find(|shared| waits(shared))
    }

    /// Removes a controller's disks, which waits until nobody uses them, and shuts the controller down.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn detach(&self, name: &str) -> Result<(), Error> {
        let controller = self.find(name)?;
        let (reply, answer) = oneshot::channel();
        controller.shared.send(Command::Stop(reply));
        // The thread ends without an answer if it was about to end.
        let _ = answer.await;
        lock(&self.0.attached).retain(|_, controller| !controller.shared.has_ended());
        Ok(())
    }

    /// The controller with this name.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn find(&self, name: &str) -> Result<Arc<AttachedController>, Error> {
        let controller = lock(&self.0.attached).get(name).cloned();
        let controller = controller.filter(|controller| !controller.shared.has_ended());
        controller.ok_or_else(|| Error::NotFound(name.to_owned()))
    }

    /// All controllers, by name.
    pub fn list(&self) -> Vec<Arc<AttachedController>> {
        let attached = lock(&self.0.attached);
        attached.values().filter(|controller| !controller.shared.has_ended()).cloned().collect()
    }

    /// The functions of this host that are attached; models and sockets are left out.
    pub fn find_at(&self, location: &Location) -> Option<Arc<AttachedController>> {
        let location = location.to_string();
        self.list().into_iter().find(|controller| controller.shared.info().location == location)
    }
}

impl AttachedController {
    /// The controller's name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Waits until the controller is detached, or is given up because it did not come back.
    pub async fn ended(&self) {
        self.shared.ended().await;
    }

    /// What is known of the controller.
    pub fn info(&self) -> Info {
        self.shared.info().clone()
    }

    /// The NSID of the namespace whose disk has this name.
    pub fn nsid_of(&self, disk: &str) -> Option<u32> {
        let info = self.shared.info();
        let is_it = |namespace: &&NamespaceInfo| namespace.disk.as_deref() == Some(disk);
        info.namespaces.iter().find(is_it).map(|namespace| namespace.nsid)
    }

    /// The controller's counters.
    pub fn counts(&self) -> Counts {
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.shared.counters;
        let pairs = self.shared.pairs().into_iter().map(|(qid, pair)| PairCounts {
            qid,
            core: pair.core,
            submitted: get(&pair.submitted),
            completed: get(&pair.completed),
            sq_doorbells: get(&pair.sq_doorbells),
            cq_doorbells: get(&pair.cq_doorbells),
            polls: get(&pair.polls),
            idle_polls: get(&pair.idle_polls),
            queued: get(&pair.queued),
            in_flight: get(&pair.in_flight),
            pool: (get(&pair.pool_pages), get(&pair.pool_low)),
            errors: pair.errors.each_ref().map(get),
        });
        let pairs: Vec<PairCounts> = pairs.collect();
        let sum = |of: fn(&PairCounts) -> u64| pairs.iter().map(of).sum::<u64>();
        Counts {
            submitted: sum(|pair| pair.submitted),
            doorbells: sum(|pair| pair.sq_doorbells + pair.cq_doorbells),
            resets: get(&counters.resets),
            queue_resets: get(&counters.queue_resets),
            aborts: get(&counters.aborts),
            retried: get(&counters.retried),
            resubmitted: get(&counters.resubmitted),
            failed_by_reset: get(&counters.failed_by_reset),
            warnings: get(&counters.warnings),
            injected: get(&counters.injected),
            errors: std::array::from_fn(|index| pairs.iter().map(|pair| pair.errors[index]).sum()),
            pairs,
        }
    }

    /// Sends an admin command.
    ///
    /// # Errors
    /// [`Error::Forbidden`], [`Error::InUse`], [`Error::WrongData`]: the command did not reach the controller.
    /// [`Error::NotReady`], also if a reset ends the command; [`Error::Refused`] if too many are in flight.
    pub async fn admin(&self, command: admin::Command) -> Result<AdminAnswer, Error> {
        let (reply, answer) = oneshot::channel();
        self.shared.send(Command::Admin { command: Box::new(command), reply });
        answer.await.unwrap_or_else(|_| Err(Error::NotReady(self.name().to_owned())))
    }

    /// Creates character devices for the system's tools, and returns their names below `/dev`: `aryk/NAME` for the controller,
    /// `aryk/NAMEnN` for namespace N. They follow the namespaces, and end with the controller. A tool may read; `access` decides
    /// whether it may change the drive.
    ///
    /// # Errors
    /// [`Error::Tools`]: there are such devices, or the kernel creates none; [`Error::NotReady`] if the controller has ended.
    pub async fn register_tools(&self, access: Access) -> Result<Vec<String>, Error> {
        let (reply, answer) = oneshot::channel();
        self.shared.send(Command::RegisterTools { access, reply });
        answer.await.unwrap_or_else(|_| Err(Error::NotReady(self.name().to_owned())))
    }

    /// Removes the devices for tools. Returns whether there were any.
    pub async fn unregister_tools(&self) -> bool {
        let (reply, answer) = oneshot::channel();
        self.shared.send(Command::UnregisterTools(reply));
        answer.await.unwrap_or(false)
    }

    /// Shuts the controller down; requests wait until it is enabled. Ready when it is shut down.
    ///
    /// # Errors
    /// [`Error::NotReady`] if the controller ends meanwhile.
    pub async fn disable(&self) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        self.shared.send(Command::Disable(reply));
        answer.await.map_err(|_| Error::NotReady(self.name().to_owned()))
    }

    /// Opens a disabled controller again. Its requests go on when it is ready, and then this is ready.
    ///
    /// # Errors
    /// [`Error::NotDisabled`]; [`Error::NotEnabled`] with the first failure to start, or the failure to open the function for
    /// some seconds: the controller may still come back within [`Config::grace`]. [`Error::NotReady`] if the controller ends.
    pub async fn enable(&self) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        self.shared.send(Command::Enable(reply));
        answer.await.unwrap_or_else(|_| Err(Error::NotReady(self.name().to_owned())))
    }

    /// Resets the controller; requests wait meanwhile. Ready when the reset is over.
    ///
    /// # Errors
    /// [`Error::NotReady`] if the controller does not come back.
    pub async fn reset(&self) -> Result<(), Error> {
        let (reply, answer) = oneshot::channel();
        self.shared.send(Command::Reset(reply));
        answer.await.map_err(|_| Error::NotReady(self.name().to_owned()))
    }
}
