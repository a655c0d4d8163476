//! Waits with a limit, for futures on any executor. Any context but a reactor's.
//!
//! One thread of the process wakes the futures whose time is over. It starts with the first wait.

use aryk_reactor::{Clock, Nanos};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::oneshot;

type Wait = (Nanos, oneshot::Sender<()>);

static WAITS: OnceLock<Option<Sender<Wait>>> = OnceLock::new();

/// Waits for `future` for up to `limit`; `None` if it is not ready then, or if the process has no thread for the clock and must
/// not wait for ever.
pub(crate) async fn within<T>(limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    let (sender, over) = oneshot::channel();
    let waits = WAITS.get_or_init(|| {
        let (sender, receiver) = channel();
        let thread = std::thread::Builder::new().name("rbd_timer".into()).spawn(move || run(&receiver));
        thread.ok().map(|_| sender)
    });
    let at = Clock::Monotonic.now().after(limit);
    // Without the thread, the sender is dropped here, and the time is over at once.
    let _ = waits.as_ref().map(|waits| waits.send((at, sender)));
    tokio::select! {
        biased;
        value = future => Some(value),
        _ = over => None,
    }
}

/// How often [`sole`] looks, and how many times.
const LOOK_EVERY: Duration = Duration::from_millis(10);
const LOOKS: u32 = 500;

/// Waits, for some seconds, until `shared` is the only reference to its value; `None` if there are others then.
pub(crate) async fn sole<T>(mut shared: Arc<T>) -> Option<T> {
    for _ in 0..LOOKS {
        match Arc::try_unwrap(shared) {
            Ok(value) => return Some(value),
            Err(again) => shared = again,
        }
        let _ = within(LOOK_EVERY, std::future::pending::<()>()).await;
    }
    None
}

fn run(new: &Receiver<Wait>) {
    let mut waits: Vec<Wait> = Vec::new();
    loop {
        let now = Clock::Monotonic.now();
        // A wait that has ended before is dropped, too.
        waits.extract_if(.., |(at, waiter)| *at <= now || waiter.is_closed()).for_each(|(_, waiter)| {
            // The wait may have just ended.
            let _ = waiter.send(());
        });
        let next = waits.iter().map(|(at, _)| at.since(now)).min();
        match new.recv_timeout(next.unwrap_or(Duration::MAX)) {
            Ok(wait) => waits.push(wait),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
