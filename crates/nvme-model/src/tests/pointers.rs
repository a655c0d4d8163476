//! PRPs and SGLs, against a simple reference that knows the pages from the start.

use super::host::{Host, PAGE, io, is_ok, status, with_prps};
use crate::{Config, NamespaceConfig, SubmissionEntry, nvm};
use proptest::prelude::{Strategy as _, any, prop};
use proptest::{prop_assert, prop_assert_eq, proptest};

fn descriptor(address: u64, len: u32, kind: u8) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&len.to_le_bytes());
    bytes[15] = kind;
    bytes
}

fn with_sgl(mut entry: SubmissionEntry, first: [u8; 16]) -> SubmissionEntry {
    entry.flags |= 1 << 6;
    entry.dptr = first;
    entry
}

const DATA: u8 = 0x00;
const BUCKET: u8 = 0x10;
const SEGMENT: u8 = 0x20;
const LAST: u8 = 0x30;

fn host_of_small_blocks(sgls: u32) -> Host {
    let config = Config {
        namespaces: vec![(1, NamespaceConfig::new(4096, 0, 1))],
        mdts: 6,
        sgls,
        ..Config::default()
    };
    Host::ready(config)
}

#[test]
fn sgl_descriptors_gather_any_pieces() {
    let mut host = host_of_small_blocks(1 | 1 << 16);
    let (data, list) = (host.pages(2), host.pages(1));
    let at = host.iova + data;
    // 2,048 bytes: 1,000 and 48 in a first segment, 1,000 in a second; two of the pieces are not aligned.
    host.write(data, &[1; 1000]);
    host.write(data + 3001, &[2; 48]);
    host.write(data + 5000, &[3; 1000]);
    let list_at = host.iova + list;
    host.write(list, &descriptor(at, 1000, DATA));
    host.write(list + 16, &descriptor(at + 3001, 48, DATA));
    host.write(list + 32, &descriptor(list_at + 256, 16, LAST));
    host.write(list + 256, &descriptor(at + 5000, 1000, DATA));
    let write = with_sgl(io(nvm::WRITE, 1, 10, 4), descriptor(list_at, 48, SEGMENT));
    assert!(is_ok(&host.run(write)));
    let stored = host.model.with(|c| c.data(1, 10, 4).map(<[u8]>::to_vec)).unwrap();
    assert!(stored[..1000].iter().all(|&b| b == 1) && stored[1048..].iter().all(|&b| b == 3));
    assert!(stored[1000..1048].iter().all(|&b| b == 2));
    // Read the middle block only: bit buckets take the rest.
    host.write(list, &descriptor(0, 512, BUCKET));
    host.write(list + 16, &descriptor(at + 4096, 512, DATA));
    host.write(list + 32, &descriptor(0, 1024, BUCKET));
    host.write(data + 4096, &[0; 4096]);
    let read = with_sgl(io(nvm::READ, 1, 10, 4), descriptor(list_at, 48, LAST));
    assert!(is_ok(&host.run(read)));
    assert_eq!(host.read(data + 4096, 512), stored[512..1024]);
    assert_eq!(host.read(data + 4096 + 512, 8), [0; 8]);
    host.assert_clean();
}

