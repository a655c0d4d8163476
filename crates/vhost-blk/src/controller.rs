//! One vhost-user-blk controller: a disk, as the sessions of its socket see it. Control context.
//!
//! Each queue is a root of its own, on a thread of its own, on the least loaded reactor of the controller's cores: the queues of one disk spread over them.

use crate::config::{self, BlkConfig};
use crate::moving;
use crate::queue::Queue;
use crate::request::Disk;
use aryk_bdev::{Descriptor, Event, OpenError};
use aryk_reactor::{CoreSet, Cx, Gone, Handle, Hold, Reactors, RootRef, ThreadId};
use aryk_vhost_device::{Errors, MOVE_PATIENCE, MoveError, Moved, Parts, Trouble, virtqueue};
use aryk_vhost_user::{Device, DeviceError, EventFd, MemoryChange, QueueLog, QueueSetup, SessionHandle};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_ID_BYTES};
use zerocopy::IntoBytes;

/// How a controller is to serve its disk.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub name: String,
    pub read_only: bool,
    /// Reactors for its queues; all if `None`.
    pub cores: Option<CoreSet>,
    pub queues: u16,
}

/// The controller.
pub(crate) struct Controller {
    settings: Settings,
    reactors: Rc<Reactors>,
    /// Device features, as offered since its creation.
    features: u64,
    /// `None` when the disk has been removed.
    disk: RefCell<Option<Descriptor>>,
    config: RefCell<BlkConfig>,
    queues: RefCell<BTreeMap<u16, Running>>,
    /// Held while a queue moves, or something is asked of queues that may be about to.
    moving: Mutex<()>,
    session: RefCell<Option<SessionHandle>>,
    errors: Arc<Errors>,
}

/// A queue that runs.
#[derive(Clone)]
struct Running {
    root: RootRef<Queue>,
    /// Its thread's number.
    thread: u64,
}

/// Why a queue cannot start.
#[derive(Debug, thiserror::Error)]
enum StartError {
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
    pub fn new(settings: Settings, disk: Descriptor, reactors: Rc<Reactors>) -> Self {
        let bdev = Arc::clone(disk.bdev());
        Self {
            features: config::features(&bdev, settings.read_only || !disk.is_writable()),
            config: RefCell::new(BlkConfig::new(&bdev, settings.queues)),
            disk: RefCell::new(Some(disk)),
            queues: RefCell::default(),
            moving: Mutex::new(()),
            session: RefCell::default(),
            errors: Arc::default(),
            settings,
            reactors,
        }
    }

    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    pub fn errors(&self) -> &Errors {
        &self.errors
    }

    /// The disk's name, while it has one.
    pub fn disk_name(&self) -> Option<String> {
        self.disk.borrow().as_ref().map(|d| d.bdev().name().to_owned())
    }

    /// Queues that run, and the cores that they run on.
    pub fn running(&self) -> Vec<(u16, u16)> {
        self.queues.borrow().iter().map(|(&index, q)| (index, q.root.handle().core())).collect()
    }

    /// The queue that is the thread of that number.
    pub fn queue_of(&self, thread: u64) -> Option<u16> {
        self.queues.borrow().iter().find(|(_, queue)| queue.thread == thread).map(|(&index, _)| index)
    }

    /// Something happened to the disk.
    pub async fn disk_event(&self, event: Event) {
        match event {
            Event::Resized { .. } => {
                if let Some(disk) = &*self.disk.borrow() {
                    *self.config.borrow_mut() = BlkConfig::new(disk.bdev(), self.settings.queues);
                }
                if let Some(session) = &*self.session.borrow() {
                    session.config_changed();
                }
            }
            Event::Removed => {
                let _still = self.moving.lock().await;
                // A queue that is gone has closed its channel already.
                for queue in self.running_queues() {
                    let _ = queue.call(Queue::lose_disk).await;
                }
                self.disk.borrow_mut().take();
            }
        }
    }

    fn running_queues(&self) -> Vec<RootRef<Queue>> {
        self.queues.borrow().values().map(|queue| queue.root.clone()).collect()
    }

    fn queue(&self, index: u16) -> Option<RootRef<Queue>> {
        self.queues.borrow().get(&index).map(|queue| queue.root.clone())
    }

