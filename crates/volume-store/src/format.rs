//! Creating a pool on a disk. Any context.
//!
//! The disk is looked at first: the data of others, and another pool, are destroyed only by force. Then both superblocks are
//! cleared. The new ones are written after the first checkpoint, so that a pool whose creation was interrupted does not exist.

use crate::disk::{DiskDone, DiskOp};
use crate::erase::Erasing;
use crate::error::Error;
use crate::journal::{FIRST_GENERATION, Start};
use crate::layout::{self, Options};
use crate::open::{Base, Reading, occupant};
use crate::store::Store;
use crate::superblock::{Superblock, is_name};

/// A search for what a new pool would destroy.
#[derive(Debug)]
pub struct Looking {
    reading: Reading,
    base: Base,
}

impl Looking {
    /// Begins to look at a disk.
    pub fn new(base: Base) -> Self {
        let mut reading = Reading::new(base);
        reading.want(0..1);
        Self { reading, base }
    }

    /// The next operation for the disk.
    pub fn next_op(&mut self) -> Option<DiskOp> {
        self.reading.next_op()
    }

    /// An operation has ended. Returns the result, once there is one: an error if the disk has something.
    pub fn completed(&mut self, done: DiskDone) -> Option<Result<(), Error>> {
        if !self.reading.completed(done) {
            return None;
        }
        match occupant(self.reading.known(), self.base) {
            Ok(found) => Some(found),
            Err(range) => {
                self.reading.want(range);
                None
            }
        }
    }
}

/// The creation of a pool, or of a shard of it.
#[derive(Debug)]
pub struct Formatting {
    superblock: Superblock,
    base: Base,
    step: Step,
}

#[derive(Debug)]
enum Step {
    Look(Looking),
    Erase(Erasing),
}

impl Formatting {
    /// Begins to create a pool on a disk: that of a shard ([`crate::share_bytes`]), if the pool has several. With `force`,
    /// whatever the disk has is destroyed.
    ///
    /// # Errors
    /// If no pool of these options fits on the disk.
    pub fn new(base: Base, options: &Options, force: bool) -> Result<Self, Error> {
        if !is_name(&options.name) {
            return Err(Error::Name);
        }
        if base.block > options.alignment {
            return Err(Error::BlockSize { disk: base.block, pool: options.alignment });
        }
        let superblock = layout::create(options, base.bytes)?;
        let step = if force { Step::Erase(Erasing::new(base)) } else { Step::Look(Looking::new(base)) };
        Ok(Self { superblock, base, step })
    }

    /// The next operation for the base disk.
    pub fn next_op(&mut self) -> Option<DiskOp> {
        match &mut self.step {
            Step::Look(looking) => looking.next_op(),
            Step::Erase(erasing) => erasing.next_op(),
        }
    }

    /// An operation has ended. Returns the result of the creation, once there is one: a store whose first operation is to be a
    /// checkpoint, with which the pool begins to exist.
    pub fn completed(&mut self, done: DiskDone) -> Option<Result<Box<Store>, Error>> {
        let erased = match &mut self.step {
            Step::Erase(erasing) => erasing.completed(done)?,
            Step::Look(looking) => match looking.completed(done)? {
                Ok(()) => {
                    self.step = Step::Erase(Erasing::new(self.base));
                    return None;
                }
                Err(error) => Err(error),
            },
        };
        Some(erased.map(|()| {
            let superblock = self.superblock.clone();
            let (end, patches, stale_copy) = (None, Vec::new(), None);
            let (first_page, lost, next_copy) = (Vec::new(), None, (0, 1));
            let generation = FIRST_GENERATION - 1;
            Box::new(Store::new(Start {
                superblock,
                end,
                generation,
                patches,
                stale_copy,
                first_page,
                lost,
                next_copy,
            }))
        }))
    }
}

#[cfg(test)]
mod tests;
