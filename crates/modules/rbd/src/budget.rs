//! How much memory the requests of a link may take that librbd has at one time. Pure.
//!
//! librbd copies the data of writes, and a cluster that does not answer lets it keep the copies. So each request has a cost,
//! about the memory that it takes, and librbd gets a request only if its channel's share of the budget has room. What exceeds a
//! share's own part comes from the part that all channels have together, which channels of a stuck pool may use up: with its own
//! part, each other channel goes on.

/// What a request takes beside its data, in librbd and librados.
const REQUEST: u64 = 16 << 10;
/// What each channel has for itself.
const OWN: u64 = 1 << 20;
/// What one channel may have, with its own part.
const SHARE_MAX: u64 = 64 << 20;
/// What the channels of a link have together, beside their own parts.
const COMMON: u64 = 256 << 20;

/// The cost of a request with so many bytes of data.
pub(crate) const fn cost_of(bytes: u32) -> u64 {
    REQUEST + bytes as u64
}

/// The budget of a link.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    /// What shares have of the common part. One request of each channel may exceed it.
    common: u64,
}

/// A channel's share of the budget.
#[derive(Debug, Default)]
pub(crate) struct Share {
    used: u64,
}

/// What a request that has no room waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wait {
    /// The end of a request of its own channel.
    Own,
    /// Room in the common part.
    Common,
}

impl Budget {
    /// Takes `cost` for a request. A channel without requests always gets its first. Without `may_share`, the channel has its
    /// own part only.
    pub fn try_take(&mut self, share: &mut Share, cost: u64, may_share: bool) -> Result<(), Wait> {
        let after = share.used + cost;
        let more = after.saturating_sub(OWN) - share.used.saturating_sub(OWN);
        if share.used > 0 && after > OWN {
            if after > SHARE_MAX {
                return Err(Wait::Own);
            }
            if !may_share || self.common + more > COMMON {
                return Err(Wait::Common);
            }
        }
        self.common += more;
        share.used = after;
        Ok(())
    }

    /// A request has ended.
    pub fn give_back(&mut self, share: &mut Share, cost: u64) {
        let after = share.used.checked_sub(cost).expect("a request gives back what it took");
        self.common -= share.used.saturating_sub(OWN) - after.saturating_sub(OWN);
        share.used = after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u32 = 1 << 20;

    /// Takes as much as there is for requests of so many bytes; returns their number, and what the next waits for.
    fn take_all(budget: &mut Budget, share: &mut Share, bytes: u32) -> (u64, Wait) {
        let mut count = 0;
        loop {
            match budget.try_take(share, cost_of(bytes), true) {
                Ok(()) => count += 1,
                Err(wait) => return (count, wait),
            }
        }
    }

    #[test]
    fn one_channel_has_a_bounded_share() {
        let (mut budget, mut share) = (Budget::default(), Share::default());
        assert_eq!(take_all(&mut budget, &mut share, MIB), (63, Wait::Own));
        (0..63).for_each(|_| budget.give_back(&mut share, cost_of(MIB)));
        assert_eq!((budget.common, share.used), (0, 0));
    }

    #[test]
    fn channels_that_have_taken_all_leave_each_other_its_own_part() {
        let mut budget = Budget::default();
        let mut stuck: Vec<Share> = (0..8).map(|_| Share::default()).collect();
        let taken: Vec<_> = stuck.iter_mut().map(|share| take_all(&mut budget, share, MIB)).collect();
        assert_eq!(taken[0], (63, Wait::Own));
        // Each channel has its first request.
        assert_eq!(taken[7], (1, Wait::Common));
        let mut small = Share::default();
        let (count, wait) = take_all(&mut budget, &mut small, 4096);
        assert!(count >= 51 && wait == Wait::Common, "{count} requests, {wait:?}");
        let mut large = Share::default();
        assert_eq!(take_all(&mut budget, &mut large, 4 * MIB), (1, Wait::Common));
        budget.give_back(&mut large, cost_of(4 * MIB));
        assert_eq!(budget.try_take(&mut large, cost_of(4 * MIB), false), Ok(()));
        for _ in 0..63 {
            budget.give_back(&mut stuck[0], cost_of(MIB));
        }
        assert!(take_all(&mut budget, &mut small, 4096).0 > 1000);
    }
}
