//! An opener's line: its requests, one by one, before all buckets that they go by. Reactor context.
//!
//! A request gets what it costs from every bucket on its path, or nothing. While one of them has nothing, the lane waits in that one's ring, and in no other.
//!
//! Where leases allow it, several requests are paid at a time, for as long as they are of one size: the next ones look at no bucket's share at all. What is
//! paid ahead counts as leased. A lane that waits, or is dropped since limits have changed, hands it back.

use crate::share::{Share, Wheel};
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The buckets that a request goes by, from the disk's to the outermost group's.
pub type Path<W, T> = Vec<Rc<RefCell<Share<W, T>>>>;

/// A bucket on the path, and what each request that is paid ahead has cost there.
struct Stage<W, T> {
    share: Rc<RefCell<Share<W, T>>>,
    price: u64,
}

/// Requests of one size that are paid ahead.
#[derive(Default)]
struct Prepaid {
    bytes: u64,
    left: u64,
    /// How many they were.
    of: u64,
    /// Requests of other sizes since.
    others: u64,
}

/// What the next lane is called in the rings.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// An opener's line. See the file's head.
// What nearly every request looks at comes first, and so stands together.
#[repr(C)]
pub struct Lane<W, T> {
    prepaid: Prepaid,
    id: u64,
    who: W,
    path: Vec<Stage<W, T>>,
    /// Which bucket it waits for.
    waits_at: Option<usize>,
    /// What it owed which bucket when it ceased to wait.
    debt: (usize, i64),
}

impl<W, T> fmt::Debug for Lane<W, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut s = f.debug_struct("Lane");
        s.field("id", &self.id).field("waits_at", &self.waits_at).finish_non_exhaustive()
    }
}

impl<W: Copy, T> Lane<W, T> {
    /// A lane of `who` that goes by these buckets.
    pub fn new(who: W, path: Path<W, T>) -> Self {
        let path = path.into_iter().map(|share| Stage { share, price: 0 }).collect();
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, who, prepaid: Prepaid::default(), path, waits_at: None, debt: (0, 0) }
    }

    /// Whether it waits.
    pub const fn is_waiting(&self) -> bool {
        self.waits_at.is_some()
    }

    /// Whether a request of so many bytes is one of those that are paid ahead; it is not any more. If it is none, [`Lane::ask`].
    #[inline]
    pub fn spend_ahead(&mut self, bytes: u64) -> bool {
        let is_paid = self.prepaid.left > 0 && self.prepaid.bytes == bytes;
        self.prepaid.left -= u64::from(is_paid);
        is_paid
    }

    /// Pays a request of so many bytes from what is leased of all buckets, if that is enough and nobody waits here.
    fn pay(&mut self, bytes: u64) -> bool {
        let is_short = |stage: &Stage<W, T>| !stage.share.borrow_mut().spend(bytes);
        if let Some(paid) = self.path.iter().position(is_short) {
            self.path[..paid].iter().for_each(|stage| stage.share.borrow_mut().take_back(bytes));
            return false;
        }
        // Sizes may have changed for good.
        if self.prepaid.others >= self.prepaid.left {
            self.pay_ahead(bytes);
        } else {
            self.prepaid.others += 1;
        }
        true
    }

    /// Pays as many further requests as all leases allow.
    fn pay_ahead(&mut self, bytes: u64) {
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
    }

    /// Asks for the first request, of so many bytes; `behind` more wait in the line. [`Lane::settle`] must follow the last of several of these.
    pub fn ask(
        &mut self,
        bytes: u64,
        behind: u64,
        now: u64,
        wheel: &mut impl Wheel<Who = W, Timer = T>,
    ) -> bool {
        if self.spend_ahead(bytes) || self.pay(bytes) {
            return true;
        }
        for at in 0..self.path.len() {
            let mut share = self.path[at].share.borrow_mut();
            let cost = share.cost(bytes);
            if !share.may_take(self.id, cost, now) {
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
            share.served(cost);
        }
        true
    }

    /// Waits for that bucket, and for no other.
    fn wait_at(&mut self, at: usize, now: u64, wheel: &mut impl Wheel<Who = W, Timer = T>) {
        if self.waits_at == Some(at) {
            return;
        }
        self.leave(now, wheel);
        self.hand_back();
        let debt = if self.debt.0 == at { self.debt.1 } else { 0 };
        self.path[at].share.borrow_mut().join(self.id, self.who, debt);
        self.waits_at = Some(at);
    }

    /// Has asked for all that it wants to for now; `has_more`: requests wait in the line.
    pub fn settle(&mut self, has_more: bool, now: u64, wheel: &mut impl Wheel<Who = W, Timer = T>) {
        if !has_more {
            self.leave(now, wheel);
        } else if let Some(at) = self.waits_at {
            self.path[at].share.borrow_mut().settle(now, wheel);
        }
    }

    /// Waits no more: its requests are gone, or cannot go now for another reason.
    pub fn leave(&mut self, now: u64, wheel: &mut impl Wheel<Who = W, Timer = T>) {
        if let Some(at) = self.waits_at.take() {
            let mut share = self.path[at].share.borrow_mut();
            self.debt = (at, share.leave(self.id));
            share.settle(now, wheel);
        }
    }
}

impl<W, T> Lane<W, T> {
    /// Has nothing paid ahead any more, so that [`Lane::spend_ahead`] lets nothing go before others.
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
    }
}
