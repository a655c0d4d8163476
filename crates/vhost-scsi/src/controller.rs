//! One vhost-user-scsi controller: the device that the sessions of its socket serve, with eight targets. Control context.
//!
//! Queue 0 is the control queue, queue 1 the event queue; all others are request queues. Each queue is a root of its own on the
//! reactor with the least load among the controller's cores. A disk is attached and detached without the guest's help: every
//! queue gets a message, the guest gets an event, and commands in flight on a disk that was detached end beside the target's next
//! disk.

use crate::Error;
use crate::events::{Events, News, Waiting};
use crate::manage::Manager;
use crate::queue::{Queue, Role, Targets};
use crate::wire::{self, Config, feature};
use aryk_bdev::{Descriptor, Memory, OpenError};
use aryk_dma::MemTable;
use aryk_reactor::{CoreSet, Cx, Gone, Handle, Reactors, RootRef};
use aryk_scsi::{Lun, Nexus};
use aryk_vhost_device::{Errors, Host, NotReady, Parts, Queues, Running, Trouble, virtqueue};
use aryk_vhost_user::{Device, DeviceError, EventFd, MemoryChange, QueueLog, QueueSetup, SessionHandle};
use aryk_virtqueue::Virtqueue;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::{Arc, Weak};
use tokio::sync::MutexGuard;
use zerocopy::IntoBytes;

/// The control queue's index.
const CONTROL: u16 = 0;
/// The event queue's index.
const EVENT: u16 = 1;
/// Queues that are not request queues.
pub(crate) const FIXED: u16 = 2;

/// The settings of a controller.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub name: String,
    /// The cores whose reactors serve its queues; all cores if `None`.
    pub cores: Option<CoreSet>,
    /// Request queues.
    pub queues: u16,
    /// Its initiator port name.
    pub initiator: u64,
    /// The largest number of descriptors of a queue.
    pub queue_size_max: u16,
}

/// The controller.
pub(crate) struct Controller {
    settings: Settings,
    reactors: Rc<Reactors>,
    /// Where its guest's memory is announced.
    memory: Memory,
    /// The disks of the targets. They change only while the queues are held still, so that each queue learns of every change.
    targets: RefCell<Targets>,
    /// Targets to which a disk is being attached, by bit.
    arriving: Cell<u8>,
    queues: Queues<Queue>,
    /// Events for the guest that wait until its event queue runs again. `None` if the queue has not run in this session: the
    /// guest scans the targets first.
    untold: Cell<Option<Waiting>>,
    session: RefCell<Option<SessionHandle>>,
    errors: Arc<Errors>,
}

