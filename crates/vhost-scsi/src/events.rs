//! Events for guests (virtio 1.2, section 5.6.6.3). Reactor context.
//!
//! Events wait for the guest's buffers. Waiting events are not a queue but a set of flags per target: disk removed, disk added,
//! size changed, properties changed, sent in this order. So a guest that leaves its event queue empty for any length of time
//! receives few events when it refills the queue, and they describe the current state: no change is lost and no event is out of
//! date. A queue that stops passes its waiting events to its successor, so that a VM that its VMM pauses and resumes misses no
//! event.

use crate::wire::{Event, TARGETS};
use aryk_vhost_device::GuestQueue;
use aryk_virtqueue::Chain;
use zerocopy::IntoBytes;

/// A change of a target that the guest receives as an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TargetEvent {
    /// The target's disk is gone. A guest may know the removed disk from its own scan of the targets, even if it received no
    /// event for it.
    Unplugged,
    /// The target has a disk now.
    Plugged,
    /// The target's disk has another size.
    Resized,
    /// The target's disk has other properties, such as whether it can be written.
    Changed,
}

impl TargetEvent {
    /// The order in which the events are sent.
    const ALL: [Self; 4] = [Self::Unplugged, Self::Plugged, Self::Resized, Self::Changed];

    const fn of(self, target: u8) -> Event {
        match self {
            Self::Unplugged => Event::unplugged(target),
            Self::Plugged => Event::plugged(target),
            Self::Resized => Event::resized(target),
            Self::Changed => Event::changed(target),
        }
    }
}

/// Buffers taken in one poll: few, because each buffer may have as many descriptors as a chain can have.
const BUFFERS: usize = 4;

/// Waiting events of each target, in the order of [`TargetEvent::ALL`].
#[derive(Clone, Copy, Debug, Default)]
pub struct PendingEvents([[bool; 4]; TARGETS as usize]);

impl PendingEvents {
    /// Adds an event of a target.
    pub fn add(&mut self, event: TargetEvent, target: u8) {
        let waiting = &mut self.0[usize::from(target)];
        match event {
            TargetEvent::Unplugged => *waiting = [true, false, false, false],
            // The guest reads the size and properties of a new disk anyway.
            TargetEvent::Plugged => *waiting = [waiting[0], true, false, false],
            TargetEvent::Resized => waiting[2] = true,
            TargetEvent::Changed => waiting[3] = true,
        }
    }

    fn all(&mut self) -> impl Iterator<Item = (&mut bool, Event)> {
        let targets = (0..).zip(&mut self.0);
        targets.flat_map(|(target, waiting)| {
            waiting.iter_mut().zip(TargetEvent::ALL.map(|event| event.of(target)))
        })
    }
}

/// The event queue's waiting events.
#[derive(Debug)]
pub struct Events {
    /// The features that the guest has acknowledged.
    features: u64,
    pending: PendingEvents,
}

impl Events {
    /// Takes over `pending`, without the events whose feature the guest has not acknowledged.
    pub fn new(features: u64, mut pending: PendingEvents) -> Self {
        pending.all().for_each(|(waits, event)| *waits &= features & event.feature() != 0);
        Self { features, pending }
    }

    /// Adds an event of a target if the guest has acknowledged its feature.
    pub fn post(&mut self, event: TargetEvent, target: u8) {
        if self.features & event.of(target).feature() != 0 {
            self.pending.add(event, target);
        }
    }

    /// Takes the waiting events, for the queue's successor.
    pub fn take_pending(&mut self) -> PendingEvents {
        std::mem::take(&mut self.pending)
    }

    /// Whether an event is waiting.
    pub fn has_some(&self) -> bool {
        self.pending.0.as_flattened().contains(&true)
    }

    /// Takes the next waiting event.
    fn take(&mut self) -> Option<Event> {
        self.pending.all().find_map(|(waits, event)| std::mem::take(waits).then_some(event))
    }

    /// Sends waiting events as far as the guest has provided buffers. Returns whether it took a buffer.
    pub fn send(&mut self, guest: &mut GuestQueue) -> bool {
        let mut sent = false;
        // Bounded, because a guest may refill the queue faster than this loop empties it.
        for _ in 0..BUFFERS {
            if !self.has_some() || !guest.take_one(|guest, head, chain| self.put(head, chain, guest)) {
                break;
            }
            sent = true;
        }
        sent
    }

    fn put(&mut self, head: u16, chain: &Chain, guest: &mut GuestQueue) {
        let mut list = guest.sgs.begin(head);
        let fits = chain.writable_len() >= size_of::<Event>() as u64
            && chain.writable().iter().all(|p| list.push(p.addr, p.len).is_ok());
        if !fits {
            guest.complete_unanswerable(head);
            return;
        }
        let event = self.take().expect("an event is waiting");
        guest.sgs.sgl(head).write(0, event.as_bytes());
        let len = size_of::<Event>() as u32;
        guest.complete(head, len, |_| 0..len);
    }
}
