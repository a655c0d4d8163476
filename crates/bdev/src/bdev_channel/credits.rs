//! How many pieces a device has at one time. Pure but for waking roots; reactor context.
//!
//! A channel has [`Limits::depth`](crate::Limits::depth) credits of its own. Channels may share a driver, such as one
//! NVMe queue pair or one connection for hundreds of disks. Then the driver has a [`CreditPool`], and each piece also needs a
//! credit of the pool. While the pool is short, channels that want a credit stand in a
//! line, and each credit that comes back goes to the first of them: one credit a turn of the line for each channel, however
//! many requests it has.
//!
//! A driver that has room for them lets each channel have some pieces without a credit of the pool ([`CreditPool::own`]):
//! requests that a disk does not complete then hold up other disks in part only.

use crate::Bytes;
use aryk_reactor::{Cx, Local, RootId};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;

/// Bytes that a channel sends to its device from one poll to the next, and those of one piece more: a module may copy them
/// then and there, or have the kernel do so. Requests that want more wait for the next turn, in which other channels send
/// theirs too. It is about 80 µs of copies, so that a reactor's turn stays short beside the latency of a disk.
const POLL_BYTES: Bytes = Bytes(512 << 10);

/// The credits of a driver, which the channels of one reactor share ([`crate::Channel::credits`]).
#[derive(Clone)]
pub struct CreditPool(Rc<Pool>);

struct Pool {
    depth: u32,
    /// Pieces that each channel may have beside the pool.
    own: u32,
    free: Cell<u32>,
    /// Channels that want a credit. While there are some, no credit is free.
    line: RefCell<VecDeque<Rc<Place>>>,
}

/// A channel's part in a pool.
struct Place {
    /// Woken when a credit is granted.
    root: RootId,
    state: Cell<Standing>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Standing {
    /// The channel wants no credit.
    Aside,
    /// The channel stands in the line.
    Waiting,
    /// The channel stands in the line and wants no credit any more. Its place is passed over, unless it wants one again before
    /// that.
    Left,
    /// A credit was granted, and the channel has not taken it.
    Granted,
}

impl fmt::Debug for CreditPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pool { depth, free, line, .. } = &*self.0;
        let waiting = line.borrow().len();
        write!(f, "{} of {depth} credits free, {waiting} channels waiting", free.get())
    }
}

impl CreditPool {
    /// A pool of `depth` credits.
    ///
    /// # Panics
    /// If that is none.
    pub fn new(depth: u32) -> Self {
        Self::own(depth, 0)
    }

    /// A pool of `depth` credits, beside which each channel may have `own` pieces.
    ///
    /// # Panics
    /// If there are no credits.
    pub fn own(depth: u32, own: u32) -> Self {
        assert!(depth > 0, "a pool without credits");
        Self(Rc::new(Pool { depth, own, free: Cell::new(depth), line: RefCell::default() }))
    }

    /// Credits that no channel has.
    pub fn free(&self) -> u32 {
        self.0.free.get()
    }
}

impl Pool {
    /// Gives a credit to the first channel of the line, or keeps it.
    fn give_back(&self, mut wake: impl FnMut(RootId)) {
        let mut line = self.line.borrow_mut();
        while let Some(place) = line.pop_front() {
            match place.state.get() {
                Standing::Waiting => {
                    place.state.set(Standing::Granted);
                    return wake(place.root);
                }
                Standing::Left => place.state.set(Standing::Aside),
                other => unreachable!("a channel in the line is {other:?}"),
            }
        }
        self.free.set(self.free.get() + 1);
        assert!(self.free.get() <= self.depth, "more credits came back than were given");
    }
}

/// A channel's access to a pool.
struct Lease {
    pool: Rc<Pool>,
    place: Rc<Place>,
    local: Local,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.decline(|root| self.local.defer(move |cx| cx.wake(root)));
        if self.place.state.get() == Standing::Left {
            self.pool.line.borrow_mut().retain(|place| !Rc::ptr_eq(place, &self.place));
        }
    }
}

