//! A connection of TCP, and the buffers of its socket. Reactor context.

use super::link::Link;
use super::live::Live;
use super::{DriverId, FRUITLESS, Loss, QueueDriver, read_data};
use aryk_nvme_fabrics::tcp::{HostQueue, HostReceived};
use aryk_reactor::{Cx, Nanos, WatchId};
use aryk_tls::Session;
use rustix::event::epoll;
use rustix::net::sockopt;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

/// System calls that write in one turn.
const WRITES_MAX: u32 = 4;
/// Bytes that one turn reads, and that one system call writes.
pub(super) const BUFFER: usize = 256 << 10;

/// The buffers of sockets: all queues of a reactor share them.
pub(super) struct Buffers {
    pub(super) input: RefCell<Vec<u8>>,
    pub(super) output: RefCell<Vec<u8>>,
}

impl Default for Buffers {
    fn default() -> Self {
        let buffer = || RefCell::new(vec![0; BUFFER]);
        Self { input: buffer(), output: buffer() }
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Tcp {
    socket: TcpStream,
    pub(super) tls: Option<Session>,
    pub(super) queue: HostQueue,
    watch: Option<WatchId>,
    /// Tells when a full socket has room again.
    room: Option<WatchId>,
    /// Output that the socket has not taken.
    unsent: VecDeque<u8>,
    /// When the socket is read and written next, if it had nothing or no room.
    read_at: Nanos,
    write_at: Nanos,
    /// Input wakes the driver.
    is_armed: bool,
}

impl Tcp {
    pub(super) fn new(socket: TcpStream, tls: Option<Session>, queue: HostQueue) -> Self {
        Self {
            socket,
            tls,
            queue,
            watch: None,
            room: None,
            unsent: VecDeque::new(),
            read_at: Nanos(0),
            write_at: Nanos(0),
            is_armed: false,
        }
    }

    /// Has a driver woken by the input of the socket.
    pub(super) fn watch(&mut self, id: DriverId, cx: &mut Cx) -> io::Result<()> {
        self.watch = Some(cx.watch_driver(self.socket.as_fd().try_clone_to_owned()?, id)?);
        (self.read_at, self.write_at) = (Nanos(0), Nanos(0));
        Ok(())
    }

    /// Ends the connection. What the kernel has not sent is dropped, so that it cannot arrive later.
    pub(super) fn close(self, cx: &mut Cx) {
        [self.watch, self.room].into_iter().flatten().for_each(|watch| drop(cx.unwatch(watch)));
        // It fails for a socket that is closed already.
        let _ = sockopt::set_socket_linger(&self.socket, Some(Duration::ZERO));
    }

    /// Reads the socket once. `None`: there is nothing to read; `Some(0)`: the target has closed the connection.
    fn read(&mut self, buffer: &mut [u8], now: Nanos) -> io::Result<Option<usize>> {
        match self.socket.read(buffer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.read_at = now.after(FRUITLESS);
                Ok(None)
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(None),
            read => read.map(Some),
        }
    }

    /// Whether output may be written: the socket had room, or some time has passed since it had none.
    fn may_write(&self, now: Nanos) -> bool {
        now >= self.write_at
    }

    /// Writes output that the socket has not taken before. Returns whether there is none left; without room for it, the next
    /// attempt comes later.
    fn write_unsent(&mut self, now: Nanos) -> io::Result<bool> {
        if self.unsent.is_empty() {
            return Ok(true);
        }
        let (bytes, _) = self.unsent.as_slices();
        match write(&mut self.socket, bytes)? {
            Some(len) => drop(self.unsent.drain(..len)),
            None => self.write_at = now.after(FRUITLESS),
        }
        Ok(self.unsent.is_empty())
    }

    /// Writes output, and keeps what the socket does not take.
    fn write(&mut self, output: &[u8]) -> io::Result<()> {
        let len = write(&mut self.socket, output)?.unwrap_or(0);
        self.unsent.extend(&output[len..]);
        Ok(())
    }

    /// Whether the socket is to be read: there is input, or some time has passed since there was none.
    pub(super) fn is_due(&mut self, cx: &mut Cx) -> bool {
        let is_woken = std::mem::take(&mut self.is_armed);
        self.take_room(cx);
        is_woken || cx.now() >= self.read_at
    }

    /// Takes the news that a full socket has room again.
    fn take_room(&mut self, cx: &mut Cx) {
        if let Some(room) = self.room.take() {
            cx.unwatch(room);
            self.write_at = Nanos(0);
        }
    }

    /// Has the driver woken when the socket has room, if it had none.
    pub(super) fn await_room(&mut self, id: DriverId, cx: &mut Cx) -> io::Result<()> {
        if self.unsent.is_empty() || self.room.is_some() {
            return Ok(());
        }
        let room = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let event = epoll::EventFlags::OUT | epoll::EventFlags::ONESHOT;
        epoll::add(&room, &self.socket, epoll::EventData::new_u64(0), event)?;
        self.room = Some(cx.watch_driver(room, id)?);
        Ok(())
    }

    /// Whether what comes from here on wakes the driver; otherwise there is something to read or to write.
    pub(super) fn arm(&mut self) -> bool {
        if self.unsent.is_empty() && self.queue.has_output() {
            return false;
        }
        match self.socket.peek(&mut [0]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.is_armed = true,
            _ => (self.is_armed, self.read_at) = (false, Nanos(0)),
        }
        self.is_armed
    }
}

impl QueueDriver {
    /// Writes what the queue of a path has to send, as far as the socket takes it.
    pub(super) fn send_tcp(&mut self, path: usize, cx: &mut Cx) -> Result<(), Loss> {
        let Some(Live { link: Link::Tcp(tcp), commands, .. }) = self.lives[path].as_deref_mut() else {
            return Ok(());
        };
        for _ in 0..WRITES_MAX {
            if !tcp.may_write(cx.now()) {
                return Ok(());
            }
            if !tcp.write_unsent(cx.now())? {
                continue;
            }
            if !tcp.queue.has_output() {
                return Ok(());
            }
            let (requests, commands) = (&self.requests, &*commands);
            let mut output = self.buffers.output.borrow_mut();
            let filled = tcp.queue.encode(&mut output, |cid, offset, to| {
                let running = commands[usize::from(cid)].expect("the queue has the command");
                let request = requests.get(running.key).expect("it is at the controller");
                read_data(&request.io, running.is_second, offset, to);
            });
            match (&mut tcp.tls, &self.sealing) {
                (Some(session), Some(sealing)) => {
                    let records = sealing.seal(session, &output[..filled])?;
                    tcp.write(&records)?;
                }
                _ => tcp.write(&output[..filled])?,
            }
        }
        Ok(())
    }

    /// Reads the socket of a path once. Returns the number of commands that ended, at least 1 if there was input.
    pub(super) fn receive_tcp(&mut self, path: usize, cx: &mut Cx) -> Result<u32, Loss> {
        let Some(Live { link: Link::Tcp(tcp), .. }) = self.lives[path].as_deref_mut() else { return Ok(0) };
        let buffers = Rc::clone(&self.buffers);
        let mut buffer = buffers.input.borrow_mut();
        let len = match tcp.read(&mut buffer, cx.now())? {
            None => return Ok(0),
            Some(0) => return Err(Loss::Closed),
            Some(len) => len,
        };
        match tcp.tls {
            Some(_) => self.open(path, &buffer[..len], cx),
            None => self.take_input(path, &buffer[..len], cx),
        }
        .map(|count| count.max(1))
    }

    /// Takes plain input of a path. Returns the number of commands that ended.
    pub(super) fn take_input(&mut self, path: usize, mut input: &[u8], cx: &mut Cx) -> Result<u32, Loss> {
        let (mut count, mut received_at) = (0, None);
        loop {
            let Some(Live { link: Link::Tcp(tcp), commands, free, .. }) = self.lives[path].as_deref_mut()
            else {
                return Ok(count);
            };
            match tcp.queue.receive(&mut input).map_err(Loss::Violation)? {
                None => return Ok(count),
                Some(HostReceived::Data { cid, offset, bytes }) => {
                    let running = commands[usize::from(cid)].expect("the queue has the command");
                    let request = self.requests.get(running.key).expect("it is at the controller");
                    request.io.data.write(offset, bytes);
                }
                Some(HostReceived::Completed { cid, status, is_intact, .. }) => {
                    count += 1;
                    let running = commands[usize::from(cid)].take().expect("the queue had the command");
                    free.push(cid);
                    let now = *received_at.get_or_insert_with(|| cx.refresh_now());
                    self.complete(running, status, is_intact, now, cx)?;
                }
                Some(HostReceived::Terminated(fatal)) => return Err(Loss::Terminated(fatal)),
                Some(HostReceived::Established) => unreachable!("the queue was established in control"),
            }
        }
    }
}

/// Writes once; `None` if the socket has no room.
fn write(socket: &mut TcpStream, bytes: &[u8]) -> io::Result<Option<usize>> {
    match socket.write(bytes) {
        Ok(len) => Ok(Some(len)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}
