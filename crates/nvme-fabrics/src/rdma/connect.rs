//! The private data of connections: what hosts and controllers tell each other when they connect. NVMe RDMA Transport 1.0 §3.2.
//! Any context.

use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the data of a request, and of that of its acceptance.
pub const PRIVATE_DATA_LEN: usize = 32;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRequest {
    recfmt: U16,
    qid: U16,
    hrqsize: U16,
    hsqsize: U16,
    cntlid: U16,
    reserved: [u8; 22],
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawAccept {
    recfmt: U16,
    crqsize: U16,
    reserved: [u8; 28],
}

const _: () = assert!(size_of::<RawRequest>() == PRIVATE_DATA_LEN);
const _: () = assert!(size_of::<RawAccept>() == PRIVATE_DATA_LEN);

/// What a host asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// QID of the queue that the connection will have; 0: the admin queue.
    pub qid: u16,
    /// HRQSIZE: completions that the host can receive at the same time.
    pub receives: u16,
    /// Entries of the queue: commands that the host has at the same time, at least 2. HSQSIZE is one less.
    pub entries: u16,
    /// CNTLID of an I/O queue's controller, if the host says it.
    pub controller_id: u16,
}

impl Request {
    /// Reads the data, behind which there may be other bytes.
    ///
    /// # Errors
    /// Why the connection is refused.
    pub fn decode(data: &[u8]) -> Result<Self, Reject> {
        let (raw, _) = RawRequest::ref_from_prefix(data).map_err(|_| Reject::LENGTH)?;
        if raw.recfmt.get() != 0 {
            return Err(Reject::RECORD_FORMAT);
        }
        let entries = match raw.hsqsize.get() {
            0 | u16::MAX => return Err(Reject::SEND_QUEUE),
            size => size + 1,
        };
        if raw.hrqsize.get() == 0 {
            return Err(Reject::RECEIVE_QUEUE);
        }
        Ok(Self { qid: raw.qid.get(), receives: raw.hrqsize.get(), entries, controller_id: raw.cntlid.get() })
    }

    /// Writes the data.
    ///
    /// # Panics
    /// If there are no entries.
    pub fn encode(&self) -> [u8; PRIVATE_DATA_LEN] {
        let raw = RawRequest {
            recfmt: U16::ZERO,
            qid: self.qid.into(),
            hrqsize: self.receives.into(),
            hsqsize: (self.entries - 1).into(),
            cntlid: self.controller_id.into(),
            reserved: [0; 22],
        };
        zerocopy::transmute!(raw)
    }
}

/// What a controller says that accepts a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accept {
    /// CRQSIZE: commands that the controller can receive at the same time.
    pub receives: u16,
}

/// What a controller that accepts a connection must not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the controller accepts a connection with unknown data")]
pub struct BadAccept;

impl Accept {
    /// Reads the data, behind which there may be other bytes.
    ///
    /// # Errors
    /// The data is too short, or has another format.
    pub fn decode(data: &[u8]) -> Result<Self, BadAccept> {
        let (raw, _) = RawAccept::ref_from_prefix(data).map_err(|_| BadAccept)?;
        if raw.recfmt.get() != 0 {
            return Err(BadAccept);
        }
        Ok(Self { receives: raw.crqsize.get() })
    }

    /// Writes the data.
    pub fn encode(&self) -> [u8; PRIVATE_DATA_LEN] {
        let raw = RawAccept { recfmt: U16::ZERO, crqsize: self.receives.into(), reserved: [0; 28] };
        zerocopy::transmute!(raw)
    }
}

/// Why a controller refuses a connection: STS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reject(pub u16);

impl Reject {
    /// The private data is too short.
    pub const LENGTH: Self = Self(1);
    /// RECFMT is unknown.
    pub const RECORD_FORMAT: Self = Self(2);
    /// HSQSIZE is not possible.
    pub const SEND_QUEUE: Self = Self(4);
    /// HRQSIZE is not possible.
    pub const RECEIVE_QUEUE: Self = Self(5);
    /// The controller has no resources for another connection.
    pub const NO_RESOURCES: Self = Self(6);
    /// The host does not let the controller read its memory (IRD).
    pub const NO_READS: Self = Self(7);

    /// Reads the data, behind which there may be other bytes. `None`: it is no reason of NVMe.
    pub fn decode(data: &[u8]) -> Option<Self> {
        match *data {
            [0, 0, low, high, ..] => Some(Self(u16::from_le_bytes([low, high]))),
            _ => None,
        }
    }

    /// The reason in words.
    pub const fn name(self) -> &'static str {
        match self.0 {
            1 => "the length of the host's data",
            2 => "the format of the host's data",
            3 => "the queue's number",
            4 => "the size of the queue",
            5 => "the number of completions that the host receives",
            6 => "no resources",
            7 => "the host does not let the controller read its memory",
            8 => "the host does not let the controller write its memory",
            _ => "an unknown reason",
        }
    }

    /// Writes the data: RECFMT and STS.
    pub const fn encode(self) -> [u8; 4] {
        let [low, high] = self.0.to_le_bytes();
        [0, 0, low, high]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_they_were_written() {
        let request = Request { qid: 0x0102, receives: 0x0304, entries: 0x0507, controller_id: 0x0708 };
        let mut data = request.encode().to_vec();
        assert_eq!(data[..12], [0, 0, 2, 1, 4, 3, 6, 5, 8, 7, 0, 0]);
        data.resize(56, 0);
        assert_eq!(Request::decode(&data), Ok(request));
    }

    #[test]
    fn wrong_requests_are_refused_with_a_reason() {
        let right = Request { qid: 1, receives: 128, entries: 128, controller_id: 1 }.encode();
        assert_eq!(Request::decode(&right[1..]), Err(Reject::LENGTH));
        let with = |at: usize, bytes: [u8; 2]| {
            let mut data = right;
            data[at..at + 2].copy_from_slice(&bytes);
            Request::decode(&data)
        };
        assert_eq!(with(0, [1, 0]), Err(Reject::RECORD_FORMAT));
        assert_eq!(with(4, [0, 0]), Err(Reject::RECEIVE_QUEUE));
        assert_eq!(with(6, [0, 0]), Err(Reject::SEND_QUEUE));
        assert_eq!(with(6, [0xff, 0xff]), Err(Reject::SEND_QUEUE));
        assert_eq!(Reject::NO_RESOURCES.encode(), [0, 0, 6, 0]);
        assert_eq!(Reject::decode(&[0, 0, 6, 0, 0]), Some(Reject::NO_RESOURCES));
        assert_eq!((Reject::decode(&[0, 0, 6]), Reject::decode(&[1, 0, 6, 0])), (None, None));
    }

    #[test]
    fn an_acceptance_has_its_fields_in_place() {
        let accept = Accept { receives: 0x0102 };
        let mut data = accept.encode().to_vec();
        assert_eq!(data[..5], [0, 0, 2, 1, 0]);
        assert_eq!(Accept::decode(&data[1..]), Err(BadAccept));
        data.resize(196, 0);
        assert_eq!(Accept::decode(&data), Ok(accept));
        data[0] = 1;
        assert_eq!(Accept::decode(&data), Err(BadAccept));
    }
}
