//! `bdev_null_*`: disks that discard their data. Control context.

use super::details::{Details, Preferred};
use super::{Control, Count, Error, Name, Phase, Table, is_default};
use crate::config::Subsystem;
use aryk_bdev::{Blocks, Bytes};
use aryk_bdev_null as module;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

const MODULE: &str = "null";

pub(super) fn register(table: &mut Table<Control>) {
    table.add("bdev_null_create", Phase::RunTime, "Creates a disk that discards its data.", create);
    table.add("bdev_null_delete", Phase::RunTime, "Removes a null disk.", delete);
    table.add("bdev_null_resize", Phase::RunTime, "Changes the size of a null disk.", resize);
}

/// Parameters of `bdev_null_create`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Name of the new disk.
    name: String,
    /// Block size in bytes.
    block_size: u32,
    /// Number of blocks.
    num_blocks: Count,
    /// Default: a random uuid.
    uuid: Option<Uuid>,
    /// Physical block size that the disk reports, in bytes. Default: the block size.
    #[serde(skip_serializing_if = "Option::is_none")]
    physical_block_size: Option<u32>,
    /// Size of metadata for each block: must be 0, since metadata is not supported.
    #[serde(default, skip_serializing)]
    md_size: u32,
    /// Must be 0, since protection information is not supported.
    #[serde(default, skip_serializing)]
    dif_type: u32,
    /// Layout of metadata, which is not supported. Ignored.
    #[serde(default, rename = "dif_is_head_of_md", skip_serializing)]
    _dif_is_head_of_md: bool,
    /// Ignored.
    #[serde(default, rename = "dif_pi_format", skip_serializing)]
    _dif_pi_format: u32,
    /// In blocks. `bdev_get_bdevs` reports this value, as the following ones; it has no effect on this disk.
    #[serde(default, skip_serializing_if = "is_default")]
    preferred_write_granularity: u32,
    /// Blocks.
    #[serde(default, skip_serializing_if = "is_default")]
    preferred_write_alignment: u32,
    /// Blocks.
    #[serde(default, skip_serializing_if = "is_default")]
    optimal_write_size: u32,
    /// Blocks.
    #[serde(default, skip_serializing_if = "is_default")]
    preferred_unmap_granularity: u32,
    /// Blocks.
    #[serde(default, skip_serializing_if = "is_default")]
    preferred_unmap_alignment: u32,
}

async fn create(control: &Control, mut p: Create) -> Result<String, Error> {
    super::refuse_metadata(p.md_size, p.dif_type)?;
    let identity = super::identity(&p.name, p.uuid)?;
    p.uuid = Some(identity.uuid);
    let config = module::Config {
        identity,
        block_size: p.block_size,
        physical_block_size: super::physical_block_size(p.physical_block_size, p.block_size)?,
        blocks: super::check_blocks(Blocks(p.num_blocks.0))?,
    };
    let bdev = module::create(&control.env, config)?;
    let preferred = Preferred {
        preferred_write_alignment: p.preferred_write_alignment,
        preferred_write_granularity: p.preferred_write_granularity,
        optimal_write_size: p.optimal_write_size,
        preferred_unmap_alignment: p.preferred_unmap_alignment,
        preferred_unmap_granularity: p.preferred_unmap_granularity,
    };
    let details = Details { preferred, ..Details::default() };
    Ok(control.made_disk(&bdev, MODULE, details, ("bdev_null_create", &p)))
}

async fn delete(control: &Control, p: Name) -> Result<bool, Error> {
    control.remove_disk(MODULE, &p.name).await
}

/// Parameters of `bdev_null_resize`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Resize {
    /// Name, alias or uuid.
    name: String,
    /// New size in MiB.
    new_size: Count,
}

async fn resize(control: &Control, p: Resize) -> Result<bool, Error> {
    let bdev = control.disks.find_made_by(&[MODULE], &p.name)?;
    let bytes = p.new_size.0.checked_mul(1 << 20).ok_or_else(|| Error::invalid("the size is too large"))?;
    let blocks = super::check_blocks(Bytes(bytes).whole_blocks(bdev.geometry().block_size))?;
    module::resize(&control.disks.registry, bdev.name(), blocks)?;
    control.config.changed(Subsystem::Bdev, bdev.name(), "num_blocks", blocks.0);
    Ok(true)
}
