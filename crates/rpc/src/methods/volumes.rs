//! Pools and volumes, for the methods of both families: SPDK's `bdev_lvol_*` and `aryk_pool_*`, `aryk_volume_*`. Control context.
//!
//! A pool has no note in the configuration: it is found on its disk when the disk appears, and its volumes are what
//! the pool says.

use super::details::{Details, Lvol};
use super::waiting::make_waiting;
use super::{Control, Error};
use crate::config::{AbsentObject, Subsystem};
use crate::pool_positions;
use aryk_bdev::Bdev;
use aryk_bdev_volume as module;
use aryk_bdev_volume::{CommandError, Member, NewPool, NewVolume, Parent, Pool, Pools};
use aryk_reactor::{
    ChangeError, Clock, Hold, MOVE_PATIENCE, MoveError, Order, PREPARE_PATIENCE, ReactorList,
};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::Serialize;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::convert::Infallible;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::timeout;
use uuid::Uuid;

/// The module of the disks of volumes.
pub(super) const MODULE: &str = "lvol";

/// The time that the creation of a disk waits for the search for a pool on it. A disk that does not respond is searched as long
/// as it takes, and its creation ends before.
const PATIENCE: Duration = Duration::from_millis(500);

/// When a disk is searched again whose pool a daemon of another host has.
const RETRY: Duration = Duration::from_secs(30);
/// The time that `bdev_wait_for_examine` waits for all searches.
const PATIENCE_FOR_ALL: Duration = Duration::from_secs(5);

/// The pools.
#[derive(Debug)]
pub(crate) struct State {
    pub pools: Pools,
    /// Whether new disks are searched by themselves.
    auto_examine: Cell<bool>,
    /// Where searches begin, once [`follow`] was called.
    wanted: RefCell<Option<UnboundedSender<Search>>>,
    /// Disks whose pools were in use by daemons of other hosts when they were searched last, each with what its repeated search
    /// looks at: that ends when the entry goes.
    in_use: RefCell<BTreeMap<String, Rc<()>>>,
    /// The number of searches that have not ended.
    pending: watch::Sender<usize>,
    /// Names of the disks that are searched at the moment.
    searched: RefCell<BTreeSet<String>>,
    /// Notifies those who wait for the end of a search of their disk.
    search_ended: Notify,
    /// Copies of volumes to other disks.
    pub copies: Rc<super::lvol::copies::Copies>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            pools: Pools::default(),
            auto_examine: Cell::new(true),
            wanted: RefCell::default(),
            in_use: RefCell::default(),
            pending: watch::Sender::default(),
            searched: RefCell::default(),
            search_ended: Notify::new(),
            copies: Rc::default(),
        }
    }
}

impl State {
    /// Has the shard of a pool whose thread has that number run elsewhere. `None` if no shard has that thread.
    pub async fn order(
        &self,
        thread: u64,
        order: Order,
        reactors: &ReactorList,
    ) -> Option<Result<(), MoveError>> {
        let of = |pool: Arc<Pool>| pool.shard_of_thread(thread).map(|shard| (pool, shard));
        let (pool, shard) = self.pools.list().into_iter().find_map(of)?;
        Some(match order {
            Order::Move(to, patience) => move_to(&pool, shard, to, patience).await,
            Order::Stay(cores) => {
                let moved = match cores.contains(pool.cores()[shard]) {
                    true => Ok(()),
                    false => match reactors.find_least_loaded(Some(&cores)) {
                        Some(to) => move_to(&pool, shard, to, MOVE_PATIENCE).await,
                        None => Err(MoveError::Cores(cores.clone())),
                    },
                };
                match moved {
                    Ok(()) => pool.set_shard_cores(shard, cores).await,
                    Err(error) => Err(error),
                }
            }
        })
    }
}

/// Moves a shard of a pool to a reactor while its volumes are used.
async fn move_to(pool: &Pool, shard: usize, to: Hold, patience: Duration) -> Result<(), MoveError> {
    timeout(PREPARE_PATIENCE, pool.prepare_move(shard, &to)).await.unwrap_or(Err(MoveError::NotReady))?;
    pool.move_shard(shard, to, patience).await
}

