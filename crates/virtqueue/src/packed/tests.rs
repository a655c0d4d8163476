//! Tests of the queue against a simple driver, with and without crashes.

mod driver;

use super::{EVENT_DESC, EVENT_DISABLE, EVENT_ENABLE, INDIRECT, NEXT, PackedConfig, PackedQueue, WRITE};
use crate::{CHAIN_MAX, Chain, ChainError, ConfigError, InflightError, PopError, QueueError};
use aryk_dma::GuestArea;
use driver::{BUFFERS, Driver, TABLES};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// Descriptors: address, length, flags.
type Descs = [(u64, u32, u16)];

fn pop(driver: &Driver, queue: &mut PackedQueue) -> Option<(u16, Vec<u64>)> {
    let mut chain = Chain::default();
    let id = queue.pop(&driver.memory, &mut chain).unwrap()?;
    Some((id, chain.readable().iter().chain(chain.writable()).map(|piece| piece.addr).collect()))
}

fn error(driver: &Driver, queue: &mut PackedQueue) -> PopError {
    queue.pop(&driver.memory, &mut Chain::default()).unwrap_err()
}

#[test]
fn chains_complete_out_of_order() {
    let mut driver = Driver::new(5);
    let mut queue = driver.queue(false);
    assert_eq!(pop(&driver, &mut queue), None);
    for round in 0..20 {
        let (long, short) = (driver.add(3), driver.add(1));
        assert_eq!(queue.available(), Ok(1));
        let (first, pieces) = pop(&driver, &mut queue).unwrap();
        assert_eq!((first, pieces.len()), (long, 3));
        assert_eq!(pop(&driver, &mut queue).unwrap().0, short);
        assert_eq!((pop(&driver, &mut queue), queue.in_flight()), (None, 2));
        queue.push_used(short, 7);
        queue.push_used(long, 0);
        assert_eq!(driver.take_used(), None, "the element is not published yet");
        assert!(queue.publish());
        assert_eq!((driver.take_used(), driver.take_used()), (Some((short, 7)), Some((long, 0))), "{round}");
        assert!(!queue.publish(), "nothing new");
    }
}

/// The driver makes a chain available while the device, which has completed another chain without publishing it, pops the next.
/// The in-flight region of a back-end that dies then records both: the first is visible to the driver, the second is in flight.
#[test]
fn a_chain_added_during_a_pop_is_recorded_beside_unpublished_chains() {
    let mut driver = Driver::new(4);
    let memory = std::mem::take(&mut driver.memory);
    let mut chain = Chain::default();
    for round in 0..500 {
        let mut queue = driver.successor().unwrap();
        let first = driver.add(1);
        assert_eq!(queue.pop(&memory, &mut chain), Ok(Some(first)));
        queue.push_used(first, 0);
        let second = std::thread::scope(|scope| {
            let (added, spins) = (&mut driver, round % 50);
            let added = scope.spawn(move || {
                (0..spins).for_each(|_| std::hint::spin_loop());
                added.add(1)
            });
            let popped = loop {
                if let Some(id) = queue.pop(&memory, &mut chain).unwrap() {
                    break id;
                }
            };
            assert_eq!(popped, added.join().unwrap());
            popped
        });
        assert_eq!(driver.take_used(), Some((first, 0)), "round {round}: the chain is in no record");
        let mut successor = driver.successor().unwrap();
        assert_eq!(successor.replays(), 1);
        assert_eq!(successor.pop(&memory, &mut chain), Ok(Some(second)));
        successor.push_used(second, 0);
        let _ = successor.publish();
        assert_eq!(driver.take_used(), Some((second, 0)));
    }
}

