//! Messages of the FUSE protocol, as `/dev/cuse` uses it. Linux, include/uapi/linux/fuse.h, version 7.16 and later. Pure.
//!
//! The kernel sends each request as one message: a header, a structure by opcode, and for an ioctl the bytes of its caller. All
//! numbers have the host's byte order.

use rustix::io::Errno;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::request::{Caller, DATA_MAX};

/// The major version of the protocol.
pub(crate) const MAJOR: u32 = 7;
/// The minor version that this crate speaks.
pub(crate) const MINOR: u32 = 31;
/// The oldest minor version whose [`Iovec`]s do not depend on the word size.
pub(crate) const MINOR_MIN: u32 = 16;
/// The length of the longest request that this crate serves: an ioctl with its structure and data. The kernel refuses buffers of
/// less than 8 KiB, and answers longer requests by itself.
pub(crate) const BUFFER: usize = size_of::<InHeader>() + size_of::<IoctlIn>() + STRUCTURE_MAX + DATA_MAX;
/// The longest structure of an ioctl.
const STRUCTURE_MAX: usize = 80;
/// The kernel's least value of the longest READ and WRITE; this crate serves neither.
pub(crate) const TRANSFER: u32 = 4096;

const FORGET: u32 = 2;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INTERRUPT: u32 = 36;
const IOCTL: u32 = 39;
const BATCH_FORGET: u32 = 42;
const CUSE_INIT: u32 = 4096;

/// `CUSE_UNRESTRICTED_IOCTL`: the server asks for the caller's memory by retries.
pub(crate) const UNRESTRICTED: u32 = 1;
/// `FOPEN_DIRECT_IO` and `FOPEN_NONSEEKABLE`.
const OPEN_FLAGS: u32 = 1 | 1 << 2;
/// `FUSE_IOCTL_RETRY`.
const RETRY: u32 = 1 << 2;

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct InHeader {
    len: u32,
    opcode: u32,
    unique: u64,
    nodeid: u64,
    uid: u32,
    gid: u32,
    pid: u32,
    extensions: u16,
    padding: u16,
}

#[derive(Clone, Copy, Debug, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct OutHeader {
    len: u32,
    error: i32,
    unique: u64,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct InitIn {
    major: u32,
    minor: u32,
    unused: u32,
    flags: u32,
}

#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct InitOut {
    major: u32,
    minor: u32,
    unused: u32,
    flags: u32,
    max_read: u32,
    max_write: u32,
    /// Device numbers; 0 lets the kernel choose.
    dev_major: u32,
    dev_minor: u32,
    spare: [u32; 10],
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct IoctlIn {
    fh: u64,
    flags: u32,
    command: u32,
    argument: u64,
    in_size: u32,
    out_size: u32,
}

#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct IoctlOut {
    result: i32,
    flags: u32,
    in_iovs: u32,
    out_iovs: u32,
}

/// A range of the caller's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Iovec {
    pub base: u64,
    pub len: u64,
}

/// A request of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message<'a> {
    /// The request's number, which the reply repeats.
    pub unique: u64,
    pub caller: Caller,
    pub body: Body<'a>,
}

/// The kernel's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body<'a> {
    /// The handshake.
    Init {
        major: u32,
        minor: u32,
        flags: u32,
    },
    Open,
    /// RELEASE and FLUSH: an empty reply.
    Close,
    /// READ and WRITE, which an NVMe device does not have.
    ReadWrite,
    /// The caller of this request received a signal. No reply.
    Interrupt(u64),
    /// FORGET, in both forms. No reply.
    Forget,
    Ioctl(Ioctl<'a>),
    /// Any other request.
    Unknown,
}

/// One round of an ioctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ioctl<'a> {
    pub command: u32,
    pub argument: u64,
    /// The bytes that the last round asked for.
    pub input: &'a [u8],
    /// The bytes that the reply may return to the caller's memory.
    pub room: u32,
}

/// A message that is no request; with its number if that could be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed(pub Option<u64>);

impl<'a> Message<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let (header, rest) = InHeader::read_from_prefix(bytes).map_err(|_| Malformed(None))?;
        let malformed = Malformed(Some(header.unique));
        if header.len as usize != bytes.len() {
            return Err(malformed);
        }
        let body = match header.opcode {
            CUSE_INIT => {
                let (init, _) = InitIn::read_from_prefix(rest).map_err(|_| malformed)?;
                Body::Init { major: init.major, minor: init.minor, flags: init.flags }
            }
            OPEN => Body::Open,
            RELEASE | FLUSH => Body::Close,
            READ | WRITE => Body::ReadWrite,
            INTERRUPT => Body::Interrupt(u64::read_from_prefix(rest).map_err(|_| Malformed(None))?.0),
            FORGET | BATCH_FORGET => Body::Forget,
            IOCTL => {
                let (ioctl, input) = IoctlIn::read_from_prefix(rest).map_err(|_| malformed)?;
                if ioctl.in_size as usize != input.len() {
                    return Err(malformed);
                }
                let IoctlIn { command, argument, out_size: room, .. } = ioctl;
                Body::Ioctl(Ioctl { command, argument, input, room })
            }
            _ => Body::Unknown,
        };
        let caller = Caller { uid: header.uid, gid: header.gid, pid: header.pid };
        Ok(Self { unique: header.unique, caller, body })
    }
}

/// A reply without error.
fn reply(unique: u64, parts: &[&[u8]]) -> Vec<u8> {
    let len = size_of::<OutHeader>() + parts.iter().map(|part| part.len()).sum::<usize>();
    let mut bytes = Vec::with_capacity(len);
    bytes.extend_from_slice(OutHeader { len: len as u32, error: 0, unique }.as_bytes());
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
    bytes
}

