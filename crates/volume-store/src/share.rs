//! The part of the base disk that a shard of a pool has. Any context.
//!
//! The base is divided into units, which belong to the shards in turn. A shard sees its own ones as one disk: so each has as much
//! as the others, also after the base has grown. The only shard of a pool has all of the base.

use aryk_volume::Shard;

/// Bytes of a unit. The superblock's copies of the first shard are at the beginning of the base, as in a pool without shards.
const UNIT_BYTES: u64 = 32 << 20;

/// Bytes of a shard's disk, on a base of so many bytes.
pub const fn share_bytes(shard: Shard, base_bytes: u64) -> u64 {
    match shard.count() {
        1 => base_bytes,
        count => base_bytes / (UNIT_BYTES * count as u64) * UNIT_BYTES,
    }
}

/// The places on the base that have `bytes` of a shard's disk from `offset` on: offsets and lengths.
pub fn share_places(shard: Shard, offset: u64, bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut at = offset;
    let end = offset + bytes;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let left = end - at;
        let (place, len) = if shard == Shard::ALL {
            (at, left)
        } else {
            let unit = at / UNIT_BYTES * u64::from(shard.count()) + u64::from(shard.index());
            let inside = at % UNIT_BYTES;
            (unit * UNIT_BYTES + inside, left.min(UNIT_BYTES - inside))
        };
        at += len;
        Some((place, len))
    })
}

/// The place on the base that has the byte `offset` of a shard's disk.
pub fn share_place(shard: Shard, offset: u64) -> u64 {
    let (place, _) = share_places(shard, offset, 1).next().expect("a byte has a place");
    place
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn shards_have_all_of_the_base_and_nothing_twice() {
        let base = 4 * 5 * UNIT_BYTES + 12345;
        let mut places = BTreeSet::new();
        for index in 0..4 {
            let shard = Shard::new(index, 4).unwrap();
            let bytes = share_bytes(shard, base);
            assert_eq!(bytes, 5 * UNIT_BYTES);
            let mut sum = 0;
            for (place, len) in share_places(shard, 0, bytes) {
                assert!(place + len <= base && places.insert((place, len)));
                sum += len;
            }
            assert_eq!(sum, bytes);
        }
        let mut end = 0;
        for (place, len) in places {
            assert_eq!(place, end);
            end = place + len;
        }
        assert_eq!(share_bytes(Shard::ALL, base), base);
        assert_eq!(share_places(Shard::ALL, 7, base).collect::<Vec<_>>(), [(7, base)]);
    }

    #[test]
    fn a_request_over_the_end_of_a_unit_has_two_places() {
        let shard = Shard::new(1, 2).unwrap();
        let places: Vec<_> = share_places(shard, UNIT_BYTES - 4096, 8192).collect();
        assert_eq!(places, [(2 * UNIT_BYTES - 4096, 4096), (3 * UNIT_BYTES, 4096)]);
        assert_eq!(share_places(shard, 5, 0).count(), 0);
        assert_eq!(share_place(shard, UNIT_BYTES + 5), 3 * UNIT_BYTES + 5);
    }
}
