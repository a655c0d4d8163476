//! One io_uring, which all clients on a reactor share.
//!
//! Each method named after an operation queues it. [`Ring::submit`] or [`Ring::wait`] submits all queued operations together,
//! in one `io_uring_enter`. Each operation completes once (a poll: many times) with its [`Tag`].
//!
//! **Invariant.** A request's scatter list stays in place until its completion is reaped; this is the invariant of
//! [`aryk_dma::Sgl`]. The caller that queues a read or a write ensures this by not completing the request earlier.

use aryk_dma::{Seg, Sgl};
use io_uring::{Builder, EnterFlags, IoUring, cqueue, opcode, squeue, types};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
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
                let (vector, count) = self.vector(sgl)?;
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
                let (vector, count) = self.vector(sgl)?;
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

    /// Queues a request to cancel the operation with `tag`. The operation completes in any case.
    ///
    /// # Errors
    /// As [`Ring::read`].
    pub fn cancel(&mut self, tag: Tag) -> io::Result<()> {
        self.push_raw(opcode::AsyncCancel::new(tag.raw()).build().user_data(Tag::NO_RECIPIENT))
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
            each(Completion { tag: Tag::from_raw(entry.user_data()), result: entry.result(), more });
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

    /// Copies the pieces of `sgl` to the arena. Returns their address there, valid until the next submission. Ensures that the
    /// queue has room for the entry that refers to them: if the entry had to wait for a submission, the next vector would
    /// overwrite them.
    fn vector(&mut self, sgl: &Sgl) -> io::Result<(*const libc::iovec, u32)> {
        let pieces = sgl.pieces();
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
        self.vectors.len() + VECTOR_MAX <= self.vectors.capacity() && !self.ring.submission().is_full()
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
            self.bytes = 0;
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aryk_dma::{Buffer, Mapping, MemTable, PAGE, Region, SgTable};
    use rustix::event::{EventfdFlags, eventfd};
    use std::io::Write;
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
    fn waiting_ends_at_the_timeout() {
        for mut ring in rings() {
            ring.wait(Some(Duration::from_millis(1))).unwrap();
            assert!(!ring.has_completions());
        }
    }
}
