//! Commands that read much of a pool: checks, comparisons, copies. Control context.

use super::{Member, Pool, lock};
use crate::{Copy, Error, NewVolume, Origin};
use aryk_bdev::{Access, Bytes};
use aryk_reactor::{Clock, Nanos};
use aryk_volume::{Answer, BLOCK, CheckReport, Command, Space as VolumeSpace, VolumeId, WhenFull};
use std::collections::BTreeMap;
use std::sync::Arc;
use uuid::Uuid;

/// Bytes of a block of the index.
const BLOCK_BYTES: u64 = BLOCK as u64;

/// The space that volumes and snapshots kept in use at a moment.
#[derive(Debug)]
pub struct SpaceCount {
    /// By volume or snapshot.
    pub of: BTreeMap<VolumeId, VolumeSpace>,
    /// The end of the count, by the monotonic clock.
    pub at: Nanos,
}

impl Pool {
    /// Verifies every reference, and with `data` every checksum. With `repair`, leaked space becomes free.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn check(&self, data: bool, repair: bool) -> Result<CheckReport, Error> {
        match self.command(Command::Check { data, repair }).await? {
            Answer::Check(report) => Ok(report),
            other => unreachable!("the answer to a check is {other:?}"),
        }
    }

    /// Which parts may differ between a snapshot and a later snapshot or the volume itself, as (first byte, bytes) in ascending
    /// order.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn changed(&self, since: VolumeId, until: VolumeId) -> Result<Vec<(u64, u64)>, Error> {
        match self.command(Command::Changed { since, until }).await? {
            Answer::Changed(parts) => {
                let bytes = |(first, blocks)| (first * BLOCK_BYTES, blocks * BLOCK_BYTES);
                Ok(parts.into_iter().map(bytes).collect())
            }
            other => unreachable!("the answer to a comparison is {other:?}"),
        }
    }

    /// Which parts a volume or a snapshot has for itself, as (first byte, bytes) in ascending order: those that were written
    /// since the snapshot before it, or since its creation.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn own(&self, id: VolumeId) -> Result<Vec<(u64, u64)>, Error> {
        match self.command(Command::Own(id)).await? {
            Answer::Changed(parts) => {
                let bytes = |(first, blocks)| (first * BLOCK_BYTES, blocks * BLOCK_BYTES);
                Ok(parts.into_iter().map(bytes).collect())
            }
            other => unreachable!("the answer to a comparison is {other:?}"),
        }
    }

    /// Counts how much space each volume and snapshot keeps in use, which reads the whole index. With `gives_way`, the count ends
    /// when another long command comes. [`Pool::last_count`] returns the result until the next count.
    ///
    /// # Errors
    /// [`Error`]: [`aryk_volume::CommandError::Busy`] if it has given way.
    pub async fn count_space(&self, gives_way: bool) -> Result<Arc<SpaceCount>, Error> {
        let spaces = match self.command(Command::Space { of: Vec::new(), gives_way }).await? {
            Answer::Space(spaces) => spaces,
            other => unreachable!("the answer to a question for space is {other:?}"),
        };
        let of = spaces.into_iter().map(|space| (space.volume, space)).collect();
        let count = Arc::new(SpaceCount { of, at: Clock::Monotonic.now() });
        *lock(&self.last_count) = Some(Arc::clone(&count));
        Ok(count)
    }

    /// The last count of the space of volumes and snapshots, if there was one since the pool was opened.
    pub fn last_count(&self) -> Option<Arc<SpaceCount>> {
        lock(&self.last_count).clone()
    }

    /// Makes a volume, whose disk was removed before, a snapshot of itself. [`Pool::refresh`] creates its disk again.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn freeze(&self, id: VolumeId) -> Result<(), Error> {
        let _changing = self.begin_change().await?;
        self.command(Command::Freeze(id)).await.map(drop)
    }

    /// Gives a volume another base: a snapshot, or a disk of another module. What the volume has for itself stays: it is copied
    /// to a volume on that base, whose content the volume then gets. The volume has no writer meanwhile.
    ///
    /// # Errors
    /// [`Error`]. Nothing has changed then.
    pub async fn set_parent(&self, id: VolumeId, origin: Origin) -> Result<(), Error> {
        let member = lock(&self.members).get(&id).cloned().ok_or(Error::Ended)?;
        let disk = member.disk.as_ref().ok_or(Error::Busy("the volume has no disk"))?;
        let no_writer =
            self.env.registry().open(disk.name(), Access::Frozen, "a change of its parent", |_| ())?;
        let own = self.own(id).await?;
        let new = NewVolume {
            name: format!("{}.new-parent", member.name()),
            uuid: Uuid::new_v4(),
            bytes: Bytes(member.bytes()),
            block_size: member.volume.block_size,
            origin,
            when_full: WhenFull::Fail,
            is_thick: false,
        };
        let made = self.create_volume(new).await?;
        let result = self.move_own(&member, &made, own).await;
        match &result {
            Ok(()) => {}
            Err(Error::Unfinished(_)) => {
                let _changing = self.changing.lock().await;
                // Otherwise, it was finished meanwhile.
                if self.is_mixed(member.uuid()) {
                    self.withdraw(&member, Some(no_writer)).await;
                }
            }
            Err(_) => {
                self.env.registry().remove(&made.uuid().to_string()).await.ok();
                self.delete(made.id).await?;
            }
        }
        result
    }

    /// Copies parts of a volume to another one, whose content the volume then gets.
    async fn move_own(&self, volume: &Member, made: &Member, own: Vec<(u64, u64)>) -> Result<(), Error> {
        let (from, to) = (volume.uuid().to_string(), made.uuid().to_string());
        // Parts beyond the end of a volume that was shrunk are not its own any more.
        let bytes = volume.bytes();
        let inside = own.into_iter().filter(|(start, _)| *start < bytes);
        let parts = inside.map(|(start, len)| (start, len.min(bytes - start))).collect();
        Copy::new(&self.env, &from, &to)?.run(&self.env, parts, Arc::default()).await?;
        self.begin_to_delete(made.id)?;
        self.env.registry().remove(&to).await?;
        let _changing = self.begin_change().await?;
        let adopted = self.command(Command::Adopt { volume: volume.id, from: made.id }).await;
        if let Ok(_) | Err(Error::Unfinished(_)) = adopted {
            lock(&self.members).remove(&made.id);
        }
        self.list_again().await?;
        adopted.map(drop)
    }

    /// Copies what a clone has of its snapshot, after which it is independent.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn inflate(&self, id: VolumeId) -> Result<(), Error> {
        self.command(Command::Inflate(id)).await?;
        self.refresh().await
    }
}
