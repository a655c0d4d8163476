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
        let mut has_any = false;
        let mut may_have_more = self.has_begun;
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

    /// Polls once. Returns whether there was something, and whether there may be more.
    fn poll_wire(&mut self, cx: &mut Cx) -> Result<(bool, bool), Lost> {
        let Link::Rdma(rdma) = &mut self.link else { return Ok((false, false)) };
        let is_full = rdma.wire.poll()?;
        let mut has_any = false;
        while let Link::Rdma(rdma) = &mut self.link
            && !self.is_closing
            && let Some(event) = rdma.wire.next()?
        {
            has_any = true;
            self.follow(event, cx);
        }
        Ok((has_any, is_full))
    }

    fn follow(&mut self, event: Event, cx: &mut Cx) {
        match event {
            Event::Command { data, .. } if !self.takes_input() => {
                give_back(&self.pool, &mut self.share, data, &self.waiting, self.root, cx);
            }
            Event::Command { slot, entry, data_len, data } => {
                let data = if data_len > 0 {
                    Some(data)
                } else {
                    give_back(&self.pool, &mut self.share, data, &self.waiting, self.root, cx);
                    None
                };
                *self.slot(slot) = Slot::new(entry, data_len, data);
                self.execute(slot, true, cx);
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
        if self.is_closing || !self.has_begun {
            return Armed::Yes;
        }
        match rdma.wire.arm() {
            Ok(false) => Armed::Yes,
            Ok(true) => Armed::Busy,
            Err(lost) => {
                self.lose(&lost, cx);
                Armed::Busy
            }
        }
    }
}
