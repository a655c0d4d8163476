//! How others reach a reactor: messages. Any context.

use crate::mailbox::Mailbox;
use crate::trace::TraceReader;
use crate::{Cx, Root, RootId};
use aryk_uring::Completion;
use async_task::Runnable;
use futures_channel::oneshot;
use rustix::event::{EventfdFlags, eventfd};
use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};
use std::time::Duration;

/// What a reactor is asked to do.
pub(crate) type Message = Box<dyn FnOnce(&mut Cx) + Send>;

/// The reactor, or the root, is there no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("it has stopped")]
pub struct Gone;

/// Messages that a reactor has room for.
const MAILBOX: usize = 1024;

/// What a reactor and its handles share.
pub(crate) struct Shared {
    pub core: u16,
    pub mailbox: Mailbox<Message>,
    /// Wakes a sleeping reactor.
    pub wake_fd: OwnedFd,
    /// Tasks that can go on.
    runnable: Mutex<Vec<Runnable>>,
    has_runnable: AtomicBool,
    /// Results of blocking calls.
    completed: Mutex<Vec<Completion>>,
    has_completed: AtomicBool,
    /// Senders that found the mailbox full.
    waiting: Mutex<Vec<Waker>>,
    has_waiting: AtomicBool,
    /// Set when the reactor has ended: what is sent from now on is dropped.
    closed: AtomicBool,
    pub account: Account,
    pub trace: TraceReader,
    /// Names of what runs, for the watchdog, by the number in [`Account::running`].
    pub names: Mutex<HashMap<u64, String>>,
}

/// Where a reactor's time goes. Written by the reactor once a turn.
#[derive(Default, Debug)]
pub(crate) struct Account {
    pub turns: AtomicU64,
    pub busy_ns: AtomicU64,
    pub idle_ns: AtomicU64,
    pub sleeping_ns: AtomicU64,
    /// What runs now: a number of [`Shared::names`]; 0 for nothing.
    pub running: AtomicU64,
    /// Roots and pollers on it.
    pub members: AtomicU64,
}

/// Where a reactor's time went since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReactorStats {
    /// Turns that it made.
    pub turns: u64,
    /// Time of turns with work in them.
    pub busy: Duration,
    /// Time of turns without.
    pub idle: Duration,
    /// Time asleep.
    pub sleeping: Duration,
}

/// Reaches one reactor from any thread. Cheap to clone.
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

/// A lock that is held for a few instructions only, and whose holder does not panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no one panics holding it")
}

impl Handle {
    pub(crate) fn new(core: u16, trace: TraceReader) -> std::io::Result<Self> {
        Ok(Self(Arc::new(Shared {
            core,
            mailbox: Mailbox::new(MAILBOX),
            wake_fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            runnable: Mutex::default(),
            has_runnable: AtomicBool::new(false),
            completed: Mutex::default(),
            has_completed: AtomicBool::new(false),
            waiting: Mutex::default(),
            has_waiting: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            account: Account::default(),
            trace,
            names: Mutex::default(),
        })))
    }

    /// The core that the reactor runs on.
    pub fn core(&self) -> u16 {
        self.0.core
    }

    /// Where its time went.
    pub fn stats(&self) -> ReactorStats {
        let a = &self.0.account;
        let time = |t: &AtomicU64| Duration::from_nanos(t.load(Ordering::Relaxed));
        ReactorStats {
            turns: a.turns.load(Ordering::Relaxed),
            busy: time(&a.busy_ns),
            idle: time(&a.idle_ns),
            sleeping: time(&a.sleeping_ns),
        }
    }

    /// Roots and pollers on it.
    pub fn members(&self) -> u64 {
        self.0.account.members.load(Ordering::Relaxed)
    }

    /// Its trace.
    pub fn trace(&self) -> TraceReader {
        self.0.trace.clone()
    }

    /// What was registered under a trace record's object number or the like.
    pub fn name_of(&self, number: u64) -> Option<String> {
        lock(&self.0.names).get(&number).cloned()
    }

