//! Services on the local network: multicast DNS (RFC 6762) and service discovery (RFC 6763), over IPv4. Control context.
//!
//! | file | contents |
//! | --- | --- |
//! | `wire` | messages and names, as they are on the network |
//! | `browser` | what other hosts announce, on one link |
//! | `responder` | what this host announces |
//! | `socket` | the socket, and the links of this host |
//! | `task` | the tasks that browse and publish |
//!
//! Every host of a link may send anything. So a message is checked once, by [`wire::Message::parse`]. A packet counts only if its
//! source address is one of a link of this host, which a sender may forge, and only [`PACKETS`] of them count in each second: the
//! kernel drops the others, when the buffer of the socket is full. A link keeps at most [`SERVICES_MAX`] services and their
//! hosts, with names of at most 255 bytes, texts of [`TEXT_MAX`] bytes, and [`ADDRESSES_MAX`] addresses of each host; what comes
//! later is ignored until others have expired.
//!
//! Names are unique by random parts, so that they are not probed (RFC 6762, section 8.1).

#![forbid(unsafe_code)]

pub mod browser;
pub mod responder;
mod socket;
mod task;
pub mod wire;

pub use browser::{ADDRESSES_MAX, Browser, SERVICES_MAX, Service, TEXT_MAX};
pub use responder::{Offer, Responder};
pub use socket::{LINKS_MAX, PACKETS, Socket};
pub use task::{browse, publish};
pub use wire::{Name, text, text_value};
