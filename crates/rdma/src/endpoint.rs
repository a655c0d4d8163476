//! A connection's queue pair: requests and completions. Context: the owner's, usually a reactor.
//!
//! Requests are collected and posted together ([`Endpoint::flush`]): one call, and one doorbell, for the requests of a turn. The
//! owner has at most as many requests in progress as it has asked for; a request without a completion of its own
//! ([`Endpoint::write`]) ends with the next one that has one.

use crate::manager::{Manager, Parts};
use crate::verbs::{self, CompChannel, Cq, RecvWr, SendWr, Sge, Wc, WorkRequest, opcode, send_flags};
use crate::{CallError, ConnectError, SharedReceives};
use aryk_dma::{Buffer, Seg, Sgl};
use futures_channel::oneshot;
use std::os::fd::BorrowedFd;

/// Bytes that a request can carry itself.
pub const INLINE_MAX: usize = 64;
/// Completions that one poll takes.
const POLL_MAX: usize = 32;

/// Memory of the other computer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Its address there.
    pub address: u64,
    /// The key that the other computer has given for it.
    pub key: u32,
}

/// What has completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// [`Endpoint::receive`], or a receive that is shared: [`Endpoint::message`].
    Receive,
    /// [`Endpoint::send`].
    Send,
    /// [`Endpoint::read`].
    Read,
    /// [`Endpoint::write`], only if it has failed.
    Write,
    /// The end of a connection with shared receives, which always fails: there are no other requests whose failure would tell the
    /// owner.
    End,
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The request.
    pub kind: Kind,
    /// The number that the owner has given to the request.
    pub id: u32,
    /// Bytes that were received, for [`Kind::Receive`]; or why the request has failed (`ibv_wc_status`). Then the connection has,
    /// too.
    pub result: Result<u32, u32>,
}

impl Completion {
    pub(crate) fn new(wc: &Wc) -> Self {
        let kind = match wc.wr_id >> 32 {
            0 => Kind::Receive,
            1 => Kind::Send,
            2 => Kind::Read,
            3 => Kind::Write,
            _ => Kind::End,
        };
        let result = if wc.status == verbs::WC_SUCCESS { Ok(wc.byte_len) } else { Err(wc.status) };
        Self { kind, id: wc.wr_id as u32, result }
    }

    /// Whether the connection had failed, or was ended, before the request was executed.
    pub fn is_flushed(&self) -> bool {
        self.result == Err(verbs::WC_FLUSHED)
    }
}

pub(crate) const fn wr_id(kind: Kind, id: u32) -> u64 {
    let kind = match kind {
        Kind::Receive => 0,
        Kind::Send => 1,
        Kind::Read => 2,
        Kind::Write => 3,
        Kind::End => 4,
    };
    kind << 32 | id as u64
}

/// Requests that were not posted yet.
#[derive(Default)]
struct Batch {
    sends: Vec<SendWr>,
    send_pieces: Vec<Sge>,
    /// What requests carry themselves.
    inline: Vec<[u8; INLINE_MAX]>,
    receives: Vec<RecvWr>,
    receive_pieces: Vec<Sge>,
}

/// The queue pair of a connection. Its drop ends the connection, and gives the queue pair to the thread that destroys it.
/// [`Endpoint::end`] also takes the buffers that requests still have.
pub struct Endpoint {
    /// `Some` until it is dropped.
    parts: Option<Parts>,
    manager: Manager,
    batch: Batch,
    /// The device reports the next completion.
    is_armed: bool,
}

// SAFETY: libibverbs allows calls from any thread, and the requests' pointers are made and used in one call.
unsafe impl Send for Endpoint {}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("is_armed", &self.is_armed).finish_non_exhaustive()
    }
}

impl Endpoint {
    pub(crate) fn new(parts: Parts, manager: Manager) -> Self {
        Self { parts: Some(parts), manager, batch: Batch::default(), is_armed: false }
    }

    fn parts(&self) -> &Parts {
        self.parts.as_ref().expect("present until dropped")
    }

    /// Whether [`Endpoint::send`] can invalidate a key of the other computer.
    pub fn can_invalidate(&self) -> bool {
        self.parts().can_invalidate
    }

    /// Requests to read that run at the same time.
    pub fn reads_max(&self) -> u8 {
        self.parts().reads_max
    }

