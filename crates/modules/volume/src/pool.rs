//! A pool, as the control plane sees it: its volumes, their disks, and commands. Control context.

mod changes;
mod images;
mod moving;
pub(crate) mod scrub;
mod upkeep;

pub use scrub::{ScrubReport, ScrubSettings, ScrubState};
pub use upkeep::SpaceCount;

use crate::claim::{Held, Right};
use crate::device::VolumeDisk;
use crate::gate::Gate;
use crate::note::Intent;
use crate::owner::Ready;
use crate::part::Part;
use crate::{Error, NewVolume, Origin, note};
use aryk_bdev::{Bdev, Bytes, Descriptor, Env, Identity};
use aryk_log_limit::LogLimit;
use aryk_volume::{
    Answer, Command, Commit, Cut, Foreign, Label, LogPlace, PARTITIONS, Settings, Shard, State, Stats,
    StoreError, TimelineId, UNIT, Volume, VolumeId, WhenFull,
};
use aryk_volume_store::{Finding, Position, Store, share_bytes, share_place};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use uuid::Uuid;

/// Locks a mutex that is held for a few instructions only, and whose holder does not panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no one panics holding it")
}

/// A state of a history.
pub(crate) type View = (TimelineId, Cut);

/// A volume or a snapshot, as the engine lists it.
pub(crate) struct Listed {
    pub id: VolumeId,
    pub volume: Volume,
    /// The view whose blocks its history has, where it has none of its own.
    pub base: Option<View>,
    /// The disk whose blocks its history and those before it have, where they have none of their own.
    pub foreign: Option<Foreign>,
}

/// A disk of another module that is the base of volumes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Image {
    /// Its UUID, by which it is found again.
    pub uuid: Uuid,
    /// Bytes of its blocks, at most.
    pub block_size: u32,
    /// Its name when the volume was created.
    pub name: String,
}

impl Image {
    /// As the pool stores it.
    fn to_stored(&self) -> String {
        format!("{} {} {}", self.uuid, self.block_size, self.name)
    }

    fn from_stored(stored: &str) -> Option<Self> {
        let (uuid, rest) = stored.split_once(' ')?;
        let (block_size, name) = rest.split_once(' ')?;
        let (uuid, block_size) = (Uuid::parse_str(uuid).ok()?, block_size.parse().ok()?);
        Some(Self { uuid, block_size, name: name.to_owned() })
    }
}

/// A volume or a snapshot, with its disk.
#[derive(Clone, Debug)]
pub struct Member {
    /// How the pool identifies it: as its first part does.
    pub id: VolumeId,
    /// How each part identifies it.
    pub(crate) ids: Vec<VolumeId>,
    /// Its properties.
    pub volume: Volume,
    /// The view whose blocks its history has, where it has none of its own.
    base: Option<View>,
    foreign: Option<Foreign>,
    /// Its disk; `None` if it cannot be registered, as while the disk on which it depends is absent.
    pub disk: Option<Arc<Bdev>>,
    /// Whether it is being deleted: it gets no disk.
    is_leaving: bool,
}

impl Member {
    /// Its UUID.
    pub const fn uuid(&self) -> Uuid {
        Uuid::from_bytes(self.volume.label.uuid)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.volume.label.name
    }

    /// Whether it is a snapshot.
    pub const fn is_snapshot(&self) -> bool {
        self.volume.cut.is_some()
    }

    /// Its size in bytes.
    pub const fn bytes(&self) -> u64 {
        self.volume.units * UNIT as u64
    }

    /// The disk of another module on which it depends, directly or by snapshots.
    pub fn image(&self) -> Option<Image> {
        Image::from_stored(&self.foreign.as_ref()?.name)
    }
}

/// What a volume or a snapshot has its blocks from, as far as it was not written since.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Parent {
    /// It has no blocks from elsewhere.
    None,
    /// The snapshot with this name.
    Snapshot(String),
    /// A disk of another module.
    Image(Image),
}

