//! Limits of disks, of groups of disks, and of openers. Control context, except for the functions that channels call.
//!
//! A disk's limits and its group are changed under a short lock, and then each of its channels gets a command to read them
//! again. A channel applies the limits that it reads, so the last change counts, in whatever order the commands arrive.

use crate::bdev::lock;
use crate::cell::Command;
use crate::{Bdev, Error, Registry};
use aryk_qos::{Bucket, Kind, Limiter, Limits, LimitsError};
use aryk_reactor::Nanos;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The token buckets of a channel's requests, from its opener's and the disk's own to the disk's outermost group's, each with the
/// kind that it counts.
pub(crate) type Buckets = Vec<(Kind, Arc<Bucket>)>;

/// The most groups that may be nested.
pub const GROUP_DEPTH: usize = 4;

/// The limits of an opener of disks, for example a host on the network: of all its channels together, whatever disks they are of.
///
/// A channel applies the limits that it was given by [`crate::BdevChannel::limit_opener`], beside those of its disk.
#[derive(Debug, Default)]
pub struct OpenerQos(Mutex<Limiter>);

impl OpenerQos {
    /// The limits.
    pub fn limits(&self) -> Limits {
        *lock(&self.0).limits()
    }

    /// For how long the opener still pays, with its limits, for what it has transferred.
    pub fn debt(&self, now: Nanos) -> Duration {
        let limiter = lock(&self.0);
        let free_from = limiter.buckets().iter().map(|(_, bucket)| bucket.free_from(now.0)).max();
        Duration::from_nanos(free_from.unwrap_or(0).saturating_sub(now.0))
    }

    /// Sets the limits from `now` on. The opener must then call [`crate::BdevChannel::limit_opener`] for each of its channels.
    ///
    /// # Errors
    /// [`LimitsError`]; then nothing has changed.
    pub fn set(&self, limits: Limits, now: Nanos) -> Result<(), LimitsError> {
        lock(&self.0).set(limits, now.0)
    }
}

/// A disk's limits and its group.
#[derive(Debug, Default)]
pub(crate) struct DiskQos {
    limiter: Limiter,
    group: Option<Arc<QosGroup>>,
}

/// A group of disks and of other groups, which share limits.
pub struct QosGroup {
    name: String,
    parent: Option<Arc<Self>>,
    limiter: Mutex<Limiter>,
}

impl fmt::Debug for QosGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QosGroup").field("name", &self.name).finish_non_exhaustive()
    }
}

impl QosGroup {
    /// The name of the group.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The group that contains this group.
    pub const fn parent(&self) -> Option<&Arc<Self>> {
        self.parent.as_ref()
    }

    /// The limits of the group.
    pub fn limits(&self) -> Limits {
        *lock(&self.limiter).limits()
    }

    /// The group, its parent, and so on.
    fn outwards(self: &Arc<Self>) -> impl Iterator<Item = &Arc<Self>> {
        std::iter::successors(Some(self), |group| group.parent.as_ref())
    }
}

impl Bdev {
    /// The limits of the disk itself.
    pub fn qos_limits(&self) -> Limits {
        *lock(self.qos()).limiter.limits()
    }

    /// The group whose limits also apply to the disk.
    pub fn qos_group(&self) -> Option<Arc<QosGroup>> {
        lock(self.qos()).group.clone()
    }

    /// Sets the disk's limits from `now` on, also for waiting requests.
    ///
    /// # Errors
    /// [`Error::Limits`]; then nothing has changed.
    pub async fn set_qos_limits(&self, limits: Limits, now: Nanos) -> Result<(), Error> {
        lock(self.qos()).limiter.set(limits, now.0)?;
        self.look_at_limits().await;
        Ok(())
    }

    /// The buckets of the requests of an opener, if it has limits of its own, or of any.
    pub(crate) fn buckets(&self, opener: Option<&OpenerQos>) -> Buckets {
        let mut buckets = opener.map_or_else(Vec::new, |opener| lock(&opener.0).buckets().to_vec());
        let qos = lock(self.qos());
        buckets.extend(qos.limiter.buckets().iter().cloned());
        for group in qos.group.iter().flat_map(|group| group.outwards()) {
            buckets.extend(lock(&group.limiter).buckets().iter().cloned());
        }
        buckets
    }

    /// Makes the disk's channels read its limits again.
    async fn look_at_limits(&self) {
        self.for_each_channel(|cell, cx| cell.command(Command::LookAtLimits, cx)).await;
    }
}

/// All groups of the process.
#[derive(Debug, Default)]
pub struct QosGroups(Mutex<Vec<Arc<QosGroup>>>);

