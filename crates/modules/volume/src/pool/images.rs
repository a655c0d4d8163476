//! Disks of other modules on which volumes of a pool depend. Control context.
//!
//! The pool reads such a disk where a volume was not written, and keeps others from writing to it. While the disk is absent, the
//! volumes that depend on it have no disks.

use super::{Image, Pool, lock};
use crate::Error;
use crate::device::VolumeDisk;
use aryk_bdev::{Access, Bdev, Event};
use aryk_volume::{Foreign, UNIT};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use uuid::Uuid;

fn units(disk: &Bdev) -> u64 {
    let geometry = disk.geometry();
    geometry.blocks.to_bytes(geometry.block_size).0 / u64::from(UNIT)
}

impl Pool {
    /// Opens a disk for a new volume with blocks of this size.
    pub(super) async fn open_new_image(&self, disk: &str, block_size: u32) -> Result<Foreign, Error> {
        let found = self.env.registry().find(disk)?;
        let refuse = |why| Err(Error::Image { disk: disk.to_owned(), why });
        if found.device_as::<VolumeDisk>().is_some_and(|volume| volume.place.number == self.place.number) {
            return refuse("it is a volume of the same pool; clone a snapshot of it");
        }
        if found.geometry().block_size > block_size {
            return refuse(
                "its blocks are larger than the volume's; create the volume with blocks of 4,096 bytes",
            );
        }
        let image = Image { uuid: found.identity().uuid, name: found.name().to_owned() };
        let stored = image.to_stored();
        self.open_image(&stored, &image.uuid.to_string()).await?;
        Ok(Foreign { name: stored, units: units(&found) })
    }

    /// Opens those of these disks that exist, and closes others.
    pub(super) async fn open_images(&self, needed: BTreeSet<String>) -> Result<(), Error> {
        for stored in &needed {
            let is_open = lock(&self.images).contains_key(stored);
            let Some(image) = Image::from_stored(stored).filter(|_| !is_open) else { continue };
            if let Err(error) = self.open_image(stored, &image.uuid.to_string()).await {
                tracing::warn!(
                    pool = self.name(), disk = image.name, uuid = %image.uuid, %error,
                    "volumes wait for the disk on which they depend"
                );
            }
        }
        lock(&self.images).retain(|stored, _| needed.contains(stored));
        let keep = |owner: &mut crate::owner::Owner, cx: &mut aryk_reactor::Cx| {
            let names = owner.foreign_names();
            owner.keep_foreign(&names, cx);
        };
        self.root.call(keep).await.map_err(|_| Error::Ended)
    }

    async fn open_image(&self, stored: &str, name: &str) -> Result<(), Error> {
        if lock(&self.images).contains_key(stored) {
            return Ok(());
        }
        let signals = Arc::clone(&self.signals);
        let owner = format!("volumes of the pool {}", self.name());
        let disk = self.env.registry().open(name, Access::Frozen, &owner, move |event| {
            if event == Event::Removed {
                signals.is_foreign_removed.store(true, Ordering::Release);
                signals.bell.ring();
            }
        })?;
        let reactor = self.place.owner()?;
        disk.prepare(&reactor).await?;
        let bdev = Arc::clone(disk.bdev());
        let key = stored.to_owned();
        let added = self.root.call(move |owner, cx| owner.add_foreign(key, &disk, cx)).await;
        added.map_err(|_| Error::Ended)??;
        lock(&self.images).insert(stored.to_owned(), bdev);
        Ok(())
    }

    /// Forgets the disks of volumes that were removed with the disk on which they depended.
    pub(crate) fn forget_removed_disks(&self) {
        let mut images = lock(&self.images);
        if images.is_empty() {
            return;
        }
        let registry = self.env.registry();
        let is_there = |disk: &Arc<Bdev>| {
            registry.find(&disk.identity().uuid.to_string()).is_ok_and(|found| Arc::ptr_eq(&found, disk))
        };
        images.retain(|_, disk| is_there(disk));
        for member in lock(&self.members).values_mut() {
            if member.foreign.is_some() && member.disk.as_ref().is_some_and(|disk| !is_there(disk)) {
                member.disk = None;
            }
        }
    }

    /// Whether volumes wait for a disk with this UUID.
    pub fn waits_for(&self, uuid: Uuid) -> bool {
        self.members()
            .iter()
            .any(|member| member.disk.is_none() && member.image().is_some_and(|image| image.uuid == uuid))
    }
}
