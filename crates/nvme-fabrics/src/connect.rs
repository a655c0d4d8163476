//! The data of a Connect command, and its results. NVMe 2.0 §6.3. Any context.

use aryk_nvme::spec::status::{Code, Status};

use crate::nqn::{self, Nqn};
use crate::status;

/// Bytes of the data.
pub const LEN: usize = 1024;
/// CNTLID of a host that leaves the choice of the controller to the subsystem.
pub const ANY_CONTROLLER: u16 = 0xffff;
/// The largest CNTLID of a controller; larger numbers are reserved.
pub const CONTROLLER_ID_MAX: u16 = 0xffef;

/// The bytes before the incarnation of a host that tells it. Only targets of this project look for it.
const INCARNATION: [u8; 16] = *b"aryk:incarnation";

/// Offsets in the data.
mod offset {
    pub(super) const HOST_ID: usize = 0;
    pub(super) const CNTLID: usize = 16;
    /// Reserved for standards to come; so what is here begins with [`super::INCARNATION`].
    pub(super) const INCARNATION: usize = 224;
    pub(super) const SUBNQN: usize = 256;
    pub(super) const HOSTNQN: usize = 512;
}

/// A parameter of a Connect command that is wrong, as the result of its completion reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidParameter {
    /// Of the submission queue entry, at this offset.
    Entry(u16),
    /// Of the data, at this offset.
    Data(u16),
}

impl InvalidParameter {
    /// HOSTID of the data.
    pub const HOST_ID: Self = Self::Data(offset::HOST_ID as u16);
    /// CNTLID of the data.
    pub const CNTLID: Self = Self::Data(offset::CNTLID as u16);
    /// SUBNQN of the data.
    pub const SUBNQN: Self = Self::Data(offset::SUBNQN as u16);
    /// HOSTNQN of the data.
    pub const HOSTNQN: Self = Self::Data(offset::HOSTNQN as u16);
    /// QID of the entry.
    pub const QID: Self = Self::Entry(42);
    /// SQSIZE of the entry.
    pub const SQSIZE: Self = Self::Entry(44);

    /// DW0 of the completion: IPO and IATTR.
    pub const fn result(self) -> u32 {
        match self {
            Self::Entry(offset) => offset as u32,
            Self::Data(offset) => offset as u32 | 1 << 16,
        }
    }
}

/// Why a Connect command fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// With this code and no result.
    Code(Code),
    /// With [`status::INVALID_PARAMETERS`].
    Parameter(InvalidParameter),
}

impl Refusal {
    /// Status and DW0 of the completion. DNR is set, except where another attempt may succeed.
    pub const fn completion(self) -> (Status, u32) {
        match self {
            Self::Code(code @ status::CONTROLLER_BUSY) => (code.status(), 0),
            Self::Code(code) => (code.status().as_final(), 0),
            Self::Parameter(parameter) => {
                (status::INVALID_PARAMETERS.status().as_final(), parameter.result())
            }
        }
    }
}

/// The data of a Connect command, checked as far as it is by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectData {
    /// HOSTID, never zeroes.
    pub host_id: [u8; 16],
    /// CNTLID: for an I/O queue, its controller; for an admin queue, [`ANY_CONTROLLER`] or the controller that the host wants.
    pub controller_id: u16,
    /// SUBNQN.
    pub subsystem: Nqn,
    /// HOSTNQN.
    pub host: Nqn,
    /// A number of the host's present life, the same on all of its paths and another one in each life; `None`: the host is of
    /// another kind, and tells none.
    pub incarnation: Option<[u8; 16]>,
}

impl ConnectData {
    /// Reads the data.
    ///
    /// # Errors
    /// The data is too short, or a field has a value that no subsystem accepts.
    pub fn decode(data: &[u8]) -> Result<Self, Refusal> {
        let data: &[u8; LEN] = data.first_chunk().ok_or(Refusal::Code(Code::SGL_DATA_LENGTH_INVALID))?;
        let name = |at: usize, parameter| {
            let field = data[at..].first_chunk::<{ nqn::FIELD_LEN }>().expect("within the data");
            Nqn::decode(field).map_err(|_| Refusal::Parameter(parameter))
        };
        let host_id = *data.first_chunk().expect("within the data");
        if host_id == [0; 16] {
            return Err(Refusal::Parameter(InvalidParameter::HOST_ID));
        }
        let [marker, incarnation] = [0, 16].map(|at| {
            let field = data[offset::INCARNATION + at..].first_chunk::<16>();
            *field.expect("within the data")
        });
        Ok(Self {
            host_id,
            controller_id: u16::from_le_bytes([data[offset::CNTLID], data[offset::CNTLID + 1]]),
            subsystem: name(offset::SUBNQN, InvalidParameter::SUBNQN)?,
            host: name(offset::HOSTNQN, InvalidParameter::HOSTNQN)?,
            incarnation: (marker == INCARNATION).then_some(incarnation),
        })
    }

