//! A queue whose connection is one of RDMA. Reactor context.
//!
//! While the reactor polls the queue in every turn, the completion queue has no wake-ups and no system call: they are turned on
//! before the reactor stops that.

use super::commands::Slot;
use super::link::Link;
use super::{IoQueue, give_back};
use crate::rdma::{Event, Lost, Wire};
use aryk_log_limit::limited;
use aryk_reactor::{Armed, Cx, Nanos, RootId, WatchId};
use std::io;

/// How often one poll takes completions.
const POLLS_MAX: u32 = 4;

/// The connection.
pub(super) struct Rdma {
    pub wire: Wire,
    watch: WatchId,
    /// Since when the host has taken no completion, if there are some to take.
    pub waiting_since: Option<Nanos>,
}

impl Rdma {
    pub fn new(wire: Wire, root: RootId, cx: &mut Cx) -> io::Result<Self> {
        let watch = cx.watch(wire.fd().try_clone_to_owned()?, root)?;
        Ok(Self { wire, watch, waiting_since: None })
    }

    pub fn unwatch(&mut self, cx: &mut Cx) {
        cx.unwatch(self.watch);
    }
}

impl IoQueue {
    /// Takes what the device has completed.
    pub(super) fn receive_rdma(&mut self, cx: &mut Cx) -> bool {
        if self.is_closing {
            self.return_receives(cx);
            return false;
        }
        if !self.has_begun {
            self.take_messages(cx);
            return false;
        }
        let (mut has_any, mut may_have_more) = (false, true);
        let mut polls = 0;
        while may_have_more && !self.is_closing {
            if polls == POLLS_MAX {
                cx.wake(self.root);
                break;
            }
            polls += 1;
            match self.poll_wire(cx) {
                Ok((has_worked, is_full)) => {
                    has_any |= has_worked;
                    may_have_more = is_full;
                }
                Err(lost) => {
                    self.lose(&lost, cx);
                    return true;
                }
            }
        }
        has_any
    }

    /// The disks may take long for what they have: other queues go on with the receives that this one has taken.
    fn return_receives(&mut self, cx: &mut Cx) {
        if let Link::Rdma(rdma) = &mut self.link
            && rdma.wire.shares_receives()
            && rdma.wire.return_receives() == Ok(true)
        {
            cx.wake(self.root);
        }
    }

    /// Takes messages from shared receives, which other queues need. They are executed when the queue has begun.
    fn take_messages(&mut self, cx: &mut Cx) {
        let Link::Rdma(rdma) = &mut self.link else { return };
        if !rdma.wire.shares_receives() {
            return;
        }
        let taken = rdma.wire.poll().and_then(|may_have_more| {
            // Nothing else was requested yet.
            while rdma.wire.next_done(&self.pool)?.is_some() {}
            rdma.wire.flush(&self.pool)?;
            Ok(may_have_more)
        });
        match taken {
            Ok(true) => cx.wake(self.root),
            Ok(false) => {}
            Err(lost) => self.lose(&lost, cx),
        }
    }

    /// Polls once. Returns whether there was something, and whether there may be more.
    fn poll_wire(&mut self, cx: &mut Cx) -> Result<(bool, bool), Lost> {
        let Link::Rdma(rdma) = &mut self.link else { return Ok((false, false)) };
        let is_full = rdma.wire.poll()?;
        let mut has_any = false;
        while let Link::Rdma(rdma) = &mut self.link
            && !self.is_closing
            && let Some(event) = rdma.wire.next(&self.pool)?
        {
            has_any = true;
            self.follow(event, cx);
        }
        Ok((has_any, is_full))
    }

    fn follow(&mut self, event: Event, cx: &mut Cx) {
        match event {
            Event::Command { slot, entry, data_len, data } => {
                let takes_input = self.takes_input();
                let is_kept = takes_input && data_len > 0;
                let (kept, unused) = if is_kept { (data, None) } else { (None, data) };
                if let Some(unused) = unused {
                    give_back(&self.pool, &mut self.share, unused, &self.waiting, self.root, cx);
                }
                if takes_input {
                    *self.slot(slot) = Slot::new(entry, data_len, kept);
                    self.execute(slot, true, cx);
                }
            }
            Event::Read { slot, data } => {
                self.slot(slot).data = Some(data);
                if self.takes_input() {
                    self.execute(slot, true, cx);
                }
            }
            Event::Sent { data, .. } => {
                if let Link::Rdma(rdma) = &mut self.link {
                    rdma.waiting_since = (rdma.wire.unsent() > 0).then_some(cx.now());
                }
                if let Some(data) = data {
                    give_back(&self.pool, &mut self.share, data, &self.waiting, self.root, cx);
                }
            }
        }
    }

    fn lose(&mut self, lost: &Lost, cx: &mut Cx) {
        match lost {
            Lost::Ended => tracing::debug!("a queue of a host has lost its connection"),
            error => limited!(self.lines, warn, %error, "the RDMA connection of a host has failed"),
        }
        self.close(cx);
    }

    /// Posts what the turn has added.
    pub(super) fn send_rdma(&mut self, cx: &mut Cx) -> bool {
        let Link::Rdma(rdma) = &mut self.link else { return false };
        if self.is_closing {
            return false;
        }
        if let Err(lost) = rdma.wire.flush(&self.pool) {
            self.lose(&lost, cx);
        } else if rdma.wire.unsent() > 0 {
            let since = *rdma.waiting_since.get_or_insert(cx.now());
            self.await_host(since, cx);
        }
        false
    }

    pub(super) fn park_rdma(&mut self, cx: &mut Cx) -> Armed {
        let Link::Rdma(rdma) = &mut self.link else { return Armed::Yes };
        // A queue that begins is polled then.
        if (self.is_closing || !self.has_begun) && !rdma.wire.shares_receives() {
            return Armed::Yes;
        }
        match rdma.wire.arm() {
            Ok(false) => Armed::Yes,
            Ok(true) => Armed::Busy,
            Err(_) if self.is_closing => Armed::Yes,
            Err(lost) => {
                self.lose(&lost, cx);
                Armed::Busy
            }
        }
    }
}
