//! What guests are told unasked (virtio 1.2, section 5.6.6.3). Reactor context.
//!
//! Events wait for the guest's buffers, but not many: a guest that does not refill its queue is told, when it does, that some were missed, and
//! looks for itself.

use crate::line::Line;
use crate::wire::{EVENTS_MISSED, Event};
use aryk_virtqueue::Chain;
use std::collections::VecDeque;
use zerocopy::IntoBytes;

/// Events that wait at one time.
const WAITING_MAX: usize = 16;

/// Events that wait.
#[derive(Debug)]
pub(crate) struct Events {
    /// What the guest has agreed to hear.
    features: u64,
    waiting: VecDeque<Event>,
    missed: bool,
}

impl Events {
    /// None yet, for a guest that has agreed to these features.
    pub const fn new(features: u64) -> Self {
        Self { features, waiting: VecDeque::new(), missed: false }
    }

    /// An event that is to be sent, if the guest wants to hear of such.
    pub fn post(&mut self, event: Event) {
        if self.features & event.feature() == 0 {
            return;
        }
        if self.waiting.len() < WAITING_MAX {
            self.waiting.push_back(event);
        } else {
            self.missed = true;
        }
    }

    /// Whether there is something to send.
    pub fn has_some(&self) -> bool {
        self.missed || !self.waiting.is_empty()
    }

    /// Sends what there are buffers for; whether that was anything.
    pub fn send(&mut self, line: &mut Line, chain: &mut Chain) -> bool {
        let mut sent = false;
        while self.has_some() {
            let Some(head) = line.pop(chain) else { break };
            sent = true;
            line.sgs.begin(head);
            let fits = chain.writable_len() >= size_of::<Event>() as u64
                && chain.writable().iter().all(|p| line.sgs.push(head, p.addr, p.len).is_ok());
            if !fits {
                line.give_up(head);
                continue;
            }
            let mut event = self.waiting.pop_front().unwrap_or(Event::NONE);
            if std::mem::take(&mut self.missed) {
                event.event |= EVENTS_MISSED;
            }
            line.sgs.sgl(head).write(0, event.as_bytes());
            line.give_back(head, size_of::<Event>() as u32);
        }
        sent
    }
}