    /// Writes the data.
    pub fn encode(&self) -> [u8; LEN] {
        let mut data = [0; LEN];
        data[..16].copy_from_slice(&self.host_id);
        data[offset::CNTLID..][..2].copy_from_slice(&self.controller_id.to_le_bytes());
        if let Some(incarnation) = self.incarnation {
            data[offset::INCARNATION..][..16].copy_from_slice(&INCARNATION);
            data[offset::INCARNATION + 16..][..16].copy_from_slice(&incarnation);
        }
        data[offset::SUBNQN..][..nqn::FIELD_LEN].copy_from_slice(&self.subsystem.encode());
        data[offset::HOSTNQN..][..nqn::FIELD_LEN].copy_from_slice(&self.host.encode());
        data
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data() -> ConnectData {
        ConnectData {
            host_id: [7; 16],
            controller_id: 0x0102,
            subsystem: "nqn.2016-06.io.spdk:cnode1".parse().unwrap(),
            host: "nqn.2014-08.org.nvmexpress:uuid:0e4d9f5a-11aa-4c3b-8ad4-0a1b2c3d4e5f".parse().unwrap(),
            incarnation: None,
        }
    }

    #[test]
    fn data_is_read_as_it_was_written() {
        let bytes = data().encode();
        assert_eq!(bytes[14..18], [7, 7, 2, 1]);
        assert_eq!((&bytes[256..260], &bytes[512..516]), (&b"nqn."[..], &b"nqn."[..]));
        assert!(bytes[18..256].iter().all(|byte| *byte == 0), "reserved bytes");
        assert_eq!(ConnectData::decode(&bytes), Ok(data()));
        let told = ConnectData { incarnation: Some([9; 16]), ..data() };
        let mut bytes = told.encode();
        assert_eq!(ConnectData::decode(&bytes), Ok(told));
        // What others may put there some day is no incarnation.
        bytes[224] ^= 1;
        assert_eq!(ConnectData::decode(&bytes), Ok(data()));
    }

    #[test]
    fn a_wrong_field_is_named_by_its_offset() {
        for (at, byte, parameter) in [
            (256, b'x', InvalidParameter::SUBNQN),
            (512, 0, InvalidParameter::HOSTNQN),
            (600, 0xff, InvalidParameter::HOSTNQN),
        ] {
            let mut bytes = data().encode();
            bytes[520..700].fill(b'a');
            bytes[512..520].copy_from_slice(b"nqn.2016");
            bytes[520..].iter_mut().zip(b"-06.io.a:").for_each(|(to, from)| *to = *from);
            bytes[at] = byte;
            assert_eq!(ConnectData::decode(&bytes), Err(Refusal::Parameter(parameter)), "{at}");
        }
        let mut bytes = data().encode();
        bytes[..16].fill(0);
        assert_eq!(ConnectData::decode(&bytes), Err(Refusal::Parameter(InvalidParameter::HOST_ID)));
        assert_eq!(ConnectData::decode(&bytes[1..]), Err(Refusal::Code(Code::SGL_DATA_LENGTH_INVALID)));
    }

    #[test]
    fn completions_say_what_was_wrong_and_whether_to_try_again() {
        let (status, result) = Refusal::Parameter(InvalidParameter::SUBNQN).completion();
        assert_eq!((status.code(), status.is_final(), result), (Code(0x182), true, 0x1_0100));
        assert_eq!(Refusal::Parameter(InvalidParameter::QID).completion().1, 42);
        assert!(!Refusal::Code(status::CONTROLLER_BUSY).completion().0.is_final());
        assert!(Refusal::Code(status::INVALID_HOST).completion().0.is_final());
        assert_eq!(status::name(status::INVALID_HOST), "Connect Invalid Host");
        assert_eq!(status::name(Code::INVALID_FIELD), "Invalid Field in Command");
    }
}
