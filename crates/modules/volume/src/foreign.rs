//! The disks of other modules that are the bases of volumes of a pool, on the pool's reactor. Reactor context.

use crate::claim::Right;
use crate::disk::{Disk, Ended};
use aryk_bdev::{Descriptor, OpenError};
use aryk_reactor::{Cx, RootId};
use aryk_slots::Key;
use aryk_volume::{ForeignId, ForeignUse, OpId, Shard};
use std::collections::{BTreeMap, HashMap};

/// Who reads.
pub(crate) enum Reader {
    /// A request of a channel, by its key.
    User(Key),
    /// The engine.
    Engine(OpId),
}

struct ForeignDisk {
    name: String,
    descriptor: Descriptor,
    disk: Disk<Reader>,
    /// It is closed when it has completed what it has.
    is_leaving: bool,
}

/// The disks. There are few, and many volumes may have the same.
#[derive(Default)]
pub(crate) struct ForeignDisks {
    disks: Vec<ForeignDisk>,
    /// The names of the disks by their identifiers in the engine.
    names: BTreeMap<ForeignId, String>,
    /// Indices in `disks`.
    places: HashMap<ForeignId, usize>,
}

impl ForeignDisks {
    /// Sets which disk the engine means by which identifier.
    pub fn set_names(&mut self, used: &[ForeignUse]) {
        self.names = used.iter().map(|used| (used.id, used.foreign.name.clone())).collect();
        self.find_places();
    }

    fn find_places(&mut self) {
        let place = |name: &String| self.disks.iter().position(|d| d.name == *name && !d.is_leaving);
        self.places = self.names.iter().filter_map(|(id, name)| Some((*id, place(name)?))).collect();
    }

    /// Opens a channel of a disk.
    pub fn add(
        &mut self,
        name: String,
        descriptor: Descriptor,
        root: RootId,
        cx: &mut Cx,
    ) -> Result<(), OpenError> {
        let disk = Disk::new(descriptor.open_channel(root, cx)?, Shard::ALL);
        self.disks.push(ForeignDisk { name, descriptor, disk, is_leaving: false });
        self.find_places();
        Ok(())
    }

    /// The disks that stay open, with their names.
    pub fn list(&self) -> Vec<(String, Descriptor)> {
        let staying = self.disks.iter().filter(|disk| !disk.is_leaving);
        staying.map(|disk| (disk.name.clone(), disk.descriptor.clone())).collect()
    }

    /// Whether no disk has a request, and what has ended was taken.
    pub fn is_idle(&self) -> bool {
        self.disks.iter().all(|disk| disk.disk.is_idle())
    }

    /// The disk with this identifier, if it is open.
    pub fn find(&mut self, id: ForeignId) -> Option<&mut Disk<Reader>> {
        let place = *self.places.get(&id)?;
        Some(&mut self.disks[place].disk)
    }

    /// Closes the disks that are not among these when they have completed what they have.
    pub fn keep(&mut self, names: &[String]) {
        for disk in &mut self.disks {
            disk.is_leaving |= !names.contains(&disk.name);
        }
        self.close_idle();
    }

    /// Closes the disks that are being removed when they have completed what they have.
    pub fn note_removed(&mut self) {
        for disk in &mut self.disks {
            disk.is_leaving |= disk.disk.is_being_removed();
        }
        self.close_idle();
    }

    fn close_idle(&mut self) {
        let before = self.disks.len();
        self.disks.retain(|d| !d.is_leaving || !d.disk.is_idle());
        if self.disks.len() < before {
            self.find_places();
        }
    }

    /// Gives up the reads for whose readers `is_meant` returns true. They end nevertheless.
    pub fn give_up(&mut self, mut is_meant: impl FnMut(&Reader) -> bool, cx: &mut Cx) {
        self.disks.iter_mut().for_each(|disk| disk.disk.give_up(&mut is_meant, cx));
    }

    /// Takes the completions of all disks.
    pub fn poll(&mut self, cx: &mut Cx) {
        self.disks.iter_mut().for_each(|disk| disk.disk.poll(Right::Valid, cx));
        if self.disks.iter().any(|disk| disk.is_leaving) {
            self.close_idle();
        }
    }

    /// The next read that has ended.
    pub fn next_ended(&mut self) -> Option<Ended<Reader>> {
        self.disks.iter_mut().find_map(|disk| disk.disk.next_ended())
    }

    pub fn is_empty(&self) -> bool {
        self.disks.is_empty()
    }
}
