//! `trace_*`: the trace of requests, in SPDK's terms, and `aryk_trace_get`, which returns its records. Control context.
//!
//! Aryk's trace is always on, in each layer: SPDK's group of trace points is a layer, and its points are the submission of a
//! request and its completion.

use super::framework::TICK_RATE;
use super::{Control, Error, NoParams, Phase, Table};
use aryk_reactor::{Layer, Point};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const LAYERS: [Layer; 3] = [Layer::Frontend, Layer::Bdev, Layer::Module];
const POINTS: [Point; 2] = [Point::Submit, Point::Complete];

/// Default number of records.
const COUNT: usize = 256;

pub(super) fn register(table: &mut Table<Control>) {
    table.add(
        "trace_get_tpoint_group_mask",
        Phase::Any,
        "Lists the groups of trace points: the layers that a request passes.",
        get_groups,
    );
    table.add(
        "trace_enable_tpoint_group",
        Phase::Any,
        "Without effect: the trace is always on.",
        enable_group,
    );
    table.add("trace_set_tpoint_mask", Phase::Any, "Without effect: the trace is always on.", set_mask);
    table.add(
        "trace_disable_tpoint_group",
        Phase::Any,
        "Without effect: the trace is always on.",
        enable_group,
    );
    table.add("trace_clear_tpoint_mask", Phase::Any, "Without effect: the trace is always on.", set_mask);
    table.add(
        "trace_get_info",
        Phase::Any,
        "Lists the groups of trace points, and the path of the trace in shared memory: always empty.",
        get_info,
    );
    table.add("trace_clear", Phase::Any, "Discards the trace records up to now.", clear);
    table.add(
        "aryk_trace_get",
        Phase::Any,
        "Reports the latest trace records of requests on all reactors, oldest first.",
        get_records,
    );
}

/// Result of `trace_get_tpoint_group_mask`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "TraceGroups")]
struct Groups {
    tpoint_group_mask: String,
    bdev: Group,
    #[serde(rename = "front-end")]
    front_end: Group,
    module: Group,
}

/// A layer that requests pass.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "TraceGroup")]
struct Group {
    /// Always true.
    enabled: bool,
    /// Bit of the group.
    mask: String,
    /// Bits of the enabled points.
    tpoint_mask: String,
    /// Points of the group.
    tpoints: [TracePoint; POINTS.len()],
}

/// A trace point.
#[derive(Debug, Serialize, JsonSchema)]
struct TracePoint {
    name: &'static str,
    /// Number of the point within the group.
    id: u8,
    /// Same as `id`, under the name of some versions of SPDK.
    tpoint_id: u8,
    enabled: bool,
}

async fn get_groups(_: &Control, _: NoParams) -> Result<Groups, Error> {
    let group = |layer: Layer| Group {
        enabled: true,
        mask: format!("{:#x}", bit(layer)),
        tpoint_mask: format!("{:#x}", (1 << POINTS.len()) - 1),
        tpoints: POINTS.map(|point| TracePoint {
            name: point.name(),
            id: point as u8,
            tpoint_id: point as u8,
            enabled: true,
        }),
    };
    let all: u64 = LAYERS.map(bit).iter().sum();
    Ok(Groups {
        tpoint_group_mask: format!("{all:#x}"),
        bdev: group(Layer::Bdev),
        front_end: group(Layer::Frontend),
        module: group(Layer::Module),
    })
}

/// Result of `trace_get_info`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "TraceInfo")]
struct Info {
    /// Always empty: `aryk_trace_get` returns the trace.
    tpoint_shm_path: &'static str,
    tpoint_group_mask: String,
    bdev: GroupInfo,
    #[serde(rename = "front-end")]
    front_end: GroupInfo,
    module: GroupInfo,
}

/// A layer that requests pass, in brief.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "TraceGroupInfo")]
struct GroupInfo {
    /// Bit of the group.
    mask: String,
    /// Bits of the enabled points.
    tpoint_mask: String,
}

