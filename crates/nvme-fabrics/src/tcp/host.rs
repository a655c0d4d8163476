//! A host's side of a connection: commands go out, data and completions come back. NVMe TCP Transport 1.0 §3.3. Any context.
//!
//! The owner has the data of its commands and the socket. It chooses the command identifiers, which are below the number of
//! entries, and writes what [`HostQueue::encode`] makes. After the first PDU, nothing here allocates.
//!
//! **Invariants.** A PDU is encoded as a whole. What a controller sends is accepted only for a command that it has: data within
//! the range that the command reads, in order; one R2T at a time, within the range that the command writes, in order; one
//! completion, and a successful one only after all data. Anything else ends the connection.

use std::collections::VecDeque;

use aryk_nvme::spec::entry::SubmissionEntry;
use aryk_nvme::spec::status::Status;

use super::digest::{DIGEST_LEN, DataDigest};
use super::fatal::{Fatal, FatalStatus};
use super::parser::{Event, Limits, Parser};
use super::pdu::{C2hData, Format, H2cData, HEADER_MAX, Header, IcReq, IcResp, R2t, Side, field};
use super::span::Span;
use crate::Transfer;
use crate::sgl::Sgl;

/// Data of a capsule that every controller takes before it has said more: that of Connect has 1,024 bytes.
const IN_CAPSULE_MIN: u32 = 8192;
/// The least data that is sent in one PDU, if there is more: a smaller rest of the room waits for the next call.
const PIECE_MIN: u32 = 4096;
/// The most data that is sent in one PDU, so that others have their turn.
const PIECE_MAX: u32 = 128 << 10;

/// The room that [`HostQueue::encode`] needs at least, to make any PDU.
pub const ENCODE_MIN: usize = HEADER_MAX + IN_CAPSULE_MAX as usize + DIGEST_LEN;
/// The most data that a host sends in a capsule, also where the controller takes more.
pub const IN_CAPSULE_MAX: u32 = 16 << 10;

/// What a host received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostReceived<'a> {
    /// The connection takes commands from now on.
    Established,
    /// Data of a command.
    Data {
        /// The command.
        cid: u16,
        /// The place in the command's data.
        offset: u32,
        /// The data.
        bytes: &'a [u8],
    },
    /// A command has ended, and its identifier is free.
    Completed {
        /// The command.
        cid: u16,
        /// Its status.
        status: Status,
        /// DW0 and DW1 of its completion.
        result: u64,
        /// Whether all data that came has its digest. If not, the data is wrong, whatever the status is.
        is_intact: bool,
    },
    /// The controller ends the connection.
    Terminated(Fatal),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// Its capsule has not been encoded.
    Queued,
    /// The controller has it.
    Sent,
}

/// Data that the controller has requested and that has not been encoded.
#[derive(Clone, Copy, Debug)]
struct Requested {
    tag: u16,
    offset: u32,
    len: u32,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: State,
    entry: SubmissionEntry,
    transfer: Transfer,
    /// What the controller has not sent, or not requested.
    span: Span,
    requested: Option<Requested>,
    is_intact: bool,
}

/// The PDU that arrives.
#[derive(Clone, Copy, Debug)]
enum Arriving {
    /// One without an effect at its end.
    Other,
    /// Data of this command, at this offset.
    Data {
        cid: u16,
        offset: u32,
        is_success: bool,
    },
    /// The end of a command.
    Response {
        cid: u16,
        status: Status,
        result: u64,
    },
    Established,
    Terminated(Fatal),
}

/// See the [module](self).
#[derive(Debug)]
pub struct HostQueue {
    request: IcReq,
    parser: Parser,
    format: Format,
    h2c_data_max: u32,
    in_capsule_max: u32,
    is_opened: bool,
    is_established: bool,
    slots: Box<[Slot]>,
    /// Commands with something to encode, each once.
    pending: VecDeque<u16>,
    arriving: Arriving,
}

impl HostQueue {
    /// The queue of a new connection for `commands` commands at a time, of which each reads at most `data_max` bytes.
    ///
    /// # Panics
    /// Without commands.
    pub fn new(request: IcReq, commands: u16, data_max: u32) -> Self {
        assert!(commands > 0, "a queue takes commands");
        let free = Slot {
            state: State::Free,
            entry: SubmissionEntry::new(0, 0),
            transfer: Transfer::None,
            span: Span::new(0, 0),
            requested: None,
            is_intact: true,
        };
        Self {
            // One R2T at a time for each command.
            request: IcReq { max_r2t: 0, ..request },
            parser: Parser::new(Side::Host, Limits { capsule_data_max: 0, data_max }),
            format: Format::default(),
            h2c_data_max: 0,
            in_capsule_max: IN_CAPSULE_MIN,
            is_opened: false,
            is_established: false,
            slots: vec![free; usize::from(commands)].into(),
            pending: VecDeque::with_capacity(usize::from(commands)),
            arriving: Arriving::Other,
        }
    }

