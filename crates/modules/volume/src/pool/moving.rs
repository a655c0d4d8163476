//! Moves of the shards of a pool between reactors. Control context.

use super::Pool;
use crate::part::Part;
use aryk_reactor::{CoreSet, Hold, MoveError};
use std::time::Duration;

impl Pool {
    /// The shard whose thread has that number.
    pub fn shard_of_thread(&self, thread: u64) -> Option<usize> {
        self.parts.iter().position(|part| part.place.thread() == thread)
    }

    fn part(&self, shard: usize) -> Result<&Part, MoveError> {
        self.parts.get(shard).ok_or(MoveError::Ending)
    }

    /// Prepares a reactor for a shard, which may take seconds. Dropping the future cancels that.
    ///
    /// # Errors
    /// [`MoveError::Open`]; [`MoveError::Ending`]: the pool has ended, or does not have the shard.
    pub async fn prepare_move(&self, shard: usize, to: &Hold) -> Result<(), MoveError> {
        self.part(shard)?.prepare(to).await
    }

    /// Moves a shard to a reactor that was prepared. Its volumes are used meanwhile: requests wait for at most `patience`, in
    /// which the base has to complete what it has. If this future is dropped, the move goes on.
    ///
    /// # Errors
    /// [`MoveError`]: the shard stays.
    pub async fn move_shard(&self, shard: usize, to: Hold, patience: Duration) -> Result<(), MoveError> {
        self.part(shard)?.move_to(to, patience).await
    }

    /// Sets the cores on which the scheduler may have a shard run.
    ///
    /// # Errors
    /// [`MoveError::Ending`].
    pub async fn set_shard_cores(&self, shard: usize, cores: CoreSet) -> Result<(), MoveError> {
        let set = self.part(shard)?.root.call(move |owner, cx| owner.set_cores(cores, cx)).await;
        set.map_err(|_| MoveError::Ending)
    }
}
