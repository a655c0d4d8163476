//! The LUKS1 header: one structure of 592 bytes, numbers big-endian, eight key slots. Control context.

use std::num::NonZeroU32;
use std::ops::Range;

use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::error::Error;
use crate::hash::Hash;
use crate::header::{Digest, Layout, SALT_LEN};
use crate::kdf::Kdf;
use crate::segment::{AES_XTS, Cipher, Segment};
use crate::slot::{KeySlot, Priority, SECTOR, material_len, overlap};
use crate::store::Store;
use crate::stripes::STRIPES;

/// The first bytes of LUKS headers of both versions.
pub(crate) const MAGIC: &[u8; 6] = b"LUKS\xba\xbe";

/// Bytes of the digest of the volume key.
pub(crate) const DIGEST_LEN: usize = 20;

const SLOTS: u32 = 8;
const ENABLED: u32 = 0x00AC_71F3;
const DISABLED: u32 = 0x0000_DEAD;

/// Areas of key slots begin at multiples of this, in headers that this crate writes.
const ALIGNMENT: usize = 4096;
/// Start of the data in headers that this crate writes, in bytes: behind all eight areas.
pub(crate) const DATA_OFFSET: u32 = 2 << 20;

/// The header, as on the disk.
#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Phdr {
    magic: [u8; 6],
    version: U16,
    cipher_name: [u8; 32],
    cipher_mode: [u8; 32],
    hash_spec: [u8; 32],
    /// In sectors; 0 if the header is detached.
    payload_offset: U32,
    key_bytes: U32,
    digest: [u8; DIGEST_LEN],
    digest_salt: [u8; SALT_LEN],
    digest_iterations: U32,
    uuid: [u8; 40],
    slots: [Slot; SLOTS as usize],
}

#[derive(Clone, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Slot {
    active: U32,
    iterations: U32,
    salt: [u8; SALT_LEN],
    /// In sectors.
    area_offset: U32,
    stripes: U32,
}

const _: () = assert!(size_of::<Phdr>() == 592);

impl Phdr {
    /// A header without key slots for a key of `cipher`.
    pub(crate) fn new(cipher: Cipher, hash: Hash, digest: &Digest, uuid: uuid::Uuid) -> Box<Self> {
        let mut phdr = Box::new(Self::new_zeroed());
        phdr.magic = *MAGIC;
        phdr.version = U16::new(1);
        let (name, mode) = AES_XTS.split_once('-').expect("a cipher has a mode");
        set_text(&mut phdr.cipher_name, name);
        set_text(&mut phdr.cipher_mode, mode);
        set_text(&mut phdr.hash_spec, hash.name());
        phdr.payload_offset = U32::new(DATA_OFFSET / SECTOR as u32);
        phdr.key_bytes = U32::new(cipher.key_len() as u32);
        phdr.digest.copy_from_slice(&digest.digest);
        phdr.digest_salt.copy_from_slice(&digest.salt);
        phdr.digest_iterations = U32::new(digest.iterations.get());
        set_text(&mut phdr.uuid, &uuid.to_string());
        let area_len = material_len(cipher.key_len(), STRIPES).next_multiple_of(ALIGNMENT);
        for (number, slot) in phdr.slots.iter_mut().enumerate() {
            slot.active = U32::new(DISABLED);
            slot.area_offset = U32::new(((ALIGNMENT + number * area_len) / SECTOR) as u32);
            slot.stripes = U32::new(STRIPES);
        }
        phdr
    }

    /// Reads a header whose magic and version were checked.
    pub(crate) fn read(store: &mut dyn Store) -> Result<Box<Self>, Error> {
        let mut phdr = Box::new(Self::new_zeroed());
        store.read_at(0, phdr.as_mut_bytes())?;
        Ok(phdr)
    }

    pub(crate) fn write(&self, store: &mut dyn Store) -> Result<(), Error> {
        store.write_at(0, self.as_bytes())?;
        Ok(store.sync()?)
    }

    pub(crate) fn uuid(&self) -> &[u8] {
        &self.uuid
    }

