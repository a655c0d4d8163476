//! Who is being served by HTTP. Whoever has shown no password has to go when others want the place: saying nothing is in nobody's way. Control context.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use tokio::task::{AbortHandle, JoinSet};

/// Clients that may be connected at a time; others wait to be accepted.
pub(super) const CONNECTIONS_MAX: usize = 64;

/// Whether a client has shown a password.
pub(super) type Known = Rc<Cell<bool>>;

/// The clients.
#[derive(Default)]
pub(super) struct Clients {
    all: JoinSet<()>,
    /// Those that may have shown no password, in the order in which they came.
    strangers: VecDeque<(AbortHandle, Known)>,
}

impl Clients {
    /// Whether another can be served.
    pub fn has_room(&mut self) -> bool {
        self.strangers.retain(|(client, known)| !known.get() && !client.is_finished());
        self.all.len() < CONNECTIONS_MAX || !self.strangers.is_empty()
    }

    /// Serves another, in the place of the oldest stranger if there is no other. Needs a tokio `LocalSet`.
    pub fn begin<S: Future<Output = ()> + 'static>(&mut self, serve: impl FnOnce(Known) -> S) {
        if self.all.len() >= CONNECTIONS_MAX
            && let Some((oldest, _)) = self.strangers.pop_front()
        {
            oldest.abort();
        }
        let known = Known::default();
        let client = self.all.spawn_local(serve(Rc::clone(&known)));
        self.strangers.push_back((client, known));
    }

    /// Waits for one that is gone. `None` if there is none.
    pub async fn next_gone(&mut self) -> Option<()> {
        // A client's task that panicked has been told of.
        self.all.join_next().await.map(drop)
    }

    /// Waits until all are gone.
    pub async fn all_gone(mut self) {
        while self.next_gone().await.is_some() {}
    }
}
