//! The progress of what takes long, on standard error.

use aryk_volume::Progress;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

/// Time between two lines of progress where there is no terminal.
const INTERVAL: Duration = Duration::from_secs(5);

#[expect(clippy::disallowed_methods, reason = "a command line may read the clock")]
fn now() -> Instant {
    Instant::now()
}

/// Progress that is shown: a bar on a terminal, lines elsewhere.
pub struct Shown {
    bar: Option<ProgressBar>,
    is_json: bool,
    last: Instant,
}

impl Shown {
    pub fn new(is_json: bool) -> Self {
        let bar = (io::stderr().is_terminal() && !is_json).then(|| {
            let style = ProgressStyle::with_template("{bar:40} {percent:>3}%  {msg}");
            ProgressBar::new(1).with_style(style.expect("the template is valid"))
        });
        Self { bar, is_json, last: now() }
    }

    pub fn show(&mut self, progress: Progress) {
        let Progress { what, done, all } = progress;
        if let Some(bar) = &self.bar {
            bar.set_length(all.max(1));
            bar.set_position(done);
            bar.set_message(what);
        } else if self.last.elapsed() >= INTERVAL {
            self.last = now();
            if self.is_json {
                eprintln!("{}", json!({"progress": {"what": what, "done": done, "all": all}}));
            } else {
                eprintln!("{what}: {done} of {all}");
            }
        }
    }

    pub fn end(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}
