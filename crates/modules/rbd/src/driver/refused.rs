//! Changes that librbd refuses as read-only although the disk is not: another client has the lock of the image, and does not give
//! it up, such as `rbd rm` while it finds out that the image is in use. They are tried again for some seconds. Reactor context.

use super::{LinkDriver, Request};
use aryk_bdev::{Completion, Status, Tag};
use aryk_reactor::{Cx, Nanos};
use aryk_slots::Key;
use std::time::Duration;

/// How long a request waits until it is tried again, and for how long it is tried.
const RETRY: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(5);

impl LinkDriver {
    /// Keeps a request that librbd has refused, until [`LinkDriver::retry`]. Returns false if the refusal is the request's
    /// result.
    #[cold]
    pub(super) fn try_later(&mut self, key: Key, cx: &mut Cx) -> bool {
        let request = self.requests.get_mut(key).expect("the caller has found it");
        let opened = self.channels.get_mut(request.channel).expect("a channel outlives its requests");
        let is_wanted = !request.is_aborted && !opened.leaves;
        let may_succeed = request.io.op.is_change() && !opened.disk.is_read_only() && is_wanted;
        let (now, since) = (cx.now(), request.refused.unwrap_or(cx.now()));
        if !may_succeed || now.since(since) >= PATIENCE {
            return false;
        }
        request.refused = Some(since);
        opened.disk.waits_for_lock();
        let at = now.after(RETRY);
        opened.refused.push_back((at, key));
        cx.wake_at(opened.root, at);
        true
    }

    /// Tries the refused requests of a channel again whose time has come.
    #[cold]
    pub(super) fn retry(&mut self, channel: Key, now: Nanos) {
        loop {
            let opened = self.channels.get_mut(channel).expect("an open channel");
            let Some((_, key)) = opened.refused.pop_front_if(|(at, _)| *at <= now) else { return };
            self.start(key);
        }
    }

    /// Completes the refused requests of a channel with this tag. Those that librbd has are not tried again: after an abort, the
    /// memory of a request may be replaced.
    pub(super) fn abort_refused(&mut self, channel: Key, tag: Tag, cx: &mut Cx) {
        let is_meant = |request: &Request| request.channel == channel && request.io.tag == tag;
        self.requests.iter_mut().filter(|(_, r)| is_meant(r)).for_each(|(_, r)| r.is_aborted = true);
        let opened = self.channels.get_mut(channel).expect("an open channel");
        let (requests, share, completions) = (&mut self.requests, &mut opened.share, &mut opened.completions);
        let before = opened.refused.len();
        opened.refused.retain(|(_, key)| {
            let io = requests.get(*key).expect("it waits").io;
            if io.tag != tag {
                return true;
            }
            requests.remove(*key);
            self.budget.give_back(share, super::cost_of(io.data.len()));
            completions.push(Completion { tag, status: Status::Aborted });
            false
        });
        if opened.refused.len() < before {
            cx.wake(opened.root);
            // Others may have room now.
            self.start_waiting_of(channel);
            self.start_line();
        }
    }
}
