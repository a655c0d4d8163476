//! Tests of commands with their data against a disk in memory, and against a simple model of the disk.

use crate::initiator::Initiators;
use crate::{Attention, Key, Outcome, Sense, Status, TaskFilter};
use aryk_bdev::{Access, Blocks, Bytes, Env, Identity, Lba, Op, OpSet, Registry};
use aryk_bdev_error::Injection;
use aryk_bdev_malloc as malloc;
use aryk_dma::{Buffer, Sgl};
use proptest::prelude::*;
use std::sync::Arc;

mod aborts;
mod drive;
mod shared;

const BLOCK: usize = 512;
const BLOCKS: u64 = 2048;

fn disk() -> Env {
    let env = Env::default();
    let identity = Identity::named("disk");
    let config = malloc::Config {
        identity,
        block_size: BLOCK as u32,
        physical_block_size: 4096,
        blocks: Blocks(BLOCKS),
        optimal_io_blocks: Blocks::ZERO,
    };
    malloc::create(&env, config).unwrap();
    env
}

/// Initiators that have already received the attention that the unit is new.
fn initiators(count: u8) -> Initiators {
    let mut all = Initiators::new(disk().registry(), "disk", Access::Shared, count);
    for i in 0..count.into() {
        assert_eq!(sense_of(&mut all, i, &[0; 6], &[]), Sense::new(Key::UnitAttention, 0x29, 0));
    }
    all
}

fn good(all: &mut Initiators, i: usize, cdb: &[u8], out: &[u8], room: usize) -> Vec<u8> {
    let (outcome, data) = all.run(i, cdb, out, room);
    assert_eq!((outcome.status, outcome.overrun), (Status::Good, None), "{cdb:02x?}: {outcome:?}");
    if room > 0 {
        return data[..outcome.moved as usize].to_vec();
    }
    data
}

fn sense_of(all: &mut Initiators, i: usize, cdb: &[u8], out: &[u8]) -> Sense {
    let (outcome, _) = all.run(i, cdb, out, 4096);
    assert_eq!(outcome.status, Status::CheckCondition, "{cdb:02x?}: {outcome:?}");
    outcome.sense
}

fn cdb_16(opcode: u8, flags: u8, lba: u64, blocks: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (opcode, flags);
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

fn read(all: &mut Initiators, lba: u64, blocks: u32) -> Vec<u8> {
    good(all, 0, &cdb_16(0x88, 0, lba, blocks), &[], blocks as usize * BLOCK)
}

fn pattern(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i / BLOCK + i) as u8 ^ seed).collect()
}

#[test]
fn reads_and_writes_of_every_length() {
    let mut all = initiators(1);
    let data = pattern(1, 2 * BLOCK);
    let writes: [&[u8]; 4] = [
        &[0x0a, 0, 0, 10, 2, 0],
        &[0x2a, 8, 0, 0, 0, 20, 0, 0, 2, 0],
        &[0xaa, 0, 0, 0, 0, 30, 0, 0, 0, 2, 0, 0],
        &cdb_16(0x8a, 0, 40, 2),
    ];
    for (cdb, lba) in writes.iter().zip([10, 20, 30, 40]) {
        good(&mut all, 0, cdb, &data, 0);
        let mut as_read = cdb.to_vec();
        as_read[0] -= 2;
        assert_eq!(good(&mut all, 0, &as_read, &[], 2 * BLOCK), data);
        assert_eq!(read(&mut all, lba, 2), data);
    }
    // READ (6) of 0 blocks reads 256 blocks.
    assert_eq!(good(&mut all, 0, &[0x08, 0, 0, 0, 0, 0], &[], 256 * BLOCK).len(), 256 * BLOCK);
    assert_eq!(good(&mut all, 0, &cdb_16(0x88, 0, 0, 0), &[], 0).len(), 0);
}