    async fn start(&self, index: u16, setup: QueueSetup) -> Result<Running, StartError> {
        let name = format!("{}.q{index}", self.settings.name);
        let handle = self.reactors.least_loaded(self.settings.cores.as_ref());
        let keeps_in_flight = setup.inflight.is_some();
        let ring = virtqueue(&setup)?;
        let kick = setup.kick.map(|fd| fd.try_clone()).transpose()?;
        let disk = self.disk.borrow().clone();
        let requests = self.requests(disk.as_ref(), setup.features);
        let (errors, alarm) = (Arc::clone(&self.errors), self.alarm());
        let cores = self.settings.cores.clone().unwrap_or_else(|| self.reactors.allowed().clone());
        let start = move |cx: &mut Cx| -> Result<Running, StartError> {
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
        handle.call(start).await?
    }

    /// Has a queue run on one of `cores` from now on.
    ///
    /// # Errors
    /// [`MoveError`].
    pub async fn place(&self, index: u16, cores: CoreSet) -> Result<(), MoveError> {
        if !self.reactors.is_any_on(&cores) {
            return Err(MoveError::Cores(cores));
        }
        let queue = self.queue(index).ok_or(MoveError::Ending)?;
        if !cores.contains(queue.handle().core()) {
            self.move_queue(index, self.reactors.least_loaded(Some(&cores)), MOVE_PATIENCE).await?;
        }
        let _still = self.moving.lock().await;
        let queue = self.queue(index).ok_or(MoveError::Ending)?;
        queue
            .call(move |queue, cx| cx.set_thread_cores(queue.line.thread(), cores))
            .await
            .map_err(|Gone| MoveError::Ending)
    }

    /// Moves a queue to another reactor, if all that it has in flight completes within `patience`. To be awaited to its end: whoever asks for queues meanwhile waits for that.
    ///
    /// # Errors
    /// [`MoveError`].
    pub async fn move_queue(&self, index: u16, to: Hold, patience: Duration) -> Result<(), MoveError> {
        let _still = self.moving.lock().await;
        let queue = self.queue(index).ok_or(MoveError::Ending)?;
        if *queue.handle() == *to {
            return Ok(());
        }
        // It may come back.
        let _home = self.reactors.hold(queue.handle()).ok_or(MoveError::Ending)?;
        let there = Handle::clone(&to);
        let disk = self.disk.borrow().clone();
        let begun = queue.call(move |queue, cx| queue.move_to((there, disk), patience, cx)).await;
        let ends = begun.ok().flatten().ok_or(MoveError::Ending)?;
        match ends.await {
            Ok(Moved::There(root)) => {
                self.has_moved(index, root);
                Ok(())
            }
            Ok(Moved::Back(root, why)) => {
                self.has_moved(index, root);
                Err(MoveError::Open(why))
            }
            Ok(Moved::TooSlow) => Err(MoveError::TooSlow),
            Err(_) => {
                if let Some(session) = &*self.session.borrow() {
                    session.end(format!("queue {index} was lost on its way to another core"));
                }
                Err(MoveError::Ending)
            }
        }
    }

    fn has_moved(&self, index: u16, root: RootRef<Queue>) {
        self.queues.borrow_mut().get_mut(&index).expect("queues do not end while they move").root = root;
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

    /// What a queue in trouble calls: its session ends.
    fn alarm(&self) -> Box<dyn Fn(Trouble) + Send> {
        let session = self.session.borrow().clone();
        Box::new(move |trouble| {
            if let Some(session) = &session {
                session.end(trouble.to_string());
            }
        })
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
        let queue = self.start(index, setup).await.map_err(|e| DeviceError::from(e.to_string()))?;
        self.queues.borrow_mut().insert(index, queue);
        Ok(())
    }

    async fn stop_queue(&self, index: u16) -> u32 {
        let still = self.moving.lock().await;
        let queue = self.queue(index).expect("the session stops queues that run");
        let stopping = queue.call(Queue::stop).await;
        drop(still);
        let base = match stopping {
            Ok(stopped) => stopped.await.unwrap_or(0),
            // The daemon is ending, and nobody will go on from that base.
            Err(Gone) => 0,
        };
        self.queues.borrow_mut().remove(&index);
        base
    }

    async fn set_call(&self, index: u16, call: Option<EventFd>) {
        let _still = self.moving.lock().await;
        if let Some(queue) = self.queue(index) {
            let _ = queue.call(move |q, cx| q.set_call(call, cx)).await;
        }
    }

    async fn set_err(&self, _index: u16, _err: Option<EventFd>) {
        // A queue in trouble ends its session, which tells the front-end more.
    }

    async fn set_log(&self, index: u16, log: Option<QueueLog>) {
        let _still = self.moving.lock().await;
        if let Some(queue) = self.queue(index) {
            let _ = queue.call(move |q, _| q.set_log(log)).await;
        }
    }

    async fn revoke_memory(&self) {
        let _still = self.moving.lock().await;
        for queue in self.running_queues() {
            // One that is gone uses no memory.
            let _ = queue.call(Queue::leave_removed_memory).await;
        }
    }

    async fn set_memory(&self, change: MemoryChange) {
        let _still = self.moving.lock().await;
        for (index, rings) in change.rings {
            let Some(queue) = self.queue(index) else { continue };
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