/// The space of a pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    /// For data: without what the pool keeps for itself.
    pub total: Bytes,
    /// That is free, or will be when deleted data has been cleaned, and that nothing has reserved.
    pub free: Bytes,
    /// That is reserved for thick volumes, beyond the data that they have for themselves.
    pub reserved: Bytes,
}

/// The state of a pool, for people.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Health {
    /// All is well.
    Ready,
    /// Its disk has failed: reads are served.
    ReadOnly(StoreError),
    /// Its claim was not renewed in time: requests wait.
    Waiting,
    /// Another daemon has taken it over: nothing is served.
    TakenOver,
}

/// A pool of volumes on a base disk.
pub struct Pool {
    env: Env,
    name: Mutex<String>,
    uuid: Uuid,
    base: Arc<Bdev>,
    /// Bytes of a cluster.
    cluster: AtomicU64,
    /// At least one: the first one's volumes are the pool's.
    pub(crate) parts: Vec<Part>,
    /// Changes of several parts that are being made, or are not finished in all of them.
    intents: Mutex<Vec<Intent>>,
    /// About attempts to finish them.
    unfinished_lines: LogLimit,
    findings: Vec<Finding>,
    log_damage: Vec<(Shard, LogPlace)>,
    members: Mutex<BTreeMap<VolumeId, Member>>,
    /// The disks on which volumes depend and that are open, as the pool stores them.
    images: Mutex<BTreeMap<String, Arc<Bdev>>>,
    last_count: Mutex<Option<Arc<SpaceCount>>>,
    scrubbing: scrub::Scrubbing,
    /// `None` if no other host reaches the base.
    claim: Option<Arc<Held>>,
    /// Held by each change of the volumes, from its first check until the list of volumes has it.
    changing: tokio::sync::Mutex<()>,
    /// Whether the pool is being deleted.
    is_ending: AtomicBool,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("name", &self.name()).field("base", &self.base).finish_non_exhaustive()
    }
}

impl Pool {
    /// A pool whose parts were started.
    pub(crate) async fn new(
        env: &Env,
        base: Arc<Bdev>,
        parts: Vec<Part>,
        ready: Vec<Ready>,
        claim: Option<Arc<Held>>,
    ) -> Result<Arc<Self>, Error> {
        let identity = parts[0].root.call(|owner, _| owner.identity()).await.ok().flatten();
        let (uuid, name) = identity.ok_or(Error::Ended)?;
        let shards = || parts.iter().map(|part| part.place.shard);
        let log_damage =
            shards().zip(&ready).filter_map(|(shard, ready)| Some((shard, ready.log_damage?))).collect();
        let on_base =
            |shard| move |found: Finding| Finding { offset: share_place(shard, found.offset), ..found };
        let findings = shards()
            .zip(ready)
            .flat_map(|(shard, ready)| ready.findings.into_iter().map(on_base(shard)))
            .collect();
        Ok(Arc::new(Self {
            env: env.clone(),
            name: Mutex::new(name),
            uuid,
            base,
            cluster: AtomicU64::new(note::USUAL_CLUSTER.0),
            parts,
            intents: Mutex::default(),
            unfinished_lines: LogLimit::new(3, Duration::from_secs(60)),
            findings,
            log_damage,
            members: Mutex::default(),
            images: Mutex::default(),
            last_count: Mutex::default(),
            scrubbing: scrub::Scrubbing::default(),
            claim,
            changing: tokio::sync::Mutex::default(),
            is_ending: AtomicBool::new(false),
        }))
    }

    /// Its name.
    pub fn name(&self) -> String {
        lock(&self.name).clone()
    }

    /// Its UUID.
    pub const fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Its base disk.
    pub const fn base(&self) -> &Arc<Bdev> {
        &self.base
    }

    /// The unit in which SPDK's methods report its space, and to which they round sizes up.
    pub fn cluster(&self) -> Bytes {
        Bytes(self.cluster.load(Ordering::Relaxed))
    }

