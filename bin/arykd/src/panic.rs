//! A panic on any thread aborts the process at once.
//!
//! Without its reactor a queue is not served; without the control thread no RPC is answered; and a pool's thread leaves its work
//! in an unknown state. So no part of the daemon runs on: the daemon logs the reason and aborts, and its successor recovers, as
//! after any crash.

use crate::log;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tracing::Level;

/// How long the log's reader has to read the last lines.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(200);

/// From this call on a panic on any thread aborts the process. First of all `last_words` gets the reason.
pub fn abort_on_panic(last_words: impl Fn(&str) + Send + Sync + 'static) {
    std::panic::set_hook(Box::new(move |panic| {
        static PANICKING: AtomicBool = AtomicBool::new(false);
        if !PANICKING.swap(true, Ordering::AcqRel) {
            let why = describe(panic);
            last_words(&why);
            log::write_line(Level::ERROR, &format!("{why}; the daemon aborts, and its successor recovers"));
            log::flush(FLUSH_TIMEOUT);
        } else {
            // Another thread is panicking already.
            std::thread::park_timeout(FLUSH_TIMEOUT);
        }
        std::process::abort()
    }));
}

fn describe(panic: &PanicHookInfo<'_>) -> String {
    let thread = std::thread::current();
    let payload = panic.payload_as_str().unwrap_or("no message");
    let place = panic.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
    format!("panic in thread {} at {place}: {payload}", thread.name().unwrap_or("without a name"))
}
