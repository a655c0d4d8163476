//! The protocol's messages: header, payloads, and the file descriptors of each request.
//!
//! Pure: bytes in, [`Message`]s out, and replies as bytes. Any context. Invalid bytes from a front-end cause an error, never a
//! panic. Layouts and numbers: "Vhost-user Protocol", sections "Message Specification", "Front-end message types" and "Back-end
//! message types". All integers are in native byte order.

use crate::Error;
use std::fmt;
use std::ops::RangeInclusive;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// The maximum length of a payload in bytes. The longest useful payload, a configuration space, has 268.
pub const PAYLOAD_MAX: usize = 4096;
/// The maximum number of file descriptors of one message: as many as a memory table has regions.
pub const FDS_MAX: usize = 8;
/// The maximum size of a configuration space in bytes.
pub const CONFIG_MAX: usize = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
const HEADER_LEN: usize = size_of::<Header>();

/// Number of a request or reply. Any number is possible; it is displayed as the specification's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub u32);

/// Requests that are always answered, and whose replies have no field for a failure.
pub(crate) const ALWAYS_ANSWERED: [Code; 3] = [Code(11), Code(31), Code(40)];

/// The front-end's requests by number, without their common prefix.
const NAMES: [&str; 41] = [
    "NONE",
    "GET_FEATURES",
    "SET_FEATURES",
    "SET_OWNER",
    "RESET_OWNER",
    "SET_MEM_TABLE",
    "SET_LOG_BASE",
    "SET_LOG_FD",
    "SET_VRING_NUM",
    "SET_VRING_ADDR",
    "SET_VRING_BASE",
    "GET_VRING_BASE",
    "SET_VRING_KICK",
    "SET_VRING_CALL",
    "SET_VRING_ERR",
    "GET_PROTOCOL_FEATURES",
    "SET_PROTOCOL_FEATURES",
    "GET_QUEUE_NUM",
    "SET_VRING_ENABLE",
    "SEND_RARP",
    "NET_SET_MTU",
    "SET_BACKEND_REQ_FD",
    "IOTLB_MSG",
    "SET_VRING_ENDIAN",
    "GET_CONFIG",
    "SET_CONFIG",
    "CREATE_CRYPTO_SESSION",
    "CLOSE_CRYPTO_SESSION",
    "POSTCOPY_ADVISE",
    "POSTCOPY_LISTEN",
    "POSTCOPY_END",
    "GET_INFLIGHT_FD",
    "SET_INFLIGHT_FD",
    "GPU_SET_SOCKET",
    "RESET_DEVICE",
    "VRING_KICK",
    "GET_MAX_MEM_SLOTS",
    "ADD_MEM_REG",
    "REM_MEM_REG",
    "SET_STATUS",
    "GET_STATUS",
];

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.get(self.0 as usize) {
            Some(name) => f.write_str(name),
            None => write!(f, "request {}", self.0),
        }
    }
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    request: u32,
    flags: u32,
    size: u32,
}

/// "A vring state description".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringState {
    /// Index of the queue.
    pub index: u32,
    /// A size, an index into the available ring, or a flag.
    pub num: u32,
}

/// "A vring address description".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct VringAddr {
    /// Index of the queue.
    pub index: u32,
    /// Bit 0: writes to the used ring must be logged.
    pub flags: u32,
    /// The descriptor table, as an address of the front-end's process, as are the other two.
    pub desc: u64,
    /// The used ring.
    pub used: u64,
    /// The available ring.
    pub avail: u64,
    /// Guest address at which writes to the used ring are logged.
    pub log: u64,
}

/// A memory region, of "Memory regions description" and "Single memory region description".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionDesc {
    /// Guest-physical address.
    pub guest_addr: u64,
    /// Size in bytes.
    pub size: u64,
    /// Address in the front-end's process.
    pub user_addr: u64,
    /// Offset of the region's first byte in its file.
    pub mmap_offset: u64,
}

/// "Log description".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LogDesc {
    /// Size of the log in bytes.
    pub size: u64,
    /// Offset of the log's first byte in the file.
    pub offset: u64,
}

