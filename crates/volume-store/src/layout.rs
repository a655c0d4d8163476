//! Where the parts of a new pool go, and those of a pool that has grown. Any context.
//!
//! | bytes | what |
//! | --- | --- |
//! | 0 and 1 MiB | the superblock's copies |
//! | from 2 MiB on | the first mirrors of the two meta areas |
//! | then | segments |
//! | before the end | the second mirrors of the meta areas |
//!
//! What is added to the base later has segments only, unless the meta areas are too small for the new size by a factor of
//! four: then it begins and ends with two larger areas. The smaller ones stay unused from then on.

use aryk_volume::Shard;
use uuid::Uuid;

use crate::Error;
use crate::superblock::{AREAS_MAX, Area, Device, EXTENTS_MAX, Extent, Place, SEGMENT_BYTES, Superblock};

const MIB: u64 = 1 << 20;
/// Parts start at multiples of this many bytes, where segments are not smaller.
const ALIGN: u64 = MIB;
/// Where the first meta area starts.
const START: u64 = 2 * MIB;
/// Fewest segments of a pool.
const SEGMENTS_MIN: u64 = 4;

/// How a pool is created.
#[derive(Clone, Debug)]
pub struct Options {
    /// The pool's identity: random.
    pub pool: Uuid,
    /// The base disk's identity: random.
    pub device: Uuid,
    /// The pool's name.
    pub name: String,
    /// The smallest multiple of bytes that the engine reads and writes: 512 or 4,096, at least the base disk's block.
    pub alignment: u32,
    /// Bytes of a segment: [`SEGMENT_BYTES`]. Tests have smaller ones, to have many on a small disk.
    pub segment_bytes: u32,
    /// Bytes of a meta area's mirror; `None` chooses by the size of the base.
    pub area_bytes: Option<u64>,
    /// Which shard of the pool is created.
    pub shard: Shard,
}

impl Options {
    /// The usual options for a pool of this identity.
    pub fn new(pool: Uuid, device: Uuid, name: &str, alignment: u32) -> Self {
        let name = name.to_owned();
        Self {
            pool,
            device,
            name,
            alignment,
            segment_bytes: SEGMENT_BYTES,
            area_bytes: None,
            shard: Shard::ALL,
        }
    }
}

/// Bytes of a meta area for a base of `bytes`. A checkpoint takes about 24 bytes for each segment, and the edits that follow it
/// as much again; snapshots and volumes take the rest.
const fn area_bytes(bytes: u64) -> u64 {
    (4 * MIB + bytes / 65_536).next_multiple_of(ALIGN)
}

/// The superblock of a new pool on a base of `bytes`.
pub(crate) fn create(options: &Options, bytes: u64) -> Result<Superblock, Error> {
    let mut superblock = Superblock {
        pool: options.pool,
        name: options.name.clone(),
        update: 1,
        device: 0,
        shard: options.shard,
        segment_bytes: options.segment_bytes,
        alignment: options.alignment,
        devices: vec![Device { id: options.device, bytes }],
        areas: Vec::new(),
        extents: Vec::new(),
    };
    let area = options.area_bytes.unwrap_or(area_bytes(bytes));
    let needed = START + 4 * area + SEGMENTS_MIN * u64::from(options.segment_bytes);
    if bytes < needed {
        return Err(Error::TooSmall { bytes, needed });
    }
    add(&mut superblock, START, bytes, Some(area));
    Ok(superblock)
}

/// The superblock of a pool whose base has grown to `bytes`; `None` if there is no room for another segment.
pub(crate) fn grow(old: &Superblock, bytes: u64) -> Option<Superblock> {
    let segment = u64::from(old.segment_bytes);
    let areas = old.areas.iter().flat_map(|area| area.mirrors.map(|place| place.offset + area.bytes));
    let extents = old.extents.iter().map(|e| e.place.offset + u64::from(e.segments) * segment);
    let start = areas.chain(extents).max().unwrap_or(START);
    let largest = old.areas.iter().map(|area| area.bytes).max().unwrap_or_default();
    let needs_areas = area_bytes(bytes) >= 4 * largest && old.areas.len() + 2 <= AREAS_MAX;
    let with = |area| {
        let mut new = old.clone();
        new.update += 1;
        new.devices[old.device as usize].bytes = bytes;
        add(&mut new, start, bytes, area);
        (new.segments() > old.segments()).then_some(new)
    };
    // What has been added may be too small for larger areas.
    needs_areas.then(|| with(Some(area_bytes(bytes)))).flatten().or_else(|| with(None))
}

