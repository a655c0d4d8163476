//! Disks that are created before their base disk exists, as in SPDK's files: they wait for the base; and `aryk_absent_get`, which
//! lists absent objects. Control context.

use super::{Control, Error, NoParams, Phase, Table, crypto, delay, error, luks, passthru, rbd, split};
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
        "Lists configured objects that do not exist, and why: disks that wait for their base disk, and objects that could not be created again after a restart.",
        get_absent,
    );
}

/// One of the results of `aryk_absent_get`.
#[derive(Debug, Serialize, JsonSchema)]
struct Absent {
    /// Kind and name of the object, as text.
    object: String,
    /// Kind of the object: `disk`, `controller`, `target` or `setting`.
    kind: &'static str,
    /// Name of the object; of a target the name of its controller and its number, as `ctrlr/3`.
    name: String,
    /// Why the object does not exist.
    why: String,
    /// Time since which the daemon retries, in seconds since 1970; missing if the object waits for a disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    tried_since: Option<u64>,
    #[serde(flatten)]
    call: Call,
}

async fn get_absent(control: &Control, _: NoParams) -> Result<Vec<Absent>, Error> {
    let config = &control.config;
    let describe = |(key, call)| {
        let (kind, name) = config.kind_and_name(key)?;
        let since = config.tried_since(key);
        let tried_since = since.map(|at| at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs());
        let (object, why) = (config.describe(key), config.why_absent(key));
        let call = rbd::for_output(crypto::without_key(call));
        Some(Absent { object, kind, name, why, tried_since, call })
    };
    Ok(config.absent().into_iter().filter_map(describe).collect())
}

/// Whether the disk `name`, which this call creates on top of the disk `base`, must wait for `base`; if so, the call is noted.
///
/// A client that names the base by its uuid has seen the base, and receives the error that it no longer exists.
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
    // This check comes before the one whether the base is in use: an existing disk of this name uses it.
    if control.disks.find(name).is_ok() {
        return Err(exists(name));
    }
    if control.disks.find(base).is_ok() || journal::is_restore() || Uuid::parse_str(base).is_ok() {
        return Ok(false);
    }
    super::identity(name, None)?;
    control.config.wait(base, name, call).map_err(exists)?;
    tracing::info!(disk = name, base, "the disk waits for its base disk");
    Ok(true)
}

/// Creates the disks that waited for the disk `name`, which exists now, and the disks that waited for these.
pub(crate) async fn make_waiting(control: &Control, name: &str) {
    let mut made = vec![name.to_owned()];
    while let Some(base) = made.pop() {
        for (key, call) in control.config.waiting_for(&base) {
            // A client may have created or removed the object in between.
            if !control.config.is_absent(key) || control.is_closing() {
                continue;
            }
            let Some(_trying) = control.start_up.try_object(key) else { continue };
            let object = control.config.describe(key);
            let (outcome, mut done) = journal::watch(Caller::Restore, make(control, call)).await;
            // The note is already in the store. The store reports a failed write itself.
            let _ = done.written().await;
            if control.undo_revived(&done).await {
                continue;
            }
            match outcome {
                Ok(()) => tracing::info!(%object, base, "created, since its base disk exists now"),
                Err(error) => {
                    control.config.stop_waiting(key);
                    control.config.failed(key, &error.to_string());
                    control.start_up.waiting_failed.notify_one();
                    tracing::error!(%object, base, %error, "its base disk exists now, but it cannot be created; it is retried");
                }
            }
            let disks = done.made.into_iter().filter(|(subsystem, _)| *subsystem == Subsystem::Bdev);
            for (_, name) in disks {
                // The disk may have a pool, on whose volumes others wait.
                Box::pin(super::volumes::examine(control, &name)).await;
                made.push(name);
            }
        }
    }
}

async fn make(control: &Control, call: Call) -> Result<(), Error> {
    match &*call.method {
        crypto::CREATE => crypto::create(control, params(call.params)?).await.map(drop),
        delay::CREATE => delay::create(control, params(call.params)?).await.map(drop),
        error::CREATE => error::create(control, params(call.params)?).await.map(drop),
        luks::CREATE => luks::create(control, params(call.params)?).await.map(drop),
        passthru::CREATE => passthru::create(control, params(call.params)?).await.map(drop),
        split::CREATE => split::create(control, params(call.params)?).await.map(drop),
        other => Err(Error::Internal(format!("{other} has no base disk to wait for"))),
    }
}

fn params<P: DeserializeOwned>(params: Value) -> Result<P, Error> {
    serde_json::from_value(params).map_err(|e| Error::Internal(e.to_string()))
}
