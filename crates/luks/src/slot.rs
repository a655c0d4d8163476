//! One key slot: the volume key as stripes, encrypted by a key that a secret derives. Control context.

use std::ops::Range;

use aryk_aes_xts::{Key, SectorSize, Tweaks};
use aryk_secrets::SecretBytes;

use crate::error::Error;
use crate::hash::Hash;
use crate::kdf::Kdf;
use crate::key::{VolumeKey, random};
use crate::store::Store;
use crate::stripes::{self, STRIPES_MAX};

/// Bytes of a sector of an area, and the unit of LUKS1's offsets.
pub(crate) const SECTOR: usize = 512;
const SECTOR_SIZE: SectorSize = match SectorSize::new(SECTOR) {
    Ok(size) => size,
    Err(_) => panic!("a sector is whole blocks of AES"),
};
/// The tweaks of an area: the numbers of its sectors, from its start.
const TWEAKS: Tweaks = Tweaks { start: 0, step: 1 };

/// A key slot in use that opens the volume. Its fields were checked against each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySlot {
    pub(crate) number: u32,
    pub(crate) priority: Priority,
    /// Bytes of the volume key.
    pub(crate) key_len: usize,
    pub(crate) stripes: u32,
    pub(crate) stripes_hash: Hash,
    /// Where the encrypted stripes are, in bytes.
    pub(crate) area: Range<u64>,
    /// Bytes of the key of that area.
    pub(crate) area_key_len: usize,
    pub(crate) kdf: Kdf,
    pub(crate) salt: Vec<u8>,
}

/// Which key slots are tried first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Before all others.
    Prefer,
    /// The default, and all key slots of LUKS1.
    Normal,
    /// Only if the caller names the key slot.
    Ignore,
}

impl KeySlot {
    /// The key slot's number.
    pub const fn number(&self) -> u32 {
        self.number
    }

    /// When the key slot is tried.
    pub const fn priority(&self) -> Priority {
        self.priority
    }

    /// How the key slot derives its key.
    pub const fn kdf(&self) -> Kdf {
        self.kdf
    }

    /// Fails if the fields contradict each other. Key lengths are those of a cipher already.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.stripes == 0 || self.stripes > STRIPES_MAX {
            return Err(Error::invalid(format!("key slot {} has {} stripes", self.number, self.stripes)));
        }
        if self.area.end.saturating_sub(self.area.start) < self.material_len() as u64 {
            return Err(Error::invalid(format!(
                "the area of key slot {} is too small for its key",
                self.number
            )));
        }
        self.kdf.check(&self.salt)
    }

    /// Bytes of the area that are in use: whole sectors.
    fn material_len(&self) -> usize {
        material_len(self.key_len, self.stripes)
    }

    /// The volume key, if `secret` is that of this key slot; otherwise some other key of its length.
    pub(crate) fn open(&self, store: &mut dyn Store, secret: &[u8]) -> Result<VolumeKey, Error> {
        let area_key = self.derive(secret)?;
        let mut material = SecretBytes::zeroed(self.material_len());
        store.read_at(self.area.start, &mut material)?;
        area_key.decrypt_in_place(SECTOR_SIZE, TWEAKS, &mut material).expect("whole sectors");
        let stripes = &material[..self.key_len * self.stripes as usize];
        Ok(VolumeKey::new(stripes::merge(self.stripes_hash, stripes, self.key_len)))
    }

    /// Writes `key`, so that `secret` opens it.
    pub(crate) fn seal(&self, store: &mut dyn Store, secret: &[u8], key: &VolumeKey) -> Result<(), Error> {
        let area_key = self.derive(secret)?;
        let stripes = stripes::split(self.stripes_hash, key.as_bytes(), self.stripes)?;
        let mut material = SecretBytes::zeroed(self.material_len());
        material[..stripes.len()].copy_from_slice(&stripes);
        area_key.encrypt_in_place(SECTOR_SIZE, TWEAKS, &mut material).expect("whole sectors");
        store.write_at(self.area.start, &material)?;
        Ok(store.sync()?)
    }

    /// Destroys the stripes.
    pub(crate) fn wipe(&self, store: &mut dyn Store) -> Result<(), Error> {
        let mut noise = vec![0; self.material_len()];
        random(&mut noise)?;
        store.write_at(self.area.start, &noise)?;
        Ok(store.sync()?)
    }

    /// The key of the area.
    fn derive(&self, secret: &[u8]) -> Result<Key, Error> {
        let mut key = SecretBytes::zeroed(self.area_key_len);
        self.kdf.derive(secret, &self.salt, &mut key)?;
        Ok(Key::new(&key)?)
    }
}

/// Bytes that `stripes` stripes of a key take on the disk: whole sectors.
pub(crate) const fn material_len(key_len: usize, stripes: u32) -> usize {
    (key_len * stripes as usize).next_multiple_of(SECTOR)
}

/// Whether two ranges have a byte in common.
pub(crate) const fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}
