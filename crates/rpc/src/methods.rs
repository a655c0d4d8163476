//! The methods, by area: each consists of a pair of types and an `async fn`. Control context.
//!
//! The types define the wire format; no other code parses or prints JSON. If SPDK has a method, its parameters and result are
//! SPDK's; additional parameters and members are marked as *Aryk only*.

mod bdev;
mod codes;
mod cores;
pub(crate) mod crypto;
mod defaults;
mod delay;
pub(crate) mod details;
mod error;
pub mod framework;
mod host;
pub mod keyring;
pub mod log;
pub(crate) mod luks;
mod lvol;
mod malloc;
mod memory;
mod none;
pub(crate) mod notify;
mod null;
pub(crate) mod nvme;
pub(crate) mod nvmf;
pub(crate) mod observe;
mod options;
mod passthru;
mod pollers;
mod pool;
pub(crate) mod qos;
pub(crate) mod rbd;
pub(crate) mod rekey;
mod scheduler;
mod split;
mod stats;
mod table;
mod trace;
mod uring;
pub(crate) mod vhost;
pub(crate) mod vhost_blk;
pub(crate) mod vhost_scsi;
pub(crate) mod volumes;
pub(crate) mod waiting;

pub(crate) use framework::SavedSubsystem;
pub(crate) use qos::group_object;
pub(crate) use table::DISCOVER;

use crate::dispatch::{Methods, NoParams};
use crate::params::Count;
use crate::{Control, Error, Phase, Table};
use aryk_bdev::{Bdev, Blocks, Identity};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::rc::{Rc, Weak};
use uuid::Uuid;

/// All methods, over `control`.
pub fn table(control: Rc<Control>) -> Rc<Methods<Control>> {
    table_with(control, |_| {})
}

/// All methods, over `control`, and those that `extend` adds.
pub fn table_with(control: Rc<Control>, extend: impl FnOnce(&mut Table<Control>)) -> Rc<Methods<Control>> {
    Rc::new_cyclic(|this| {
        let mut table = all(this);
        extend(&mut table);
        Methods::new(control, table, Control::has_started)
            .settle_with(async |control: &Control, outcome, done| control.settle(outcome, done).await)
            .hold_with(|control: &Control, changes, params| control.start_up.wait_for_call(changes, params))
    })
}

/// The methods; `this` is the table through which methods call other methods.
pub(crate) fn all(this: &Weak<Methods<Control>>) -> Table<Control> {
    let mut table = Table::default();
    bdev::register(&mut table);
    defaults::register(&mut table);
    crypto::register(&mut table);
    delay::register(&mut table);
    error::register(&mut table);
    framework::register(&mut table);
    keyring::register(&mut table);
    log::register(&mut table);
    luks::register(&mut table);
    lvol::register(&mut table);
    pool::register(&mut table);
    malloc::register(&mut table);
    memory::register(&mut table);
    none::register(&mut table);
    null::register(&mut table);
    nvme::register(&mut table);
    nvmf::register(&mut table);
    notify::register(&mut table);
    observe::register(&mut table);
    options::register(&mut table);
    passthru::register(&mut table);
    pollers::register(&mut table);
    qos::register(&mut table);
    rbd::register(&mut table);
    rekey::register(&mut table);
    scheduler::register(&mut table);
    cores::register(&mut table);
    split::register(&mut table);
    stats::register(&mut table);
    trace::register(&mut table);
    uring::register(&mut table);
    vhost::register(&mut table);
    vhost_blk::register(&mut table);
    vhost_scsi::register(&mut table);
    waiting::register(&mut table);
    table::register(&mut table, this);
    table.change_nothing(&CHANGE_NOTHING);
    codes::set(&mut table);
    table
}