    /// The cores of its shards.
    pub fn cores(&self) -> Vec<u16> {
        self.parts.iter().map(|part| part.place.core()).collect()
    }

    /// How many changes are being made, or wait until all shards can make them.
    pub fn unfinished_changes(&self) -> usize {
        lock(&self.intents).len()
    }

    /// Structures of which one copy was damaged when the pool was opened.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Where the logs of its shards were damaged when the pool was opened: what was written behind these places is lost.
    pub fn log_damage(&self) -> &[(Shard, LogPlace)] {
        &self.log_damage
    }

    /// Whether it has ended, since its base was removed or it was closed.
    pub fn has_ended(&self) -> bool {
        self.parts.iter().any(|part| part.signals.has_ended.load(Ordering::Acquire))
    }

    /// Whether its disk has failed.
    pub fn health(&self) -> Health {
        match self.claim.as_ref().map(|claim| &claim.lease) {
            Some(lease) if lease.is_taken_over() => return Health::TakenOver,
            Some(lease) if lease.right() == Right::Waits => return Health::Waiting,
            _ => {}
        }
        let error = self.parts.iter().find_map(|part| match part.signals.state() {
            Some(State::ReadOnly(error)) => Some(error),
            _ => None,
        });
        error.map_or(Health::Ready, Health::ReadOnly)
    }

    /// Its volumes and snapshots, in the order of their creation.
    pub fn members(&self) -> Vec<Member> {
        lock(&self.members).values().cloned().collect()
    }

    /// The volume or snapshot with this name or UUID.
    ///
    /// # Errors
    /// [`Error::NoVolume`].
    pub fn find(&self, name: &str) -> Result<Member, Error> {
        let uuid = Uuid::parse_str(name).ok();
        let is_it = |member: &&Member| member.name() == name || uuid == Some(member.uuid());
        let members = lock(&self.members);
        members.values().find(is_it).cloned().ok_or_else(|| Error::NoVolume(name.to_owned()))
    }

    /// Counters and sizes.
    ///
    /// # Errors
    /// [`Error::Ended`].
    pub async fn stats(&self) -> Result<Stats, Error> {
        let mut sum = Stats::default();
        for part in &self.parts {
            sum += part.root.call(|owner, _| owner.stats()).await.map_err(|_| Error::Ended)?;
        }
        Ok(sum)
    }

    /// How much of the state of each of its shards the base has.
    ///
    /// # Errors
    /// [`Error::Ended`].
    pub async fn positions(&self) -> Result<Vec<Position>, Error> {
        let mut positions = Vec::new();
        for part in &self.parts {
            let position = part.root.call(|owner, _| owner.store().map(Store::position)).await;
            positions.push(position.ok().flatten().ok_or(Error::Ended)?);
        }
        Ok(positions)
    }

    /// Its space.
    ///
    /// # Errors
    /// [`Error::Ended`].
    pub async fn space(&self) -> Result<Space, Error> {
        let stats = self.stats().await?;
        let taken = stats.live_bytes + stats.reserved_bytes;
        let free = stats.usable_bytes.saturating_sub(taken);
        let reserved = Bytes(stats.reserved_bytes);
        Ok(Space { total: Bytes(stats.usable_bytes), free: Bytes(free), reserved })
    }

    /// How full its fullest shard is, in percent of the space for data. Reservations count as used.
    ///
    /// # Errors
    /// [`Error::Ended`].
    pub async fn used_percent(&self) -> Result<u64, Error> {
        let mut most = 0;
        for part in &self.parts {
            let stats = part.root.call(|owner, _| owner.stats()).await.map_err(|_| Error::Ended)?;
            let used = stats.live_bytes + stats.reserved_bytes;
            most = most.max(used.saturating_mul(100) / stats.usable_bytes.max(1));
        }
        Ok(most)
    }

    /// What a volume or a snapshot has its blocks from.
    pub fn parent(&self, member: &Member) -> Parent {
        self.parents().remove(&member.id).unwrap_or(Parent::None)
    }

