//! A queue under load: requests of one length, laid out once, and offered again and again. The front-end's thread.

use crate::{Announced, Builder, Error, Memory, Operation, Piece, Place, Ring, Shape, Trouble};
use aryk_dma::GuestArea;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Bytes of an indirect table of three pieces, on a line of its own.
const TABLE: u64 = 64;

/// A queue, all of whose requests have a slot.
#[derive(Debug)]
pub struct Queue<B> {
    index: u16,
    size: u16,
    ring: Ring,
    kick: OwnedFd,
    call: OwnedFd,
    area: GuestArea,
    builder: B,
    slots: Vec<(Operation, Place)>,
    indirect: bool,
    /// Where slot 0's table lies.
    tables: u64,
}

/// A request that came back well.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// Its slot.
    pub slot: u16,
    /// What it did.
    pub operation: Operation,
    /// Where its data lies.
    pub place: Place,
}

/// What a queue is to be.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Its ring.
    pub shape: Shape,
    /// Requests.
    pub slots: u16,
    /// Bytes of data of each.
    pub len: u32,
    /// Whether each has a table of its own, instead of descriptors in the ring.
    pub indirect: bool,
}

impl Layout {
    /// Bytes of memory of such a queue.
    #[must_use]
    pub fn space<B: Builder>(&self) -> u64 {
        self.shape.space() + self.heads::<B>() + u64::from(self.slots) * self.step()
    }

    /// Bytes of all requests without their data.
    fn heads<B: Builder>(&self) -> u64 {
        (u64::from(self.slots) * (B::SPACE + TABLE)).next_multiple_of(aryk_dma::PAGE)
    }

    /// From one request's data to the next one's.
    fn step(&self) -> u64 {
        u64::from(self.len).next_multiple_of(aryk_dma::PAGE)
    }
}

impl<B: Builder> Queue<B> {
    /// Queue number `index`, polled, from offset `at` of the memory on.
    ///
    /// # Errors
    /// The kernel gives no file descriptor.
    ///
    /// # Panics
    /// If it does not fit.
    pub fn new(builder: B, memory: &Memory, index: u16, at: u64, layout: Layout) -> Result<Self, Error> {
        let Layout { shape, slots, len, indirect } = layout;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = || event().map_err(Error::os("eventfd"));
        let heads_at = at + shape.space();
        let tables = heads_at + u64::from(slots) * B::SPACE;
        let data = heads_at + layout.heads::<B>();
        let step = layout.step();
        let place = |slot: u64| Place { head: heads_at + slot * B::SPACE, data: data + slot * step, len };
        let mut queue = Self {
            index,
            size: shape.size,
            ring: Ring::new(shape, memory, at),
            kick: event()?,
            call: event()?,
            area: memory.whole().clone(),
            builder,
            slots: (0..u64::from(slots)).map(|slot| (Operation::Read, place(slot))).collect(),
            indirect,
            tables,
        };
        queue.ring.disarm();
        (0..slots).for_each(|slot| queue.lay_out(slot));
        Ok(queue)
    }

    fn lay_out(&mut self, slot: u16) {
        let (operation, place) = self.slots[usize::from(slot)];
        let pieces: [Piece; 3] = self.builder.pieces(operation, place);
        let table = self.indirect.then_some(self.tables + TABLE * u64::from(slot));
        self.ring.prepare(slot, &pieces, table);
    }

    /// As a session announces it.
    #[must_use]
    pub fn announced(&self) -> Announced<'_> {
        Announced {
            index: self.index,
            size: self.size,
            ring: &self.ring,
            kick: self.kick.as_fd(),
            call: self.call.as_fd(),
        }
    }

    /// How its requests look.
    pub(crate) const fn builder_mut(&mut self) -> &mut B {
        &mut self.builder
    }

    /// The memory.
    pub(crate) const fn area(&self) -> &GuestArea {
        &self.area
    }

    /// What is wrong with a request of this queue.
    pub(crate) const fn failed(&self, source: Trouble) -> Error {
        Error::Request { queue: self.index, source }
    }

    /// One request, laid out as a read, that `set_up` writes; where it lies, once it has come back. Nothing else is in flight.
    pub(crate) fn round_trip(
        &mut self,
        patience: Duration,
        set_up: impl FnOnce(&GuestArea, Place),
    ) -> Result<Place, Error> {
        let queue = self.index;
        let (last, place) = self.slots[0];
        if last != Operation::Read {
            self.slots[0].0 = Operation::Read;
            self.lay_out(0);
        }
        set_up(&self.area, place);
        self.ring.offer(0);
        self.ring.arm();
        self.publish();
        let patience = Timespec::try_from(patience).map_err(|_| Error::Unanswered(queue))?;
        while !self.ring.is_ready() {
            let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
            let ready = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&patience)));
            if ready.map_err(Error::os("poll"))? == 0 {
                return Err(Error::Unanswered(queue));
            }
            // What was read is only how often it was called.
            let _ = rustix::io::read(&self.call, &mut [0; 8]);
        }
        self.ring.disarm();
        self.ring.take().map_err(|source| Error::Ring { queue, source })?;
        Ok(place)
    }

    /// Where a slot's request lies.
    #[must_use]
    pub fn place(&self, slot: u16) -> Place {
        self.slots[usize::from(slot)].1
    }

    /// Adds a request for the disk's bytes from `offset` on, without showing it yet.
    ///
    /// # Panics
    /// If the slot's last request has not come back.
    #[inline]
    pub fn submit(&mut self, slot: u16, operation: Operation, offset: u64) {
        let (last, place) = self.slots[usize::from(slot)];
        if operation != last {
            self.slots[usize::from(slot)].0 = operation;
            self.lay_out(slot);
        }
        self.builder.set_up(&self.area, operation, place, offset);
        self.ring.offer(slot);
    }

    /// Shows what was added, and kicks the device if it wants to be.
    #[inline]
    pub fn publish(&mut self) {
        if self.ring.publish() {
            self.kick();
        }
    }

    #[cold]
    fn kick(&self) {
        // Full is as good: the device has not looked yet.
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    /// The next request that came back.
    ///
    /// # Errors
    /// It was not in flight, or failed.
    #[inline]
    pub fn take(&mut self) -> Result<Option<Done>, Error> {
        let queue = self.index;
        let taken = self.ring.take().map_err(|source| Error::Ring { queue, source })?;
        let Some((slot, written)) = taken else { return Ok(None) };
        let (operation, place) = self.slots[usize::from(slot)];
        let checked = self.builder.check(&self.area, operation, place, written);
        checked.map_err(|source: Trouble| Error::Request { queue, source })?;
        Ok(Some(Done { slot, operation, place }))
    }
}
