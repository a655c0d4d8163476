//! A queue under load: requests of one length, laid out once and submitted repeatedly. Runs on the front-end's
//! thread.

use crate::{Announced, Builder, Error, Memory, Operation, Piece, Place, RequestError, Ring, Shape};
use aryk_dma::GuestArea;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

/// Bytes of an indirect table of three descriptors, on a cache line of its own.
const TABLE: u64 = 64;

/// A queue with a slot for each request.
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
    /// Offset of slot 0's indirect table.
    tables: u64,
}

/// A request that completed successfully.
#[derive(Clone, Copy, Debug)]
pub struct Done {
    /// The request's slot.
    pub slot: u16,
    /// The request's operation.
    pub operation: Operation,
    /// The place of the request's data.
    pub place: Place,
}

/// The parameters of a queue.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// The ring's shape.
    pub shape: Shape,
    /// Number of requests.
    pub slots: u16,
    /// Bytes of data per request.
    pub len: u32,
    /// Whether each request has an indirect table, instead of descriptors in the ring.
    pub indirect: bool,
}

impl Layout {
    /// Bytes of memory that the queue takes.
    #[must_use]
    pub fn space<B: Builder>(&self) -> u64 {
        self.shape.space() + self.heads::<B>() + u64::from(self.slots) * self.step()
    }

    /// Bytes of all requests without their data.
    fn heads<B: Builder>(&self) -> u64 {
        (u64::from(self.slots) * (B::SPACE + TABLE)).next_multiple_of(aryk_dma::PAGE)
    }

    /// Bytes from one request's data to the next request's.
    fn step(&self) -> u64 {
        u64::from(self.len).next_multiple_of(aryk_dma::PAGE)
    }
}

impl<B: Builder> Queue<B> {
    /// Creates queue `index`, which is polled, in the memory from offset `at` on.
    ///
    /// # Errors
    /// The kernel refuses an eventfd.
    ///
    /// # Panics
    /// If the queue does not fit.
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

    /// The queue's parameters for [`crate::Session::start`].
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

    /// The builder of the queue's requests.
    pub(crate) const fn builder_mut(&mut self) -> &mut B {
        &mut self.builder
    }

    /// The guest's memory.
    pub(crate) const fn area(&self) -> &GuestArea {
        &self.area
    }

    /// The error for a failed request of this queue.
    pub(crate) const fn failed(&self, source: RequestError) -> Error {
        Error::Request { queue: self.index, source }
    }

    /// Submits one request, laid out as a read and then changed by `set_up`, and waits for its completion; returns
    /// its place. No other request may be in flight.
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
        self.publish();
        self.sleep(patience)?;
        self.ring.take().map_err(|source| Error::Ring { queue, source })?;
        Ok(place)
    }

    /// Sleeps until a request has completed.
    fn sleep(&mut self, patience: Duration) -> Result<(), Error> {
        let queue = self.index;
        let patience = Timespec::try_from(patience).map_err(|_| Error::Unanswered(queue))?;
        self.ring.arm();
        while !self.ring.is_ready() {
            let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
            let ready = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&patience)));
            if ready.map_err(Error::os("poll"))? == 0 {
                return Err(Error::Unanswered(queue));
            }
            // The value read is only the number of calls.
            let _ = rustix::io::read(&self.call, &mut [0; 8]);
        }
        self.ring.disarm();
        Ok(())
    }

    /// Takes the next completion, for which it sleeps.
    ///
    /// # Errors
    /// [`Error::Unanswered`] after `patience`; the errors of [`Queue::take`].
    pub fn wait(&mut self, patience: Duration) -> Result<Done, Error> {
        loop {
            if let Some(done) = self.take()? {
                return Ok(done);
            }
            self.sleep(patience)?;
        }
    }

    /// The place of a slot's request.
    #[must_use]
    pub fn place(&self, slot: u16) -> Place {
        self.slots[usize::from(slot)].1
    }

    /// Adds a request for the disk's bytes from `offset` on; [`Queue::publish`] makes it visible to the device.
    ///
    /// # Panics
    /// If the slot's last request is not completed.
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

    /// Makes the added requests visible to the device, and kicks it if it asks for kicks.
    #[inline]
    pub fn publish(&mut self) {
        if self.ring.publish() {
            self.kick();
        }
    }

    #[cold]
    fn kick(&self) {
        // EAGAIN, a full counter, is harmless: the device has not read the earlier kicks yet.
        let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
    }

    /// Takes the next completion.
    ///
    /// # Errors
    /// The request was not in flight, or failed.
    #[inline]
    pub fn take(&mut self) -> Result<Option<Done>, Error> {
        let queue = self.index;
        let taken = self.ring.take().map_err(|source| Error::Ring { queue, source })?;
        let Some((slot, written)) = taken else { return Ok(None) };
        let (operation, place) = self.slots[usize::from(slot)];
        let checked = self.builder.check(&self.area, operation, place, written);
        checked.map_err(|source: RequestError| Error::Request { queue, source })?;
        Ok(Some(Done { slot, operation, place }))
    }
}
