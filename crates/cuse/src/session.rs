//! Decisions about each message of the kernel. Pure: [`receive`] has no state; the device keeps the requests in flight.

use rustix::io::Errno;

use crate::ioctl::{self, Round, Shape};
use crate::policy::Access;
use crate::request::{Caller, Completion, Request};
use crate::wire::{self, Body, Message};

/// The drive or namespace behind `/dev/NAME`, and its callers' rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// The namespace of this device, or `None` for the controller's device.
    pub nsid: Option<u32>,
    /// What callers may do.
    pub access: Access,
}

/// The consequence of a message.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// Nothing.
    Nothing,
    /// The device sends this reply.
    Reply(Vec<u8>),
    /// The caller of the request with this number does not wait any longer.
    Interrupt(u64),
    /// The owner serves a request.
    Serve {
        /// The request's number.
        unique: u64,
        /// The process that made it.
        caller: Caller,
        /// The request.
        request: Request,
        /// What the reply returns.
        shape: Shape,
    },
}

/// Decides about a message of the kernel, after the handshake.
pub fn receive(message: &[u8], node: Node) -> Received {
    let Message { unique, caller, body } = match Message::parse(message) {
        Ok(message) => message,
        Err(wire::Malformed(Some(unique))) => return Received::Reply(wire::fail(unique, Errno::IO)),
        Err(wire::Malformed(None)) => return Received::Nothing,
    };
    Received::Reply(match body {
        Body::Open => wire::opened(unique),
        Body::Close => wire::done(unique),
        Body::ReadWrite => wire::fail(unique, Errno::INVAL),
        // The handshake is over.
        Body::Init { .. } => wire::fail(unique, Errno::IO),
        Body::Unknown => wire::fail(unique, Errno::NOSYS),
        Body::Forget => return Received::Nothing,
        Body::Interrupt(other) => return Received::Interrupt(other),
        Body::Ioctl(ioctl) => match ioctl::decide(&ioctl, node) {
            Round::Again { input, output } => wire::again(unique, &input, &output),
            Round::Returned(result) => wire::returned(unique, result, &[]),
            Round::Failed(errno) => wire::fail(unique, errno),
            Round::Serve(request, shape) => return Received::Serve { unique, caller, request, shape },
        },
    })
}

/// The reply to a served request. A status other than 0 is the ioctl's result; then no data is returned.
pub(crate) fn answer(unique: u64, shape: Shape, outcome: Result<Completion, Errno>) -> Vec<u8> {
    let Completion { status, result, mut data } = match outcome {
        Ok(completion) => completion,
        Err(errno) => return wire::fail(unique, errno),
    };
    let status = status & 0x7fff;
    data.resize(if status == 0 { shape.data } else { 0 }, 0);
    let result = u64::from(result).to_le_bytes();
    wire::returned(unique, status.into(), &[&result[..shape.result], &data])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::tests::{ioctl_message, message};

    const NODE: Node = Node { nsid: Some(1), access: Access::Read };

    fn reply(message: &[u8]) -> (i32, Vec<u8>) {
        let Received::Reply(bytes) = receive(message, NODE) else { panic!("no reply") };
        assert_eq!(bytes[..4], (bytes.len() as u32).to_ne_bytes());
        (i32::from_ne_bytes(bytes[4..8].try_into().unwrap()), bytes[16..].to_vec())
    }

    #[test]
    fn every_request_that_waits_is_answered() {
        let errno = |errno: Errno| -errno.raw_os_error();
        assert_eq!(reply(&message(14, 2, &[0; 8])).0, 0, "OPEN");
        assert_eq!(reply(&message(18, 2, &[0; 24])), (0, Vec::new()), "RELEASE");
        assert_eq!(reply(&message(15, 2, &[0; 40])).0, errno(Errno::INVAL), "READ");
        assert_eq!(reply(&message(40, 2, &[0; 24])).0, errno(Errno::NOSYS), "POLL");
        assert_eq!(reply(&message(39, 2, &[0; 31])).0, errno(Errno::IO), "a short IOCTL");
        assert_eq!(reply(&ioctl_message(2, ioctl::number::ID, 0, &[], 0)).1[..4], 1_i32.to_ne_bytes());
        assert_eq!(receive(&message(2, 2, &[0; 8]), NODE), Received::Nothing, "FORGET");
        assert_eq!(receive(&[0; 39], NODE), Received::Nothing);
    }

    #[test]
    fn a_round_asks_for_the_structure() {
        let (error, body) = reply(&ioctl_message(2, ioctl::number::ADMIN_CMD, 0x1000, &[], 0));
        let words: Vec<u64> = body.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect();
        // result 0 and FUSE_IOCTL_RETRY, one range to read and none to write, the range.
        assert_eq!((error, &words[..]), (0, &[4 << 32, 1, 0x1000, 72][..]));
    }

    #[test]
    fn an_answer_returns_what_the_caller_has_room_for() {
        let shape = Shape { result: 8, data: 4 };
        let completion = Completion { status: 0, result: 0x0102_0304, data: vec![9; 6] };
        let bytes = answer(5, shape, Ok(completion.clone()));
        assert_eq!(bytes[16..32], [0; 16]);
        assert_eq!(bytes[32..], [4, 3, 2, 1, 0, 0, 0, 0, 9, 9, 9, 9]);
        let short = answer(5, shape, Ok(Completion { data: vec![9], ..completion.clone() }));
        assert_eq!(short[40..], [9, 0, 0, 0]);
        let failed = answer(5, shape, Ok(Completion { status: 0x4002, ..completion }));
        assert_eq!((failed[16..20].to_vec(), failed.len()), (0x4002_i32.to_ne_bytes().to_vec(), 40));
        let error = answer(5, shape, Err(Errno::BUSY));
        assert_eq!((error.len(), &error[4..8]), (16, &(-16_i32).to_ne_bytes()[..]));
    }
}