/// Moves a shard of a pool to the reactor of a core while its volumes are used.
pub(super) async fn move_shard(
    control: &Control,
    pool: &Pool,
    shard: Option<u32>,
    core: u16,
) -> Result<(), Error> {
    let count = pool.cores().len();
    let shard = match (shard, count) {
        (Some(shard), _) if (shard as usize) < count => shard as usize,
        (None, 1) => 0,
        (Some(_), 1) => return Err(Error::invalid("the pool has one shard, 0")),
        _ => return Err(Error::invalid(format!("name one of the shards of the pool: 0 to {}", count - 1))),
    };
    let Some(to) = control.reactors.hold_for_arrival(core) else {
        let is_there = control.reactors.handles().iter().any(|reactor| reactor.core() == core);
        return Err(match is_there {
            true => Error::errno(Errno::BUSY, format!("the reactor on core {core} is being removed")),
            false => ChangeError::NotFound(core).into(),
        });
    };
    let moved = move_to(pool, shard, to, MOVE_PATIENCE).await;
    moved.map_err(|error| match error {
        MoveError::TooSlow => Error::errno(
            Errno::TIMEDOUT,
            "the disk of the pool did not complete its requests in time, so the shard stays on its core",
        ),
        MoveError::Moving => Error::errno(Errno::BUSY, "the shard is being moved already"),
        MoveError::Ending => Error::errno(Errno::NODEV, "the pool has ended"),
        other => other.into(),
    })?;
    tracing::info!(pool = pool.name(), shard, core, "shard moved");
    Ok(())
}

/// Refuses to shrink a disk whose end a pool, or a volume on this image, would miss.
pub(super) fn check_shrinking(control: &Control, bdev: &Bdev) -> Result<(), Error> {
    let why = match (control.volumes.pools.on(bdev), bdev.frozen_by()) {
        (Some(pool), _) => format!("the pool '{}' is on the disk: a pool does not shrink", pool.name()),
        (None, Some(owner)) => format!("{owner} needs the disk as it is"),
        (None, None) => return Ok(()),
    };
    Err(Error::errno(Errno::BUSY, why))
}

/// The search for a pool on a disk.
struct Search {
    disk: String,
    /// Dropped at the end.
    ended: oneshot::Sender<Infallible>,
}

/// What is said of a volume.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "LvolAttributes")]
pub(super) struct Attributes {
    /// Whether it takes space when it is written only. False for a volume for which the pool reserves space.
    is_thin_provisioned: bool,
    /// Whether it is a snapshot.
    is_snapshot: bool,
    /// Whether it has the blocks of a snapshot, as far as it was not written since.
    is_clone: bool,
    /// Whether it has the blocks of a disk of another module, as far as it was not written since.
    is_esnap_clone: bool,
}

impl Attributes {
    pub fn of(pool: &Pool, member: &Member) -> Self {
        let parent = pool.parent(member);
        Self {
            is_thin_provisioned: !member.volume.is_thick,
            is_snapshot: member.is_snapshot(),
            is_clone: matches!(parent, Parent::Snapshot(_)),
            is_esnap_clone: matches!(parent, Parent::Image(_)),
        }
    }
}

/// The volume or snapshot that is named by its UUID, or as `POOL/VOLUME`.
pub(crate) fn find(control: &Control, name: &str) -> Result<(Arc<Pool>, Member), Error> {
    let pools = &control.volumes.pools;
    if let Ok(uuid) = Uuid::parse_str(name) {
        let in_pool = |pool: Arc<Pool>| {
            let member = pool.members().into_iter().find(|member| member.uuid() == uuid)?;
            Some((pool, member))
        };
        let found = pools.list().into_iter().find_map(in_pool);
        return found.ok_or_else(|| Error::no_device("volume or snapshot", name));
    }
    let Some((pool, volume)) = name.split_once('/') else {
        return Err(Error::no_device("volume or snapshot", name));
    };
    let pool = pools.find(pool)?;
    let member = pool.find(volume)?;
    Ok((pool, member))
}