#[test]
fn a_chain_that_is_too_long_is_refused_and_its_cost_is_counted() {
    const LONG: u16 = CHAIN_MAX + 5;
    let mut driver = Driver::new(2048);
    let mut queue = driver.queue(false);
    let (longest, longer) = (driver.add(CHAIN_MAX), driver.add(LONG - 6 - 8));
    assert_eq!(pop(&driver, &mut queue).unwrap().1.len(), usize::from(CHAIN_MAX));
    assert_eq!(pop(&driver, &mut queue).unwrap().0, longer);
    queue.push_used(longest, 0);
    queue.push_used(longer, 0);
    let _ = queue.publish();
    while driver.take_used().is_some() {}
    let id = driver.add(LONG);
    let mut chain = Chain::default();
    let refused = queue.pop(&driver.memory, &mut chain);
    assert_eq!(refused, Err(PopError::Chain { head: id, error: ChainError::TooLong }));
    assert!(chain.cost() >= u32::from(LONG), "{}", chain.cost());
}

#[test]
fn a_successor_continues_at_the_base() {
    let mut driver = Driver::new(3);
    for _ in 0..10 {
        let mut queue = driver.queue(false);
        let id = driver.add(2);
        assert_eq!(pop(&driver, &mut queue).unwrap().0, id);
        queue.push_used(id, 1);
        let _ = queue.publish();
        assert_eq!(driver.take_used(), Some((id, 1)));
        driver.base = queue.base();
    }
}

#[test]
fn an_indirect_table_is_one_descriptor() {
    let mut driver = Driver::new(2);
    let mut queue = driver.queue(false);
    driver.table(0, &[(BUFFERS, 16, 0), (BUFFERS + 64, 512, WRITE), (BUFFERS + 1024, 1, WRITE)]);
    let id = driver.offer(&[(TABLES, 48, INDIRECT)]);
    let mut chain = Chain::default();
    assert_eq!(queue.pop(&driver.memory, &mut chain), Ok(Some(id)));
    assert_eq!((chain.readable_len(), chain.writable_len()), (16, 513));
    queue.push_used(id, 1);
    let _ = queue.publish();
    assert_eq!(driver.take_used(), Some((id, 1)));
}

#[test]
fn malformed_chains_are_refused_by_id() {
    let cases: [(&Descs, ChainError); 6] = [
        (&[(BUFFERS, 0, 0)], ChainError::Empty),
        (&[(BUFFERS, 1, WRITE), (BUFFERS, 1, 0)], ChainError::Order),
        (&[(TABLES, 24, INDIRECT)], ChainError::IndirectLength(24)),
        (&[(TABLES, 0, INDIRECT)], ChainError::IndirectLength(0)),
        (&[(TABLES, 16 << 20, INDIRECT)], ChainError::IndirectLength(16 << 20)),
        (&[(u64::MAX - 8, 32, INDIRECT)], ChainError::IndirectAddress(u64::MAX - 8)),
    ];
    let mut driver = Driver::new(4);
    let mut queue = driver.queue(false);
    for (descs, expected) in cases {
        let id = driver.offer(descs);
        assert_eq!(error(&driver, &mut queue), PopError::Chain { head: id, error: expected });
        queue.push_used(id, 0);
        let _ = queue.publish();
        assert_eq!(driver.take_used(), Some((id, 0)));
    }
}

#[test]
fn invalid_indices_break_the_queue() {
    let mut driver = Driver::new(4);
    let mut queue = driver.queue(false);
    driver.offer_as(4, &[(BUFFERS, 1, 0)]);
    assert_eq!(error(&driver, &mut queue), QueueError::HeadIndex(4).into());
    assert!(queue.available().is_err() && queue.broken().is_some());

    let mut driver = Driver::new(4);
    let mut queue = driver.queue(false);
    driver.offer_as(1, &[(BUFFERS, 1, 0)]);
    driver.offer_as(1, &[(BUFFERS, 1, 0)]);
    assert_eq!(pop(&driver, &mut queue).unwrap().0, 1);
    assert_eq!(error(&driver, &mut queue), QueueError::HeadInFlight(1).into());

    let mut driver = Driver::new(4);
    let mut queue = driver.queue(false);
    driver.offer_as(1, &[(BUFFERS, 1, NEXT); 5]);
    assert_eq!(error(&driver, &mut queue), QueueError::Overrun.into());

    let bad = |base| PackedQueue::new(PackedConfig { base, ..Driver::new(4).config(false) }).unwrap_err();
    for base in [4, 4 << 16, 0x8000_0001, 0x0000_8002] {
        assert_eq!(bad(base), ConfigError::Base(base));
    }
}

