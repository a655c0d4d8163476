//! `bdev_crypto_rekey`, `bdev_crypto_rekey_stop`: rotations of the keys of encrypted disks. Control context.
//!
//! The journal of a rotation is a file in the state directory, whose name follows from that of the disk. The order of writes
//! makes a rotation survive a crash at any point: the journal is created first; the disk's note has `rekey`, durably, before the
//! first block is encrypted again, and loses it when all blocks are; then the journal is removed. A disk whose journal says that
//! two keys are in use is created with both keys or not at all.

use super::crypto::{self, MODULE};
use super::{Control, Count, Error, Name, Phase, Table, details, is_default};
use crate::config::{Call, Subsystem};
use aryk_bdev::Bdev;
use aryk_bdev_crypto as module;
use aryk_state::Written;
use module::rekey::{self, CheckValue, Journal, JournalError, State as Doing};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::cell::{OnceCell, RefCell};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::rc::Weak;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use uuid::Uuid;

/// Namespace of the names of journals.
const NAMESPACE: Uuid = uuid::uuid!("5b0d7a52-9a2c-4a0e-9d0f-64b7a1c3e8f2");

/// The parameter of a disk's note that names the second key.
const REKEY: &str = "rekey";

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_crypto_rekey",
        Phase::RunTime,
        "Starts to encrypt a disk of `bdev_crypto_create` with another key, while it is in use; or continues that.",
        begin,
    );
    table.add(
        "bdev_crypto_rekey_stop",
        Phase::RunTime,
        "Stops encrypting a disk with another key. The disk then has both keys; `bdev_crypto_rekey` continues.",
        stop,
    );
}

/// A rotation to follow.
type Followed = (std::sync::Weak<Bdev>, rekey::Rekey);

/// The rotations of a daemon.
#[derive(Debug, Default)]
pub(crate) struct State {
    /// Disks for which a call is under way, or the end of a rotation is being recorded.
    busy: RefCell<BTreeSet<String>>,
    /// Notified when a disk is not busy any more.
    freed: Notify,
    followed: OnceCell<UnboundedSender<Followed>>,
}

/// Ends the call for a disk when it is dropped.
struct Busy<'a>(&'a State, String);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy.borrow_mut().remove(&self.1);
        self.0.freed.notify_waiters();
    }
}

impl State {
    fn begin(&self, name: &str) -> Result<Busy<'_>, Error> {
        match self.busy.borrow_mut().insert(name.to_owned()) {
            true => Ok(Busy(self, name.to_owned())),
            false => Err(Error::errno(Errno::BUSY, "another such call for this disk is under way")),
        }
    }

    /// Waits until no call for the disk is under way.
    async fn wait_and_begin(&self, name: &str) -> Busy<'_> {
        loop {
            match self.begin(name) {
                Ok(busy) => return busy,
                Err(_) => self.freed.notified().await,
            }
        }
    }

    fn follow(&self, bdev: &Arc<Bdev>, rekey: &rekey::Rekey) {
        if let Some(followed) = self.followed.get() {
            // The receiver has ended with the daemon.
            let _ = followed.send((Arc::downgrade(bdev), rekey.clone()));
        }
    }
}

/// Follows rotations to their ends as long as the daemon lives. Needs a tokio `LocalSet`.
pub(crate) fn follow_all(control: &std::rc::Rc<Control>) {
    let (sender, followed) = unbounded_channel();
    control.rekeys.followed.set(sender).expect("called once");
    tokio::task::spawn_local(follow(std::rc::Rc::downgrade(control), followed));
}

async fn follow(control: Weak<Control>, mut followed: UnboundedReceiver<Followed>) {
    while let Some((bdev, rekey)) = followed.recv().await {
        let control = Weak::clone(&control);
        tokio::task::spawn_local(async move {
            let ended = rekey.ended().await;
            let (Some(control), Some(bdev)) = (control.upgrade(), bdev.upgrade()) else { return };
            if control.is_closing() || bdev.is_removing() {
                return;
            }
            let disk = bdev.name();
            match ended {
                Doing::Running | Doing::Stopped => {}
                Doing::Failed(why) => {
                    tracing::error!(
                        disk,
                        why,
                        "the rotation of the disk's key has stopped; both keys are in use, and bdev_crypto_rekey continues"
                    );
                }
                Doing::Complete => match complete(&control, &bdev, &rekey).await {
                    Ok(()) => tracing::info!(disk, "all of the disk is encrypted with the new key"),
                    Err(error) => {
                        tracing::error!(disk, %error, "all of the disk is encrypted with the new key, but that cannot be recorded; bdev_crypto_rekey tries again");
                    }
                },
            }
        });
    }
}

