//! The LUKS2 header on the disk: two copies, each a binary structure of 4096 bytes and JSON text, with a checksum and a sequence
//! number. Control context.
//!
//! A change is written to one copy and made durable, then to the other: after a power failure at any moment one copy is whole. A
//! damaged or older copy is written first, so that the good one remains until then.

use serde_json::{Map, Value};
use zerocopy::byteorder::big_endian::{U16, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::error::Error;
use crate::hash::Hash;
use crate::header::Layout;
use crate::kdf::Kdf;
use crate::key::random;
use crate::limits::Limits;
use crate::metadata;
use crate::slot::KeySlot;
use crate::store::Store;
use crate::v1::{MAGIC, set_text, text};

/// The first bytes of the second copy.
const MAGIC_SECONDARY: &[u8; 6] = b"SKUL\xba\xbe";
/// Bytes of the binary structure; the JSON text follows.
const BINARY_LEN: u64 = 4096;
/// The sizes that a copy can have, and so the offsets of the second copy.
const SIZES: [u64; 9] =
    [16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20];
/// Bytes of a label, with its final zero.
pub(crate) const LABEL_LEN: usize = 48;

/// The header that is in use, and the state of its copies.
#[derive(Clone, Debug)]
pub(crate) struct Meta {
    binary: Box<Binary>,
    json: Map<String, Value>,
    /// The copy that is damaged or older, if one is.
    stale: Option<Place>,
}

/// The binary structure.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Binary {
    magic: [u8; 6],
    version: U16,
    /// With the JSON area.
    size: U64,
    sequence: U64,
    label: [u8; LABEL_LEN],
    checksum_hash: [u8; 32],
    salt: [u8; 64],
    uuid: [u8; 40],
    subsystem: [u8; 48],
    /// Of this copy.
    offset: U64,
    padding: [u8; 184],
    checksum: [u8; 64],
    rest: [u8; 3584],
}

const _: () = assert!(size_of::<Binary>() == BINARY_LEN as usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Primary,
    Secondary,
}

/// One copy that is whole.
struct Copy {
    binary: Box<Binary>,
    json_area: Vec<u8>,
}

impl Meta {
    /// A header with `json` that is not on the disk yet, of the smallest size.
    pub(crate) fn new(json: Map<String, Value>, label: &str, uuid: uuid::Uuid) -> Result<Box<Self>, Error> {
        if label.len() >= LABEL_LEN || label.contains('\0') {
            return Err(Error::unsupported("label", label));
        }
        let mut binary = Box::new(Binary::new_zeroed());
        binary.version = U16::new(2);
        binary.size = U64::new(SIZES[0]);
        set_text(&mut binary.label, label);
        set_text(&mut binary.checksum_hash, Hash::Sha256.name());
        set_text(&mut binary.uuid, &uuid.to_string());
        Ok(Box::new(Self { binary, json, stale: None }))
    }

    /// Bytes of a copy of a new header.
    pub(crate) const fn size_of_new() -> u64 {
        SIZES[0]
    }

    /// Bytes of the JSON area of a new header.
    pub(crate) const fn json_size_of_new() -> u64 {
        SIZES[0] - BINARY_LEN
    }

    /// Reads the newer copy of those that are whole.
    pub(crate) fn read(store: &mut dyn Store, limits: &Limits) -> Result<Box<Self>, Error> {
        let primary = Copy::read(store, Place::Primary, 0, limits);
        let secondary = match &primary {
            Ok(copy) => Copy::read(store, Place::Secondary, copy.binary.size.get(), limits),
            Err(_) => find_secondary(store, limits),
        };
        let (copy, stale) = match (primary, secondary) {
            (Ok(primary), Ok(secondary)) => {
                let (first, second) = (primary.binary.sequence.get(), secondary.binary.sequence.get());
                match first.cmp(&second) {
                    std::cmp::Ordering::Equal => (primary, None),
                    std::cmp::Ordering::Greater => (primary, Some(Place::Secondary)),
                    std::cmp::Ordering::Less => (secondary, Some(Place::Primary)),
                }
            }
            (Ok(primary), Err(_)) => (primary, Some(Place::Secondary)),
            (Err(_), Ok(secondary)) => (secondary, Some(Place::Primary)),
            (Err(error), Err(_)) => return Err(error),
        };
        let end = copy.json_area.iter().position(|&byte| byte == 0);
        let end = end.ok_or_else(|| Error::invalid("its JSON text has no end"))?;
        let json = metadata::parse(&copy.json_area[..end], limits)?;
        Ok(Box::new(Self { binary: copy.binary, json, stale }))
    }

