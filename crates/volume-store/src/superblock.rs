//! The superblock: what a pool is, and where its parts are. Any context.
//!
//! A device has two copies, at [`PLACES`]. A copy is valid as a whole or not at all, by its checksum. The copies are written one
//! after the other, with a flush of the device between, so one of them is valid at every moment; of two valid copies the one with
//! the larger update number is newer.

use aryk_volume::Shard;
use uuid::Uuid;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::checksum;
use crate::claim::ROOM_BYTES as CLAIM_ROOM;

/// Byte offsets of the two copies. A tool that overwrites the start of a disk leaves the second one.
pub const PLACES: [u64; 2] = [0, 1 << 20];
/// Byte offsets of the two places of copies of the manifest, directly behind those of the superblock, and the bytes of each.
pub const COPY_PLACES: [u64; 2] = [PLACES[0] + SUPERBLOCK_BYTES as u64, PLACES[1] + SUPERBLOCK_BYTES as u64];
/// Bytes of each of these places. The claim is behind the first one ([`crate::CLAIM_PLACE`]).
pub const COPY_BYTES: u64 = (1 << 20) - SUPERBLOCK_BYTES as u64 - CLAIM_ROOM;
/// Bytes of a copy.
pub const SUPERBLOCK_BYTES: usize = 4096;
/// The version of the format that this crate writes.
pub const VERSION: u32 = 1;
/// Bytes of a pool's name.
pub const NAME_BYTES_MAX: usize = 64;
/// Bytes of a segment.
pub const SEGMENT_BYTES: u32 = 32 << 20;
/// Bytes of the smallest segment that the format allows, for tests.
const SEGMENT_BYTES_MIN: u32 = 64 << 10;

const MAGIC: [u8; 8] = *b"ARYKPOOL";
/// The bit of the features of a pool with several shards.
const SHARDS: u64 = 1;
const DEVICES_MAX: usize = 16;
/// Meta areas of a pool.
pub(crate) const AREAS_MAX: usize = 16;
/// Extents of a pool.
pub(crate) const EXTENTS_MAX: usize = 64;
/// Multiples of this many bytes are the smallest places of meta areas and segments.
const PLACE_ALIGN: u64 = 4096;

/// A device of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// The device's own identity.
    pub id: Uuid,
    /// Its size, in bytes, when the pool last grew.
    pub bytes: u64,
}

/// A byte address in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index in [`Superblock::devices`].
    pub device: u32,
    /// Byte offset on the device.
    pub offset: u64,
}

/// A place of the meta journal: two mirrors of the same length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// Where the mirrors start.
    pub mirrors: [Place; 2],
    /// Bytes of each mirror.
    pub bytes: u64,
}

/// Consecutive segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where the first segment starts.
    pub place: Place,
    /// The number of the blob in the first segment.
    pub first: u32,
    /// Number of segments.
    pub segments: u32,
}

/// A checked superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The pool's identity.
    pub pool: Uuid,
    /// The pool's name, at most [`NAME_BYTES_MAX`] bytes.
    pub name: String,
    /// Increases with each change of the superblock.
    pub update: u64,
    /// Index in `devices` of the device that has this copy.
    pub device: u32,
    /// Which shard of the pool this is the superblock of.
    pub shard: Shard,
    /// Bytes of a segment, a power of two.
    pub segment_bytes: u32,
    /// All writes and reads of segments are multiples of this many bytes: 512 or 4,096.
    pub alignment: u32,
    /// The devices of the pool.
    pub devices: Vec<Device>,
    /// The places of the meta journal; at least two.
    pub areas: Vec<Area>,
    /// The segments, ordered by their blobs' numbers, without gaps.
    pub extents: Vec<Extent>,
}

