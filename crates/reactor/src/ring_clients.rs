//! The clients of the reactor's ring and of its blocking calls, and the completions that wait for each. Reactor context.

use crate::kernel::KernelDriver;
use crate::socket::RECEIVE;
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
        self.kernel.borrow_mut().clients.client(self.number).outbox.take(into);
    }
}

impl Drop for RingClient {
    fn drop(&mut self) {
        self.kernel.borrow_mut().clients.close(self.number);
    }
}

/// Clients by their numbers, from 1 on; number 0 is the reactor's own. `None` for a client that was dropped.
#[derive(Debug, Default)]
pub(crate) struct RingClients {
    clients: Vec<Option<Client>>,
    free: Vec<u16>,
    /// Receives in the kernel.
    receives: u32,
}

/// What a client has.
#[derive(Debug)]
struct Client {
    outbox: Outbox<Completion>,
    /// The client is a socket, and the kernel has its receive.
    is_receiving: bool,
}

impl RingClients {
    fn open(&mut self, root: RootId) -> u16 {
        let client = Client { outbox: Outbox::new(root), is_receiving: false };
        if let Some(number) = self.free.pop() {
            let before = self.clients[usize::from(number) - 1].replace(client);
            assert!(before.is_none(), "number {number} is free, but has a client");
            return number;
        }
        self.clients.push(Some(client));
        u16::try_from(self.clients.len()).expect("a reactor has fewer than 65,536 ring clients")
    }

    fn close(&mut self, number: u16) {
        let client = self.clients[usize::from(number) - 1].take().expect("a client leaves once");
        debug_assert!(client.outbox.is_empty() || std::thread::panicking(), "completions that no one took");
        self.free.push(number);
    }

    #[inline]
    fn client(&mut self, number: u16) -> &mut Client {
        let client = self.clients[usize::from(number) - 1].as_mut();
        client.expect("a client leaves after its last completion")
    }

    /// The kernel has the receive of a socket, until a completion is the last one.
    pub fn receive_began(&mut self, number: u16) {
        self.client(number).is_receiving = true;
        self.receives += 1;
    }

    /// Receives in the kernel, which may be there for any time.
    pub const fn receives(&self) -> u32 {
        self.receives
    }

    /// Puts a completion into its client's outbox, and wakes the client's root.
    #[inline]
    pub fn deliver(&mut self, completion: Completion, cx: &mut Cx) {
        let client = self.client(completion.tag.client);
        if !completion.more && client.is_receiving && completion.tag.token == RECEIVE {
            client.is_receiving = false;
            client.outbox.push(completion, cx);
            self.receives -= 1;
        } else {
            client.outbox.push(completion, cx);
        }
    }
}
