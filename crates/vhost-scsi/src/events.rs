//! What guests are told unasked (virtio 1.2, section 5.6.6.3). Reactor context.
//!
//! Events wait for the guest's buffers. What waits is not a queue but what is to be said of each target: that its disk is
//! gone, that there is one, that it has another size, that it has other properties, in this order. So a guest that does not
//! refill its queue, however long, is told in a few events how things are when it does; none is ever lost, and none comes
//! that is out of date by then. A queue that stops leaves what waits to its successor: a VM that its monitor stops and lets go
//! on is not to miss anything.

use crate::wire::{Event, TARGETS};
use aryk_vhost_device::GuestQueue;
use aryk_virtqueue::Chain;
use zerocopy::IntoBytes;

/// What there may be to say of a target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum News {
    /// Its disk is gone. The guest may know of that disk by having looked for itself.
    Unplugged,
    /// It has a disk.
    Plugged,
    /// Its disk has another size.
    Resized,
    /// Its disk has other properties, such as whether it can be written.
    Changed,
}

impl News {
    /// In the order in which they are said.
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

/// Buffers that are taken in one poll: few, for each may have as many descriptors as a chain can.
const BUFFERS: usize = 4;

/// What waits, by target and in the order of [`News::ALL`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Waiting([[bool; 4]; TARGETS as usize]);

impl Waiting {
    /// Something is to be said of a target.
    pub fn add(&mut self, news: News, target: u8) {
        let waiting = &mut self.0[usize::from(target)];
        match news {
            News::Unplugged => *waiting = [true, false, false, false],
            // A disk's size and properties are what the guest asks for first.
            News::Plugged => *waiting = [waiting[0], true, false, false],
            News::Resized => waiting[2] = true,
            News::Changed => waiting[3] = true,
        }
    }

    fn all(&mut self) -> impl Iterator<Item = (&mut bool, Event)> {
        let targets = (0..).zip(&mut self.0);
        targets.flat_map(|(target, waiting)| waiting.iter_mut().zip(News::ALL.map(|news| news.of(target))))
    }
}

/// Events that wait.
#[derive(Debug)]
pub struct Events {
    /// What the guest has agreed to hear.
    features: u64,
    waiting: Waiting,
}

impl Events {
    /// Those that have waited already, for a guest that has agreed to these features.
    pub fn new(features: u64, mut waiting: Waiting) -> Self {
        waiting.all().for_each(|(waits, event)| *waits &= features & event.feature() != 0);
        Self { features, waiting }
    }

    /// Something is to be said of a target, if the guest wants to hear of such.
    pub fn post(&mut self, news: News, target: u8) {
        if self.features & news.of(target).feature() != 0 {
            self.waiting.add(news, target);
        }
    }

    /// What waits, for the queue's successor.
    pub fn take_waiting(&mut self) -> Waiting {
        std::mem::take(&mut self.waiting)
    }

    /// Whether there is something to send.
    pub fn has_some(&self) -> bool {
        self.waiting.0.as_flattened().contains(&true)
    }

    /// The next event, which waits no more.
    fn take(&mut self) -> Option<Event> {
        self.waiting.all().find_map(|(waits, event)| std::mem::take(waits).then_some(event))
    }

    /// Sends what there are buffers for; whether there were any.
    pub fn send(&mut self, guest: &mut GuestQueue) -> bool {
        let mut sent = false;
        // A guest may give faster than we take.
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
        let event = self.take().expect("there is some");
        guest.sgs.sgl(head).write(0, event.as_bytes());
        let len = size_of::<Event>() as u32;
        guest.complete(head, len, |_| 0..len);
    }
}
