//! All controllers of other hosts, and the thread of their admin queues. Control context.

use super::control::{self, Command, Done};
use super::direct::DirectMemory;
use super::discovery::{self, Heard};
use super::rdma::RdmaThread;
use super::shared::Shared;
use super::{PathInfo, PathTraffic, Policy, RemoteConfig, RemoteError, RemoteInfo, RemotePhase};
use crate::NamespaceInfo;
use crate::shared::lock;
use aryk_bdev::{Bdev, Env};
use aryk_nvme::controller::AdminAnswer;
use aryk_nvme_fabrics::chap::Secrets;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use tokio::sync::mpsc::{Sender, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::LocalSet;

type Start = Box<dyn FnOnce() + Send>;

/// The controllers of other hosts that are attached. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct RemoteControllers(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    attached: Mutex<BTreeMap<String, Arc<RemoteController>>>,
    /// Starts a task on the thread, which begins with the first controller and ends with this.
    tasks: Mutex<Option<UnboundedSender<Start>>>,
    rdma: RdmaThread,
}

impl Inner {
    /// Runs `start` on the thread, within a local set of tasks.
    fn start(&self, start: Start) -> io::Result<()> {
        let mut tasks = lock(&self.tasks);
        let start = match &*tasks {
            Some(tasks) => match tasks.send(start) {
                Ok(()) => return Ok(()),
                Err(unsent) => unsent.0,
            },
            None => start,
        };
        let (sender, mut starts) = unbounded_channel::<Start>();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        std::thread::Builder::new().name("nvme-fabrics".to_owned()).spawn(move || {
            LocalSet::new().block_on(&runtime, async move {
                while let Some(start) = starts.recv().await {
                    start();
                }
            });
        })?;
        // The thread has just begun to receive.
        let _ = sender.send(start);
        *tasks = Some(sender);
        Ok(())
    }
}

/// A controller that is attached, or is being attached.
#[derive(Debug)]
pub struct RemoteController {
    pub(super) shared: Arc<Shared>,
}

/// A discovery service that is followed, until this is dropped.
#[derive(Debug)]
pub struct Following(#[expect(dead_code, reason = "its end is the message")] oneshot::Sender<()>);

impl RemoteControllers {
    /// Follows the discovery service at the address of `config`, whose subsystem is the discovery subsystem.
    ///
    /// # Errors
    /// The kernel refused a thread.
    pub fn follow(&self, mut config: RemoteConfig, heard: Sender<Heard>) -> io::Result<Following> {
        config.rdma = self.0.rdma.clone();
        let (stop, stopped) = oneshot::channel();
        self.0.start(Box::new(move || {
            drop(tokio::task::spawn_local(discovery::follow(config, heard, stopped)));
        }))?;
        Ok(Following(stop))
    }

    /// Attaches a controller, and returns the disks of its namespaces, by NSID. If the future is dropped, the controller is
    /// detached again.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub async fn attach(&self, env: &Env, mut config: RemoteConfig) -> Result<Vec<Arc<Bdev>>, RemoteError> {
        config.rdma = self.0.rdma.clone();
        let name = config.name.clone();
        config.direct = config.is_direct.then(|| DirectMemory::new(&name, env.memory()));
        let (shared, ready) = {
            let mut attached = lock(&self.0.attached);
            attached.retain(|_, controller| !controller.shared.has_ended());
            if attached.contains_key(&name) {
                return Err(RemoteError::Exists(name));
            }
            let (ready, answer) = oneshot::channel();
            let (shared, task) = control::new(env, config, ready);
            self.0.start(Box::new(move || drop(tokio::task::spawn_local(task.run()))))?;
            attached.insert(name.clone(), Arc::new(RemoteController { shared: Arc::clone(&shared) }));
            (shared, answer)
        };
        let disks = ready.await.unwrap_or(Err(RemoteError::Ended(name)));
        if disks.is_err() {
            // From then on the name can be used again.
            shared.ended().await;
        }
        disks
    }

    /// Adds a path to a controller: an address at which the same subsystem answers. The other settings are the controller's.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub async fn add_path(
        &self,
        name: &str,
        address: SocketAddr,
        source: Option<SocketAddr>,
    ) -> Result<(), RemoteError> {
        let controller = self.find(name)?;
        let config = Box::new(controller.config().at(address, source));
        controller.ask(|done| Command::AddPath { config, done }).await
    }

    /// Removes a controller's disks, which waits until no opener uses them, and ends the controller.
    ///
    /// # Errors
    /// [`RemoteError::NotFound`].
    pub async fn detach(&self, name: &str) -> Result<(), RemoteError> {
        let controller = self.find(name)?;
        controller.shared.send(Command::Stop);
        controller.ended().await;
        lock(&self.0.attached).retain(|_, controller| !controller.shared.has_ended());
        Ok(())
    }

    /// The controller with this name.
    ///
    /// # Errors
    /// [`RemoteError::NotFound`].
    pub fn find(&self, name: &str) -> Result<Arc<RemoteController>, RemoteError> {
        let controller = lock(&self.0.attached).get(name).cloned();
        let controller = controller.filter(|controller| !controller.shared.has_ended());
        controller.ok_or_else(|| RemoteError::NotFound(name.to_owned()))
    }

    /// All controllers, by name.
    pub fn list(&self) -> Vec<Arc<RemoteController>> {
        let attached = lock(&self.0.attached);
        attached.values().filter(|controller| !controller.shared.has_ended()).cloned().collect()
    }
}

