//! The handle of a reactor, by which other threads send it messages. Any context.

use crate::account::{Account, Running};
use crate::mailbox::{Mailbox, Refused, Taken};
use crate::trace::{Layer, TraceReader};
use crate::{Clock, Cx, ReactorStats, Root, RootId};
use aryk_uring::Completion;
use async_task::Runnable;
use futures_channel::oneshot;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Wake, Waker};
use std::time::Duration;

/// A message: a closure that runs on the reactor.
pub(crate) type Message = Box<dyn FnOnce(&mut Cx) + Send>;

/// The reactor has ended, or the root was removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the reactor has ended, or the object was removed")]
pub struct Gone;

/// The number of messages that a reactor's mailbox can hold.
const MAILBOX: usize = 1024;

/// The state that a reactor and its handles share.
pub(crate) struct Shared {
    pub core: u16,
    pub mailbox: Mailbox<Message>,
    /// Wakes a sleeping reactor.
    pub wake_fd: OwnedFd,
    /// Tasks that are ready to be polled; `None` when the reactor has ended.
    runnable: Mutex<Option<Vec<Runnable>>>,
    /// Results of blocking calls.
    results: Mutex<Vec<Completion>>,
    pub account: Account,
    pub clock: Clock,
    pub trace: TraceReader,
    /// Names of roots, pollers and drivers, for the watchdog.
    pub names: Mutex<HashMap<Running, String>>,
    /// Names of the objects of trace records.
    pub objects: Mutex<HashMap<(Layer, u16), String>>,
}

/// The reactor's waker: it makes the reactor check all events that come without a message.
impl Wake for Shared {
    fn wake(self: Arc<Self>) {
        Self::wake_by_ref(&self);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.act_on(self.mailbox.notify());
    }
}

impl Shared {
    fn act_on(&self, taken: Taken) {
        if taken == Taken::MustWake {
            // The write fails only if the counter is saturated; then the reactor is being woken anyway.
            let _ = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes());
        }
    }
}

/// Sends messages to one reactor from any thread. Cheap to clone.
#[derive(Clone)]
pub struct Handle(pub(crate) Arc<Shared>);

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "reactor {}", self.0.core)
    }
}

impl PartialEq for Handle {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Handle {}

/// Locks a mutex that is held for a few instructions only and whose holder does not panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no one panics holding it")
}

impl Handle {
    pub(crate) fn new(core: u16, clock: Clock, trace: TraceReader) -> std::io::Result<Self> {
        Ok(Self(Arc::new(Shared {
            core,
            mailbox: Mailbox::new(MAILBOX),
            wake_fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            runnable: Mutex::new(Some(Vec::new())),
            results: Mutex::default(),
            account: Account::default(),
            clock,
            trace,
            names: Mutex::default(),
            objects: Mutex::default(),
        })))
    }

    /// The core that the reactor runs on.
    pub fn core(&self) -> u16 {
        self.0.core
    }

    /// How the reactor has spent its time.
    pub fn stats(&self) -> ReactorStats {
        self.0.account.read(&self.0.clock)
    }

    /// The longest turn since the last call of this function. Only one caller may use it: the one that watches all reactors.
    pub fn take_longest_turn(&self) -> Duration {
        self.0.account.take_longest_turn()
    }

    /// Number of roots and pollers on the reactor.
    pub fn members(&self) -> u64 {
        self.0.account.members()
    }

    /// A reader of the reactor's trace.
    pub fn trace(&self) -> TraceReader {
        self.0.trace.clone()
    }

    /// The name that [`Cx::name_object`] gave to the object of the trace records with this `layer` and `object`.
    pub fn name_of(&self, layer: Layer, object: u16) -> Option<String> {
        lock(&self.0.objects).get(&(layer, object)).cloned()
    }

