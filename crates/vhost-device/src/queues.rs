//! The running queues of a controller, and the moves of a queue to another reactor. Control context.

use crate::Alarm;
use crate::moving::{MOVE_PATIENCE, Movable, MoveError, Moved, PREPARE_PATIENCE};
use aryk_bdev::{Descriptor, OpenError, OpeningId};
use aryk_reactor::{CoreSet, Gone, Handle, Hold, Reactors, RootRef, SleepPolicy};
use aryk_vhost_user::SessionHandle;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::timeout;

/// A controller whose queues can move.
pub trait Host: 'static {
    /// Its queues.
    type Queue: Movable;

    /// The running queues.
    fn queues(&self) -> &Queues<Self::Queue>;

    /// The disks that a queue opens its channels on, at this time.
    fn disks(&self) -> <Self::Queue as Movable>::Disks;

    /// The disks on which the queue `index` opens a channel, as openings: each prepares a reactor first.
    fn open_disks(&self, index: u16) -> Vec<Descriptor>;

    /// The session that the queues belong to.
    fn session(&self) -> Option<SessionHandle>;

    /// The function that a queue of the session calls when it cannot go on: it ends the session.
    fn alarm(&self) -> Alarm {
        let session = self.session();
        Box::new(move |trouble| {
            if let Some(session) = &session {
                session.end(trouble.to_string());
            }
        })
    }
}

/// Why the disks of a queue are not ready for its start on a reactor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotReady {
    /// A disk could not prepare the reactor.
    #[error("cannot open the disk for a queue: {0}")]
    Disk(#[from] OpenError),
    /// The session ended first.
    #[error("the session ended before the disks were ready")]
    Ending,
}

/// The running queues of a controller.
pub struct Queues<Q> {
    running: RefCell<BTreeMap<u16, Running<Q>>>,
    still: Mutex<()>,
    /// `None`: the daemon's policy.
    sleep_policy: Cell<Option<SleepPolicy>>,
    reactors: Rc<Reactors>,
}

/// A running queue.
pub struct Running<Q> {
    /// The queue.
    pub root: RootRef<Q>,
    /// The number of its thread.
    pub thread: u64,
}

impl<Q> fmt::Debug for Queues<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.running.borrow().keys()).finish()
    }
}

impl<Q> fmt::Debug for Running<Q> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("thread", &self.thread).finish_non_exhaustive()
    }
}

impl<Q: Movable> Queues<Q> {
    /// No queues yet; queues will run on some of `reactors`.
    pub const fn new(reactors: Rc<Reactors>) -> Self {
        Self {
            running: RefCell::new(BTreeMap::new()),
            still: Mutex::const_new(()),
            sleep_policy: Cell::new(None),
            reactors,
        }
    }

    /// Waits until no queue is moving. While the guard is held, no queue begins to move, so a call reaches every queue.
    pub async fn hold_still(&self) -> MutexGuard<'_, ()> {
        self.still.lock().await
    }

    /// Waits until the disks of the queue `index` of `host` have prepared a reactor, and returns with the queues held still, for
    /// the caller to open channels. The queues are not held still while the disks prepare. A disk that is being removed counts as
    /// prepared, because no channel opens on it.
    ///
    /// # Errors
    /// A disk could not prepare the reactor.
    async fn hold_prepared(
        &self,
        host: &impl Host<Queue = Q>,
        index: u16,
        reactor: &Handle,
    ) -> Result<MutexGuard<'_, ()>, OpenError> {
        // Only the disk that prepares is kept open: the others can be removed meanwhile.
        let mut prepared: Vec<OpeningId> = Vec::new();
        loop {
            let still = self.hold_still().await;
            let disks = host.open_disks(index);
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

    /// Starts the queue `index` of `host` on a reactor by `start`, and adds it, when the disks of the queue have prepared the
    /// reactor. The queues are held still while `start` runs. So a call to all queues reaches this one too, and a disk that is
    /// removed while the queue opens it does not stay open.
    ///
    /// # Errors
    /// [`NotReady`], and those of `start`.
    pub async fn start<E: From<NotReady>>(
        &self,
        host: &impl Host<Queue = Q>,
        index: u16,
        reactor: &Handle,
        start: impl Future<Output = Result<Running<Q>, E>>,
    ) -> Result<(), E> {
        let _still = self.hold_for_start(host, index, reactor).await?;
        let queue = start.await?;
        self.apply_sleep_policy(&queue.root).await;
        self.running.borrow_mut().insert(index, queue);
        Ok(())
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

    /// Waits until the disks of the queue `index` of `host` have prepared a reactor for its start, and returns with the queues
    /// held still. The end of the session cancels that.
    ///
    /// # Errors
    /// [`NotReady`].
    async fn hold_for_start(
        &self,
        host: &impl Host<Queue = Q>,
        index: u16,
        reactor: &Handle,
    ) -> Result<MutexGuard<'_, ()>, NotReady> {
        let session = host.session();
        let ending = async {
            match session {
                Some(session) => session.ending().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = ending => Err(NotReady::Ending),
            held = self.hold_prepared(host, index, reactor) => Ok(held?),
        }
    }

    /// Removes a queue that has stopped.
    pub fn remove(&self, index: u16) {
        self.running.borrow_mut().remove(&index);
    }

    /// The queue of that index, if it runs.
    pub fn get(&self, index: u16) -> Option<RootRef<Q>> {
        self.running.borrow().get(&index).map(|queue| queue.root.clone())
    }

    /// All running queues, by index.
    pub fn all(&self) -> Vec<(u16, RootRef<Q>)> {
        self.running.borrow().iter().map(|(&index, queue)| (index, queue.root.clone())).collect()
    }

    /// The indexes of all running queues, and the cores that they run on.
    pub fn cores(&self) -> Vec<(u16, u16)> {
        self.running.borrow().iter().map(|(&index, queue)| (index, queue.root.handle().core())).collect()
    }

    async fn has_moved(&self, index: u16, root: RootRef<Q>) {
        self.apply_sleep_policy(&root).await;
        self.running.borrow_mut().get_mut(&index).expect("queues do not end while they move").root = root;
    }
}

async fn apply_sleep_policy<Q: Movable>(queue: &RootRef<Q>, policy: Option<SleepPolicy>) {
    // A queue that has ended needs none.
    let _ = queue.call(move |queue, cx| cx.set_sleep_policy(queue.line().id, policy)).await;
}

/// A queue that is to run on another reactor.
pub struct Mover<H> {
    host: Rc<H>,
    index: u16,
}

impl<H> fmt::Debug for Mover<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mover").field("index", &self.index).finish_non_exhaustive()
    }
}

