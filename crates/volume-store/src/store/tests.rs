//! The store's operations and their order on the disk; growth; failures.

use aryk_dma::Buffer;
use aryk_volume::{BlobId, OpId, StoreError, StoreOp};

use super::*;
use crate::ram::{AREA, Ram, SEGMENT};
use crate::superblock::PLACES;

fn read(found: (&str, &str, usize)) -> (String, String, usize) {
    (found.0.to_owned(), found.1.to_owned(), found.2)
}

#[test]
fn edits_and_checkpoints_are_found_again() {
    let (mut ram, mut store) = Ram::pool();
    assert_eq!(ram.read().unwrap(), read(("first", "", 0)));
    ram.commit(&mut store, b"a").unwrap();
    ram.commit(&mut store, b"b").unwrap();
    assert_eq!(ram.read().unwrap(), read(("first", "a b", 0)));
    assert_eq!(store.position(), Position { generation: 1, sequence: 2 });
    ram.checkpoint(&mut store, b"second").unwrap();
    assert_eq!(ram.read().unwrap(), read(("second", "", 0)));
    ram.commit(&mut store, b"c").unwrap();
    ram.checkpoint(&mut store, b"third").unwrap();
    ram.commit(&mut store, b"d").unwrap();
    assert_eq!(ram.read().unwrap(), read(("third", "d", 0)));
    let mut again = ram.try_open(Default::default()).unwrap().store;
    assert_eq!(again.position(), store.position());
    ram.commit(&mut again, b"e").unwrap();
    assert_eq!(ram.read().unwrap(), read(("third", "d e", 0)));
}

#[test]
fn a_checkpoint_is_written_in_pieces_and_its_header_is_the_last() {
    for bytes in [0, 1, 4031, 4032, 4033, 20_000, 20_416, 20_417, 30_000] {
        let (mut ram, mut store) = Ram::pool();
        let old = ram.log.len();
        let payload = "p".repeat(bytes);
        store.submit(OpId(1), StoreOp::Checkpoint { bytes: payload.clone().into() });
        let mut pieces = Vec::new();
        while let Some(op) = store.next_op() {
            if let crate::DiskRequest::Write { offset, buffer, .. } = &op.request {
                assert!(buffer.len() <= 20 << 10, "{} bytes in one write", buffer.len());
                pieces.push(*offset);
            }
            // Until the header is written, the checkpoint before counts.
            if pieces.len() < 2 * (1 + bytes.saturating_sub(4032).div_ceil(16 << 10)) - 1 {
                assert_eq!(ram.read().unwrap(), read(("first", "", 0)));
            }
            let done = ram.run(op);
            store.completed(done);
        }
        assert!(store.next_answer().is_some() && ram.log.len() > old && pieces.len() >= 4);
        assert_eq!(ram.read().unwrap(), (payload, String::new(), 0), "{bytes} bytes");
        ram.commit(&mut store, b"edit").unwrap();
        assert_eq!(ram.read().unwrap().1, "edit");
    }
}

#[test]
fn edits_that_come_together_are_one_record() {
    let (mut ram, mut store) = Ram::pool();
    ram.log.clear();
    for (n, edit) in ["a", "b", "c"].into_iter().enumerate() {
        store.submit(OpId(n as u64), StoreOp::Commit { edit: edit.into() });
    }
    let answers = ram.drain(&mut store);
    let ids: Vec<_> = answers.iter().map(|done| done.id.0).collect();
    assert_eq!(ids, [0, 1, 2]);
    assert_eq!(ram.log.iter().map(|op| op.0).collect::<String>(), "wwf");
    assert_eq!(ram.read().unwrap(), read(("first", "a b c", 0)));
}

#[test]
fn data_is_flushed_before_an_edit_and_once_for_all_that_wait() {
    let (mut ram, mut store) = Ram::pool();
    ram.log.clear();
    let data = || Buffer::new(4096, 4096);
    store.submit(OpId(1), StoreOp::Write { blob: BlobId(3), unit: 8, data: data(), len: 512 });
    assert_eq!(ram.drain(&mut store).len(), 1);
    store.submit(OpId(2), StoreOp::Flush);
    store.submit(OpId(3), StoreOp::Commit { edit: b"x".to_vec() });
    store.submit(OpId(4), StoreOp::Flush);
    assert_eq!(ram.drain(&mut store).len(), 3);
    assert_eq!(ram.log.iter().map(|op| op.0).collect::<String>(), "wfwwf");
    let segment = store.superblock().segment(3).unwrap().offset;
    assert_eq!(ram.log[0], ('w', segment + 4096));
    ram.log.clear();
    assert_eq!(ram.op(&mut store, StoreOp::Flush), Ok(()));
    assert!(ram.log.is_empty(), "nothing to flush");
    assert_eq!(ram.op(&mut store, StoreOp::Discard { blob: BlobId(3) }), Ok(()));
    assert_eq!(ram.log, [('d', segment)]);
}