/// The bytes of a volume on an image, and of its blocks if the caller has not chosen them.
pub(super) fn size_on(image: &Bdev, block_size: Option<u32>) -> (u64, u32) {
    let geometry = image.geometry();
    let block_size = block_size.unwrap_or(geometry.block_size);
    let bytes = geometry.blocks.to_bytes(geometry.block_size).0;
    (bytes.next_multiple_of(block_size.max(1).into()), block_size)
}

/// `driver_specific` of a disk, if it is that of a volume.
pub(super) fn details(control: &Control, bdev: &Bdev) -> Option<Lvol> {
    let base = bdev.device().bases().into_iter().next()?;
    let pool = control.volumes.pools.on(&base)?;
    let members = pool.members();
    let member = members.iter().find(|member| member.uuid() == bdev.identity().uuid)?;
    let mut parents = pool.parents();
    let of_snapshot = |other: &Member| match parents.get(&other.id) {
        Some(Parent::Snapshot(name)) if name == member.name() => Some(other.name().to_owned()),
        _ => None,
    };
    let clones = member.is_snapshot().then(|| members.iter().filter_map(of_snapshot).collect());
    let parent = parents.remove(&member.id).unwrap_or(Parent::None);
    Some(Lvol {
        lvol_store_uuid: pool.uuid(),
        base_bdev: base.name().to_owned(),
        thin_provision: !member.volume.is_thick,
        num_allocated_clusters: member.bytes().div_ceil(pool.cluster().0),
        snapshot: member.is_snapshot(),
        clone: matches!(parent, Parent::Snapshot(_)),
        esnap_clone: matches!(parent, Parent::Image(_)),
        external_snapshot_name: member.image().map(|image| image.uuid.to_string()),
        base_snapshot: match parent {
            Parent::Snapshot(name) => Some(name),
            Parent::Image(_) | Parent::None => None,
        },
        clones,
    })
}

/// Forgets the pools whose disks were removed, so that these disks close.
pub(crate) fn forget_gone(control: &Control) {
    control.volumes.pools.forget_ended();
    control.volumes.pools.forget_removed_disks();
}

/// Notes the disks of a pool that are new.
fn note_disks(control: &Control, pool: &Pool) {
    for disk in pool.members().into_iter().filter_map(|member| member.disk) {
        if !control.disks.is_made(disk.name()) {
            control.disks.made(&disk, MODULE, Details::default());
        }
    }
}

/// What the metrics report on pools.
pub(crate) async fn metrics(control: &Control) -> Vec<aryk_metrics::Pool> {
    let mut pools = Vec::new();
    for pool in control.volumes.pools.list() {
        // A pool may end meanwhile.
        if let (Ok(space), Ok(stats)) = (pool.space().await, pool.stats().await) {
            let members = pool.members();
            let (snapshots, volumes): (Vec<_>, Vec<_>) = members.iter().partition(|m| m.is_snapshot());
            let count = pool.last_count();
            let space_of = |member: &Member| {
                let space = count.as_ref()?.of.get(&member.id)?;
                Some(aryk_metrics::PoolMember {
                    name: member.name().to_owned(),
                    is_snapshot: member.is_snapshot(),
                    size: member.bytes(),
                    own_bytes: space.own_bytes,
                    shared_bytes: space.shared_bytes,
                })
            };
            pools.push(aryk_metrics::Pool {
                name: pool.name(),
                is_writable: pool.health() == module::Health::Ready,
                volumes: volumes.len() as u64,
                snapshots: snapshots.len() as u64,
                total_bytes: space.total.0,
                free_bytes: space.free.0,
                provisioned_bytes: volumes.iter().map(|volume| volume.bytes()).sum(),
                user_write_bytes: stats.user_write_bytes,
                user_read_bytes: stats.user_read_bytes,
                written: [
                    ("log", stats.log_write_bytes),
                    ("moved", stats.moved_write_bytes - stats.gathered_write_bytes),
                    ("gathered", stats.gathered_write_bytes),
                    ("index", stats.index_write_bytes),
                    ("manifest", stats.manifest_write_bytes),
                ],
                read: [
                    ("data", stats.data_read_bytes),
                    ("index", stats.index_read_bytes),
                    ("background", stats.background_read_bytes),
                ],
                space: [
                    ("segments", stats.used_bytes),
                    ("data", stats.live_bytes),
                    ("index", stats.index_bytes),
                ],
                cache_hits: stats.cache_hits,
                cache_misses: stats.cache_misses,
                backlog_bytes: stats.unflushed_bytes,
                debt_bytes: stats.debt_bytes,
                waiting_requests: stats.waiting_requests,
                price_percent: stats.price_percent,
                gathered_ranges: stats.gathered_ranges,
                damaged_blocks: stats.damaged_blocks,
                scrub_read_bytes: stats.scrub_read_bytes,
                scrub_damaged_blocks: stats.scrub_damaged_blocks,
                scrub_complete_since: pool.scrub_report().complete_since,
                members: members.iter().filter_map(space_of).collect(),
                counted_ago: count.as_ref().map(|count| Clock::Monotonic.now().since(count.at)),
            });
        }
    }
    pools
}

