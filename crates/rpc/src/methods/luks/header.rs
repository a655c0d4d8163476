//! LUKS headers: formatting a disk, describing its header, and adding and removing key slots. Control context; the work on a
//! header runs on a thread of its own.

use super::key_file::{self, KeyFile};
use super::{Control, MODULE, Phase, Table, content, explained, module};
use crate::Error;
use aryk_bdev::Access;
use aryk_luks::{Argon2Variant, Cipher, Hash, Header, KeySlot, Limits, Options, Priority, Store, Version};
use module::Opener;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;
use uuid::Uuid;

/// Time of a key derivation, by default as in cryptsetup, and at most.
const ITER_TIME_MS: u32 = 2000;
const ITER_TIME_MS_MAX: u32 = 60_000;
/// Memory of a key derivation by default. The daemon needs it again at each start, for each disk.
const MEMORY_KIB: u32 = 256 << 10;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_luks_format",
        Phase::RunTime,
        "Writes a LUKS header with a new volume key to a disk, whose data is lost.",
        format,
    );
    table.add("bdev_luks_get_header", Phase::RunTime, "Describes the LUKS header of a disk.", get_header);
    table.add(
        "bdev_luks_add_key_slot",
        Phase::RunTime,
        "Adds a key slot to the LUKS header of a disk, which may be in use. Returns its number.",
        add_key_slot,
    );
    table.add(
        "bdev_luks_remove_key_slot",
        Phase::RunTime,
        "Destroys a key slot in the LUKS header of a disk, which may be in use.",
        remove_key_slot,
    );
}

/// A version of LUKS.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "LuksVersion")]
enum Format {
    Luks1,
    #[default]
    Luks2,
}

pub(super) const fn version_name(version: Version) -> &'static str {
    match version {
        Version::V1 => "luks1",
        Version::V2 => "luks2",
    }
}

/// How a key slot derives its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(rename = "LuksKdf")]
enum Kdf {
    Argon2id,
    Pbkdf2,
}

/// The cost of a new key slot.
#[derive(Debug, Clone, Copy)]
struct Cost {
    kdf: Kdf,
    time: Duration,
    memory_kib: u32,
}

impl Cost {
    fn new(
        version: Version,
        kdf: Option<Kdf>,
        iter_time_ms: Option<u32>,
        memory_kib: Option<u32>,
    ) -> Result<Self, Error> {
        let kdf = match (version, kdf) {
            (Version::V1, None | Some(Kdf::Pbkdf2)) | (Version::V2, Some(Kdf::Pbkdf2)) => Kdf::Pbkdf2,
            (Version::V2, None | Some(Kdf::Argon2id)) => Kdf::Argon2id,
            (Version::V1, Some(Kdf::Argon2id)) => {
                return Err(Error::invalid("LUKS1 has no argon2id: use pbkdf2, or luks2"));
            }
        };
        let (time, memory_kib) = (iter_time_ms.unwrap_or(ITER_TIME_MS), memory_kib.unwrap_or(MEMORY_KIB));
        if time == 0 || time > ITER_TIME_MS_MAX {
            return Err(Error::invalid(format!("`iter_time_ms` must be from 1 to {ITER_TIME_MS_MAX}")));
        }
        let memory_max = Limits::default().memory_max >> 10;
        if memory_kib < 32 || u64::from(memory_kib) > memory_max {
            return Err(Error::invalid(format!("`pbkdf_memory_kib` must be from 32 to {memory_max}")));
        }
        Ok(Self { kdf, time: Duration::from_millis(time.into()), memory_kib })
    }

    /// Measures what takes so long on this host.
    fn measured(self, hash: Hash) -> Result<aryk_luks::Kdf, aryk_luks::Error> {
        match self.kdf {
            Kdf::Pbkdf2 => Ok(aryk_luks::Kdf::pbkdf2_for(hash, self.time)),
            Kdf::Argon2id => aryk_luks::Kdf::argon2id_for(self.time, self.memory_kib),
        }
    }
}

