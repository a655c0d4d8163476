//! The buffers for the data of commands that the queues of one reactor share. Reactor context.
//!
//! A buffer is allocated when it is first needed and then kept, so a steady load allocates nothing. A command whose data does
//! not fit beside that of others waits for a buffer; but a queue always gets its first one, so that hosts that do not read their
//! replies leave each other queue at least one command at a time. Data that comes in the capsule cannot wait: its buffers are not
//! limited here, but by the entries of the queues.
//!
//! The pool of an RDMA connection is its own, and has a fixed number of buffers ([`Pool::of`]). If the connection shares its
//! receives with others, data that comes in capsules is copied to buffers of the reactor's pool.

use aryk_dma::{Buffer, PAGE};
use aryk_reactor::RootId;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

/// The sizes of buffers.
const SIZES: [usize; 3] = [8 << 10, 32 << 10, 128 << 10];
/// Bytes of the buffers that the commands of all queues have, beside the first one of each and those for data in capsules.
const BYTES_MAX: usize = 64 << 20;
/// Bytes of the buffers that the commands of one queue have, beside those for data in capsules.
const QUEUE_MAX: usize = 8 << 20;
/// Bytes of the buffers that are kept for later commands.
const IDLE_MAX: usize = 16 << 20;

/// Bytes of the smallest buffers.
pub(crate) const SMALL: usize = SIZES[0];
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
    /// `Some`: all buffers were there at the beginning, and are of one queue. Buffers of [`Pool::take_for_capsule`] are of the
    /// pool here.
    beside: Option<Rc<Pool>>,
}

/// What a queue has of a pool.
#[derive(Debug, Default)]
pub(crate) struct Share {
    /// Bytes of its limited buffers.
    used: usize,
}

impl Share {
    /// Whether the queue has no limited buffer.
    pub const fn is_empty(&self) -> bool {
        self.used == 0
    }
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
    /// It is one of a fixed number.
    Fixed,
}

impl Pool {
    /// The sizes of the buffers of a pool with a fixed number of them: so many of the smallest size, and of each other size.
    pub fn sizes(small: usize, larger: [usize; SIZES.len() - 1]) -> impl Iterator<Item = usize> {
        let counts = std::iter::once(small).chain(larger);
        SIZES.into_iter().zip(counts).flat_map(|(size, count)| std::iter::repeat_n(size, count))
    }

    /// A pool with these buffers and no others, for one queue. The sizes are those of [`Pool::sizes`]. `beside`: the pool for
    /// data in capsules that does not arrive in one of these buffers.
    pub fn of(buffers: Vec<Buffer>, beside: Rc<Self>) -> Self {
        let pool = Self { beside: Some(beside), ..Self::default() };
        buffers.into_iter().for_each(|buffer| pool.keep(buffer));
        pool
    }

    /// The buffers that are not in use, of a pool with a fixed number of them.
    pub fn into_buffers(self) -> Vec<Buffer> {
        self.idle.into_inner().into_iter().flatten().collect()
    }

    /// Takes a buffer back.
    fn keep(&self, buffer: Buffer) {
        self.idle.borrow_mut()[class_of(buffer.len())].push(buffer);
    }

    /// A buffer of the smallest size, of a pool with a fixed number of buffers. `None`: all are in use.
    pub fn take_small(&self) -> Option<Taken> {
        let buffer = self.idle.borrow_mut()[0].pop()?;
        Some(Taken { buffer, kind: Kind::Fixed })
    }

    /// A buffer of at least `len` bytes, of a pool with a fixed number of buffers. `None`: all are in use.
    pub fn take_fixed(&self, len: usize) -> Option<Taken> {
        let buffer = self.idle.borrow_mut()[class_of(len)..].iter_mut().find_map(Vec::pop)?;
        Some(Taken { buffer, kind: Kind::Fixed })
    }

    /// A buffer of at least `len` bytes for the queue `root`. `None`: the queue tries again when one of its own buffers is given
    /// back, or when [`Pool::give_back`] returns it.
    pub fn take(&self, share: &mut Share, len: usize, root: RootId) -> Option<Taken> {
        let class = class_of(len);
        if self.beside.is_some() {
            return self.take_fixed(len);
        }
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
        if let Some(pool) = &self.beside {
            return pool.take_for_capsule(len);
        }
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
        if taken.kind == Kind::Fixed {
            self.keep(taken.buffer);
            return None;
        }
        if let Some(pool) = &self.beside {
            return pool.give_back(share, taken);
        }
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
    fn a_fixed_pool_has_the_buffers_that_it_was_given() {
        let [root, _] = roots();
        let buffers = Pool::sizes(2, [1, 1]).map(|size| Buffer::new(size, PAGE as usize)).collect();
        let beside = Rc::new(Pool::default());
        let (pool, mut share) = (Pool::of(buffers, Rc::clone(&beside)), Share::default());
        let mut lens = Vec::new();
        let mut taken: Vec<Taken> = std::iter::from_fn(|| pool.take(&mut share, 512, root)).collect();
        lens.extend(taken.iter().map(|taken| taken.buffer.len()));
        assert_eq!(lens, [SIZES[0], SIZES[0], SIZES[1], SIZES[2]]);
        assert!(pool.take_small().is_none() && pool.take(&mut share, SIZES[1], root).is_none());
        taken.drain(1..).for_each(|taken| assert_eq!(pool.give_back(&mut share, taken), None));
        assert_eq!(pool.take(&mut share, SIZES[1] + 1, root).map(|taken| taken.buffer.len()), Some(SIZES[2]));
        assert!(pool.take_small().is_some() && pool.take_small().is_none());
        assert_eq!(pool.waiting.borrow().len(), 0);
        let capsule = pool.take_for_capsule(4096);
        assert_eq!((pool.give_back(&mut share, capsule), beside.idle_bytes.get()), (None, SIZES[0]));
        assert_eq!(pool.into_buffers().len(), 1, "those in use are not there");
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