fn check_pool_name(name: &str) -> Result<(), Error> {
    match name.is_empty() || name.contains('/') {
        true => Err(Error::invalid("a pool's name must not be empty, and has no `/`")),
        false => Ok(()),
    }
}

/// Gives a pool another name, and its volumes other aliases.
pub(super) async fn rename_pool(control: &Control, pool: &Pool, name: String) -> Result<(), Error> {
    check_pool_name(&name)?;
    if pool.name() == name {
        return Ok(());
    }
    Ok(control.volumes.pools.rename(pool, name).await?)
}

/// Creates a pool.
pub(super) async fn create_pool(control: &Control, new: NewPool) -> Result<Arc<Pool>, Error> {
    control.check_open()?;
    check_pool_name(&new.name)?;
    let pool = control.volumes.pools.create(&control.env, new).await?;
    pool_positions::save(control, &pool).await;
    tracing::info!(pool = pool.name(), disk = pool.base().name(), "pool created");
    Ok(pool)
}

/// Deletes a pool, with its volumes.
pub(super) async fn delete_pool(control: &Control, pool: &Arc<Pool>) -> Result<(), Error> {
    pool.set_ending(true).await?;
    if let Err(error) = remove_disks(control, pool).await {
        pool.set_ending(false).await?;
        pool.refresh().await?;
        announce(control, pool).await;
        return Err(error);
    }
    control.volumes.pools.delete(&control.env, pool).await?;
    pool_positions::forget(control, pool.uuid());
    tracing::info!(pool = pool.name(), disk = pool.base().name(), "pool deleted");
    Ok(())
}

/// Removes the disks of all volumes of a pool.
async fn remove_disks(control: &Control, pool: &Arc<Pool>) -> Result<(), Error> {
    for member in pool.members().iter().rev() {
        remove_disk_of(control, member).await?;
    }
    Ok(())
}

/// Creates a volume.
pub(super) async fn create_volume(control: &Control, pool: &Pool, new: NewVolume) -> Result<Member, Error> {
    control.check_open()?;
    let made = pool.create_volume(new).await;
    note_disks(control, pool);
    Ok(made?)
}

/// Takes snapshots of volumes of a pool at one instant.
pub(super) async fn snapshot(
    control: &Control,
    pool: &Pool,
    wanted: Vec<(module::VolumeId, String, Uuid)>,
) -> Result<Vec<Member>, Error> {
    control.check_open()?;
    let made = pool.snapshot(wanted).await;
    note_disks(control, pool);
    Ok(made?)
}

/// Deletes a volume or a snapshot, after its users have closed its disk.
pub(super) async fn delete(control: &Control, pool: &Pool, member: &Member) -> Result<(), Error> {
    pool.begin_to_delete(member.id)?;
    let removed = remove_disk_of(control, member).await;
    let deleted = match removed {
        Ok(()) => pool.delete(member.id).await.map_err(Error::from),
        Err(error) => Err(error),
    };
    if deleted.is_err() && !pool.has_ended() {
        // The volume is still there: so is its disk.
        give_disk_back(control, pool, member).await;
    }
    deleted
}

