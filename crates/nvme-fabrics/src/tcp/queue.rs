//! A controller's side of a connection, which carries one queue pair: commands and their data come in, R2Ts, data and completions
//! go out. NVMe TCP Transport 1.0 §3.3. Context: the owner of the connection, usually a reactor.
//!
//! The queue knows neither the socket nor the memory of the data, nor what commands do. Its owner passes what the socket receives
//! ([`Queue::receive`]), keeps the data of each slot, executes commands, and writes what the queue has to send
//! ([`Queue::output`]).
//!
//! **Invariants.** A slot is in use from [`Received::Command`] until the last byte of its completion is sent; until then its
//! owner keeps the data that is to be sent in place. A host can have as many commands as its queue has entries, and each of them
//! has at most one R2T, so that what a host can make the queue store is bounded. Once the queue has warmed up, it allocates
//! nothing.
//!
//! The R2Ts of several commands are outstanding at the same time. A command has one of them, whatever MAXR2T the host allows: its
//! owner has memory for all of the command's data before it requests data, so that further R2Ts of parts would bring nothing
//! earlier.

mod output;

use aryk_nvme::spec::entry::{CompletionEntry, SubmissionEntry};
use aryk_nvme::spec::status::Status;

use super::fatal::{Fatal, FatalStatus};
use super::parser::{Event, Limits, Parser};
use super::pdu::{C2hData, Format, H2cData, Header, IcReq, IcResp, R2t, Side, field};
use super::span::Span;
use crate::SlotId;
use output::Output;
pub use output::Piece;

/// SQHD of the completion of a Connect that disabled flow control.
const NO_FLOW_CONTROL: u16 = 0xffff;

/// What the queue received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received<'a> {
    /// The first part of a command. Its data in the capsule follows, and then [`Received::Ready`].
    Command {
        /// Where the command is from now on.
        slot: SlotId,
        /// The command.
        entry: SubmissionEntry,
        /// Bytes of data in the capsule.
        data_len: u32,
    },
    /// A piece of a command's data.
    Data {
        /// The command.
        slot: SlotId,
        /// Place of the bytes in the command's data.
        offset: u32,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// A command with its data in the capsule, or all data of an R2T, is there.
    Ready {
        /// The command.
        slot: SlotId,
        /// All data digests were right. If not, the command fails with Transient Transport Error.
        is_intact: bool,
    },
    /// The host ends the connection, because of this error of the controller.
    Terminated(Fatal),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// The capsule arrives.
    Arriving,
    /// The owner has the command.
    Owned,
    /// The data of an R2T arrives.
    Requested(Span),
    /// The completion has been given to the output.
    Completed,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    state: State,
    cid: u16,
    is_intact: bool,
}

const FREE: Slot = Slot { state: State::Free, cid: 0, is_intact: true };

/// What the PDU that arrives belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// The connection: ICReq, or a TermReq with its reason.
    Connection(Option<Fatal>),
    /// A command, whose data in this PDU begins at this offset of all its data. `ends`: the PDU is the last one.
    Slot { slot: SlotId, offset: u32, ends: bool },
}

/// The connection. See the head of the file.
#[derive(Debug)]
pub struct Queue {
    parser: Parser,
    supported: IcResp,
    format: Format,
    target: Target,
    slots: Vec<Slot>,
    free: Vec<SlotId>,
    output: Output,
    has_flow_control: bool,
    sqhd: u16,
}

impl Queue {
    /// A new connection. `supported` says which digests the controller supports; before Connect, the host can have one command.
    pub fn new(supported: IcResp, capsule_data_max: u32) -> Self {
        let limits = Limits { capsule_data_max, data_max: supported.h2c_data_max };
        Self {
            parser: Parser::new(Side::Controller, limits),
            supported,
            format: Format::default(),
            target: Target::Connection(None),
            slots: vec![FREE],
            free: vec![SlotId(0)],
            output: Output::default(),
            has_flow_control: true,
            sqhd: 0,
        }
    }

