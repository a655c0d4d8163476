//! `bdev_get_*`, `bdev_reset*`: disks of all kinds. Control context.

use super::details::{Details, Preferred};
use super::framework::TICK_RATE;
use super::observe::Action;
use super::{Control, Error, Phase, Table};
use crate::params::Count;
use aryk_bdev::{Bdev, Clear, Op, OpStats, QueueDepth, RemovalState, Stats};
use aryk_reactor::Clock;
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

pub(super) fn register(table: &mut Table<Control>) {
    table.add("bdev_get_bdevs", Phase::RunTime, "Lists the disks, or describes one of them.", get_bdevs);
    table.add(
        "bdev_get_iostat",
        Phase::RunTime,
        "Reports the statistics of disks: operations, bytes, latencies, errors.",
        get_iostat,
    );
    table.add(
        "bdev_reset_iostat",
        Phase::RunTime,
        "Sets the statistics of a disk, or of all disks, to zero.",
        reset_iostat,
    );
    table.add(
        "bdev_reset",
        Phase::RunTime,
        "Aborts the requests in flight at the disk's device, and continues with those that arrived later.",
        reset,
    );
    table.add(
        "bdev_wait_for_examine",
        Phase::RunTime,
        "Waits until new disks are searched for pools of volumes, for 5 s at most.",
        async |control: &Control, _: super::NoParams| {
            super::volumes::examined(control).await;
            Ok(true)
        },
    );
}

/// Parameters of `bdev_get_bdevs`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetBdevs {
    /// Name, alias or uuid of the disk to describe. Default: all disks.
    name: Option<String>,
    /// Milliseconds to wait for the disk to appear.
    #[serde(default)]
    timeout: Count,
}

/// One of the results of `bdev_get_bdevs`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Bdev")]
struct Description {
    /// Name of the disk. Aliases and the uuid identify it as well.
    name: String,
    /// Other names of the disk.
    aliases: Vec<String>,
    /// Kind of the disk.
    product_name: &'static str,
    /// Block size in bytes.
    block_size: u32,
    /// Number of blocks.
    num_blocks: u64,
    uuid: Uuid,
    #[serde(flatten)]
    preferred: Preferred,
    /// Preferred I/O boundary in blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    optimal_io_boundary: Option<u32>,
    /// Aryk only: block size of the store below, in bytes.
    physical_block_size: u32,
    /// Aryk only: whether writes are refused.
    readonly: bool,
    /// Aryk only: whether the disk's store is away for a time, as a drive that has vanished or is being reset: requests wait.
    stalled: bool,
    /// Rate limits; 0 means no limit.
    assigned_rate_limits: super::qos::Limits,
    /// Aryk only: the QoS group of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    qos_group: Option<String>,
    /// Aryk only: deadline of a request, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    io_timeout_ms: Option<u64>,
    /// Aryk only: action for requests that exceed the deadline.
    #[serde(skip_serializing_if = "Option::is_none")]
    io_timeout_action: Option<Action>,
    /// Aryk only: state of the disk's removal: `in use`, while openers have the disk open; `closing`, while its device closes;
    /// `abandoned`, if the removal did not end: then the disk fails its requests, and can be deleted again.
    #[serde(skip_serializing_if = "Option::is_none")]
    removal: Option<&'static str>,
    /// Whether an opener has claimed the disk for exclusive write access.
    claimed: bool,
    /// Type of the claim: other openers may not write.
    #[serde(skip_serializing_if = "Option::is_none")]
    claim_type: Option<&'static str>,
    /// Aryk only: the owner of the claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    claimed_by: Option<String>,
    /// Always false.
    zoned: bool,
    /// Operations that the disk supports.
    supported_io_types: IoTypes,
    /// Always empty.
    #[schemars(with = "Vec<Value>")]
    memory_domains: [(); 0],
    /// Members that only disks of this kind have.
    driver_specific: Details,
}

