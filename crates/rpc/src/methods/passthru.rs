//! `bdev_passthru_*`: disks that pass all requests to another disk. Control context.

use super::details::{Details, Passthru};
use super::waiting::waits;
use super::{Control, Error, Name, Phase, Table};
use aryk_bdev_passthru as module;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Namespace of the disks' uuids.
const NAMESPACE: Uuid = uuid::uuid!("7e25812e-c8c0-4d3f-8599-16d790555b85");
const MODULE: &str = "passthru";
pub(super) const CREATE: &str = "bdev_passthru_create";

pub(super) fn register(table: &mut Table<Control>) {
    table.add(CREATE, Phase::RunTime, "Creates a disk that passes all requests to another disk.", create);
    table.add("bdev_passthru_delete", Phase::RunTime, "Removes a disk of `bdev_passthru_create`.", delete);
}

/// Parameters of `bdev_passthru_create`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Create {
    /// Name of the new disk.
    name: String,
    /// Name of the base disk.
    base_bdev_name: String,
    /// Default: derived from the base disk's uuid.
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<Uuid>,
}

pub(super) async fn create(control: &Control, mut p: Create) -> Result<String, Error> {
    if waits(control, &p.base_bdev_name, &p.name, (CREATE, &p))? {
        return Ok(p.name);
    }
    let base = control.disks.find(&p.base_bdev_name)?;
    let identity = super::identity_over(&p.name, p.uuid, &base, NAMESPACE)?;
    p.uuid = Some(identity.uuid);
    let config = module::Config { identity, base: p.base_bdev_name.clone() };
    let bdev = module::create(&control.env, config)?;
    let details = Details {
        passthru: Some(Passthru { base_bdev_name: p.base_bdev_name.clone(), name: p.name.clone() }),
        ..Details::default()
    };
    Ok(control.made_disk(&bdev, MODULE, details, (CREATE, &p)))
}

async fn delete(control: &Control, p: Name) -> Result<bool, Error> {
    control.remove_disk(MODULE, &p.name).await
}
