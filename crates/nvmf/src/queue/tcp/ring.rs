//! A socket of TCP that the reactor's ring reads and writes. Reactor context.
//!
//! What arrives is taken in the poll that learns of it, which gives the ring's buffers back: a queue holds none of them. A queue
//! has one send in the kernel, of all output that there was; what is added meanwhile is sent together when that send has
//! completed. Headers are copied to a buffer of the pool, data is sent from where the disk has put it.
//!
//! All queues of a reactor share the ring's buffers, and a host that sends much may have all of them for a moment. A queue that
//! finds none reads its socket by a system call, as a polled one does, so it goes on whatever others send. A poll takes a limited
//! amount; a queue that has more waiting has the kernel receive nothing more until it has taken that.
//!
//! A host that does not read its replies is still read from: its commands and their data in capsules are bounded by the entries
//! of the queue, since a slot is not free before its completion is sent.
//!
//! **Invariant.** The buffers of a send are lent from its start until the kernel reports that it is over. A queue ends, or leaves
//! its reactor, when the kernel has neither a receive nor a send of its socket.

use super::{Input, Means, Tcp, WRITE_MAX};
use crate::pool::{Pool, SMALL, Taken};
use crate::queue::commands::Slot;
use crate::queue::link::Link;
use crate::queue::{IoQueue, give_back};
use aryk_dma::Sgl;
use aryk_nvme_fabrics::SlotId;
use aryk_nvme_fabrics::tcp::{Piece, Queue};
use aryk_reactor::{Cx, RootId, Socket, SocketEvent};
use std::cell::RefCell;
use std::io::{self, ErrorKind};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;

/// Bytes that one poll takes from the ring's buffers, and those of one more.
pub(in crate::queue) const TAKEN_MAX: usize = 512 << 10;
/// Pieces that one send has.
const PIECES_MAX: usize = 256;
/// Bytes from which on a send without a copy is worth its second completion.
const ZERO_COPY_MIN: usize = 16 << 10;

/// The lists of a send, until the kernel has copied them: all queues of a reactor have one.
#[derive(Default)]
struct Lists(RefCell<Vec<Sgl>>);

/// The socket.
pub(in crate::queue) struct Ring {
    socket: Socket,
    /// The headers of the send.
    headers: Option<Taken>,
    /// The slots whose buffers the send has.
    lent: Vec<SlotId>,
    /// Buffers of a send without a copy whose slots are free.
    held: Vec<Taken>,
    /// Bytes of the send.
    len: usize,
    /// There was no buffer for what has arrived.
    is_starved: bool,
    lists: Rc<Lists>,
}

impl Ring {
    pub fn new(socket: TcpStream, root: RootId, cx: &mut Cx) -> io::Result<Self> {
        // Operations on a socket that does not block would fail where others wait.
        socket.set_nonblocking(false)?;
        let socket = Socket::open(socket.into(), root, cx).expect("the caller has asked for the ring");
        let lists = cx.local_state();
        Ok(Self {
            socket,
            headers: None,
            lent: Vec::new(),
            held: Vec::new(),
            len: 0,
            is_starved: false,
            lists,
        })
    }

    pub const fn is_sending(&self) -> bool {
        self.socket.is_sending()
    }

    pub const fn is_at_rest(&self) -> bool {
        self.socket.is_at_rest()
    }

    pub fn stop(&mut self, cx: &mut Cx) {
        self.socket.stop_receiving(cx);
    }

    /// Has the kernel come to rest after the end of the connection.
    pub fn end(&mut self, cx: &mut Cx) {
        self.stop(cx);
        if self.socket.awaits_release() {
            // A host that has vanished never acknowledges what the kernel has not copied: the kernel drops it.
            let _ = rustix::net::connect_unspec(&self.socket);
        }
    }

    pub fn into_socket(self) -> TcpStream {
        self.socket.into_fd().into()
    }

    /// Bytes that the kernel has to send.
    #[cfg(test)]
    pub const fn sending_len(&self) -> usize {
        if self.is_sending() { self.len } else { 0 }
    }

    /// Lends the output, as far as one send takes it.
    fn lend(&mut self, queue: &Queue, slots: &mut [Slot], pool: &Pool, lists: &mut Vec<Sgl>) {
        let mut headers = pool.take_for_capsule(SMALL);
        let room = headers.buffer.lend();
        self.headers = Some(headers);
        let mut filled = 0;
        for piece in queue.output() {
            let left = (WRITE_MAX - self.len) as u32;
            let list = match piece {
                Piece::Bytes(bytes) => {
                    let len = bytes.len().min(left as usize).min((room.len() - filled) as usize);
                    room.write(filled, &bytes[..len]);
                    let list = room.slice(filled, len as u32);
                    filled += len as u32;
                    list
                }
                Piece::Data { slot, offset, len } => {
                    let data = slots[usize::from(slot.0)].data.as_mut().expect("kept until it is sent");
                    self.lent.push(slot);
                    data.buffer.lend().slice(offset, len.min(left))
                }
            };
            self.len += list.len() as usize;
            lists.push(list);
            if self.len == WRITE_MAX || filled == room.len() || lists.len() == PIECES_MAX {
                break;
            }
        }
    }

