//! Rate limits of disks and groups of disks. Pure: the caller passes the time in, and wakes the lanes that this crate names.
//!
//! - [`Limits`] are an operator's settings: requests and bytes per second (of all requests, of reads, or of writes), and a
//!   burst. They become up to six [`Bucket`]s, each with a price per request ([`Cost`]). A price is a time: a bucket sells one
//!   second of time per second.
//! - A [`Bucket`] is shared by all reactors. It is one number, the time up to which it is sold out, so it fills without
//!   periodic visits.
//! - A [`Share`] is a reactor's part of a bucket: its lease, and the lanes that wait for more, in the order of deficit round
//!   robin.
//! - A [`Lane`] is an opener's queue. It asks for one request at a time, and gets it from every bucket on its path or from
//!   none. Where no lane waits, a lane pays several requests at a time.
//!
//! | context | functions and types |
//! | --- | --- |
//! | control | [`Limiter::new`], [`Limiter::set`] |
//! | reactor | [`Share`], [`Lane`] |
//! | any | [`Bucket`], by atomics |
//!
//! **Upper bound.** In any time W, a bucket admits its rate × (W + burst), one request of each lane, and 2 ms of its rate. One
//! half of these 2 ms is how late reactors may be without losing tokens ([`SLACK`]); the other half is the leases of all
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
