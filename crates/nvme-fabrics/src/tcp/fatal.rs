//! Fatal transport errors, which end a connection: what a TermReq reports. NVMe TCP Transport 1.0 §3.5. Any context.

use std::fmt;

/// FES: the kind of a fatal error.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct FatalStatus(pub u16);

impl FatalStatus {
    /// A field of a header has a value that is not allowed; FEI is the field's offset.
    pub const INVALID_FIELD: Self = Self(1);
    /// A PDU came that the state of the connection does not allow.
    pub const SEQUENCE: Self = Self(2);
    /// The header digest does not match; FEI is the digest that was received.
    pub const HEADER_DIGEST: Self = Self(3);
    /// The data of a PDU is not the data that was requested.
    pub const DATA_OUT_OF_RANGE: Self = Self(4);
    /// More data in a PDU, or more R2Ts at once, than the receiver allows.
    pub const LIMIT_EXCEEDED: Self = Self(5);
    /// A parameter is not supported; FEI is the field's offset.
    pub const UNSUPPORTED_PARAMETER: Self = Self(6);

    const fn name(self) -> &'static str {
        match self {
            Self::INVALID_FIELD => "invalid PDU header field",
            Self::SEQUENCE => "PDU sequence error",
            Self::HEADER_DIGEST => "header digest error",
            Self::DATA_OUT_OF_RANGE => "data transfer out of range",
            Self::LIMIT_EXCEEDED => "data or R2T limit exceeded",
            Self::UNSUPPORTED_PARAMETER => "unsupported parameter",
            _ => "unknown fatal error",
        }
    }
}

impl fmt::Debug for FatalStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:02X}h)", self.name(), self.0)
    }
}

/// A fatal error of a connection, found by this side or reported by a peer's TermReq.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status:?}, FEI {information:#x}")]
pub struct Fatal {
    /// FES.
    pub status: FatalStatus,
    /// FEI: for [`FatalStatus::INVALID_FIELD`] and [`FatalStatus::UNSUPPORTED_PARAMETER`] the offset of the field in the PDU's
    /// header, for [`FatalStatus::HEADER_DIGEST`] the digest that was received, otherwise 0.
    pub information: u32,
}

impl Fatal {
    pub(super) const fn field(offset: u32) -> Self {
        Self { status: FatalStatus::INVALID_FIELD, information: offset }
    }

    pub(super) const fn unsupported(offset: u32) -> Self {
        Self { status: FatalStatus::UNSUPPORTED_PARAMETER, information: offset }
    }

    /// An error whose status has no information.
    pub const fn of(status: FatalStatus) -> Self {
        Self { status, information: 0 }
    }
}
