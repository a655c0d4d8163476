//! The headers of PDUs: what they contain, and how they are written. NVMe TCP Transport 1.0 §3.6. Any context.

use aryk_nvme::spec::entry::{CompletionEntry, SubmissionEntry};
use zerocopy::{FromBytes, IntoBytes};

use super::digest::{self, DIGEST_LEN};
use super::fatal::{Fatal, FatalStatus};

/// Bytes of the longest header, with its digest and the padding before the data: a command with a digest (76 bytes) and an
/// alignment of 72 bytes.
pub const HEADER_MAX: usize = 144;
/// The smallest MAXH2CDATA that a controller may report.
pub const MAXH2CDATA_MIN: u32 = 4096;
/// The largest value of HPDA and CPDA, which stands for an alignment of 128 bytes.
const PDA_MAX: u8 = 31;
/// Bytes of the longest data of a TermReq: the header that was wrong.
pub const TERM_DATA_MAX: u32 = 128;

/// Offsets of fields in headers, as [`Fatal::information`] names them.
pub(super) mod field {
    pub(crate) const KIND: u32 = 0;
    pub(crate) const FLAGS: u32 = 1;
    pub(crate) const HLEN: u32 = 2;
    pub(crate) const PDO: u32 = 3;
    pub(crate) const PLEN: u32 = 4;
    pub(crate) const PFV: u32 = 8;
    pub(crate) const CCCID: u32 = 8;
    pub(crate) const PDA: u32 = 10;
    pub(crate) const TTAG: u32 = 10;
    pub(crate) const DGST: u32 = 11;
    pub(crate) const MAXH2CDATA: u32 = 12;
    pub(crate) const DATAO: u32 = 12;
    pub(crate) const DATAL: u32 = 16;
}

/// Bits of FLAGS.
pub(super) mod flag {
    pub(crate) const HDGST: u8 = 1;
    pub(crate) const DDGST: u8 = 2;
    pub(crate) const LAST: u8 = 4;
    pub(crate) const SUCCESS: u8 = 8;
}

/// The two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The host, which connects.
    Host,
    /// The controller, which listens.
    Controller,
}

/// PDU-Type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names are the specification's")]
pub enum Kind {
    IcReq = 0,
    IcResp = 1,
    H2cTermReq = 2,
    C2hTermReq = 3,
    CapsuleCmd = 4,
    CapsuleResp = 5,
    H2cData = 6,
    C2hData = 7,
    R2t = 9,
}

impl Kind {
    pub(super) const fn decode(byte: u8) -> Option<Self> {
        Some(match byte {
            0 => Self::IcReq,
            1 => Self::IcResp,
            2 => Self::H2cTermReq,
            3 => Self::C2hTermReq,
            4 => Self::CapsuleCmd,
            5 => Self::CapsuleResp,
            6 => Self::H2cData,
            7 => Self::C2hData,
            9 => Self::R2t,
            _ => return None,
        })
    }

    /// The side that sends such PDUs.
    pub const fn sender(self) -> Side {
        match self {
            Self::IcReq | Self::H2cTermReq | Self::CapsuleCmd | Self::H2cData => Side::Host,
            Self::IcResp | Self::C2hTermReq | Self::CapsuleResp | Self::C2hData | Self::R2t => {
                Side::Controller
            }
        }
    }

    /// HLEN.
    pub const fn header_len(self) -> usize {
        match self {
            Self::IcReq | Self::IcResp => 128,
            Self::CapsuleCmd => 72,
            _ => 24,
        }
    }

    /// Whether the PDU opens a connection.
    pub(super) const fn is_initial(self) -> bool {
        matches!(self, Self::IcReq | Self::IcResp)
    }

    /// Whether the PDU ends a connection.
    pub(super) const fn is_terminal(self) -> bool {
        matches!(self, Self::H2cTermReq | Self::C2hTermReq)
    }

    /// Whether data may follow the header.
    pub(super) const fn may_have_data(self) -> bool {
        matches!(self, Self::CapsuleCmd | Self::H2cData | Self::C2hData) || self.is_terminal()
    }

    /// Whether the PDU has digests where the connection has.
    const fn has_digests(self) -> bool {
        !self.is_initial() && !self.is_terminal()
    }
}

