//! Which blocks of a store are being rewritten. Reactor context; shared by all channels of a disk, and there only if the
//! disk's blocks are smaller than those of its store.
//!
//! A write of less than a block of the store reads that block, changes a part of it and writes it back. If another write to
//! the same block came between, it would be undone, though it was acknowledged. So each change of such a disk claims the
//! range it touches: alone, if it must read first; or beside others that write whole blocks, for their order is their
//! submitter's business.
//!
//! The table is a list in the order of arrival, and a claim holds once nothing before it is in its way: nobody is overtaken
//! by those he waits for. It is behind a lock that is held for one look through the list. A claim that has to wait is
//! granted by whoever releases the last one in its way, with a message to its reactor.

use aryk_reactor::{Cx, Handle, RootId};
use aryk_slots::Key;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

/// A channel as its claims know it.
#[derive(Debug)]
pub(crate) struct Claimant {
    reactor: Handle,
    root: RootId,
    granted: Mutex<Vec<Key>>,
    has_granted: AtomicBool,
}

/// A lock that is held for a few instructions only, and whose holder does not panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no one panics holding it")
}

impl Claimant {
    pub fn new(root: RootId, cx: &Cx) -> Self {
        let reactor = cx.handle().clone();
        Self { reactor, root, granted: Mutex::default(), has_granted: AtomicBool::new(false) }
    }

    /// Requests that had to wait, and whose claims hold now.
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
    /// Claims before it that are in its way: it holds when there are none.
    before: u32,
    key: Key,
    by: Arc<Claimant>,
}

impl Claim {
    fn is_in_the_way_of(&self, other: &Self) -> bool {
        let overlap = self.bytes.start < other.bytes.end && other.bytes.start < self.bytes.end;
        overlap && (self.alone || other.alone)
    }
}

/// All claims on a disk, in the order of their arrival.
#[derive(Debug, Default)]
pub(crate) struct Ranges(Mutex<Vec<Claim>>);

impl Ranges {
    /// Claims `bytes` for the request `key`, beside others or alone. Whether the claim holds at once; otherwise
    /// [`Claimant::take_granted`] has it later.
    pub fn claim(&self, bytes: Range<u64>, alone: bool, key: Key, by: &Arc<Claimant>) -> bool {
        let mut claim = Claim { bytes, alone, before: 0, key, by: Arc::clone(by) };
        let mut claims = lock(&self.0);
        claim.before = claims.iter().filter(|earlier| earlier.is_in_the_way_of(&claim)).count() as u32;
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
            for claim in claims[index..].iter_mut().filter(|later| released.is_in_the_way_of(later)) {
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
