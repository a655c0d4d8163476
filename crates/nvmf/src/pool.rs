//! The buffers for the data of commands that the queues of one reactor share. Reactor context.
//!
//! A buffer is allocated when it is first needed and then kept, so a steady load allocates nothing. A command whose data does
//! not fit beside that of others waits for a buffer. Data that comes in the capsule cannot wait: its buffers are not limited
//! here, but by the entries of the queues.

use aryk_dma::{Buffer, PAGE};
use aryk_reactor::RootId;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

/// The sizes of buffers.
const SIZES: [usize; 3] = [8 << 10, 32 << 10, 128 << 10];
/// Bytes of the buffers that commands have at one time, beside those for data in capsules.
const BYTES_MAX: usize = 64 << 20;
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
    /// Bytes of the limited buffers that commands have.
    used: Cell<usize>,
    /// Queues with commands that wait for a buffer, each once.
    waiting: RefCell<VecDeque<RootId>>,
}

/// A buffer of a command.
#[derive(Debug)]
pub(crate) struct Taken {
    pub buffer: Buffer,
    is_limited: bool,
}

impl Pool {
    /// A buffer of at least `len` bytes. `None`: there is none, and `root` is returned by a later [`Pool::give_back`].
    pub fn take(&self, len: usize, root: RootId) -> Option<Taken> {
        let class = class_of(len);
        if self.used.get() + SIZES[class] > BYTES_MAX {
            let mut waiting = self.waiting.borrow_mut();
            if !waiting.contains(&root) {
                waiting.push_back(root);
            }
            return None;
        }
        self.used.set(self.used.get() + SIZES[class]);
        Some(Taken { buffer: self.buffer(class), is_limited: true })
    }

    /// A buffer for at least `len` bytes of data in a capsule.
    pub fn take_for_capsule(&self, len: usize) -> Taken {
        Taken { buffer: self.buffer(class_of(len)), is_limited: false }
    }

    fn buffer(&self, class: usize) -> Buffer {
        let Some(buffer) = self.idle.borrow_mut()[class].pop() else {
            return Buffer::new(SIZES[class], PAGE as usize);
        };
        self.idle_bytes.set(self.idle_bytes.get() - SIZES[class]);
        buffer
    }

    /// Takes a buffer back. Returns a queue that has waited for one.
    #[must_use = "the queue is woken"]
    pub fn give_back(&self, taken: Taken) -> Option<RootId> {
        let size = taken.buffer.len();
        if self.idle_bytes.get() + size <= IDLE_MAX {
            self.idle_bytes.set(self.idle_bytes.get() + size);
            self.idle.borrow_mut()[class_of(size)].push(taken.buffer);
        }
        if !taken.is_limited {
            return None;
        }
        self.used.set(self.used.get() - size);
        self.waiting.borrow_mut().pop_front()
    }

    /// A queue ends: it waits no longer.
    pub fn forget(&self, root: RootId) {
        self.waiting.borrow_mut().retain(|waiting| *waiting != root);
    }
}

fn class_of(len: usize) -> usize {
    SIZES.iter().position(|&size| size >= len).expect("no more than the largest transfer")
}
