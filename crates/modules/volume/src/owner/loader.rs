//! Makes the engine of a pool on a thread: it takes as long as the pool is large, which no reactor waits for.

use super::Engine;
use crate::{Error, Settings, note};
use aryk_reactor::{Cx, RingClient, RootId};
use aryk_uring::Tag;
use aryk_volume::{Recovered, Shard};
use aryk_volume_store::Store;
use std::sync::mpsc::{Receiver, channel};

/// A thread that makes an engine. It is kept until [`Loader::take`] has returned a result.
pub(super) struct Loader {
    client: RingClient,
    made: Receiver<Result<Box<Engine>, Error>>,
}

impl Loader {
    /// Begins to make the engine of this shard over its store. `root` is woken when the thread has ended.
    pub fn start(
        store: &Store,
        recovered: Recovered,
        usual: Settings,
        shard: Shard,
        root: RootId,
        cx: &mut Cx,
    ) -> Self {
        let client = cx.open_ring_client(root);
        let (sender, made) = channel();
        let (facts, uuid) = (store.facts(), store.pool().into_bytes());
        let settings = move |note: &[u8]| note::settings(note, usual).of_shard(shard);
        let call = move || {
            let made = Engine::open(settings, facts, uuid, &recovered);
            // The root keeps the other end until this call has completed.
            let _ = sender.send(made.map(Box::new).map_err(Error::from));
            0
        };
        cx.submit_blocking(Tag { client: client.number(), token: 0 }, Box::new(call));
        Self { client, made }
    }

    /// The engine, when the thread has ended.
    pub fn take(&self) -> Option<Result<Box<Engine>, Error>> {
        let mut completions = Vec::new();
        self.client.take(&mut completions);
        // A call that was dropped had no thread, or has panicked.
        completions.first().map(|_| self.made.try_recv().unwrap_or(Err(Error::NoThread)))
    }
}
