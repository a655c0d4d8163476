//! One io_uring, which all clients on a reactor share.
//!
//! Each method named after an operation queues it. [`Ring::submit`] or [`Ring::wait`] submits all queued operations together,
//! in one `io_uring_enter`. Each operation completes once (a poll, a receive, or a send without a copy: more often) with its
//! [`Tag`].
//!
//! **Invariant.** A request's scatter list stays in place until its last completion is reaped; this is the invariant of
//! [`aryk_dma::Sgl`]. The caller that queues a read, a write or a send ensures this by not completing the request earlier.

use crate::received::{BUFFERS, BufferName, Buffers, Filled, GROUP};
use aryk_dma::{Seg, Sgl};
use io_uring::{Builder, EnterFlags, IoUring, Probe, cqueue, opcode, squeue, types};
use rustix::io::Errno;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::rc::Rc;
use std::time::Duration;

/// Returned with a completion: identifies the client of the ring, and its operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tag {
    /// The client that owns the operation.
    pub client: u16,
    /// The client's own number for the operation, below 2⁴⁸.
    pub token: u64,
}

impl Tag {
    /// Marks the ring's own operations (cancellations), whose completions have no recipient.
    const NO_RECIPIENT: u64 = u64::MAX;

    fn raw(self) -> u64 {
        assert!(self.token < 1 << 48, "a token has 48 bits");
        let raw = u64::from(self.client) << 48 | self.token;
        assert_ne!(raw, Self::NO_RECIPIENT, "the last token of the last client is reserved");
        raw
    }

    const fn from_raw(raw: u64) -> Self {
        Self { client: (raw >> 48) as u16, token: raw & ((1 << 48) - 1) }
    }
}

/// The result of an operation.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The operation's tag.
    pub tag: Tag,
    /// Bytes, poll events, or similar; a negated errno if the operation failed.
    pub result: i32,
    /// Whether the same operation completes again.
    pub more: bool,
    /// The buffer with what a receive has received: [`Ring::claim`].
    buffer: Option<BufferName>,
}

impl Completion {
    /// A completion of what is not an operation of a ring.
    pub const fn of_call(tag: Tag, result: i32) -> Self {
        Self { tag, result, more: false, buffer: None }
    }
}

/// The durability of [`Ring::fsync`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fsync {
    /// The file's data, and the metadata needed to read it.
    Data,
    /// Data and all metadata.
    All,
}

/// An io_uring with its queued and submitted operations. See the head of this file.
pub struct Ring {
    ring: IoUring,
    /// Vectors of operations that are queued and not yet submitted. The kernel copies them on submission, so the
    /// arena is reused from its start then. Never grown while in use: entries point into it.
    vectors: Vec<Seg>,
    /// The headers of the messages among them, by the same rules.
    messages: Vec<libc::msghdr>,
    /// The buffers of receives, once there are some.
    received: Option<Rc<Buffers>>,
    /// Operations whose last completion is pending, polls included.
    in_flight: u32,
    /// Whether operations may be queued that the kernel does not have yet. Each turn reads this flag, because the submission
    /// queue's own count takes longer.
    has_queued: bool,
    /// Bytes of queued reads and writes; after a partial submission, still the bytes of all of them.
    bytes: u64,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

/// The kernel's limit for one vector (`UIO_MAXIOV`).
pub(crate) const VECTOR_MAX: usize = 1024;

/// How long the end of a ring waits for that of its operations.
const DROP_WAIT: Duration = Duration::from_secs(1);

impl Ring {
    /// Creates a ring with room for `entries` unsubmitted operations. Only the creating thread may use it.
    ///
    /// # Errors
    /// The kernel's errors: `EPERM` or `ENOSYS` where io_uring is forbidden. `Unsupported` if the kernel lacks a feature.
    pub fn new(entries: u32) -> io::Result<Self> {
        let mut modern = IoUring::builder();
        modern.setup_single_issuer().setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
        match Self::with(&mut modern, entries) {
            // Kernels before Linux 6.0 lack some of these flags, which affect only speed.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Self::with(&mut IoUring::builder(), entries),
            made => made,
        }
    }

