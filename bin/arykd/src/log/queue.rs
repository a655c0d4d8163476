//! The queue of output on its way to the reader. Any context may add to it: a lock-free push to a bounded queue. A thread of its
//! own writes.
//!
//! The reader of our output may stop reading, and then a write blocks without limit: neither a reactor nor the control thread may
//! do that write. Lines that exceed the queue are dropped, counted, and reported as soon as a write is possible again.

use super::Format;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};
use tracing::Level;

/// Lines in the queue, and their bytes.
const LINES_MAX: usize = 8192;
const BYTES_MAX: usize = 4 << 20;
/// Bytes of a line; the rest is cut off.
const LINE_MAX: usize = 64 << 10;
/// Lines between two reports of losses during an unbroken stream of lines.
const REPORT_EVERY: u32 = 1024;

/// The stream of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Out,
    Err,
}

struct Line {
    to: Stream,
    bytes: Box<[u8]>,
}

#[derive(Default)]
struct Counts {
    /// The writer sleeps, or is about to.
    sleeping: AtomicBool,
    bytes: AtomicUsize,
    /// Lines added and lines written; the difference is in the queue.
    added: AtomicU64,
    written: AtomicU64,
    lost: AtomicU64,
}

static COUNTS: Counts = Counts {
    sleeping: AtomicBool::new(false),
    bytes: AtomicUsize::new(0),
    added: AtomicU64::new(0),
    written: AtomicU64::new(0),
    lost: AtomicU64::new(0),
};

/// The sender of the queue; one per process.
static QUEUE: OnceLock<(SyncSender<Line>, Thread)> = OnceLock::new();

/// Starts the thread that writes. Lines that are added before, or after a failure to start it, are written at once.
///
/// # Errors
/// The thread cannot be created.
pub(super) fn start(format: Format) -> io::Result<()> {
    let (sender, lines) = sync_channel(LINES_MAX);
    let work = move || write_all(&lines, format);
    let writer: JoinHandle<()> = std::thread::Builder::new().name("log".to_owned()).spawn(work)?;
    // `start` is called once; a second queue would be dropped here.
    let _ = QUEUE.set((sender, writer.thread().clone()));
    Ok(())
}

/// Queues a line to be written soon.
pub(super) fn add(to: Stream, line: &[u8]) {
    let line = &line[..line.len().min(LINE_MAX)];
    let Some((sender, writer)) = QUEUE.get() else { return write(to, line) };
    let drop_line = || {
        COUNTS.lost.fetch_add(1, Ordering::Relaxed);
    };
    if COUNTS.bytes.fetch_add(line.len(), Ordering::Relaxed) + line.len() > BYTES_MAX {
        COUNTS.bytes.fetch_sub(line.len(), Ordering::Relaxed);
        return drop_line();
    }
    match sender.try_send(Line { to, bytes: line.into() }) {
        Ok(()) => {
            COUNTS.added.fetch_add(1, Ordering::Release);
        }
        Err(TrySendError::Full(line) | TrySendError::Disconnected(line)) => {
            COUNTS.bytes.fetch_sub(line.bytes.len(), Ordering::Relaxed);
            drop_line();
        }
    }
    // The writer raises its flag, fences, and checks the queue; the sender adds, fences, and checks the flag.
    fence(Ordering::SeqCst);
    if COUNTS.sleeping.load(Ordering::Relaxed) && COUNTS.sleeping.swap(false, Ordering::AcqRel) {
        writer.unpark();
    }
}

/// Waits until all lines that were added have been written, at most for `patience`.
pub(super) fn flush(patience: Duration) {
    const CHECK_EVERY: Duration = Duration::from_micros(500);
    let Some((_, writer)) = QUEUE.get() else { return };
    if writer.id() == std::thread::current().id() {
        return;
    }
    let (began, until) = (now(), COUNTS.added.load(Ordering::Acquire));
    while COUNTS.written.load(Ordering::Acquire) < until && began.elapsed() < patience {
        std::thread::park_timeout(CHECK_EVERY);
    }
}

#[expect(clippy::disallowed_methods, reason = "only the end of the process waits with this")]
fn now() -> Instant {
    Instant::now()
}

/// The main loop of the writer.
fn write_all(lines: &Receiver<Line>, format: Format) {
    let mut since_report = 0;
    loop {
        let Some(line) = lines.try_recv().ok().or_else(|| wait(lines, format)) else { continue };
        write(line.to, &line.bytes);
        COUNTS.bytes.fetch_sub(line.bytes.len(), Ordering::Relaxed);
        COUNTS.written.fetch_add(1, Ordering::Release);
        since_report += 1;
        if since_report >= REPORT_EVERY {
            since_report = 0;
            report_losses(format);
        }
    }
}

/// Sleeps until there is a line to write. Returns a line that came before the sleep.
fn wait(lines: &Receiver<Line>, format: Format) -> Option<Line> {
    report_losses(format);
    COUNTS.sleeping.store(true, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    // Not `recv`: to wake a thread that waits in it, a sender takes a lock.
    let line = lines.try_recv().ok();
    if line.is_none() {
        std::thread::park();
    }
    COUNTS.sleeping.store(false, Ordering::Relaxed);
    line
}

fn report_losses(format: Format) {
    let lost = COUNTS.lost.swap(0, Ordering::Relaxed);
    if lost > 0 {
        let text = format!("{lost} lines of the log were lost: its reader was too slow");
        write(Stream::Err, format.line(Level::WARN, &text).as_bytes());
    }
}

/// Writes, and blocks for as long as that takes. A reader that has gone does not end the daemon.
fn write(to: Stream, mut bytes: &[u8]) {
    // By the descriptor: std's handle would hold its lock while the write blocks.
    let (out, err) = (io::stdout(), io::stderr());
    let stream = if to == Stream::Out { out.as_fd() } else { err.as_fd() };
    while !bytes.is_empty() {
        match rustix::io::write(stream, bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            // Another process that shares the file has made it non-blocking.
            Err(Errno::AGAIN) => drop(rustix::event::poll(&mut [PollFd::new(&stream, PollFlags::OUT)], None)),
            Err(_) => return,
        }
    }
}

/// Writer for a formatter that passes a whole line at a time.
pub(super) struct LineWriter;

impl Write for LineWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        add(Stream::Err, line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
