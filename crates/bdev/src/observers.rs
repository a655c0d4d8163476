//! Observers of all disks of a registry. Control context.

use crate::Bdev;
use std::fmt;

/// What happened to a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Change {
    /// It can be found and opened.
    Added,
    /// It is gone, and its name is free.
    Removed,
    /// It has another number of blocks.
    Resized,
}

type Observer = Box<dyn Fn(Change, &Bdev) + Send + Sync>;

/// The functions that are called for each change.
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
