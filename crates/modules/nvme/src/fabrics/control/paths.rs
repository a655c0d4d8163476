//! The paths of a controller: they are added, connect, are lost, and are removed.

use super::{Command, Control, Done};
use crate::fabrics::admin::{Admin, Queues};
use crate::fabrics::driver::{self, Choice, PATHS_MAX};
use crate::fabrics::path::{self, Order, Ready, Report};
use crate::fabrics::{ConnectError, PathInfo, RemoteConfig, RemoteError, RemotePhase};
use aryk_log_limit::limited;
use aryk_nvme::claims::ControllerInfo;
use aryk_nvme::controller::ListedNamespace;
use aryk_nvme_fabrics::chap::Secrets;
use aryk_nvme_fabrics::subsystem::AnaState;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::{JoinSet, spawn_local};
use tokio::time::{Instant, timeout};

/// Time between two looks whether a path that is being removed has no requests any more.
const DRAIN_INTERVAL: Duration = Duration::from_millis(5);

/// The admin queue of a path that is connected, and what the controller has said.
pub(super) type Connected = (Box<Admin>, Box<Ready>);

/// How long the normal end of a controller may take.
const SHUT_DOWN_TIME: Duration = Duration::from_secs(3);

/// A path.
pub(super) struct Path {
    /// The controller's configuration, with the addresses of the path.
    pub(super) config: Arc<RemoteConfig>,
    /// The path's task ends with this. `None`: the controller has ended.
    orders: Option<UnboundedSender<Order>>,
    is_connected: bool,
    /// What the controller said when the path was connected last.
    known: Box<Ready>,
    losses: u64,
    last_loss: Option<String>,
    /// The caller that removes the path.
    removed: Option<Done>,
}

impl Path {
    fn new(config: RemoteConfig, known: Box<Ready>, is_connected: bool) -> Self {
        let config = Arc::new(config);
        Self { config, orders: None, is_connected, known, losses: 0, last_loss: None, removed: None }
    }

    /// Whether the path takes requests.
    pub(super) const fn takes_requests(&self) -> bool {
        self.is_connected && self.removed.is_none()
    }

    /// The limits of the queues of a path that takes requests.
    pub(super) fn limits(&self) -> Option<Queues> {
        self.takes_requests().then_some(self.known.queues)
    }

    /// The identifier of the controller, if the path is connected.
    pub(super) fn controller_id(&self) -> Option<u16> {
        self.is_connected.then_some(self.known.queues.controller_id)
    }

    /// The access that the path gives to a namespace; `None`: the path does not have it.
    fn access_to(&self, namespace: &aryk_nvme::claims::Namespace) -> Option<AnaState> {
        let listed = self.known.listed.iter().find(|listed| listed.nsid == namespace.nsid)?;
        let here = listed.namespace.as_ref().ok()?;
        let is_same = here.block_shift == namespace.block_shift
            && !crate::disks::are_different(here.ids, namespace.ids);
        is_same.then(|| match &self.known.access {
            None => AnaState::Optimized,
            Some(states) => states.get(&namespace.nsid).copied().unwrap_or(AnaState::Inaccessible),
        })
    }
}

