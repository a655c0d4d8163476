//! A channel for futures, for long or rare sequences of requests. Reactor context.

use crate::{BdevChannel, Blocks, Completion, Descriptor, Io, Lba, Op, OpenError, Status, Tag};
use aryk_dma::{Buffer, Sgl};
use aryk_reactor::{Cx, Local, Root, RootId, ThreadId};
use aryk_slots::{Key, Slots};
use futures_channel::oneshot;
use std::cell::RefCell;
use std::convert::Infallible;
use std::fmt;
use std::rc::Rc;

/// A request of a task. It keeps the buffer until it completes, also when the task stops waiting.
struct Waiting {
    buffer: Option<Buffer>,
    done: oneshot::Sender<(Status, Option<Buffer>)>,
}

struct Queue {
    channel: BdevChannel,
    waiting: Slots<Waiting>,
    completions: Vec<Completion>,
    closing: bool,
    id: RootId,
    /// Dropped after the channel.
    closed: Option<oneshot::Sender<Infallible>>,
}

/// The initial room for requests in flight; the table grows for more.
const WAITING: u32 = 16;

impl Root for Queue {
    fn poll(&mut self, cx: &mut Cx) -> bool {
        self.channel.poll(cx, &mut self.completions);
        let worked = !self.completions.is_empty();
        for completion in self.completions.drain(..) {
            let waiting = self.waiting.remove(Key::from_raw(completion.tag.0)).expect("completed once");
            let buffer = waiting.buffer.map(|mut b| {
                b.reclaim();
                b
            });
            // The send fails if the task has stopped waiting; then the buffer is dropped.
            let _ = waiting.done.send((completion.status, buffer));
        }
        if self.closing && self.channel.in_flight() == 0 {
            self.closing = false;
            let id = self.id;
            cx.local().defer(move |cx| cx.remove_root(id));
        }
        worked
    }
}

/// A channel whose requests are futures that own their buffers.
pub struct AsyncChannel {
    local: Local,
    queue: Rc<RefCell<Queue>>,
}

impl fmt::Debug for AsyncChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.queue.borrow().channel.fmt(f)
    }
}

impl AsyncChannel {
    /// Opens a channel of the disk on the calling reactor, in `thread`. The reactor was prepared by [`Descriptor::prepare`].
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(descriptor: &Descriptor, thread: ThreadId, cx: &mut Cx) -> Result<Self, OpenError> {
        let name = format!("tasks of {}", descriptor.bdev().name());
        let root = cx.add_root(thread, &name, |id, cx| {
            let channel = descriptor.open_channel(id, cx)?;
            let waiting = Slots::new(WAITING);
            Ok(Queue { channel, waiting, completions: Vec::new(), closing: false, id, closed: None })
        })?;
        let queue = cx.root(root.id()).expect("just added");
        Ok(Self { local: cx.local().clone(), queue })
    }

    /// Reads `blocks` blocks from `lba` into `buffer`, which has the same length, and returns it.
    ///
    /// # Errors
    /// Any status but [`Status::Ok`].
    pub async fn read(&self, lba: Lba, blocks: Blocks, buffer: Buffer) -> Result<Buffer, Status> {
        let buffer = self.request(Op::Read, (lba, Lba::ZERO), blocks, Some(buffer)).await?;
        Ok(buffer.expect("it comes back"))
    }

    /// Writes `buffer` to `blocks` blocks from `lba`, which have the same length, and returns it.
    ///
    /// # Errors
    /// Any status but [`Status::Ok`].
    pub async fn write(&self, lba: Lba, blocks: Blocks, buffer: Buffer) -> Result<Buffer, Status> {
        let buffer = self.request(Op::Write, (lba, Lba::ZERO), blocks, Some(buffer)).await?;
        Ok(buffer.expect("it comes back"))
    }

