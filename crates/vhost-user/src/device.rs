//! What a device type implements to be served over vhost-user, and what it may ask of its session.
//!
//! Control context: all of [`Device`] is called on the thread that serves the session, one call at a time
//! for one device. [`SessionHandle`] may be used from any thread.

use aryk_dma::{DirtyLog, GuestArea, MemTable};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{Notify, watch};

/// Any error of a device. Its text reaches the log.
pub type DeviceError = Box<dyn std::error::Error + Send + Sync>;

/// The three parts of a ring, checked to lie in guest memory with the lengths and alignments of virtio 1.2, sections 2.7
/// (split) and 2.8 (packed, if VIRTIO_F_RING_PACKED was negotiated).
#[derive(Clone, Debug)]
pub struct Rings {
    /// The descriptors: 16 bytes each. Split: the table; packed: the ring.
    pub desc: GuestArea,
    /// What the driver writes. Split: the available ring, with `used_event` if VIRTIO_F_EVENT_IDX was negotiated. Packed: the
    /// driver's event suppression, 4 bytes.
    pub driver: GuestArea,
    /// What the device writes. Split: the used ring, with `avail_event` if VIRTIO_F_EVENT_IDX was negotiated. Packed: the
    /// device's event suppression, 4 bytes.
    pub device: GuestArea,
}

/// Where a queue marks what it writes, while its guest migrates.
#[derive(Clone, Debug)]
pub struct QueueLog {
    /// For all that its requests write to guest memory, each marked after it was written.
    pub log: Arc<DirtyLog>,
    /// Guest addresses and lengths of what the device writes of the ring itself.
    pub(crate) ring: [(u64, u64); 2],
}

impl PartialEq for QueueLog {
    /// Whether the same is to be marked in the same log.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.log, &other.log) && self.ring == other.ring
    }
}

impl QueueLog {
    /// A log of what is written to guest memory, and to the ring, which lies at these guest addresses.
    pub const fn new(log: Arc<DirtyLog>, ring: [(u64, u64); 2]) -> Self {
        Self { log, ring }
    }

    /// Marks the ring. To be called after each publication of used buffers and each change of event suppression, for both
    /// are writes. Marks all of it: rings have few pages.
    pub fn mark_ring(&self) {
        for (addr, len) in self.ring {
            self.log.mark(addr, len);
        }
    }
}

/// An eventfd of the front-end. Its description is shared with the front-end: a write may block if the
/// front-end wants it to, so it must never be written to with a plain `write`.
pub type EventFd = Arc<OwnedFd>;

/// All that a device needs to run one queue.
#[derive(Clone, Debug)]
pub struct QueueSetup {
    /// Descriptors: up to [`Device::queue_size_max`]; of a split ring a power of two.
    pub size: u16,
    /// Where to go on. Split: the index of the next available entry, in 16 bits. Packed: bits 0–14 the next available
    /// descriptor, bit 15 its wrap counter, bits 16–30 the next used, bit 31 its wrap counter.
    pub base: u32,
    /// Negotiated features, transport and device, without VHOST_USER_F_PROTOCOL_FEATURES.
    pub features: u64,
    /// Where the rings lie.
    pub rings: Rings,
    /// The guest's memory.
    pub memory: Arc<MemTable>,
    /// Readable when the guest has made buffers available. `None`: the queue is to be polled. A kick may
    /// have been missed before the start: look at the ring once.
    pub kick: Option<EventFd>,
    /// Written to when the guest is to be told of used buffers. `None`: the guest polls.
    pub call: Option<EventFd>,
    /// Written to when the queue is broken.
    pub err: Option<EventFd>,
    /// The queue's part of the region that the front-end keeps over our restarts ("Inflight I/O tracking"), of
    /// `aryk_virtqueue::inflight_len` bytes. Its contents are anybody's guess.
    pub inflight: Option<GuestArea>,
    /// Set while the guest migrates.
    pub log: Option<QueueLog>,
}

/// A new epoch of the guest's memory, while queues run.
#[derive(Clone, Debug)]
pub struct MemoryChange {
    /// The new table; regions that stayed have the mappings that they had.
    pub memory: Arc<MemTable>,
    /// Each running queue, by index, and where its rings lie now.
    pub rings: Vec<(u16, Rings)>,
}

