//! The progress of a copy, at which a signal ends the copy: so it can remove what it has made.

use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// A progress bar, which is drawn only on a terminal.
pub struct Bar(ProgressBar);

impl Bar {
    /// A bar for a copy of `bytes` bytes. From now on, the first signal that would end the process ends the copy.
    pub fn new(bytes: u64, quiet: bool) -> io::Result<Self> {
        interruption()?;
        if quiet {
            return Ok(Self(ProgressBar::hidden()));
        }
        let style = "{bar:40} {percent:>3}%  {binary_bytes} of {binary_total_bytes}, {eta} left";
        let style = ProgressStyle::with_template(style).expect("the template is valid");
        Ok(Self(ProgressBar::new(bytes).with_style(style)))
    }

    /// Shows that `done` bytes are copied.
    ///
    /// # Errors
    /// A signal has interrupted the copy.
    pub fn advance(&self, done: u64) -> io::Result<()> {
        if interruption()?.load(Ordering::Relaxed) {
            self.0.finish_and_clear();
            return Err(io::Error::other("interrupted; what was copied is removed"));
        }
        self.0.set_position(done);
        Ok(())
    }

    pub fn finish(self) {
        self.0.finish_and_clear();
    }
}

/// Whether the process got a signal. A second signal ends it.
fn interruption() -> io::Result<&'static AtomicBool> {
    static INTERRUPTED: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    if let Some(interrupted) = INTERRUPTED.get() {
        return Ok(interrupted);
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // As a shell reports a process that the signal has ended.
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&interrupted))?;
        flag::register(signal, Arc::clone(&interrupted))?;
    }
    Ok(INTERRUPTED.get_or_init(|| interrupted))
}
