//! PRPs and SGLs, read back as a controller reads them.

use proptest::prelude::*;

use super::*;

const PAGE: u64 = 4096;
const LIST: u64 = 0x7000_0000;

fn build(pieces: &[Piece], sgl: SglSupport, words: usize) -> Result<(SubmissionEntry, Vec<u64>), Unfit> {
    let mut memory = vec![0; words];
    let mut list = List {
        iova: LIST,
        len: words,
        write: |at, words: &[u64]| memory[at..at + words.len()].copy_from_slice(words),
    };
    let entry = attach(SubmissionEntry::new(2, 1), pieces, PAGE, sgl, &mut list)?;
    Ok((entry, memory))
}

/// The bytes that a controller would access, as single addresses in order, by its reading of the specification.
fn addresses(entry: &SubmissionEntry, list: &[u64], len: u64) -> Vec<u64> {
    let [first, second] = entry.data_pointer();
    let mut found = Vec::new();
    if entry.has_sgl() {
        let expand = |[address, rest]: [u64; 2]| {
            assert_eq!(rest >> 60, DATA_BLOCK);
            address..address + (rest & 0xffff_ffff)
        };
        if second >> 60 == LAST_SEGMENT {
            assert_eq!(first, LIST);
            let count = (second & 0xffff_ffff) as usize / 16;
            list.as_chunks::<2>().0[..count].iter().for_each(|&words| found.extend(expand(words)));
        } else {
            found.extend(expand([first, second]));
        }
        return found;
    }
    let in_first = (PAGE - first % PAGE).min(len);
    found.extend(first..first + in_first);
    let pages = (len - in_first).div_ceil(PAGE) as usize;
    let entries = match pages {
        0 => vec![],
        1 => vec![second],
        _ => {
            assert_eq!(second, LIST);
            list[..pages].to_vec()
        }
    };
    for page in entries {
        assert_eq!(page % PAGE, 0);
        found.extend(page..page + PAGE.min(len - found.len() as u64));
    }
    found
}

fn expected(pieces: &[Piece]) -> Vec<u64> {
    pieces.iter().flat_map(|piece| piece.iova..piece.iova + u64::from(piece.len)).collect()
}

fn piece(iova: u64, len: u32) -> Piece {
    Piece { iova, len }
}

#[test]
fn one_and_two_pages_need_no_list() {
    for pieces in [
        &[piece(0x1000, 4096)][..],
        &[piece(0x1ffc, 4)],
        &[piece(0x1800, 4096)],
        &[piece(0x1000, 4096), piece(0x9000, 512)],
        &[piece(0x1200, 0xe00), piece(0x9000, 512)],
        &[piece(0x1000, 512), piece(0x1200, 512)],
    ] {
        let (entry, list) = build(pieces, SglSupport::None, 0).unwrap_or_else(|unfit| {
            assert_eq!(unfit, Unfit::TooLong { max: 0 });
            build(pieces, SglSupport::None, 1).unwrap()
        });
        let len = pieces.iter().map(|piece| u64::from(piece.len)).sum();
        assert_eq!(addresses(&entry, &list, len), expected(pieces), "{pieces:x?}");
    }
}

#[test]
fn what_prps_cannot_describe_is_unfit_unless_there_are_sgls() {
    let gap = [piece(0x1000, 512), piece(0x9000, 512)];
    let odd = [piece(0x1001, 512)];
    assert_eq!(build(&gap, SglSupport::None, 8), Err(Unfit::Unaligned { index: 1 }));
    assert_eq!(build(&odd, SglSupport::None, 8), Err(Unfit::Unaligned { index: 0 }));
    assert_eq!(build(&odd, SglSupport::Dwords, 8), Err(Unfit::Unaligned { index: 0 }));
    for pieces in [&gap[..], &odd] {
        let (entry, list) = build(pieces, SglSupport::Bytes, 8).unwrap();
        assert!(entry.has_sgl() && addresses(&entry, &list, 0) == expected(pieces));
    }
}

