//! A short task with a channel of a disk, on a reactor. Control context.

use crate::Error;
use aryk_bdev::{AsyncChannel, Descriptor, OpenError};
use aryk_reactor::{CoreSet, Cx, Hold, Local};
use futures_channel::oneshot;
use std::future::{Future as _, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

/// The interval of checks whether a channel is closed.
const CLOSING: Duration = Duration::from_micros(100);

/// Runs `work` with a channel of the disk on a reactor, and closes the channel. `None` if `removal` has ended before: a disk that
/// does not respond can be removed nevertheless.
///
/// # Errors
/// [`Error::Ended`] if the reactor ends, and [`Error::Open`].
pub(crate) async fn visit<R: Send + 'static>(
    reactor: &Hold,
    descriptor: Descriptor,
    name: &'static str,
    mut removal: oneshot::Receiver<()>,
    work: impl AsyncFnOnce(&AsyncChannel, &Local) -> R + Send + 'static,
) -> Result<Option<R>, Error> {
    descriptor.prepare(reactor).await?;
    let (sender, result) = oneshot::channel();
    let start = move |cx: &mut Cx| {
        let thread = cx.add_thread(name, CoreSet::from_iter([cx.handle().core()]));
        let channel =
            AsyncChannel::open(&descriptor, thread, cx).inspect_err(|_| cx.remove_thread(thread))?;
        let local = cx.local().clone();
        let task = async move {
            let result = {
                let mut working = pin!(work(&channel, &local));
                poll_fn(|cx| match Pin::new(&mut removal).poll(cx) {
                    Poll::Ready(_) => Poll::Ready(None),
                    Poll::Pending => working.as_mut().poll(cx).map(Some),
                })
                .await
            };
            drop((channel, descriptor));
            while local.with(move |cx| cx.thread_members(thread)).await > 0 {
                local.sleep(CLOSING).await;
            }
            local.with(move |cx| cx.remove_thread(thread)).await;
            // The caller may have been dropped.
            let _ = sender.send(result);
        };
        cx.local().spawn(task).detach();
        Ok::<_, OpenError>(())
    };
    reactor.call(start).await.map_err(|_| Error::Ended)??;
    result.await.map_err(|_| Error::Ended)
}
