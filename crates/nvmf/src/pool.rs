//! The buffers for the data of commands that the queues of one reactor share. Reactor context.
//!
//! A buffer is allocated when it is first needed and then kept, so a steady load allocates nothing. A command whose data does
//! not fit beside that of others waits for a buffer; but a queue always gets its first one, so that hosts that do not read their
//! replies leave each other queue at least one command at a time. Data that comes in the capsule cannot wait: its buffers are not
//! limited here, but by the entries of the queues.

use aryk_dma::{Buffer, PAGE};
use aryk_reactor::RootId;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

/// The sizes of buffers.
const SIZES: [usize; 3] = [8 << 10, 32 << 10, 128 << 10];
/// Bytes of the buffers that the commands of all queues have, beside the first one of each and those for data in capsules.
const BYTES_MAX: usize = 64 << 20;
/// Bytes of the buffers that the commands of one queue have, beside those for data in capsules.
const QUEUE_MAX: usize = 8 << 20;
/// Bytes of the buffers that are kept for later commands.
const IDLE_MAX: usize = 16 << 20;

/// The largest amount of data of one command.
pub(crate) const TRANSFER_MAX: usize = SIZES[SIZES.len() - 1];

/// The buffers of a reactor.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    idle: RefCell<[Vec<Buffer>; SIZES.len()]>,
    /// Bytes of the buffers in `idle`.
    idle_bytes: Cell<usize>,
    /// Bytes of the limited buffers that commands have, and that are not the first one of their queue.
    used: Cell<usize>,
    /// Queues with commands that wait for a buffer, each once.
    waiting: RefCell<VecDeque<RootId>>,
}

/// What a queue has of a pool.
#[derive(Debug, Default)]
pub(crate) struct Share {
    /// Bytes of its limited buffers.
    used: usize,
}

/// A buffer of a command.
#[derive(Debug)]
pub(crate) struct Taken {
    pub buffer: Buffer,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Capsule,
    /// It was taken while its queue had no other.
    First,
    Counted,
}

impl Pool {
    /// A buffer of at least `len` bytes for the queue `root`. `None`: the queue tries again when one of its own buffers is given
    /// back, or when [`Pool::give_back`] returns it.
    pub fn take(&self, share: &mut Share, len: usize, root: RootId) -> Option<Taken> {
        let class = class_of(len);
        let size = SIZES[class];
        let kind = if share.used == 0 { Kind::First } else { Kind::Counted };
        if kind == Kind::Counted {
            if share.used + size > QUEUE_MAX {
                return None;
            }
            if self.used.get() + size > BYTES_MAX {
                let mut waiting = self.waiting.borrow_mut();
                if !waiting.contains(&root) {
                    waiting.push_back(root);
                }
                return None;
            }
            self.used.set(self.used.get() + size);
        }
        share.used += size;
        Some(Taken { buffer: self.buffer(class), kind })
    }

    /// A buffer for at least `len` bytes of data in a capsule.
    pub fn take_for_capsule(&self, len: usize) -> Taken {
        Taken { buffer: self.buffer(class_of(len)), kind: Kind::Capsule }
    }

    fn buffer(&self, class: usize) -> Buffer {
        let Some(buffer) = self.idle.borrow_mut()[class].pop() else {
            return Buffer::new(SIZES[class], PAGE as usize);
        };
        self.idle_bytes.set(self.idle_bytes.get() - SIZES[class]);
        buffer
    }

    /// Takes a buffer back from a queue. Returns a queue that has waited for one.
    #[must_use = "the queue is woken"]
    pub fn give_back(&self, share: &mut Share, taken: Taken) -> Option<RootId> {
        let size = taken.buffer.len();
        if self.idle_bytes.get() + size <= IDLE_MAX {
            self.idle_bytes.set(self.idle_bytes.get() + size);
            self.idle.borrow_mut()[class_of(size)].push(taken.buffer);
        }
        if taken.kind != Kind::Capsule {
            share.used -= size;
        }
        if taken.kind != Kind::Counted {
            return None;
        }
        self.used.set(self.used.get() - size);
        self.waiting.borrow_mut().pop_front()
    }

