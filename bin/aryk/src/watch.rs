//! `--watch`: repeats the output, and redraws it in place on a terminal.

use crate::error::Error;
use clap::Args;
use std::time::Duration;

/// The option of commands that show a state.
#[derive(Debug, Clone, Copy, Args)]
pub struct Watch {
    /// Repeat the output every second, or at this interval
    #[arg(
        long = "watch",
        value_name = "SECONDS",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1",
        value_parser = seconds
    )]
    pub every: Option<Duration>,
}

/// Parses an interval in seconds.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=86_400.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "give seconds, from 0.1 to 86400".to_owned())
}

/// Runs `once` one time, or repeatedly without end.
pub fn repeat(every: Option<Duration>, mut once: impl FnMut() -> Result<(), Error>) -> Result<(), Error> {
    once()?;
    let Some(every) = every else { return Ok(()) };
    loop {
        wait(every);
        once()?;
    }
}

/// Sleeps until the next repetition.
#[expect(clippy::disallowed_methods, reason = "a command line may sleep")]
pub fn wait(every: Duration) {
    std::thread::sleep(every);
}

/// The control sequences that draw `text` over the previous output, on a terminal with `rows` rows.
pub fn frame(text: &str, rows: usize) -> String {
    let all = text.trim_end().lines().count();
    let shown = if all < rows { all } else { rows.saturating_sub(2) };
    let mut frame = String::from("\x1b[H");
    for line in text.lines().take(shown) {
        frame.push_str(line);
        frame.push_str("\x1b[K\n");
    }
    if shown < all {
        frame.push_str(&format!("and {} more lines\x1b[K\n", all - shown));
    }
    frame.push_str("\x1b[J");
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_fit_the_terminal() {
        let text = "a\nb\nc\nd";
        assert_eq!(frame(text, 24), "\x1b[Ha\x1b[K\nb\x1b[K\nc\x1b[K\nd\x1b[K\n\x1b[J");
        let short = frame(text, 4);
        assert!(short.contains("b\x1b[K\nand 2 more lines") && !short.contains('c'), "{short:?}");
    }
}
