//! All pools of a process. Control context.

use crate::device::VolumeDisk;
use crate::owner::{Ready, Start};
use crate::part::{BaseHold, Starting};
use crate::pool::lock;
use crate::visit::visit;
use crate::{Error, Health, Pool, note};
use aryk_bdev::{Access, AsyncChannel, Bdev, Bytes, Env, Event, Lba};
use aryk_dma::{Buffer, PAGE};
use aryk_reactor::Local;
use aryk_volume::{Settings, Shard};
use aryk_volume_store::{
    Base, ClaimPace, Erasing, Expected, Formatting, Holder, Invalid, Looking, Opening, Options, Position,
    SEGMENT_BYTES, SUPERBLOCK_BYTES, SUPERBLOCK_PLACES, Superblock, share_bytes,
};
use futures_channel::oneshot;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use uuid::Uuid;

/// A pool to create.
#[derive(Clone, Debug)]
pub struct NewPool {
    /// Its name, unique among the pools.
    pub name: String,
    /// Its UUID.
    pub uuid: Uuid,
    /// The name of the base disk.
    pub base: String,
    /// Whether to destroy what the base disk has.
    pub force: bool,
    /// Limits of its use of memory and of the base.
    pub settings: Settings,
    /// The unit in which SPDK's methods report its space, and to which they round sizes up: a multiple of 4 KiB, below 4 GiB.
    pub cluster: Bytes,
    /// Bytes of a segment: a power of two, at most 32 MiB. `None`: as many as suit the base.
    pub segment_bytes: Option<u32>,
    /// Its shards, each of which is on a reactor of its own if there are as many: 1, 2, 4, 8 or 16. Each has an equal part of the
    /// base, and of each volume.
    pub shards: u32,
}

/// Bytes of a segment on a base of `bytes`: a dozen segments are never for data, which must not be most of a small base.
const fn segment_bytes_of(bytes: u64) -> u32 {
    const SMALL: u64 = 4 << 30;
    if bytes < SMALL { SEGMENT_BYTES / 4 } else { SEGMENT_BYTES }
}

impl NewPool {
    /// A pool with the usual settings.
    pub fn named(name: &str, base: &str) -> Self {
        Self {
            name: name.to_owned(),
            uuid: Uuid::new_v4(),
            base: base.to_owned(),
            force: false,
            settings: Settings::default(),
            cluster: note::USUAL_CLUSTER,
            segment_bytes: None,
            shards: 1,
        }
    }
}

/// All shards of a pool with so many; `None` if a pool cannot have so many.
fn shards_of(count: u32) -> Option<Vec<Shard>> {
    Shard::new(0, count)?;
    (0..count).map(|index| Shard::new(index, count)).collect()
}

/// The part of a base that a shard has.
const fn share_of(base: Base, shard: Shard) -> Base {
    Base { bytes: share_bytes(shard, base.bytes), block: base.block }
}

/// The shards of a pool that is being created or opened.
struct Made<'a> {
    env: &'a Env,
    hold: BaseHold,
    settings: Settings,
    starting: Vec<Starting>,
    ready: Vec<Ready>,
}

