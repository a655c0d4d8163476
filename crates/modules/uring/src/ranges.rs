//! Claims of block ranges that requests rewrite. Reactor context. All channels of a disk share the table, which exists only
//! if the disk's blocks are smaller than those of its store.
//!
//! A write of less than a block of the store reads that block, changes a part of it and writes it back. If another write to the
//! same block completed between the two steps, it would be undone. So each request that changes such a disk claims the range
//! that it changes: exclusively, if it must read first; or shared with other requests that write whole blocks, whose order is
//! their submitter's responsibility.
//!
//! The table is a list in the order of arrival. A claim holds once no earlier claim conflicts with it, so no later claim
//! overtakes a conflicting one. A mutex protects the list and is held for one pass over it. The request that releases the last
//! conflicting claim grants the waiting claim, with a message to its reactor.

use aryk_reactor::{Cx, Handle, RootId};
use aryk_slots::Key;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// The channel that owns claims, and the means to wake it.
#[derive(Debug)]
pub(crate) struct Claimant {
    reactor: Handle,
    root: RootId,
    granted: Mutex<Vec<Key>>,
    has_granted: AtomicBool,
}

/// Locks a mutex that is held for a few instructions only, and whose holder does not panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no holder of the lock panics")
}

impl Claimant {
    pub fn new(root: RootId, cx: &Cx) -> Self {
        let reactor = cx.handle().clone();
        Self { reactor, root, granted: Mutex::default(), has_granted: AtomicBool::new(false) }
    }

    /// Takes the requests that had to wait and whose claims hold now.
    pub fn take_granted(&self) -> Vec<Key> {
        if self.has_granted.swap(false, Ordering::Acquire) {
            std::mem::take(&mut *lock(&self.granted))
        } else {
            Vec::new()
        }
    }

    fn grant(&self, key: Key) {
        lock(&self.granted).push(key);
        self.has_granted.store(true, Ordering::Release);
    }

    fn wake(&self, cx: &mut Cx) {
        let root = self.root;
        if &self.reactor == cx.handle() {
            cx.wake(root);
        } else {
            cx.post(&self.reactor, move |cx| cx.wake(root));
        }
    }
}

#[derive(Debug)]
struct Claim {
    bytes: Range<u64>,
    alone: bool,
    /// The number of earlier claims that conflict with this one: the claim holds when it is 0.
    before: u32,
    key: Key,
    by: Arc<Claimant>,
}

impl Claim {
    fn conflicts_with(&self, other: &Self) -> bool {
        let overlap = self.bytes.start < other.bytes.end && other.bytes.start < self.bytes.end;
        overlap && (self.alone || other.alone)
    }
}

/// All claims on a disk, in the order of their arrival.
#[derive(Debug, Default)]
pub(crate) struct Ranges(Mutex<Vec<Claim>>);

impl Ranges {
    /// Claims `bytes` for the request `key`, shared or exclusively (`alone`). Returns whether the claim holds at once;
    /// otherwise [`Claimant::take_granted`] returns the request later.
    pub fn claim(&self, bytes: Range<u64>, alone: bool, key: Key, by: &Arc<Claimant>) -> bool {
        let mut claim = Claim { bytes, alone, before: 0, key, by: Arc::clone(by) };
        let mut claims = lock(&self.0);
        claim.before = claims.iter().filter(|earlier| earlier.conflicts_with(&claim)).count() as u32;
        let holds = claim.before == 0;
        claims.push(claim);
        holds
    }

    /// Ends a claim, whether it holds or waits.
    pub fn release(&self, key: Key, by: &Arc<Claimant>, cx: &mut Cx) {
        let mut to_wake = Vec::new();
        {
            let mut claims = lock(&self.0);
            let mine = |c: &Claim| c.key == key && Arc::ptr_eq(&c.by, by);
            let index = claims.iter().position(mine).expect("a claim is released once");
            let released = claims.remove(index);
            for claim in claims[index..].iter_mut().filter(|later| released.conflicts_with(later)) {
                claim.before -= 1;
                if claim.before == 0 {
                    claim.by.grant(claim.key);
                    to_wake.push(Arc::clone(&claim.by));
                }
            }
        }
        to_wake.iter().for_each(|claimant| claimant.wake(cx));
    }
}