#[test]
fn calls_and_kicks_follow_event_suppression() {
    let mut driver = Driver::new(4);
    let mut queue = driver.queue(true);
    assert!(queue.publish(), "a predecessor may have failed to send a call");
    let give = |queue: &mut PackedQueue, driver: &mut Driver| {
        let id = driver.add(1);
        pop(driver, queue).unwrap();
        queue.push_used(id, 0);
        let called = queue.publish();
        driver.take_used().unwrap();
        called
    };
    driver.ask_for_calls(EVENT_ENABLE, 0);
    assert!(give(&mut queue, &mut driver));
    driver.ask_for_calls(EVENT_DISABLE, 0);
    assert!(!give(&mut queue, &mut driver));
    // At 2, at 3, and after one pass at 1.
    driver.ask_for_calls(EVENT_DESC, 2 | 1 << 15);
    assert!(give(&mut queue, &mut driver));
    driver.ask_for_calls(EVENT_DESC, 1);
    assert_eq!([(); 3].map(|()| give(&mut queue, &mut driver)), [false, false, true]);

    assert!(!queue.enable_kicks());
    assert_eq!(driver.kicks_asked_for(), (EVENT_DESC, 2));
    queue.disable_kicks();
    assert_eq!(driver.kicks_asked_for().0, EVENT_DISABLE);
    driver.add(1);
    assert!(queue.enable_kicks());
}

/// A step of driver or device.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// The driver adds a chain of this many descriptors.
    Add(u16),
    Pop,
    /// The device completes the n-th chain in flight.
    Complete(usize),
    Publish,
    /// The device dies. The driver continues, and may fill the ring, before a successor starts.
    Crash {
        refill: bool,
    },
    /// The device dies during a publication, after this many stores.
    CrashWithin {
        stores: usize,
        refill: bool,
    },
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        4 => (1u16..4).prop_map(Act::Add),
        4 => Just(Act::Pop),
        4 => (0usize..8).prop_map(Act::Complete),
        3 => Just(Act::Publish),
        1 => any::<bool>().prop_map(|refill| Act::Crash { refill }),
        1 => (0usize..24, any::<bool>()).prop_map(|(stores, refill)| Act::CrashWithin { stores, refill }),
    ];
    prop::collection::vec(act, 1..120)
}

/// Publishes as [`PackedQueue::publish`] does, but executes only the first `stores` stores. `region` is the in-flight region.
fn publish_in_part(queue: &mut PackedQueue, region: &GuestArea, stores: usize) {
    let Some(kept) = queue.kept.as_mut().filter(|_| !queue.used.is_empty()) else { return };
    let mut left = 0..stores;
    let mut next = || left.next().is_some();
    if !next() {
        return;
    }
    kept.publishing(queue.next_used);
    for used in &queue.used {
        if !next() {
            return;
        }
        queue.config.desc.store_u16(
            16 * usize::from(used.at.index) + 14,
            used.flags,
            std::sync::atomic::Ordering::Release,
        );
    }
    let bytes = || (0..region.len() as usize).map(|at| region.read::<u8>(at)).collect::<Vec<_>>();
    let before = bytes();
    kept.published();
    let after = bytes();
    // The marks were cleared one by one, then the old end of the free list and the old position were set.
    let marks = (32..after.len()).filter(|&at| before[at] != after[at]).map(|at| at..at + 1);
    for range in marks.chain([14..16, 16..24]) {
        if !next() {
            range.for_each(|at| region.write(at, &before[at]));
        }
    }
}

/// A driver, its device, and their expected state.
struct World {
    driver: Driver,
    queue: PackedQueue,
    /// Descriptors of each chain that is not completed yet.
    waited: BTreeMap<u16, u16>,
    /// Ids of the chains that the device has taken, in order.
    taken: Vec<u16>,
}