    /// What the header says, checked.
    pub(crate) fn layout(&self) -> Result<Layout, Error> {
        let cipher = self.cipher()?;
        let mut slots: Vec<KeySlot> = Vec::new();
        for number in 0..SLOTS {
            let slot = &self.slots[number as usize];
            match slot.active.get() {
                DISABLED => continue,
                ENABLED => {}
                other => return Err(Error::invalid(format!("key slot {number} has the state {other:#x}"))),
            }
            let slot = KeySlot {
                number,
                priority: Priority::Normal,
                key_len: cipher.key_len(),
                stripes: slot.stripes.get(),
                stripes_hash: self.hash()?,
                area: self.area(number)?,
                area_key_len: cipher.key_len(),
                kdf: Kdf::Pbkdf2 { hash: self.hash()?, iterations: iterations(slot.iterations)? },
                salt: slot.salt.to_vec(),
            };
            slot.check()?;
            if slots.iter().any(|other| overlap(&other.area, &slot.area)) {
                return Err(Error::invalid(format!("the area of key slot {number} overlaps another one")));
            }
            slots.push(slot);
        }
        Ok(Layout {
            segment: Segment {
                offset: self.data_offset(),
                size: None,
                cipher,
                sector_size: SECTOR as u32,
                iv_tweak: 0,
            },
            digest: Digest {
                hash: self.hash()?,
                iterations: iterations(self.digest_iterations)?,
                salt: self.digest_salt.to_vec(),
                digest: self.digest.to_vec(),
            },
            slots,
        })
    }

    fn cipher(&self) -> Result<Cipher, Error> {
        let name = format!("{}-{}", text(&self.cipher_name)?, text(&self.cipher_mode)?);
        Cipher::parse(&name, self.key_bytes.get().into())
    }

    fn hash(&self) -> Result<Hash, Error> {
        Hash::parse(&text(&self.hash_spec)?)
    }

    fn data_offset(&self) -> u64 {
        u64::from(self.payload_offset.get()) * SECTOR as u64
    }

    /// The area of a key slot, used or not: behind the structure, before the data.
    fn area(&self, number: u32) -> Result<Range<u64>, Error> {
        let slot = &self.slots[number as usize];
        let start = u64::from(slot.area_offset.get()) * SECTOR as u64;
        let len = u64::from(self.key_bytes.get()) * u64::from(slot.stripes.get());
        let area = start..start.saturating_add(len.next_multiple_of(SECTOR as u64));
        let data = self.data_offset();
        if start < size_of::<Self>() as u64 || (data != 0 && area.end > data) {
            return Err(Error::invalid(format!(
                "the area of key slot {number} overlaps the header or the data"
            )));
        }
        Ok(area)
    }

    /// Enables a key slot with this number or the first free one. Nothing is on the disk yet.
    pub(crate) fn add(&mut self, number: Option<u32>, kdf: Kdf, salt: Vec<u8>) -> Result<KeySlot, Error> {
        let Kdf::Pbkdf2 { hash, iterations } = kdf else {
            return Err(Error::Unsupported { what: "LUKS1 key derivation", name: "Argon2".into() });
        };
        if hash != self.hash()? {
            return Err(Error::Unsupported {
                what: "second hash of a LUKS1 header",
                name: hash.name().into(),
            });
        }
        let is_free =
            |number: &u32| self.slots.get(*number as usize).is_some_and(|slot| slot.active.get() == DISABLED);
        let number = match number {
            Some(number) if is_free(&number) => number,
            Some(number) => return Err(Error::SlotTaken(number)),
            None => (0..SLOTS).find(is_free).ok_or(Error::NoRoom)?,
        };
        let slot = &mut self.slots[number as usize];
        slot.active = U32::new(ENABLED);
        slot.iterations = U32::new(iterations.get());
        slot.salt.copy_from_slice(&salt);
        let added = self.layout()?.slots.into_iter().find(|slot| slot.number == number);
        Ok(added.expect("this key slot was enabled"))
    }

    pub(crate) fn remove(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        slot.active = U32::new(DISABLED);
        slot.iterations = U32::new(0);
        slot.salt = [0; SALT_LEN];
    }
}

fn iterations(field: U32) -> Result<NonZeroU32, Error> {
    NonZeroU32::new(field.get()).ok_or_else(|| Error::invalid("PBKDF2 with no iterations"))
}

/// A field's text, up to its first zero.
pub(crate) fn text(field: &[u8]) -> Result<String, Error> {
    let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
    let text = std::str::from_utf8(&field[..end]).map_err(|_| Error::invalid("a text that is not UTF-8"))?;
    Ok(text.to_owned())
}

/// Sets a field that is all zeroes to `text`, which is shorter.
pub(crate) fn set_text(field: &mut [u8], text: &str) {
    field[..text.len()].copy_from_slice(text.as_bytes());
}
