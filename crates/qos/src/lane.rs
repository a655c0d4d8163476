//! The queue of an opener's requests before the buckets that limit them. Reactor context.
//!
//! A request gets its cost from every bucket on its path, or from none. While one bucket has no tokens, the lane waits in that
//! bucket's ring and in no other.
//!
//! If leases allow it, a lane pays several requests of one size at a time: the next requests do not read the buckets' shares at
//! all. Prepaid requests count as leased. A lane that waits, or that is dropped because limits have changed, returns them.

use crate::share::{Share, Wheel};
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The buckets that limit a request, from the disk's to the outermost group's.
pub type Path<W, T> = Vec<Rc<RefCell<Share<W, T>>>>;

/// A bucket on the path, and the cost there of each prepaid request.
struct Stage<W, T> {
    share: Rc<RefCell<Share<W, T>>>,
    price: u64,
}

/// Prepaid requests of one size.
#[derive(Default)]
struct Prepaid {
    bytes: u64,
    left: u64,
    /// Number of prepaid requests at the time of the payment.
    of: u64,
    /// Number of requests of other sizes since then.
    others: u64,
}

/// The id of the next lane.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// An opener's queue. See the file's head.
// The fields that nearly every request reads come first, and so share cache lines.
#[repr(C)]
pub struct Lane<W, T> {
    prepaid: Prepaid,
    id: u64,
    who: W,
    path: Vec<Stage<W, T>>,
    /// The bucket that the lane waits for.
    waits_at: Option<usize>,
    /// The bucket in which the lane had a debt when it stopped waiting, and the debt.
    debt: (usize, i64),
}

impl<W, T> fmt::Debug for Lane<W, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut s = f.debug_struct("Lane");
        s.field("id", &self.id).field("waits_at", &self.waits_at).finish_non_exhaustive()
    }
}