    /// Gives the queue its number of entries (SQSIZE plus one), once, while Connect is the only command there is.
    /// The completion of Connect follows.
    ///
    /// # Panics
    /// If the queue has been connected, or `entries` is below 2.
    pub fn connect(&mut self, entries: u16, disables_flow_control: bool) {
        assert!(
            self.slots.len() == 1 && entries >= 2,
            "a queue is connected once, with at least two entries"
        );
        // Connect itself has a slot until its completion is sent.
        self.slots.resize(usize::from(entries), FREE);
        self.free.extend((1..entries).rev().map(SlotId));
        self.has_flow_control = !disables_flow_control;
        self.sqhd = if disables_flow_control { NO_FLOW_CONTROL } else { 1 % entries };
    }

    /// Takes bytes from the front of `input` until there is something for the owner. `None`: the input is used up.
    ///
    /// # Errors
    /// The connection must end: the owner calls [`Self::terminate`], writes the output, and closes the socket. Every later call
    /// returns the error again.
    pub fn receive<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Received<'a>>, Fatal> {
        while let Some(event) = self.parser.next(input)? {
            let received = match event {
                Event::Header(header) => self.begin(header).inspect_err(|fatal| self.parser.fail(*fatal))?,
                Event::Data { offset, bytes } => match self.target {
                    Target::Slot { slot, offset: start, .. } => {
                        Some(Received::Data { slot, offset: start + offset, bytes })
                    }
                    Target::Connection(_) => None,
                },
                Event::End { is_intact } => self.end(is_intact),
            };
            if received.is_some() {
                return Ok(received);
            }
        }
        Ok(None)
    }

    fn begin(&mut self, header: Header) -> Result<Option<Received<'static>>, Fatal> {
        match header {
            Header::IcReq(request) => {
                self.initialize(&request);
                self.target = Target::Connection(None);
            }
            Header::TermReq { fatal, .. } => self.target = Target::Connection(Some(fatal)),
            Header::Command { entry, data_len } => {
                let slot = self.free.pop().ok_or(Fatal::of(FatalStatus::LIMIT_EXCEEDED))?;
                *self.slot(slot) = Slot { state: State::Arriving, cid: entry.cid(), is_intact: true };
                self.advance_head();
                self.target = Target::Slot { slot, offset: 0, ends: true };
                return Ok(Some(Received::Command { slot, entry, data_len }));
            }
            Header::H2cData(data) => {
                let ends = self.accept(&data)?;
                self.target = Target::Slot { slot: SlotId(data.tag), offset: data.offset, ends };
            }
            Header::IcResp(_) | Header::Response(_) | Header::C2hData(_) | Header::R2t(_) => {
                unreachable!("a controller's parser refuses what controllers send")
            }
        }
        Ok(None)
    }

    fn initialize(&mut self, request: &IcReq) {
        let answer = request.answer(self.supported);
        self.parser.establish(answer.h2c_format());
        self.output.header(&Header::IcResp(answer), &Format::default());
        self.format = request.c2h_format(&answer);
    }

    /// Counts a command that was taken from the submission queue.
    fn advance_head(&mut self) {
        if self.has_flow_control && self.slots.len() > 1 {
            self.sqhd = (self.sqhd + 1) % self.slots.len() as u16;
        }
    }

    /// Checks that data is what an R2T requested. Returns whether it is the last of that.
    fn accept(&mut self, data: &H2cData) -> Result<bool, Fatal> {
        let slot = self.slots.get_mut(usize::from(data.tag));
        let Some(Slot { state: State::Requested(span), cid, .. }) = slot else {
            return Err(Fatal::field(field::TTAG));
        };
        if *cid != data.cid {
            return Err(Fatal::field(field::CCCID));
        }
        span.accept(data.offset, data.len, data.is_last)
    }

    fn end(&mut self, is_intact: bool) -> Option<Received<'static>> {
        match self.target {
            Target::Connection(fatal) => fatal.map(Received::Terminated),
            Target::Slot { slot: id, ends, .. } => {
                let slot = self.slot(id);
                slot.is_intact &= is_intact;
                if !ends {
                    return None;
                }
                slot.state = State::Owned;
                Some(Received::Ready { slot: id, is_intact: slot.is_intact })
            }
        }
    }

    fn slot(&mut self, slot: SlotId) -> &mut Slot {
        &mut self.slots[usize::from(slot.0)]
    }

    /// The slot of a command that the owner has, which changes its state.
    fn owned(&mut self, slot: SlotId, next: State) -> &mut Slot {
        let slot = self.slot(slot);
        assert_eq!(slot.state, State::Owned, "the owner has the command");
        slot.state = next;
        slot
    }

    /// Requests data of a command from the host; it arrives as [`Received::Data`], and then [`Received::Ready`] comes again.
    ///
    /// # Panics
    /// If the owner does not have the command, or `len` is 0.
    pub fn request_data(&mut self, id: SlotId, offset: u32, len: u32) {
        assert!(len > 0, "an R2T requests data");
        let slot = self.owned(id, State::Requested(Span::new(offset, len)));
        let r2t = R2t { cid: slot.cid, tag: id.0, offset, len };
        self.output.header(&Header::R2t(r2t), &self.format);
    }

    /// Completes a command.
    ///
    /// # Panics
    /// If the owner does not have the command.
    pub fn complete(&mut self, id: SlotId, status: Status, result: u64) {
        let cid = self.owned(id, State::Completed).cid;
        self.respond(cid, status, result);
        self.output.finish(id);
    }

    /// Completes a command with success, after its data, which the owner keeps in place until the slot is free.
    ///
    /// # Panics
    /// If the owner does not have the command, or there is no data, or 4 GiB or more.
    pub fn complete_with_data(&mut self, id: SlotId, data: &[u8], result: u64) {
        let cid = self.owned(id, State::Completed).cid;
        let len = u32::try_from(data.len()).expect("data is shorter than 4 GiB");
        assert!(len > 0, "there is data");
        // The flag stands for a completion of zeroes, which has no SQHD.
        let is_success = !self.has_flow_control && result == 0 && self.sqhd == 0;
        let header = C2hData { cid, offset: 0, len, is_last: true, is_success };
        self.output.header(&Header::C2hData(header), &self.format);
        self.output.data(id, len);
        if self.format.data_digest {
            self.output.digest(data);
        }
        if !is_success {
            self.respond(cid, Status::new(0), result);
        }
        self.output.finish(id);
    }

    /// Drops a command, which gets no completion: a reset of the controller has ended it.
    ///
    /// # Panics
    /// If the owner does not have the command.
    pub fn drop_command(&mut self, id: SlotId) {
        *self.owned(id, State::Free) = FREE;
        self.free.push(id);
    }

    fn respond(&mut self, cid: u16, status: Status, result: u64) {
        let entry = CompletionEntry::new(cid, status, result).with_sqhd(self.sqhd);
        self.output.header(&Header::Response(entry), &self.format);
        if self.sqhd == NO_FLOW_CONTROL {
            // Only the completion of Connect says so.
            self.sqhd = 0;
        }
    }

    /// Has a TermReq sent, as the last of all: what the owner completes or requests from here on is not sent, and its slots do
    /// not become free.
    pub fn terminate(&mut self, fatal: Fatal) {
        self.output.term_req(fatal, self.parser.failed_header());
    }

    /// Whether there is nothing to send.
    pub fn is_output_empty(&self) -> bool {
        self.output.is_empty()
    }

    /// The bytes to send, in order. No piece is empty.
    pub fn output(&self) -> impl Iterator<Item = Piece<'_>> {
        self.output.pieces()
    }

    /// The socket has taken the next `len` bytes of the output. Reports the slots that become free.
    ///
    /// # Panics
    /// If the output is shorter.
    pub fn sent(&mut self, len: usize, mut freed: impl FnMut(SlotId)) {
        self.output.advance(len, |id| {
            self.slots[usize::from(id.0)] = FREE;
            self.free.push(id);
            freed(id);
        });
    }

    /// Whether data that is sent has digests, which [`Self::complete_with_data`] computes.
    pub const fn has_data_digests(&self) -> bool {
        self.format.data_digest
    }

    /// Commands that are in use.
    pub fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

#[cfg(test)]
mod tests;