impl<H: Host> Mover<H> {
    /// The queue of `host` whose thread has that number, if there is one.
    pub fn find(host: &Rc<H>, thread: u64) -> Option<Self> {
        let running = host.queues().running.borrow();
        let (&index, _) = running.iter().find(|(_, queue)| queue.thread == thread)?;
        Some(Self { host: Rc::clone(host), index })
    }

    /// Makes the queue run on one of `cores` from now on.
    ///
    /// # Errors
    /// [`MoveError`].
    pub async fn place(self, cores: CoreSet) -> Result<(), MoveError> {
        to_the_end(async move { self.stay_on(cores).await }).await
    }

    /// Moves the queue to another reactor. Fails if the requests that it has in flight do not complete within `patience`.
    ///
    /// # Errors
    /// [`MoveError`].
    pub async fn move_to(self, to: Hold, patience: Duration) -> Result<(), MoveError> {
        to_the_end(async move { self.go(to, patience).await }).await
    }

    async fn stay_on(&self, cores: CoreSet) -> Result<(), MoveError> {
        let queues = self.host.queues();
        if !queues.reactors.is_any_on(&cores) {
            return Err(MoveError::Cores(cores));
        }
        let queue = queues.get(self.index).ok_or(MoveError::Ending)?;
        if !cores.contains(queue.handle().core()) {
            self.go(queues.reactors.least_loaded(Some(&cores)), MOVE_PATIENCE).await?;
        }
        let _still = queues.hold_still().await;
        let queue = queues.get(self.index).ok_or(MoveError::Ending)?;
        let told = queue.call(move |queue, cx| cx.set_thread_cores(queue.line().thread(), cores)).await;
        told.map_err(|Gone| MoveError::Ending)
    }

    /// The future must be polled to its end: callers that want the queues still wait for it.
    async fn go(&self, to: Hold, patience: Duration) -> Result<(), MoveError> {
        let queues = self.host.queues();
        if *queues.get(self.index).ok_or(MoveError::Ending)?.handle() == *to {
            return Ok(());
        }
        // The queue runs while its disks prepare the other reactor.
        let prepared = queues.hold_prepared(&*self.host, self.index, &to);
        let _still = timeout(PREPARE_PATIENCE, prepared)
            .await
            .map_err(|_| MoveError::NotReady)?
            .map_err(|error| MoveError::Open(error.to_string()))?;
        let queue = queues.get(self.index).ok_or(MoveError::Ending)?;
        if *queue.handle() == *to {
            return Ok(());
        }
        // The queue may come back.
        let _home = queues.reactors.hold(queue.handle()).ok_or(MoveError::Ending)?;
        let there = (Handle::clone(&to), self.host.disks());
        let begun = queue.call(move |queue, cx| queue.begin_move(there, patience, cx)).await;
        let ends = begun.ok().flatten().ok_or(MoveError::Ending)?;
        match ends.await {
            Ok(Moved::There(root)) => {
                queues.has_moved(self.index, root).await;
                Ok(())
            }
            Ok(Moved::Back(root, why)) => {
                queues.has_moved(self.index, root).await;
                Err(MoveError::Open(why))
            }
            Ok(Moved::TooSlow) => Err(MoveError::TooSlow),
            Err(_) => {
                if let Some(session) = self.host.session() {
                    session.end(format!("queue {} was lost on its way to another core", self.index));
                }
                Err(MoveError::Ending)
            }
        }
    }
}

/// Polls `moving` to its end, also if the caller is dropped.
async fn to_the_end(moving: impl Future<Output = Result<(), MoveError>> + 'static) -> Result<(), MoveError> {
    tokio::task::spawn_local(moving).await.unwrap_or(Err(MoveError::Ending))
}
