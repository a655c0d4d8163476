//! The interface of a device type that is served over vhost-user, and the device's handle to its session.
//!
//! Control context: all functions of [`Device`] are called on the thread that serves the session, one call at a time for one
//! device. [`SessionHandle`] may be used from any thread.

use aryk_dma::{DirtyLog, GuestArea, MemTable};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{Notify, watch};

/// An error of a device. Its text is written to the log.
pub type DeviceError = Box<dyn std::error::Error + Send + Sync>;

/// The three parts of a ring, checked to lie in guest memory with the lengths and alignments of virtio 1.2, sections 2.7
/// (split) and 2.8 (packed, if VIRTIO_F_RING_PACKED was negotiated).
#[derive(Clone, Debug)]
pub struct Rings {
    /// The descriptors: 16 bytes each. Split: the table; packed: the ring.
    pub desc: GuestArea,
    /// The part that the driver writes. Split: the available ring, with `used_event` if VIRTIO_F_EVENT_IDX was negotiated.
    /// Packed: the driver's event suppression, 4 bytes.
    pub driver: GuestArea,
    /// The part that the device writes. Split: the used ring, with `avail_event` if VIRTIO_F_EVENT_IDX was negotiated. Packed:
    /// the device's event suppression, 4 bytes.
    pub device: GuestArea,
}

/// The log in which a queue marks the guest memory that it writes, during a migration.
#[derive(Clone, Debug)]
pub struct QueueLog {
    /// The log for the memory that the queue's requests write. Each write is marked after it was made.
    pub log: Arc<DirtyLog>,
    /// Guest addresses and lengths of the parts of the ring that the device writes.
    pub(crate) ring: [(u64, u64); 2],
}

impl PartialEq for QueueLog {
    /// Whether both mark the same addresses in the same log.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.log, &other.log) && self.ring == other.ring
    }
}

impl QueueLog {
    /// A log for writes to guest memory, and to the ring at these guest addresses.
    pub const fn new(log: Arc<DirtyLog>, ring: [(u64, u64); 2]) -> Self {
        Self { log, ring }
    }

    /// Marks the ring. Must be called after each publication of used buffers and after each change of event suppression, since
    /// both write to the ring. Marks the whole ring, which covers few pages.
    pub fn mark_ring(&self) {
        for (addr, len) in self.ring {
            self.log.mark(addr, len);
        }
    }
}

/// An eventfd of the front-end, which shares its open file description: the front-end can make a write block, so a plain `write`
/// is not allowed.
pub type EventFd = Arc<OwnedFd>;

/// Everything that a device needs to run a queue.
#[derive(Clone, Debug)]
pub struct QueueSetup {
    /// Number of descriptors: up to [`Device::queue_size_max`]; a power of two for a split ring.
    pub size: u16,
    /// Position at which the queue resumes. Split: the index of the next available entry, in 16 bits. Packed: bits 0–14 the next
    /// available descriptor, bit 15 its wrap counter, bits 16–30 the next used descriptor, bit 31 its wrap counter.
    pub base: u32,
    /// Negotiated features, transport and device, without VHOST_USER_F_PROTOCOL_FEATURES.
    pub features: u64,
    /// The addresses of the rings.
    pub rings: Rings,
    /// The guest's memory.
    pub memory: Arc<MemTable>,
    /// Becomes readable when the guest has made buffers available. `None`: the device must poll the queue. A kick may have been
    /// missed before the start: check the ring once.
    pub kick: Option<EventFd>,
    /// Written to notify the guest of used buffers. `None`: the guest polls.
    pub call: Option<EventFd>,
    /// Written when the queue has failed.
    pub err: Option<EventFd>,
    /// The queue's part of the region that the front-end keeps while the back-end restarts ("Inflight I/O tracking"), of
    /// `aryk_virtqueue::inflight_len` bytes. Its contents are not trusted.
    pub inflight: Option<GuestArea>,
    /// Set during a migration of the guest.
    pub log: Option<QueueLog>,
}

/// A new epoch of the guest's memory, while queues run.
#[derive(Clone, Debug)]
pub struct MemoryChange {
    /// The new table; regions that have not changed keep their mappings.
    pub memory: Arc<MemTable>,
    /// Each running queue, by index, and the new addresses of its rings.
    pub rings: Vec<(u16, Rings)>,
}