/// What both sides have settled about the PDUs of one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Format {
    /// HDGST_ENABLE.
    pub header_digest: bool,
    /// DDGST_ENABLE.
    pub data_digest: bool,
    /// HPDA or CPDA of the receiver, at most 31: data begins at a multiple of four times this number plus one.
    pub alignment: u8,
}

impl Format {
    /// Bytes of which PDO is a multiple.
    const fn alignment_bytes(&self) -> usize {
        (self.alignment as usize + 1) * 4
    }

    pub(super) const fn is_aligned(&self, pdo: u8) -> bool {
        (pdo as usize).is_multiple_of(self.alignment_bytes())
    }

    /// The bytes of a PDU's header with its digest.
    pub(super) const fn header_end(&self, kind: Kind) -> usize {
        kind.header_len() + if self.has_header_digest(kind) { DIGEST_LEN } else { 0 }
    }

    pub(super) const fn has_header_digest(&self, kind: Kind) -> bool {
        self.header_digest && kind.has_digests()
    }

    pub(super) const fn has_data_digest(&self, kind: Kind) -> bool {
        self.data_digest && kind.has_digests()
    }

    /// FLAGS that concern digests.
    pub(super) const fn flags(&self, kind: Kind, has_data: bool) -> u8 {
        let header = if self.has_header_digest(kind) { flag::HDGST } else { 0 };
        let data = if has_data && self.has_data_digest(kind) { flag::DDGST } else { 0 };
        header | data
    }
}

/// ICReq: what the host wants. NVMe TCP Transport 1.0 §3.6.2.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcReq {
    /// HPDA: the alignment of data that the controller sends ([`Format::alignment`]).
    pub alignment: u8,
    /// The host wants header digests.
    pub header_digest: bool,
    /// The host wants data digests.
    pub data_digest: bool,
    /// MAXR2T: R2Ts, less one, that may be outstanding for one command.
    pub max_r2t: u32,
}

/// ICResp: what the controller allows. NVMe TCP Transport 1.0 §3.6.2.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcResp {
    /// CPDA: the alignment of data that the host sends ([`Format::alignment`]).
    pub alignment: u8,
    /// PDUs of both directions have header digests.
    pub header_digest: bool,
    /// PDUs of both directions have data digests.
    pub data_digest: bool,
    /// MAXH2CDATA: the most data of one H2CData PDU, at least [`MAXH2CDATA_MIN`] and a multiple of 4.
    pub h2c_data_max: u32,
}

/// H2CData: data that an R2T requested. NVMe TCP Transport 1.0 §3.6.2.8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct H2cData {
    /// CCCID: the command.
    pub cid: u16,
    /// TTAG: the R2T.
    pub tag: u16,
    /// DATAO: offset in the command's data.
    pub offset: u32,
    /// DATAL.
    pub len: u32,
    /// LAST_PDU: the data of the R2T ends with this PDU.
    pub is_last: bool,
}

/// C2HData: data of a command. NVMe TCP Transport 1.0 §3.6.2.9.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct C2hData {
    /// CCCID: the command.
    pub cid: u16,
    /// DATAO: offset in the command's data.
    pub offset: u32,
    /// DATAL.
    pub len: u32,
    /// LAST_PDU: the data of the command ends with this PDU.
    pub is_last: bool,
    /// SUCCESS: the command has succeeded, and no CapsuleResp follows.
    pub is_success: bool,
}

/// R2T: the controller requests data of a command. NVMe TCP Transport 1.0 §3.6.2.10.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct R2t {
    /// CCCID: the command.
    pub cid: u16,
    /// TTAG: the controller's number for the request.
    pub tag: u16,
    /// R2TO: offset in the command's data.
    pub offset: u32,
    /// R2TL.
    pub len: u32,
}

/// A PDU without its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Header {
    /// ICReq.
    IcReq(IcReq),
    /// ICResp.
    IcResp(IcResp),
    /// H2CTermReq or C2HTermReq.
    TermReq {
        /// The side that ends the connection.
        from: Side,
        /// Why.
        fatal: Fatal,
        /// Bytes of data: the header that was wrong, at most [`TERM_DATA_MAX`].
        data_len: u32,
    },
    /// CapsuleCmd.
    Command {
        /// The command.
        entry: SubmissionEntry,
        /// Bytes of in-capsule data.
        data_len: u32,
    },
    /// CapsuleResp.
    Response(CompletionEntry),
    /// H2CData.
    H2cData(H2cData),
    /// C2HData.
    C2hData(C2hData),
    /// R2T.
    R2t(R2t),
}