    /// Accepts the connection, with data for the other computer. The owner has posted its receives. Returns when the other
    /// computer knows that it is connected; both sides may send before.
    ///
    /// # Errors
    /// librdmacm's, or the connection is lost.
    pub async fn accept(&self, private_data: &[u8]) -> Result<(), CallError> {
        const CALL: &str = "rdma_accept";
        let (reply, accepted) = oneshot::channel();
        self.manager.accept(self.parts().id, private_data, reply);
        match accepted.await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(ConnectError::Call(error))) => Err(error),
            Ok(Err(ConnectError::Refused(_))) | Err(_) => Err(CallError::new(CALL, libc::ECONNRESET)),
        }
    }

    /// Asks for the connection, with data for the other computer. The owner has posted its receives. Returns the other
    /// computer's data when there is a connection, behind which there may be zeroes.
    ///
    /// # Errors
    /// [`ConnectError`]: `ECONNREFUSED` if the other computer does not listen.
    pub async fn connect(&self, private_data: &[u8]) -> Result<Vec<u8>, ConnectError> {
        const CALL: &str = "rdma_connect";
        let (reply, connected) = oneshot::channel();
        self.manager.connect(self.parts().id, private_data, reply);
        connected.await.unwrap_or(Err(CallError::new(CALL, libc::ECONNRESET).into()))
    }

    /// A buffer of the endpoint that is shared, as the other computer names it.
    pub fn remote(&self, buffer: &Sgl) -> Option<Remote> {
        let address = buffer.pieces().next()?.base() as u64;
        Some(Remote { address, key: self.parts().remote_key()? })
    }

    /// Has the connection ended. All requests complete then.
    pub fn disconnect(&self) {
        self.manager.disconnect(self.parts().id);
    }

    /// Ends the connection. Requests that are in progress may have these buffers, which are lent, until the queue pair is
    /// destroyed. The owner has given the shared receives back whose completions it has polled.
    pub fn end(mut self, lent: Vec<Buffer>) -> Ending {
        self.destroy(lent)
    }

    fn destroy(&mut self, lent: Vec<Buffer>) -> Ending {
        let (ended, ending) = oneshot::channel();
        if self.parts.as_ref().is_some_and(|parts| parts.receives.is_some()) {
            // A device that fails has no use for them.
            let _ = self.flush_receives();
        }
        if let Some(parts) = self.parts.take() {
            self.manager.destroy(parts, lent, ended);
        }
        Ending(ending)
    }

    /// The descriptor that becomes readable at a completion after [`Endpoint::arm`]. It is not to be read.
    pub fn fd(&self) -> BorrowedFd<'_> {
        let channel: *mut CompChannel = self.parts().channel;
        // SAFETY: the channel exists, and its descriptor is open, until the parts are destroyed.
        unsafe { BorrowedFd::borrow_raw((*channel).fd) }
    }

    /// Has the descriptor report the next completion. One that has come before is not reported: the owner polls afterwards.
    ///
    /// # Errors
    /// libibverbs's: no completion will be reported.
    pub fn arm(&mut self) -> Result<(), CallError> {
        let get_event = self.manager.library().0.ibv_get_cq_event;
        let parts = self.parts.as_mut().expect("present until dropped");
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel exists, and does not block.
        if self.is_armed && unsafe { get_event(parts.channel, &raw mut cq, &raw mut context) } == 0 {
            parts.events = parts.events.wrapping_add(1);
            self.is_armed = false;
        }
        if !self.is_armed {
            let cq: *mut Cq = self.parts().cq;
            // SAFETY: the completion queue exists; the provider's function belongs to its context.
            let errno = unsafe { ((*(*cq).context).req_notify_cq)(cq, 0) };
            if errno != 0 {
                return Err(CallError::new("ibv_req_notify_cq", errno.abs()));
            }
            self.is_armed = true;
        }
        Ok(())
    }

    /// Takes completions, some at a time. Returns whether there may be more.
    ///
    /// # Errors
    /// libibverbs's: the connection cannot go on.
    pub fn poll(&mut self, completions: &mut Vec<Completion>) -> Result<bool, CallError> {
        let mut taken = [Wc::EMPTY; POLL_MAX];
        let cq: *mut Cq = self.parts().cq;
        // SAFETY: the completion queue exists, and there is room for this many completions.
        let count = unsafe { ((*(*cq).context).poll_cq)(cq, POLL_MAX as i32, taken.as_mut_ptr()) };
        let count = usize::try_from(count).map_err(|_| CallError::new("ibv_poll_cq", libc::EIO))?;
        completions.extend(taken[..count].iter().map(Completion::new));
        Ok(count == POLL_MAX)
    }

    /// Receives one message to these pieces of the endpoint's buffers. Not for endpoints with shared receives.
    pub fn receive(&mut self, id: u32, pieces: &[Sgl]) {
        let key = self.parts().key();
        self.add_receive(id, pieces, key);
    }

    fn add_receive(&mut self, id: u32, pieces: &[Sgl], key: u32) {
        let Batch { receives, receive_pieces, .. } = &mut self.batch;
        let before = receive_pieces.len();
        receive_pieces.extend(pieces.iter().flat_map(|piece| sges(piece, key)));
        receives.push(RecvWr::new(wr_id(Kind::Receive, id), (receive_pieces.len() - before) as i32));
    }

    fn shared_receives(&self) -> &SharedReceives {
        self.parts().receives.as_ref().expect("the receives of the endpoint are shared")
    }

    /// Whether the receives are shared with other endpoints.
    pub fn shares_receives(&self) -> bool {
        self.parts().receives.is_some()
    }

    /// The message of a shared receive that has completed, with so many bytes, until [`Endpoint::receive_again`].
    ///
    /// # Panics
    /// If the receives are not shared.
    pub fn message(&self, id: u32, len: u32) -> Sgl {
        self.shared_receives().place(id).first(len)
    }

    /// Gives a shared receive back that has completed, successfully or not: another endpoint may get it.
    ///
    /// # Panics
    /// If the receives are not shared.
    pub fn receive_again(&mut self, id: u32) {
        let receives = self.shared_receives();
        let (place, key) = (receives.place(id), receives.key());
        self.add_receive(id, &[place], key);
    }

    fn transfer(&mut self, mut request: SendWr, piece: &Sgl, remote: Remote) {
        let key = self.parts().key();
        let Batch { sends, send_pieces, .. } = &mut self.batch;
        let before = send_pieces.len();
        send_pieces.extend(sges(piece, key));
        request.num_sge = (send_pieces.len() - before) as i32;
        (request.remote_addr, request.rkey) = (remote.address, remote.key);
        sends.push(request);
    }

    /// Copies memory of the other computer to a piece of the endpoint's buffers.
    pub fn read(&mut self, id: u32, to: &Sgl, from: Remote) {
        let request = SendWr::new(wr_id(Kind::Read, id), opcode::RDMA_READ, send_flags::SIGNALED);
        self.transfer(request, to, from);
    }

    /// Copies a piece of the endpoint's buffers to memory of the other computer, before the next send. It has no completion of
    /// its own.
    pub fn write(&mut self, from: &Sgl, to: Remote) {
        self.transfer(SendWr::new(wr_id(Kind::Write, 0), opcode::RDMA_WRITE, 0), from, to);
    }

    /// Sends a message of at most [`INLINE_MAX`] bytes. `invalidates`: a key that the other computer can be used no more with.
    ///
    /// # Panics
    /// If the message is longer.
    pub fn send(&mut self, id: u32, message: &[u8], invalidates: Option<u32>) {
        let mut inline = [0; INLINE_MAX];
        inline[..message.len()].copy_from_slice(message);
        let flags = send_flags::SIGNALED | send_flags::INLINE;
        let mut request = SendWr::new(wr_id(Kind::Send, id), opcode::SEND, flags);
        if let Some(key) = invalidates {
            (request.opcode, request.invalidate_rkey) = (opcode::SEND_WITH_INV, key);
        }
        self.batch.sends.push(request);
        self.batch.send_pieces.push(Sge { addr: 0, length: message.len() as u32, lkey: 0 });
        self.batch.inline.push(inline);
    }

    /// Sends a message that consists of pieces of the endpoint's buffers.
    pub fn send_pieces(&mut self, id: u32, pieces: &[Sgl]) {
        let key = self.parts().key();
        let mut request = SendWr::new(wr_id(Kind::Send, id), opcode::SEND, send_flags::SIGNALED);
        let Batch { sends, send_pieces, .. } = &mut self.batch;
        let before = send_pieces.len();
        send_pieces.extend(pieces.iter().flat_map(|piece| sges(piece, key)));
        request.num_sge = (send_pieces.len() - before) as i32;
        sends.push(request);
    }

    /// Sends a message that consists of a piece of the endpoint's buffers and of memory behind it, which the endpoint's domain
    /// has registered with this local key.
    pub fn send_with(&mut self, id: u32, piece: &Sgl, memory: Seg, key: u32) {
        self.send_pieces(id, &[*piece]);
        let Batch { sends, send_pieces, .. } = &mut self.batch;
        send_pieces.push(Sge { addr: memory.base() as u64, length: memory.len() as u32, lkey: key });
        sends.last_mut().expect("just added").num_sge += 1;
    }

    /// Posts the collected requests.
    ///
    /// # Errors
    /// libibverbs's: the connection cannot go on.
    pub fn flush(&mut self) -> Result<(), CallError> {
        self.flush_receives()?;
        self.flush_sends()
    }

    /// Posts the collected receives only.
    ///
    /// # Errors
    /// As [`Endpoint::flush`].
    pub fn flush_receives(&mut self) -> Result<(), CallError> {
        let Self { parts, batch: Batch { receives, receive_pieces, .. }, .. } = self;
        let Parts { qp, receives: shared, .. } = parts.as_ref().expect("present until dropped");
        let (qp, first) = (*qp, link(receives, receive_pieces));
        if first.is_null() {
            return Ok(());
        }
        let result = match shared {
            // SAFETY: the requests and their pieces stay in place during the call, and are of shared receives.
            Some(shared) => unsafe { shared.post_list(first) },
            None => {
                let mut failed = std::ptr::null_mut();
                // SAFETY: the queue pair exists, and the requests and their pieces stay in place during the call. The memory of
                // the pieces stays in place until the completions, by the invariant of `Sgl`.
                let errno = unsafe { ((*(*qp).context).post_recv)(qp, first, &raw mut failed) };
                posted("ibv_post_recv", errno)
            }
        };
        receives.clear();
        receive_pieces.clear();
        result
    }

    fn flush_sends(&mut self) -> Result<(), CallError> {
        let qp = self.parts().qp;
        let Batch { sends, send_pieces, inline, .. } = &mut self.batch;
        let (mut at, mut inline_left) = (0, inline.iter());
        for request in sends.iter() {
            if request.send_flags & send_flags::INLINE != 0 {
                let bytes = inline_left.next().expect("each such request has its bytes");
                send_pieces[at].addr = bytes.as_ptr() as u64;
            }
            at += request.piece_count();
        }
        let first = link(sends, send_pieces);
        if first.is_null() {
            return Ok(());
        }
        let mut failed = std::ptr::null_mut();
        // SAFETY: as for receives; what a request carries itself is copied during the call.
        let errno = unsafe { ((*(*qp).context).post_send)(qp, first, &raw mut failed) };
        sends.clear();
        send_pieces.clear();
        inline.clear();
        posted("ibv_post_send", errno)
    }
}

