//! The logical units of a process: one for each disk, shared by all of its initiators. Control context.

use crate::{Lun, Nexus, Port, SaveSender, SavedState};
use aryk_bdev::{Bdev, Descriptor};
use std::cell::{RefCell, RefMut};
use std::collections::HashMap;
use std::sync::{Arc, Weak};

/// Finds the state of a disk that was saved before.
type Find = Box<dyn Fn(&Bdev) -> Option<SavedState>>;

#[derive(Default)]
struct Inner {
    /// Units by their disks' serial numbers; a unit lives as long as its disk.
    all: HashMap<u64, (Weak<Bdev>, Arc<Lun>)>,
    /// Number of live units after the last removal of dead ones.
    live: usize,
    store: Option<(SaveSender, Find)>,
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
    /// Makes state that initiators set outlive the process: `saver` receives the requests to save, and `find` looks up the state
    /// saved before. Must be called before the first unit is created.
    pub fn persist(&self, saver: SaveSender, find: impl Fn(&Bdev) -> Option<SavedState> + 'static) {
        self.inner().store = Some((saver, Box::new(find)));
    }

    /// Creates a nexus of a disk at this port of its target, as the unit with that number. The nexus keeps the registration of
    /// an earlier nexus at the port.
    pub fn nexus(&self, disk: Descriptor, port: Port, number: u16) -> Arc<Nexus> {
        let lun = self.inner().unit(disk.bdev());
        lun.nexus(disk, port, number)
    }

    /// Whether initiators have registered with a disk to reserve it: then only openers that respect reservations may use the
    /// disk.
    pub fn is_registered(&self, disk: &Bdev) -> bool {
        let inner = self.inner();
        match (inner.all.get(&disk.serial()), &inner.store) {
            (Some((_, lun)), _) => lun.has_registrations(),
            (None, Some((_, find))) => {
                find(disk).is_some_and(|saved_state| !saved_state.registrations.is_empty())
            }
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
        let (saver, saved_state) = match &self.store {
            Some((saver, find)) => (Some(saver.clone()), find(disk)),
            None => (None, None),
        };
        let lun = Lun::new(disk.name(), saver, saved_state.unwrap_or_default());
        self.all.insert(disk.serial(), (Arc::downgrade(disk), Arc::clone(&lun)));
        lun
    }
}