    fn with(builder: &mut Builder, entries: u32) -> io::Result<Self> {
        let ring = builder.setup_cqsize(entries * 4).build(entries)?;
        let has = ring.params();
        // The last feature came with Linux 5.13, as did multishot polls, which have no feature flag.
        if !(has.is_feature_nodrop()
            && has.is_feature_submit_stable()
            && has.is_feature_ext_arg()
            && has.is_feature_resource_tagging())
        {
            return Err(io::Error::from(io::ErrorKind::Unsupported));
        }
        Ok(Self {
            ring,
            vectors: Vec::with_capacity(4 * VECTOR_MAX),
            messages: Vec::with_capacity(entries as usize),
            received: None,
            in_flight: 0,
            bytes: 0,
            has_queued: false,
        })
    }

    /// Operations whose last completion is pending, polls included.
    pub const fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Operations that are queued and not yet submitted to the kernel.
    pub fn unsubmitted(&mut self) -> usize {
        self.ring.submission().len()
    }

    /// Bytes of reads and writes that are queued and not yet submitted to the kernel. The kernel may copy them during the
    /// submission.
    pub const fn unsubmitted_bytes(&self) -> u64 {
        self.bytes
    }

    /// Queues a read of `fd` at `offset` into `sgl`.
    ///
    /// # Errors
    /// If the submission queue is full: the errors of [`Ring::submit`], or `EAGAIN` if the kernel accepts no operation. Then
    /// nothing is queued.
    ///
    /// # Panics
    /// If `sgl` has more than 1024 pieces.
    pub fn read(&mut self, tag: Tag, fd: BorrowedFd<'_>, sgl: &Sgl, offset: u64) -> io::Result<()> {
        let fd = types::Fd(fd.as_raw_fd());
        let entry = match sgl.as_single() {
            Some(seg) => opcode::Read::new(fd, seg.base(), seg.len() as u32).offset(offset).build(),
            None => {
                let (vector, count) = self.vector(sgl.pieces())?;
                opcode::Readv::new(fd, vector, count).offset(offset).build()
            }
        };
        self.push(tag, entry)?;
        self.bytes += u64::from(sgl.len());
        Ok(())
    }

    /// Queues a write of `sgl` to `fd` at `offset`, durable on completion if `dsync`.
    ///
    /// # Errors
    /// As [`Ring::read`].
    ///
    /// # Panics
    /// As [`Ring::read`].
    pub fn write(
        &mut self,
        tag: Tag,
        fd: BorrowedFd<'_>,
        sgl: &Sgl,
        offset: u64,
        dsync: bool,
    ) -> io::Result<()> {
        let fd = types::Fd(fd.as_raw_fd());
        let flags = if dsync { libc::RWF_DSYNC } else { 0 };
        let entry = match sgl.as_single() {
            Some(seg) => {
                opcode::Write::new(fd, seg.base(), seg.len() as u32).offset(offset).rw_flags(flags).build()
            }
            None => {
                let (vector, count) = self.vector(sgl.pieces())?;
                opcode::Writev::new(fd, vector, count).offset(offset).rw_flags(flags).build()
            }
        };
        self.push(tag, entry)?;
        self.bytes += u64::from(sgl.len());
        Ok(())
    }

    /// Queues a flush of `fd` to its storage.
    ///
    /// # Errors
    /// As [`Ring::read`].
    pub fn fsync(&mut self, tag: Tag, fd: BorrowedFd<'_>, what: Fsync) -> io::Result<()> {
        let flags = match what {
            Fsync::Data => types::FsyncFlags::DATASYNC,
            Fsync::All => types::FsyncFlags::empty(),
        };
        self.push(tag, opcode::Fsync::new(types::Fd(fd.as_raw_fd())).flags(flags).build())
    }

    /// Queues a `fallocate(2)` with `mode`, over `len` bytes from `offset`.
    ///
    /// # Errors
    /// As [`Ring::read`].
    pub fn fallocate(
        &mut self,
        tag: Tag,
        fd: BorrowedFd<'_>,
        mode: i32,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        let fd = types::Fd(fd.as_raw_fd());
        self.push(tag, opcode::Fallocate::new(fd, len).offset(offset).mode(mode).build())
    }

    /// Queues a multishot poll: it completes, with more to come, each time that `fd` becomes readable.
    ///
    /// # Errors
    /// As [`Ring::read`].
    pub fn poll_readable(&mut self, tag: Tag, fd: BorrowedFd<'_>) -> io::Result<()> {
        let fd = types::Fd(fd.as_raw_fd());
        self.push(tag, opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true).build())
    }