/// The reply that makes the caller's system call fail.
pub(crate) fn fail(unique: u64, errno: Errno) -> Vec<u8> {
    let len = size_of::<OutHeader>() as u32;
    OutHeader { len, error: -errno.raw_os_error(), unique }.as_bytes().to_vec()
}

/// The reply to a handshake: creates `/dev/NAME`.
pub(crate) fn init(unique: u64, minor: u32, name: &str) -> Vec<u8> {
    let (minor, flags) = (minor.min(MINOR), UNRESTRICTED);
    let out =
        InitOut { major: MAJOR, minor, flags, max_read: TRANSFER, max_write: TRANSFER, ..InitOut::default() };
    reply(unique, &[out.as_bytes(), b"DEVNAME=", name.as_bytes(), b"\0"])
}

/// The reply to OPEN: file handle 0, as no file has a state of its own.
pub(crate) fn opened(unique: u64) -> Vec<u8> {
    reply(unique, &[&0_u64.to_ne_bytes(), &OPEN_FLAGS.to_ne_bytes(), &0_u32.to_ne_bytes()])
}

/// The reply to RELEASE and FLUSH.
pub(crate) fn done(unique: u64) -> Vec<u8> {
    reply(unique, &[])
}

/// The last reply to an ioctl: its result, and the bytes for the caller's memory.
pub(crate) fn returned(unique: u64, result: i32, output: &[&[u8]]) -> Vec<u8> {
    let out = IoctlOut { result, ..IoctlOut::default() };
    let mut parts = vec![out.as_bytes()];
    parts.extend_from_slice(output);
    reply(unique, &parts)
}

/// The reply that asks for another round, with these bytes of the caller and room for those.
pub(crate) fn again(unique: u64, input: &[Iovec], output: &[Iovec]) -> Vec<u8> {
    let (in_iovs, out_iovs) = (input.len() as u32, output.len() as u32);
    let out = IoctlOut { result: 0, flags: RETRY, in_iovs, out_iovs };
    reply(unique, &[out.as_bytes(), input.as_bytes(), output.as_bytes()])
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A request as the kernel sends it.
    pub(crate) fn message(opcode: u32, unique: u64, body: &[u8]) -> Vec<u8> {
        let len = (size_of::<InHeader>() + body.len()) as u32;
        let (uid, gid, pid) = (10, 20, 30);
        let header = InHeader { len, opcode, unique, nodeid: 1, uid, gid, pid, extensions: 0, padding: 0 };
        [header.as_bytes(), body].concat()
    }

    pub(crate) fn init_message(major: u32, minor: u32, flags: u32) -> Vec<u8> {
        message(CUSE_INIT, 1, InitIn { major, minor, unused: 0, flags }.as_bytes())
    }

    pub(crate) fn ioctl_message(
        unique: u64,
        command: u32,
        argument: u64,
        input: &[u8],
        room: u32,
    ) -> Vec<u8> {
        let (in_size, flags) = (input.len() as u32, 2);
        let ioctl = IoctlIn { fh: 0, flags, command, argument, in_size, out_size: room };
        message(IOCTL, unique, &[ioctl.as_bytes(), input].concat())
    }

    pub(crate) fn interrupt_message(unique: u64) -> Vec<u8> {
        message(INTERRUPT, unique | 1, &unique.to_ne_bytes())
    }

    pub(crate) fn release_message(unique: u64) -> Vec<u8> {
        message(RELEASE, unique, &[0; 24])
    }

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!((size_of::<InHeader>(), size_of::<OutHeader>()), (40, 16));
        assert_eq!((size_of::<InitIn>(), size_of::<InitOut>()), (16, 72));
        assert_eq!((size_of::<IoctlIn>(), size_of::<IoctlOut>(), size_of::<Iovec>()), (32, 16, 16));
        assert_eq!(opened(7).len(), 32);
    }

    #[test]
    fn requests_are_parsed() {
        let bytes = ioctl_message(9, 0x4e40, 0x1234, &[1, 2, 3], 5);
        let parsed = Message::parse(&bytes).unwrap();
        let ioctl = Ioctl { command: 0x4e40, argument: 0x1234, input: &[1, 2, 3], room: 5 };
        let caller = Caller { uid: 10, gid: 20, pid: 30 };
        assert_eq!(parsed, Message { unique: 9, caller, body: Body::Ioctl(ioctl) });
        let init = init_message(7, 37, 1);
        assert_eq!(Message::parse(&init).unwrap().body, Body::Init { major: 7, minor: 37, flags: 1 });
        assert_eq!(Message::parse(&interrupt_message(8)).unwrap().body, Body::Interrupt(8));
        for (opcode, body) in [
            (OPEN, Body::Open),
            (RELEASE, Body::Close),
            (FLUSH, Body::Close),
            (WRITE, Body::ReadWrite),
            (FORGET, Body::Forget),
            (99, Body::Unknown),
        ] {
            assert_eq!(Message::parse(&message(opcode, 4, &[0; 40])).unwrap().body, body);
        }
    }

    #[test]
    fn a_message_of_a_wrong_length_is_malformed() {
        let whole = ioctl_message(9, 0x4e40, 0, &[1, 2, 3], 5);
        for len in 0..whole.len() {
            let expected = if len < 40 { None } else { Some(9) };
            assert_eq!(Message::parse(&whole[..len]), Err(Malformed(expected)), "{len}");
        }
        let mut longer = whole;
        longer.push(0);
        assert_eq!(Message::parse(&longer), Err(Malformed(Some(9))));
        // An ioctl whose own length differs from the message's.
        let mut other = ioctl_message(9, 0x4e40, 0, &[1, 2, 3], 5);
        other[40 + 24] = 4;
        assert_eq!(Message::parse(&other), Err(Malformed(Some(9))));
    }
}
