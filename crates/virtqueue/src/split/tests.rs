//! Tests of the queue against a simple driver, and against a simple device written from the specification's text.

mod concurrency;
mod driver;
mod inflight;
mod naive;
mod properties;

use super::{SplitConfig, SplitQueue, avail_len, desc_len, used_idx, used_len};
use crate::{CHAIN_MAX, Chain, ChainError, ConfigError, Piece, PopError, QueueError};
use aryk_dma::{MemTable, Region};
use driver::{Desc, Guest, INDIRECT, NEXT, WRITE};

fn chain_of(guest: &Guest, queue: &mut SplitQueue) -> (u16, Vec<Piece>, Vec<Piece>) {
    let mut chain = Chain::default();
    let head = queue.pop(&guest.memory, &mut chain).unwrap().expect("a chain is available");
    (head, chain.readable().to_vec(), chain.writable().to_vec())
}

fn error_of(guest: &Guest, queue: &mut SplitQueue) -> PopError {
    queue.pop(&guest.memory, &mut Chain::default()).unwrap_err()
}

#[test]
fn a_block_request_is_taken_and_completed() {
    let guest = Guest::new(8);
    let mut queue = guest.queue(false);
    let mut chain = Chain::default();
    assert_eq!(queue.pop(&guest.memory, &mut chain), Ok(None));

    guest.set_desc(3, Desc { addr: 0x1000, len: 16, flags: NEXT, next: 5 });
    guest.set_desc(5, Desc { addr: 0x2000, len: 4096, flags: NEXT | WRITE, next: 1 });
    guest.set_desc(1, Desc { addr: 0x3000, len: 1, flags: WRITE, next: 99 });
    guest.memory.write_bytes(guest.base + 0x1000, b"0123456789abcdef").unwrap();
    guest.offer(3);
    assert_eq!(queue.available(), Ok(1));
    assert_eq!(queue.pop(&guest.memory, &mut chain), Ok(Some(3)));
    assert_eq!((chain.readable_len(), chain.writable_len(), queue.in_flight()), (16, 4097, 1));
    assert_eq!(chain.take_header::<[u8; 16]>(&guest.memory), Ok(Some(*b"0123456789abcdef")));
    assert_eq!(chain.take_last_writable(), Some(guest.base + 0x3000));
    assert_eq!((chain.readable(), chain.writable()), (&[][..], &[guest.piece(0x2000, 4096)][..]));

    queue.push_used(3, 4097);
    assert_eq!(guest.used_idx(), 0, "the element is not published yet");
    assert!(queue.publish());
    assert_eq!((guest.used_idx(), guest.used(0)), (1, (3, 4097)));
    assert!(!queue.publish(), "nothing new");
    assert_eq!((queue.next_avail(), queue.next_used(), queue.in_flight()), (1, 1, 0));
    assert_eq!(queue.pop(&guest.memory, &mut chain), Ok(None));
}

#[test]
fn the_fast_path_takes_header_and_status_in_separate_buffers() {
    let guest = Guest::new(8);
    let (mut queue, mut chain) = (guest.queue(false), Chain::default());
    guest.memory.write_bytes(guest.base + 0x1000, b"0123456789abcdef").unwrap();
    // Each case: the lengths of a chain's buffers; how many of them are readable; and, if the fast path takes header and
    // status, how many of the data buffers are readable.
    let chains: [(&[u32], usize, Option<usize>); 9] = [
        (&[16, 1], 1, Some(0)),
        (&[16, 512, 1], 1, Some(0)),
        (&[16, 512, 512, 1], 3, Some(2)),
        (&[16, 1, 512, 1], 2, Some(1)),
        (&[16], 1, None),
        (&[1], 0, None),
        (&[16, 512], 2, None),
        (&[15, 1], 1, None),
        (&[16, 2], 1, None),
    ];
    for (lens, readable, taken) in chains {
        for (i, &len) in (0_u16..).zip(lens) {
            let next = if usize::from(i) + 1 < lens.len() { NEXT } else { 0 };
            let flags = next | if usize::from(i) < readable { 0 } else { WRITE };
            guest.set_desc(i, Desc { addr: 0x1000 * (u64::from(i) + 1), len, flags, next: i + 1 });
        }
        guest.offer(0);
        queue.pop(&guest.memory, &mut chain).unwrap();
        let whole = (chain.readable().to_vec(), chain.writable().to_vec());
        let ends = chain.take_ends::<[u8; 16]>(&guest.memory).map(|ends| {
            assert_eq!(ends.header, *b"0123456789abcdef");
            assert_eq!(ends.status, guest.base + 0x1000 * lens.len() as u64);
            (ends.readable.to_vec(), ends.writable.to_vec())
        });
        let left = (chain.readable().to_vec(), chain.writable().to_vec());
        match taken {
            Some(count) => {
                let data = (left.0.len(), left.0.len() + left.1.len());
                assert_eq!((ends, data), (Some(left), (count, lens.len() - 2)), "{lens:?}");
                assert!(chain.take_ends::<[u8; 16]>(&guest.memory).is_none(), "once");
            }
            None => assert_eq!((ends, left), (None, whole), "{lens:?}"),
        }
        queue.push_used(0, 0);
    }
}