async fn remove_disk_of(control: &Control, member: &Member) -> Result<(), Error> {
    match &member.disk {
        // It may have gone with the disk on which the volume depends.
        Some(disk) if control.disks.find(disk.name()).is_ok() => {
            control.remove_disk(MODULE, disk.name()).await.map(drop)
        }
        Some(_) | None => Ok(()),
    }
}

/// Gives a volume its disk again, after it was removed.
async fn give_disk_back(control: &Control, pool: &Pool, member: &Member) {
    pool.keep(member.id);
    match pool.refresh().await {
        Ok(()) => announce(control, pool).await,
        Err(error) => tracing::warn!(pool = pool.name(), %error, "a volume has no disk"),
    }
}

/// Refuses to change a volume that is in use.
fn check_unused(pool: &Pool, member: &Member) -> Result<(), Error> {
    let user = member.disk.as_ref().and_then(|disk| disk.openers().into_iter().next());
    if let Some((user, _)) = user {
        let why = format!("'{}' is in use by {user}, which may write to it", pool.alias(member.name()));
        return Err(Error::errno(Errno::BUSY, why));
    }
    Ok(())
}

/// Gives a volume, which must not be in use, another base.
pub(super) async fn set_parent(
    control: &Control,
    pool: &Pool,
    member: &Member,
    parent: module::Origin,
) -> Result<(), Error> {
    control.check_open()?;
    if member.is_snapshot() {
        return Err(Error::invalid(format!("'{}' is a snapshot", pool.alias(member.name()))));
    }
    check_unused(pool, member)?;
    Ok(pool.set_parent(member.id, parent).await?)
}

/// Makes a volume read-only for ever: a snapshot of itself. It must not be in use.
pub(super) async fn set_read_only(control: &Control, pool: &Pool, member: &Member) -> Result<(), Error> {
    control.check_open()?;
    check_unused(pool, member)?;
    pool.begin_to_delete(member.id)?;
    let frozen = match remove_disk_of(control, member).await {
        Ok(()) => pool.freeze(member.id).await.map_err(Error::from),
        Err(error) => Err(error),
    };
    give_disk_back(control, pool, member).await;
    frozen
}

/// Searches disks for pools as long as the daemon lives. Needs a tokio `LocalSet`.
pub(crate) fn follow(control: &Rc<Control>) {
    let (sender, wanted) = unbounded_channel();
    control.volumes.wanted.replace(Some(sender));
    tokio::task::spawn_local(search_all(Rc::downgrade(control), wanted));
}

async fn search_all(control: Weak<Control>, mut wanted: UnboundedReceiver<Search>) {
    while let Some(Search { disk, ended }) = wanted.recv().await {
        let Some(control) = control.upgrade() else { return };
        tokio::task::spawn_local(async move {
            search(&control, &disk).await;
            drop(ended);
            control.volumes.pending.send_modify(|pending| *pending -= 1);
        });
    }
}

/// Begins to look for a pool on a disk that has appeared. A pool that is found is opened, and what has waited for its volumes is
/// created.
pub(crate) fn begin_search(control: &Control, disk: &str) -> Option<oneshot::Receiver<Infallible>> {
    let state = &control.volumes;
    if !state.auto_examine.get() {
        return None;
    }
    state.search(disk)
}

impl State {
    /// Sets whether new disks are searched.
    pub fn set_auto_examine(&self, searches: bool) {
        self.auto_examine.set(searches);
    }

    /// Begins a search that was asked for.
    pub fn search(&self, disk: &str) -> Option<oneshot::Receiver<Infallible>> {
        let (ended, end) = oneshot::channel();
        self.wanted.borrow().as_ref()?.send(Search { disk: disk.to_owned(), ended }).ok()?;
        self.pending.send_modify(|pending| *pending += 1);
        Some(end)
    }
}

/// Searches a disk from time to time, while its pool is in use by a daemon of another host.
async fn search_again(control: Weak<Control>, is_in_use: Weak<()>, disk: String) {
    loop {
        tokio::time::sleep(RETRY).await;
        let now = control.upgrade().filter(|_| is_in_use.strong_count() > 0);
        let Some(end) = now.and_then(|control| control.volumes.search(&disk)) else { return };
        // The sender is dropped, not sent.
        let _ = end.await;
    }
}