impl Made<'_> {
    /// Starts shards, and waits until all have started.
    ///
    /// # Errors
    /// [`Error`]. None is left then.
    async fn start(
        &mut self,
        shards: impl Iterator<Item = Shard>,
        start: &impl Fn(Shard) -> Result<Start, Error>,
    ) -> Result<(), Error> {
        let result = self.try_start(shards, start).await;
        if result.is_err() {
            for starting in self.starting.drain(..) {
                starting.part.end().await;
            }
        }
        result
    }

    async fn try_start(
        &mut self,
        shards: impl Iterator<Item = Shard>,
        start: &impl Fn(Shard) -> Result<Start, Error>,
    ) -> Result<(), Error> {
        let first = self.starting.len();
        for shard in shards {
            let (start, others) = (start(shard)?, &self.starting);
            let starting = self.hold.start(self.env, shard, start, self.settings, others).await?;
            self.starting.push(starting);
        }
        for starting in &mut self.starting[first..] {
            self.ready.push(starting.done().await?);
        }
        Ok(())
    }

    /// The pool, whose shards `start` starts. Finishes changes that were interrupted, and renews the claim
    /// until then.
    ///
    /// # Errors
    /// [`Error`]. No shard is left then, and the claim was given back.
    async fn into_pool_by(
        mut self,
        start: impl AsyncFnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<Arc<Pool>, Error> {
        let claim = self.hold.claim().cloned();
        let base = self.hold.descriptor();
        let make = async {
            start(&mut self).await?;
            let parts = self.starting.into_iter().map(|starting| starting.part);
            let mut all: Vec<_> = parts.zip(self.ready).collect();
            all.sort_by_key(|(part, _)| part.place.shard.index());
            let (parts, ready) = all.into_iter().unzip();
            let disk = Arc::clone(self.hold.bdev());
            let pool = Pool::new(self.env, disk, parts, ready, claim.clone()).await?;
            match pool.recover().await {
                Ok(()) => Ok(pool),
                Err(error) => {
                    pool.end().await;
                    Err(error)
                }
            }
        };
        let Some(claim) = &claim else { return make.await };
        let made = claim.renew_during(&base, make).await;
        if made.is_err() {
            claim.release(base).await;
        }
        made
    }
}

/// The pools.
#[derive(Debug)]
pub struct Pools {
    open: Mutex<Vec<Arc<Pool>>>,
    /// Names that pools are about to get.
    reserved: Mutex<BTreeSet<String>>,
    /// Pools of which a claim is taken: that is this daemon's, whichever disk it comes by.
    being_opened: Mutex<BTreeSet<Uuid>>,
    /// The identity and the times with which this daemon claims pools that other hosts reach.
    pub(crate) holder: Holder,
    pub(crate) pace: ClaimPace,
}

impl Default for Pools {
    fn default() -> Self {
        Self {
            open: Mutex::default(),
            reserved: Mutex::default(),
            being_opened: Mutex::default(),
            holder: Holder::of_this_process(),
            pace: ClaimPace::default(),
        }
    }
}

/// An entry of a set, until this is dropped.
struct Reserved<'a, T: Ord> {
    set: &'a Mutex<BTreeSet<T>>,
    entry: T,
}

impl<'a, T: Ord + Clone> Reserved<'a, T> {
    /// Adds the entry; `None` if the set has it.
    fn new(set: &'a Mutex<BTreeSet<T>>, entry: T) -> Option<Self> {
        // Not `then_some`: a value that is not returned would remove the entry of another caller by its drop.
        lock(set).insert(entry.clone()).then(|| Self { set, entry })
    }
}

impl<T: Ord> Drop for Reserved<'_, T> {
    fn drop(&mut self) {
        lock(self.set).remove(&self.entry);
    }
}

/// The disk as the store sees it.
fn base_of(bdev: &Bdev) -> Base {
    let geometry = bdev.geometry();
    Base { bytes: geometry.blocks.to_bytes(geometry.block_size).0, block: geometry.block_size }
}

/// The smallest multiple of bytes that a pool on the disk reads and writes.
fn alignment_of(bdev: &Bdev) -> u32 {
    let geometry = bdev.geometry();
    if geometry.physical_block_size.max(geometry.block_size) > 512 { 4096 } else { 512 }
}

impl Pools {
    /// The pools that are open, in the order in which they were opened.
    pub fn list(&self) -> Vec<Arc<Pool>> {
        self.forget_ended();
        lock(&self.open).clone()
    }

    /// Forgets the pools that have ended, and with them their bases.
    pub fn forget_ended(&self) {
        lock(&self.open).retain(|pool| !pool.has_ended());
    }

    /// Forgets the disks of volumes that were removed with the disk on which they depended.
    pub fn forget_removed_disks(&self) {
        self.list().iter().for_each(|pool| pool.forget_removed_disks());
    }

