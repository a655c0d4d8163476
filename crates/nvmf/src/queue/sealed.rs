//! A queue whose connection uses TLS. Reactor context.
//!
//! Received bytes are decrypted to a buffer that all queues of a reactor share, and taken from there. Output is gathered, so that
//! small pieces share a record, encrypted, and written; commands give their buffers back then. Only what the socket does not take
//! stays with the connection: at most the bytes of one call.

use super::link::Link;
use super::tcp::{Means, Polled, Tcp};
use super::{IoQueue, give_back};
use aryk_log_limit::limited;
use aryk_nvme_fabrics::tcp::Piece;
use aryk_reactor::Cx;
use aryk_tls::{Session, TlsError, overhead};
use std::cell::RefCell;
use std::io::{self, ErrorKind, Write};
use std::rc::Rc;

/// Bytes that are encrypted, or decrypted, at a time.
const PLAIN_MAX: usize = 64 << 10;

/// The buffers that queues with TLS share.
struct Buffers {
    opened: RefCell<Vec<u8>>,
    gathered: RefCell<Vec<u8>>,
    sealed: RefCell<Vec<u8>>,
}

impl Default for Buffers {
    fn default() -> Self {
        Self {
            opened: RefCell::new(vec![0; PLAIN_MAX]),
            gathered: RefCell::new(Vec::with_capacity(PLAIN_MAX)),
            sealed: RefCell::new(Vec::with_capacity(PLAIN_MAX + overhead(PLAIN_MAX))),
        }
    }
}

/// What TLS adds to a queue.
pub(super) struct Sealed {
    session: Session,
    /// Records that the socket has not taken, from `sent` on.
    unsent: Vec<u8>,
    sent: usize,
    buffers: Rc<Buffers>,
}

impl Sealed {
    pub fn new(session: Session, cx: &mut Cx) -> Self {
        Self { session, unsent: Vec::new(), sent: 0, buffers: cx.local_state() }
    }

    pub fn has_unsent(&self) -> bool {
        self.sent < self.unsent.len()
    }

    /// The session. Nothing is unsent.
    pub fn into_session(self) -> Session {
        self.session
    }

    #[cfg(test)]
    pub fn unsent_len(&self) -> usize {
        self.unsent.len() - self.sent
    }
}

impl IoQueue {
    /// Takes encrypted input.
    pub(super) fn open(&mut self, mut received: &[u8], cx: &mut Cx) {
        let Link::Tcp(Tcp { means: Means::Polled(Polled { sealed: Some(sealed), .. }), .. }) = &self.link
        else {
            return;
        };
        let buffers = Rc::clone(&sealed.buffers);
        let mut opened = buffers.opened.borrow_mut();
        while let Link::Tcp(Tcp { means: Means::Polled(Polled { sealed: Some(sealed), .. }), .. }) =
            &mut self.link
            && !self.is_closing
        {
            match sealed.session.read(&mut received, &mut opened) {
                Ok(0) => return,
                Ok(len) => self.take(&opened[..len], cx),
                Err(TlsError::Closed) => self.close(cx),
                Err(error) => {
                    limited!(self.lines, warn, %error, "the TLS connection of a host has failed");
                    self.close(cx);
                }
            }
        }
    }

    /// Writes what is encrypted, or encrypts up to `max` bytes of the output and writes them.
    pub(super) fn write_sealed(&mut self, max: usize, cx: &mut Cx) -> io::Result<usize> {
        let Self { link: Link::Tcp(tcp), slots, pool, share, waiting, root, .. } = self else { return Ok(0) };
        let Tcp { queue, sent_at, means: Means::Polled(polled), .. } = tcp else { return Ok(0) };
        let Polled { socket, sealed: Some(sealed), .. } = polled else { return Ok(0) };
        let Sealed { session, unsent, sent, buffers } = sealed;
        if *sent < unsent.len() {
            let len = socket.write(&unsent[*sent..])?;
            *sent_at = cx.now();
            *sent += len;
            if *sent == unsent.len() {
                unsent.clear();
                *sent = 0;
            }
            return Ok(len.min(max));
        }
        let mut plain = buffers.gathered.borrow_mut();
        plain.clear();
        let room = max.min(PLAIN_MAX);
        for piece in queue.output() {
            let bytes = match piece {
                Piece::Bytes(bytes) => bytes,
                Piece::Data { slot, offset, len } => {
                    let data = slots[usize::from(slot.0)].data.as_ref().expect("kept until it is sent");
                    &data.buffer.bytes()[offset as usize..][..len as usize]
                }
            };
            let left = room - plain.len();
            plain.extend_from_slice(&bytes[..bytes.len().min(left)]);
            if plain.len() == room {
                break;
            }
        }
        let mut records = buffers.sealed.borrow_mut();
        records.clear();
        session.write(&plain, &mut records).map_err(io::Error::other)?;
        queue.sent(plain.len(), |id| {
            if let Some(data) = slots[usize::from(id.0)].data.take() {
                give_back(pool, share, data, waiting, *root, cx);
            }
        });
        let written = match socket.write(&records) {
            Ok(len) => len,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => 0,
            Err(error) => return Err(error),
        };
        *sent_at = cx.now();
        unsent.extend_from_slice(&records[written..]);
        Ok(plain.len())
    }
}
