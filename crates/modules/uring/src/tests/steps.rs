//! Tests of the steps of one request; the test answers in place of the kernel.

use super::harness::{MIB, disk_directory, sparse};
use crate::request::{Next, Pool, Request};
use crate::store::{Alignment, Call, Store};
use crate::{Config, Direct, Forced, OnFull};
use aryk_bdev::{Blocks, Io, Lba, Op, Status, Tag};
use aryk_dma::{Buffer, Sgl};
use std::sync::atomic::Ordering;
use std::time::Duration;

const SECTOR: Alignment = Alignment { memory: 512, offset: 512 };

struct Rig {
    store: Store,
    pool: Pool,
    request: Request,
    /// The first action of the request.
    first: Next,
    buffer: Buffer,
}

fn rig(op: Op, alignment: Alignment, change: impl FnOnce(&mut Config)) -> Rig {
    rig_of(op, alignment, change, |io| io)
}

fn rig_of(op: Op, alignment: Alignment, change: impl FnOnce(&mut Config), ask: impl FnOnce(Io) -> Io) -> Rig {
    let dir = disk_directory();
    let mut config = sparse(dir.path(), MIB);
    change(&mut config);
    let forced = Forced { alignment: Some(alignment), blocking: false };
    let store = crate::open::open(&config, forced).unwrap().store;
    let mut pool = Pool::new(&store);
    let mut buffer = Buffer::new(8192, 4096);
    let data = if op.has_data() { buffer.lend() } else { Sgl::EMPTY };
    let blocks = if op == Op::Flush { 0 } else { 16 };
    let io = Io {
        tag: Tag(1),
        op,
        fua: false,
        may_unmap: false,
        lba: Lba(8),
        blocks: Blocks(blocks),
        source: Lba::ZERO,
        data,
    };
    let mut request = Request::new(&ask(io), &store);
    let first = request.next(&store, &mut pool);
    Rig { store, pool, request, first, buffer }
}

impl Rig {
    fn answer(&mut self, result: i32) -> Next {
        self.request.answered(result, &self.store, &mut self.pool)
    }
}

/// Offset and length of the transfer that the request starts.
fn transfer(next: &Next) -> (u64, u32) {
    match next {
        Next::Start(Call::Read { data, offset } | Call::Write { data, offset, .. }) => (*offset, data.len()),
        other => panic!("a transfer, not {other:?}"),
    }
}

fn status(next: &Next) -> Status {
    match next {
        Next::Done(status) => *status,
        other => panic!("the end, not {other:?}"),
    }
}

#[test]
fn short_transfers_are_continued() {
    for op in [Op::Read, Op::Write] {
        let mut rig = rig(op, SECTOR, |_| {});
        assert_eq!(transfer(&rig.first), (4096, 8192));
        // The request continues at a multiple of the alignment.
        assert_eq!(transfer(&rig.answer(1500)), (4096 + 1024, 8192 - 1024));
        assert_eq!(transfer(&rig.answer(-libc::EINTR)), (4096 + 1024, 8192 - 1024));
        assert_eq!(transfer(&rig.answer(4096)), (4096 + 5120, 8192 - 5120));
        assert_eq!(status(&rig.answer(8192 - 5120)), Status::Ok);
        rig.buffer.reclaim();
    }
}

#[test]
fn a_read_beyond_a_truncated_file_fails() {
    let mut rig = rig(Op::Read, SECTOR, |_| {});
    assert_eq!(transfer(&rig.answer(4096)), (8192, 4096));
    assert_eq!(status(&rig.answer(100)), Status::Medium);
    rig.buffer.reclaim();
}

#[test]
fn errors_of_the_kernel_map_to_statuses() {
    for (errno, expected) in
        [(libc::EIO, Status::Medium), (libc::ENOSPC, Status::NoSpace), (libc::EDQUOT, Status::NoSpace)]
    {
        let mut rig = rig(Op::Write, SECTOR, |_| {});
        assert_eq!(status(&rig.answer(-errno)), expected);
        rig.buffer.reclaim();
    }
}

