//! Answers of variable length, of the kernel and of vfio-user servers: a structure, then a chain of capabilities. Any context;
//! pure.
//!
//! `include/uapi/linux/vfio.h` defines the structures. Bytes of a server are hostile: each offset, count and chain
//! is checked.

use std::mem::offset_of;
use vfio_bindings::bindings::vfio as abi;

/// Upper bound of a chain's length: kernels have a handful of capabilities.
const CAPABILITIES_MAX: usize = 64;

/// One answer. Fields are read by their offset.
#[derive(Debug)]
pub(crate) struct Info(Vec<u8>);

impl Info {
    pub(crate) const fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }

    /// The 32-bit field at `offset`; 0 if the answer ends before it, as older kernels' answers do.
    pub(crate) fn u32(&self, offset: usize) -> u32 {
        let bytes = self.0.get(offset..offset + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u32::from_ne_bytes)
    }

    /// As [`Info::u32`], of 64 bits.
    pub(crate) fn u64(&self, offset: usize) -> u64 {
        let bytes = self.0.get(offset..offset + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map_or(0, u64::from_ne_bytes)
    }

    /// The offset of the capability `id` in a chain that starts at offset `first`; `None` if the chain does not have it.
    fn capability(&self, first: usize, id: u32) -> Option<usize> {
        let mut at = first;
        for _ in 0..CAPABILITIES_MAX {
            if at == 0 || at + size_of::<abi::vfio_info_cap_header>() > self.0.len() {
                return None;
            }
            // The header's first two fields, id and version, have 16 bits each.
            if self.u32(at) & 0xffff == id {
                return Some(at);
            }
            at = self.u32(at + offset_of!(abi::vfio_info_cap_header, next)) as usize;
        }
        None
    }

    /// Pairs of 64-bit values: the number of pairs is at `count`, the first pair at `pairs`.
    fn pairs(&self, count: usize, pairs: usize) -> Vec<(u64, u64)> {
        let room = self.0.len().saturating_sub(pairs) / 16;
        let count = room.min(self.u32(count) as usize);
        (0..count).map(|i| (self.u64(pairs + 16 * i), self.u64(pairs + 16 * i + 8))).collect()
    }
}

/// A region of a device: a BAR, or configuration space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Region {
    /// Length in bytes; 0 for a BAR that the device does not have.
    pub(crate) size: u64,
    /// Offset in the device's file.
    pub(crate) offset: u64,
    /// The ranges that may be mapped: offset in the region, and length.
    pub(crate) areas: Vec<(u64, u64)>,
    /// Whether the MSI-X table may be mapped, if it is in this region.
    pub(crate) has_mappable_msix: bool,
}

impl Region {
    /// `VFIO_DEVICE_GET_REGION_INFO`'s answer.
    pub(crate) fn parse(info: &Info) -> Self {
        type R = abi::vfio_region_info;
        type Sparse = abi::vfio_region_info_cap_sparse_mmap;
        let flags = info.u32(offset_of!(R, flags));
        let (size, offset) = (info.u64(offset_of!(R, size)), info.u64(offset_of!(R, offset)));
        let has_caps = flags & abi::VFIO_REGION_INFO_FLAG_CAPS != 0;
        let first = if has_caps { info.u32(offset_of!(R, cap_offset)) as usize } else { 0 };
        let sparse = info.capability(first, abi::VFIO_REGION_INFO_CAP_SPARSE_MMAP);
        let mut areas = match sparse {
            Some(at) => info.pairs(at + offset_of!(Sparse, nr_areas), at + offset_of!(Sparse, areas)),
            None => vec![(0, size)],
        };
        let needed = abi::VFIO_REGION_INFO_FLAG_MMAP | abi::VFIO_REGION_INFO_FLAG_WRITE;
        let is_mappable = flags & needed == needed;
        areas.retain(|&(start, len)| {
            is_mappable && len > 0 && start.checked_add(len).is_some_and(|end| end <= size)
        });
        let msix = info.capability(first, abi::VFIO_REGION_INFO_CAP_MSIX_MAPPABLE);
        Self { size, offset, areas, has_mappable_msix: msix.is_some() }
    }

    /// Whether one area contains `len` bytes from `offset` on.
    pub(crate) fn is_mappable(&self, offset: u64, len: u64) -> bool {
        let Some(end) = offset.checked_add(len) else { return false };
        self.areas.iter().any(|&(start, len)| start <= offset && end <= start + len)
    }
}

/// What the IOMMU of a container can map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Iommu {
    /// First and last address of each range.
    pub(crate) ranges: Vec<(u64, u64)>,
    /// The number of mappings that the container has room for, if the kernel reports it.
    pub(crate) room: Option<u32>,
}

