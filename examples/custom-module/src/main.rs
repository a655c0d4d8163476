//! `arykd`, with the pattern module's methods among its own.
#![forbid(unsafe_code)]

use aryk_bdev::{Blocks, Identity};
use aryk_example_custom_module::{Config, create};
use aryk_rpc::{Control, Error, Phase};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::process::ExitCode;

/// How the module is called where disks are listed, and in its methods.
const MODULE: &str = "pattern";
const CREATE: &str = "bdev_pattern_create";

fn main() -> ExitCode {
    aryk_daemon::run(|table| {
        table.add(CREATE, Phase::RunTime, "Makes a disk that holds a pattern.", create_pattern);
        table.add(
            "bdev_pattern_delete",
            Phase::RunTime,
            "Removes a disk that `bdev_pattern_create` made.",
            delete,
        );
    })
}

/// Parameters of `bdev_pattern_create`. They are kept in the state store: after a restart the same call makes the disk again.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// The disk's name.
    name: String,
    /// Its size in blocks of 4096 bytes.
    num_blocks: u64,
    /// Its UUID; by default a random one.
    uuid: Option<String>,
    /// Whether a background task reads the disk over and over.
    #[serde(default)]
    patrol: bool,
}

async fn create_pattern(control: &Control, mut p: Create) -> Result<String, Error> {
    let mut identity = Identity::named(&p.name);
    if let Some(uuid) = &p.uuid {
        identity.uuid = uuid.parse().map_err(|_| Error::invalid(format!("'{uuid}' is no UUID")))?;
    }
    // What was chosen here stays the same after a restart.
    p.uuid = Some(identity.uuid.to_string());
    let bdev = create(&control.env, Config { identity, blocks: Blocks(p.num_blocks), patrols: p.patrol })?;
    Ok(control.made_by(&bdev, MODULE, (CREATE, &p)))
}

/// Parameters of `bdev_pattern_delete`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Delete {
    /// The disk's name, alias or UUID.
    name: String,
}

async fn delete(control: &Control, p: Delete) -> Result<bool, Error> {
    control.remove_disk(MODULE, &p.name).await
}
