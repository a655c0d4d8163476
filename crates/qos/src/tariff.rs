//! An operator's limits, and the cost of a request under them. Any context.
//!
//! A request costs time: at 1,000 requests a second, a millisecond. Prices are exact to 2^-32 ns and rounded up, so that a
//! limit is never exceeded.

use std::time::Duration;

/// Binary digits of the fractions of a nanosecond in costs and leases: 2^16.
pub(crate) const FRACTION: u32 = 16;
/// The same for prices.
const PRICE_FRACTION: u32 = 32;
/// An upper bound that keeps sums of several costs from overflowing.
const COST_MAX: u64 = u64::MAX >> 1;
const SECOND: u128 = 1_000_000_000 << PRICE_FRACTION;

/// The largest limit of requests per second.
pub const IOS_MAX: u64 = 1_000_000_000;
/// The largest limit of bytes per second.
pub const BYTES_MAX: u64 = 1 << 50;
/// The longest burst.
pub const BURST_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// The size in bytes that is charged for requests without data that still cost the store time: the size of a small request.
/// Otherwise a limit of bytes alone would not limit them.
pub const LEAST_BYTES: u64 = SMALL;

/// The two sizes at which combined limits apply exactly.
const SMALL: u64 = 4 << 10;
const LARGE: u64 = 4 << 20;

/// The direction of a request's data, if it has any; other changes of the disk count as writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// From the disk to memory.
    Read,
    /// From memory to the disk.
    Write,
}

/// A kind of limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Requests, or with combined limits requests and bytes.
    All,
    /// Reads, and likewise their bytes.
    Reads,
    /// Writes, and likewise their bytes.
    Writes,
    /// Bytes.
    AllBytes,
    /// Bytes read.
    ReadBytes,
    /// Bytes written.
    WriteBytes,
}

impl Kind {
    /// Whether the limit applies to requests of this direction.
    pub const fn counts(self, direction: Direction) -> bool {
        match self {
            Self::All | Self::AllBytes => true,
            Self::Reads | Self::ReadBytes => matches!(direction, Direction::Read),
            Self::Writes | Self::WriteBytes => matches!(direction, Direction::Write),
        }
    }
}

/// An operator's limits. 0 means no limit.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Limits {
    /// Requests a second.
    pub ios: u64,
    /// Reads a second.
    pub read_ios: u64,
    /// Writes a second.
    pub write_ios: u64,
    /// Bytes a second.
    pub bytes: u64,
    /// Bytes read a second.
    pub read_bytes: u64,
    /// Bytes written a second.
    pub write_bytes: u64,
    /// The time whose tokens can be saved up.
    pub burst: Duration,
    /// A limit of requests and a limit of bytes are the two ends of one scale: a request costs 1/C1 + bytes/C2 seconds, such
    /// that requests of 4 KiB meet the first limit, and requests of 4 MiB the second.
    pub combined: bool,
}

/// The reason for which limits are refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LimitsError {
    /// A limit of requests beyond [`IOS_MAX`].
    #[error("{0} requests a second exceed the maximum, {IOS_MAX}; 0 means no limit")]
    Ios(u64),
    /// A limit of bytes beyond [`BYTES_MAX`].
    #[error("{0} bytes a second exceed the maximum, {BYTES_MAX}; 0 means no limit")]
    Bytes(u64),
    /// A burst of more than a day.
    #[error("a burst of {0:?} is longer than {BURST_MAX:?}")]
    Burst(Duration),
    /// Combined limits where the limit of bytes applies before that of requests.
    #[error(
        "{ios} requests of 4 KiB a second are more than {bytes} bytes a second: combined limits cannot meet both"
    )]
    FewBytes {
        /// Requests a second.
        ios: u64,
        /// Bytes a second.
        bytes: u64,
    },
    /// Combined limits where the limit of requests applies before that of bytes.
    #[error(
        "{ios} requests of 4 MiB a second are fewer than {bytes} bytes a second: combined limits cannot meet both"
    )]
    FewIos {
        /// Requests a second.
        ios: u64,
        /// Bytes a second.
        bytes: u64,
    },
}

/// The price of a request: a constant, and an amount per byte, in 2^-32 ns.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Cost {
    /// Per request.
    pub request: u64,
    /// Per byte.
    pub byte: u64,
}

impl Cost {
    /// The cost of `bytes` bytes in 2^-16 ns, rounded up, at most 39 hours.
    #[inline]
    pub fn of(self, bytes: u64) -> u64 {
        let price = u128::from(self.request) + u128::from(self.byte) * u128::from(bytes);
        let shift = PRICE_FRACTION - FRACTION;
        let cost = price.saturating_add((1 << shift) - 1) >> shift;
        u64::try_from(cost).unwrap_or(u64::MAX).min(COST_MAX)
    }

    const fn per_request(ios: u64) -> Self {
        Self { request: SECOND.div_ceil(ios as u128) as u64, byte: 0 }
    }

    const fn per_byte(bytes: u64) -> Self {
        Self { request: 0, byte: SECOND.div_ceil(bytes as u128) as u64 }
    }