impl Iommu {
    /// `VFIO_IOMMU_GET_INFO`'s answer.
    pub(crate) fn parse(info: &Info) -> Self {
        type I = abi::vfio_iommu_type1_info;
        type Ranges = abi::vfio_iommu_type1_info_cap_iova_range;
        type Room = abi::vfio_iommu_type1_info_dma_avail;
        let has_caps = info.u32(offset_of!(I, flags)) & abi::VFIO_IOMMU_INFO_CAPS != 0;
        let first = if has_caps { info.u32(offset_of!(I, cap_offset)) as usize } else { 0 };
        let ranges = info.capability(first, abi::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE);
        let ranges = match ranges {
            Some(at) => info.pairs(at + offset_of!(Ranges, nr_iovas), at + offset_of!(Ranges, iova_ranges)),
            // Linux before 5.4. Both makers' IOMMUs keep this range below 4 GiB for interrupts.
            None => vec![(0, 0xfedf_ffff), (0x1_0000_0000, (1 << 39) - 1)],
        };
        let room = info.capability(first, abi::VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL);
        Self { ranges, room: room.map(|at| info.u32(at + offset_of!(Room, avail))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A structure of 32-bit words, followed by capabilities of an id and words.
    fn info(head: &[u32], capabilities: &[(u32, Vec<u32>)]) -> Info {
        let mut words = head.to_vec();
        for (id, body) in capabilities {
            let next = (words.len() + 2 + body.len()) * 4;
            words.extend([id | 1 << 16, u32::try_from(next).unwrap()]);
            words.extend(body);
        }
        Info::new(words.iter().flat_map(|word| word.to_ne_bytes()).collect())
    }

    fn region(flags: u32, cap_offset: u32, capabilities: &[(u32, Vec<u32>)]) -> Region {
        Region::parse(&info(&[0, flags, 0, cap_offset, 0x4000, 0, 0, 1], capabilities))
    }

    #[test]
    fn a_region_is_mappable_where_its_areas_are() {
        let whole = region(0b111, 0, &[]);
        assert_eq!((whole.size, whole.offset), (0x4000, 1 << 32));
        assert!(whole.is_mappable(0, 0x4000) && whole.is_mappable(0x1000, 8));
        assert!(!whole.is_mappable(0x3fff, 2) && !whole.is_mappable(u64::MAX, 2));
        assert!(!region(0b011, 0, &[]).is_mappable(0, 1), "no MMAP flag");

        let sparse = [(3, vec![]), (1, vec![2, 0, 0, 0, 0x1000, 0, 0x3000, 0, 0x1000, 0])];
        let sparse = region(0b1111, 32, &sparse);
        assert!(sparse.has_mappable_msix);
        assert_eq!(sparse.areas, [(0, 0x1000), (0x3000, 0x1000)]);
        assert!(sparse.is_mappable(0x3000, 0x1000) && !sparse.is_mappable(0x1000, 8));
        assert!(!sparse.is_mappable(0xff8, 16), "over the end of an area");
    }

    #[test]
    fn areas_outside_of_the_region_and_short_lists_are_dropped() {
        let outside = [(1, vec![2, 0, 0x3000, 0, 0x1001, 0, u32::MAX, u32::MAX, 2, 0])];
        assert_eq!(region(0b1111, 32, &outside).areas, []);
        let short = [(1, vec![u32::MAX, 0, 0, 0, 0x1000, 0])];
        assert_eq!(region(0b1111, 32, &short).areas, [(0, 0x1000)]);
        for cap_offset in [1, 33, 39, 40, u32::MAX] {
            let _ = region(0b1111, cap_offset, &[(1, vec![])]);
        }
        // A chain that ends in itself.
        let circle = info(&[0, 0b1111, 0, 32, 0x4000, 0, 0, 0, 9, 32], &[]);
        assert_eq!(Region::parse(&circle).areas, [(0, 0x4000)]);
    }

    #[test]
    fn iommu_ranges_and_room_are_read() {
        let ranges = (1, vec![2, 0, 0, 0, 0xfedf_ffff, 0, 0xfef0_0000, 0, u32::MAX, 0x7f]);
        let head = [0, 0b11, 0x1000, 0, 24, 0];
        let all = Iommu::parse(&info(&head, &[ranges, (3, vec![65535])]));
        assert_eq!(all.ranges, [(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)]);
        assert_eq!(all.room, Some(65535));
        let old = Iommu::parse(&info(&[0, 0b01, 0x1000, 0], &[]));
        assert_eq!((old.ranges.len(), old.room), (2, None));
    }
}
