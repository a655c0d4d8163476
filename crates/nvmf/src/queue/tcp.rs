//! A queue whose connection is one of TCP. Reactor context.
//!
//! The socket is read and written by the reactor's ring (`tcp/ring.rs`), or, where the ring cannot and with TLS, by system calls
//! (`tcp/polled.rs`).

mod polled;
mod ring;

use super::IoQueue;
use super::commands::Slot;
use super::link::Link;
use super::sealed::Sealed;
use aryk_log_limit::limited;
use aryk_nvme::spec::entry::Fuse;
use aryk_nvme_fabrics::tcp::{Fatal, Queue, Received};
use aryk_reactor::{Cx, Nanos, RootId};
use aryk_tls::Session;
pub(super) use polled::Polled;
pub(super) use ring::Ring;
#[cfg(test)]
pub(super) use ring::TAKEN_MAX;
use rustix::net::Shutdown;
use std::cell::RefCell;
use std::io;
use std::net::TcpStream;
use std::os::fd::AsFd;

/// Bytes that one poll writes.
pub(super) const WRITE_MAX: usize = 512 << 10;

/// Bytes that one poll reads.
const READ_MAX: usize = 256 << 10;

/// Where sockets are read to by system calls: all queues of a reactor have one buffer.
struct Input(RefCell<Vec<u8>>);

impl Default for Input {
    fn default() -> Self {
        Self(RefCell::new(vec![0; READ_MAX]))
    }
}

/// How the queue reads and writes its socket.
pub(super) enum Means {
    Polled(Polled),
    Ring(Ring),
}

/// The connection.
pub(super) struct Tcp {
    pub means: Means,
    pub queue: Queue,
    /// What was received behind Connect.
    rest: Vec<u8>,
    /// When the socket has last taken output.
    pub sent_at: Nanos,
    zero_copy: bool,
}

/// What carries a connection of TCP from one owner to the next.
pub(crate) struct TcpCarrier {
    pub socket: TcpStream,
    /// The connection uses TLS.
    pub tls: Option<Session>,
    pub queue: Queue,
    /// What was received behind Connect.
    pub rest: Vec<u8>,
    /// The kernel sends large output without a copy, if it has no TLS.
    pub zero_copy: bool,
}

impl Tcp {
    pub fn new(carrier: TcpCarrier, root: RootId, cx: &mut Cx) -> io::Result<Self> {
        let TcpCarrier { socket, tls, queue, rest, zero_copy } = carrier;
        let means = match tls {
            None if cx.has_ring_sockets() => Means::Ring(Ring::new(socket, root, cx)?),
            tls => Means::Polled(Polled::new(socket, tls, root, cx)?),
        };
        Ok(Self { means, queue, rest, sent_at: cx.now(), zero_copy })
    }

    pub fn has_output(&self) -> bool {
        let has_unsent = match &self.means {
            Means::Polled(polled) => polled.has_unsent(),
            Means::Ring(_) => false,
        };
        has_unsent || !self.queue.is_output_empty()
    }

    /// Since when the host has taken no output, if there is some that it must take.
    pub fn waiting_since(&self) -> Option<Nanos> {
        let is_waiting = match &self.means {
            Means::Polled(polled) => polled.is_blocked,
            Means::Ring(ring) => ring.is_sending(),
        };
        is_waiting.then_some(self.sent_at)
    }

    /// Whether the kernel has nothing of the connection to do.
    pub const fn is_at_rest(&self) -> bool {
        match &self.means {
            Means::Polled(_) => true,
            Means::Ring(ring) => ring.is_at_rest(),
        }
    }

    /// Has the kernel come to rest, if there is nothing to send.
    pub fn stop(&mut self, cx: &mut Cx) {
        if let Means::Ring(ring) = &mut self.means {
            ring.stop(cx);
        }
    }

    /// Has the kernel come to rest after the end of the connection.
    pub fn end(&mut self, cx: &mut Cx) {
        if let Means::Ring(ring) = &mut self.means {
            ring.end(cx);
        }
    }