#[test]
fn temporary_errors_restart_the_request_after_a_delay() {
    let mut rig = rig(Op::Write, SECTOR, |c| c.on_full = OnFull::Hold);
    let delays: Vec<_> = [libc::EAGAIN, libc::ENOSPC, libc::ENOSPC, libc::ENOSPC, libc::ENOSPC, libc::ENOSPC]
        .into_iter()
        .map(|errno| {
            assert_eq!(transfer(&rig.answer(4096)), (8192, 4096));
            let Next::Later(delay) = rig.answer(-errno) else { panic!("{errno} is temporary") };
            assert_eq!(transfer(&rig.request.next(&rig.store, &mut rig.pool)), (4096, 8192));
            delay.as_millis()
        })
        .collect();
    assert_eq!(delays, [1, 100, 200, 400, 800, 1000]);
    assert_eq!(rig.store.stats().held_total, 1);
    rig.buffer.reclaim();
}

#[test]
fn a_store_stricter_than_reported_receives_bounced_data() {
    let mut rig = rig(Op::Write, SECTOR, |_| {});
    let Next::Start(Call::Write { data, .. }) = rig.first else { panic!("{:?}", rig.first) };
    let straight = data.as_single().unwrap().base();
    let Next::Start(Call::Write { data, offset, .. }) = rig.answer(-libc::EINVAL) else {
        panic!("not bounced")
    };
    assert_eq!((offset, data.len()), (4096, 8192));
    assert_ne!(data.as_single().unwrap().base(), straight);
    // A second EINVAL fails the request.
    assert_eq!(status(&rig.answer(-libc::EINVAL)), Status::Medium);
    rig.buffer.reclaim();
}

#[test]
fn without_fallocate_zeroes_are_written_and_unmaps_ignored() {
    let mut zeroes = rig(Op::WriteZeroes, SECTOR, |_| {});
    assert!(matches!(zeroes.first, Next::Start(Call::Allocate { offset: 4096, len: 8192, .. })));
    assert_eq!(transfer(&zeroes.answer(-libc::EOPNOTSUPP)), (4096, 8192));
    assert_eq!(status(&zeroes.answer(8192)), Status::Ok);
    let mut unmap = rig(Op::Unmap, SECTOR, |_| {});
    assert_eq!(status(&unmap.answer(-libc::EOPNOTSUPP)), Status::Ok);
}

#[test]
fn holes_are_punched_only_where_unmapping_is_allowed() {
    let zero = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let mode = |next: &Next| match next {
        Next::Start(Call::Allocate { mode, .. }) => *mode,
        other => panic!("not {other:?}"),
    };
    let mut allocated = rig(Op::WriteZeroes, SECTOR, |_| {});
    assert_eq!(mode(&allocated.first), zero);
    assert_eq!(transfer(&allocated.answer(-libc::EOPNOTSUPP)), (4096, 8192));
    let mut unmappable = rig_of(Op::WriteZeroes, SECTOR, |_| {}, |io| Io { may_unmap: true, ..io });
    assert_eq!(mode(&unmappable.first), punch);
    assert_eq!(mode(&unmappable.answer(-libc::EOPNOTSUPP)), zero);
    assert_eq!(transfer(&unmappable.answer(-libc::EOPNOTSUPP)), (4096, 8192));
    assert!(
        !unmappable.store.punches.load(Ordering::Relaxed) && !unmappable.store.zeroes.load(Ordering::Relaxed)
    );
    allocated.request.answered(8192, &allocated.store, &mut allocated.pool);
    unmappable.request.answered(8192, &unmappable.store, &mut unmappable.pool);
}

#[test]
fn einval_of_one_range_does_not_disable_fallocate() {
    let mut zeroes = rig(Op::WriteZeroes, SECTOR, |_| {});
    assert_eq!(transfer(&zeroes.answer(-libc::EINVAL)), (4096, 8192));
    assert_eq!(status(&zeroes.answer(8192)), Status::Ok);
    let mut unmap = rig(Op::Unmap, SECTOR, |_| {});
    assert_eq!(status(&unmap.answer(-libc::EINVAL)), Status::Ok);
    for rig in [zeroes, unmap] {
        assert!(rig.store.punches.load(Ordering::Relaxed) && rig.store.zeroes.load(Ordering::Relaxed));
    }
    // Any other errno fails the request.
    for errno in [libc::EIO, libc::EPERM, libc::ENODEV, libc::EFBIG] {
        assert_eq!(status(&rig(Op::Unmap, SECTOR, |_| {}).answer(-errno)), Status::Medium);
    }
}