/// Operations that a disk supports.
#[derive(Debug, Serialize, JsonSchema)]
struct IoTypes {
    read: bool,
    write: bool,
    unmap: bool,
    flush: bool,
    reset: bool,
    nvme_admin: bool,
    nvme_io: bool,
    nvme_io_md: bool,
    write_zeroes: bool,
    zcopy: bool,
    get_zone_info: bool,
    zone_management: bool,
    zone_append: bool,
    compare: bool,
    compare_and_write: bool,
    abort: bool,
    seek_hole: bool,
    seek_data: bool,
    copy: bool,
    nvme_iov_md: bool,
}

impl IoTypes {
    fn of(bdev: &Bdev) -> Self {
        let device = bdev.device();
        let can = |op: Op| device.ops().contains(op) && !(op.is_change() && device.is_read_only());
        Self {
            read: can(Op::Read),
            write: can(Op::Write),
            unmap: can(Op::Unmap),
            flush: can(Op::Flush),
            reset: true,
            nvme_admin: false,
            nvme_io: false,
            nvme_io_md: false,
            // The block layer implements write-zeroes by writes if the device lacks it, and the compound operations by reads and
            // writes.
            write_zeroes: can(Op::WriteZeroes) || can(Op::Write),
            zcopy: false,
            get_zone_info: false,
            zone_management: false,
            zone_append: false,
            compare: can(Op::Read),
            compare_and_write: can(Op::Read) && can(Op::Write),
            abort: true,
            seek_hole: false,
            seek_data: false,
            copy: can(Op::Read) && can(Op::Write),
            nvme_iov_md: false,
        }
    }
}

fn describe(control: &Control, bdev: &Bdev) -> Description {
    let (identity, geometry) = (bdev.identity(), bdev.geometry());
    let mut details = control.disks.details(bdev);
    if let Some(nvme) = super::nvme::details(control, bdev) {
        details.nvme = Some([nvme]);
        details.mp_policy = Some("active_passive");
    }
    details.lvol = details.lvol.or_else(|| super::volumes::details(control, bdev));
    if let Some(crypto) = &mut details.crypto {
        crypto.rekey = super::rekey::describe(control, bdev);
    }
    let (claimed_by, deadline) = (bdev.claimed_by(), bdev.deadline());
    Description {
        name: identity.name.clone(),
        // The uuid identifies the disk too, and SPDK's clients expect it among the aliases.
        aliases: [identity.uuid.to_string()].into_iter().chain(bdev.aliases()).collect(),
        product_name: bdev.device().product(),
        block_size: geometry.block_size,
        num_blocks: geometry.blocks.0,
        uuid: identity.uuid,
        preferred: details.preferred,
        optimal_io_boundary: u32::try_from(geometry.optimal_io_blocks.0).ok().filter(|&blocks| blocks > 0),
        physical_block_size: geometry.physical_block_size,
        readonly: bdev.device().is_read_only(),
        stalled: bdev.is_stalled(),
        assigned_rate_limits: bdev.qos_limits().into(),
        qos_group: bdev.qos_group().map(|group| group.name().to_owned()),
        io_timeout_ms: deadline.map(|d| d.after.as_millis() as u64),
        io_timeout_action: deadline.map(|d| d.action.into()),
        removal: bdev.removal_state().map(|removal| match removal {
            RemovalState::InUse => "in use",
            RemovalState::Closing => "closing",
            RemovalState::Abandoned => "abandoned",
        }),
        claimed: claimed_by.is_some(),
        claim_type: claimed_by.is_some().then_some("exclusive_write"),
        claimed_by,
        zoned: false,
        supported_io_types: IoTypes::of(bdev),
        memory_domains: [],
        driver_specific: details,
    }
}

