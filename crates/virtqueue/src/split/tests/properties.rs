//! Random steps of a driver and a device: the queue must behave like the simple device, and the used ring must contain exactly
//! the completed chains.

use super::driver::{Desc, Guest, INDIRECT, NEXT, WRITE};
use super::naive;
use crate::{Chain, PopError, SplitConfig, SplitQueue};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use std::collections::{BTreeMap, BTreeSet};

/// Addresses of the driver's indirect tables and buffers.
const TABLES: u64 = 0x1_0000;
const TABLE_LEN: u64 = 0x1000;
const BUFFERS: u64 = 0x20_0000;

/// A valid request.
#[derive(Clone, Debug)]
struct Request {
    readable: Vec<u32>,
    writable: Vec<u32>,
    /// The number of its descriptors in the queue's own table, if the others are in an indirect table.
    direct: Option<Index>,
    /// Picks the request's descriptors among the free ones.
    places: Vec<Index>,
}

#[derive(Clone, Debug)]
enum Step {
    Offer(Request),
    /// Overwrites any descriptor, also of chains in flight.
    Overwrite(Index, Desc),
    /// Overwrites a descriptor of the first indirect table.
    OverwriteTable(u8, Desc),
    /// Makes a head available that the driver does not own.
    OfferWild(u16),
    Jump(u16),
    Pop,
    Complete(Index, u32),
    Publish {
        flags: u16,
        used_event: u16,
    },
    EnableKicks,
    DisableKicks,
}

fn request() -> impl Strategy<Value = Request> {
    let lens = || vec(1..5000_u32, 0..5);
    (lens(), lens(), any::<Option<Index>>(), vec(any::<Index>(), 10))
        .prop_filter("a chain has a descriptor", |(r, w, ..)| !r.is_empty() || !w.is_empty())
        .prop_map(|(readable, writable, direct, places)| Request { readable, writable, direct, places })
}

fn wild_desc() -> impl Strategy<Value = Desc> {
    let end = Guest::LEN;
    let addr = prop_oneof![
        4 => Just(TABLES),
        1 => Just(end - 16),
        1 => Just(end - 8),
        1 => Just(0_u64.wrapping_sub(Guest::BASE + 1)),
        1 => any::<u64>(),
    ];
    let len = prop_oneof![
        Just(0_u32),
        Just(1),
        Just(16),
        Just(17),
        Just(48),
        Just(80),
        Just(16 * 1024),
        Just(16 * 1025),
        Just(u32::MAX),
        any::<u32>(),
    ];
    let flags = prop_oneof![8 => 0..8_u16, 2 => Just(NEXT), 2 => Just(INDIRECT), 1 => any::<u16>()];
    let next = prop_oneof![8 => 0..9_u16, 1 => any::<u16>()];
    (addr, len, flags, next).prop_map(|(addr, len, flags, next)| Desc { addr, len, flags, next })
}

fn valid_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => request().prop_map(Step::Offer),
        6 => Just(Step::Pop),
        6 => (any::<Index>(), any::<u32>()).prop_map(|(i, len)| Step::Complete(i, len)),
        // An event index near the current one, because a distant one is never passed.
        3 => (0..2_u16, 0..6_u16).prop_map(|(flags, used_event)| Step::Publish { flags, used_event }),
        1 => Just(Step::EnableKicks),
        1 => Just(Step::DisableKicks),
    ]
}

fn hostile_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        20 => valid_step(),
        8 => (any::<Index>(), wild_desc()).prop_map(|(i, desc)| Step::Overwrite(i, desc)),
        4 => (0..5_u8, wild_desc()).prop_map(|(i, desc)| Step::OverwriteTable(i, desc)),
        8 => (0..10_u16).prop_map(Step::OfferWild),
        1 => any::<u16>().prop_map(Step::OfferWild),
        1 => any::<u16>().prop_map(Step::Jump),
    ]
}