    /// Takes the buffers of a send back, which is over. Those in `held` and the headers go to the pool.
    fn reclaim(&mut self, slots: &mut [Slot], mut give_back: impl FnMut(Taken)) {
        for slot in self.lent.drain(..) {
            let data = slots[usize::from(slot.0)].data.as_mut().expect("kept until it is sent");
            data.buffer.reclaim();
        }
        for mut data in self.headers.take().into_iter().chain(self.held.drain(..)) {
            data.buffer.reclaim();
            give_back(data);
        }
        self.len = 0;
    }
}

impl AsFd for Ring {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl IoQueue {
    const fn ring(&mut self) -> Option<&mut Ring> {
        match &mut self.link {
            Link::Tcp(Tcp { means: Means::Ring(ring), .. }) => Some(ring),
            _ => None,
        }
    }

    /// Takes what the kernel has completed, and has it receive.
    pub(super) fn receive_from_ring(&mut self, cx: &mut Cx) -> bool {
        let (mut has_any, mut taken) = (false, 0);
        while let Some(ring) = self.ring() {
            if taken >= TAKEN_MAX {
                ring.socket.stop_receiving(cx);
                cx.wake(self.root);
                return true;
            }
            let Some(event) = ring.socket.next_event(cx) else { break };
            has_any = true;
            match event {
                SocketEvent::Received(bytes) => {
                    taken += bytes.len();
                    self.take(&bytes, cx);
                }
                SocketEvent::Starved => ring.is_starved = true,
                SocketEvent::Sent { result, is_released } => self.sent(result, is_released, cx),
                SocketEvent::Released => self.released(cx),
                SocketEvent::Ended => self.close(cx),
                SocketEvent::Failed(error) => self.lost(&error, cx),
            }
        }
        if self.may_receive() && self.ring().is_some_and(|ring| std::mem::take(&mut ring.is_starved)) {
            self.receive_starved(cx);
        }
        if self.may_receive()
            && let Some(ring) = self.ring()
        {
            ring.socket.receive(cx);
        }
        has_any
    }

    fn may_receive(&mut self) -> bool {
        self.has_begun && !self.is_closing && !self.is_ready_to_leave()
    }

    /// Reads what has arrived while there was no buffer. The kernel has no receive.
    #[cold]
    fn receive_starved(&mut self, cx: &mut Cx) {
        let input = cx.local_state::<Input>();
        let mut bytes = input.0.borrow_mut();
        let Some(ring) = self.ring() else { return };
        match ring.socket.read(&mut bytes) {
            Ok(0) => self.close(cx),
            Ok(len) => self.take(&bytes[..len], cx),
            // The receive found no buffer when it began, before anything had arrived.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => self.lost(&error, cx),
        }
    }

    /// Has the kernel send the output at the end of the turn, unless it has some.
    pub(super) fn send_by_ring(&mut self, cx: &mut Cx) -> bool {
        let Self { link: Link::Tcp(tcp), slots, pool, is_closing, .. } = self else { return false };
        let Tcp { queue, sent_at, means: Means::Ring(ring), zero_copy, .. } = tcp else { return false };
        if *is_closing || ring.is_sending() || queue.is_output_empty() {
            return false;
        }
        let lists = Rc::clone(&ring.lists);
        let mut lists = lists.0.borrow_mut();
        lists.clear();
        ring.lend(queue, slots, pool, &mut lists);
        let is_zero_copy = *zero_copy && ring.len >= ZERO_COPY_MIN;
        if ring.socket.send(&lists, is_zero_copy, cx) {
            *sent_at = cx.now();
            self.await_host(cx.now(), cx);
        } else {
            self.released(cx);
        }
        true
    }

    /// The socket has taken the first bytes of a send.
    fn sent(&mut self, result: io::Result<u32>, is_released: bool, cx: &mut Cx) {
        if is_released {
            self.released(cx);
        }
        let len = match result {
            Ok(len) => len as usize,
            Err(error) => return self.lost(&error, cx),
        };
        let Self { link: Link::Tcp(tcp), slots, pool, share, waiting, root, .. } = self else { return };
        let Tcp { queue, sent_at, means: Means::Ring(ring), .. } = tcp else { return };
        if len > 0 {
            *sent_at = cx.now();
        }
        queue.sent(len, |id| {
            let Some(data) = slots[usize::from(id.0)].data.take() else { return };
            if data.buffer.is_lent() {
                ring.held.push(data);
            } else {
                give_back(pool, share, data, waiting, *root, cx);
            }
        });
        // Other commands may have these slots next.
        ring.lent.retain(|id| slots[usize::from(id.0)].data.is_some());
    }

    /// The kernel has no send.
    fn released(&mut self, cx: &mut Cx) {
        let Self { link: Link::Tcp(tcp), slots, pool, share, waiting, root, .. } = self else { return };
        let Means::Ring(ring) = &mut tcp.means else { return };
        ring.reclaim(slots, |data| give_back(pool, share, data, waiting, *root, cx));
    }

    fn lost(&mut self, error: &io::Error, cx: &mut Cx) {
        tracing::debug!(%error, "a queue of a host has lost its connection");
        self.close(cx);
    }
}