    /// The next queue that waits, if there is room for any buffer: the one that was woken has left some of what was given back.
    #[must_use = "the queue is woken"]
    pub fn pass_on(&self) -> Option<RootId> {
        let has_room = self.used.get() + TRANSFER_MAX <= BYTES_MAX;
        has_room.then(|| self.waiting.borrow_mut().pop_front()).flatten()
    }

    /// A queue ends: it waits no longer.
    pub fn forget(&self, root: RootId) {
        self.waiting.borrow_mut().retain(|waiting| *waiting != root);
    }
}

fn class_of(len: usize) -> usize {
    SIZES.iter().position(|&size| size >= len).expect("no more than the largest transfer")
}

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_reactor::{Cx, Root};
    use std::convert::Infallible;

    struct Nothing;

    impl Root for Nothing {
        fn poll(&mut self, _: &mut Cx) -> bool {
            false
        }
    }

    /// Two roots of a reactor, which is not run.
    fn roots() -> [RootId; 2] {
        let mut bench = aryk_bdev_conformance::Bench::new();
        let cx = bench.cx();
        let thread = cx.add_thread("test", aryk_reactor::CoreSet::allowed());
        [(); 2].map(|()| {
            let added = cx.add_root(thread, "test", |_, _| Ok::<_, Infallible>(Nothing));
            added.unwrap_or_else(|never| match never {}).id()
        })
    }

    #[test]
    fn queues_that_hold_all_buffers_leave_others_their_first() {
        let [lazy, other] = roots();
        let pool = Pool::default();
        let mut shares: Vec<Share> = (0..20).map(|_| Share::default()).collect();
        let mut held: Vec<Vec<Taken>> = Vec::new();
        for share in &mut shares {
            held.push(std::iter::from_fn(|| pool.take(share, TRANSFER_MAX, lazy)).collect());
        }
        let counts: Vec<usize> = held.iter().map(Vec::len).collect();
        assert_eq!(counts[..8], [QUEUE_MAX / TRANSFER_MAX; 8]);
        assert_eq!(counts[10..], [1; 10]);
        let mut share = Share::default();
        let first = pool.take(&mut share, 512, other).expect("the first");
        assert!(pool.take(&mut share, 512, other).is_none());
        let capsule = pool.take_for_capsule(8192);
        assert_eq!(pool.give_back(&mut share, capsule), None);
        assert_eq!(pool.give_back(&mut share, first), None);
        // The first of the queues that wait is woken for each buffer.
        let of_first = held[0].pop().expect("it has many");
        assert_eq!(pool.give_back(&mut shares[0], of_first), Some(lazy));
        let of_first = held[0].pop().expect("it has many");
        assert_eq!(pool.give_back(&mut shares[0], of_first), Some(other));
        pool.forget(other);
        assert_eq!(pool.waiting.borrow().len(), 0);
        // A large buffer is room for several small ones.
        for root in [lazy, other] {
            pool.waiting.borrow_mut().push_back(root);
        }
        let of_first = held[0].pop().expect("it has many");
        assert_eq!(pool.give_back(&mut shares[0], of_first), Some(lazy));
        assert_eq!((pool.pass_on(), pool.pass_on()), (Some(other), None));
    }

    #[test]
    fn buffers_are_kept_up_to_a_limit() {
        let [root, _] = roots();
        let (pool, mut share) = (Pool::default(), Share::default());
        let all: Vec<Taken> = std::iter::from_fn(|| pool.take(&mut share, 4096, root)).collect();
        assert_eq!(all.len(), QUEUE_MAX / SIZES[0]);
        all.into_iter().for_each(|taken| assert_eq!(pool.give_back(&mut share, taken), None));
        assert_eq!((pool.used.get(), share.used, pool.idle_bytes.get()), (0, 0, QUEUE_MAX));
        let capsules: Vec<Taken> = (0..3000).map(|_| pool.take_for_capsule(4096)).collect();
        capsules.into_iter().for_each(|taken| assert_eq!(pool.give_back(&mut share, taken), None));
        assert_eq!(pool.idle_bytes.get(), IDLE_MAX);
    }
}
