//! The device configuration space and the feature bits of a disk (virtio 1.2, sections 5.2.3 and 5.2.4). Control context.

use crate::request::SECTOR;
use aryk_bdev::{Bdev, Op};
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use zerocopy::{Immutable, IntoBytes};

/// `struct virtio_blk_config`, as far as the offered features define it.
#[derive(Clone, Copy, Debug, Default, IntoBytes, Immutable)]
#[repr(C, packed)]
pub(crate) struct BlkConfig {
    capacity: u64,
    size_max: u32,
    seg_max: u32,
    cylinders: u16,
    heads: u8,
    sectors: u8,
    blk_size: u32,
    physical_block_exp: u8,
    alignment_offset: u8,
    min_io_size: u16,
    opt_io_size: u32,
    writeback: u8,
    unused0: u8,
    num_queues: u16,
    max_discard_sectors: u32,
    max_discard_seg: u32,
    discard_sector_alignment: u32,
    max_write_zeroes_sectors: u32,
    max_write_zeroes_seg: u32,
    write_zeroes_may_unmap: u8,
    unused1: [u8; 3],
}

const _: () = assert!(size_of::<BlkConfig>() == 60);

/// The maximum number of data buffers in one request: what fits into a queue of 128 descriptors beside header and status.
pub(crate) const SEG_MAX: u32 = 126;
/// The maximum size of one buffer, in bytes.
const SIZE_MAX: u32 = 1 << 20;
/// The maximum number of sectors in one discard: 2 GiB. The block layer splits larger requests than the module takes.
const DISCARD_SECTORS_MAX: u32 = 1 << 22;
/// The maximum number of sectors in one write-zeroes: 32 MiB. A write-zeroes pays a disk's bandwidth limit for all its bytes,
/// and the requests behind it wait until they are paid for.
const WRITE_ZEROES_SECTORS_MAX: u32 = 1 << 16;

impl BlkConfig {
    pub fn new(bdev: &Bdev, queues: u16) -> Self {
        let geometry = bdev.geometry();
        let block_sectors = geometry.block_size / SECTOR;
        let physical = (geometry.physical_block_size / geometry.block_size).max(1);
        Self {
            capacity: geometry.blocks.0.saturating_mul(block_sectors.into()),
            size_max: SIZE_MAX,
            seg_max: SEG_MAX,
            blk_size: geometry.block_size,
            physical_block_exp: physical.ilog2() as u8,
            min_io_size: u16::try_from(physical).unwrap_or(u16::MAX),
            opt_io_size: u32::try_from(geometry.optimal_io_blocks.0).unwrap_or(u32::MAX),
            num_queues: queues,
            max_discard_sectors: DISCARD_SECTORS_MAX,
            max_discard_seg: 1,
            discard_sector_alignment: block_sectors * physical,
            max_write_zeroes_sectors: WRITE_ZEROES_SECTORS_MAX,
            max_write_zeroes_seg: 1,
            write_zeroes_may_unmap: 1,
            ..Self::default()
        }
    }
}

/// The device's own feature bits for this disk.
pub(crate) fn features(bdev: &Bdev, read_only: bool) -> u64 {
    let always = [
        VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_MQ,
    ];
    let mut bits = always.into_iter().fold(0, |bits, f| bits | 1 << f);
    if read_only {
        return bits | 1 << VIRTIO_BLK_F_RO;
    }
    if bdev.device().ops().contains(Op::Unmap) {
        bits |= 1 << VIRTIO_BLK_F_DISCARD;
    }
    bits | 1 << VIRTIO_BLK_F_WRITE_ZEROES
}
