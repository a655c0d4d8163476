//! Starts of queues that take long: the device waits for a queue's disk, and the session continues. Control context.
//!
//! The futures are polled beside all other work of the session ([`Starts::beside`]), because a start may hold a resource for
//! which another call of the device waits.

use crate::device::DeviceError;
use std::cell::RefCell;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use tokio::sync::oneshot;

/// The result of a start in progress. It is sent when the device has started the queue, or has failed to.
pub(crate) type Started = oneshot::Receiver<Result<(), DeviceError>>;

/// The starts of one session that are in progress.
#[derive(Default)]
pub(crate) struct Starts<'d>(RefCell<Vec<Pin<Box<dyn Future<Output = ()> + 'd>>>>);

impl<'d> Starts<'d> {
    /// Begins a start. When this returns, the device knows the start, so the start can be cancelled.
    pub(super) async fn begin(
        &self,
        starting: impl Future<Output = Result<(), DeviceError>> + 'd,
    ) -> Started {
        let (sender, started) = oneshot::channel();
        let mut starting = Box::pin(async move {
            // The session waits for each start before it ends.
            let _ = sender.send(starting.await);
        });
        let first = std::future::poll_fn(|cx| Poll::Ready(starting.as_mut().poll(cx))).await;
        if first.is_pending() {
            self.0.borrow_mut().push(starting);
        }
        started
    }

    fn poll(&self, cx: &mut Context<'_>) {
        self.0.borrow_mut().retain_mut(|starting| starting.as_mut().poll(cx).is_pending());
    }

    /// Polls `work` to its end, and the starts beside it.
    pub(crate) async fn beside<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        std::future::poll_fn(|cx| {
            let polled = work.as_mut().poll(cx);
            if polled.is_pending() {
                self.poll(cx);
            }
            polled
        })
        .await
    }
}