/// Connects to all paths of a configuration at once, until one is there. Returns its number.
///
/// # Errors
/// The address of the first path, and why it cannot be connected.
pub(super) async fn connect_first(
    config: &RemoteConfig,
) -> Result<(usize, Connected), (SocketAddr, ConnectError)> {
    let mut attempts = JoinSet::new();
    for (number, config) in config.of_paths().enumerate().take(PATHS_MAX) {
        attempts.spawn_local(async move { (number, path::connect(&config).await) });
    }
    let mut refused = BTreeMap::new();
    while let Some(attempt) = attempts.join_next().await {
        match attempt {
            Ok((number, Ok(connected))) => return Ok((number, connected)),
            Ok((number, Err(error))) => drop(refused.insert(number, error)),
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
    let (_, first) = refused.pop_first().expect("there is a path");
    Err((config.address, first))
}

/// What the controllers of all paths have in common.
fn limits_of(info: &ControllerInfo) -> impl PartialEq + use<> {
    (info.supported, info.transfer_max, info.write_zeroes_max, info.deallocate_max)
}

impl Control {
    /// Adds the paths of the configuration that have not been connected, which are connected later.
    pub(super) fn add_lost_paths(&mut self) {
        let Some((&connected, first)) = self.paths.iter().next() else { return };
        // Their controllers have no identifier, and have listed nothing yet.
        let info = ControllerInfo { controller_id: 0, ..first.known.info.clone() };
        let known = Ready { info, listed: Vec::new(), access: None, ..*first.known };
        let shared = Arc::clone(&self.shared);
        for (number, config) in shared.config.of_paths().enumerate().take(PATHS_MAX) {
            if number != connected {
                self.paths.insert(number, Path::new(config, Box::new(known.clone()), false));
                self.regain(number);
            }
        }
    }

    /// Connects a path that is to be added.
    pub(super) fn connect_path(&self, config: Box<RemoteConfig>, done: Done) {
        if let Err(error) = self.number_for(&config) {
            // The caller may be gone.
            return drop(done.send(Err(error)));
        }
        let shared = Arc::clone(&self.shared);
        spawn_local(async move {
            let result = path::connect(&config).await;
            shared.send(Command::Added { config, result, done });
        });
    }

    /// A path that is to be added was connected, or was not.
    pub(super) async fn added(
        &mut self,
        config: RemoteConfig,
        result: Result<Connected, ConnectError>,
    ) -> Result<(), RemoteError> {
        let target = |reason| RemoteError::Target { address: config.address, reason };
        let connected = result.map_err(target)?;
        // Another call may have been faster.
        let number = self.number_for(&config)?;
        if let Some(first) = self.paths.values().next() {
            let (ready, known) = (&connected.1, &first.known);
            ready.check(&known.info, self.needed()).map_err(target)?;
            if limits_of(&known.info) != limits_of(&ready.info) {
                let reason = "its controller has other commands or limits than those of the other paths";
                return Err(target(ConnectError::Unsupported(reason)));
            }
        }
        self.add_path(number, config, connected);
        self.is_there().await;
        Ok(())
    }

    /// The number that a path would have if it was added.
    fn number_for(&self, config: &RemoteConfig) -> Result<usize, RemoteError> {
        let name = || config.name.clone();
        if self.is_stopping {
            return Err(RemoteError::Ended(name()));
        }
        if self.is_disabled {
            return Err(RemoteError::Away(name()));
        }
        if self.paths.values().any(|path| path.config.address == config.address) {
            return Err(RemoteError::PathExists { name: name(), address: config.address });
        }
        // A path that was removed keeps its number until its lost connections can change nothing.
        let is_free = |path: &usize| !self.paths.contains_key(path) && !self.fences.contains_key(path);
        (0..PATHS_MAX).find(is_free).ok_or_else(|| RemoteError::TooManyPaths(name()))
    }

    /// Adds a path that is connected, with a number that is free.
    pub(super) fn add_path(&mut self, number: usize, config: RemoteConfig, (admin, ready): Connected) {
        self.disks.limit_depth(ready.queues.depth(self.config()));
        self.paths.insert(number, Path::new(config, ready, true));
        let task = self.new_task(number);
        spawn_local(task.serve(admin));
    }

    /// The task of a path: that of an earlier life ends.
    fn new_task(&mut self, path: usize) -> path::Task {
        let (sender, orders) = unbounded_channel();
        let (shared, life) = (Arc::clone(&self.shared), self.shared.life(path));
        let of_path = self.paths.get_mut(&path).expect("the caller has the path");
        of_path.orders = Some(sender);
        path::Task { shared, config: Arc::clone(&of_path.config), path, life, orders }
    }

    /// A path is connected.
    async fn is_there(&mut self) {
        (self.fail_at, self.give_up_at) = (None, None);
        if self.shared.is_failing.swap(false, Ordering::AcqRel) {
            self.tell_reactors(driver::hold).await;
        }
        self.disks.set_stalled(false);
        // Namespaces that have gone or changed: before their requests are submitted.
        self.update_disks();
        self.connect_wanted();
        self.publish();
    }

    /// Takes what the task of a path reports.
    pub(super) async fn take_report(&mut self, path: usize, life: u64, report: Report) {
        if life != self.shared.life(path) {
            return;
        }
        let Some(of_path) = self.paths.get_mut(&path) else { return };
        match report {
            Report::Ready(ready) => {
                let (controller, address) = (&self.shared.config.name, of_path.config.address);
                limited!(
                    self.lines, info, controller, %address,
                    "a path to the controller of another host is back"
                );
                let (ends_earlier, depth) = (ready.ends_earlier, ready.queues.depth(&self.shared.config));
                (of_path.is_connected, of_path.known) = (true, ready);
                self.disks.limit_depth(depth);
                self.is_there().await;
                self.path_is_back(path, ends_earlier).await;
            }
            Report::Refused(error) => {
                let (controller, address) = (&self.shared.config.name, of_path.config.address);
                limited!(
                    self.lines, info, controller, %address, %error,
                    "a path to the controller of another host is not back yet"
                );
            }
            Report::Listed(listed) => {
                of_path.known.listed = listed;
                self.update_disks();
            }
            Report::Access(access) => {
                of_path.known.access = access;
                self.update_access();
                self.publish();
            }
            Report::Lost(error) => self.lose(path, life, &error.to_string()).await,
        }
    }

    /// A path is lost: connects it again.
    pub(super) async fn lose(&mut self, path: usize, life: u64, reason: &str) {
        if life != self.shared.life(path) {
            return;
        }
        let Some(of_path) = self.paths.get_mut(&path) else { return };
        let address = of_path.config.address;
        limited!(
            self.lines, warn, controller = self.shared.config.name, %address, reason,
            "a path to the controller of another host is lost"
        );
        of_path.is_connected = false;
        of_path.losses += 1;
        of_path.last_loss = Some(reason.to_owned());
        {
            let mut info = self.shared.info();
            info.losses += 1;
            info.last_loss = Some(reason.to_owned());
        }
        let is_removed = of_path.removed.is_some();
        self.stop_path(path).await;
        if is_removed {
            return self.forget_removed(path);
        }
        self.regain(path);
        self.begin_absence();
        self.publish();
    }

    /// Begins the times for a controller that is lost, if no path is connected any more.
    fn begin_absence(&mut self) {
        if self.is_disabled || self.give_up_at.is_some() || self.paths.values().any(Path::takes_requests) {
            return;
        }
        let lost_at = Instant::now();
        self.give_up_at = self.config().loss_timeout.map(|time| lost_at + time);
        self.fail_at = self.config().fast_fail.map(|time| lost_at + time);
        self.disks.set_stalled(true);
    }

    /// Closes the connections of all paths, and lets requests wait.
    pub(super) async fn disable(&mut self) {
        if self.is_stopping || std::mem::replace(&mut self.is_disabled, true) {
            return;
        }
        (self.fail_at, self.give_up_at) = (None, None);
        self.disks.set_stalled(true);
        if self.shared.is_failing.swap(false, Ordering::AcqRel) {
            self.tell_reactors(driver::hold).await;
        }
        tracing::warn!(controller = self.config().name, "the controller is disabled: its requests wait");
        for path in self.paths.keys().copied().collect::<Vec<usize>>() {
            // First, so that the target ends nothing that this host still has under way.
            self.stop_path(path).await;
            let Some(of_path) = self.paths.get_mut(&path) else { continue };
            let orders = of_path.orders.take().filter(|_| std::mem::take(&mut of_path.is_connected));
            if let Some(orders) = orders {
                let (done, ended) = oneshot::channel();
                // The connection may just have been lost.
                let _ = orders.send(Order::ShutDown(done));
                let _ = timeout(SHUT_DOWN_TIME, ended).await;
            }
            if self.paths.get(&path).is_some_and(|path| path.removed.is_some()) {
                self.forget_removed(path);
            }
        }
        self.shared.info().phase = RemotePhase::Disabled;
        self.publish();
    }

    /// Connects the paths of a disabled controller again.
    pub(super) fn enable(&mut self) -> Result<(), RemoteError> {
        if !std::mem::take(&mut self.is_disabled) {
            return Err(RemoteError::NotDisabled(self.config().name.clone()));
        }
        self.shared.info().phase = RemotePhase::Lost;
        for path in self.paths.keys().copied().collect::<Vec<usize>>() {
            self.regain(path);
        }
        self.begin_absence();
        self.publish();
        Ok(())
    }

    /// Starts to connect a path again.
    fn regain(&mut self, path: usize) {
        if self.is_disabled {
            return;
        }
        let Some(of_path) = self.paths.get(&path) else { return };
        let expected = of_path.known.info.clone();
        let task = self.new_task(path);
        spawn_local(task.regain(expected));
    }

    /// Closes the connections of all paths, and connects them again.
    pub(super) async fn lose_all(&mut self, reason: &str) {
        let connected = self.paths.iter().filter(|(_, path)| path.is_connected);
        let connected: Vec<usize> = connected.map(|(path, _)| *path).collect();
        for path in connected {
            self.lose(path, self.shared.life(path), reason).await;
        }
    }

    /// Gives the task of a path an order.
    pub(super) fn order(&self, path: usize, order: Order) {
        if let Some(orders) = self.paths.get(&path).and_then(|path| path.orders.as_ref()) {
            // The connection may just have been lost.
            let _ = orders.send(order);
        }
    }

    /// Gives the tasks of all paths an order.
    pub(super) fn order_all(&self, order: impl Fn() -> Order) {
        self.paths.keys().for_each(|path| self.order(*path, order()));
    }

    /// Authenticates with other secrets on one connected path after the other. When the target has taken them on all,
    /// connections use them from then on.
    pub(super) fn set_secrets(&self, secrets: Option<Arc<Secrets>>, done: Done) {
        let shared = Arc::clone(&self.shared);
        let connected = self.paths.values().filter(|path| path.is_connected);
        let connected: Vec<_> =
            connected.filter_map(|path| Some((path.config.address, path.orders.clone()?))).collect();
        spawn_local(async move {
            let mut result = Ok(());
            for (address, orders) in connected {
                let Some(secrets) = secrets.clone() else { break };
                let (proven, answer) = oneshot::channel();
                // A path that has just been lost authenticates when it is connected again.
                let _ = orders.send(Order::Authenticate { secrets, done: proven });
                if let Ok(Err(reason)) = answer.await {
                    result = Err(RemoteError::Target { address, reason });
                    break;
                }
            }
            if result.is_ok() {
                shared.config.secrets.set(secrets);
            }
            // The caller may be gone.
            let _ = done.send(result);
        });
    }

    /// Removes a path: it gets no requests any more, and goes when it has none.
    pub(super) fn remove_path(&mut self, path: usize, done: Done) {
        let is_last = self.paths.values().filter(|path| path.removed.is_none()).count() == 1;
        let name = self.config().name.clone();
        let Some(of_path) = self.paths.get_mut(&path).filter(|path| path.removed.is_none() && !is_last)
        else {
            // The caller may be gone.
            return drop(done.send(Err(RemoteError::NoSuchPath(name))));
        };
        of_path.removed = Some(done);
        let is_lost = !of_path.is_connected;
        self.update_access();
        if is_lost {
            return self.forget_removed(path);
        }
        self.drain(path);
    }

    /// Waits until the queues of a path have no requests any more.
    fn drain(&self, path: usize) {
        let (shared, life) = (Arc::clone(&self.shared), self.shared.life(path));
        let reactors: Vec<_> = self.queues.iter().map(|queue| queue.reactor.clone()).collect();
        let orders = self.paths.get(&path).and_then(|path| path.orders.clone());
        spawn_local(async move {
            let key = shared.key;
            loop {
                let mut left = 0;
                for reactor in &reactors {
                    // A reactor that has ended has no requests.
                    left += reactor.call(move |cx| driver::drain(key, path, cx)).await.unwrap_or(0);
                }
                if left == 0 {
                    let (done, ended) = oneshot::channel();
                    if let Some(orders) = orders {
                        // The connection may just have been lost.
                        let _ = orders.send(Order::ShutDown(done));
                    }
                    // The connection is closed then, too.
                    let _ = timeout(SHUT_DOWN_TIME, ended).await;
                    return shared.send(Command::Drained { path, life });
                }
                if life != shared.life(path) {
                    return;
                }
                tokio::time::sleep(DRAIN_INTERVAL).await;
            }
        });
    }

    /// The queues of a path that is being removed have no requests any more.
    pub(super) async fn drained(&mut self, path: usize, life: u64) {
        if life != self.shared.life(path) {
            return;
        }
        self.stop_path(path).await;
        self.forget_removed(path);
    }

    fn forget_removed(&mut self, path: usize) {
        let Some(mut removed) = self.paths.remove(&path) else { return };
        self.shared.begin_life(path);
        for namespace in self.disks.namespaces() {
            let choice = namespace.paths.choice();
            if choice.preferred == Some(path) {
                namespace.paths.set_choice(Choice { preferred: None, ..choice });
            }
            namespace.traffic.forget(path);
        }
        self.begin_absence();
        self.update_disks();
        self.publish();
        if let Some(done) = removed.removed.take() {
            // The caller may be gone.
            let _ = done.send(Ok(()));
        }
    }

    /// Closes all connections for ever.
    pub(super) fn disconnect(&mut self) {
        for (path, of_path) in &mut self.paths {
            (of_path.orders, of_path.is_connected) = (None, false);
            self.shared.begin_life(*path);
        }
    }

    /// Shuts the controllers of all paths down, whose I/O queues are closed.
    pub(super) async fn shut_down(&mut self) {
        let mut ends = Vec::new();
        for of_path in self.paths.values().filter(|path| path.is_connected) {
            let (done, ended) = oneshot::channel();
            if let Some(orders) = &of_path.orders {
                // The connection may just have been lost.
                let _ = orders.send(Order::ShutDown(done));
            }
            ends.push(ended);
        }
        for ended in ends {
            let _ = timeout(SHUT_DOWN_TIME, ended).await;
        }
    }

    /// What all paths list, and what the first one that is there says of its controller.
    pub(super) fn listed(&self) -> Option<(Vec<ListedNamespace>, ControllerInfo)> {
        let mut all: BTreeMap<u32, &ListedNamespace> = BTreeMap::new();
        // What a lost path has listed may be old: it counts only if no path is connected.
        let any = self.paths.values().any(Path::takes_requests);
        let counts = |path: &&Path| path.takes_requests() || !any && path.removed.is_none();
        for listed in self.paths.values().filter(counts).flat_map(|path| &path.known.listed) {
            let known = all.entry(listed.nsid).or_insert(listed);
            if known.namespace.is_err() && listed.namespace.is_ok() {
                *known = listed;
            }
        }
        let there = self.paths.values().find(|path| path.takes_requests());
        let info = there.or_else(|| self.paths.values().next())?.known.info.clone();
        Some((all.into_values().cloned().collect(), info))
    }

    /// Says what the paths are for each disk.
    pub(super) fn update_access(&self) {
        let mut has_changed = false;
        for namespace in self.disks.namespaces() {
            let claims = crate::disks::Namespace::claims(namespace);
            for path in 0..PATHS_MAX {
                let of_path = self.paths.get(&path).filter(|path| path.removed.is_none());
                let access = of_path.and_then(|path| path.access_to(&claims));
                has_changed |= namespace.paths.set_access(path, access);
            }
        }
        if has_changed {
            self.shared.change_routes();
        }
    }

    /// Publishes what is known of the paths.
    pub(super) fn publish(&self) {
        let paths: Vec<PathInfo> =
            self.paths.iter().map(|(&number, path)| self.describe(number, path)).collect();
        let mut info = self.shared.info();
        if let Some(path) = self.paths.values().find(|path| path.is_connected) {
            info.controller = Some(path.known.info.clone());
            info.phase = RemotePhase::Ready;
        } else if info.phase == RemotePhase::Ready {
            info.phase = RemotePhase::Lost;
        }
        info.paths = paths;
    }

    fn describe(&self, number: usize, path: &Path) -> PathInfo {
        let access = self.disks.namespaces().filter_map(|namespace| {
            let choice = namespace.paths.choice();
            let state = namespace.paths.access(number)?;
            Some(crate::fabrics::PathAccess {
                nsid: namespace.nsid(),
                state,
                policy: choice.policy,
                is_preferred: choice.preferred == Some(number),
            })
        });
        PathInfo {
            is_connected: path.is_connected,
            controller_id: path.known.info.controller_id,
            ends_earlier: path.known.ends_earlier,
            queues: self.cores_on(number),
            access: access.collect(),
            losses: path.losses,
            last_loss: path.last_loss.clone(),
            ..PathInfo::unknown(number, &path.config)
        }
    }
}
