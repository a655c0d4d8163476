//! `bdev_lvol_*`: SPDK's logical volumes, which are volumes of Aryk's pools: an lvolstore is a pool. Control context.
//!
//! A volume's disk has the volume's UUID as its name, and `POOL/VOLUME` as its alias. A pool notes the size of its clusters for
//! these methods: they report space in clusters, and round sizes up to them. The engine has no clusters.
//!
//! As in SPDK, errors of the lookup of an object have their own number, and errors of the operation on it have -32602.

pub(crate) mod copies;
mod member;
mod store;

use super::volumes;
use super::{Control, Error, Table};
use crate::error::INVALID_PARAMS;
use aryk_bdev::Bytes;
use aryk_bdev_volume::{Member, Pool};
use schemars::JsonSchema;
use serde::Deserialize;
use std::sync::Arc;

pub(super) fn register(table: &mut Table<Control>) {
    store::register(table);
    member::register(table);
    copies::register(table);
}

/// Error of an operation, for which SPDK has one code.
fn failed(error: impl Into<Error>) -> Error {
    error.into().coded(INVALID_PARAMS)
}

/// The pool that is named by its UUID or by its name, not by both.
fn find_store(control: &Control, uuid: Option<&str>, name: Option<&str>) -> Result<Arc<Pool>, Error> {
    match (uuid, name) {
        (Some(_), Some(_)) => {
            Err(Error::invalid("an lvolstore is named by its UUID or by its name, not by both"))
        }
        (None, None) => Err(Error::invalid("the UUID or the name of an lvolstore is missing")),
        (Some(uuid), None) => {
            let is_it = |pool: &Arc<Pool>| pool.uuid().to_string() == uuid.to_ascii_lowercase();
            let found = control.volumes.pools.list().into_iter().find(is_it);
            found.ok_or_else(|| Error::no_device("lvolstore", uuid))
        }
        (None, Some(name)) => {
            let found = control.volumes.pools.list().into_iter().find(|pool| pool.name() == name);
            found.ok_or_else(|| Error::no_device("lvolstore", name))
        }
    }
}

/// The volume or snapshot with this UUID or alias.
fn find(control: &Control, name: &str) -> Result<(Arc<Pool>, Member), Error> {
    volumes::find(control, name).map_err(|_| Error::no_device("logical volume", name))
}

/// Bytes of so many MiB, as whole clusters of a pool.
fn whole_clusters(pool: &Pool, mib: u64) -> Result<Bytes, Error> {
    let cluster = pool.cluster().0;
    let bytes = mib.checked_mul(1 << 20).and_then(|bytes| bytes.checked_next_multiple_of(cluster));
    bytes.map(Bytes).ok_or_else(|| Error::invalid("the size is too large"))
}

/// A method of clearing blocks. It has no effect: blocks that were never written read as zeroes.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "LvolClearMethod")]
enum ClearMethod {
    Default,
    None,
    Unmap,
    WriteZeroes,
}

/// As [`ClearMethod`], of a whole pool.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "LvsClearMethod")]
enum StoreClearMethod {
    None,
    Unmap,
    WriteZeroes,
}