/// Both sides, and their expected state.
struct World {
    guest: Guest,
    event_idx: bool,
    indirect: bool,
    queue: SplitQueue,
    chain: Chain,
    /// Free descriptors, as the driver tracks them.
    free: BTreeSet<u16>,
    /// The driver's requests, by head, and their descriptors.
    submitted: BTreeMap<u16, (Request, Vec<u16>)>,
    /// Chains that were taken and not completed.
    in_flight: BTreeSet<u16>,
    /// Completed chains that are not published yet.
    unpublished: Vec<(u32, u32)>,
    next_avail: u16,
    shown: u16,
    published: u16,
    ever_published: bool,
    broken: Option<PopError>,
    overwrote: bool,
}

impl World {
    fn new(size: u16, start: u16, event_idx: bool, indirect: bool) -> Self {
        let guest = Guest::starting_at(size, start);
        let config = SplitConfig { indirect, ..guest.config(event_idx) };
        Self {
            queue: SplitQueue::new(config).unwrap(),
            chain: Chain::default(),
            free: (0..size).collect(),
            submitted: BTreeMap::new(),
            in_flight: BTreeSet::new(),
            unpublished: Vec::new(),
            next_avail: start,
            shown: start,
            published: start,
            ever_published: false,
            broken: None,
            overwrote: false,
            guest,
            event_idx,
            indirect,
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Offer(request) => self.offer(request),
            Step::Overwrite(place, desc) => {
                self.overwrote = true;
                self.guest.set_desc(place.index(self.guest.size.into()) as u16, desc);
            }
            Step::OverwriteTable(place, desc) => {
                self.overwrote = true;
                self.guest.set_table(TABLES + 16 * u64::from(place), &[desc]);
            }
            Step::OfferWild(head) => {
                self.overwrote = true;
                self.guest.offer(head);
            }
            Step::Jump(idx) => {
                self.overwrote = true;
                self.guest.set_avail_idx(idx);
            }
            Step::Pop => self.pop(),
            Step::Complete(which, len) => self.complete(which, len),
            Step::Publish { flags, used_event } => self.publish(flags, used_event),
            Step::EnableKicks => {
                let more = self.queue.enable_kicks();
                assert_eq!(more, self.guest.avail_idx() != self.next_avail);
                if self.event_idx {
                    assert_eq!(self.guest.avail_event(), self.next_avail);
                } else {
                    assert_eq!(self.guest.used_flags(), 0);
                }
            }
            Step::DisableKicks => {
                self.queue.disable_kicks();
                assert_eq!(self.guest.used_flags(), u16::from(!self.event_idx));
            }
        }
        assert_eq!(self.queue.in_flight() as usize, self.in_flight.len());
        assert_eq!(self.queue.next_avail(), self.next_avail);
        assert_eq!(self.guest.used_idx(), self.published);
    }

    /// Writes a random request, if there are enough free descriptors for it.
    fn offer(&mut self, mut request: Request) {
        let parts = [(&request.readable, 0), (&request.writable, WRITE)];
        let mut descs: Vec<_> = parts
            .into_iter()
            .flat_map(|(lens, flags)| lens.iter().map(move |len| (*len, flags)))
            .enumerate()
            .map(|(i, (len, flags))| Desc { addr: BUFFERS + 8192 * i as u64, len, flags, next: 0 })
            .collect();
        if !self.indirect {
            request.direct = None;
        }
        let direct = request.direct.map_or(descs.len(), |direct| direct.index(descs.len()));
        let mut table = descs.split_off(direct);
        let needed = direct + usize::from(!table.is_empty());
        let waiting = self.guest.avail_idx().wrapping_sub(self.next_avail);
        if needed > self.free.len() || waiting >= self.guest.size {
            return;
        }
        let mut places = Vec::new();
        for place in &request.places[..needed] {
            let place = *place.get(&Vec::from_iter(self.free.iter().copied()));
            self.free.remove(&place);
            places.push(place);
        }
        if !table.is_empty() {
            let count = table.len();
            for (i, desc) in table[..count - 1].iter_mut().enumerate() {
                (desc.flags, desc.next) = (desc.flags | NEXT, i as u16 + 1);
            }
            let addr = TABLES + TABLE_LEN * u64::from(places[0]);
            self.guest.set_table(addr, &table);
            descs.push(Desc { addr, len: 16 * count as u32, flags: INDIRECT, next: 0 });
        }
        for (i, mut desc) in descs.into_iter().enumerate() {
            if i + 1 < needed {
                (desc.flags, desc.next) = (desc.flags | NEXT, places[i + 1]);
            }
            self.guest.set_desc(places[i], desc);
        }
        self.guest.offer(places[0]);
        self.submitted.insert(places[0], (request, places));
    }

