//! `bdev_luks_*`: disks whose data is behind a LUKS header, and these headers. Methods of Aryk only. Control context.
//!
//! A header is read and written by the base disk's own I/O path (`aryk_bdev_crypto::on_header`). Keys are derived on threads of
//! their own, a few at a time. No volume key, passphrase or content of a key file is stored, logged or replied: the state store
//! has the path of the key file, and a restarted daemon unlocks the disk again. Until it can, the disk is absent.

pub(super) mod content;
mod header;
mod key_file;
mod permit;

use super::details::{self, Details};
use super::waiting::waits;
use super::{Control, Error, Name, Phase, Table, is_default};
use crate::journal;
use aryk_bdev::{Access, Bdev};
use aryk_bdev_crypto as module;
use aryk_luks::{Header, Limits, Segment, Version};
use key_file::{FileVersion, KeyFile};
use module::{HeaderError, Opener};
use permit::Permit;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::{Mutex, OwnedMutexGuard, Semaphore};
use uuid::Uuid;

/// Namespace of the disks' uuids.
const NAMESPACE: Uuid = uuid::uuid!("0d3f9bd6-2f52-4d6a-8a5c-6a7c2d3b8f11");
const MODULE: &str = "luks";
pub(crate) const CREATE: &str = "bdev_luks_create";

/// Key derivations at the same time: each may need as much memory as [`Limits`] allow.
const DERIVATIONS: usize = 2;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        CREATE,
        Phase::RunTime,
        "Unlocks a disk that has a LUKS header, and creates a disk of its data.",
        create,
    );
    table.add("bdev_luks_delete", Phase::RunTime, "Removes a disk of `bdev_luks_create`.", delete);
    header::register(table);
}

/// What the daemon keeps about LUKS disks.
#[derive(Debug)]
pub(crate) struct State {
    derivations: Arc<Semaphore>,
    /// By the serial of a disk in use: held while its key slots are changed.
    changes: RefCell<HashMap<u64, Arc<Mutex<()>>>>,
    /// The disks that could not be unlocked again after a restart, by name.
    refused: RefCell<HashMap<String, Refusal>>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            derivations: Arc::new(Semaphore::new(DERIVATIONS)),
            changes: RefCell::default(),
            refused: RefCell::default(),
        }
    }
}

/// A try that would fail again after as much work, as long as the key file and the base are the same.
#[derive(Debug)]
struct Refusal {
    file: FileVersion,
    base: u64,
    error: Error,
}

impl State {
    /// Waits until a key may be derived. The permit goes to the thread that derives the key.
    async fn derivation(&self) -> Result<Permit, Error> {
        let permit = Arc::clone(&self.derivations).acquire_owned().await;
        permit.map(Permit::new).map_err(|_| Error::State("the daemon is ending".into()))
    }

    /// Waits until no other call changes the key slots of a disk.
    async fn change(&self, disk: &Bdev) -> OwnedMutexGuard<()> {
        let lock = {
            let mut changes = self.changes.borrow_mut();
            changes.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(changes.entry(disk.serial()).or_default())
        };
        lock.lock_owned().await
    }

    fn refusal(&self, disk: &str, file: FileVersion, base: u64) -> Option<Error> {
        let refused = self.refused.borrow();
        let refusal = refused.get(disk).filter(|refusal| (refusal.file, refusal.base) == (file, base))?;
        Some(refusal.error.clone())
    }
}

/// Parameters of `bdev_luks_create`, a method of Aryk only.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Create {
    /// Name of the new disk.
    name: String,
    /// Name of the disk that has the header.
    base_bdev_name: String,
    /// Path of a file that only the daemon's user or root may read. All of its bytes are the passphrase, also a final line break.
    /// The daemon reads it again at each start.
    key_file: PathBuf,
    /// The key slot that the key file opens. Default: all are tried, except those that have the priority `ignore`.
    #[serde(skip_serializing_if = "Option::is_none")]
    key_slot: Option<u32>,
    /// Whether discards go to the base disk, where they show which blocks are in use. Otherwise the disk does not support them.
    #[serde(default, skip_serializing_if = "is_default")]
    pass_discards: bool,
    /// Whether a damaged copy of the header is repaired also if something else has overwritten the copy, such as a partition
    /// table, which is lost. Applies to this call only.
    #[serde(default, skip_serializing)]
    repair: bool,
}

/// An unlocked header.
struct Unlocked {
    key: module::Key,
    segment: Segment,
    version: Version,
    uuid: Option<Uuid>,
    slot: u32,
    /// Whether a damaged copy of the header was repaired, or why not.
    repaired: Result<bool, aryk_luks::Error>,
}

