//! The running queues of a controller. Control context.

use crate::DeviceQueue;
use crate::queue::Running;
use aryk_reactor::{RootRef, SleepPolicy};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use tokio::sync::{Mutex, MutexGuard};

/// The running queues of a controller, by index.
pub struct Queues<Q> {
    running: RefCell<BTreeMap<u16, Running<Q>>>,
    still: Mutex<()>,
    /// `None`: the daemon's policy.
    sleep_policy: Cell<Option<SleepPolicy>>,
}

impl<Q> fmt::Debug for Queues<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.running.borrow().keys()).finish()
    }
}

impl<Q: DeviceQueue> Queues<Q> {
    /// No queues yet.
    pub(crate) const fn new() -> Self {
        Self {
            running: RefCell::new(BTreeMap::new()),
            still: Mutex::const_new(()),
            sleep_policy: Cell::new(None),
        }
    }

    /// Waits until no queue is moving. While the guard is held, no queue begins to move, so a call reaches every queue.
    pub async fn hold_still(&self) -> MutexGuard<'_, ()> {
        self.still.lock().await
    }

    /// Adds a queue that has just started.
    pub(crate) async fn add(&self, index: u16, queue: Running<Q>) {
        self.apply_sleep_policy(&queue.root).await;
        let before = self.running.borrow_mut().insert(index, queue);
        assert!(before.is_none(), "queue {index} starts while it runs");
    }

    /// Sets the sleep policy of all queues, also of those that start later; `None`: the daemon's policy.
    pub async fn set_sleep_policy(&self, policy: Option<SleepPolicy>) {
        let _still = self.hold_still().await;
        self.sleep_policy.set(policy);
        for (_, queue) in self.all() {
            apply_sleep_policy(&queue, policy).await;
        }
    }

    /// The sleep policy of the queues; `None`: the daemon's policy.
    pub fn sleep_policy(&self) -> Option<SleepPolicy> {
        self.sleep_policy.get()
    }

    /// Applies the sleep policy to a queue that has just started on its reactor, with the daemon's policy.
    async fn apply_sleep_policy(&self, queue: &RootRef<Q>) {
        if let Some(policy) = self.sleep_policy() {
            apply_sleep_policy(queue, Some(policy)).await;
        }
    }

    /// Removes a queue that has stopped.
    pub(crate) fn remove(&self, index: u16) {
        let removed = self.running.borrow_mut().remove(&index);
        assert!(removed.is_some(), "queue {index} stops, but does not run");
    }

    /// The queue of that index, if it runs.
    pub fn get(&self, index: u16) -> Option<RootRef<Q>> {
        self.running.borrow().get(&index).map(|queue| queue.root.clone())
    }

    /// The index of the queue whose thread has that number.
    pub(crate) fn of_thread(&self, thread: u64) -> Option<u16> {
        self.running.borrow().iter().find(|(_, queue)| queue.thread == thread).map(|(&index, _)| index)
    }

    /// All running queues, by index.
    pub fn all(&self) -> Vec<(u16, RootRef<Q>)> {
        self.running.borrow().iter().map(|(&index, queue)| (index, queue.root.clone())).collect()
    }

    /// The indexes of all running queues, and the cores that they run on.
    pub fn cores(&self) -> Vec<(u16, u16)> {
        self.running.borrow().iter().map(|(&index, queue)| (index, queue.root.handle().core())).collect()
    }

    pub(crate) async fn has_moved(&self, index: u16, root: RootRef<Q>) {
        self.apply_sleep_policy(&root).await;
        self.running.borrow_mut().get_mut(&index).expect("queues do not end while they move").root = root;
    }
}

async fn apply_sleep_policy<Q: DeviceQueue>(queue: &RootRef<Q>, policy: Option<SleepPolicy>) {
    // A queue that has ended needs none.
    let _ = queue.call(move |queue, cx| cx.set_sleep_policy(queue.guest().id, policy)).await;
}