async fn get_info(control: &Control, p: NoParams) -> Result<Info, Error> {
    let groups = get_groups(control, p).await?;
    let brief = |group: Group| GroupInfo { mask: group.mask, tpoint_mask: group.tpoint_mask };
    Ok(Info {
        tpoint_shm_path: "",
        tpoint_group_mask: groups.tpoint_group_mask,
        bdev: brief(groups.bdev),
        front_end: brief(groups.front_end),
        module: brief(groups.module),
    })
}

const fn bit(layer: Layer) -> u64 {
    1 << layer as u8
}

/// Parameters of `trace_enable_tpoint_group` and `trace_disable_tpoint_group`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct EnableGroup {
    /// Name of the group, or `all`.
    name: String,
}

async fn enable_group(_: &Control, p: EnableGroup) -> Result<bool, Error> {
    check_group(&p.name).map(|()| true)
}

/// Parameters of `trace_set_tpoint_mask` and `trace_clear_tpoint_mask`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SetMask {
    /// Name of the group, or `all`.
    name: String,
    /// A bit for each point.
    tpoint_mask: u64,
}

async fn set_mask(_: &Control, p: SetMask) -> Result<bool, Error> {
    check_group(&p.name)?;
    match p.tpoint_mask >> POINTS.len() {
        0 => Ok(true),
        _ => Err(Error::invalid(format!("'{}' has {} trace points", p.name, POINTS.len()))),
    }
}

async fn clear(control: &Control, _: NoParams) -> Result<bool, Error> {
    let handles = control.reactors.handles();
    let latest = handles.iter().filter_map(|handle| handle.trace().last());
    if let Some(latest) = latest.map(|record| record.at).max() {
        control.trace_cleared.set(Some(latest));
    }
    Ok(true)
}

/// Parameters of `aryk_trace_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetRecords {
    /// Maximum number of records, the latest ones. Default: 256. Each reactor keeps its last 4095.
    count: Option<u32>,
}

/// Result of `aryk_trace_get`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Trace")]
struct Records {
    /// Ticks in a second.
    tick_rate: u64,
    /// Oldest first.
    records: Vec<TraceRecord>,
}

/// A trace record of a request.
#[derive(Debug, Serialize, JsonSchema)]
struct TraceRecord {
    /// Time in ticks since the start of the daemon.
    ticks: u64,
    /// Core of the reactor.
    lcore: u16,
    /// Layer: front-end, bdev or module.
    layer: &'static str,
    /// Point: submit or complete.
    point: &'static str,
    /// Queue or channel: its name, or its number if it has been closed.
    object: String,
    /// The request's tag within the queue or channel.
    tag: u32,
}

async fn get_records(control: &Control, p: GetRecords) -> Result<Records, Error> {
    let handles = control.reactors.handles();
    let mut records: Vec<_> = handles
        .iter()
        .flat_map(|handle| handle.trace().read().into_iter().map(move |record| (handle, record)))
        .collect();
    if let Some(cleared) = control.trace_cleared.get() {
        records.retain(|(_, record)| record.at > cleared);
    }
    // Events of the same turn keep their order.
    records.sort_by_key(|(_, record)| record.at);
    let surplus = records.len().saturating_sub(p.count.map_or(COUNT, |count| count as usize));
    let records = records.split_off(surplus).into_iter().map(|(handle, record)| {
        let name = handle.name_of(record.layer, record.object);
        TraceRecord {
            ticks: record.at.0,
            lcore: handle.core(),
            layer: record.layer.name(),
            point: record.point.name(),
            object: name.unwrap_or_else(|| record.object.to_string()),
            tag: record.tag,
        }
    });
    Ok(Records { tick_rate: TICK_RATE, records: records.collect() })
}

/// Checks that the group exists; all groups are enabled.
fn check_group(name: &str) -> Result<(), Error> {
    if name == "all" || LAYERS.iter().any(|layer| layer.name() == name) {
        return Ok(());
    }
    let names = LAYERS.map(Layer::name).join(", ");
    Err(Error::errno(
        Errno::INVAL,
        format!("there is no group of trace points '{name}'; the groups are {names}"),
    ))
}