    /// Solves the two equations: SMALL bytes cost 1/ios, LARGE bytes LARGE/bytes.
    fn combined(ios: u64, bytes: u64) -> Result<Self, LimitsError> {
        let small = SECOND.div_ceil(ios.into());
        let large = (SECOND * u128::from(LARGE)).div_ceil(bytes.into());
        let byte = large
            .checked_sub(small)
            .ok_or(LimitsError::FewIos { ios, bytes })?
            .div_ceil((LARGE - SMALL).into());
        let request =
            small.checked_sub(byte * u128::from(SMALL)).ok_or(LimitsError::FewBytes { ios, bytes })?;
        Ok(Self { request: request as u64, byte: byte as u64 })
    }
}

impl Limits {
    /// Whether there are no limits.
    pub fn is_unlimited(&self) -> bool {
        [self.ios, self.read_ios, self.write_ios, self.bytes, self.read_bytes, self.write_bytes] == [0; 6]
    }

    /// The buckets of these limits.
    ///
    /// # Errors
    /// [`LimitsError`].
    pub fn costs(&self) -> Result<Vec<(Kind, Cost)>, LimitsError> {
        if self.burst > BURST_MAX {
            return Err(LimitsError::Burst(self.burst));
        }
        let pairs = [
            (Kind::All, self.ios, Kind::AllBytes, self.bytes),
            (Kind::Reads, self.read_ios, Kind::ReadBytes, self.read_bytes),
            (Kind::Writes, self.write_ios, Kind::WriteBytes, self.write_bytes),
        ];
        let mut costs = Vec::new();
        for (kind, ios, bytes_kind, bytes) in pairs {
            if ios > IOS_MAX {
                return Err(LimitsError::Ios(ios));
            }
            if bytes > BYTES_MAX {
                return Err(LimitsError::Bytes(bytes));
            }
            if self.combined && ios > 0 && bytes > 0 {
                costs.push((kind, Cost::combined(ios, bytes)?));
                continue;
            }
            if ios > 0 {
                costs.push((kind, Cost::per_request(ios)));
            }
            if bytes > 0 {
                costs.push((bytes_kind, Cost::per_byte(bytes)));
            }
        }
        Ok(costs)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn seconds(cost: Cost, bytes: u64) -> f64 {
        cost.of(bytes) as f64 / (1e9 * 65536.0)
    }

    #[test]
    fn each_limit_has_its_price() {
        let limits = Limits { ios: 1000, read_ios: 10, write_bytes: 1 << 20, ..Limits::default() };
        let costs = limits.costs().unwrap();
        let kinds: Vec<_> = costs.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [Kind::All, Kind::Reads, Kind::WriteBytes]);
        assert_eq!(costs[0].1.of(0), 1_000_000 << FRACTION);
        assert_eq!(costs[1].1.of(1 << 30), 100_000_000 << FRACTION);
        assert_eq!(costs[2].1.of(1 << 20), 1_000_000_000 << FRACTION);
        assert!(Limits::default().is_unlimited() && Limits::default().costs().unwrap().is_empty());
    }

    #[test]
    fn combined_limits_are_met_at_both_ends() {
        for (ios, bytes) in [(3000, 125 << 20), (1000, 4 << 20), (100_000, 10 << 30), (1, 5000)] {
            let limits = Limits { ios, bytes, combined: true, ..Limits::default() };
            let [(Kind::All, cost)] = limits.costs().unwrap()[..] else { panic!("one bucket") };
            for (size, wanted) in [(4096, 1.0 / ios as f64), (4 << 20, 4194304.0 / bytes as f64)] {
                let is = seconds(cost, size);
                assert!(is >= wanted * (1.0 - 1e-12) && is < wanted * (1.0 + 1e-6), "{is} {wanted}");
            }
        }
    }

    #[test]
    fn impossible_values_are_refused() {
        let refused = |limits: Limits| limits.costs().unwrap_err();
        let none = Limits::default();
        assert_eq!(refused(Limits { ios: u64::MAX, ..none }), LimitsError::Ios(u64::MAX));
        assert_eq!(refused(Limits { write_bytes: u64::MAX, ..none }), LimitsError::Bytes(u64::MAX));
        let burst = Duration::MAX;
        assert_eq!(refused(Limits { burst, ..none }), LimitsError::Burst(burst));
        let both = |ios, bytes| refused(Limits { ios, bytes, combined: true, ..none });
        assert_eq!(both(1000, 1 << 20), LimitsError::FewBytes { ios: 1000, bytes: 1 << 20 });
        assert_eq!(both(10, 1 << 30), LimitsError::FewIos { ios: 10, bytes: 1 << 30 });
    }

    proptest! {
        /// No price is lower than the limit demands, and none is higher by more than its rounding.
        #[test]
        fn prices_are_never_too_low(ios in 1..=IOS_MAX, rate in 1..=BYTES_MAX, bytes in 0..1u64 << 33) {
            let unit = 1u128 << FRACTION;
            let of = |limits: Limits| u128::from(limits.costs().unwrap()[0].1.of(bytes));
            let request = of(Limits { ios, ..Limits::default() });
            prop_assert!(request * u128::from(ios) >= 1_000_000_000 * unit);
            prop_assert!((request - 1) * u128::from(ios) < 1_000_000_000 * unit);
            let moved = of(Limits { bytes: rate, ..Limits::default() });
            let exact = u128::from(bytes) * 1_000_000_000 * unit;
            let is_capped = moved == u128::from(COST_MAX);
            prop_assert!(is_capped || moved * u128::from(rate) >= exact);
            let slack = u128::from(rate) * (u128::from(bytes >> 16) + 2);
            prop_assert!(is_capped || moved * u128::from(rate) <= exact + slack);
        }
    }
}