impl World {
    fn new(size: u16) -> Self {
        let driver = Driver::new(size);
        let queue = driver.successor().unwrap();
        Self { driver, queue, waited: BTreeMap::new(), taken: Vec::new() }
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Add(count) if self.driver.has_room(count) => self.add(count),
            Act::Pop => {
                if let Some((id, pieces)) = pop(&self.driver, &mut self.queue) {
                    assert_eq!(
                        pieces.len(),
                        usize::from(self.waited[&id]),
                        "the chain as the driver wrote it"
                    );
                    assert!(!self.taken.contains(&id));
                    self.taken.push(id);
                }
            }
            Act::Complete(n) if n < self.taken.len() => {
                let id = self.taken.remove(n);
                self.queue.push_used(id, id.into());
            }
            Act::Publish => {
                let _ = self.queue.publish();
            }
            Act::Crash { refill } => self.crash(refill),
            Act::CrashWithin { stores, refill } => {
                publish_in_part(&mut self.queue, &self.driver.region, stores);
                self.crash(refill);
            }
            Act::Add(_) | Act::Complete(_) => {}
        }
        self.take_used();
    }

    fn add(&mut self, count: u16) {
        let id = self.driver.add(count);
        self.waited.insert(id, count);
    }

    fn take_used(&mut self) {
        while let Some((id, len)) = self.driver.take_used() {
            assert_eq!(len, id.into());
            assert!(self.waited.remove(&id).is_some(), "{id} was answered twice");
        }
    }

    fn crash(&mut self, refill: bool) {
        self.take_used();
        while refill && self.driver.has_room(1) {
            self.add(1);
        }
        self.queue = self.driver.successor().unwrap();
        self.taken.clear();
    }
}

proptest! {
    #[test]
    fn each_chain_is_answered_once_through_any_crashes(size in 1u16..9, acts in acts()) {
        let mut world = World::new(size);
        acts.into_iter().for_each(|act| world.act(act));
        // In the end all chains are completed.
        for _ in 0..64 {
            world.act(Act::Pop);
            world.act(Act::Complete(0));
            world.act(Act::Publish);
        }
        prop_assert!(world.waited.is_empty(), "{:?}", world.waited);
        prop_assert_eq!(world.queue.in_flight(), 0);
    }

    #[test]
    fn any_region_content_is_an_error_or_gives_finitely_many_replays(
        content in prop::collection::vec(prop_oneof![6 => Just(0u8), 2 => Just(1u8), 2 => 2u8..5, 1 => any::<u8>()], 32 * 5),
    ) {
        let driver = Driver::new(4);
        content.iter().enumerate().for_each(|(at, byte)| driver.region.write(at, byte));
        driver.region.write(8, &1u16);
        driver.region.write(10, &4u16);
        if let Ok(mut queue) = driver.successor() {
            let mut chain = Chain::default();
            for _ in 0..16 {
                match queue.pop(&driver.memory, &mut chain) {
                    Ok(Some(id)) | Err(PopError::Chain { head: id, .. }) => queue.push_used(id, 0),
                    Ok(None) | Err(PopError::Queue(_)) => break,
                }
            }
            let _ = queue.publish();
        }
    }
}

#[test]
fn a_region_with_invalid_fields_is_refused() {
    let driver = Driver::new(4);
    drop(driver.successor().unwrap());
    let refused = |at: usize, value: u16, expected: InflightError| {
        let before: u16 = driver.region.read(at);
        driver.region.write(at, &value);
        assert_eq!(driver.successor().unwrap_err(), ConfigError::Inflight(expected));
        driver.region.write(at, &before);
    };
    refused(8, 2, InflightError::Version(2));
    refused(10, 8, InflightError::Size { region: 8, queue: 4 });
    refused(16, 4, InflightError::Head(4));
    refused(32, 1, InflightError::Chain(0));
    refused(64, 3, InflightError::State { head: 1, value: 3 });
    assert!(driver.successor().is_ok());
}