#[test]
fn transfers_beyond_the_disk_or_the_list_are_refused() {
    let mut all = initiators(1);
    for (lba, blocks) in [(BLOCKS, 0), (BLOCKS, 1), (BLOCKS - 1, 2), (u64::MAX, 1), (0, u32::MAX)] {
        for opcode in [0x88, 0x8a, 0x8f, 0x91, 0x93] {
            let sense = sense_of(&mut all, 0, &cdb_16(opcode, 0, lba, blocks), &[0; BLOCK]);
            assert_eq!(sense, Sense::OUT_OF_RANGE, "{opcode:#x} {lba} {blocks}");
        }
    }
    let (outcome, data) = all.run(0, &cdb_16(0x88, 0, 0, 3), &[], 3 * BLOCK - 1);
    assert_eq!((outcome.overrun, outcome.moved), (Some(Bytes(3 * BLOCK as u64)), 0));
    assert!(data.iter().all(|byte| *byte == 0xee));
    let (outcome, _) = all.run(0, &cdb_16(0x8a, 0, 0, 2), &[1; BLOCK], 0);
    assert_eq!(outcome.overrun, Some(Bytes(2 * BLOCK as u64)));
    assert_eq!(read(&mut all, 0, 1), [0; BLOCK], "nothing was written");
    // In a list that is longer than the data, the rest is not touched.
    let (outcome, data) = all.run(0, &cdb_16(0x88, 0, 0, 1), &[], 2 * BLOCK);
    assert_eq!((outcome.status, outcome.moved as usize), (Status::Good, BLOCK));
    assert!(data[BLOCK..].iter().all(|byte| *byte == 0xee));
}

#[test]
fn compare_and_write() {
    let mut all = initiators(1);
    let cdb = |blocks: u8| {
        let mut cdb = cdb_16(0x89, 0, 5, 0);
        cdb[13] = blocks;
        cdb
    };
    let (old, new) = (vec![0; BLOCK], pattern(3, BLOCK));
    good(&mut all, 0, &cdb(1), &[&old[..], &new].concat(), 0);
    assert_eq!(read(&mut all, 5, 1), new);
    let sense = sense_of(&mut all, 0, &cdb(1), &[&old[..], &new].concat());
    assert_eq!((sense.key, sense.code), (Key::Miscompare, (0x1d, 0)));
    assert_eq!(sense_of(&mut all, 0, &cdb(129), &[0; BLOCK]), Sense::in_cdb(13));
    good(&mut all, 0, &cdb(0), &[], 0);
}

#[test]
fn write_same_and_verify() {
    let mut all = initiators(1);
    let block = pattern(7, BLOCK);
    // More blocks than one step has, and not a multiple of a step.
    good(&mut all, 0, &cdb_16(0x93, 0, 100, 300), &block, 0);
    assert_eq!(read(&mut all, 100, 300), block.repeat(300));
    assert_eq!((read(&mut all, 99, 1), read(&mut all, 400, 1)), (vec![0; BLOCK], vec![0; BLOCK]));
    good(&mut all, 0, &cdb_16(0x8f, 0x06, 100, 300), &block, 0);
    good(&mut all, 0, &cdb_16(0x8f, 0x02, 100, 300), &block.repeat(300), 0);
    good(&mut all, 0, &cdb_16(0x8f, 0, 0, BLOCKS as u32), &[], 0);
    assert_eq!(sense_of(&mut all, 0, &cdb_16(0x8f, 0x06, 100, 301), &block).key, Key::Miscompare);
    // To the end of the disk, in zeroes, with UNMAP; then by a command without data-out.
    good(&mut all, 0, &cdb_16(0x93, 0x08, 350, 0), &[0; BLOCK], 0);
    assert_eq!(read(&mut all, 350, 50), [0; 50 * BLOCK]);
    good(&mut all, 0, &cdb_16(0x93, 0x01, 100, 10), &[], 0);
    assert_eq!(read(&mut all, 100, 11), [vec![0; 10 * BLOCK], block].concat());
}