    /// Prepares receives and sends. What they need came with Linux 6.1.
    ///
    /// # Errors
    /// `Unsupported` with an older kernel; the kernel's, if it refuses the buffers.
    pub fn prepare_sockets(&mut self) -> io::Result<()> {
        if self.received.is_some() {
            return Ok(());
        }
        let mut known = Probe::new();
        self.ring.submitter().register_probe(&mut known)?;
        if !known.is_supported(opcode::SendMsgZc::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let buffers = Rc::new(Buffers::new()?);
        // SAFETY: the list has room for this many entries, and stays in place: see `Ring::drop`.
        unsafe {
            self.ring.submitter().register_buf_ring_with_flags(buffers.list() as u64, BUFFERS, GROUP, 0)?
        };
        self.received = Some(buffers);
        Ok(())
    }

    /// Queues the receives of a socket that blocks: it completes, with more to come, each time that bytes have arrived, and ends
    /// with 0 at the end of the stream, with an error, or with `ENOBUFS` if there is no buffer: for bytes that have arrived, or
    /// when the receive begins, also if none have. The bytes of each completion are to be taken by [`Ring::claim`].
    ///
    /// # Errors
    /// As [`Ring::read`].
    ///
    /// # Panics
    /// If [`Ring::prepare_sockets`] has not succeeded.
    pub fn receive(&mut self, tag: Tag, fd: BorrowedFd<'_>) -> io::Result<()> {
        assert!(self.received.is_some(), "receives are prepared");
        self.push(tag, opcode::RecvMulti::new(types::Fd(fd.as_raw_fd()), GROUP).build())
    }

    /// The bytes of a completion of a receive. `None`: it has none, as an error.
    ///
    /// # Panics
    /// If they have been claimed.
    pub fn claim(&self, completion: &Completion) -> Option<Filled> {
        let len = usize::try_from(completion.result).unwrap_or(0);
        Some(self.received.as_ref()?.claim(completion.buffer?, len))
    }

    /// Queues a send of the scatter lists, in this order, by a socket that blocks. The result is the number of bytes that the
    /// socket has taken, at least one. If `zero_copy`, there is more to come after the result: a last completion tells that the
    /// memory is free.
    ///
    /// # Errors
    /// As [`Ring::read`].
    ///
    /// # Panics
    /// If the lists have more than 1024 pieces together.
    pub fn send(&mut self, tag: Tag, fd: BorrowedFd<'_>, lists: &[Sgl], zero_copy: bool) -> io::Result<()> {
        let (vector, count) = self.vector(lists.iter().flat_map(Sgl::pieces))?;
        // SAFETY: all zeroes are a message without address, data and control.
        let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        message.msg_iov = vector.cast_mut();
        message.msg_iovlen = count as usize;
        self.messages.push(message);
        let (fd, message) = (types::Fd(fd.as_raw_fd()), self.messages.last().expect("just added"));
        let flags = libc::MSG_NOSIGNAL as u32;
        let entry = match zero_copy {
            true => opcode::SendMsgZc::new(fd, message).flags(flags).build(),
            false => opcode::SendMsg::new(fd, message).flags(flags).build(),
        };
        self.push(tag, entry)?;
        self.bytes += lists.iter().map(|list| u64::from(list.len())).sum::<u64>();
        Ok(())
    }

    /// Queues a request to cancel the operation with `tag`. The operation completes in any case.
    ///
    /// # Errors
    /// As [`Ring::read`].
    pub fn cancel(&mut self, tag: Tag) -> io::Result<()> {
        self.push_raw(opcode::AsyncCancel::new(tag.raw()).build().user_data(Tag::NO_RECIPIENT))
    }

    /// As [`Ring::cancel`], and the request completes, too: with 0, or with an error if there was nothing to cancel (`ENOENT`),
    /// or nothing that can be cancelled now (`EALREADY`).
    ///
    /// # Errors
    /// As [`Ring::read`].
    pub fn cancel_with_result(&mut self, tag: Tag, of: Tag) -> io::Result<()> {
        self.push(tag, opcode::AsyncCancel::new(of.raw()).build())
    }

    /// Submits all queued operations to the kernel. Without queued operations, there is no system call.
    ///
    /// # Errors
    /// The errors of `io_uring_enter`, except for `EBUSY` and `EAGAIN`, after which the caller must reap first: operations stay
    /// queued.
    pub fn submit(&mut self) -> io::Result<()> {
        if !self.has_queued {
            return Ok(());
        }
        let result = self.ring.submit();
        self.submitted(result)
    }

    /// Submits all queued operations and sleeps until there is a completion or `timeout` has passed; without a timeout, for any
    /// time.
    ///
    /// # Errors
    /// As [`Ring::submit`].
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let spec = timeout.map(types::Timespec::from);
        let mut args = types::SubmitArgs::new();
        if let Some(spec) = &spec {
            args = args.timespec(spec);
        }
        let result = self.ring.submitter().submit_with_args(1, &args);
        self.submitted(result)
    }

