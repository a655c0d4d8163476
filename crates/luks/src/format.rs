//! A new header, with a new volume key and one key slot. Control context.

use uuid::Uuid;

use crate::error::Error;
use crate::hash::Hash;
use crate::header::{Digest, Disk, Header, Layout, SALT_LEN, Version};
use crate::kdf::{ITERATIONS_MIN, Kdf};
use crate::key::{VolumeKey, random};
use crate::segment::Cipher;
use crate::store::Store;
use crate::{metadata, v1, v2};

/// Bytes that are cleared at a time.
const CHUNK: u64 = 1 << 20;

/// What a new header is like.
#[derive(Clone, Debug)]
pub struct Options {
    /// The format.
    pub version: Version,
    /// The cipher of the data and of the key slot.
    pub cipher: Cipher,
    /// Bytes per unit of encryption: 512, or for LUKS2 also 1024, 2048 and 4096.
    pub sector_size: u32,
    /// Key derivation of the key slot; for LUKS1 PBKDF2, with the hash of all later key slots.
    pub kdf: Kdf,
    /// A name, at most 47 bytes; LUKS2 only.
    pub label: String,
    /// The volume's identifier; a new one if `None`.
    pub uuid: Option<Uuid>,
}

/// Writes a new header to `store`, and returns it with its volume key. All bytes before the data are overwritten; data that is
/// there is lost. Until the end, the store has no header.
pub fn format(store: &mut dyn Store, options: &Options, secret: &[u8]) -> Result<(Header, VolumeKey), Error> {
    let key = VolumeKey::random(options.cipher.key_len())?;
    let uuid = match options.uuid {
        Some(uuid) => uuid,
        None => new_uuid()?,
    };
    let (layout, disk) = match options.version {
        Version::V1 => empty_v1(options, &key, uuid)?,
        Version::V2 => empty_v2(options, &key, uuid)?,
    };
    // Nothing is overwritten for options that cannot be.
    options.kdf.check(&[0; SALT_LEN])?;
    clear(store, layout.segment.offset)?;
    let mut header = Header::new(layout, disk);
    header.add_key_slot(store, &key, secret, options.kdf, Some(0))?;
    Ok((header, key))
}

fn empty_v1(options: &Options, key: &VolumeKey, uuid: Uuid) -> Result<(Layout, Disk), Error> {
    if options.sector_size != 512 || !options.label.is_empty() {
        return Err(Error::Unsupported { what: "LUKS1 option", name: "sector size or label".into() });
    }
    let Kdf::Pbkdf2 { hash, .. } = options.kdf else {
        return Err(Error::Unsupported { what: "LUKS1 key derivation", name: "Argon2".into() });
    };
    let digest = Digest::of(key, hash, ITERATIONS_MIN, v1::DIGEST_LEN)?;
    let phdr = v1::Phdr::new(options.cipher, hash, &digest, uuid);
    Ok((phdr.layout()?, Disk::V1(phdr)))
}

fn empty_v2(options: &Options, key: &VolumeKey, uuid: Uuid) -> Result<(Layout, Disk), Error> {
    // A random key needs no slow digest.
    let digest = Digest::of(key, Hash::Sha256, ITERATIONS_MIN, Hash::Sha256.len())?;
    let json = metadata::empty(options.sector_size, &digest);
    let meta = v2::Meta::new(json, &options.label, uuid)?;
    Ok((metadata::empty_layout(options.cipher, options.sector_size, digest)?, Disk::V2(meta)))
}

fn new_uuid() -> Result<Uuid, Error> {
    let mut bytes = [0; 16];
    random(&mut bytes)?;
    Ok(uuid::Builder::from_random_bytes(bytes).into_uuid())
}

/// Overwrites what another format may have left before the data.
fn clear(store: &mut dyn Store, end: u64) -> Result<(), Error> {
    let zeroes = vec![0; CHUNK as usize];
    let mut at = 0;
    while at < end {
        let len = CHUNK.min(end - at);
        store.write_at(at, &zeroes[..len as usize])?;
        at += len;
    }
    Ok(store.sync()?)
}
