//! One connection: receives whole messages with their file descriptors, and sends replies. Control context; no function blocks.
//!
//! **Invariant.** Until the kind of a file descriptor from a front-end is known to be harmless, the only calls made on it are
//! calls that the kernel answers from memory ([`kind_of`]). A descriptor of any other kind may block even in `close` (a file of
//! a FUSE server that does not answer, a lingering TCP socket), so [`Connection::close`] closes it on a separate thread.

use crate::Error;
use crate::message::{Decoder, FDS_MAX, FdKind, Message, Request};
use aryk_log_limit::{LogLimit, limited};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketType,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::{Instant, timeout, timeout_at};

/// Timeout for the rest of a message after its first byte, and for the front-end to read a reply. A busy front-end may be slow;
/// one that stops in the middle of a message has failed.
const PATIENCE: Duration = Duration::from_secs(10);

/// The maximum number of one front-end's memory files that wait to be closed when its next message is read.
const CLOSING_MAX: usize = 64;
/// The maximum number of descriptors that are kept until the end of a connection because closing them may block.
const SLOW_TO_CLOSE_MAX: usize = 64;

pub(crate) struct Connection {
    stream: UnixStream,
    decoder: Decoder,
    /// Descriptors that came with the bytes of the unfinished message.
    fds: Vec<OwnedFd>,
    /// Descriptors whose `close` may block.
    slow_to_close: Vec<OwnedFd>,
    /// Cloned for each memory file that is being closed.
    closing: Arc<()>,
    /// Deadline for the unfinished message.
    deadline: Option<Instant>,
}

impl Connection {
    pub(crate) fn new(stream: UnixStream) -> Self {
        let (fds, slow_to_close, closing) = (Vec::new(), Vec::new(), Arc::default());
        Self { stream, decoder: Decoder::default(), fds, slow_to_close, closing, deadline: None }
    }

    /// The next message and its file descriptors, whose number and kind match the request. `None` at the end of the connection.
    /// The future can be cancelled without loss.
    pub(crate) async fn next(&mut self) -> Result<Option<(Message, Vec<OwnedFd>)>, Error> {
        self.memory_is_closed().await;
        loop {
            let received = match self.deadline {
                None => self.receive().await,
                Some(deadline) => match timeout_at(deadline, self.receive()).await {
                    Ok(received) => received,
                    Err(_) => {
                        return Err(Error::HalfMessage(
                            self.decoder.pending(),
                            "no more bytes before the timeout",
                        ));
                    }
                },
            };
            let n = match received {
                Ok(n) => n.ok_or(Error::FdsLost)?,
                // If a front-end is killed with unread replies in its socket, the kernel resets the connection.
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => 0,
                Err(e) => return Err(e.into()),
            };
            if n == 0 {
                return match self.decoder.pending() {
                    0 => Ok(None),
                    n => Err(Error::HalfMessage(n, "hung up")),
                };
            }
            if let Some(message) = self.decoder.filled(n)? {
                self.deadline = None;
                let fds = self.take_fds(&message)?;
                return Ok(Some((message, fds)));
            }
            self.deadline.get_or_insert_with(|| Instant::now() + PATIENCE);
        }
    }