/// Links requests in their order, and each to its pieces, which are in the same order. Returns the first request; null if there
/// is none.
pub(crate) fn link<R: WorkRequest>(requests: &mut [R], pieces: &mut [Sge]) -> *mut R {
    let (mut next, mut pieces) = (std::ptr::null_mut(), pieces);
    for request in requests.iter_mut().rev() {
        let (before, own) = pieces.split_at_mut(pieces.len() - request.piece_count());
        request.link(own, next);
        (next, pieces) = (std::ptr::from_mut(request), before);
    }
    next
}

/// The result of a function that returns 0, or an errno of either sign.
pub(crate) fn posted(call: &'static str, errno: i32) -> Result<(), CallError> {
    if errno == 0 { Ok(()) } else { Err(CallError::new(call, errno.wrapping_abs())) }
}

pub(crate) fn sges(piece: &Sgl, key: u32) -> impl Iterator<Item = Sge> + use<> {
    piece.pieces().map(move |seg| Sge { addr: seg.base() as u64, length: seg.len() as u32, lkey: key })
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        drop(self.destroy(Vec::new()));
    }
}

/// The end of a connection. It may be dropped.
#[derive(Debug)]
pub struct Ending(oneshot::Receiver<()>);

impl Ending {
    /// Waits until the queue pair is destroyed: from then on, neither computer accesses any memory by this connection. If the
    /// device does not destroy it, that takes for ever.
    pub async fn wait(self) {
        if self.0.await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_linked_in_order_each_to_its_pieces() {
        let mut pieces = [10, 11, 20, 30, 31, 32].map(|addr| Sge { addr, length: 1, lkey: 0 });
        let mut requests = [2, 1, 3].map(|num_sge| {
            let mut request = SendWr::new(0, opcode::SEND, 0);
            request.num_sge = num_sge;
            request
        });
        let places = requests.each_mut().map(std::ptr::from_mut);
        let of_requests = [0, 2, 3].map(|at| pieces[at..].as_mut_ptr());
        assert_eq!(link(&mut requests, &mut pieces), places[0]);
        assert_eq!(requests.map(|request| request.sg_list), of_requests);
        assert_eq!(requests.map(|request| request.next), [places[1], places[2], std::ptr::null_mut()]);
        assert!(link::<SendWr>(&mut [], &mut []).is_null());
    }
}
