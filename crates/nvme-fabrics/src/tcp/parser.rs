//! The incremental parser of a connection's incoming bytes. NVMe TCP Transport 1.0 §3. Any context; it allocates nothing.
//!
//! The receiver passes bytes in pieces of any size. Headers are copied once, into the parser; data is not copied: the parser
//! returns the pieces of the input that are data, with their place in the PDU's data, and the receiver copies them to where they
//! belong.
//!
//! **Invariants.** What the parser reports does not depend on how the bytes are divided. After an error, every call returns it
//! again.

use super::digest::{self, DIGEST_LEN, DataDigest};
use super::fatal::{Fatal, FatalStatus};
use super::pdu::{Format, Header, IcReq, IcResp, Kind, Side, TERM_DATA_MAX, field, flag};

/// Bytes of the common header, which tells the length of the rest.
const COMMON: usize = 8;
/// Bytes of the longest header with its digest.
const BUFFER: usize = 128;

/// What the parser finds in the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// A PDU has begun, and its header is valid. Its data follows, and then [`Event::End`].
    Header(Header),
    /// The next bytes of the PDU's data.
    Data {
        /// Their place in the data of the PDU.
        offset: u32,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// The PDU has ended.
    End {
        /// The data has the digest that the PDU says, or the PDU has none. If not, the command of the data fails, and the
        /// connection goes on.
        is_intact: bool,
    },
}

/// The receiver's limits for the data of one PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// In-capsule data of a command. A controller accepts at least 8,192 bytes on the admin queue (NVMe TCP Transport 1.0
    /// §3.3.2.1).
    pub capsule_data_max: u32,
    /// Data of an H2CData or C2HData: MAXH2CDATA of a controller, and the largest transfer of a host.
    pub data_max: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// In the header or its digest.
    Header,
    /// In the padding before the data, with so many bytes left.
    Padding(usize),
    /// In the data, at this offset.
    Data(u32),
    /// In the data digest.
    DataDigest,
    /// The event of the end comes next.
    End { is_intact: bool },
    /// After a fatal error.
    Failed(Fatal),
}

/// How far the initialization of the connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No PDU has come.
    New,
    /// The first PDU has come; the receiver has not settled the format.
    Initial,
    Established,
}

/// The state between two pieces of input.
#[derive(Debug)]
pub struct Parser {
    sender: Side,
    limits: Limits,
    format: Format,
    phase: Phase,
    stage: Stage,
    /// The header, then the data digest.
    buffer: [u8; BUFFER],
    filled: usize,
    /// Once the common header is there: the bytes of the PDU that are data, its start, and its type.
    pdu: Option<Shape>,
    digest: DataDigest,
}

/// What the common header of a PDU says.
#[derive(Clone, Copy, Debug)]
struct Shape {
    kind: Kind,
    /// Bytes of the header with its digest.
    header_end: usize,
    /// Bytes of padding between the header and the data.
    padding: usize,
    data_len: u32,
}

impl Parser {
    /// A parser of what `receiver` receives on a new connection.
    pub fn new(receiver: Side, limits: Limits) -> Self {
        Self {
            sender: match receiver {
                Side::Host => Side::Controller,
                Side::Controller => Side::Host,
            },
            limits,
            format: Format::default(),
            phase: Phase::New,
            stage: Stage::Header,
            buffer: [0; BUFFER],
            filled: 0,
            pdu: None,
            digest: DataDigest::default(),
        }
    }

    /// Settles the format of all later PDUs, after the event of an ICReq or ICResp. Before this call no other PDU is accepted.
    ///
    /// # Panics
    /// If no ICReq or ICResp has come, or the format has been settled.
    pub fn establish(&mut self, format: Format) {
        assert_eq!(self.phase, Phase::Initial, "the format is settled once, after the first PDU");
        self.phase = Phase::Established;
        self.format = format;
    }

