//! Disks of other modules on which volumes of a pool depend. Control context.
//!
//! The pool reads such a disk where a volume was not written, and keeps others from writing to it. While the disk is absent, the
//! volumes that depend on it have no disks.

use super::{Image, Pool, lock};
use crate::Error;
use crate::device::VolumeDisk;
use aryk_bdev::{Access, Bdev, Event};
use aryk_volume::{Foreign, UNIT};
use std::collections::BTreeMap;
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
        if found
            .device_as::<VolumeDisk>()
            .is_some_and(|volume| volume.places[0].number == self.parts[0].place.number)
        {
            return refuse("it is a volume of the same pool; clone a snapshot of it");
        }
        let image_blocks = found.geometry().block_size;
        if image_blocks > block_size {
            return refuse(
                "its blocks are larger than the volume's; create the volume with blocks of 4,096 bytes",
            );
        }
        let image =
            Image { uuid: found.identity().uuid, block_size: image_blocks, name: found.name().to_owned() };
        let foreign = Foreign { name: image.to_stored(), units: units(&found) };
        self.open_image(&foreign, &image).await?;
        Ok(foreign)
    }

    /// Opens those of these disks that exist, and closes others.
    pub(super) async fn open_images(&self, needed: BTreeMap<String, u64>) -> Result<(), Error> {
        for (stored, &units) in &needed {
            let is_open = lock(&self.images).contains_key(stored);
            let Some(image) = Image::from_stored(stored).filter(|_| !is_open) else { continue };
            let foreign = Foreign { name: stored.clone(), units };
            if let Err(error) = self.open_image(&foreign, &image).await {
                tracing::warn!(
                    pool = self.name(), disk = image.name, uuid = %image.uuid, %error,
                    "volumes wait for the disk on which they depend"
                );
            }
        }
        lock(&self.images).retain(|stored, _| needed.contains_key(stored));
        let keep = |owner: &mut crate::owner::Owner, cx: &mut aryk_reactor::Cx| {
            let names = owner.foreign_names();
            owner.keep_foreign(&names, cx);
        };
        for part in &self.parts {
            part.root.call(keep).await.map_err(|_| Error::Ended)?;
        }
        Ok(())
    }

    /// Opens a disk, if it is the one that the volumes were created on: it has the UUID, and is as large as then.
    async fn open_image(&self, foreign: &Foreign, image: &Image) -> Result<(), Error> {
        let stored = &foreign.name;
        if lock(&self.images).contains_key(stored) {
            return Ok(());
        }
        let signals: Vec<_> = self.parts.iter().map(|part| Arc::clone(&part.signals)).collect();
        let name = image.uuid.to_string();
        let owner = format!("volumes of the pool {}", self.name());
        let disk = self.env.registry().open(&name, Access::Frozen, &owner, move |event| {
            if event == Event::Removed {
                for signals in &signals {
                    signals.is_foreign_removed.store(true, Ordering::Release);
                    signals.bell().ring();
                }
            }
        })?;
        let refuse = |why| Err(Error::Image { disk: image.name.clone(), why });
        // A disk may have the text of the UUID as its name.
        if disk.bdev().identity().uuid != image.uuid {
            return refuse("it has another UUID");
        }
        if disk.bdev().geometry().block_size > image.block_size {
            return refuse("its blocks are larger than they were");
        }
        if units(disk.bdev()) < foreign.units {
            return refuse("it is smaller than it was");
        }
        let bdev = Arc::clone(disk.bdev());
        for part in &self.parts {
            loop {
                let reactor = part.place.owner()?;
                disk.prepare(&reactor).await?;
                let (key, disk) = (stored.clone(), disk.clone());
                let added = part.root.call(move |owner, cx| owner.add_foreign(key, &disk, cx)).await;
                match added.map_err(|_| Error::Ended)? {
                    Ok(()) => break,
                    // The part has moved meanwhile.
                    Err(_) if *part.place.owner()? != *reactor => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        lock(&self.images).insert(stored.clone(), bdev);
        Ok(())
    }

    /// Forgets the disks of volumes that were removed with the disk on which they depended.
    pub(crate) fn forget_removed_disks(&self) {
        let mut images = lock(&self.images);
        if images.is_empty() {
            return;
        }
        images.retain(|_, disk| self.is_registered(disk));
        for member in lock(&self.members).values_mut() {
            if member.foreign.is_some() && member.disk.as_ref().is_some_and(|disk| !self.is_registered(disk))
            {
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