    /// Runs `f` on the reactor, and gives its result. Waits while the reactor's mailbox is full.
    ///
    /// # Errors
    /// [`Gone`] if the reactor ends before `f` has run.
    pub async fn call<R, F>(&self, f: F) -> Result<R, Gone>
    where
        R: Send + 'static,
        F: FnOnce(&mut Cx) -> R + Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        // A caller that has gone meanwhile does not want the result.
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
            let Some(unsent) = message.take() else { return Poll::Ready(Ok(())) };
            // Registered before the attempt, so that room made after it is not missed.
            let Err(unsent) = self.try_send(unsent) else { return Poll::Ready(Ok(())) };
            lock(&self.0.waiting).push(cx.waker().clone());
            self.0.has_waiting.store(true, Ordering::SeqCst);
            match self.try_send(unsent) {
                Ok(()) => Poll::Ready(Ok(())),
                Err(_) if self.0.closed.load(Ordering::Acquire) => Poll::Ready(Err(Gone)),
                Err(unsent) => {
                    message = Some(unsent);
                    Poll::Pending
                }
            }
        })
        .await
    }

    pub(crate) fn try_send(&self, message: Message) -> Result<(), Message> {
        if self.0.closed.load(Ordering::Acquire) {
            return Err(message);
        }
        self.0.mailbox.push(message)?;
        if self.0.closed.load(Ordering::SeqCst) {
            self.drain();
        }
        self.wake();
        Ok(())
    }

    /// A task of the reactor can go on.
    pub(crate) fn schedule(&self, runnable: Runnable) {
        if self.0.closed.load(Ordering::Acquire) {
            // Its future belongs to a thread that is no more, and may not be dropped by another.
            std::mem::forget(runnable);
            return;
        }
        lock(&self.0.runnable).push(runnable);
        self.0.has_runnable.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn take_runnable(&self, into: &mut Vec<Runnable>) {
        if self.0.has_runnable.swap(false, Ordering::Acquire) {
            into.append(&mut lock(&self.0.runnable));
        }
    }

    pub(crate) fn has_runnable(&self) -> bool {
        self.0.has_runnable.load(Ordering::Acquire)
    }

    /// A blocking call has ended.
    pub(crate) fn complete_blocking(&self, completion: Completion) {
        lock(&self.0.completed).push(completion);
        self.0.has_completed.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn take_completed(&self, into: &mut Vec<Completion>) -> u32 {
        if !self.0.has_completed.load(Ordering::Relaxed) {
            return 0;
        }
        self.0.has_completed.store(false, Ordering::Relaxed);
        let mut completed = lock(&self.0.completed);
        let count = completed.len() as u32;
        into.append(&mut completed);
        count
    }

    pub(crate) fn has_completed(&self) -> bool {
        self.0.has_completed.load(Ordering::Acquire)
    }

    /// Lets senders that wait for room try again.
    pub(crate) fn made_room(&self) {
        if self.0.has_waiting.swap(false, Ordering::SeqCst) {
            let waiting = std::mem::take(&mut *lock(&self.0.waiting));
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.0.closed.load(Ordering::Acquire)
    }

    pub(crate) fn close(&self) {
        self.0.closed.store(true, Ordering::SeqCst);
        self.drain();
        drop(std::mem::take(&mut *lock(&self.0.runnable)));
        self.made_room();
    }

    /// Drops messages that nobody will run, whose senders then see that the reactor is gone.
    fn drain(&self) {
        // The lock makes those who drain one receiver.
        let _one = lock(&self.0.runnable);
        while self.0.mailbox.pop().is_some() {}
    }

    fn wake(&self) {
        if self.0.mailbox.must_wake() {
            // It cannot fail but by a saturated counter, and then the reactor is being woken anyway.
            let _ = rustix::io::write(&self.0.wake_fd, &1u64.to_ne_bytes());
        }
    }
}

/// Reaches one root from any thread.
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

    /// The root's name on its reactor.
    pub fn id(&self) -> RootId {
        self.id
    }

    /// The reactor that it is on.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs `f` on the root, in its reactor's context, and gives the result.
    ///
    /// # Errors
    /// [`Gone`] if the root or its reactor is there no more.
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
