//! One controller of any kind: the device that the sessions of its socket serve. Control context.
//!
//! Each queue is a root with a thread of its own, on the reactor with the least load among the controller's cores. So the queues
//! of one disk spread over these reactors. A [`Kind`] adds what the kinds of devices have of their own.

use crate::queue::Running;
use crate::ring::virtqueue;
use crate::{Alarm, DeviceQueue, Errors, Parts, Queues, Trouble};
use aryk_bdev::{Descriptor, Memory, OpenError, OpeningId};
use aryk_dma::MemTable;
use aryk_reactor::{CoreSet, Cx, Gone, Handle, Reactors, RootRef};
use aryk_vhost_user::{Device, DeviceError, EventFd, MemoryChange, QueueLog, QueueSetup, SessionHandle};
use aryk_virtqueue::Virtqueue;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{MutexGuard, oneshot};

/// What a kind of controllers has of its own. One value for each controller.
#[expect(async_fn_in_trait, reason = "controllers live on one thread; their futures are never sent")]
pub trait Kind: Sized + 'static {
    /// The name of the kind: `blk` or `scsi`.
    const NAME: &'static str;
    /// Queues that are not request queues. The first queues are these.
    const FIXED_QUEUES: u16;
    /// The device's queues.
    type Queue: DeviceQueue;

    /// As [`Device::features`].
    fn features(&self) -> u64;

    /// As [`Device::config`].
    fn config(&self) -> Vec<u8>;

    /// As [`Device::set_config`].
    ///
    /// # Errors
    /// One of these bytes is read-only, or the value is invalid.
    fn set_config(&self, offset: u32, data: &[u8]) -> Result<(), DeviceError> {
        let _ = (offset, data);
        Err("the configuration space is read-only".into())
    }

    /// The disks that a queue opens its channels on, at this time.
    fn disks(&self) -> <Self::Queue as DeviceQueue>::Disks;

    /// The disks on which the queue `index` opens a channel, as openings: each prepares a reactor first.
    fn open_disks(&self, index: u16) -> Vec<Descriptor>;

    /// The names of all disks.
    fn disk_names(&self) -> Vec<String>;

    /// The role of the queue `index`, which starts with these negotiated features and this ring.
    fn role(&self, index: u16, features: u64, ring: &mut Virtqueue) -> <Self::Queue as DeviceQueue>::Role;

    /// Keeps what a queue that stops has left.
    fn keep(&self, left: <Self::Queue as DeviceQueue>::Left) {
        let _ = left;
    }

    /// The front-end has disconnected. All queues have been stopped.
    fn disconnected(&self) {}

    /// The controller is deleted, and its front-end has disconnected.
    async fn end(controller: &Controller<Self>) {
        let _ = controller;
    }
}

/// The settings of a controller of any kind.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Its name, which is also the name of its socket.
    pub name: String,
    /// The cores whose reactors serve its queues; all cores if `None`.
    pub cores: Option<CoreSet>,
    /// Request queues that a guest can have.
    pub queues: u16,
    /// The largest number of descriptors of a queue.
    pub queue_size_max: u16,
}

/// A controller.
pub struct Controller<K: Kind> {
    settings: Settings,
    kind: K,
    /// Where its guest's memory is announced.
    memory: Memory,
    reactors: Rc<Reactors>,
    queues: Queues<K::Queue>,
    /// Starts of queues whose disks are not ready, by index. A start is cancelled when its sender is dropped.
    preparing: RefCell<BTreeMap<u16, oneshot::Sender<()>>>,
    /// Queues of earlier sessions that have left their front-ends, and whose requests have not ended.
    left_behind: RefCell<Vec<Stopping>>,
    session: RefCell<Option<SessionHandle>>,
    errors: Arc<Errors>,
}

/// A queue that stops; ready at its end.
type Stopping = futures_channel::oneshot::Receiver<u32>;