impl QosGroups {
    /// Creates an empty list of groups.
    pub fn new() -> Self {
        Self::default()
    }

    /// All groups, in the order of their creation: each after its parent.
    pub fn list(&self) -> Vec<Arc<QosGroup>> {
        lock(&self.0).clone()
    }

    /// The group called `name`.
    ///
    /// # Errors
    /// [`Error::NoGroup`].
    pub fn find(&self, name: &str) -> Result<Arc<QosGroup>, Error> {
        find(&lock(&self.0), name)
    }

    /// Creates a group without limits, within the group `parent` if one is given.
    ///
    /// # Errors
    /// [`Error::GroupExists`], [`Error::NoGroup`], [`Error::GroupDepth`].
    pub fn create(&self, name: &str, parent: Option<&str>) -> Result<Arc<QosGroup>, Error> {
        let mut groups = lock(&self.0);
        if groups.iter().any(|g| g.name == name) {
            return Err(Error::GroupExists(name.to_owned()));
        }
        let parent = parent.map(|parent| find(&groups, parent)).transpose()?;
        if parent.as_ref().is_some_and(|parent| parent.outwards().count() >= GROUP_DEPTH) {
            return Err(Error::GroupDepth(name.to_owned()));
        }
        let group = Arc::new(QosGroup { name: name.to_owned(), parent, limiter: Mutex::default() });
        groups.push(Arc::clone(&group));
        Ok(group)
    }

    /// Sets the limits of a group from `now` on.
    ///
    /// # Errors
    /// [`Error::NoGroup`], [`Error::Limits`].
    pub async fn set_limits(
        &self,
        registry: &Registry,
        name: &str,
        limits: Limits,
        now: Nanos,
    ) -> Result<(), Error> {
        let group = self.find(name)?;
        lock(&group.limiter).set(limits, now.0)?;
        for bdev in registry.list() {
            let its = bdev.qos_group();
            if its.is_some_and(|its| its.outwards().any(|g| Arc::ptr_eq(g, &group))) {
                bdev.look_at_limits().await;
            }
        }
        Ok(())
    }

    /// Adds a disk to a group, and removes it from its present group.
    ///
    /// # Errors
    /// [`Error::NoGroup`], [`Error::NotFound`].
    pub async fn add(&self, registry: &Registry, name: &str, disk: &str) -> Result<Arc<Bdev>, Error> {
        let bdev = registry.find(disk)?;
        {
            // The lock is held, so that the group is not deleted before the disk is in it.
            let groups = lock(&self.0);
            let group = find(&groups, name)?;
            lock(bdev.qos()).group = Some(group);
        }
        bdev.look_at_limits().await;
        Ok(bdev)
    }

    /// Removes a disk from a group.
    ///
    /// # Errors
    /// [`Error::NoGroup`], [`Error::NotFound`], [`Error::NotInGroup`].
    pub async fn remove(&self, registry: &Registry, name: &str, disk: &str) -> Result<Arc<Bdev>, Error> {
        let group = self.find(name)?;
        let bdev = registry.find(disk)?;
        {
            let mut qos = lock(bdev.qos());
            if qos.group.as_ref().is_none_or(|g| !Arc::ptr_eq(g, &group)) {
                let (disk, group) = (bdev.name().to_owned(), name.to_owned());
                return Err(Error::NotInGroup { disk, group });
            }
            qos.group = None;
        }
        bdev.look_at_limits().await;
        Ok(bdev)
    }

    /// Deletes a group that contains no disk and no group.
    ///
    /// # Errors
    /// [`Error::NoGroup`], [`Error::GroupInUse`].
    pub fn delete(&self, registry: &Registry, name: &str) -> Result<(), Error> {
        let mut groups = lock(&self.0);
        let group = find(&groups, name)?;
        let in_use = |by: String| Error::GroupInUse { group: name.to_owned(), by };
        let is_in = |its: Option<&Arc<QosGroup>>| its.is_some_and(|its| Arc::ptr_eq(its, &group));
        if let Some(child) = groups.iter().find(|g| is_in(g.parent.as_ref())) {
            return Err(in_use(format!("group '{}'", child.name)));
        }
        if let Some(bdev) = registry.list().iter().find(|b| is_in(b.qos_group().as_ref())) {
            return Err(in_use(format!("disk '{}'", bdev.name())));
        }
        groups.retain(|g| !Arc::ptr_eq(g, &group));
        Ok(())
    }
}

fn find(groups: &[Arc<QosGroup>], name: &str) -> Result<Arc<QosGroup>, Error> {
    let found = groups.iter().find(|g| g.name == name);
    found.cloned().ok_or_else(|| Error::NoGroup(name.to_owned()))
}