#[test]
fn blobs_keep_what_is_written() {
    let (mut ram, mut store) = Ram::pool();
    let facts = store.facts();
    assert_eq!((facts.alignment, facts.blob_units), (512, 128));
    let mut data = Buffer::new(8192, 4096);
    data.write(0, &[7; 1024]);
    let blob = BlobId(facts.blobs - 1);
    store.submit(OpId(1), StoreOp::Write { blob, unit: 126, data, len: 1024 });
    ram.drain(&mut store);
    store.submit(OpId(2), StoreOp::Read { blob, unit: 127, data: Buffer::new(512, 512), len: 512 });
    let answers = ram.drain(&mut store);
    assert_eq!(answers[0].data.as_ref().unwrap().bytes(), [7; 512]);
}

#[test]
#[should_panic(expected = "1024 bytes from unit 127")]
fn a_write_beyond_its_blob_panics() {
    let (_, mut store) = Ram::pool();
    store.submit(
        OpId(1),
        StoreOp::Write { blob: BlobId(0), unit: 127, data: Buffer::new(1024, 512), len: 1024 },
    );
}

#[test]
fn a_checkpoint_is_due_before_the_area_is_full_and_a_full_area_fails_edits() {
    let (mut ram, mut store) = Ram::pool();
    let mut due = None;
    let mut edits = 0;
    while ram.commit(&mut store, b"edit") == Ok(()) {
        edits += 1;
        due = due.or(store.is_checkpoint_due().then_some(edits));
    }
    assert_eq!(edits, AREA / 4096 - 1);
    assert!(due.unwrap() <= edits / 2 + 1, "{due:?}");
    assert_eq!(ram.commit(&mut store, b"edit"), Err(StoreError::NoSpace));
    assert_eq!(ram.read().unwrap().1.len() as u64, edits * 5 - 1);
    ram.checkpoint(&mut store, b"second").unwrap();
    assert!(!store.is_checkpoint_due());
    assert_eq!(ram.commit(&mut store, b"edit"), Ok(()));
    let large = vec![b'x'; AREA as usize];
    assert_eq!(ram.checkpoint(&mut store, &large), Err(StoreError::NoSpace));
    assert_eq!(ram.commit(&mut store, b"more"), Ok(()), "nothing was written");
    assert_eq!(ram.read().unwrap(), read(("second", "edit more", 0)));
}

#[test]
fn the_pool_grows_with_its_base() {
    let (mut ram, mut store) = Ram::pool();
    let blobs = store.facts().blobs;
    let old = store.superblock().segment(blobs - 1);
    store.grow(ram.bytes.len() as u64);
    ram.drain(&mut store);
    assert_eq!(store.growth(), Growth::Grown(blobs));
    ram.bytes.resize(ram.bytes.len() + 10 * SEGMENT as usize + 512, 0);
    store.grow(ram.bytes.len() as u64);
    assert_eq!(store.growth(), Growth::Running);
    ram.drain(&mut store);
    assert_eq!(store.growth(), Growth::Grown(blobs + 10));
    store.rename("new name").unwrap();
    store.grow(ram.bytes.len() as u64);
    ram.drain(&mut store);
    assert_eq!(store.growth(), Growth::Grown(blobs + 10));
    assert_eq!(store.rename("bad\nname"), Err(Error::Name));
    let again = ram.try_open(Default::default()).unwrap();
    assert_eq!(again.findings, []);
    assert_eq!((again.store.facts().blobs, &again.store.superblock().name[..]), (blobs + 10, "new name"));
    assert_eq!(again.store.superblock().segment(blobs - 1), old);
}

