//! The deadlines of a channel's requests. Reactor context.
//!
//! There is one timer, for the oldest request that is not known to be late; it is set only while there is such a request.
//! Each look at the requests finds those that have become late since the last, by the time of their submission, so that a
//! request carries nothing for it.

use super::BdevChannel;
use crate::cell::Command;
use crate::{Deadline, OnDeadline};
use aryk_reactor::{Cx, Nanos, TimerId};
use aryk_slots::Key;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// The log has at most one line about a disk's late requests in this time.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Watch {
    deadline: Option<Deadline>,
    timer: Option<TimerId>,
    /// A deadline is set, and no timer: the next request sets it.
    must_begin: bool,
    /// Requests that were submitted until then have been looked at when they were late.
    seen_until: Nanos,
    reported: Option<Nanos>,
    /// Late requests since the last report.
    unreported: u64,
}

impl Watch {
    pub fn new(deadline: Option<Deadline>) -> Self {
        Self { must_begin: deadline.is_some(), deadline, ..Self::default() }
    }

    /// Whether a request that is submitted now is the first to be watched.
    #[inline]
    pub const fn must_begin(&self) -> bool {
        self.must_begin
    }
}

impl BdevChannel {
    /// Requests in flight, and those to come, have this deadline.
    pub(super) fn set_deadline(&mut self, deadline: Option<Deadline>, cx: &mut Cx) {
        if let Some(timer) = self.watch.timer.take() {
            cx.cancel_timer(timer);
        }
        self.watch = Watch::new(deadline);
        self.watch_oldest(cx);
    }

    /// Sets the timer for the oldest request, if there is one.
    #[cold]
    pub(super) fn watch_oldest(&mut self, cx: &mut Cx) {
        let Some(Deadline { after, .. }) = self.watch.deadline else { return };
        let seen_until = self.watch.seen_until;
        let oldest = self.requests.iter().map(|(_, r)| r.started).filter(|&s| s > seen_until).min();
        self.watch.must_begin = oldest.is_none();
        self.watch.timer = oldest.map(|oldest| {
            let cell = Rc::downgrade(self.registration.cell());
            cx.call_at(oldest.after(after), move |cx| {
                // A channel that is closed has nothing in flight.
                if let Some(cell) = cell.upgrade() {
                    cell.command(Command::LookAtDeadlines, cx);
                }
            })
        });
    }

    /// Deals with what has become late since the last look.
    pub(super) fn look_at_deadlines(&mut self, cx: &mut Cx) {
        let Some(Deadline { after, action }) = self.watch.deadline else { return };
        let now = cx.now();
        let seen_until = self.watch.seen_until;
        let is_late = |s: Nanos| s > seen_until && s.after(after) <= now;
        let late = self.requests.iter().filter(|(_, r)| is_late(r.started));
        let keys: Vec<Key> = late.map(|(key, _)| key).collect();
        self.watch.seen_until = Nanos(now.0.saturating_sub(after.as_nanos() as u64));
        self.registration.stats_mut().overdue += keys.len() as u64;
        if !keys.is_empty() {
            self.report(keys.len() as u64, after, now);
            match action {
                OnDeadline::Report => {}
                OnDeadline::Abort => keys.into_iter().for_each(|key| self.abort_one(key, cx)),
                OnDeadline::Reset => {
                    let bdev = Arc::clone(self.bdev());
                    // One that is under way already is as good.
                    cx.local().spawn(async move { bdev.reset().await }).detach();
                }
            }
        }
        self.watch_oldest(cx);
    }

    fn report(&mut self, requests: u64, after: Duration, now: Nanos) {
        self.watch.unreported += requests;
        if self.watch.reported.is_none_or(|at| now.since(at) >= REPORT_INTERVAL) {
            self.watch.reported = Some(now);
            let requests = std::mem::take(&mut self.watch.unreported);
            tracing::warn!(disk = self.bdev().name(), requests, ?after, "requests are over their deadline");
        }
    }
}
