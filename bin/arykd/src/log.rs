//! The log: lines on the standard error, in one of three formats. RPCs change its level. A thread of its own writes the lines
//! ([`queue`]), so no other thread waits for a slow reader of the log.

mod queue;

use aryk_rpc::methods::log::{LogSettings, PrintLevel};
use clap::ValueEnum;
use queue::{LineWriter, Stream};
use std::fmt as std_fmt;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Full, Json, JsonFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, format};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, fmt, reload};

/// The format of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A line of plain text with the time.
    Text,
    /// One JSON object per line.
    Json,
    /// A line that begins with its priority, as journald and other readers of a service's output parse it. The reader adds the
    /// time.
    Journal,
}

impl Format {
    /// The format that was given, or else the one that the reader of our standard error expects.
    pub fn choose(asked: Option<Self>) -> Self {
        let journal = || std::env::var("JOURNAL_STREAM").is_ok_and(|stream| is_stderr(&stream));
        asked.unwrap_or_else(|| if journal() { Self::Journal } else { Self::Text })
    }

    fn layer(self, timestamps: Arc<AtomicBool>) -> Box<dyn Layer<Filtered> + Send + Sync> {
        let lines = fmt::layer().with_writer(|| LineWriter);
        match self {
            Self::Text => lines
                .with_ansi(std::io::stderr().is_terminal())
                .event_format(Leveled { rest: format().without_time().with_level(false), timestamps })
                .boxed(),
            Self::Json => lines
                .fmt_fields(JsonFields::new())
                .event_format(Renamed(format().json().flatten_event(true)))
                .boxed(),
            Self::Journal => lines
                .with_ansi(false)
                .event_format(Prioritized(format().without_time().with_level(false)))
                .boxed(),
        }
    }

    /// A line without a `tracing` event, for code that cannot use `tracing`: the panic hook and the log's own writer.
    fn line(self, level: Level, text: &str) -> String {
        let mut time = String::new();
        // If the time cannot be formatted, the line is written without it.
        let _ = SystemTime.format_time(&mut Writer::new(&mut time));
        match self {
            Self::Text => format!("{time} {:>7} arykd: {text}\n", name(level)),
            Self::Json => format!(
                "{}\n",
                serde_json::json!({"timestamp": time, "level": name(level), "message": text, "target": "arykd"})
            ),
            Self::Journal => {
                let priority = priority(level);
                text.lines().map(|line| format!("<{priority}>arykd: {line}\n")).collect()
            }
        }
    }
}

/// The subscriber below a format's layer.
type Filtered = tracing_subscriber::layer::Layered<reload::Layer<Targets, Registry>, Registry>;

/// Whether the standard error is the stream with this device and inode; it may have been redirected.
fn is_stderr(stream: &str) -> bool {
    let Ok(stat) = rustix::fs::fstat(std::io::stderr().as_fd()) else { return false };
    stream == format!("{}:{}", stat.st_dev, stat.st_ino)
}

/// The log's name for a level: the same names as in `--log` and in the RPCs.
const fn name(level: Level) -> &'static str {
    match level {
        Level::ERROR => "ERROR",
        Level::WARN => "WARNING",
        Level::INFO => "NOTICE",
        Level::DEBUG => "INFO",
        Level::TRACE => "DEBUG",
    }
}

/// The ANSI colour code of a level's name.
const fn color(level: Level) -> u8 {
    match level {
        Level::ERROR => 31,
        Level::WARN => 33,
        Level::INFO => 32,
        Level::DEBUG => 34,
        Level::TRACE => 35,
    }
}

/// Formats lines with their level, and with their time if timestamps are on.
struct Leveled {
    rest: format::Format<Full, ()>,
    timestamps: Arc<AtomicBool>,
}

impl<S, N> FormatEvent<S, N> for Leveled
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
        if self.timestamps.load(Ordering::Relaxed) {
            SystemTime.format_time(&mut writer)?;
            writer.write_char(' ')?;
        }
        let level = *event.metadata().level();
        match writer.has_ansi_escapes() {
            true => write!(writer, "\x1b[{}m{:>7}\x1b[0m ", color(level), name(level))?,
            false => write!(writer, "{:>7} ", name(level))?,
        }
        self.rest.format_event(context, writer, event)
    }
}

/// Formats JSON lines with our names of the levels.
struct Renamed(format::Format<Json>);

impl<S, N> FormatEvent<S, N> for Renamed
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
        // The time and the level come first: a later text that looks like a level belongs to the event.
        let level = *event.metadata().level();
        let member = |name: &str| format!(r#""level":"{name}""#);
        writer.write_str(&text.replacen(&member(level.as_str()), &member(name(level)), 1))
    }
}

/// Formats lines that begin with `<N>`, as `sd-daemon(3)` defines.
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
        // journald makes an entry of each line, and a line without a priority gets the default one.
        let priority = priority(*event.metadata().level());
        text.lines().try_for_each(|line| writeln!(writer, "<{priority}>{line}"))
    }
}

/// The priority of syslog.
const fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 5,
        Level::DEBUG => 6,
        Level::TRACE => 7,
    }
}

/// The format that the log was started with.
static FORMAT: OnceLock<Format> = OnceLock::new();

/// Starts the thread that writes the log; from then on a slow reader delays no other thread. Earlier lines are written at once.
pub fn write_behind() {
    if let Err(error) = queue::start(format_now()) {
        tracing::warn!(%error, "cannot start the log's thread: a slow reader of the log delays the daemon");
    }
}

/// The format that the log was started with; before that, text.
fn format_now() -> Format {
    *FORMAT.get().unwrap_or(&Format::Text)
}

/// Writes a line to the log without `tracing`.
pub fn write_line(level: Level, text: &str) {
    queue::add(Stream::Err, format_now().line(level, text).as_bytes());
}

/// Writes a line to the standard error as it is: the reason why the daemon does not start or ends abnormally.
pub fn write_error(text: &str) {
    queue::add(Stream::Err, format!("{text}\n").as_bytes());
}

/// Writes text to the standard output.
pub fn print(text: &str) {
    queue::add(Stream::Out, text.as_bytes());
}

/// Waits until all queued lines have been written, at most for `patience`.
pub fn flush(patience: Duration) {
    queue::flush(patience);
}

/// Starts the log. The returned function changes its settings.
pub fn start(level: PrintLevel, format: Format) -> impl Fn(&LogSettings) {
    FORMAT.get_or_init(|| format);
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
    targets.with_targets(settings.verbose_targets().map(|target| (target, Level::TRACE)))
}