#[test]
fn a_pool_that_has_grown_much_gets_larger_areas() {
    let (mut ram, mut store) = Ram::pool();
    ram.bytes.resize(64 << 20, 0);
    store.grow(64 << 20);
    ram.drain(&mut store);
    assert_eq!(store.superblock().areas.len(), 4);
    let large = vec![b'x'; AREA as usize * 4];
    for n in 0..3 {
        ram.checkpoint(&mut store, &large).unwrap();
        ram.commit(&mut store, b"more").unwrap();
        let found = ram.read().unwrap();
        assert_eq!((found.0.len(), found.1.as_str()), (large.len(), "more"), "{n}");
    }
}

#[test]
fn a_failing_mirror_costs_redundancy_only() {
    let (mut ram, mut store) = Ram::pool();
    let area = store.superblock().areas[0];
    for mirror in 0..2 {
        let place = area.mirrors[mirror].offset;
        ram.unwritable = vec![(place, place + AREA)];
        assert_eq!(ram.commit(&mut store, b"a"), Ok(()));
        assert_eq!(store.degraded_writes(), mirror as u64 + 1);
    }
    ram.unwritable.clear();
    assert_eq!(ram.read().unwrap().1, "a a");
    assert_eq!(ram.commit(&mut store, b"b"), Ok(()));
    assert_eq!(ram.read().unwrap(), read(("first", "a a b", 2)));
}

#[test]
fn after_a_failed_edit_edits_fail_until_a_checkpoint() {
    let (mut ram, mut store) = Ram::pool();
    let area = store.superblock().areas[0];
    ram.unwritable = area.mirrors.map(|place| (place.offset, place.offset + AREA)).to_vec();
    assert_eq!(ram.commit(&mut store, b"a"), Err(StoreError::Medium));
    ram.unwritable.clear();
    assert_eq!(ram.commit(&mut store, b"b"), Err(StoreError::Medium));
    assert_eq!(ram.checkpoint(&mut store, b"second"), Ok(()));
    assert_eq!(ram.commit(&mut store, b"c"), Ok(()));
    assert_eq!(ram.read().unwrap(), read(("second", "c", 0)));
}

#[test]
fn after_a_failed_checkpoint_edits_fail_because_it_may_exist() {
    let (mut ram, mut store) = Ram::pool();
    // The marks of the old checkpoint cannot be written.
    let area = store.superblock().areas[0];
    ram.unwritable = area.mirrors.map(|place| (place.offset, place.offset + 4096)).to_vec();
    assert_eq!(ram.checkpoint(&mut store, b"second"), Err(StoreError::Medium));
    assert_eq!(ram.commit(&mut store, b"a"), Err(StoreError::Medium));
    assert_eq!(ram.read().unwrap().0, "second");
}

#[test]
fn after_a_failed_flush_nothing_is_durable_any_more() {
    let (mut ram, mut store) = Ram::pool();
    ram.fails_flushes = true;
    assert_eq!(ram.commit(&mut store, b"a"), Err(StoreError::Medium));
    ram.fails_flushes = false;
    assert_eq!(ram.op(&mut store, StoreOp::Flush), Err(StoreError::Medium));
    assert_eq!(ram.checkpoint(&mut store, b"second"), Err(StoreError::Medium));
}

#[test]
fn the_copies_of_the_superblock_are_never_both_in_danger() {
    let (mut ram, mut store) = Ram::pool();
    // Growth writes the second copy first; when it fails, the first one is not touched.
    ram.bytes.resize(ram.bytes.len() + 10 * SEGMENT as usize, 0);
    ram.unwritable = vec![(PLACES[1], PLACES[1] + 1)];
    ram.log.clear();
    store.grow(ram.bytes.len() as u64);
    ram.drain(&mut store);
    assert_eq!(store.growth(), Growth::Failed(StoreError::Medium));
    assert_eq!(ram.log, [('w', PLACES[1])]);
    // When the first one fails, the second one counts, and the next change begins with the first.
    ram.unwritable = vec![(PLACES[0], PLACES[0] + 1)];
    store.grow(ram.bytes.len() as u64);
    ram.drain(&mut store);
    assert!(matches!(store.growth(), Growth::Grown(_)));
    ram.unwritable.clear();
    ram.log.clear();
    ram.commit(&mut store, b"a").unwrap();
    assert_eq!(ram.log[..2], [('w', PLACES[0]), ('f', 0)]);
    assert_eq!(ram.read().unwrap(), read(("first", "a", 0)));
}