#[test]
fn lists_that_are_too_short_and_pieces_that_wrap_are_refused() {
    assert_eq!(build(&[piece(0, 4 * 4096)], SglSupport::None, 2), Err(Unfit::TooLong { max: 2 }));
    assert!(build(&[piece(0, 4 * 4096)], SglSupport::None, 3).is_ok());
    let three = [piece(1, 1), piece(5, 1), piece(9, 1)];
    assert_eq!(build(&three, SglSupport::Bytes, 5), Err(Unfit::TooLong { max: 2 }));
    assert_eq!(build(&[piece(0, 0)], SglSupport::Bytes, 8), Err(Unfit::BadPiece { index: 0 }));
    assert_eq!(
        build(&[piece(u64::MAX - 4095, 8192)], SglSupport::Bytes, 8),
        Err(Unfit::BadPiece { index: 0 })
    );
    assert_eq!(build(&[], SglSupport::None, 0).unwrap().0.data_pointer(), [0, 0]);
}

#[test]
fn the_last_page_of_the_address_space_is_a_page_as_others() {
    let last = u64::MAX - 4095;
    let pieces = [piece(last - 4096, 4096), piece(last, 4092)];
    let (entry, _) = build(&pieces, SglSupport::None, 4).unwrap();
    assert_eq!(entry.data_pointer(), [last - 4096, last]);
    let (entry, _) = build(&[piece(last + 4, 8), piece(last + 12, 8)], SglSupport::None, 4).unwrap();
    assert_eq!(entry.data_pointer(), [last + 4, 0]);
    let wraps = build(&[piece(last - 4096, 8193)], SglSupport::None, 4);
    assert_eq!(wraps, Err(Unfit::BadPiece { index: 0 }));
}

#[test]
fn a_list_holds_the_largest_transfer_at_any_offset() {
    for page in [4096, 8192, 65536] {
        assert_eq!(list_bytes(transfer_max(page), 0, SglSupport::None, page), page);
        let words = page as usize / 8;
        let mut list = List { iova: LIST, len: words, write: |_, _: &[u64]| {} };
        let most = [piece(page - 4, transfer_max(page).min(u64::from(u32::MAX)) as u32)];
        assert!(long_prps(&most, page, &mut list).is_ok(), "{page}");
    }
    assert_eq!(list_bytes(131_072, 128, SglSupport::Bytes, 4096), 2048);
    assert_eq!(list_bytes(0, 0, SglSupport::None, 4096), 64);
}

/// Pieces as guests have them: mostly pages, some parts, some next to each other.
fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let one =
        (0_u64..64, 0_u64..1024, 1_u32..5000, 0..4_u8).prop_map(|(page, dword, len, kind)| match kind {
            0 => piece(page << 20, 4096),
            1 => piece((page << 20) + 4 * dword, (4096 - 4 * dword) as u32),
            2 => piece(page << 20, 8192),
            _ => piece((page << 20) + dword, len),
        });
    let joined = prop::collection::vec((one, any::<bool>()), 1..12);
    joined.prop_map(|parts| {
        let mut pieces: Vec<Piece> = Vec::new();
        for (mut part, joins) in parts {
            if let (true, Some(last)) = (joins, pieces.last()) {
                part.iova = last.iova + u64::from(last.len);
            }
            pieces.push(part);
        }
        pieces
    })
}

proptest! {
    /// Whatever is accepted, a controller accesses exactly the pieces, in order.
    #[test]
    fn a_controller_finds_exactly_the_pieces(pieces in pieces(), kind in 0..3_u8, words in 0_usize..80) {
        let sgl = [SglSupport::None, SglSupport::Bytes, SglSupport::Dwords][usize::from(kind)];
        let len = pieces.iter().map(|piece| u64::from(piece.len)).sum();
        match build(&pieces, sgl, words) {
            Ok((entry, list)) => prop_assert_eq!(addresses(&entry, &list, len), expected(&pieces)),
            Err(Unfit::BadPiece { .. }) => prop_assert!(false, "no piece is bad"),
            Err(Unfit::Unaligned { .. }) => prop_assert!(sgl != SglSupport::Bytes),
            Err(Unfit::TooLong { .. }) => prop_assert!(words < 48),
        }
    }

    /// Pieces that are whole pages, but for the start of the first and the end of the last, always fit.
    #[test]
    fn aligned_pieces_always_fit(pages in prop::collection::vec(0_u64..1 << 40, 2..16), skip in 0_u64..1024, end in 1_u32..=4096) {
        let mut pieces: Vec<_> = pages.iter().map(|page| piece(page * PAGE, 4096)).collect();
        pieces[0].iova += 4 * skip;
        pieces[0].len -= 4 * skip as u32;
        pieces.last_mut().unwrap().len = end;
        let (entry, _) = build(&pieces, SglSupport::Bytes, 16).unwrap();
        prop_assert!(!entry.has_sgl());
    }
}