    /// What both sides have settled about the PDUs that the host sends.
    pub const fn format(&self) -> Format {
        self.format
    }

    /// Sets the data that a capsule may have, as the controller reports it.
    pub fn set_in_capsule_max(&mut self, bytes: u32) {
        self.in_capsule_max = bytes.min(IN_CAPSULE_MAX);
    }

    /// Adds a command. Its data pointer and its identifier are set here.
    ///
    /// # Panics
    /// The identifier is in use or too large, or the length of the data is not a multiple of 4.
    pub fn submit(&mut self, cid: u16, entry: SubmissionEntry, transfer: Transfer) {
        let len = transfer.len();
        assert!(len.is_multiple_of(4), "data is transferred in dwords");
        let slot = &mut self.slots[usize::from(cid)];
        assert_eq!(slot.state, State::Free, "a command identifier is used once at a time");
        let is_in_capsule = matches!(transfer, Transfer::ToController(1..)) && len <= self.in_capsule_max;
        let sgl = if is_in_capsule { Sgl::InCapsule { offset: 0, len } } else { Sgl::Transport { len } };
        *slot = Slot {
            state: State::Queued,
            entry: entry.with_cid(cid).with_sgl(sgl.encode()),
            transfer,
            span: Span::new(0, if is_in_capsule { 0 } else { len }),
            requested: None,
            is_intact: true,
        };
        self.pending.push_back(cid);
    }

    /// Whether both sides have settled the format.
    pub fn is_established(&self) -> bool {
        self.is_established
    }

    /// Whether [`HostQueue::encode`] would make something.
    pub fn has_output(&self) -> bool {
        !self.is_opened || self.is_established && !self.pending.is_empty()
    }

    /// Writes whole PDUs to the start of `out`, as many as fit, and returns their length. The owner sends all of it. `data`
    /// copies data of a command, from an offset on.
    pub fn encode(&mut self, out: &mut [u8], mut data: impl FnMut(u16, u32, &mut [u8])) -> usize {
        if !self.is_opened {
            self.is_opened = true;
            return Header::IcReq(self.request).encode(&self.format, out);
        }
        let mut filled = 0;
        while self.is_established
            && let Some(&cid) = self.pending.front()
        {
            let Some(len) = self.encode_one(cid, &mut out[filled..], &mut data) else { break };
            filled += len;
            self.pending.pop_front();
            if self.slots[usize::from(cid)].requested.is_some() {
                self.pending.push_back(cid);
            }
        }
        filled
    }

    /// Encodes the next PDU of a command. `None`: it does not fit.
    fn encode_one(
        &mut self,
        cid: u16,
        out: &mut [u8],
        data: &mut impl FnMut(u16, u32, &mut [u8]),
    ) -> Option<usize> {
        let room = u32::try_from(out.len()).unwrap_or(u32::MAX);
        let room = room.checked_sub((HEADER_MAX + DIGEST_LEN) as u32)?;
        let slot = &mut self.slots[usize::from(cid)];
        let (header, offset) = if slot.state == State::Queued {
            let is_in_capsule =
                matches!(slot.transfer, Transfer::ToController(_)) && slot.span.missing() == 0;
            let data_len = if is_in_capsule { slot.transfer.len() } else { 0 };
            if data_len > room {
                return None;
            }
            slot.state = State::Sent;
            (Header::Command { entry: slot.entry, data_len }, 0)
        } else {
            let requested = slot.requested.as_mut().expect("only commands with output are pending");
            let len = requested.len.min(self.h2c_data_max).min(PIECE_MAX).min(room & !3);
            if len < requested.len.min(PIECE_MIN) {
                return None;
            }
            let (tag, offset, is_last) = (requested.tag, requested.offset, len == requested.len);
            requested.offset += len;
            requested.len -= len;
            if is_last {
                slot.requested = None;
            }
            (Header::H2cData(H2cData { cid, tag, offset, len, is_last }), offset)
        };
        let len = header.data_len() as usize;
        let start = header.encode(&self.format, out);
        let end = start + len;
        if len == 0 {
            return Some(end);
        }
        data(cid, offset, &mut out[start..end]);
        if !self.format.data_digest {
            return Some(end);
        }
        let mut digest = DataDigest::default();
        digest.update(&out[start..end]);
        out[end..end + DIGEST_LEN].copy_from_slice(&digest.to_wire());
        Some(end + DIGEST_LEN)
    }