    /// The pool with this name or UUID.
    ///
    /// # Errors
    /// [`Error::NoPool`].
    pub fn find(&self, name: &str) -> Result<Arc<Pool>, Error> {
        let uuid = Uuid::parse_str(name).ok();
        let is_it = |pool: &Arc<Pool>| uuid == Some(pool.uuid()) || pool.name() == name;
        self.list().into_iter().find(is_it).ok_or_else(|| Error::NoPool(name.to_owned()))
    }

    /// The pool on a disk.
    pub fn on(&self, base: &Bdev) -> Option<Arc<Pool>> {
        self.list().into_iter().find(|pool| std::ptr::eq(Arc::as_ptr(pool.base()), base))
    }

    /// Creates a pool.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn create(&self, env: &Env, new: NewPool) -> Result<Arc<Pool>, Error> {
        let NewPool { name, uuid, base, force, settings, cluster, segment_bytes, shards } = new;
        if !note::is_cluster(cluster) {
            return Err(Error::Cluster(cluster));
        }
        let _reserved = self.reserve(&name)?;
        let bdev = env.registry().find(&base)?;
        if bdev.device_as::<VolumeDisk>().is_some() {
            return Err(Error::Nested(base));
        }
        let all = shards_of(shards).ok_or(Error::Shards(shards))?;
        let mut hold = BaseHold::new(env, &base, &format!("the pool {name}"))?;
        let whole = base_of(&bdev);
        // The first shard has the beginning of the disk only, and the claim is written before anything else.
        let is_shared = bdev.device().limits().is_shared;
        let looks_first = shards > 1 || is_shared;
        if looks_first && !force {
            hold.run(env, Start::Look(Box::new(Looking::new(whole)))).await?;
        }
        let start = |shard: Shard| {
            let base = share_of(whole, shard);
            let segment_bytes = segment_bytes.unwrap_or_else(|| segment_bytes_of(base.bytes));
            let options = Options::new(uuid, Uuid::new_v4(), &name, alignment_of(&bdev));
            let options = Options { segment_bytes, shard, ..options };
            Ok(Start::Format(Box::new(Formatting::new(base, &options, force || looks_first)?)))
        };
        // Invalid options are refused before anything is written.
        all.iter().try_for_each(|shard| start(*shard).map(drop))?;
        hold.take_claim(env, uuid, &self.holder, self.pace).await?;
        let made = Made { env, hold, settings, starting: Vec::new(), ready: Vec::new() };
        // The first shard is made last: then the pool exists.
        let pool = made
            .into_pool_by(async |made: &mut Made<'_>| {
                if is_shared && !force {
                    // Another host may have made a pool since the first look.
                    made.hold.run(env, Start::Look(Box::new(Looking::new(whole)))).await?;
                }
                made.start(all[1..].iter().copied(), &start).await?;
                made.start(all[..1].iter().copied(), &start).await
            })
            .await?;
        lock(&self.open).push(Arc::clone(&pool));
        if settings != Settings::default() || cluster != note::USUAL_CLUSTER {
            pool.store_settings(&settings, cluster).await?;
        }
        Ok(pool)
    }

    /// Gives a pool another name.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn rename(&self, pool: &Pool, name: String) -> Result<(), Error> {
        let _reserved = self.reserve(&name)?;
        pool.rename_pool(name).await
    }

    /// Keeps a name for a pool that is about to get it.
    fn reserve(&self, name: &str) -> Result<Reserved<'_, String>, Error> {
        let reserved =
            if self.find(name).is_ok() { None } else { Reserved::new(&self.reserved, name.to_owned()) };
        reserved.ok_or_else(|| Error::PoolExists(name.to_owned()))
    }

    /// Opens the pool on a disk, if there is one and nobody uses the disk, and creates the disks of its volumes. `last` is as in
    /// [`Pools::open`].
    ///
    /// # Errors
    /// [`Error`]: the disk has a pool that cannot be opened.
    pub async fn examine(
        &self,
        env: &Env,
        disk: &str,
        settings: Settings,
        last: impl Fn(Uuid) -> Vec<Position>,
    ) -> Result<Option<Arc<Pool>>, Error> {
        let bdev = env.registry().find(disk)?;
        let is_of_volume = bdev.device_as::<VolumeDisk>().is_some();
        let is_too_small = base_of(&bdev).bytes < SUPERBLOCK_PLACES[1] + SUPERBLOCK_BYTES as u64;
        if is_of_volume || is_too_small || bdev.writers() > 0 || bdev.device().is_read_only() {
            return Ok(None);
        }
        match probe(env, disk).await? {
            Some(superblock) => self.open_found(env, disk, superblock, settings, last).await.map(Some),
            None => Ok(None),
        }
    }

    /// Opens the pool on a disk, and creates the disks of its volumes. With `Settings::accepts_damaged_log`, the writes behind a
    /// damaged place of its log are lost ([`Pool::log_damage`]).
    ///
    /// `last` returns the positions that the pool with this UUID had when it was open last, as far as they are known
    /// ([`Pool::positions`]): a pool with an older one is refused.
    ///
    /// # Errors
    /// [`Error`].
    pub async fn open(
        &self,
        env: &Env,
        disk: &str,
        settings: Settings,
        last: impl Fn(Uuid) -> Vec<Position>,
    ) -> Result<Arc<Pool>, Error> {
        let bdev = env.registry().find(disk)?;
        if bdev.device_as::<VolumeDisk>().is_some() {
            return Err(Error::Nested(disk.to_owned()));
        }
        match probe(env, disk).await? {
            Some(superblock) => self.open_found(env, disk, superblock, settings, last).await,
            None => Err(Error::NoPoolOn(disk.to_owned())),
        }
    }

    async fn open_found(
        &self,
        env: &Env,
        disk: &str,
        superblock: Result<Superblock, Invalid>,
        settings: Settings,
        last: impl Fn(Uuid) -> Vec<Position>,
    ) -> Result<Arc<Pool>, Error> {
        // Before the opening, which changes what the disk has.
        let mut shards = 1;
        let mut expected = Expected::default();
        let mut positions = Vec::new();
        let mut claimed = None;
        let is_shared = env.registry().find(disk)?.device().limits().is_shared;
        match superblock {
            Ok(superblock) => {
                self.check_is_only(superblock.pool, disk)?;
                positions = last(superblock.pool);
                (shards, expected.pool) = (superblock.shard.count(), Some(superblock.pool));
                claimed = superblock.has_room_for_copies().then_some(superblock.pool);
                if is_shared && claimed.is_none() {
                    tracing::warn!(
                        disk,
                        "the pool has no room for a claim: nothing keeps other hosts from opening it"
                    );
                }
            }
            // Without the pool's UUID, there would be no claim.
            Err(invalid) if is_shared => return Err(Error::Format(invalid.into())),
            Err(_) => {}
        }
        let _opening = claimed
            .map(|pool| {
                Reserved::new(&self.being_opened, pool).ok_or(Error::Busy(
                    "the pool is being opened already, or watched until another daemon's claim is old",
                ))
            })
            .transpose()?;
        let mut hold = BaseHold::new(env, disk, "a pool")?;
        if let Some(pool) = claimed {
            hold.take_claim(env, pool, &self.holder, self.pace).await?;
        }
        let whole = base_of(hold.bdev());
        let start = |shard: Shard| {
            let position = positions.get(shard.index() as usize).copied();
            let expected = Expected { shard: Some(shard), position, ..expected };
            Ok(Start::Open(Box::new(Opening::new(share_of(whole, shard), expected))))
        };
        let shards = shards_of(shards).ok_or(Error::Shards(shards))?;
        let opened = Made { env, hold, settings, starting: Vec::new(), ready: Vec::new() };
        let pool = opened
            .into_pool_by(async |opened: &mut Made<'_>| opened.start(shards.into_iter(), &start).await)
            .await?;
        if let Err(error) = self.check_is_only(pool.uuid(), disk) {
            pool.close().await;
            return Err(error);
        }
        // A pool that is created meanwhile has its name reserved.
        let is_reserved = lock(&self.reserved).contains(&pool.name());
        if is_reserved || self.find(&pool.name()).is_ok() {
            pool.close().await;
            return Err(Error::PoolExists(pool.name()));
        }
        lock(&self.open).push(Arc::clone(&pool));
        // A volume without a disk is reported, and the others are there.
        let _ = pool.refresh().await;
        Ok(pool)
    }

    /// Refuses a pool that is open from another disk.
    fn check_is_only(&self, uuid: Uuid, disk: &str) -> Result<(), Error> {
        match self.list().iter().find(|pool| pool.uuid() == uuid) {
            Some(pool) => {
                let (first, second) = (pool.base().name().to_owned(), disk.to_owned());
                Err(Error::Twin { pool: pool.name(), first, second })
            }
            None => Ok(()),
        }
    }

    /// Closes a pool whose volumes' disks were removed before.
    pub async fn close(&self, pool: &Arc<Pool>) {
        pool.close().await;
        lock(&self.open).retain(|known| !Arc::ptr_eq(known, pool));
    }

    /// Destroys a pool whose volumes' disks were removed before.
    ///
    /// # Errors
    /// [`Error`]: the pool is closed, and may be found again.
    pub async fn delete(&self, env: &Env, pool: &Arc<Pool>) -> Result<(), Error> {
        if pool.health() == Health::TakenOver {
            return Err(Error::TakenOver);
        }
        let (base, whole) = (pool.base().name().to_owned(), base_of(pool.base()));
        // Its claim stays this daemon's until the pool does not exist.
        pool.end().await;
        lock(&self.open).retain(|known| !Arc::ptr_eq(known, pool));
        let mut hold = BaseHold::new(env, &base, "the deletion of a pool")?;
        hold.take_claim(env, pool.uuid(), &self.holder, self.pace).await?;
        // Without the superblocks of the first shard there is no pool.
        let erase = hold.run(env, Start::Erase(Box::new(Erasing::new(whole))));
        let Some(claim) = hold.claim() else { return erase.await };
        let base = hold.descriptor();
        let erased = claim.renew_during(&base, erase).await;
        claim.release(base).await;
        erased
    }
}

