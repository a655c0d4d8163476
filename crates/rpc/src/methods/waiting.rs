//! Disks that are asked for before the disk that they are made of, as in SPDK's files: they wait for it; and `aryk_absent_get`, which tells of what is
//! not there. Control context.

use super::{Control, Error, NoParams, Phase, Table, delay, error, passthru, split};
use crate::config::{Call, Subsystem};
use crate::journal::{self, Caller};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::time::UNIX_EPOCH;
use uuid::Uuid;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "aryk_absent_get",
        Phase::RunTime,
        "What is configured and not there: disks that wait for the disk that they are made of, what could not be made again after a restart, and why.",
        get_absent,
    );
}

/// One of the results of `aryk_absent_get`.
#[derive(Debug, Serialize, JsonSchema)]
struct Absent {
    /// What it is, and its name, for people.
    object: String,
    /// What it is: `disk`, `controller`, `target` or `setting`.
    kind: &'static str,
    /// Its name; a target's is its controller's and its number, as `ctrlr/3`.
    name: String,
    /// Why it is not there.
    why: String,
    /// Since when it is tried again and again, in seconds since 1970; not if it waits for a disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    tried_since: Option<u64>,
    #[serde(flatten)]
    call: Call,
}

async fn get_absent(control: &Control, _: NoParams) -> Result<Vec<Absent>, Error> {
    let config = &control.config;
    let told = |(key, call)| {
        let (kind, name) = config.kind_and_name(key)?;
        let since = config.tried_since(key);
        let tried_since = since.map(|at| at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs());
        let (object, why) = (config.describe(key), config.why_absent(key));
        Some(Absent { object, kind, name, why, tried_since, call })
    };
    Ok(config.absent().into_iter().filter_map(told).collect())
}

/// Whether the disk `name`, to be made of the disk `base` by this call, has to wait for that, and is noted to.
///
/// Who names the base by its uuid has seen it, and is told that it is gone.
///
/// # Errors
/// `EEXIST`, `EINVAL`.
pub(super) fn waits(
    control: &Control,
    base: &str,
    name: &str,
    call: (&'static str, &impl Serialize),
) -> Result<bool, Error> {
    let exists =
        |name: &str| Error::errno(Errno::EXIST, format!("a disk '{name}' exists, or waits for its base"));
    // Before it is said that the base is in use: it is by the one that is there.
    if control.disks.find(name).is_ok() {
        return Err(exists(name));
    }
    if control.disks.find(base).is_ok() || journal::is_restore() || Uuid::parse_str(base).is_ok() {
        return Ok(false);
    }
    super::identity(name, None)?;
    control.config.wait(base, name, call).map_err(exists)?;
    tracing::info!(disk = name, base, "the disk waits for the one that it is made of");
    Ok(true)
}

/// Makes what has waited for the disk `name`, which is there, and what waits for that in turn.
pub(crate) async fn make_waiting(control: &Control, name: &str) {
    let mut made = vec![name.to_owned()];
    while let Some(base) = made.pop() {
        for (key, call) in control.config.waiting_for(&base) {
            // It may have been made, or forgotten, by a client meanwhile.
            if !control.config.is_absent(key) {
                continue;
            }
            let Some(_trying) = control.start_up.try_object(key) else { continue };
            let object = control.config.describe(key);
            let (outcome, mut done) = journal::watch(Caller::Restore, make(control, call)).await;
            // It stands in the store as it is. A store that cannot be written says so itself.
            let _ = done.written().await;
            match outcome {
                Ok(()) => tracing::info!(%object, base, "what it has waited for is there, and so is it"),
                Err(error) => {
                    control.config.failed(key, &error.to_string());
                    tracing::error!(%object, base, %error, "what it has waited for is there, but it cannot be made");
                }
            }
            let disks = done.made.into_iter().filter(|(subsystem, _)| *subsystem == Subsystem::Bdev);
            made.extend(disks.map(|(_, name)| name));
        }
    }
}

async fn make(control: &Control, call: Call) -> Result<(), Error> {
    match &*call.method {
        delay::CREATE => delay::create(control, params(call.params)?).await.map(drop),
        error::CREATE => error::create(control, params(call.params)?).await.map(drop),
        passthru::CREATE => passthru::create(control, params(call.params)?).await.map(drop),
        split::CREATE => split::create(control, params(call.params)?).await.map(drop),
        other => Err(Error::Internal(format!("{other} does not wait"))),
    }
}

fn params<P: DeserializeOwned>(params: Value) -> Result<P, Error> {
    serde_json::from_value(params).map_err(|e| Error::Internal(e.to_string()))
}
