//! What a disk holds before it is formatted or encrypted, or where a copy of its header should be. Control context, on a thread
//! that may block.
//!
//! Before a format, any byte but zero counts where the header will be, or at the disk's end. Where encrypted data may be, only
//! known formats count.

use aryk_luks::{Header, Store};
use std::io;

/// Bytes that are read at a time.
const CHUNK: u64 = 1 << 20;
/// Bytes at the end of a disk that are read: copies of partition tables and headers of RAID are there.
const TAIL: u64 = 1 << 20;

const LUKS: &str = "a LUKS header";

/// Formats by the bytes that each of their headers has at an offset.
const KNOWN: [(&str, usize, &[u8]); 12] = [
    (LUKS, 0, b"LUKS\xba\xbe"),
    ("a partition table (GPT)", 512, b"EFI PART"),
    ("a partition table (GPT)", 4096, b"EFI PART"),
    ("an XFS file system", 0, b"XFSB"),
    ("an ext2, ext3 or ext4 file system", 1080, b"\x53\xef"),
    ("a Btrfs file system", 65_600, b"_BHRfS_M"),
    ("an LVM physical volume", 512, b"LABELONE"),
    ("swap space", 4086, b"SWAPSPACE2"),
    ("a member of a RAID array", 4096, b"\xfc\x4e\x2b\xa9"),
    ("a qcow2 image", 0, b"QFI\xfb"),
    ("an NTFS file system", 3, b"NTFS    "),
    ("a partition table or a boot sector", 510, b"\x55\xaa"),
];

/// Describes what the first `header_len` bytes of a disk of `len` bytes hold, or its last ones; `None` if all of these are
/// zeroes.
pub(super) fn find(store: &mut dyn Store, header_len: u64, len: u64) -> io::Result<Option<String>> {
    let tail = len.saturating_sub(TAIL).max(header_len.min(len));
    let mut bytes = vec![0; CHUNK as usize];
    for (start, end) in [(0, header_len.min(len)), (tail, len)] {
        let mut at = start;
        while at < end {
            let part = &mut bytes[..CHUNK.min(end - at) as usize];
            store.read_at(at, part)?;
            if let Some(found) = part.iter().position(|&byte| byte != 0) {
                let known = if at == 0 { recognize(part) } else { None };
                let unknown = || format!("data: byte {} is not zero", at + found as u64);
                return Ok(Some(known.map_or_else(unknown, str::to_owned)));
            }
            at += part.len() as u64;
        }
    }
    Ok(None)
}

/// Names the known format of a disk of `len` bytes, if it has one.
pub(crate) fn known(store: &mut dyn Store, len: u64) -> io::Result<Option<&'static str>> {
    let mut start = vec![0; CHUNK.min(len) as usize];
    store.read_at(0, &mut start)?;
    Ok(recognize(&start))
}

/// Refuses to write a header of which something else has overwritten the first copy.
pub(super) fn check(store: &mut dyn Store, header: &Header) -> Result<(), aryk_luks::Error> {
    if !header.is_degraded() {
        return Ok(());
    }
    match known(store, header.segment().offset)? {
        Some(format) if format != LUKS => Err(aryk_luks::Error::Overwritten(format)),
        _ => Ok(()),
    }
}

fn recognize(start: &[u8]) -> Option<&'static str> {
    let has = |at: usize, magic: &[u8]| start.get(at..at + magic.len()) == Some(magic);
    KNOWN.iter().find(|(_, at, magic)| has(*at, magic)).map(|(name, ..)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_found_where_it_would_be_lost() {
        const LEN: u64 = 8 << 20;
        let find = |at: usize, bytes: &[u8]| {
            let mut store = vec![0; LEN as usize];
            store[at..at + bytes.len()].copy_from_slice(bytes);
            find(&mut store, 2 << 20, LEN).unwrap()
        };
        assert_eq!(find(0, b""), None);
        for (name, at, magic) in KNOWN {
            assert_eq!(find(at, magic).as_deref(), Some(name));
        }
        assert_eq!(find((2 << 20) - 1, b"x").unwrap(), "data: byte 2097151 is not zero");
        assert_eq!(find(LEN as usize - 1, b"x").unwrap(), "data: byte 8388607 is not zero");
        assert_eq!(find(3 << 20, b"x"), None, "data far from the header and the end is not looked for");
        // A disk that is shorter than its header.
        assert_eq!(super::find(&mut vec![0; 4096], 2 << 20, 4096).unwrap(), None);
        assert_eq!(
            super::find(&mut vec![1; 4096], 2 << 20, 4096).unwrap().unwrap(),
            "data: byte 0 is not zero"
        );
    }
}