impl<W: Copy, T> Lane<W, T> {
    /// Creates a lane with these buckets. `who` identifies its owner for [`Wheel`].
    pub fn new(who: W, path: Path<W, T>) -> Self {
        let path = path.into_iter().map(|share| Stage { share, price: 0 }).collect();
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, who, prepaid: Prepaid::default(), path, waits_at: None, debt: (0, 0) }
    }

    /// Whether the lane waits.
    pub const fn is_waiting(&self) -> bool {
        self.waits_at.is_some()
    }

    /// Uses one prepaid request of this size. Returns `false` if none is left; then [`Lane::ask`] is needed.
    #[inline]
    pub fn spend_ahead(&mut self, bytes: u64) -> bool {
        let is_paid = self.prepaid.left > 0 && self.prepaid.bytes == bytes;
        self.prepaid.left -= u64::from(is_paid);
        is_paid
    }

    /// Pays a request of this size from the leases of all buckets. Returns `false` if a lease is too small or lanes wait.
    fn pay(&mut self, bytes: u64) -> bool {
        let is_short = |stage: &Stage<W, T>| !stage.share.borrow_mut().spend(bytes);
        if let Some(paid) = self.path.iter().position(is_short) {
            self.path[..paid].iter().for_each(|stage| stage.share.borrow_mut().take_back(bytes));
            return false;
        }
        // The size of requests may have changed permanently.
        if self.prepaid.others >= self.prepaid.left {
            self.prepay(bytes);
        } else {
            self.prepaid.others += 1;
        }
        true
    }

    /// Prepays as many further requests as all leases allow.
    fn prepay(&mut self, bytes: u64) {
        self.hand_back();
        let payable = |stage: &Stage<W, T>| {
            stage.share.borrow_mut().payable(bytes, Rc::strong_count(&stage.share) as u64)
        };
        let requests = self.path.iter().map(payable).min().unwrap_or(0);
        if requests > 0 {
            self.path
                .iter_mut()
                .for_each(|stage| stage.price = stage.share.borrow_mut().lend(bytes, requests));
            self.prepaid = Prepaid { bytes, left: requests, of: requests, others: 0 };
        }
        self.check_invariants();
    }

    /// Asks to submit the first request, of `bytes` bytes; `behind` more requests wait behind it. [`Lane::settle`] must follow
    /// the last of a series of calls.
    pub fn ask(
        &mut self,
        bytes: u64,
        behind: u64,
        now: u64,
        wheel: &mut impl Wheel<Waiter = W, Timer = T>,
    ) -> bool {
        if self.spend_ahead(bytes) || self.pay(bytes) {
            return true;
        }
        for at in 0..self.path.len() {
            let mut share = self.path[at].share.borrow_mut();
            let cost = share.cost(bytes);
            if !share.try_admit(self.id, cost, now) {
                drop(share);
                self.wait_at(at, now, wheel);
                return false;
            }
        }
        for at in 0..self.path.len() {
            let mut share = self.path[at].share.borrow_mut();
            let cost = share.cost(bytes);
            if !share.take(cost, behind, now) {
                drop(share);
                for taken in &self.path[..at] {
                    let mut share = taken.share.borrow_mut();
                    let cost = share.cost(bytes);
                    share.give_back(cost);
                }
                self.wait_at(at, now, wheel);
                return false;
            }
        }
        if let Some(at) = self.waits_at {
            let mut share = self.path[at].share.borrow_mut();
            let cost = share.cost(bytes);
            share.served(self.id, cost);
        }
        true
    }

    /// Starts to wait for the bucket at index `at`, and stops waiting for any other.
    fn wait_at(&mut self, at: usize, now: u64, wheel: &mut impl Wheel<Waiter = W, Timer = T>) {
        if self.waits_at == Some(at) {
            return;
        }
        self.leave(now, wheel);
        self.hand_back();
        let debt = if self.debt.0 == at { self.debt.1 } else { 0 };
        self.path[at].share.borrow_mut().join(self.id, self.who, debt);
        self.waits_at = Some(at);
        self.check_invariants();
    }

    /// Ends a series of [`Lane::ask`]. `has_more`: requests still wait.
    pub fn settle(&mut self, has_more: bool, now: u64, wheel: &mut impl Wheel<Waiter = W, Timer = T>) {
        if !has_more {
            self.leave(now, wheel);
        } else if let Some(at) = self.waits_at {
            self.path[at].share.borrow_mut().settle(now, wheel);
        }
    }

    /// Stops waiting: the lane has no more requests, or cannot submit them now for another reason.
    pub fn leave(&mut self, now: u64, wheel: &mut impl Wheel<Waiter = W, Timer = T>) {
        if let Some(at) = self.waits_at.take() {
            let mut share = self.path[at].share.borrow_mut();
            self.debt = (at, share.leave(self.id));
            share.settle(now, wheel);
        }
    }

    /// Checks, in debug builds, the invariants between two requests.
    #[inline]
    fn check_invariants(&self) {
        if !cfg!(debug_assertions) {
            return;
        }
        let Prepaid { left, of, .. } = self.prepaid;
        assert!(left <= of, "{left} of {of} prepaid requests are left");
        assert!(self.waits_at.is_none() || of == 0, "a lane that waits has prepaid requests");
        assert!(self.waits_at.is_none_or(|at| at < self.path.len()), "a lane waits outside of its path");
        assert!(self.debt.1 <= 0, "a lane keeps tokens of a turn that is over: {}", self.debt.1);
    }
}

impl<W, T> Lane<W, T> {
    /// Returns all prepaid requests, so that [`Lane::spend_ahead`] lets no request overtake others.
    pub fn hand_back(&mut self) {
        let Prepaid { left, of, .. } = std::mem::take(&mut self.prepaid);
        if of > 0 {
            for Stage { share, price } in &self.path {
                share.borrow_mut().end_loan(price * of, price * left);
            }
        }
    }
}

impl<W, T> Drop for Lane<W, T> {
    fn drop(&mut self) {
        self.hand_back();
        assert!(
            self.waits_at.is_none() || std::thread::panicking(),
            "other lanes would wait behind a dropped lane"
        );
    }
}