/// A virtio device, as a session uses it.
///
/// A queue runs between [`Device::start_queue`] and [`Device::stop_queue`]. The session calls `start_queue` when the front-end
/// has started *and* enabled the queue and has sent its complete setup, and `stop_queue` when that ends or the front-end
/// disconnects. A queue whose setup changes is stopped and started again. The futures need not be `Send`: a session never
/// leaves its thread. A device has one session at a time.
#[expect(async_fn_in_trait, reason = "sessions live on one thread; their futures are never sent")]
pub trait Device: 'static {
    /// Features of the device type. The session adds those of rings and transport.
    fn features(&self) -> u64;

    /// Whether the queues can be packed rings: if so, VIRTIO_F_RING_PACKED is offered.
    fn packed(&self) -> bool {
        false
    }

    /// Whether the queues track their requests in [`QueueSetup::inflight`]: if so, INFLIGHT_SHMFD is offered.
    fn tracks_inflight(&self) -> bool {
        false
    }

    /// Whether the queues mark their writes in [`QueueSetup::log`]: if so, VHOST_F_LOG_ALL is offered, without which guests
    /// cannot migrate.
    fn logs_writes(&self) -> bool {
        false
    }

    /// Number of queues that a front-end may use, 1 to 256.
    fn num_queues(&self) -> u16;

    /// The maximum number of descriptors of a queue. The queue size determines how much memory a queue can make the back-end
    /// hold, and how much work an abort of its requests or a change of its guest's memory takes.
    fn queue_size_max(&self) -> u16;

    /// The current configuration space of the device, at most [`crate::CONFIG_MAX`] bytes.
    fn config(&self) -> Vec<u8>;

    /// The driver writes `data` at `offset` of the configuration space.
    ///
    /// # Errors
    /// One of these bytes is read-only, or the value is invalid.
    fn set_config(&self, offset: u32, data: &[u8]) -> Result<(), DeviceError> {
        let _ = (offset, data);
        Err("the configuration space is read-only".into())
    }

    /// A front-end has connected; `session` is the handle to it.
    fn connected(&self, session: SessionHandle) {
        let _ = session;
    }

    /// The front-end has disconnected. All queues have been stopped.
    fn disconnected(&self) {}

    /// Starts a stopped queue. The device treats the queue as kicked, and signals its guest once: a kick or a call may have been
    /// lost while the queue was stopped.
    ///
    /// # Errors
    /// The queue cannot run; it stays stopped. A device that waits for a store stops waiting at [`SessionHandle::ending`] and
    /// at [`Device::cancel_start`].
    async fn start_queue(&self, index: u16, setup: QueueSetup) -> Result<(), DeviceError>;

    /// The front-end stops a queue that is starting: a device that waits for a store must stop waiting. The session awaits the
    /// end of `start_queue`, whose future it polls beside the other calls.
    fn cancel_start(&self, index: u16) {
        let _ = index;
    }

    /// Stops a running queue: takes no more requests from it, and waits until all taken requests have been returned as used.
    /// Returns the position at which another back-end or a later start resumes, in the format of [`QueueSetup::base`].
    ///
    /// After [`SessionHandle::ending`], the device may return before these requests have completed, if the queue no longer
    /// touches the ring, and if [`Device::revoke_memory`] is true. At the end of a session, all its queues stop at the same time.
    async fn stop_queue(&self, index: u16) -> u32;

    /// Registers the guest's new memory with the devices that access it by themselves. The session awaits this before any queue
    /// uses the memory and before it answers the front-end, but drops the future when the session must end. The registration of
    /// a mapping ends with the mapping.
    async fn register_memory(&self, memory: &MemTable) {
        let _ = memory;
    }

    /// Makes all running queues use a new memory table. Returns when each queue does; requests in flight that use removed memory
    /// keep the old table. The session itself waits until a removed region is no longer in use.
    async fn set_memory(&self, change: MemoryChange);

    /// Replaces the call fd of a running queue. The guest is signalled once on the new one.
    async fn set_call(&self, index: u16, call: Option<EventFd>);

    /// Replaces the error fd of a running queue.
    async fn set_err(&self, index: u16, err: Option<EventFd>);

    /// Requests have used removed memory for a second, and the front-end waits for its release: the device must abort the
    /// requests that hold it, as far as possible. Returns whether the session may replace the memory under those that remain
    /// ([`aryk_dma::Mapping::revoke`]). Called again until then, or until no request uses the memory.
    async fn revoke_memory(&self) -> bool {
        false
    }

    /// Makes a running queue mark its writes in another log, or in none. When the future completes, the queue no longer writes to
    /// the old log, and marks all later completions in the new one. Called only if [`Device::logs_writes`].
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
    /// Whether the session must end, or its front-end has disconnected.
    ending: watch::Sender<bool>,
}

/// The device's handle to its session. Usable from any thread; after the end of the session its methods do nothing.
#[derive(Clone, Debug, Default)]
pub struct SessionHandle(Arc<Shared>);

impl SessionHandle {
    /// Ends the session after a fault of the front-end that makes it impossible to continue, such as a truncation of guest
    /// memory. The first reason is reported. Queues are stopped as after a disconnect.
    pub fn end(&self, reason: impl Into<String>) {
        self.end_with(Event::Failed(reason.into()));
    }

    /// Notifies the front-end that the configuration space has changed, if it accepts such messages.
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

    /// Waits until the session must end or its front-end has disconnected. A device that waits for a resource before it starts
    /// a queue must then stop waiting.
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

    /// The next event of the session. The future can be cancelled without loss.
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