/// "Inflight description".
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct InflightDesc {
    /// Size of the region in bytes.
    pub size: u64,
    /// Offset of the region's first byte in the file.
    pub offset: u64,
    /// Number of queues that have a part of the region.
    pub num_queues: u16,
    /// Descriptors of each queue.
    pub queue_size: u16,
    /// The structure's padding as a C compiler lays it out. Some front-ends send these bytes, others do not.
    pub padding: [u8; 4],
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ConfigHeader {
    offset: u32,
    size: u32,
    flags: u32,
}

/// The payload of SET_VRING_KICK, CALL and ERR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringFd {
    /// Index of the queue: bits 0–7.
    pub index: u8,
    /// Whether an fd comes with the message: bit 8 is clear.
    pub has_fd: bool,
}

/// Kinds of file descriptors that messages carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FdKind {
    /// An eventfd.
    Event,
    /// A memory file: memfd, tmpfs or hugetlbfs.
    Memory,
    /// A UNIX stream socket.
    Socket,
}

impl fmt::Display for FdKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Event => "an eventfd",
            Self::Memory => "a memory file (memfd, tmpfs or hugetlbfs)",
            Self::Socket => "a UNIX stream socket",
        })
    }
}

/// A request of the front-end; the names are the specification's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is the specification's message of that name")]
pub enum Request {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<RegionDesc>),
    SetVringNum(VringState),
    SetVringAddr(VringAddr),
    SetVringBase(VringState),
    GetVringBase(VringState),
    SetVringKick(VringFd),
    SetVringCall(VringFd),
    SetVringErr(VringFd),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable(VringState),
    SetBackendReqFd,
    GetConfig {
        offset: u32,
        size: u32,
        flags: u32,
    },
    SetConfig {
        offset: u32,
        data: Vec<u8>,
    },
    GetMaxMemSlots,
    AddMemReg(RegionDesc),
    RemMemReg(RegionDesc),
    SetLogBase(LogDesc),
    SetLogFd,
    GetInflightFd {
        desc: InflightDesc,
        /// Whether the request includes the structure's padding; then the reply includes it too.
        padded: bool,
    },
    SetInflightFd(InflightDesc),
    ResetDevice,
    SetStatus(u64),
    GetStatus,
}

/// A request, and whether it needs a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The number of the request.
    pub code: Code,
    /// Whether the bit NEED_REPLY is set.
    pub need_reply: bool,
    /// The request.
    pub request: Request,
}

impl Request {
    /// Reads the payload of the request numbered `code`.
    ///
    /// # Errors
    /// [`Error::BadSize`], [`Error::BadPayload`], [`Error::UnknownRequest`].
    pub fn parse(code: Code, payload: &[u8]) -> Result<Self, Error> {
        let request = match code.0 {
            1 => empty(payload, Self::GetFeatures),
            2 => exact(payload).map(Self::SetFeatures),
            3 => empty(payload, Self::SetOwner),
            4 => empty(payload, Self::ResetOwner),
            5 => mem_table(code, payload)?,
            6 => exact(payload).map(Self::SetLogBase),
            7 => empty(payload, Self::SetLogFd),
            8 => exact(payload).map(Self::SetVringNum),
            9 => exact(payload).map(Self::SetVringAddr),
            10 => exact(payload).map(Self::SetVringBase),
            11 => exact(payload).map(Self::GetVringBase),
            12 => exact(payload).map(vring_fd).map(Self::SetVringKick),
            13 => exact(payload).map(vring_fd).map(Self::SetVringCall),
            14 => exact(payload).map(vring_fd).map(Self::SetVringErr),
            15 => empty(payload, Self::GetProtocolFeatures),
            16 => exact(payload).map(Self::SetProtocolFeatures),
            17 => empty(payload, Self::GetQueueNum),
            18 => exact(payload).map(Self::SetVringEnable),
            21 => empty(payload, Self::SetBackendReqFd),
            24 | 25 => config(code, payload)?,
            31 => {
                inflight(payload).map(|desc| Self::GetInflightFd { desc, padded: payload.len() > UNPADDED })
            }
            32 => inflight(payload).map(Self::SetInflightFd),
            34 => empty(payload, Self::ResetDevice),
            36 => empty(payload, Self::GetMaxMemSlots),
            37 => single_region(payload).map(Self::AddMemReg),
            38 => single_region(payload).map(Self::RemMemReg),
            39 => exact(payload).map(Self::SetStatus),
            40 => empty(payload, Self::GetStatus),
            _ => return Err(Error::UnknownRequest(code)),
        };
        request.ok_or(Error::BadSize { code, size: payload.len() })
    }

