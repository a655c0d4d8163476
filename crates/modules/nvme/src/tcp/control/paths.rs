//! The paths of a controller: they are added, connect, are lost, and are removed.

use super::{Command, Control, Done};
use crate::tcp::admin::{AccessByNsid, Queues};
use crate::tcp::driver::{self, Choice, PATHS_MAX};
use crate::tcp::path::{self, Connected, Order, Ready, Report};
use crate::tcp::{ConnectError, PathInfo, RemoteConfig, RemoteError, RemotePhase};
use aryk_log_limit::limited;
use aryk_nvme::claims::ControllerInfo;
use aryk_nvme::controller::ListedNamespace;
use aryk_nvme_fabrics::subsystem::AnaState;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::{JoinSet, spawn_local};
use tokio::time::{Instant, timeout};

/// Time between two looks whether a path that is being removed has no requests any more.
const DRAIN_INTERVAL: Duration = Duration::from_millis(5);

/// How long the normal end of a controller may take.
const SHUT_DOWN_TIME: Duration = Duration::from_secs(3);

/// A path.
pub(super) struct Path {
    /// The controller's configuration, with the addresses of the path.
    pub(super) config: Arc<RemoteConfig>,
    /// Its task; `None`: it is being removed.
    orders: Option<UnboundedSender<Order>>,
    /// What the controller said when it became ready last. `None`: it is lost.
    queues: Option<Queues>,
    info: ControllerInfo,
    ends_earlier: bool,
    listed: Vec<ListedNamespace>,
    access: Option<AccessByNsid>,
    losses: u64,
    last_loss: Option<String>,
    /// The caller that removes it.
    removed: Option<Done>,
}

impl Path {
    /// The limits of the queues of a path that takes requests.
    pub(super) fn limits(&self) -> Option<Queues> {
        self.queues.filter(|_| self.removed.is_none())
    }

    /// The identifier of the controller, if it is there.
    pub(super) fn controller_id(&self) -> Option<u16> {
        self.queues.map(|queues| queues.controller_id)
    }

    fn take(&mut self, ready: Ready) {
        self.queues = Some(ready.queues);
        self.info = ready.info;
        self.ends_earlier = ready.ends_earlier;
        self.listed = ready.listed;
        self.access = ready.access;
    }

