//! Rate limits of disks and groups of disks. Pure: the caller passes the time in, and wakes the lanes that the crate
//! names.
//!
//! - [`Limits`] are an operator's settings: requests and bytes per second, of all requests, reads or writes, and a burst.
//!   They become up to six [`Bucket`]s, each with a price per request ([`Cost`]): time, of which a second has one second.
//! - A [`Bucket`] is shared by all reactors. It is one number, the time up to which it is sold out, so it fills by
//!   itself, without periodic visits.
//! - A [`Share`] is a reactor's part of a bucket: its lease, and the lanes that wait for more, in the order of deficit
//!   round robin.
//! - A [`Lane`] is an opener's queue: it asks for one request at a time, and gets it from every bucket on its path or
//!   from none; where no lane waits, several are paid at a time.
//!
//! | context | functions and types |
//! | --- | --- |
//! | control | [`Limiter::new`], [`Limiter::set`] |
//! | reactor | [`Share`], [`Lane`] |
//! | any | [`Bucket`], by atomics |
//!
//! **Upper bound.** In any time W, a bucket lets through its rate × (W + burst), one request of each lane, and 2 ms of
//! its rate: one half is how late reactors may be without losing anything ([`SLACK`]), the other half the leases of all
//! reactors together ([`LEASES`]).
#![forbid(unsafe_code)]

mod bucket;
mod lane;
mod limiter;
mod share;
mod sync;
mod tariff;

pub use bucket::{Bucket, LEASES, SLACK};
pub use lane::{Lane, Path};
pub use limiter::Limiter;
pub use share::{Share, Wheel};
pub use tariff::{BURST_MAX, BYTES_MAX, Cost, Direction, IOS_MAX, Kind, LEAST_BYTES, Limits, LimitsError};