/// The superblock of the pool on a disk, or why it is invalid. A disk that is removed meanwhile has none.
async fn probe(env: &Env, disk: &str) -> Result<Option<Result<Superblock, Invalid>>, Error> {
    let reactor = env.reactors().find_least_loaded(None).ok_or(Error::Ended)?;
    let (removed, removal) = oneshot::channel::<()>();
    let removed = Mutex::new(Some(removed));
    let descriptor = env.registry().open(disk, Access::Probe, "the search for pools", move |event| {
        if event == Event::Removed {
            lock(&removed).take();
        }
    })?;
    let base = base_of(descriptor.bdev());
    let search =
        async move |channel: &AsyncChannel, _: &Local| match superblock(channel, base, SUPERBLOCK_PLACES[0])
            .await
        {
            Some(Ok(first)) => Some(Ok(first)),
            first => superblock(channel, base, SUPERBLOCK_PLACES[1]).await.or(first),
        };
    Ok(visit(&reactor, descriptor, "search for pools", removal, search).await?.flatten())
}

/// The superblock at this byte offset, of whatever version and state.
async fn superblock(channel: &AsyncChannel, base: Base, offset: u64) -> Option<Result<Superblock, Invalid>> {
    let block = u64::from(base.block);
    let bytes = (SUPERBLOCK_BYTES as u64).next_multiple_of(block);
    if offset + bytes > base.bytes {
        return None;
    }
    let buffer = Buffer::new(bytes as usize, PAGE as usize);
    match channel.read(Lba(offset / block), aryk_bdev::Blocks(bytes / block), buffer).await {
        Ok(buffer) => match Superblock::parse(&buffer.bytes()[..SUPERBLOCK_BYTES]) {
            Err(Invalid::Signature) => None,
            found => Some(found),
        },
        Err(status) => {
            tracing::warn!(
                offset,
                ?status,
                "a disk cannot be searched for a pool: `bdev_examine` tries it again"
            );
            None
        }
    }
}