impl RemoteController {
    /// The controller's name.
    pub fn name(&self) -> &str {
        &self.shared.config.name
    }

    /// How it was attached.
    pub fn config(&self) -> &RemoteConfig {
        &self.shared.config
    }

    /// Waits until the controller is detached, or is given up because it did not come back.
    pub async fn ended(&self) {
        self.shared.ended().await;
    }

    /// What is known of the controller.
    pub fn info(&self) -> RemoteInfo {
        let mut info = self.shared.info().clone();
        info.retried = self.shared.retried.load(Ordering::Relaxed);
        info.resubmitted = self.shared.resubmitted.load(Ordering::Relaxed);
        info.failed_by_loss = self.shared.failed_by_loss.load(Ordering::Relaxed);
        info
    }

    /// Whether its requests wait for it.
    pub fn is_lost(&self) -> bool {
        use RemotePhase::{Disabled, Failing, Lost};
        matches!(self.shared.info().phase, Lost | Failing | Disabled)
    }

    /// The NSID of the namespace whose disk has this name.
    pub fn nsid_of(&self, disk: &str) -> Option<u32> {
        let info = self.shared.info();
        let is_it = |namespace: &&NamespaceInfo| namespace.disk.as_deref() == Some(disk);
        info.namespaces.iter().find(is_it).map(|namespace| namespace.nsid)
    }

    async fn ask(&self, command: impl FnOnce(Done) -> Command) -> Result<(), RemoteError> {
        let (done, answer) = oneshot::channel();
        self.shared.send(command(done));
        answer.await.unwrap_or_else(|_| Err(RemoteError::Ended(self.name().to_owned())))
    }

    /// Removes a path, which gets no requests any more and goes when it has none. The last one cannot be removed.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub async fn remove_path(&self, path: usize) -> Result<(), RemoteError> {
        self.ask(|done| Command::RemovePath { path, done }).await
    }

    /// Sets how the paths of a namespace's disk are used.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub async fn set_policy(&self, nsid: u32, policy: Policy) -> Result<(), RemoteError> {
        self.ask(|done| Command::SetPolicy { nsid, policy, done }).await
    }

    /// Prefers a path of a namespace's disk, by the identifier of the controller at its end, while it is one of the best.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub async fn prefer(&self, nsid: u32, controller: u16) -> Result<(), RemoteError> {
        self.ask(|done| Command::Prefer { nsid, controller, done }).await
    }

    /// Runs an admin command that changes nothing, on a path that is connected.
    ///
    /// # Errors
    /// [`RemoteError::Away`]: no path is connected, or the path was lost before the answer.
    pub async fn admin(&self, command: aryk_nvme::admin::Command) -> Result<AdminAnswer, RemoteError> {
        let (reply, answer) = oneshot::channel();
        self.shared.send(Command::Admin { command: Box::new(command), reply });
        answer.await.map_err(|_| RemoteError::Away(self.name().to_owned()))
    }

    /// What each path has carried for the disk of a namespace, since the disk has it.
    ///
    /// # Errors
    /// [`RemoteError::Ended`], also for a disk that has gone.
    pub async fn traffic(&self, nsid: u32) -> Result<Vec<(PathInfo, PathTraffic)>, RemoteError> {
        let (reply, answer) = oneshot::channel();
        self.shared.send(Command::ReadTraffic { nsid, reply });
        let paths = answer.await.unwrap_or_default();
        // A controller has at least one path.
        if paths.is_empty() { Err(RemoteError::Ended(self.name().to_owned())) } else { Ok(paths) }
    }

    /// Has all connections authenticate with other secrets from now on, if the target takes them on the admin queue of each
    /// connected path. I/O queues that are connected stay so. `None`: later connections do not authenticate.
    ///
    /// # Errors
    /// [`RemoteError`]; the secrets are the earlier ones then.
    pub async fn set_secrets(&self, secrets: Option<Arc<Secrets>>) -> Result<(), RemoteError> {
        self.ask(|done| Command::SetSecrets { secrets, done }).await
    }

    /// Closes all connections, and shuts the controllers at their ends down; requests wait until the controller is enabled.
    ///
    /// # Errors
    /// [`RemoteError::Ended`].
    pub async fn disable(&self) -> Result<(), RemoteError> {
        self.ask(Command::Disable).await
    }

    /// Connects a disabled controller again, as one that is lost. Does not wait for that.
    ///
    /// # Errors
    /// [`RemoteError::NotDisabled`], [`RemoteError::Ended`].
    pub async fn enable(&self) -> Result<(), RemoteError> {
        self.ask(Command::Enable).await
    }

    /// Closes all connections and connects again; requests wait meanwhile.
    pub fn reset(&self) {
        self.shared.send(Command::Reset);
    }
}