#[test]
fn header_and_status_may_be_split_in_any_way() {
    let guest = Guest::new(8);
    let mut queue = guest.queue(false);
    let mut chain = Chain::default();
    guest.memory.write_bytes(guest.base + 0x1000, b"0123456789abcdefDATA").unwrap();
    guest.set_desc(0, Desc { addr: 0x1000, len: 3, flags: NEXT, next: 1 });
    guest.set_desc(1, Desc { addr: 0x1003, len: 17, flags: NEXT, next: 2 });
    guest.set_desc(2, Desc { addr: 0x2000, len: 513, flags: WRITE, next: 0 });
    guest.offer(0);
    queue.pop(&guest.memory, &mut chain).unwrap();
    assert_eq!(chain.take_header::<[u8; 16]>(&guest.memory), Ok(Some(*b"0123456789abcdef")));
    assert_eq!(chain.take_last_writable(), Some(guest.base + 0x2200));
    assert_eq!(chain.readable(), [guest.piece(0x1010, 4)]);
    assert_eq!(chain.writable(), [guest.piece(0x2000, 512)]);
    assert_eq!(chain.take_header::<[u8; 16]>(&guest.memory), Ok(None), "only 4 bytes are left");
}

#[test]
fn a_chain_may_end_in_an_indirect_table() {
    let guest = Guest::new(4);
    let mut queue = guest.queue(false);
    let table = [
        Desc { addr: 0x2000, len: 4096, flags: NEXT | WRITE, next: 2 },
        Desc { addr: 0x9999, len: 0, flags: INDIRECT, next: 77 },
        Desc { addr: 0x3000, len: 1, flags: WRITE, next: 0 },
    ];
    guest.set_table(0x5000, &table);
    guest.set_desc(2, Desc { addr: 0x1000, len: 16, flags: NEXT, next: 0 });
    guest.set_desc(0, Desc { addr: 0x5000, len: 48, flags: INDIRECT | WRITE, next: 0 });
    guest.offer(2);
    let (head, readable, writable) = chain_of(&guest, &mut queue);
    assert_eq!((head, readable), (2, vec![guest.piece(0x1000, 16)]));
    assert_eq!(writable, [guest.piece(0x2000, 4096), guest.piece(0x3000, 1)]);
}

#[test]
fn malformed_chains_fail_only_themselves() {
    let ok = Desc { addr: 0x1000, len: 16, flags: 0, next: 0 };
    let table = |len| Desc { addr: 0x5000, len, flags: INDIRECT, next: 0 };
    let nested = [Desc { flags: INDIRECT, ..ok }];
    let far = [Desc { flags: NEXT, next: 1, ..ok }];
    let outside = u64::MAX - Guest::BASE - 0x20;
    let cases: [(&[Desc], &[Desc], ChainError); 12] = [
        (&[Desc { flags: NEXT, next: 8, ..ok }], &[], ChainError::Index(8)),
        (&[Desc { flags: NEXT, next: 0, ..ok }], &[], ChainError::TooLong),
        (&[Desc { len: 0, ..ok }], &[], ChainError::Empty),
        (&[Desc { flags: NEXT | WRITE, next: 1, ..ok }, ok], &[], ChainError::Order),
        (&[Desc { flags: INDIRECT | NEXT, len: 16, ..ok }], &[], ChainError::IndirectNext),
        (&[table(0)], &[], ChainError::IndirectLength(0)),
        (&[table(17)], &[ok], ChainError::IndirectLength(17)),
        (&[table(16 * (u32::from(CHAIN_MAX) + 1))], &[], ChainError::IndirectLength(16 * 1025)),
        (&[table(0xffff_fff0)], &[], ChainError::IndirectLength(0xffff_fff0)),
        (&[table(16)], &nested, ChainError::IndirectNested),
        (&[table(16)], &far, ChainError::Index(1)),
        (&[Desc { addr: outside, ..table(16) }], &[], ChainError::IndirectAddress(Guest::BASE + outside)),
    ];
    for (descs, table, error) in cases {
        let guest = Guest::new(8);
        let mut queue = guest.queue(false);
        guest.set_table(0x5000, table);
        descs.iter().enumerate().for_each(|(i, d)| guest.set_desc(i as u16, *d));
        guest.set_desc(7, ok);
        guest.offer(0);
        guest.offer(7);
        assert_eq!(error_of(&guest, &mut queue), PopError::Chain { head: 0, error });
        queue.push_used(0, 0);
        assert!(queue.publish());
        assert_eq!(chain_of(&guest, &mut queue).0, 7, "the queue continues");
    }
}

