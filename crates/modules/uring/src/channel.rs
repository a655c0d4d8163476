//! A disk's channel: the table of its requests and of their states. Reactor context.
//!
//! A request is in the kernel, waits for its claim of a range ([`Ranges`](crate::ranges::Ranges)), or waits for a retry. On the
//! usual path a request needs no allocation, no lock and no counter. A poll takes the kernel's completions as one list, by a
//! swap, and adds the completion of each request directly to its caller's list.

use crate::ranges::Claimant;
use crate::request::{AGAIN_DELAY, Next, Pool, Request};
use crate::store::{DEPTH, Store};
use aryk_bdev::{Channel, Completion, Io, Outbox, Status, Tag};
use aryk_reactor::{Cx, Nanos, RingClient, RootId};
use aryk_slots::{Key, Slots};
use aryk_uring::{Completion as Answer, Tag as RingTag};
use std::sync::Arc;
use std::time::Duration;

/// The maximum number of bytes that one poll copies through bounce buffers. After the answer that reaches the limit, the other
/// answers wait for the next turn.
const COPY_MAX: u64 = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Kernel,
    /// The request waits for its range of the store.
    Range,
    /// The request is in the list of requests to retry.
    Later,
}

#[derive(Debug)]
struct Entry {
    request: Request,
    place: Place,
    /// The request has claimed a range of the store, or waits for one.
    claims: bool,
}

pub(crate) struct FileChannel {
    store: Arc<Store>,
    client: RingClient,
    entries: Slots<Entry>,
    pool: Pool,
    /// Answers that a poll has taken and not processed; empty unless a poll had more to copy than the limit allows.
    answers: Vec<Answer>,
    /// Requests that end outside of a poll: aborted requests, and requests refused at their submission.
    outbox: Outbox,
    later: Vec<(Nanos, Key)>,
    /// Present if the store has [`Store::ranges`].
    claimant: Option<Arc<Claimant>>,
}

const _: () = assert!(DEPTH <= 1 << 16, "a token has 16 bits for the index");

