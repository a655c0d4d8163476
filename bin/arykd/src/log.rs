//! The log: lines on the standard error, in one of three formats. What it tells can be changed by RPC.

use aryk_rpc::methods::log::{LogSettings, PrintLevel};
use clap::ValueEnum;
use std::fmt as std_fmt;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, format};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, fmt, reload};

/// How an event is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A line for people, with the time.
    Text,
    /// A JSON object a line.
    Json,
    /// A line that begins with its priority, as journald and other readers of a service's output take it. The time is theirs.
    Journal,
}

impl Format {
    /// The one asked for, or the one that whoever reads our standard error wants.
    pub fn choose(asked: Option<Self>) -> Self {
        let journal = || std::env::var("JOURNAL_STREAM").is_ok_and(|stream| is_stderr(&stream));
        asked.unwrap_or_else(|| if journal() { Self::Journal } else { Self::Text })
    }

    fn layer(self, timestamps: Arc<AtomicBool>) -> Box<dyn Layer<Filtered> + Send + Sync> {
        let lines = fmt::layer().with_writer(std::io::stderr);
        match self {
            Self::Text => lines
                .with_ansi(std::io::stderr().is_terminal())
                .event_format(Timed { with: format(), without: format().without_time(), timestamps })
                .boxed(),
            Self::Json => lines.json().flatten_event(true).boxed(),
            Self::Journal => lines
                .with_ansi(false)
                .event_format(Prioritized(format().without_time().with_level(false)))
                .boxed(),
        }
    }
}

/// What a format's layer is put upon.
type Filtered = tracing_subscriber::layer::Layered<reload::Layer<Targets, Registry>, Registry>;

/// Whether the standard error is the stream with these numbers of device and inode: it may have been turned elsewhere.
fn is_stderr(stream: &str) -> bool {
    let Ok(stat) = rustix::fs::fstat(std::io::stderr().as_fd()) else { return false };
    stream == format!("{}:{}", stat.st_dev, stat.st_ino)
}

/// Lines that have their time or not, as it is asked for.
struct Timed {
    with: format::Format,
    without: format::Format<Full, ()>,
    timestamps: Arc<AtomicBool>,
}

impl<S, N> FormatEvent<S, N> for Timed
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std_fmt::Result {
        match self.timestamps.load(Ordering::Relaxed) {
            true => self.with.format_event(context, writer, event),
            false => self.without.format_event(context, writer, event),
        }
    }
}

/// Lines that begin with `<N>`, as `sd-daemon(3)` has it.
struct Prioritized(format::Format<Full, ()>);

impl<S, N> FormatEvent<S, N> for Prioritized
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std_fmt::Result {
        let mut text = String::new();
        self.0.format_event(context, Writer::new(&mut text), event)?;
        // Each line is an entry of its own there, and one without a priority would be taken for a message of the default one.
        let priority = priority(*event.metadata().level());
        text.lines().try_for_each(|line| writeln!(writer, "<{priority}>{line}"))
    }
}

/// syslog's.
const fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 5,
        Level::DEBUG => 6,
        Level::TRACE => 7,
    }
}

/// Starts the log; what it gives changes what the log tells.
pub fn start(level: PrintLevel, format: Format) -> impl Fn(&LogSettings) {
    let settings = LogSettings::new(level);
    let (filter, handle) = reload::Layer::new(targets(&settings));
    let timestamps = Arc::new(AtomicBool::new(settings.timestamps));
    tracing_subscriber::registry().with(filter).with(format.layer(Arc::clone(&timestamps))).init();
    move |settings| {
        timestamps.store(settings.timestamps, Ordering::Relaxed);
        // The subscriber lives as long as the process.
        let _ = handle.modify(|filter| *filter = targets(settings));
    }
}

fn targets(settings: &LogSettings) -> Targets {
    let targets = Targets::new().with_default(Level::from(settings.level));
    targets.with_targets(settings.told().map(|target| (target, Level::TRACE)))
}