/// A virtio device, as its session sees it.
///
/// A queue runs between [`Device::start_queue`] and [`Device::stop_queue`]; the session calls the one
/// when the front-end has started *and* enabled it, with all that it needs to run, and the other
/// when that ends or the front-end is gone. A queue whose setup changes is stopped and started again.
/// The futures need not be `Send`: a session never leaves its thread. One session exists at a time.
#[expect(async_fn_in_trait, reason = "sessions live on one thread; their futures are never sent")]
pub trait Device: 'static {
    /// Features of the device type. Those of rings and transport are the session's.
    fn features(&self) -> u64;

    /// Whether its queues can be packed rings: if so, VIRTIO_F_RING_PACKED is offered.
    fn packed(&self) -> bool {
        false
    }

    /// Whether its queues keep track of their requests in [`QueueSetup::inflight`]: if so, INFLIGHT_SHMFD is offered.
    fn tracks_inflight(&self) -> bool {
        false
    }

    /// Whether its queues mark what they write in [`QueueSetup::log`]: if so, VHOST_F_LOG_ALL is offered, without which
    /// guests cannot migrate.
    fn logs_writes(&self) -> bool {
        false
    }

    /// Queues that a front-end may use, 1 to 256.
    fn num_queues(&self) -> u16;

    /// Descriptors of the largest queue that a front-end may have: what a queue can make us hold, and do when its requests are
    /// aborted or its guest's memory changes,
    /// goes by its size.
    fn queue_size_max(&self) -> u16;

    /// The device's configuration space, as it is now, at most [`crate::CONFIG_MAX`] bytes.
    fn config(&self) -> Vec<u8>;

    /// The driver writes `data` at `offset` of the configuration space.
    ///
    /// # Errors
    /// If any of these bytes cannot be written, or the value is wrong.
    fn set_config(&self, offset: u32, data: &[u8]) -> Result<(), DeviceError> {
        let _ = (offset, data);
        Err("the configuration space is read-only".into())
    }

    /// A front-end has connected; `session` is the way to speak to it.
    fn connected(&self, session: SessionHandle) {
        let _ = session;
    }

    /// The front-end is gone. All queues have been stopped.
    fn disconnected(&self) {}

    /// Starts a queue that does not run. It is treated as kicked, and its guest is signalled once: a kick or a call
    /// may have been lost while it did not run.
    ///
    /// # Errors
    /// If it cannot run; it stays stopped. A device that waits for a store gives up at [`SessionHandle::ending`].
    async fn start_queue(&self, index: u16, setup: QueueSetup) -> Result<(), DeviceError>;

    /// Stops a running queue: takes no more from it, and waits until all that it took has been given back as used.
    /// Returns where another back-end, or a later start, goes on, as [`QueueSetup::base`] has it.
    async fn stop_queue(&self, index: u16) -> u32;

    /// Makes all running queues see a new memory table. Returns when each of them does; requests in flight that use
    /// removed memory keep the old one. The session itself waits until nobody holds a removed region.
    async fn set_memory(&self, change: MemoryChange);

    /// Replaces the call fd of a running queue. The guest is signalled once on the new one.
    async fn set_call(&self, index: u16, call: Option<EventFd>);

    /// Replaces the error fd of a running queue.
    async fn set_err(&self, index: u16, err: Option<EventFd>);

    /// Memory that was removed has been in use by requests for a second, and the front-end waits for it: what holds it is to be
    /// given up, as far as that can be done. Called once for each removal.
    async fn revoke_memory(&self) {}

    /// A running queue is to mark what it writes, from now on, in another log or no more. When the future is ready the old log
    /// is not written to any more, and all that is completed from then on is in the new one. Called only if
    /// [`Device::logs_writes`].
    async fn set_log(&self, index: u16, log: Option<QueueLog>) {
        let _ = (index, log);
    }
}

#[derive(Debug)]
pub(crate) enum Event {
    /// The device can no longer serve this front-end.
    Failed(String),
    /// The controller is being removed.
    Stop,
    /// The configuration space has changed.
    ConfigChanged,
}

#[derive(Debug, Default)]
struct Shared {
    wake: Notify,
    config_changed: AtomicBool,
    end: Mutex<Option<Event>>,
    /// Whether the session is to end, or its front-end has left.
    ending: watch::Sender<bool>,
}

/// A session, as its device sees it. Any thread may use it; after the session's end it does nothing.
#[derive(Clone, Debug, Default)]
pub struct SessionHandle(Arc<Shared>);

impl SessionHandle {
    /// Ends the session, because its front-end has done something that makes going on impossible, such as
    /// truncating its memory. The first reason counts. Queues are stopped as after a disconnect.
    pub fn end(&self, reason: impl Into<String>) {
        self.end_with(Event::Failed(reason.into()));
    }

    /// Tells the front-end, if it can be told, that the configuration space has changed.
    pub fn config_changed(&self) {
        self.0.config_changed.store(true, Ordering::Release);
        self.0.wake.notify_one();
    }

    pub(crate) fn stop(&self) {
        self.end_with(Event::Stop);
    }

    fn end_with(&self, event: Event) {
        self.0.end.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(event);
        self.0.ending.send_replace(true);
        self.0.wake.notify_one();
    }

    /// Waits until the session is to end or its front-end has left: a device that waits for something before it starts a queue stops waiting then.
    pub async fn ending(&self) {
        // The sender is kept by this handle.
        let _ = self.0.ending.subscribe().wait_for(|ending| *ending).await;
    }

    pub(crate) fn is_ending(&self) -> bool {
        *self.0.ending.borrow()
    }

    pub(crate) fn front_end_left(&self) {
        self.0.ending.send_replace(true);
    }

    /// The next thing asked of the session. Cancelling the future loses nothing.
    pub(crate) async fn event(&self) -> Event {
        loop {
            if let Some(end) = self.0.end.lock().unwrap_or_else(PoisonError::into_inner).take() {
                return end;
            }
            if self.0.config_changed.swap(false, Ordering::Acquire) {
                return Event::ConfigChanged;
            }
            self.0.wake.notified().await;
        }
    }
}
