//! NVMe over Fabrics without I/O, for targets and initiators: bytes, commands and time go in; bytes, completions and events come
//! out.
//!
//! Cited sections are those of the NVMe Base Specification 2.0 ("NVMe 2.0"), and of the specifications 1.0 of the NVMe TCP and
//! RDMA Transports.
//! Commands, identify data and status codes that all transports share are in `aryk_nvme::spec`.
//!
//! # Order of reading
//! 1. [`tcp`]: PDUs, their parser, and the errors that end a connection; [`rdma`]: the other transport.
//! 2. [`sgl`], [`command`], [`connect`], [`property`], [`status`], [`nqn`]: what capsules contain.
//! 3. [`discovery`], [`keep_alive`], [`subsystem`]: what a target shows to a host, and for how long; [`ana`]: through which
//!    paths.
//! 4. [`controller`]: the admin commands of a target; [`io`]: its I/O commands.
//! 5. [`association`]: which hosts have which controllers; [`reservation`]: which of them may use a namespace.
//! 6. [`chap`]: how hosts and controllers prove who they are; [`psk`]: the keys of TLS.
//!
//! | context | functions and types |
//! | --- | --- |
//! | reactor | [`tcp`], [`rdma`], [`sgl`], [`io`] |
//! | the owner of the admin queue | [`controller::Controller`] |
//! | control | [`association::Associations`], [`reservation::Reservations`] |
//! | a thread that may compute for milliseconds | [`chap`], [`psk`] |
//!
//! **Invariants.** Bytes of a peer cause errors, never panics. [`tcp`] and [`rdma`] know nothing of what is above
//! them.
#![forbid(unsafe_code)]

pub mod ana;
pub mod association;
pub mod chap;
pub mod command;
pub mod connect;
pub mod controller;
pub mod discovery;
pub mod io;
pub mod keep_alive;
pub mod nqn;
pub mod property;
pub mod psk;
pub mod rdma;
pub mod reservation;
pub mod sgl;
pub mod status;
pub mod subsystem;
pub mod tcp;

/// A command's place in its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u16);

/// The data of a command, in bytes: a multiple of 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// None.
    None,
    /// The controller sends it.
    ToHost(u32),
    /// The host sends it.
    ToController(u32),
}

impl Transfer {
    /// Bytes.
    pub const fn len(self) -> u32 {
        match self {
            Self::None => 0,
            Self::ToHost(len) | Self::ToController(len) => len,
        }
    }

    /// Whether there is no data.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }
}
