//! Tests of rings against a simulated device, which writes the ring's memory as the specification says.

use std::sync::atomic::Ordering::Relaxed;

use super::{Format, NotOutstanding, Piece, Ring, Shape};
use crate::Memory;

const SIZE: u16 = 8;

struct Rig {
    memory: Memory,
    ring: Ring,
    /// The device's position, and wrap counter.
    used: (u16, bool),
}

impl Rig {
    fn new(format: Format, event_idx: bool) -> Self {
        let memory = Memory::new(64 << 10).unwrap();
        let ring = Ring::new(Shape { format, size: SIZE, event_idx }, &memory, 0);
        Self { memory, ring, used: (0, true) }
    }

    fn load(&self, at: u64) -> u16 {
        self.memory.whole().load_u16(at as usize, Relaxed)
    }

    fn store(&self, at: u64, value: u16) {
        self.memory.whole().store_u16(at as usize, value, Relaxed);
    }

    fn add(&mut self, slot: u16, count: u64) {
        let pieces: Vec<_> =
            (0..count).map(|i| Piece { at: 4096 * i, len: 512, write: i + 1 == count }).collect();
        self.ring.add(slot, &pieces, None);
    }

    /// The id of the `n`th chain made available.
    fn available(&self, n: u16) -> u32 {
        let parts = self.ring.parts();
        match &self.ring {
            Ring::Split(_) => self.load(parts.driver + 4 + 2 * u64::from(n % SIZE)).into(),
            Ring::Packed(_) => self.load(16 * u64::from(n % SIZE) + 12).into(),
        }
    }

    /// Plays the device: completes `id`, whose chain has `count` descriptors.
    fn complete(&mut self, id: u32, count: u16, len: u32) {
        let parts = self.ring.parts();
        let (at, wrap) = self.used;
        match &self.ring {
            Ring::Split(_) => {
                let element = parts.device + 4 + 8 * u64::from(at % SIZE);
                self.memory.whole().write(element as usize, &id.to_le_bytes());
                self.memory.whole().write(element as usize + 4, &len.to_le_bytes());
                self.used.0 += 1;
                self.store(parts.device + 2, self.used.0);
            }
            Ring::Packed(_) => {
                let desc = 16 * u64::from(at);
                self.memory.whole().write(desc as usize + 8, &len.to_le_bytes());
                self.store(desc + 12, id as u16);
                self.store(desc + 14, if wrap { 0x8080 } else { 0 });
                let next = at + count;
                self.used = (next % SIZE, wrap == (next < SIZE));
            }
        }
    }
}

#[test]
fn chains_go_round_and_come_back() {
    for format in [Format::Split, Format::Packed] {
        let mut rig = Rig::new(format, false);
        let mut position = 0;
        for round in 0..40_u16 {
            rig.add(round % 5, 3);
            assert!(rig.ring.publish(), "a device that never said otherwise wants to be kicked");
            assert_eq!((rig.ring.take(), rig.ring.room()), (Ok(None), 5));
            // Split rings count chains; packed rings count descriptors, the last of which has the id.
            let id = rig.available(if format == Format::Split { round } else { position + 2 });
            rig.complete(id, 3, 512);
            assert_eq!(rig.ring.take(), Ok(Some((round % 5, 512))), "{format:?} {round}");
            position = (position + 3) % SIZE;
        }
    }
}

#[test]
fn a_repeated_completion_is_found() {
    for format in [Format::Split, Format::Packed] {
        let mut rig = Rig::new(format, false);
        rig.add(0, 1);
        rig.add(1, 1);
        rig.ring.publish();
        let id = rig.available(0);
        rig.complete(id, 1, 1);
        assert!(matches!(rig.ring.take(), Ok(Some(_))));
        assert_eq!(rig.ring.take(), Ok(None));
        rig.complete(id, 1, 1);
        assert_eq!(rig.ring.take(), Err(NotOutstanding { id }), "{format:?}");
    }
}

