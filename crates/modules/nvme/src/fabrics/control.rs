//! One controller of another host: its life, its paths and its queues. A task of the thread of NVMe over Fabrics.
//!
//! | file | contents |
//! | --- | --- |
//! | `paths` | the paths: they are added, connect, are lost, and are removed |
//! | `queues` | the I/O queues: each reactor with channels has one on each path |
//! | `recovery` | what happens to requests after a loss |
//! | `disks` | the disks of the namespaces |

mod disks;
mod paths;
mod queues;
mod recovery;

use super::admin;
use super::driver::{self, Choice, Guard, PATHS_MAX, PathTraffic, Policy};
use super::path::Report;
use super::shared::Shared;
use super::{ConnectError, PathInfo, RemoteConfig, RemoteError, RemoteInfo, RemotePhase};
use crate::shared::lock;
use aryk_bdev::{Bdev, Env, OpenError};
use aryk_log_limit::LogLimit;
use aryk_nvme::controller::AdminAnswer;
use aryk_nvme_fabrics::chap::Secrets;
use aryk_reactor::Handle;
use disks::Disks;
use paths::Path;
use queues::Queue;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};

/// Lines about one controller: a burst, then one per period.
const LINES: u32 = 20;
const LINE_PERIOD: Duration = Duration::from_secs(5);

type Waiter = oneshot::Sender<Result<(), OpenError>>;
type Attached = Result<Vec<Arc<Bdev>>, RemoteError>;
pub(super) type Done = oneshot::Sender<Result<(), RemoteError>>;

/// A message to the task.
#[derive(Debug)]
pub(crate) enum Command {
    /// An opener needs queues on a reactor.
    Prepare { reactor: Handle, reply: Waiter },
    /// A driver has begun, with the gate of that number, and with connected queues: the path, its life and the QID of each.
    Began { reactor: Handle, gate: u64, queues: Vec<(usize, u64, u16)> },
    /// A reactor has no driver any more.
    Gone(Handle),
    /// A queue was connected, and has been given to its reactor, or was not.
    Connected { reactor: Handle, path: usize, life: u64, result: Result<(), ConnectError> },
    /// It is time to connect a queue again.
    Again { reactor: Handle, path: usize },
    /// A queue has lost its connection.
    Lost { path: usize, life: u64, reason: String },
    /// A reactor has ended what was submitted again.
    Replayed { reactor: Handle, round: u64 },
    /// A reactor was refused access to a namespace.
    ReadAccess { path: usize },
    /// What a path's task reports.
    Path { path: usize, life: u64, report: Report },
    /// Adds a path.
    AddPath { config: Box<RemoteConfig>, done: Done },
    /// A path that is to be added was connected, or was not.
    Added { config: Box<RemoteConfig>, result: Result<paths::Connected, ConnectError>, done: Done },
    /// Removes a path that is not the only one.
    RemovePath { path: usize, done: Done },
    /// The queues of a path that is being removed have no requests any more.
    Drained { path: usize, life: u64 },
    /// Sets how the paths of a namespace are used.
    SetPolicy { nsid: u32, policy: Policy, done: Done },
    /// Sets the path of a namespace that is preferred, by the identifier of its controller.
    Prefer { nsid: u32, controller: u16, done: Done },
    /// Returns what each path has carried for the disk of a namespace; nothing for a disk that has gone.
    ReadTraffic { nsid: u32, reply: oneshot::Sender<Vec<(PathInfo, PathTraffic)>> },
    /// Runs an admin command of a client, on a path that is connected. No answer: there is none, or it is lost.
    Admin { command: Box<aryk_nvme::admin::Command>, reply: oneshot::Sender<AdminAnswer> },
    /// Authenticates with other secrets, on all connected paths, and uses them from then on.
    SetSecrets { secrets: Option<Arc<Secrets>>, done: Done },
    /// The disk of a namespace was removed.
    Closed(u32),
    /// The disk of a namespace that has changed is gone: the namespace gets another.
    Rescan,
    /// All disks are removed.
    DisksRemoved,
    /// Closes all connections, and connects again.
    Reset,
    /// Closes all connections; requests wait until the controller is enabled.
    Disable(Done),
    /// Connects a disabled controller again.
    Enable(Done),
    /// Removes the disks and ends the controller.
    Stop,
}

/// The task.
pub(crate) struct Control {
    env: Env,
    shared: Arc<Shared>,
    commands: UnboundedReceiver<Command>,
    ready: Option<oneshot::Sender<Attached>>,
    /// The paths by number.
    paths: BTreeMap<usize, Path>,
    queues: Vec<Queue>,
    disks: Disks,
    /// The blocks that lost connections may still change.
    guard: Guard,
    /// Paths with lost connections that may still change them, and how long at most.
    fences: BTreeMap<usize, Instant>,
    /// The number of times that requests were submitted again.
    round: u64,
    /// A client has disabled the controller: no path is connected.
    is_disabled: bool,
    /// If no path is connected: when requests begin to fail, and when the controller is given up.
    fail_at: Option<Instant>,
    give_up_at: Option<Instant>,
    /// The disks are being removed, or are.
    is_stopping: bool,
    are_removed: bool,
    lines: LogLimit,
}