#[test]
fn indirect_tables_must_be_negotiated() {
    let guest = Guest::new(8);
    let mut queue = SplitQueue::new(SplitConfig { indirect: false, ..guest.config(false) }).unwrap();
    guest.set_desc(0, Desc { addr: 0x5000, len: 16, flags: INDIRECT, next: 0 });
    guest.offer(0);
    let error = ChainError::IndirectNotNegotiated;
    assert_eq!(error_of(&guest, &mut queue), PopError::Chain { head: 0, error });
}

#[test]
fn an_invalid_head_breaks_the_queue() {
    let jump = QueueError::IndexJump { from: 0, to: 9 };
    let cases = [(8, 1, QueueError::HeadIndex(8)), (0, 2, QueueError::HeadInFlight(0)), (0, 9, jump)];
    for (head, idx, error) in cases {
        let guest = Guest::new(8);
        let mut queue = guest.queue(false);
        guest.set_desc(0, Desc { addr: 0x1000, len: 16, flags: 0, next: 0 });
        (0..8).for_each(|place| guest.set_avail(place, head));
        guest.set_avail_idx(idx);
        if idx == 2 {
            chain_of(&guest, &mut queue);
        }
        assert_eq!(error_of(&guest, &mut queue), error.into());
        guest.set_avail_idx(0);
        assert_eq!((queue.available(), queue.broken()), (Err(error), Some(error)), "for ever");
    }
}

#[test]
fn the_parameters_of_a_queue_are_checked() {
    let guest = Guest::new(8);
    let part = |offset, len| guest.area(offset, len);
    let bad = |change: &dyn Fn(&mut SplitConfig)| {
        let mut config = guest.config(true);
        change(&mut config);
        SplitQueue::new(config).unwrap_err()
    };
    for size in [0, 3, 6, 32_769, u16::MAX] {
        assert_eq!(bad(&|c| c.size = size), ConfigError::Size(size));
    }
    let short = |part, len, needed| ConfigError::TooShort { part, len, needed };
    assert_eq!(bad(&|c| c.desc = part(0, 127)), short("descriptor table", 127, 128));
    assert_eq!(bad(&|c| c.avail = part(0, 20)), short("available ring", 20, 22));
    assert_eq!(bad(&|c| c.used = part(0, 68)), short("used ring", 68, 70));
    let unaligned = |part, align| ConfigError::Unaligned { part, align };
    assert_eq!(bad(&|c| c.desc = part(8, 128)), unaligned("descriptor table", 16));
    assert_eq!(bad(&|c| c.avail = part(1, 22)), unaligned("available ring", 2));
    assert_eq!(bad(&|c| c.used = part(2, 70)), unaligned("used ring", 4));
    assert_eq!((desc_len(8), avail_len(8, false), used_len(8, false)), (128, 20, 68));
}

#[test]
fn calls_and_kicks_by_flags() {
    let guest = Guest::new(8);
    let mut queue = guest.queue(false);
    guest.set_desc(0, Desc { addr: 0x1000, len: 16, flags: 0, next: 0 });
    guest.set_avail_flags(1);
    for calls in [0, 1, 0] {
        guest.set_avail_flags(calls);
        guest.offer(0);
        chain_of(&guest, &mut queue);
        queue.push_used(0, 0);
        assert_eq!(queue.publish(), calls == 0);
    }
    queue.disable_kicks();
    assert_eq!(guest.used_flags(), 1);
    assert!(!queue.enable_kicks());
    assert_eq!(guest.used_flags(), 0);
    guest.offer(0);
    assert!(queue.enable_kicks(), "the chain was available before kicks were enabled");
}

#[test]
fn calls_and_kicks_by_event_index() {
    let guest = Guest::new(8);
    let mut queue = guest.queue(true);
    guest.set_desc(0, Desc { addr: 0x1000, len: 16, flags: 0, next: 0 });
    guest.set_avail_flags(1);
    // The driver requests a call at used elements 3 and 5. The first publication always calls.
    for (used_event, called) in [(3, true), (3, false), (3, false), (3, true), (5, false), (5, true)] {
        guest.set_used_event(used_event);
        guest.offer(0);
        chain_of(&guest, &mut queue);
        queue.push_used(0, 0);
        assert_eq!(queue.publish(), called);
    }
    assert!(!queue.enable_kicks());
    assert_eq!(guest.avail_event(), 6);
    queue.disable_kicks();
    assert_eq!(guest.used_flags(), 0, "with EVENT_IDX flags are not used");
    guest.offer(0);
    assert!(queue.enable_kicks());
}

