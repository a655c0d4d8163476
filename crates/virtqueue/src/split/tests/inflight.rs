//! Tests of a successor with an in-flight region, for each step at which its predecessor may have stopped.

use super::driver::{Desc, Guest, WRITE};
use crate::split::inflight;
use crate::{Chain, ConfigError, InflightError, SplitConfig, SplitQueue};
use aryk_dma::{GuestArea, Mapping};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

const SIZE: u16 = 8;

fn region() -> GuestArea {
    let len = inflight::len(SIZE);
    GuestArea::new(&Arc::new(Mapping::anonymous(len).unwrap()), 0, len).unwrap()
}

fn bytes(area: &GuestArea) -> Vec<u8> {
    (0..area.len() as usize).map(|at| area.read::<u8>(at)).collect()
}

/// Creates the queue of a back-end process that starts now.
fn successor(guest: &Guest, region: &GuestArea) -> Result<SplitQueue, ConfigError> {
    let next_used = guest.used_idx();
    // QEMU sends the used index as the base after a crash.
    let config = SplitConfig { next_avail: next_used, next_used, ..guest.config(false) };
    SplitQueue::with_inflight(config, region.clone())
}

fn pop_all(guest: &Guest, queue: &mut SplitQueue) -> Vec<u16> {
    let mut chain = Chain::default();
    std::iter::from_fn(|| queue.pop(&guest.memory, &mut chain).unwrap()).collect()
}

fn guest() -> Guest {
    let guest = Guest::starting_at(SIZE, u16::MAX - 2);
    (0..SIZE).for_each(|i| guest.set_desc(i, Desc { addr: 0x1000, len: 1, flags: WRITE, next: 0 }));
    guest
}

#[test]
fn chains_in_flight_are_replayed_in_order_before_new_ones() {
    let (guest, region) = (guest(), region());
    let mut queue = successor(&guest, &region).unwrap();
    [5, 1, 7, 2].into_iter().for_each(|head| guest.offer(head));
    assert_eq!(pop_all(&guest, &mut queue), [5, 1, 7, 2]);
    queue.push_used(1, 1);
    let _ = queue.publish();
    guest.offer(1);
    // Completed and never published: still in flight.
    queue.push_used(7, 1);
    drop(queue);
    let mut queue = successor(&guest, &region).unwrap();
    assert!(queue.enable_kicks(), "replays are available, although the ring has no new chain");
    assert_eq!(pop_all(&guest, &mut queue), [5, 7, 2, 1]);
    [5, 7, 2, 1].into_iter().for_each(|head| queue.push_used(head, 1));
    let _ = queue.publish();
    let mut queue = successor(&guest, &region).unwrap();
    assert_eq!((pop_all(&guest, &mut queue), queue.next_avail()), (vec![], guest.avail_idx()));
}

/// The region's bytes after each store of a batch, in the order of the stores.
fn states_of_a_batch(before: &[u8], after: &[u8], batch: &[u16]) -> Vec<Vec<u8>> {
    let mut states = vec![before.to_vec()];
    for &head in batch {
        let mut state = states.last().unwrap().clone();
        state[16 + 16 * usize::from(head)] = 0;
        states.push(state);
    }
    assert_eq!(states.last().unwrap()[16..], after[16..]);
    states.push(after.to_vec());
    states
}

#[test]
fn a_successor_completes_a_batch_interrupted_at_any_step() {
    let (guest, region) = (guest(), region());
    let mut queue = successor(&guest, &region).unwrap();
    [0, 3, 6].into_iter().for_each(|head| guest.offer(head));
    pop_all(&guest, &mut queue);
    queue.push_used(6, 1);
    queue.push_used(0, 1);
    let before = bytes(&region);
    let _ = queue.publish();
    let after = bytes(&region);
    for (step, state) in states_of_a_batch(&before, &after, &[6, 0]).into_iter().enumerate() {
        state.iter().enumerate().for_each(|(at, byte)| region.write(at, byte));
        let mut queue = successor(&guest, &region).unwrap();
        assert_eq!(pop_all(&guest, &mut queue), [3], "after step {step}");
    }
}

#[test]
fn an_invalid_region_is_refused() {
    let (guest, region) = (guest(), region());
    drop(successor(&guest, &region).unwrap());
    let used = guest.used_idx();
    let sound = bytes(&region);
    let cases: [(usize, u16, InflightError); 5] = [
        (8, 2, InflightError::Version(2)),
        (10, 4, InflightError::Size { region: 4, queue: SIZE }),
        (14, used.wrapping_sub(9), InflightError::UsedIndex { region: used.wrapping_sub(9), ring: used }),
        (14, used.wrapping_add(1), InflightError::UsedIndex { region: used.wrapping_add(1), ring: used }),
        (32, 2, InflightError::State { head: 1, value: 2 }),
    ];
    for (at, value, error) in cases {
        sound.iter().enumerate().for_each(|(at, byte)| region.write(at, byte));
        region.write(at, &value);
        assert_eq!(successor(&guest, &region).unwrap_err(), ConfigError::Inflight(error));
    }
    sound.iter().enumerate().for_each(|(at, byte)| region.write(at, byte));
    region.write(14, &used.wrapping_sub(1));
    region.write(12, &SIZE);
    assert_eq!(successor(&guest, &region).unwrap_err(), ConfigError::Inflight(InflightError::Head(SIZE)));
    let short = GuestArea::new(&Arc::new(Mapping::anonymous(64).unwrap()), 0, 64).unwrap();
    assert!(matches!(successor(&guest, &short), Err(ConfigError::TooShort { .. })));
}

proptest! {
    #[test]
    fn any_region_content_is_an_error_or_gives_finitely_many_replays(
        content in prop::collection::vec(prop_oneof![4 => Just(0u8), 2 => Just(1u8), 1 => any::<u8>()], 16 * 9),
        version in 0u16..3,
    ) {
        let (guest, region) = (guest(), region());
        content.iter().enumerate().for_each(|(at, byte)| region.write(at, byte));
        region.write(8, &version);
        region.write(10, &SIZE);
        region.write(14, &guest.used_idx().wrapping_sub(u16::from(content[14] % 4)));
        if let Ok(mut queue) = successor(&guest, &region) {
            // The region's content may put the available index into the past.
            let mut chain = Chain::default();
            let mut seen = BTreeSet::new();
            while let Ok(Some(head)) = queue.pop(&guest.memory, &mut chain) {
                prop_assert!(head < SIZE && seen.insert(head));
            }
            seen.into_iter().for_each(|head| queue.push_used(head, 0));
            let _ = queue.publish();
        }
    }
}
