//! The rotation of a disk's key: all blocks are encrypted again with another key, while the disk is in use. Control context.
//!
//! AES-XTS has no room to store which key a block has, so the rotation goes through the disk from its first block to its last,
//! and a position separates the blocks with the new key from those with the old one. It encrypts one zone after the other
//! (`rotation`): no request reads or writes the zone in the meantime, and a journal (`journal`) makes the change of a zone
//! atomic, also if the process or the host dies. The journal is authoritative: it holds the position, and check values by which
//! the two keys are recognised.
//!
//! A disk with a rotation is registered with both keys. If its journal holds a zone, no reactor is prepared for channels of the
//! disk before an attempt was made to write that zone again.

mod journal;
mod rotation;
mod worker;

pub use journal::{Journal, JournalError, remove_journal};
pub(crate) use rotation::Rotation;

use crate::epoch::{Cipher, Epoch};
use crate::tweaks::Layout;
use crate::{Crypto, TweakError, TweakMode};
use aryk_aes_xts::{Key, SectorSize, Tweaks};
use aryk_bdev::{Bdev, Blocks, Env, Lba};
use std::ops::Range;
use std::sync::Arc;

/// Bytes by which a key is recognised: a constant, encrypted with it. No key material can be derived from them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CheckValue([u8; 32]);

/// The check value of a key with a tweak mode, on disks with blocks of `block_size` bytes.
///
/// # Errors
/// [`TweakError`].
pub fn check_value(key: &Key, mode: TweakMode, block_size: u32) -> Result<CheckValue, TweakError> {
    Ok(check_value_of(key, &Layout::new(mode, block_size)?))
}

fn check_value_of(key: &Key, layout: &Layout) -> CheckValue {
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(&layout.fingerprint());
    let whole = SectorSize::new(bytes.len()).expect("a multiple of 16 bytes");
    // No sector of a disk has this tweak: its LBA would be beyond the end of all disks.
    let tweaks = Tweaks { start: u128::MAX, step: 0 };
    key.encrypt_in_place(whole, tweaks, &mut bytes).expect("one sector");
    CheckValue(bytes)
}

/// Parameters of a rotation.
#[derive(Debug)]
pub struct Config {
    /// The new key.
    pub key: Arc<Key>,
    /// The tweak mode of the new key.
    pub tweak_mode: TweakMode,
    /// The journal of the rotation.
    pub journal: Journal,
    /// Bytes of the disk that are encrypted again in a second, at most; 0 for no limit.
    pub bytes_per_second: u64,
}

/// Why a rotation does not begin or does not go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The journal is that of a rotation between other keys.
    #[error("the journal {} belongs to a rotation between other keys", .0.display())]
    OtherKeys(std::path::PathBuf),
    /// The journal is that of a rotation of a disk on another base.
    #[error("the journal {} belongs to a rotation of another disk", .0.display())]
    OtherDisk(std::path::PathBuf),
    /// The disk cannot be created, or is being removed.
    #[error(transparent)]
    Create(#[from] crate::Error),
    /// The tweak mode of the new key does not fit the disk.
    #[error(transparent)]
    Tweak(#[from] TweakError),
    /// The disk has a rotation.
    #[error("a key rotation of the disk is not complete")]
    UnderWay,
    /// The disk is none of this module.
    #[error("the disk is not an encrypted disk")]
    OtherModule,
    /// The journal's thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
    /// No reactor takes the work.
    #[error("no reactor runs")]
    NoReactor,
}

/// How far a rotation is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Blocks that have the new key.
    pub done: Blocks,
    /// Blocks of the disk.
    pub blocks: Blocks,
    /// What the rotation does.
    pub state: State,
    /// The blocks of which it is unknown what is stored, because a write of the base or of the journal failed: requests for them
    /// fail until the rotation goes on.
    pub unavailable: Option<Range<Lba>>,
}

/// What a rotation does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// It goes on.
    Running,
    /// It was stopped. Both keys are in use.
    Stopped,
    /// It has stopped because of an error. Both keys are in use.
    Failed(String),
    /// All blocks have the new key.
    Complete,
}

/// The rotation of a disk.
#[derive(Clone, Debug)]
pub struct Rekey(Arc<Rotation>);

impl Rekey {
    /// The rotation of a disk, if one is not complete, or is complete and [`Rekey::conclude`] was not called.
    pub fn of(bdev: &Bdev) -> Option<Self> {
        bdev.device_as::<Crypto>()?.rotation().map(Self)
    }