    /// Whether operations may be queued that the kernel does not have yet.
    #[inline]
    pub const fn has_queued(&self) -> bool {
        self.has_queued
    }

    /// Whether [`Ring::reap`] would find completions, in the ring or held by the kernel.
    #[inline]
    pub fn may_reap(&mut self) -> bool {
        self.has_completions() || self.kernel_holds_completions()
    }

    /// Takes up to `budget` completions. Makes no system call, except when the kernel holds completions that did not fit into
    /// the queue.
    pub fn reap(&mut self, budget: u32, mut each: impl FnMut(Completion)) -> u32 {
        self.flush_overflow();
        let mut count = 0;
        let mut queue = self.ring.completion();
        while count < budget {
            let Some(entry) = queue.next() else { break };
            count += 1;
            let more = cqueue::more(entry.flags());
            if entry.user_data() == Tag::NO_RECIPIENT {
                continue;
            }
            self.in_flight -= u32::from(!more);
            let (tag, result) = (Tag::from_raw(entry.user_data()), entry.result());
            let name = |index| self.received.as_ref().map(|buffers| buffers.reaped(index));
            let buffer = cqueue::buffer_select(entry.flags()).and_then(name);
            each(Completion { tag, result, more, buffer });
        }
        count
    }

    /// Whether a completion can be reaped.
    #[inline]
    pub fn has_completions(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    /// With COOP_TASKRUN, and after an overflow, completions appear only when this thread enters the kernel; flags in shared
    /// memory report that.
    #[inline]
    fn kernel_holds_completions(&mut self) -> bool {
        let queue = self.ring.submission();
        queue.cq_overflow() || queue.taskrun()
    }

    fn flush_overflow(&mut self) {
        if !self.kernel_holds_completions() {
            return;
        }
        // SAFETY: the call passes no memory.
        let entered = unsafe { self.ring.submitter().enter::<()>(0, 0, EnterFlags::GETEVENTS.bits(), None) };
        debug_assert!(entered.is_ok(), "{entered:?}");
    }

    /// Copies `pieces` to the arena. Returns their address there, valid until the next submission. Ensures that the
    /// queue has room for the entry that refers to them: if the entry had to wait for a submission, the next vector would
    /// overwrite them.
    fn vector(&mut self, pieces: impl Iterator<Item = Seg>) -> io::Result<(*const libc::iovec, u32)> {
        if !self.has_room_for_vector() {
            self.submit()?;
            if !self.has_room_for_vector() {
                return Err(Errno::AGAIN.into());
            }
        }
        let start = self.vectors.len();
        self.vectors.extend(pieces.take(VECTOR_MAX + 1));
        let count = self.vectors.len() - start;
        assert!(count <= VECTOR_MAX, "the block layer splits at {VECTOR_MAX} pieces");
        Ok((self.vectors[start..].as_ptr().cast(), count as u32))
    }

    fn has_room_for_vector(&mut self) -> bool {
        self.vectors.len() + VECTOR_MAX <= self.vectors.capacity()
            && self.messages.len() < self.messages.capacity()
            && !self.ring.submission().is_full()
    }

    fn push(&mut self, tag: Tag, entry: squeue::Entry) -> io::Result<()> {
        self.push_raw(entry.user_data(tag.raw()))?;
        self.in_flight += 1;
        Ok(())
    }

    fn push_raw(&mut self, entry: squeue::Entry) -> io::Result<()> {
        if self.ring.submission().is_full() {
            self.submit()?;
        }
        // SAFETY: the kernel checks descriptors; the memory that the entry names stays in place: vectors until submission
        // by `vector`, data until completion by the file's invariant.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        self.has_queued = true;
        pushed.map_err(|_| Errno::AGAIN.into())
    }

    fn submitted(&mut self, result: io::Result<usize>) -> io::Result<()> {
        let result = match result {
            Ok(_) => Ok(()),
            Err(e) => match Errno::from_io_error(&e) {
                Some(Errno::AGAIN | Errno::BUSY | Errno::INTR | Errno::TIME) => Ok(()),
                _ => Err(e),
            },
        };
        self.has_queued = !self.ring.submission().is_empty();
        if !self.has_queued {
            self.vectors.clear();
            self.messages.clear();
            self.bytes = 0;
        }
        result
    }
}

impl Drop for Ring {
    /// Ends receives before their buffers are unmapped.
    fn drop(&mut self) {
        let Some(buffers) = self.received.take() else { return };
        let submitter = self.ring.submitter();
        let wait = types::Timespec::from(DROP_WAIT);
        let ended = match self.in_flight {
            0 => Ok(()),
            _ => submitter.register_sync_cancel(Some(wait), types::CancelBuilder::any()),
        };
        let has_ended = match ended {
            Ok(()) => true,
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        if submitter.unregister_buf_ring(GROUP).is_err() || !has_ended {
            // The kernel may still fill them.
            std::mem::forget(buffers);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_dma::{Buffer, Mapping, MemTable, PAGE, Region, SgTable};
    use rustix::event::{EventfdFlags, eventfd};
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;
    use std::sync::Arc;

    fn tag(token: u64) -> Tag {
        Tag { client: 3, token }
    }

    /// A ring with the setup flags of new kernels, and one with those of old kernels.
    fn rings() -> [Ring; 2] {
        [Ring::new(4).unwrap(), Ring::with(&mut IoUring::builder(), 4).unwrap()]
    }

    fn reap_one(ring: &mut Ring) -> Completion {
        let mut got = None;
        while got.is_none() {
            ring.wait(None).unwrap();
            ring.reap(1, |c| got = Some(c));
        }
        got.unwrap()
    }

    #[test]
    fn reads_return_written_data() {
        let file = tempfile::tempfile().unwrap();
        for mut ring in rings() {
            let mut out = Buffer::from_slice(b"0123456789");
            let sgl = out.lend();
            ring.write(tag(1), file.as_fd(), &sgl.slice(2, 4), 100, true).unwrap();
            let done = reap_one(&mut ring);
            assert_eq!((done.tag, done.result, done.more), (tag(1), 4, false));
            let mut back = Buffer::new(4, 512);
            ring.read(tag((1 << 48) - 1), file.as_fd(), &back.lend(), 100).unwrap();
            assert_eq!(reap_one(&mut ring).result, 4);
            back.reclaim();
            assert_eq!((back.bytes(), ring.in_flight()), (&b"2345"[..], 0));
            out.reclaim();
        }
    }

    #[test]
    fn operations_beyond_the_queue_are_submitted_early() {
        let file = tempfile::tempfile().unwrap();
        for mut ring in rings() {
            for i in 0..100 {
                ring.fsync(tag(i), file.as_fd(), Fsync::Data).unwrap();
            }
            let mut seen = std::collections::BTreeSet::new();
            while seen.len() < 100 {
                ring.wait(None).unwrap();
                ring.reap(7, |c| assert!(seen.insert(c.tag.token)));
            }
            assert_eq!(ring.in_flight(), 0);
        }
    }

    /// The bytes are subtracted when the operations are submitted, even if a full queue forces the submission.
    #[test]
    fn unsubmitted_bytes_are_those_that_are_queued() {
        let file = tempfile::tempfile().unwrap();
        for mut ring in rings() {
            let mut out = Buffer::from_slice(b"0123456789");
            let sgl = out.lend();
            let entries = ring.ring.submission().capacity() as u64;
            for i in 0..=entries {
                ring.write(tag(i), file.as_fd(), &sgl, 10 * i, false).unwrap();
                assert_eq!(ring.unsubmitted_bytes(), 10 * ring.unsubmitted() as u64, "after {i}");
            }
            assert_eq!(ring.unsubmitted(), 1, "the last operation forced the submission of the full queue");
            ring.submit().unwrap();
            assert_eq!((ring.unsubmitted(), ring.unsubmitted_bytes()), (0, 0));
            for _ in 0..=entries {
                assert_eq!(reap_one(&mut ring).result, 10);
            }
            out.reclaim();
        }
    }

    /// The queue may be full, or become full, at any of these operations.
    #[test]
    fn vectors_stay_in_place_until_they_are_submitted() {
        let len = 4 * PAGE;
        let region = Region {
            guest_addr: 0,
            user_addr: 0,
            len,
            offset: 0,
            mapping: Arc::new(Mapping::anonymous(len).unwrap()),
        };
        let memory = Arc::new(MemTable::new(vec![region]).unwrap());
        for mut ring in rings() {
            let before = ring.ring.submission().capacity() as u64;
            let file = tempfile::tempfile().unwrap();
            let mut lists = SgTable::new(16, Arc::clone(&memory));
            (0..before).for_each(|i| ring.fsync(tag(100 + i), file.as_fd(), Fsync::Data).unwrap());
            for slot in 0..16_u16 {
                let at = u64::from(slot) * 64;
                memory.write_bytes(at, &[slot as u8; 64]).unwrap();
                lists.begin(slot).extend([(at, 8), (at + 32, 8)]).unwrap();
                ring.write(tag(slot.into()), file.as_fd(), &lists.sgl(slot), 16 * u64::from(slot), false)
                    .unwrap();
            }
            for _ in 0..16 + before {
                let done = reap_one(&mut ring);
                assert_eq!(done.result, if done.tag.token < 100 { 16 } else { 0 });
            }
            let mut bytes = [0; 256];
            file.read_exact_at(&mut bytes, 0).unwrap();
            for (i, byte) in bytes.into_iter().enumerate() {
                assert_eq!(usize::from(byte), i / 16, "byte {i}");
            }
            (0..16).for_each(|slot| lists.end(slot));
        }
    }

    #[test]
    fn a_poll_fires_at_each_kick_until_cancelled() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for mut ring in rings() {
            ring.poll_readable(tag(9), fd.as_fd()).unwrap();
            ring.submit().unwrap();
            let mut file = std::fs::File::from(fd.try_clone().unwrap());
            for _ in 0..3 {
                file.write_all(&1u64.to_ne_bytes()).unwrap();
                let event = reap_one(&mut ring);
                assert!(event.more && event.result > 0);
            }
            ring.cancel(tag(9)).unwrap();
            let mut last = reap_one(&mut ring);
            while last.more {
                // The kernel may report one kick twice.
                last = reap_one(&mut ring);
            }
            assert_eq!((last.more, last.result), (false, -libc::ECANCELED));
        }
    }

    #[test]
    fn a_cancel_tells_whether_it_has_found_something() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for mut ring in rings() {
            ring.cancel_with_result(tag(2), tag(1)).unwrap();
            let done = reap_one(&mut ring);
            assert_eq!((done.tag, done.result, done.more), (tag(2), -libc::ENOENT, false));
            ring.poll_readable(tag(1), fd.as_fd()).unwrap();
            ring.cancel_with_result(tag(2), tag(1)).unwrap();
            let mut done =
                [reap_one(&mut ring), reap_one(&mut ring)].map(|done| (done.tag.token, done.result));
            done.sort_unstable();
            assert_eq!((done, ring.in_flight()), ([(1, -libc::ECANCELED), (2, 0)], 0));
        }
    }

    /// A connection: the side of the ring, and that of the test.
    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener.accept().unwrap().0, peer)
    }

