//! `bdev_split_*`: disks that are parts of another disk. Control context.

use super::details::{Details, Split};
use super::waiting::waits;
use super::{Control, Count, Error, Phase, Table};
use crate::config::Subsystem;
use aryk_bdev::Bytes;
use aryk_bdev_split as module;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const MODULE: &str = "split";
pub(super) const CREATE: &str = "bdev_split_create";

pub(super) fn register(table: &mut Table<Control>) {
    table.add(CREATE, Phase::RunTime, "Creates disks that are parts of another disk.", create);
    table.add("bdev_split_delete", Phase::RunTime, "Removes all parts of a split disk.", delete);
}

/// Parameters of `bdev_split_create`; its result is empty if the base disk does not exist yet.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Create {
    /// Name of the base disk.
    base_bdev: String,
    /// Number of parts.
    split_count: u32,
    /// Size of each part in MiB. Default, or 0: the base disk is divided evenly.
    #[serde(default)]
    split_size_mb: Count,
}

pub(super) async fn create(control: &Control, mut p: Create) -> Result<Vec<String>, Error> {
    if waits(control, &p.base_bdev, &first_part(&p.base_bdev), (CREATE, &p))? {
        return Ok(Vec::new());
    }
    let base = control.disks.find(&p.base_bdev)?;
    base.name().clone_into(&mut p.base_bdev);
    let mib = Some(p.split_size_mb.0).filter(|&mib| mib > 0);
    let bytes = mib.map(|mib| {
        mib.checked_mul(1 << 20).map(Bytes).ok_or_else(|| Error::invalid("the size is too large"))
    });
    let config =
        module::Config { base: p.base_bdev.clone(), count: p.split_count, bytes: bytes.transpose()? };
    let parts = module::create(&control.env, config).await?;
    let mut names = Vec::new();
    for part in &parts {
        let offset = module::offset_in(part, &base).expect("the part lies in its base");
        let split = Split { base_bdev: base.name().to_owned(), offset_blocks: offset.0 };
        control.disks.made(part, MODULE, Details { split: Some(split), ..Details::default() });
        names.push(part.name().to_owned());
    }
    // One call creates all parts: its note has the name of the first part, which is removed with the others.
    control.config.made(Subsystem::Bdev, &names[0], CREATE, &p);
    Ok(names)
}

/// The name of a disk's first part, under which the note is stored.
fn first_part(base: &str) -> String {
    format!("{base}p0")
}

/// Parameters of `bdev_split_delete`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Delete {
    /// Name of the base disk.
    base_bdev: String,
}

async fn delete(control: &Control, p: Delete) -> Result<bool, Error> {
    if control.config.forget_absent(Subsystem::Bdev, &first_part(&p.base_bdev)) {
        return Ok(true);
    }
    let base = control.disks.find(&p.base_bdev)?;
    let parts = module::parts(&control.disks.registry, &base);
    if parts.is_empty() {
        return Err(Error::no_device("split disk", &p.base_bdev));
    }
    for part in parts {
        control.remove_disk(MODULE, part.name()).await?;
    }
    Ok(true)
}

impl From<module::Error> for Error {
    fn from(error: module::Error) -> Self {
        match error {
            module::Error::Registry(error) => error.into(),
            error @ module::Error::Size { .. } => Self::invalid(error.to_string()),
        }
    }
}
