//! `bdev_uring_*` and `bdev_aio_*`: disks in files and block devices. One module of Aryk serves both families; each family only
//! handles its own disks, as clients expect. Control context.

use super::details::{Aio, Details, Uring};
use super::{Control, Count, Error, Name, Phase, Table, is_default, volumes};
use crate::config::Subsystem;
use crate::journal;
use aryk_bdev::{Bdev, Bytes, Env, Registry};
use aryk_bdev_uring as module;
use aryk_log_limit::LogLimit;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

const URING: &str = "uring";
const AIO: &str = "aio";

pub(super) fn register(table: &mut Table<Control>) {
    table.add("bdev_uring_create", Phase::RunTime, "Creates a disk in a file or block device.", create_uring);
    table.add(
        "bdev_uring_delete",
        Phase::RunTime,
        "Removes a disk of `bdev_uring_create`; its file stays.",
        async |control: &Control, p: Name| control.remove_disk(URING, &p.name).await,
    );
    table.add(
        "bdev_uring_rescan",
        Phase::RunTime,
        "Adjusts the size of a disk of `bdev_uring_create` to the present size of its file.",
        async |control: &Control, p: Name| rescan(control, URING, &p.name).await,
    );
    table.add(
        "aryk_file_systems_get",
        Phase::RunTime,
        "Reports the space that disks in files may use, and the free space of their file systems.",
        get_file_systems,
    );
    table.add("bdev_uring_resize", Phase::RunTime, "Changes the size of a disk and its file.", resize);
    table.add(
        "bdev_aio_create",
        Phase::RunTime,
        "Creates a disk in a file or block device, as `bdev_uring_create` does.",
        create_aio,
    );
    table.add(
        "bdev_aio_delete",
        Phase::RunTime,
        "Removes a disk of `bdev_aio_create`; its file stays.",
        async |control: &Control, p: Name| control.remove_disk(AIO, &p.name).await,
    );
    table.add(
        "bdev_aio_rescan",
        Phase::RunTime,
        "Adjusts the size of a disk of `bdev_aio_create` to the present size of its file.",
        async |control: &Control, p: Name| rescan(control, AIO, &p.name).await,
    );
}

/// Parameters of `bdev_uring_create` and `bdev_aio_create`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    /// Name of the new disk.
    name: String,
    /// Path of the file or block device.
    filename: PathBuf,
    /// Block size in bytes. Default: 512 for a file, the device's own for a block device.
    #[serde(skip_serializing_if = "Option::is_none")]
    block_size: Option<u32>,
    /// Default: a random uuid.
    uuid: Option<Uuid>,
    /// Whether writes are refused.
    #[serde(default, skip_serializing_if = "is_default")]
    readonly: bool,
    /// Aryk only: size in bytes of the sparse file that is created if the file does not exist or is empty. A file of another size
    /// is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<Count>,
    /// Aryk only: action for writes when the store is full.
    #[serde(default, skip_serializing_if = "is_default")]
    enospc: Enospc,
    /// Aryk only: how long the file is locked against other processes.
    #[serde(default, skip_serializing_if = "is_default")]
    lock: Lock,
    /// Saved, without effect: unmapped blocks are always deallocated if the file system supports it.
    #[serde(default, skip_serializing_if = "is_default")]
    fallocate: bool,
    /// Saved, without effect: the daemon never blocks on the device.
    #[serde(default, skip_serializing_if = "is_default")]
    nowait: bool,
}

/// Action for writes when the store is full.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Enospc {
    #[default]
    Error,
    Hold,
}

/// How long a file is locked against other processes: as long as the disk exists, or from its first channel to its last.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "FileLock")]
enum Lock {
    #[default]
    Always,
    InUse,
}

async fn create_uring(control: &Control, p: Create) -> Result<String, Error> {
    let details = Details { uring: Some(Uring { filename: p.filename.clone() }), ..Details::default() };
    create(control, p, (URING, "URING bdev", "bdev_uring_create"), details).await
}