/// The second key of a disk, as in its note.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "CryptoRekey")]
pub(super) struct Rekey {
    /// Name of the new key.
    key_name: String,
    /// MiB of the disk that are encrypted again in a second, at most; 0 for no limit.
    #[serde(default, skip_serializing_if = "is_default")]
    mbytes_per_sec: Count,
    /// Whether the rotation was stopped.
    #[serde(default, skip_serializing_if = "is_default")]
    stopped: bool,
}

impl Rekey {
    const fn bytes_per_second(&self) -> u64 {
        self.mbytes_per_sec.0.saturating_mul(1 << 20)
    }
}

/// Whether a call creates a disk that is being encrypted with this key.
pub(super) fn names_key(call: &Call, key: &str) -> bool {
    call.params.get(REKEY).and_then(|rekey| rekey.get("key_name")).is_some_and(|name| name == key)
}

/// The second key in a disk's note.
fn noted(control: &Control, disk: &str) -> Option<Rekey> {
    let params = control.config.params(Subsystem::Bdev, disk)?;
    serde_json::from_value(params.get(REKEY)?.clone()).ok()
}

/// The rotation of a disk, as `bdev_get_bdevs` reports it.
pub(super) fn describe(control: &Control, bdev: &Bdev) -> Option<details::Rekey> {
    let progress = rekey::Rekey::of(bdev)?.progress();
    let (state, error) = match progress.state {
        Doing::Running => ("running", None),
        Doing::Stopped => ("stopped", None),
        Doing::Failed(why) => ("failed", Some(why)),
        Doing::Complete => ("complete", None),
    };
    // For a moment at the end, the note has one key only: the new one.
    let only = || Some(control.config.params(Subsystem::Bdev, bdev.name())?["key_name"].as_str()?.to_owned());
    Some(details::Rekey {
        key_name: noted(control, bdev.name()).map(|rekey| rekey.key_name).or_else(only)?,
        state,
        error,
        done_blocks: progress.done.0,
        num_blocks: progress.blocks.0,
        unavailable: progress.unavailable.map(|blocks| details::Unavailable {
            lba: blocks.start.0,
            num_blocks: (blocks.end - blocks.start).0,
        }),
    })
}

/// The journal of a disk.
fn journal_in(dir: &Path, disk: &str) -> PathBuf {
    dir.join(format!("rekey-{}.journal", Uuid::new_v5(&NAMESPACE, disk.as_bytes())))
}

/// A journal of a rotation from or to a key that is not complete. Its disk may have been removed: only with the key can the disk
/// be created again.
///
/// # Errors
/// The state directory cannot be read.
pub(super) async fn journal_with(
    control: &Control,
    key: &crypto::NamedKey,
) -> Result<Option<PathBuf>, Error> {
    let Some(dir) = control.config.state_dir().map(Path::to_owned) else { return Ok(None) };
    let (key, of_key) = (Arc::clone(&key.key), key.tweak_mode.into());
    let plain64 = |sector_size, iv_large_sectors| module::TweakMode::Plain64 {
        iv_offset: 0,
        sector_size,
        iv_large_sectors,
    };
    let modes = [512, 1024, 2048, 4096].map(|size| [plain64(size, false), plain64(size, true)]);
    let values = move |block_size| {
        let modes = std::iter::once(&of_key).chain(modes.as_flattened());
        modes.filter_map(|mode| rekey::check_value(&key, *mode, block_size).ok()).collect()
    };
    let find = move || -> std::io::Result<_> {
        for entry in std::fs::read_dir(dir)? {
            let path = entry?.path();
            // One that is damaged, or removed meanwhile, needs no key. The header of one in use may seem damaged for a moment;
            // its disk has a note.
            if path.extension().is_some_and(|end| end == "journal")
                && Journal::needs(&path, &values).unwrap_or(false)
            {
                return Ok(Some(path));
            }
        }
        Ok(None)
    };
    blocking(find).await?.map_err(|error| {
        Error::errno(Errno::IO, format!("the state directory cannot be searched for journals: {error}"))
    })
}