/// Parameters of `bdev_luks_format`, a method of Aryk only.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct FormatDisk {
    /// Name, alias or uuid of the disk, which must not be in use.
    name: String,
    /// Path of a file that only the daemon's user or root may read: its bytes open the first key slot.
    key_file: PathBuf,
    /// Default: `luks2`.
    #[serde(default)]
    version: Format,
    /// Bits of the AES key: 128 or 256. Default: 256.
    aes_bits: Option<u32>,
    /// Bytes that are encrypted together: 512, or for `luks2` also 1024, 2048 and 4096. The disk's blocks have at least as many.
    /// Default: a block of the disk, at most 4096; 512 for `luks1`.
    sector_size: Option<u32>,
    /// Key derivation of the key slot. Default: `argon2id`, for `luks1` `pbkdf2`.
    pbkdf: Option<Kdf>,
    /// Time that the key derivation takes on this host, in milliseconds. Default: 2000.
    iter_time_ms: Option<u32>,
    /// Memory that `argon2id` uses, at most. Default: 262144.
    pbkdf_memory_kib: Option<u32>,
    /// A name in the header, at most 47 bytes; `luks2` only.
    #[serde(default)]
    label: String,
    /// Format the disk even if it holds data, which is lost.
    #[serde(default)]
    overwrite: bool,
}

async fn format(control: &Control, p: FormatDisk) -> Result<LuksHeader, Error> {
    let bdev = control.disks.find(&p.name)?;
    let version = if p.version == Format::Luks1 { Version::V1 } else { Version::V2 };
    let cost = Cost::new(version, p.pbkdf, p.iter_time_ms, p.pbkdf_memory_kib)?;
    let cipher = match p.aes_bits {
        None | Some(256) => Cipher::Aes256Xts,
        Some(128) => Cipher::Aes128Xts,
        Some(other) => return Err(Error::invalid(format!("`aes_bits` is {other}, not 128 or 256"))),
    };
    let of_block = if version == Version::V1 { 512 } else { bdev.geometry().block_size.clamp(512, 4096) };
    let sector_size = p.sector_size.unwrap_or(of_block);
    if !matches!(sector_size, 512 | 1024 | 2048 | 4096) || (version == Version::V1 && sector_size != 512) {
        return Err(Error::invalid(format!(
            "a `sector_size` of {sector_size} is not 512, 1024, 2048 or 4096; LUKS1 has 512 only"
        )));
    }
    let len = bdev.blocks().to_bytes(bdev.geometry().block_size).0;
    check_room(&p.name, version, sector_size.max(bdev.geometry().block_size), len)?;
    if bdev.device().is_read_only() {
        return Err(Error::errno(Errno::ROFS, format!("disk '{}' is read-only", p.name)));
    }
    let KeyFile { secret, .. } = key_file::read(&p.key_file).await?;
    let permit = control.luks.derivation().await?;
    control.check_open()?;
    let (name, overwrite, label) = (bdev.name().to_owned(), p.overwrite, p.label);
    let work = move |store: &mut dyn Store| {
        let store = &mut permit.around(store);
        let found = if overwrite { None } else { content::find(store, version.data_offset(), len)? };
        if let Some(found) = found {
            return Ok(Err(found));
        }
        let kdf = cost.measured(Hash::Sha256)?;
        let options = Options { version, cipher, sector_size, kdf, label, uuid: None };
        let (header, _) = aryk_luks::format(store, &options, &secret)?;
        Ok(Ok(LuksHeader::of(&header)))
    };
    let opener = Opener { name: "bdev_luks_format", access: Access::Exclusive };
    let formatted = module::on_header(&control.env, &name, opener, work).await?;
    let formatted = formatted.map_err(|error: aryk_luks::Error| explained(&name, &error))?;
    formatted.map_err(|found| {
        let detail =
            format!("disk '{name}' holds {found}; to overwrite what is on the disk, set `overwrite`");
        Error::errno(Errno::EXIST, detail)
    })
}

/// Refuses a disk without room for a header and a block of data.
fn check_room(disk: &str, version: Version, block_size: u32, len: u64) -> Result<(), Error> {
    let needed = version.data_offset() + u64::from(block_size);
    if len >= needed {
        return Ok(());
    }
    let (name, header) = (version_name(version), version.data_offset());
    Err(Error::errno(
        Errno::NOSPC,
        format!(
            "disk '{disk}' has {len} bytes, and a {name} header takes {header}, before at least one block of data: \
             use a disk of at least {needed} bytes"
        ),
    ))
}