/// Why a queue cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The disk of a target is not ready.
    #[error(transparent)]
    NotReady(#[from] NotReady),
    /// The disk of a target cannot be opened.
    #[error("cannot open a disk for a queue: {0}")]
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

/// The parts of a queue's role, before they are on its reactor.
enum Plan {
    Control(Targets),
    Event(u64, Option<Waiting>),
    Request(Targets),
}

impl Controller {
    pub fn new(settings: Settings, memory: Memory, reactors: Rc<Reactors>) -> Self {
        Self {
            settings,
            targets: RefCell::default(),
            arriving: Cell::default(),
            queues: Queues::new(Rc::clone(&reactors)),
            reactors,
            memory,
            untold: Cell::default(),
            session: RefCell::default(),
            errors: Arc::default(),
        }
    }

    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    pub fn errors(&self) -> &Errors {
        &self.errors
    }

    /// The targets that have disks, and the disks' names.
    pub fn disks(&self) -> Vec<(u8, String)> {
        let targets = self.targets.borrow();
        let named = |nexus: &Arc<Nexus>| nexus.bdev().name().to_owned();
        let all = (0..).zip(targets.iter());
        all.filter_map(|(target, nexus)| nexus.as_ref().map(|n| (target, named(n)))).collect()
    }

    /// Whether a target has no disk and none is being attached to it.
    pub fn is_free(&self, target: u8) -> bool {
        !self.has_disk(target) && self.arriving.get() & 1 << target == 0
    }

    /// Whether a target has a disk.
    pub fn has_disk(&self, target: u8) -> bool {
        self.targets.borrow()[usize::from(target)].is_some()
    }

    /// Attaches a disk to a target and sends the guest an event. The result identifies this attachment.
    ///
    /// # Errors
    /// The target has a disk, or the disk cannot be prepared or opened on a queue's reactor.
    pub async fn attach(&self, target: u8, nexus: Arc<Nexus>) -> Result<Weak<Nexus>, Error> {
        if !self.is_free(target) {
            return Err(Error::Taken(target));
        }
        let _arriving = Arriving::new(&self.arriving, target);
        let _changing = self.hold_for_disk(nexus.disk()).await?;
        self.targets.borrow_mut()[usize::from(target)] = Some(Arc::clone(&nexus));
        for (index, queue) in self.queues.all() {
            let nexus = Arc::clone(&nexus);
            let told = queue.call(move |queue, cx| match index {
                CONTROL => {
                    queue.manager().0.set_target(target, Some(nexus));
                    Ok(())
                }
                EVENT => Ok(()),
                _ => {
                    let (requests, line) = queue.requests();
                    requests.attach(target, nexus, line, cx)
                }
            });
            // A queue that has ended needs no target.
            if let Ok(Err(error)) = told.await {
                self.take_away(target).await;
                return Err(error.into());
            }
        }
        self.post(News::Plugged, target).await;
        Ok(Arc::downgrade(&nexus))
    }

    /// Waits until a disk has prepared the reactors of all request queues, and returns with the queues held still. They are not
    /// held still while it prepares.
    async fn hold_for_disk(&self, disk: &Descriptor) -> Result<MutexGuard<'_, ()>, OpenError> {
        let mut prepared: Vec<Handle> = Vec::new();
        loop {
            let still = self.queues.hold_still().await;
            let mut reactors = self.queues.all().into_iter().filter(|(index, _)| *index >= FIXED);
            let next = reactors.find(|(_, queue)| !prepared.contains(queue.handle()));
            let Some((_, queue)) = next else { return Ok(still) };
            drop(still);
            // A reactor that has ended has no queue.
            if let Some(reactor) = self.reactors.hold(queue.handle()) {
                disk.prepare(&reactor).await?;
            }
            prepared.push(queue.handle().clone());
        }
    }

    /// Detaches the disk of a target, whatever the disk and the guest do, and sends the guest an event. Returns whether the
    /// target had a disk; if `this` is given, whether it had that one.
    pub async fn detach(&self, target: u8, this: Option<&Weak<Nexus>>) -> bool {
        let _changing = self.queues.hold_still().await;
        let had = self.disk_of(target).is_some_and(|nexus| is_same(&nexus, this));
        if had {
            self.take_away(target).await;
            self.post(News::Unplugged, target).await;
        }
        had
    }

    fn disk_of(&self, target: u8) -> Option<Arc<Nexus>> {
        self.targets.borrow()[usize::from(target)].clone()
    }

    async fn take_away(&self, target: u8) {
        self.targets.borrow_mut()[usize::from(target)].take();
        for (index, queue) in self.queues.all() {
            let told = queue.call(move |queue, cx| match index {
                CONTROL => queue.manager().0.set_target(target, None),
                EVENT => {}
                _ => {
                    let (requests, line) = queue.requests();
                    requests.detach(target, line, cx);
                }
            });
            let _ = told.await;
        }
    }

    /// Handles another size of the disk `this` of a target.
    pub async fn resized(&self, target: u8, this: &Weak<Nexus>) {
        self.tell(News::Resized, Lun::resized, target, this).await;
    }

    /// Handles other limits, operations or another read-only state of the disk `this` of a target.
    pub async fn changed(&self, target: u8, this: &Weak<Nexus>) {
        self.tell(News::Changed, Lun::changed, target, this).await;
    }

    async fn tell(&self, news: News, note: fn(&Lun), target: u8, this: &Weak<Nexus>) {
        let _changing = self.queues.hold_still().await;
        let nexus = self.disk_of(target).filter(|nexus| is_same(nexus, Some(this)));
        if let Some(nexus) = nexus {
            note(nexus.lun());
            self.post(news, target).await;
        }
    }

    /// Sends the guest an event. The queues are held still, so the event queue neither starts nor stops meanwhile.
    async fn post(&self, news: News, target: u8) {
        let told = match self.queues.get(EVENT) {
            Some(queue) => queue.call(move |queue, cx| queue.post(news, target, cx)).await.unwrap_or(false),
            None => false,
        };
        if let Some(mut untold) = self.untold.get().filter(|_| !told) {
            untold.add(news, target);
            self.untold.set(Some(untold));
        }
    }

    async fn start(&self, index: u16, setup: QueueSetup) -> Result<(), StartError> {
        let reactor = self.reactors.least_loaded(self.settings.cores.as_ref());
        self.queues.start(self, index, &reactor, self.start_on(&reactor, index, setup)).await
    }

    async fn start_on(
        &self,
        reactor: &Handle,
        index: u16,
        setup: QueueSetup,
    ) -> Result<Running<Queue>, StartError> {
        let name = format!("{}.q{index}", self.settings.name);
        let ring = virtqueue(&setup)?;
        let kick = setup.kick.map(|fd| fd.try_clone()).transpose()?;
        let (errors, alarm) = (Arc::clone(&self.errors), self.alarm());
        let cores = self.settings.cores.clone().unwrap_or_else(|| self.reactors.allowed().clone());
        let targets = self.targets.borrow().clone();
        let plan = match index {
            CONTROL => Plan::Control(targets),
            EVENT => Plan::Event(setup.features, self.untold.take()),
            _ => Plan::Request(targets),
        };
        let start = move |cx: &mut Cx| -> Result<Running<Queue>, StartError> {
            let thread = cx.add_thread(name.clone(), cores);
            let parts = Parts {
                index,
                name,
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
            let root = start_on(cx, parts, plan).inspect_err(|_| cx.remove_thread(thread))?;
            Ok(Running { root, thread: number })
        };
        reactor.call(start).await?
    }
}

/// Marks a target to which a disk is being attached: no other disk is attached to it meanwhile.
struct Arriving<'a>(&'a Cell<u8>, u8);