    /// Reaps until `is_done`.
    fn reap_until(ring: &mut Ring, mut is_done: impl FnMut(&Ring, Completion) -> bool) {
        let mut done = false;
        while !done {
            ring.wait(None).unwrap();
            let mut all = Vec::new();
            ring.reap(1024, |completion| all.push(completion));
            all.into_iter().for_each(|completion| done |= is_done(ring, completion));
        }
    }

    #[test]
    fn a_receive_takes_all_that_arrives_in_buffers_of_the_ring() {
        for mut ring in rings() {
            ring.prepare_sockets().unwrap();
            ring.prepare_sockets().unwrap();
            let (socket, mut peer) = connection();
            ring.receive(tag(1), socket.as_fd()).unwrap();
            ring.submit().unwrap();
            // More than all buffers, in pieces, so that each buffer is used again.
            let sent: Vec<u8> = (0..10 << 20).map(|i: u32| (i / 7) as u8).collect();
            let expected = sent.clone();
            let sender = std::thread::spawn(move || peer.write_all(&sent).unwrap());
            let mut got = Vec::new();
            let mut is_over = false;
            while !is_over {
                let mut has_ended = false;
                reap_until(&mut ring, |ring, done| {
                    has_ended |= !done.more;
                    match ring.claim(&done) {
                        Some(bytes) => got.extend_from_slice(&bytes),
                        None => is_over = done.result == 0,
                    }
                    true
                });
                // The queue of completions was full, or there was no buffer.
                if has_ended && !is_over {
                    ring.receive(tag(1), socket.as_fd()).unwrap();
                }
            }
            sender.join().unwrap();
            assert!(got == expected);
            assert_eq!(ring.in_flight(), 0);
        }
    }

