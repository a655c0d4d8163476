//! A disk's channel: the table of its requests, and who of them waits for what. Reactor context.
//!
//! A request is in the kernel's hands, or waits for its turn in a block of the store ([`Ranges`](crate::ranges::Ranges)), or until it is tried
//! again. On the usual path it goes into the table, to the ring, and out again: nothing is allocated, locked or counted.

use crate::ranges::Claimant;
use crate::request::{AGAIN_DELAY, Next, Pool, Request};
use crate::store::{DEPTH, Store};
use aryk_bdev::{Channel, Completion, Io, Status, Tag};
use aryk_reactor::{Cx, Local, Nanos, RingClient, RootId};
use aryk_slots::{Key, Slots};
use aryk_uring::{Completion as Answer, Tag as RingTag};
use std::sync::Arc;
use std::time::Duration;

/// Bytes that answers of one poll have copied through bounce buffers, and those of one answer more; the others are looked at in the next turn.
const COPY_MAX: u64 = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Kernel,
    /// Has not got its range yet.
    Range,
    /// In the list of those that are tried again.
    Later,
}

#[derive(Debug)]
struct Entry {
    request: Request,
    place: Place,
    /// It has a range of the store, or awaits it.
    claims: bool,
}

pub(crate) struct FileChannel {
    store: Arc<Store>,
    root: RootId,
    client: RingClient,
    local: Local,
    entries: Slots<Entry>,
    pool: Pool,
    answers: Vec<Answer>,
    ready: Vec<Completion>,
    later: Vec<(Nanos, Key)>,
    /// Present if the store has [`Store::ranges`].
    claimant: Option<Arc<Claimant>>,
}

const _: () = assert!(DEPTH <= 1 << 16, "a token has 16 bits for the index");

/// A key in the 48 bits of a ring's tag: 32 of its generation, 16 of its index.
const fn token(key: Key) -> u64 {
    let raw = key.raw();
    raw >> 32 << 16 | raw & 0xffff
}

const fn key(token: u64) -> Key {
    Key::from_raw(token >> 16 << 32 | token & 0xffff)
}

impl FileChannel {
    pub fn new(store: &Arc<Store>, root: RootId, cx: &mut Cx) -> Self {
        Self {
            root,
            client: cx.open_ring_client(root),
            local: cx.local().clone(),
            entries: Slots::new(DEPTH),
            pool: Pool::new(store),
            answers: Vec::new(),
            ready: Vec::new(),
            later: Vec::new(),
            claimant: store.ranges.as_ref().map(|_| Arc::new(Claimant::new(root, cx))),
            store: Arc::clone(store),
        }
    }

    /// Starts a request, at first or over again, once it has its range.
    #[inline]
    fn begin(&mut self, key: Key, cx: &mut Cx) {
        let entry = self.entries.get_mut(key).expect("a request of this channel");
        if let (Some(ranges), Some(claimant)) = (&self.store.ranges, &self.claimant)
            && entry.request.op.is_change()
        {
            let (bytes, alone) = entry.request.claim(&self.store);
            entry.claims = true;
            if !ranges.claim(bytes, alone, key, claimant) {
                entry.place = Place::Range;
                return;
            }
        }
        self.go_on(key, cx);
    }

    #[inline]
    fn go_on(&mut self, key: Key, cx: &mut Cx) {
        let entry = self.entries.get_mut(key).expect("a request of this channel");
        entry.place = Place::Kernel;
        let next = if entry.request.is_within(&self.store) {
            entry.request.next(&self.store, &mut self.pool)
        } else {
            Next::Done(Status::OutOfRange)
        };
        self.obey(key, next, cx);
    }

    #[inline]
    fn obey(&mut self, key: Key, next: Next, cx: &mut Cx) {
        match next {
            Next::Done(status) => self.finish(key, status, cx),
            Next::Later(delay) => self.postpone(key, delay, cx),
            Next::Start(call) => {
                let tag = RingTag { client: self.client.number(), token: token(key) };
                if self.store.start(tag, call, cx).is_err() {
                    let entry = self.entries.get_mut(key).expect("the caller looked");
                    // Nothing but a delay is made of it.
                    let _ = entry.request.later(AGAIN_DELAY, &mut self.pool);
                    self.postpone(key, AGAIN_DELAY, cx);
                }
            }
        }
    }