/// Why the disks of a queue are not ready for its start on a reactor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    /// A disk could not prepare the reactor.
    #[error("cannot open the disk for a queue: {0}")]
    Disk(#[from] OpenError),
    /// The session ended first.
    #[error("the session ended before the disks were ready")]
    Ending,
    /// The front-end stopped the queue first.
    #[error("the front-end stopped the queue before the disks were ready")]
    Cancelled,
}

/// Why a queue cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// A disk is not ready.
    #[error(transparent)]
    NotReady(#[from] NotReady),
    /// A disk cannot be opened.
    #[error("cannot open the disk for a queue: {0}")]
    Open(#[from] OpenError),
    /// The kick fd cannot be watched.
    #[error("cannot watch the queue's kicks: {0}")]
    Os(#[from] std::io::Error),
    /// The ring is invalid.
    #[error("the queue is refused: {0}")]
    Ring(#[from] aryk_virtqueue::ConfigError),
    /// The reactor has ended.
    #[error("its reactor has stopped")]
    Gone(#[from] Gone),
}

impl<K: Kind> Controller<K> {
    /// A controller without queues. They will run on some of `reactors`; its guest's memory is announced to `memory`.
    pub fn new(settings: Settings, kind: K, memory: Memory, reactors: Rc<Reactors>) -> Self {
        Self {
            settings,
            kind,
            memory,
            reactors,
            queues: Queues::new(),
            preparing: RefCell::default(),
            left_behind: RefCell::default(),
            session: RefCell::default(),
            errors: Arc::default(),
        }
    }

    /// The settings.
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What its kind has of its own.
    pub const fn kind(&self) -> &K {
        &self.kind
    }

    /// The running queues.
    pub const fn queues(&self) -> &Queues<K::Queue> {
        &self.queues
    }

    /// The reactors on which its queues run.
    pub fn reactors(&self) -> &Reactors {
        &self.reactors
    }

    /// The session of its front-end, if one is connected.
    pub fn session(&self) -> Option<SessionHandle> {
        self.session.borrow().clone()
    }

    /// Errors of its guests.
    pub fn errors(&self) -> &Errors {
        &self.errors
    }

    /// The function that a queue of the session calls when it cannot go on: it ends the session.
    fn alarm(&self) -> Alarm {
        let session = self.session();
        Box::new(move |trouble| {
            if let Some(session) = &session {
                session.end(trouble.to_string());
            }
        })
    }

    /// Waits until the disks of the queue `index` have prepared a reactor, and returns with the queues held still, for the caller
    /// to open channels. The queues are not held still while the disks prepare. A disk that is being removed counts as prepared,
    /// because no channel opens on it.
    ///
    /// # Errors
    /// A disk could not prepare the reactor.
    pub(crate) async fn hold_prepared(
        &self,
        index: u16,
        reactor: &Handle,
    ) -> Result<MutexGuard<'_, ()>, OpenError> {
        // Only the disk that prepares is kept open: the others can be removed meanwhile.
        let mut prepared: Vec<OpeningId> = Vec::new();
        loop {
            let still = self.queues.hold_still().await;
            let disks = self.kind.open_disks(index);
            let Some(next) = disks.into_iter().find(|disk| !prepared.contains(&disk.id())) else {
                return Ok(still);
            };
            drop(still);
            match next.prepare(reactor).await {
                Ok(()) | Err(OpenError::Removed) => prepared.push(next.id()),
                Err(error) => return Err(error),
            }
        }
    }

    /// As [`Controller::hold_prepared`], but the end of the session and the end of the queue cancel the preparation.
    async fn hold_for_start(&self, index: u16, reactor: &Handle) -> Result<MutexGuard<'_, ()>, NotReady> {
        let session = self.session();
        let ending = async {
            match session {
                Some(session) => session.ending().await,
                None => std::future::pending().await,
            }
        };
        let (cancel, cancelled) = oneshot::channel();
        let before = self.preparing.borrow_mut().insert(index, cancel);
        assert!(before.is_none(), "queue {index} starts twice");
        let held = tokio::select! {
            biased;
            () = ending => Err(NotReady::Ending),
            _ = cancelled => Err(NotReady::Cancelled),
            held = async {
                self.await_left_behind().await;
                self.hold_prepared(index, reactor).await
            } => held.map_err(NotReady::Disk),
        };
        self.preparing.borrow_mut().remove(&index);
        held
    }

    /// Waits until the session must end and the queue, which stops, has left its front-end: its disks do not answer, but the
    /// memory of their requests may be replaced.
    async fn leave_front_end(&self, index: u16, queue: &RootRef<K::Queue>) {
        const RETRY: Duration = Duration::from_millis(50);
        match self.session() {
            Some(session) => session.ending().await,
            None => std::future::pending().await,
        }
        loop {
            match queue.call(DeviceQueue::leave_front_end).await {
                Ok(None) => tokio::time::sleep(RETRY).await,
                Ok(Some(requests)) => {
                    let name = &self.settings.name;
                    tracing::warn!(
                        "controller {name}: queue {index} has ended before {requests} of its requests, which its disk has: \
                         the queue starts again when they have ended"
                    );
                    return;
                }
                // It has stopped.
                Err(Gone) => std::future::pending().await,
            }
        }
    }

    /// Waits until no queue of an earlier session has requests: a request of that session must not be carried out after one
    /// of the next.
    async fn await_left_behind(&self) {
        const POLL_INTERVAL: Duration = Duration::from_millis(20);
        let has_ended = |queue: &mut Stopping| queue.try_recv() != Ok(None);
        loop {
            self.left_behind.borrow_mut().retain_mut(|queue| !has_ended(queue));
            if self.left_behind.borrow().is_empty() {
                return;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Starts a queue when its disks have prepared a reactor. The queues are held still while it opens its channels: a call to
    /// all queues reaches this one too, and a disk that is removed while the queue opens it does not stay open.
    async fn start(&self, index: u16, setup: QueueSetup) -> Result<(), StartError> {
        let reactor = self.reactors.least_loaded(self.settings.cores.as_ref());
        let _still = self.hold_for_start(index, &reactor).await?;
        let queue = self.start_on(&reactor, index, setup).await?;
        self.queues.add(index, queue).await;
        Ok(())
    }

    async fn start_on(
        &self,
        reactor: &Handle,
        index: u16,
        setup: QueueSetup,
    ) -> Result<Running<K::Queue>, StartError> {
        let name = format!("{}.q{index}", self.settings.name);
        let mut ring = virtqueue(&setup)?;
        let kick = setup.kick.map(|fd| fd.try_clone()).transpose()?;
        let (errors, alarm) = (Arc::clone(&self.errors), self.alarm());
        let cores = self.settings.cores.clone().unwrap_or_else(|| self.reactors.allowed().clone());
        let disks = self.kind.disks();
        let role = self.kind.role(index, setup.features, &mut ring);
        let start = move |cx: &mut Cx| -> Result<Running<K::Queue>, StartError> {
            let thread = cx.add_thread(name.clone(), cores);
            let parts = Parts {
                index,
                name: name.clone(),
                thread,
                ring,
                keeps_in_flight: setup.inflight.is_some(),
                log: setup.log,
                memory: setup.memory,
                call: setup.call,
                kick,
                errors,
                alarm,
            };
            let number = cx.thread_number(thread);
            let started = cx.add_root(thread, &name, |id, cx| K::Queue::begin(id, parts, role, &disks, cx));
            let root = started.inspect_err(|_| cx.remove_thread(thread))?;
            Ok(Running { root, thread: number })
        };
        reactor.call(start).await?
    }
}

impl<K: Kind> Device for Controller<K> {
    fn features(&self) -> u64 {
        self.kind.features()
    }

    fn packed(&self) -> bool {
        true
    }

    fn tracks_inflight(&self) -> bool {
        true
    }

    fn logs_writes(&self) -> bool {
        true
    }

    fn num_queues(&self) -> u16 {
        K::FIXED_QUEUES + self.settings.queues
    }

    fn queue_size_max(&self) -> u16 {
        self.settings.queue_size_max
    }

    fn config(&self) -> Vec<u8> {
        self.kind.config()
    }

    fn set_config(&self, offset: u32, data: &[u8]) -> Result<(), DeviceError> {
        self.kind.set_config(offset, data)
    }

    fn connected(&self, session: SessionHandle) {
        let before = self.session.borrow_mut().replace(session);
        assert!(before.is_none(), "a controller has one session at a time");
    }

    fn disconnected(&self) {
        let session = self.session.borrow_mut().take();
        assert!(session.is_some(), "a session ends once");
        assert!(self.queues.all().is_empty(), "a session ends after its queues");
        self.kind.disconnected();
    }

    async fn start_queue(&self, index: u16, setup: QueueSetup) -> Result<(), DeviceError> {
        self.start(index, setup).await.map_err(|e| e.to_string().into())
    }

    fn cancel_start(&self, index: u16) {
        self.preparing.borrow_mut().remove(&index);
    }

    async fn stop_queue(&self, index: u16) -> u32 {
        let still = self.queues.hold_still().await;
        let queue = self.queues.get(index).expect("the session stops queues that run");
        let stopping = queue.call(|queue, cx| (queue.take_left(), queue.stop(cx))).await;
        drop(still);
        let base = match stopping {
            Ok((left, mut stopped)) => {
                self.kind.keep(left);
                tokio::select! {
                    biased;
                    base = &mut stopped => base.unwrap_or(0),
                    () = self.leave_front_end(index, &queue) => {
                        self.left_behind.borrow_mut().push(stopped);
                        // There is no front-end to use it.
                        0
                    }
                }
            }
            // The daemon is ending, and no successor uses that base.
            Err(Gone) => 0,
        };
        self.queues.remove(index);
        base
    }

    async fn set_call(&self, index: u16, call: Option<EventFd>) {
        let _still = self.queues.hold_still().await;
        if let Some(queue) = self.queues.get(index) {
            let _ = queue.call(move |queue, cx| queue.guest().set_call(call, cx)).await;
        }
    }

    async fn set_err(&self, _index: u16, _err: Option<EventFd>) {
        // A queue that cannot go on ends its session, which tells the front-end more than a signal.
    }

    async fn set_log(&self, index: u16, log: Option<QueueLog>) {
        let _still = self.queues.hold_still().await;
        if let Some(queue) = self.queues.get(index) {
            let _ = queue.call(move |queue, _| queue.guest().set_log(log)).await;
        }
    }

    async fn register_memory(&self, memory: &MemTable) {
        self.memory.add(memory.regions(), &self.settings.name).await;
    }

    async fn revoke_memory(&self) -> bool {
        let _still = self.queues.hold_still().await;
        let mut are_revocable = true;
        for (_, queue) in self.queues.all() {
            // A queue that has ended uses no memory.
            are_revocable &= queue.call(DeviceQueue::leave_removed_memory).await.unwrap_or(true);
        }
        are_revocable
    }

    async fn set_memory(&self, change: MemoryChange) {
        let _still = self.queues.hold_still().await;
        for (index, rings) in change.rings {
            let Some(queue) = self.queues.get(index) else { continue };
            let memory = Arc::clone(&change.memory);
            let moved = queue.call(move |queue, _| queue.guest().set_memory(memory, rings)).await;
            if let Ok(Err(error)) = moved {
                (self.alarm())(Trouble::Moved(index, error));
            }
        }
    }
}

impl<K: Kind> std::fmt::Debug for Controller<K> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller")
            .field("kind", &K::NAME)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
