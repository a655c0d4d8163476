//! The state of a disk's image that other clients change: features, snapshots, locks, and whether it has a LUKS header. Control
//! context: librbd's calls block, and run on a thread of the client. One call at a time does that for each pool, so that a pool
//! that does not answer holds no more than one of its threads.

use crate::disk::begin_read;
use crate::timer::within;
use crate::{Error, Spec, disk_of};
use aryk_bdev::Bdev;
use aryk_librbd::{CallError, Image, Lock, Snapshot};
use std::sync::Arc;
use std::time::Duration;

/// How long the cluster may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// The names of `RBD_FEATURE_*`, by bit.
const FEATURES: [&str; 12] = [
    "layering",
    "striping",
    "exclusive-lock",
    "object-map",
    "fast-diff",
    "deep-flatten",
    "journaling",
    "data-pool",
    "operations",
    "migrating",
    "non-primary",
    "dirty-cache",
];

/// The state of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageState {
    /// The image.
    pub spec: Spec,
    /// Bytes.
    pub size: u64,
    /// The image's features, by Ceph's names; those without a name by their bits.
    pub features: Vec<String>,
    /// Whether this daemon holds the exclusive lock.
    pub is_lock_owner: bool,
    /// All locks.
    pub locks: Vec<Lock>,
    /// The snapshots, the oldest first.
    pub snapshots: Vec<Snapshot>,
    /// The version of the LUKS header at the image's beginning.
    pub luks_version: Option<u16>,
}

/// The version of a LUKS header, if there is one at the beginning of a disk.
pub(crate) fn luks_version(beginning: &[u8]) -> Option<u16> {
    let version = beginning.strip_prefix(b"LUKS\xba\xbe")?.first_chunk()?;
    Some(u16::from_be_bytes(*version))
}

fn names_of(features: u64) -> Vec<String> {
    let bits = (0..u64::BITS).filter(|bit| features >> bit & 1 != 0);
    let name =
        |bit: u32| FEATURES.get(bit as usize).map_or_else(|| format!("bit {bit}"), |name| (*name).into());
    bits.map(name).collect()
}

/// Reads the state. Blocks.
fn read(image: &Arc<Image>, spec: Spec) -> Result<ImageState, CallError> {
    let (mut buffer, result) = begin_read(image);
    let result = result.blocking_recv();
    buffer.reclaim();
    let luks_version = match result {
        Ok(result) if result >= 0 => luks_version(buffer.bytes()),
        _ => None,
    };
    Ok(ImageState {
        size: image.size()?,
        features: names_of(image.features()?),
        is_lock_owner: image.is_lock_owner()?,
        locks: image.locks()?,
        snapshots: image.snapshots()?,
        luks_version,
        spec,
    })
}

/// Asks the cluster for the state of a disk's image.
///
/// # Errors
/// [`Error`]; [`Error::NoAnswer`] after ten seconds.
pub async fn state(bdev: &Arc<Bdev>) -> Result<ImageState, Error> {
    let disk = disk_of(bdev).ok_or_else(|| Error::NotOurs(bdev.name().to_owned()))?;
    let (image, connection) = disk.parts().ok_or(Error::Ending)?;
    let (spec, calls) = (disk.info().spec, connection.state_calls(&disk.info().spec.pool));
    let (name, lane) = (spec.to_string(), spec.lane());
    let read = async {
        let permit = calls.acquire_owned().await.map_err(|_| Error::Ending)?;
        // The thread gives the permit back, also if this call has been given up.
        let job = move || {
            let state = read(&image, spec);
            drop(permit);
            state
        };
        let state = connection.workers.run(lane, job).await?;
        state.map_err(|error| Error::Image { action: "inspect", image: name.clone(), error })
    };
    within(PATIENCE, read).await.unwrap_or_else(|| Err(Error::NoAnswer(name.clone())))
}