#[test]
fn a_fua_write_through_the_page_cache_ends_with_a_sync() {
    let cached = |c: &mut Config| c.direct = Direct::Never;
    let mut rig = rig_of(Op::Write, Alignment::NONE, cached, |io| Io { fua: true, ..io });
    assert!(matches!(rig.first, Next::Start(Call::Write { dsync: false, .. })));
    assert!(matches!(rig.answer(8192), Next::Start(Call::Sync)));
    assert_eq!(status(&rig.answer(-libc::EIO)), Status::Medium);
    assert!(rig.store.lost.load(Ordering::Relaxed));
    rig.buffer.reclaim();
    // With direct I/O no earlier write can be lost.
    let mut rig = rig_of(Op::Write, SECTOR, |_| {}, |io| Io { fua: true, ..io });
    assert!(matches!(rig.first, Next::Start(Call::Write { dsync: true, .. })));
    assert_eq!(status(&rig.answer(8192)), Status::Ok);
    rig.buffer.reclaim();
}

#[test]
fn a_lost_page_cache_stays_lost() {
    let cached = |c: &mut Config| c.direct = Direct::Never;
    for (alignment, lost) in [(Alignment::NONE, true), (SECTOR, false)] {
        let mut rig = rig(Op::Flush, alignment, cached);
        assert!(matches!(rig.first, Next::Start(Call::Sync)));
        assert_eq!(status(&rig.answer(-libc::EIO)), Status::Medium);
        assert_eq!(rig.store.lost.load(Ordering::Relaxed), lost);
        let io = Io {
            tag: Tag(2),
            op: Op::Flush,
            fua: false,
            may_unmap: false,
            lba: Lba::ZERO,
            blocks: Blocks::ZERO,
            source: Lba::ZERO,
            data: Sgl::EMPTY,
        };
        let next = Request::new(&io, &rig.store).next(&rig.store, &mut rig.pool);
        assert_eq!(matches!(next, Next::Done(Status::Medium)), lost);
    }
}

#[test]
fn an_error_of_a_cached_write_may_be_of_earlier_writes() {
    let own = [libc::ENOSPC, libc::EDQUOT, libc::EFBIG, libc::ENOMEM];
    // For each errno: whether the disk is marked as having lost writes, first if ENOSPC is known to refer to the write itself,
    // then if it is not known.
    let cases = own.map(|errno| (errno, [false, true])).into_iter().chain([
        (libc::EFAULT, [false; 2]),
        (libc::EIO, [true; 2]),
        (libc::EROFS, [true; 2]),
        (libc::ESTALE, [true; 2]),
        (4095, [true; 2]),
    ]);
    for (errno, lost) in cases {
        for (enospc_is_own, lost) in [true, false].into_iter().zip(lost) {
            for on_full in [OnFull::Error, OnFull::Hold] {
                for (op, alignment) in
                    [(Op::Write, Alignment::NONE), (Op::Read, Alignment::NONE), (Op::Write, SECTOR)]
                {
                    let mut rig = rig(op, alignment, |c| c.on_full = on_full);
                    rig.store.enospc_is_own = enospc_is_own;
                    rig.answer(-errno);
                    let expected = lost && op == Op::Write && alignment == Alignment::NONE;
                    let is_lost = rig.store.lost.load(Ordering::Relaxed);
                    assert_eq!(is_lost, expected, "{errno} {enospc_is_own} {op:?} {alignment:?}");
                    rig.buffer.reclaim();
                }
            }
        }
    }
}

#[test]
fn eagain_is_retried_after_a_millisecond() {
    let mut rig = rig(Op::Flush, SECTOR, |_| {});
    assert!(matches!(rig.answer(-libc::EAGAIN), Next::Later(delay) if delay == Duration::from_millis(1)));
    assert!(matches!(rig.request.next(&rig.store, &mut rig.pool), Next::Start(Call::Sync)));
}
