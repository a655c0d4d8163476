//! The logical units of a process: one of each disk, whoever uses it. Control context.

use crate::{Keeper, Kept, Lun, Nexus, Port};
use aryk_bdev::{Bdev, Descriptor};
use std::cell::{RefCell, RefMut};
use std::collections::HashMap;
use std::sync::{Arc, Weak};

/// What finds what was kept of a disk.
type Find = Box<dyn Fn(&Bdev) -> Option<Kept>>;

#[derive(Default)]
struct Inner {
    /// By their disks' serial numbers; a unit lives as long as its disk.
    all: HashMap<u64, (Weak<Bdev>, Arc<Lun>)>,
    /// So many were there when those whose disks are gone were last looked for.
    live: usize,
    kept: Option<(Keeper, Find)>,
}

/// The logical units.
#[derive(Default)]
pub struct Units(RefCell<Inner>);

impl std::fmt::Debug for Units {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Units").field("units", &self.0.borrow().all.len()).finish_non_exhaustive()
    }
}

impl Units {
    /// From now on what initiators set outlives the process: `keeper` hears of it, and `find` knows what was kept before. No unit is there yet.
    pub fn keep(&self, keeper: Keeper, find: impl Fn(&Bdev) -> Option<Kept> + 'static) {
        self.inner().kept = Some((keeper, Box::new(find)));
    }

    /// An initiator's use of a disk, by this port of the disk's target, in which it is the unit of that number. What it has registered before is its again.
    pub fn nexus(&self, disk: Descriptor, port: Port, number: u16) -> Arc<Nexus> {
        let lun = self.inner().unit(disk.bdev());
        lun.nexus(disk, port, number)
    }

    /// Whether initiators have registered with a disk to reserve it: it is then for those alone who heed that.
    pub fn is_registered(&self, disk: &Bdev) -> bool {
        let inner = self.inner();
        match (inner.all.get(&disk.serial()), &inner.kept) {
            (Some((_, lun)), _) => lun.has_registrations(),
            (None, Some((_, find))) => find(disk).is_some_and(|kept| !kept.registrations.is_empty()),
            (None, None) => false,
        }
    }

    fn inner(&self) -> RefMut<'_, Inner> {
        self.0.borrow_mut()
    }
}

impl Inner {
    fn unit(&mut self, disk: &Arc<Bdev>) -> Arc<Lun> {
        if let Some((_, lun)) = self.all.get(&disk.serial()) {
            return Arc::clone(lun);
        }
        if self.all.len() >= 2 * self.live + 16 {
            self.all.retain(|_, (disk, _)| disk.strong_count() > 0);
            self.live = self.all.len();
        }
        let (keeper, kept) = match &self.kept {
            Some((keeper, find)) => (Some(keeper.clone()), find(disk)),
            None => (None, None),
        };
        let lun = Lun::new(disk.name(), keeper, kept.unwrap_or_default());
        self.all.insert(disk.serial(), (Arc::downgrade(disk), Arc::clone(&lun)));
        lun
    }
}