#[test]
fn unmap_takes_ranges() {
    let mut all = initiators(1);
    good(&mut all, 0, &cdb_16(0x8a, 0, 0, 64), &pattern(9, 64 * BLOCK), 0);
    let list = |ranges: &[(u64, u32)]| {
        let bytes = ranges.len() as u16 * 16;
        let mut list = [(bytes + 6).to_be_bytes(), bytes.to_be_bytes()].concat();
        list.extend([0; 4]);
        for (lba, blocks) in ranges {
            list.extend([&lba.to_be_bytes()[..], &blocks.to_be_bytes(), &[0; 4]].concat());
        }
        list
    };
    let cdb = |length: usize| [0x42, 0, 0, 0, 0, 0, 0, (length >> 8) as u8, length as u8, 0];
    let two = list(&[(8, 8), (3000, 0), (32, 8)]);
    good(&mut all, 0, &cdb(two.len()), &two, 0);
    let data = read(&mut all, 0, 64);
    for (i, block) in data.chunks(BLOCK).enumerate() {
        let is_zero = block.iter().all(|byte| *byte == 0);
        assert_eq!(is_zero, (8..16).contains(&i) || (32..40).contains(&i), "{i}");
    }
    // If one range is outside of the disk, no range is unmapped.
    let outside = list(&[(0, 8), (BLOCKS, 1)]);
    assert_eq!(sense_of(&mut all, 0, &cdb(outside.len()), &outside), Sense::OUT_OF_RANGE);
    assert_eq!(read(&mut all, 0, 64), data);
    assert_eq!(sense_of(&mut all, 0, &cdb(7), &two), Sense::LIST_LENGTH);
    good(&mut all, 0, &cdb(0), &[], 0);
    let many = list(&[(0, 1); 257]);
    assert_eq!(sense_of(&mut all, 0, &cdb(many.len()), &many), Sense::in_list(2));
    assert_eq!(all.run(0, &cdb(100), &two[..24], 0).0.overrun, Some(Bytes(100)));
}