    /// The connection for another reactor. Nothing is unsent, the kernel is at rest, and the socket is not watched.
    pub fn into_carrier(self) -> TcpCarrier {
        let Self { means, queue, rest, zero_copy, .. } = self;
        let (socket, tls) = match means {
            Means::Polled(Polled { socket, sealed, .. }) => (socket, sealed.map(Sealed::into_session)),
            Means::Ring(ring) => (ring.into_socket(), None),
        };
        TcpCarrier { socket, tls, queue, rest, zero_copy }
    }

    /// Ends the connection, or the output alone: the host sees that at once.
    pub fn shut_down(&self, how: Shutdown) {
        let fd = match &self.means {
            Means::Polled(polled) => polled.socket.as_fd(),
            Means::Ring(ring) => ring.as_fd(),
        };
        let _ = rustix::net::shutdown(fd, how);
    }

    pub fn unwatch(&mut self, cx: &mut Cx) {
        if let Means::Polled(polled) = &mut self.means {
            polled.unwatch(cx);
        }
    }
}

impl IoQueue {
    /// Takes what the socket has received.
    pub(super) fn receive_tcp(&mut self, cx: &mut Cx) -> bool {
        let may_take = self.has_begun && self.takes_input();
        let Link::Tcp(tcp) = &mut self.link else { return false };
        let rest = if may_take { std::mem::take(&mut tcp.rest) } else { Vec::new() };
        let is_ring = matches!(tcp.means, Means::Ring(_));
        if !rest.is_empty() {
            self.take(&rest, cx);
            cx.wake(self.root);
            return true;
        }
        match is_ring {
            true => self.receive_from_ring(cx),
            false => self.has_begun && !self.is_closing && self.receive_polled(cx),
        }
    }

    /// Sends the output, as far as the socket takes it now.
    pub(super) fn send_tcp(&mut self, cx: &mut Cx) -> bool {
        let Link::Tcp(tcp) = &mut self.link else { return false };
        match tcp.means {
            Means::Polled(_) => self.send_polled(cx),
            Means::Ring(_) => self.send_by_ring(cx),
        }
    }

    pub(super) fn take(&mut self, mut input: &[u8], cx: &mut Cx) {
        while self.takes_input()
            && let Link::Tcp(tcp) = &mut self.link
        {
            match tcp.queue.receive(&mut input) {
                Ok(None) => return,
                Ok(Some(Received::Command { slot, entry, data_len })) => {
                    // The second half of a fused operation is added to the data of the first.
                    let halves = if entry.fuse() == Some(Fuse::First) { 2 } else { 1 };
                    let room = halves * data_len as usize;
                    let data = (room > 0).then(|| self.pool.take_for_capsule(room));
                    let place = usize::from(slot.0);
                    if place >= self.slots.len() {
                        self.add_slots(place);
                    }
                    self.slots[place] = Slot::new(entry, data_len, data);
                }
                Ok(Some(Received::Data { slot, offset, bytes })) => {
                    let data = self.slots[usize::from(slot.0)].data.as_mut().expect("data was expected");
                    data.buffer.write(offset as usize, bytes);
                }
                Ok(Some(Received::Ready { slot, is_intact })) => self.execute(slot, is_intact, cx),
                Ok(Some(Received::Terminated(fatal))) => {
                    limited!(self.lines, warn, ?fatal, "a host has ended its connection");
                    self.close(cx);
                }
                Err(fatal) => self.terminate(fatal, cx),
            }
        }
    }

    /// Adds slots, so that there is one at `place`. The host has more commands at a time than ever before.
    #[cold]
    fn add_slots(&mut self, place: usize) {
        let count = (place + 1).next_power_of_two().min(self.entries.into());
        self.slots.resize_with(count, Slot::free);
    }

    /// Ends the connection with a reason, which is sent behind all that there is to send.
    fn terminate(&mut self, fatal: Fatal, cx: &mut Cx) {
        limited!(self.lines, warn, ?fatal, "a host has violated the protocol: its connection ends");
        if let Link::Tcp(tcp) = &mut self.link {
            tcp.queue.terminate(fatal);
        }
        self.close_behind_output(cx);
    }
}