    /// The number of file descriptors of this request, and their kind.
    pub fn fds(&self) -> (RangeInclusive<usize>, FdKind) {
        match self {
            Self::SetVringKick(v) | Self::SetVringCall(v) | Self::SetVringErr(v) => {
                let n = usize::from(v.has_fd);
                (n..=n, FdKind::Event)
            }
            Self::SetMemTable(regions) => (regions.len()..=regions.len(), FdKind::Memory),
            Self::AddMemReg(_) => (1..=1, FdKind::Memory),
            // "VHOST_USER_REM_MEM_REG": some front-ends send a descriptor, which must be closed.
            Self::RemMemReg(_) => (0..=1, FdKind::Memory),
            Self::SetBackendReqFd => (1..=1, FdKind::Socket),
            Self::SetLogBase(_) | Self::SetInflightFd(_) => (1..=1, FdKind::Memory),
            Self::SetLogFd => (0..=1, FdKind::Event),
            _ => (0..=0, FdKind::Event),
        }
    }
}

fn empty(payload: &[u8], request: Request) -> Option<Request> {
    payload.is_empty().then_some(request)
}

fn exact<T: FromBytes>(payload: &[u8]) -> Option<T> {
    T::read_from_bytes(payload).ok()
}

fn vring_fd(bits: u64) -> VringFd {
    VringFd { index: bits as u8, has_fd: bits & (1 << 8) == 0 }
}

/// "Memory regions description": a count, padding, and room for 8 regions, of which unused ones may be omitted.
fn mem_table(code: Code, payload: &[u8]) -> Result<Option<Request>, Error> {
    let Ok(([count, _padding], mut rest)) = <[u32; 2]>::read_from_prefix(payload) else {
        return Ok(None);
    };
    if count as usize > FDS_MAX {
        return Err(Error::BadPayload { code, what: "more than 8 memory regions" });
    }
    if rest.len() > FDS_MAX * size_of::<RegionDesc>() {
        return Ok(None);
    }
    let mut regions = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let Ok((region, tail)) = RegionDesc::read_from_prefix(rest) else { return Ok(None) };
        regions.push(region);
        rest = tail;
    }
    Ok(Some(Request::SetMemTable(regions)))
}

/// "Single memory region description": 64 bits of padding, then the region.
fn single_region(payload: &[u8]) -> Option<RegionDesc> {
    exact(payload.get(8..)?)
}

/// Length of [`InflightDesc`] without its padding, in bytes.
const UNPADDED: usize = size_of::<InflightDesc>() - 4;

/// "Inflight description", with or without the structure's padding.
fn inflight(payload: &[u8]) -> Option<InflightDesc> {
    let mut desc = InflightDesc::new_zeroed();
    let known = payload.len() == UNPADDED || payload.len() == size_of::<InflightDesc>();
    desc.as_mut_bytes().get_mut(..payload.len()).filter(|_| known)?.copy_from_slice(payload);
    desc.padding = [0; 4];
    Some(desc)
}

/// "Virtio device config space".
fn config(code: Code, payload: &[u8]) -> Result<Option<Request>, Error> {
    let Ok((header, data)) = ConfigHeader::read_from_prefix(payload) else { return Ok(None) };
    let ConfigHeader { offset, size, flags } = header;
    if u64::from(offset) + u64::from(size) > CONFIG_MAX as u64 {
        return Err(Error::BadPayload { code, what: "a configuration space of more than 256 bytes" });
    }
    if code.0 == 24 {
        // Some front-ends include space for the answer, others do not; its contents are ignored.
        return Ok(Some(Request::GetConfig { offset, size, flags }));
    }
    // The flags are ignored too: 1 means "live migration" in the specification, and "writable field" in the `vhost` crate's
    // front-ends. The device checks which bytes are writable.
    let data = data.get(..size as usize);
    Ok(data.map(|data| Request::SetConfig { offset, data: data.to_vec() }))
}

