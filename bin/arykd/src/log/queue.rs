//! What is written, on its way to whoever reads it. Any context may add to it: that is a bounded queue's push without a lock. A thread of its own writes.
//!
//! Who reads our output may stop, and then a write waits for as long as he likes: neither a reactor nor the control thread may be the one who does. What the
//! queue has no room for is lost, counted, and told of as soon as anything can be written again.

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

/// Lines that may wait, and their bytes.
const LINES_MAX: usize = 8192;
const BYTES_MAX: usize = 4 << 20;
/// Bytes of a line; the rest is cut off.
const LINE_MAX: usize = 64 << 10;
/// Lines between two that tell of losses, while there is no end of lines.
const TELL_EVERY: u32 = 1024;

/// Where a line goes.
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
    /// Lines added, and lines written: what is between them waits.
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

/// The way into the queue; one of the process.
static QUEUE: OnceLock<(SyncSender<Line>, Thread)> = OnceLock::new();

/// Starts the thread that writes. Lines that are added before, or without it, are written at once.
///
/// # Errors
/// There is no thread to be had.
pub(super) fn start(format: Format) -> io::Result<()> {
    let (sender, lines) = sync_channel(LINES_MAX);
    let work = move || write_all(&lines, format);
    let writer: JoinHandle<()> = std::thread::Builder::new().name("log".to_owned()).spawn(work)?;
    // A second log, which there is not, would go the first one's way.
    let _ = QUEUE.set((sender, writer.thread().clone()));
    Ok(())
}

/// Has a line written, soon.
pub(super) fn add(to: Stream, line: &[u8]) {
    let line = &line[..line.len().min(LINE_MAX)];
    let Some((sender, writer)) = QUEUE.get() else { return write(to, line) };
    let lose = || {
        COUNTS.lost.fetch_add(1, Ordering::Relaxed);
    };
    if COUNTS.bytes.fetch_add(line.len(), Ordering::Relaxed) + line.len() > BYTES_MAX {
        COUNTS.bytes.fetch_sub(line.len(), Ordering::Relaxed);
        return lose();
    }
    match sender.try_send(Line { to, bytes: line.into() }) {
        Ok(()) => {
            COUNTS.added.fetch_add(1, Ordering::Release);
        }
        Err(TrySendError::Full(line) | TrySendError::Disconnected(line)) => {
            COUNTS.bytes.fetch_sub(line.bytes.len(), Ordering::Relaxed);
            lose();
        }
    }
    // The writer raises its flag, fences, and looks at the queue; we have added, fence, and look at the flag.
    fence(Ordering::SeqCst);
    if COUNTS.sleeping.load(Ordering::Relaxed) && COUNTS.sleeping.swap(false, Ordering::AcqRel) {
        writer.unpark();
    }
}

/// Waits until all that was added has been written, but no longer than `patience`.
pub(super) fn flush(patience: Duration) {
    const LOOK_EVERY: Duration = Duration::from_micros(500);
    let Some((_, writer)) = QUEUE.get() else { return };
    if writer.id() == std::thread::current().id() {
        return;
    }
    let (began, until) = (now(), COUNTS.added.load(Ordering::Acquire));
    while COUNTS.written.load(Ordering::Acquire) < until && began.elapsed() < patience {
        std::thread::park_timeout(LOOK_EVERY);
    }
}

#[expect(clippy::disallowed_methods, reason = "only the process's end waits by this")]
fn now() -> Instant {
    Instant::now()
}

/// The writer's life.
fn write_all(lines: &Receiver<Line>, format: Format) {
    let mut since_told = 0;
    loop {
        let Some(line) = lines.try_recv().ok().or_else(|| wait(lines, format)) else { continue };
        write(line.to, &line.bytes);
        COUNTS.bytes.fetch_sub(line.bytes.len(), Ordering::Relaxed);
        COUNTS.written.fetch_add(1, Ordering::Release);
        since_told += 1;
        if since_told >= TELL_EVERY {
            since_told = 0;
            tell_losses(format);
        }
    }
}

/// Nothing is left to write: sleeps until there is; what there is, if it came before that.
fn wait(lines: &Receiver<Line>, format: Format) -> Option<Line> {
    tell_losses(format);
    COUNTS.sleeping.store(true, Ordering::Relaxed);
    fence(Ordering::SeqCst);
    // Not `recv`: senders would take a lock to wake one who waits in it.
    let line = lines.try_recv().ok();
    if line.is_none() {
        std::thread::park();
    }
    COUNTS.sleeping.store(false, Ordering::Relaxed);
    line
}

fn tell_losses(format: Format) {
    let lost = COUNTS.lost.swap(0, Ordering::Relaxed);
    if lost > 0 {
        let text = format!("{lost} lines of the log were lost: whoever reads it was too slow");
        write(Stream::Err, format.line(Level::WARN, &text).as_bytes());
    }
}

/// Writes, however long that takes. Whoever reads it may have gone: that is not the daemon's end.
fn write(to: Stream, mut bytes: &[u8]) {
    // By its descriptor: the lock of std's handle would be held while the write waits.
    let (out, err) = (io::stdout(), io::stderr());
    let stream = if to == Stream::Out { out.as_fd() } else { err.as_fd() };
    while !bytes.is_empty() {
        match rustix::io::write(stream, bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(Errno::INTR) => {}
            // Somebody who shares it made it so.
            Err(Errno::AGAIN) => drop(rustix::event::poll(&mut [PollFd::new(&stream, PollFlags::OUT)], None)),
            Err(_) => return,
        }
    }
}

/// For a formatter that gives a whole line at a time.
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