/// A new controller: what it shares, and its task. `ready` gets its disks.
pub(super) fn new(
    env: &Env,
    config: RemoteConfig,
    ready: oneshot::Sender<Attached>,
) -> (Arc<Shared>, Control) {
    let (sender, commands) = unbounded_channel();
    let info = RemoteInfo {
        phase: RemotePhase::Connecting,
        subsystem: config.subsystem.clone(),
        host: config.host.clone(),
        controller: None,
        namespaces: Vec::new(),
        paths: (0..).zip(config.of_paths()).map(|(number, path)| PathInfo::unknown(number, &path)).collect(),
        losses: 0,
        last_loss: None,
        retried: 0,
        resubmitted: 0,
        failed_by_loss: 0,
    };
    let shared = Shared::new(config, sender, info);
    let control = Control {
        env: env.clone(),
        shared: Arc::clone(&shared),
        commands,
        ready: Some(ready),
        paths: BTreeMap::new(),
        queues: Vec::new(),
        disks: disks::new(env, &shared.config, &shared),
        guard: Guard::default(),
        fences: BTreeMap::new(),
        round: 0,
        is_disabled: false,
        fail_at: None,
        give_up_at: None,
        is_stopping: false,
        are_removed: false,
        lines: LogLimit::new(LINES, LINE_PERIOD),
    };
    (shared, control)
}

impl Control {
    /// Serves the controller until its end.
    pub(super) async fn run(mut self) {
        if self.attach().await {
            self.serve().await;
        }
        self.end().await;
    }

    fn config(&self) -> &RemoteConfig {
        &self.shared.config
    }

    /// Connects for the first time. Returns whether the controller is there.
    async fn attach(&mut self) -> bool {
        let Some(mut ready) = self.ready.take() else { return false };
        let shared = Arc::clone(&self.shared);
        let attached = async {
            let attaching = paths::connect_first(&shared.config);
            tokio::pin!(attaching);
            loop {
                tokio::select! {
                    attached = &mut attaching => break Some(attached),
                    () = ready.closed() => break None,
                    command = self.commands.recv() => if matches!(command, None | Some(Command::Stop)) { break None },
                }
            }
        };
        let Some(result) = attached.await else { return false };
        let result = match result {
            Ok((first, connected)) => {
                self.add_path(
                    first,
                    shared.config.of_paths().nth(first).expect("it is connected"),
                    connected,
                );
                self.add_lost_paths();
                let disks = self.create_disks();
                self.publish();
                disks
            }
            Err((address, reason)) => Err(RemoteError::Target { address, reason }),
        };
        let is_there = result.is_ok();
        if !is_there {
            self.remove_disks();
            self.until_removed().await;
            self.commands.close();
        }
        // A caller that has gone wants no controller.
        if ready.send(result).is_err() && is_there {
            self.remove_disks();
        }
        is_there
    }

    /// Serves the controller until it is detached, or is given up.
    async fn serve(&mut self) {
        while !self.are_removed {
            let due = [self.fail_at, self.give_up_at].into_iter().flatten();
            let due = due.chain(self.fences.values().copied()).min();
            tokio::select! {
                command = self.commands.recv() => match command {
                    None => return,
                    Some(command) => self.handle(command).await,
                },
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.meet_deadlines().await,
            }
        }
        self.shared.info().phase = RemotePhase::Ending;
        // Channels are closed: the queues are, too.
        self.shut_down().await;
    }

    async fn handle(&mut self, command: Command) {
        match command {
            Command::Prepare { reactor, reply } => self.prepare(reactor, reply),
            Command::Began { reactor, gate, queues } => self.driver_began(reactor, gate, &queues).await,
            Command::Gone(reactor) => self.forget_queues(&reactor).await,
            Command::Connected { reactor, path, life, result } => {
                self.connected(&reactor, path, life, result)
            }
            Command::Again { reactor, path } => self.connect_again(&reactor, path),
            Command::Lost { path, life, reason } => self.lose(path, life, &reason).await,
            Command::Replayed { reactor, round } => self.replayed(&reactor, round).await,
            Command::ReadAccess { path } => self.order(path, super::path::Order::ReadAccess),
            Command::Path { path, life, report } => self.take_report(path, life, report).await,
            Command::AddPath { config, done } => self.connect_path(config, done),
            Command::Added { config, result, done } => {
                // The caller may be gone.
                let _ = done.send(self.added(*config, result).await);
            }
            Command::RemovePath { path, done } => self.remove_path(path, done),
            Command::Drained { path, life } => self.drained(path, life).await,
            Command::SetPolicy { nsid, policy, done } => {
                let chosen = self.choose(nsid, |choice| choice.policy = policy);
                if chosen.is_ok() {
                    // Another disk of the namespace, after a change of its format, has it, too.
                    lock(&self.shared.policies).insert(nsid, policy);
                }
                // The caller may be gone.
                let _ = done.send(chosen);
            }
            Command::Prefer { nsid, controller, done } => {
                // The caller may be gone.
                let _ = done.send(self.prefer(nsid, controller));
            }
            Command::ReadTraffic { nsid, reply } => {
                // The caller may be gone.
                let _ = reply.send(self.traffic(nsid));
            }
            Command::Admin { command, reply } => {
                if let Some((path, _)) = self.paths.iter().find(|(_, path)| path.takes_requests()) {
                    self.order(*path, super::path::Order::Admin { command, done: reply });
                }
            }
            Command::SetSecrets { secrets, done } => self.set_secrets(secrets, done),
            Command::Closed(nsid) => {
                if self.disks.closed(nsid) && self.disks.ends_with(nsid) {
                    self.remove_disks();
                }
            }
            Command::Rescan => self.order_all(|| super::path::Order::List),
            Command::DisksRemoved => self.are_removed = true,
            Command::Reset => self.lose_all("a client has asked for it").await,
            Command::Disable(done) => {
                self.disable().await;
                // The caller may be gone.
                let _ = done.send(Ok(()));
            }
            Command::Enable(done) => {
                // The caller may be gone.
                let _ = done.send(self.enable());
            }
            Command::Stop => self.remove_disks(),
        }
    }