    /// What each volume and snapshot has its blocks from.
    pub fn parents(&self) -> BTreeMap<VolumeId, Parent> {
        let members = lock(&self.members);
        // The snapshots of a history, by age.
        let mut snapshots: BTreeMap<(TimelineId, Cut), &Member> = BTreeMap::new();
        for member in members.values() {
            if let Some(cut) = member.volume.cut {
                snapshots.insert((member.volume.timeline, cut), member);
            }
        }
        let parent = |member: &Member| {
            let timeline = member.volume.timeline;
            let before = match member.volume.cut {
                Some(cut) => {
                    snapshots.range((timeline, [Commit::ZERO; PARTITIONS])..(timeline, cut)).next_back()
                }
                None => snapshots
                    .range((timeline, [Commit::ZERO; PARTITIONS])..=(timeline, [Commit::MAX; PARTITIONS]))
                    .next_back(),
            };
            let snapshot = before.map(|(_, snapshot)| *snapshot);
            let base = || member.base.and_then(|view| snapshots.get(&view).copied());
            match (snapshot.or_else(base), member.image()) {
                (Some(snapshot), _) => Parent::Snapshot(snapshot.name().to_owned()),
                // The snapshot between them was deleted.
                (None, Some(image)) => Parent::Image(image),
                (None, None) => Parent::None,
            }
        };
        members.values().map(|member| (member.id, parent(member))).collect()
    }

    /// Stores the settings with which the pool is opened from now on, and the size of its clusters.
    ///
    /// # Errors
    /// [`Error`].
    pub(crate) async fn store_settings(&self, settings: &Settings, cluster: Bytes) -> Result<(), Error> {
        self.command(Command::SetNote(note::of(settings, cluster))).await?;
        self.cluster.store(cluster.0, Ordering::Relaxed);
        Ok(())
    }

    /// Reads which volumes and snapshots there are, and creates the disks of those that have none. One that cannot get a disk is
    /// logged.
    ///
    /// # Errors
    /// [`Error::Ended`].
    pub async fn refresh(&self) -> Result<(), Error> {
        let _changing = self.changing.lock().await;
        self.list_again().await
    }

    /// As [`Pool::refresh`], for a caller who holds `changing`.
    async fn list_again(&self) -> Result<(), Error> {
        let mut lists = Vec::new();
        for part in &self.parts {
            lists.push(part.root.call(|owner, _| owner.volumes()).await.map_err(|_| Error::Ended)?);
        }
        let there = lists.remove(0);
        let by_uuid = |list: Vec<Listed>| {
            list.into_iter().map(|listed| (listed.volume.label.uuid, listed.id)).collect::<BTreeMap<_, _>>()
        };
        let others: Vec<BTreeMap<_, _>> = lists.into_iter().map(by_uuid).collect();
        let foreign = there.iter().filter_map(|listed| listed.foreign.as_ref());
        let needed: BTreeMap<String, u64> =
            foreign.map(|foreign| (foreign.name.clone(), foreign.units)).collect();
        self.open_images(needed).await?;
        {
            let mut members = lock(&self.members);
            let mut known = std::mem::take(&mut *members);
            for Listed { id, volume, base, foreign } in there {
                let (disk, is_leaving) =
                    known.remove(&id).map_or((None, false), |member| (member.disk, member.is_leaving));
                let disk = disk.filter(|disk| self.is_registered(disk));
                // One that a part lacks has too few.
                let of_others = others.iter().map_while(|ids| ids.get(&volume.label.uuid).copied());
                let ids = std::iter::once(id).chain(of_others).collect();
                members.insert(id, Member { id, ids, volume, base, foreign, disk, is_leaving });
            }
        }
        let is_due = |member: &Member| {
            member.disk.is_none()
                && !member.is_leaving
                && !self.is_degraded(member)
                && !self.is_mixed(member.uuid())
        };
        for member in self.members().into_iter().filter(is_due) {
            match self.register(&member) {
                Ok(disk) => {
                    if let Some(member) = lock(&self.members).get_mut(&member.id) {
                        member.disk = Some(disk);
                    }
                }
                Err(error) => {
                    tracing::error!(pool = self.name(), volume = member.name(), %error, "the volume has no disk");
                }
            }
        }
        Ok(())
    }