async fn get_bdevs(control: &Control, p: GetBdevs) -> Result<Vec<Description>, Error> {
    let Some(name) = p.name else {
        return Ok(control.list_disks().iter().map(|bdev| describe(control, bdev)).collect());
    };
    let wait = Duration::from_millis(p.timeout.0);
    let bdev = control.disks.find_within(&name, wait).await.map_err(|error| match wait {
        Duration::ZERO => error,
        _ => Error::errno(Errno::TIMEDOUT, format!("there is no disk '{name}' after {wait:?}")),
    })?;
    Ok(vec![describe(control, &bdev)])
}

/// Parameters of `bdev_get_iostat`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct GetIostat {
    /// Names, aliases or uuids. Default: all disks.
    names: Option<Vec<String>>,
    /// Older name of `names`, for one disk.
    name: Option<String>,
    /// Report each open channel of the one named disk, instead of the disk.
    #[serde(default)]
    per_channel: bool,
    /// Statistics that are set to zero after they were read. Default: none.
    #[serde(default = "ResetMode::none")]
    reset_mode: ResetMode,
}

/// Statistics that are set to zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum ResetMode {
    All,
    // The minimum and maximum latencies.
    MaxMin,
    // Failed requests.
    Error,
    None,
}

impl ResetMode {
    /// The statistics to set to zero, if any.
    const fn cleared(self) -> Option<Clear> {
        match self {
            Self::All => Some(Clear::All),
            Self::MaxMin => Some(Clear::Extremes),
            Self::Error => Some(Clear::Errors),
            Self::None => None,
        }
    }

    const fn all() -> Self {
        Self::All
    }

    const fn none() -> Self {
        Self::None
    }
}

/// Result of `bdev_get_iostat`. Times in ticks.
#[derive(Debug, Serialize, JsonSchema)]
struct Iostat {
    /// Ticks in a second.
    tick_rate: u64,
    /// Current time.
    ticks: u64,
    /// Statistics of each disk; empty if `per_channel` is set.
    bdevs: Vec<BdevStat>,
    #[serde(flatten)]
    per_channel: Option<PerChannel>,
}

/// The statistics of a disk's channels.
#[derive(Debug, Serialize, JsonSchema)]
struct PerChannel {
    /// Name of the disk.
    name: String,
    /// Statistics of each open channel.
    channels: Vec<ChannelStat>,
}

/// The statistics of a channel.
#[derive(Debug, Serialize, JsonSchema)]
struct ChannelStat {
    /// ID of the thread that owns the channel, as in `thread_get_stats`.
    thread_id: u64,
    #[serde(flatten)]
    stat: BdevStat,
}

/// The statistics of a disk. Times in ticks; the members that exist only while the queue depth is sampled, in microseconds.
#[derive(Debug, Serialize, JsonSchema)]
struct BdevStat {
    name: String,
    bytes_read: u64,
    num_read_ops: u64,
    bytes_written: u64,
    num_write_ops: u64,
    bytes_unmapped: u64,
    num_unmap_ops: u64,
    bytes_copied: u64,
    num_copy_ops: u64,
    read_latency_ticks: u64,
    max_read_latency_ticks: u64,
    min_read_latency_ticks: u64,
    write_latency_ticks: u64,
    max_write_latency_ticks: u64,
    min_write_latency_ticks: u64,
    unmap_latency_ticks: u64,
    max_unmap_latency_ticks: u64,
    min_unmap_latency_ticks: u64,
    copy_latency_ticks: u64,
    max_copy_latency_ticks: u64,
    min_copy_latency_ticks: u64,
    #[serde(flatten)]
    sampled: Option<Sampled>,
    queue_depth: u64,
    /// Requests that failed.
    io_error: IoError,
    /// Aryk only, as all members below: requests that wait in the block layer, part of `queue_depth`.
    queue_waiting: u64,
    num_flush_ops: u64,
    flush_latency_ticks: u64,
    num_write_zeroes_ops: u64,
    bytes_zeroed: u64,
    num_read_errors: u64,
    num_write_errors: u64,
    num_flush_errors: u64,
    num_unmap_errors: u64,
    num_write_zeroes_errors: u64,
    num_copy_errors: u64,
    num_compare_ops: u64,
    bytes_compared: u64,
    num_compare_errors: u64,
    num_compare_and_write_ops: u64,
    num_compare_and_write_errors: u64,
    /// Requests that exceeded the disk's deadline.
    num_overdue: u64,
    /// Requests that the limits of the disk or its groups delayed.
    num_throttled_ops: u64,
    /// Sum of these delays.
    throttled_ticks: u64,
    p50_read_latency_ticks: u64,
    p99_read_latency_ticks: u64,
    p50_write_latency_ticks: u64,
    p99_write_latency_ticks: u64,
}

