//! The HTTP clients being served. When all places are taken, a client that has not authenticated is disconnected in favour of a
//! new one, so that silent clients cannot block others. Control context.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use tokio::task::{AbortHandle, JoinSet};

/// Clients that may be connected at the same time; further clients wait to be accepted.
pub(super) const CONNECTIONS_MAX: usize = 64;

/// Whether a client has authenticated.
pub(super) type Authenticated = Rc<Cell<bool>>;

/// The clients.
#[derive(Default)]
pub(super) struct Clients {
    all: JoinSet<()>,
    /// Clients that may not have authenticated, in the order of their connections.
    unauthenticated: VecDeque<(AbortHandle, Authenticated)>,
}

impl Clients {
    /// Whether another client can be served.
    pub fn has_room(&mut self) -> bool {
        self.unauthenticated.retain(|(client, known)| !known.get() && !client.is_finished());
        self.all.len() < CONNECTIONS_MAX || !self.unauthenticated.is_empty()
    }

    /// Serves another client, if necessary in the place of the oldest unauthenticated one. Needs a tokio `LocalSet`.
    pub fn begin<S: Future<Output = ()> + 'static>(&mut self, serve: impl FnOnce(Authenticated) -> S) {
        if self.all.len() >= CONNECTIONS_MAX
            && let Some((oldest, _)) = self.unauthenticated.pop_front()
        {
            oldest.abort();
        }
        let known = Authenticated::default();
        let client = self.all.spawn_local(serve(Rc::clone(&known)));
        self.unauthenticated.push_back((client, known));
    }

    /// Waits until a client has disconnected. `None` if no client is connected.
    pub async fn next_gone(&mut self) -> Option<()> {
        // A panic in a client's task has already been reported.
        self.all.join_next().await.map(drop)
    }

    /// Waits until all clients have disconnected.
    pub async fn all_gone(mut self) {
        while self.next_gone().await.is_some() {}
    }
}
