//! `bdev_error_*`: disks that inject failures into the requests to another disk. Control context.

use super::details::{Details, ErrorDisk};
use super::waiting::waits;
use super::{Control, Error, Name, Phase, Table};
use aryk_bdev::{Blocks, Op, OpSet};
use aryk_bdev_error as module;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

const MODULE: &str = "error";
pub(super) const CREATE: &str = "bdev_error_create";

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        CREATE,
        Phase::RunTime,
        "Creates an error disk on top of another disk, with the prefix `EE_` before that disk's name. It fails requests as `bdev_error_inject_error` sets.",
        create,
    );
    table.add("bdev_error_delete", Phase::RunTime, "Removes an error disk.", delete);
    table.add(
        "bdev_error_inject_error",
        Phase::RunTime,
        "Sets which requests of an error disk fail, and how.",
        inject_error,
    );
    table.add(
        "bdev_error_resume_pending",
        Phase::RunTime,
        "Resumes the requests that an error disk holds as pending, and stops holding requests.",
        resume_pending,
    );
}

/// Parameters of `bdev_error_create`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Create {
    /// Name of the base disk.
    base_name: String,
    /// Default: derived from the base disk's uuid.
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<Uuid>,
}

fn name_over(base: &str) -> String {
    format!("EE_{base}")
}

/// Creates a disk with the name of its base and the prefix `EE_`.
pub(super) async fn create(control: &Control, mut p: Create) -> Result<bool, Error> {
    if waits(control, &p.base_name, &name_over(&p.base_name), (CREATE, &p))? {
        return Ok(true);
    }
    let base = control.disks.find(&p.base_name)?;
    let uuid = p.uuid.unwrap_or_else(|| base.identity().uuid_of_part(Blocks::ZERO, base.geometry().blocks));
    let identity = super::identity(&name_over(base.name()), Some(uuid))?;
    p.uuid = Some(identity.uuid);
    let config = module::Config { identity, base: p.base_name.clone() };
    let bdev = module::create(&control.env, config)?;
    let details =
        Details { error_disk: Some(ErrorDisk { base_bdev: p.base_name.clone() }), ..Details::default() };
    control.made_disk(&bdev, MODULE, details, (CREATE, &p));
    Ok(true)
}

async fn delete(control: &Control, p: Name) -> Result<bool, Error> {
    control.remove_disk(MODULE, &p.name).await
}

/// Parameters of `bdev_error_inject_error`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct InjectError {
    /// Name, alias or uuid.
    name: String,
    /// The requests that fail; `clear` ends all failures.
    io_type: IoType,
    /// How the requests fail.
    error_type: ErrorType,
    /// Number of requests to fail.
    #[serde(default = "one")]
    num: u32,
    /// Fail a request only while this many others are in flight.
    #[serde(default)]
    queue_depth: u32,
    /// With `corrupt_data`: index of the byte in each request that is corrupted.
    #[serde(default)]
    corrupt_offset: u64,
    /// With `corrupt_data`: the value by which that byte is changed.
    #[serde(default)]
    corrupt_value: u8,
}

const fn one() -> u32 {
    1
}

/// The requests that fail.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum IoType {
    Clear,
    Read,
    Write,
    Unmap,
    Flush,
    All,
}

/// How requests fail.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum ErrorType {
    Failure,
    Pending,
    CorruptData,
    Nomem,
}

async fn inject_error(control: &Control, p: InjectError) -> Result<bool, Error> {
    let bdev = control.disks.find_made_by(&[MODULE], &p.name)?;
    let ops = match p.io_type {
        IoType::Clear => {
            module::clear(&control.disks.registry, bdev.name())?;
            return Ok(true);
        }
        IoType::Read => OpSet::of(&[Op::Read]),
        IoType::Write => OpSet::of(&[Op::Write]),
        IoType::Unmap => OpSet::of(&[Op::Unmap]),
        IoType::Flush => OpSet::of(&[Op::Flush]),
        IoType::All => OpSet::ALL,
    };
    let fault = match p.error_type {
        ErrorType::Failure => module::Fault::Failure,
        ErrorType::Pending => module::Fault::Pending,
        ErrorType::Nomem => module::Fault::NoMem,
        ErrorType::CorruptData => {
            module::Fault::CorruptData { offset: p.corrupt_offset, value: p.corrupt_value }
        }
    };
    let injection = module::Injection { fault, ops, count: p.num, queue_depth: p.queue_depth };
    module::inject(&control.disks.registry, bdev.name(), injection)?;
    Ok(true)
}

async fn resume_pending(control: &Control, p: Name) -> Result<bool, Error> {
    let bdev = control.disks.find_made_by(&[MODULE], &p.name)?;
    module::resume(&control.disks.registry, bdev.name()).await?;
    Ok(true)
}

impl From<module::Error> for Error {
    fn from(error: module::Error) -> Self {
        match error {
            module::Error::Registry(error) => error.into(),
            error @ module::Error::CorruptsNothing => Self::invalid(error.to_string()),
        }
    }
}
