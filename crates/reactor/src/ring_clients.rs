//! Who uses the reactor's ring, and the completions that wait for each. Reactor context.

use crate::RootId;
use aryk_uring::Completion;

/// Names a user of the reactor's ring: the `client` of its operations' tags.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingClient(u16);

impl RingClient {
    /// The number for [`aryk_uring::Tag::client`].
    pub const fn number(self) -> u16 {
        self.0
    }
}

#[derive(Debug, Default)]
struct Client {
    /// Whom to wake; `None` for one that has left.
    root: Option<RootId>,
    outbox: Vec<Completion>,
}

/// Clients by number; number 0 is the reactor's own.
#[derive(Debug, Default)]
pub(crate) struct RingClients {
    clients: Vec<Client>,
    free: Vec<u16>,
}

impl RingClients {
    pub fn open(&mut self, root: RootId) -> RingClient {
        let client = Client { root: Some(root), outbox: Vec::new() };
        if let Some(number) = self.free.pop() {
            self.clients[usize::from(number) - 1] = client;
            return RingClient(number);
        }
        self.clients.push(client);
        RingClient(u16::try_from(self.clients.len()).expect("a reactor has fewer than 65,536 ring clients"))
    }

    /// The client has nothing in flight, and leaves.
    pub fn close(&mut self, client: RingClient) {
        self.clients[usize::from(client.0) - 1] = Client::default();
        self.free.push(client.0);
    }

    /// Stores a completion; whom to wake.
    pub fn deliver(&mut self, completion: Completion) -> RootId {
        let client = &mut self.clients[usize::from(completion.tag.client) - 1];
        client.outbox.push(completion);
        client.root.expect("a client leaves after its last completion")
    }

    /// Takes what has come for `client`.
    pub fn take(&mut self, client: RingClient, into: &mut Vec<Completion>) {
        into.append(&mut self.clients[usize::from(client.0) - 1].outbox);
    }
}