/// Runs a function that may block on a file system on another thread.
async fn blocking<R: Send + 'static>(f: impl FnOnce() -> R + Send + 'static) -> Result<R, Error> {
    tokio::task::spawn_blocking(f).await.map_err(|error| Error::Internal(error.to_string()))
}

impl From<JournalError> for Error {
    fn from(error: JournalError) -> Self {
        let errno = match &error {
            JournalError::Missing(_) => Errno::NOENT,
            JournalError::Exists(_) => Errno::EXIST,
            JournalError::Damaged(..) => Errno::UCLEAN,
            JournalError::Io(_, error) => Errno::from_io_error(error).unwrap_or(Errno::IO),
        };
        Self::errno(errno, error.to_string())
    }
}

impl From<rekey::Error> for Error {
    fn from(error: rekey::Error) -> Self {
        match error {
            rekey::Error::Journal(error) => error.into(),
            rekey::Error::Create(error) => error.into(),
            rekey::Error::OtherKeys(_) | rekey::Error::OtherDisk(_) => {
                Self::errno(Errno::UCLEAN, error.to_string())
            }
            rekey::Error::UnderWay => Self::errno(Errno::BUSY, error.to_string()),
            rekey::Error::Tweak(_) | rekey::Error::OtherModule => Self::invalid(error.to_string()),
            rekey::Error::Thread(_) | rekey::Error::NoReactor => Self::Internal(error.to_string()),
        }
    }
}

/// Creates the disk of `config`, whose key has the name `key_name`. If its key is being rotated, `rekey` has the new key, whose
/// tweak mode is `plain64` if given.
///
/// # Errors
/// Among others: a rotation of the disk's key is not complete, and `rekey` does not name the new key; its journal is missing or
/// damaged.
pub(super) async fn create(
    control: &Control,
    config: module::Config,
    key_name: &str,
    plain64: Option<module::TweakMode>,
    rekey: Option<&Rekey>,
) -> Result<Arc<Bdev>, Error> {
    let name = &config.identity.name;
    if control.env.registry().find(name).is_ok() {
        // Its rotation may be using the journal.
        return Err(module::Error::from(aryk_bdev::Error::Exists(name.clone())).into());
    }
    let path = control.config.state_dir().map(|dir| journal_in(dir, name));
    let Some(rekey) = rekey else {
        if let Some(path) = path {
            let base = control.disks.find(&config.base)?;
            settle_journal(path, check_value(&config.key, config.tweak_mode, &base)?, &base).await?;
            crypto::check_is_there(control, key_name, &config.key)?;
        }
        return Ok(module::create(&control.env, config)?);
    };
    let path = path.ok_or_else(no_state_dir)?;
    let new = crypto::find_key(control, &rekey.key_name)?;
    let journal = blocking(move || Journal::open(&path)).await??;
    check_base(&journal, &*control.disks.find(&config.base)?)?;
    crypto::check_is_there(control, key_name, &config.key)?;
    crypto::check_is_there(control, &rekey.key_name, &new.key)?;
    let rotation = rekey::Config {
        key: Arc::clone(&new.key),
        tweak_mode: plain64.unwrap_or_else(|| new.tweak_mode.into()),
        journal,
        bytes_per_second: rekey.bytes_per_second(),
    };
    let bdev = module::create_rotating(&control.env, config, rotation, rekey.stopped)?;
    if let Some(rotation) = rekey::Rekey::of(&bdev) {
        control.rekeys.follow(&bdev, &rotation);
    }
    Ok(bdev)
}

/// Refuses the journal of a rotation of a disk on another base.
fn check_base(journal: &Journal, base: &Bdev) -> Result<(), Error> {
    let (noted, present) = (Uuid::from_bytes(journal.base()), base.identity().uuid);
    if noted == present {
        return Ok(());
    }
    let why = format!(
        "the journal {} belongs to a rotation of a disk on a base disk with the uuid {noted}, and '{base}' has {present}: if '{base}' \
         has the data of that disk, create it with that `uuid`; if not, move the journal away, without which that data cannot be read",
        journal.path().display(),
        base = base.name(),
    );
    Err(Error::errno(Errno::UCLEAN, why))
}

fn no_state_dir() -> Error {
    Error::errno(Errno::NOTSUP, "the key of a disk is rotated only with --state-dir, which keeps the journal")
}