    /// Tries a request again later, unless nobody wants it.
    #[cold]
    fn postpone(&mut self, key: Key, delay: Duration, cx: &mut Cx) {
        let entry = self.entries.get_mut(key).expect("the caller looked");
        if entry.request.abandoned {
            return self.finish(key, Status::Aborted, cx);
        }
        if self.store.is_removing() {
            return self.finish(key, Status::Removed, cx);
        }
        entry.place = Place::Later;
        self.release(key, cx);
        let at = cx.now().after(delay);
        self.later.push((at, key));
        cx.wake_at(self.root, at);
    }

    #[inline]
    fn finish(&mut self, key: Key, status: Status, cx: &mut Cx) {
        self.release(key, cx);
        let request = self.entries.remove(key).expect("the caller looked").request;
        if request.held {
            self.store.unhold();
        }
        self.ready.push(Completion { tag: request.tag, status });
    }

    /// Gives up a request's claim, if it has or awaits one.
    #[inline]
    fn release(&mut self, key: Key, cx: &mut Cx) {
        let (Some(ranges), Some(claimant)) = (&self.store.ranges, &self.claimant) else { return };
        let entry = self.entries.get_mut(key).expect("the caller looked");
        if std::mem::take(&mut entry.claims) {
            ranges.release(key, claimant, cx);
        }
    }

    /// Tries those again whose time has come.
    fn retry(&mut self, cx: &mut Cx) {
        let now = cx.now();
        while let Some(i) = self.later.iter().position(|&(at, _)| at <= now) {
            let (_, key) = self.later.remove(i);
            self.begin(key, cx);
        }
    }

    fn abort_one(&mut self, key: Key, cx: &mut Cx) {
        let entry = self.entries.get_mut(key).expect("a request of this channel");
        match entry.place {
            // It ends as it ends: a file's requests are not cancelled, but it is not held afterwards.
            Place::Kernel => entry.request.abandoned = true,
            Place::Range => self.finish(key, Status::Aborted, cx),
            Place::Later => {
                self.later.retain(|&(_, k)| k != key);
                self.finish(key, Status::Aborted, cx);
            }
        }
    }
}

impl Channel for FileChannel {
    #[inline]
    fn submit(&mut self, io: Io, cx: &mut Cx) {
        let entry = Entry { request: Request::new(&io, &self.store), place: Place::Kernel, claims: false };
        let key = self.entries.insert(entry).expect("the caller holds a credit");
        self.begin(key, cx);
        if !self.ready.is_empty() {
            cx.wake(self.root);
        }
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        let same = self.entries.iter().filter(|(_, e)| e.request.tag == tag);
        let keys: Vec<_> = same.map(|(key, _)| key).collect();
        keys.into_iter().for_each(|key| self.abort_one(key, cx));
        if !self.ready.is_empty() {
            cx.wake(self.root);
        }
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        let mut answers = std::mem::take(&mut self.answers);
        cx.take_ring_completions(self.client, &mut answers);
        let (mut taken, copied_max) = (0, self.pool.copied + COPY_MAX);
        while taken < answers.len() && self.pool.copied < copied_max {
            let answer = answers[taken];
            taken += 1;
            let key = key(answer.tag.token);
            let entry = self.entries.get_mut(key).expect("the kernel answers each call once");
            let next = entry.request.answered(answer.result, &self.store, &mut self.pool);
            self.obey(key, next, cx);
        }
        answers.drain(..taken);
        if !answers.is_empty() {
            cx.wake(self.root);
        }
        self.answers = answers;
        if let Some(claimant) = &self.claimant {
            for key in claimant.take_granted() {
                // One that was aborted meanwhile is gone.
                if self.entries.get(key).is_some() {
                    self.go_on(key, cx);
                }
            }
        }
        if !self.later.is_empty() {
            self.retry(cx);
        }
        out.append(&mut self.ready);
    }
}

impl Drop for FileChannel {
    fn drop(&mut self) {
        if self.entries.is_empty() {
            self.store.leave();
            let client = self.client;
            self.local.defer(move |cx| cx.close_ring_client(client));
        } else {
            assert!(std::thread::panicking(), "a channel is closed when nothing is in flight");
        }
    }
}
