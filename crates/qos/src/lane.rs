//! An opener's line: its requests, one by one, before all buckets that they go by. Reactor context.
//!
//! A request gets what it costs from every bucket on its path, or nothing. While one of them has nothing, the lane waits in that one's ring, and in no other.

use crate::share::{Share, Wheel};
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The buckets that a request goes by, from the disk's to the outermost group's.
pub type Path<W, T> = Vec<Rc<RefCell<Share<W, T>>>>;

/// What the next lane is called in the rings.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// An opener's line. See the file's head.
pub struct Lane<W, T> {
    id: u64,
    who: W,
    path: Path<W, T>,
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
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed), who, path, waits_at: None, debt: (0, 0) }
    }

    /// Whether it waits.
    pub const fn is_waiting(&self) -> bool {
        self.waits_at.is_some()
    }

    /// Pays a request of so many bytes from what is leased of all buckets, if that is enough and nobody waits here. If not, [`Lane::ask`].
    #[inline]
    pub fn spend(&self, bytes: u64) -> bool {
        let is_short = |share: &Rc<RefCell<Share<W, T>>>| !share.borrow_mut().spend(bytes);
        let Some(paid) = self.path.iter().position(is_short) else { return true };
        self.path[..paid].iter().for_each(|share| share.borrow_mut().take_back(bytes));
        false
    }

    /// Asks for the first request, of so many bytes; `behind` more wait in the line. [`Lane::settle`] must follow the last of several of these.
    pub fn ask(
        &mut self,
        bytes: u64,
        behind: u64,
        now: u64,
        wheel: &mut impl Wheel<Who = W, Timer = T>,
    ) -> bool {
        if self.spend(bytes) {
            return true;
        }
        for at in 0..self.path.len() {
            let mut share = self.path[at].borrow_mut();
            let cost = share.cost(bytes);
            if !share.may_take(self.id, cost, now) {
                drop(share);
                self.wait_at(at, now, wheel);
                return false;
            }
        }
        for at in 0..self.path.len() {
            let mut share = self.path[at].borrow_mut();
            let cost = share.cost(bytes);
            if !share.take(cost, behind, now) {
                drop(share);
                for taken in &self.path[..at] {
                    let mut share = taken.borrow_mut();
                    let cost = share.cost(bytes);
                    share.give_back(cost);
                }
                self.wait_at(at, now, wheel);
                return false;
            }
        }
        if let Some(at) = self.waits_at {
            let mut share = self.path[at].borrow_mut();
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
        let debt = if self.debt.0 == at { self.debt.1 } else { 0 };
        self.path[at].borrow_mut().join(self.id, self.who, debt);
        self.waits_at = Some(at);
    }

    /// Has asked for all that it wants to for now; `has_more`: requests wait in the line.
    pub fn settle(&mut self, has_more: bool, now: u64, wheel: &mut impl Wheel<Who = W, Timer = T>) {
        if !has_more {
            self.leave(now, wheel);
        } else if let Some(at) = self.waits_at {
            self.path[at].borrow_mut().settle(now, wheel);
        }
    }

    /// Waits no more: its requests are gone, or cannot go now for another reason.
    pub fn leave(&mut self, now: u64, wheel: &mut impl Wheel<Who = W, Timer = T>) {
        if let Some(at) = self.waits_at.take() {
            let mut share = self.path[at].borrow_mut();
            self.debt = (at, share.leave(self.id));
            share.settle(now, wheel);
        }
    }
}