/// Refuses a disk that has only `key` if a journal says that it has two, or another one; removes a journal that is not needed any
/// more.
async fn settle_journal(path: PathBuf, key: CheckValue, base: &Bdev) -> Result<(), Error> {
    let opened = {
        let path = path.clone();
        blocking(move || Journal::open(&path)).await?
    };
    let journal = match opened {
        Err(JournalError::Missing(_)) => return Ok(()),
        opened => opened?,
    };
    let is_settled = match (journal.is_from(key), journal.is_to(key)) {
        (true, _) => journal.is_untouched(),
        (_, true) => journal.is_complete(),
        // That of another disk, which had this name.
        (false, false) => return Ok(()),
    };
    if !is_settled {
        check_base(&journal, base)?;
        let why = format!(
            "the journal {} says that blocks of the disk have another key: `rekey` must name the new key",
            path.display()
        );
        return Err(Error::errno(Errno::BUSY, why));
    }
    blocking(move || rekey::remove_journal(&path)).await?.map_err(|error| Error::Internal(error.to_string()))
}

/// The check value of a key of a disk on `base`, or with the blocks of `base`.
fn check_value(key: &module::Key, mode: module::TweakMode, base: &Bdev) -> Result<CheckValue, Error> {
    let value = rekey::check_value(key, mode, base.geometry().block_size);
    value.map_err(|error| Error::invalid(error.to_string()))
}

/// Parameters of `bdev_crypto_rekey`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Begin {
    /// Name, alias or uuid of the disk.
    name: String,
    /// Name of the new key. To continue: of the same new key.
    key_name: String,
    /// MiB of the disk that are encrypted again in a second, at most. Default: 0, no limit.
    #[serde(default)]
    mbytes_per_sec: Count,
}

async fn begin(control: &Control, p: Begin) -> Result<bool, Error> {
    let bdev = control.disks.find_made_by(&[MODULE], &p.name)?;
    let _busy = control.rekeys.begin(bdev.name())?;
    let rekey = Rekey { key_name: p.key_name, mbytes_per_sec: p.mbytes_per_sec, stopped: false };
    let rotation = match rekey::Rekey::of(&bdev) {
        Some(rotation) => {
            if let Some(noted) = noted(control, bdev.name()).filter(|noted| noted.key_name != rekey.key_name)
            {
                let why = format!("the rotation to the key '{}' is not complete", noted.key_name);
                return Err(Error::errno(Errno::BUSY, why));
            }
            control.config.changed(Subsystem::Bdev, bdev.name(), REKEY, json!(rekey));
            rotation
        }
        None => prepare(control, &bdev, &rekey).await?,
    };
    rotation.run(&control.env, rekey.bytes_per_second())?;
    control.rekeys.follow(&bdev, &rotation);
    Ok(true)
}

/// Records a new rotation, durably. It does not run yet.
async fn prepare(control: &Control, bdev: &Arc<Bdev>, rekey: &Rekey) -> Result<rekey::Rekey, Error> {
    let dir = control.config.state_dir().ok_or_else(no_state_dir)?;
    let create: crypto::Create = control
        .config
        .params(Subsystem::Bdev, bdev.name())
        .and_then(|params| serde_json::from_value(params).ok())
        .ok_or_else(|| Error::Internal("the disk has no note".into()))?;
    let plain64: Option<module::TweakMode> = create.plain64.map(Into::into);
    let find = |name: &str| crypto::find_key(control, name);
    let (old, new) = (find(create.key_name.as_deref().unwrap_or_default())?, find(&rekey.key_name)?);
    let mode_of = |key: &crypto::NamedKey| plain64.unwrap_or_else(|| key.tweak_mode.into());
    let (old_check, new_check) =
        (check_value(&old.key, mode_of(&old), bdev)?, check_value(&new.key, mode_of(&new), bdev)?);
    if old_check == new_check {
        return Err(Error::invalid("the disk is encrypted with this key"));
    }
    let (path, block_size) = (journal_in(dir, bdev.name()), bdev.geometry().block_size);
    let base = control.disks.find(&create.base_bdev_name)?;
    settle_journal(path.clone(), old_check, &base).await?;
    let journal = {
        let (path, base) = (path.clone(), base.identity().uuid.into_bytes());
        blocking(move || Journal::create(&path, block_size, base, [old_check, new_check])).await??
    };
    // From here to the note nothing waits: the key cannot be destroyed, or the disk removed, in between.
    let begun =
        find(&rekey.key_name).and_then(|_| match control.config.params(Subsystem::Bdev, bdev.name()) {
            Some(_) if !bdev.is_removing() => Ok(()),
            _ => Err(Error::no_device("disk", bdev.name())),
        });
    let noted = match begun {
        Ok(()) => written(change(control, bdev.name(), [(REKEY, json!(rekey))])).await,
        refused => refused,
    };
    let config = rekey::Config {
        tweak_mode: mode_of(&new),
        key: new.key,
        journal,
        bytes_per_second: rekey.bytes_per_second(),
    };
    let begun = noted.and_then(|()| Ok(rekey::Rekey::begin(bdev, config)?));
    if begun.is_err() {
        control.config.changed(Subsystem::Bdev, bdev.name(), REKEY, Value::Null);
        if let Err(error) = blocking(move || rekey::remove_journal(&path)).await? {
            tracing::warn!(disk = bdev.name(), %error, "cannot remove the journal of the rotation that did not begin");
        }
    }
    begun
}