/// The methods that read-only clients may call.
const CHANGE_NOTHING: [&str; 68] = [
    "accel_crypto_keys_get",
    "accel_get_module_info",
    "accel_get_opc_assignments",
    "accel_get_stats",
    "aryk_absent_get",
    "aryk_file_systems_get",
    "aryk_latency_get",
    "aryk_memory_clients_get",
    "aryk_pool_get_scrub",
    "aryk_pools_get",
    "aryk_volume_get_changed",
    "aryk_volume_get_space",
    "aryk_volumes_get",
    "aryk_stats_get",
    "aryk_trace_get",
    "bdev_get_bdevs",
    "bdev_get_histogram",
    "bdev_get_histogram_borders",
    // Its reset of statistics is a change, for which the method itself checks the rights.
    "bdev_get_iostat",
    "bdev_luks_get_header",
    "bdev_lvol_get_lvols",
    "bdev_lvol_get_lvstores",
    "bdev_nvme_get_controller_health_info",
    "bdev_nvme_get_controllers",
    "bdev_nvme_get_discovery_info",
    "bdev_nvme_get_io_paths",
    "bdev_nvme_get_mdns_discovery_info",
    "bdev_nvme_get_path_iostat",
    "bdev_nvme_get_transport_statistics",
    "bdev_qos_groups_get",
    "bdev_rbd_get_clusters_info",
    "bdev_rbd_get_image_info",
    "bdev_wait_for_examine",
    "framework_get_config",
    "framework_get_governor",
    "framework_get_pci_devices",
    "framework_get_reactors",
    "framework_get_scheduler",
    "framework_get_subsystems",
    "framework_wait_init",
    "iobuf_get_stats",
    "keyring_get_keys",
    "log_get_flags",
    "log_get_level",
    "log_get_print_level",
    "notify_get_notifications",
    "notify_get_types",
    "nvmf_discovery_get_referrals",
    "nvmf_get_stats",
    "nvmf_get_subsystems",
    "nvmf_get_targets",
    "nvmf_get_transports",
    "nvmf_subsystem_get_controllers",
    "nvmf_subsystem_get_listeners",
    "nvmf_subsystem_get_qpairs",
    "rpc.discover",
    "rpc_get_methods",
    "save_config",
    "scsi_get_devices",
    "sock_get_default_impl",
    "spdk_get_version",
    "thread_get_io_channels",
    "thread_get_pollers",
    "thread_get_stats",
    "trace_get_info",
    "trace_get_tpoint_group_mask",
    "vhost_get_controllers",
    "virtio_blk_get_transports",
];

/// Parameters at their defaults are not saved: SPDK rejects parameters of Aryk.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Members of an object that is always empty.
type Members = Map<String, Value>;

/// Parameters of the methods that name one disk: `bdev_*_delete` and others.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Name {
    /// Name, alias or uuid.
    name: String,
}

/// Bytes of a disk's name, at most: the name is stored in several places, including the event list.
const NAME_LEN_MAX: usize = 4096;

/// A new disk's name and uuid, which is random if none is given.
fn identity(name: &str, uuid: Option<Uuid>) -> Result<Identity, Error> {
    if name.is_empty() {
        return Err(Error::invalid("a disk's name must not be empty"));
    }
    if name.len() > NAME_LEN_MAX {
        return Err(Error::invalid(format!("a disk's name may have at most {NAME_LEN_MAX} bytes")));
    }
    let mut identity = Identity::named(name);
    identity.uuid = uuid.unwrap_or(identity.uuid);
    Ok(identity)
}

/// As [`identity`], for a disk over the whole of `base`: without a given uuid, it is derived from the base's uuid, in SPDK's
/// namespace for the module.
fn identity_over(name: &str, uuid: Option<Uuid>, base: &Bdev, namespace: Uuid) -> Result<Identity, Error> {
    identity(name, Some(uuid.unwrap_or_else(|| base.identity().uuid_of_whole(namespace))))
}

/// Checks that a disk has at least one block.
fn check_blocks(blocks: Blocks) -> Result<Blocks, Error> {
    match blocks {
        Blocks::ZERO => Err(Error::invalid("a disk must have at least one block")),
        blocks => Ok(blocks),
    }
}

/// The block size of the simulated store: the disk's own, unless a larger one is requested.
fn physical_block_size(asked: Option<u32>, block_size: u32) -> Result<u32, Error> {
    match asked {
        None => Ok(block_size),
        Some(bytes) if bytes.is_power_of_two() && bytes >= block_size => Ok(bytes),
        Some(bytes) => Err(Error::invalid(format!(
            "the physical block size {bytes} is not {block_size} times a power of two"
        ))),
    }
}

/// Refuses metadata beside the blocks. Some clients pass zeroes, which mean none.
fn refuse_metadata(md_size: u32, dif_type: u32) -> Result<(), Error> {
    match (md_size, dif_type) {
        (0, 0) => Ok(()),
        _ => Err(Error::invalid("metadata and protection information are not supported")),
    }
}

#[cfg(test)]
mod tests;
