//! The log: lines on the standard error, at a level that RPC can change.

use aryk_rpc::methods::log::PrintLevel;
use std::io::IsTerminal;
use tracing::Level;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{fmt, reload};

/// Starts the log; what it gives changes the level.
pub fn start(level: PrintLevel) -> impl Fn(PrintLevel) {
    let (filter, handle) = reload::Layer::new(LevelFilter::from_level(Level::from(level)));
    let lines = fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    tracing_subscriber::registry().with(filter).with(lines).init();
    move |level| {
        // The subscriber lives as long as the process.
        let _ = handle.modify(|filter| *filter = LevelFilter::from_level(Level::from(level)));
    }
}