impl Lease {
    fn try_take(&self) -> bool {
        let Self { pool, place, .. } = self;
        match place.state.get() {
            Standing::Granted => {
                place.state.set(Standing::Aside);
                return true;
            }
            Standing::Waiting => return false,
            Standing::Left => {
                place.state.set(Standing::Waiting);
                return false;
            }
            Standing::Aside => {}
        }
        let free = pool.free.get();
        if free > 0 {
            debug_assert!(pool.line.borrow().is_empty(), "a credit is free though channels wait");
            pool.free.set(free - 1);
            return true;
        }
        place.state.set(Standing::Waiting);
        pool.line.borrow_mut().push_back(Rc::clone(place));
        false
    }

    /// Wants no credit any more: leaves the line, or gives the credit back that was granted.
    fn decline(&self, wake: impl FnMut(RootId)) {
        match self.place.state.get() {
            Standing::Granted => {
                self.place.state.set(Standing::Aside);
                self.pool.give_back(wake);
            }
            Standing::Waiting => self.place.state.set(Standing::Left),
            Standing::Aside | Standing::Left => {}
        }
    }
}

/// What a channel may send to its device at the moment.
pub(crate) struct Credits {
    /// Pieces that the device has.
    at_device: u32,
    /// How many it may have of this channel.
    depth: u32,
    /// Bytes that may be sent before the next poll, which those of one piece may exceed.
    bytes_left: Bytes,
    lease: Option<Lease>,
}

impl Credits {
    /// Credits of a channel whose completions wake `root`.
    pub fn new(depth: u32, pool: Option<CreditPool>, root: RootId, local: &Local) -> Self {
        let place = || Rc::new(Place { root, state: Cell::new(Standing::Aside) });
        let lease = pool.map(|CreditPool(pool)| Lease { pool, place: place(), local: local.clone() });
        Self { at_device: 0, depth, bytes_left: POLL_BYTES, lease }
    }

    /// Pieces that the device has.
    pub const fn at_device(&self) -> u32 {
        self.at_device
    }

    /// Lets the device have so many pieces from now on. Those above stay there until they complete.
    pub const fn set_depth(&mut self, depth: u32) {
        self.depth = depth;
    }

    /// Takes the credit for a piece. If there is none in the pool, the channel joins its line.
    #[inline]
    pub fn try_take(&mut self) -> bool {
        if self.at_device >= self.depth || self.is_out_of_bytes() {
            return false;
        }
        if let Some(lease) = &self.lease
            && self.at_device >= lease.pool.own
            && !lease.try_take()
        {
            return false;
        }
        self.at_device += 1;
        true
    }

    /// Counts the bytes of a piece whose credit was taken.
    #[inline]
    pub const fn spend(&mut self, bytes: Bytes) {
        debug_assert!(self.at_device > 0, "a piece takes its credit before its bytes");
        self.bytes_left = self.bytes_left.saturating_sub(bytes);
    }

    /// The device has completed a piece, or never got it.
    #[inline]
    pub fn give_back(&mut self, cx: &mut Cx) {
        assert!(self.at_device > 0, "a device completes a piece once");
        self.at_device -= 1;
        // The own pieces are the first that were sent, and count as the last that complete.
        if let Some(lease) = &self.lease
            && self.at_device >= lease.pool.own
        {
            lease.pool.give_back(|root| cx.wake(root));
        }
    }

    /// A poll begins: as many bytes may go as in each.
    #[inline]
    pub const fn begin_poll(&mut self) {
        self.bytes_left = POLL_BYTES;
    }

    /// Whether the bytes of this poll are used up.
    #[inline]
    pub const fn is_out_of_bytes(&self) -> bool {
        self.bytes_left.0 == 0
    }

    /// Whether pieces need credits of a pool too.
    #[inline]
    pub const fn is_leased(&self) -> bool {
        self.lease.is_some()
    }

    /// The channel has nothing to send: it leaves the pool's line, or the credit that it was granted goes to another channel.
    /// So a channel that is quiet has no credit that nothing would make it give back.
    #[inline]
    pub fn decline(&mut self, cx: &mut Cx) {
        if let Some(lease) = &self.lease {
            lease.decline(|root| cx.wake(root));
        }
    }
}

#[cfg(test)]
mod tests;
