//! Tests of scatter lists against the same bytes in one array.

use super::{STREAMED_STORE_MIN, Seg, Sgl};
use crate::Mapping;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use std::sync::OnceLock;

/// Memory that contains a list of separate pieces, and their content as one array.
struct Scattered {
    memory: Vec<u8>,
    segs: Vec<Seg>,
    places: Vec<std::ops::Range<usize>>,
}

impl Scattered {
    /// Pieces of the given lengths, each after a gap.
    fn new(pieces: &[(usize, usize)]) -> Self {
        let total: usize = pieces.iter().map(|(gap, len)| gap + len).sum();
        let mut memory: Vec<u8> = (0..total).map(|i| (i * 31 + i / 251) as u8).collect();
        let base = memory.as_mut_ptr();
        let (mut segs, mut places, mut at) = (Vec::new(), Vec::new(), 0);
        for (gap, len) in pieces {
            at += gap;
            segs.push(Seg::new(base.wrapping_add(at), *len));
            places.push(at..at + len);
            at += len;
        }
        Self { memory, segs, places }
    }

    fn sgl(&self) -> Sgl {
        let len: usize = self.segs.iter().map(Seg::len).sum();
        // SAFETY: the list and its memory live as long as `self`, which outlives the view in these tests.
        unsafe { Sgl::new(&self.segs, len as u32) }
    }

    fn gathered(&self) -> Vec<u8> {
        self.places.iter().flat_map(|place| self.memory[place.clone()].to_vec()).collect()
    }

    /// The bytes in the gaps.
    fn others(&self) -> Vec<u8> {
        let inside = |i| self.places.iter().any(|place| place.contains(&i));
        (0..self.memory.len()).filter(|i| !inside(*i)).map(|i| self.memory[i]).collect()
    }
}

/// Mostly pieces of a few bytes; sometimes a piece that is large enough for non-temporal stores.
fn pieces() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let len = prop_oneof![10 => 1..100_usize, 1 => 4000..20_000_usize];
    vec((0..70_usize, len), 1..9)
}

/// A random part of `of` bytes.
fn part(of: usize, (from, to): (Index, Index)) -> std::ops::Range<usize> {
    let (a, b) = (from.index(of + 1), to.index(of + 1));
    a.min(b)..a.max(b)
}

/// A memory disk, small or large enough for non-temporal stores.
fn store(large: bool) -> &'static Mapping {
    static STORES: [OnceLock<Mapping>; 2] = [OnceLock::new(), OnceLock::new()];
    let len = if large { STREAMED_STORE_MIN } else { 1 << 20 };
    STORES[usize::from(large)].get_or_init(|| Mapping::anonymous(len).unwrap())
}