impl<'a> Arriving<'a> {
    fn new(all: &'a Cell<u8>, target: u8) -> Self {
        all.set(all.get() | 1 << target);
        Self(all, target)
    }
}

impl Drop for Arriving<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() & !(1 << self.1));
    }
}

/// Whether `nexus` is the attachment `this`, if that is given. Another disk may have taken its place.
fn is_same(nexus: &Arc<Nexus>, this: Option<&Weak<Nexus>>) -> bool {
    this.is_none_or(|this| std::ptr::eq(this.as_ptr(), Arc::as_ptr(nexus)))
}

/// Whether a ring is in the state that a new driver gives it.
fn is_unused(ring: &mut Virtqueue) -> bool {
    /// The bases of new rings: 0 for split rings, both wrap counters set for packed rings.
    const BEGINNINGS: [u32; 2] = [0, 0x8000_8000];
    BEGINNINGS.contains(&ring.base()) && ring.available() == Ok(0)
}

fn start_on(cx: &mut Cx, mut parts: Parts, plan: Plan) -> Result<RootRef<Queue>, StartError> {
    let name = parts.name.clone();
    cx.add_root(parts.thread, &name, |id, cx| match plan {
        Plan::Control(targets) => Ok(Queue::start(id, parts, Role::Control(Manager::new(targets)), cx)?),
        Plan::Event(features, untold) => {
            // A driver that has made no buffer available is new, and scans the targets itself.
            let is_new = is_unused(&mut parts.ring);
            let waiting = untold.filter(|_| !is_new).unwrap_or_default();
            Ok(Queue::start(id, parts, Role::Event(Events::new(features, waiting)), cx)?)
        }
        Plan::Request(targets) => Queue::of_commands(id, parts, targets, cx),
    })
}