    /// Takes bytes from the front of `input` until there is something to report. `None`: the input is used up.
    ///
    /// # Errors
    /// The connection must end, with a TermReq that has this error and [`Self::failed_header`].
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Event<'a>>, Fatal> {
        let result = self.step(input);
        result.inspect_err(|fatal| self.fail(*fatal))
    }

    /// Has every later call return this error, which the receiver has found in what the parser reported.
    pub const fn fail(&mut self, fatal: Fatal) {
        self.stage = Stage::Failed(fatal);
    }

    /// After an error in a header: what came of this header, which is the data of the TermReq.
    pub fn failed_header(&self) -> &[u8] {
        &self.buffer[..self.filled]
    }

    fn step<'a>(&mut self, input: &mut &'a [u8]) -> Result<Option<Event<'a>>, Fatal> {
        loop {
            match self.stage {
                Stage::Header => {
                    let Some(header) = self.read_header(input)? else { return Ok(None) };
                    return Ok(Some(Event::Header(header)));
                }
                Stage::Padding(left) => {
                    let skipped = take(input, left).len();
                    if skipped < left {
                        self.stage = Stage::Padding(left - skipped);
                        return Ok(None);
                    }
                    self.stage = Stage::Data(0);
                }
                Stage::Data(offset) => {
                    if let Some(event) = self.read_data(input, offset) {
                        return Ok(event);
                    }
                }
                Stage::DataDigest => {
                    if !self.fill(input, DIGEST_LEN) {
                        return Ok(None);
                    }
                    let is_intact = self.buffer[..DIGEST_LEN] == self.digest.to_wire();
                    self.stage = Stage::End { is_intact };
                }
                Stage::End { is_intact } => {
                    (self.stage, self.filled, self.pdu) = (Stage::Header, 0, None);
                    return Ok(Some(Event::End { is_intact }));
                }
                Stage::Failed(fatal) => return Err(fatal),
            }
        }
    }

    /// Copies input to the buffer until it has `len` bytes. Returns whether it has.
    fn fill(&mut self, input: &mut &[u8], len: usize) -> bool {
        let piece = take(input, len - self.filled);
        self.buffer[self.filled..self.filled + piece.len()].copy_from_slice(piece);
        self.filled += piece.len();
        self.filled == len
    }

    fn read_header(&mut self, input: &mut &[u8]) -> Result<Option<Header>, Fatal> {
        let shape = match self.pdu {
            Some(shape) => shape,
            None => {
                if !self.fill(input, COMMON) {
                    return Ok(None);
                }
                let shape = self.check_common()?;
                self.pdu = Some(shape);
                shape
            }
        };
        if !self.fill(input, shape.header_end) {
            return Ok(None);
        }
        let header = self.check_header(shape)?;
        if shape.kind.is_initial() {
            self.phase = Phase::Initial;
        }
        self.stage = match shape.data_len {
            0 => Stage::End { is_intact: true },
            _ => Stage::Padding(shape.padding),
        };
        self.digest = DataDigest::default();
        Ok(Some(header))
    }

    /// The next event of the data; `None` if the data has ended.
    fn read_data<'a>(&mut self, input: &mut &'a [u8], offset: u32) -> Option<Option<Event<'a>>> {
        let shape = self.pdu.expect("data follows a header");
        let has_digest = self.format.has_data_digest(shape.kind);
        if offset == shape.data_len {
            self.filled = 0;
            self.stage = if has_digest { Stage::DataDigest } else { Stage::End { is_intact: true } };
            return None;
        }
        let bytes = take(input, (shape.data_len - offset) as usize);
        if bytes.is_empty() {
            return Some(None);
        }
        if has_digest {
            self.digest.update(bytes);
        }
        self.stage = Stage::Data(offset + bytes.len() as u32);
        Some(Some(Event::Data { offset, bytes }))
    }

    /// Checks type, FLAGS, HLEN, PDO and PLEN, as far as they do not depend on the rest of the header.
    fn check_common(&self) -> Result<Shape, Fatal> {
        let [kind, flags, hlen, pdo, ..] = self.buffer;
        let plen = u32::from_le_bytes([self.buffer[4], self.buffer[5], self.buffer[6], self.buffer[7]]);
        let kind = Kind::decode(kind).filter(|kind| kind.sender() == self.sender);
        let kind = kind.ok_or(Fatal::field(field::KIND))?;
        let may_come = match self.phase {
            Phase::New => kind.is_initial() || kind.is_terminal(),
            Phase::Initial => kind.is_terminal(),
            Phase::Established => !kind.is_initial(),
        };
        if !may_come {
            return Err(Fatal::of(FatalStatus::SEQUENCE));
        }
        if usize::from(hlen) != kind.header_len() {
            return Err(Fatal::field(field::HLEN));
        }
        let header_end = self.format.header_end(kind);
        let rest = plen.checked_sub(header_end as u32).ok_or(Fatal::field(field::PLEN))?;
        let has_data = rest != 0;
        if has_data && !kind.may_have_data() {
            return Err(Fatal::field(field::PLEN));
        }
        if flags & (flag::HDGST | flag::DDGST) != self.format.flags(kind, has_data) {
            return Err(Fatal::field(field::FLAGS));
        }
        let padding = if !has_data || kind.is_terminal() {
            0
        } else if !self.format.is_aligned(pdo) {
            return Err(Fatal::field(field::PDO));
        } else {
            usize::from(pdo).checked_sub(header_end).ok_or(Fatal::field(field::PDO))?
        };
        let digest = if has_data && self.format.has_data_digest(kind) { DIGEST_LEN } else { 0 };
        let data_len = match rest.checked_sub((padding + digest) as u32) {
            Some(0) if has_data => return Err(Fatal::field(field::PLEN)),
            Some(data_len) => data_len,
            None => return Err(Fatal::field(field::PLEN)),
        };
        let data_max = match kind {
            Kind::CapsuleCmd => self.limits.capsule_data_max,
            _ if kind.is_terminal() => TERM_DATA_MAX,
            _ => self.limits.data_max,
        };
        match data_len > data_max {
            true if kind.is_terminal() => Err(Fatal::field(field::PLEN)),
            true => Err(Fatal::of(FatalStatus::LIMIT_EXCEEDED)),
            false => Ok(Shape { kind, header_end, padding, data_len }),
        }
    }

    /// Checks the digest and the fields of a header that is there as a whole.
    fn check_header(&self, shape: Shape) -> Result<Header, Fatal> {
        let header = &self.buffer[..shape.kind.header_len()];
        if self.format.has_header_digest(shape.kind) {
            let received = self.buffer[header.len()..].first_chunk::<DIGEST_LEN>().expect("a digest fits");
            let received = u32::from_le_bytes(*received);
            if received != digest::of_header(header) {
                return Err(Fatal { status: FatalStatus::HEADER_DIGEST, information: received });
            }
        }
        Header::decode(shape.kind, header, shape.data_len)
    }
}

