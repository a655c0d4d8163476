//! Futures on a reactor, for long or rare work. Reactor context.
//!
//! A task belongs to its reactor: only the reactor's OS thread polls it and drops its future. Tasks that have not ended when
//! the reactor ends are dropped then.

use crate::{Cx, Handle, TimerId};
use aryk_slots::{Key, Slots};
use async_task::{Runnable, Task};
use futures_channel::oneshot;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

type Call = Box<dyn FnOnce(&mut Cx)>;

struct State {
    calls: RefCell<VecDeque<Call>>,
    /// The tasks that have not ended.
    tasks: RefCell<Slots<Option<Waker>>>,
    ended: Cell<bool>,
}

/// The interface of a reactor for its tasks. Cheap to clone; it stays on its reactor.
#[derive(Clone)]
pub struct Local {
    handle: Handle,
    state: Rc<State>,
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "local to {:?}", self.handle)
    }
}

/// Part of a task's future: when the future is dropped, this removes the task from the list.
struct Listed {
    state: Rc<State>,
    key: Key,
}

impl Drop for Listed {
    fn drop(&mut self) {
        let waker = self.state.tasks.borrow_mut().remove(self.key);
        // The waker is dropped after the borrow of the list has ended.
        drop(waker);
    }
}

/// Cancels a timer for which its task no longer waits.
struct Alarm {
    local: Local,
    timer: Option<TimerId>,
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Some(timer) = self.timer {
            self.local.defer(move |cx| {
                cx.cancel_timer(timer);
            });
        }
    }
}

impl Local {
    pub(crate) fn new(handle: Handle) -> Self {
        let tasks = RefCell::new(Slots::new(16));
        let state = State { calls: RefCell::default(), tasks, ended: Cell::new(false) };
        Self { handle, state: Rc::new(state) }
    }

    /// Starts a task. Dropping the returned [`Task`] cancels it, unless it was detached.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Task<T> {
        let key = self.list();
        let listed = Listed { state: Rc::clone(&self.state), key };
        let future = async move {
            let _listed = listed;
            future.await
        };
        let handle = self.handle.clone();
        let (runnable, task) = async_task::spawn_local(future, move |runnable| handle.schedule(runnable));
        if let Some(waker) = self.state.tasks.borrow_mut().get_mut(key) {
            *waker = Some(runnable.waker());
        }
        runnable.schedule();
        task
    }

    fn list(&self) -> Key {
        self.state.tasks.borrow_mut().add(None)
    }

    /// Runs `f` with the reactor's state, in this turn or the next, and returns its result.
    pub async fn with<R: 'static>(&self, f: impl FnOnce(&mut Cx) -> R + 'static) -> R {
        let (sender, receiver) = oneshot::channel();
        self.defer(move |cx| drop(sender.send(f(cx))));
        receiver.await.expect("the reactor's tasks end before its calls")
    }

    /// As [`Local::with`], without a result and without waiting for the call.
    pub fn defer(&self, f: impl FnOnce(&mut Cx) + 'static) {
        // An object that is dropped after the reactor's end may still call this. A stored call that owns a `Local` would keep
        // this state alive forever.
        if !self.state.ended.get() {
            self.state.calls.borrow_mut().push_back(Box::new(f));
        }
    }

    /// Waits for `duration` to pass.
    pub async fn sleep(&self, duration: Duration) {
        let (sender, receiver) = oneshot::channel::<()>();
        let set = move |cx: &mut Cx| {
            let at = cx.now().after(duration);
            cx.call_at(at, move |_| {
                let _ = sender.send(());
            })
        };
        let mut alarm = Alarm { local: self.clone(), timer: Some(self.with(set).await) };
        // Only the end of the reactor drops the sender unused.
        let _ = receiver.await;
        alarm.timer = None;
    }

    pub(crate) fn pop_call(&self) -> Option<Call> {
        self.state.calls.borrow_mut().pop_front()
    }

    /// Whether there is a task that has not ended, or a deferred call.
    pub(crate) fn has_tasks(&self) -> bool {
        self.has_calls() || self.state.tasks.borrow().iter().next().is_some()
    }

    #[inline]
    pub(crate) fn has_calls(&self) -> bool {
        !self.state.calls.borrow().is_empty()
    }

    /// Drops the futures of all tasks, and the deferred calls, at the reactor's end.
    pub(crate) fn end(&self) {
        let mut runnable: Vec<Runnable> = Vec::new();
        loop {
            let wakers: Vec<_> = self.state.tasks.borrow().iter().filter_map(|(_, w)| w.clone()).collect();
            wakers.into_iter().for_each(Waker::wake);
            self.handle.take_runnable(&mut runnable);
            if runnable.is_empty() {
                break;
            }
            // Dropping a task may wake or start other tasks.
            runnable.clear();
        }
        self.state.ended.set(true);
        while self.pop_call().is_some() {}
    }
}