proptest! {
    #[test]
    fn a_view_reads_the_same_bytes_as_the_array(pieces in pieces(), cut: (Index, Index), again: (Index, Index)) {
        let scattered = Scattered::new(&pieces);
        let all = scattered.gathered();
        prop_assert_eq!(scattered.sgl().len() as usize, all.len());
        let first = part(all.len(), cut);
        let second = part(first.len(), again);
        let view = scattered.sgl().slice(first.start as u32, first.len() as u32);
        let view = view.slice(second.start as u32, second.len() as u32);
        let model = &all[first][second];
        prop_assert_eq!(view.len() as usize, model.len());
        prop_assert_eq!(view.is_empty(), model.is_empty());
        let mut seen = vec![0; model.len()];
        view.read(0, &mut seen);
        prop_assert_eq!(&seen, model);
        prop_assert!(view.pieces().all(|piece| !piece.is_empty()));
        prop_assert_eq!(view.pieces().map(|piece| piece.len()).sum::<usize>(), model.len());
        prop_assert_eq!(view.as_single(), view.pieces().next().filter(|_| view.pieces().count() == 1));
    }

    #[test]
    fn a_copy_fills_the_first_bytes_of_the_other_view(from in pieces(), to in pieces(), cut: (Index, Index)) {
        let (from, to) = (Scattered::new(&from), Scattered::new(&to));
        let (source, mut model, others) = (from.gathered(), to.gathered(), to.others());
        let range = part(source.len().min(model.len()), cut);
        from.sgl().slice(range.start as u32, range.len() as u32).copy_to(&to.sgl());
        model[..range.len()].copy_from_slice(&source[range]);
        prop_assert_eq!(to.gathered(), model);
        prop_assert_eq!(to.others(), others);
        prop_assert_eq!(from.gathered(), source);
    }

    #[test]
    fn writes_change_the_view_and_nothing_else(
        pieces in pieces(), cut: (Index, Index), at: (Index, Index), byte: u8, fill: bool,
    ) {
        let scattered = Scattered::new(&pieces);
        let (mut model, others) = (scattered.gathered(), scattered.others());
        let range = part(model.len(), cut);
        let view = scattered.sgl().slice(range.start as u32, range.len() as u32);
        if fill {
            view.fill(byte);
            model[range].fill(byte);
        } else {
            let inner = part(range.len(), at);
            let data: Vec<u8> = (0..inner.len()).map(|i| byte.wrapping_add(i as u8)).collect();
            view.write(inner.start as u32, &data);
            model[range][inner].copy_from_slice(&data);
        }
        prop_assert_eq!(scattered.gathered(), model);
        prop_assert_eq!(scattered.others(), others);
    }

    #[test]
    fn a_store_is_written_from_a_view_and_read_into_it(pieces in pieces(), cut: (Index, Index), at in 1..90_000_u64, large: bool) {
        let (source, target) = (Scattered::new(&pieces), Scattered::new(&pieces));
        let all = source.gathered();
        let range = part(all.len(), cut);
        let slice = |scattered: &Scattered| scattered.sgl().slice(range.start as u32, range.len() as u32);
        let around = |at: u64| {
            let byte = Seg::new(store(large).base().as_ptr().wrapping_add(at as usize), 1);
            // SAFETY: a byte of a mapping that lives for ever.
            unsafe { byte.base().read() }
        };
        let end = at + range.len() as u64;
        let beside = (around(at - 1), around(end));
        slice(&source).store_to(store(large), at);
        prop_assert_eq!((around(at - 1), around(end)), beside);
        target.sgl().fill(0);
        let others = target.others();
        slice(&target).load_from(store(large), at);
        let mut model = vec![0; all.len()];
        model[range.clone()].copy_from_slice(&all[range.clone()]);
        prop_assert_eq!(target.gathered(), model);
        prop_assert_eq!(target.others(), others);
    }

    #[test]
    fn put_writes_the_first_bytes(pieces in pieces(), cut: (Index, Index), value: [u8; 12]) {
        let scattered = Scattered::new(&pieces);
        let (mut model, others) = (scattered.gathered(), scattered.others());
        let range = part(model.len(), cut);
        let view = scattered.sgl().slice(range.start as u32, range.len() as u32);
        view.prefetch_write();
        if range.len() >= value.len() {
            view.put(&value);
            model[range.start..range.start + value.len()].copy_from_slice(&value);
        }
        prop_assert_eq!(scattered.gathered(), model);
        prop_assert_eq!(scattered.others(), others);
    }

    #[test]
    fn put_byte_writes_one_byte(pieces in pieces(), cut: (Index, Index), at: Index, byte: u8) {
        let scattered = Scattered::new(&pieces);
        let (mut model, others) = (scattered.gathered(), scattered.others());
        let range = part(model.len(), cut);
        let view = scattered.sgl().slice(range.start as u32, range.len() as u32);
        if !range.is_empty() {
            let at = at.index(range.len());
            view.put_byte(at as u32, byte);
            model[range.start + at] = byte;
        }
        prop_assert_eq!(scattered.gathered(), model);
        prop_assert_eq!(scattered.others(), others);
    }

    #[test]
    fn alignment_is_that_of_every_piece(pieces in vec((0..3_usize, 1..4_usize), 1..5), shift in 0..4_u32) {
        let pieces: Vec<_> = pieces.into_iter().map(|(gap, len)| (gap * 4, len * 8)).collect();
        let align = 1_usize << shift;
        let scattered = Scattered::new(&pieces);
        let base = scattered.memory.as_ptr() as usize;
        let aligned = |place: &std::ops::Range<usize>| {
            (base + place.start).is_multiple_of(align) && place.len().is_multiple_of(align)
        };
        prop_assert_eq!(scattered.sgl().is_aligned(align), scattered.places.iter().all(aligned));
    }
}

#[test]
fn pieces_that_follow_each_other_are_one_piece_of_memory() {
    let pieces = [(3, 4), (0, 2), (0, 5), (1, 2)];
    let scattered = Scattered::new(&pieces);
    let base = scattered.memory.as_ptr();
    let found = |offset, len| {
        let found = scattered.sgl().slice(offset, len).as_contiguous()?;
        Some((found.base() as usize - base as usize, found.len()))
    };
    assert_eq!(found(0, 11), Some((3, 11)));
    assert_eq!(found(1, 9), Some((4, 9)));
    assert_eq!(found(5, 6), Some((8, 6)));
    assert_eq!([found(0, 12), found(10, 2), found(0, 13)], [None; 3], "a gap");
    assert_eq!(found(11, 2), Some((15, 2)));
    assert!(Sgl::EMPTY.as_contiguous().is_none());
}

#[test]
fn empty_views_are_valid() {
    assert_eq!((Sgl::EMPTY.len(), Sgl::EMPTY.pieces().count()), (0, 0));
    assert!(Sgl::EMPTY.is_empty() && Sgl::EMPTY.is_aligned(4096) && Sgl::EMPTY.as_single().is_none());
    Sgl::EMPTY.fill(1);
    Sgl::EMPTY.read(0, &mut []);
    Sgl::EMPTY.prefetch();
    Sgl::EMPTY.prefetch_write();
    assert!(Sgl::EMPTY.slice(0, 0).is_empty());
}

#[test]
#[should_panic(expected = "slice 5+6 of 10 bytes")]
fn a_slice_beyond_the_end_panics() {
    let scattered = Scattered::new(&[(0, 10)]);
    let _view = scattered.sgl().slice(5, 6);
}

#[test]
#[should_panic(expected = "slice 0+8 of 7 bytes")]
fn a_value_is_not_put_beyond_the_end() {
    let scattered = Scattered::new(&[(0, 10)]);
    scattered.sgl().slice(0, 7).put(&0_u64);
}

#[test]
#[should_panic(expected = "byte 7 of 7")]
fn a_byte_is_not_put_beyond_the_end() {
    let scattered = Scattered::new(&[(0, 10)]);
    scattered.sgl().slice(0, 7).put_byte(7, 0);
}

#[test]
#[should_panic(expected = "1048570+7 of 1048576")]
fn a_store_is_not_written_beyond_its_end() {
    let scattered = Scattered::new(&[(0, 7)]);
    scattered.sgl().store_to(store(false), (1 << 20) - 6);
}
