//! `bdev_malloc_*`: disks in memory. Control context.

use super::details::{Details, Malloc};
use super::{Control, Count, Error, Name, Phase, Table};
use crate::journal;
use aryk_bdev_malloc as module;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

const MODULE: &str = "malloc";

pub(super) fn register(table: &mut Table<Control>) {
    table.add("bdev_malloc_create", Phase::RunTime, "Makes a disk in memory.", create);
    table.add("bdev_malloc_delete", Phase::RunTime, "Removes a disk that `bdev_malloc_create` made.", delete);
}

/// Parameters of `bdev_malloc_create`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// By default the first of `Malloc0`, `Malloc1`, … that is free.
    name: Option<String>,
    /// Bytes.
    block_size: u32,
    /// How many of these.
    num_blocks: Count,
    /// By default a random one.
    uuid: Option<Uuid>,
    /// Blocks.
    #[serde(default)]
    optimal_io_boundary: u32,
    /// Bytes of a block of the store that it plays; by default as large as a block.
    #[serde(skip_serializing_if = "Option::is_none")]
    physical_block_size: Option<u32>,
    /// Metadata beside each block: 0, for there is none.
    #[serde(default, skip_serializing)]
    md_size: u32,
    /// 0, for blocks have no protection information.
    #[serde(default, skip_serializing)]
    dif_type: u32,
    /// How metadata would be laid out that there is not.
    #[serde(default, rename = "md_interleave", skip_serializing)]
    _md_interleave: bool,
    /// Not heeded.
    #[serde(default, rename = "dif_is_head_of_md", skip_serializing)]
    _dif_is_head_of_md: bool,
    /// Not heeded.
    #[serde(default, rename = "dif_pi_format", skip_serializing)]
    _dif_pi_format: u32,
    /// The kernel places memory.
    #[serde(default, rename = "numa_id", skip_serializing)]
    _numa_id: i32,
}

async fn create(control: &Control, mut p: Create) -> Result<String, Error> {
    super::refuse_metadata(p.md_size, p.dif_type)?;
    let name = p.name.take().unwrap_or_else(|| free_name(control));
    let identity = super::identity(&name, p.uuid)?;
    (p.name, p.uuid) = (Some(name), Some(identity.uuid));
    check_memory(p.num_blocks.0.saturating_mul(p.block_size.into()))?;
    let config = module::Config {
        identity,
        block_size: p.block_size,
        physical_block_size: super::physical_block_size(p.physical_block_size, p.block_size)?,
        blocks: super::check_blocks(p.num_blocks)?,
        optimal_io_blocks: p.optimal_io_boundary,
    };
    let bdev = module::create(&control.disks.registry, config)?;
    let emptied = journal::is_restore();
    if emptied {
        let disk = bdev.name();
        tracing::warn!(
            disk,
            "the disk is empty: what it held in memory went with the daemon before this one"
        );
    }
    let malloc = emptied.then_some(Malloc { emptied });
    let details = Details { malloc, ..Details::default() };
    Ok(control.made_disk(&bdev, MODULE, details, ("bdev_malloc_create", &p)))
}

/// Memory is taken as it is written, so that the kernel lends any amount of it; a disk that can never be filled is refused.
fn check_memory(bytes: u64) -> Result<(), Error> {
    // Where it cannot be read, the kernel has the last word.
    let Some(all) = std::fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(memory) else {
        return Ok(());
    };
    match bytes > all {
        false => Ok(()),
        true => Err(Error::errno(
            Errno::NOMEM,
            format!("a disk of {bytes} bytes: there are {all} bytes of memory"),
        )),
    }
}

/// The host's memory in bytes, of the text of `/proc/meminfo`.
fn memory(meminfo: &str) -> Option<u64> {
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = total.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1 << 10)
}

fn free_name(control: &Control) -> String {
    let mut names = (0_u32..).map(|n| format!("Malloc{n}"));
    names.find(|name| control.disks.find(name).is_err()).expect("there are fewer disks than numbers")
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
