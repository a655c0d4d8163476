//! Futures on a reactor: for what is long or rare. Reactor context.

use crate::{Cx, Handle};
use async_task::Task;
use futures_channel::oneshot;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

type Call = Box<dyn FnOnce(&mut Cx)>;

/// What a reactor's tasks use of it. Cheap to clone; it stays on its reactor.
#[derive(Clone)]
pub struct Local {
    handle: Handle,
    calls: Rc<RefCell<VecDeque<Call>>>,
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "local to {:?}", self.handle)
    }
}

impl Local {
    pub(crate) fn new(handle: Handle) -> Self {
        Self { handle, calls: Rc::default() }
    }

    /// Starts a task. Dropping what is returned cancels it, unless it is detached.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Task<T> {
        let handle = self.handle.clone();
        let (runnable, task) = async_task::spawn_local(future, move |runnable| handle.schedule(runnable));
        runnable.schedule();
        task
    }

    /// Runs `f` with the reactor at hand, in this turn or the next.
    pub async fn with<R: 'static>(&self, f: impl FnOnce(&mut Cx) -> R + 'static) -> R {
        let (sender, receiver) = oneshot::channel();
        self.defer(move |cx| drop(sender.send(f(cx))));
        receiver.await.expect("the reactor runs all its calls before its tasks end")
    }

    /// As [`Local::with`], for what has no result and is not waited for.
    pub fn defer(&self, f: impl FnOnce(&mut Cx) + 'static) {
        self.calls.borrow_mut().push_back(Box::new(f));
    }

    /// Waits for `duration` to pass.
    pub async fn sleep(&self, duration: Duration) {
        let (sender, receiver) = oneshot::channel::<()>();
        self.defer(move |cx| {
            let at = cx.now().after(duration);
            cx.call_at(at, move |_| {
                let _ = sender.send(());
            });
        });
        // The timer is dropped unfired only with the reactor.
        let _ = receiver.await;
    }

    pub(crate) fn pop_call(&self) -> Option<Call> {
        self.calls.borrow_mut().pop_front()
    }

    pub(crate) fn has_calls(&self) -> bool {
        !self.calls.borrow().is_empty()
    }
}