/// Why bytes are not a superblock of this version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invalid {
    /// No superblock: another signature.
    Signature,
    /// A superblock of this version or a newer one, with a wrong checksum.
    Checksum,
    /// A newer version, or one that never existed.
    Version(u32),
    /// Features that this version does not know, as bits.
    Features(u64),
    /// A field contradicts the format: its name.
    Field(&'static str),
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct RawDevice {
    id: [u8; 16],
    bytes: U64,
    reserved: [u8; 8],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct RawPlace {
    device: U32,
    reserved: [u8; 4],
    offset: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct RawArea {
    mirrors: [RawPlace; 2],
    bytes: U64,
    reserved: [u8; 8],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct RawExtent {
    place: RawPlace,
    first: U32,
    segments: U32,
    reserved: [u8; 8],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    version: U32,
    checksum: U32,
    pool: [u8; 16],
    update: U64,
    /// Bits of features that a reader must know.
    features: U64,
    segment_bytes: U32,
    alignment: U32,
    device: U32,
    devices_len: U32,
    areas_len: U32,
    extents_len: U32,
    name: [u8; NAME_BYTES_MAX],
    /// Zero in a pool without shards.
    shard: U32,
    shards: U32,
    reserved: [u8; 112],
    devices: [RawDevice; DEVICES_MAX],
    areas: [RawArea; AREAS_MAX],
    extents: [RawExtent; EXTENTS_MAX],
    reserved_end: [u8; 512],
}

const _: () = assert!(size_of::<Raw>() == SUPERBLOCK_BYTES);
const CHECKSUM_AT: usize = std::mem::offset_of!(Raw, checksum);

pub(crate) fn sum(bytes: &[u8]) -> u32 {
    checksum::of(&[&bytes[..CHECKSUM_AT], &[0; 4], &bytes[CHECKSUM_AT + 4..]])
}

impl RawPlace {
    fn new(place: Place) -> Self {
        Self { device: place.device.into(), reserved: [0; 4], offset: place.offset.into() }
    }

    fn place(self) -> Place {
        Place { device: self.device.get(), offset: self.offset.get() }
    }
}

impl Superblock {
    /// The bytes of a copy.
    ///
    /// # Panics
    /// If the superblock contradicts the format.
    pub fn encode(&self) -> Box<[u8; SUPERBLOCK_BYTES]> {
        let mut raw = Raw::new_zeroed();
        raw.magic = MAGIC;
        raw.version = VERSION.into();
        raw.pool = self.pool.into_bytes();
        raw.update = self.update.into();
        raw.segment_bytes = self.segment_bytes.into();
        raw.alignment = self.alignment.into();
        raw.device = self.device.into();
        if self.shard != Shard::ALL {
            raw.features = SHARDS.into();
            (raw.shard, raw.shards) = (self.shard.index().into(), self.shard.count().into());
        }
        raw.devices_len = (self.devices.len() as u32).into();
        raw.areas_len = (self.areas.len() as u32).into();
        raw.extents_len = (self.extents.len() as u32).into();
        raw.name[..self.name.len()].copy_from_slice(self.name.as_bytes());
        for (raw, device) in raw.devices.iter_mut().zip(&self.devices) {
            (raw.id, raw.bytes) = (device.id.into_bytes(), device.bytes.into());
        }
        for (raw, area) in raw.areas.iter_mut().zip(&self.areas) {
            (raw.mirrors, raw.bytes) = (area.mirrors.map(RawPlace::new), area.bytes.into());
        }
        for (raw, extent) in raw.extents.iter_mut().zip(&self.extents) {
            raw.place = RawPlace::new(extent.place);
            (raw.first, raw.segments) = (extent.first.into(), extent.segments.into());
        }
        raw.checksum = sum(raw.as_bytes()).into();
        let mut bytes = Box::new([0; SUPERBLOCK_BYTES]);
        bytes.copy_from_slice(raw.as_bytes());
        assert_eq!(Self::parse(&bytes[..]).as_ref(), Ok(self), "a superblock that can be read");
        bytes
    }

    /// Reads a copy, of [`SUPERBLOCK_BYTES`] bytes.
    ///
    /// # Errors
    /// If the bytes are not a superblock of this version.
    pub fn parse(bytes: &[u8]) -> Result<Self, Invalid> {
        let raw = Raw::read_from_bytes(bytes).map_err(|_| Invalid::Signature)?;
        if raw.magic != MAGIC {
            return Err(Invalid::Signature);
        }
        // A newer version has its checksum in the same place: otherwise damage of the version would look like a newer pool.
        if raw.checksum.get() != sum(bytes) {
            return Err(Invalid::Checksum);
        }
        let shard = match (raw.version.get(), raw.features.get()) {
            (VERSION, 0) => Shard::ALL,
            (VERSION, SHARDS) => Shard::new(raw.shard.get(), raw.shards.get())
                .filter(|shard| *shard != Shard::ALL)
                .ok_or(Invalid::Field("shards"))?,
            (VERSION, features) => return Err(Invalid::Features(features & !SHARDS)),
            (version, _) => return Err(Invalid::Version(version)),
        };
        let superblock = Self {
            pool: Uuid::from_bytes(raw.pool),
            name: name(&raw.name)?,
            update: raw.update.get(),
            device: raw.device.get(),
            shard,
            segment_bytes: raw.segment_bytes.get(),
            alignment: raw.alignment.get(),
            devices: used(&raw.devices, raw.devices_len, "devices")?
                .iter()
                .map(|raw| Device { id: Uuid::from_bytes(raw.id), bytes: raw.bytes.get() })
                .collect(),
            areas: used(&raw.areas, raw.areas_len, "areas")?
                .iter()
                .map(|raw| Area { mirrors: raw.mirrors.map(RawPlace::place), bytes: raw.bytes.get() })
                .collect(),
            extents: used(&raw.extents, raw.extents_len, "extents")?
                .iter()
                .map(|raw| Extent {
                    place: raw.place.place(),
                    first: raw.first.get(),
                    segments: raw.segments.get(),
                })
                .collect(),
        };
        superblock.check().map_or(Ok(superblock), |field| Err(Invalid::Field(field)))
    }

    /// The first field that contradicts the format.
    fn check(&self) -> Option<&'static str> {
        if !self.segment_bytes.is_power_of_two()
            || !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES).contains(&self.segment_bytes)
        {
            return Some("segment_bytes");
        }
        if !matches!(self.alignment, 512 | 4096) {
            return Some("alignment");
        }
        if self.devices.get(self.device as usize).is_none() {
            return Some("device");
        }
        if self.areas.len() < 2 {
            return Some("areas_len");
        }
        let mut next = 0_u32;
        for extent in &self.extents {
            match next.checked_add(extent.segments) {
                Some(end) if extent.first == next && extent.segments > 0 => next = end,
                _ => return Some("extents"),
            }
        }
        let mut parts = self.parts();
        parts.sort_unstable_by_key(|part| (part.0.device, part.0.offset));
        for (n, (place, bytes, field)) in parts.iter().enumerate() {
            let end = place.offset.checked_add(*bytes);
            let Some(device) = self.devices.get(place.device as usize) else { return Some(field) };
            let Some(end) = end.filter(|&end| end <= device.bytes) else { return Some(field) };
            if *bytes == 0 || !place.offset.is_multiple_of(PLACE_ALIGN) || !bytes.is_multiple_of(PLACE_ALIGN)
            {
                return Some(field);
            }
            if parts.get(n + 1).is_some_and(|(next, ..)| next.device == place.device && next.offset < end) {
                return Some(field);
            }
        }
        None
    }

    /// All parts of the pool, with their lengths and the fields that have them. The sum of the segments' bytes fits into 64 bits,
    /// because both factors have 32.
    fn parts(&self) -> Vec<(Place, u64, &'static str)> {
        let copies = (0..self.devices.len() as u32).flat_map(|device| {
            PLACES.map(|offset| (Place { device, offset }, SUPERBLOCK_BYTES as u64, "devices"))
        });
        let areas = self.areas.iter().flat_map(|area| area.mirrors.map(|place| (place, area.bytes, "areas")));
        let extents = self
            .extents
            .iter()
            .map(|e| (e.place, u64::from(e.segments) * u64::from(self.segment_bytes), "extents"));
        copies.chain(areas).chain(extents).collect()
    }

    /// Whether the places of copies of the manifest, and that of the claim, are on this device and belong to nothing else.
    pub fn has_room_for_copies(&self) -> bool {
        const ROOM: u64 = COPY_BYTES + CLAIM_ROOM;
        let is_on = |bytes: u64| COPY_PLACES.iter().all(|place| place + ROOM <= bytes);
        let is_elsewhere = |(place, bytes, _): (Place, u64, &str)| {
            place.device != self.device
                || COPY_PLACES.iter().all(|copy| place.offset >= copy + ROOM || place.offset + bytes <= *copy)
        };
        self.devices.get(self.device as usize).is_some_and(|device| is_on(device.bytes))
            && self.parts().into_iter().all(is_elsewhere)
    }

    /// Number of segments, which is also the number of blobs.
    pub fn segments(&self) -> u32 {
        self.extents.iter().map(|extent| extent.segments).sum()
    }

    /// Where the segment of blob `blob` starts; `None` beyond the last one.
    pub fn segment(&self, blob: u32) -> Option<Place> {
        let n = self.extents.partition_point(|extent| extent.first <= blob).checked_sub(1)?;
        let extent = &self.extents[n];
        let index = blob - extent.first;
        (index < extent.segments).then(|| Place {
            offset: extent.place.offset + u64::from(index) * u64::from(self.segment_bytes),
            ..extent.place
        })
    }
}

/// Whether a pool may have this name.
pub(crate) fn is_name(name: &str) -> bool {
    name.len() <= NAME_BYTES_MAX && !name.chars().any(char::is_control)
}

fn name(raw: &[u8; NAME_BYTES_MAX]) -> Result<String, Invalid> {
    let len = raw.iter().position(|&byte| byte == 0).unwrap_or(raw.len());
    let name = std::str::from_utf8(&raw[..len]).map_err(|_| Invalid::Field("name"))?;
    if is_name(name) { Ok(name.to_owned()) } else { Err(Invalid::Field("name")) }
}

fn used<'a, T>(all: &'a [T], len: U32, field: &'static str) -> Result<&'a [T], Invalid> {
    all.get(..len.get() as usize).ok_or(Invalid::Field(field))
}

#[cfg(test)]
mod tests;
