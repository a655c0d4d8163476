//! Data that callers read by themselves, and reads that follow aborts.

use super::rig::Rig;
use crate::*;
use aryk_dma::Buffer;

/// Blocks of a blob are read from the rig's disk: an offset names the blob and the byte in it.
fn offset(blob: BlobId, unit: u32, _: u32) -> u64 {
    u64::from(blob.0) << 32 | u64::from(unit * UNIT)
}

/// Answers the reads of a reader.
fn serve(reader: &mut Reader, rig: &mut Rig) {
    rig.disk.flush();
    while let Some(Read { id, offset, mut data, len }) = reader.next_read() {
        let bytes = &rig.disk.blobs[&BlobId((offset >> 32) as u32)];
        let at = offset as u32 as usize;
        data.bytes_mut()[..len as usize].copy_from_slice(&bytes[at..at + len as usize]);
        reader.completed(id, data, Ok(()));
    }
}

fn locate(rig: &mut Rig, volume: VolumeId, unit: u64, units: u64) -> Extents {
    let tag = rig.submit(volume, unit, units, Action::Locate);
    let mut reply = rig.wait(tag);
    assert_eq!((reply.status, reply.foreign.len()), (Status::Ok, 0));
    reply.extents.place(offset);
    reply.extents
}

#[test]
fn data_stays_where_it_is_until_its_reader_gives_it_back() {
    let mut rig = Rig::new(1);
    let volume = rig.create("v", 1 << 16, Origin::Empty);
    let data: Vec<u8> = (0..40_960_u32).map(|at| (at / 512 + 1) as u8).collect();
    rig.write(volume, 8, &data);
    // From the middle of a block to behind the data.
    let extents = locate(&mut rig, volume, 11, 85);
    assert_eq!(rig.command(Command::Delete(volume)), Ok(Answer::Done));
    // More than the store has: each blob that is free is written again.
    let other = rig.create("other", 1 << 16, Origin::Empty);
    for byte in 0..200 {
        rig.write(other, 0, &vec![byte; 2 << 20]);
    }
    rig.settle();
    let mut reader = Reader::default();
    let mut memory = Buffer::new(85 * UNIT as usize, 4096);
    memory.bytes_mut().fill(0x5a);
    let all = memory.lend().first(85 * UNIT);
    let key = reader.start(Tag(7), 11, all, extents);
    assert!(!reader.is_idle() && reader.next_end().is_none());
    serve(&mut reader, &mut rig);
    assert_eq!(reader.next_end(), Some(ReadEnd::Request { tag: Tag(7), status: Status::Ok }));
    reader.abort(key);
    let Some(ReadEnd::Extents { extents, damaged_blocks: 0 }) = reader.next_end() else {
        panic!("the extents are not given back")
    };
    assert!(reader.is_idle() && reader.next_end().is_none());
    memory.reclaim();
    assert!(memory.bytes()[..77 * 512] == data[3 * 512..] && memory.bytes()[77 * 512..] == [0; 8 * 512]);
    assert!(!rig.pool.is_idle());
    rig.pool.give_back(extents, 0);
    rig.settle();
    assert!(rig.pool.is_idle());
}

#[test]
fn damaged_and_aborted_data_does_not_reach_memory() {
    let mut rig = Rig::new(2);
    let volume = rig.create("v", 1 << 16, Origin::Empty);
    rig.write(volume, 0, &[1; 8192]);
    let mut reader = Reader::default();
    let mut memory = Buffer::new(8192, 4096);
    memory.bytes_mut().fill(0x5a);
    let all = memory.lend().first(8192);
    let extents = locate(&mut rig, volume, 0, 16);
    reader.start(Tag(1), 0, all, extents);
    let Read { id, data, .. } = reader.next_read().expect("a read");
    reader.completed(id, data, Ok(()));
    assert_eq!(reader.next_end(), Some(ReadEnd::Request { tag: Tag(1), status: Status::Medium }));
    let Some(ReadEnd::Extents { extents, damaged_blocks: 1 }) = reader.next_end() else {
        panic!("the damage is not counted")
    };
    rig.pool.give_back(extents, 1);
    assert_eq!(rig.pool.stats().damaged_blocks, 1);

    let extents = locate(&mut rig, volume, 0, 16);
    let key = reader.start(Tag(2), 0, all, extents);
    reader.abort(key);
    assert_eq!(reader.next_end(), Some(ReadEnd::Request { tag: Tag(2), status: Status::Aborted }));
    assert_eq!((reader.next_end(), reader.abandoned_bytes()), (None, 8192));
    serve(&mut reader, &mut rig);
    assert!(matches!(reader.next_end(), Some(ReadEnd::Extents { damaged_blocks: 0, .. })));
    assert_eq!(reader.abandoned_bytes(), 0);
    memory.reclaim();
    assert!(memory.bytes().iter().all(|byte| *byte == 0x5a));
}

#[test]
fn what_is_on_a_foreign_disk_is_not_located() {
    let mut rig = Rig::new(3);
    let foreign = Foreign { name: "image".to_owned(), units: 4096 };
    let volume = rig.create("v", 1 << 13, Origin::Foreign(foreign));
    rig.write(volume, 0, &[1; 4096]);
    let tag = rig.submit(volume, 0, 16, Action::Locate);
    let reply = rig.wait(tag);
    assert_eq!((reply.status, reply.extents), (Status::Foreign, Extents::default()));
    let extents = locate(&mut rig, volume, 0, 8);
    rig.pool.give_back(extents, 0);
    rig.settle();
    assert!(rig.pool.is_idle());
}

#[test]
fn reads_that_follow_an_abort_see_what_it_left() {
    let mut rig = Rig::new(4);
    let volume = rig.create("v", 1 << 16, Origin::Empty);
    rig.write(volume, 0, &[1; 4096]);
    let write = rig.submit_write(volume, 0, &[2; 4096], false);
    // The frame is handed out, and not answered.
    rig.turn();
    rig.pool.abort(volume, |tag| tag == write);
    rig.turn();
    assert!(rig.replies.iter().any(|reply| (reply.tag, reply.status) == (write, Status::Aborted)));
    rig.forget(write);
    let (read, located) = (rig.submit_read(volume, 0, 8), rig.submit(volume, 0, 8, Action::Locate));
    rig.turn();
    assert!(rig.replies.iter().all(|reply| reply.tag != read && reply.tag != located));
    let reply = rig.wait(read);
    assert_eq!(rig.data(&reply), [2; 4096]);
    let extents = rig.wait(located).extents;
    rig.pool.give_back(extents, 0);
    rig.settle();
    assert!(rig.pool.is_idle());
}