/// Changes parameters of a disk's note, to survive a power failure.
fn change<const N: usize>(
    control: &Control,
    disk: &str,
    params: [(&'static str, Value); N],
) -> Option<Written> {
    control.config.changed_durably(Subsystem::Bdev, disk, params)
}

/// Waits for a change of the state store.
async fn written(change: Option<Written>) -> Result<(), Error> {
    let Some(written) = change else { return Err(Error::Internal("the disk has no note".into())) };
    match written.await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(Error::Internal(error.to_string())),
        Err(_) => Err(Error::Internal("the state store's writer has ended".into())),
    }
}

/// Records that a disk has the new key only.
async fn complete(control: &Control, bdev: &Arc<Bdev>, rotation: &rekey::Rekey) -> Result<(), Error> {
    let name = bdev.name();
    // No other rotation begins before this one's journal is removed: theirs would be the one that is removed.
    let _busy = control.rekeys.wait_and_begin(name).await;
    // An earlier call has done it.
    let Some(Rekey { key_name, .. }) = noted(control, name) else { return Ok(()) };
    let before = control.config.params(Subsystem::Bdev, name).unwrap_or_default();
    let params = [("key_name", json!(key_name)), (REKEY, Value::Null)];
    if let Err(error) = written(change(control, name, params)).await {
        // The store may have either note, and is left with the old one; bdev_crypto_rekey tries again.
        let before = ["key_name", REKEY].map(|param| (param, before[param].clone()));
        drop(change(control, name, before));
        return Err(error);
    }
    control.disks.change_details(bdev, |details| {
        if let Some(crypto) = &mut details.crypto {
            crypto.key_name = key_name;
        }
    });
    rotation.conclude(bdev).await;
    if let Some(path) = control.config.state_dir().map(|dir| journal_in(dir, name))
        && let Err(error) = blocking(move || rekey::remove_journal(&path)).await?
    {
        tracing::warn!(disk = name, %error, "cannot remove the journal of the rotation, which is complete");
    }
    Ok(())
}

/// Logs what is needed to create a disk again that is removed while its key is rotated.
pub(super) fn tell_removal(control: &Control, disk: &str) {
    let rotation = control.disks.find(disk).ok().and_then(|bdev| Some((rekey::Rekey::of(&bdev)?, bdev)));
    let Some((dir, (_, bdev))) = control.config.state_dir().zip(rotation) else { return };
    let journal = journal_in(dir, bdev.name());
    let key = noted(control, bdev.name()).map(|rekey| rekey.key_name);
    tracing::warn!(
        disk = bdev.name(),
        key,
        journal = %journal.display(),
        "the disk is removed while its key is rotated: only bdev_crypto_create with `rekey` and the journal can read it"
    );
}

async fn stop(control: &Control, p: Name) -> Result<bool, Error> {
    let bdev = control.disks.find_made_by(&[MODULE], &p.name)?;
    let _busy = control.rekeys.begin(bdev.name())?;
    let rotation = rekey::Rekey::of(&bdev);
    let Some((rotation, rekey)) = rotation.zip(noted(control, bdev.name())) else {
        return Err(Error::errno(Errno::NOENT, "the key of the disk is not being rotated"));
    };
    let stopped = json!(Rekey { stopped: true, ..rekey });
    control.config.changed(Subsystem::Bdev, bdev.name(), REKEY, stopped);
    rotation.stop().await;
    Ok(true)
}
