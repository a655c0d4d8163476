//! What a connection has to send: headers and digests, which the queue writes, and data, which its owner has. Context: the
//! queue's.

use std::collections::VecDeque;

use crate::SlotId;
use crate::tcp::digest::DataDigest;
use crate::tcp::fatal::Fatal;
use crate::tcp::pdu::{Format, HEADER_MAX, Header, Side};

/// Sent bytes beyond which the rest of the buffer is moved to its front.
const SENT_MAX: usize = 4096;

/// A piece of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Bytes of headers and digests.
    Bytes(&'a [u8]),
    /// Bytes of the data of a slot.
    Data {
        /// The slot.
        slot: SlotId,
        /// The first byte.
        offset: u32,
        /// The number of bytes.
        len: u32,
    },
}

/// A part of the output, of which the front one may have been sent in part.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// So many bytes of the buffer.
    Bytes(usize),
    Data {
        slot: SlotId,
        offset: u32,
        len: u32,
    },
    /// With everything before, the slot is complete.
    Finish(SlotId),
}

/// The output of a connection.
#[derive(Debug, Default)]
pub(super) struct Output {
    parts: VecDeque<Part>,
    /// Headers and digests that have not been sent, behind some that have.
    buffer: Vec<u8>,
    sent: usize,
    /// The last PDU is there: nothing is added behind it.
    has_last: bool,
}

impl Output {
    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    fn bytes(&mut self, bytes: &[u8]) {
        if self.has_last {
            return;
        }
        self.buffer.extend_from_slice(bytes);
        match self.parts.back_mut() {
            Some(Part::Bytes(len)) => *len += bytes.len(),
            _ => self.parts.push_back(Part::Bytes(bytes.len())),
        }
    }

    pub(super) fn header(&mut self, header: &Header, format: &Format) {
        let mut bytes = [0; HEADER_MAX];
        let len = header.encode(format, &mut bytes);
        self.bytes(&bytes[..len]);
    }

    pub(super) fn data(&mut self, slot: SlotId, len: u32) {
        if !self.has_last {
            self.parts.push_back(Part::Data { slot, offset: 0, len });
        }
    }

    pub(super) fn digest(&mut self, data: &[u8]) {
        let mut digest = DataDigest::default();
        digest.update(data);
        self.bytes(&digest.to_wire());
    }

    pub(super) fn finish(&mut self, slot: SlotId) {
        if !self.has_last {
            self.parts.push_back(Part::Finish(slot));
        }
    }

    pub(super) fn term_req(&mut self, fatal: Fatal, wrong: &[u8]) {
        let header = Header::TermReq { from: Side::Controller, fatal, data_len: wrong.len() as u32 };
        self.header(&header, &Format::default());
        self.bytes(wrong);
        self.has_last = true;
    }

    pub(super) fn pieces(&self) -> impl Iterator<Item = Piece<'_>> {
        let mut at = self.sent;
        self.parts.iter().filter_map(move |part| match *part {
            Part::Bytes(len) => {
                at += len;
                Some(Piece::Bytes(&self.buffer[at - len..at]))
            }
            Part::Data { slot, offset, len } => Some(Piece::Data { slot, offset, len }),
            Part::Finish(_) => None,
        })
    }

    /// Removes the first `len` bytes, and what ends with them.
    pub(super) fn advance(&mut self, mut len: usize, mut finished: impl FnMut(SlotId)) {
        while let Some(part) = self.parts.front_mut() {
            let all = match part {
                Part::Bytes(all) => *all,
                Part::Data { len, .. } => *len as usize,
                Part::Finish(_) => 0,
            };
            let taken = all.min(len);
            len -= taken;
            match part {
                Part::Bytes(left) => {
                    *left -= taken;
                    self.sent += taken;
                }
                Part::Data { offset, len, .. } => {
                    *offset += taken as u32;
                    *len -= taken as u32;
                }
                Part::Finish(slot) => finished(*slot),
            }
            if taken < all {
                break;
            }
            self.parts.pop_front();
        }
        assert_eq!(len, 0, "no more is sent than there was");
        if self.sent == self.buffer.len() {
            self.buffer.clear();
            self.sent = 0;
        } else if self.sent >= SENT_MAX {
            self.buffer.drain(..self.sent);
            self.sent = 0;
        }
    }
}