/// Failed requests, by status. Aryk counts all statuses as `failed`.
#[derive(Debug, Serialize, JsonSchema)]
struct IoError {
    /// Omitted if no request has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    failed: Option<u64>,
}

/// Queue depth statistics of a disk whose queue depth is sampled. Times in microseconds.
#[derive(Debug, Serialize, JsonSchema)]
struct Sampled {
    queue_depth_polling_period: u64,
    io_time: u64,
    weighted_io_time: u64,
}

impl Sampled {
    const fn new(sampled: &QueueDepth) -> Self {
        Self {
            queue_depth_polling_period: sampled.period.as_micros() as u64,
            io_time: sampled.busy.as_micros() as u64,
            weighted_io_time: sampled.weighted.as_micros() as u64,
        }
    }
}

impl BdevStat {
    fn new(name: String, stats: &Stats, sampled: Option<QueueDepth>) -> Self {
        let [read, write, flush] = [Op::Read, Op::Write, Op::Flush].map(|op| stats.op(op));
        let [unmap, zeroes, copy] = [Op::Unmap, Op::WriteZeroes, Op::Copy].map(|op| stats.op(op));
        let [compare, swap] = [Op::Compare, Op::CompareAndWrite].map(|op| stats.op(op));
        let min = |op: &OpStats| op.latency_ns_min().unwrap_or_default();
        let failed =
            [read, write, flush, unmap, zeroes, copy, compare, swap].iter().map(|op| op.errors).sum();
        Self {
            name,
            bytes_read: read.bytes.0,
            num_read_ops: read.ops,
            bytes_written: write.bytes.0,
            num_write_ops: write.ops,
            bytes_unmapped: unmap.bytes.0,
            num_unmap_ops: unmap.ops,
            bytes_copied: copy.bytes.0,
            num_copy_ops: copy.ops,
            read_latency_ticks: read.latency_ns,
            max_read_latency_ticks: read.latency_ns_max,
            min_read_latency_ticks: min(read),
            write_latency_ticks: write.latency_ns,
            max_write_latency_ticks: write.latency_ns_max,
            min_write_latency_ticks: min(write),
            unmap_latency_ticks: unmap.latency_ns,
            max_unmap_latency_ticks: unmap.latency_ns_max,
            min_unmap_latency_ticks: min(unmap),
            copy_latency_ticks: copy.latency_ns,
            max_copy_latency_ticks: copy.latency_ns_max,
            min_copy_latency_ticks: min(copy),
            queue_depth: sampled.map_or(stats.in_flight, |s| s.depth),
            sampled: sampled.as_ref().map(Sampled::new),
            io_error: IoError { failed: Some(failed).filter(|failed| *failed > 0) },
            queue_waiting: stats.waiting,
            num_flush_ops: flush.ops,
            flush_latency_ticks: flush.latency_ns,
            num_write_zeroes_ops: zeroes.ops,
            bytes_zeroed: zeroes.bytes.0,
            num_read_errors: read.errors,
            num_write_errors: write.errors,
            num_flush_errors: flush.errors,
            num_unmap_errors: unmap.errors,
            num_write_zeroes_errors: zeroes.errors,
            num_copy_errors: copy.errors,
            num_compare_ops: compare.ops,
            bytes_compared: compare.bytes.0,
            num_compare_errors: compare.errors,
            num_compare_and_write_ops: swap.ops,
            num_compare_and_write_errors: swap.errors,
            num_overdue: stats.overdue,
            num_throttled_ops: stats.throttled_ios,
            throttled_ticks: stats.throttled_ns,
            p50_read_latency_ticks: read.latencies.quantile(0.5),
            p99_read_latency_ticks: read.latencies.quantile(0.99),
            p50_write_latency_ticks: write.latencies.quantile(0.5),
            p99_write_latency_ticks: write.latencies.quantile(0.99),
        }
    }
}