    fn is_registered(&self, disk: &Arc<Bdev>) -> bool {
        let found = self.env.registry().find(disk.name());
        found.is_ok_and(|found| Arc::ptr_eq(&found, disk))
    }

    /// Begins to delete a volume or a snapshot: it gets no disk again. [`Pool::delete`] ends that, or [`Pool::keep`].
    ///
    /// # Errors
    /// [`Error::Busy`]: it is being deleted already. [`Error::Ended`]: it does not exist any more.
    pub fn begin_to_delete(&self, id: VolumeId) -> Result<(), Error> {
        match lock(&self.members).get_mut(&id) {
            None => Err(Error::Ended),
            Some(member) if member.is_leaving => Err(Error::Busy("the volume is being deleted")),
            Some(member) => {
                member.is_leaving = true;
                Ok(())
            }
        }
    }

    /// A volume or a snapshot is not deleted: [`Pool::refresh`] gives it a disk again.
    pub fn keep(&self, id: VolumeId) {
        if let Some(member) = lock(&self.members).get_mut(&id) {
            (member.disk, member.is_leaving) = (None, false);
        }
    }

    /// Begins or gives up the deletion of the pool, during which it has no new volumes.
    ///
    /// # Errors
    /// [`Error::Busy`]: it is being deleted already.
    pub async fn set_ending(&self, is_ending: bool) -> Result<(), Error> {
        let _changing = self.changing.lock().await;
        match self.is_ending.swap(is_ending, Ordering::Relaxed) && is_ending {
            true => Err(Error::Busy("the pool is being deleted")),
            false => Ok(()),
        }
    }

