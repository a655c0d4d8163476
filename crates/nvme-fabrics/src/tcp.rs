//! The TCP transport: PDUs, read by [`Parser`] and written by [`Header::encode`]. NVMe TCP Transport 1.0. Any context; the
//! parser and the encoder allocate nothing.
//!
//! A PDU consists of a header, an optional header digest, padding up to the data (PDO), the data, and an optional data digest.
//! Either side opens with an ICReq or ICResp, which settles the [`Format`] of what it will receive.

mod digest;
mod fatal;
mod parser;
mod pdu;
mod span;

pub use digest::{DIGEST_LEN, DataDigest};
pub use fatal::{Fatal, FatalStatus};
pub use parser::{Event, Limits, Parser};
pub use pdu::{
    C2hData, Format, H2cData, HEADER_MAX, Header, IcReq, IcResp, Kind, MAXH2CDATA_MIN, R2t, Side,
    TERM_DATA_MAX,
};
pub use span::Span;