#[test]
fn inquiry_and_capacity_describe_the_disk() {
    let mut all = initiators(1);
    let standard = good(&mut all, 0, &[0x12, 0, 0, 0, 255, 0], &[], 255);
    assert_eq!((standard.len(), &standard[..5]), (96, &[0, 0, 6, 0x12, 91][..]));
    assert_eq!(
        good(&mut all, 0, &[0x12, 0, 0, 0, 36, 0], &[], 255).len(),
        36,
        "truncated to the allocation length"
    );
    assert_eq!(good(&mut all, 0, &[0x12, 0, 0, 0, 36, 0], &[], 5), standard[..5], "truncated to the list");
    let pages = good(&mut all, 0, &[0x12, 1, 0, 0, 255, 0], &[], 255);
    for page in &pages[4..] {
        let data = good(&mut all, 0, &[0x12, 1, *page, 0, 255, 0], &[], 255);
        assert_eq!((data[1], usize::from(data[3]) + 4), (*page, data.len()));
    }
    assert_eq!(sense_of(&mut all, 0, &[0x12, 1, 0x99, 0, 255, 0], &[]), Sense::in_cdb(2));
    assert_eq!(good(&mut all, 0, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 8), [0, 0, 7, 255, 0, 0, 2, 0]);
    let mut capacity = cdb_16(0x9e, 0x10, 0, 32);
    assert_eq!(
        good(&mut all, 0, &capacity, &[], 32)[..16],
        [0, 0, 0, 0, 0, 0, 7, 255, 0, 0, 2, 0, 0, 3, 0x80, 0]
    );
    capacity[1] = 0x12;
    capacity[9] = 48;
    let status = good(&mut all, 0, &capacity, &[], 32);
    assert_eq!(status, [0, 0, 0, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 48, 0, 0, 7, 208, 0, 0, 0, 0]);
    let luns = good(&mut all, 0, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0], &[], 16);
    assert_eq!(luns, [0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    good(&mut all, 0, &[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[], 0);
    good(&mut all, 0, &[0x1b, 0, 0, 0, 0, 0], &[], 0);
    assert_eq!(good(&mut all, 0, &[0x03, 0, 0, 0, 18, 0], &[], 18)[..3], [0x70, 0, 0]);
}

#[test]
fn each_initiator_receives_an_attention_once() {
    let mut all = Initiators::new(disk().registry(), "disk", Access::Shared, 2);
    // These commands do not report the attention, and leave it pending.
    good(&mut all, 0, &[0x12, 0, 0, 0, 36, 0], &[], 36);
    assert_eq!(sense_of(&mut all, 0, &[0; 6], &[]), Attention::PowerOn.sense());
    good(&mut all, 0, &[0; 6], &[], 0);
    // REQUEST SENSE reports the attention.
    assert_eq!(good(&mut all, 1, &[0x03, 0, 0, 0, 18, 0], &[], 18)[12], 0x29);
    good(&mut all, 1, &[0; 6], &[], 0);
    all.lun.resized();
    assert_eq!(sense_of(&mut all, 0, &cdb_16(0x88, 0, 0, 1), &[]), Attention::CapacityChanged.sense());
    assert_eq!(sense_of(&mut all, 1, &[0xff; 6], &[]), Attention::CapacityChanged.sense());
    assert_eq!(sense_of(&mut all, 1, &[0xff; 6], &[]), Sense::OPCODE);
}

#[test]
fn a_mode_set_by_one_initiator_is_in_force_for_all() {
    let mut all = initiators(2);
    let mut page = good(&mut all, 0, &[0x1a, 8, 0x0a, 0, 255, 0], &[], 255);
    page[0] = 0;
    page[4 + 4] |= 0x08;
    page[4 + 2] |= 0x04;
    let select = [0x15, 0x10, 0, 0, page.len() as u8, 0];
    good(&mut all, 0, &select, &page, 0);
    assert_eq!(sense_of(&mut all, 1, &[0; 6], &[]), Attention::ModeChanged.sense());
    good(&mut all, 0, &[0; 6], &[], 0);
    assert_eq!(sense_of(&mut all, 0, &cdb_16(0x8a, 0, 0, 1), &[0; BLOCK]), Sense::WRITE_PROTECTED);
    assert!(all.wants_descriptors(0));
    good(&mut all, 0, &cdb_16(0x88, 0, 0, 1), &[], BLOCK);
    // Without a store for state, no page can be saved.
    assert_eq!(sense_of(&mut all, 0, &[0x1a, 0, 0xc8, 0, 36, 0], &[]), Sense::SAVING);
    assert_eq!(
        sense_of(&mut all, 0, &[0x15, 0x11, 0, 0, page.len() as u8, 0], &page),
        Sense::in_cdb_bit(1, 0)
    );
    page[4 + 3] ^= 0x80;
    assert_eq!(sense_of(&mut all, 0, &select, &page), Sense::in_list(7));
}

#[test]
fn a_read_only_disk_is_read_only() {
    let mut all = Initiators::new(disk().registry(), "disk", Access::Read, 1);
    sense_of(&mut all, 0, &[0; 6], &[]);
    for opcode in [0x8a, 0x93] {
        assert_eq!(sense_of(&mut all, 0, &cdb_16(opcode, 0, 0, 1), &[0; BLOCK]), Sense::WRITE_PROTECTED);
    }
    let list = [&[0, 22, 0, 16, 0, 0, 0, 0][..], &[0; 16]].concat();
    assert_eq!(sense_of(&mut all, 0, &[0x42, 0, 0, 0, 0, 0, 0, 0, 24, 0], &list), Sense::WRITE_PROTECTED);
    assert_eq!(good(&mut all, 0, &[0x1a, 8, 0x3f, 0, 255, 0], &[], 255)[2], 0x90);
}

fn reserve_out(action: u8, kind: u8, key: u64, new: u64) -> ([u8; 10], Vec<u8>) {
    let list = [&key.to_be_bytes()[..], &new.to_be_bytes(), &[0; 8]].concat();
    ([0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], list)
}

fn reserve(all: &mut Initiators, i: usize, action: u8, kind: u8, key: u64, new: u64) -> Outcome {
    let (cdb, list) = reserve_out(action, kind, key, new);
    all.run(i, &cdb, &list, 0).0
}

#[test]
fn reservations_deny_other_initiators() {
    let mut all = initiators(2);
    assert_eq!(reserve(&mut all, 0, 0, 0, 0, 77).status, Status::Good);
    assert_eq!(reserve(&mut all, 0, 1, 3, 77, 0).status, Status::Good);
    let (outcome, _) = all.run(1, &cdb_16(0x88, 0, 0, 1), &[], BLOCK);
    assert_eq!(outcome.status, Status::ReservationConflict);
    good(&mut all, 0, &cdb_16(0x88, 0, 0, 1), &[], BLOCK);
    good(&mut all, 1, &[0; 6], &[], 0);
    let keys = good(&mut all, 1, &[0x5e, 0, 0, 0, 0, 0, 0, 0, 255, 0], &[], 255);
    assert_eq!(keys, [0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 77]);
    let held = good(&mut all, 1, &[0x5e, 1, 0, 0, 0, 0, 0, 0, 255, 0], &[], 255);
    assert_eq!(held[8..], [0, 0, 0, 0, 0, 0, 0, 77, 0, 0, 0, 0, 0, 3, 0, 0]);
    let full = good(&mut all, 1, &[0x5e, 3, 0, 0, 0, 0, 0, 0, 255, 0], &[], 255);
    assert_eq!(
        full[8..],
        [
            &77u64.to_be_bytes()[..],
            &[0, 0, 0, 0, 1, 3, 0, 0, 0, 0, 0, 1, 0, 0, 0, 24],
            &[6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x30, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        ]
        .concat()
    );
    assert_eq!(good(&mut all, 1, &[0x5e, 2, 0, 0, 0, 0, 0, 0, 255, 0], &[], 255).len(), 8);
    // An initiator that registers takes over.
    assert_eq!(reserve(&mut all, 1, 0, 0, 0, 88).status, Status::Good);
    assert_eq!(reserve(&mut all, 1, 5, 1, 88, 77).status, Status::Good);
    assert_eq!(sense_of(&mut all, 0, &[0; 6], &[]), Attention::RegistrationsPreempted.sense());
    assert_eq!(all.run(0, &cdb_16(0x8a, 0, 0, 1), &[0; BLOCK], 0).0.status, Status::ReservationConflict);
    good(&mut all, 0, &cdb_16(0x88, 0, 0, 1), &[], BLOCK);
    assert_eq!(reserve(&mut all, 0, 9, 1, 0, 0).sense, Sense::in_cdb_bit(1, 4));
    assert_eq!(reserve(&mut all, 0, 0, 0, 5, 5).status, Status::ReservationConflict);
    let (cdb, mut list) = reserve_out(6, 0, 0, 5);
    list[20] = 1;
    assert_eq!(sense_of(&mut all, 0, &cdb, &list), Sense::in_list(20), "APTPL");
}

#[test]
fn commands_that_wait_for_the_disk_can_be_aborted() {
    let env = disk();
    let config = aryk_bdev_error::Config { identity: Identity::named("slow"), base: "disk".to_owned() };
    aryk_bdev_error::create(&env, config).unwrap();
    let fault = aryk_bdev_error::Fault::Pending;
    let never = Injection { fault, ops: OpSet::of(&[Op::Read]), count: u32::MAX, queue_depth: 0 };
    aryk_bdev_error::inject(env.registry(), "slow", never).unwrap();
    let mut all = Initiators::new(env.registry(), "slow", Access::Shared, 2);
    for i in 0..2 {
        sense_of(&mut all, i, &[0; 6], &[]);
    }
    let mut buffers: Vec<_> = (0..3).map(|_| Buffer::new(BLOCK, 512)).collect();
    let lists: Vec<_> = buffers.iter_mut().map(Buffer::lend).collect();
    let read = cdb_16(0x88, 0, 0, 1);
    let tags: Vec<_> =
        [0, 0, 1].into_iter().zip(lists).map(|(i, list)| all.submit(i, &read, Sgl::EMPTY, list)).collect();
    let lun = Arc::clone(&all.lun);
    let number = all.nexus(0).number();
    let abort = |all: &mut Initiators, which: TaskFilter| {
        let lun = Arc::clone(&lun);
        all.cx().local().spawn(async move { lun.abort(which).await }).detach();
    };
    abort(&mut all, TaskFilter::Nexus(number, Some(tags[1].into())));
    let outcome = all.wait(0, tags[1]);
    assert!(outcome.aborted && outcome.status == Status::TaskAborted, "{outcome:?}");
    assert_eq!((all.outcome(0, tags[0]), all.outcome(1, tags[2])), (None, None));
    // PREEMPT AND ABORT completes when the commands that it aborts have ended.
    assert_eq!(reserve(&mut all, 0, 0, 0, 0, 1).status, Status::Good);
    assert_eq!(reserve(&mut all, 1, 0, 0, 0, 2).status, Status::Good);
    assert_eq!(reserve(&mut all, 1, 5, 1, 2, 1).status, Status::Good);
    assert!(all.outcome(0, tags[0]).is_some_and(|o| o.aborted));
    abort(&mut all, TaskFilter::All);
    assert!(all.wait(1, tags[2]).aborted);
    buffers.iter_mut().for_each(Buffer::reclaim);
}

/// A step of the model: opcode, first block, number of blocks, seed of the data.
fn step() -> impl Strategy<Value = (u8, u64, u32, u8)> {
    let opcode = prop::sample::select(vec![0x88u8, 0x8a, 0x93, 0x8f, 0x28, 0x2a]);
    (opcode, 0..BLOCKS + 2, 0u32..40, any::<u8>())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// A sequence of commands, against an array.
    #[test]
    fn the_disk_holds_what_an_array_would(steps in prop::collection::vec(step(), 1..30)) {
        let mut all = initiators(1);
        let mut model = vec![0u8; BLOCKS as usize * BLOCK];
        for (opcode, lba, blocks, seed) in steps {
            let short = opcode < 0x80;
            let cdb = if short {
                vec![opcode, 0, 0, 0, (lba >> 8) as u8, lba as u8, 0, 0, blocks as u8, 0]
            } else {
                cdb_16(opcode, if opcode == 0x8f { 2 } else { 0 }, lba, blocks).to_vec()
            };
            let count = if opcode == 0x93 && blocks == 0 { BLOCKS.saturating_sub(lba) as usize } else { blocks as usize };
            let given = if opcode == 0x93 { BLOCK } else { count * BLOCK };
            let is_read = matches!(opcode, 0x88 | 0x28);
            let data = if is_read { Vec::new() } else { vec![seed % 3; given] };
            let (outcome, got) = all.run(0, &cdb, &data, if is_read { given } else { 0 });
            if lba >= BLOCKS || lba + count as u64 > BLOCKS {
                prop_assert_eq!((outcome.status, outcome.sense), (Status::CheckCondition, Sense::OUT_OF_RANGE));
                continue;
            }
            let place = &mut model[lba as usize * BLOCK..][..count * BLOCK];
            let expected = match opcode {
                0x8f if place != &data[..] => Status::CheckCondition,
                _ => Status::Good,
            };
            prop_assert_eq!(outcome.status, expected, "{:?}", outcome);
            match opcode {
                0x88 | 0x28 => prop_assert_eq!(&got[..], &place[..]),
                0x8a | 0x2a => place.copy_from_slice(&data),
                0x93 => place.chunks_mut(BLOCK).for_each(|block| block.copy_from_slice(&data)),
                _ => {}
            }
        }
    }

    /// Any CDB with any data ends, and reports no more transferred bytes than the lists have room for.
    #[test]
    fn any_command_ends(cdbs in prop::collection::vec((any::<[u8; 16]>(), 0usize..18, 0usize..1200, 0usize..1200), 1..60)) {
        let mut all = initiators(2);
        for (i, (cdb, len, out, room)) in cdbs.into_iter().enumerate() {
            let (outcome, _) = all.run(i % 2, &cdb[..len.min(16)], &vec![cdb[15]; out], room);
            prop_assert!(outcome.moved as usize <= out.max(room), "{:?}", outcome);
            let has_sense = outcome.sense != Sense::NONE;
            prop_assert_eq!(has_sense, outcome.status == Status::CheckCondition, "{:?}", outcome);
        }
    }
}

/// VPD pages B0, B1 and B2 (SBC-3, section 6.6) of a disk that supports UNMAP.
#[test]
fn vpd_pages_report_the_limits_that_commands_check() {
    let mut all = initiators(1);
    let page = |all: &mut Initiators, code| good(all, 0, &[0x12, 1, code, 0, 255, 0], &[], 255);
    let limits = page(&mut all, 0xb0);
    let be32 = |at: usize| u32::from_be_bytes(std::array::from_fn(|i| limits[at + i]));
    let (compared, ranges) = (limits[5], be32(24));
    assert!(compared > 0 && ranges > 0 && be32(20) > 0);
    let mut cdb = cdb_16(0x89, 0, 0, 0);
    cdb[13] = compared;
    good(&mut all, 0, &cdb, &vec![0; 2 * usize::from(compared) * BLOCK], 0);
    if compared < u8::MAX {
        cdb[13] = compared + 1;
        assert_eq!(sense_of(&mut all, 0, &cdb, &vec![0; 1024 * BLOCK]), Sense::in_cdb(13));
    }
    let unmap = |count: u32| {
        let bytes = 16 * count as u16;
        let list =
            [&(bytes + 6).to_be_bytes()[..], &bytes.to_be_bytes(), &[0; 4], &vec![0; bytes.into()]].concat();
        let [high, low] = (bytes + 8).to_be_bytes();
        ([0x42, 0, 0, 0, 0, 0, 0, high, low, 0], list)
    };
    let (cdb, list) = unmap(ranges);
    good(&mut all, 0, &cdb, &list, 0);
    let (cdb, list) = unmap(ranges + 1);
    assert_eq!(sense_of(&mut all, 0, &cdb, &list), Sense::in_list(2));
    assert_eq!(page(&mut all, 0xb1)[4..6], [0, 1], "non-rotating medium");
    assert_eq!(page(&mut all, 0xb2)[5] & 0xe0, 0xe0, "UNMAP, and WRITE SAME of both lengths");
}

/// Failures of the store, as a disk reports them (SPC-4, section 4.5.6).
#[test]
fn failures_of_the_store_have_the_right_sense_data() {
    use aryk_bdev_error::Fault;
    let env = disk();
    let identity = Identity::named("bad");
    aryk_bdev_error::create(&env, aryk_bdev_error::Config { identity, base: "disk".to_owned() }).unwrap();
    let mut all = Initiators::new(env.registry(), "bad", Access::Shared, 1);
    sense_of(&mut all, 0, &[0; 6], &[]);
    let cases = [
        (Fault::Failure, Op::Read, (0x3, 0x11, 0x00)),
        (Fault::Failure, Op::Write, (0x3, 0x0c, 0x00)),
        (Fault::NoMem, Op::Write, (0x7, 0x27, 0x07)),
    ];
    for (fault, op, expected) in cases {
        let injection = Injection { fault, ops: OpSet::of(&[op]), count: 1, queue_depth: 0 };
        aryk_bdev_error::inject(env.registry(), "bad", injection).unwrap();
        let cdb = cdb_16(if op == Op::Read { 0x88 } else { 0x8a }, 0, 77, 1);
        let sense = sense_of(&mut all, 0, &cdb, &[1; BLOCK]);
        assert_eq!((sense.key as u8, sense.code.0, sense.code.1), expected, "{fault:?}");
        assert_eq!(sense.lba, (fault == Fault::Failure).then_some(Lba(77)));
        // The next command succeeds.
        all.run(0, &cdb, &[1; BLOCK], BLOCK);
        assert_eq!(all.run(0, &cdb, &[1; BLOCK], BLOCK).0.status, Status::Good);
    }
}

/// A store that another host has reserved, or that is locked (SAM-5, section 5.3; SPC-4, section 4.5.6).
#[test]
fn a_store_that_refuses_access_is_not_a_bad_medium() {
    use crate::unit::Failure;
    use aryk_bdev::Status as BdevStatus;
    let outcome = |status| Outcome::failed(1, Failure::of(status, Op::Read, Lba(77)));
    let conflict = outcome(BdevStatus::ReservationConflict);
    assert_eq!((conflict.status, conflict.sense), (Status::ReservationConflict, Sense::NONE));
    let denied = outcome(BdevStatus::AccessDenied);
    assert_eq!(denied.status, Status::CheckCondition);
    assert_eq!((denied.sense.key as u8, denied.sense.code, denied.sense.lba), (7, (0x20, 0x02), None));
    assert_eq!(outcome(BdevStatus::Medium).sense.lba, Some(Lba(77)));
}
