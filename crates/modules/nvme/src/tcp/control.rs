//! One controller of another host: its life, its queues, and what happens when it is lost. A task of the thread of NVMe over TCP.
//!
//! A reactor's queue is wanted from [`Command::Prepare`] or [`Command::Wanted`] on, and until [`Command::Gone`]. Tasks of their
//! own connect queues, and give them to their reactors.

mod disks;

use super::admin::{self, Admin, Queues};
use super::driver::{self, Live, Stopped};
use super::shared::Shared;
use super::{ConnectError, RemoteConfig, RemoteError, RemoteInfo, RemotePhase};
use aryk_bdev::{Bdev, Env, OpenError};
use aryk_log_limit::{LogLimit, limited};
use aryk_nvme::controller::ListedNamespace;
use aryk_nvme::replay::History;
use aryk_reactor::{Clock, Handle};
use disks::Disks;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::spawn_local;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

/// The pause before the second attempt to connect again; each further one is twice as long, up to
/// [`RemoteConfig::reconnect_delay`].
const DELAY_MIN: Duration = Duration::from_millis(100);
/// A target ends a controller at the latest after twice its keep-alive timeout, if it counts all commands as signs of life; and
/// this much later by its timers.
const FENCE_MARGIN: Duration = Duration::from_secs(1);
/// Lines about one controller: a burst, then one per period.
const LINES: u32 = 20;
const LINE_PERIOD: Duration = Duration::from_secs(5);
/// Time between two attempts to connect a queue while the controller is there.
const QUEUE_INTERVAL: Duration = Duration::from_secs(1);

type Waiter = oneshot::Sender<Result<(), OpenError>>;
type Attached = Result<Vec<Arc<Bdev>>, RemoteError>;

/// A message to the task.
#[derive(Debug)]
pub(crate) enum Command {
    /// An opener needs a queue on a reactor.
    Prepare { reactor: Handle, reply: Waiter },
    /// A reactor has a driver without a queue.
    Wanted(Handle),
    /// A reactor has no driver any more.
    Gone(Handle),
    /// A queue was connected, and has been given to its reactor, or was not.
    Connected { reactor: Handle, generation: u64, result: Result<(), ConnectError> },
    /// It is time to connect a queue again.
    Again(Handle),
    /// A queue has lost its connection.
    Lost { generation: u64, reason: String },
    /// A reactor has ended what a loss kept.
    Replayed { reactor: Handle, generation: u64 },
    /// The disk of a namespace was removed.
    Closed(u32),
    /// The disk of a namespace that has changed is gone: the namespace gets another.
    Rescan,
    /// All disks are removed.
    DisksRemoved,
    /// Closes all connections, and connects again.
    Reset,
    /// Removes the disks and ends the controller.
    Stop,
}

/// How far the queue of a reactor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The controller is not there.
    Wanted,
    /// It is being connected.
    Connecting,
    /// The reactor has it, or it is kept for the reactor's first channel.
    Connected,
    /// It could not be connected, and is tried again.
    Failed,
}

#[derive(Debug)]
struct Queue {
    reactor: Handle,
    qid: u16,
    stage: Stage,
    /// What a loss kept on the reactor has not ended.
    is_replaying: bool,
    waiters: Vec<Waiter>,
}

impl Queue {
    fn answer(&mut self, result: &Result<(), OpenError>) {
        // An opener may be gone.
        self.waiters.drain(..).for_each(|waiter| drop(waiter.send(result.clone())));
    }
}

/// Why the controller is not served any more.
enum End {
    /// The controller is detached, or has no disk left.
    Stop,
    Lost(String),
}

