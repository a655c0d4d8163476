//! All disks of the process. Control context: any thread that runs no reactor.

use crate::bdev::{Claim, Listener, lock};
use crate::observers::{Change, Observers};
use crate::{
    BaseEvent, Bdev, Blocks, BoxFuture, Descriptor, Device, Event, Geometry, Identity, Memory, Stay,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Why a disk cannot be registered, found, opened or removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Another disk has that name, alias or UUID.
    #[error("a disk named `{0}` exists already")]
    Exists(String),
    /// No disk has that name.
    #[error("there is no disk named `{0}`")]
    NotFound(String),
    /// The claim of another opener forbids it.
    #[error("`{name}` is in use by {owner}")]
    Claimed {
        /// The disk.
        name: String,
        /// The opener that holds the claim.
        owner: String,
    },
    /// The disk is being removed.
    #[error("`{0}` is being removed")]
    Busy(String),
    /// Another QoS group has that name.
    #[error("a QoS group named `{0}` exists already")]
    GroupExists(String),
    /// No group has that name.
    #[error("there is no QoS group named `{0}`")]
    NoGroup(String),
    /// The disk is in another group, or in none.
    #[error("`{disk}` is not in the QoS group `{group}`")]
    NotInGroup {
        /// The disk.
        disk: String,
        /// The group.
        group: String,
    },
    /// The group has members.
    #[error("the QoS group `{group}` has {by} in it")]
    GroupInUse {
        /// The group.
        group: String,
        /// The members.
        by: String,
    },
    /// The group would be nested too deeply.
    #[error("`{0}` would be within more than {max} QoS groups", max = crate::GROUP_DEPTH - 1)]
    GroupDepth(String),
    /// The limits are invalid.
    #[error(transparent)]
    Limits(#[from] aryk_qos::LimitsError),
    /// The block size is invalid.
    #[error("a block size of {0} is not a power of two from 512 on")]
    BlockSize(u32),
    /// The disk has more bytes than a `u64` counts.
    #[error("a disk of {blocks} blocks of {block_size} bytes is larger than 2^64 - 1 bytes")]
    TooLarge {
        /// The number of blocks.
        blocks: Blocks,
        /// Bytes in each.
        block_size: u32,
    },
}

/// How a disk is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// For a few reads of the daemon's own, which end soon. It is no user of the disk ([`Bdev::openers`]).
    Probe,
    /// For reads only.
    Read,
    /// For reads, while nobody writes: other openers may read.
    Frozen,
    /// For reads and writes; other openers may write too.
    Shared,
    /// For reads and writes, as the only writer.
    Exclusive,
}

/// A step of a disk's removal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RemovalStep {
    /// All openers have closed the disk, and its device closes ([`Device::close`]). Nothing is in flight any more.
    Closing,
    /// The disk is gone.
    Gone,
}

/// The number of the next disk. A reactor may have disks of several registries, so the numbers are the process's.
static SERIALS: AtomicU64 = AtomicU64::new(1);

#[derive(Debug, Default)]
struct Inner {
    /// In the order of registration.
    disks: Vec<Arc<Bdev>>,
    /// By name, alias and UUID.
    names: HashMap<String, Arc<Bdev>>,
    observers: Observers,
}

/// The disks of a process, by name, and the guests' memory that their devices register.
#[derive(Debug, Default)]
pub struct Registry {
    inner: Mutex<Inner>,
    memory: Memory,
}

impl Inner {
    fn made_of(&self, base: &Arc<Bdev>) -> Vec<Arc<Bdev>> {
        let is_on = |b: &&Arc<Bdev>| b.device().bases().iter().any(|x| Arc::ptr_eq(x, base));
        self.disks.iter().filter(is_on).cloned().collect()
    }

    /// Notes that the store of `bdev` is away or back, also for the disks on top of it that have no other base.
    fn set_stalled(&self, bdev: &Arc<Bdev>, is_stalled: bool) {
        if bdev.set_stalled(is_stalled) {
            self.observers.report(if is_stalled { Change::Stalled } else { Change::Resumed }, bdev);
        }
        for above in self.made_of(bdev) {
            if above.device().bases().len() == 1 {
                self.set_stalled(&above, is_stalled);
            }
        }
    }