pub(super) async fn create(control: &Control, p: Create) -> Result<String, Error> {
    if waits(control, &p.base_bdev_name, &p.name, (CREATE, &p))? {
        return Ok(p.name);
    }
    let base = control.disks.find(&p.base_bdev_name)?;
    let identity = super::identity_over(&p.name, None, &base, NAMESPACE)?;
    let file = key_file::read(&p.key_file).await?;
    let (version, serial) = (file.version, base.serial());
    if journal::is_restore()
        && let Some(error) = control.luks.refusal(&p.name, version, serial)
    {
        return Err(error);
    }
    let unlocked = unlock(control, &p, file).await.inspect_err(|error| {
        if matches!(error, Error::Errno { errno: Errno::PERM | Errno::TOOBIG, .. }) {
            let refusal = Refusal { file: version, base: serial, error: error.clone() };
            control.luks.refused.borrow_mut().insert(p.name.clone(), refusal);
        }
    })?;
    control.luks.refused.borrow_mut().remove(&p.name);
    match &unlocked.repaired {
        Ok(false) => {}
        Ok(true) => {
            tracing::warn!(
                disk = p.name,
                base = base.name(),
                "a damaged copy of the LUKS header was repaired"
            );
        }
        Err(error) => {
            let error = explained(base.name(), error);
            tracing::error!(disk = p.name, %error, "one copy of the LUKS header is damaged, and is not repaired");
        }
    }
    let Segment { offset, size, sector_size, iv_tweak, .. } = unlocked.segment;
    let config = module::Config {
        identity,
        product: MODULE,
        base: p.base_bdev_name.clone(),
        area: module::Area { offset: aryk_bdev::Bytes(offset), size: size.map(aryk_bdev::Bytes) },
        key: Arc::new(unlocked.key),
        tweak_mode: module::TweakMode::Plain64 { iv_offset: iv_tweak, sector_size, iv_large_sectors: false },
        passes_discards: p.pass_discards,
    };
    let bdev = module::create(&control.env, config)?;
    let luks = details::Luks {
        base_bdev_name: p.base_bdev_name.clone(),
        name: p.name.clone(),
        version: header::version_name(unlocked.version),
        uuid: unlocked.uuid,
        key_slot: unlocked.slot,
    };
    let details = Details { luks: Some(luks), ..Details::default() };
    Ok(control.made_disk(&bdev, MODULE, details, (CREATE, &p)))
}

async fn unlock(control: &Control, p: &Create, file: KeyFile) -> Result<Unlocked, Error> {
    let permit = control.luks.derivation().await?;
    control.check_open()?;
    let (slot, may_overwrite) = (p.key_slot, p.repair);
    let work = move |store: &mut dyn aryk_luks::Store| {
        let store = &mut permit.around(store);
        let limits = Limits::default();
        let mut header = Header::read(store, &limits)?;
        let segment = header.segment();
        if segment.offset == 0 {
            return Err(aryk_luks::Error::Unsupported { what: "detached header:", name: "its data".into() });
        }
        let unlocked = header.unlock(store, &file.secret, slot, &limits)?;
        let key = module::Key::new(unlocked.key.as_bytes())?;
        let repaired = match content::check(store, &header) {
            Err(error) if !may_overwrite => Err(error),
            _ => header.repair(store),
        };
        let (version, uuid, slot) = (header.version(), header.uuid(), unlocked.slot);
        Ok(Unlocked { key, segment, version, uuid, slot, repaired })
    };
    let opener = Opener { name: &p.name, access: Access::Exclusive };
    let unlocked = module::on_header(&control.env, &p.base_bdev_name, opener, work).await?;
    unlocked.map_err(|error| explained(&p.base_bdev_name, &error))
}

async fn delete(control: &Control, p: Name) -> Result<bool, Error> {
    let removed = control.remove_disk(MODULE, &p.name).await?;
    control.luks.refused.borrow_mut().remove(&p.name);
    Ok(removed)
}

impl From<HeaderError> for Error {
    fn from(error: HeaderError) -> Self {
        let errno = match error {
            HeaderError::Registry(error) => return error.into(),
            HeaderError::NotEncrypted(_) | HeaderError::Removed => Errno::NODEV,
            HeaderError::Open(_) => Errno::IO,
            HeaderError::Ending => return Self::State(error.to_string()),
            HeaderError::Thread(_) => Errno::AGAIN,
        };
        Self::errno(errno, error.to_string())
    }
}

/// An error of the header of the disk `disk`, with what the operator can do.
fn explained(disk: &str, error: &aryk_luks::Error) -> Error {
    use aryk_luks::Error as Luks;
    let (errno, hint) = match error {
        Luks::NotLuks => (
            Errno::INVAL,
            "the disk was never formatted, its header was overwritten (restore a backup of it), or it is another disk",
        ),
        Luks::WrongSecret => (
            Errno::PERM,
            "all bytes of a key file count, also a final line break: 'printf %s PASSPHRASE' writes none, 'echo' writes one",
        ),
        Luks::TooExpensive { .. } => (
            Errno::TOOBIG,
            "make the key slot cheaper where the disk can be unlocked: 'cryptsetup luksConvertKey --pbkdf-memory 1048576'",
        ),
        Luks::Version(_) | Luks::Unsupported { .. } => (
            Errno::OPNOTSUPP,
            "LUKS1 and LUKS2 with aes-xts-plain64 are supported, with the header on the disk itself",
        ),
        Luks::Overwritten(_) => (
            Errno::EXIST,
            "is it the right disk? 'aryk luks open --repair' writes that copy again, and what is there is lost",
        ),
        Luks::Invalid(_) => {
            (Errno::INVAL, "the header is damaged: restore a backup of it ('cryptsetup luksHeaderRestore')")
        }
        Luks::Io(_) => {
            (Errno::IO, "the disk is smaller than its header, or it has failed: see its last failure")
        }
        Luks::NoMemory(_) => (Errno::NOMEM, "free memory, or make the key slot cheaper"),
        Luks::NoSuchSlot(_) => (Errno::NOENT, "bdev_luks_get_header lists the key slots"),
        Luks::SlotTaken(_) => (Errno::EXIST, "bdev_luks_get_header lists the key slots"),
        Luks::NoRoom => (Errno::NOSPC, "remove a key slot first"),
        Luks::LastSlot(_) => (Errno::BUSY, "add another key slot first, or remove the disk's data"),
        Luks::WrongKey | Luks::Key(_) => (Errno::INVAL, "the header has a volume key that cannot be used"),
        Luks::Random => (Errno::IO, "try again"),
    };
    Error::errno(errno, format!("disk '{disk}': {error}; {hint}"))
}