/// The task.
pub(crate) struct Control {
    env: Env,
    shared: Arc<Shared>,
    commands: UnboundedReceiver<Command>,
    ready: Option<oneshot::Sender<Attached>>,
    queues: Vec<Queue>,
    disks: Disks,
    /// Queues that the controller has, once it is there.
    limits: Option<Queues>,
    /// What all queues have changed up to this time is not known any more: a reactor's driver has ended then.
    departed: u64,
    /// Until then, changes of an earlier controller may take effect, unless the target ends it first.
    fence: Option<Instant>,
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
        address: config.address,
        subsystem: config.subsystem.clone(),
        host: config.host.clone(),
        controller: None,
        namespaces: Vec::new(),
        queues: Vec::new(),
        ends_earlier: false,
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
        queues: Vec::new(),
        disks: disks::new(env, &shared.config, &shared),
        limits: None,
        departed: 0,
        fence: None,
        is_stopping: false,
        are_removed: false,
        lines: LogLimit::new(LINES, LINE_PERIOD),
    };
    (shared, control)
}

impl Control {
    /// Serves the controller until its end.
    pub(super) async fn run(mut self) {
        if let Some(admin) = self.attach().await {
            let mut admin = Some(admin);
            while let Some(served) = admin.take() {
                admin = match self.serve(served).await {
                    End::Stop => None,
                    End::Lost(reason) => self.regain(&reason).await,
                };
            }
        }
        self.end().await;
    }

    fn config(&self) -> &RemoteConfig {
        &self.shared.config
    }

    /// Connects for the first time.
    async fn attach(&mut self) -> Option<Admin> {
        let mut ready = self.ready.take()?;
        let shared = Arc::clone(&self.shared);
        let attached = async {
            let attaching = admin::attach(&shared.config);
            tokio::pin!(attaching);
            loop {
                tokio::select! {
                    attached = &mut attaching => break Some(attached),
                    () = ready.closed() => break None,
                    command = self.commands.recv() => if matches!(command, None | Some(Command::Stop)) { break None },
                }
            }
        };
        let result = match attached.await? {
            Ok((admin, listed)) => {
                self.is_there(&admin);
                self.create_disks(&listed, &admin.info).map(|disks| (admin, disks))
            }
            Err(reason) => Err(RemoteError::Target { address: self.config().address, reason }),
        };
        match result {
            Ok((admin, disks)) => {
                // A caller that has gone wants no controller.
                if ready.send(Ok(disks)).is_err() {
                    self.remove_disks();
                }
                Some(admin)
            }
            Err(error) => {
                self.remove_disks();
                self.until_removed().await;
                self.commands.close();
                let _ = ready.send(Err(error));
                None
            }
        }
    }

    /// The controller is connected.
    fn is_there(&mut self, admin: &Admin) {
        self.limits = Some(admin.queues);
        self.shared.is_failing.store(false, Ordering::Release);
        self.disks.limit_depth(admin.queues.depth(self.config()));
        let mut info = self.shared.info();
        info.phase = RemotePhase::Ready;
        info.controller = Some(admin.info.clone());
        info.ends_earlier = admin.ends_earlier;
    }

