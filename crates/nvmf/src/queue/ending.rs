//! The end of a queue whose host must learn why. Reactor context.
//!
//! A queue that closes at once loses what it has not sent. One that has a last word for its host, as the reason of a violation or
//! of a failed authentication, first sends its output, then ends its side of the connection, and waits a short time for the
//! host's end: a socket that is closed while the host still sends would have the network drop that word. What the host sends
//! meanwhile is read and dropped. Each step has an end in time, so a host that reads nothing keeps nothing.

use super::IoQueue;
use aryk_reactor::{Cx, Nanos};

/// How long the host has to end the connection when it has been sent everything.
const LINGER: Nanos = Nanos(1_000_000_000);

/// How far the end is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The host has failed to authenticate, and may ask why. Other commands fail.
    Refused,
    /// No more input is taken. What there is to send is sent.
    Sending,
    /// Everything is sent.
    Lingering,
}

/// The end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    pub step: Step,
    /// When the queue closes in any case.
    at: Nanos,
}

impl IoQueue {
    /// Whether the queue takes what its host sends.
    pub(super) fn takes_input(&self) -> bool {
        !self.is_closing && self.ending.is_none_or(|ending| ending.step == Step::Refused)
    }

    /// Whether nothing more can be sent.
    pub(super) fn has_sent_all(&self) -> bool {
        self.ending.is_some_and(|ending| ending.step == Step::Lingering)
    }

    /// Whether the host has failed to authenticate.
    pub(super) fn is_refused(&self) -> bool {
        self.ending.is_some()
    }

    /// Has the queue execute nothing any more but what tells its host that it has failed to authenticate. It ends then, or when
    /// the host has not asked for long.
    pub(crate) fn refuse(&mut self, cx: &mut Cx) {
        if self.ending.is_none() {
            self.end_by(Step::Refused, self.patience, cx);
        }
    }

    /// Ends the queue when its host has been sent what there is to send.
    pub(crate) fn close_behind_output(&mut self, cx: &mut Cx) {
        if self.takes_input() {
            self.end_by(Step::Sending, self.patience, cx);
        }
    }

    fn end_by(&mut self, step: Step, within: Nanos, cx: &mut Cx) {
        let at = Nanos(cx.now().0 + within.0);
        // A step does not put off the end that an earlier one has set.
        let at = self.ending.map_or(at, |before| before.at.min(at));
        self.ending = Some(Ending { step, at });
        cx.wake_at(self.root, at);
        cx.wake(self.root);
    }

    /// Goes on with the end, if it has begun.
    #[inline]
    pub(super) fn go_on_ending(&mut self, cx: &mut Cx) {
        if let Some(ending) = self.ending
            && !self.is_closing
        {
            self.end_step(ending, cx);
        }
    }

    #[cold]
    fn end_step(&mut self, Ending { step, at }: Ending, cx: &mut Cx) {
        let is_sent = || !self.link.has_output() && self.link.waiting_since().is_none();
        if cx.now() >= at {
            self.close(cx);
        } else if step == Step::Sending && is_sent() {
            if self.link.end_output() {
                self.end_by(Step::Lingering, LINGER, cx);
            } else {
                self.close(cx);
            }
        }
    }
}