async fn create_aio(control: &Control, p: Create) -> Result<String, Error> {
    let aio = Aio {
        block_size_override: p.block_size.is_some(),
        fallocate: true,
        filename: p.filename.clone(),
        readonly: p.readonly,
    };
    let details = Details { aio: Some(aio), ..Details::default() };
    create(control, p, (AIO, "AIO disk", "bdev_aio_create"), details).await
}

async fn create(
    control: &Control,
    mut p: Create,
    (module, product, method): (&'static str, &'static str, &'static str),
    details: Details,
) -> Result<String, Error> {
    if p.name.is_empty() || p.filename.as_os_str().is_empty() {
        return Err(Error::invalid("the names of a disk and its file must not be empty"));
    }
    let config = module::Config {
        product,
        uuid: p.uuid,
        block_size: p.block_size,
        read_only: p.readonly,
        // A file that existed before the restart is missing, not new: a new file would hold zeroes instead of its data.
        size: p.size.map(|bytes| Bytes(bytes.0)).filter(|_| !journal::is_restore()),
        on_full: match p.enospc {
            Enospc::Error => module::OnFull::Error,
            Enospc::Hold => module::OnFull::Hold,
        },
        lock: match p.lock {
            Lock::Always => module::Lock::Always,
            Lock::InUse => module::Lock::InUse,
        },
        // After a restart, the other disks need not wait for this one, which is retried.
        waits: !journal::is_restore(),
        ..module::Config::new(&p.name, &p.filename)
    };
    let make = move |env: &Env| {
        let bdev = module::create(env, config)?;
        warn_of_missing_room(env.registry(), bdev.name());
        Ok(bdev)
    };
    let bdev = blocking(control, make).await?;
    let Bytes(has) = bdev.blocks().to_bytes(bdev.geometry().block_size);
    if let Some(had) = p.size.map(|bytes| bytes.0).filter(|had| *had != has) {
        // An existing file is accepted with its size, since a resize may have been in progress that was not noted yet.
        let (disk, path) = (bdev.name(), p.filename.display());
        tracing::warn!(disk, %path, had, has, "the file has another size than before the restart: check that it is the disk's file");
    }
    p.uuid = Some(bdev.identity().uuid);
    Ok(control.made_disk(&bdev, module, details, (method, &p)))
}

/// Limit of the check of file systems, and of its log lines, when disks are created: the check is slow with thousands of disks.
static ROOMS: LogLimit = LogLimit::new(10, Duration::from_secs(1));

/// Logs a warning if the disks may use more space than their file system has, after `disk` was created or has grown.
fn warn_of_missing_room(registry: &Registry, disk: &str) {
    if ROOMS.admit().is_none() {
        return;
    }
    // The disk exists, and the check is optional.
    let Ok(rooms) = module::rooms(registry, Some(disk)) else { return };
    for room in rooms.iter().filter(|room| room.missing() > 0) {
        let (file_system, missing) = (room.path.display(), room.missing());
        tracing::warn!(
            disk,
            %file_system,
            disks = room.disks,
            promised = room.promised,
            allocated = room.allocated,
            free = room.free,
            missing,
            "the disks in this file system may use more bytes than are free: writes will fail when the file system is full"
        );
    }
}

/// Parameters of `aryk_file_systems_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetFileSystems {
    /// Name, alias or uuid of a disk: report only its file system. Default: all.
    disk: Option<String>,
}

/// Space that the disks in files of one file system may use. All in bytes.
#[derive(Debug, Serialize, JsonSchema)]
struct FileSystem {
    /// Mount point.
    path: PathBuf,
    /// Number of disks.
    disks: u64,
    /// Sum of the disks' sizes.
    promised: u64,
    /// Bytes that the files have allocated.
    allocated: u64,
    /// Free bytes of the file system.
    free: u64,
    /// Bytes that the disks may still allocate beyond the free space: if more than 0, writes will fail before the disks are full.
    missing: u64,
}

