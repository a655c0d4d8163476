//! What a panic is: the end of the process, at once, on whichever thread.
//!
//! A reactor that is gone leaves its queues without anybody who serves them; the control thread's end leaves nobody who answers; and what a pool's thread has left
//! half done nobody knows. So there is no half of a daemon: it says why and aborts, and its successor recovers, which it can after any crash.

use crate::log;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tracing::Level;

/// How long the log has to reach whoever reads it.
const FAREWELL: Duration = Duration::from_millis(200);

/// From here on a panic of any thread aborts the process. `last_words` is told why, before all else.
pub fn abort_on_panic(last_words: impl Fn(&str) + Send + Sync + 'static) {
    std::panic::set_hook(Box::new(move |panic| {
        static PANICKING: AtomicBool = AtomicBool::new(false);
        if !PANICKING.swap(true, Ordering::AcqRel) {
            let why = describe(panic);
            last_words(&why);
            log::say(Level::ERROR, &format!("{why}; the daemon aborts, so that its successor goes on"));
            log::flush(FAREWELL);
        } else {
            // Another thread is at it.
            std::thread::park_timeout(FAREWELL);
        }
        std::process::abort()
    }));
}

fn describe(panic: &PanicHookInfo<'_>) -> String {
    let thread = std::thread::current();
    let payload = panic.payload_as_str().unwrap_or("without a message");
    let place = panic.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
    format!("panic in thread {} at {place}: {payload}", thread.name().unwrap_or("without a name"))
}
