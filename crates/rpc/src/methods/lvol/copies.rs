//! `bdev_lvol_start_shallow_copy`, `bdev_lvol_check_shallow_copy`: what a snapshot has for itself is copied to another disk, in
//! the background. Control context.

use super::{failed, find};
use crate::methods::{Control, Error, Phase, Table};
use aryk_bdev::Bytes;
use aryk_bdev_volume::{Copy, whole_clusters};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Ended copies whose results are kept, at most.
const KEPT: usize = 1000;

/// The copies.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    next: Cell<u32>,
    all: RefCell<BTreeMap<u32, ShallowCopy>>,
}

#[derive(Debug)]
struct ShallowCopy {
    /// Bytes that were copied.
    copied: Arc<AtomicU64>,
    /// Clusters to copy.
    total: u64,
    /// Bytes of a cluster.
    cluster: Bytes,
    /// `None` while it runs.
    result: Option<Result<(), Error>>,
}

impl Copies {
    /// Adds a copy. The results of the oldest are forgotten when there are many.
    fn add(&self, copy: ShallowCopy) -> u32 {
        let id = self.next.get();
        self.next.set(id.wrapping_add(1));
        let mut all = self.all.borrow_mut();
        let ended = all.iter().filter(|(_, copy)| copy.result.is_some()).map(|(id, _)| *id);
        let ended: Vec<u32> = ended.collect();
        if ended.len() >= KEPT {
            all.remove(&ended[0]);
        }
        all.insert(id, copy);
        id
    }

    fn ended(&self, id: u32, result: Result<(), Error>) {
        match &result {
            Ok(()) => tracing::info!(operation = id, "shallow copy complete"),
            Err(error) => tracing::error!(operation = id, %error, "shallow copy failed"),
        }
        if let Some(copy) = self.all.borrow_mut().get_mut(&id) {
            copy.result = Some(result);
        }
    }
}

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_lvol_start_shallow_copy",
        Phase::RunTime,
        "Starts to copy the clusters that a snapshot has for itself to another disk.",
        start,
    );
    table.add(
        "bdev_lvol_check_shallow_copy",
        Phase::RunTime,
        "Reports the progress of a shallow copy.",
        check,
    );
}

/// Parameters of `bdev_lvol_start_shallow_copy`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "LvolStartShallowCopy")]
struct Start {
    /// UUID or alias of a snapshot, or of a volume that was made read-only.
    src_lvol_name: String,
    /// Name of the disk to which it is copied: at least as large, with blocks that are not larger, and not in use.
    dst_bdev_name: String,
}

/// Result of `bdev_lvol_start_shallow_copy`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "LvolShallowCopy")]
struct Started {
    /// The copy, for `bdev_lvol_check_shallow_copy`.
    operation_id: u32,
}

async fn start(control: &Control, p: Start) -> Result<Started, Error> {
    control.check_open()?;
    let (pool, member) = find(control, &p.src_lvol_name)?;
    let disk = member.disk.clone().ok_or_else(|| Error::no_device("disk of the volume", &p.src_lvol_name))?;
    if !member.is_snapshot() {
        let why = format!("'{}' is not read-only: copy a snapshot of it", p.src_lvol_name);
        return Err(failed(Error::errno(Errno::PERM, why)));
    }
    control.disks.find(&p.dst_bdev_name)?;
    let own = pool.own(member.id).await.map_err(failed)?;
    let copy = Copy::new(&control.env, disk.name(), &p.dst_bdev_name).map_err(failed)?;
    let cluster = pool.cluster();
    let (parts, total) = whole_clusters(&own, cluster, Bytes(member.bytes()));
    let copied = Arc::new(AtomicU64::new(0));
    let id =
        control.volumes.copies.add(ShallowCopy { copied: Arc::clone(&copied), total, cluster, result: None });
    let (copies, env) = (Rc::clone(&control.volumes.copies), control.env.clone());
    tokio::task::spawn_local(async move {
        let result = copy.run(&env, parts, copied).await.map_err(Error::from);
        copies.ended(id, result);
    });
    Ok(Started { operation_id: id })
}

/// Parameters of `bdev_lvol_check_shallow_copy`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "LvolCheckShallowCopy")]
struct Check {
    /// The copy, as `bdev_lvol_start_shallow_copy` returned it.
    operation_id: u32,
}

/// Result of `bdev_lvol_check_shallow_copy`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "LvolShallowCopyState")]
struct Progress {
    /// `in progress`, `complete` or `error`.
    state: &'static str,
    /// Clusters that were copied.
    copied_clusters: u64,
    /// Clusters to copy.
    total_clusters: u64,
    /// What failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

async fn check(control: &Control, p: Check) -> Result<Progress, Error> {
    let all = control.volumes.copies.all.borrow();
    let copy = all
        .get(&p.operation_id)
        .ok_or_else(|| Error::errno(Errno::NOENT, format!("there is no shallow copy {}", p.operation_id)))?;
    let copied = copy.copied.load(Ordering::Relaxed) / copy.cluster.0;
    let (state, copied, error) = match &copy.result {
        None => ("in progress", copied, None),
        // The last cluster may be a part of one.
        Some(Ok(())) => ("complete", copy.total, None),
        Some(Err(error)) => ("error", copied, Some(error.to_string())),
    };
    Ok(Progress { state, copied_clusters: copied, total_clusters: copy.total, error })
}