async fn get_file_systems(control: &Control, p: GetFileSystems) -> Result<Vec<FileSystem>, Error> {
    let rooms = blocking(control, move |env| module::rooms(env.registry(), p.disk.as_deref())).await?;
    let describe = |room: module::Room| FileSystem {
        missing: room.missing(),
        path: room.path,
        disks: room.disks,
        promised: room.promised,
        allocated: room.allocated,
        free: room.free,
    };
    Ok(rooms.into_iter().map(describe).collect())
}

/// Runs a function that may block on a file system on another thread.
async fn blocking<R: Send + 'static>(
    control: &Control,
    f: impl FnOnce(&Env) -> Result<R, module::Error> + Send + 'static,
) -> Result<R, Error> {
    let env = control.env.clone();
    let done = tokio::task::spawn_blocking(move || f(&env)).await;
    Ok(done.map_err(|e| Error::Internal(e.to_string()))??)
}

async fn rescan(control: &Control, module: &str, name: &str) -> Result<bool, Error> {
    let bdev = control.disks.find_made_by(&[module], name)?;
    set_size(control, &bdev, module::Size::Rescan).await?;
    // The noted size is cleared: a file of another size would be refused after a restart.
    control.config.changed(Subsystem::Bdev, bdev.name(), "size", Value::Null);
    Ok(true)
}

/// Parameters of `bdev_uring_resize`, a method of Aryk only.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Resize {
    /// Name, alias or uuid.
    name: String,
    /// New size in bytes.
    size: Count,
    /// Allow a smaller size, and discard the data beyond it.
    #[serde(default)]
    shrink: bool,
}

async fn resize(control: &Control, p: Resize) -> Result<bool, Error> {
    let bdev = control.disks.find_made_by(&[URING, AIO], &p.name)?;
    if p.size.0 == 0 {
        return Err(Error::invalid("a disk must have at least one block"));
    }
    if p.shrink && Bytes(p.size.0) < bdev.blocks().to_bytes(bdev.geometry().block_size) {
        volumes::check_shrinking(control, &bdev)?;
    }
    let size =
        if p.shrink { module::Size::Exactly(Bytes(p.size.0)) } else { module::Size::GrowTo(Bytes(p.size.0)) };
    let bytes = set_size(control, &bdev, size).await?;
    control.config.changed(Subsystem::Bdev, bdev.name(), "size", bytes.0);
    Ok(true)
}

async fn set_size(control: &Control, bdev: &Arc<Bdev>, size: module::Size) -> Result<Bytes, Error> {
    let name = bdev.name().to_owned();
    let change = move |env: &Env| {
        let resized = module::resize(env.registry(), &name, size)?;
        warn_of_missing_room(env.registry(), &name);
        Ok(resized)
    };
    match blocking(control, change).await? {
        module::Resized::Done(bytes) => Ok(bytes),
        module::Resized::Shrinking(shrinking) => {
            let settled = shrinking.settle().await;
            blocking(control, move |env| settled.cut(env.registry())).await
        }
    }
}

impl From<module::Error> for Error {
    fn from(error: module::Error) -> Self {
        use module::Error as Uring;
        let errno = match &error {
            Uring::Bdev(error) => return error.clone().into(),
            Uring::Missing(_) | Uring::NoDirectory { .. } | Uring::Dangling(_) => Errno::NOENT,
            Uring::Directory(_) => Errno::ISDIR,
            Uring::Permission { .. } | Uring::Outside { .. } => Errno::ACCESS,
            Uring::Locked { .. } | Uring::InUse(_) | Uring::Resizing(_) => Errno::BUSY,
            Uring::NotOurs(_) => Errno::NODEV,
            Uring::Empty(_)
            | Uring::NoSize(_)
            | Uring::OtherSize { .. }
            | Uring::NotAFile(_)
            | Uring::BlockSize(_)
            | Uring::NotAMultiple { .. }
            | Uring::Shrinks { .. }
            | Uring::FixedSize(_) => Errno::INVAL,
            Uring::Os { error, .. } => Errno::from_io_error(error).unwrap_or(Errno::IO),
        };
        Self::errno(errno, error.to_string())
    }
}