/// Looks for a pool on a disk that has appeared ([`begin_search`]). Returns at its end, or while a slow disk is still searched.
pub(crate) async fn examine(control: &Control, disk: &str) {
    if let Some(end) = begin_search(control, disk)
        && timeout(PATIENCE, end).await.is_err()
    {
        tracing::warn!(disk, "the disk is slow: it is still searched for a pool of volumes");
    }
}

/// Waits until all disks are searched, or for [`PATIENCE_FOR_ALL`].
pub(super) async fn examined(control: &Control) {
    let mut pending = control.volumes.pending.subscribe();
    let none_pending = pending.wait_for(|pending| *pending == 0);
    if timeout(PATIENCE_FOR_ALL, none_pending).await.is_err() {
        tracing::warn!("some disks are slow: they are still searched for pools of volumes");
    }
}

/// Whether the configuration gives a disk to guests, or to another disk. What it holds is theirs: they could write a pool of
/// their own making to it.
fn is_given_away(control: &Control, disk: &str) -> bool {
    let is_user = |object: &AbsentObject| match object.subsystem {
        Subsystem::VhostBlk | Subsystem::VhostScsi | Subsystem::Nvmf => object.call.names(disk),
        Subsystem::Bdev => object.call.base() == Some(disk),
        _ => false,
    };
    control.config.absent_objects().iter().any(is_user)
}

async fn search(control: &Rc<Control>, disk: &str) {
    if control.is_closing() || is_given_away(control, disk) {
        return;
    }
    // The call that has created a disk and the one that follows the changes of the registry may both want a search: the second
    // waits for the first, and finds the disk in use.
    let state = &control.volumes;
    while !state.searched.borrow_mut().insert(disk.to_owned()) {
        state.search_ended.notified().await;
    }
    make_dependents(control, disk).await;
    let last = |pool| pool_positions::stored(control, pool);
    let found = state.pools.examine(&control.env, disk, module::Settings::default(), last).await;
    state.searched.borrow_mut().remove(disk);
    state.search_ended.notify_waiters();
    match found {
        Ok(None) => {}
        Ok(Some(pool)) => opened(control, &pool, disk).await,
        // The disk was removed meanwhile.
        Err(module::Error::Registry(aryk_bdev::Error::NotFound(_))) => {}
        Err(error @ module::Error::InUse { .. }) => {
            if let Entry::Vacant(entry) = state.in_use.borrow_mut().entry(disk.to_owned()) {
                let seconds = RETRY.as_secs();
                tracing::warn!(disk, %error, seconds, "the disk is searched again from time to time: its pool is in use");
                let is_in_use = Rc::downgrade(entry.insert(Rc::new(())));
                tokio::task::spawn_local(search_again(Rc::downgrade(control), is_in_use, disk.to_owned()));
            }
            return;
        }
        Err(error) => tracing::error!(disk, %error, "the disk has a pool that cannot be opened"),
    }
    state.in_use.borrow_mut().remove(disk);
}

/// Opens the pool of a disk that a search has not opened. `may_be_older`: also if the disk came back older.
pub(super) async fn open_pool(
    control: &Control,
    disk: &str,
    settings: module::Settings,
    may_be_older: bool,
) -> Result<Arc<Pool>, Error> {
    control.check_open()?;
    if is_given_away(control, disk) {
        let why =
            format!("the configuration gives '{disk}' to a VM or to another disk: what it holds is theirs");
        return Err(Error::errno(Errno::BUSY, why));
    }
    let last = |pool| if may_be_older { Vec::new() } else { pool_positions::stored(control, pool) };
    let pool = control.volumes.pools.open(&control.env, disk, settings, last).await?;
    opened(control, &pool, disk).await;
    Ok(pool)
}