    fn pop(&mut self) {
        // The device reads the driver's index only when all chains up to the last read index are taken.
        if self.shown == self.next_avail {
            self.shown = self.guest.avail_idx();
        }
        let expected = match self.broken {
            Some(error) => Err(error),
            None => naive::pop(&self.guest, self.indirect, self.next_avail, self.shown, &self.in_flight),
        };
        let popped = self.queue.pop(&self.guest.memory, &mut self.chain).map(|head| {
            head.map(|head| (head, self.chain.readable().to_vec(), self.chain.writable().to_vec()))
        });
        assert_eq!(popped, expected);
        match popped {
            Ok(None) => {}
            Ok(Some((head, readable, writable))) => {
                if !self.overwrote {
                    let (request, _) = &self.submitted[&head];
                    assert!(readable.iter().map(|p| p.len).eq(request.readable.iter().copied()));
                    assert!(writable.iter().map(|p| p.len).eq(request.writable.iter().copied()));
                }
                self.took(head);
            }
            Err(PopError::Chain { head, .. }) => {
                assert!(self.overwrote, "a valid driver's chain was refused");
                self.took(head);
            }
            Err(error) => {
                assert!(self.overwrote, "a valid driver's queue was refused");
                self.broken = Some(error);
            }
        }
    }

    fn took(&mut self, head: u16) {
        self.in_flight.insert(head);
        self.next_avail = self.next_avail.wrapping_add(1);
    }

    fn complete(&mut self, which: Index, len: u32) {
        let in_flight = Vec::from_iter(self.in_flight.iter().copied());
        if in_flight.is_empty() || self.unpublished.len() >= self.guest.size.into() {
            return;
        }
        let head = *which.get(&in_flight);
        self.in_flight.remove(&head);
        self.queue.push_used(head, len);
        self.unpublished.push((head.into(), len));
    }

    fn publish(&mut self, flags: u16, used_event: u16) {
        let old = self.published;
        let event = old.wrapping_add(used_event).wrapping_sub(2);
        self.guest.set_avail_flags(flags);
        if self.event_idx {
            self.guest.set_used_event(event);
        }
        let called = self.queue.publish();
        let new = old.wrapping_add(self.unpublished.len() as u16);
        let first = !std::mem::replace(&mut self.ever_published, true);
        let expected = match (first || !self.unpublished.is_empty(), self.event_idx) {
            (false, _) => false,
            (true, false) => flags == 0,
            (true, true) => first || naive::wanted(event, old, new),
        };
        assert_eq!(called, expected, "event {event}, from {old} to {new}");
        self.published = new;
        for (i, unpublished) in self.unpublished.drain(..).enumerate() {
            let place = old.wrapping_add(i as u16) % self.guest.size;
            assert_eq!(self.guest.used(place), unpublished);
            if let Some((_, places)) = self.submitted.remove(&(unpublished.0 as u16)) {
                self.free.extend(places);
            }
        }
    }
}

fn size() -> impl Strategy<Value = u16> {
    (0..7_u32).prop_map(|log| 1 << log)
}

/// Includes values with which indices wrap soon.
fn start() -> impl Strategy<Value = u16> {
    prop_oneof![Just(0), 65_500..=u16::MAX, any::<u16>()]
}

proptest! {
    #[test]
    fn a_valid_driver_finds_all_its_chains_completed(
        size in size(), start in start(), event_idx: bool, indirect: bool, steps in vec(valid_step(), 0..150),
    ) {
        let mut world = World::new(size, start, event_idx, indirect);
        steps.into_iter().for_each(|step| world.step(step));
    }

    #[test]
    fn a_hostile_driver_causes_errors_only(
        size in size(), start in start(), event_idx: bool, indirect: bool, steps in vec(hostile_step(), 0..150),
    ) {
        let mut world = World::new(size, start, event_idx, indirect);
        steps.into_iter().for_each(|step| world.step(step));
    }
}