/// Adds the bytes from `start` to `end` to the pool: segments, between the mirrors of two new areas if `area` has their size.
fn add(superblock: &mut Superblock, start: u64, end: u64, area: Option<u64>) {
    let device = superblock.device;
    let segment = u64::from(superblock.segment_bytes);
    let align = ALIGN.min(segment);
    let areas = 2 * area.unwrap_or(0);
    let first = (start + areas).next_multiple_of(align);
    let room = (end / align * align).saturating_sub(first + areas);
    let next = superblock.segments();
    // The highest number is never a blob's.
    let segments = (room / segment).min(u64::from(u32::MAX - 1 - next)) as u32;
    if segments == 0 {
        return;
    }
    if let Some(bytes) = area {
        let second = first + u64::from(segments) * segment;
        superblock.areas.extend([0, bytes].map(|skip| Area {
            mirrors: [start, second].map(|at| Place { device, offset: at + skip }),
            bytes,
        }));
    }
    let place = Place { device, offset: first };
    let end_of = |e: &Extent| (e.place.device, e.place.offset + u64::from(e.segments) * segment);
    let is_full = superblock.extents.len() == EXTENTS_MAX;
    match superblock.extents.last_mut() {
        Some(last) if end_of(last) == (device, first) => last.segments += segments,
        _ if is_full => {}
        _ => superblock.extents.push(Extent { place, first: next, segments }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn pool(bytes: u64) -> Superblock {
        create(&Options::new(Uuid::from_u128(1), Uuid::from_u128(2), "pool", 512), bytes).unwrap()
    }

    #[test]
    fn a_new_pool_is_valid_and_wastes_little() {
        for bytes in [GIB, 1000 * GIB + 512, 15_000 * GIB] {
            let pool = pool(bytes);
            pool.encode();
            let used = u64::from(pool.segments()) << 25;
            assert!(bytes - used <= bytes / 64 + (33 << 20), "{bytes}: {used}");
        }
        let options = Options::new(Uuid::nil(), Uuid::nil(), "", 512);
        let Err(Error::TooSmall { needed, .. }) = create(&options, 100 << 20) else { panic!("too small") };
        assert_eq!(create(&options, needed).unwrap().segments(), 4);
        assert!(create(&options, needed - 512).is_err());
    }

    #[test]
    fn growing_keeps_all_places_and_adds_larger_areas_when_it_needs_them() {
        let mut now = pool(GIB);
        let mut bytes = GIB;
        for _ in 0..40 {
            bytes += bytes / 2 + 4096;
            let new = grow(&now, bytes).unwrap();
            new.encode();
            assert_eq!(&new.areas[..now.areas.len()], &now.areas[..]);
            for blob in 0..now.segments() {
                assert_eq!(new.segment(blob), now.segment(blob));
                if blob > 100_000 {
                    break;
                }
            }
            assert_eq!(new.segment(new.segments()), None);
            now = new;
            if bytes > 1 << 50 {
                break;
            }
        }
        let largest = now.areas.iter().map(|area| area.bytes).max().unwrap();
        assert!(largest * 4 > area_bytes(bytes), "{largest}");
    }

    #[test]
    fn growing_in_small_steps_does_not_fill_the_superblock() {
        let mut now = pool(GIB);
        for n in 1..2000 {
            now = grow(&now, GIB + n * (64 << 20)).unwrap();
        }
        assert!(now.extents.len() < 8, "{}", now.extents.len());
        assert!(grow(&now, now.devices[0].bytes + (1 << 20)).is_none());
    }
}