/// Logs what was found when a pool was opened, and creates what has waited for its volumes.
async fn opened(control: &Control, pool: &Pool, disk: &str) {
    pool_positions::save(control, pool).await;
    let volumes = pool.members().len();
    tracing::info!(pool = pool.name(), disk, volumes, "pool found");
    for finding in pool.findings() {
        tracing::warn!(
            pool = pool.name(),
            disk,
            offset = finding.offset,
            "{} is damaged, and the pool has its content elsewhere",
            finding.what
        );
    }
    for (shard, place) in pool.log_damage() {
        tracing::error!(
            pool = pool.name(),
            disk,
            shard = shard.index(),
            segment = place.blob.0,
            offset = u64::from(place.unit) * u64::from(module::UNIT),
            "the log was damaged at this byte of the segment or behind: what was written later is lost"
        );
    }
    announce(control, pool).await;
}

/// Creates the disks of the volumes that depend on a disk which has appeared.
async fn make_dependents(control: &Control, disk: &str) {
    let Ok(disk) = control.disks.find(disk) else { return };
    let uuid = disk.identity().uuid;
    for pool in control.volumes.pools.list().into_iter().filter(|pool| pool.waits_for(uuid)) {
        if let Err(error) = pool.refresh().await {
            tracing::error!(pool = pool.name(), %error, "volumes that depend on a disk have no disks");
        }
        announce(control, &pool).await;
    }
}

/// Creates what has waited for the volumes of a pool.
pub(crate) async fn announce(control: &Control, pool: &Pool) {
    let disks: Vec<_> = pool.members().into_iter().filter_map(|member| member.disk).collect();
    let is_new = |disk: &&Arc<Bdev>| !control.disks.is_made(disk.name());
    let new: Vec<_> = disks.iter().filter(is_new).cloned().collect();
    note_disks(control, pool);
    for disk in new {
        // Volumes of other pools may depend on a snapshot.
        Box::pin(make_dependents(control, disk.name())).await;
        // An object waits for its disk by any of the disk's names.
        for name in [disk.name().to_owned()].into_iter().chain(disk.aliases()) {
            make_waiting(control, &name).await;
        }
    }
}

impl From<module::Error> for Error {
    fn from(error: module::Error) -> Self {
        use module::Error as Of;
        let errno = match &error {
            Of::Registry(error) => return error.clone().into(),
            Of::Busy(_) | Of::Unfinished(_) | Of::InUse { .. } | Of::TakenOver => Errno::BUSY,
            Of::NoThread => Errno::AGAIN,
            Of::Open(_) | Of::Ended | Of::NoPool(_) | Of::NoPoolOn(_) | Of::NoVolume(_) => Errno::NODEV,
            Of::Format(error) => match error {
                module::FormatError::Foreign(_) | module::FormatError::Pool { .. } => Errno::EXIST,
                module::FormatError::TooSmall { .. } => Errno::NOSPC,
                module::FormatError::Medium(_) => Errno::IO,
                module::FormatError::NotAPool { .. } => Errno::ILSEQ,
                _ => Errno::INVAL,
            },
            Of::Manifest(_) | Of::NoManifest | Of::Intent(_) | Of::Incomplete => Errno::ILSEQ,
            Of::Store(error) => match error {
                module::StoreError::Medium => Errno::IO,
                module::StoreError::NoSpace => Errno::NOSPC,
                module::StoreError::Gone => Errno::NODEV,
            },
            Of::Command(error) => match error {
                CommandError::NotFound => Errno::NODEV,
                CommandError::Exists => Errno::EXIST,
                CommandError::Invalid(_) | CommandError::WrongKind(_) => Errno::INVAL,
                CommandError::Busy => Errno::BUSY,
                CommandError::NoSpace | CommandError::NotReservable { .. } => Errno::NOSPC,
                CommandError::ReadOnly => Errno::ROFS,
                CommandError::Medium => Errno::IO,
            },
            Of::PoolExists(_) | Of::Twin { .. } => Errno::EXIST,
            Of::DamagedLog { .. } => Errno::ILSEQ,
            Of::ReadOnlyBase(_) => Errno::ROFS,
            Of::Nested(_)
            | Of::Image { .. }
            | Of::CopyTarget(_)
            | Of::Name(_)
            | Of::Size(_)
            | Of::Shards(_)
            | Of::Cluster(_) => Errno::INVAL,
            Of::Copy { .. } | Of::Claim { .. } => Errno::IO,
        };
        Self::errno(errno, error.to_string())
    }
}
