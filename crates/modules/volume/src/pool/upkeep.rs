//! Commands that read much of a pool: checks, comparisons, copies. Control context.

use super::Pool;
use crate::Error;
use aryk_volume::{Answer, BLOCK, CheckReport, Command, Space as VolumeSpace, VolumeId};

/// Bytes of a block of the index.
const BLOCK_BYTES: u64 = BLOCK as u64;

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

    /// How much space these volumes and snapshots keep in use, or all if none is named.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn space_of(&self, volumes: Vec<VolumeId>) -> Result<Vec<VolumeSpace>, Error> {
        match self.command(Command::Space(volumes)).await? {
            Answer::Space(spaces) => Ok(spaces),
            other => unreachable!("the answer to a question for space is {other:?}"),
        }
    }

    /// Makes a volume, whose disk was removed before, a snapshot of itself. [`Pool::refresh`] creates its disk again.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn freeze(&self, id: VolumeId) -> Result<(), Error> {
        let _changing = self.begin_change().await?;
        self.command(Command::Freeze(id)).await.map(drop)
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
