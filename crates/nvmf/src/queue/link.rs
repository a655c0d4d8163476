//! What carries an I/O queue: a connection of TCP or RDMA, by one interface for all that is above it. Reactor context.

use super::IoQueue;
use super::commands::Slot;
use super::rdma::Rdma;
use super::tcp::{Tcp, TcpCarrier};
use crate::address::Transport;
use crate::pool::Pool;
use crate::rdma::Wire;
use aryk_dma::Buffer;
use aryk_nvme::spec::status::Status;
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::sgl::DataBlocks;
use aryk_reactor::{Armed, Cx, Nanos, RootId};
use rustix::net::Shutdown;
use std::io;
use std::rc::Rc;

/// Slots that a queue of TCP begins with.
const SLOTS_MIN: usize = 8;

/// A connection that becomes an I/O queue's.
#[expect(clippy::large_enum_variant, reason = "it is moved once, from control or between reactors")]
pub(crate) enum Carrier {
    /// Of TCP.
    Tcp(TcpCarrier),
    /// Of RDMA, with the buffers for data of its commands.
    Rdma { wire: Wire, buffers: Vec<Buffer> },
}

/// The connection.
#[expect(
    clippy::large_enum_variant,
    reason = "a queue has one, and no indirection on the path of its commands"
)]
pub(super) enum Link {
    Tcp(Tcp),
    Rdma(Rdma),
}

impl Link {
    /// The connection, and the pool of the queue.
    pub fn new(carrier: Carrier, root: RootId, cx: &mut Cx) -> io::Result<(Self, Rc<Pool>)> {
        Ok(match carrier {
            Carrier::Tcp(carrier) => (Self::Tcp(Tcp::new(carrier, root, cx)?), cx.local_state()),
            Carrier::Rdma { wire, buffers } => {
                let pool = Pool::of(buffers, cx.local_state());
                (Self::Rdma(Rdma::new(wire, root, cx)?), Rc::new(pool))
            }
        })
    }

    /// The slots that a queue with so many entries begins with.
    pub fn slots(&self, entries: u16) -> usize {
        match self {
            Self::Tcp(_) => usize::from(entries).min(SLOTS_MIN),
            Self::Rdma(rdma) => rdma.wire.slots(),
        }
    }

    pub const fn data_blocks(&self) -> DataBlocks {
        match self {
            Self::Tcp(_) => Transport::Tcp.data_blocks(),
            Self::Rdma(_) => Transport::Rdma.data_blocks(),
        }
    }

    /// Gives the queue its number of entries. The completion of Connect follows.
    pub fn connect(&mut self, entries: u16, disables_flow_control: bool) {
        match self {
            Self::Tcp(tcp) => tcp.queue.connect(entries, disables_flow_control),
            Self::Rdma(rdma) => rdma.wire.connect(entries, disables_flow_control),
        }
    }

    /// Completes a command.
    pub fn complete(&mut self, id: SlotId, status: Status, result: u64) {
        match self {
            Self::Tcp(tcp) => tcp.queue.complete(id, status, result),
            Self::Rdma(rdma) => rdma.wire.complete(id, status, result),
        }
    }

    /// Completes a command with success, after the first `len` bytes of its buffer. Returns the bytes whose digest was computed.
    pub fn complete_with_data(&mut self, id: SlotId, slot: &mut Slot, len: u32, result: u64) -> usize {
        match self {
            Self::Tcp(tcp) => {
                let data = slot.data.as_ref().expect("it has data");
                tcp.queue.complete_with_data(id, &data.buffer.bytes()[..len as usize], result);
                if tcp.queue.has_data_digests() { len as usize } else { 0 }
            }
            Self::Rdma(rdma) => {
                let data = slot.data.take().expect("it has data");
                rdma.wire.complete_with_data(id, data, len, result);
                0
            }
        }
    }

    /// Has the first `len` bytes of a command's data come to its buffer.
    pub fn request_data(&mut self, id: SlotId, slot: &mut Slot, len: u32) {
        match self {
            Self::Tcp(tcp) => tcp.queue.request_data(id, 0, len),
            Self::Rdma(rdma) => {
                let data = slot.data.take().expect("it has a buffer");
                rdma.wire.request_data(id, data, len);
            }
        }
    }

    /// Whether there is output that the host has not got.
    pub fn has_output(&self) -> bool {
        match self {
            Self::Tcp(tcp) => tcp.has_output(),
            Self::Rdma(rdma) => rdma.wire.unsent() > 0,
        }
    }

    /// Since when the host has taken no output, if there is some that it must take.
    pub fn waiting_since(&self) -> Option<Nanos> {
        match self {
            Self::Tcp(tcp) => tcp.waiting_since(),
            Self::Rdma(rdma) => rdma.waiting_since,
        }
    }

    /// Whether neither the kernel nor the device has something of the connection to do.
    pub const fn is_at_rest(&self) -> bool {
        match self {
            Self::Tcp(tcp) => tcp.is_at_rest(),
            Self::Rdma(_) => true,
        }
    }

    /// Has the connection come to rest: what has arrived until then wakes the queue.
    pub fn stop(&mut self, cx: &mut Cx) {
        match self {
            Self::Tcp(tcp) => tcp.stop(cx),
            Self::Rdma(_) => {}
        }
    }

    /// Has the connection come to rest after its end.
    pub fn end(&mut self, cx: &mut Cx) {
        match self {
            Self::Tcp(tcp) => tcp.end(cx),
            Self::Rdma(_) => {}
        }
    }

    /// Ends the output, of which there is none left: the host can still send. Returns whether the transport has that.
    pub fn end_output(&self) -> bool {
        match self {
            Self::Tcp(tcp) => tcp.shut_down(Shutdown::Write),
            Self::Rdma(_) => return false,
        }
        true
    }

    /// Ends the connection.
    pub fn shut_down(&self) {
        match self {
            Self::Tcp(tcp) => tcp.shut_down(Shutdown::Both),
            Self::Rdma(rdma) => rdma.wire.disconnect(),
        }
    }

    pub fn unwatch(&mut self, cx: &mut Cx) {
        match self {
            Self::Tcp(tcp) => tcp.unwatch(cx),
            Self::Rdma(rdma) => rdma.unwatch(cx),
        }
    }
}

impl IoQueue {
    /// Has what comes next wake the queue.
    pub(super) fn park_link(&mut self, cx: &mut Cx) -> Armed {
        match self.link {
            // The watch of a socket is always on.
            Link::Tcp(_) => Armed::Yes,
            Link::Rdma(_) => self.park_rdma(cx),
        }
    }
}