/// The LUKS header of a disk.
#[derive(Debug, Serialize, JsonSchema)]
struct LuksHeader {
    /// `luks1` or `luks2`.
    version: &'static str,
    /// The volume's identifier; missing if the header has an invalid one.
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<Uuid>,
    /// The cipher of the data: `aes-xts-plain64`.
    cipher: &'static str,
    /// Bits of the AES key.
    aes_bits: u32,
    /// Bytes that are encrypted together.
    sector_size: u32,
    /// Start of the data on the disk, in bytes.
    data_offset: u64,
    /// Length of the data in bytes; missing if it extends to the end of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    data_size: Option<u64>,
    /// Whether one copy of a `luks2` header is damaged. `bdev_luks_create` repairs it, unless something else has overwritten it.
    degraded: bool,
    /// The key slots in use, by number.
    key_slots: Vec<LuksKeySlot>,
}

/// A key slot in use.
#[derive(Debug, Serialize, JsonSchema)]
struct LuksKeySlot {
    /// Its number.
    key_slot: u32,
    /// When it is tried: `prefer` before all others, `normal`, or `ignore` only if it is named.
    priority: &'static str,
    /// Key derivation: `pbkdf2`, `argon2i` or `argon2id`.
    pbkdf: &'static str,
    /// Iterations of PBKDF2, or passes of Argon2.
    iterations: u32,
    /// Memory of Argon2; missing for PBKDF2.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_kib: Option<u32>,
}

impl LuksHeader {
    fn of(header: &Header) -> Self {
        let segment = header.segment();
        Self {
            version: version_name(header.version()),
            uuid: header.uuid(),
            cipher: "aes-xts-plain64",
            aes_bits: segment.cipher.key_len() as u32 * 8 / 2,
            sector_size: segment.sector_size,
            data_offset: segment.offset,
            data_size: segment.size,
            degraded: header.is_degraded(),
            key_slots: header.key_slots().iter().map(LuksKeySlot::of).collect(),
        }
    }
}

impl LuksKeySlot {
    fn of(slot: &KeySlot) -> Self {
        let (pbkdf, iterations, memory_kib) = match slot.kdf() {
            aryk_luks::Kdf::Pbkdf2 { iterations, .. } => ("pbkdf2", iterations.get(), None),
            aryk_luks::Kdf::Argon2 { variant: Argon2Variant::I, passes, memory_kib, .. } => {
                ("argon2i", passes, Some(memory_kib))
            }
            aryk_luks::Kdf::Argon2 { variant: Argon2Variant::Id, passes, memory_kib, .. } => {
                ("argon2id", passes, Some(memory_kib))
            }
        };
        let priority = match slot.priority() {
            Priority::Prefer => "prefer",
            Priority::Normal => "normal",
            Priority::Ignore => "ignore",
        };
        Self { key_slot: slot.number(), priority, pbkdf, iterations, memory_kib }
    }
}

/// Parameters of `bdev_luks_get_header`, a method of Aryk only.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetHeader {
    /// Name, alias or uuid of a disk of `bdev_luks_create`, or of a disk that has a header.
    name: String,
}

async fn get_header(control: &Control, p: GetHeader) -> Result<LuksHeader, Error> {
    let read = |store: &mut dyn Store| Ok(LuksHeader::of(&Header::read(store, &Limits::default())?));
    on_header(control, &p.name, Access::Read, read).await
}

/// Runs `work` on the header of a LUKS disk, or of a disk that has a header.
async fn on_header<R: Send + 'static>(
    control: &Control,
    name: &str,
    access: Access,
    work: impl FnOnce(&mut dyn Store) -> Result<R, aryk_luks::Error> + Send + 'static,
) -> Result<R, Error> {
    const OWNER: &str = "key slots";
    let env = &control.env;
    let is_luks = control.disks.find_made_by(&[MODULE], name).is_ok();
    let done = match is_luks {
        true => module::on_header_below(env, name, OWNER, work).await?,
        false => module::on_header(env, name, Opener { name: OWNER, access }, work).await?,
    };
    done.map_err(|error| explained(name, &error))
}

