//! Rate limits of disks and groups of disks. Pure: the time is passed in, and whoever is to be woken is told to the caller.
//!
//! - [`Limits`] is what an operator says: requests and bytes a second, of all requests, reads or writes, and a burst. It becomes up to six
//!   [`Bucket`]s, each with a price for a request ([`Cost`]): time, of which a second has one second.
//! - A [`Bucket`] is shared by all reactors. It is one number, the time up to which it is sold out, so that it fills by itself, and nobody visits it.
//! - A [`Share`] is a reactor's part of a bucket: the slice that it has leased, and the lanes that wait for more, in the order of deficit round robin.
//! - A [`Lane`] is an opener's line: it asks for a request at a time, and gets it from every bucket on its path or from none; where nobody waits, several are
//!   paid at a time.
//!
//! | context | what runs in it |
//! | --- | --- |
//! | control | [`Limiter::new`], [`Limiter::set`] |
//! | reactor | [`Share`], [`Lane`] |
//! | any | [`Bucket`], by atomics |
//!
//! **How much at most.** In any time W, a bucket lets through its rate × (W + burst), one request of each lane, and 2 ms of its rate: one
//! half is how late reactors may be without losing anything ([`SLACK`]), the other what all of them have leased together ([`LEASES`]).
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