impl Header {
    /// The type.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::IcReq(_) => Kind::IcReq,
            Self::IcResp(_) => Kind::IcResp,
            Self::TermReq { from: Side::Host, .. } => Kind::H2cTermReq,
            Self::TermReq { from: Side::Controller, .. } => Kind::C2hTermReq,
            Self::Command { .. } => Kind::CapsuleCmd,
            Self::Response(_) => Kind::CapsuleResp,
            Self::H2cData(_) => Kind::H2cData,
            Self::C2hData(_) => Kind::C2hData,
            Self::R2t(_) => Kind::R2t,
        }
    }

    /// Bytes of data that follow the header.
    pub const fn data_len(&self) -> u32 {
        match self {
            Self::Command { data_len, .. } | Self::TermReq { data_len, .. } => *data_len,
            Self::H2cData(data) => data.len,
            Self::C2hData(data) => data.len,
            _ => 0,
        }
    }

    /// Writes the header to the start of `out`, with its digest and the padding before the data. Returns the number of bytes, at
    /// most [`HEADER_MAX`]. The data comes next and then, if the format has data digests and there is data, its digest.
    ///
    /// # Panics
    /// `out` is too short, the PDU would have 4 GiB or more, or the format's alignment is above 31.
    pub fn encode(&self, format: &Format, out: &mut [u8]) -> usize {
        assert!(format.alignment <= PDA_MAX, "HPDA and CPDA are at most 31");
        let (kind, data_len) = (self.kind(), self.data_len());
        let (header_len, header_end) = (kind.header_len(), format.header_end(kind));
        // TermReqs have no PDO: their data follows the header.
        let start = if data_len == 0 || kind.is_terminal() {
            header_end
        } else {
            header_end.next_multiple_of(format.alignment_bytes())
        };
        let out = &mut out[..start];
        out.fill(0);
        let has_data = data_len != 0;
        let digest = if has_data && format.has_data_digest(kind) { DIGEST_LEN } else { 0 };
        let plen = u32::try_from(start + digest).ok().and_then(|len| len.checked_add(data_len));
        out[0] = kind as u8;
        out[1] = format.flags(kind, has_data) | self.own_flags();
        out[2] = header_len as u8;
        out[3] = if has_data && !kind.is_terminal() { start as u8 } else { 0 };
        out[4..8].copy_from_slice(&plen.expect("a PDU is shorter than 4 GiB").to_le_bytes());
        self.encode_fields(&mut out[..header_len]);
        if format.has_header_digest(kind) {
            let digest = digest::of_header(&out[..header_len]);
            out[header_len..header_end].copy_from_slice(&digest.to_le_bytes());
        }
        start
    }

    const fn own_flags(&self) -> u8 {
        match self {
            Self::H2cData(data) if data.is_last => flag::LAST,
            Self::C2hData(data) => {
                let last = if data.is_last { flag::LAST } else { 0 };
                last | if data.is_success { flag::SUCCESS } else { 0 }
            }
            _ => 0,
        }
    }

    fn encode_fields(&self, out: &mut [u8]) {
        match *self {
            Self::IcReq(request) => {
                (out[10], out[11]) = (request.alignment, dgst(request.header_digest, request.data_digest));
                put(out, 12, request.max_r2t);
            }
            Self::IcResp(response) => {
                (out[10], out[11]) = (response.alignment, dgst(response.header_digest, response.data_digest));
                put(out, 12, response.h2c_data_max);
            }
            Self::TermReq { fatal, .. } => {
                out[8..10].copy_from_slice(&fatal.status.0.to_le_bytes());
                out[10..14].copy_from_slice(&fatal.information.to_le_bytes());
            }
            Self::Command { entry, .. } => out[8..72].copy_from_slice(entry.as_bytes()),
            Self::Response(entry) => out[8..24].copy_from_slice(entry.as_bytes()),
            Self::H2cData(H2cData { cid, tag, offset, len, .. })
            | Self::R2t(R2t { cid, tag, offset, len }) => {
                put(out, 8, u32::from(cid) | u32::from(tag) << 16);
                put(out, 12, offset);
                put(out, 16, len);
            }
            Self::C2hData(C2hData { cid, offset, len, .. }) => {
                put(out, 8, cid.into());
                put(out, 12, offset);
                put(out, 16, len);
            }
        }
    }

    /// Reads a header of the right length, whose FLAGS, HLEN, PDO and PLEN have been checked; PLEN leaves `data_len` bytes of
    /// data.
    pub(super) fn decode(kind: Kind, bytes: &[u8], data_len: u32) -> Result<Self, Fatal> {
        let (cid, tag) = (word(bytes, 8) as u16, (word(bytes, 8) >> 16) as u16);
        let (offset, len) = (word(bytes, 12), word(bytes, 16));
        let (is_last, is_success) = (bytes[1] & flag::LAST != 0, bytes[1] & flag::SUCCESS != 0);
        Ok(match kind {
            Kind::IcReq => {
                let (alignment, header_digest, data_digest) = initial(bytes)?;
                Self::IcReq(IcReq { alignment, header_digest, data_digest, max_r2t: word(bytes, 12) })
            }
            Kind::IcResp => {
                let (alignment, header_digest, data_digest) = initial(bytes)?;
                let h2c_data_max = word(bytes, 12);
                if h2c_data_max < MAXH2CDATA_MIN || !h2c_data_max.is_multiple_of(4) {
                    return Err(Fatal::field(field::MAXH2CDATA));
                }
                Self::IcResp(IcResp { alignment, header_digest, data_digest, h2c_data_max })
            }
            Kind::H2cTermReq | Kind::C2hTermReq => {
                let status = FatalStatus(u16::from_le_bytes([bytes[8], bytes[9]]));
                let information = word(bytes, 10);
                Self::TermReq { from: kind.sender(), fatal: Fatal { status, information }, data_len }
            }
            Kind::CapsuleCmd => {
                let entry = SubmissionEntry::read_from_bytes(&bytes[8..72]).expect("64 bytes");
                Self::Command { entry, data_len }
            }
            Kind::CapsuleResp => {
                Self::Response(CompletionEntry::read_from_bytes(&bytes[8..24]).expect("16 bytes"))
            }
            Kind::H2cData => {
                check_range(offset, len, Some(data_len))?;
                Self::H2cData(H2cData { cid, tag, offset, len, is_last })
            }
            Kind::C2hData => {
                check_range(offset, len, Some(data_len))?;
                if is_success && !is_last {
                    return Err(Fatal::field(field::FLAGS));
                }
                Self::C2hData(C2hData { cid, offset, len, is_last, is_success })
            }
            Kind::R2t => {
                check_range(offset, len, None)?;
                Self::R2t(R2t { cid, tag, offset, len })
            }
        })
    }
}

/// PFV, PDA and DGST of an ICReq or ICResp.
const fn initial(bytes: &[u8]) -> Result<(u8, bool, bool), Fatal> {
    if bytes[8] != 0 || bytes[9] != 0 {
        return Err(Fatal::unsupported(field::PFV));
    }
    if bytes[10] > PDA_MAX {
        return Err(Fatal::field(field::PDA));
    }
    Ok((bytes[10], bytes[11] & 1 != 0, bytes[11] & 2 != 0))
}

/// Checks an offset and a length of data: whole dwords, some data, below 4 GiB, and as much as the PDU has.
fn check_range(offset: u32, len: u32, data_len: Option<u32>) -> Result<(), Fatal> {
    if !offset.is_multiple_of(4) || offset.checked_add(len).is_none() {
        return Err(Fatal::field(field::DATAO));
    }
    if len == 0 || !len.is_multiple_of(4) || data_len.is_some_and(|data_len| data_len != len) {
        return Err(Fatal::field(field::DATAL));
    }
    Ok(())
}

const fn dgst(header: bool, data: bool) -> u8 {
    header as u8 | (data as u8) << 1
}

fn put(out: &mut [u8], at: usize, value: u32) {
    out[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
