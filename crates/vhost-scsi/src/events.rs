//! What guests are told unasked (virtio 1.2, section 5.6.6.3). Reactor context.
//!
//! Events wait for the guest's buffers. What waits is not a queue but what is to be said of each target: that its disk is gone, that there is one, that it
//! has another size, in this order. So a guest that does not refill its queue, however long, is told in a few events how things are when it does; none is
//! ever lost, and none comes that is out of date by then.

use crate::line::Line;
use crate::wire::{Event, TARGETS};
use aryk_virtqueue::Chain;
use zerocopy::IntoBytes;

/// What there may be to say of a target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum News {
    /// Its disk is gone. The guest may know of that disk by having looked for itself.
    Unplugged,
    /// It has a disk.
    Plugged,
    /// Its disk has another size.
    Resized,
}

impl News {
    /// In the order in which they are said.
    const ALL: [Self; 3] = [Self::Unplugged, Self::Plugged, Self::Resized];

    const fn of(self, target: u8) -> Event {
        match self {
            Self::Unplugged => Event::unplugged(target),
            Self::Plugged => Event::plugged(target),
            Self::Resized => Event::resized(target),
        }
    }
}

/// Events that wait.
#[derive(Debug)]
pub(crate) struct Events {
    /// What the guest has agreed to hear.
    features: u64,
    /// What waits, by target and in the order of [`News::ALL`].
    waiting: [[bool; 3]; TARGETS as usize],
}

impl Events {
    /// None yet, for a guest that has agreed to these features.
    pub const fn new(features: u64) -> Self {
        Self { features, waiting: [[false; 3]; TARGETS as usize] }
    }

    /// Something is to be said of a target, if the guest wants to hear of such.
    pub fn post(&mut self, news: News, target: u8) {
        if self.features & news.of(target).feature() == 0 {
            return;
        }
        let waiting = &mut self.waiting[usize::from(target)];
        match news {
            News::Unplugged => *waiting = [true, false, false],
            // A disk's size is what the guest asks for first.
            News::Plugged => (waiting[1], waiting[2]) = (true, false),
            News::Resized => waiting[2] = true,
        }
    }

    /// Whether there is something to send.
    pub fn has_some(&self) -> bool {
        self.waiting.as_flattened().contains(&true)
    }

    /// The next event, which waits no more.
    fn take(&mut self) -> Option<Event> {
        let targets = (0..).zip(&mut self.waiting);
        let mut all = targets
            .flat_map(|(target, waiting)| waiting.iter_mut().zip(News::ALL.map(|news| news.of(target))));
        all.find_map(|(waits, event)| std::mem::take(waits).then_some(event))
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
            let event = self.take().expect("there is some");
            line.sgs.sgl(head).write(0, event.as_bytes());
            line.give_back(head, size_of::<Event>() as u32);
        }
        sent
    }
}
