//! `bdev_malloc_*`: disks in memory. Control context.

use super::details::{Details, Malloc};
use super::{Control, Count, Error, Name, Phase, Table};
use crate::journal;
use aryk_bdev::{Blocks, Bytes};
use aryk_bdev_malloc as module;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

const MODULE: &str = "malloc";

pub(super) fn register(table: &mut Table<Control>) {
    table.add("bdev_malloc_create", Phase::RunTime, "Creates a disk in memory.", create);
    table.add("bdev_malloc_delete", Phase::RunTime, "Removes a disk of `bdev_malloc_create`.", delete);
}

/// Parameters of `bdev_malloc_create`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Name of the new disk. Default: the first free name of `Malloc0`, `Malloc1`, …
    name: Option<String>,
    /// Block size in bytes.
    block_size: u32,
    /// Number of blocks.
    num_blocks: Count,
    /// Default: a random uuid.
    uuid: Option<Uuid>,
    /// Preferred I/O boundary in blocks.
    #[serde(default)]
    optimal_io_boundary: u32,
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
    #[serde(default, rename = "md_interleave", skip_serializing)]
    _md_interleave: bool,
    /// Ignored.
    #[serde(default, rename = "dif_is_head_of_md", skip_serializing)]
    _dif_is_head_of_md: bool,
    /// Ignored.
    #[serde(default, rename = "dif_pi_format", skip_serializing)]
    _dif_pi_format: u32,
    /// Ignored: the kernel places the memory.
    #[serde(default, rename = "numa_id", skip_serializing)]
    _numa_id: i32,
}

async fn create(control: &Control, mut p: Create) -> Result<String, Error> {
    super::refuse_metadata(p.md_size, p.dif_type)?;
    let name = p.name.take().unwrap_or_else(|| free_name(control));
    let identity = super::identity(&name, p.uuid)?;
    (p.name, p.uuid) = (Some(name), Some(identity.uuid));
    let blocks = super::check_blocks(Blocks(p.num_blocks.0))?;
    check_memory(blocks.checked_to_bytes(p.block_size).unwrap_or(Bytes::MAX))?;
    let config = module::Config {
        identity,
        block_size: p.block_size,
        physical_block_size: super::physical_block_size(p.physical_block_size, p.block_size)?,
        blocks,
        optimal_io_blocks: Blocks(p.optimal_io_boundary.into()),
    };
    let bdev = module::create(&control.env, config)?;
    let emptied = journal::is_restore();
    if emptied {
        let disk = bdev.name();
        tracing::warn!(disk, "the disk is empty: its contents were in the memory of the previous daemon");
    }
    let malloc = emptied.then_some(Malloc { emptied });
    let details = Details { malloc, ..Details::default() };
    Ok(control.made_disk(&bdev, MODULE, details, ("bdev_malloc_create", &p)))
}

/// The kernel overcommits memory, and allocates it when it is written. A disk that exceeds the host's memory could never be
/// filled, and is refused.
fn check_memory(bytes: Bytes) -> Result<(), Error> {
    // If the size of memory cannot be read, the kernel decides.
    let Some(all) = std::fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(memory) else {
        return Ok(());
    };
    match bytes > all {
        false => Ok(()),
        true => Err(Error::errno(
            Errno::NOMEM,
            format!("a disk of {bytes} bytes exceeds the host's memory of {all} bytes"),
        )),
    }
}

/// The host's memory in bytes, from the text of `/proc/meminfo`.
fn memory(meminfo: &str) -> Option<Bytes> {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10).map(Bytes)
}

fn free_name(control: &Control) -> String {
    let mut names = (0_u32..).map(|n| format!("Malloc{n}"));
    names.find(|name| control.disks.find(name).is_err()).expect("a free number exists")
}

async fn delete(control: &Control, p: Name) -> Result<bool, Error> {
    control.remove_disk(MODULE, &p.name).await
}

impl From<module::Error> for Error {
    fn from(error: module::Error) -> Self {
        match error {
            module::Error::Registry(error) => error.into(),
            error @ module::Error::Memory { .. } => Self::errno(Errno::NOMEM, error.to_string()),
        }
    }
}