    /// Serves a controller that is there.
    async fn serve(&mut self, mut admin: Admin) -> End {
        self.connect_wanted();
        let mut ticks = interval((self.config().keep_alive / 3).max(Duration::from_millis(10)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let listed = tokio::select! {
                command = self.commands.recv() => match command {
                    None => return End::Stop,
                    Some(Command::DisksRemoved) => {
                        self.are_removed = true;
                        self.shared.info().phase = RemotePhase::Ending;
                        // Channels are closed: the queues are, too.
                        admin.shut_down().await;
                        return End::Stop;
                    }
                    Some(Command::Rescan) => admin.list().await.map(Some),
                    Some(Command::Lost { generation, reason }) if generation == self.shared.generation() => {
                        return End::Lost(reason);
                    }
                    Some(Command::Reset) => return End::Lost("a client has asked for it".to_owned()),
                    Some(command) => {
                        self.handle(command);
                        continue;
                    }
                },
                event = admin.event() => match event {
                    Ok(event) => admin.handle(event).await,
                    Err(error) => Err(error),
                },
                _ = ticks.tick() => admin.keep_alive().await.map(|()| None),
            };
            match listed {
                Ok(Some(listed)) => self.update_disks(&listed, &admin.info),
                Ok(None) => {}
                Err(error) => return End::Lost(error.to_string()),
            }
        }
    }

    /// Handles a command, whether the controller is there or not.
    fn handle(&mut self, command: Command) {
        match command {
            Command::Prepare { reactor, reply } => self.prepare(reactor, reply),
            Command::Wanted(reactor) => {
                let is_there = self.limits.is_some();
                let queue = self.queue_of(reactor);
                // The connection that is kept for it was taken by a driver that has ended since.
                if queue.stage == Stage::Connected {
                    queue.stage = Stage::Wanted;
                }
                if is_there {
                    self.connect_wanted();
                }
            }
            Command::Gone(reactor) => {
                self.departed = Clock::Monotonic.now().0;
                let place = self.queues.iter().position(|queue| queue.reactor == reactor);
                let is_unused = |place: &usize| {
                    let queue = &self.queues[*place];
                    queue.stage != Stage::Connecting && queue.waiters.is_empty()
                };
                if let Some(place) = place.filter(is_unused) {
                    self.queues.swap_remove(place);
                    self.open_if_replayed();
                }
                self.publish_queues();
            }
            Command::Connected { reactor, generation, result } => {
                self.connected(&reactor, generation, result)
            }
            Command::Again(reactor) => {
                let is_it = |queue: &&mut Queue| queue.reactor == reactor && queue.stage == Stage::Failed;
                self.queues.iter_mut().find(is_it).into_iter().for_each(|queue| queue.stage = Stage::Wanted);
                if self.limits.is_some() {
                    self.connect_wanted();
                }
            }
            Command::Replayed { reactor, generation } => {
                if generation == self.shared.generation() {
                    let is_its = |queue: &&mut Queue| queue.reactor == reactor;
                    self.queues
                        .iter_mut()
                        .find(is_its)
                        .into_iter()
                        .for_each(|queue| queue.is_replaying = false);
                    self.open_if_replayed();
                }
            }
            Command::Closed(nsid) => {
                if self.disks.closed(nsid) && self.disks.ends_with(nsid) {
                    self.remove_disks();
                }
            }
            Command::Stop => self.remove_disks(),
            // The controller is not there, or was lost since.
            Command::Lost { .. } | Command::Rescan | Command::DisksRemoved | Command::Reset => {}
        }
    }

    fn queue_of(&mut self, reactor: Handle) -> &mut Queue {
        let place = self.queues.iter().position(|queue| queue.reactor == reactor);
        let place = place.unwrap_or_else(|| {
            let (stage, waiters) = (Stage::Wanted, Vec::new());
            self.queues.push(Queue { reactor, qid: 0, stage, is_replaying: false, waiters });
            self.queues.len() - 1
        });
        &mut self.queues[place]
    }

    fn prepare(&mut self, reactor: Handle, reply: Waiter) {
        // A reactor may have ended.
        self.queues.retain(|queue| !queue.reactor.has_ended());
        let result = if self.is_stopping {
            Some(Err(OpenError::Removed))
        } else if self.shared.owner_for(&reactor).is_some() || self.shared.is_failing.load(Ordering::Acquire)
        {
            Some(Ok(()))
        } else {
            None
        };
        if let Some(result) = result {
            // The opener may be gone.
            return drop(reply.send(result));
        }
        let is_there = self.limits.is_some();
        let queue = self.queue_of(reactor);
        if queue.stage == Stage::Connected {
            return drop(reply.send(Ok(())));
        }
        queue.waiters.push(reply);
        if is_there {
            self.connect_wanted();
        }
    }

    /// Connects the queues that are wanted.
    fn connect_wanted(&mut self) {
        let Some(limits) = self.limits else { return };
        let mut used: BTreeSet<u16> =
            self.queues.iter().filter(|queue| queue.stage != Stage::Wanted).map(|queue| queue.qid).collect();
        let generation = self.shared.generation();
        let mut without = Vec::new();
        for (place, queue) in self.queues.iter_mut().enumerate() {
            if queue.stage != Stage::Wanted {
                continue;
            }
            let Some(qid) = (1..=limits.count).find(|qid| !used.contains(qid)) else {
                without.push(place);
                continue;
            };
            used.insert(qid);
            (queue.qid, queue.stage) = (qid, Stage::Connecting);
            let (shared, reactor) = (Arc::clone(&self.shared), queue.reactor.clone());
            spawn_local(async move {
                let result = match admin::open_queue(&shared.config, limits, qid, generation).await {
                    Ok(live) => {
                        let of_reactor = Arc::clone(&shared);
                        // A reactor that has ended wants no queue.
                        let _ = reactor.call(move |cx| driver::give(&of_reactor, live, cx)).await;
                        Ok(())
                    }
                    Err(error) => Err(error),
                };
                shared.send(Command::Connected { reactor, generation, result });
            });
        }
        for place in without.into_iter().rev() {
            self.use_other_queue(place);
        }
    }

    /// The controller has too few queues: a reactor uses that of another.
    fn use_other_queue(&mut self, place: usize) {
        let staying = self.env.reactors().staying();
        let is_owner = |queue: &&Queue| {
            matches!(queue.stage, Stage::Connected | Stage::Connecting) && staying.contains(&queue.reactor)
        };
        let owner = self.queues.iter().find(is_owner);
        let owner = owner.and_then(|owner| self.env.reactors().hold(&owner.reactor));
        let mut queue = self.queues.swap_remove(place);
        let result = match owner {
            Some(owner) => {
                tracing::warn!(
                    controller = self.config().name,
                    core = queue.reactor.core(),
                    through = owner.core(),
                    "a core sends its requests through the queue of another: the target has too few"
                );
                self.shared.route(queue.reactor.clone(), owner);
                Ok(())
            }
            None => Err(OpenError::Unavailable("the target has no queue for this core".to_owned())),
        };
        queue.answer(&result);
    }

    fn connected(&mut self, reactor: &Handle, generation: u64, result: Result<(), ConnectError>) {
        if generation != self.shared.generation() {
            return;
        }
        let is_its = |queue: &&mut Queue| queue.reactor == *reactor && queue.stage == Stage::Connecting;
        let Some(queue) = self.queues.iter_mut().find(is_its) else { return };
        match result {
            Ok(()) => {
                queue.stage = Stage::Connected;
                queue.answer(&Ok(()));
            }
            Err(error) => {
                queue.stage = Stage::Failed;
                queue.answer(&Err(OpenError::Unavailable(format!("the queue cannot be connected: {error}"))));
                let (shared, reactor) = (Arc::clone(&self.shared), reactor.clone());
                limited!(
                    self.lines, warn, controller = shared.config.name, core = reactor.core(), %error,
                    "a queue cannot be connected"
                );
                spawn_local(async move {
                    tokio::time::sleep(QUEUE_INTERVAL).await;
                    shared.send(Command::Again(reactor));
                });
            }
        }
        self.publish_queues();
    }

    fn publish_queues(&self) {
        let connected = self.queues.iter().filter(|queue| queue.stage == Stage::Connected);
        self.shared.info().queues = connected.map(|queue| queue.reactor.core()).collect();
    }

    /// Lets new requests begin on all reactors, once what a loss kept has ended on all of them.
    fn open_if_replayed(&mut self) {
        if self.limits.is_none() || self.queues.iter().any(|queue| queue.is_replaying) {
            return;
        }
        if self.shared.is_gated.swap(false, Ordering::AcqRel) {
            self.tell_reactors(driver::open);
        }
    }

    /// Sends all reactors with queues a message.
    fn tell_reactors(&self, message: fn(aryk_reactor::DriverKey, &mut aryk_reactor::Cx)) {
        for queue in &self.queues {
            let (reactor, key) = (queue.reactor.clone(), self.shared.key);
            // A reactor that has ended has no requests.
            spawn_local(async move { reactor.cast(move |cx| message(key, cx)).await });
        }
    }

    /// Closes all connections of a controller that is lost. Returns what the queues have changed lately.
    async fn stop_queues(&mut self) -> Vec<Box<History>> {
        self.limits = None;
        self.shared.begin_generation();
        let lost_at = Instant::now();
        let mut histories = vec![Box::new(History::unknown_until(self.departed))];
        let mut has_unsettled = false;
        let mut without_driver = Vec::new();
        for queue in &mut self.queues {
            let key = self.shared.key;
            let stopped = queue.reactor.call(move |cx| driver::stop(key, cx)).await;
            queue.is_replaying = false;
            queue.stage = Stage::Wanted;
            // Without a driver, only openers want the queue.
            if let Ok(Some(Stopped { history, has_unsettled: has_some })) = stopped {
                histories.push(history);
                has_unsettled |= has_some;
            } else if queue.waiters.is_empty() {
                without_driver.push(queue.reactor.clone());
            }
        }
        // A driver that has begun since asks for its queue.
        self.queues.retain(|queue| !without_driver.contains(&queue.reactor));
        if has_unsettled {
            self.fence = Some(lost_at + 2 * self.config().keep_alive + FENCE_MARGIN);
        }
        self.publish_queues();
        histories
    }

    /// Connects again. `None`: the controller ends.
    async fn regain(&mut self, reason: &str) -> Option<Admin> {
        let name = self.config().name.clone();
        limited!(self.lines, warn, controller = name, reason, "the controller of another host is lost");
        {
            let mut info = self.shared.info();
            info.phase = RemotePhase::Lost;
            info.losses += 1;
            info.last_loss = Some(reason.to_owned());
        }
        self.disks.set_stalled(true);
        let histories = self.stop_queues().await;
        let lost_at = Instant::now();
        let far = lost_at + Duration::from_secs(100 * 365 * 86_400);
        let give_up = self.config().loss_timeout.map_or(far, |timeout| lost_at + timeout);
        let mut fail_at = self.config().fast_fail.map_or(far, |timeout| lost_at + timeout);
        let (mut next, mut delay) = (Instant::now(), DELAY_MIN.min(self.config().reconnect_delay));
        loop {
            let shared = Arc::clone(&self.shared);
            let ends_earlier = shared.info().ends_earlier;
            let begin = if ends_earlier { next } else { self.fence.map_or(next, |fence| fence.max(next)) };
            let reactors: Vec<Handle> = self.queues.iter().map(|queue| queue.reactor.clone()).collect();
            let connecting = async {
                sleep_until(begin).await;
                connect_all(&shared, &reactors).await
            };
            tokio::pin!(connecting);
            let connected = loop {
                tokio::select! {
                    connected = &mut connecting => break connected,
                    command = self.commands.recv() => match command {
                        None => return None,
                        Some(Command::DisksRemoved) => {
                            self.are_removed = true;
                            return None;
                        }
                        Some(command) => self.handle(command),
                    },
                    () = sleep_until(fail_at) => {
                        fail_at = far;
                        tracing::warn!(controller = name, "requests fail until the controller is back");
                        self.shared.info().phase = RemotePhase::Failing;
                        self.shared.is_failing.store(true, Ordering::Release);
                        self.queues.iter_mut().for_each(|queue| queue.answer(&Ok(())));
                        self.tell_reactors(driver::fail);
                    }
                    () = sleep_until(give_up) => {
                        tracing::warn!(controller = name, "the controller does not come back: its disks are removed");
                        self.give_up().await;
                        return None;
                    }
                }
            };
            let result = match connected {
                Ok(connected) => self.resume(connected, &histories).await,
                Err(error) => Err(error),
            };
            match result {
                Ok(admin) => {
                    tracing::info!(controller = name, "the controller of another host is back");
                    return Some(admin);
                }
                Err(error) => {
                    limited!(self.lines, info, controller = name, %error, "the controller is not back yet");
                    next = Instant::now() + delay;
                    delay = (2 * delay).min(self.config().reconnect_delay.max(DELAY_MIN));
                }
            }
        }
    }

    /// Goes on with a controller that is back.
    async fn resume(&mut self, back: Back, histories: &[Box<History>]) -> Result<Admin, ConnectError> {
        let Back { admin, listed, queues } = back;
        let is_other = |before: &aryk_nvme::claims::ControllerInfo| {
            (&before.serial, &before.model) != (&admin.info.serial, &admin.info.model)
        };
        let before = self.shared.info().controller.clone();
        if before.as_ref().is_some_and(is_other) {
            return Err(ConnectError::Other(admin.info.serial));
        }
        if !admin.ends_earlier && self.fence.is_some_and(|fence| Instant::now() < fence) {
            // The next attempt waits until the fence.
            self.shared.info().ends_earlier = false;
            return Err(ConnectError::Unsupported("the earlier controller has not ended at the target"));
        }
        self.fence = None;
        self.is_there(&admin);
        // Namespaces that have gone or changed: before their requests are submitted again.
        self.update_disks(&listed, &admin.info);
        let histories: Arc<[Box<History>]> = histories.to_vec().into();
        for (reactor, qid, live) in queues {
            let (key, histories) = (self.shared.key, Arc::clone(&histories));
            let kept = reactor.call(move |cx| driver::resume(key, live, &histories, cx)).await;
            let Some(queue) = self.queues.iter_mut().find(|queue| queue.reactor == reactor) else { continue };
            if let Ok(Some(kept)) = kept {
                (queue.qid, queue.stage, queue.is_replaying) = (qid, Stage::Connected, kept > 0);
                queue.answer(&Ok(()));
            }
        }
        self.publish_queues();
        self.disks.set_stalled(false);
        self.open_if_replayed();
        Ok(admin)
    }

    /// The controller does not come back.
    async fn give_up(&mut self) {
        self.shared.info().phase = RemotePhase::Ending;
        self.tell_reactors(driver::close);
        self.remove_disks();
        self.until_removed().await;
    }

    /// Waits until the disks are removed.
    async fn until_removed(&mut self) {
        while !self.are_removed {
            match self.commands.recv().await {
                Some(Command::DisksRemoved) => self.are_removed = true,
                Some(command) => self.handle(command),
                None => return,
            }
        }
    }

    async fn end(mut self) {
        self.shared.info().phase = RemotePhase::Ending;
        self.shared.begin_generation();
        self.shared.forget_routes();
        if !self.are_removed && !self.commands.is_closed() {
            self.remove_disks();
            self.until_removed().await;
        }
        self.queues.iter_mut().for_each(|queue| queue.answer(&Err(OpenError::Removed)));
    }
}

/// A controller that is back, with a queue for each reactor.
struct Back {
    admin: Admin,
    listed: Vec<ListedNamespace>,
    queues: Vec<(Handle, u16, Box<Live>)>,
}

/// Connects a controller and a queue for each of these reactors.
async fn connect_all(shared: &Shared, reactors: &[Handle]) -> Result<Back, ConnectError> {
    let (admin, listed) = admin::attach(&shared.config).await?;
    let generation = shared.generation();
    let mut queues = Vec::new();
    for (reactor, qid) in reactors.iter().zip(1..) {
        if qid > admin.queues.count {
            return Err(ConnectError::Unsupported("the target has fewer queues than before"));
        }
        let live = admin::open_queue(&shared.config, admin.queues, qid, generation).await?;
        queues.push((reactor.clone(), qid, live));
    }
    Ok(Back { admin, listed, queues })
}
