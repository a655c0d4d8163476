//! A connected I/O queue, and the buffers of its socket. Reactor context; the thread makes it.

use super::{DriverId, FRUITLESS};
use crate::fabrics::connection::Parts;
use aryk_nvme_fabrics::tcp::HostQueue;
use aryk_reactor::{Cx, Nanos, WatchId};
use aryk_slots::Key;
use aryk_tls::Session;
use rustix::event::epoll;
use rustix::net::sockopt;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Duration;

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

/// A command in flight: its request, and which of the request's commands it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Running {
    pub(super) key: Key,
    pub(super) is_second: bool,
}

/// A connected queue.
#[derive(Debug)]
pub(crate) struct Live {
    socket: TcpStream,
    pub(super) tls: Option<Session>,
    pub(super) queue: HostQueue,
    /// The path, and the life of its controller to which the queue belongs.
    pub(super) path: usize,
    pub(super) life: u64,
    pub(super) qid: u16,
    pub(super) retry_delays: [u16; 3],
    pub(super) has_write_cache: bool,
    watch: Option<WatchId>,
    /// Tells when a full socket has room again.
    room: Option<WatchId>,
    /// Output that the socket has not taken.
    unsent: VecDeque<u8>,
    pub(super) commands: Box<[Option<Running>]>,
    /// Command identifiers that are free.
    pub(super) free: Vec<u16>,
    /// When the socket is read and written next, if it had nothing or no room.
    pub(super) read_at: Nanos,
    write_at: Nanos,
    /// Input wakes the driver.
    pub(super) is_armed: bool,
}

impl Live {
    /// A connection whose queue takes `depth` commands at a time.
    pub(crate) fn new(
        (socket, tls, queue): Parts,
        depth: u16,
        (path, life, qid): (usize, u64, u16),
        retry_delays: [u16; 3],
        has_write_cache: bool,
    ) -> Self {
        Self {
            socket,
            tls,
            queue,
            path,
            life,
            qid,
            retry_delays,
            has_write_cache,
            watch: None,
            room: None,
            unsent: VecDeque::new(),
            commands: vec![None; usize::from(depth)].into(),
            free: (0..depth).rev().collect(),
            read_at: Nanos(0),
            write_at: Nanos(0),
            is_armed: false,
        }
    }

    /// The path to which the queue belongs.
    pub(crate) const fn path(&self) -> usize {
        self.path
    }

    pub(super) fn in_flight(&self) -> u32 {
        (self.commands.len() - self.free.len()) as u32
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
    pub(super) fn read(&mut self, buffer: &mut [u8], now: Nanos) -> io::Result<Option<usize>> {
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
    pub(super) fn may_write(&self, now: Nanos) -> bool {
        now >= self.write_at
    }

    /// Writes output that the socket has not taken before. Returns whether there is none left; without room for it, the next
    /// attempt comes later.
    pub(super) fn write_unsent(&mut self, now: Nanos) -> io::Result<bool> {
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
    pub(super) fn write(&mut self, output: &[u8]) -> io::Result<()> {
        let len = write(&mut self.socket, output)?.unwrap_or(0);
        self.unsent.extend(&output[len..]);
        Ok(())
    }

    /// Takes the news that a full socket has room again.
    pub(super) fn take_room(&mut self, cx: &mut Cx) {
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

/// Writes once; `None` if the socket has no room.
fn write(socket: &mut TcpStream, bytes: &[u8]) -> io::Result<Option<usize>> {
    match socket.write(bytes) {
        Ok(len) => Ok(Some(len)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(error),
    }
}
