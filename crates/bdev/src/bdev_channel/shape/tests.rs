//! Checks, routes and cuts of requests.

use super::super::request::Place;
use super::*;
use crate::{Channel, Geometry, OpenError, Tag};
use aryk_dma::{Buffer, Sgl};
use aryk_reactor::{Cx, Nanos, RootId};

const BLOCK: u32 = 512;
const DISK: Blocks = Blocks(1000);

struct Disk {
    limits: Limits,
    ops: OpSet,
}

impl Device for Disk {
    fn product(&self) -> &'static str {
        "shape"
    }

    fn geometry(&self) -> Geometry {
        Geometry::plain(BLOCK, DISK)
    }

    fn limits(&self) -> Limits {
        self.limits
    }

    fn ops(&self) -> OpSet {
        self.ops
    }

    fn open_channel(&self, _: RootId, _: &mut Cx) -> Result<Box<dyn Channel>, OpenError> {
        Err(OpenError::Removed)
    }
}

fn shape(limits: Limits, ops: OpSet) -> Shape {
    Shape::new(&Disk { limits, ops }, true)
}

fn io(op: Op, lba: u64, blocks: u64, data: Sgl) -> Io {
    Io {
        tag: Tag(1),
        op,
        fua: false,
        may_unmap: false,
        lba: Lba(lba),
        blocks: Blocks(blocks),
        source: Lba::ZERO,
        data,
    }
}

/// Memory of so many blocks.
fn memory(blocks: u32) -> Buffer {
    Buffer::new((blocks * BLOCK) as usize, 512)
}

/// The pieces of a request until it has gone, each as its first block, its blocks, and whether it is zeroes.
fn pieces(shape: &Shape, io: Io) -> Vec<(u64, u64, bool)> {
    let mut request = Request::new(&io, io.blocks.to_bytes(BLOCK), Nanos(0), Place::Queued);
    let mut pieces = Vec::new();
    loop {
        let (blocks, zeroes) = match shape.next_piece(&request).expect("a block fits") {
            Piece::Blocks(blocks) => (blocks, false),
            Piece::Zeroes(blocks) => (blocks, true),
        };
        pieces.push((request.lba.0, blocks.0, zeroes));
        request.lba += blocks;
        request.blocks -= blocks;
        if request.op.has_data() {
            let bytes = shape.data_len(blocks);
            request.data = request.data.slice(bytes, request.data.len() - bytes);
        }
        if request.blocks == Blocks::ZERO {
            return pieces;
        }
    }
}

#[test]
fn a_request_is_refused_for_what_is_wrong_with_it() {
    let shape = shape(Limits::default(), OpSet::PLAIN);
    let mut memory = memory(4);
    let data = memory.lend();
    let check = |io| shape.check(&io, DISK);
    assert_eq!(check(io(Op::Read, DISK.0 - 4, 4, data)), Ok(()));
    assert_eq!(check(io(Op::Read, DISK.0 - 3, 4, data)), Err(Status::OutOfRange));
    assert_eq!(check(io(Op::Read, u64::MAX, 4, data)), Err(Status::OutOfRange));
    assert_eq!(check(io(Op::Write, 0, 3, data)), Err(Status::Invalid));
    assert_eq!(check(io(Op::Write, 0, 0, Sgl::EMPTY)), Err(Status::Invalid));
    assert_eq!(check(io(Op::Write, 0, 3, data.slice(0, 4 * BLOCK - 1))), Err(Status::Invalid));
    assert_eq!(check(io(Op::Unmap, 0, 4, Sgl::EMPTY)), Ok(()));
    assert_eq!(check(io(Op::Unmap, 0, 4, data)), Err(Status::Invalid));
    assert_eq!(check(io(Op::Flush, 0, 0, Sgl::EMPTY)), Ok(()));
    assert_eq!(check(io(Op::Flush, 0, 1, Sgl::EMPTY)), Err(Status::Invalid));
    assert_eq!(check(io(Op::CompareAndWrite, 0, 2, data)), Ok(()));
    assert_eq!(check(io(Op::CompareAndWrite, 0, 4, data)), Err(Status::Invalid));
    assert_eq!(
        check(Io { source: Lba(DISK.0 - 1), ..io(Op::Copy, 0, 2, Sgl::EMPTY) }),
        Err(Status::OutOfRange)
    );
    // As many bytes as a huge request would have, had they not overflowed.
    let huge = 1 << 55 | 4;
    assert_eq!(shape.check(&io(Op::Read, 0, huge, data), Blocks::MAX), Err(Status::Invalid));
    memory.reclaim();
}

