//! `bdev_nvme_cuse_register` and `_unregister`: character devices for the system's tools. Control context.

use super::{Control, Error, KIND, Phase, Table, find};
use aryk_cuse::Access;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::Deserialize;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "bdev_nvme_cuse_register",
        Phase::RunTime,
        "Creates character devices for `nvme` and `smartctl`: `/dev/aryk/NAME`, and `/dev/aryk/NAMEn1` for namespace 1.",
        cuse_register,
    );
    table.add(
        "bdev_nvme_cuse_unregister",
        Phase::RunTime,
        "Removes the character devices of an NVMe controller.",
        cuse_unregister,
    );
}

/// Parameters of `bdev_nvme_cuse_register`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Register {
    /// Name of the controller.
    name: String,
    /// Aryk only: whether a tool may also reset, format or sanitize the drive, set features, and change firmware and keys.
    #[serde(default)]
    allow_changes: bool,
}

async fn cuse_register(control: &Control, p: Register) -> Result<bool, Error> {
    let access = if p.allow_changes { Access::Change } else { Access::Read };
    find(control, &p.name)?.register_tools(access).await?;
    Ok(true)
}

/// Parameters of `bdev_nvme_cuse_unregister`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Unregister {
    /// Name of the controller.
    name: String,
}

async fn cuse_unregister(control: &Control, p: Unregister) -> Result<bool, Error> {
    if !find(control, &p.name)?.unregister_tools().await {
        let detail = format!("the {KIND} {} has no character devices", p.name);
        return Err(Error::errno(Errno::NODEV, detail));
    }
    Ok(true)
}
