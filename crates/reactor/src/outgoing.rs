//! Messages from this reactor to others. Reactor context.
//!
//! Each message is sent at the end of the turn. Messages for a reactor that has no room wait, in order, and do not delay
//! messages for other reactors; that reactor wakes this one when it has room.

use crate::handle::{Handle, Message};
use crate::mailbox::Refused;
use std::collections::VecDeque;
use std::task::Waker;

struct Destination {
    to: Handle,
    messages: VecDeque<Message>,
    /// The destination had no room, and will wake this reactor when it may have.
    waits: bool,
}

/// Messages to be sent, by destination; there are about as many destinations as cores.
#[derive(Default)]
pub(crate) struct Outgoing {
    destinations: Vec<Destination>,
    /// Whether there may be a message that can be sent now.
    untried: bool,
}

impl Outgoing {
    pub fn push(&mut self, to: &Handle, message: Message) {
        self.untried = true;
        if let Some(found) = self.destinations.iter_mut().find(|d| d.to == *to) {
            return found.messages.push_back(message);
        }
        let messages = VecDeque::from([message]);
        self.destinations.push(Destination { to: to.clone(), messages, waits: false });
    }

    /// Whether all messages wait for room at their destinations.
    pub const fn is_quiet(&self) -> bool {
        !self.untried
    }

    /// Whether there is nothing to be sent.
    pub fn is_empty(&self) -> bool {
        self.destinations.iter().all(|d| d.messages.is_empty())
    }

    /// Makes the next flush try all destinations again, since one of them may have room.
    pub fn retry(&mut self) {
        for destination in &mut self.destinations {
            destination.waits = false;
            self.untried |= !destination.messages.is_empty();
        }
    }

    /// Sends the messages for which there is room; `waker` is woken when there may be more room.
    pub fn flush(&mut self, waker: &Waker) {
        if !std::mem::take(&mut self.untried) {
            return;
        }
        for destination in self.destinations.iter_mut().filter(|d| !d.waits) {
            while let Some(message) = destination.messages.pop_front() {
                match destination.to.send_or_wait(message, waker) {
                    Ok(()) => {}
                    Err(Refused::Full(message)) => {
                        destination.messages.push_front(message);
                        destination.waits = true;
                        break;
                    }
                    // The destination has ended, so the message cannot run.
                    Err(Refused::Closed(message)) => drop(message),
                }
            }
        }
        // Destinations that have ended are removed.
        self.destinations.retain(|d| !d.to.has_ended());
    }
}