#[test]
fn a_queue_continues_where_its_predecessor_stopped() {
    let guest = Guest::starting_at(8, 65_533);
    guest.set_desc(0, Desc { addr: 0x1000, len: 16, flags: 0, next: 0 });
    let mut queue = guest.queue(true);
    for _ in 0..2 {
        guest.set_used_event(guest.used_idx());
        guest.offer(0);
        chain_of(&guest, &mut queue);
        queue.push_used(0, 0);
        assert!(queue.publish());
    }
    let config = SplitConfig {
        next_avail: queue.next_avail(),
        next_used: used_idx(&guest.config(true).used),
        ..guest.config(true)
    };
    let mut successor = SplitQueue::new(config).unwrap();
    guest.set_used_event(30_000);
    assert!(successor.publish(), "one call, because the predecessor may have failed to send it");
    for _ in 0..3 {
        guest.offer(0);
        chain_of(&guest, &mut successor);
        successor.push_used(0, 0);
        assert!(!successor.publish());
    }
    assert_eq!((guest.used_idx(), successor.next_avail()), (2, 2));
}

#[test]
fn chains_may_have_up_to_chain_max_descriptors() {
    let guest = Guest::new(4096);
    let mut queue = guest.queue(false);
    let desc = |i, last| Desc {
        addr: 64 * u64::from(i),
        len: 1,
        flags: if i < last { NEXT } else { 0 },
        next: i + 1,
    };
    // Chains of every length: each starts at another descriptor of one long chain.
    (0..4096).for_each(|i| guest.set_desc(i, desc(i, 4095)));
    guest.offer(4096 - CHAIN_MAX);
    assert_eq!(chain_of(&guest, &mut queue).1.len(), usize::from(CHAIN_MAX));
    guest.offer(0);
    let mut chain = Chain::default();
    let refused = queue.pop(&guest.memory, &mut chain);
    assert_eq!(refused, Err(PopError::Chain { head: 0, error: ChainError::TooLong }));
    assert_eq!(chain.cost(), u32::from(CHAIN_MAX) + 1, "the cost is the number of descriptors read");

    let guest = Guest::new(2);
    let mut queue = guest.queue(false);
    let table: Vec<_> = (0..CHAIN_MAX).map(|i| desc(i, CHAIN_MAX - 1)).collect();
    guest.set_table(0x5000, &table);
    guest.set_desc(0, Desc { addr: 0x5000, len: 16 * u32::from(CHAIN_MAX), flags: INDIRECT, next: 0 });
    guest.offer(0);
    assert_eq!(
        chain_of(&guest, &mut queue).1.len(),
        CHAIN_MAX.into(),
        "a chain longer than the queue's table"
    );
    queue.push_used(0, 0);
    guest.set_desc(1, Desc { addr: 0x1000, len: 1, flags: NEXT, next: 0 });
    guest.offer(1);
    assert_eq!(error_of(&guest, &mut queue), PopError::Chain { head: 1, error: ChainError::TooLong });
}

#[test]
fn an_indirect_table_does_not_wrap_around_the_address_space() {
    let guest = Guest::new(8);
    let mut queue = guest.queue(false);
    // Memory at the last and at the first guest-physical addresses.
    let region = |guest_addr| Region { guest_addr, len: 4096, ..guest.memory.regions()[0].clone() };
    let memory = MemTable::new(vec![region(0), region(0_u64.wrapping_sub(4097))]).unwrap();
    let table = 0_u64.wrapping_sub(17);
    let first = [Desc { addr: 0, len: 1, flags: NEXT, next: 1 }; 2];
    guest.set_table(4080, &first);
    guest.set_desc(0, Desc { addr: table.wrapping_sub(guest.base), len: 32, flags: INDIRECT, next: 0 });
    guest.offer(0);
    let error = PopError::Chain { head: 0, error: ChainError::IndirectAddress(table) };
    assert_eq!(queue.pop(&memory, &mut Chain::default()), Err(error));
}

#[test]
#[should_panic(expected = "chain 3 is not in flight")]
fn a_chain_is_completed_once() {
    let guest = Guest::new(8);
    let mut queue = guest.queue(false);
    guest.set_desc(3, Desc { addr: 0x1000, len: 16, flags: 0, next: 0 });
    guest.offer(3);
    chain_of(&guest, &mut queue);
    queue.push_used(3, 0);
    queue.push_used(3, 0);
}