    #[test]
    fn a_receive_without_buffers_ends_and_goes_on_later() {
        for mut ring in rings() {
            ring.prepare_sockets().unwrap();
            let (socket, mut peer) = connection();
            ring.receive(tag(1), socket.as_fd()).unwrap();
            ring.submit().unwrap();
            let sender = std::thread::spawn(move || {
                let _ = peer.write_all(&[7; 64 << 20]);
            });
            let mut held = Vec::new();
            let mut is_over = false;
            while !is_over {
                let mut has_ended = false;
                reap_until(&mut ring, |ring, done| {
                    has_ended |= !done.more;
                    is_over = done.result == -libc::ENOBUFS;
                    held.extend(ring.claim(&done));
                    true
                });
                if has_ended && !is_over {
                    ring.receive(tag(1), socket.as_fd()).unwrap();
                }
            }
            assert_eq!((held.len(), ring.in_flight()), (BUFFERS.into(), 0));
            // One that begins ends, too, although nothing has arrived.
            let (idle, _idle_peer) = connection();
            ring.receive(tag(3), idle.as_fd()).unwrap();
            let ended = reap_one(&mut ring);
            assert_eq!((ended.tag, ended.result, ended.more), (tag(3), -libc::ENOBUFS, false));
            drop(held);
            ring.receive(tag(2), socket.as_fd()).unwrap();
            reap_until(&mut ring, |ring, done| {
                assert_eq!(done.tag, tag(2));
                ring.claim(&done).is_some_and(|bytes| bytes.iter().all(|byte| *byte == 7))
            });
            // The receive is cancelled by the end of the ring.
            drop(ring);
            drop(socket);
            sender.join().unwrap();
        }
    }

