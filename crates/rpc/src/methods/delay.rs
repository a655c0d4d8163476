//! `bdev_delay_*`: disks that delay the requests to another disk. Control context.

use super::details::{Delay, Details};
use super::waiting::waits;
use super::{Control, Count, Error, Name, Phase, Table};
use crate::config::Subsystem;
use aryk_bdev_delay as module;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// Namespace of the disks' uuids.
const NAMESPACE: Uuid = uuid::uuid!("4009b574-6430-4f1b-bc40-ace811091027");
const MODULE: &str = "delay";
pub(super) const CREATE: &str = "bdev_delay_create";

pub(super) fn register(table: &mut Table<Control>) {
    table.add(CREATE, Phase::RunTime, "Creates a delay disk on top of another disk.", create);
    table.add("bdev_delay_delete", Phase::RunTime, "Removes a delay disk.", delete);
    table.add(
        "bdev_delay_update_latency",
        Phase::RunTime,
        "Changes one latency of a delay disk.",
        update_latency,
    );
}

/// Parameters of `bdev_delay_create`. Latencies in microseconds.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Create {
    /// Name of the new disk.
    name: String,
    /// Name of the base disk.
    base_bdev_name: String,
    /// Additional latency of most reads.
    avg_read_latency: Count,
    /// Additional latency of 1 % of the reads.
    p99_read_latency: Count,
    /// Additional latency of most writes.
    avg_write_latency: Count,
    /// Additional latency of 1 % of the writes.
    p99_write_latency: Count,
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
    let config = module::Config {
        identity,
        base: p.base_bdev_name.clone(),
        avg_read_us: p.avg_read_latency.0,
        p99_read_us: p.p99_read_latency.0,
        avg_write_us: p.avg_write_latency.0,
        p99_write_us: p.p99_write_latency.0,
    };
    let bdev = module::create(&control.env, config)?;
    let delay = Delay {
        avg_read_latency: p.avg_read_latency,
        avg_write_latency: p.avg_write_latency,
        base_bdev_name: p.base_bdev_name.clone(),
        name: p.name.clone(),
        p99_read_latency: p.p99_read_latency,
        p99_write_latency: p.p99_write_latency,
    };
    let details = Details { delay: Some(delay), ..Details::default() };
    Ok(control.made_disk(&bdev, MODULE, details, (CREATE, &p)))
}

async fn delete(control: &Control, p: Name) -> Result<bool, Error> {
    control.remove_disk(MODULE, &p.name).await
}

/// Parameters of `bdev_delay_update_latency`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct UpdateLatency {
    /// Name, alias or uuid.
    delay_bdev_name: String,
    /// The latency to change.
    latency_type: LatencyType,
    /// New latency in microseconds.
    latency_us: Count,
}

/// One of the latencies of a delay disk.
#[derive(Debug, Clone, Copy, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum LatencyType {
    AvgRead,
    P99Read,
    AvgWrite,
    P99Write,
}

impl LatencyType {
    /// The module's name for the latency, and the parameter that sets it.
    const fn kind(self) -> (module::Kind, &'static str) {
        match self {
            Self::AvgRead => (module::Kind::AvgRead, "avg_read_latency"),
            Self::P99Read => (module::Kind::P99Read, "p99_read_latency"),
            Self::AvgWrite => (module::Kind::AvgWrite, "avg_write_latency"),
            Self::P99Write => (module::Kind::P99Write, "p99_write_latency"),
        }
    }

    const fn field_of(self, delay: &mut Delay) -> &mut Count {
        match self {
            Self::AvgRead => &mut delay.avg_read_latency,
            Self::P99Read => &mut delay.p99_read_latency,
            Self::AvgWrite => &mut delay.avg_write_latency,
            Self::P99Write => &mut delay.p99_write_latency,
        }
    }
}

async fn update_latency(control: &Control, p: UpdateLatency) -> Result<bool, Error> {
    let name = &p.delay_bdev_name;
    if control.disks.find(name).is_err() {
        return Err(Error::InvalidParams(format!("there is no disk '{name}'")));
    }
    let not_ours = |_| Error::InvalidRequest(format!("'{name}' is not a delay disk"));
    let bdev = control.disks.find_made_by(&[MODULE], name).map_err(not_ours)?;
    let (kind, param) = p.latency_type.kind();
    module::set_latency(&control.disks.registry, bdev.name(), kind, p.latency_us.0)?;
    control.config.changed(Subsystem::Bdev, bdev.name(), param, p.latency_us.0);
    control.disks.change_details(&bdev, |details| {
        if let Some(delay) = &mut details.delay {
            *p.latency_type.field_of(delay) = p.latency_us;
        }
    });
    Ok(true)
}