    /// Does what is due.
    async fn meet_deadlines(&mut self) {
        let now = Instant::now();
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_due(self.fail_at) {
            self.fail_at = None;
            self.fail().await;
        }
        if is_due(self.give_up_at) {
            self.give_up_at = None;
            self.give_up().await;
        }
        let proven = self.fences.len();
        self.fences.retain(|_, at| *at > now);
        if self.fences.len() < proven {
            self.replay_if_proven().await;
        }
    }

    /// Changes how the paths of a namespace are used.
    fn choose(&self, nsid: u32, change: impl FnOnce(&mut Choice)) -> Result<(), RemoteError> {
        let gone = || RemoteError::Namespace {
            name: self.config().name.clone(),
            nsid,
            reason: "it has just gone".to_owned(),
        };
        let namespace =
            self.disks.namespaces().find(|namespace| namespace.nsid() == nsid).ok_or_else(gone)?;
        let mut choice = namespace.paths.choice();
        change(&mut choice);
        namespace.paths.set_choice(choice);
        self.shared.change_routes();
        self.publish();
        Ok(())
    }

    fn prefer(&self, nsid: u32, controller: u16) -> Result<(), RemoteError> {
        let path = self.paths.iter().find(|(_, path)| path.controller_id() == Some(controller));
        let (path, _) = path.ok_or_else(|| RemoteError::NoSuchPath(self.config().name.clone()))?;
        self.choose(nsid, |choice| choice.preferred = Some(*path))
    }

    /// What each path has carried for the disk of a namespace.
    fn traffic(&self, nsid: u32) -> Vec<(PathInfo, PathTraffic)> {
        let Some(namespace) = self.disks.namespaces().find(|namespace| namespace.nsid() == nsid) else {
            return Vec::new();
        };
        let paths = self.shared.info().paths.clone();
        let with_traffic = |path: PathInfo| {
            let traffic = namespace.traffic.of(path.number);
            (path, traffic)
        };
        paths.into_iter().map(with_traffic).collect()
    }

    /// Requests fail until a path is back.
    async fn fail(&mut self) {
        tracing::warn!(controller = self.config().name, "requests fail until the controller is back");
        self.shared.info().phase = RemotePhase::Failing;
        self.shared.is_failing.store(true, Ordering::Release);
        self.queues.iter_mut().for_each(|queue| queue.answer(&Ok(())));
        self.tell_reactors(driver::fail).await;
    }

    /// The controller does not come back.
    async fn give_up(&mut self) {
        tracing::warn!(
            controller = self.config().name,
            "the controller does not come back: its disks are removed"
        );
        self.shared.info().phase = RemotePhase::Ending;
        self.shared.is_failing.store(true, Ordering::Release);
        self.disconnect();
        for path in 0..PATHS_MAX {
            self.cut(path).await;
        }
        self.tell_reactors(driver::close).await;
        self.remove_disks();
    }

    /// Sends all reactors with queues a message.
    async fn tell_reactors(&self, message: fn(aryk_reactor::DriverKey, &mut aryk_reactor::Cx)) {
        for queue in &self.queues {
            let key = self.shared.key;
            // A reactor that has ended has no requests.
            let _ = queue.reactor.call(move |cx| message(key, cx)).await;
        }
    }

    /// Waits until the disks are removed.
    async fn until_removed(&mut self) {
        while !self.are_removed {
            match self.commands.recv().await {
                Some(command) => self.handle(command).await,
                None => return,
            }
        }
    }

    async fn end(mut self) {
        self.shared.info().phase = RemotePhase::Ending;
        self.disconnect();
        self.shared.forget_routes();
        if !self.are_removed && !self.commands.is_closed() {
            self.remove_disks();
            self.until_removed().await;
        }
        self.queues.iter_mut().for_each(|queue| queue.answer(&Err(OpenError::Removed)));
        if let Some(direct) = &self.config().direct {
            direct.end();
        }
    }
}
