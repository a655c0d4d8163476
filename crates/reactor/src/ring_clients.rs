//! The clients of the reactor's ring and of its blocking calls, and the completions that wait for each. Reactor context.

use crate::kernel::KernelDriver;
use crate::{Cx, Outbox, RootId};
use aryk_uring::Completion;
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

/// A client of the reactor's ring and of its blocking calls. It is dropped after the last completion of its operations.
pub struct RingClient {
    number: u16,
    kernel: Rc<RefCell<KernelDriver>>,
}

impl fmt::Debug for RingClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ring client {}", self.number)
    }
}

impl RingClient {
    pub(crate) fn open(kernel: &Rc<RefCell<KernelDriver>>, root: RootId) -> Self {
        Self { number: kernel.borrow_mut().clients.open(root), kernel: Rc::clone(kernel) }
    }

    /// The number for [`aryk_uring::Tag::client`].
    pub const fn number(&self) -> u16 {
        self.number
    }

    /// Takes the client's completions, as [`Outbox::take`].
    #[inline]
    pub fn take(&self, into: &mut Vec<Completion>) {
        self.kernel.borrow_mut().clients.outbox(self.number).take(into);
    }
}

impl Drop for RingClient {
    fn drop(&mut self) {
        self.kernel.borrow_mut().clients.close(self.number);
    }
}

/// Outboxes by the numbers of their clients, from 1 on; number 0 is the reactor's own. `None` for a client that was dropped.
#[derive(Debug, Default)]
pub(crate) struct RingClients {
    outboxes: Vec<Option<Outbox<Completion>>>,
    free: Vec<u16>,
}

impl RingClients {
    fn open(&mut self, root: RootId) -> u16 {
        let outbox = Outbox::new(root);
        if let Some(number) = self.free.pop() {
            let before = self.outboxes[usize::from(number) - 1].replace(outbox);
            assert!(before.is_none(), "number {number} is free, but has a client");
            return number;
        }
        self.outboxes.push(Some(outbox));
        u16::try_from(self.outboxes.len()).expect("a reactor has fewer than 65,536 ring clients")
    }

    fn close(&mut self, number: u16) {
        let outbox = self.outboxes[usize::from(number) - 1].take().expect("a client leaves once");
        debug_assert!(outbox.is_empty() || std::thread::panicking(), "completions that no one took");
        self.free.push(number);
    }

    #[inline]
    fn outbox(&mut self, number: u16) -> &mut Outbox<Completion> {
        let outbox = self.outboxes[usize::from(number) - 1].as_mut();
        outbox.expect("a client leaves after its last completion")
    }

    /// Puts a completion into its client's outbox, and wakes the client's root.
    #[inline]
    pub fn deliver(&mut self, completion: Completion, cx: &mut Cx) {
        self.outbox(completion.tag.client).push(completion, cx);
    }
}