async fn get_iostat(control: &Control, p: GetIostat) -> Result<Iostat, Error> {
    if p.reset_mode != ResetMode::None {
        crate::journal::may_change("bdev_get_iostat with reset_mode")?;
    }
    if p.name.is_some() && p.names.is_some() {
        return Err(Error::invalid("set either name or names, not both"));
    }
    let names: Vec<String> = p.names.into_iter().flatten().chain(p.name).collect();
    let bdevs: Vec<Arc<Bdev>> = match names.as_slice() {
        [] => control.list_disks(),
        names => names.iter().map(|name| control.disks.find(name)).collect::<Result<_, _>>()?,
    };
    let mut reply = Iostat {
        tick_rate: TICK_RATE,
        ticks: Clock::Monotonic.now().0,
        bdevs: Vec::new(),
        per_channel: None,
    };
    if p.per_channel {
        let ([bdev], [_]) = (&*bdevs, &*names) else {
            return Err(Error::errno(Errno::INVAL, "per_channel requires the name of one disk"));
        };
        reply.per_channel = Some(per_channel(bdev, p.reset_mode).await);
        return Ok(reply);
    }
    for bdev in bdevs {
        reply.bdevs.push(BdevStat::new(bdev.name().to_owned(), &bdev.stats().await, bdev.queue_depth()));
        if let Some(what) = p.reset_mode.cleared() {
            bdev.clear_stats(what).await;
        }
    }
    Ok(reply)
}

async fn per_channel(bdev: &Bdev, reset_mode: ResetMode) -> PerChannel {
    let name = bdev.name().to_owned();
    let channel = |(thread_id, stats): (u64, Stats)| ChannelStat {
        thread_id,
        stat: BdevStat::new(name.clone(), &stats, None),
    };
    let channels = bdev.channel_stats().await.into_iter().map(channel).collect();
    if let Some(what) = reset_mode.cleared() {
        bdev.clear_stats(what).await;
    }
    PerChannel { name, channels }
}

/// Parameters of `bdev_reset_iostat`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ResetIostat {
    /// Name, alias or uuid. Default: all disks.
    name: Option<String>,
    /// Default: all statistics.
    #[serde(default = "ResetMode::all")]
    mode: ResetMode,
}

async fn reset_iostat(control: &Control, p: ResetIostat) -> Result<bool, Error> {
    let bdevs = match &p.name {
        Some(name) => vec![control.disks.find(name)?],
        None => control.list_disks(),
    };
    if let Some(what) = p.mode.cleared() {
        for bdev in bdevs {
            bdev.clear_stats(what).await;
        }
    }
    Ok(true)
}

/// Parameters of `bdev_reset`, a method of Aryk only.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Reset {
    /// Name, alias or uuid.
    name: String,
}

/// Aborts the requests in flight at the disk's device, and continues with those that arrived later.
async fn reset(control: &Control, p: Reset) -> Result<bool, Error> {
    match control.disks.find(&p.name)?.reset().await {
        true => Ok(true),
        false => Err(Error::errno(Errno::BUSY, format!("a reset of '{}' is already in progress", p.name))),
    }
}
