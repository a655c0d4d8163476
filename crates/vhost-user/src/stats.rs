//! Counters of a controller's sessions. Updated in control context, read from any context.

use crate::Error;
use crate::error::Class;
use aryk_dma::Peer;
use aryk_log_limit::LogLimit;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Limits on log lines that a controller's front-end can cause, by subject.
#[derive(Debug)]
pub(crate) struct Lines {
    /// For the start and the end of sessions.
    pub(crate) sessions: LogLimit,
    /// For faults within a session.
    pub(crate) faults: LogLimit,
}

impl Default for Lines {
    fn default() -> Self {
        const PERIOD: Duration = Duration::from_secs(5);
        Self { sessions: LogLimit::new(20, PERIOD), faults: LogLimit::new(10, PERIOD) }
    }
}

impl Lines {
    /// Logs how many lines were suppressed, if no line was logged since and such a line is due.
    pub(crate) fn tell_left_out(&self) {
        if let Some(left_out) = self.sessions.overdue() {
            tracing::info!(left_out, "further connects and disconnects of the front-end were not logged");
        }
        if let Some(left_out) = self.faults.overdue() {
            tracing::warn!(left_out, "further errors of the front-end were not logged");
        }
    }
}

/// Counters of one controller's sessions since its creation, and whether a front-end is connected.
#[derive(Debug, Default)]
pub struct Stats {
    connected: AtomicBool,
    /// The front-end's process; 0 if it is unknown.
    pid: AtomicI32,
    sessions: AtomicU64,
    messages: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
    connection_errors: AtomicU64,
    protocol_errors: AtomicU64,
    fd_errors: AtomicU64,
    memory_errors: AtomicU64,
    device_errors: AtomicU64,
    rings_outside: AtomicU64,
    memory_private: AtomicU64,
    last_error: Mutex<Option<String>>,
    pub(crate) lines: Lines,
    /// The controller's front-ends as the owner of guest memory: much memory of a front-end that has just disconnected may
    /// still wait to be unmapped.
    pub(crate) peer: Peer,
}

/// The values of [`Stats`] at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Whether a front-end is connected.
    pub connected: bool,
    /// PID of the connected front-end, if the kernel reports it.
    pub pid: Option<i32>,
    /// Front-ends that have connected.
    pub sessions: u64,
    /// Complete messages received.
    pub messages: u64,
    /// Requests answered with a failure, after which the session continued.
    pub refused: u64,
    /// Sessions that ended in another way than by a hang-up between two messages or by the back-end.
    pub failed: u64,
    /// Errors (each a refusal or the end of a session) of the connection: incomplete messages, replies not read.
    pub connection_errors: u64,
    /// Errors in messages.
    pub protocol_errors: u64,
    /// Errors in the number or kind of file descriptors.
    pub fd_errors: u64,
    /// Errors in guest memory and its tables.
    pub memory_errors: u64,
    /// Errors that the device has reported.
    pub device_errors: u64,
    /// Times that a queue had to wait because none of the memory regions contained its rings.
    pub rings_outside: u64,
    /// Sessions whose front-end had mapped guest memory privately, so that the guest's writes could not reach the back-end.
    pub memory_private: u64,
    /// The last of these errors, or the reason for which the controller cannot connect to a front-end's socket.
    pub last_error: Option<String>,
}

impl Stats {
    /// The current values.
    pub fn snapshot(&self) -> Snapshot {
        let connected = self.connected.load(Relaxed);
        Snapshot {
            connected,
            pid: Some(self.pid.load(Relaxed)).filter(|pid| connected && *pid > 0),
            sessions: self.sessions.load(Relaxed),
            messages: self.messages.load(Relaxed),
            refused: self.refused.load(Relaxed),
            failed: self.failed.load(Relaxed),
            connection_errors: self.connection_errors.load(Relaxed),
            protocol_errors: self.protocol_errors.load(Relaxed),
            fd_errors: self.fd_errors.load(Relaxed),
            memory_errors: self.memory_errors.load(Relaxed),
            device_errors: self.device_errors.load(Relaxed),
            rings_outside: self.rings_outside.load(Relaxed),
            memory_private: self.memory_private.load(Relaxed),
            last_error: self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    pub(crate) fn began(&self, pid: Option<i32>) {
        self.pid.store(pid.unwrap_or_default(), Relaxed);
        self.sessions.fetch_add(1, Relaxed);
        self.connected.store(true, Relaxed);
    }

    pub(crate) fn message(&self) {
        self.messages.fetch_add(1, Relaxed);
    }

    pub(crate) fn rings_outside(&self) {
        self.rings_outside.fetch_add(1, Relaxed);
    }

    pub(crate) fn memory_private(&self) {
        self.memory_private.fetch_add(1, Relaxed);
    }

    pub(crate) fn refused(&self, error: &Error) {
        self.refused.fetch_add(1, Relaxed);
        self.error(error);
    }

    pub(crate) fn ended(&self, error: Option<&Error>) {
        self.connected.store(false, Relaxed);
        if let Some(error) = error {
            self.failed.fetch_add(1, Relaxed);
            self.error(error);
        }
    }

    /// The controller cannot connect to a front-end until the operator corrects an error.
    pub(crate) fn not_connected(&self, why: &str) {
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(why.to_owned());
    }

    fn error(&self, error: &Error) {
        let counter = match error.class() {
            Class::Connection => &self.connection_errors,
            Class::Protocol => &self.protocol_errors,
            Class::Fds => &self.fd_errors,
            Class::Memory => &self.memory_errors,
            Class::Device => &self.device_errors,
        };
        counter.fetch_add(1, Relaxed);
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.to_string());
    }
}
