//! One vhost-user-blk controller: the device that the sessions of its socket serve, with one disk. Control context.
//!
//! Each queue is a root with a thread of its own, on the reactor with the least load among the controller's cores. So the queues
//! of one disk spread over these reactors.

use crate::config::{self, BlkConfig};
use crate::moving;
use crate::queue::Queue;
use crate::request::Disk;
use aryk_bdev::{Descriptor, Event, Memory, OpenError};
use aryk_dma::MemTable;
use aryk_reactor::{CoreSet, Cx, Gone, Handle, Reactors, RootRef, ThreadId};
use aryk_vhost_device::{Errors, Host, NotReady, Parts, Queues, Running, Trouble, virtqueue};
use aryk_vhost_user::{Device, DeviceError, EventFd, MemoryChange, QueueLog, QueueSetup, SessionHandle};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_ID_BYTES};
use zerocopy::IntoBytes;

/// The settings of a controller.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub name: String,
    pub read_only: bool,
    /// The cores whose reactors serve its queues; all cores if `None`.
    pub cores: Option<CoreSet>,
    pub queues: u16,
    /// The largest number of descriptors of a queue.
    pub queue_size_max: u16,
}

/// The controller.
pub(crate) struct Controller {
    settings: Settings,
    reactors: Rc<Reactors>,
    /// Where its guest's memory is announced.
    memory: Memory,
    /// Device features. They are offered from its creation on and never change.
    features: u64,
    /// `None` if the disk was removed.
    disk: RefCell<Option<Descriptor>>,
    config: RefCell<BlkConfig>,
    queues: Queues<Queue>,
    session: RefCell<Option<SessionHandle>>,
    errors: Arc<Errors>,
}

