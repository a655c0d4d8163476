//! Observers of all disks of a registry. Control context.

use crate::Bdev;
use std::fmt;

/// An event of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// The disk was registered: it can be found and opened.
    Added,
    /// The disk was removed, and its name is free.
    Removed,
    /// The disk's number of blocks has changed.
    Resized,
    /// The disk's store is away: requests wait, or fail after a while ([`Bdev::is_stalled`]).
    Stalled,
    /// The store is back, and requests go on. A stalled disk may also be removed, without this.
    Resumed,
}

type Observer = Box<dyn Fn(Change, &Bdev) + Send + Sync>;

/// The functions that are called for each event.
#[derive(Default)]
pub(crate) struct Observers(Vec<Observer>);

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} observers", self.0.len())
    }
}

impl Observers {
    pub fn add(&mut self, observer: impl Fn(Change, &Bdev) + Send + Sync + 'static) {
        self.0.push(Box::new(observer));
    }

    pub fn report(&self, change: Change, bdev: &Bdev) {
        self.0.iter().for_each(|observer| observer(change, bdev));
    }
}