    /// Takes bytes from the front of `input` until there is something to report. `None`: the input is used up.
    ///
    /// # Errors
    /// The controller violates the protocol: the connection must end.
    pub fn receive<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<HostReceived<'a>>, Fatal> {
        let result = self.step(input);
        result.inspect_err(|fatal| self.parser.fail(*fatal))
    }

    fn step<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<HostReceived<'a>>, Fatal> {
        while let Some(event) = self.parser.next(input)? {
            match event {
                Event::Header(header) => self.arriving = self.begin(header)?,
                Event::Data { offset, bytes } => {
                    if let Arriving::Data { cid, offset: start, .. } = self.arriving {
                        return Ok(Some(HostReceived::Data { cid, offset: start + offset, bytes }));
                    }
                }
                Event::End { is_intact } => {
                    if let Some(received) = self.end(is_intact)? {
                        return Ok(Some(received));
                    }
                }
            }
        }
        Ok(None)
    }

    fn begin(&mut self, header: Header) -> Result<Arriving, Fatal> {
        match header {
            Header::IcResp(answer) => self.establish(&answer),
            Header::TermReq { fatal, .. } => Ok(Arriving::Terminated(fatal)),
            Header::Response(entry) => {
                let (cid, status) = (entry.cid(), entry.status());
                self.sent(cid, RESPONSE_CID)?;
                Ok(Arriving::Response { cid, status, result: entry.result_64() })
            }
            Header::C2hData(C2hData { cid, offset, len, is_last, is_success }) => {
                let slot = self.sent(cid, field::CCCID)?;
                if !matches!(slot.transfer, Transfer::ToHost(_)) {
                    return Err(Fatal::field(field::CCCID));
                }
                slot.span.accept(offset, len, is_last)?;
                Ok(Arriving::Data { cid, offset, is_success })
            }
            Header::R2t(r2t) => self.request(r2t).map(|()| Arriving::Other),
            // The parser accepts only what controllers send.
            Header::IcReq(_) | Header::Command { .. } | Header::H2cData(_) => Err(Fatal::field(field::KIND)),
        }
    }

    fn establish(&mut self, answer: &IcResp) -> Result<Arriving, Fatal> {
        if !self.is_opened {
            return Err(Fatal::of(FatalStatus::SEQUENCE));
        }
        self.request.check(answer)?;
        self.parser.establish(self.request.c2h_format(answer));
        self.format = answer.h2c_format();
        self.h2c_data_max = answer.h2c_data_max;
        Ok(Arriving::Established)
    }

    /// The slot of a command that the controller has.
    fn sent(&mut self, cid: u16, at: u32) -> Result<&mut Slot, Fatal> {
        let slot = self.slots.get_mut(usize::from(cid)).filter(|slot| slot.state == State::Sent);
        slot.ok_or(Fatal::field(at))
    }

    fn request(&mut self, R2t { cid, tag, offset, len }: R2t) -> Result<(), Fatal> {
        let slot = self.sent(cid, field::CCCID)?;
        if !matches!(slot.transfer, Transfer::ToController(_)) {
            return Err(Fatal::field(field::CCCID));
        }
        if slot.requested.is_some() {
            return Err(Fatal::of(FatalStatus::LIMIT_EXCEEDED));
        }
        let is_all = len == slot.span.missing();
        slot.span.accept(offset, len, is_all)?;
        slot.requested = Some(Requested { tag, offset, len });
        self.pending.push_back(cid);
        Ok(())
    }

    fn end(&mut self, is_intact: bool) -> Result<Option<HostReceived<'static>>, Fatal> {
        match std::mem::replace(&mut self.arriving, Arriving::Other) {
            Arriving::Other => Ok(None),
            Arriving::Established => {
                self.is_established = true;
                Ok(Some(HostReceived::Established))
            }
            Arriving::Terminated(fatal) => Ok(Some(HostReceived::Terminated(fatal))),
            Arriving::Data { cid, is_success, .. } => {
                self.slots[usize::from(cid)].is_intact &= is_intact;
                if is_success { self.complete(cid, Status::new(0), 0).map(Some) } else { Ok(None) }
            }
            Arriving::Response { cid, status, result } => self.complete(cid, status, result).map(Some),
        }
    }

    fn complete(&mut self, cid: u16, status: Status, result: u64) -> Result<HostReceived<'static>, Fatal> {
        let slot = &mut self.slots[usize::from(cid)];
        // A command that still has data to send, or that has succeeded without its data.
        if slot.requested.is_some() || status.is_success() && slot.span.missing() > 0 {
            return Err(Fatal::of(FatalStatus::DATA_OUT_OF_RANGE));
        }
        slot.state = State::Free;
        Ok(HostReceived::Completed { cid, status, result, is_intact: slot.is_intact })
    }
}

/// The offset of CID in a CapsuleResp.
const RESPONSE_CID: u32 = 20;

#[cfg(test)]
mod tests;