/// The bytes of a reply.
pub fn reply(code: Code, payload: &[u8]) -> Vec<u8> {
    encode(code, VERSION | REPLY, payload)
}

/// A reply of one integer: a value; or 0 for success and another number for failure.
pub fn reply_u64(code: Code, value: u64) -> Vec<u8> {
    reply(code, value.as_bytes())
}

/// The reply to GET_CONFIG: the request's header again, and the bytes.
pub fn reply_config(offset: u32, flags: u32, data: &[u8]) -> Vec<u8> {
    let header = ConfigHeader { offset, size: data.len() as u32, flags };
    reply(Code(24), &[header.as_bytes(), data].concat())
}

/// The reply to SET_LOG_BASE: the request's payload. The specification does not define the reply; the `vhost` crate's front-ends
/// expect this one, and QEMU accepts any.
pub fn reply_log(desc: &LogDesc) -> Vec<u8> {
    reply(Code(6), desc.as_bytes())
}

/// The reply to GET_INFLIGHT_FD, laid out as the request was.
pub fn reply_inflight(desc: &InflightDesc, padded: bool) -> Vec<u8> {
    let bytes = desc.as_bytes();
    reply(Code(31), if padded { bytes } else { &bytes[..UNPADDED] })
}

/// The back-end's own request CONFIG_CHANGE_MSG, for the channel that SET_BACKEND_REQ_FD passed. It requests no reply.
pub fn config_change() -> Vec<u8> {
    encode(Code(2), VERSION, &[])
}

fn encode(code: Code, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header { request: code.0, flags, size: payload.len() as u32 };
    [header.as_bytes(), payload].concat()
}

/// Splits a byte stream into messages. The decoder never reads a byte beyond the current message, since file descriptors belong
/// to the message with whose bytes they arrived. After an error the decoder is unusable.
#[derive(Debug)]
pub struct Decoder {
    buf: Box<[u8]>,
    have: usize,
    /// Length of the current message in bytes, as far as it is known.
    want: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self { buf: vec![0; HEADER_LEN + PAYLOAD_MAX].into(), have: 0, want: HEADER_LEN }
    }
}

impl Decoder {
    /// The buffer for the next bytes; never empty.
    pub fn space(&mut self) -> &mut [u8] {
        &mut self.buf[self.have..self.want]
    }

    /// Bytes of an unfinished message.
    pub const fn pending(&self) -> usize {
        self.have
    }

    /// Accepts `n` bytes that were written to [`Decoder::space`]; returns the message that they complete.
    ///
    /// # Errors
    /// As [`Request::parse`]; [`Error::BadVersion`], [`Error::TooLong`].
    ///
    /// # Panics
    /// If `n` exceeds the length of the space.
    pub fn filled(&mut self, n: usize) -> Result<Option<Message>, Error> {
        assert!(n <= self.want - self.have, "{n} bytes in a space of {}", self.want - self.have);
        self.have += n;
        if self.have < HEADER_LEN {
            return Ok(None);
        }
        let header =
            Header::read_from_bytes(&self.buf[..HEADER_LEN]).expect("the buffer holds a whole header");
        let code = Code(header.request);
        if header.flags & (VERSION_MASK | REPLY) != VERSION {
            return Err(Error::BadVersion { code, flags: header.flags });
        }
        if header.size as usize > PAYLOAD_MAX {
            return Err(Error::TooLong { code, size: header.size });
        }
        self.want = HEADER_LEN + header.size as usize;
        if self.have < self.want {
            return Ok(None);
        }
        let request = Request::parse(code, &self.buf[HEADER_LEN..self.want])?;
        (self.have, self.want) = (0, HEADER_LEN);
        Ok(Some(Message { code, need_reply: header.flags & NEED_REPLY != 0, request }))
    }
}

#[cfg(test)]
mod tests;