    /// Begins a rotation of a disk in use, with a new journal. It does not run before [`Rekey::run`].
    ///
    /// # Errors
    /// [`Error`].
    pub fn begin(bdev: &Arc<Bdev>, config: Config) -> Result<Self, Error> {
        let crypto = bdev.device_as::<Crypto>().ok_or(Error::OtherModule)?;
        let mut slot = crypto.lock_rotation();
        if slot.is_some() {
            return Err(Error::UnderWay);
        }
        // A removal that begins later finds the rotation.
        if bdev.is_removing() {
            return Err(removed(bdev.name()));
        }
        // The other hosts would not know which blocks have the new key.
        if crypto.base.bdev().device().limits().has_other_hosts {
            let (name, owner) = (crypto.base.bdev().name().to_owned(), "other hosts".to_owned());
            return Err(Error::Create(aryk_bdev::Error::Claimed { name, owner }.into()));
        }
        if !config.journal.is_untouched() {
            return Err(JournalError::Exists(config.journal.path().to_owned()).into());
        }
        let current = crypto.epochs.last().cipher.clone();
        let (epoch, rotation) = prepare(crypto, current, config)?;
        rotation.attach(bdev);
        crypto.epochs.follow(epoch);
        *slot = Some(Arc::clone(&rotation));
        Ok(Self(rotation))
    }

    /// Makes the rotation go on, from where it was stopped or has failed, with at most so many bytes in a second; 0 for no limit.
    ///
    /// # Errors
    /// [`Error::NoReactor`]; [`Error::Create`] while the disk is being removed.
    pub fn run(&self, env: &Env, bytes_per_second: u64) -> Result<(), Error> {
        self.0.run(env, bytes_per_second)
    }

    /// Stops the rotation after the zone in work. It can go on later.
    pub async fn stop(&self) {
        self.0.stop().await;
    }

    /// How far the rotation is.
    pub fn progress(&self) -> Progress {
        self.0.progress()
    }

    /// Waits until the rotation is complete, has failed, or was stopped.
    pub async fn ended(&self) -> State {
        self.0.ended().await
    }

    /// Ends a rotation that is complete: the disk has one key, the new one, and channels drop the old one. The caller has
    /// recorded that, and removes the journal afterwards.
    pub async fn conclude(&self, bdev: &Arc<Bdev>) {
        let Some(crypto) = bdev.device_as::<Crypto>() else { return };
        {
            let mut slot = crypto.lock_rotation();
            let is_ours = slot.as_ref().is_some_and(|rotation| Arc::ptr_eq(rotation, &self.0));
            if !is_ours || self.0.progress().state != State::Complete {
                return;
            }
            *slot = None;
            let last = crypto.epochs.last();
            let next = last.next.as_ref().expect("a rotation is between two keys");
            crypto.epochs.follow(Epoch::settled(next.cipher.clone()));
        }
        bdev.wake_channels().await;
    }
}

/// The error for a disk that is being removed.
fn removed(disk: &str) -> Error {
    Error::Create(aryk_bdev::Error::Busy(disk.to_owned()).into())
}

/// Checks that a journal fits a disk and its keys, and returns the disk's keys and the rotation.
pub(crate) fn prepare(
    crypto: &Crypto,
    current: Cipher,
    config: Config,
) -> Result<(Arc<Epoch>, Arc<Rotation>), Error> {
    let Config { key, tweak_mode, journal, bytes_per_second } = config;
    let block_size = current.layout.block_size;
    // As when the disk is created with the new key only.
    let layout = Layout::new(tweak_mode, crypto.base.bdev().geometry().block_size)?;
    if layout.block_size != block_size {
        return Err(TweakError::OtherBlocks(layout.block_size, block_size).into());
    }
    if check_value_of(&key, &current.layout) == check_value_of(&current.key, &current.layout) {
        return Err(TweakError::SameKey.into());
    }
    let next = Cipher { key, layout };
    let is_ours = journal.block_size() == block_size
        && journal.is_from(check_value_of(&current.key, &current.layout))
        && journal.is_to(check_value_of(&next.key, &next.layout));
    if !is_ours {
        return Err(Error::OtherKeys(journal.path().to_owned()));
    }
    if journal.base() != crypto.base.bdev().identity().uuid.into_bytes() {
        return Err(Error::OtherDisk(journal.path().to_owned()));
    }
    let epoch = Epoch::of_two(current, next, journal.position());
    if let Some(end) = journal.zone_end() {
        epoch.next.as_ref().expect("just made").break_zone(end);
    }
    let rotation = Rotation::new(crypto, Arc::clone(&epoch), journal, bytes_per_second)?;
    Ok((epoch, rotation))
}