    /// Compares `blocks` blocks from `lba` with `buffer`, which has the same length, and returns it.
    ///
    /// # Errors
    /// [`Status::Miscompare`] if they differ; any other status except [`Status::Ok`].
    pub async fn compare(&self, lba: Lba, blocks: Blocks, buffer: Buffer) -> Result<Buffer, Status> {
        let buffer = self.request(Op::Compare, (lba, Lba::ZERO), blocks, Some(buffer)).await?;
        Ok(buffer.expect("it comes back"))
    }

    /// Writes the second half of `buffer` to `blocks` blocks from `lba` if these hold its first half. The buffer has twice the
    /// length of the blocks, and is returned.
    ///
    /// # Errors
    /// As [`AsyncChannel::compare`].
    pub async fn compare_and_write(
        &self,
        lba: Lba,
        blocks: Blocks,
        buffer: Buffer,
    ) -> Result<Buffer, Status> {
        let buffer = self.request(Op::CompareAndWrite, (lba, Lba::ZERO), blocks, Some(buffer)).await?;
        Ok(buffer.expect("it comes back"))
    }

    /// Copies `blocks` blocks from `source` to `lba`.
    ///
    /// # Errors
    /// Any status but [`Status::Ok`].
    pub async fn copy(&self, source: Lba, lba: Lba, blocks: Blocks) -> Result<(), Status> {
        self.request(Op::Copy, (lba, source), blocks, None).await.map(drop)
    }

    /// Executes a request without data: a flush (of no blocks), an unmap, or a write-zeroes.
    ///
    /// # Errors
    /// Any status but [`Status::Ok`].
    pub async fn command(&self, op: Op, lba: Lba, blocks: Blocks) -> Result<(), Status> {
        self.request(op, (lba, Lba::ZERO), blocks, None).await.map(drop)
    }

    /// Aborts the requests in flight. They complete nevertheless, and may succeed.
    pub fn abort_all(&self) {
        let queue = Rc::clone(&self.queue);
        self.local.defer(move |cx| {
            let mut queue = queue.borrow_mut();
            queue.channel.abort_all(cx);
            cx.wake(queue.id);
        });
    }

    /// Closes the channel when the requests in flight have completed, and waits for that.
    pub async fn close(self) {
        let (closed, wait) = oneshot::channel();
        self.queue.borrow_mut().closed = Some(closed);
        drop(self);
        // The sender is dropped, not sent.
        let _ = wait.await;
    }

    async fn request(
        &self,
        op: Op,
        place: (Lba, Lba),
        blocks: Blocks,
        buffer: Option<Buffer>,
    ) -> Result<Option<Buffer>, Status> {
        let (done, completed) = oneshot::channel();
        let queue = Rc::clone(&self.queue);
        self.local.defer(move |cx| queue.borrow_mut().submit(op, place, blocks, buffer, done, cx));
        let (status, buffer) = completed.await.map_err(|_| Status::Removed)?;
        if status.is_ok() { Ok(buffer) } else { Err(status) }
    }
}

impl Queue {
    fn submit(
        &mut self,
        op: Op,
        (lba, source): (Lba, Lba),
        blocks: Blocks,
        mut buffer: Option<Buffer>,
        done: oneshot::Sender<(Status, Option<Buffer>)>,
        cx: &mut Cx,
    ) {
        let data = buffer.as_mut().map_or(Sgl::EMPTY, Buffer::lend);
        let key = self.waiting.add(Waiting { buffer, done });
        self.channel.submit(
            Io { tag: Tag(key.raw()), op, fua: false, may_unmap: false, lba, blocks, source, data },
            cx,
        );
        cx.wake(self.id);
    }
}

impl Drop for AsyncChannel {
    /// Closes the channel when the requests in flight have completed.
    fn drop(&mut self) {
        let queue = Rc::clone(&self.queue);
        self.local.defer(move |cx| {
            let mut queue = queue.borrow_mut();
            queue.closing = true;
            cx.wake(queue.id);
        });
    }
}