    /// Writes both copies.
    pub(crate) fn write(&mut self, store: &mut dyn Store) -> Result<(), Error> {
        let next = self.binary.sequence.get().checked_add(1);
        self.binary.sequence =
            U64::new(next.ok_or_else(|| Error::invalid("its sequence number is the last one"))?);
        let text = self.json_text()?;
        let order = match self.stale {
            Some(Place::Secondary) => [Place::Secondary, Place::Primary],
            _ => [Place::Primary, Place::Secondary],
        };
        for place in order {
            let copy = self.encode(place, &text)?;
            let offset = self.offset(place);
            store.write_at(offset, &copy)?;
            store.sync()?;
        }
        self.stale = None;
        Ok(())
    }

    /// The JSON text, if it fits.
    fn json_text(&self) -> Result<String, Error> {
        let text = Value::Object(self.json.clone()).to_string();
        let room = self.binary.size.get() - BINARY_LEN;
        if text.len() as u64 >= room { Err(Error::NoRoom) } else { Ok(text) }
    }

    const fn offset(&self, place: Place) -> u64 {
        match place {
            Place::Primary => 0,
            Place::Secondary => self.binary.size.get(),
        }
    }

    /// The bytes of a copy.
    fn encode(&self, place: Place, text: &str) -> Result<Vec<u8>, Error> {
        let mut binary = self.binary.clone();
        binary.magic = *place.magic();
        binary.offset = U64::new(self.offset(place));
        random(&mut binary.salt)?;
        binary.checksum = [0; 64];
        let mut json_area = vec![0; (binary.size.get() - BINARY_LEN) as usize];
        json_area[..text.len()].copy_from_slice(text.as_bytes());
        let checksum = binary.checksum_hash()?.digest(&[binary.as_bytes(), &json_area]);
        binary.checksum[..checksum.as_ref().len()].copy_from_slice(checksum.as_ref());
        let mut bytes = binary.as_bytes().to_vec();
        bytes.append(&mut json_area);
        Ok(bytes)
    }

    pub(crate) fn uuid(&self) -> &[u8] {
        &self.binary.uuid
    }

    pub(crate) const fn is_degraded(&self) -> bool {
        self.stale.is_some()
    }

    /// What the header says, checked.
    pub(crate) fn layout(&self) -> Result<Layout, Error> {
        metadata::layout(&self.json, self.binary.size.get(), self.binary.size.get() - BINARY_LEN)
    }

    /// Adds a key slot with this number or the first free one. Nothing is on the disk yet.
    pub(crate) fn add(
        &mut self,
        number: Option<u32>,
        kdf: Kdf,
        salt: Vec<u8>,
        key_len: usize,
    ) -> Result<KeySlot, Error> {
        let slot = metadata::add_slot(&mut self.json, self.binary.size.get(), number, kdf, salt, key_len)?;
        self.json_text()?;
        Ok(slot)
    }

    pub(crate) fn remove(&mut self, number: u32) {
        metadata::remove_slot(&mut self.json, number);
    }
}

impl Copy {
    fn read(store: &mut dyn Store, place: Place, offset: u64, limits: &Limits) -> Result<Self, Error> {
        let mut binary = Box::new(Binary::new_zeroed());
        store.read_at(offset, binary.as_mut_bytes())?;
        if binary.magic != *place.magic() {
            return Err(Error::NotLuks);
        }
        if binary.version.get() != 2 {
            return Err(Error::Version(binary.version.get()));
        }
        let size = binary.size.get();
        let is_in_place = binary.offset.get() == offset && (place == Place::Primary || size == offset);
        if !SIZES.contains(&size) || !is_in_place {
            return Err(Error::invalid(format!("a copy of {size} bytes for offset {}", binary.offset.get())));
        }
        if size - BINARY_LEN > limits.json_len_max {
            return Err(Error::invalid(format!(
                "{} bytes for JSON text, more than the limits allow",
                size - BINARY_LEN
            )));
        }
        let mut json_area = vec![0; (size - BINARY_LEN) as usize];
        store.read_at(offset + BINARY_LEN, &mut json_area)?;
        let hash = binary.checksum_hash()?;
        let expected = std::mem::replace(&mut binary.checksum, [0; 64]);
        let found = hash.digest(&[binary.as_bytes(), &json_area]);
        if found.as_ref() != &expected[..hash.len()] {
            return Err(Error::invalid("its checksum is wrong"));
        }
        Ok(Self { binary, json_area })
    }
}

/// The second copy, where the first one is damaged and does not tell its size.
fn find_secondary(store: &mut dyn Store, limits: &Limits) -> Result<Copy, Error> {
    let mut copies = SIZES.iter().map(|&offset| Copy::read(store, Place::Secondary, offset, limits));
    copies.find_map(Result::ok).ok_or(Error::NotLuks)
}

impl Binary {
    fn checksum_hash(&self) -> Result<Hash, Error> {
        Hash::parse(&text(&self.checksum_hash)?)
    }
}

impl Place {
    const fn magic(self) -> &'static [u8; 6] {
        match self {
            Self::Primary => MAGIC,
            Self::Secondary => MAGIC_SECONDARY,
        }
    }
}