/// Why a queue cannot start.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error(transparent)]
    NotReady(#[from] NotReady),
    #[error("cannot open the disk for a queue: {0}")]
    Open(#[from] OpenError),
    #[error("cannot watch the queue's kicks: {0}")]
    Os(#[from] std::io::Error),
    #[error("the queue is refused: {0}")]
    Ring(#[from] aryk_virtqueue::ConfigError),
    #[error("its reactor has stopped")]
    Gone(#[from] Gone),
}

impl Controller {
    pub fn new(settings: Settings, disk: Descriptor, memory: Memory, reactors: Rc<Reactors>) -> Self {
        let bdev = Arc::clone(disk.bdev());
        Self {
            features: config::features(&bdev, settings.read_only || !disk.is_writable()),
            config: RefCell::new(BlkConfig::new(&bdev, settings.queues)),
            disk: RefCell::new(Some(disk)),
            queues: Queues::new(Rc::clone(&reactors)),
            session: RefCell::default(),
            errors: Arc::default(),
            settings,
            memory,
            reactors,
        }
    }

    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    pub fn errors(&self) -> &Errors {
        &self.errors
    }

    /// The name of the disk, if the controller has one.
    pub fn disk_name(&self) -> Option<String> {
        self.disk.borrow().as_ref().map(|d| d.bdev().name().to_owned())
    }

    /// Handles an event of the disk.
    pub async fn disk_event(&self, event: Event) {
        match event {
            // The guest has negotiated its features already: a disk that has become read-only fails the guest's writes.
            Event::Changed => {}
            Event::Resized { .. } => {
                if let Some(disk) = &*self.disk.borrow() {
                    *self.config.borrow_mut() = BlkConfig::new(disk.bdev(), self.settings.queues);
                }
                if let Some(session) = &*self.session.borrow() {
                    session.config_changed();
                }
            }
            Event::Removed => {
                let _still = self.queues.hold_still().await;
                // A queue that has ended has closed its channel already.
                for (_, queue) in self.queues.all() {
                    let _ = queue.call(Queue::lose_disk).await;
                }
                self.disk.borrow_mut().take();
            }
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
        let keeps_in_flight = setup.inflight.is_some();
        let ring = virtqueue(&setup)?;
        let kick = setup.kick.map(|fd| fd.try_clone()).transpose()?;
        let disk = self.disk.borrow().clone();
        let requests = self.requests(disk.as_ref(), setup.features);
        let (errors, alarm) = (Arc::clone(&self.errors), self.alarm());
        let cores = self.settings.cores.clone().unwrap_or_else(|| self.reactors.allowed().clone());
        let start = move |cx: &mut Cx| -> Result<Running<Queue>, StartError> {
            let thread = cx.add_thread(name.clone(), cores);
            let parts = Parts {
                index,
                name,
                thread,
                ring,
                keeps_in_flight,
                log: setup.log,
                memory: setup.memory,
                call: setup.call,
                kick,
                errors,
                alarm,
            };
            let number = cx.thread_number(thread);
            let started = start_on(cx, parts, requests, disk.as_ref());
            let root = started.inspect_err(|_| cx.remove_thread(thread))?;
            Ok(Running { root, thread: number })
        };
        reactor.call(start).await?
    }

    fn requests(&self, disk: Option<&Descriptor>, features: u64) -> Disk {
        let mut id = [0; VIRTIO_BLK_ID_BYTES as usize];
        let name = self.disk_name().unwrap_or_default();
        let len = name.len().min(id.len());
        id[..len].copy_from_slice(&name.as_bytes()[..len]);
        Disk {
            block_size: disk.map_or(512, |d| d.bdev().geometry().block_size),
            id,
            write_through: features & 1 << VIRTIO_BLK_F_FLUSH == 0,
        }
    }
}

fn start_on(
    cx: &mut Cx,
    parts: Parts,
    requests: Disk,
    disk: Option<&Descriptor>,
) -> Result<RootRef<Queue>, StartError> {
    let (thread, name): (ThreadId, _) = (parts.thread, parts.name.clone());
    cx.add_root(thread, &name, |id, cx| {
        let channel = moving::open(disk, id, cx)?;
        Ok(Queue::start(id, parts, requests, channel, cx)?)
    })
}

impl Host for Controller {
    type Queue = Queue;

    fn queues(&self) -> &Queues<Queue> {
        &self.queues
    }

    fn disks(&self) -> Option<Descriptor> {
        self.disk.borrow().clone()
    }

    fn open_disks(&self, _index: u16) -> Vec<Descriptor> {
        self.disk.borrow().iter().cloned().collect()
    }

    fn session(&self) -> Option<SessionHandle> {
        self.session.borrow().clone()
    }
}

impl Device for Controller {
    fn features(&self) -> u64 {
        self.features
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
        self.settings.queues
    }

    fn queue_size_max(&self) -> u16 {
        self.settings.queue_size_max
    }

    fn config(&self) -> Vec<u8> {
        self.config.borrow().as_bytes().to_vec()
    }

    fn connected(&self, session: SessionHandle) {
        *self.session.borrow_mut() = Some(session);
    }

    fn disconnected(&self) {
        self.session.borrow_mut().take();
    }

    async fn start_queue(&self, index: u16, setup: QueueSetup) -> Result<(), DeviceError> {
        self.start(index, setup).await.map_err(|e| e.to_string().into())
    }

    async fn stop_queue(&self, index: u16) -> u32 {
        let still = self.queues.hold_still().await;
        let queue = self.queues.get(index).expect("the session stops queues that run");
        let stopping = queue.call(Queue::stop).await;
        drop(still);
        let base = match stopping {
            Ok(stopped) => stopped.await.unwrap_or(0),
            // The daemon is ending, and no successor uses that base.
            Err(Gone) => 0,
        };
        self.queues.remove(index);
        base
    }

    async fn set_call(&self, index: u16, call: Option<EventFd>) {
        let _still = self.queues.hold_still().await;
        if let Some(queue) = self.queues.get(index) {
            let _ = queue.call(move |q, cx| q.set_call(call, cx)).await;
        }
    }

    async fn set_err(&self, _index: u16, _err: Option<EventFd>) {
        // A queue that cannot go on ends its session, which tells the front-end more than a signal.
    }

    async fn set_log(&self, index: u16, log: Option<QueueLog>) {
        let _still = self.queues.hold_still().await;
        if let Some(queue) = self.queues.get(index) {
            let _ = queue.call(move |q, _| q.set_log(log)).await;
        }
    }

    async fn register_memory(&self, memory: &MemTable) {
        self.memory.add(memory.regions(), &self.settings.name).await;
    }

    async fn revoke_memory(&self) {
        let _still = self.queues.hold_still().await;
        for (_, queue) in self.queues.all() {
            // A queue that has ended uses no memory.
            let _ = queue.call(Queue::leave_removed_memory).await;
        }
    }

    async fn set_memory(&self, change: MemoryChange) {
        let _still = self.queues.hold_still().await;
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

#[cfg(test)]
mod tests;
