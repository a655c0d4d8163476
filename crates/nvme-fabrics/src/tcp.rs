//! The TCP transport: PDUs, read by [`Parser`] and written by [`Header::encode`], a controller's side of a connection
//! ([`Queue`]), and a host's ([`HostQueue`]). NVMe TCP Transport 1.0. Any context; the parser and the encoder allocate nothing.
//!
//! A PDU consists of a header, an optional header digest, padding up to the data (PDO), the data, and an optional data digest.
//! Either side opens with an ICReq or ICResp, which settles the [`Format`] of what it will receive.

mod digest;
mod fatal;
mod host;
mod parser;
mod pdu;
mod queue;
mod span;

pub use digest::{DIGEST_LEN, DataDigest};
pub use fatal::{Fatal, FatalStatus};
pub use host::{ENCODE_MIN, HostQueue, HostReceived, IN_CAPSULE_MAX};
pub use parser::{Event, Limits, Parser};
pub use pdu::{
    C2hData, Format, H2cData, HEADER_MAX, Header, IcReq, IcResp, Kind, MAXH2CDATA_MIN, R2t, Side,
    TERM_DATA_MAX,
};
pub use queue::{Piece, Queue, Received};
pub use span::Span;