#[test]
fn wrong_sgls_have_their_own_errors() {
    let mut host = host_of_small_blocks(1);
    let (data, list) = (host.pages(1), host.pages(1));
    let (at, list_at) = (host.iova + data, host.iova + list);
    let put = |host: &Host, all: &[[u8; 16]]| host.write(list, all.as_flattened());
    let read = |first| with_sgl(io(nvm::READ, 1, 0, 2), first);
    for (first, all, expected, what) in [
        (descriptor(at, 1024, DATA), vec![], (0, 0), "one descriptor"),
        (descriptor(at, 1023, DATA), vec![], (0, 0x0f), "too short"),
        (descriptor(at, 1025, DATA), vec![], (0, 0x0f), "too long"),
        (descriptor(at, 1024, 0x40), vec![], (0, 0x11), "a keyed descriptor"),
        (descriptor(at, 1024, 0x0f), vec![], (0, 0x11), "an unknown sub type"),
        (descriptor(at, 1024, BUCKET), vec![], (0, 0x11), "a bit bucket where there is none"),
        (descriptor(list_at, 0, LAST), vec![], (0, 0x0d), "an empty segment"),
        (descriptor(list_at, 24, LAST), vec![], (0, 0x0d), "half a descriptor"),
        (descriptor(list_at, 16, SEGMENT), vec![descriptor(at, 1024, DATA)], (0, 0x0d), "no last segment"),
        (
            descriptor(list_at, 16, LAST),
            vec![descriptor(list_at, 16, LAST)],
            (0, 0x0d),
            "a segment in the last",
        ),
        (
            descriptor(list_at, 32, SEGMENT),
            vec![descriptor(list_at, 16, LAST), descriptor(at, 1024, DATA)],
            (0, 0x0d),
            "a segment that is not at the end",
        ),
        (descriptor(list_at, 16, SEGMENT), vec![descriptor(list_at, 16, SEGMENT)], (0, 0x0e), "a loop"),
    ] {
        put(&host, &all);
        assert_eq!(status(&host.run(read(first))), expected, "{what}");
    }
    let mut none = host_of_small_blocks(0);
    assert_eq!(status(&none.run(read(descriptor(at, 1024, DATA)))), (0, 2), "no SGLs at all");
    let mut dwords = host_of_small_blocks(2);
    let page = dwords.iova + dwords.pages(2);
    assert!(is_ok(&dwords.run(read(descriptor(page + 4, 1024, DATA)))));
    assert!(!is_ok(&dwords.run(read(descriptor(page + 2, 1024, DATA)))));
}

proptest! {
    /// A write from and a read to scattered pages, at any offset and length, with a list at any place.
    #[test]
    fn scattered_pages_are_written_and_read(
        offset in (0..1024_u64).prop_map(|n| n * 4),
        blocks in 1..300_u32,
        list_entry in 0..512_u64,
        order in prop::collection::vec(any::<u16>(), 64),
        lba in 0..1000_u64,
    ) {
        let config = Config {
            namespaces: vec![(1, NamespaceConfig::new(4096, 0, 1))], mdts: 6, ..Config::default()
        };
        let mut host = Host::ready(config);
        let len = u64::from(blocks) * 512;
        let count = (offset + len).div_ceil(PAGE);
        // Pages in any order, with gaps.
        let base = host.pages(128);
        let mut pages: Vec<u64> = (0..128).collect();
        for (i, swap) in order.iter().enumerate() {
            pages.swap(i, usize::from(*swap) % 128);
        }
        let pages: Vec<u64> = pages[..count as usize].iter().map(|page| base + page * PAGE).collect();
        let list = host.pages(4);
        let mut at = list + list_entry * 8;
        for (i, page) in pages.iter().enumerate().skip(1) {
            let is_last_entry = (at + 8).is_multiple_of(PAGE);
            if is_last_entry && i + 1 < pages.len() {
                let next = at + 8;
                host.write(at, &(host.iova + next).to_le_bytes());
                at = next;
            }
            host.write(at, &(host.iova + page).to_le_bytes());
            at += 8;
        }
        let bytes: Vec<u8> = (0..len).map(|i| (i * 31 / 512) as u8 ^ i as u8).collect();
        let spans: Vec<(u64, usize, usize)> = pages
            .iter()
            .enumerate()
            .map(|(i, page)| {
                let skip = if i == 0 { offset } else { 0 };
                let start = (i as u64 * PAGE + skip - offset) as usize;
                let end = (((i as u64 + 1) * PAGE - offset) as usize).min(len as usize);
                (page + skip, start, end)
            })
            .collect();
        for (at, start, end) in &spans {
            host.write(*at, &bytes[*start..*end]);
        }
        let prp2 = match pages.len() {
            1 => 0,
            2 => host.iova + pages[1],
            _ => host.iova + list + list_entry * 8,
        };
        let prp1 = host.iova + pages[0] + offset;
        let done = host.run(with_prps(io(nvm::WRITE, 1, lba, blocks), prp1, prp2));
        prop_assert!(is_ok(&done), "{:?}", done);
        let stored = host.model.with(|c| c.data(1, lba, blocks.into()).map(<[u8]>::to_vec));
        prop_assert_eq!(stored.as_ref(), Some(&bytes));
        for (at, start, end) in &spans {
            host.write(*at, &vec![0; end - start]);
        }
        prop_assert!(is_ok(&host.run(with_prps(io(nvm::READ, 1, lba, blocks), prp1, prp2))));
        for (at, start, end) in &spans {
            prop_assert_eq!(&host.read(*at, end - start)[..], &bytes[*start..*end]);
        }
        host.assert_clean();
    }
}