impl Host for Controller {
    type Queue = Queue;

    fn queues(&self) -> &Queues<Queue> {
        &self.queues
    }

    fn disks(&self) -> Targets {
        self.targets.borrow().clone()
    }

    /// Only request queues open channels.
    fn open_disks(&self, index: u16) -> Vec<Descriptor> {
        match index {
            CONTROL | EVENT => Vec::new(),
            _ => self.targets.borrow().iter().flatten().map(|nexus| nexus.disk().clone()).collect(),
        }
    }

    fn session(&self) -> Option<SessionHandle> {
        self.session.borrow().clone()
    }
}

impl Device for Controller {
    fn features(&self) -> u64 {
        feature::HOTPLUG | feature::CHANGE
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
        FIXED + self.settings.queues
    }

    fn queue_size_max(&self) -> u16 {
        self.settings.queue_size_max
    }

    fn config(&self) -> Vec<u8> {
        Config::new(self.settings.queues).as_bytes().to_vec()
    }

    fn set_config(&self, offset: u32, data: &[u8]) -> Result<(), DeviceError> {
        if wire::may_write(&Config::new(self.settings.queues), offset, data) {
            return Ok(());
        }
        Err("CDBs have 32 bytes, sense data 96, and nothing else can be written".into())
    }

    fn connected(&self, session: SessionHandle) {
        *self.session.borrow_mut() = Some(session);
    }

    fn disconnected(&self) {
        self.session.borrow_mut().take();
        self.untold.take();
    }

    async fn start_queue(&self, index: u16, setup: QueueSetup) -> Result<(), DeviceError> {
        self.start(index, setup).await.map_err(|e| e.to_string().into())
    }

    async fn stop_queue(&self, index: u16) -> u32 {
        let changing = self.queues.hold_still().await;
        let queue = self.queues.get(index).expect("the session stops queues that run");
        let stop = |queue: &mut Queue, cx: &mut Cx| (queue.take_waiting(), queue.stop(cx));
        let stopping = queue.call(stop).await;
        drop(changing);
        let base = match stopping {
            Ok((waiting, stopped)) => {
                if waiting.is_some() {
                    self.untold.set(waiting);
                }
                stopped.await.unwrap_or(0)
            }
            // The daemon is ending, and no successor uses that base.
            Err(Gone) => 0,
        };
        self.queues.remove(index);
        base
    }

    async fn set_call(&self, index: u16, call: Option<EventFd>) {
        let _changing = self.queues.hold_still().await;
        if let Some(queue) = self.queues.get(index) {
            let _ = queue.call(move |q, cx| q.set_call(call, cx)).await;
        }
    }

    async fn set_err(&self, _index: u16, _err: Option<EventFd>) {
        // A queue that cannot go on ends its session, which tells the front-end more than a signal.
    }

    async fn set_log(&self, index: u16, log: Option<QueueLog>) {
        let _changing = self.queues.hold_still().await;
        if let Some(queue) = self.queues.get(index) {
            let _ = queue.call(move |q, _| q.set_log(log)).await;
        }
    }

    async fn register_memory(&self, memory: &MemTable) {
        self.memory.add(memory.regions(), &self.settings.name).await;
    }

    async fn revoke_memory(&self) {
        let _changing = self.queues.hold_still().await;
        for (_, queue) in self.queues.all() {
            // A queue that has ended uses no memory.
            let _ = queue.call(Queue::leave_removed_memory).await;
        }
    }

    async fn set_memory(&self, change: MemoryChange) {
        let _changing = self.queues.hold_still().await;
        for (index, rings) in change.rings {
            let Some(queue) = self.queues.get(index) else { continue };
            let memory = Arc::clone(&change.memory);
            let moved = queue.call(move |q, _| q.set_memory(memory, rings)).await;
            if let Ok(Err(error)) = moved {
                (self.alarm())(Trouble::Moved(index, error));
            }
        }
    }
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller").field("settings", &self.settings).finish_non_exhaustive()
    }
}