#[test]
fn what_is_not_permitted_is_read_only_or_unsupported() {
    let limits = Limits::default();
    let all = [Op::Write, Op::Unmap, Op::WriteZeroes, Op::CompareAndWrite, Op::Copy];
    let read_only = Shape::new(&Disk { limits, ops: OpSet::PLAIN }, false);
    for op in all {
        assert_eq!(read_only.check(&io(op, 0, 1, Sgl::EMPTY), DISK), Err(Status::ReadOnly), "{op:?}");
    }
    let reads = shape(limits, OpSet::of(&[Op::Read]));
    for op in all {
        assert_eq!(reads.check(&io(op, 0, 1, Sgl::EMPTY), DISK), Err(Status::Unsupported), "{op:?}");
    }
    assert_eq!(reads.check(&io(Op::Flush, 0, 0, Sgl::EMPTY), DISK), Err(Status::Unsupported));
}

#[test]
fn requests_are_cut_at_limits_and_boundaries() {
    let limits = Limits {
        transfer_blocks: Blocks(8),
        boundary_blocks: Blocks(10),
        unmap_blocks: Blocks(100),
        ..Limits::default()
    };
    let shape = shape(limits, OpSet::PLAIN.without(Op::WriteZeroes));
    let mut memory = memory(20);
    let data = memory.lend();
    let read = io(Op::Read, 5, 20, data);
    assert!(!shape.is_one_piece(&read));
    assert_eq!(pieces(&shape, read), [(5, 5, false), (10, 8, false), (18, 2, false), (20, 5, false)]);
    let small = io(Op::Write, 11, 8, data.slice(0, 8 * BLOCK));
    assert!(shape.is_one_piece(&small));
    assert_eq!(pieces(&shape, small), [(11, 8, false)]);
    let unmap = io(Op::Unmap, 0, 250, Sgl::EMPTY);
    assert_eq!(pieces(&shape, unmap), [(0, 100, false), (100, 100, false), (200, 50, false)]);
    let zeroes = io(Op::WriteZeroes, 8, 12, Sgl::EMPTY);
    assert!(!shape.is_one_piece(&zeroes));
    assert_eq!(pieces(&shape, zeroes), [(8, 2, true), (10, 8, true), (18, 2, true)]);
    assert_eq!(pieces(&shape, io(Op::Flush, 0, 0, Sgl::EMPTY)), [(0, 0, false)]);
    memory.reclaim();
}

#[test]
fn compound_requests_go_to_a_device_that_does_them() {
    let limits = Limits { compare_and_write_blocks: Blocks(2), ..Limits::default() };
    let mut memory = memory(8);
    let data = memory.lend();
    let of = |blocks: u64| io(Op::CompareAndWrite, 0, blocks, data.slice(0, 2 * blocks as u32 * BLOCK));
    let copy = Io { source: Lba(2), ..io(Op::Copy, 0, 2, Sgl::EMPTY) };
    let native = shape(limits, OpSet::ALL);
    assert_eq!([2, 3].map(|blocks| native.route(&of(blocks))), [Route::Native, Route::Emulated]);
    assert_eq!(pieces(&native, of(2)), [(0, 2, false)]);
    assert_eq!(native.route(&copy), Route::Native);
    assert_eq!(native.route(&Io { source: Lba(1), ..copy }), Route::Emulated, "the ranges overlap");
    let emulated = shape(limits, OpSet::PLAIN);
    assert_eq!((emulated.route(&of(1)), emulated.route(&copy)), (Route::Emulated, Route::Emulated));

    // Fences keep this host's changes apart, and no other's.
    let shared = Limits { is_shared: true, ..limits };
    let native = shape(shared, OpSet::ALL);
    assert_eq!([2, 3].map(|blocks| native.route(&of(blocks))), [Route::Native, Route::Refused]);
    assert_eq!(native.check(&of(3), DISK), Err(Status::Unsupported));
    let plain = shape(shared, OpSet::PLAIN);
    assert_eq!(plain.check(&of(1), DISK), Err(Status::Unsupported));
    assert_eq!(plain.check(&copy, DISK), Err(Status::Unsupported));
    for (limits, ops, most) in [
        (limits, OpSet::PLAIN, Blocks::MAX),
        (limits, OpSet::of(&[Op::Read]), Blocks::ZERO),
        (shared, OpSet::PLAIN, Blocks::ZERO),
        (Limits { copy_blocks: Blocks(5), ..shared }, OpSet::ALL, Blocks(5)),
    ] {
        assert_eq!(limits.copy_max(ops), most);
        let takes = |blocks| {
            let copy = Io { source: Lba(500), ..io(Op::Copy, 0, blocks, Sgl::EMPTY) };
            shape(limits, ops).check(&copy, DISK).is_ok()
        };
        assert_eq!([1, 5, 6].map(takes), [1, 5, 6].map(|blocks| Blocks(blocks) <= most));
    }
    let compare = io(Op::Compare, 0, 8, data);
    assert_eq!((plain.check(&compare, DISK), plain.route(&compare)), (Ok(()), Route::Emulated));
    memory.reclaim();
}
