//! A header of either format: unlocking, and key slots added and removed. Control context.

use std::num::NonZeroU32;

use crate::error::Error;
use crate::hash::Hash;
use crate::kdf::Kdf;
use crate::key::{VolumeKey, random};
use crate::limits::{Budget, Limits};
use crate::segment::Segment;
use crate::slot::{KeySlot, Priority};
use crate::store::Store;
use crate::{metadata, v1, v2};

/// Bytes of a salt that this crate writes.
pub(crate) const SALT_LEN: usize = 32;

/// The version of a header's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// LUKS1: a fixed structure, PBKDF2 only.
    V1,
    /// LUKS2: JSON text in two copies, also Argon2.
    V2,
}

impl Version {
    /// Start of the data behind a header that [`crate::format()`] writes, in bytes.
    pub const fn data_offset(self) -> u64 {
        match self {
            Self::V1 => v1::DATA_OFFSET as u64,
            Self::V2 => metadata::DATA_OFFSET,
        }
    }
}

/// A header that was read and checked. It has no secrets.
#[derive(Clone, Debug)]
pub struct Header {
    layout: Layout,
    disk: Disk,
}

/// What both formats have in common.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) segment: Segment,
    pub(crate) digest: Digest,
    /// The key slots that open the segment, by number.
    pub(crate) slots: Vec<KeySlot>,
}

/// What is on the disk.
#[derive(Clone, Debug)]
pub(crate) enum Disk {
    V1(Box<v1::Phdr>),
    V2(Box<v2::Meta>),
}

/// Tells the volume key from other keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Digest {
    pub(crate) hash: Hash,
    pub(crate) iterations: NonZeroU32,
    pub(crate) salt: Vec<u8>,
    pub(crate) digest: Vec<u8>,
}

/// The result of [`Header::unlock`].
pub struct Unlocked {
    /// The volume key.
    pub key: VolumeKey,
    /// The key slot that opened.
    pub slot: u32,
}

impl Header {
    /// Reads and checks the header at the start of `store`. Of a LUKS2 header with one damaged or older copy, the other is used.
    pub fn read(store: &mut dyn Store, limits: &Limits) -> Result<Self, Error> {
        let mut start = [0; 8];
        let result = store.read_at(0, &mut start);
        let (magic, version) = start.split_at(v1::MAGIC.len());
        let has_magic = magic == v1::MAGIC;
        if has_magic && version == [0, 1] {
            let phdr = v1::Phdr::read(store)?;
            return Ok(Self { layout: phdr.layout()?, disk: Disk::V1(phdr) });
        }
        // Without the magic or with another version there may still be a second copy.
        let meta = v2::Meta::read(store, limits).map_err(|error| match error {
            Error::Io(_) if result.is_ok() && !has_magic => Error::NotLuks,
            error => error,
        })?;
        Ok(Self { layout: meta.layout()?, disk: Disk::V2(meta) })
    }

    pub(crate) const fn new(layout: Layout, disk: Disk) -> Self {
        Self { layout, disk }
    }

    /// The format's version.
    pub const fn version(&self) -> Version {
        match self.disk {
            Disk::V1(_) => Version::V1,
            Disk::V2(_) => Version::V2,
        }
    }

    /// The volume's identifier; `None` if the header has an invalid one.
    pub fn uuid(&self) -> Option<uuid::Uuid> {
        let field = match &self.disk {
            Disk::V1(phdr) => phdr.uuid(),
            Disk::V2(meta) => meta.uuid(),
        };
        let end = field.iter().position(|&byte| byte == 0).unwrap_or(field.len());
        uuid::Uuid::try_parse_ascii(&field[..end]).ok()
    }

    /// Where the data is, and how it is encrypted.
    pub const fn segment(&self) -> Segment {
        self.layout.segment
    }

    /// The key slots that open the volume, by number.
    pub fn key_slots(&self) -> &[KeySlot] {
        &self.layout.slots
    }

    /// Whether one copy of a LUKS2 header is damaged or older than the other. [`Header::repair`] repairs it, and so do added and
    /// removed key slots.
    pub const fn is_degraded(&self) -> bool {
        match &self.disk {
            Disk::V1(_) => false,
            Disk::V2(meta) => meta.is_degraded(),
        }
    }