    #[test]
    fn sends_take_the_pieces_in_order_and_tell_when_their_memory_is_free() {
        for (mut ring, zero_copy) in rings().into_iter().zip([false, true]) {
            ring.prepare_sockets().unwrap();
            let (socket, mut peer) = connection();
            let mut buffers = [b"01234567", b"abcdefgh"].map(|bytes| Buffer::from_slice(bytes));
            let lists = buffers.each_mut().map(Buffer::lend);
            let lists = [lists[1].slice(1, 3), lists[0].first(2), lists[1].slice(7, 1)];
            ring.send(tag(4), socket.as_fd(), &lists, zero_copy).unwrap();
            let sent = reap_one(&mut ring);
            assert_eq!((sent.tag, sent.result, sent.more), (tag(4), 6, zero_copy));
            let mut bytes = [0; 6];
            peer.read_exact(&mut bytes).unwrap();
            assert_eq!(&bytes, b"bcd01h");
            if zero_copy {
                let free = reap_one(&mut ring);
                assert_eq!((free.tag, free.more), (tag(4), false));
            }
            buffers.iter_mut().for_each(Buffer::reclaim);
            assert_eq!(ring.in_flight(), 0);
            drop(peer);
            let list = [buffers[0].lend()];
            let failed = loop {
                ring.send(tag(5), socket.as_fd(), &list, false).unwrap();
                let result = reap_one(&mut ring).result;
                if result < 0 {
                    break result;
                }
            };
            assert!([-libc::EPIPE, -libc::ECONNRESET].contains(&failed), "{failed}");
            buffers[0].reclaim();
        }
    }

    #[test]
    fn waiting_ends_at_the_timeout() {
        for mut ring in rings() {
            ring.wait(Some(Duration::from_millis(1))).unwrap();
            assert!(!ring.has_completions());
        }
    }
}
