//! Creating a pool on a disk. Any context.
//!
//! The disk is looked at first: the data of others, and another pool, are destroyed only by force. Then both superblocks are
//! cleared. The new ones are written after the first checkpoint, so that a pool whose creation was interrupted does not exist.

use crate::disk::{DiskDone, DiskOp, DiskTag, Purpose};
use crate::erase::Erasing;
use crate::error::Error;
use crate::journal::{FIRST_GENERATION, Start};
use crate::layout::{self, Options};
use crate::open::{Base, Reading, occupant};
use crate::store::Store;
use crate::superblock::{Superblock, is_name};

/// The creation of a pool.
#[derive(Debug)]
pub struct Formatting {
    superblock: Superblock,
    reading: Reading,
    base: Base,
    /// Begins once the disk has been looked at.
    erasing: Option<Erasing>,
}

impl Formatting {
    /// Begins to create a pool. With `force`, whatever the disk has is destroyed.
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
        let mut reading = Reading::new(base);
        if !force {
            reading.want(0..1);
        }
        Ok(Self { superblock, reading, base, erasing: force.then(Erasing::new) })
    }

    /// The next operation for the base disk.
    pub fn next_op(&mut self) -> Option<DiskOp> {
        self.erasing.as_mut().map_or_else(|| self.reading.next_op(), Erasing::next_op)
    }

    /// An operation has ended. Returns the result of the creation, once there is one: a store whose first operation is to be a
    /// checkpoint, with which the pool begins to exist.
    pub fn completed(&mut self, done: DiskDone) -> Option<Result<Box<Store>, Error>> {
        if let DiskTag(Purpose::Opening(_)) = done.tag {
            return if self.reading.completed(done) { self.look().map(Err) } else { None };
        }
        let erased = self.erasing.as_mut().expect("the superblocks are being cleared").completed(done)?;
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

    /// Looks at what is known of the disk, and goes on if the pool may be created.
    fn look(&mut self) -> Option<Error> {
        match occupant(self.reading.known(), self.base) {
            Ok(Ok(())) => self.erasing = Some(Erasing::new()),
            Ok(Err(error)) => return Some(error),
            Err(range) => self.reading.want(range),
        }
        None
    }
}

#[cfg(test)]
mod tests;