    /// Sends a reply, with a file descriptor if given. Returns `false` if the front-end has hung up.
    pub(crate) async fn send(&mut self, reply: &[u8], fd: Option<BorrowedFd<'_>>) -> Result<bool, Error> {
        let Self { stream, .. } = self;
        let all = async {
            let (mut rest, mut fd) = (reply, fd);
            while !rest.is_empty() {
                let sent = stream.async_io(Interest::WRITABLE, || send(stream.as_fd(), rest, fd));
                match sent.await {
                    Ok(n) => rest = &rest[n..],
                    Err(e)
                        if matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) =>
                    {
                        return Ok(false);
                    }
                    Err(e) => return Err(e.into()),
                }
                // The descriptor was sent with the first byte.
                fd = None;
            }
            Ok(true)
        };
        timeout(PATIENCE, all).await.map_err(|_| Error::NotReading)?
    }

    /// Waits for `work`, however long it takes. Logs and calls `left` if the front-end hangs up before `work` ends.
    pub(crate) async fn wait_watching<T>(
        &self,
        (what, lines): (&str, &LogLimit),
        left: impl FnOnce(),
        work: impl Future<Output = T>,
    ) -> T {
        tokio::pin!(work);
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = self.hung_up() => limited!(lines, warn, "the front-end hung up while {what}; still waiting"),
        }
        left();
        work.await
    }

    /// Waits until the front-end has hung up. Its unread messages keep the socket readable, so readiness does not show a
    /// hang-up, and the connection is polled instead.
    pub(crate) async fn hung_up(&self) {
        const POLL_INTERVAL: Duration = Duration::from_millis(100);
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let mut fds = [PollFd::new(&self.stream, PollFlags::RDHUP)];
            let polled = rustix::event::poll(&mut fds, Some(&Timespec::default()));
            let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
            if polled.is_ok() && fds[0].revents().intersects(gone) {
                return;
            }
        }
    }

    /// Keeps a descriptor until the end of the connection, when a thread that may block closes it.
    ///
    /// # Errors
    /// [`Error::TooManyChannels`]; the fd is kept all the same.
    pub(crate) fn close_later(&mut self, fd: OwnedFd) -> Result<(), Error> {
        self.slow_to_close.push(fd);
        if self.slow_to_close.len() > SLOW_TO_CLOSE_MAX {
            Err(Error::TooManyChannels(SLOW_TO_CLOSE_MAX))
        } else {
            Ok(())
        }
    }

    /// Closes memory files, and other descriptors whose `close` does not block, in the background: if this process has the last
    /// reference to a memory file, the kernel frees its pages, which takes long.
    pub(crate) fn close_memory(&self, fds: Vec<OwnedFd>) {
        fds.into_iter().for_each(|fd| aryk_dma::close_memory(fd, Arc::clone(&self.closing)));
    }

    /// Waits until few memory files are being closed, so that their descriptors do not accumulate.
    async fn memory_is_closed(&self) {
        const POLL_INTERVAL: Duration = Duration::from_millis(1);
        while Arc::strong_count(&self.closing) > CLOSING_MAX {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Ends the connection. Waits until the front-end's descriptors and `channel` are closed, however long that takes. Only
    /// this controller's next front-end has to wait for that.
    pub(crate) async fn close(self, channel: Option<OwnedFd>) {
        let closing = tokio::task::spawn_blocking(move || drop((self, channel)));
        closing.await.expect("closing does not panic");
    }

    async fn receive(&mut self) -> io::Result<Option<usize>> {
        let Self { stream, decoder, fds, .. } = self;
        stream.async_io(Interest::READABLE, || receive(stream.as_fd(), decoder.space(), fds)).await
    }

    fn take_fds(&mut self, message: &Message) -> Result<Vec<OwnedFd>, Error> {
        let fds = std::mem::take(&mut self.fds);
        let (count, want) = message.request.fds();
        let wrong = fds.iter().find(|fd| kind_of(fd.as_fd()) != Some(want));
        let error = match wrong {
            _ if !count.contains(&fds.len()) => wrong_count(message, fds.len()),
            None => return Ok(fds),
            Some(fd) => wrong_kind(message, want, fd.as_fd()),
        };
        self.slow_to_close.extend(fds);
        Err(error)
    }
}

fn wrong_count(message: &Message, got: usize) -> Error {
    let code = message.code;
    match &message.request {
        Request::SetMemTable(regions) if got < regions.len() => Error::MemoryNotShared(code),
        Request::AddMemReg(_) if got == 0 => Error::MemoryNotShared(code),
        _ => Error::WrongFdCount { code, got },
    }
}

fn wrong_kind(message: &Message, want: FdKind, fd: BorrowedFd<'_>) -> Error {
    let (code, got) = (message.code, name_of(fd));
    match want {
        FdKind::Memory => Error::NotMemory { code, got },
        FdKind::Event | FdKind::Socket => Error::WrongFdKind { code, want, got },
    }
}

/// One `recvmsg`: bytes into `space`, file descriptors to `fds`. `None` if file descriptors were lost.
fn receive(socket: BorrowedFd<'_>, space: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<Option<usize>> {
    let mut control = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut control);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(space)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    let lost = got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > FDS_MAX;
    Ok((!lost).then_some(got.bytes))
}

/// One `sendmsg`: returns the number of bytes that the socket accepted.
fn send(socket: BorrowedFd<'_>, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if let Some(fd) = &fd {
        let pushed = control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
        assert!(pushed, "the buffer has room for one descriptor");
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?)
}

/// The kind of a file descriptor, determined without a request to a file system or peer.
pub(crate) fn kind_of(fd: BorrowedFd<'_>) -> Option<FdKind> {
    // Only files of tmpfs (which includes memfds) and hugetlbfs have seals, if only the seal against sealing.
    if rustix::fs::fcntl_get_seals(fd).is_ok() {
        return Some(FdKind::Memory);
    }
    if name_of(fd) == "anon_inode:[eventfd]" {
        return Some(FdKind::Event);
    }
    let domain = rustix::net::sockopt::socket_domain(fd);
    let stream = rustix::net::sockopt::socket_type(fd);
    (domain == Ok(AddressFamily::UNIX) && stream == Ok(SocketType::STREAM)).then_some(FdKind::Socket)
}

/// The kernel's name of an open file, such as `/dev/null`, `/memfd:ram (deleted)` or `anon_inode:[eventfd]`.
fn name_of(fd: BorrowedFd<'_>) -> String {
    match rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()) {
        Ok(name) => name.to_string_lossy().into_owned(),
        Err(e) => format!("a file without a name ({e})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[test]
    fn a_message_waits_while_many_memory_files_are_being_closed() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        runtime.block_on(async {
            let (ours, mut theirs) = UnixStream::pair().expect("socketpair");
            let mut connection = Connection::new(ours);
            let mut closing = vec![Arc::clone(&connection.closing); CLOSING_MAX];
            // GET_FEATURES: request, version, no payload.
            let message = [1_u32, 1, 0].map(u32::to_le_bytes).concat();
            theirs.write_all(&message).await.expect("sent");
            let patience = Duration::from_millis(50);
            assert!(timeout(patience, connection.next()).await.is_err(), "{} files", closing.len());
            closing.pop();
            let next = connection.next().await.expect("a message");
            assert!(matches!(next, Some((Message { request: Request::GetFeatures, .. }, _))), "{next:?}");
        });
    }
}