    /// Asks each disk that is made of `bdev` whether it stays, and adds `bdev` to `order` behind those that do not.
    fn find_doomed(&self, bdev: &Arc<Bdev>, order: &mut Vec<Arc<Bdev>>) {
        let is_known = |bdev: &Arc<Bdev>, order: &[Arc<Bdev>]| {
            bdev.is_doomed() || order.iter().any(|b| Arc::ptr_eq(b, bdev))
        };
        for above in self.made_of(bdev) {
            if is_known(&above, order) {
                continue;
            }
            match above.device().base_event(bdev, BaseEvent::Removing) {
                Stay::Stay => bdev.add_staying(&above),
                Stay::Remove => self.find_doomed(&above, order),
            }
        }
        order.push(Arc::clone(bdev));
    }
}

/// Disks that a removal has marked as doomed, the next one to remove last.
struct Doomed<'a> {
    registry: &'a Registry,
    left: Vec<Arc<Bdev>>,
}

impl Drop for Doomed<'_> {
    fn drop(&mut self) {
        let _inner = lock(&self.registry.inner);
        self.left.iter().for_each(|b| b.set_doomed(false));
    }
}

/// Checks that the bytes of a disk fit a `u64`, so that each number of its blocks converts exactly.
fn check_size(blocks: Blocks, block_size: u32) -> Result<(), Error> {
    blocks.checked_to_bytes(block_size).map(drop).ok_or(Error::TooLarge { blocks, block_size })
}

fn names(identity: &Identity) -> Vec<String> {
    let mut names = vec![identity.name.clone(), identity.uuid.to_string()];
    names.extend(identity.aliases.iter().cloned());
    names
}

impl Registry {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// The memory of all guests. Front-ends announce it here, and devices that access it by themselves register it.
    pub const fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Calls `observer` for each disk that is added, removed, resized, stalled or resumed from now on, by a call or by its
    /// module, in the order of these changes.
    ///
    /// `observer` runs in control context, on any thread, while the registry is locked: it must do no more than pass the news on.
    pub fn observe(&self, observer: impl Fn(Change, &Bdev) + Send + Sync + 'static) {
        lock(&self.inner).observers.add(observer);
    }

    /// Registers a disk.
    ///
    /// # Errors
    /// [`Error::Exists`], [`Error::BlockSize`], [`Error::TooLarge`]; [`Error::Busy`] if one of its bases is being removed.
    pub fn register(&self, identity: Identity, device: Arc<dyn Device>) -> Result<Arc<Bdev>, Error> {
        let Geometry { block_size, blocks, .. } = device.geometry();
        if !block_size.is_power_of_two() || block_size < 512 {
            return Err(Error::BlockSize(block_size));
        }
        check_size(blocks, block_size)?;
        let mut inner = lock(&self.inner);
        let names = names(&identity);
        if let Some(taken) = names.iter().find(|n| inner.names.contains_key(*n)) {
            return Err(Error::Exists(taken.clone()));
        }
        if let Some(base) = device.bases().iter().find(|b| b.is_doomed()) {
            return Err(Error::Busy(base.name().to_owned()));
        }
        let serial = SERIALS.fetch_add(1, Ordering::Relaxed);
        let bdev = Arc::new(Bdev::new(serial, identity, device));
        inner.names.extend(names.into_iter().map(|n| (n, Arc::clone(&bdev))));
        inner.disks.push(Arc::clone(&bdev));
        inner.observers.report(Change::Added, &bdev);
        if let [base] = &*bdev.device().bases()
            && base.is_stalled()
        {
            inner.set_stalled(&bdev, true);
        }
        Ok(bdev)
    }

