//! A device that checks the guarantees of [`Device`]. When a queue is stopped, the device "serves" it by returning all
//! available descriptors as used.

use aryk_vhost_user::{Device, DeviceError, EventFd, MemoryChange, QueueLog, QueueSetup, SessionHandle};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use tokio::sync::Notify;

/// The calls that the device received, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceCall {
    Start(u16),
    Stop(u16),
    Memory(usize),
    CallFd(u16, bool),
    ErrFd(u16, bool),
    Log(u16, bool),
}

#[derive(Default)]
pub struct Mock {
    pub calls: RefCell<Vec<DeviceCall>>,
    pub running: RefCell<BTreeMap<u16, QueueSetup>>,
    pub session: RefCell<Option<SessionHandle>>,
    /// While set, a queue stops only after a notification.
    pub slow_stop: RefCell<Option<Rc<Notify>>>,
    pub refuse_start: Cell<bool>,
    /// While set, a queue waits to start until `ready`; if its session ends or its start is cancelled before, the start fails.
    pub endless_start: Cell<bool>,
    /// Whether a queue has begun to wait to start.
    pub has_waited: Cell<bool>,
    pub ready: Notify,
    pub cancelled: Notify,
    /// How often the session asked the device to release removed memory.
    pub revoked: Cell<u32>,
    /// Whether memory may be replaced under its users.
    pub lets_memory_go: Cell<bool>,
    pub packed: Cell<bool>,
    pub tracks_inflight: Cell<bool>,
    pub logs_writes: Cell<bool>,
    pub config: RefCell<Vec<u8>>,
}

impl Mock {
    pub fn take_calls(&self) -> Vec<DeviceCall> {
        self.calls.take()
    }
}

fn served(queue: &QueueSetup) -> u32 {
    if let Some(log) = &queue.log {
        log.mark_ring();
    }
    if is_packed(queue) {
        // As if three descriptors had been made available and used.
        return queue.base + 0x3_0003;
    }
    let idx = queue.rings.driver.load_u16(2, Ordering::Acquire);
    queue.rings.device.store_u16(2, idx, Ordering::Release);
    idx.into()
}

fn is_packed(queue: &QueueSetup) -> bool {
    queue.features & aryk_vhost_user::F_RING_PACKED != 0
}

fn check(queue: &QueueSetup) {
    let size = u64::from(queue.size);
    let rings = &queue.rings;
    assert_eq!(rings.desc.len(), 16 * size);
    assert!(rings.desc.is_aligned(16), "descriptors");
    if is_packed(queue) {
        assert!((1..=32768).contains(&size));
        assert_eq!((rings.driver.len(), rings.device.len()), (4, 4));
        assert!(rings.driver.is_aligned(4) && rings.device.is_aligned(4), "event suppression");
    } else {
        assert!(queue.size.is_power_of_two() && queue.base <= 0xffff);
        let event = if queue.features & aryk_vhost_user::F_EVENT_IDX != 0 { 2 } else { 0 };
        assert_eq!(rings.driver.len(), 4 + 2 * size + event);
        assert_eq!(rings.device.len(), 4 + 8 * size + event);
        assert!(rings.driver.is_aligned(2) && rings.device.is_aligned(4), "rings");
    }
    assert_eq!(queue.features & (1 << 30), 0);
}

impl Device for Mock {
    fn features(&self) -> u64 {
        0b110
    }

    fn packed(&self) -> bool {
        self.packed.get()
    }

    fn tracks_inflight(&self) -> bool {
        self.tracks_inflight.get()
    }

    fn logs_writes(&self) -> bool {
        self.logs_writes.get()
    }

    fn num_queues(&self) -> u16 {
        4
    }

    fn queue_size_max(&self) -> u16 {
        1024
    }

    fn config(&self) -> Vec<u8> {
        self.config.borrow().clone()
    }

    fn set_config(&self, offset: u32, data: &[u8]) -> Result<(), DeviceError> {
        let mut config = self.config.borrow_mut();
        let end = offset as usize + data.len();
        config.get_mut(offset as usize..end).ok_or("no such field")?.copy_from_slice(data);
        Ok(())
    }

    fn connected(&self, session: SessionHandle) {
        let old = self.session.replace(Some(session));
        assert!(old.is_none(), "two sessions at once");
    }

    fn disconnected(&self) {
        assert!(self.running.borrow().is_empty(), "disconnected with queues running");
        assert!(self.session.take().is_some());
    }

    async fn start_queue(&self, index: u16, setup: QueueSetup) -> Result<(), DeviceError> {
        tokio::task::yield_now().await;
        if self.refuse_start.get() {
            return Err("no room".into());
        }
        if self.endless_start.get() {
            let session = self.session.borrow().clone().expect("connected");
            self.has_waited.set(true);
            tokio::select! {
                () = session.ending() => return Err("given up".into()),
                () = self.cancelled.notified() => return Err("cancelled".into()),
                () = self.ready.notified() => {}
            }
            if self.refuse_start.get() {
                return Err("no room".into());
            }
        }
        check(&setup);
        let old = self.running.borrow_mut().insert(index, setup);
        assert!(old.is_none(), "queue {index} was started twice");
        self.calls.borrow_mut().push(DeviceCall::Start(index));
        Ok(())
    }

    fn cancel_start(&self, _: u16) {
        self.cancelled.notify_waiters();
    }

    async fn stop_queue(&self, index: u16) -> u32 {
        let gate = self.slow_stop.borrow().clone();
        match gate {
            Some(gate) => gate.notified().await,
            None => tokio::task::yield_now().await,
        }
        let queue = self.running.borrow_mut().remove(&index).expect("a running queue");
        self.calls.borrow_mut().push(DeviceCall::Stop(index));
        served(&queue)
    }

    async fn set_memory(&self, change: MemoryChange) {
        tokio::task::yield_now().await;
        let mut running = self.running.borrow_mut();
        let listed = change.rings.iter().map(|(index, _)| *index);
        assert!(listed.eq(running.keys().copied()), "the change lists each running queue");
        for (index, rings) in change.rings {
            let queue = running.get_mut(&index).expect("checked above");
            queue.rings = rings;
            queue.memory = change.memory.clone();
            check(queue);
        }
        self.calls.borrow_mut().push(DeviceCall::Memory(change.memory.regions().len()));
    }

    async fn set_call(&self, index: u16, call: Option<EventFd>) {
        self.calls.borrow_mut().push(DeviceCall::CallFd(index, call.is_some()));
        self.running.borrow_mut().get_mut(&index).expect("a running queue").call = call;
    }

    async fn set_err(&self, index: u16, err: Option<EventFd>) {
        self.calls.borrow_mut().push(DeviceCall::ErrFd(index, err.is_some()));
        self.running.borrow_mut().get_mut(&index).expect("a running queue").err = err;
    }

    async fn revoke_memory(&self) -> bool {
        self.revoked.set(self.revoked.get() + 1);
        self.lets_memory_go.get()
    }

    async fn set_log(&self, index: u16, log: Option<QueueLog>) {
        tokio::task::yield_now().await;
        self.calls.borrow_mut().push(DeviceCall::Log(index, log.is_some()));
        self.running.borrow_mut().get_mut(&index).expect("a running queue").log = log;
    }
}
