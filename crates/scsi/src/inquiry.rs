//! INQUIRY data: what a disk reports about itself, and its vital product data (SPC-4, sections 6.6 and 7.8; SBC-3, section 6.5).
//! Any context.

use crate::{Nexus, Sense};
use aryk_bdev::{Bdev, Blocks, Bytes};

const VENDOR: &[u8; 8] = b"ARYK    ";
const PRODUCT: &[u8; 16] = b"DISK            ";
const REVISION: &[u8; 4] = b"0001";

/// Blocks in one COMPARE AND WRITE, at most, unless the disk takes fewer.
const COMPARE_BLOCKS_MAX: u8 = 128;
/// Ranges in one UNMAP, at most.
pub(crate) const UNMAP_RANGES_MAX: u32 = 256;
/// Bytes in all ranges of one UNMAP, or in one WRITE SAME, at most: 4 GiB. The block layer splits them at the module's limits.
const RANGE_BYTES_MAX: Bytes = Bytes(1 << 32);

/// Blocks in one COMPARE AND WRITE, at most.
pub(crate) fn compare_blocks_max(disk: &Bdev) -> u8 {
    let device = disk.device();
    let blocks = device.limits().compare_and_write_max(device.ops());
    u8::try_from(blocks.0).map_or(COMPARE_BLOCKS_MAX, |blocks| blocks.min(COMPARE_BLOCKS_MAX))
}

/// Blocks in all ranges of one UNMAP, or in one WRITE SAME, at most.
pub(crate) fn range_blocks_max(nexus: &Nexus) -> Blocks {
    RANGE_BYTES_MAX.whole_blocks(nexus.bdev().geometry().block_size)
}

/// INQUIRY data of a logical unit that does not exist: no device, and none can be attached there.
pub(crate) fn absent() -> Vec<u8> {
    let mut data = standard();
    data[0] = 0x7f;
    data
}

/// Standard INQUIRY data.
pub(crate) fn standard() -> Vec<u8> {
    let mut data = vec![0; 96];
    // A direct access block device, in SPC-4's INQUIRY format, which numbers logical units as SAM-5 defines.
    data[2] = 0x06;
    data[3] = 0x12;
    data[4] = 91;
    // CMDQUE: several commands can be in flight.
    data[7] = 0x02;
    data[8..16].copy_from_slice(VENDOR);
    data[16..32].copy_from_slice(PRODUCT);
    data[32..36].copy_from_slice(REVISION);
    // The standards: SAM-5, SPC-4, SBC-3.
    data[58..64].copy_from_slice(&[0x00, 0xa0, 0x04, 0x60, 0x04, 0xc0]);
    data
}

/// A page of vital product data.
///
/// # Errors
/// No page has that code.
pub(crate) fn page(nexus: &Nexus, code: u8) -> Result<Vec<u8>, Sense> {
    let body = match code {
        0x00 => vec![0x00, 0x80, 0x83, 0xb0, 0xb1, 0xb2],
        0x80 => serial(nexus),
        0x83 => identification(nexus),
        0xb0 => limits(nexus),
        0xb1 => characteristics(),
        0xb2 => provisioning(nexus),
        _ => return Err(Sense::in_cdb(2)),
    };
    let [high, low] = (body.len() as u16).to_be_bytes();
    Ok([&[0x00, code, high, low], &body[..]].concat())
}

fn serial(nexus: &Nexus) -> Vec<u8> {
    nexus.bdev().identity().uuid.simple().to_string().into_bytes()
}

/// One designation descriptor of the logical unit, with these codes.
fn designator(code_set: u8, kind: u8, body: &[u8]) -> Vec<u8> {
    [&[code_set, kind, 0, body.len() as u8], body].concat()
}

fn identification(nexus: &Nexus) -> Vec<u8> {
    let uuid = nexus.bdev().identity().uuid;
    let bytes = uuid.as_bytes();
    // NAA 3: 60 locally chosen bits. The last 8 bytes of a UUID hold its variant and 62 random bits.
    let mut naa: [u8; 8] = std::array::from_fn(|i| bytes[8 + i] ^ bytes[i]);
    naa[0] = 0x30 | naa[0] & 0x0f;
    let vendor = [VENDOR, &serial(nexus)[..]].concat();
    [designator(0x01, 0x03, &naa), designator(0x02, 0x01, &vendor)].concat()
}

/// Block limits (SBC-3, section 6.5.3).
fn limits(nexus: &Nexus) -> Vec<u8> {
    let geometry = nexus.bdev().geometry();
    let mut body = vec![0; 60];
    // WSNZ is 0: a WRITE SAME of 0 blocks extends to the end of the disk.
    body[1] = compare_blocks_max(nexus.bdev());
    let physical = (geometry.physical_block_size / geometry.block_size).max(1);
    body[2..4].copy_from_slice(&u16::try_from(physical).unwrap_or(u16::MAX).to_be_bytes());
    body[8..12]
        .copy_from_slice(&u32::try_from(geometry.optimal_io_blocks.0).unwrap_or(u32::MAX).to_be_bytes());
    let Blocks(range) = range_blocks_max(nexus);
    if nexus.unmaps() {
        body[16..20].copy_from_slice(&(range as u32).to_be_bytes());
        body[20..24].copy_from_slice(&UNMAP_RANGES_MAX.to_be_bytes());
        body[24..28].copy_from_slice(&physical.to_be_bytes());
        // UGAVALID: the unmap granularity is aligned to block 0.
        body[28] = 0x80;
    }
    body[32..40].copy_from_slice(&range.to_be_bytes());
    body
}

/// Block device characteristics (SBC-3, section 6.5.2): a non-rotating medium.
fn characteristics() -> Vec<u8> {
    let mut body = vec![0; 60];
    body[1] = 1;
    body
}

/// Logical block provisioning (SBC-3, section 6.5.4). LBPRZ is 0: unmapped blocks may read as they did before.
fn provisioning(nexus: &Nexus) -> Vec<u8> {
    // LBPU, LBPWS and LBPWS10 are set; the unit is thinly provisioned.
    if nexus.unmaps() { vec![0, 0xe0, 2, 0] } else { vec![0, 0, 0, 0] }
}