/// Up to `len` bytes from the front of `input`.
fn take<'a>(input: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (piece, rest) = input.split_at(len.min(input.len()));
    *input = rest;
    piece
}

impl IcReq {
    /// The controller's answer, from what it supports: digests where both sides want them.
    pub const fn answer(&self, supported: IcResp) -> IcResp {
        IcResp {
            header_digest: self.header_digest && supported.header_digest,
            data_digest: self.data_digest && supported.data_digest,
            ..supported
        }
    }

    /// The format of the PDUs that the controller sends after its answer.
    pub const fn c2h_format(&self, answer: &IcResp) -> Format {
        Format {
            header_digest: answer.header_digest,
            data_digest: answer.data_digest,
            alignment: self.alignment,
        }
    }

    /// Checks, on the host, that an ICResp answers this ICReq.
    ///
    /// # Errors
    /// The controller enables a digest that the host does not want.
    pub const fn check(&self, answer: &IcResp) -> Result<(), Fatal> {
        let is_unwanted =
            answer.header_digest && !self.header_digest || answer.data_digest && !self.data_digest;
        if is_unwanted { Err(Fatal::field(field::DGST)) } else { Ok(()) }
    }
}

impl IcResp {
    /// The format of the PDUs that the host sends after this answer.
    pub const fn h2c_format(&self) -> Format {
        Format { header_digest: self.header_digest, data_digest: self.data_digest, alignment: self.alignment }
    }
}

#[cfg(test)]
mod tests;