/// Parameters of `bdev_luks_add_key_slot`, a method of Aryk only.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct AddKeySlot {
    /// Name, alias or uuid of a disk of `bdev_luks_create`, or of a disk that has a header and is not in use.
    name: String,
    /// Path of a key file that opens a key slot.
    key_file: PathBuf,
    /// Path of the key file that will open the new key slot.
    new_key_file: PathBuf,
    /// Number of the new key slot. Default: the first free one.
    key_slot: Option<u32>,
    /// Key derivation of the new key slot. Default: `argon2id`, for `luks1` `pbkdf2`.
    pbkdf: Option<Kdf>,
    /// Time that the key derivation takes on this host, in milliseconds. Default: 2000.
    iter_time_ms: Option<u32>,
    /// Memory that `argon2id` uses, at most. Default: 262144.
    pbkdf_memory_kib: Option<u32>,
}

async fn add_key_slot(control: &Control, p: AddKeySlot) -> Result<u32, Error> {
    // LUKS1 has no argon2id: the header, read later, decides about the default.
    let (v1, v2) = [Version::V1, Version::V2]
        .map(|version| Cost::new(version, p.pbkdf, p.iter_time_ms, p.pbkdf_memory_kib))
        .into();
    let v2 = v2?;
    let v1 = v1.unwrap_or(v2);
    let secret = key_file::read(&p.key_file).await?.secret;
    let new_secret = key_file::read(&p.new_key_file).await?.secret;
    let _change = control.luks.change(&*control.disks.find(&p.name)?).await;
    let permit = control.luks.derivation().await?;
    control.check_open()?;
    let number = p.key_slot;
    let work = move |store: &mut dyn Store| {
        let store = &mut permit.around(store);
        let limits = Limits::default();
        let mut header = Header::read(store, &limits)?;
        content::check(store, &header)?;
        let cost = if header.version() == Version::V1 { v1 } else { v2 };
        let kdf = cost.measured(hash_of(&header))?;
        let key = header.unlock(store, &secret, None, &limits)?.key;
        header.add_key_slot(store, &key, &new_secret, kdf, number)
    };
    on_header(control, &p.name, Access::Exclusive, work).await
}

/// The hash of a new key slot: a LUKS1 header has one for all.
fn hash_of(header: &Header) -> Hash {
    let of_slot = header.key_slots().iter().find_map(|slot| match slot.kdf() {
        aryk_luks::Kdf::Pbkdf2 { hash, .. } => Some(hash),
        aryk_luks::Kdf::Argon2 { .. } => None,
    });
    of_slot.filter(|_| header.version() == Version::V1).unwrap_or(Hash::Sha256)
}

/// Parameters of `bdev_luks_remove_key_slot`, a method of Aryk only.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RemoveKeySlot {
    /// Name, alias or uuid of a disk of `bdev_luks_create`, or of a disk that has a header and is not in use.
    name: String,
    /// Number of the key slot.
    key_slot: u32,
    /// Path of a key file that opens another key slot: the data stays accessible.
    key_file: PathBuf,
}

async fn remove_key_slot(control: &Control, p: RemoveKeySlot) -> Result<bool, Error> {
    let secret = key_file::read(&p.key_file).await?.secret;
    let _change = control.luks.change(&*control.disks.find(&p.name)?).await;
    let permit = control.luks.derivation().await?;
    control.check_open()?;
    let number = p.key_slot;
    let work = move |store: &mut dyn Store| {
        let store = &mut permit.around(store);
        let limits = Limits::default();
        let mut header = Header::read(store, &limits)?;
        content::check(store, &header)?;
        let slots: Vec<u32> = header.key_slots().iter().map(KeySlot::number).collect();
        if !slots.contains(&number) {
            return Err(aryk_luks::Error::NoSuchSlot(number));
        }
        let mut outcome = Err(aryk_luks::Error::LastSlot(number));
        for other in slots.into_iter().filter(|slot| *slot != number) {
            outcome = header.unlock(store, &secret, Some(other), &limits).map(drop);
            if outcome.is_ok() {
                break;
            }
        }
        outcome?;
        header.remove_key_slot(store, number)?;
        Ok(true)
    };
    on_header(control, &p.name, Access::Exclusive, work).await
}