/// Packs a key into the 48 bits of a ring's tag: 32 bits of its generation, 16 bits of its index.
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
            client: cx.open_ring_client(root),
            entries: Slots::new(DEPTH),
            pool: Pool::new(store),
            answers: Vec::new(),
            outbox: Outbox::new(root),
            later: Vec::new(),
            claimant: store.ranges.as_ref().map(|_| Arc::new(Claimant::new(root, cx))),
            store: Arc::clone(store),
        }
    }

    /// Starts or restarts a request as soon as it has its range. Returns the completion of a request that ends at once.
    #[inline]
    fn begin(&mut self, key: Key, cx: &mut Cx) -> Option<Completion> {
        let entry = self.entries.get_mut(key).expect("a request of this channel");
        if let (Some(ranges), Some(claimant)) = (&self.store.ranges, &self.claimant)
            && entry.request.op.is_change()
        {
            let (bytes, alone) = entry.request.claim(&self.store);
            entry.claims = true;
            if !ranges.claim(bytes, alone, key, claimant) {
                entry.place = Place::Range;
                return None;
            }
        }
        self.proceed(key, cx)
    }

    #[inline]
    fn proceed(&mut self, key: Key, cx: &mut Cx) -> Option<Completion> {
        let entry = self.entries.get_mut(key).expect("a request of this channel");
        entry.place = Place::Kernel;
        let next = if entry.request.is_within(&self.store) {
            entry.request.next(&self.store, &mut self.pool)
        } else {
            Next::Done(Status::OutOfRange)
        };
        self.execute(key, next, cx)
    }

    #[inline]
    fn execute(&mut self, key: Key, next: Next, cx: &mut Cx) -> Option<Completion> {
        match next {
            Next::Done(status) => Some(self.finish(key, status, cx)),
            Next::Later(delay) => self.postpone(key, delay, cx),
            Next::Start(call) => {
                let tag = RingTag { client: self.client.number(), token: token(key) };
                if self.store.start(tag, call, cx).is_ok() {
                    return None;
                }
                let entry = self.entries.get_mut(key).expect("the caller has checked the key");
                // The delay is known, so the result is not needed.
                let _ = entry.request.later(AGAIN_DELAY, &mut self.pool);
                self.postpone(key, AGAIN_DELAY, cx)
            }
        }
    }

    /// Retries a request later, unless its caller has aborted it.
    #[cold]
    fn postpone(&mut self, key: Key, delay: Duration, cx: &mut Cx) -> Option<Completion> {
        let entry = self.entries.get_mut(key).expect("the caller has checked the key");
        if entry.request.abandoned {
            return Some(self.finish(key, Status::Aborted, cx));
        }
        if self.store.is_removing() {
            return Some(self.finish(key, Status::Removed, cx));
        }
        entry.place = Place::Later;
        self.release(key, cx);
        let at = cx.now().after(delay);
        self.later.push((at, key));
        cx.wake_at(self.outbox.root(), at);
        None
    }

    #[inline]
    fn finish(&mut self, key: Key, status: Status, cx: &mut Cx) -> Completion {
        self.release(key, cx);
        let request = self.entries.remove(key).expect("the caller has checked the key").request;
        if request.held {
            self.store.unhold();
        }
        Completion { tag: request.tag, status }
    }

    /// Releases a request's claim, if it has or awaits one.
    #[inline]
    fn release(&mut self, key: Key, cx: &mut Cx) {
        let (Some(ranges), Some(claimant)) = (&self.store.ranges, &self.claimant) else { return };
        let entry = self.entries.get_mut(key).expect("the caller has checked the key");
        if std::mem::take(&mut entry.claims) {
            ranges.release(key, claimant, cx);
        }
    }

    /// Processes the kernel's answers, until they have copied as much as one turn may.
    #[inline]
    fn take_answers(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        self.client.take(&mut self.answers);
        let (mut taken, copied_max) = (0, self.pool.copied + COPY_MAX);
        while let Some(&answer) = self.answers.get(taken) {
            if self.pool.copied >= copied_max {
                cx.wake(self.outbox.root());
                break;
            }
            taken += 1;
            let key = key(answer.tag.token);
            let entry = self.entries.get_mut(key).expect("the kernel answers each call once");
            let next = entry.request.answered(answer.result, &self.store, &mut self.pool);
            if let Some(completion) = self.execute(key, next, cx) {
                out.push(completion);
            }
        }
        self.answers.drain(..taken);
    }

    /// Retries the requests whose delay has passed.
    fn retry(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        let now = cx.now();
        while let Some(i) = self.later.iter().position(|&(at, _)| at <= now) {
            let (_, key) = self.later.remove(i);
            out.extend(self.begin(key, cx));
        }
    }

    fn abort_one(&mut self, key: Key, cx: &mut Cx) {
        let entry = self.entries.get_mut(key).expect("a request of this channel");
        match entry.place {
            // The kernel completes the request, because requests to a file are not cancelled. The request will not be held for
            // a retry.
            Place::Kernel => return entry.request.abandoned = true,
            Place::Range => {}
            Place::Later => self.later.retain(|&(_, k)| k != key),
        }
        let completion = self.finish(key, Status::Aborted, cx);
        self.outbox.push(completion.tag, completion.status, cx);
    }
}

impl Channel for FileChannel {
    #[inline]
    fn submit(&mut self, io: &Io, cx: &mut Cx) {
        let entry = Entry { request: Request::new(io, &self.store), place: Place::Kernel, claims: false };
        let key = self.entries.insert(entry).expect("the caller holds a credit");
        if let Some(Completion { tag, status }) = self.begin(key, cx) {
            self.outbox.push(tag, status, cx);
        }
    }

    fn abort(&mut self, tag: Tag, cx: &mut Cx) {
        let same = self.entries.iter().filter(|(_, e)| e.request.tag == tag);
        let keys: Vec<_> = same.map(|(key, _)| key).collect();
        keys.into_iter().for_each(|key| self.abort_one(key, cx));
    }

    #[inline]
    fn poll(&mut self, cx: &mut Cx, out: &mut Vec<Completion>) {
        self.outbox.take(out);
        self.take_answers(cx, out);
        if let Some(claimant) = &self.claimant {
            for key in claimant.take_granted() {
                // The request may have been aborted meanwhile.
                if self.entries.get(key).is_some() {
                    out.extend(self.proceed(key, cx));
                }
            }
        }
        if !self.later.is_empty() {
            self.retry(cx, out);
        }
    }
}

impl Drop for FileChannel {
    fn drop(&mut self) {
        if self.entries.is_empty() {
            self.store.leave();
        } else {
            assert!(std::thread::panicking(), "a channel is closed when nothing is in flight");
        }
    }
}