    /// Opens the volume by `secret`, a passphrase or the content of a key file, with key slot `slot` or the first one that opens.
    /// Takes seconds for each key slot.
    pub fn unlock(
        &self,
        store: &mut dyn Store,
        secret: &[u8],
        slot: Option<u32>,
        limits: &Limits,
    ) -> Result<Unlocked, Error> {
        let mut budget = Budget::new(limits);
        let mut outcome = Error::WrongSecret;
        for candidate in self.candidates(slot)? {
            let digest_steps = self.layout.digest.steps();
            if !budget.try_spend(&candidate.kdf, candidate.area_key_len, digest_steps) {
                outcome = Error::TooExpensive {
                    slot: candidate.number,
                    memory: candidate.kdf.memory(),
                    steps: candidate.kdf.steps(candidate.area_key_len).saturating_add(digest_steps),
                };
                continue;
            }
            match candidate.open(store, secret) {
                Ok(key) if self.layout.digest.matches(&key) => {
                    return Ok(Unlocked { key, slot: candidate.number });
                }
                Ok(_) => {}
                // Another slot may be readable.
                Err(error) => outcome = error,
            }
        }
        Err(outcome)
    }

    /// The key slots to try, in order.
    fn candidates(&self, slot: Option<u32>) -> Result<Vec<&KeySlot>, Error> {
        let slots = &self.layout.slots;
        if let Some(number) = slot {
            let slot = slots.iter().find(|slot| slot.number == number);
            return slot.map(|slot| vec![slot]).ok_or(Error::NoSuchSlot(number));
        }
        let mut candidates: Vec<_> = slots.iter().filter(|slot| slot.priority != Priority::Ignore).collect();
        candidates.sort_by_key(|slot| (slot.priority, slot.number));
        Ok(candidates)
    }

    /// Adds a key slot that `secret` opens, with this number or the first free one, and returns its number. A LUKS1 header has
    /// one hash for all key slots, which `kdf` must use.
    pub fn add_key_slot(
        &mut self,
        store: &mut dyn Store,
        key: &VolumeKey,
        secret: &[u8],
        kdf: Kdf,
        number: Option<u32>,
    ) -> Result<u32, Error> {
        if !self.layout.digest.matches(key) {
            return Err(Error::WrongKey);
        }
        let mut salt = vec![0; SALT_LEN];
        random(&mut salt)?;
        let mut disk = self.disk.clone();
        let slot = match &mut disk {
            Disk::V1(phdr) => phdr.add(number, kdf, salt)?,
            Disk::V2(meta) => meta.add(number, kdf, salt, key.as_bytes().len())?,
        };
        // A failure leaves the header as it is on the disk: nothing refers to the area yet.
        slot.seal(store, secret, key)?;
        self.replace(store, disk)?;
        let number = slot.number;
        self.layout.slots.push(slot);
        self.layout.slots.sort_by_key(|slot| slot.number);
        Ok(number)
    }

    /// Destroys a key slot. The last one is refused.
    pub fn remove_key_slot(&mut self, store: &mut dyn Store, number: u32) -> Result<(), Error> {
        let slots = &self.layout.slots;
        let slot = slots.iter().find(|slot| slot.number == number).ok_or(Error::NoSuchSlot(number))?;
        if slots.len() == 1 {
            return Err(Error::LastSlot(number));
        }
        // First the area: after a power failure between the two writes, the key slot is listed and opens nothing.
        slot.wipe(store)?;
        let mut disk = self.disk.clone();
        match &mut disk {
            Disk::V1(phdr) => phdr.remove(number),
            Disk::V2(meta) => meta.remove(number),
        }
        self.replace(store, disk)?;
        self.layout.slots.retain(|slot| slot.number != number);
        Ok(())
    }

    /// Writes both copies of a LUKS2 header if one is damaged or older. Returns whether that was so.
    pub fn repair(&mut self, store: &mut dyn Store) -> Result<bool, Error> {
        let is_degraded = self.is_degraded();
        if is_degraded {
            self.replace(store, self.disk.clone())?;
        }
        Ok(is_degraded)
    }

    fn replace(&mut self, store: &mut dyn Store, mut disk: Disk) -> Result<(), Error> {
        match &mut disk {
            Disk::V1(phdr) => phdr.write(store)?,
            Disk::V2(meta) => meta.write(store)?,
        }
        self.disk = disk;
        Ok(())
    }
}

impl Digest {
    /// The digest of `key`, `len` bytes long.
    pub(crate) fn of(key: &VolumeKey, hash: Hash, iterations: NonZeroU32, len: usize) -> Result<Self, Error> {
        let (mut salt, mut digest) = (vec![0; SALT_LEN], vec![0; len]);
        random(&mut salt)?;
        hash.pbkdf2(iterations, &salt, key.as_bytes(), &mut digest);
        Ok(Self { hash, iterations, salt, digest })
    }

    fn matches(&self, key: &VolumeKey) -> bool {
        let mut digest = vec![0; self.digest.len()];
        self.hash.pbkdf2(self.iterations, &self.salt, key.as_bytes(), &mut digest);
        // The time of this comparison tells nothing: the digest is no secret.
        digest == self.digest
    }

    fn steps(&self) -> u64 {
        self.hash.pbkdf2_steps(self.iterations, self.digest.len())
    }
}