    /// Runs `f` on the reactor, and returns its result. Waits while the reactor's mailbox is full.
    ///
    /// # Errors
    /// [`Gone`] if the reactor ends before `f` has run.
    pub async fn call<R, F>(&self, f: F) -> Result<R, Gone>
    where
        R: Send + 'static,
        F: FnOnce(&mut Cx) -> R + Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        // The send fails if the caller was dropped meanwhile; then the result is dropped too.
        self.send(Box::new(move |cx| drop(sender.send(f(cx))))).await?;
        receiver.await.map_err(|_| Gone)
    }

    /// Sends `f` to run on the reactor, without waiting for it to run.
    ///
    /// # Errors
    /// [`Gone`] if the reactor has ended.
    pub async fn cast(&self, f: impl FnOnce(&mut Cx) + Send + 'static) -> Result<(), Gone> {
        self.send(Box::new(f)).await
    }

    pub(crate) async fn send(&self, message: Message) -> Result<(), Gone> {
        let mut message = Some(message);
        std::future::poll_fn(|cx| {
            let unsent = message.take().expect("not polled after it was ready");
            match self.send_or_wait(unsent, cx.waker()) {
                Ok(()) => Poll::Ready(Ok(())),
                Err(Refused::Closed(_)) => Poll::Ready(Err(Gone)),
                Err(Refused::Full(unsent)) => {
                    message = Some(unsent);
                    Poll::Pending
                }
            }
        })
        .await
    }

    pub(crate) fn try_send(&self, message: Message) -> Result<(), Refused<Message>> {
        self.0.mailbox.push(message).map(|taken| self.0.act_on(taken))
    }

    /// Sends `message`; if there is no room, `waker` is woken when there may be room.
    pub(crate) fn send_or_wait(&self, message: Message, waker: &Waker) -> Result<(), Refused<Message>> {
        self.0.mailbox.push_or_wait(message, waker).map(|taken| self.0.act_on(taken))
    }

    /// Makes the reactor check its tasks, bells, results of blocking calls and outgoing messages, which come without a message.
    pub(crate) fn notify(&self) {
        self.0.act_on(self.0.mailbox.notify());
    }

    /// Queues a task of the reactor to be polled.
    pub(crate) fn schedule(&self, runnable: Runnable) {
        match &mut *lock(&self.0.runnable) {
            Some(list) => list.push(runnable),
            // Its future belongs to a thread that has ended, and must not be dropped by another thread.
            None => return std::mem::forget(runnable),
        }
        self.notify();
    }

    /// Takes the tasks that are ready to be polled.
    pub(crate) fn take_runnable(&self, into: &mut Vec<Runnable>) {
        if let Some(list) = &mut *lock(&self.0.runnable) {
            into.append(list);
        }
    }

    /// As [`Handle::take_runnable`], without waiting for the lock: a thread that holds it adds a task, then notifies the reactor.
    pub(crate) fn try_take_runnable(&self, into: &mut Vec<Runnable>) {
        if let Ok(mut list) = self.0.runnable.try_lock()
            && let Some(list) = &mut *list
        {
            into.append(list);
        }
    }

    /// Delivers the result of a blocking call.
    pub(crate) fn complete_blocking(&self, result: Completion) {
        lock(&self.0.results).push(result);
        self.notify();
    }

    /// Takes the results of blocking calls into an empty list, without waiting for the lock, as [`Handle::try_take_runnable`].
    pub(crate) fn try_take_results(&self, into: &mut Vec<Completion>) {
        debug_assert!(into.is_empty(), "results that were not delivered");
        if let Ok(mut results) = self.0.results.try_lock() {
            std::mem::swap(into, &mut results);
        }
    }

    /// A waker of the reactor itself.
    pub(crate) fn waker(&self) -> Waker {
        Waker::from(Arc::clone(&self.0))
    }

    /// Whether the reactor has ended: it refuses messages.
    pub fn has_ended(&self) -> bool {
        self.0.mailbox.is_closed()
    }

    /// Closes the mailbox at the reactor's end: it refuses later messages. Returns the tasks that were ready to be polled.
    pub(crate) fn close(&self) -> Vec<Runnable> {
        self.0.mailbox.close();
        lock(&self.0.runnable).take().unwrap_or_default()
    }
}

/// Calls functions of one root from any thread.
pub struct RootRef<T> {
    handle: Handle,
    id: RootId,
    root: PhantomData<fn() -> T>,
}

impl<T> Clone for RootRef<T> {
    fn clone(&self) -> Self {
        Self { handle: self.handle.clone(), id: self.id, root: PhantomData }
    }
}

/// Whether both refer to the same root: another root never gets its id.
impl<T> PartialEq for RootRef<T> {
    fn eq(&self, other: &Self) -> bool {
        self.handle == other.handle && self.id == other.id
    }
}

impl<T> Eq for RootRef<T> {}

impl<T> fmt::Debug for RootRef<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on {:?}", self.id, self.handle)
    }
}

impl<T: Root> RootRef<T> {
    /// Refers to the root `id` of the reactor behind `handle`.
    pub fn new(handle: Handle, id: RootId) -> Self {
        Self { handle, id, root: PhantomData }
    }

    /// The root's id on its reactor.
    pub fn id(&self) -> RootId {
        self.id
    }

    /// The handle of the root's reactor.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs `f` on the root, in its reactor's context, and returns its result.
    ///
    /// # Errors
    /// [`Gone`] if the root was removed or its reactor has ended.
    pub async fn call<R, F>(&self, f: F) -> Result<R, Gone>
    where
        R: Send + 'static,
        F: FnOnce(&mut T, &mut Cx) -> R + Send + 'static,
    {
        let id = self.id;
        let call = move |cx: &mut Cx| {
            let root = cx.root::<T>(id).ok_or(Gone)?;
            Ok(f(&mut root.borrow_mut(), cx))
        };
        self.handle.call(call).await?
    }
}