    /// What the path is for a namespace with these identifiers.
    fn access_to(&self, namespace: &aryk_nvme::claims::Namespace) -> Option<AnaState> {
        let listed = self.listed.iter().find(|listed| listed.nsid == namespace.nsid)?;
        let here = listed.namespace.as_ref().ok()?;
        let is_same = here.block_shift == namespace.block_shift
            && !crate::disks::are_different(here.ids, namespace.ids);
        is_same.then(|| match &self.access {
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
) -> Result<(usize, Box<Connected>), (SocketAddr, ConnectError)> {
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
        let Some(first) = self.paths.values().next() else { return };
        // Their controllers have no identifier yet.
        let (info, ends_earlier) =
            (ControllerInfo { controller_id: 0, ..first.info.clone() }, first.ends_earlier);
        let shared = Arc::clone(&self.shared);
        for (number, config) in shared.config.of_paths().enumerate().take(PATHS_MAX) {
            if self.paths.contains_key(&number) {
                continue;
            }
            let path = Path {
                config: Arc::new(config),
                orders: None,
                queues: None,
                info: info.clone(),
                ends_earlier,
                listed: Vec::new(),
                access: None,
                losses: 0,
                last_loss: None,
                removed: None,
            };
            self.paths.insert(number, path);
            self.regain(number);
        }
    }

    /// Connects a path that is to be added.
    pub(super) fn connect_path(&mut self, config: Box<RemoteConfig>, done: Done) {
        let refused = if self.is_stopping {
            Some(RemoteError::Ended(config.name.clone()))
        } else if self.paths.values().any(|path| path.config.address == config.address) {
            Some(RemoteError::PathExists { name: config.name.clone(), address: config.address })
        } else if self.free_number().is_none() {
            Some(RemoteError::TooManyPaths(config.name.clone()))
        } else {
            None
        };
        if let Some(error) = refused {
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
        result: Result<Box<Connected>, ConnectError>,
    ) -> Result<(), RemoteError> {
        let target = |reason| RemoteError::Target { address: config.address, reason };
        let connected = result.map_err(target)?;
        let name = config.name.clone();
        if self.is_stopping {
            return Err(RemoteError::Ended(name));
        }
        // Another call may have been faster.
        if self.paths.values().any(|path| path.config.address == config.address) {
            return Err(RemoteError::PathExists { name, address: config.address });
        }
        let Some(number) = self.free_number() else { return Err(RemoteError::TooManyPaths(name)) };
        let (info, expected) = (connected.ready().info, self.expected());
        if expected.is_some_and(|expected| expected != (info.serial.clone(), info.model)) {
            return Err(target(ConnectError::Other(info.serial)));
        }
        let first = self.paths.values().next().map(|path| limits_of(&path.info));
        if first.is_some_and(|first| first != limits_of(&connected.ready().info)) {
            let reason = "its controller has other commands or limits than those of the other paths";
            return Err(target(ConnectError::Unsupported(reason)));
        }
        if connected.ready().queues.count < self.needed() {
            return Err(target(ConnectError::Unsupported("the target has fewer queues than cores use")));
        }
        self.add_path(number, config, *connected);
        self.is_there().await;
        Ok(())
    }

    /// The serial and the model number of the subsystem.
    fn expected(&self) -> Option<(String, String)> {
        self.paths.values().next().map(|path| (path.info.serial.clone(), path.info.model.clone()))
    }

    /// The number of a path that is added. A path that was removed keeps its own until its lost connections can change nothing.
    fn free_number(&self) -> Option<usize> {
        (0..PATHS_MAX).find(|path| !self.paths.contains_key(path) && !self.fences.contains_key(path))
    }

    /// Adds a path that is connected, with a number that is free.
    pub(super) fn add_path(&mut self, number: usize, config: RemoteConfig, connected: Connected) {
        let (ready, config) = (connected.ready(), Arc::new(config));
        let expected = (ready.info.serial.clone(), ready.info.model.clone());
        let (orders, task) = self.new_task(number, &config, expected);
        spawn_local(connected.serve(task));
        let depth = ready.queues.depth(self.config());
        self.disks.limit_depth(depth);
        let path = Path {
            config,
            orders: Some(orders),
            queues: Some(ready.queues),
            info: ready.info,
            ends_earlier: ready.ends_earlier,
            listed: ready.listed,
            access: ready.access,
            losses: 0,
            last_loss: None,
            removed: None,
        };
        self.paths.insert(number, path);
    }

    fn new_task(
        &self,
        path: usize,
        config: &Arc<RemoteConfig>,
        expected: (String, String),
    ) -> (UnboundedSender<Order>, path::Task) {
        let (sender, orders): (_, UnboundedReceiver<Order>) = unbounded_channel();
        let (shared, config) = (Arc::clone(&self.shared), Arc::clone(config));
        let life = shared.life(path);
        (sender, path::Task { shared, config, path, life, expected, orders, lacks_access: false })
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
                let ends_earlier = ready.ends_earlier;
                let depth = ready.queues.depth(&self.shared.config);
                of_path.take(*ready);
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
                of_path.listed = listed;
                self.update_disks();
            }
            Report::Access(access) => {
                of_path.access = access;
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
        of_path.queues = None;
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
        if self.give_up_at.is_some() || self.paths.values().any(|path| path.limits().is_some()) {
            return;
        }
        let lost_at = Instant::now();
        self.give_up_at = self.config().loss_timeout.map(|time| lost_at + time);
        self.fail_at = self.config().fast_fail.map(|time| lost_at + time);
        self.disks.set_stalled(true);
    }

    /// Starts to connect a path again.
    fn regain(&mut self, path: usize) {
        let Some(of_path) = self.paths.get(&path) else { return };
        let (config, info) = (Arc::clone(&of_path.config), &of_path.info);
        let expected = (info.serial.clone(), info.model.clone());
        let (orders, task) = self.new_task(path, &config, expected);
        spawn_local(task.regain());
        self.paths.get_mut(&path).expect("just found").orders = Some(orders);
    }

    pub(super) async fn lose_all(&mut self, reason: &str) {
        let connected = self.paths.iter().filter(|(_, path)| path.queues.is_some());
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
        let is_lost = of_path.queues.is_none();
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
            (of_path.orders, of_path.queues) = (None, None);
            self.shared.begin_life(*path);
        }
    }

    /// Shuts the controllers of all paths down, whose I/O queues are closed.
    pub(super) async fn shut_down(&mut self) {
        let mut ends = Vec::new();
        for of_path in self.paths.values().filter(|path| path.queues.is_some()) {
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
        let is_there = |path: &Path| path.limits().is_some();
        let any_is_there = self.paths.values().any(is_there);
        let counts = |path: &&Path| is_there(path) || !any_is_there && path.removed.is_none();
        for listed in self.paths.values().filter(counts).flat_map(|path| &path.listed) {
            let known = all.entry(listed.nsid).or_insert(listed);
            if known.namespace.is_err() && listed.namespace.is_ok() {
                *known = listed;
            }
        }
        let there = self.paths.values().find(|path| path.limits().is_some());
        let info = there.or_else(|| self.paths.values().next())?.info.clone();
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
        if let Some(path) = self.paths.values().find(|path| path.queues.is_some()) {
            info.controller = Some(path.info.clone());
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
            Some(crate::tcp::PathAccess {
                nsid: namespace.nsid(),
                state,
                policy: choice.policy,
                is_preferred: choice.preferred == Some(number),
            })
        });
        PathInfo {
            number,
            address: path.config.address,
            source: path.config.source,
            is_connected: path.queues.is_some(),
            controller: path.info.clone(),
            ends_earlier: path.ends_earlier,
            queues: self.cores_on(number),
            access: access.collect(),
            losses: path.losses,
            last_loss: path.last_loss.clone(),
        }
    }
}
