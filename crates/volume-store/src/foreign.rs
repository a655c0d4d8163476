//! Recognises the data of others on a disk, so that a new pool does not destroy it unasked. Any context.

use std::fmt;

/// Bytes from a disk's start that [`recognise`] needs.
pub const START_BYTES: usize = 128 << 10;
/// Bytes before a disk's end that [`recognise`] needs.
pub const END_BYTES: usize = 128 << 10;

/// What a disk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign(&'static str);

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

struct Signature {
    offset: usize,
    bytes: &'static [u8],
    name: &'static str,
}

const fn at(offset: usize, bytes: &'static [u8], name: &'static str) -> Signature {
    Signature { offset, bytes, name }
}

/// Signatures by byte offset from the start; a more specific one comes before a partition table.
const SIGNATURES: &[Signature] = &[
    at(0, b"SPDKBLOB", "an SPDK blobstore (an lvol store)"),
    at(0, b"LUKS\xba\xbe", "a LUKS encrypted volume"),
    at(0x4000, b"SKUL\xba\xbe", "a LUKS encrypted volume"),
    at(0, b"XFSB", "an XFS file system"),
    at(0x438, b"\x53\xef", "an ext file system"),
    at(0x10040, b"_BHRfS_M", "a Btrfs file system"),
    at(
        0x1018,
        b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81",
        "a bcachefs file system or bcache device",
    ),
    at(0x400, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    at(3, b"NTFS    ", "an NTFS file system"),
    at(3, b"EXFAT   ", "an exFAT file system"),
    at(0x8001, b"CD001", "an ISO 9660 file system"),
    at(0, b"hsqs", "a SquashFS file system"),
    at(0x400, b"\xe2\xe1\xf5\xe0", "an EROFS file system"),
    at(4086, b"SWAPSPACE2", "Linux swap space"),
    at(512, b"LABELONE", "an LVM physical volume"),
    at(0, b"LABELONE", "an LVM physical volume"),
    at(1024, b"LABELONE", "an LVM physical volume"),
    at(1536, b"LABELONE", "an LVM physical volume"),
    at(4096, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
    at(0, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
    at(0, b"bluestore block device", "an OSD of Ceph"),
    at(0, b"QFI\xfb", "a qcow2 image"),
    at(0, b"KDMV", "a VMDK image"),
    at(0, b"vhdxfile", "a VHDX image"),
    at(512, b"EFI PART", "a GPT partition table"),
    at(4096, b"EFI PART", "a GPT partition table"),
    at(510, b"\x55\xaa", "an MBR partition table or a FAT file system"),
];

/// Signatures by byte offset before the end.
const AT_END: &[Signature] = &[
    at(512, b"EFI PART", "the backup of a GPT partition table"),
    at(4096, b"EFI PART", "the backup of a GPT partition table"),
    at(8192, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
    at(65536, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
];

/// The label of ZFS has a list at 16 KiB, and its blocks of state from 128 KiB on; its fourth label is at the end.
const ZFS_NAME: &[u8] = b"pool_guid";

/// What the disk holds whose first [`START_BYTES`] and last [`END_BYTES`] these are; fewer from a smaller disk. `None` if all
/// these bytes are zero.
pub fn recognise(start: &[u8], end: &[u8]) -> Option<Foreign> {
    let has = |bytes: &[u8], at: Option<usize>, signature: &Signature| {
        at.and_then(|at| bytes.get(at..)).is_some_and(|bytes| bytes.starts_with(signature.bytes))
    };
    if let Some(found) = SIGNATURES.iter().find(|s| has(start, Some(s.offset), s)) {
        return Some(Foreign(found.name));
    }
    if start.get(0x4000..0x8000).is_some_and(|list| list.windows(ZFS_NAME.len()).any(|w| w == ZFS_NAME)) {
        return Some(Foreign("a member of a ZFS pool"));
    }
    if let Some(found) = AT_END.iter().find(|s| has(end, end.len().checked_sub(s.offset), s)) {
        return Some(Foreign(found.name));
    }
    let is_blank = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 0);
    (!is_blank(start) || !is_blank(end)).then_some(Foreign("data of an unknown kind"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_recognised_at_their_places() {
        for signature in SIGNATURES {
            let mut start = vec![0; START_BYTES];
            start[signature.offset..][..signature.bytes.len()].copy_from_slice(signature.bytes);
            assert_eq!(recognise(&start, &[0; 4096]), Some(Foreign(signature.name)));
            start[signature.offset] ^= 1;
            assert_eq!(recognise(&start, &[]), Some(Foreign("data of an unknown kind")));
        }
        for signature in AT_END {
            let mut end = vec![0; END_BYTES];
            let at = end.len() - signature.offset;
            end[at..][..signature.bytes.len()].copy_from_slice(signature.bytes);
            assert_eq!(recognise(&[0; START_BYTES], &end), Some(Foreign(signature.name)));
        }
    }

    #[test]
    fn the_more_specific_signature_wins() {
        let mut start = vec![0; START_BYTES];
        start[510..512].copy_from_slice(b"\x55\xaa");
        start[512..520].copy_from_slice(b"EFI PART");
        assert_eq!(recognise(&start, &[]), Some(Foreign("a GPT partition table")));
        start[..8].copy_from_slice(b"SPDKBLOB");
        assert_eq!(
            recognise(&start, &[]).map(|f| f.to_string()).as_deref(),
            Some("an SPDK blobstore (an lvol store)")
        );
    }

    #[test]
    fn a_blank_disk_and_short_ones() {
        assert_eq!(recognise(&[0; START_BYTES], &[0; END_BYTES]), None);
        assert_eq!(recognise(&[], &[]), None);
        assert_eq!(recognise(&[0; 700], &[0; 100]), None);
        assert_eq!(recognise(&[0; 700], &[1; 100]), Some(Foreign("data of an unknown kind")));
    }
}
