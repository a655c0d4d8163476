//! `bdev_passthru_*`: disks that are other disks. Control context.

use super::{Control, Error, Methods, Name, Phase};
use aryk_bdev_passthru as module;
use serde::{Deserialize, Serialize};
use serde_json::json;
use uuid::Uuid;

const MODULE: &str = "passthru";

pub(super) fn register(methods: &mut Methods<Control>) {
    methods.add("bdev_passthru_create", Phase::RunTime, create);
    methods.add("bdev_passthru_delete", Phase::RunTime, delete);
}

/// Parameters of `bdev_passthru_create`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Create {
    name: String,
    base_bdev_name: String,
    uuid: Option<Uuid>,
}

async fn create(control: &Control, mut p: Create) -> Result<String, Error> {
    let identity = super::identity(&p.name, p.uuid)?;
    p.uuid = Some(identity.uuid);
    let config = module::Config { identity, base: p.base_bdev_name.clone() };
    let bdev = module::create(&control.disks.registry, config)?;
    let details = json!({"passthru": {"name": p.name, "base_bdev_name": p.base_bdev_name}});
    Ok(control.made_disk(&bdev, MODULE, details, ("bdev_passthru_create", &p)))
}

async fn delete(control: &Control, p: Name) -> Result<bool, Error> {
    control.remove_disk(MODULE, &p.name).await
}