#[test]
fn invalid_ids_are_found() {
    for format in [Format::Split, Format::Packed] {
        let mut rig = Rig::new(format, false);
        rig.add(0, 1);
        rig.complete(SIZE.into(), 1, 1);
        assert_eq!(rig.ring.take(), Err(NotOutstanding { id: SIZE.into() }));
    }
}

#[test]
fn kicks_are_given_where_the_device_asks_for_them() {
    for format in [Format::Split, Format::Packed] {
        let mut rig = Rig::new(format, true);
        let device = rig.ring.parts().device;
        let event = |rig: &Rig, index: u16| match format {
            Format::Split => rig.store(device + 4 + 8 * u64::from(SIZE), index),
            Format::Packed => {
                rig.store(device, index | 1 << 15);
                rig.store(device + 2, 2);
            }
        };
        event(&rig, 1);
        rig.add(0, 1);
        assert!(!rig.ring.publish(), "{format:?}: the event index is 1, and this is chain 0");
        rig.add(1, 1);
        assert!(rig.ring.publish(), "{format:?}");
        rig.add(2, 1);
        assert!(!rig.ring.publish(), "{format:?}");
        assert!(!rig.ring.publish(), "nothing was added");
    }
}

#[test]
fn a_position_after_the_end_has_the_other_wrap_counter() {
    let mut rig = Rig::new(Format::Packed, true);
    assert_eq!(rig.ring.base(), 0x8000_8000);
    for round in 0..3 {
        rig.add(0, 3);
        rig.complete(0, 3, 1);
        assert_eq!(rig.ring.take(), Ok(Some((0, 1))), "{round}");
    }
    assert_eq!(rig.ring.base(), 0x0001_0001);
    rig.ring.arm();
    let driver = rig.ring.parts().driver;
    assert_eq!((rig.load(driver), rig.load(driver + 2)), (1, 2));
}

#[test]
fn prepared_chains_go_round_as_they_are() {
    for (format, table) in [Format::Split, Format::Packed]
        .into_iter()
        .zip([None, Some(32 << 10)])
        .chain([(Format::Split, Some(32 << 10)), (Format::Packed, None)])
    {
        let mut rig = Rig::new(format, false);
        let pieces = [false, true].map(|write| Piece { at: 4096, len: 512, write });
        let used = if table.is_some() { 1 } else { 2 };
        for slot in [3, 1] {
            rig.ring.prepare(slot, &pieces, table);
        }
        let mut position = 0;
        for round in 0..50_u16 {
            let slot = if round % 2 == 0 { 3 } else { 1 };
            rig.ring.prepare(slot, &pieces, table);
            rig.ring.offer(slot);
            assert!(rig.ring.publish());
            let id = rig.available(if format == Format::Split { round } else { position + used - 1 });
            rig.complete(id, used, 7);
            assert_eq!(rig.ring.take(), Ok(Some((slot, 7))), "{format:?} {table:?} {round}");
            assert_eq!(rig.ring.take(), Ok(None));
            position = (position + used) % SIZE;
        }
        // Prepared chains of split rings keep their descriptors.
        let kept = if format == Format::Split { 2 * usize::from(used) } else { 0 };
        assert_eq!(rig.ring.room(), usize::from(SIZE) - kept);
    }
}

#[test]
fn polled_rings_ask_for_no_calls() {
    let mut rig = Rig::new(Format::Split, true);
    rig.ring.disarm();
    let event = rig.ring.parts().driver + 4 + 2 * u64::from(SIZE);
    for round in 0..40_000_u16 {
        let event = rig.load(event);
        assert_ne!(event, round, "the event index is reached");
        rig.add(0, 1);
        let id = rig.available(round);
        rig.complete(id, 1, 1);
        assert!(matches!(rig.ring.take(), Ok(Some(_))));
    }
    rig.ring.arm();
    assert_eq!(rig.load(event), 40_000);
    let mut rig = Rig::new(Format::Packed, true);
    rig.ring.disarm();
    assert_eq!(rig.load(rig.ring.parts().driver + 2), 1);
}