    /// Waits until no other change is running. The guard is held until the change is in the list of volumes.
    async fn begin_change(&self) -> Result<tokio::sync::MutexGuard<'_, ()>, Error> {
        let changing = self.changing.lock().await;
        if self.is_ending.load(Ordering::Relaxed) {
            return Err(Error::Busy("the pool is being deleted"));
        }
        self.finish_intents().await;
        Ok(changing)
    }

    /// Whether no disk has the name of a new volume.
    fn check_names(&self, uuid: Uuid, name: &str) -> Result<(), Error> {
        for name in [uuid.to_string(), self.alias(name)] {
            if self.env.registry().find(&name).is_ok() {
                return Err(aryk_bdev::Error::Exists(name).into());
            }
        }
        Ok(())
    }

    /// The alias of a volume's disk.
    pub fn alias(&self, volume: &str) -> String {
        format!("{}/{volume}", lock(&self.name))
    }

    /// Whether it cannot be used, because the disk on which it depends is absent.
    pub fn is_degraded(&self, member: &Member) -> bool {
        member.foreign.as_ref().is_some_and(|foreign| !lock(&self.images).contains_key(&foreign.name))
    }

    fn register(&self, member: &Member) -> Result<Arc<Bdev>, Error> {
        let uuid = member.uuid();
        if member.ids.len() < self.parts.len() {
            return Err(Error::Incomplete);
        }
        let aliases = vec![self.alias(member.name())];
        let identity = Identity { name: uuid.to_string(), aliases, uuid };
        let Volume { units, block_size, .. } = member.volume;
        let image =
            member.foreign.as_ref().and_then(|foreign| lock(&self.images).get(&foreign.name).cloned());
        let device = VolumeDisk {
            ids: member.ids.clone(),
            block_size,
            blocks: AtomicU64::new(VolumeDisk::blocks_of(units, block_size).0),
            places: self.parts.iter().map(|part| Arc::clone(&part.place)).collect(),
            gate: Gate::new(),
            bases: [Some(Arc::clone(&self.base)), image].into_iter().flatten().collect(),
            is_snapshot: member.is_snapshot(),
        };
        Ok(self.env.registry().register(identity, Arc::new(device))?)
    }

    /// Creates a volume, with its disk.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn create_volume(&self, new: NewVolume) -> Result<Member, Error> {
        let NewVolume { name, uuid, bytes, block_size, origin, when_full, is_thick } = new;
        let units = bytes.to_blocks(UNIT).ok_or(Error::Size(bytes))?.0;
        let new_name = check_name(name)?;
        let label = Label { name: new_name.clone(), uuid: uuid.into_bytes() };
        let _changing = self.begin_change().await?;
        self.check_names(uuid, &new_name)?;
        let origin = match origin {
            Origin::Empty => aryk_volume::Origin::Empty,
            Origin::Snapshot(id) => aryk_volume::Origin::Snapshot(id),
            Origin::Disk(disk) => aryk_volume::Origin::Foreign(self.open_new_image(&disk, block_size).await?),
        };
        let create = Command::Create { label, units, block_size, origin, when_full, is_thick };
        match self.command(create).await {
            Ok(Answer::Volume(id)) => self.made(id).await,
            Ok(other) => unreachable!("the answer to a creation is {other:?}"),
            Err(error) => {
                // The image is closed if no other volume depends on it.
                self.list_again().await?;
                Err(error)
            }
        }
    }

    /// The new volume `id`, with its disk.
    async fn made(&self, id: VolumeId) -> Result<Member, Error> {
        self.list_again().await?;
        lock(&self.members).get(&id).cloned().ok_or(Error::Ended)
    }

    /// Takes snapshots of volumes at one instant, by their new names and UUIDs.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn snapshot(&self, volumes: Vec<(VolumeId, String, Uuid)>) -> Result<Vec<Member>, Error> {
        let _changing = self.begin_change().await?;
        let mut labels = Vec::new();
        for (id, name, uuid) in volumes {
            self.check_names(uuid, &name)?;
            labels.push((id, Label { name: check_name(name)?, uuid: uuid.into_bytes() }));
        }
        let Answer::Volumes(made) = self.command(Command::Snapshot(labels)).await? else {
            unreachable!("the answer to a snapshot is a list");
        };
        self.list_again().await?;
        let members = lock(&self.members);
        Ok(made.iter().filter_map(|id| members.get(id).cloned()).collect())
    }

    /// Deletes a volume or a snapshot, whose disk was removed before ([`Pool::begin_to_delete`]).
    ///
    /// # Errors
    /// [`Error`].
    pub async fn delete(&self, id: VolumeId) -> Result<(), Error> {
        let _changing = self.changing.lock().await;
        self.finish_intents().await;
        self.command(Command::Delete(id)).await?;
        lock(&self.members).remove(&id);
        // Its image is closed if no other volume depends on it.
        self.list_again().await
    }

    /// Gives a volume another size, and tells its users.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn resize(&self, id: VolumeId, bytes: Bytes) -> Result<(), Error> {
        let units = bytes.to_blocks(UNIT).ok_or(Error::Size(bytes))?.0;
        let _changing = self.begin_change().await?;
        let member = lock(&self.members).get(&id).cloned().ok_or(Error::Ended)?;
        let shrinks = units < member.volume.units;
        if shrinks {
            Self::check_not_frozen(&member)?;
        }
        // No request reaches beyond the end of the volume, which the engine would refuse.
        if shrinks {
            self.tell_size(&member, units)?;
        }
        let resized = self.command(Command::Resize { volume: id, units }).await;
        self.list_again().await?;
        self.tell_size_of(id)?;
        resized.map(drop)
    }

    /// Refuses a change of data on which volumes of another pool depend.
    fn check_not_frozen(member: &Member) -> Result<(), Error> {
        match member.disk.as_ref().and_then(|disk| disk.frozen_by().map(|owner| (disk, owner))) {
            None => Ok(()),
            Some((disk, owner)) => {
                Err(aryk_bdev::Error::Claimed { name: disk.name().to_owned(), owner }.into())
            }
        }
    }

    /// Tells the size that a volume has, to its users.
    fn tell_size_of(&self, id: VolumeId) -> Result<(), Error> {
        let member = lock(&self.members).get(&id).cloned().ok_or(Error::Ended)?;
        self.tell_size(&member, member.volume.units)
    }

    fn tell_size(&self, member: &Member, units: u64) -> Result<(), Error> {
        let Some(disk) = &member.disk else { return Ok(()) };
        let blocks = VolumeDisk::blocks_of(units, member.volume.block_size);
        if let Some(device) = disk.device_as::<VolumeDisk>() {
            device.blocks.store(blocks.0, Ordering::Relaxed);
        }
        Ok(self.env.registry().set_size(disk, blocks)?)
    }

    /// Gives a volume or a snapshot another name.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn rename(&self, id: VolumeId, name: String) -> Result<(), Error> {
        let name = check_name(name)?;
        let _changing = self.begin_change().await?;
        let member = lock(&self.members).get(&id).cloned().ok_or(Error::Ended)?;
        let old = member.disk.as_ref().map(|disk| (disk, disk.aliases()));
        if let Some((disk, _)) = &old {
            self.env.registry().set_aliases(disk, vec![self.alias(&name)])?;
        }
        let renamed = self.command(Command::Rename { volume: id, name }).await;
        if let (Err(_), Some((disk, aliases))) = (&renamed, old) {
            self.env.registry().set_aliases(disk, aliases)?;
        }
        renamed?;
        self.list_again().await
    }

    /// Changes what a volume's writes do while the pool is full.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn set_when_full(&self, id: VolumeId, when_full: WhenFull) -> Result<(), Error> {
        let _changing = self.begin_change().await?;
        let changed = self.command(Command::SetWhenFull { volume: id, when_full }).await;
        self.list_again().await?;
        changed.map(drop)
    }

    /// Reserves space for all of a volume, or gives it up.
    ///
    /// # Errors
    /// [`Error`]: [`aryk_volume::CommandError::NotReservable`] if the pool does not have the space.
    pub async fn set_thick(&self, id: VolumeId, is_thick: bool) -> Result<(), Error> {
        let _changing = self.begin_change().await?;
        let changed = self.command(Command::SetThick { volume: id, is_thick }).await;
        self.list_again().await?;
        changed.map(drop)
    }

    /// Gives a volume the content of a snapshot.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn revert(&self, volume: VolumeId, snapshot: VolumeId) -> Result<(), Error> {
        let _changing = self.begin_change().await?;
        let member = lock(&self.members).get(&volume).cloned().ok_or(Error::Ended)?;
        Self::check_not_frozen(&member)?;
        // A larger snapshot needs more space reserved: a shard that does not have it refuses that before others have reverted.
        let grows = self.parts.len() > 1 && member.volume.is_thick;
        let larger = lock(&self.members).get(&snapshot).map(|snapshot| snapshot.volume.units);
        let larger = larger.filter(|units| grows && *units > member.volume.units);
        if let Some(units) = larger {
            self.command(Command::Resize { volume, units }).await?;
        }
        let reverted = self.command(Command::Revert { volume, snapshot }).await;
        match &reverted {
            Err(Error::Unfinished(_)) => self.withdraw(&member, None).await,
            Err(_) if larger.is_some() => {
                let back = Command::Resize { volume, units: member.volume.units };
                if let Err(error) = self.command(back).await {
                    tracing::warn!(pool = self.name(), volume = member.name(), %error, "the volume stays larger");
                }
            }
            _ => {}
        }
        self.list_again().await?;
        self.tell_size_of(volume)?;
        reverted.map(drop)
    }

    /// Removes the disk of a volume whose content differs between shards; it comes back when the change is finished. `descriptor`
    /// is the caller's own of that disk, which keeps writers away until the disk is being removed.
    async fn withdraw(&self, member: &Member, descriptor: Option<Descriptor>) {
        let Some(disk) = &member.disk else { return };
        tracing::error!(
            pool = self.name(),
            volume = member.name(),
            "the volume has no disk until a change of it is finished in all shards"
        );
        let (removed, ()) =
            tokio::join!(self.env.registry().remove(disk.name()), async move { drop(descriptor) });
        if let Err(error) = removed {
            tracing::error!(pool = self.name(), volume = member.name(), %error, "its disk cannot be removed");
        }
        if let Some(member) = lock(&self.members).get_mut(&member.id) {
            member.disk = None;
        }
    }

    /// Finishes changes that a shard has refused, as far as possible. A pool without such changes is left alone. Returns whether
    /// one was finished: volumes may have disks again.
    pub async fn finish_changes(&self) -> bool {
        if self.unfinished_changes() == 0 {
            return false;
        }
        let _changing = self.changing.lock().await;
        let before = self.unfinished_changes();
        self.finish_intents().await;
        if self.unfinished_changes() == before || self.list_again().await.is_err() {
            return false;
        }
        for member in self.members() {
            if let Err(error) = self.tell_size_of(member.id) {
                tracing::warn!(pool = self.name(), volume = member.name(), %error, "its size is not told");
            }
        }
        true
    }

    /// Lets the pool grow to the size of its base. Returns the number of its segments.
    ///
    /// Shards grow one after another: after an interruption, the next call lets the others grow.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn grow(&self) -> Result<u32, Error> {
        let geometry = self.base.geometry();
        let bytes = geometry.blocks.to_bytes(geometry.block_size).0;
        let mut segments = 0;
        for part in &self.parts {
            let bytes = share_bytes(part.place.shard, bytes);
            let grow = move |store: &mut Store| {
                store.grow(bytes);
                Ok(())
            };
            segments += part.change_store(grow).await?;
        }
        Ok(segments)
    }

    /// Gives the pool another name, and its volumes' disks other aliases.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn rename_pool(&self, name: String) -> Result<(), Error> {
        let new = name.clone();
        // The name of a pool is that of its first part.
        self.parts[0].change_store(move |store| store.rename(&new)).await?;
        *lock(&self.name) = name;
        for member in self.members() {
            if let Some(disk) = &member.disk {
                self.env.registry().set_aliases(disk, vec![self.alias(member.name())])?;
            }
        }
        Ok(())
    }

    /// Ends the pool: its base is free when this returns. The disks of its volumes were removed before, or fail their requests.
    pub async fn close(&self) {
        let base = self.parts[0].place.base();
        self.end().await;
        if let (Some(claim), Ok(base)) = (&self.claim, base) {
            claim.release(base).await;
        }
    }

    /// As [`Pool::close`], but its claim stays.
    pub(crate) async fn end(&self) {
        for part in &self.parts {
            part.end().await;
        }
    }

    /// Whether other hosts reach its base, so that its claim must be renewed.
    pub const fn has_claim(&self) -> bool {
        self.claim.is_some()
    }

    /// Renews the claim of the pool, if other hosts reach its base. Returns when that is due again; `None` if it is not.
    pub async fn renew_claim(&self) -> Option<Duration> {
        let claim = self.claim.as_ref()?;
        let place = &self.parts[0].place;
        if claim.renew(place.base().ok()?, place.owner().ok()).await {
            self.parts.iter().for_each(|part| part.signals.bell().ring());
        }
        (claim.lease.right() != Right::Lost).then(|| claim.pause())
    }
}

/// Checks the name of a volume or a snapshot.
fn check_name(name: String) -> Result<String, Error> {
    let is_valid =
        (1..=255).contains(&name.len()) && !name.contains('/') && !name.chars().any(char::is_control);
    if is_valid { Ok(name) } else { Err(Error::Name(name)) }
}