    /// The disk with this name, alias or UUID.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn find(&self, name: &str) -> Result<Arc<Bdev>, Error> {
        let inner = lock(&self.inner);
        let by_uuid = || {
            inner
                .names
                .get(&name.to_ascii_lowercase())
                .filter(|b| b.identity().uuid.to_string() == name.to_ascii_lowercase())
        };
        let found = inner.names.get(name).or_else(by_uuid);
        found.cloned().ok_or_else(|| Error::NotFound(name.to_owned()))
    }

    /// All disks, in the order of registration.
    pub fn list(&self) -> Vec<Arc<Bdev>> {
        lock(&self.inner).disks.clone()
    }

    /// Opens a disk for `owner`. Events of the disk go to `listener`.
    ///
    /// `listener` runs in control context, and must only pass the event on.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Claimed`]; [`Error::Busy`] while the disk is being removed.
    pub fn open(
        &self,
        name: &str,
        access: Access,
        owner: &str,
        listener: impl Fn(Event) + Send + Sync + 'static,
    ) -> Result<Descriptor, Error> {
        let bdev = self.find(name)?;
        // The lock orders this with a removal: either the removal finds this opener, or the disk is doomed here.
        let _inner = lock(&self.inner);
        if bdev.is_doomed() {
            return Err(Error::Busy(bdev.name().to_owned()));
        }
        let claim = match access {
            Access::Probe => Claim::Probe,
            Access::Read => Claim::None,
            Access::Frozen => Claim::Frozen,
            Access::Shared => Claim::Shared,
            Access::Exclusive => Claim::Exclusive,
        };
        let listener: Listener = Arc::new(listener);
        let clash = |owner| Error::Claimed { name: bdev.name().to_owned(), owner };
        bdev.open(claim, owner, listener).map_err(clash)
    }

    /// Removes a disk, and before it the disks that are made of it and do not stay without it ([`Device::base_event`]). New
    /// requests fail, requests in flight complete, and openers get [`Event::Removed`]. When the last opener has closed the disk
    /// and the device is closed ([`Device::close`]), the disk is gone. Requests that are in flight after ten seconds are aborted.
    ///
    /// If the future is dropped, the disk stays and fails its requests; it may be removed again.
    ///
    /// # Errors
    /// [`Error::NotFound`]; [`Error::Busy`] if another removal is under way.
    pub async fn remove(&self, name: &str) -> Result<(), Error> {
        self.remove_telling(name, |_, _| {}).await
    }

    /// As [`Registry::remove`]; `tell` is called at the steps of each disk.
    ///
    /// # Errors
    /// As [`Registry::remove`].
    pub async fn remove_telling(&self, name: &str, tell: impl Fn(RemovalStep, &str)) -> Result<(), Error> {
        let mut doomed = self.doom(name)?;
        for bdev in &doomed.left {
            bdev.part_from_staying().await;
        }
        while let Some(bdev) = doomed.left.last() {
            bdev.begin_removal().await;
            bdev.closed_by_all().await;
            tell(RemovalStep::Closing, bdev.name());
            // The name is freed last, so that a successor does not find the store in use.
            bdev.close_device().await;
            self.forget(bdev);
            tell(RemovalStep::Gone, bdev.name());
            doomed.left.pop();
        }
        Ok(())
    }

    /// Marks a disk and all disks that are removed with it as doomed: they can no longer be opened. A disk that another removal
    /// has marked is left to that one.
    fn doom(&self, name: &str) -> Result<Doomed<'_>, Error> {
        let bdev = self.find(name)?;
        let inner = lock(&self.inner);
        if bdev.is_doomed() {
            return Err(Error::Busy(bdev.name().to_owned()));
        }
        let mut left = Vec::new();
        inner.find_doomed(&bdev, &mut left);
        assert!(left.iter().all(|b| !b.is_doomed()), "a disk belongs to one removal");
        left.reverse();
        left.iter().for_each(|b| b.set_doomed(true));
        Ok(Doomed { registry: self, left })
    }

    fn forget(&self, bdev: &Arc<Bdev>) {
        let mut inner = lock(&self.inner);
        let before = inner.disks.len();
        inner.disks.retain(|b| !Arc::ptr_eq(b, bdev));
        assert!(inner.disks.len() + 1 == before, "a disk is removed once");
        let aliases = bdev.aliases();
        for name in names(&Identity { aliases, ..bdev.identity().clone() }) {
            // An alias may repeat another name of the disk.
            let removed = inner.names.remove(&name);
            assert!(removed.is_none_or(|named| Arc::ptr_eq(&named, bdev)), "`{name}` leads to one disk");
        }
        inner.observers.report(Change::Removed, bdev);
    }

    /// A module gives its disk other aliases.
    ///
    /// # Errors
    /// [`Error::NotFound`]: the disk is not registered. [`Error::Exists`]: another disk has one of the names.
    pub fn set_aliases(&self, bdev: &Arc<Bdev>, aliases: Vec<String>) -> Result<(), Error> {
        let mut inner = lock(&self.inner);
        if !inner.disks.iter().any(|known| Arc::ptr_eq(known, bdev)) {
            return Err(Error::NotFound(bdev.name().to_owned()));
        }
        let is_others =
            |name: &&String| inner.names.get(*name).is_some_and(|named| !Arc::ptr_eq(named, bdev));
        if let Some(taken) = aliases.iter().find(is_others) {
            return Err(Error::Exists(taken.clone()));
        }
        let (own, uuid) = (bdev.name(), bdev.identity().uuid.to_string());
        for old in bdev.aliases().iter().filter(|old| **old != own && **old != uuid) {
            inner.names.remove(old);
        }
        inner.names.extend(aliases.iter().map(|alias| (alias.clone(), Arc::clone(bdev))));
        bdev.set_aliases(aliases);
        Ok(())
    }

    /// A module reports that its disk has another size. Openers get [`Event::Resized`], and disks that are made of it follow.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::TooLarge`]: the disk keeps its size. [`Error::TooLarge`] also if a disk above keeps its size
    /// for this reason; the other disks follow.
    pub fn resized(&self, name: &str, blocks: Blocks) -> Result<(), Error> {
        self.set_size(&self.find(name)?, blocks)
    }

    /// As [`Registry::resized`], for a module that does not know whether another disk has the name of its disk by now.
    ///
    /// # Errors
    /// As [`Registry::resized`].
    pub fn set_size(&self, bdev: &Arc<Bdev>, blocks: Blocks) -> Result<(), Error> {
        if !lock(&self.inner).disks.iter().any(|known| Arc::ptr_eq(known, bdev)) {
            return Err(Error::NotFound(bdev.name().to_owned()));
        }
        check_size(blocks, bdev.device().geometry().block_size)?;
        let before = bdev.blocks();
        bdev.set_blocks(blocks);
        let above = {
            let inner = lock(&self.inner);
            if before != blocks {
                inner.observers.report(Change::Resized, bdev);
            }
            inner.made_of(bdev)
        };
        let mut result = Ok(());
        for above in above {
            let followed = above.device().base_resized().map(|blocks| self.resized(above.name(), blocks));
            match followed {
                // The disk above has been removed meanwhile.
                None | Some(Ok(()) | Err(Error::NotFound(_))) => {}
                Some(failed) => result = failed,
            }
        }
        result
    }

    /// A module reports that the store of its disk is away for a time, so that requests wait, or that it is back. Disks that are
    /// made of this disk alone are stalled with it; the module of a disk with several bases decides for that disk.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn stalled(&self, name: &str, is_stalled: bool) -> Result<(), Error> {
        // Its removal is reported under this lock, and nothing after it.
        let inner = lock(&self.inner);
        let bdev = inner.names.get(name).ok_or_else(|| Error::NotFound(name.to_owned()))?;
        inner.set_stalled(bdev, is_stalled);
        Ok(())
    }

    /// A module reports that the limits, the operations or the read-only state of its disk have changed. Every channel has
    /// applied the new ones when the future is ready, openers have got [`Event::Changed`], and disks that are made of it have
    /// followed. A request that was submitted before completes under the old ones: the device still answers it, with a failure if
    /// need be.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub async fn changed(&self, name: &str) -> Result<(), Error> {
        let bdev = self.find(name)?;
        self.follow_change(&bdev).await;
        Ok(())
    }

    fn follow_change<'a>(&'a self, bdev: &'a Arc<Bdev>) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            bdev.reload_properties().await;
            let above = lock(&self.inner).made_of(bdev);
            for above in &above {
                // The answer matters for a removal only.
                above.device().base_event(bdev, BaseEvent::Changed);
                above.tell_channels(bdev, BaseEvent::Changed).await;
                self.follow_change(above).await;
            }
        })
    }
}

#[cfg(test)]
mod tests;
